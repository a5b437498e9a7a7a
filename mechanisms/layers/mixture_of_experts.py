"""A feed-forward layer that chooses a few of its experts for each token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import gelu
from transformer_lens.hook_points import HookPoint

from mechanisms.initialization import lecun_normal, zeros


@dataclass(frozen=True, kw_only=True)
class MixtureOfExpertsConfig:
    """`n_experts` networks of width `d_mlp`, of which each token uses `top_k`.

    Raises:
        ValueError: unless 1 <= top_k <= n_experts and d_mlp >= 1.
    """

    n_experts: int
    top_k: int
    d_mlp: int

    def __post_init__(self):
        if not 1 <= self.top_k <= self.n_experts:
            raise ValueError(
                f"top_k must be in [1, n_experts = {self.n_experts}], got {self.top_k}"
            )
        if self.d_mlp < 1:
            raise ValueError(f"d_mlp must be at least 1, got {self.d_mlp}")

    def build(self, d_model: int, *, generator: torch.Generator | None = None) -> nn.Module:
        """The module for a residual stream of width `d_model`."""
        return MixtureOfExperts(self, d_model, generator=generator)


class MixtureOfExperts(nn.Module):
    """sum over the top k experts e of w_e expert_e(x), with w a softmax over the chosen ones.

    Shazeer et al. 2017, with the routing of Mixtral (Jiang et al. 2024): the probabilities of
    the chosen experts are renormalised to sum to one. All experts are computed for all tokens,
    in one batched product: for the small layers of synthetic tasks that is faster than
    sorting tokens by expert, and it costs n_experts / top_k times the arithmetic.

    Hook points, with TransformerLens' names: `hook_expert_weights` [batch, pos, n_experts], the
    probabilities before the choice; `hook_expert_indices` [batch, pos, top_k], the choice;
    `hook_pre`, `hook_post` [batch, pos, n_experts, d_mlp].
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
        """Apply the chosen experts to every token; `hooks` as in `MultiHeadAttention`."""
        points = self if hooks is None else hooks
        weights = points.hook_expert_weights((x @ self.W_gate).softmax(-1))
        chosen = points.hook_expert_indices(weights.topk(self.top_k, dim=-1).indices)
        kept = torch.zeros_like(weights).scatter(-1, chosen, weights.gather(-1, chosen))
        kept = kept / kept.sum(-1, keepdim=True)

        pre = einsum(x, self.W_in, "batch pos d, expert d mlp -> batch pos expert mlp")
        post = points.hook_post(gelu(points.hook_pre(pre + self.b_in), approximate="tanh"))
        # Weighting the hidden layer first leaves one product over experts and channels.
        weighted = post * kept.unsqueeze(-1)
        out = einsum(weighted, self.W_out, "batch pos expert mlp, expert mlp d -> batch pos d")
        return out + kept @ self.b_out
