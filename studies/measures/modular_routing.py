"""Measures of modular networks on equations, and readings of them.

What a router chooses, by operation and by combination of operations; and the losses of the best
paths, which no router chose.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import xarray as xr

import probes
from studies.engine import Reading, Trained, metric, read
from studies.engine.readings import conditions_of, unmeasured
from studies.setups.equations import MODULAR

# Measures


def measure_specialization(trained: Trained, n: int = 5000) -> xr.Dataset | None:
    """Specialization and collapse, on training and on held-out combinations.

    Args:
        trained: the trained model.
        n: largest number of examples of each split.
    """
    setup = trained.setup
    if setup.model not in MODULAR:
        return None
    return probes.measure_specialization(
        trained.model,
        {split: trained.batches(split, n) for split in setup.splits},
        # A single layer performs a whole combination of operations.
        operation="operator" if setup.n_layers > 1 else "task",
        operations=setup.operations,
        seed=trained.seed,
    ).rename(group="split")


def measure_paths(
    trained: Trained,
    n: int = 5000,
    examples: tuple[int, ...] = (1, 4, 16, 64),
    memory: int = 2**28,
) -> xr.Dataset | None:
    """Losses of the best paths, apart from the router, and of paths chosen by a few labels.

    Args:
        trained: the trained model and its untrained control.
        n: largest number of examples of each split.
        examples: numbers of labelled examples of a held-out combination that choose its path; at
            most half of its examples.
        memory: memory limit of the search, in bytes.
    """
    if trained.setup.model not in MODULAR:
        return None
    losses = probes.measure_paths(
        trained.model,
        trained.untrained,
        {split: trained.batch(split, n) for split in trained.setup.splits},
        adapted="ood",
        examples=examples,
        memory_limit=memory,
        seed=trained.seed,
    )
    names = [trained.task.task_names[number] for number in losses["task"].to_numpy()]
    return losses.rename(group="split").assign_coords(task=names)


def measure_combinations(trained: Trained, n: int = 5000, kept: int = 10) -> xr.Dataset | None:
    """Which modules the examples of each combination of operators go to.

    Args:
        trained: the trained model.
        n: largest number of examples of each split.
        kept: combinations of each split whose modules are kept.

    Returns:
        `digits` [split, layer]: the entropy of the module, given the combination, over log M. The
        operators are then fixed, so that 0 says that the digits have no effect on the choice.
        Entropies of few examples are biased downwards.
        `activation` [split, combination, layer, module]: shares of the first `kept` combinations,
        NaN if there are fewer, and their `name` [split, combination].
    """
    from scipy.special import entr

    if trained.setup.model not in MODULAR:
        return None
    choice = probes.Quantity("layers.*.hook_module_choice", ("example", "module"))
    parts = []
    for split in trained.setup.splits:
        data = probes.capture(trained.model, trained.batches(split, n), {"choice": choice})
        shares = data["choice"].groupby(data["task"]).mean()
        shares = shares.transpose("task", "layer", "module")
        first = shares[:kept].pad(task=(0, max(0, kept - len(shares))))
        names = [trained.task.task_names[number] for number in shares["task"].to_numpy()[:kept]]
        spread = entr(shares).sum("module").mean("task") / np.log(max(2, shares.sizes["module"]))
        part = xr.Dataset({"digits": spread, "activation": first.drop_vars("task")})
        part["name"] = ("task", np.array([*names, *[""] * (kept - len(names))], dtype=object))
        parts.append(part.rename(task="combination"))
    joined = xr.concat(parts, xr.Variable("split", list(trained.setup.splits)))
    joined = joined.assign_coords(
        layer=joined["layer"].astype(str),
        combination=("combination", range(kept), {"long_name": "number of the combination"}),
        module=("module", range(joined.sizes["module"]), {"long_name": "module"}),
    )
    long_names = {
        "digits": "entropy of the module, given the operators, over log M",
        "activation": "share of the combination that the module gets",
        "name": "operators of the combination",
    }
    for name, long_name in long_names.items():
        joined[name].attrs = {"long_name": long_name, "units": "1"}
    return joined


def measure_gaps(trained: Trained, n: int = 5000) -> xr.Dataset | None:
    """Where the loss of held-out combinations comes from: the path, the read-out or the modules.

    One half of the examples of a combination chooses what is replaced, the other half is scored.

    Args:
        trained: the trained model.
        n: largest number of examples of `ood`.

    Returns:
        `loss` [task, stage]: the mean squared error `routed`, as the router decides; on the best
        `path` for the whole combination; and there after a `read-out` of its answer, the affine map
        with the least squared error. What is left is due to the modules.
    """
    if trained.setup.model not in MODULAR or "ood" not in trained.setup.splits:
        return None
    batch = trained.batch("ood", n)
    inputs, targets = batch.inputs.split(256), batch.targets[:, 0].double()
    with torch.inference_mode():
        parts = [(trained.model(x)[:, 0], trained.model.all_paths(x)[0]) for x in inputs]
    # On a CPU, which has the solver for least squares of any rank.
    routed, answers = (torch.cat(part).double().cpu() for part in zip(*parts, strict=True))
    targets, tasks = targets.cpu(), batch.latents["task"].cpu()
    rows = []
    for task in tasks.unique():
        # Examples of a task are in random order.
        choosing, scored = (tasks == task).nonzero()[:, 0].tensor_split(2)
        error = (answers[choosing] - targets[choosing, None]).square().mean(0)
        on_path = answers[:, error.argmin()]
        features = torch.stack([on_path, torch.ones_like(on_path)], dim=1)
        fit = torch.linalg.lstsq(features[choosing], targets[choosing, None], driver="gelsd")
        stages = torch.stack([routed, on_path, (features @ fit.solution)[:, 0]], dim=1)
        rows.append((stages[scored] - targets[scored, None]).square().mean(0))
    names = [trained.task.task_names[number] for number in tasks.unique()]
    return xr.Dataset(
        {
            "loss": (
                ("task", "stage"),
                torch.stack(rows).numpy(),
                {"long_name": "mean squared error with this part replaced by the best one"},
            )
        },
        {"task": names, "stage": list(STAGES)},
    )


# Readings

STAGES = ("routed", "path", "read-out")
STAGE = {stage: read("gaps", "loss", mean=("task",), stage=stage) for stage in STAGES}
SHARES = {
    "path": (STAGE["routed"] - STAGE["path"]) / STAGE["routed"],
    "read-out": (STAGE["path"] - STAGE["read-out"]) / STAGE["routed"],
    "modules": STAGE["read-out"] / STAGE["routed"],
}
"""The shares of the loss on `ood` that the path, the read-out and the modules explain."""
routing = partial(read, "specialization", split="id", control="observed", layer="pooled")
SCORES = {name: routing(name) for name in ("collapse", "collapse_attainable")}
COLLAPSE = SCORES["collapse"]


def _special(result: xr.DataTree) -> np.ndarray:
    try:
        scores = result["specialization"]["specialization"].sel(split="id", control="observed")
    except KeyError:
        return unmeasured(result)
    return scores.drop_sel(layer="pooled").mean("layer").to_numpy()


# Within layers: nothing tells a router to choose the same module for an operation in both.
SPECIAL = Reading("specialization/specialization (id, observed, mean over layers)", _special)
DIGITS = read("combinations", "digits", mean=("layer",), split="id")
path_loss = partial(read, "paths", "loss", split="ood")
PATHS = ("sample", "task", "routed", "mean")
TRAINED = {path: path_loss(control="trained", path=path) for path in PATHS}
NULL = {path: path_loss(control="untrained", path=path) for path in PATHS}
ID, OOD = metric("loss", "id"), metric("loss", "ood")
CONSTANT_OOD = metric("loss_constant", "ood")

METHOD = ("model", "objective", "selection_bottleneck")
"""The coordinates that name a method; others are about task, sizes and seed."""


def over_methods(function: Callable[..., Any], *readings: Reading) -> Reading:
    """A function of the values of all methods that share seed and other coordinates.

    Each cell has the value of its group. Of tuned settings, the chosen ones count.

    Args:
        function: takes an array [method] for each reading; NaN is left out.
        readings: the readings, for example `OOD.among(["encoder"])`.

    Example:
        `over_methods(min, OOD.among(["encoder", "concatenation"]))`
    """

    def values(result: xr.DataTree) -> np.ndarray:
        cells, coordinates = result["scores"].coords, json.loads(result.attrs["axes"])
        apart = (*METHOD, *coordinates["tuned"])
        names = [name for name in coordinates["coordinates"] if name not in apart]
        keys = list(zip(*(cells[name].to_numpy().tolist() for name in names), strict=True))
        columns = np.stack([reading.values(result) for reading in readings])
        is_measured = np.isfinite(columns).all(0) & (result["scores"]["chosen"].to_numpy() == 1)
        found = np.full(len(keys), np.nan)
        for key in dict.fromkeys(keys):
            group = np.array([other == key for other in keys])
            if (group & is_measured).any():
                found[group] = function(*columns[:, group & is_measured])
        return found

    return Reading(f"{readings[0].label}, over methods", values)


def without_outliers(reading: Reading, level: float = 0.05) -> Reading:
    """A reading without the outlying cells of each condition, as in the paper's Figure 4.

    Grubbs' two-sided test, repeated until no cell is an outlier; the paper does not give its level.
    """

    def values(result: xr.DataTree) -> np.ndarray:
        found = reading.values(result).copy()
        for condition in conditions_of(result):
            while (worst := _outlier(found[condition.cells], level)) is not None:
                found[condition.cells[worst]] = np.nan
        return found

    return Reading(f"{reading.label}, without outliers", values)


def _outlier(values: np.ndarray, level: float) -> int | None:
    """The index of the value that Grubbs' test calls an outlier; None if there is none."""
    from scipy.stats import t

    n = int(np.isfinite(values).sum())
    if n < 3 or not (spread := np.nanstd(values, ddof=1)) > 0:
        return None
    distances = np.abs(values - np.nanmean(values)) / spread
    quantile = t.ppf(1 - level / (2 * n), n - 2)
    critical = (n - 1) / np.sqrt(n) * np.sqrt(quantile**2 / (n - 2 + quantile**2))
    worst = int(np.nanargmax(distances))
    return worst if distances[worst] > critical else None
