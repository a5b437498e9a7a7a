"""Quasi-attention: how alike two tokens are, times a gate of how far apart they are.

Tay et al. 2019, "Compositional De-Attention Networks". The two matrices behind it, their
composition, and the whole of it without keeping what is in between.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.autograd.function import once_differentiable

Composition = Literal["tanh", "sigmoid", "arctan", "arctan_scaled", "algebraic"]
Centring = Literal["none", "matrix", "row"]

_FUNCTIONS: dict[Composition, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "arctan": torch.arctan,
    "arctan_scaled": lambda x: x.arctan() * (2 / math.pi),
    "algebraic": lambda x: x * (1 + x.square()).rsqrt(),
}

# Query-key pairs that are computed at once: on a CPU they should stay in its cache.
_AT_ONCE_ON_CPU = 2**19
_AT_ONCE = 2**26

Part = tuple[slice, slice]
"""Some examples, and some heads."""


@dataclass(frozen=True, kw_only=True)
class QuasiAttentionConfig:
    """How affinity E and dissimilarity N become the quasi-attention M = affinity(E) * gate(N).

    Tay et al. 2019, equations 1 to 4, sections on centring and scaling, and the ablation over
    composition functions.

    Args:
        alpha: factor of E, above 0.
        beta: factor of the distances in N, above 0.
        affinity: the function of E: `tanh`, `sigmoid`, `arctan` (within π/2 of 0),
            `arctan_scaled` (within 1 of 0) or `algebraic`, x / sqrt(1 + x²).
        gate: the function of N, one of these.
        affinity_centring: what is subtracted from E: nothing (`none`), its mean over the `matrix`
            of one example and head, or its mean over each `row`, the keys of one query; over valid
            pairs alone.
        gate_centring: the same for N. Without, N is at most 0 and a sigmoid gate at most 1/2; and
            far less at the start, as distances grow with the width: of two vectors of unit normal
            numbers, 1.1 times their width, where their product is about its square root.
        doubled: whether the gate is multiplied by 2, so that a sigmoid's is 1 at distance 0.

    Raises:
        ValueError: for a value that is not allowed.
    """

    alpha: float = 1.0
    beta: float = 1.0
    affinity: Composition = "tanh"
    gate: Composition = "sigmoid"
    affinity_centring: Centring = "none"
    gate_centring: Centring = "none"
    doubled: bool = False

    def __post_init__(self):
        for name in ("alpha", "beta"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be above 0 and finite, got {getattr(self, name)}")
        for name, kinds in (
            ("affinity", Composition),
            ("gate", Composition),
            ("affinity_centring", Centring),
            ("gate_centring", Centring),
        ):
            if getattr(self, name) not in get_args(kinds):
                allowed = ", ".join(get_args(kinds))
                raise ValueError(f"{name} must be one of {allowed}, got {getattr(self, name)!r}")

    @property
    def centres_matrix(self) -> bool:
        """Whether a pair's value depends on all queries."""
        return "matrix" in (self.affinity_centring, self.gate_centring)

    def centred_affinity(
        self,
        affinity: Float[Tensor, "batch head query_pos key_pos"],
        valid: Bool[Tensor, "#batch #head #query_pos key_pos"] | None,
    ) -> Float[Tensor, "batch head query_pos key_pos"]:
        """E, centred over its valid pairs (None: all)."""
        return _centre(affinity, self.affinity_centring, valid)

    def centred_dissimilarity(
        self,
        dissimilarity: Float[Tensor, "batch head query_pos key_pos"],
        valid: Bool[Tensor, "#batch #head #query_pos key_pos"] | None,
    ) -> Float[Tensor, "batch head query_pos key_pos"]:
        """N, centred over its valid pairs (None: all)."""
        return _centre(dissimilarity, self.gate_centring, valid)

    def gated(
        self, dissimilarity: Float[Tensor, "batch head query_pos key_pos"]
    ) -> Float[Tensor, "batch head query_pos key_pos"]:
        """The gate of the centred N."""
        gate = _FUNCTIONS[self.gate](dissimilarity)
        return 2 * gate if self.doubled else gate

    def composed(
        self,
        affinity: Float[Tensor, "batch head query_pos key_pos"],
        gate: Float[Tensor, "batch head query_pos key_pos"],
        mask: Bool[Tensor, "#batch #head #query_pos key_pos"] | None,
    ) -> Float[Tensor, "batch head query_pos key_pos"]:
        """M, of the centred E and the gate.

        The mask comes last: -inf in E would be -1 after a tanh, which is to subtract the token.
        """
        pattern = _FUNCTIONS[self.affinity](affinity) * gate
        return pattern if mask is None else pattern.masked_fill(~mask, 0.0)


def _centre(values: Tensor, centring: Centring, valid: Tensor | None) -> Tensor:
    if centring == "none":
        return values
    dims = (-1,) if centring == "row" else (-2, -1)
    if valid is None:
        return values - values.mean(dims, keepdim=True)
    counted = valid.expand_as(values)
    count = counted.sum(dims, keepdim=True).clamp(min=1)
    return values - values.masked_fill(~counted, 0.0).sum(dims, keepdim=True) / count


def l1_distances(
    x: Float[Tensor, "batch head query_pos d"], y: Float[Tensor, "batch head key_pos d"]
) -> Float[Tensor, "batch head query_pos key_pos"]:
    """The sum over d of |x - y| for all pairs of positions.

    The gradient is 0 where two numbers are equal. It is made for some pairs at a time, feature by
    feature. Torch's own of `cdist` also keeps the distances and, on a GPU, makes a tensor of all
    pairs and features; on a CPU forward and backward take 0.6 of its time with 4 features, 0.75
    with 16, and as long with 64.
    """
    return _L1Distances.apply(x, y)  # pyright: ignore[reportReturnType]


class _L1Distances(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        return torch.cdist(x, y, p=1.0)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor, Tensor]:
        (gradient,) = grad_outputs
        x, y = ctx.saved_tensors
        return _through_distances(gradient, x, y)


def _through_distances(
    gradient: Float[Tensor, "batch head query_pos key_pos"],
    x: Float[Tensor, "batch head query_pos d"],
    y: Float[Tensor, "batch head key_pos d"],
) -> tuple[Tensor, Tensor]:
    """The gradients of x and y, given that of their distances."""
    shape = gradient.shape
    gradient = gradient.flatten(0, 1)
    along_x, along_y = (part.flatten(0, 1).mT.contiguous() for part in (x, y))
    of_x, of_y = torch.empty_like(along_x), torch.zeros_like(along_y)
    rows = max(1, _at_once(x) // shape[3])
    heads = max(1, rows // shape[2])
    signs = torch.empty_like(gradient[:heads, :rows])
    for first in range(0, len(gradient), heads):
        some = slice(first, first + heads)
        for row in range(0, shape[2], rows):
            now = slice(row, row + rows)
            wanted = gradient[some, now]
            sign = signs[: len(wanted), : wanted.shape[1]]
            for d in range(x.shape[3]):
                torch.sub(along_x[some, d, now, None], along_y[some, d, None], out=sign)
                sign.sign_().mul_(wanted)
                of_x[some, d, now] = sign.sum(-1)
                of_y[some, d] -= sign.sum(-2)
    return of_x.mT.reshape(x.shape), of_y.mT.reshape(y.shape)


def quasi_attention(
    q: Float[Tensor, "batch head query_pos d_head"],
    k: Float[Tensor, "batch head key_pos d_head"],
    x: Float[Tensor, "batch head query_pos d"],
    y: Float[Tensor, "batch head key_pos d"],
    v: Float[Tensor, "batch head key_pos d_value"],
    bias: Float[Tensor, "#batch #head query_pos key_pos"] | None,
    compose: Callable[[Tensor, Tensor, Part], Tensor],
) -> Float[Tensor, "batch head query_pos d_value"]:
    """M v with M = compose(E, N): E = q · k + bias, N = -||x - y||_1.

    Of what has a number for each pair, only the distances are kept, which cost most; the rest is
    made some examples and heads at a time, and once more for the gradient.

    Args:
        q: queries of the affinity, with its factor.
        k: keys of the affinity.
        x: queries of the dissimilarity, with its factor.
        y: keys of the dissimilarity, with its factor.
        v: values.
        bias: added to E.
        compose: M, given E and N of the examples and heads that are named.
    """
    return _QuasiAttention.apply(q, k, x, y, v, bias, compose)  # pyright: ignore[reportReturnType]


class _QuasiAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        x: Tensor,
        y: Tensor,
        v: Tensor,
        bias: Tensor | None,
        compose: Callable[[Tensor, Tensor, Part], Tensor],
    ) -> Tensor:
        z = v.new_empty(*q.shape[:3], v.shape[3])
        dissimilarity = x.new_empty(*x.shape[:3], y.shape[2])
        for part in _parts(dissimilarity):
            torch.neg(torch.cdist(x[part], y[part], p=1.0), out=dissimilarity[part])
            pattern = compose(_affinity(q, k, bias, part), dissimilarity[part], part)
            z[part] = pattern @ v[part]
        ctx.save_for_backward(q, k, x, y, v, bias, dissimilarity)
        ctx.compose = compose
        return z

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        (gradient,) = grad_outputs
        q, k, x, y, v, bias, dissimilarity = ctx.saved_tensors
        of_q, of_k, of_x, of_y, of_v = (torch.empty_like(part) for part in (q, k, x, y, v))
        of_bias = None if bias is None else torch.zeros_like(bias)
        for part in _parts(dissimilarity):
            with torch.enable_grad():
                affinity = _affinity(q, k, bias, part).requires_grad_()
                apart = dissimilarity[part].detach().requires_grad_()
                pattern = ctx.compose(affinity, apart, part)
            of_v[part] = pattern.detach().mT @ gradient[part]
            of_affinity, of_apart = torch.autograd.grad(
                pattern, (affinity, apart), gradient[part] @ v[part].mT
            )
            of_q[part], of_k[part] = of_affinity @ k[part], of_affinity.mT @ q[part]
            of_x[part], of_y[part] = _through_distances(of_apart.neg_(), x[part], y[part])
            if of_bias is not None:
                where = place(of_bias, part)
                of_bias[where] += of_affinity.sum_to_size(of_bias[where].shape)
        return of_q, of_k, of_x, of_y, of_v, of_bias, None


def _affinity(q: Tensor, k: Tensor, bias: Tensor | None, part: Part) -> Tensor:
    with torch.no_grad():
        affinity = q[part] @ k[part].mT
        return affinity if bias is None else affinity.add_(bias[place(bias, part)])


def place(tensor: Tensor, part: Part) -> Part:
    """Where a tensor that may be the same for all examples or heads has a part."""
    examples, heads = part
    return (
        slice(None) if tensor.shape[0] == 1 else examples,
        slice(None) if tensor.shape[1] == 1 else heads,
    )


def _at_once(tensor: Tensor) -> int:
    return _AT_ONCE_ON_CPU if tensor.device.type == "cpu" else _AT_ONCE


def _parts(pairs: Float[Tensor, "batch head query_pos key_pos"]) -> Iterator[Part]:
    """The examples and heads that are computed together."""
    batch, n_heads = pairs.shape[:2]
    at_once = max(1, _at_once(pairs) // pairs[0, 0].numel())
    examples, heads = max(1, at_once // n_heads), min(at_once, n_heads)
    for example in range(0, batch, examples):
        for head in range(0, n_heads, heads):
            yield slice(example, example + examples), slice(head, head + heads)
