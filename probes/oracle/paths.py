"""Paths through the modules of a network: what a path model is, and the losses of all its paths."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformer_lens.utilities.statistics import derive_generator

from probes.capturing.hooking import HookedModel
from probes.capturing.inputs import slices

BUDGET = 10**6
"""Module applications for each example, at most."""

MEMORY_LIMIT = 2**30
"""In bytes, at once."""

_MOST_EXAMPLES = 2**12  # at once: what a model makes of the inputs alone is in no other limit

PathLoss = Callable[[Tensor, Tensor], Tensor]
"""From answers [example, path, state] and targets [example, ...] to losses [example, path]."""

PathBound = Callable[[Tensor, int, Tensor, Tensor], Tensor]
"""From (inputs, layer, partial results [example, path, state], targets) to [example, path]: what
the loss of no completion is below. `layer` is the next one, as in `PathModel.advance`."""


class PathModel(Protocol):
    """A network whose layers each choose one of the modules of a pool.

    A path is the modules (m_1, ..., m_L) that are chosen; what a layer makes of its partial result
    depends on the inputs, the partial result and the module alone.
    """

    @property
    def n_layers(self) -> int:
        """L, the length of a path."""
        ...

    @property
    def n_modules(self) -> int:
        """M, the modules to choose from in each layer."""
        ...

    @property
    def bytes_per_result(self) -> int:
        """Memory that `advance` needs on the way for each of its example x path x module."""
        ...

    def begin(self, inputs: Tensor) -> Float[Tensor, "example 1 state"]:
        """The partial result before the first layer."""
        ...

    def advance(
        self, inputs: Tensor, layer: int, partial: Float[Tensor, "example path state"]
    ) -> Float[Tensor, "example path module state"]:
        """What each module of the layer makes of each partial result; at last, of the answer."""
        ...


def squared_error(
    answers: Float[Tensor, "example path state"], targets: Float[Tensor, "example state"]
) -> Float[Tensor, "example path"]:
    """Squared error, summed over the state."""
    return (answers - targets[:, None]).square().sum(-1)


@dataclass(frozen=True)
class PathProblem:
    """Examples, and the network whose paths are searched. Made by `read_problem`.

    Attributes:
        routed: the router's own path.
        state_bytes: of one partial result.
        memory_limit: in bytes.
    """

    model: PathModel
    inputs: Float[Tensor, "example ..."]
    targets: Float[Tensor, "example ..."]
    routed: Int[Tensor, "example layer"]
    loss: PathLoss
    state_bytes: int
    memory_limit: int

    def __len__(self) -> int:
        return len(self.inputs)

    @property
    def n_layers(self) -> int:
        """Length of a path."""
        return self.model.n_layers

    @property
    def n_modules(self) -> int:
        """Modules to choose from in each layer."""
        return self.model.n_modules

    @property
    def entry_bytes(self) -> int:
        """Memory for each example x path x module."""
        # A result of each layer, the error and its square, and what is made of the losses.
        results = (self.n_layers + 3) * self.state_bytes + 40
        return self.model.bytes_per_result + results

    def take(self, rows: slice | Int[Tensor, " row"]) -> "PathProblem":
        """The same for some of the examples."""
        return replace(
            self, inputs=self.inputs[rows], targets=self.targets[rows], routed=self.routed[rows]
        )

    def advance(
        self, layer: int, partial: Float[Tensor, "example path state"]
    ) -> Float[Tensor, "example path module state"]:
        """What each module makes of each partial result.

        Raises:
            ValueError: the model's answer has another shape.
        """
        result = self.model.advance(self.inputs, layer, partial)
        expected = (*partial.shape[:2], self.n_modules)
        if result.ndim != 4 or result.shape[:3] != expected:
            raise ValueError(
                f"model.advance must give [example, path, module, state], "
                f"{(*expected, '...')} in layer {layer}, got {tuple(result.shape)}"
            )
        return result

    def losses(self, answers: Float[Tensor, "example path state"]) -> Float[Tensor, "example path"]:
        """The losses of answers.

        Raises:
            ValueError: they have another shape, or are not finite numbers of at least 0.
        """
        losses = self.loss(answers, self.targets)
        if losses.shape != answers.shape[:2]:
            raise ValueError(
                f"loss must give [example, path], {tuple(answers.shape[:2])}, "
                f"got {tuple(losses.shape)}"
            )
        if not ((losses >= 0) & (losses < torch.inf)).all():
            raise ValueError(
                "loss must give finite numbers of at least 0, got "
                f"{losses.min().item():g}..{losses.max().item():g}"
            )
        return losses


def read_problem(
    model: PathModel,
    inputs: Float[Tensor, "example ..."],
    targets: Float[Tensor, "example ..."],
    routed: Int[Tensor, "example layer"],
    loss: PathLoss,
    memory_limit: int,
) -> PathProblem:
    """Check the arguments. The model must be in evaluation mode.

    Raises:
        TypeError: `routed` does not hold integers.
        ValueError: shapes that do not fit, no examples, targets that are not finite, routed modules
            out of range, a memory limit that is too small for one partial result.
    """
    examples = len(inputs) if inputs.ndim else 0
    if not examples:
        raise ValueError(f"inputs must hold at least 1 example, got shape {tuple(inputs.shape)}")
    if targets.ndim == 0 or len(targets) != examples:
        raise ValueError(
            f"targets must be of the {examples} examples of inputs, "
            f"got shape {tuple(targets.shape)}"
        )
    if not targets.isfinite().all():
        bad = int((~targets.isfinite()).sum())
        raise ValueError(f"targets must be finite, got {bad} NaN or infinite values")
    _check_whole("routed", routed)
    if routed.shape != (examples, model.n_layers):
        raise ValueError(
            f"routed must be [example, layer], {(examples, model.n_layers)}, "
            f"got {tuple(routed.shape)}"
        )
    if routed.min() < 0 or routed.max() >= model.n_modules:
        raise ValueError(
            f"routed must be in 0..{model.n_modules - 1}, got "
            f"{int(routed.min())}..{int(routed.max())}"
        )
    start = model.begin(inputs[:1])
    if start.ndim != 3 or start.shape[:2] != (1, 1):
        raise ValueError(
            "model.begin must give [example, 1, state], for 1 example (1, 1, ...), "
            f"got {tuple(start.shape)}"
        )
    state_bytes = start.shape[2] * start.element_size()
    routed = routed.to(inputs.device, torch.long)
    problem = PathProblem(model, inputs, targets, routed, loss, state_bytes, memory_limit)
    least = model.n_modules * problem.entry_bytes
    if memory_limit < least:
        raise ValueError(f"memory_limit must be at least {least} bytes, got {memory_limit}")
    return problem


def as_hooked(model: PathModel) -> HookedModel:
    """The same, for `evaluating`, which needs no hooks."""
    return cast(HookedModel, model)


def path_numbers(paths: Int[Tensor, "*row layer"], n_modules: int) -> Int[Tensor, "*row"]:
    """The number of each path; the last layer's module changes fastest."""
    return (paths * _place_values(paths.shape[-1], n_modules, paths.device)).sum(-1)


def paths_of(
    numbers: Int[Tensor, "*row"], n_layers: int, n_modules: int
) -> Int[Tensor, "*row layer"]:
    """The paths of these numbers."""
    return numbers[..., None] // _place_values(n_layers, n_modules, numbers.device) % n_modules


def check_exact(model: PathModel, budget: int) -> None:
    """Refuse to look at all paths where these are too many.

    Raises:
        ValueError: the budget is too small.
    """
    needed = sum(model.n_modules**layer for layer in range(1, model.n_layers + 1))
    if needed > budget:
        raise ValueError(
            f"exact search applies {needed} modules for each example, more than budget={budget}; "
            "raise it, or use search_paths with the method 'beam' or 'best_first'"
        )


def stream_losses(
    problem: PathProblem,
) -> Iterator[tuple[slice, int, Float[Tensor, "example path"]]]:
    """The losses of all paths of all examples, in pieces that fit into memory.

    Each distinct partial result is computed once: M + M^2 + ... + M^L modules are applied for each
    example, not L M^L.

    Yields:
        The examples, the number of the first path, and the losses.
    """
    paths = problem.n_modules**problem.n_layers
    for part, chunk in example_chunks(problem, paths * problem.entry_bytes):
        for first, answers in _answers(chunk, 0, chunk.model.begin(chunk.inputs), first=0):
            yield part, first, chunk.losses(answers)


def _answers(
    problem: PathProblem, layer: int, partial: Float[Tensor, "example path state"], first: int
) -> Iterator[tuple[int, Float[Tensor, "example path state"]]]:
    """The answers below consecutive partial results, of which `first` is the first one's number."""
    if layer == problem.n_layers:
        yield first, partial
        return
    for piece in path_pieces(problem, partial):
        reached = problem.advance(layer, partial[:, piece]).flatten(1, 2)
        yield from _answers(problem, layer + 1, reached, (first + piece.start) * problem.n_modules)


def example_chunks(problem: PathProblem, each: int) -> Iterator[tuple[slice, PathProblem]]:
    """Slices of the examples, when each is to take so many bytes."""
    size = min(_MOST_EXAMPLES, max(1, problem.memory_limit // each))
    for part in slices(len(problem), size):
        yield part, problem.take(part)


def path_pieces(
    problem: PathProblem, partial: Float[Tensor, "example path state"]
) -> Iterator[slice]:
    """Slices of the paths, each of which can be advanced within the memory limit."""
    each = len(partial) * problem.n_modules * problem.entry_bytes
    return slices(partial.shape[1], max(1, problem.memory_limit // each))


@dataclass(frozen=True)
class AllPaths:
    """What the losses of all paths say.

    Attributes:
        completed: the loss of the best completion of the router's first 0, 1, ..., L choices: the
            first is that of the best path, the last that of the router's.
        best: the number of the best path, the first of equals.
        mean: mean loss.
        marked: the losses of the marked paths.
    """

    completed: Float[Tensor, "example prefix"]
    best: Int[Tensor, " example"]
    mean: Float[Tensor, " example"]
    marked: Float[Tensor, "example mark"]


def look_at_all_paths(problem: PathProblem, marked: Int[Tensor, " mark"]) -> AllPaths:
    """Look at all paths; `marked` are numbers of paths."""
    examples, n_layers, n_modules = len(problem), problem.n_layers, problem.n_modules
    device = problem.inputs.device
    numbers = path_numbers(problem.routed, n_modules)
    completed = torch.full((examples, n_layers + 1), torch.inf, dtype=torch.double, device=device)
    best = torch.zeros(examples, dtype=torch.long, device=device)
    total = torch.zeros(examples, dtype=torch.double, device=device)
    kept = torch.zeros(examples, len(marked), dtype=torch.double, device=device)
    for part, first, losses in stream_losses(problem):
        last = first + losses.shape[1]
        least, place = losses.min(dim=1)
        best[part] = torch.where(least < completed[part, 0], first + place, best[part])
        completed[part, 0] = completed[part, 0].minimum(least)
        for prefix in range(1, n_layers + 1):
            # Paths that share a prefix are neighbours.
            below = n_modules ** (n_layers - prefix)
            shared = torch.arange(first, last, device=device) // below
            mine = shared == numbers[part, None] // below
            least = torch.where(mine, losses, torch.inf).amin(dim=1)
            completed[part, prefix] = completed[part, prefix].minimum(least)
        total[part] += losses.sum(dim=1, dtype=torch.double)
        inside = (marked >= first) & (marked < last)
        kept[part, inside] = losses[:, marked[inside] - first].double()
    return AllPaths(completed, best, total / n_modules**n_layers, kept)


def choose_paths(
    problem: PathProblem, weights: Float[Tensor, "choice example"]
) -> Int[Tensor, " choice"]:
    """The number of the path of least loss over all examples, for several weightings of them."""
    paths = problem.n_modules**problem.n_layers
    total = torch.zeros(len(weights), paths, dtype=torch.double, device=problem.inputs.device)
    weights = weights.to(total)
    for part, first, losses in stream_losses(problem):
        total[:, first : first + losses.shape[1]] += weights[:, part] @ losses.double()
    return total.argmin(dim=1)


@dataclass(frozen=True)
class Halves:
    """The examples of a task, dealt out at random: a path is chosen on one half, scored on the
    other. Of an odd number, the scored half has one more."""

    task: int
    choosing: Int[Tensor, " row"]
    scored: Int[Tensor, " row"]


def split_tasks(
    task: Int[Tensor, " example"], examples: int, seed: int, device: torch.device
) -> list[Halves]:
    """Halves of every task, in the order of their ids; the same for the same seed.

    Raises:
        TypeError: `task` does not hold integers.
        ValueError: it has another shape, or a task has fewer than 2 examples.
    """
    _check_whole("task", task)
    if task.shape != (examples,):
        raise ValueError(f"task must be [example], {(examples,)}, got {tuple(task.shape)}")
    result = []
    for one in task.unique().tolist():
        rows = (task == one).nonzero()[:, 0].cpu()
        if len(rows) < 2:
            raise ValueError(f"task must have at least 2 examples of each task, of {one} it has 1")
        generator = derive_generator(seed, "halves", one)
        rows = rows[torch.randperm(len(rows), generator=generator)].to(device)
        result.append(Halves(one, rows[: len(rows) // 2], rows[len(rows) // 2 :]))
    return result


def _place_values(n_layers: int, n_modules: int, device: torch.device) -> Int[Tensor, " layer"]:
    return n_modules ** torch.arange(n_layers - 1, -1, -1, device=device)


def _check_whole(name: str, tensor: Tensor) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a tensor of integers, got {type(tensor).__name__}")
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise TypeError(f"{name} must hold integers, got {tensor.dtype}")
