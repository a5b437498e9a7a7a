"""Adapt the path of each task by a few labelled examples."""

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
import xarray as xr
from einops import einsum, rearrange
from jaxtyping import Float, Int
from torch import Tensor
from transformer_lens.utilities.statistics import derive_generator

from probes.capturing.hooking import evaluating
from probes.checking import checked
from probes.oracle.exhaustive import check_exact, choose_paths, evaluate_all_paths
from probes.oracle.halves import Halves, split_tasks
from probes.oracle.paths import BUDGET, MEMORY_LIMIT, PathLoss, PathModel, squared_error
from probes.oracle.problem import PathProblem, read_problem
from probes.statistics.intervals import Interval, bootstrap, interval_variables


@checked
def adapt_paths(
    model: PathModel,
    inputs: Float[Tensor, "example ..."],
    targets: Float[Tensor, "example ..."],
    *,
    routed: Int[Tensor, "example layer"],
    task: Int[Tensor, " example"],
    examples: Sequence[int] = (1, 4, 16, 64),
    repeats: int = 20,
    loss: PathLoss = squared_error,
    budget: int = BUDGET,
    memory_limit: int = MEMORY_LIMIT,
    resamples: int = 1000,
    seed: int = 0,
) -> xr.Dataset:
    """Choose the path of each task by a few labelled examples, and score it on others.

    Only the path is adapted, not the weights: to the path of M^L with the lowest loss on the
    labelled examples (the first in case of a tie). These are drawn from one half of a task's
    examples and the loss is measured on the other half. The halves are those of `score_paths` with
    the same seed, whose "task" path is `oracle` here.

    Args:
        model, inputs, targets, routed, loss, memory_limit: as in `search_paths`.
        task: task of each example.
        examples: numbers of labelled examples per task, ascending, at most half of its examples.
        repeats: number of draws of labelled examples; within a repeat smaller sets are subsets of
            larger ones.
        budget: maximum of module applications per example; all paths are computed.
        resamples: number of bootstrap resamples.
        seed: seed of the halves, the draws and the bootstrap.

    Returns:
        Coordinate `examples`. All are means over the scored examples of all tasks:

        - `adapted` [examples]: loss of the adapted paths, also averaged over repeats;
          `adapted_repeat` [examples, repeat]: the same per repeat.
        - `routed`, `oracle`: losses of the router's path, and of the path chosen on the whole
          half of each task.
        - `gap_closed` [examples]: (routed - adapted) / (routed - oracle): 0 if adapted paths are
          as good as the router's, 1 if as good as the oracle's, negative if worse than the
          router's. NaN where routed - oracle is not positive.

        All but `adapted_repeat` have `_low` and `_high`: 95% intervals over scored examples and
        repeats, resampled together (percentile bootstrap). Those of `adapted` and `gap_closed` are
        NaN with a single repeat; that of `gap_closed` also if routed - oracle is not positive in
        some resample.

    Raises:
        TypeError: `routed` or `task` does not hold integers.
        ValueError: as in `search_paths`; `examples` are not ascending or more than half of a
            task's examples; a number is below 1; or the memory limit is too small for the losses
            of all paths.

    Example:
        >>> adapt_paths(model, inputs, targets, routed=routed, task=task)["gap_closed"]
    """
    for name, value in (("repeats", repeats), ("resamples", resamples)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    numbers = list(examples)
    if not numbers or numbers[0] < 1 or numbers != sorted(set(numbers)):
        raise ValueError(f"examples must be ascending numbers of at least 1, got {examples!r:.200}")
    check_exact(model, budget)
    needed = 8 * (len(numbers) * repeats + 1) * model.n_modules**model.n_layers
    if needed > memory_limit:
        raise ValueError(
            f"memory_limit must be at least {needed} bytes for all paths' losses in {repeats} "
            f"repeats, got {memory_limit}"
        )
    with evaluating(model):
        problem = read_problem(model, inputs, targets, routed, loss, memory_limit)
        tasks = split_tasks(task, len(inputs), seed, inputs.device)
        for halves in tasks:
            if len(halves.choosing) < numbers[-1]:
                raise ValueError(
                    f"examples must be at most half of those of each task, {len(halves.choosing)} "
                    f"for task {halves.task}, got {numbers[-1]}"
                )
        losses = [_adapt(problem, halves, numbers, repeats, seed) for halves in tasks]
    return _dataset(torch.cat(losses), numbers, repeats, resamples, seed)


def _adapt(
    problem: PathProblem, halves: Halves, numbers: list[int], repeats: int, seed: int
) -> Float[Tensor, "example choice"]:
    """Compute losses of the scored examples on the router's, the oracle's and adapted paths."""
    choosing = len(halves.choosing)
    generator = derive_generator(seed, "labelled", halves.task)
    # Rank of each example in a random order per repeat; the first ones are labelled.
    rank = torch.rand(repeats, choosing, generator=generator).argsort(dim=1).argsort(dim=1)
    is_labelled = rank[None] < torch.tensor(numbers)[:, None, None]
    labelled = torch.cat([torch.ones(1, choosing), is_labelled.flatten(0, 1)])
    chosen = choose_paths(problem.take(halves.choosing), labelled)
    all_paths = evaluate_all_paths(problem.take(halves.scored), chosen)
    return torch.cat([all_paths.completed[:, -1:], all_paths.marked], dim=1).cpu()


def _dataset(
    losses: Float[Tensor, "example choice"],
    numbers: list[int],
    repeats: int,
    resamples: int,
    seed: int,
) -> xr.Dataset:
    examples = len(losses)

    def means(weights: Float[np.ndarray, "draw example"]) -> Float[np.ndarray, "draw choice"]:
        return (weights / examples) @ losses.numpy()

    def adapt(
        weights: Float[np.ndarray, "draw example"], repeat_weights: Float[np.ndarray, "draw repeat"]
    ) -> Float[np.ndarray, "draw n score"]:
        scored = means(weights)
        by_repeat = rearrange(scored[:, 2:], "draw (n repeat) -> draw n repeat", repeat=repeats)
        weighted = repeat_weights / repeats
        adapted = einsum(by_repeat, weighted, "draw n repeat, draw repeat -> draw n")
        routed, oracle = scored[:, :1], scored[:, 1:2]
        gap = np.where(routed > oracle, routed - oracle, np.nan)
        return np.stack([adapted, (routed - adapted) / gap], axis=2)

    interval_of = partial(bootstrap, resamples=resamples, seed=seed)
    plain = interval_of(means, (examples,))
    # Only gap_closed can be undefined.
    adapted = interval_of(adapt, (examples, repeats), skipna=False)
    result = xr.Dataset(
        coords={"examples": numbers},
        attrs={
            "long_name": "paths chosen by a few labelled examples of a task",
            "seed": seed,
            "repeats": repeats,
            "interval": "percentile bootstrap over examples and repeats, 95%, "
            f"{resamples} resamples",
        },
    )
    result["examples"].attrs["long_name"] = "labelled examples of a task"
    rows = {
        "adapted": (adapted, 0, "mean loss of the adapted paths"),
        "routed": (plain, 0, "mean loss of the router's path"),
        "oracle": (plain, 1, "mean loss of the tasks' best paths"),
        "gap_closed": (adapted, 1, "share of the gap between router and oracle that is closed"),
    }
    for name, (interval, column, long_name) in rows.items():
        dims = ("examples",) if interval is adapted else ()
        score = Interval(*(values[..., column] for values in interval))
        result.update(interval_variables(name, score, dims, long_name=long_name))
    by_repeat = plain.estimate[2:].reshape(len(numbers), repeats)
    result["adapted_repeat"] = (
        ("examples", "repeat"),
        by_repeat,
        {"long_name": "mean loss of the adapted paths in each repeat"},
    )
    return result
