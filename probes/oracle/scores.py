"""How good are the modules, apart from the router? The loss of the best path, and its null."""

from dataclasses import dataclass

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float, Int
from torch import Tensor

from probes.capturing.hooking import evaluating
from probes.oracle.paths import (
    BUDGET,
    MEMORY_LIMIT,
    Halves,
    PathLoss,
    PathModel,
    PathProblem,
    as_hooked,
    check_exact,
    choose_paths,
    look_at_all_paths,
    paths_of,
    read_problem,
    split_tasks,
    squared_error,
)
from probes.statistics.intervals import Interval, bootstrap_ratio, interval_variables

PATHS = ("sample", "task", "routed", "mean")


def score_paths(
    model: PathModel,
    inputs: Float[Tensor, "example ..."],
    targets: Float[Tensor, "example ..."],
    *,
    routed: Int[Tensor, "example layer"],
    task: Int[Tensor, " example"],
    untrained: PathModel,
    loss: PathLoss = squared_error,
    budget: int = BUDGET,
    memory_limit: int = MEMORY_LIMIT,
    resamples: int = 1000,
    seed: int = 0,
) -> xr.Dataset:
    """Score the best paths of samples and tasks beside the router's, with untrained modules' too.

    Ostapenko et al. 2022, "Attention for Compositional Modularity", section on test-time oracles.
    Their oracle takes the best path of each sample, which is optimistic: the least of M^L draws. A
    task's path is chosen on one half of its examples and scored on the other, which is honest. The
    control, modules that were never trained, tells how good the best of as many draws is anyway.

    All is scored on the same examples, the other half of every task; each partial result of all
    paths is computed once.

    Args:
        model, inputs, targets, routed, loss, memory_limit: as in `search_paths`.
        task: what each example's task is, at least 2 examples of each.
        untrained: the control, of as many layers and modules. Its "routed" path is `routed` too.
        budget: module applications for each example, at most: all paths are looked at.
        resamples: of the bootstrap.
        seed: of the halves and the bootstrap.

    Returns:
        Coordinates `control` ("trained", "untrained"), `path` ("sample", the best of each example;
        "task", one for all of a task; "routed", the router's; "mean", the mean of all paths),
        `task` (ids), `layer`.

        - `loss` [control, path], `regret` [control, layer] (as in `search_paths`), with `_low` and
          `_high`: means over scored examples, and their 95% intervals over these examples
          (percentile bootstrap; halves and chosen paths are held fixed).
        - `task_loss` [control, path, task]: mean loss of the scored examples of a task.
        - `task_path` [control, task, layer]: the path chosen for a task.
        - `scored` [task]: how many examples are scored.

    Raises:
        TypeError: `routed` or `task` does not hold integers.
        ValueError: as in `search_paths`; a task with 1 example, an untrained model of another size.
    """
    if resamples < 1:
        raise ValueError(f"resamples must be at least 1, got {resamples}")
    sizes = [(one.n_layers, one.n_modules) for one in (model, untrained)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"untrained must have {sizes[0][0]} layers and {sizes[0][1]} modules as model has, "
            f"got {sizes[1][0]} and {sizes[1][1]}"
        )
    check_exact(model, budget)
    scores: list[list[_TaskScores]] = []
    for one in (model, untrained):
        with evaluating(as_hooked(one)):
            problem = read_problem(one, inputs, targets, routed, loss, memory_limit)
            tasks = split_tasks(task, len(inputs), seed, inputs.device)
            scores.append([_score(problem, halves) for halves in tasks])
    values = torch.stack([torch.cat([one.values for one in each]) for each in scores])
    summary = bootstrap_ratio(values.transpose(0, 1).numpy(), resamples=resamples, seed=seed)
    result = xr.Dataset(
        coords={
            "control": ["trained", "untrained"],
            "path": list(PATHS),
            "task": [halves.task for halves in tasks],
            "layer": np.arange(model.n_layers),
        },
        attrs={
            "long_name": "losses of the best paths through the modules",
            "seed": seed,
            "interval": f"percentile bootstrap over examples, 95%, {resamples} resamples",
        },
    )
    about = {"loss": ("path", "mean loss"), "regret": ("layer", "mean regret of the router")}
    parts = [np.split(values, [len(PATHS)], axis=1) for values in summary]
    for (name, (dim, text)), part in zip(about.items(), zip(*parts, strict=True), strict=True):
        of_part = interval_variables(name, Interval(*part), ("control", dim), long_name=text)
        result.update(of_part)
    by_task = [[one.values[:, : len(PATHS)].mean(dim=0) for one in each] for each in scores]
    result["task_loss"] = (
        ("control", "path", "task"),
        torch.stack([torch.stack(each, dim=1) for each in by_task]).numpy(),
        {"long_name": "mean loss of the task"},
    )
    result["task_path"] = (
        ("control", "task", "layer"),
        torch.stack([torch.stack([one.path for one in each]) for each in scores]).numpy(),
        {"long_name": "module chosen for the task"},
    )
    scored = [len(halves.scored) for halves in tasks]
    result["scored"] = ("task", scored, {"long_name": "examples scored"})
    return result


@dataclass(frozen=True)
class _TaskScores:
    """What is known of a task: for each scored example the losses of PATHS and the regrets; the
    path that was chosen."""

    values: Float[Tensor, "example score"]
    path: Int[Tensor, " layer"]


def _score(problem: PathProblem, halves: Halves) -> _TaskScores:
    choosing = problem.take(halves.choosing)
    chosen = choose_paths(choosing, torch.ones(1, len(choosing)))
    seen = look_at_all_paths(problem.take(halves.scored), chosen)
    losses = [seen.completed[:, :1], seen.marked, seen.completed[:, -1:], seen.mean[:, None]]
    values = torch.cat([*losses, seen.completed.diff(dim=1)], dim=1)
    path = paths_of(chosen[0], problem.n_layers, problem.n_modules)
    return _TaskScores(values.cpu(), path.cpu())
