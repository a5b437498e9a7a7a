"""Position encodings: relative position bias, sinusoidal embeddings, rotary positions."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from mechanisms.initialization import normal


def relative_buckets(
    n_query: int,
    n_key: int,
    *,
    n_buckets: int,
    max_distance: int,
    bidirectional: bool = False,
    device: torch.device | str | None = None,
) -> Int[Tensor, "query_pos key_pos"]:
    """The bucket of each query-key distance, in [0, n_buckets) (Raffel et al. 2020, T5).

    Distances up to half of the number of buckets have one bucket each; larger ones share
    logarithmically wider buckets up to `max_distance`. With `bidirectional=False` every key to the
    right of its query falls into bucket 0, like the query's own position; with `True` half of the
    buckets are used for keys to the right.

    Raises:
        ValueError: `n_buckets` is too small for both kinds of bucket, `max_distance` is not greater
            than the distances with one bucket each, or there are more queries than keys.

    Example:
        >>> relative_buckets(1, 6, n_buckets=4, max_distance=8).tolist()  # query at the end
        [[3, 3, 2, 2, 1, 0]]
    """
    max_exact = _exact_distances(n_buckets, max_distance, bidirectional=bidirectional)
    if n_query > n_key:
        raise ValueError(
            f"n_query must be at most n_key = {n_key}, got {n_query}: queries are at the last key "
            "positions"
        )
    query = torch.arange(n_key - n_query, n_key, device=device)[:, None]
    key = torch.arange(n_key, device=device)[None, :]
    distance = query - key
    offset = torch.zeros_like(distance)
    if bidirectional:
        n_buckets //= 2
        offset = (distance < 0) * n_buckets
        distance = distance.abs()
    distance = distance.clamp(min=0)
    # The logarithm in float32 with its epsilon, the rest in float64: this puts distances on the
    # border of a bucket where the code of T5 and of Schug et al. puts them.
    ratio = distance.float() / max_exact + torch.finfo(torch.float32).eps
    fraction = torch.log(ratio).double() / math.log(max_distance / max_exact)
    coarse = max_exact + (fraction * (n_buckets - max_exact)).int()
    return offset + torch.where(distance < max_exact, distance, coarse.clamp(max=n_buckets - 1))


# What is cached is made outside of inference mode: later calls may need gradients.
_cached_buckets = lru_cache(maxsize=64)(torch.inference_mode(False)(relative_buckets))


def check_buckets(*, n_buckets: int, max_distance: int, bidirectional: bool) -> None:
    """Raise a ValueError if `relative_buckets` does not allow these sizes."""
    _exact_distances(n_buckets, max_distance, bidirectional=bidirectional)


def _exact_distances(n_buckets: int, max_distance: int, *, bidirectional: bool) -> int:
    """The number of distances in each direction that have a bucket of their own."""
    minimum = 4 if bidirectional else 2
    if n_buckets < minimum:
        raise ValueError(
            f"n_buckets must be at least {minimum} with bidirectional={bidirectional}, "
            f"got {n_buckets}"
        )
    max_exact = n_buckets // minimum
    if max_distance <= max_exact:
        raise ValueError(
            f"max_distance must be greater than {max_exact}, the largest distance with its own "
            f"bucket, got {max_distance}"
        )
    return max_exact


class RelativePositionBias(nn.Module):
    """A learned bias for each head and distance bucket, added to the attention scores.

    Raffel et al. 2020 (T5), section 2.1. The table is `[n_heads, n_buckets]`; it starts from a
    normal distribution with the standard deviation n_buckets^-0.5, as in the code of Schug et al.
    2024.

    Args:
        n_heads: number of heads.
        n_buckets: number of distance buckets, at least 2 (4 if bidirectional).
        max_distance: larger distances share the last bucket; more than n_buckets / 2.
        bidirectional: whether keys to the right have their own buckets.
        generator: random generator of the initial table; None for torch's global generator.

    Raises:
        ValueError: as for `relative_buckets`.

    Example:
        >>> RelativePositionBias(n_heads=4, n_buckets=8, max_distance=16)(3, 5).shape
        torch.Size([1, 4, 3, 5])
    """

    def __init__(
        self,
        *,
        n_heads: int,
        n_buckets: int,
        max_distance: int,
        bidirectional: bool = False,
        generator: torch.Generator | None = None,
    ):
        super().__init__()
        self.max_distance = max_distance
        self.bidirectional = bidirectional
        check_buckets(n_buckets=n_buckets, max_distance=max_distance, bidirectional=bidirectional)
        self.table = normal(n_heads, n_buckets, std=n_buckets**-0.5, generator=generator)

    def forward(self, n_query: int, n_key: int) -> Float[Tensor, "1 head query_pos key_pos"]:
        """The bias between `n_key` keys and queries at their last `n_query` positions."""
        buckets = _cached_buckets(
            n_query,
            n_key,
            n_buckets=self.table.shape[1],
            max_distance=self.max_distance,
            bidirectional=self.bidirectional,
            device=self.table.device,
        )
        return self.table[:, buckets].unsqueeze(0)


def sinusoidal_embedding(n_positions: int, d_model: int) -> Float[Tensor, "pos d_model"]:
    """Sines in the first half of the channels, cosines in the second (Vaswani et al. 2017).

    Rates decrease geometrically from 1 to 1e-4; with an odd `d_model` the last channel is 0.
    Entries are float32 and exact up to its rounding, also at large positions.

    Raises:
        ValueError: d_model is less than 4, for which the rates are undefined.

    Example:
        >>> sinusoidal_embedding(5, 16).shape
        torch.Size([5, 16])
    """
    half = d_model // 2
    if half < 2:
        raise ValueError(f"d_model must be at least 4 for sinusoidal positions, got {d_model}")
    channel = torch.arange(half, dtype=torch.float64)
    rate = torch.exp(-channel * (math.log(1e4) / (half - 1)))
    angle = torch.arange(n_positions)[:, None] * rate
    embedding = torch.zeros(n_positions, d_model)
    embedding[:, :half] = angle.sin()
    embedding[:, half : 2 * half] = angle.cos()
    return embedding


@lru_cache(maxsize=64)
@torch.inference_mode(False)
def interleaved_sinusoids(first: int, stop: int, d_model: int) -> Float[Tensor, "pos d_model"]:
    """Alternating sin and cos at rates 1e4^(-2c / d_model) for positions first, ..., stop - 1."""
    rate = torch.exp(torch.arange(0, d_model, 2) * (-math.log(1e4) / d_model))
    angle = torch.arange(first, stop)[:, None] * rate
    return torch.stack([angle.sin(), angle.cos()], -1).flatten(1)


def rotate(
    x: Float[Tensor, "batch pos head d_head"], *, first: int = 0
) -> Float[Tensor, "batch pos head d_head"]:
    """Rotate queries or keys by their positions, so that their products depend on distances only.

    Su et al. 2021 (RoFormer), section 3.2. Channels c and c + d_head / 2 (halves, as in GPT-NeoX;
    not neighbours) form a 2d point, rotated at position p by the angle p 10,000^(-2c / d_head).

    Args:
        x: vectors at the positions `first`, `first` + 1, ...
        first: 0, or for queries at the last key positions number of keys - number of queries.

    Raises:
        ValueError: d_head is odd.

    Example:
        >>> q = torch.randn(2, 5, 4, 8)
        >>> torch.allclose(rotate(q).norm(dim=-1), q.norm(dim=-1), atol=1e-5)
        True
    """
    n_positions, d_head = x.shape[1], x.shape[3]
    if d_head % 2:
        raise ValueError(f"d_head must be even for rotary positions, got {d_head}")
    # Half precision cannot represent small angles at large positions.
    dtype = torch.promote_types(x.dtype, torch.float32)
    cosine, sine = _rotations(first, n_positions, d_head, dtype, x.device)
    left, right = x.chunk(2, -1)
    rotated = [left * cosine - right * sine, right * cosine + left * sine]
    return torch.cat(rotated, -1).to(x.dtype)


@lru_cache(maxsize=64)
@torch.inference_mode(False)
def _rotations(
    first: int, n_positions: int, d_head: int, dtype: torch.dtype, device: torch.device
) -> tuple[Float[Tensor, "pos 1 pair"], Float[Tensor, "pos 1 pair"]]:
    """Cosine and sine of the angle of each pair of channels at each position."""
    pair = torch.arange(d_head // 2, dtype=torch.float64)
    position = torch.arange(first, first + n_positions, dtype=torch.float64)
    angle = position[:, None, None] * 1e4 ** (-2 * pair / d_head)
    return angle.cos().to(dtype).to(device), angle.sin().to(dtype).to(device)
