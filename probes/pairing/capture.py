"""Capture value scores and patterns of compositional attention, and score their pairing."""

from collections.abc import Iterable, Mapping
from typing import cast

import numpy as np
import xarray as xr

from probes.capturing.capture import capture
from probes.capturing.hooking import HookedModel
from probes.capturing.passes import Batch
from probes.capturing.quantity import Quantity
from probes.checking import checked
from probes.pairing.scores import score_pairing

_DIMS = {
    "hook_value_scores": ("example", "pos", "search", "retrieval"),
    "hook_pattern": ("example", "search", "query_pos", "key_pos"),
}


@checked
def measure_pairing(
    model: HookedModel,
    batches: Mapping[str, Iterable[Batch]],
    *,
    attention: str = "blocks.0.attn",
    truth: str = "preference",
    winner: str | None = "winner",
    resamples: int = 1000,
    seed: int = 0,
) -> xr.Dataset:
    """Score which retrieval serves which search of a model, by group of examples.

    Runs the model over the batches and passes the captured activations to `score_pairing`.

    Args:
        model: an eager HookedRootModule or TransformerBridge.
        batches: objects with `.inputs` and `.latents` by group, such as the split.
        attention: name of the attention module, which has the hooks `hook_value_scores` [example,
            pos, search, retrieval] and, for `winner`, `hook_pattern` [example, search, query_pos,
            key_pos].
        truth: name of the latent [example, pos, true search] with the true retrieval, -1 for none.
        winner: name of the latent of that shape with the position that each true search should
            find; None: searches are assigned by their choices alone.
        resamples: number of bootstrap resamples.
        seed: seed of shuffling and bootstrap.

    Returns:
        The results of `score_pairing`, with groups in order.

    Raises:
        KeyError: an unknown hook or latent.
        TypeError, ValueError: as in `capture` and `score_pairing`; or there are no groups.

    Example:
        >>> measure_pairing(model, {"id": [task.batch("id", 0, 500)]})

    Source:
        Mittal et al. 2021, "Compositional Attention", figures 5 and 11.
    """
    if not batches:
        raise ValueError("batches must name at least one group, got an empty mapping")
    names = [truth] if winner is None else [truth, winner]
    hooks = ["hook_value_scores"] if winner is None else list(_DIMS)
    quantities = {name: Quantity(f"{attention}.{name}", dims=_DIMS[name]) for name in hooks}
    dims = dict.fromkeys(names, ("example", "pos", "true_search"))
    captured_groups = {}
    for group, group_batches in batches.items():
        captured = capture(model, group_batches, quantities, latent_dims=dims)
        captured_groups[group] = captured[[*hooks, *names]]
    joined = xr.concat(list(captured_groups.values()), "example", combine_attrs="drop_conflicts")
    data = cast(xr.Dataset, joined)
    group_labels = np.repeat(
        list(captured_groups),
        [group_data.sizes["example"] for group_data in captured_groups.values()],
    )
    return score_pairing(
        data["hook_value_scores"],
        data[truth],
        winner=None if winner is None else data[winner],
        pattern=None if winner is None else data["hook_pattern"],
        groups=xr.DataArray(group_labels, dims="example"),
        resamples=resamples,
        seed=seed,
    )
