"""Bidirectional attention connector: attention between two sequences, compressed to scalars."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint

from mechanisms.attention.alignment import Alignment, AlignmentConfig
from mechanisms.layers.factorization_machine import FactorizationMachine

N_FEATURES = 3
"""Features of a token: of the concatenation, the difference and the product."""


class BidirectionalConnector(nn.Module):
    """Attention between sequences a and b, of which three numbers per token are passed on.

    Tay et al. 2018, "Densely Connected Attention Propagation for Reading Comprehension", section
    2.1 (BAC), equations 1 to 4: with a' = M b and b' = M'^T a, M and M' the weights of `Alignment`,
    the features of a token of a are

        [G_1([a'_i; a_i]), G_2(a'_i - a_i), G_3(a'_i * a_i)],

    and those of a token of b the same, with the same G, which are factorization machines. Features
    are 0 at padding.

    Hook points: `align.*`, those of `Alignment`; `hook_aligned_a` (a'), `hook_aligned_b`
    [batch, pos, d_model]; `hook_features_a`, `hook_features_b` [batch, pos, 3].

    Parameters: those of `align`; `concatenation`, `difference`, `product`, each a
    `FactorizationMachine`.

    Args:
        config: the configuration of the alignment.
        d_model: width of both sequences, and of the alignment.
        n_factors: width of the factors of the factorization machines.
        one_sided: whether only a gets features (section 3.3).
        generator: random generator of the initial weights; None for torch's global generator.

    Example:
        >>> connector = BidirectionalConnector(AlignmentConfig(), 8, 4)
        >>> a, b = torch.randn(2, 6, 8), torch.randn(2, 3, 8)
        >>> connector(a, b, *(torch.ones(x.shape[:2], dtype=torch.bool) for x in (a, b)))[0].shape
        torch.Size([2, 6, 3])
    """

    def __init__(
        self,
        config: AlignmentConfig,
        d_model: int,
        n_factors: int,
        *,
        one_sided: bool = False,
        generator: torch.Generator | None = None,
    ):
        super().__init__()
        self.align = Alignment(config, d_model, d_model, one_sided=one_sided, generator=generator)
        self.concatenation = FactorizationMachine(2 * d_model, n_factors, generator=generator)
        self.difference = FactorizationMachine(d_model, n_factors, generator=generator)
        self.product = FactorizationMachine(d_model, n_factors, generator=generator)
        self.hook_aligned_a, self.hook_features_a = HookPoint(), HookPoint()
        if not one_sided:
            self.hook_aligned_b, self.hook_features_b = HookPoint(), HookPoint()

    def forward(
        self,
        a: Float[Tensor, "batch a_pos d_model"],
        b: Float[Tensor, "batch b_pos d_model"],
        mask_a: Bool[Tensor, "batch a_pos"],
        mask_b: Bool[Tensor, "batch b_pos"],
    ) -> tuple[Float[Tensor, "batch a_pos 3"], Float[Tensor, "batch b_pos 3"] | None]:
        """The features of the tokens of a, and of those of b; None for b if `one_sided`.

        Args:
            a: the first sequence.
            b: the second sequence.
            mask_a: False for padding.
            mask_b: False for padding.
        """
        pattern_a, pattern_b = self.align(a, b, mask_a, mask_b)
        aligned_a = self.hook_aligned_a(pattern_a @ b)
        features_a = self.hook_features_a(self._compress(a, aligned_a, mask_a))
        if pattern_b is None:
            return features_a, None
        aligned_b = self.hook_aligned_b(pattern_b @ a)
        return features_a, self.hook_features_b(self._compress(b, aligned_b, mask_b))

    def _compress(
        self,
        x: Float[Tensor, "batch pos d_model"],
        aligned: Float[Tensor, "batch pos d_model"],
        mask: Bool[Tensor, "batch pos"],
    ) -> Float[Tensor, "batch pos 3"]:
        """The three numbers of each token."""
        values = (
            self.concatenation(torch.cat([aligned, x], -1)),
            self.difference(aligned - x),
            self.product(aligned * x),
        )
        return torch.stack(values, -1).masked_fill(~mask[..., None], 0.0)
