"""Execution of a study: train and measure its cells, join them into one result, draw figures."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr

from studies.engine import folders, results, settings, zoo
from studies.engine.cells import Cell
from studies.engine.examples import Examples
from studies.engine.fingerprints import code_of, sources_of
from studies.engine.folders import RunError
from studies.engine.jobs import jobs_of, run_jobs
from studies.engine.papers import with_reported
from studies.engine.processes import check_available, process_device
from studies.engine.readings import most_seeds
from studies.engine.study import Plan, Study
from studies.engine.trained import Trained
from studies.engine.trainees import run_training
from studies.engine.training import Deadline
from studies.engine.training_config import preference
from studies.engine.workers import Workers

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from studies.report.page import Exhibit


@dataclass(frozen=True, kw_only=True)
class Resources:
    """Where a study runs, on which hardware, and which parts of it are recomputed.

    Args:
        root: folder that holds the folders of the study and of its models.
        device: where models run: cpu, cuda, mps.
        workers: models that are trained and measured in parallel; a scheduler has its own.
        threads: CPU threads per worker. The last bits of a result depend on it.
        together: models that differ in their seeds alone and are trained as one batched model,
            which is faster for small models. The last bits of a result depend on it.
        minutes: stop at the last checkpoint before so many minutes have passed; start again to go
            on.
        scheduler: address of a running dask scheduler whose workers run the cells instead. They
            have modscope installed, and see the root under the same absolute path.
        fresh: start over; earlier runs are moved aside.
        accept_code: accept models that other code trained; the result says so.
        pretrained: take models that have not begun to train from the zoo, `mechanisms.zoo`, if it
            has them, whatever code trained them; the result says so.
        anew: a measure to recompute although it is on disk; repeatable on the command line.
        redraw: join, judge and draw what is on disk; train and measure nothing.

    Raises:
        ValueError: `workers`, `threads` or `together` is less than 1, `minutes` is not greater
            than 0, `fresh` is set and `pretrained` or `redraw`, too, or `anew` and `redraw` are.
    """

    root: Path = Path("runs")
    device: str = "cpu"
    workers: int = 1
    threads: int = 1
    together: int = 1
    minutes: float = math.inf
    scheduler: str | None = None
    fresh: bool = False
    accept_code: bool = False
    pretrained: bool = False
    anew: tuple[str, ...] = ()
    redraw: bool = False

    def __post_init__(self):
        for name in ("workers", "threads", "together"):
            if (n := getattr(self, name)) < 1:
                raise ValueError(f"{name} must be at least 1, got {n}")
        Deadline.after(self.minutes)
        for name in ("pretrained", "redraw"):
            if self.fresh and getattr(self, name):
                raise ValueError(f"fresh, which trains all models anew, excludes {name}")
        if self.anew and self.redraw:
            raise ValueError("redraw, which computes no measure, excludes a measure to recompute")


def run(
    study: Study,
    preset: str = "laptop",
    changes: Sequence[str] = (),
    *,
    resources: Resources | None = None,
) -> Path:
    """Run a study, or resume it, and return its folder, `NAME-HASH`.

    Parts that the same code has already finished are loaded from disk. Under `accelerate launch`
    or `torchrun` (with one worker) the processes train each model together.

    Args:
        study: the study.
        preset: name of one of its presets.
        changes: settings that differ from the preset, such as
            `["training.n_steps=100", "seed=0,1"]`.
        resources: where it runs and on which hardware.

    Raises:
        ValueError: a preset, setting or measure is unknown, or a value is not allowed.
        RunError: a folder cannot be used, a checkpoint is damaged, code has changed, or
            `minutes` are over.
        TrainingError: a loss, gradient or weight is not finite.

    Example:
        `run(STUDY, "smoke", ["seed=0,1,2"], resources=Resources(root=Path("runs"), workers=2))`
    """
    return Run(study.plan(preset, changes), resources or Resources()).finish()


class Run:
    """A plan and its folder on disk.

    Args:
        plan: the cells and measures to run.
        resources: where it runs and on which hardware.

    Attributes:
        cells: the cells of the plan, with their folders.
        folder: the folder of the study.
        taken_from_disk: whether `finish` found a complete result made by the current code.

    Raises:
        ValueError: `resources.anew` names an unknown measure, or there is no such kind of device.
    """

    def __init__(self, plan: Plan, resources: Resources):
        if unknown := sorted(set(resources.anew) - set(plan.measures)):
            measures = ", ".join(plan.measures)
            raise ValueError(f"--measure must be one of {measures}, got {', '.join(unknown)}")
        self.plan, self._resources = plan, resources
        self._rank, self._device = process_device(resources.device)
        self.folder = resources.root / plan.folder_name
        # Absolute paths, since workers may have another working directory.
        cell = partial(
            Cell,
            root=resources.root.absolute(),
            device=self._device,
            accept_code=resources.accept_code,
            measures=plan.measures,
            along=plan.study.along_training,
            axes=plan.axes,
            zoo=zoo.names_by_identity(plan.study) if resources.pretrained else None,
        )
        self.cells = list(map(cell, plan.cells))
        self._deadline = Deadline.after(resources.minutes)
        self.taken_from_disk = False

    def prepare(self) -> None:
        """Make, or miss, the files that models share: once, before workers start.

        Raises:
            RunError: a task refuses its settings or misses a file, or a split has no examples left
                to score.
        """
        kinds = {
            (type(setup), getattr(setup, "task", None), setup.n_validation): setup
            for setup in self.plan.cells
        }
        for setup in kinds.values():
            try:
                setup.prepare()
            except (FileNotFoundError, ValueError) as error:
                raise RunError(str(error)) from error
            split, n_validation = setup.selection.split, setup.n_validation
            if (size := setup.size(split)) is not None and size <= n_validation:
                raise RunError(
                    f"n_validation must be less than the {size} examples of split {split!r}, the "
                    f"rest of which is scored, got {n_validation}"
                )

    def finish(self) -> Path:
        """Train, measure, join and draw what is not on disk yet; return the folder.

        Raises:
            RunError: a folder cannot be used, code has changed, the device is not there, or a file
                that a task needs is missing.
            TrainingError: a loss, gradient or weight is not finite.
        """
        resources = self._resources
        # With a scheduler models run on other machines.
        if resources.scheduler is None:
            check_available(self._device)
        self.prepare()
        if self._rank > 0:
            # Further processes only help the first one to train.
            for number, cell in enumerate(self.cells):
                if resources.fresh or not (cell.zoo_name or cell.finished):
                    cell.train(position=number, shared=True)
            raise SystemExit(0)
        with folders.locked(self.folder):
            if resources.fresh:
                folders.set_aside(self.folder)
            for cell in self.cells:
                if resources.fresh:
                    cell.set_aside()
                elif resources.anew:
                    cell.remove(resources.anew)
                cell.take_from_zoo()
            incomplete = [cell for cell in self.cells if not cell.complete]
            if incomplete and resources.redraw:
                first = incomplete[0]
                raise RunError(
                    f"--redraw needs all models and measures on disk; {len(incomplete)} of "
                    f"{len(self.cells)} cells are not complete, such as {first.name}: "
                    f"{first.lacks()}"
                )
            if not incomplete and not resources.redraw:
                path = self.folder / "result.nc"
                self.taken_from_disk = results.code_in(
                    path
                ) == self.code() and not self._measured_since(path)
            if not self.taken_from_disk:
                self._make_result(incomplete)
        return self.folder

    def code(self) -> dict[str, Any]:
        """Digests of the code that training, each measure and the report run, and `from_zoo`.

        Also of what else a result depends on that is not in the config of the plan.
        """
        study, setups = self.plan.study, self.plan.cells
        roles = [study.tuned, study.draws, study.along_training, [*study.views], [*study.browsers]]
        return {
            "training": code_of(*setups, run_training),
            "measures": {
                name: code_of(measure, *setups, Trained, Examples)
                for name, measure in self.plan.measures.items()
            },
            "report": code_of(*self._report()),
            "roles": folders.config_hash(roles),
            "question": study.question,
            "claims": folders.config_hash([study.claims, study.trained]),
            "table": folders.config_hash(study.table),
            "reported": folders.config_hash([setup.paper() for setup in setups]),
            "from_zoo": self.from_zoo(),
        }

    def _measured_since(self, path: Path) -> bool:
        """Whether measures are newer than a result, as after a kill, or by another study."""
        files = [cell.path_of(name) for cell in self.cells for name in self.plan.measures]
        made = path.stat().st_mtime_ns
        return any(file.stat().st_mtime_ns > made for file in files)

    def _report(self) -> tuple[Any, ...]:
        """What makes the result from measurements."""
        study = self.plan.study
        drawn = (*study.views.values(), *study.browsers.values())
        return study.table, *study.claims, *drawn, study.export, Run

    def from_zoo(self) -> dict[str, str]:
        """The names in the zoo of the models that were taken from there, by cell."""
        return {cell.name: cell.zoo_name for cell in self.cells if cell.zoo_name is not None}

    def assemble(self, measured: Mapping[str, xr.DataTree]) -> xr.DataTree:
        """Join the measurements of all cells into one result, and judge the claims.

        Args:
            measured: the groups of each cell, by its name.

        Raises:
            SchemaError: a measure does not follow the schema, or has a variable with the name of an
                axis.
        """
        plan, study = self.plan, self.plan.study
        groups = results.join_cells(measured)
        for name, data in groups.items():
            with_reported(data, [setup.paper() for setup in plan.cells], name)
        documentation = {name: text for name, _, text in settings.describe(plan.setup)}
        coordinates = results.cell_coordinates([plan.coordinates(setup) for setup in plan.cells])
        for name, path in plan.axes.items():
            coordinates[name] += ({"long_name": documentation.get(path) or path},)
        for path, data in groups.items():
            if clash := sorted(set(coordinates) & set(data.variables)):
                raise results.SchemaError(
                    f"variables of {path} must not have names of axes, got {', '.join(clash)}"
                )
            groups[path] = data.assign_coords(coordinates)
        axes = {
            "coordinates": dict(plan.axes),
            "pairs": plan.coordinates_of("seed", *study.draws),
            "tuned": plan.coordinates_of(*study.tuned),
        }
        chosen = ("cell", chosen_cells(groups, axes), {"long_name": CHOSEN})
        groups = {path: data.assign_coords(chosen=chosen) for path, data in groups.items()}
        draft = xr.DataTree.from_dict(groups)
        draft.attrs = self._attributes(axes)
        return results.make_result(groups | study.judge(draft), draft.attrs)

    def _make_result(self, incomplete: Sequence[Cell]) -> None:
        """Train and measure incomplete cells in parallel, join all cells, and draw the figures."""
        resources, study = self._resources, self.plan.study
        folders.write_json(self.folder / "config.json", self.plan.config)
        draft = self.folder / ".result.nc"
        scheduler = resources.scheduler if incomplete else None
        # What is edited while models train must neither run nor be taken for what has run.
        measuring = (*self.plan.measures.values(), Trained, Examples)
        reading = partial(code_of, *self.plan.cells, run_training, *measuring, *self._report())
        reading()
        with Workers(resources.workers if incomplete else 1, scheduler=scheduler) as workers:
            workers.begin(reading, len(incomplete))
            run_jobs(
                jobs_of(incomplete, resources.together),
                workers,
                threads=resources.threads,
                deadline=self._deadline,
            )
            result = self.assemble({cell.name: cell.load() for cell in self.cells})
            results.write_result(result, draft)
            drawings = [
                partial(draw, draft.absolute(), name, view) for name, view in study.views.items()
            ]
            exhibits = workers.call(drawings, list(study.views))
        if study.export is not None:
            study.export(result, self.folder)
        self._write_report(result, [exhibit for exhibit in exhibits if exhibit is not None])
        # The result is put in place last, so that it never exists without its figures and page.
        draft.replace(self.folder / "result.nc")

    def _write_report(self, result: xr.DataTree, exhibits: Sequence[Exhibit]) -> None:
        """Write the page of the result. What keeps it from being made does not end the run."""
        from studies.report.page import report

        path = self.folder / folders.REPORT
        path.unlink(missing_ok=True)
        try:
            page = report(result, self.plan.study, exhibits, "result.nc")
            folders.write_atomically(path, lambda to: to.write_text(page, encoding="utf-8"))
        except Exception as error:
            warnings.warn(f"{path} was not written: {error}", stacklevel=2)

    def _attributes(self, axes: Mapping[str, Any]) -> dict[str, str]:
        """The attributes of the result: text as it is, everything else as JSON."""
        plan, selection = self.plan, self.plan.setup.selection
        provenance = [cell.provenance() for cell in self.cells]
        commits = {json.dumps(record.get("git", {}), sort_keys=True) for record in provenance}
        values = {
            "study": plan.study.name,
            "question": plan.study.question,
            "preset": plan.preset,
            "selection": selection.key,
            "selection_protocol": selection.protocol or "",
            "created_at": folders.now(),
            "trained_at": sorted({record.get("at", "") for record in provenance}),
            "config": plan.config,
            "config_hash": folders.config_hash(plan.config),
            "axes": axes,
            "code": self.code(),
            "devices_of_training": sorted({record.get("device", "") for record in provenance}),
            "git_commits_of_training": [json.loads(commit) for commit in sorted(commits)],
            "git_commits_of_analysis": folders.git_commits(sources_of(*plan.cells)),
            "accepted_code": {
                cell.name: files for cell in self.cells if (files := cell.other_code())
            },
            "from_zoo": self.from_zoo(),
            "versions": folders.library_versions(),
            "seeds": sorted({setup.seed for setup in plan.cells}),
            "device": self._device,
            "command": folders.command_line(),
        }
        return {k: v if isinstance(v, str) else json.dumps(v) for k, v in values.items()}


Labels = tuple[str, ...]

CHOSEN = "1: no other value of the tuned settings has a better selecting metric, over seeds"


def chosen_cells(groups: Mapping[str, xr.Dataset], axes: Mapping[str, Any]) -> np.ndarray:
    """Mark the cells whose tuned settings are the best of their condition.

    The best settings have the best selecting metric on the validation examples. Any two are
    compared by averages over the seeds and draws of the data that both have: further ones of the
    best alone do not undo the choice, and further ones of the two best decide between them.

    Args:
        groups: with `scores` and `training`.
        axes: the attribute `axes` of a result.

    Returns:
        [cell]: 1 for each cell with the best settings, else 0.
    """
    scores, validation = groups["scores"], groups["training"]["validation"]
    values = validation.attrs["sign"] * validation.to_numpy()
    repeated, tuned, others = [], [], []
    for name in axes["coordinates"]:
        part = repeated if name in axes["pairs"] else tuned if name in axes["tuned"] else others
        # As text, because settings that do not apply are NaN, which is not equal to itself.
        part.append([repr(value) for value in scores[name].to_numpy()])
    of_cells = [
        tuple(tuple(column[cell] for column in part) for part in (others, tuned, repeated))
        for cell in range(len(values))
    ]
    tried: dict[Labels, dict[Labels, dict[Labels, float]]] = {}
    for (condition, candidate, repeat), value in zip(of_cells, values.tolist(), strict=True):
        tried.setdefault(condition, {}).setdefault(candidate, {})[repeat] = value
    best = {condition: _best(candidates) for condition, candidates in tried.items()}
    return np.array([best[condition] == candidate for condition, candidate, _ in of_cells], np.int8)


def _best(candidates: Mapping[Labels, Mapping[Labels, float]]) -> Labels:
    """The best candidate by the repeats that all have, unless another beats it by those of both."""

    def mean(candidate: Labels, repeats: set[Labels]) -> float:
        of_one = candidates[candidate]
        of_repeats = [of_one[repeat] for repeat in sorted(repeats or of_one)]
        return preference(float(np.mean(of_repeats)))

    shared = set[Labels].intersection(*(set(of_one) for of_one in candidates.values()))
    best, *others = sorted(candidates, key=lambda one: mean(one, shared), reverse=True)
    for other in others:
        both = set(candidates[best]).intersection(candidates[other])
        if mean(other, both) > mean(best, both):
            best = other
    return best


def draw(path: Path, name: str, view: Callable[[xr.DataTree], Figure | None]) -> Exhibit | None:
    """Draw a view of a result file into its folder, as PNG and PDF.

    Figures of one or two seeds are marked as such.

    Returns:
        The figure for the page of the result; None if there is none.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.backends.backend_pdf import FigureCanvasPdf
    from matplotlib.pyplot import close

    from studies.report.page import exhibit

    result = _load_cached(path, path.stat().st_mtime_ns)
    figure = view(result)
    if figure is None:
        return None
    n_seeds = most_seeds(result)
    if n_seeds < 3:
        note = "one seed" if n_seeds == 1 else "two seeds"
        figure.text(0.995, 0.995, note, ha="right", va="top", fontsize=7, color="#777777")
    layout = figure.get_layout_engine()
    if layout is not None:
        # Once for both files: it takes much of the drawing time.
        layout.execute(figure)
        figure.set_layout_engine("none")
    figure.dpi = 150
    for suffix, canvas_class in (("png", FigureCanvasAgg), ("pdf", FigureCanvasPdf)):
        if layout is None:
            save = partial(figure.savefig, dpi="figure", bbox_inches="tight")
        else:
            # `savefig` would first draw the figure once more, for a layout that stays as it is.
            save = getattr(canvas_class(figure), f"print_{suffix}")
        folders.write_atomically(path.with_name(f"{name}.{suffix}"), save)
    shown = exhibit(name, figure)
    close(figure)
    return shown


@lru_cache(maxsize=1)
def _load_cached(path: Path, _modified: int) -> xr.DataTree:
    """A result file, loaded once for all views that a process draws."""
    return results.load_tree(path)
