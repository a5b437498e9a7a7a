"""Heuristic path searches: beam search, and best-first search with a bound."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields

import torch
from einops import repeat
from jaxtyping import Bool, Float, Int
from torch import Tensor

from probes.capturing.inputs import slices
from probes.oracle.paths import PathBound
from probes.oracle.problem import PathProblem, path_chunks


@dataclass(frozen=True)
class Solution:
    """The best known path of each example.

    Attributes:
        loss: loss of the path.
        path: modules of the path.
        proven: whether no path with the same prefix is better.
        evaluated: number of module applications of the search.
    """

    loss: Float[Tensor, " example"]
    path: Int[Tensor, "example layer"]
    proven: Bool[Tensor, " example"]
    evaluated: Int[Tensor, " example"]


Search = Callable[[PathProblem, int, Float[Tensor, "example 1 state"], Solution], Solution]
"""Maps (problem, layer, the router's result before the layer, best known) to the best found."""


def complete_prefixes(problem: PathProblem, search: Search) -> list[Solution]:
    """Search the best completions of the router's first 0, 1, ..., L choices.

    Starts with the longest prefix, so that no later search ends up worse.
    """
    partial = [problem.model.begin(problem.inputs)]
    for layer in range(problem.n_layers):
        partial.append(_step(problem, layer, partial[-1]))
    routed = problem.losses(partial[-1])[:, 0]
    solutions = [
        Solution(
            routed,
            problem.routed,
            torch.ones_like(routed, dtype=torch.bool),
            torch.full_like(routed, problem.n_layers * problem.n_modules, dtype=torch.long),
        )
    ]
    for layer in reversed(range(problem.n_layers)):
        solutions.insert(0, search(problem, layer, partial[layer], solutions[0]))
    return solutions


def search_beam(
    problem: PathProblem,
    start: int,
    partial: Float[Tensor, "example 1 state"],
    best_known: Solution,
    *,
    width: int,
) -> Solution:
    """Keep, layer by layer, the `width` partial results with the best completions."""
    n_layers, n_modules = problem.n_layers, problem.n_modules
    # Always complete: later layers have the router's modules.
    paths = problem.routed[:, None]
    truncated = False
    loss, paths = _roll_out(problem, start, partial, paths)
    best, path = _update_best(best_known.loss, best_known.path, loss, paths)
    applied = (n_layers - start) * n_modules
    # The last layer is not expanded: `_roll_out` has computed all its answers.
    for layer in range(start, n_layers - 1):
        if partial.shape[1] > width:
            truncated = True
            order = loss.topk(width, dim=1, largest=False).indices
            partial, paths = (array.gather(1, _expand(order, array)) for array in (partial, paths))
        applied += partial.shape[1] * n_modules * (1 + (n_layers - 1 - layer) * n_modules)
        partial = torch.cat(
            [
                problem.advance(layer, partial[:, chunk]).flatten(1, 2)
                for chunk in path_chunks(problem, partial)
            ],
            dim=1,
        )
        paths = paths.repeat_interleave(n_modules, dim=1)
        paths[..., layer] = torch.arange(paths.shape[1], device=paths.device) % n_modules
        loss, paths = _roll_out(problem, layer + 1, partial, paths)
        best, path = _update_best(best, path, loss, paths)
    return Solution(
        best, path, (best == 0) | (not truncated), torch.full_like(best_known.evaluated, applied)
    )


def _roll_out(
    problem: PathProblem,
    layer: int,
    partial: Float[Tensor, "example path state"],
    paths: Int[Tensor, "example path layer"],
) -> tuple[Float[Tensor, "example path"], Int[Tensor, "example path layer"]]:
    """Complete partial results by the router's modules and, in the last layer, the best module.

    All modules of the last layer are computed anyway. Returns losses and paths.
    """
    for later in range(layer, problem.n_layers - 1):
        partial = _step(problem, later, partial)
    losses, modules = [], []
    for chunk in path_chunks(problem, partial):
        answers = problem.advance(problem.n_layers - 1, partial[:, chunk])
        chunk_losses = problem.losses(answers.flatten(1, 2)).unflatten(1, answers.shape[1:3])
        loss, module = chunk_losses.min(dim=2)
        losses.append(loss)
        modules.append(module)
    completed = torch.cat([paths[..., :-1], torch.cat(modules, dim=1)[..., None]], dim=2)
    return torch.cat(losses, dim=1), completed


def _step(
    problem: PathProblem, layer: int, partial: Float[Tensor, "example path state"]
) -> Float[Tensor, "example path state"]:
    """Apply the router's module to each partial result."""
    rows = torch.arange(len(partial), device=partial.device)
    results = [
        problem.advance(layer, partial[:, chunk])[rows, :, problem.routed[:, layer]]
        for chunk in path_chunks(problem, partial)
    ]
    return torch.cat(results, dim=1)


def _update_best(
    best: Float[Tensor, " example"],
    path: Int[Tensor, "example layer"],
    loss: Float[Tensor, "example path"],
    paths: Int[Tensor, "example path layer"],
) -> tuple[Float[Tensor, " example"], Int[Tensor, "example layer"]]:
    least, index = loss.min(dim=1)
    rows = torch.arange(len(loss), device=loss.device)
    improved = least < best
    return best.minimum(least), torch.where(improved[:, None], paths[rows, index], path)


def _expand(order: Int[Tensor, "example kept"], x: Tensor) -> Int[Tensor, "example kept feature"]:
    return repeat(order, "example kept -> example kept feature", feature=x.shape[2])


@dataclass(frozen=True)
class _Queue:
    """Partial results of all examples that are not expanded yet."""

    example: Int[Tensor, " node"]
    layer: Int[Tensor, " node"]
    partial: Float[Tensor, "node state"]
    path: Int[Tensor, "node layer"]
    bound: Float[Tensor, " node"]

    def take(self, nodes: slice | Tensor) -> "_Queue":
        return _Queue(*(getattr(self, field.name)[nodes] for field in fields(self)))

    def with_others(self, others: list["_Queue"]) -> "_Queue":
        columns = ([getattr(x, field.name) for x in (self, *others)] for field in fields(self))
        return _Queue(*map(torch.cat, columns))


def search_best_first(
    problem: PathProblem,
    start: int,
    partial: Float[Tensor, "example 1 state"],
    best_known: Solution,
    *,
    width: int,
    budget: int,
    bound: PathBound | None,
) -> Solution:
    """Expand the `width` partial results of lowest bound of each example, round by round."""
    n_modules = problem.n_modules
    expanded = n_modules * problem.entry_bytes
    best, path = best_known.loss, best_known.path
    used = torch.zeros_like(best_known.evaluated)
    queue = _Queue(
        torch.arange(len(problem), device=best.device),
        torch.full_like(best_known.evaluated, start),
        partial[:, 0],
        problem.routed,
        _bounds(problem, start, partial, bound)[:, 0],
    )
    while True:
        queue = queue.take(queue.bound < best[queue.example])
        # Deepest first among equal bounds, since only answers can rule out others.
        order = (-queue.layer).argsort(stable=True)
        for key in (queue.bound, queue.example):
            order = order[key[order].argsort(stable=True)]
        queue = queue.take(order)
        counts = queue.example.bincount(minlength=len(problem))
        first = counts.cumsum(0) - counts
        rank = torch.arange(len(order), device=order.device) - first[queue.example]
        affordable = ((budget - used) // n_modules).clamp(max=width)
        chosen = rank < affordable[queue.example]
        if not chosen.any():
            return Solution(best, path, counts == 0, used)
        nodes, queue = queue.take(chosen), queue.take(~chosen)
        used = used + nodes.example.bincount(minlength=len(problem)) * n_modules
        new_nodes = []
        for batch, layer in _batches_by_layer(nodes, max(1, problem.memory_limit // expanded)):
            subproblem = problem.take(batch.example)
            children = subproblem.advance(layer, batch.partial[:, None])[:, 0]
            if layer == problem.n_layers - 1:
                loss, module = subproblem.losses(children).min(dim=1)
                completed = torch.cat([batch.path[:, :-1], module[:, None]], dim=1)
                best, path = _record(best, path, batch.example, loss, completed)
            else:
                bounds = _bounds(subproblem, layer + 1, children, bound)
                new_nodes.append(_children(batch, children, bounds))
        queue = queue.with_others(new_nodes)


def _batches_by_layer(nodes: _Queue, size: int) -> Iterator[tuple[_Queue, int]]:
    """Yield batches of at most `size` nodes of the same layer."""
    for layer in nodes.layer.unique().tolist():
        of_layer = nodes.take(nodes.layer == layer)
        for rows in slices(len(of_layer.layer), size):
            yield of_layer.take(rows), layer


def _children(
    parents: _Queue,
    results: Float[Tensor, "node module state"],
    bounds: Float[Tensor, "node module"],
) -> _Queue:
    n_modules = results.shape[1]
    path = parents.path.repeat_interleave(n_modules, dim=0)
    rows = torch.arange(len(path), device=path.device)
    layer = parents.layer.repeat_interleave(n_modules)
    path[rows, layer] = rows % n_modules
    return _Queue(
        parents.example.repeat_interleave(n_modules),
        layer + 1,
        results.flatten(0, 1),
        path,
        # The bound of a partial result holds for all its completions.
        bounds.maximum(parents.bound[:, None]).flatten(),
    )


def _record(
    best: Float[Tensor, " example"],
    path: Int[Tensor, "example layer"],
    example: Int[Tensor, " node"],
    loss: Float[Tensor, " node"],
    paths: Int[Tensor, "node layer"],
) -> tuple[Float[Tensor, " example"], Int[Tensor, "example layer"]]:
    """Update the best paths with new ones, of which several may belong to one example."""
    least = best.scatter_reduce(0, example, loss, "amin")
    winners = ((loss == least[example]) & (loss < best[example])).nonzero()[:, 0]
    # Take the first of ties: writing several to the same row could mix them.
    number = torch.full_like(path[:, 0], len(loss)).scatter_reduce(
        0, example[winners], winners, "amin"
    )
    improved = number < len(loss)
    path = path.clone()
    path[improved] = paths[number[improved]]
    return least, path


def _bounds(
    problem: PathProblem,
    layer: int,
    partial: Float[Tensor, "example path state"],
    bound: PathBound | None,
) -> Float[Tensor, "example path"]:
    """Compute lower bounds of the loss, at least 0.

    Raises:
        ValueError: bounds have another shape, or are NaN.
    """
    if bound is None:
        return partial.new_zeros(partial.shape[:2])
    bounds = bound(problem.inputs, layer, partial, problem.targets)
    if bounds.shape != partial.shape[:2] or bounds.isnan().any():
        raise ValueError(
            f"bound must return [example, path], {tuple(partial.shape[:2])}, without NaN, "
            f"got {tuple(bounds.shape)} with {int(bounds.isnan().sum())} NaN"
        )
    return bounds.clamp(min=0)
