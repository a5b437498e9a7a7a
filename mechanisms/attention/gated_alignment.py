"""Gated attention: what is attended to is appended, and a gate of both is applied."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn.functional import linear
from transformer_lens.hook_points import HookPoint

from mechanisms.attention.alignment import Alignment, AlignmentConfig
from mechanisms.dropout import dropout
from mechanisms.initialization import lecun_normal, zeros


class GatedAlignment(nn.Module):
    """sigmoid([a; M b] W_G + b_G) * [a; M b], with the weights M of `Alignment`.

    The gated attention of DecaProp (Tay et al. 2018, section 3.3), which is that of Wang et al.
    2017, "Gated Self-Matching Networks for Reading Comprehension and Question Answering"; with
    b = a, its self-attention.

    Hook points: `align.*`, those of `Alignment`; `hook_attended` (M b) [batch, pos, d_in];
    `hook_gates` [batch, pos, 2 d_in].

    Parameters: those of `align`; `W_G` [2 d_in, 2 d_in], `b_G`.

    Args:
        config: the configuration of the alignment.
        d_in: width of both sequences.
        d_hidden: width of the alignment.
        generator: random generator of the initial weights; None for torch's global generator.

    Example:
        >>> attend = GatedAlignment(AlignmentConfig(), 8, 4)
        >>> a, b = torch.randn(2, 6, 8), torch.randn(2, 3, 8)
        >>> attend(a, b, *(torch.ones(x.shape[:2], dtype=torch.bool) for x in (a, b))).shape
        torch.Size([2, 6, 16])
    """

    def __init__(
        self,
        config: AlignmentConfig,
        d_in: int,
        d_hidden: int,
        *,
        generator: torch.Generator | None = None,
    ):
        super().__init__()
        self.align = Alignment(config, d_in, d_hidden, one_sided=True, generator=generator)
        self.W_G = lecun_normal(2 * d_in, 2 * d_in, fan_in=2 * d_in, generator=generator)
        self.b_G = zeros(2 * d_in)
        self.hook_attended, self.hook_gates = HookPoint(), HookPoint()

    def forward(
        self,
        a: Float[Tensor, "batch a_pos d_in"],
        b: Float[Tensor, "batch b_pos d_in"],
        mask_a: Bool[Tensor, "batch a_pos"],
        mask_b: Bool[Tensor, "batch b_pos"],
    ) -> Float[Tensor, "batch a_pos two_d_in"]:
        """The gated tokens of a, each with what it attends to.

        Args:
            a: the sequence that attends.
            b: the sequence that is attended to.
            mask_a: False for padding.
            mask_b: False for padding.
        """
        pattern, _ = self.align(a, b, mask_a, mask_b)
        both = torch.cat([a, self.hook_attended(pattern @ b)], -1)
        rate, training = self.align.config.dropout, self.training
        gates = linear(dropout(both, rate, training), self.W_G.T, self.b_G).sigmoid()
        return self.hook_gates(gates) * both
