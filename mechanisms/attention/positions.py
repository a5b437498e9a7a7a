"""Where a token is: relative position bias, sinusoidal embeddings, rotations."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn


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

    Distances up to half of the buckets have one each; larger ones share logarithmically
    wider buckets up to `max_distance`. With `bidirectional=False` every key to the right of
    its query falls into bucket 0, as the query's own position does; with `True` half of the
    buckets are kept for the right-hand side.

    Raises:
        ValueError: there are too few buckets for one distance each and one that is shared,
            `max_distance` is not beyond those that have a bucket each, or there are more queries
            than keys.
    """
    least = 4 if bidirectional else 2
    if n_buckets < least:
        raise ValueError(
            f"n_buckets must be at least {least} with bidirectional={bidirectional}, "
            f"got {n_buckets}"
        )
    if n_query > n_key:
        raise ValueError(
            f"n_query must be at most n_key = {n_key}, got {n_query}: queries are at the last of "
            "the keys' positions"
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
    max_exact = n_buckets // 2
    if max_distance <= max_exact:
        raise ValueError(
            f"max_distance must be greater than {max_exact}, up to which distances have a bucket "
            f"each, got {max_distance}"
        )
    # float32 and its epsilon, so that distances on a bucket's border fall where T5 puts them.
    ratio = distance.float() / max_exact + torch.finfo(torch.float32).eps
    share = torch.log(ratio) / math.log(max_distance / max_exact)
    coarse = max_exact + (share * (n_buckets - max_exact)).int()
    return offset + torch.where(distance < max_exact, distance, coarse.clamp(max=n_buckets - 1))


class RelativePositionBias(nn.Module):
    """A learned number for each head and bucket of distance, added to the attention scores.

    Raffel et al. 2020 (T5), section 2.1. The table is `[n_heads, n_buckets]`; it starts from
    N(0, 0.02), so that no position is preferred at first.

    Args:
        n_buckets: distances are told apart by this many numbers, at least 2.
        max_distance: distances from here on share the last bucket, more than n_buckets / 2.
        bidirectional: whether keys to the right have buckets of their own.

    Raises:
        ValueError: as `relative_buckets`.
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
        self.table = nn.Parameter(torch.randn(n_heads, n_buckets, generator=generator) * 0.02)
        self._buckets: dict[tuple[int, int, torch.device], Tensor] = {}
        # Wrong sizes are an error here, not in the first forward pass.
        relative_buckets(
            1, 1, n_buckets=n_buckets, max_distance=max_distance, bidirectional=bidirectional
        )

    def forward(self, n_query: int, n_key: int) -> Float[Tensor, "1 head query_pos key_pos"]:
        """The bias for the last `n_query` positions as queries over `n_key` keys."""
        place = (n_query, n_key, self.table.device)
        if place not in self._buckets:
            self._buckets[place] = relative_buckets(
                n_query,
                n_key,
                n_buckets=self.table.shape[1],
                max_distance=self.max_distance,
                bidirectional=self.bidirectional,
                device=self.table.device,
            )
        return self.table[:, self._buckets[place]].unsqueeze(0)


def sinusoidal_embedding(n_positions: int, d_model: int) -> Float[Tensor, "pos d_model"]:
    """Sines in the first half of the channels, cosines in the second (Vaswani et al. 2017).

    Rates fall geometrically from 1 to 1e-4; an odd `d_model` leaves its last channel at 0.

    Raises:
        ValueError: if d_model < 4, for which the rates are not defined.
    """
    half = d_model // 2
    if half < 2:
        raise ValueError(f"d_model must be at least 4 for sinusoidal positions, got {d_model}")
    rate = torch.exp(-torch.arange(half) * (math.log(1e4) / (half - 1)))
    angle = torch.arange(n_positions)[:, None] * rate
    embedding = torch.zeros(n_positions, d_model)
    embedding[:, :half] = angle.sin()
    embedding[:, half : 2 * half] = angle.cos()
    return embedding


def rotate(
    x: Float[Tensor, "batch pos head d_head"], *, first: int = 0
) -> Float[Tensor, "batch pos head d_head"]:
    """Queries or keys, turned by where they are: their products then see distances alone.

    Su et al. 2021 (RoFormer), section 3.2. Channels c and c + d_head / 2 (halves, as in GPT-NeoX;
    not neighbours) are a point in the plane, which position p turns by p 10,000^(-2c / d_head).

    Args:
        x: what stands at the positions `first`, `first` + 1, ...
        first: for queries at the last of the keys' positions, number of keys - number of queries.

    Raises:
        ValueError: d_head is odd.
    """
    n_positions, d_head = x.shape[1], x.shape[3]
    if d_head % 2:
        raise ValueError(f"d_head must be even for rotary positions, got {d_head}")
    # Half precision would lose the small turns far from the start.
    dtype = torch.promote_types(x.dtype, torch.float32)
    cosine, sine = _turns(first, n_positions, d_head, dtype, x.device)
    left, right = x.chunk(2, -1)
    turned = [left * cosine - right * sine, right * cosine + left * sine]
    return torch.cat(turned, -1).to(x.dtype)


@lru_cache(maxsize=64)
def _turns(
    first: int, n_positions: int, d_head: int, dtype: torch.dtype, device: torch.device
) -> tuple[Float[Tensor, "pos 1 pair"], Float[Tensor, "pos 1 pair"]]:
    """Cosine and sine of the angles by which positions turn each pair of channels."""
    # Kept for later calls, which may want gradients.
    with torch.inference_mode(False):
        pair = torch.arange(d_head // 2, dtype=torch.float64)
        position = torch.arange(first, first + n_positions, dtype=torch.float64)
        angle = position[:, None, None] * 1e4 ** (-2 * pair / d_head)
        return angle.cos().to(dtype).to(device), angle.sin().to(dtype).to(device)
