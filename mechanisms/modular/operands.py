"""The functional bottleneck of modular networks: learned selection of a module's operands."""

from __future__ import annotations

import torch
from einops import einsum, repeat
from jaxtyping import Float
from torch import Tensor, nn

from mechanisms.initialization import lecun_normal


class OperandSlots(nn.Module):
    """The functional bottleneck `attention`: scores of the candidates for a module's operands.

    score = (W_slot s_m) · (W_C E(x_n)) / sqrt(d), where s_m is the signature of the module; for the
    current result a learned key replaces W_C E(x_n). Neural production systems select arguments
    in the same way (Goyal et al. 2021). Scores depend on the encoded variables, not on the result.

    Parameters: `signatures` [module, d_model], `W_slot` [2, d_model, d_model], `W_C` [d_model,
    d_model], `result_key` [d_model].
    """

    def __init__(self, n_modules: int, d_model: int, *, generator: torch.Generator | None = None):
        super().__init__()
        self.signatures = lecun_normal(n_modules, d_model, fan_in=1, generator=generator)
        self.W_slot = lecun_normal(2, d_model, d_model, fan_in=d_model, generator=generator)
        self.W_C = lecun_normal(d_model, d_model, fan_in=d_model, generator=generator)
        self.result_key = lecun_normal(d_model, fan_in=1, generator=generator)

    def forward(
        self, encoded: Float[Tensor, "batch variable d_model"], *, first: bool
    ) -> Float[Tensor, "batch module 2 candidate"]:
        """The score of every candidate; in the `first` layer the result is masked."""
        queries = einsum(self.signatures, self.W_slot, "module d, slot d key -> module slot key")
        keys = encoded @ self.W_C
        result = repeat(self.result_key, "key -> batch 1 key", batch=len(encoded))
        keys = torch.cat([keys, result], dim=1)
        scores = einsum(
            queries, keys, "module slot key, batch candidate key -> batch module slot candidate"
        )
        scores = scores / keys.shape[-1] ** 0.5
        if first:
            masked = torch.zeros(scores.shape[-1], dtype=torch.bool, device=scores.device)
            masked[-1] = True
            scores = scores.masked_fill(masked, -torch.inf)
        return scores
