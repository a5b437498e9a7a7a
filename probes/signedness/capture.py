"""Capture the attention of models, and score its signs and its saturation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import xarray as xr

from probes.capturing.attention_places import AttentionPlace, examine_places
from probes.capturing.hooking import HookedModel
from probes.capturing.passes import Batch
from probes.checking import checked
from probes.signedness.saturation import score_saturation
from probes.signedness.scores import relative_weights, score_signedness

Examples = Mapping[str, tuple[Sequence[Batch], Mapping[str, AttentionPlace]]]
"""By split: the batches, and the attention modules with their valid pairs."""


@checked
def measure_signedness(
    models: Mapping[str, HookedModel], examples: Examples, *, resamples: int = 1000, seed: int = 0
) -> xr.Dataset:
    """Score how signed the attention of models is, and whether its signs match planted ones.

    Runs the models over the examples and passes their attention patterns to `score_signedness`.

    Args:
        models: by name, such as `{"trained": model, "untrained": other}`.
        examples: by split: batches, and the attention modules, with true signs if known.
        resamples: number of bootstrap resamples.
        seed: seed of shuffling and bootstrap.

    Returns:
        The results of `score_signedness` [model, split, place, scale, layer, head, ...], where
        `scale` is "weights" (unchanged) or "relative" (to the largest of the head, see
        `relative_weights`). NaN for a layer or head that a module lacks.

    Raises:
        KeyError: a module has no `hook_pattern`; the message lists the nearest names.
        ValueError: there is no model, split or module, or examples do not match.

    Example:
        >>> places = {"self": AttentionPlace("blocks.*.attn.", valid, sign)}
        >>> measure_signedness({"trained": model}, {"ood": ([batch], places)})

    Source:
        Tay et al. 2019, "Compositional De-Attention Networks".
    """

    def score(data: xr.Dataset) -> xr.Dataset:
        relative = relative_weights(data["pattern"], valid=data["valid"])
        patterns = xr.Dataset({"weights": data["pattern"], "relative": relative}).to_dataarray(
            "scale"
        )
        pairs = {"valid": data["valid"], "sign": data.get("sign")}
        return score_signedness(patterns, **pairs, resamples=resamples, seed=seed)

    return examine_places(models, examples, ["pattern"], score)


@checked
def measure_saturation(
    models: Mapping[str, HookedModel],
    examples: Examples,
    limits: Mapping[str, float],
    *,
    resamples: int = 1000,
    seed: int = 0,
) -> xr.Dataset:
    """Score how saturated the quantities of attention modules are.

    Runs the models over the examples and passes the hooked activations to `score_saturation`.

    Args:
        models, examples: as in `measure_signedness`.
        limits: by quantity (a hook of each module, without `hook_`), the size from which it is
            saturated at both signs, such as `{"affinity": 2.0, "dissimilarity": 3.0}`.
        resamples: number of bootstrap resamples.
        seed: seed of the bootstrap.

    Returns:
        `saturated` [model, split, place, quantity, layer, head, side], with `_low` and `_high`: see
        `score_saturation`. NaN for a layer or head that a module lacks.

    Raises:
        KeyError: a module lacks a hook; the message lists the nearest names.
        ValueError: there is no model, split or module, a limit is not above 0, or examples do not
            match.

    Example:
        >>> measure_saturation({"trained": model}, {"id": ([batch], places)}, {"affinity": 2.0})

    Source:
        Tay et al. 2019, "Compositional De-Attention Networks", section 5.
    """
    limit = xr.DataArray(list(limits.values()), coords={"quantity": list(limits)})

    def score(data: xr.Dataset) -> xr.Dataset:
        values = data[list(limits)].to_dataarray("quantity")
        options: dict[str, Any] = {"low": -limit, "high": limit, "valid": data["valid"]}
        return score_saturation(values, **options, resamples=resamples, seed=seed).drop_dims("bin")

    return examine_places(models, examples, list(limits), score)
