"""Measures of contextual retrieval: errors by combination, and which retrievals searches choose."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
import xarray as xr

import mechanisms
import probes
from studies.engine import Reading, Trained
from studies.engine.readings import unmeasured
from studies.engine.results import config_of


def combinations(trained: Trained, n: int = 4000) -> xr.Dataset | None:
    """`error` [split, preference_0, preference_1] by combination of two searches' preferences.

    NaN for combinations that a split does not have. None for another number of searches.

    Args:
        trained: the trained model.
        n: examples of each split.
    """
    setup, means = trained.setup, []
    if setup.task.n_searches != 2:
        return None
    for split in setup.splits:
        batch = trained.batch(split, n)
        with torch.no_grad():
            parts = [
                setup.answer(trained.model, part)
                for part in batch.parts(setup.evaluation_batch_size)
            ]
        error = trained.task.score(torch.cat(parts), batch)["absolute_error"]
        first, second = batch.latents["preference"].unbind(-1)
        labels = {"preference_0": first, "preference_1": second}
        means.append(probes.mean_by_labels(error, labels, setup.task.n_retrievals))
    mean = xr.concat(means, xr.Variable("split", list(setup.splits)))
    mean.attrs["long_name"] = "mean absolute error of a combination of preferences"
    return xr.Dataset({"error": mean})


def chosen_retrievals(trained: Trained, n: int = 4000) -> xr.Dataset | None:
    """Which retrieval each search of compositional attention uses, and the error when it is forced.

    See `probes.score_pairing`, with splits as groups, among them `all` for every model;
    `usage_differences`; and, for models that some combinations were held out from,
    `probes.force_pairing`. None for other models.

    Args:
        trained: the trained model.
        n: examples of each split, and held-out examples whose pairing is forced.
    """
    setup = trained.setup
    if setup.model != "compositional":
        return None
    splits = ("all", "id", "ood") if "ood" in setup.splits else ("all",)
    batches = {split: trained.batches(split, n) for split in splits}
    pairing = probes.measure_pairing(trained.model, batches, seed=trained.seed)
    pairing = pairing.merge(usage_differences(pairing["pairing"]))
    if "ood" not in splits:
        # Results of several models have a common coordinate.
        return pairing.assign_coords(condition=np.array([], dtype=str))
    batch = trained.batch("ood", n)
    forced = probes.force_pairing(
        trained.model,
        batch.inputs,
        batch.latents["preference"],
        pairing.sel(fitted="id"),
        "blocks.0.attn.hook_value_scores",
        error=lambda output, part: setup.scores(output, batch[part], "ood")["error"][0],
        activation=pairing["activation"].sel(group="id"),
        seed=trained.seed,
    )
    return pairing.merge(forced.drop_vars("error"), combine_attrs="drop_conflicts")


def as_compositional(trained: Trained, n: int = 200) -> xr.Dataset | None:
    """How far multi-head attention is from compositional attention with the same weights.

    As many searches and retrievals as heads, and the identity as value scores (Mittal et al. 2021,
    section 3). `distance`: the largest difference of an output, divided by the largest output.
    None for compositional attention.

    Args:
        trained: the trained model.
        n: examples.
    """
    setup = trained.setup
    if setup.model == "compositional":
        return None
    heads = setup.attention
    config = mechanisms.CompositionalAttentionConfig(
        n_searches=heads.n_heads,
        n_retrievals=heads.n_heads,
        d_head=heads.d_head,
        own_value=heads.own_value,
        nonlinear=heads.nonlinear,
    )
    generator = torch.Generator().manual_seed(setup.seed)
    network = replace(trained.model.config, attention=config)
    model = mechanisms.RetrievalNetwork(network, generator=generator).eval().to(trained.device)
    # What it has beside multi-head attention are the weights that choose retrievals.
    model.load_state_dict(trained.model.state_dict(), strict=False)
    inputs = trained.batch("id", n).inputs
    identity = torch.eye(heads.n_heads, device=trained.device)
    scores_at = "blocks.0.attn.hook_value_scores"
    hooks: list[Any] = [(scores_at, lambda scores, hook: identity.expand_as(scores))]
    with torch.no_grad():
        of_heads = trained.model(inputs)
        distance = (model.run_with_hooks(inputs, fwd_hooks=hooks) - of_heads).abs().max()
    about = "largest difference to compositional attention with the same weights, relative"
    relative = float(distance / of_heads.abs().max())
    return xr.Dataset({"distance": ((), relative, {"long_name": about})})


def usage_differences(usage: xr.DataArray) -> xr.Dataset:
    """How unevenly searches use retrievals, and how much their use changes on unseen combinations.

    Differences are total variation distances, 0 (none) to 1, averaged over searches.

    Args:
        usage: mean value scores [group, model_search, model_retrieval], which sum to 1 over the
            retrievals; with `switch` if there are the groups `id` and `ood`.

    Returns:
        `unevenness` [group], the difference to even use of all retrievals; and `switch`, that
        between `id` and `ood`.

    Source:
        Mittal et al. 2021, figure 4.
    """

    def distance(difference: xr.DataArray, long_name: str) -> xr.DataArray:
        variation = abs(difference).sum("model_retrieval") / 2
        return variation.mean("model_search").assign_attrs(long_name=long_name, units="1")

    even = 1 / usage.sizes["model_retrieval"]
    result = xr.Dataset({"unevenness": distance(usage - even, "difference to even use")})
    if {"id", "ood"} <= {*usage["group"].to_numpy()}:
        changes = usage.sel(group="ood", drop=True) - usage.sel(group="id", drop=True)
        result["switch"] = distance(changes, "difference between held-out and familiar")
    return result


def early_error(split: str, share: float) -> Reading:
    """The validation error on a split at the evaluation nearest to a share of the training."""

    def values(result: xr.DataTree) -> np.ndarray:
        curves = result["training"]["error"]
        if split not in curves["split"]:
            return unmeasured(result)
        n_steps = config_of(result)["setup"]["training"]["n_steps"]
        at = curves.sel(split=split, group="all").sel(train_step=share * n_steps, method="nearest")
        return at.to_numpy().astype(float)

    return Reading(f"error, {split}, after {share:.0%} of the training", values)
