"""Attention from one sequence to another, which have no positions in common."""

from __future__ import annotations

from mechanisms.protocols import AttentionProtocol


def require_crossing(name: str, attention: AttentionProtocol) -> None:
    """Refuse the config of an attention that only a sequence's attention to itself can be.

    Raises:
        ValueError: it measures distances, or needs all queries of a sequence; the message says
            `name`.
    """
    if attention.measures_distances:
        raise ValueError(
            f"{name} must not measure distances, which two sequences do not have, got {attention}"
        )
    if attention.needs_all_queries:
        raise ValueError(
            f"{name} must not depend on all queries, which a decoder must not see, got {attention}"
        )
