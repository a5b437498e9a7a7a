"""Results of TransformerLens' activation patching, as labelled arrays."""

from collections.abc import Hashable
from typing import Any

import numpy as np
import xarray as xr
from torch import Tensor
from transformer_lens.patching import PatchingResult

from probes.checking import checked
from probes.statistics.intervals import Interval, interval_variables

_DIMS = {"head_index": "head", "dest_pos": "query_pos", "src_pos": "key_pos"}


@checked
def label_patching(result: PatchingResult, *, resamples: int = 1000, seed: int = 0) -> xr.Dataset:
    """Label the axes of a sweep of activation patching, and add its intervals.

    `transformer_lens.patching` sweeps over layers, positions and heads: each run on corrupted
    tokens gets one clean activation. Its functions, such as `get_act_patch_attn_head_out_by_pos`,
    return a `PatchingResult` with axes by number.

    Args:
        result: of a sweep with `reduce="none"`; with `baseline=True` there are effects.
        resamples, seed: of the bootstrap.

    Returns:
        In the unit of the metric, with the dims of the sweep: `layer`, `pos`, `head`, `query_pos`,
        `key_pos` or `patch_type` (of `*_every`: "out", "q", ...); `cell`, with those as
        coordinates, of a sweep over an `index_df`; and `metric` first if there are several:

        - `value, value_low, value_high` [...]: mean of the metric of the patched runs;
          `example_value` [..., example].
        - with a baseline, `effect, effect_low, effect_high` [...]: mean change against the
          corrupted runs; `p_value` [...]: of a mean effect of 0, by permutation of signs, not
          corrected for the number of cells; `baseline` [...]: mean metric of the corrupted runs.

        Intervals: percentile bootstrap 95% over examples, by TransformerLens. Where keys and values
        have fewer heads than queries, `*_every` fills their cells with 0, which are no results.

    Raises:
        ValueError: the result holds means over examples, of another `reduce`.

    Example:
        >>> swept = get_act_patch_attn_head_out_by_pos(
        ...     bridge, corrupted, clean_cache, lambda logits: metric(logits, slice(None)),
        ...     reduce="none", baseline=True)
        >>> label_patching(swept)["effect"].sel(layer=0, head=1).argmax("pos").item()
        3
    """
    metric = ("metric",) if result.has_metric_axis else ()
    dims, coordinates = _axes(result)
    dims = (*metric, *dims)
    if metric:
        coordinates["metric"] = list(result.metric_names)

    def with_interval(mean: Tensor, *, of_effect: bool) -> Interval:
        ends = result.bootstrap_ci(n_resamples=resamples, seed=seed, of_effect=of_effect)
        return Interval(*(_array(part) for part in (mean, *ends)))

    about = {"long_name": "metric of each example"}
    data = xr.Dataset(
        {
            **interval_variables(
                "value",
                with_interval(result.mean(), of_effect=False),
                dims,
                long_name="mean metric of patched runs",
            ),
            "example_value": ((*dims, "example"), _array(result.values), about),
        },
        coords=coordinates,
        attrs={
            "examples": result.values.shape[-1],
            "interval": "percentile bootstrap 95% over examples",
        },
    )
    if result.baseline is None:
        return data
    effect = with_interval(result.effect().mean(-1), of_effect=True)
    p_value = _array(result.permutation_pvalue(n_permutations=resamples, seed=seed))
    unpatched = _array(result.baseline.mean(-1))
    return data.assign(
        interval_variables("effect", effect, dims, long_name="change against the corrupted runs")
    ).assign(
        p_value=(dims, p_value, {"long_name": "p of a mean effect of 0, signs permuted"}),
        baseline=(metric, unpatched, {"long_name": "mean metric of corrupted runs"}),
    )


def _axes(result: PatchingResult) -> tuple[tuple[str, ...], dict[Hashable, Any]]:
    """The dims of the swept axes, and their coordinates."""
    columns = {_DIMS.get(name, name): result.index_df[name] for name in result.index_df}
    if not result.axis_names:
        return ("cell",), {name: ("cell", each.to_numpy()) for name, each in columns.items()}
    dims = tuple(_DIMS.get(name, name) for name in result.axis_names)
    coordinates: dict[Hashable, Any] = {dim: np.unique(columns[dim]) for dim in dims}
    if result.patch_type_names is not None:
        coordinates["patch_type"] = list(result.patch_type_names)
    return dims, coordinates


def _array(values: Tensor) -> np.ndarray:
    return values.detach().double().cpu().numpy()
