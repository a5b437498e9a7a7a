"""Jobs of a study's workers: cells that are trained one after another or together, and measured."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from threadpoolctl import threadpool_limits

from studies.engine.cells import Cell, train_together
from studies.engine.fingerprints import changed_files
from studies.engine.folders import RunError, now
from studies.engine.settings import plain
from studies.engine.training import NEVER, Deadline
from studies.engine.workers import Workers

Group = Sequence[Cell]
"""Cells that are trained as one batched model."""


def jobs_of(cells: Sequence[Cell], together: int) -> list[list[Group]]:
    """Divide cells into jobs; the groups of a job are trained one after another.

    Cells that differ in seeds alone make groups of up to `together`. Groups that share the constant
    part of the schedule `stable` are one job, the shortest first, so that it is trained once.

    Args:
        cells: the cells, in order.
        together: largest number of cells in a group.
    """
    alike: dict[str, list[Cell]] = {}
    for cell in cells:
        key = cell.name if together == 1 else kind_of(cell)
        alike.setdefault(key, []).append(cell)
    groups = [
        group[first : first + together]
        for group in alike.values()
        for first in range(0, len(group), together)
    ]
    jobs: dict[Any, list[Group]] = {}
    for group in groups:
        trunk = group[0].trunk
        # Groups whose first cells share a trunk share those of the others, too.
        key = group[0].name if trunk is None else trunk.identity
        jobs.setdefault(key, []).append(group)
    for job in jobs.values():
        job.sort(key=lambda group: group[0].setup.training.n_steps)
    return list(jobs.values())


def run_jobs(
    jobs: Sequence[Sequence[Group]],
    workers: Workers,
    *,
    threads: int,
    deadline: Deadline = NEVER,
) -> None:
    """Train and measure cells in parallel.

    A job trains its cells; then each of them is measured, by any worker. Measurements stay on disk,
    so that the memory does not grow with the cells that are done.

    Args:
        jobs: see `jobs_of`.
        workers: the processes.
        threads: CPU threads per worker.
        deadline: stop training at the last checkpoint before it.

    Raises:
        RunError: the code has changed since, or see `Cell.train`.
        TrainingError: see `Cell.train`.
    """
    cells = [list(chain.from_iterable(job)) for job in jobs]
    names = [", ".join(cell.name for cell in of_job) for of_job in cells]
    training = [
        partial(run_job, job, [cell.code() for cell in of_job], number, threads, deadline)
        for number, (job, of_job) in enumerate(zip(jobs, cells, strict=True))
    ]
    measuring = [
        [partial(measure_cell, cell, cell.code_of_measures(), threads) for cell in of_job]
        for of_job in cells
    ]
    workers.call(training, names, then=measuring)


def run_job(
    job: Sequence[Group],
    codes: Sequence[Mapping[str, str]],
    position: int,
    threads: int,
    deadline: Deadline = NEVER,
) -> None:
    """Train the cells of a job, in a worker.

    Args:
        job: groups of cells.
        codes: for each cell the digests of the training code when the study began.
        position: line of the progress bar.
        threads: CPU threads to use.
        deadline: stop at the last checkpoint before it.
    """
    torch.set_num_threads(threads)
    cells = list(chain.from_iterable(job))
    for cell, code in zip(cells, codes, strict=True):
        _check_code(code, cell.code())
    # NumPy's matrix products would otherwise use all cores, and slow down the other workers.
    with threadpool_limits(threads):
        for group in job:
            deadline.check()
            train_together(group, position=position, deadline=deadline)
            report_progress(f"trained {', '.join(cell.name for cell in group)}")


def _check_code(before: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Check that this process has read the code of the one that began the study.

    Raises:
        RunError: it has read other code, which was edited since.
    """
    if changed := changed_files(before, now):
        raise RunError(f"code was changed while the study ran: {', '.join(changed)}; start again")


def measure_cell(cell: Cell, code: Mapping[str, str], threads: int) -> None:
    """Measure a trained cell, in a worker; `code`: that of its measures when the study began."""
    torch.set_num_threads(threads)
    _check_code(code, cell.code_of_measures())
    with threadpool_limits(threads):
        cell.measure()
    report_progress(f"measured {cell.name}")


def report_progress(text: str) -> None:
    """Write a line to stderr where it is a file or a pipe, which show no progress bars."""
    if not sys.stderr.isatty():
        print(f"{now()} {text}", file=sys.stderr, flush=True)


def kind_of(cell: Cell) -> str:
    """The settings of a cell but its seeds; cells of one kind can be trained together."""
    return json.dumps(_without_seeds(plain(cell.setup)))


def _without_seeds(config: Any) -> Any:
    """A config without the values of all settings named `seed`."""
    if isinstance(config, dict):
        return {key: _without_seeds(value) for key, value in config.items() if key != "seed"}
    return [_without_seeds(value) for value in config] if isinstance(config, list) else config
