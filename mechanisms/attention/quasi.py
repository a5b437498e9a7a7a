"""Quasi-attention: the similarity of two tokens times a gate of their distance.

Tay et al. 2019, "Compositional De-Attention Networks": affinity and dissimilarity matrices, their
composition, and a version that does not keep the intermediate matrices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mechanisms.chunking import GPU_ELEMENTS
from mechanisms.differentiation import with_own_gradient
from mechanisms.validation import check_choice

Composition = Literal["tanh", "sigmoid", "arctan", "arctan_scaled", "algebraic"]
Centring = Literal["none", "matrix", "row"]

_FUNCTIONS: dict[Composition, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "arctan": torch.arctan,
    "arctan_scaled": lambda x: x.arctan() * (2 / math.pi),
    "algebraic": lambda x: x * (1 + x.square()).rsqrt(),
}

# Query-key pairs that are computed together on a CPU: they should fit its cache.
_CPU_PAIRS = 2**19

Chunk = tuple[slice, slice]
"""Examples and heads that are computed together."""


@dataclass(frozen=True, kw_only=True)
class QuasiAttentionConfig:
    """How affinity E and dissimilarity N are composed into M = affinity(E) * gate(N).

    Tay et al. 2019, equations 1 to 4, sections on centring and scaling, and the ablation over
    composition functions.

    Args:
        alpha: factor of E, above 0.
        beta: factor of the distances in N, above 0.
        affinity: the function of E: `tanh`, `sigmoid`, `arctan` (within π/2 of 0),
            `arctan_scaled` (within 1 of 0) or `algebraic`, x / sqrt(1 + x²).
        gate: the function of N, one of the same.
        affinity_centring: what is subtracted from E: nothing (`none`), its mean over the `matrix`
            of one example and head, or its mean over each `row`, the keys of one query; only over
            valid pairs.
        gate_centring: the same for N. Without it, N is at most 0 and a sigmoid gate at most 1/2,
            and far less at initialisation because distances grow with the width: for two vectors of
            unit normal numbers the distance is 1.1 times the width, their product about its square
            root.
        doubled: whether the gate is multiplied by 2, so that a sigmoid gate is 1 at distance 0.

    Raises:
        ValueError: a setting is not allowed.

    Example:
        >>> QuasiAttentionConfig(gate_centring="row").affinity
        'tanh'
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
        check_choice(self, "affinity", Composition)
        check_choice(self, "gate", Composition)
        check_choice(self, "affinity_centring", Centring)
        check_choice(self, "gate_centring", Centring)

    @property
    def centres_matrix(self) -> bool:
        """Whether the weight of a pair depends on all queries."""
        return "matrix" in (self.affinity_centring, self.gate_centring)

    def centred_affinity(
        self,
        affinity: Float[Tensor, "batch head query_pos key_pos"],
        valid: Bool[Tensor, "#batch #head #query_pos key_pos"] | None,
    ) -> Float[Tensor, "batch head query_pos key_pos"]:
        """E, centred over the valid pairs (None: all)."""
        return _centre(affinity, self.affinity_centring, valid)

    def centred_dissimilarity(
        self,
        dissimilarity: Float[Tensor, "batch head query_pos key_pos"],
        valid: Bool[Tensor, "#batch #head #query_pos key_pos"] | None,
    ) -> Float[Tensor, "batch head query_pos key_pos"]:
        """N, centred over the valid pairs (None: all)."""
        return _centre(dissimilarity, self.gate_centring, valid)

    def gated(
        self, dissimilarity: Float[Tensor, "batch head query_pos key_pos"]
    ) -> Float[Tensor, "batch head query_pos key_pos"]:
        """The gate, given the centred N."""
        gate = _FUNCTIONS[self.gate](dissimilarity)
        return 2 * gate if self.doubled else gate

    def composed(
        self,
        affinity: Float[Tensor, "batch head query_pos key_pos"],
        gate: Float[Tensor, "batch head query_pos key_pos"],
        mask: Bool[Tensor, "#batch #head #query_pos key_pos"] | None,
    ) -> Float[Tensor, "batch head query_pos key_pos"]:
        """M, given the centred E and the gate.

        The mask is applied last: -inf in E would be -1 after a tanh, which subtracts the token.
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
    """The L1 distance between x and y for all pairs of positions.

    The gradient is 0 where two numbers are equal. It is computed in chunks of pairs, feature by
    feature. The gradient of torch's `cdist` also keeps the distances and, on a GPU, allocates a
    tensor of all pairs and features; on a CPU forward and backward take 0.6 of its time with 4
    features, 0.75 with 16, and the same with 64.
    """
    return with_own_gradient(_broadcast_distances, _distances, _distance_gradients, x, y)


def _broadcast_distances(x: Tensor, y: Tensor) -> Tensor:
    # torch has no second derivative of `cdist`.
    return (x[:, :, :, None] - y[:, :, None]).abs().sum(-1)


def _distances(x: Tensor, y: Tensor) -> tuple[Tensor]:
    return (torch.cdist(x, y, p=1.0),)


def _distance_gradients(
    _needed: tuple[bool, ...],
    gradient: Float[Tensor, "batch head query_pos key_pos"],
    x: Float[Tensor, "batch head query_pos d"],
    y: Float[Tensor, "batch head key_pos d"],
) -> tuple[Tensor, Tensor]:
    """The gradients with respect to x and y, given that with respect to their distances."""
    _, _, n_query, n_key = gradient.shape
    gradient = gradient.flatten(0, 1)
    x_rows, y_rows = (tensor.flatten(0, 1).mT.contiguous() for tensor in (x, y))
    grad_x, grad_y = torch.empty_like(x_rows), torch.zeros_like(y_rows)
    rows = max(1, _pairs_per_chunk(x) // max(1, n_key))
    heads = max(1, rows // max(1, n_query))
    signs = torch.empty_like(gradient[:heads, :rows])
    for first_head in range(0, len(gradient), heads):
        head = slice(first_head, first_head + heads)
        for first_row in range(0, n_query, rows):
            row = slice(first_row, first_row + rows)
            chunk_gradient = gradient[head, row]
            sign = signs[: len(chunk_gradient), : chunk_gradient.shape[1]]
            for d in range(x.shape[3]):
                torch.sub(x_rows[head, d, row, None], y_rows[head, d, None], out=sign)
                sign.sign_().mul_(chunk_gradient)
                grad_x[head, d, row] = sign.sum(-1)
                grad_y[head, d] -= sign.sum(-2)
    return grad_x.mT.reshape(x.shape), grad_y.mT.reshape(y.shape)


def quasi_attention(
    q: Float[Tensor, "batch head query_pos d_head"],
    k: Float[Tensor, "batch head key_pos d_head"],
    x: Float[Tensor, "batch head query_pos d"],
    y: Float[Tensor, "batch head key_pos d"],
    v: Float[Tensor, "batch head key_pos d_value"],
    bias: Float[Tensor, "#batch #head query_pos key_pos"] | None,
    compose: Callable[[Tensor, Tensor, Chunk], Tensor],
) -> Float[Tensor, "batch head query_pos d_value"]:
    """M v with M = compose(E, N), where E = q · k + bias and N = -||x - y||_1.

    Of the tensors with one entry per pair only the distances are kept, which cost most to compute.
    The others are computed in chunks of examples and heads, and again for the gradient.

    Args:
        q: queries of the affinity, multiplied by its factor.
        k: keys of the affinity.
        x: queries of the dissimilarity, multiplied by its factor.
        y: keys of the dissimilarity, multiplied by its factor.
        v: values.
        bias: added to E.
        compose: computes M from E and N of one chunk; its third argument is the chunk.
    """

    def definition(
        q: Tensor, k: Tensor, x: Tensor, y: Tensor, v: Tensor, bias: Tensor | None
    ) -> Tensor:
        affinity = q @ k.mT if bias is None else q @ k.mT + bias
        return compose(affinity, -_broadcast_distances(x, y), (slice(None), slice(None))) @ v

    return with_own_gradient(
        definition,
        partial(_forward, compose),
        partial(_gradient, compose),
        *(q, k, x, y, v, bias),
    )


def _forward(
    compose: Callable[[Tensor, Tensor, Chunk], Tensor],
    q: Tensor,
    k: Tensor,
    x: Tensor,
    y: Tensor,
    v: Tensor,
    bias: Tensor | None,
) -> tuple[Tensor, ...]:
    z = v.new_empty(*q.shape[:3], v.shape[3])
    dissimilarity = x.new_empty(*x.shape[:3], y.shape[2])
    for chunk in _chunks(dissimilarity):
        torch.neg(torch.cdist(x[chunk], y[chunk], p=1.0), out=dissimilarity[chunk])
        pattern = compose(_affinity(q, k, bias, chunk), dissimilarity[chunk], chunk)
        z[chunk] = pattern @ v[chunk]
    return z, dissimilarity


def _gradient(
    compose: Callable[[Tensor, Tensor, Chunk], Tensor],
    needed: tuple[bool, ...],
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    x: Tensor,
    y: Tensor,
    v: Tensor,
    bias: Tensor | None,
    dissimilarity: Tensor,
) -> tuple[Tensor | None, ...]:
    grad_q, grad_k, grad_x, grad_y, grad_v = map(torch.empty_like, (q, k, x, y, v))
    grad_bias = None if bias is None else torch.zeros_like(bias)
    for chunk in _chunks(dissimilarity):
        with torch.enable_grad():
            affinity = _affinity(q, k, bias, chunk).requires_grad_()
            negative_distance = dissimilarity[chunk].detach().requires_grad_()
            pattern = compose(affinity, negative_distance, chunk)
        grad_v[chunk] = pattern.detach().mT @ gradient[chunk]
        grad_affinity, grad_negative = torch.autograd.grad(
            pattern, (affinity, negative_distance), gradient[chunk] @ v[chunk].mT
        )
        grad_q[chunk] = grad_affinity @ k[chunk]
        grad_k[chunk] = grad_affinity.mT @ q[chunk]
        grad_x[chunk], grad_y[chunk] = _distance_gradients(
            needed[2:4], grad_negative.neg_(), x[chunk], y[chunk]
        )
        if grad_bias is not None:
            index = broadcast_chunk(grad_bias, chunk)
            grad_bias[index] += grad_affinity.sum_to_size(grad_bias[index].shape)
    return grad_q, grad_k, grad_x, grad_y, grad_v, grad_bias


def _affinity(q: Tensor, k: Tensor, bias: Tensor | None, chunk: Chunk) -> Tensor:
    with torch.no_grad():
        affinity = q[chunk] @ k[chunk].mT
        return affinity if bias is None else affinity.add_(bias[broadcast_chunk(bias, chunk)])


def broadcast_chunk(tensor: Tensor, chunk: Chunk) -> Chunk:
    """The index of a chunk in a tensor whose batch and head dims may have size 1."""
    examples, heads = chunk
    return (
        slice(None) if tensor.shape[0] == 1 else examples,
        slice(None) if tensor.shape[1] == 1 else heads,
    )


def _pairs_per_chunk(tensor: Tensor) -> int:
    return _CPU_PAIRS if tensor.device.type == "cpu" else GPU_ELEMENTS


def _chunks(pairs: Float[Tensor, "batch head query_pos key_pos"]) -> Iterator[Chunk]:
    """Chunks of examples and heads that cover `pairs`."""
    batch, n_heads, n_query, n_key = pairs.shape
    matrices = max(1, _pairs_per_chunk(pairs) // max(1, n_query * n_key))
    examples, heads = max(1, matrices // n_heads), min(matrices, n_heads)
    for example in range(0, batch, examples):
        for head in range(0, n_heads, heads):
            yield slice(example, example + examples), slice(head, head + heads)
