"""Attention from one sequence to another, which have no positions in common."""

from __future__ import annotations

from mechanisms.attention import AttentionConfig
from mechanisms.coda import CodaAttentionConfig
from mechanisms.geometric_attention import GeometricAttentionConfig
from mechanisms.relative_attention import RelativeAttentionConfig


def require_no_distances(name: str, attention: object) -> None:
    """Refuse the config of an attention that measures how far a key is from its query.

    Raises:
        ValueError: it does; the message says `name`.
    """
    if isinstance(attention, GeometricAttentionConfig | RelativeAttentionConfig) or (
        isinstance(attention, AttentionConfig | CodaAttentionConfig) and attention.rotary
    ):
        raise ValueError(
            f"{name} must not measure distances, which two sequences do not have, got {attention}"
        )
