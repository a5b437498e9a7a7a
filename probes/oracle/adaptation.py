"""How many labelled examples of an unseen task does it take to find its path?"""

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
    read_problem,
    split_tasks,
    squared_error,
)
from probes.statistics.intervals import Interval, bootstrap, interval_variables


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

    The weights stay as they are: only the path is adapted, to the one of M^L with the least loss on
    the labelled examples, the first of equals. These are drawn from one half of a task's examples,
    the loss is that of the other half: the same halves as in `score_paths` with the same seed,
    whose "task" path is `oracle` here.

    Args:
        model, inputs, targets, routed, loss, memory_limit: as in `search_paths`.
        task: what each example's task is.
        examples: how many labelled ones of each task, in ascending order, at most half of those
            that it has.
        repeats: draws of the labelled examples; in one repeat the few are among the many.
        budget: module applications for each example, at most: all paths are looked at.
        resamples: of the bootstrap.
        seed: of the halves, the draws and the bootstrap.

    Returns:
        Coordinate `examples`. All are means over the scored examples of all tasks:

        - `adapted` [examples]: loss of the adapted paths, mean over repeats too; `adapted_repeat`
          [examples, repeat]: of each.
        - `routed`, `oracle`: losses of the router's path, and of each task's path that is chosen
          on its whole half.
        - `gap_closed` [examples]: (routed - adapted) / (routed - oracle): 0 if adapted paths are
          not better than the router's, 1 if as good as the oracle's; below 0 if worse than the
          router's. NaN where routed - oracle is not positive.

        All but `adapted_repeat` with `_low` and `_high`: the 95% interval over scored examples and
        repeats, which are resampled together (percentile bootstrap); NaN of
        `adapted` and `gap_closed` with a single repeat. That of `gap_closed` is also NaN where
        routed - oracle is not positive in every resample.

    Raises:
        TypeError: `routed` or `task` does not hold integers.
        ValueError: as in `search_paths`; examples that are not ascending, or more than half of a
            task's; a number below 1; a memory limit too small for the losses of all paths.
    """
    for name, number in (("repeats", repeats), ("resamples", resamples)):
        if number < 1:
            raise ValueError(f"{name} must be at least 1, got {number}")
    wanted = list(examples)
    if not wanted or wanted[0] < 1 or wanted != sorted(set(wanted)):
        raise ValueError(f"examples must be ascending numbers of at least 1, got {examples}")
    check_exact(model, budget)
    table = 8 * (len(wanted) * repeats + 1) * model.n_modules**model.n_layers
    if table > memory_limit:
        raise ValueError(
            f"memory_limit must be at least {table} bytes for all paths' losses in {repeats} "
            f"repeats, got {memory_limit}"
        )
    with evaluating(as_hooked(model)):
        problem = read_problem(model, inputs, targets, routed, loss, memory_limit)
        tasks = split_tasks(task, len(inputs), seed, inputs.device)
        for halves in tasks:
            if len(halves.choosing) < wanted[-1]:
                raise ValueError(
                    f"examples must be at most half of those of each task, got {wanted[-1]}, but "
                    f"task {halves.task} has {len(halves.choosing)} to choose from"
                )
        scored = [_adapt(problem, halves, wanted, repeats, seed) for halves in tasks]
    return _dataset(torch.cat(scored), wanted, repeats, resamples, seed)


def _adapt(
    problem: PathProblem, halves: Halves, wanted: list[int], repeats: int, seed: int
) -> Float[Tensor, "example choice"]:
    """Losses of the scored examples: router's path, oracle's, and the adapted ones'."""
    choosing = len(halves.choosing)
    generator = derive_generator(seed, "labelled", halves.task)
    # Each repeat's order of the examples, of which the first few are labelled.
    place = torch.rand(repeats, choosing, generator=generator).argsort(dim=1).argsort(dim=1)
    few = place[None] < torch.tensor(wanted)[:, None, None]
    labelled = torch.cat([torch.ones(1, choosing), few.flatten(0, 1)])
    chosen = choose_paths(problem.take(halves.choosing), labelled)
    seen = look_at_all_paths(problem.take(halves.scored), chosen)
    return torch.cat([seen.completed[:, -1:], seen.marked], dim=1).cpu()


def _dataset(
    losses: Float[Tensor, "example choice"],
    wanted: list[int],
    repeats: int,
    resamples: int,
    seed: int,
) -> xr.Dataset:
    examples = len(losses)

    def means(weights: Float[np.ndarray, "draw example"]) -> Float[np.ndarray, "draw choice"]:
        return (weights / examples) @ losses.numpy()

    def adapt(
        weights: Float[np.ndarray, "draw example"], of_repeats: Float[np.ndarray, "draw repeat"]
    ) -> Float[np.ndarray, "draw n score"]:
        scored = means(weights)
        by_repeat = rearrange(scored[:, 2:], "draw (n repeat) -> draw n repeat", repeat=repeats)
        weighted = of_repeats / repeats
        adapted = einsum(by_repeat, weighted, "draw n repeat, draw repeat -> draw n")
        routed, oracle = scored[:, :1], scored[:, 1:2]
        gap = np.where(routed > oracle, routed - oracle, np.nan)
        return np.stack([adapted, (routed - adapted) / gap], axis=2)

    interval_of = partial(bootstrap, resamples=resamples, seed=seed)
    kept = interval_of(means, (examples,))
    # Only what closes a gap is ever undefined.
    adapted = interval_of(adapt, (examples, repeats), skipna=False)
    result = xr.Dataset(
        coords={"examples": wanted},
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
        "routed": (kept, 0, "mean loss of the router's path"),
        "oracle": (kept, 1, "mean loss of the tasks' best paths"),
        "gap_closed": (adapted, 1, "share of the gap between router and oracle that is closed"),
    }
    for name, (interval, column, about) in rows.items():
        dims = ("examples",) if interval is adapted else ()
        part = Interval(*(values[..., column] for values in interval))
        result.update(interval_variables(name, part, dims, long_name=about))
    by_repeat = kept.estimate[2:].reshape(len(wanted), repeats)
    result["adapted_repeat"] = (
        ("examples", "repeat"),
        by_repeat,
        {"long_name": "mean loss of the adapted paths in each repeat"},
    )
    return result
