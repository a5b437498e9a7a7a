"""Test-time oracle: search the best path through the modules of a network."""

from dataclasses import replace
from functools import partial
from typing import Literal, get_args

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float, Int
from torch import Tensor

from probes.capturing.hooking import evaluating
from probes.checking import checked
from probes.oracle.exhaustive import check_exact, evaluate_all_paths
from probes.oracle.heuristics import (
    Search,
    Solution,
    complete_prefixes,
    search_beam,
    search_best_first,
)
from probes.oracle.paths import (
    BUDGET,
    MEMORY_LIMIT,
    PathBound,
    PathLoss,
    PathModel,
    paths_of,
    squared_error,
)
from probes.oracle.problem import PathProblem, example_chunks, read_problem

Method = Literal["exact", "beam", "best_first"]


@checked
def search_paths(
    model: PathModel,
    inputs: Float[Tensor, "example ..."],
    targets: Float[Tensor, "example ..."],
    *,
    routed: Int[Tensor, "example layer"],
    method: Method = "exact",
    loss: PathLoss = squared_error,
    width: int = 32,
    bound: PathBound | None = None,
    budget: int = BUDGET,
    memory_limit: int = MEMORY_LIMIT,
) -> xr.Dataset:
    """Search the path with the lowest loss for each example, and the regret of the router.

    Ostapenko et al. 2022, "Attention for Compositional Modularity", find that the best path at test
    time is excellent out of distribution where the routed one is not. The best path of each example
    is optimistic: it is the minimum over M^L paths, which is low even for untrained modules;
    `score_paths` compares with these.

    Methods, with M modules and L layers:

    - `exact` computes all paths, and each distinct partial result once: M + M^2 + ... + M^L module
      applications per example (not L M^L).
    - `beam` keeps, layer by layer, the `width` partial results with the best completions by the
      router's choices and the best module of the last layer (all of which are computed anyway).
      About width L^2 M^2 / 2 module applications.
    - `best_first` expands the `width` partial results with the smallest lower bound, deepest first
      among ties, until no bound is below the best loss or the budget is spent. Without an
      informative bound it ends only after all paths or at a loss of 0. Each round sorts the queue,
      which is at most as long as the budget.

    The last two start from the router's path, and repeat the search from each of its prefixes to
    get the regret, which takes up to L times as long.

    Args:
        model: network with paths; run in evaluation mode, without gradients, on the device of the
            inputs.
        inputs: inputs of the examples.
        targets: targets of the examples, on the same device.
        routed: modules that the router chose.
        method: see above.
        loss: loss function with finite values of at least 0.
        width: width of `beam` and `best_first`, at least 1.
        bound: for `best_first`: lower bound of the loss of any completion; None for 0.
        budget: maximum of module applications per example: `exact` raises an error if it needs
            more, each search of `best_first` stops there.
        memory_limit: in bytes, for simultaneous computations.

    Returns:
        - `best_loss` [example], `best_path` [example, layer]: the best path found, at least as good
          as the router's.
        - `routed_loss` [example]; `mean_loss` [example] over all paths, NaN unless `exact`.
        - `regret` [example, layer]: the loss of the best completion of the router's choices up to
          this layer, minus that of its choices before, at least 0. Regrets sum to routed_loss -
          best_loss. Where a search is not proven, completions are the best ones found.
        - `proven` [example] (0 or 1): no path is better. `regret_proven` [example, layer] (0 or 1):
          both completions are the best. For `beam`: where no partial result was dropped, or the
          loss is 0.
        - `evaluated` [example]: number of module applications.

    Raises:
        TypeError: `routed` does not hold integers.
        ValueError: the method is unknown, a bound is given for another method, shapes do not match,
            values are not finite or out of range, a loss is negative, or the budget or the memory
            limit is too small.

    Example:
        >>> search_paths(model, inputs, targets, routed=routed, method="beam")["best_loss"]
    """
    if method not in get_args(Method):
        raise ValueError(f"method must be one of {', '.join(get_args(Method))}, got {method!r}")
    if width < 1:
        raise ValueError(f"width must be at least 1, got {width}")
    if bound is not None and method != "best_first":
        raise ValueError(f"method must be 'best_first' if bound is given, got {method!r}")
    with evaluating(model):
        problem = read_problem(model, inputs, targets, routed, loss, memory_limit)
        if method == "exact":
            check_exact(model, budget)
            result = _exact(problem)
        elif method == "beam":
            bytes_per_example = width * model.n_modules**2 * problem.entry_bytes
            result = _heuristic(problem, partial(search_beam, width=width), bytes_per_example)
        else:
            search = partial(search_best_first, width=width, budget=budget, bound=bound)
            halved = replace(problem, memory_limit=memory_limit // 2)
            result = _heuristic(halved, search, _queue_bytes(halved, budget))
    result.attrs = {"long_name": "best paths through the modules", "method": method}
    if method != "exact":
        result.attrs["width"] = width
    return result


def _queue_bytes(problem: PathProblem, budget: int) -> int:
    """Compute the maximum memory of one example's queue.

    Raises:
        ValueError: it exceeds the memory limit.
    """
    n_layers, n_modules = problem.n_layers, problem.n_modules
    nodes = min(budget, sum(n_modules**layer for layer in range(n_layers)))
    # Three numbers and the modules of the path, 8 bytes each; sorting and concatenation copy.
    needed = 3 * nodes * (8 * (3 + n_layers) + problem.state_bytes)
    if needed > problem.memory_limit:
        raise ValueError(
            f"memory_limit must be at least {2 * needed} bytes for best_first with "
            f"budget={budget}, got {2 * problem.memory_limit}; or lower the budget"
        )
    return needed


def _exact(problem: PathProblem) -> xr.Dataset:
    all_paths = evaluate_all_paths(problem, problem.routed.new_zeros(0))
    examples, n_layers, n_modules = len(problem), problem.n_layers, problem.n_modules
    return _dataset(
        all_paths.completed,
        paths_of(all_paths.best, n_layers, n_modules),
        all_paths.mean,
        torch.ones(examples, n_layers + 1),
        torch.full((examples,), sum(n_modules**layer for layer in range(1, n_layers + 1))),
    )


def _heuristic(problem: PathProblem, search: Search, bytes_per_example: int) -> xr.Dataset:
    chunks = [
        complete_prefixes(problem_chunk, search)
        for _, problem_chunk in example_chunks(problem, bytes_per_example)
    ]
    prefixes = [_concatenate(list(prefix)) for prefix in zip(*chunks, strict=True)]
    best = prefixes[0]
    return _dataset(
        torch.stack([solution.loss for solution in prefixes], dim=1),
        best.path,
        torch.full_like(best.loss, torch.nan),
        torch.stack([solution.proven for solution in prefixes], dim=1),
        torch.stack([solution.evaluated for solution in prefixes]).sum(dim=0),
    )


def _concatenate(solutions: list[Solution]) -> Solution:
    return Solution(
        torch.cat([part.loss for part in solutions]),
        torch.cat([part.path for part in solutions]),
        torch.cat([part.proven for part in solutions]),
        torch.cat([part.evaluated for part in solutions]),
    )


def _dataset(
    completed: Float[Tensor, "example prefix"],
    best_path: Int[Tensor, "example layer"],
    mean: Float[Tensor, " example"],
    proven: Tensor,
    evaluated: Int[Tensor, " example"],
) -> xr.Dataset:
    losses = completed.double().cpu().numpy()
    proven_array = proven.cpu().numpy().astype(np.int8)
    per_example, per_layer = ("example",), ("example", "layer")
    variables = {
        "best_loss": (per_example, losses[:, 0], "loss of the best path found"),
        "best_path": (per_layer, best_path.cpu().numpy(), "modules of the best path found"),
        "routed_loss": (per_example, losses[:, -1], "loss of the router's path"),
        "mean_loss": (per_example, mean.double().cpu().numpy(), "mean loss of all paths"),
        "regret": (
            per_layer,
            np.diff(losses, axis=1),
            "loss that the router's choice cannot avoid",
        ),
        "proven": (per_example, proven_array[:, 0], "whether no path is better"),
        "regret_proven": (
            per_layer,
            proven_array[:, :-1] * proven_array[:, 1:],
            "whether the regret is exact",
        ),
        "evaluated": (per_example, evaluated.cpu().numpy(), "module applications"),
    }
    return xr.Dataset(
        {
            name: (dims, values, {"long_name": long_name})
            for name, (dims, values, long_name) in variables.items()
        },
        coords={"layer": np.arange(best_path.shape[1])},
    )
