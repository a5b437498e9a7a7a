"""Attention at several places of a model, each with queries, keys and a mask of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import xarray as xr
from jaxtyping import Bool, Int
from torch import Tensor

from probes.attention_pairs import PAIRS
from probes.capturing.capture import Batch, Quantity, capture
from probes.capturing.hooking import HookedModel

_CLOSE: Any = {"coords": "minimal", "compat": "override", "combine_attrs": "drop_conflicts"}


@dataclass(frozen=True)
class AttentionPlace:
    """A place where a model attends, such as between a decoder and an encoder.

    Attributes:
        hooks: the start of the names of its hooks; or a glob (`blocks.*.attn.`), for several
            layers.
        valid: [example, query_pos, key_pos]: the pairs that are no padding, nor hidden by a mask.
        sign: the planted signs, if they are known, -1, 0 or 1: see `score_signedness`.
    """

    hooks: str
    valid: Bool[Tensor, "example query_pos key_pos"]
    sign: Int[Tensor, "example query_pos key_pos"] | None = None


def capture_places(
    model: HookedModel,
    batches: Iterable[Batch],
    places: Mapping[str, AttentionPlace],
    hooks: Sequence[str],
) -> dict[str, xr.Dataset]:
    """Keep what hooks of attention show at several places, beside the pairs that count.

    Args:
        model: as in `capture`.
        batches: as in `capture`; the model runs over them once for each place.
        places: by name; their examples are those of all batches, in this order.
        hooks: names of hooks [example, head, query_pos, key_pos] that every place has, without
            what they start with and `hook_`: `["pattern", "gate"]`.

    Returns:
        For each place a dataset with a variable for each hook [example, layer, head, query_pos,
        key_pos], `valid` [example, query_pos, key_pos], and `sign` where it is known. A place
        without a glob is layer 0.

    Raises:
        KeyError: an unknown hook; the message lists the nearest.
        ValueError: no batch, or examples of a place that are not those of the batches.

    Example:
        >>> places = {"self": AttentionPlace("blocks.*.attn.", valid)}
        >>> score_signedness(**capture_places(model, batches, places, ["pattern"])["self"])
    """
    every, found = list(batches), {}
    dims = ("example", "head", "query_pos", "key_pos")
    for name, place in places.items():
        wanted = {hook: Quantity(f"{place.hooks}hook_{hook}", dims=dims) for hook in hooks}
        data = cast(xr.Dataset, capture(model, every, wanted)[list(hooks)])
        data = data if "layer" in data.dims else data.expand_dims(layer=[0])
        for variable, values in (("valid", place.valid), ("sign", place.sign)):
            if values is None:
                continue
            if len(values) != data.sizes["example"]:
                raise ValueError(
                    f"{variable} must be of {data.sizes['example']} examples at {name}, got "
                    f"{len(values)}"
                )
            data[variable] = PAIRS, values.cpu().numpy()
        found[name] = data.assign_coords(head=range(data.sizes["head"]))
    return found


def score_places(
    model: HookedModel,
    batches: Iterable[Batch],
    places: Mapping[str, AttentionPlace],
    hooks: Sequence[str],
    score: Callable[[xr.Dataset], xr.Dataset],
) -> xr.Dataset:
    """Score what hooks of attention show at several places, in one dataset.

    Args:
        model, batches, places, hooks: as in `capture_places`.
        score: what is computed of a dataset of `capture_places`; its result has none of the dims
            `example`, `query_pos` and `key_pos`, in which places differ.

    Returns:
        [place, ...] of what `score` gives; NaN for a layer or head that a place lacks.

    Raises:
        KeyError, ValueError: as `capture_places`; or there is no place.

    Example:
        `score_places(model, batches, places, ["pattern"], lambda data: score_signedness(**data))`
    """
    if not places:
        raise ValueError("places must name at least one place, got none")
    captured = capture_places(model, batches, places, hooks)
    scores = [score(data) for data in captured.values()]
    # Places may have layers of their own.
    return xr.concat(scores, xr.Variable("place", list(captured)), join="outer", **_CLOSE)


def examine_places(
    models: Mapping[str, HookedModel],
    examples: Mapping[str, tuple[Sequence[Batch], Mapping[str, AttentionPlace]]],
    hooks: Sequence[str],
    score: Callable[[xr.Dataset], xr.Dataset],
) -> xr.Dataset:
    """Score what hooks of attention show in several models, on several splits.

    Args:
        models: by name, such as `{"trained": model, "untrained": other}`: all see the same
            examples.
        examples: by split: the batches, and the places where models attend in them.
        hooks, score: as in `score_places`.

    Returns:
        [model, split, place, ...] of what `score` gives.

    Raises:
        KeyError, ValueError: as `score_places`; or there is no model, or no split.

    Example:
        `examine_places({"trained": model}, {"id": (batches, places)}, ["pattern"], score)`
    """
    if not models or not examples:
        raise ValueError("models and examples must not be empty")
    parts = [
        [score_places(model, *given, hooks, score) for model in models.values()]
        for given in examples.values()
    ]
    found = xr.combine_nested(parts, ["split", "model"], join="outer", **_CLOSE)
    return cast(xr.Dataset, found).assign_coords(model=list(models), split=list(examples))
