"""Exhaustive search: the losses of all paths of a network."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from probes.oracle.paths import PathModel, path_numbers
from probes.oracle.problem import PathProblem, example_chunks, path_chunks


def check_exact(model: PathModel, budget: int) -> None:
    """Check that the budget allows to compute all paths.

    Raises:
        ValueError: the budget is too small.
    """
    needed = sum(model.n_modules**layer for layer in range(1, model.n_layers + 1))
    if needed > budget:
        raise ValueError(
            f"budget must be at least {needed} module applications for an exact search, got "
            f"{budget}; raise it, or use search_paths with the method 'beam' or 'best_first'"
        )


def stream_losses(
    problem: PathProblem,
) -> Iterator[tuple[slice, int, Float[Tensor, "example path"]]]:
    """Compute the losses of all paths of all examples, in chunks that fit into memory.

    Each distinct partial result is computed once: M + M^2 + ... + M^L module applications per
    example, not L M^L.

    Yields:
        The examples, the number of the first path, and the losses.
    """
    n_paths = problem.n_modules**problem.n_layers
    for rows, chunk in example_chunks(problem, n_paths * problem.entry_bytes):
        for first, answers in _answers(chunk, 0, chunk.model.begin(chunk.inputs), first=0):
            yield rows, first, chunk.losses(answers)


def _answers(
    problem: PathProblem, layer: int, partial: Float[Tensor, "example path state"], first: int
) -> Iterator[tuple[int, Float[Tensor, "example path state"]]]:
    """Yield the answers of consecutive partial results; `first` is the number of the first."""
    if layer == problem.n_layers:
        yield first, partial
        return
    for chunk in path_chunks(problem, partial):
        results = problem.advance(layer, partial[:, chunk]).flatten(1, 2)
        yield from _answers(problem, layer + 1, results, (first + chunk.start) * problem.n_modules)


@dataclass(frozen=True)
class AllPaths:
    """Summary of the losses of all paths.

    Attributes:
        completed: loss of the best completion of the router's first 0, 1, ..., L choices; the
            first is that of the best path, the last that of the router's path.
        best: number of the best path, the first in case of a tie.
        mean: mean loss of all paths.
        marked: losses of the marked paths.
    """

    completed: Float[Tensor, "example prefix"]
    best: Int[Tensor, " example"]
    mean: Float[Tensor, " example"]
    marked: Float[Tensor, "example mark"]


def evaluate_all_paths(problem: PathProblem, marked: Int[Tensor, " mark"]) -> AllPaths:
    """Summarise the losses of all paths; `marked` are numbers of paths."""
    examples, n_layers, n_modules = len(problem), problem.n_layers, problem.n_modules
    device = problem.inputs.device
    numbers = path_numbers(problem.routed, n_modules)
    completed = torch.full((examples, n_layers + 1), torch.inf, dtype=torch.double, device=device)
    best = torch.zeros(examples, dtype=torch.long, device=device)
    total = torch.zeros(examples, dtype=torch.double, device=device)
    marked_losses = torch.zeros(examples, len(marked), dtype=torch.double, device=device)
    for rows, first, losses in stream_losses(problem):
        last = first + losses.shape[1]
        least, index = losses.min(dim=1)
        best[rows] = torch.where(least < completed[rows, 0], first + index, best[rows])
        completed[rows, 0] = completed[rows, 0].minimum(least)
        for prefix in range(1, n_layers + 1):
            # Paths that share a prefix have consecutive numbers.
            n_completions = n_modules ** (n_layers - prefix)
            prefixes = torch.arange(first, last, device=device) // n_completions
            matches = prefixes == numbers[rows, None] // n_completions
            least = torch.where(matches, losses, torch.inf).amin(dim=1)
            completed[rows, prefix] = completed[rows, prefix].minimum(least)
        total[rows] += losses.sum(dim=1, dtype=torch.double)
        in_chunk = (marked >= first) & (marked < last)
        marked_losses[rows, in_chunk] = losses[:, marked[in_chunk] - first].double()
    return AllPaths(completed, best, total / n_modules**n_layers, marked_losses)


def choose_paths(
    problem: PathProblem, weights: Float[Tensor, "choice example"]
) -> Int[Tensor, " choice"]:
    """Choose the path with the lowest weighted loss over all examples, for several weightings."""
    n_paths = problem.n_modules**problem.n_layers
    total = torch.zeros(len(weights), n_paths, dtype=torch.double, device=problem.inputs.device)
    weights = weights.to(total)
    for rows, first, losses in stream_losses(problem):
        total[:, first : first + losses.shape[1]] += weights[:, rows] @ losses.double()
    return total.argmin(dim=1)
