"""Mixture of experts: a feed-forward layer that routes each token to a few experts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from einops import einsum
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import gelu
from transformer_lens.hook_points import HookPoint

from mechanisms.initialization import lecun_normal, zeros
from mechanisms.validation import check_sizes


@dataclass(frozen=True, kw_only=True)
class MixtureOfExpertsConfig:
    """Configuration of `MixtureOfExperts`: number and width of the experts.

    Args:
        n_experts: number of experts.
        top_k: number of experts for each token, in [1, n_experts].
        d_mlp: width of the hidden layer of an expert.

    Raises:
        ValueError: a setting is outside its range.

    Example:
        >>> MixtureOfExpertsConfig(n_experts=4, top_k=2, d_mlp=32).build(16)(x).shape
        torch.Size([2, 5, 16])
    """

    n_experts: int
    top_k: int
    d_mlp: int

    def __post_init__(self):
        check_sizes(self, "n_experts", "d_mlp")
        if not 1 <= self.top_k <= self.n_experts:
            raise ValueError(
                f"top_k must be in [1, n_experts = {self.n_experts}], got {self.top_k}"
            )

    def build(self, d_model: int, *, generator: torch.Generator | None = None) -> nn.Module:
        """The module for a residual stream of width `d_model`."""
        return MixtureOfExperts(self, d_model, generator=generator)


class MixtureOfExperts(nn.Module):
    """The weighted sum of the `top_k` most probable experts, sum_e w_e expert_e(x).

    Shazeer et al. 2017, with the routing of Mixtral (Jiang et al. 2024): w are the probabilities
    of the selected experts, renormalised to sum to one. All experts are computed for all tokens,
    in one batched product: for the small layers of synthetic tasks this is faster than
    sorting tokens by expert, but it costs n_experts / top_k times the arithmetic.

    Hook points, with TransformerLens' names: `hook_expert_weights` [batch, pos, n_experts], the
    probabilities before the selection; `hook_expert_indices` [batch, pos, top_k], the selection;
    `hook_pre`, `hook_post` [batch, pos, n_experts, d_mlp].

    Example:
        >>> config = MixtureOfExpertsConfig(n_experts=4, top_k=2, d_mlp=32)
        >>> MixtureOfExperts(config, 16)(x).shape
        torch.Size([2, 5, 16])
    """

    def __init__(
        self,
        config: MixtureOfExpertsConfig,
        d_model: int,
        *,
        generator: torch.Generator | None = None,
    ):
        super().__init__()
        self.top_k = config.top_k
        n_experts, d_mlp = config.n_experts, config.d_mlp
        self.W_gate = lecun_normal(d_model, n_experts, fan_in=d_model, generator=generator)
        self.W_in = lecun_normal(n_experts, d_model, d_mlp, fan_in=d_model, generator=generator)
        self.b_in = zeros(n_experts, d_mlp)
        self.W_out = lecun_normal(n_experts, d_mlp, d_model, fan_in=d_mlp, generator=generator)
        self.b_out = zeros(n_experts, d_model)
        self.hook_expert_weights, self.hook_expert_indices = HookPoint(), HookPoint()
        self.hook_pre, self.hook_post = HookPoint(), HookPoint()

    def forward(
        self, x: Float[Tensor, "batch pos d_model"], *, hooks: MixtureOfExperts | None = None
    ) -> Float[Tensor, "batch pos d_model"]:
        """The output at every token; `hooks` as in `MultiHeadAttention`."""
        points = self if hooks is None else hooks
        weights = points.hook_expert_weights((x @ self.W_gate).softmax(-1))
        indices = points.hook_expert_indices(weights.topk(self.top_k, dim=-1).indices)
        selected = weights_of_chosen(weights, indices)

        pre = einsum(x, self.W_in, "batch pos d, expert d mlp -> batch pos expert mlp")
        post = points.hook_post(gelu(points.hook_pre(pre + self.b_in), approximate="tanh"))
        # Weighting the hidden layer first allows one product over experts and channels.
        weighted = post * selected.unsqueeze(-1)
        out = einsum(weighted, self.W_out, "batch pos expert mlp, expert mlp d -> batch pos d")
        return out + selected @ self.b_out


def weights_of_chosen(
    weights: Float[Tensor, "*batch expert"], indices: Int[Tensor, "*batch chosen"]
) -> Float[Tensor, "*batch expert"]:
    """The weights of the chosen experts, which sum to 1, and 0 for all others."""
    chosen = torch.zeros_like(weights).scatter(-1, indices, weights.gather(-1, indices))
    total = chosen.sum(-1, keepdim=True)
    # A hook may have set all weights to zero.
    return chosen / total.masked_fill(total == 0, 1)
