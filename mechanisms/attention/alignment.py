"""Alignment of two sequences: a matrix of weights between their tokens, without values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn.functional import linear
from transformer_lens.hook_points import HookPoint

from mechanisms.attention.pair_patterns import quasi_pattern, softmax_pattern
from mechanisms.attention.quasi import QuasiAttentionConfig, l1_distances
from mechanisms.dropout import dropout
from mechanisms.initialization import lecun_normal, zeros
from mechanisms.validation import check_choice, check_dropout

DenseProjection = Literal["relu", "linear"]


@dataclass(frozen=True, kw_only=True)
class AlignmentConfig:
    """Configuration of an `Alignment`.

    Args:
        projection: F before the alignment: `relu`, a dense layer with a relu, with which E is
            never negative; or `linear`, with which E has both signs, so that CoDA can subtract.
        composition: how CoDA aligns the tokens; None for softmax attention.
        scaled: whether CoDA's E and N are divided by the root of the width of F, as the E of
            softmax attention always is (Tay et al. 2019, equation 10 and footnote 3).
        dropout: dropout probability of the input of F.

    Raises:
        ValueError: a setting is not allowed.

    Example:
        >>> AlignmentConfig(projection="linear", composition=QuasiAttentionConfig()).scaled
        True
    """

    projection: DenseProjection = "relu"
    composition: QuasiAttentionConfig | None = None
    scaled: bool = True
    dropout: float = 0.0

    def __post_init__(self):
        check_choice(self, "projection", DenseProjection)
        check_dropout(self)
        if self.composition is None and not self.scaled:
            raise ValueError("scaled must be True without a composition, got False")


class Alignment(nn.Module):
    """The weights of the tokens of b for each token of a, and of those of a for each of b.

    E_ij = F(a_i) · F(b_j) / sqrt(d_hidden), of which the weights are the softmax over j and over i
    (Tay et al. 2018, "Densely Connected Attention Propagation for Reading Comprehension", equations
    1 and 2). With a composition both are M = tanh(alpha E) * sigmoid(N), where
    N_ij = -beta ||F(a_i) - F(b_j)||_1 / sqrt(d_hidden) (Tay et al. 2019, "Compositional
    De-Attention Networks", equations 1 to 6). A token without a valid partner has weights 0.

    Hook points [batch, head, query_pos, key_pos] with one head, the tokens of a as queries:
    `hook_attn_scores` (E), `hook_pattern`; with a composition also `hook_affinity`,
    `hook_dissimilarity` (E and N, centred) and `hook_gate`. With softmax the weights for b are
    `hook_pattern_b`, from b to a, unless `one_sided`.

    Parameters: `W_F` [d_in, d_hidden], `b_F`.

    Args:
        config: the configuration.
        d_in: width of both sequences.
        d_hidden: width of F.
        one_sided: whether only the weights for a are computed.
        generator: random generator of the initial weights; None for torch's global generator.

    Example:
        >>> align = Alignment(AlignmentConfig(), 8, 8)
        >>> a, b = torch.randn(2, 6, 8), torch.randn(2, 3, 8)
        >>> align(a, b, *(torch.ones(x.shape[:2], dtype=torch.bool) for x in (a, b)))[0].shape
        torch.Size([2, 6, 3])
    """

    def __init__(
        self,
        config: AlignmentConfig,
        d_in: int,
        d_hidden: int,
        *,
        one_sided: bool = False,
        generator: torch.Generator | None = None,
    ):
        super().__init__()
        self.config, self.one_sided = config, one_sided
        self.W_F = lecun_normal(d_in, d_hidden, fan_in=d_in, generator=generator)
        self.b_F = zeros(d_hidden)
        self.hook_attn_scores, self.hook_pattern = HookPoint(), HookPoint()
        if config.composition is not None:
            self.hook_affinity, self.hook_dissimilarity = HookPoint(), HookPoint()
            self.hook_gate = HookPoint()
        elif not one_sided:
            self.hook_pattern_b = HookPoint()

    def forward(
        self,
        a: Float[Tensor, "batch a_pos d_in"],
        b: Float[Tensor, "batch b_pos d_in"],
        mask_a: Bool[Tensor, "batch a_pos"],
        mask_b: Bool[Tensor, "batch b_pos"],
    ) -> tuple[Float[Tensor, "batch a_pos b_pos"], Float[Tensor, "batch b_pos a_pos"] | None]:
        """The weights for a, and those for b; None for b if `one_sided`.

        Args:
            a: the first sequence.
            b: the second sequence.
            mask_a: False for padding.
            mask_b: False for padding.
        """
        valid = (mask_a[:, :, None] & mask_b[:, None])[:, None]
        x, y = self._project(a)[:, None], self._project(b)[:, None]
        composition, scale = self.config.composition, x.shape[-1] ** -0.5
        if composition is None:
            scores = self.hook_attn_scores(scale * x @ y.mT)
            pattern = self.hook_pattern(softmax_pattern(scores, valid))[:, 0]
            if self.one_sided:
                return pattern, None
            return pattern, self.hook_pattern_b(softmax_pattern(scores.mT, valid.mT))[:, 0]
        scale = scale if self.config.scaled else 1.0
        affinity = composition.alpha * scale * x @ y.mT
        dissimilarity = -composition.beta * scale * l1_distances(x, y)
        pattern = quasi_pattern(affinity, dissimilarity, valid, composition, self)[:, 0]
        return pattern, None if self.one_sided else pattern.mT

    def _project(self, x: Float[Tensor, "batch pos d_in"]) -> Float[Tensor, "batch pos d_hidden"]:
        """F of each token."""
        x = linear(dropout(x, self.config.dropout, self.training), self.W_F.T, self.b_F)
        return x.relu() if self.config.projection == "relu" else x
