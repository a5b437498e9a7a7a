"""A list of runs that is worked off in order, as far as the time reaches, and goes on later.

Entries name a study, a preset and changes. A call measures how long a training step takes, prints
what will be done, trains, and stops at the last checkpoint before the time is over. Results, whose
measures take more of a CPU's time than of a GPU's, are written when all entries are trained. The
report `worklist.json` in the folder of runs says what each call has done, how fast and on which
device. Models are trained in the folders of their studies, which find them there.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE
from rich.table import Table

from studies.engine import folders
from studies.engine.cells import Cell, train_together
from studies.engine.checkpoints import read_log
from studies.engine.command import console
from studies.engine.execution import Resources, Run
from studies.engine.folders import RunError
from studies.engine.jobs import Group, jobs_of, kind_of
from studies.engine.processes import check_available
from studies.engine.settings import replaced
from studies.engine.study import Study
from studies.engine.trainees import run_training
from studies.engine.training import Deadline, OutOfTime, TrainingError
from studies.engine.workers import Workers

MEASURED_STEPS = 20
"""Steps that are timed; as many are done before."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """Models of a study that are trained and measured.

    Args:
        name: a short name.
        why: what is learned from them.
        study: the study.
        preset: the preset with the paper's settings.
        changes: settings that differ from the preset.
        tiny: settings that differ from the preset `smoke`, in a rehearsal.
        together: models that differ in their seeds alone and are trained as one batched model.
    """

    name: str
    why: str
    study: Study
    preset: str
    changes: str
    tiny: str
    together: int = 1


@dataclass(frozen=True, kw_only=True)
class Options:
    """Where and how the entries run.

    Args:
        root: the folder of runs.
        device: where models run.
        workers: processes that train at the same time.
        tiny: run each entry at the size of a rehearsal.
        results: train nothing, and write the results of entries that are trained, on any device;
            otherwise they are written when all entries are trained.
        changes: settings of all entries.
        report: file name of the report.
    """

    root: Path = Path("runs")
    device: str = "cuda"
    workers: int = 1
    tiny: bool = False
    results: bool = False
    changes: Sequence[str] = ()
    report: str = "worklist.json"


def run_of(entry: Entry, options: Options) -> Run:
    """The run of an entry.

    Raises:
        ValueError: a setting is unknown, or a value is not allowed.
    """
    preset = "smoke" if options.tiny else entry.preset
    resources = Resources(
        root=options.root,
        device=options.device,
        threads=torch.get_num_threads(),
        together=entry.together,
    )
    return Run(entry.study.plan(preset, changes_of(entry, options)), resources)


def changes_of(entry: Entry, options: Options) -> list[str]:
    """The changed settings of an entry; those of the options replace its own."""
    changes = entry.tiny if options.tiny else entry.changes
    return replaced(changes.split(), options.changes)


def jobs_left(run: Run, entry: Entry) -> list[list[Group]]:
    """What an entry has to train: groups of cells, those with a shared part in one list."""
    return jobs_of([cell for cell in run.cells if not cell.finished], entry.together)


def steps_of(cell: Cell) -> int:
    """The training steps that a cell has done."""
    return int((read_log(cell.folder) or [{"step": 0}])[-1]["step"])


def steps_left(job: Sequence[Group]) -> int:
    """The steps of a job that are not done; a part that its groups share counts once."""
    left = shared = 0
    for group in job:
        training = group[0].setup.training
        left += training.n_steps - max(shared, min(map(steps_of, group)))
        shared = training.decay_start if job[1:] else 0
    return left


def seconds_per_step(
    group: Group, device: str, clock: Callable[[], float], measured: dict[tuple[str, int], float]
) -> float:
    """How long a step of a group takes: by its log, or else measured, without compilation.

    Args:
        group: the cells.
        device: where they are trained.
        clock: the time in seconds.
        measured: what was measured so far, by the kind and number of cells; it is added to.
    """
    # A log has its model's share of the time of the group.
    log = read_log(group[0].folder)
    if len(log) > 1:
        (before, last) = log[-2:]
        share = (last["seconds"] - before["seconds"]) / (last["step"] - before["step"])
        return share * len(group)
    kind = kind_of(group[0]), len(group)
    if kind not in measured:
        measured[kind] = _measured_seconds_per_step(group, device, clock)
    return measured[kind]


def _measured_seconds_per_step(group: Group, device: str, clock: Callable[[], float]) -> float:
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, "models", str(number)) for number in range(len(group))]
        setups = [_in_short(cell.setup) for cell in group]
        run_training(setups, paths, device, deadline=Deadline(math.inf, clock))
        first, second = read_log(paths[0])
    return (second["seconds"] - first["seconds"]) / MEASURED_STEPS * len(group)


def _in_short(setup: Any) -> Any:
    training = replace(
        setup.training,
        n_steps=2 * MEASURED_STEPS,
        evaluate_every=MEASURED_STEPS,
        schedule="cosine",
        decay_steps=0,
        keep_at=(),
        stop_at=None,
        compile=False,
    )
    return replace(setup, training=training, n_validation=min(64, setup.n_validation))


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """What is expected of an entry in the time that is left.

    Attributes:
        expected: `done`, if nothing is left to train; or that it will be `trained`, in `part` or
            `not` at all; or why it cannot be trained.
        steps: the steps that are left, over all groups; None: not examined.
        seconds: how long they take.
        pace: the seconds per step of each job.
    """

    expected: str
    steps: int | None = None
    seconds: float | None = None
    pace: tuple[float, ...] = ()


def forecast(entries: Sequence[Entry], options: Options, deadline: Deadline) -> list[Forecast]:
    """What is expected of each entry; speed is measured as far as the time will reach."""
    found: list[Forecast] = []
    total, measured = 0.0, dict[tuple[str, int], float]()
    for entry in entries:
        if deadline.clock() + total >= deadline.at:
            found.append(Forecast(expected="not"))
            continue
        jobs = jobs_left(run_of(entry, options), entry)
        try:
            pace = tuple(
                seconds_per_step(job[0], options.device, deadline.clock, measured) for job in jobs
            )
        except Exception as error:
            found.append(Forecast(expected=_first_line(error)))
            continue
        steps = list(map(steps_left, jobs))
        seconds = sum(n * each for n, each in zip(steps, pace, strict=True))
        total += seconds / options.workers
        fits = deadline.clock() + total <= deadline.at
        expected = "done" if not jobs else "trained" if fits else "part"
        found.append(Forecast(expected=expected, steps=sum(steps), seconds=seconds, pace=pace))
    return found


def train_job(job: Sequence[Group], seconds: float, threads: int, deadline: Deadline) -> str | None:
    """Train the models of a job, or go on with them, as far as the time reaches.

    Args:
        job: groups of cells that are trained one after another.
        seconds: what a step takes; 0 if that is not known.
        threads: CPU threads to use.
        deadline: stop at the last checkpoint before it.

    Returns:
        The error that ended it; None if there was none, or the time is over.
    """
    torch.set_num_threads(threads)
    try:
        for group in job:
            # The engine knows how long steps take only after the first evaluation.
            deadline.check(seconds * group[0].setup.training.evaluate_every)
            group[0].setup.prepare()
            train_together(group, deadline=deadline)
    except OutOfTime:
        pass
    except Exception as error:
        return _first_line(error)
    return None


def train(
    entries: Sequence[Entry], options: Options, deadline: Deadline, expected: Sequence[Forecast]
) -> dict[str, str]:
    """Train the models of all entries, in order; returns errors by the name of the entry."""
    names, jobs, begun = [], [], set()
    for entry, each in zip(entries, expected, strict=True):
        left = [] if each.expected == "not" else jobs_left(run_of(entry, options), entry)
        for job, seconds in zip(left, each.pace or repeat(0.0), strict=False):
            # A model that earlier entries have, too, is trained there.
            groups = [[cell for cell in group if cell.name not in begun] for group in job]
            begun |= {cell.name for group in groups for cell in group}
            threads = torch.get_num_threads()
            jobs.append(partial(train_job, [*filter(None, groups)], seconds, threads, deadline))
            names.append(entry.name)
    with Workers(options.workers) as workers:
        errors = workers.call(jobs, names)
    return {name: error for name, error in zip(names, errors, strict=True) if error is not None}


def write_result(run: Run, deadline: Deadline) -> None:
    """Measure the trained models of an entry, and write its result and figures.

    Raises:
        OutOfTime: the time is over; the measures that are done stay.
    """
    longest = 0.0
    for cell in run.cells:
        began = deadline.clock()
        deadline.check(longest)
        cell.measure()
        longest = max(longest, deadline.clock() - began)
    deadline.check(longest)
    run.finish()


def work_off(
    entries: Sequence[Entry], options: Options, deadline: Deadline, expected: Sequence[Forecast]
) -> dict[str, str]:
    """Train the entries in order, until the time is over; when all are trained, write the results.

    An entry that fails does not keep the others from being trained.

    Returns:
        The errors by the name of the entry.
    """
    errors = {} if options.results else train(entries, options, deadline, expected)
    runs = {entry.name: run_of(entry, options) for entry in entries}
    waits = {name for name, run in runs.items() if state_of(run) in ("part", "not begun")}
    # Unless asked for, results wait until all is trained.
    if options.results or waits <= set(errors):
        for name, run in runs.items():
            try:
                if state_of(run) == "trained":
                    write_result(run, deadline)
            except OutOfTime:
                break
            except Exception as error:
                errors[name] = _first_line(error)
    return errors


def state_of(run: Run) -> str:
    """Whether an entry is `finished`, `trained`, there in `part` or `not begun`."""
    if all(cell.finished for cell in run.cells):
        return "finished" if (run.folder / "result.nc").exists() else "trained"
    return "part" if any(map(steps_of, run.cells)) else "not begun"


def positions(run: Run) -> dict[str, tuple[int, float]]:
    """The steps that each cell has done, and in how many seconds."""
    logs = {cell.name: read_log(cell.folder) for cell in run.cells}
    return {
        name: (int(log[-1]["step"]), log[-1]["seconds"]) if log else (0, 0.0)
        for name, log in logs.items()
    }


def record(entry: Entry, run: Run, before: dict[str, tuple[int, float]]) -> dict[str, Any]:
    """What a call has done of an entry, as JSON values."""
    cells = {}
    for cell, (name, (step, seconds)) in zip(run.cells, positions(run).items(), strict=True):
        new, duration = step - before[name][0], seconds - before[name][1]
        cells[name] = {"step": step, "of": cell.setup.training.n_steps, "new_steps": new}
        if new and duration > 0:
            cells[name]["steps_per_second"] = round(new / duration, 2)
    return {
        "entry": entry.name,
        "state": state_of(run),
        "together": entry.together,
        "folder": run.folder.name,
        "cells": cells,
    }


def run_list(entries: Sequence[Entry], options: Options, deadline: Deadline) -> dict[str, Any]:
    """Print what will be done, do it, write the report and print what is left.

    Args:
        entries: what is trained, in order.
        options: where and how.
        deadline: when to stop.

    Returns:
        The record of this call in the report.

    Raises:
        ValueError: a setting is unknown, or a value is not allowed.
        RunError: the device is not there.
    """
    check_available(options.device)
    runs = [run_of(entry, options) for entry in entries]
    before = [positions(run) for run in runs]
    began = deadline.clock()
    expected = [Forecast(expected="not")] * len(entries)
    if not options.results:
        expected = forecast(entries, options, deadline)
        table = forecast_table(entries, expected, deadline.at - began)
        console(table).print(table)
    errors = work_off(entries, options, deadline, expected)
    records = [record(*each) for each in zip(entries, runs, before, strict=True)]
    call = {
        "at": folders.now(),
        "device": device_name(options.device),
        "versions": folders.library_versions(),
        "seconds": round(deadline.clock() - began, 1),
        "changes": list(options.changes),
        "entries": records,
        "errors": errors,
    }
    path = options.root / options.report
    calls = folders.read_json(path).get("calls", [])
    folders.write_json(path, {"calls": [*calls, call]})
    write = console().print
    for name, error in errors.items():
        write(f"{name} failed: {error}")
    left = [f"{each['entry']} ({each['state']})" for each in records if each["state"] != "finished"]
    write(f"left: {', '.join(left) or 'nothing'}")
    write(f"report: {path}", soft_wrap=True)
    return call


def device_name(device: str) -> str:
    """The name of a device, such as that of a GPU's model."""
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else device


def forecast_table(entries: Sequence[Entry], expected: Sequence[Forecast], seconds: float) -> Table:
    """What will be done, with the steps that are left and their time."""
    title = f"in {seconds / 60:.1f} minutes; without compilation, which makes steps faster"
    table = Table("entry", "together", "steps left", "seconds", "", title=title, box=SIMPLE)
    for entry, each in zip(entries, expected, strict=True):
        steps = "" if each.steps is None else f"{each.steps:,}"
        duration = "" if each.seconds is None else f"{each.seconds:,.0f}"
        table.add_row(entry.name, str(entry.together), steps, duration, each.expected)
    return table


def show(entries: Sequence[Entry], options: Options) -> None:
    """Print the list, with the command that shows all settings of an entry; run nothing."""
    write = console().print
    for entry in entries:
        run = run_of(entry, options)
        write(f"{entry.name}: {entry.why}; {len(run.cells)} models ({state_of(run)})")
        words = [f"--preset {run.plan.preset}", *changes_of(entry, options), "--show"]
        write(f"    python studies/{entry.study.name}.py {' '.join(words)}", soft_wrap=True)


def _first_line(error: Exception) -> str:
    line = (str(error) or type(error).__name__).splitlines()[0]
    # The message of an error that the engine does not raise, such as a key, says little alone.
    return (
        line if isinstance(error, RunError | TrainingError) else f"{type(error).__name__}: {line}"
    )
