"""Test-time oracle: which path through the modules of a network would have been the best?"""

from dataclasses import replace
from functools import partial
from typing import Literal, get_args

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float, Int
from torch import Tensor

from probes.capturing.hooking import evaluating
from probes.oracle.heuristics import (
    Found,
    Search,
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
    PathProblem,
    as_hooked,
    check_exact,
    example_chunks,
    look_at_all_paths,
    paths_of,
    read_problem,
    squared_error,
)

Method = Literal["exact", "beam", "best_first"]


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
    """Search, for each example, the path with the least loss, and where the router leaves it.

    Ostapenko et al. 2022, "Attention for Compositional Modularity", find that the best path at test
    time is excellent out of distribution where the routed one is not. The best path of each example
    is optimistic: it is the least of M^L draws, and modules that know nothing have a good one too;
    `score_paths` compares with that.

    Methods, with M modules, L layers:

    - `exact` looks at all paths and computes each distinct partial result once: M + M^2 + ... + M^L
      modules are applied for each example (not L M^L).
    - `beam` keeps, layer by layer, the `width` partial results of which the best answer was seen
      when the router chose in the layers between, and the last layer the best module (its modules
      are all computed anyway). About width L^2 M^2 / 2 modules.
    - `best_first` expands the `width` partial results of least lower bound, of equals the deepest,
      until no bound is below the best loss, or the budget is spent. Without a bound that tells
      something, it ends only where it has seen all paths or a loss of 0. In each round it sorts all
      that it has queued, at most the budget.

    The last two start from the router's path, and search once more from each of its prefixes, for
    the regret: up to L times as much.

    Args:
        model: what it takes to compute paths; run in evaluation mode, without gradients, on the
            device of the inputs.
        inputs: of the examples.
        targets: of the examples, on the same device.
        routed: the modules that the router chose.
        method: see above.
        loss: finite and at least 0.
        width: of `beam` and `best_first`, at least 1.
        bound: of `best_first`: what no completion's loss is below; None for 0.
        budget: module applications for each example, at most: `exact` refuses where it needs more,
            each search of `best_first` stops.
        memory_limit: in bytes, for what is computed at once.

    Returns:
        - `best_loss` [example], `best_path` [example, layer]: the best path found, at least as good
          as the router's.
        - `routed_loss` [example]; `mean_loss` [example], over all paths: NaN unless `exact`.
        - `regret` [example, layer]: the loss of the best completion of the router's choices up to
          this layer, minus that of its choices before, at least 0. They sum to
          routed_loss - best_loss. Where a search is not proven, it is the best completion found.
        - `proven` [example] (0 or 1): no path is better. `regret_proven` [example, layer] (0 or 1):
          both completions are the best. Of `beam` where no partial result was dropped, or the loss
          is 0.
        - `evaluated` [example]: modules applied.

    Raises:
        TypeError: `routed` does not hold integers.
        ValueError: an unknown method, a bound for another one, shapes that do not fit, values that
            are not finite or out of range, a loss below 0, a budget or memory limit that is too
            small.
    """
    if method not in get_args(Method):
        raise ValueError(f"method must be one of {', '.join(get_args(Method))}, got {method!r}")
    if width < 1:
        raise ValueError(f"width must be at least 1, got {width}")
    if bound is not None and method != "best_first":
        raise ValueError(f"bound goes with method 'best_first', got method {method!r}")
    with evaluating(as_hooked(model)):
        problem = read_problem(model, inputs, targets, routed, loss, memory_limit)
        if method == "exact":
            check_exact(model, budget)
            result = _exact(problem)
        elif method == "beam":
            each = width * model.n_modules**2 * problem.entry_bytes
            result = _heuristic(problem, partial(search_beam, width=width), each)
        else:
            search = partial(search_best_first, width=width, budget=budget, bound=bound)
            half = replace(problem, memory_limit=memory_limit // 2)
            result = _heuristic(half, search, _queue_bytes(half, budget))
    result.attrs = {"long_name": "best paths through the modules", "method": method}
    if method != "exact":
        result.attrs["width"] = width
    return result


def _queue_bytes(problem: PathProblem, budget: int) -> int:
    """Memory that the queue of one example takes, at most.

    Raises:
        ValueError: more than there is.
    """
    n_layers, n_modules = problem.n_layers, problem.n_modules
    nodes = min(budget, sum(n_modules**layer for layer in range(n_layers)))
    # Each of a node's three numbers and its path's modules has 8 bytes; sorting and adding copy.
    needed = 3 * nodes * (8 * (3 + n_layers) + problem.state_bytes)
    if needed > problem.memory_limit:
        raise ValueError(
            f"memory_limit must be at least {2 * needed} bytes for best_first with "
            f"budget={budget}, got {2 * problem.memory_limit}; or lower the budget"
        )
    return needed


def _exact(problem: PathProblem) -> xr.Dataset:
    seen = look_at_all_paths(problem, problem.routed.new_zeros(0))
    examples, n_layers, n_modules = len(problem), problem.n_layers, problem.n_modules
    return _dataset(
        seen.completed,
        paths_of(seen.best, n_layers, n_modules),
        seen.mean,
        torch.ones(examples, n_layers + 1),
        torch.full((examples,), sum(n_modules**layer for layer in range(1, n_layers + 1))),
    )


def _heuristic(problem: PathProblem, search: Search, each: int) -> xr.Dataset:
    chunks = [complete_prefixes(part, search) for _, part in example_chunks(problem, each)]
    prefixes = [_joined(list(prefix)) for prefix in zip(*chunks, strict=True)]
    best = prefixes[0]
    return _dataset(
        torch.stack([found.loss for found in prefixes], dim=1),
        best.path,
        torch.full_like(best.loss, torch.nan),
        torch.stack([found.proven for found in prefixes], dim=1),
        torch.stack([found.evaluated for found in prefixes]).sum(dim=0),
    )


def _joined(found: list[Found]) -> Found:
    return Found(
        torch.cat([one.loss for one in found]),
        torch.cat([one.path for one in found]),
        torch.cat([one.proven for one in found]),
        torch.cat([one.evaluated for one in found]),
    )


def _dataset(
    completed: Float[Tensor, "example prefix"],
    best_path: Int[Tensor, "example layer"],
    mean: Float[Tensor, " example"],
    proven: Tensor,
    evaluated: Int[Tensor, " example"],
) -> xr.Dataset:
    losses = completed.double().cpu().numpy()
    shown = proven.cpu().numpy().astype(np.int8)
    one, each = ("example",), ("example", "layer")
    variables = {
        "best_loss": (one, losses[:, 0], "loss of the best path found"),
        "best_path": (each, best_path.cpu().numpy(), "modules of the best path found"),
        "routed_loss": (one, losses[:, -1], "loss of the router's path"),
        "mean_loss": (one, mean.double().cpu().numpy(), "mean loss of all paths"),
        "regret": (each, np.diff(losses, axis=1), "loss that the router's choice cannot avoid"),
        "proven": (one, shown[:, 0], "whether no path is better"),
        "regret_proven": (each, shown[:, :-1] * shown[:, 1:], "whether the regret is exact"),
        "evaluated": (one, evaluated.cpu().numpy(), "module applications"),
    }
    return xr.Dataset(
        {
            name: (dims, values, {"long_name": about})
            for name, (dims, values, about) in variables.items()
        },
        coords={"layer": np.arange(best_path.shape[1])},
    )
