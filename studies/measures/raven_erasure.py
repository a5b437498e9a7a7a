"""Whether answers of models of Raven matrices suffer when rules are erased from the latent code."""

from __future__ import annotations

import numpy as np
import xarray as xr

import probes
import tasks
from probes.interventions.latent_codes import PATTERNS
from studies.engine import Trained
from studies.measures.raven import PROBED


def erasure(trained: Trained, n: int = 1000, draws: int = 3) -> xr.Dataset:
    """Erase each feature's rule from its latent code, in each layer and in all: is it still solved?

    `rate` [split, condition, site], the share of right answers for the feature whose rule was
    erased, the mean over features; `effect` [split, control, site] of the erasure against its
    controls; `rank` [split, site] and `removed` [split, condition, site] (see `probes.erase`).
    Erasures are fitted on other instances of the same split.

    Args:
        trained: the trained model.
        n: instances that erasures are fitted on, and instances that are answered.
        draws: draws of each control.
    """
    queries, keys = tasks.raven_last_row(trained.setup.task.n_features)
    layers = [f"blocks.{layer}.attn.hook_pattern" for layer in range(trained.setup.n_layers)]
    sites = {f"layer {number}": layer for number, layer in enumerate(layers)}
    by_split: list[xr.Dataset] = []
    for split in PROBED:
        fit, test = (trained.batch(split, n) for _ in range(2))
        by_feature = [
            probes.erase(
                trained.model,
                fit.inputs,
                fit.latents["rule"][:, feature],
                test.inputs,
                hooks=sites | {"all layers": PATTERNS},
                answer=lambda logits, feature=feature: logits.argmax(-1)[:, feature],
                outcomes={"right": test.targets[:, feature]},
                entries=np.s_[:, :, query, row.tolist()],
                draws=draws,
                seed=trained.seed,
            )
            for feature, (query, row) in enumerate(zip(queries.tolist(), keys, strict=True))
        ]
        both = xr.concat(by_feature, "feature", combine_attrs="drop_conflicts")
        # The bounds of a mean are not the mean of the bounds.
        mean = both[["rate", "effect", "rank", "removed"]].mean("feature", keep_attrs=True)
        mean.attrs.pop("interval")
        by_split.append(mean.sel(outcome="right", drop=True))
    return xr.concat(by_split, xr.Variable("split", list(PROBED)), combine_attrs="drop_conflicts")
