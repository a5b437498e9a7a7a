"""Which attention configs allow cross-attention between two sequences."""

from __future__ import annotations

from mechanisms.protocols import AttentionProtocol


def require_crossing(name: str, attention: AttentionProtocol) -> None:
    """Raise a ValueError if `attention` is restricted to self-attention.

    Args:
        name: the setting that the error message names.
        attention: the config of an attention module.

    Raises:
        ValueError: it measures distances, or needs all queries of a sequence.
    """
    require_no_distances(name, attention)
    if attention.needs_all_queries:
        raise ValueError(
            f"{name} must not depend on all queries, which a decoder must not see, got {attention}"
        )


def require_no_distances(name: str, attention: AttentionProtocol) -> None:
    """Raise a ValueError if `attention` measures distances.

    Args:
        name: the setting that the error message names.
        attention: the config of an attention module.

    Raises:
        ValueError: it does.
    """
    if attention.measures_distances:
        raise ValueError(
            f"{name} must not measure distances, which are undefined between two sequences, "
            f"got {attention}"
        )
