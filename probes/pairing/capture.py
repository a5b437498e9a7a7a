"""Capture what pairing is seen in from a model of compositional attention, and score it."""

from collections.abc import Iterable, Mapping
from typing import cast

import numpy as np
import xarray as xr

from probes.capturing.capture import Batch, Quantity, capture
from probes.capturing.hooking import HookedModel
from probes.pairing.scores import score_pairing

_DIMS = {
    "hook_value_scores": ("example", "pos", "search", "retrieval"),
    "hook_pattern": ("example", "search", "query_pos", "key_pos"),
}


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
    """Score which retrieval serves which search of a model, in groups of examples.

    Runs the model over the batches and passes what it captures on to `score_pairing`.

    Args:
        model: an eager HookedRootModule or TransformerBridge.
        batches: objects with `.inputs` and `.latents` by group, such as the split.
        attention: the layer, which has the hooks `hook_value_scores` [example, pos, search,
            retrieval] and, for `winner`, `hook_pattern` [example, search, query_pos, key_pos].
        truth: the latent [example, pos, true search] with the true retrieval, -1 for none.
        winner: the latent of that shape with the position that each true search should find; None:
            searches are assigned by their choices alone.
        resamples: of the bootstrap.
        seed: of shuffling and bootstrap.

    Returns:
        What `score_pairing` returns, in the groups' order.

    Raises:
        KeyError: a hook or a latent that there is none of.
        TypeError, ValueError: see `capture` and `score_pairing`; no groups.

    Example:
        `measure_pairing(model, {"id": [task.batch("id", 0, 500)]})`

    Source:
        Mittal et al. 2021, "Compositional Attention", figures 5 and 11.
    """
    if not batches:
        raise ValueError("batches must name at least one group, got an empty mapping")
    names = [truth] if winner is None else [truth, winner]
    hooks = ["hook_value_scores"] if winner is None else list(_DIMS)
    quantities = {name: Quantity(f"{attention}.{name}", dims=_DIMS[name]) for name in hooks}
    dims = dict.fromkeys(names, ("example", "pos", "true_search"))
    parts = {}
    for group, some in batches.items():
        captured = capture(model, some, quantities, latent_dims=dims)
        if missing := [name for name in names if name not in captured]:
            known = sorted(map(str, set(captured) - set(quantities)))
            raise KeyError(f"no latent {', '.join(missing)}; batches have {', '.join(known)}")
        parts[group] = captured[[*hooks, *names]]
    joined = xr.concat(list(parts.values()), "example", combine_attrs="drop_conflicts")
    data = cast(xr.Dataset, joined)
    of_group = np.repeat(list(parts), [one.sizes["example"] for one in parts.values()])
    return score_pairing(
        data["hook_value_scores"],
        data[truth],
        winner=None if winner is None else data[winner],
        pattern=None if winner is None else data["hook_pattern"],
        groups=xr.DataArray(of_group, dims="example"),
        resamples=resamples,
        seed=seed,
    )
