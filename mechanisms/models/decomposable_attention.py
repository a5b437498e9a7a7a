"""Decomposable attention: two sequences are aligned, compared by token, and aggregated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import linear
from transformer_lens import HookedRootModule
from transformer_lens.hook_points import HookPoint

from mechanisms.attention.crossing import require_crossing
from mechanisms.attention.pair_patterns import quasi_pattern, softmax_pattern
from mechanisms.attention.quasi import QuasiAttentionConfig, l1_distances
from mechanisms.dropout import dropout
from mechanisms.hooking import hook_tree, remove_hook_points
from mechanisms.initialization import lecun_normal, zeros
from mechanisms.protocols import AttentionProtocol
from mechanisms.sequences import rows_of_table
from mechanisms.validation import check_choice, check_dropout, check_sizes

Projection = Literal["two_layers", "linear"]


@dataclass(frozen=True, kw_only=True)
class DecomposableAttentionConfig:
    """Configuration of a `DecomposableAttention`: sizes and alignment.

    Args:
        d_input: number of token ids.
        d_output: number of classes, or 1 for a ranking score.
        padding: id of padding; it need not be a token id, so -1 is allowed.
        d_model: width of all layers.
        composition: how CoDA aligns the tokens; None for softmax attention.
        shared: whether CoDA's F_E and F_N are the same network.
        projection: F before the alignment: `two_layers`, the network of Parikh et al., which ends
            in a relu, so that E is never negative; or `linear`, with which E has both signs, as
            Tay et al. allow for CoDA and show in Figure 2.
        attention: config of a multi-head attention between the sequences that aligns them instead,
            for example `AttentionConfig`. It must not measure distances between positions.
        dropout: dropout probability of the input of every layer.

    Raises:
        ValueError: a setting is not allowed.

    Example:
        >>> config = DecomposableAttentionConfig(
        ...     d_input=10, d_output=3, padding=-1, d_model=16, composition=QuasiAttentionConfig()
        ... )
        >>> DecomposableAttention(config)(tokens, tokens[:, :3]).shape  # [batch, 1, d_output]
        torch.Size([40, 1, 3])
    """

    d_input: int
    d_output: int
    padding: int
    d_model: int = 200
    composition: QuasiAttentionConfig | None = None
    shared: bool = True
    projection: Projection = "two_layers"
    attention: AttentionProtocol | None = None
    dropout: float = 0.0

    def __post_init__(self):
        check_sizes(self, "d_input", "d_output", "d_model")
        check_choice(self, "projection", Projection)
        if self.composition is None and not self.shared:
            raise ValueError(
                "shared must be True without a composition, got False: softmax has no F_N"
            )
        if self.attention is not None and self.composition is not None:
            raise ValueError(
                f"attention must be None with a composition, got {self.attention}: only one of "
                "them can align the sequences"
            )
        if self.attention is not None:
            require_crossing("attention", self.attention)
        check_dropout(self)


class TwoLayers(nn.Module):
    """relu(relu(x W_in + b_in) W_out + b_out), the networks F, G and H of Parikh et al. 2016.

    `W_in` [d_in, d_model], `W_out` [d_model, d_model]; they start from N(0, 2 / fan in), which
    preserves the second moment through a relu (He et al. 2015).
    """

    def __init__(
        self,
        d_in: int,
        d_model: int,
        *,
        dropout: float = 0.0,
        generator: torch.Generator | None = None,
    ):
        super().__init__()
        self.dropout = dropout
        self.W_in = _he_normal(d_in, d_model, generator)
        self.W_out = _he_normal(d_model, d_model, generator)
        self.b_in, self.b_out = zeros(d_model), zeros(d_model)

    def forward(self, x: Float[Tensor, "*batch d_in"]) -> Float[Tensor, "*batch d_model"]:
        """The output features of each row."""
        x = linear(dropout(x, self.dropout, self.training), self.W_in.T, self.b_in).relu()
        return linear(dropout(x, self.dropout, self.training), self.W_out.T, self.b_out).relu()


class Linear(nn.Module):
    """x W + b, a linear F: `W` [d_in, d_model], `b` [d_model]."""

    def __init__(
        self,
        d_in: int,
        d_model: int,
        *,
        dropout: float = 0.0,
        generator: torch.Generator | None = None,
    ):
        super().__init__()
        self.dropout = dropout
        self.W = lecun_normal(d_in, d_model, fan_in=d_in, generator=generator)
        self.b = zeros(d_model)

    def forward(self, x: Float[Tensor, "*batch d_in"]) -> Float[Tensor, "*batch d_model"]:
        """The output features of each row."""
        return linear(dropout(x, self.dropout, self.training), self.W.T, self.b)


class DecomposableAttention(HookedRootModule):
    """Attend, compare, aggregate: a classifier of pairs of sequences a, b.

    Parikh et al. 2016, "A Decomposable Attention Model for Natural Language Inference"; with a
    `composition`, as Tay et al. 2019, "Compositional De-Attention Networks", equations 1 to 10.

    - attend: E_ij = alpha F_E(a_i) · F_E(b_j), N_ij = -beta ||F_N(a_i) - F_N(b_j)||_1,
      M = tanh(E) * sigmoid(N), a' = M b and b' = M^T a. Or with softmax, of E = F_E(a) · F_E(b):
      a' = softmax_j(E) b and b' = softmax_i(E)^T a. Or with an `attention`, one module for both
      directions: a' = attention(a, b), b' = attention(b, a);
    - compare: G([a_i; a'_i]) and G([b_j; b'_j]), for each token;
    - aggregate: their sums over a and over b, then H of both, and a linear map.

    The sum over an empty sequence is 0. The order of tokens has no effect.

    Hook points [batch, pos, d_model]: `hook_embed_a`, `hook_embed_b`, `hook_aligned_a` (a'),
    `hook_aligned_b`, `hook_compared_a`, `hook_compared_b`; `hook_aggregated` [batch, 1, 2 d_model];
    [batch, head, query_pos, key_pos] with one head, the tokens of a as queries, those of b as
    keys: `hook_attn_scores` (E) and `hook_pattern`. With a composition these also are
    `hook_affinity` and `hook_dissimilarity` (E and N, centred), `hook_gate` (sigmoid(N)), and M is
    the pattern of both sides; with softmax b' has its own `hook_pattern_b`, from b to a. With an
    `attention` its hook points replace these: `align_a.*` from a to b and `align_b.*` from b to a.

    Parameters: `W_E` [d_input, d_model]; `attend`, `attend_distance` (F_N, with `shared=False`),
    each a `TwoLayers` or a `Linear`; `compare`, `aggregate`, each a `TwoLayers`; `W_U`
    [d_model, d_output], `b_U`; with an `attention` those of `align`, and no `attend`.

    Args:
        config: the configuration.
        generator: random generator of the initial weights; None for torch's global generator.

    Example:
        >>> config = DecomposableAttentionConfig(d_input=10, d_output=3, padding=-1, d_model=16)
        >>> _, cache = DecomposableAttention(config).run_with_cache(tokens, tokens[:, :3])
        >>> cache["hook_pattern"].shape, cache["hook_pattern_b"].shape  # from a to b, from b to a
        (torch.Size([40, 1, 5, 3]), torch.Size([40, 1, 3, 5]))
    """

    def __init__(
        self, config: DecomposableAttentionConfig, *, generator: torch.Generator | None = None
    ):
        super().__init__()
        self.config = config
        d_model = config.d_model

        def layers(d_in: int) -> TwoLayers:
            return TwoLayers(d_in, d_model, dropout=config.dropout, generator=generator)

        self.W_E = lecun_normal(config.d_input, d_model, fan_in=d_model, generator=generator)
        if config.attention is not None:
            self.align = config.attention.build(d_model, generator=generator)
            self.align_a, self.align_b = hook_tree(self.align), hook_tree(self.align)
            remove_hook_points(self.align)
        else:

            def projection() -> nn.Module:
                kind = TwoLayers if config.projection == "two_layers" else Linear
                return kind(d_model, d_model, dropout=config.dropout, generator=generator)

            self.attend = projection()
            if not config.shared:
                self.attend_distance = projection()
            self.hook_attn_scores, self.hook_pattern = HookPoint(), HookPoint()
            if config.composition is None:
                self.hook_pattern_b = HookPoint()
            else:
                self.hook_affinity, self.hook_dissimilarity = HookPoint(), HookPoint()
                self.hook_gate = HookPoint()
        self.compare, self.aggregate = layers(2 * d_model), layers(2 * d_model)
        self.W_U = lecun_normal(d_model, config.d_output, fan_in=d_model, generator=generator)
        self.b_U = zeros(config.d_output)
        self.hook_embed_a, self.hook_embed_b = HookPoint(), HookPoint()
        self.hook_aligned_a, self.hook_aligned_b = HookPoint(), HookPoint()
        self.hook_compared_a, self.hook_compared_b = HookPoint(), HookPoint()
        self.hook_aggregated = HookPoint()
        self.setup()

    def forward(
        self, a: Int[Tensor, "batch a_pos"], b: Int[Tensor, "batch b_pos"]
    ) -> Float[Tensor, "batch 1 d_output"]:
        """The logits of each pair; a and b hold ids in [0, d_input), or padding.

        Raises:
            ValueError: as for `rows_of_table`.
        """
        mask_a, mask_b = a != self.config.padding, b != self.config.padding
        x_a = self.hook_embed_a(self._embed(a))
        x_b = self.hook_embed_b(self._embed(b))
        aligned_a, aligned_b = self._align(x_a, x_b, mask_a, mask_b)
        aligned_a, aligned_b = self.hook_aligned_a(aligned_a), self.hook_aligned_b(aligned_b)
        compared_a = self.hook_compared_a(self.compare(torch.cat([x_a, aligned_a], -1)))
        compared_b = self.hook_compared_b(self.compare(torch.cat([x_b, aligned_b], -1)))
        sums = [
            compared.masked_fill(~mask[..., None], 0.0).sum(1)
            for compared, mask in ((compared_a, mask_a), (compared_b, mask_b))
        ]
        aggregated = self.hook_aggregated(torch.cat(sums, -1)[:, None])
        return linear(self.aggregate(aggregated), self.W_U.T, self.b_U)

    def _align(
        self,
        x_a: Float[Tensor, "batch a_pos d_model"],
        x_b: Float[Tensor, "batch b_pos d_model"],
        mask_a: Bool[Tensor, "batch a_pos"],
        mask_b: Bool[Tensor, "batch b_pos"],
    ) -> tuple[Float[Tensor, "batch a_pos d_model"], Float[Tensor, "batch b_pos d_model"]]:
        """The aligned tokens: a' from b for each token of a, and b' from a for each of b."""
        if self.config.attention is None:
            pattern_a, pattern_b = self._patterns(x_a, x_b, mask_a, mask_b)
            return pattern_a @ x_b, pattern_b @ x_a
        return (
            self.align(x_a, x_b, mask=mask_b[:, None, None], hooks=self.align_a),
            self.align(x_b, x_a, mask=mask_a[:, None, None], hooks=self.align_b),
        )

    def _patterns(
        self,
        x_a: Float[Tensor, "batch a_pos d_model"],
        x_b: Float[Tensor, "batch b_pos d_model"],
        mask_a: Bool[Tensor, "batch a_pos"],
        mask_b: Bool[Tensor, "batch b_pos"],
    ) -> tuple[Float[Tensor, "batch a_pos b_pos"], Float[Tensor, "batch b_pos a_pos"]]:
        """The attention patterns from a to b, and from b to a."""
        composition = self.config.composition
        features_a, features_b = self.attend(x_a), self.attend(x_b)
        affinity = (features_a @ features_b.mT)[:, None]
        valid = (mask_a[:, :, None] & mask_b[:, None])[:, None]
        if composition is None:
            scores = self.hook_attn_scores(affinity)
            pattern = self.hook_pattern(softmax_pattern(scores, valid))
            pattern_b = self.hook_pattern_b(softmax_pattern(scores.mT, valid.mT))
            return pattern[:, 0], pattern_b[:, 0]
        if not self.config.shared:
            features_a, features_b = self.attend_distance(x_a), self.attend_distance(x_b)
        affinity = composition.alpha * affinity
        distances = l1_distances(features_a[:, None], features_b[:, None])
        dissimilarity = -composition.beta * distances
        pattern = quasi_pattern(affinity, dissimilarity, valid, composition, self)[:, 0]
        return pattern, pattern.mT

    def _embed(self, tokens: Int[Tensor, "batch pos"]) -> Float[Tensor, "batch pos d_model"]:
        # The embedding of padding is never attended to.
        return self.W_E[rows_of_table(tokens, len(self.W_E), padding=self.config.padding)]


def _he_normal(d_in: int, d_out: int, generator: torch.Generator | None) -> nn.Parameter:
    weight = lecun_normal(d_in, d_out, fan_in=d_in, generator=generator)
    with torch.no_grad():
        weight.mul_(2**0.5)
    return weight
