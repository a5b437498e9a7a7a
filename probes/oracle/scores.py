"""Scores of the best paths through the modules, with a control of untrained modules."""

from dataclasses import dataclass

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float, Int
from torch import Tensor

from probes.capturing.hooking import evaluating
from probes.checking import checked
from probes.oracle.exhaustive import check_exact, choose_paths, evaluate_all_paths
from probes.oracle.halves import Halves, split_tasks
from probes.oracle.paths import BUDGET, MEMORY_LIMIT, PathLoss, PathModel, paths_of, squared_error
from probes.oracle.problem import PathProblem, read_problem
from probes.statistics.intervals import Interval, bootstrap_ratio, interval_variables

PATHS = ("sample", "task", "routed", "mean")


@checked
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
    """Score the best paths of samples and tasks, the router's path, and an untrained control.

    Ostapenko et al. 2022, "Attention for Compositional Modularity", section on test-time oracles.
    Their oracle takes the best path of each sample, which is optimistic: the minimum over M^L
    paths. The path of a task is chosen on one half of its examples and scored on the other, which
    is unbiased. The control, untrained modules, shows how good the best of as many paths is by
    chance.

    All scores are on the same examples, the second half of each task; each partial result is
    computed once.

    Args:
        model, inputs, targets, routed, loss, memory_limit: as in `search_paths`.
        task: task of each example, at least 2 examples per task.
        untrained: the control, with as many layers and modules. Its "routed" path is `routed` too.
        budget: maximum of module applications per example; all paths are computed.
        resamples: number of bootstrap resamples.
        seed: seed of the halves and the bootstrap.

    Returns:
        Coordinates `control` ("trained", "untrained"), `path` ("sample", the best of each example;
        "task", one for all of a task; "routed", the router's; "mean", the mean of all paths),
        `task` (ids), `layer`.

        - `loss` [control, path], `regret` [control, layer] (as in `search_paths`), with `_low` and
          `_high`: means over scored examples, and their 95% intervals over these examples
          (percentile bootstrap; halves and chosen paths are held fixed).
        - `task_loss` [control, path, task]: mean loss of the scored examples of a task.
        - `task_path` [control, task, layer]: the path chosen for a task.
        - `scored` [task]: number of scored examples.

    Raises:
        TypeError: `routed` or `task` does not hold integers.
        ValueError: as in `search_paths`; a task has 1 example, or `untrained` has another size.

    Example:
        >>> score_paths(model, inputs, targets, routed=routed, task=task, untrained=other)["loss"]
    """
    if resamples < 1:
        raise ValueError(f"resamples must be at least 1, got {resamples}")
    sizes = [(network.n_layers, network.n_modules) for network in (model, untrained)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"untrained must have {sizes[0][0]} layers and {sizes[0][1]} modules as model has, "
            f"got {sizes[1][0]} and {sizes[1][1]}"
        )
    check_exact(model, budget)
    task_scores: list[list[_TaskScores]] = []
    for network in (model, untrained):
        with evaluating(network):
            problem = read_problem(network, inputs, targets, routed, loss, memory_limit)
            tasks = split_tasks(task, len(inputs), seed, inputs.device)
            task_scores.append([_score(problem, halves) for halves in tasks])
    values = torch.stack(
        [torch.cat([task_score.values for task_score in per_task]) for per_task in task_scores]
    )
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
    tables = {"loss": ("path", "mean loss"), "regret": ("layer", "mean regret of the router")}
    score_groups = [np.split(values, [len(PATHS)], axis=1) for values in summary]
    for (name, (dim, long_name)), score in zip(
        tables.items(), zip(*score_groups, strict=True), strict=True
    ):
        variables = interval_variables(
            name, Interval(*score), ("control", dim), long_name=long_name
        )
        result.update(variables)
    by_task = [
        [task_score.values[:, : len(PATHS)].mean(dim=0) for task_score in per_task]
        for per_task in task_scores
    ]
    result["task_loss"] = (
        ("control", "path", "task"),
        torch.stack([torch.stack(per_task, dim=1) for per_task in by_task]).numpy(),
        {"long_name": "mean loss of the task"},
    )
    result["task_path"] = (
        ("control", "task", "layer"),
        torch.stack(
            [torch.stack([task_score.path for task_score in per_task]) for per_task in task_scores]
        ).numpy(),
        {"long_name": "module chosen for the task"},
    )
    scored = [len(halves.scored) for halves in tasks]
    result["scored"] = ("task", scored, {"long_name": "examples scored"})
    return result


@dataclass(frozen=True)
class _TaskScores:
    """Scores of a task: losses of PATHS and regrets of each scored example, and the chosen path."""

    values: Float[Tensor, "example score"]
    path: Int[Tensor, " layer"]


def _score(problem: PathProblem, halves: Halves) -> _TaskScores:
    choosing = problem.take(halves.choosing)
    chosen = choose_paths(choosing, torch.ones(1, len(choosing)))
    all_paths = evaluate_all_paths(problem.take(halves.scored), chosen)
    losses = [
        all_paths.completed[:, :1],
        all_paths.marked,
        all_paths.completed[:, -1:],
        all_paths.mean[:, None],
    ]
    values = torch.cat([*losses, all_paths.completed.diff(dim=1)], dim=1)
    path = paths_of(chosen[0], problem.n_layers, problem.n_modules)
    return _TaskScores(values.cpu(), path.cpu())
