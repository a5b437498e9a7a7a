"""Claims about mixtures of experts in place of feed-forward layers (Schug et al. 2024)."""

from __future__ import annotations

from studies.engine import Claim, Reading

TABLE_A1 = "Schug et al. 2024, table A1"
N_EXPERTS = 4
"""Experts of a mixture; the paper does not give their number."""


def of_experts(reading: Reading, d_mlp: int) -> tuple[Claim, Claim]:
    """The claims that a mixture helps, and about as much as more hidden units.

    Args:
        reading: how well held-out combinations are answered, as a share.
        d_mlp: hidden units of a feed-forward layer, and of an expert.
    """
    mixture, single = {"n_experts": N_EXPERTS}, {"n_experts": 1}
    held = "Held-out combinations are answered"
    return (
        Claim(
            f"{held} better by a mixture of experts than by one feed-forward layer",
            TABLE_A1,
            reading,
            of=mixture,
            exceeds=single,
        ),
        Claim(
            f"{held} by a mixture as by a feed-forward layer of as many weights, within 5 points",
            TABLE_A1,
            reading,
            of=mixture | {"d_mlp": d_mlp},
            equals=single | {"d_mlp": N_EXPERTS * d_mlp},
            margin=0.05,
        ),
    )


def capacities(d_mlp: int) -> tuple[dict[str, tuple[int, ...]], ...]:
    """Axes of a feed-forward layer, a mixture, and a layer of as many weights."""
    return (
        {"n_experts": (1, N_EXPERTS), "d_mlp": (d_mlp,)},
        {"n_experts": (1,), "d_mlp": (N_EXPERTS * d_mlp,)},
    )
