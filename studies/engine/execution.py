"""Running a study: its cells are trained and measured, joined into one result, and drawn."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xarray as xr
from threadpoolctl import threadpool_limits

from studies.engine import settings
from studies.engine.cells import Cell, Measure, Trained, run_training
from studies.engine.checkpoints import read_log
from studies.engine.claims import judge
from studies.engine.examples import Examples
from studies.engine.fairness import assess
from studies.engine.fingerprints import changed_files, code_of, sources_of
from studies.engine.folders import (
    RunError,
    command_line,
    config_hash,
    git_commits,
    library_versions,
    locked,
    now,
    set_aside,
    write_atomically,
    write_json,
)
from studies.engine.processes import process_device
from studies.engine.results import (
    cell_coordinates,
    code_in,
    join_cells,
    make_result,
    write_result,
)
from studies.engine.scoring import training_dataset
from studies.engine.setup import Setup
from studies.engine.study import Plan, Study
from studies.engine.workers import run_side_by_side

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, kw_only=True)
class Resources:
    """Where, with what and how much of it anew a study runs.

    Args:
        root: folder under which the folders of the study and of its models lie.
        device: where models run: `cpu`, `cuda`, `mps`.
        workers: models that are trained and measured side by side; a scheduler has its own.
        threads: CPU threads of each of them. The last bits of a result depend on it.
        scheduler: address of a running dask scheduler whose workers do so instead. They have
            modscope and the study installed, and see `root` under the same absolute path.
        fresh: do not go on from, but move aside, what an earlier run left.
        accept_code: take models that other code trained; the result says so.
        anew: measures to compute again, whether they are on disk or not.
        redraw: only join, judge and draw what is on disk.
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
        # Workers elsewhere need not be in this process's directory.
        self.folder = resources.root / plan.folder_name
        self.cells = [
            Cell(
                setup,
                root=resources.root.absolute(),
                device=self._device,
                accept_code=resources.accept_code,
            )
            for setup in plan.cells
        ]
        self.taken_from_disk = False

    def finish(self) -> Path:
        """Do what is left to be done; gives the folder."""
        self._prepare()
        if self._rank > 0:
            # Processes that share the training of a model leave the rest to the first one.
            for number, cell in enumerate(self.cells):
                if self._resources.fresh or not cell.finished:
                    cell.shared_training(number)
            raise SystemExit(0)
        if self._resources.fresh:
            for folder in (self.folder, *(cell.folder for cell in self.cells)):
                set_aside(folder)
        for name in self._resources.anew:
            for cell in self.cells:
                cell.path_of(name, self.plan.measures[name]).unlink(missing_ok=True)
        with locked(self.folder):
            left = [cell for cell in self.cells if not self.is_complete(cell)]
            if left and self._resources.redraw:
                names = ", ".join(cell.name for cell in left[:3])
                raise RunError(
                    f"--redraw needs all models and measures on disk; {len(left)} of "
                    f"{len(self.cells)} cells are not complete, such as {names}"
                )
            if not left and not self._resources.redraw and self._is_current():
                self.taken_from_disk = True
                return self.folder
            write_json(self.folder / "config.json", self.plan.config)
            self._work(left)
            result = self.assemble()
            # The result comes last: where it is, the figures are too.
            draw(result, self.plan.study.views, self.folder)
            if self.plan.study.export is not None:
                self.plan.study.export(result, self.folder)
            write_result(result, self.folder / "result.nc")
        return self.folder

    def is_complete(self, cell: Cell) -> bool:
        """Whether a cell's model is trained and all is measured, by the code as it is now."""
        if not cell.finished or (cell.other_code() and not self._resources.accept_code):
            return False
        return all(cell.has(name, measure) for name, measure in self.plan.measures.items())

    def code(self) -> dict[str, Any]:
        """The digests of the code that training, each measure and the report run."""
        study, setups = self.plan.study, self.plan.cells
        measures = self.plan.measures.items()
        return {
            "training": code_of(*setups, run_training),
            "measures": {name: code_of(one, *setups, Trained, Examples) for name, one in measures},
            "report": code_of(study.table, *study.claims, *study.views.values(), Run),
            "claims": config_hash([study.claims, study.trained]),
            "table": config_hash(study.table),
        }

    def assemble(self) -> xr.DataTree:
        """The result of what is on disk."""
        plan = self.plan
        names = [cell.name for cell in self.cells]
        trees = [self._tree_of(cell) for cell in self.cells]
        groups = join_cells(trees, names)
        coordinates = cell_coordinates([plan.coordinates(setup) for setup in plan.cells])
        groups = {path: _with_coordinates(data, coordinates) for path, data in groups.items()}
        documented = {name: about for name, _, about in settings.describe(plan.setup)}
        for data in groups.values():
            for name, path in plan.axes.items():
                data[name].attrs["long_name"] = documented.get(path) or path
        pairs = [plan.coordinate_of(path) for path in ("seed", *plan.study.draws)]
        tuned = [plan.coordinate_of(path) for path in plan.study.tuned]
        axes = {
            "coordinates": dict(plan.axes),
            "pairs": [name for name in pairs if name],
            "tuned": [name for name in tuned if name],
        }
        chosen = chosen_cells(groups, axes)
        groups = {
            path: data.assign_coords(chosen=("cell", chosen, {"long_name": CHOSEN}))
            for path, data in groups.items()
        }
        draft = xr.DataTree.from_dict(groups)
        draft.attrs = self._attributes(axes)
        fairness = assess(draft, plan.study.trained)
        groups |= {
            "fairness": fairness.data,
            "claims": judge(draft, plan.study.claims, fairness),
            "summary": plan.study.table.summary(draft),
        }
        return make_result(groups, {str(name): value for name, value in draft.attrs.items()})

    def _prepare(self) -> None:
        try:
            # Before there are workers: what they all read is missed, or made, once.
            for setup in {type(setup): setup for setup in self.plan.cells}.values():
                setup.prepare()
        except FileNotFoundError as error:
            raise RunError(str(error)) from error

    def _work(self, cells: Sequence[Cell]) -> None:
        code = code_of(*(cell.setup for cell in self.cells), run_training)
        jobs = [
            functools.partial(
                work,
                cell.setup,
                root=self._resources.root.absolute(),
                device=self._device,
                threads=self._resources.threads,
                accept_code=self._resources.accept_code,
                measures=dict(self.plan.measures),
                along=self.plan.study.along_training,
                position=number,
                code=code,
                setups=self.plan.cells,
            )
            for number, cell in enumerate(cells)
        ]
        run_side_by_side(
            jobs,
            self._resources.workers,
            scheduler=self._resources.scheduler,
            names=[cell.name for cell in cells],
        )

    def _tree_of(self, cell: Cell) -> xr.DataTree:
        tree = xr.DataTree()
        for name, measure in self.plan.measures.items():
            for group, data in cell.read(name, measure).children.items():
                tree[group] = data.copy()
        tree["training"] = xr.DataTree(training_dataset(cell.setup, read_log(cell.folder)))
        return tree

    def _is_current(self) -> bool:
        return code_in(self.folder / "result.nc") == self.code()

    def _attributes(self, axes: Mapping[str, Any]) -> dict[str, Any]:
        plan = self.plan
        made = [cell.made() for cell in self.cells]
        accepted = {cell.name: files for cell in self.cells if (files := cell.other_code())}
        commits = {json.dumps(one.get("git", {}), sort_keys=True) for one in made}
        return {
            "study": plan.study.name,
            "question": plan.study.question,
            "preset": plan.preset,
            "selection": plan.setup.selection.key,
            "selection_protocol": plan.setup.selection.protocol or "",
            "created_at": now(),
            "trained_at": json.dumps(sorted({one.get("at", "") for one in made})),
            "config": json.dumps(plan.config),
            "config_hash": config_hash(plan.config),
            "axes": json.dumps(axes),
            "code": json.dumps(self.code()),
            "git_commits_of_training": json.dumps([json.loads(one) for one in sorted(commits)]),
            "git_commits_of_analysis": json.dumps(git_commits(sources_of(*plan.cells))),
            "accepted_code": json.dumps(accepted),
            "versions": json.dumps(library_versions()),
            "seeds": json.dumps(sorted({setup.seed for setup in plan.cells})),
            "device": self._device,
            "command": command_line(),
        }


CHOSEN = "1: no other value of the tuned settings has a better selecting metric, over seeds"


def work(
    setup: Setup,
    *,
    root: Path,
    device: str,
    threads: int,
    accept_code: bool,
    measures: Mapping[str, Measure],
    along: Sequence[str],
    position: int,
    code: Mapping[str, str],
    setups: Sequence[Setup],
) -> None:
    """Train and measure one cell: a job of a worker.

    Args:
        code: what the study began with.
        setups: those of all cells, whose code it is.
    """
    torch.set_num_threads(threads)
    if changed := changed_files(code, code_of(*setups, run_training)):
        raise RunError(f"code was changed while the study ran: {', '.join(changed)}; start again")
    cell = Cell(setup, root=root, device=device, accept_code=accept_code)
    # NumPy's matrix products would else take all cores, which other workers are busy on.
    with threadpool_limits(threads):
        cell.train(position=position)
        for name, measure in measures.items():
            cell.measure(name, measure, along=name in along)


def chosen_cells(groups: Mapping[str, xr.Dataset], axes: Mapping[str, Any]) -> np.ndarray:
    """1 for each cell whose tuned settings are the best of its condition's, else 0.

    The best by the selecting metric on the validation examples, in the mean over seeds and draws.
    """
    scores, training = groups["scores"], groups["training"]
    names = [name for name in axes["coordinates"] if name not in axes["pairs"]]
    keys = [
        tuple(repr(scores[name].to_numpy()[cell]) for name in names)
        for cell in range(scores.sizes["cell"])
    ]
    tuned = [names.index(name) for name in axes["tuned"]]
    sign = training["validation"].attrs["sign"]
    values = sign * training["validation"].to_numpy()
    means = {key: values[[k == key for k in keys]].mean() for key in dict.fromkeys(keys)}
    best: dict[tuple[str, ...], tuple[str, ...]] = {}
    for key, mean in means.items():
        condition = tuple(value for place, value in enumerate(key) if place not in tuned)
        if condition not in best or mean > means[best[condition]]:
            best[condition] = key
    return np.array([int(key in best.values()) for key in keys], dtype=np.int8)


def draw(result: xr.DataTree, views: Mapping[str, Any], folder: Path) -> None:
    """Draw every view of a result into a folder, as PNG and PDF; figures of few seeds say so."""
    if not views:
        return
    import matplotlib.pyplot as plt

    # Figures are for files: no window system is asked for.
    plt.switch_backend("agg")
    seeds = json.loads(result.attrs["seeds"])
    for name, view in views.items():
        figure: Figure | None = view(result)
        if figure is None:
            continue
        if len(seeds) < 3:
            note = "one seed" if len(seeds) == 1 else "two seeds"
            figure.text(0.995, 0.995, note, ha="right", va="top", fontsize=7, color="#777777")
        for kind in ("png", "pdf"):
            save = functools.partial(figure.savefig, dpi=150, bbox_inches="tight")
            write_atomically(folder / f"{name}.{kind}", save)
        plt.close(figure)


def _with_coordinates(data: xr.Dataset, coordinates: Mapping[str, Any]) -> xr.Dataset:
    if clash := sorted(set(coordinates) & (set(data.data_vars) | set(data.coords))):
        raise ValueError(f"variables must not have the names of axes: {', '.join(clash)}")
    return data.assign_coords(coordinates) if "cell" in data.dims else data
