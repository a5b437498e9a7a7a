"""Searches that do not look at all paths: beam, and best-first with a bound."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields

import torch
from einops import repeat
from jaxtyping import Bool, Float, Int
from torch import Tensor

from probes.capturing.inputs import slices
from probes.oracle.paths import PathBound, PathProblem, path_pieces


@dataclass(frozen=True)
class Found:
    """The best paths that are known.

    Attributes:
        loss: of each.
        path: the modules.
        proven: whether no path with the same prefix is better.
        evaluated: how many modules were applied to find it.
    """

    loss: Float[Tensor, " example"]
    path: Int[Tensor, "example layer"]
    proven: Bool[Tensor, " example"]
    evaluated: Int[Tensor, " example"]


Search = Callable[[PathProblem, int, Float[Tensor, "example 1 state"], Found], Found]
"""From the router's result before a layer, and the best path known, to the best one found."""


def complete_prefixes(problem: PathProblem, search: Search) -> list[Found]:
    """The best completions found of the router's first 0, 1, ..., L choices.

    The longest prefix comes first, so that no later search ends up worse.
    """
    partial = [problem.model.begin(problem.inputs)]
    for layer in range(problem.n_layers):
        partial.append(_step(problem, layer, partial[-1]))
    routed = problem.losses(partial[-1])[:, 0]
    found = [
        Found(
            routed,
            problem.routed,
            torch.ones_like(routed, dtype=torch.bool),
            torch.full_like(routed, problem.n_layers * problem.n_modules, dtype=torch.long),
        )
    ]
    for layer in reversed(range(problem.n_layers)):
        found.insert(0, search(problem, layer, partial[layer], found[0]))
    return found


def search_beam(
    problem: PathProblem,
    start: int,
    partial: Float[Tensor, "example 1 state"],
    known: Found,
    *,
    width: int,
) -> Found:
    """Keep, layer by layer, the `width` partial results of which the best answer was seen."""
    n_layers, n_modules = problem.n_layers, problem.n_modules
    # Complete at any time: layers that are not reached yet have the router's modules.
    paths = problem.routed[:, None]
    truncated = False
    loss, paths = _roll_out(problem, start, partial, paths)
    best, path = _better(known.loss, known.path, loss, paths)
    applied = (n_layers - start) * n_modules
    # The last layer is not expanded: rolling out has shown all its answers.
    for layer in range(start, n_layers - 1):
        if partial.shape[1] > width:
            truncated = True
            order = loss.topk(width, dim=1, largest=False).indices
            partial, paths = (x.gather(1, _like(order, x)) for x in (partial, paths))
        applied += partial.shape[1] * n_modules * (1 + (n_layers - 1 - layer) * n_modules)
        partial = torch.cat(
            [
                problem.advance(layer, partial[:, p]).flatten(1, 2)
                for p in path_pieces(problem, partial)
            ],
            dim=1,
        )
        paths = paths.repeat_interleave(n_modules, dim=1)
        paths[..., layer] = torch.arange(paths.shape[1], device=paths.device) % n_modules
        loss, paths = _roll_out(problem, layer + 1, partial, paths)
        best, path = _better(best, path, loss, paths)
    return Found(
        best, path, (best == 0) | (not truncated), torch.full_like(known.evaluated, applied)
    )


def _roll_out(
    problem: PathProblem,
    layer: int,
    partial: Float[Tensor, "example path state"],
    paths: Int[Tensor, "example path layer"],
) -> tuple[Float[Tensor, "example path"], Int[Tensor, "example path layer"]]:
    """The loss and the path of partial results that the router completes, but for the last layer.

    There the best module is taken: all of them are computed anyway.
    """
    for later in range(layer, problem.n_layers - 1):
        partial = _step(problem, later, partial)
    losses, modules = [], []
    for piece in path_pieces(problem, partial):
        answers = problem.advance(problem.n_layers - 1, partial[:, piece])
        each = problem.losses(answers.flatten(1, 2)).unflatten(1, answers.shape[1:3])
        loss, module = each.min(dim=2)
        losses.append(loss)
        modules.append(module)
    completed = torch.cat([paths[..., :-1], torch.cat(modules, dim=1)[..., None]], dim=2)
    return torch.cat(losses, dim=1), completed


def _step(
    problem: PathProblem, layer: int, partial: Float[Tensor, "example path state"]
) -> Float[Tensor, "example path state"]:
    """What the router's module makes of each partial result."""
    rows = torch.arange(len(partial), device=partial.device)
    pieces = [
        problem.advance(layer, partial[:, piece])[rows, :, problem.routed[:, layer]]
        for piece in path_pieces(problem, partial)
    ]
    return torch.cat(pieces, dim=1)


def _better(
    best: Float[Tensor, " example"],
    path: Int[Tensor, "example layer"],
    loss: Float[Tensor, "example path"],
    paths: Int[Tensor, "example path layer"],
) -> tuple[Float[Tensor, " example"], Int[Tensor, "example layer"]]:
    least, place = loss.min(dim=1)
    rows = torch.arange(len(loss), device=loss.device)
    improved = least < best
    return best.minimum(least), torch.where(improved[:, None], paths[rows, place], path)


def _like(order: Int[Tensor, "example kept"], x: Tensor) -> Int[Tensor, "example kept feature"]:
    return repeat(order, "example kept -> example kept feature", feature=x.shape[2])


@dataclass(frozen=True)
class _Queue:
    """Partial results that are not expanded yet, of all examples together."""

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
    known: Found,
    *,
    width: int,
    budget: int,
    bound: PathBound | None,
) -> Found:
    """Expand, of each example, the `width` partial results of least bound, again and again."""
    n_modules = problem.n_modules
    expanded = n_modules * problem.entry_bytes
    best, path = known.loss, known.path
    used = torch.zeros_like(known.evaluated)
    queue = _Queue(
        torch.arange(len(problem), device=best.device),
        torch.full_like(known.evaluated, start),
        partial[:, 0],
        problem.routed,
        _bounds(problem, start, partial, bound)[:, 0],
    )
    while True:
        queue = queue.take(queue.bound < best[queue.example])
        # Of equal bounds the deepest: without answers nothing can be ruled out.
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
            return Found(best, path, counts == 0, used)
        nodes, queue = queue.take(chosen), queue.take(~chosen)
        used = used + nodes.example.bincount(minlength=len(problem)) * n_modules
        opened = []
        for part, layer in _alike(nodes, max(1, problem.memory_limit // expanded)):
            mine = problem.take(part.example)
            reached = mine.advance(layer, part.partial[:, None])[:, 0]
            if layer == problem.n_layers - 1:
                loss, module = mine.losses(reached).min(dim=1)
                ended = torch.cat([part.path[:, :-1], module[:, None]], dim=1)
                best, path = _record(best, path, part.example, loss, ended)
            else:
                bounds = _bounds(mine, layer + 1, reached, bound)
                opened.append(_children(part, reached, bounds))
        queue = queue.with_others(opened)


def _alike(nodes: _Queue, size: int) -> Iterator[tuple[_Queue, int]]:
    """At most `size` nodes of one layer at a time."""
    for layer in nodes.layer.unique().tolist():
        same = nodes.take(nodes.layer == layer)
        for piece in slices(len(same.layer), size):
            yield same.take(piece), layer


def _children(
    parents: _Queue,
    reached: Float[Tensor, "node module state"],
    bounds: Float[Tensor, "node module"],
) -> _Queue:
    n_modules = reached.shape[1]
    path = parents.path.repeat_interleave(n_modules, dim=0)
    rows = torch.arange(len(path), device=path.device)
    layer = parents.layer.repeat_interleave(n_modules)
    path[rows, layer] = rows % n_modules
    return _Queue(
        parents.example.repeat_interleave(n_modules),
        layer + 1,
        reached.flatten(0, 1),
        path,
        # What bounds a partial result bounds all that can become of it.
        bounds.maximum(parents.bound[:, None]).flatten(),
    )


def _record(
    best: Float[Tensor, " example"],
    path: Int[Tensor, "example layer"],
    example: Int[Tensor, " node"],
    loss: Float[Tensor, " node"],
    ended: Int[Tensor, "node layer"],
) -> tuple[Float[Tensor, " example"], Int[Tensor, "example layer"]]:
    """The best of what was known and of new paths, several of which may be of one example."""
    least = best.scatter_reduce(0, example, loss, "amin")
    wins = ((loss == least[example]) & (loss < best[example])).nonzero()[:, 0]
    # Of equals the first: writing several to one place could mix them.
    number = torch.full_like(path[:, 0], len(loss)).scatter_reduce(0, example[wins], wins, "amin")
    improved = number < len(loss)
    path = path.clone()
    path[improved] = ended[number[improved]]
    return least, path


def _bounds(
    problem: PathProblem,
    layer: int,
    partial: Float[Tensor, "example path state"],
    bound: PathBound | None,
) -> Float[Tensor, "example path"]:
    """The bounds, at least 0, as losses are.

    Raises:
        ValueError: they have another shape, or are NaN.
    """
    if bound is None:
        return partial.new_zeros(partial.shape[:2])
    bounds = bound(problem.inputs, layer, partial, problem.targets)
    if bounds.shape != partial.shape[:2] or bounds.isnan().any():
        raise ValueError(
            f"bound must give [example, path], {tuple(partial.shape[:2])}, without NaN, "
            f"got {tuple(bounds.shape)} with {int(bounds.isnan().sum())} NaN"
        )
    return bounds.clamp(min=0)
