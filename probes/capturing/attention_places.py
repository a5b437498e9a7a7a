"""Capture and score the attention modules of a model, each with its own queries, keys and mask."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import xarray as xr
from jaxtyping import Bool, Int
from torch import Tensor

from probes.attention_pairs import PAIRS
from probes.capturing.capture import capture
from probes.capturing.hooking import HookedModel
from probes.capturing.passes import Batch
from probes.capturing.quantity import Quantity
from probes.checking import checked

_JOIN: Any = {"coords": "minimal", "compat": "override", "combine_attrs": "drop_conflicts"}


@dataclass(frozen=True)
class AttentionPlace:
    """An attention module of a model, such as a decoder's cross-attention.

    Attributes:
        hooks: prefix of its hook names; or a glob (`blocks.*.attn.`), for several layers.
        valid: [example, query_pos, key_pos]: True for pairs that are neither padded nor masked.
        sign: true signs of the pairs (-1, 0 or 1), if known: see `score_signedness`.

    Example:
        >>> AttentionPlace("blocks.*.attn.", torch.ones(10, 5, 5).bool()).sign
    """

    hooks: str
    valid: Bool[Tensor, "example query_pos key_pos"]
    sign: Int[Tensor, "example query_pos key_pos"] | None = None


@checked
def capture_places(
    model: HookedModel,
    batches: Iterable[Batch],
    places: Mapping[str, AttentionPlace],
    hooks: Sequence[str],
) -> dict[str, xr.Dataset]:
    """Capture hooked activations of several attention modules, with the valid pairs of each.

    Args:
        model: as in `capture`.
        batches: as in `capture`; the model runs over them once per module.
        places: attention modules by name; their examples are those of all batches, in order.
        hooks: hooks [example, head, query_pos, key_pos] that every module has, named without the
            prefix and `hook_`: `["pattern", "gate"]`.

    Returns:
        For each module a dataset with one variable per hook [example, layer, head, query_pos,
        key_pos], `valid` [example, query_pos, key_pos], and `sign` if it is known. A module
        without a glob is layer 0.

    Raises:
        KeyError: an unknown hook; the message lists the nearest names.
        ValueError: there is no batch, or a module has another number of examples.

    Example:
        >>> places = {"self": AttentionPlace("blocks.*.attn.", valid)}
        >>> score_signedness(**capture_places(model, batches, places, ["pattern"])["self"])
    """
    all_batches, captured = list(batches), {}
    dims = ("example", "head", "query_pos", "key_pos")
    for name, module in places.items():
        quantities = {hook: Quantity(f"{module.hooks}hook_{hook}", dims=dims) for hook in hooks}
        data = cast(xr.Dataset, capture(model, all_batches, quantities)[list(hooks)])
        data = data if "layer" in data.dims else data.expand_dims(layer=[0])
        for variable, values in (("valid", module.valid), ("sign", module.sign)):
            if values is None:
                continue
            if len(values) != data.sizes["example"]:
                raise ValueError(
                    f"{variable} must have {data.sizes['example']} examples at {name}, got "
                    f"{len(values)}"
                )
            data[variable] = PAIRS, values.cpu().numpy()
        captured[name] = data.assign_coords(head=range(data.sizes["head"]))
    return captured


@checked
def score_places(
    model: HookedModel,
    batches: Iterable[Batch],
    places: Mapping[str, AttentionPlace],
    hooks: Sequence[str],
    score: Callable[[xr.Dataset], xr.Dataset],
) -> xr.Dataset:
    """Apply a score to several attention modules of a model and join the results.

    Args:
        model, batches, places, hooks: as in `capture_places`.
        score: maps a dataset of `capture_places` to scores without the dims `example`,
            `query_pos` and `key_pos`, whose sizes differ between modules.

    Returns:
        The results of `score` [place, ...]; NaN for a layer or head that a module lacks.

    Raises:
        KeyError, ValueError: as `capture_places`; or `places` is empty.

    Example:
        >>> score_places(model, batches, places, ["pattern"], lambda data: score_signedness(**data))
    """
    if not places:
        raise ValueError("places must name at least one place, got none")
    datasets = capture_places(model, batches, places, hooks)
    scores = [score(data) for data in datasets.values()]
    # Modules may differ in their layers.
    return xr.concat(scores, xr.Variable("place", list(datasets)), join="outer", **_JOIN)


@checked
def examine_places(
    models: Mapping[str, HookedModel],
    examples: Mapping[str, tuple[Sequence[Batch], Mapping[str, AttentionPlace]]],
    hooks: Sequence[str],
    score: Callable[[xr.Dataset], xr.Dataset],
) -> xr.Dataset:
    """Apply a score to the attention modules of several models, on several splits.

    Args:
        models: by name, such as `{"trained": model, "untrained": other}`; all run on the same
            examples.
        examples: by split: the batches, and the attention modules with their valid pairs.
        hooks, score: as in `score_places`.

    Returns:
        The results of `score` [model, split, place, ...].

    Raises:
        KeyError, ValueError: as `score_places`; or there is no model or no split.

    Example:
        >>> examine_places({"trained": model}, {"id": (batches, places)}, ["pattern"], score)
    """
    if not models or not examples:
        raise ValueError(
            "models and examples must not be empty, got "
            f"{len(models)} models and {len(examples)} splits"
        )
    parts = [
        [score_places(model, batches, places, hooks, score) for model in models.values()]
        for batches, places in examples.values()
    ]
    scores = xr.combine_nested(parts, ["split", "model"], join="outer", **_JOIN)
    return cast(xr.Dataset, scores).assign_coords(model=list(models), split=list(examples))
