"""Running a study: its cells are trained and measured, joined into one result, and drawn."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xarray as xr
from threadpoolctl import threadpool_limits

from studies.engine import folders, results, settings
from studies.engine.cells import Cell, Trained, run_training
from studies.engine.claims import judge
from studies.engine.examples import Examples
from studies.engine.fairness import assess
from studies.engine.fingerprints import changed_files, code_of, sources_of
from studies.engine.folders import RunError
from studies.engine.processes import process_device
from studies.engine.reported import with_reported
from studies.engine.study import Plan, Study
from studies.engine.workers import Workers

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, kw_only=True)
class Resources:
    """Where, with what and how much of it anew a study runs.

    Args:
        root: folder under which the folders of the study and of its models lie.
        device: where models run: cpu, cuda, mps.
        workers: models that are trained and measured side by side (on one GPU: 1); a scheduler has
            its own.
        threads: CPU threads of each of them. The last bits of a result depend on it.
        scheduler: address of a running dask scheduler whose workers do so instead. They have
            modscope and the study installed, and see the root under the same absolute path.
        fresh: start over; earlier runs are moved aside.
        accept_code: take models that other code trained; the result says so.
        anew: a measure to compute again, though it is on disk; on the command line repeatedly.
        redraw: only join, judge and draw what is on disk.

    Raises:
        ValueError: there are no workers or threads.
    """

    root: Path = Path("runs")
    device: str = "cpu"
    workers: int = 1
    threads: int = 1
    scheduler: str | None = None
    fresh: bool = False
    accept_code: bool = False
    anew: tuple[str, ...] = ()
    redraw: bool = False

    def __post_init__(self):
        for name in ("workers", "threads"):
            if (n := getattr(self, name)) < 1:
                raise ValueError(f"{name} must be at least 1, got {n}")


def run(
    study: Study,
    preset: str = "laptop",
    changes: Sequence[str] = (),
    *,
    resources: Resources | None = None,
) -> Path:
    """Run a study, or finish it; gives its folder, `NAME-HASH`.

    What was finished before, by the same code, is not done again. Under `accelerate launch` or
    `torchrun` (with one worker) the processes train each model together.

    Args:
        study: what is run.
        preset: the name of settings.
        changes: settings that differ, such as `["training.n_steps=100", "seed=0,1"]`.
        resources: where and with what.

    Raises:
        ValueError: a preset, setting or measure is unknown, or a value is not allowed.
        RunError: a folder cannot be used, a checkpoint is damaged, or code has changed.
        TrainingError: a loss, gradient or weight is not finite.

    Example:
        `run(STUDY, "smoke", ["seed=0,1,2"], resources=Resources(root=Path("runs"), workers=2))`
    """
    return Run(study.plan(preset, changes), resources or Resources()).finish()


class Run:
    """A plan, and what of it is on disk.

    Args:
        plan: what is run.
        resources: where and with what.

    Raises:
        ValueError: a measure is unknown.
        RunError: what tasks read is not there.
    """

    def __init__(self, plan: Plan, resources: Resources):
        if unknown := sorted(set(resources.anew) - set(plan.measures)):
            known = ", ".join(plan.measures)
            raise ValueError(f"--measure must be one of {known}, got {', '.join(unknown)}")
        self.plan, self._resources = plan, resources
        self._rank, self._device = process_device(resources.device)
        self.folder = resources.root / plan.folder_name
        # Paths for workers are absolute: they need not be in this process's directory.
        cell = partial(
            Cell,
            root=resources.root.absolute(),
            device=self._device,
            accept_code=resources.accept_code,
            measures=plan.measures,
            along=plan.study.along_training,
        )
        self.cells = list(map(cell, plan.cells))
        self.taken_from_disk = False

    def finish(self) -> Path:
        """Do what is left to be done; gives the folder."""
        resources = self._resources
        try:
            # Before there are workers: what they all read is missed, or made, once.
            for setup in {type(setup): setup for setup in self.plan.cells}.values():
                setup.prepare()
        except FileNotFoundError as error:
            raise RunError(str(error)) from error
        if self._rank > 0:
            # Processes that share the training of a model leave the rest to the first one.
            for number, cell in enumerate(self.cells):
                if resources.fresh or not cell.finished:
                    cell.train(position=number, shared=True)
            raise SystemExit(0)
        if resources.fresh:
            for folder in (self.folder, *(cell.folder for cell in self.cells)):
                folders.set_aside(folder)
        for name, cell in product(resources.anew, self.cells):
            cell.path_of(name).unlink(missing_ok=True)
        with folders.locked(self.folder):
            left = [cell for cell in self.cells if not cell.complete]
            if left and resources.redraw:
                names = ", ".join(cell.name for cell in left[:3])
                raise RunError(
                    f"--redraw needs all models and measures on disk; {len(left)} of "
                    f"{len(self.cells)} cells are not complete, such as {names}"
                )
            if not left and not resources.redraw:
                self.taken_from_disk = results.code_in(self.folder / "result.nc") == self.code()
            if not self.taken_from_disk:
                self._make_result(left)
        return self.folder

    def code(self) -> dict[str, Any]:
        """The digests of the code that training, each measure and the report run."""
        study, setups = self.plan.study, self.plan.cells
        measures = self.plan.measures.items()
        return {
            "training": code_of(*setups, run_training),
            "measures": {name: code_of(one, *setups, Trained, Examples) for name, one in measures},
            "report": code_of(study.table, *study.claims, *study.views.values(), Run),
            "claims": folders.config_hash([study.claims, study.trained]),
            "table": folders.config_hash(study.table),
            "reported": folders.config_hash([setup.paper() for setup in setups]),
        }

    def assemble(self, measured: Mapping[str, xr.DataTree]) -> xr.DataTree:
        """The result of what was measured in each cell, by its name."""
        plan, study = self.plan, self.plan.study
        groups = results.join_cells(measured)
        with_reported(groups["scores"], [setup.paper() for setup in plan.cells])
        documented = {name: about for name, _, about in settings.describe(plan.setup)}
        columns = results.cell_coordinates([plan.coordinates(setup) for setup in plan.cells])
        for name, path in plan.axes.items():
            columns[name] += ({"long_name": documented.get(path) or path},)
        for path, data in groups.items():
            if clash := sorted(set(columns) & set(data.variables)):
                raise ValueError(f"{path} must not have the names of axes: {', '.join(clash)}")
            groups[path] = data.assign_coords(columns)
        axes = {
            "coordinates": dict(plan.axes),
            "pairs": plan.coordinates_of("seed", *study.draws),
            "tuned": plan.coordinates_of(*study.tuned),
        }
        chosen = ("cell", chosen_cells(groups, axes), {"long_name": CHOSEN})
        groups = {path: data.assign_coords(chosen=chosen) for path, data in groups.items()}
        draft = xr.DataTree.from_dict(groups)
        draft.attrs = self._attributes(axes)
        fairness = assess(draft, study.trained)
        groups |= {
            "fairness": fairness.data,
            "claims": judge(draft, study.claims, fairness),
            "summary": study.table.summary(draft),
        }
        return results.make_result(groups, draft.attrs)

    def _make_result(self, left: Sequence[Cell]) -> None:
        """Train and measure what is left, side by side, join it with the rest, and draw."""
        resources, study = self._resources, self.plan.study
        folders.write_json(self.folder / "config.json", self.plan.config)
        draft = self.folder / ".result.nc"
        scheduler = resources.scheduler if left else None
        with Workers(resources.workers if left else 1, scheduler=scheduler) as workers:
            workers.begin(partial(code_of, *self.plan.cells, run_training), len(left))
            job = partial(work, threads=resources.threads)
            jobs = [partial(job, cell, cell.code(), n) for n, cell in enumerate(left)]
            names = [cell.name for cell in left]
            new = dict(zip(names, workers.call(jobs, names), strict=True))
            measured = {
                one.name: new[one.name] if one.name in new else one.measured() for one in self.cells
            }
            result = self.assemble(measured)
            results.write_result(result, draft)
            drawing = partial(draw, draft.absolute())
            workers.call([partial(drawing, *one) for one in study.views.items()], list(study.views))
        if study.export is not None:
            study.export(result, self.folder)
        # The result comes last: where it is, the figures are too.
        draft.replace(self.folder / "result.nc")

    def _attributes(self, axes: Mapping[str, Any]) -> dict[str, str]:
        """How the result was made; what is no text as JSON."""
        plan, selection = self.plan, self.plan.setup.selection
        made = [cell.made() for cell in self.cells]
        commits = {json.dumps(one.get("git", {}), sort_keys=True) for one in made}
        values = {
            "study": plan.study.name,
            "question": plan.study.question,
            "preset": plan.preset,
            "selection": selection.key,
            "selection_protocol": selection.protocol or "",
            "created_at": folders.now(),
            "trained_at": sorted({one.get("at", "") for one in made}),
            "config": plan.config,
            "config_hash": folders.config_hash(plan.config),
            "axes": axes,
            "code": self.code(),
            "git_commits_of_training": [json.loads(one) for one in sorted(commits)],
            "git_commits_of_analysis": folders.git_commits(sources_of(*plan.cells)),
            "accepted_code": {one.name: code for one in self.cells if (code := one.other_code())},
            "versions": folders.library_versions(),
            "seeds": sorted({setup.seed for setup in plan.cells}),
            "device": self._device,
            "command": folders.command_line(),
        }
        return {k: v if isinstance(v, str) else json.dumps(v) for k, v in values.items()}


CHOSEN = "1: no other value of the tuned settings has a better selecting metric, over seeds"


def work(cell: Cell, code: Mapping[str, str], position: int, *, threads: int) -> xr.DataTree:
    """Train and measure a cell: a job of a worker; gives what was measured.

    `code` is what training ran when the study began.
    """
    torch.set_num_threads(threads)
    if changed := changed_files(code, cell.code()):
        raise RunError(f"code was changed while the study ran: {', '.join(changed)}; start again")
    # NumPy's matrix products would else take all cores, which other workers are busy on.
    with threadpool_limits(threads):
        cell.train(position=position)
        return cell.measured()


def chosen_cells(groups: Mapping[str, xr.Dataset], axes: Mapping[str, Any]) -> np.ndarray:
    """1 for each cell whose tuned settings are the best of its condition's, else 0.

    The best by the selecting metric on the validation examples, in the mean over seeds and draws.
    """
    scores, validation = groups["scores"], groups["training"]["validation"]
    varied = [name for name in axes["coordinates"] if name not in axes["pairs"]]
    # As text: what does not apply is NaN, which is not equal to itself.
    labels = {name: [repr(value) for value in scores[name].to_numpy()] for name in varied}
    settings_of, condition_of = (
        [tuple(labels[name][cell] for name in names) for cell in range(len(validation))]
        for names in (varied, [name for name in varied if name not in axes["tuned"]])
    )
    values = validation.attrs["sign"] * validation.to_numpy()
    means = {one: values[[one == other for other in settings_of]].mean() for one in settings_of}
    best: dict[tuple[str, ...], tuple[str, ...]] = {}
    for condition, one in zip(condition_of, settings_of, strict=True):
        if condition not in best or means[one] > means[best[condition]]:
            best[condition] = one
    return np.array([one in best.values() for one in settings_of], dtype=np.int8)


def draw(path: Path, name: str, view: Callable[[xr.DataTree], Figure | None]) -> None:
    """Draw a view of a result file beside it, as PNG and PDF; figures of few seeds say so."""
    from matplotlib.pyplot import close

    result = _result_in(path, path.stat().st_mtime_ns)
    figure = view(result)
    if figure is None:
        return
    n_seeds = len(json.loads(result.attrs["seeds"]))
    if n_seeds < 3:
        note = "one seed" if n_seeds == 1 else "two seeds"
        figure.text(0.995, 0.995, note, ha="right", va="top", fontsize=7, color="#777777")
    # Both files have the layout that is found once: finding it takes half of the time.
    laid_out = figure.get_layout_engine() is not None
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    for kind in ("png", "pdf"):
        save = partial(figure.savefig, dpi=150, bbox_inches=None if laid_out else "tight")
        folders.write_atomically(path.with_name(f"{name}.{kind}"), save)
    close(figure)


@lru_cache(maxsize=1)
def _result_in(path: Path, _changed: int) -> xr.DataTree:
    """What a file holds, read once for all views that a process draws."""
    return results.load_tree(path)
