"""The map from what all heads retrieve, and perhaps from each token's own value, to the output."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import linear
from transformer_lens.hook_points import HookPoint

from mechanisms.attention.base import Attention, Config, join_heads
from mechanisms.initialization import lecun_normal, zeros


class MappedAttention(Attention[Config]):
    """Attention whose output is a linear map of the values that its heads retrieve.

    Besides these the query's own token may feed the output, by a value that no head selects
    (Mittal et al. 2021, section C.1, there in place of a residual connection; `concat` in their
    code), and a relu and another linear map may follow (`nonlinear` in their code).

    Parameters: `W_O` [head, d_value, d_model] and `b_O`; with the own value `W_own`
    [d_model, d_value] and `b_own`, and one more matrix in `W_O`, the last, for it; for the
    nonlinear output `W_O2` [d_model, d_model] and `b_O2`. Those that do not apply are None.

    Hook point [batch, pos, d_value]: `hook_own_value`, only with the own value.
    """

    W_O: nn.Parameter
    b_O: nn.Parameter | None
    W_own: nn.Parameter | None
    b_own: nn.Parameter | None
    W_O2: nn.Parameter | None
    b_O2: nn.Parameter | None
    hook_own_value: HookPoint

    def _make_output(
        self,
        n_heads: int,
        d_value: int,
        d_model: int,
        *,
        own_value: bool,
        nonlinear: bool,
        bias: bool,
        generator: torch.Generator | None,
    ) -> None:
        """Make the parameters and the hook point of the map."""
        self.W_own = self.b_own = self.W_O2 = self.b_O2 = None
        n_values = n_heads + own_value
        if own_value:
            self.W_own = lecun_normal(d_model, d_value, fan_in=d_model, generator=generator)
            self.b_own = zeros(d_value) if bias else None
            self.hook_own_value = HookPoint()
        self.W_O = lecun_normal(
            n_values, d_value, d_model, fan_in=n_values * d_value, generator=generator
        )
        self.b_O = zeros(d_model) if bias else None
        if nonlinear:
            self.W_O2 = lecun_normal(d_model, d_model, fan_in=d_model, generator=generator)
            self.b_O2 = zeros(d_model) if bias else None

    def _output(
        self,
        z: Float[Tensor, "batch pos head d_value"],
        x_query: Float[Tensor, "batch pos d_model"],
        points: Any,
    ) -> Float[Tensor, "batch pos d_model"]:
        """The output for what the heads have retrieved for each query."""
        if self.W_own is not None:
            own = points.hook_own_value(linear(x_query, self.W_own.T, self.b_own))
            z = torch.cat([z, own[:, :, None]], dim=2)
        out = join_heads(z, self.W_O, self.b_O)
        if self.W_O2 is not None:
            out = linear(out.relu(), self.W_O2.T, self.b_O2)
        return out
