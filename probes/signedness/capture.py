"""Capture what models attend to, and score its signs and its saturation, place by place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import xarray as xr

from probes.capturing.attention_places import AttentionPlace, examine_places
from probes.capturing.capture import Batch
from probes.capturing.hooking import HookedModel
from probes.signedness.saturation import score_saturation
from probes.signedness.scores import relative_weights, score_signedness

Examples = Mapping[str, tuple[Sequence[Batch], Mapping[str, AttentionPlace]]]
"""By split: the batches, and the places where models attend in them."""


def measure_signedness(
    models: Mapping[str, HookedModel], examples: Examples, *, resamples: int = 1000, seed: int = 0
) -> xr.Dataset:
    """Score how signed attention is at several places of models, and if its signs are the planted.

    Runs the models over the examples and passes what they attend with on to `score_signedness`.

    Args:
        models: by name, such as `{"trained": model, "untrained": other}`.
        examples: by split: batches, and the places, with their signs if these are known.
        resamples: of the bootstrap.
        seed: of shuffling and bootstrap.

    Returns:
        [model, split, place, scale, layer, head, ...] of what `score_signedness` gives, where
        `scale` is "weights" as they are, and "relative" to the largest ones of their head, see
        `relative_weights`. NaN for a layer or head that a place lacks.

    Raises:
        KeyError: a place without `hook_pattern`; the message lists the nearest.
        ValueError: no model, split or place, or examples that do not fit.

    Example:
        >>> places = {"self": AttentionPlace("blocks.*.attn.", valid, sign)}
        >>> measure_signedness({"trained": model}, {"ood": ([batch], places)})

    Source:
        Tay et al. 2019, "Compositional De-Attention Networks".
    """

    def score(data: xr.Dataset) -> xr.Dataset:
        relative = relative_weights(data["pattern"], valid=data["valid"])
        both = xr.Dataset({"weights": data["pattern"], "relative": relative}).to_dataarray("scale")
        known = {"valid": data["valid"], "sign": data.get("sign")}
        return score_signedness(both, **known, resamples=resamples, seed=seed)

    return examine_places(models, examples, ["pattern"], score)


def measure_saturation(
    models: Mapping[str, HookedModel],
    examples: Examples,
    limits: Mapping[str, float],
    *,
    resamples: int = 1000,
    seed: int = 0,
) -> xr.Dataset:
    """Score how much of what attention is made of lies where functions are flat, place by place.

    Runs the models over the examples and passes what hooks show on to `score_saturation`.

    Args:
        models, examples: as in `measure_signedness`.
        limits: by quantity, a hook of each place without `hook_`: beyond minus and plus which size
            it is saturated, such as `{"affinity": 2.0, "dissimilarity": 3.0}`.
        resamples, seed: of the bootstrap.

    Returns:
        `saturated` [model, split, place, quantity, layer, head, side], with `_low` and `_high`: see
        `score_saturation`. NaN for a layer or head that a place lacks.

    Raises:
        KeyError: a place without a hook; the message lists the nearest.
        ValueError: no model, split or place, limits that are not above 0, or examples that do not
            fit.

    Example:
        `measure_saturation({"trained": model}, {"id": ([batch], places)}, {"affinity": 2.0})`

    Source:
        Tay et al. 2019, "Compositional De-Attention Networks", section 5.
    """
    top = xr.DataArray(list(limits.values()), coords={"quantity": list(limits)})

    def score(data: xr.Dataset) -> xr.Dataset:
        values = data[list(limits)].to_dataarray("quantity")
        where: dict[str, Any] = {"low": -top, "high": top, "valid": data["valid"]}
        return score_saturation(values, **where, resamples=resamples, seed=seed).drop_dims("bin")

    return examine_places(models, examples, list(limits), score)
