"""Steps that linear and logistic decoders share: arguments, folds and the loop over cells."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor
from transformer_lens.utilities.statistics import derive_generator

from probes.decoding.cells import Cell, Table, Tables, grid_of
from probes.progress import progress

Result = TypeVar("Result")


def fold_of_samples(table: Table, folds: int, seed: int) -> Int[Tensor, " sample"]:
    """Assign examples to folds of equal size at random, and return the fold of each sample.

    Raises:
        ValueError: there are fewer than 2 folds, or more folds than examples.
    """
    if not 2 <= folds <= table.n_examples:
        raise ValueError(f"folds must be in 2..{table.n_examples} (examples), got {folds}")
    order = torch.randperm(table.n_examples, generator=derive_generator(seed, "folds"))
    fold = torch.empty(table.n_examples, dtype=torch.long)
    fold[order] = torch.arange(table.n_examples) % folds
    return fold[torch.from_numpy(table.example)]


def check_arguments(penalties: Sequence[float], resamples: int) -> None:
    """Check arguments that both decoders take."""
    if not penalties or not all(0 < penalty < float("inf") for penalty in penalties):
        raise ValueError(f"penalties must be one or more positive numbers, got {penalties!r:.200}")
    check_resamples(resamples)


def check_resamples(resamples: int) -> None:
    """Raise a ValueError if there are no resamples, without which there are no intervals."""
    if resamples < 1:
        raise ValueError(f"resamples must be at least 1, got {resamples}")


def classes_of(tables: Sequence[Table], label: str) -> np.ndarray:
    """List the classes of the labels of all tables, of which the first is the one to fit on.

    Raises:
        TypeError: labels are floats.
        ValueError: there are fewer than two classes in the first table.
    """
    dtype_kinds = {table.label.dtype.kind for table in tables}
    if not dtype_kinds <= set("biuUSO"):
        raise TypeError(
            f"label {label!r} must hold classes (integers or strings), got "
            f"{sorted({str(table.label.dtype) for table in tables})}; see decode_continuous"
        )
    fitted = np.unique(tables[0].label)
    if len(fitted) < 2:
        raise ValueError(
            f"label {label!r} must have at least two classes in {tables[0].name}, got {fitted}"
        )
    return np.unique(np.concatenate([table.label for table in tables]))


def over_cells(
    function: Callable[[str, Cell, tuple[int, ...]], Result],
    sources: Mapping[str, Tables],
    *,
    joined: bool,
    what: str,
) -> list[Result]:
    """Call a function for each cell of each source, with a progress bar on a terminal.

    There are as many threads as torch uses, each with one core, which is faster than several cores
    for matrices as small as these.

    Args:
        function: called with the source, the cell and its index in the results.
        sources: see `read_sources`.
        joined: see `grid_of`.
        what: the text of the progress bar.
    """
    jobs = [
        (source, *where)
        for source, tables in sources.items()
        for where in grid_of(tables.fit, joined=joined)
    ]
    with ThreadPoolExecutor(torch.get_num_threads()) as pool, one_thread():
        results = pool.map(lambda job: function(*job), jobs)
        return list(progress(results, what, total=len(jobs)))


@contextmanager
def one_thread() -> Iterator[None]:
    """Keep torch on one thread, which is faster for blocks as small as these."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
