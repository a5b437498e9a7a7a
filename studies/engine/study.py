"""Studies: a question with its setup, axes, presets, measures, claims, table and views."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr

from studies.engine import settings
from studies.engine.cells import model_costs
from studies.engine.claims import Claim, judge
from studies.engine.examples import first_batch
from studies.engine.fairness import TrainedIf, assess
from studies.engine.folders import config_hash
from studies.engine.measures import configured
from studies.engine.readings import metric
from studies.engine.results import GROUPS
from studies.engine.scoring import Scores
from studies.engine.setup import Setup
from studies.engine.trained import Measure
from studies.report.table import Row, Table, percent, short

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Grid = Mapping[str, Sequence[Any]]
"""The values of each axis, by the path of its setting; cells are all combinations."""

Where = Mapping[str, Mapping[Any, str]]
"""Settings implied by another one: `{"model": {"lstm": "training.clip=5 dropout=0.1"}}`."""


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A named set of changes to a study's settings.

    Args:
        changes: changed settings, as on the command line: `"n_layers=2 seed=0,1 decoding.n=100"`.
            Of an axis of the preset's own grids they may take some values, not put others there.
        grids: replaces the study's grids.
        where: replaces the study's `where`.
        setup: replaces the study's setup.
        measures: names of the study's measures that are taken; by default all. For large grids that
            ask for scores alone, which are always taken, as costs are.
        departures: for each setting that departs from the source of the preset, the reason.

    Example:
        `Preset(changes="training.n_steps=20 seed=0")`
    """

    changes: str = ""
    grids: tuple[Grid, ...] | None = None
    where: Where | None = None
    setup: Setup | None = None
    measures: tuple[str, ...] | None = None
    departures: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Study:
    """A question, and the experiment that answers it.

    Args:
        name: prefix of its folders `NAME-HASH`.
        question: one sentence.
        setup: the model, task and training, with the settings of the preset `laptop`.
        grids: the axes. Each grid maps settings to their values and has a cell for every
            combination; with several grids, the cells are the union.
        presets: further presets by name; `laptop` is the study's own settings.
        where: settings implied by the value of another one; axes and the command line win.
        tuned: settings that are tuned: each condition uses the values whose models have the best
            selecting metric, averaged over seeds.
        draws: axes that are draws of the data; claims pair cells by them and by the seed.
        measures: analyses of every trained model, by the name of their group in the result:
            functions of a `Trained`, whose further parameters are settings; or dataclasses.
        along_training: measures that are also taken at the checkpoints of `training.keep_at`.
        trained: the criterion for a trained condition; None: not judged.
        claims: the claims that the engine decides.
        table: the table that is printed at the end; by default each metric on each split.
        views: functions of the result that draw a figure, by file name.
        browsers: functions of the result that return a chart (of Vega-Lite) with which examples are
            stepped through, by name; for the page of the result. See `studies.report.browsers`.
        export: function of the result and a folder that writes further files.

    Raises:
        ValueError: a name is unknown or already taken, or two claims have the same statement.

    Example:
        `Study(name="toy", question="Is it?", setup=MySetup(...), grids=({"seed": (0, 1)},))`
    """

    name: str
    question: str
    setup: Setup
    grids: tuple[Grid, ...]
    presets: Mapping[str, Preset] = field(default_factory=dict)
    table: Table = None  # pyright: ignore[reportAssignmentType]
    measures: Mapping[str, Measure] = field(default_factory=dict)
    where: Where = field(default_factory=dict)
    tuned: tuple[str, ...] = ()
    draws: tuple[str, ...] = ()
    along_training: tuple[str, ...] = ()
    trained: TrainedIf | None = None
    claims: tuple[Claim, ...] = ()
    views: Mapping[str, Callable[[xr.DataTree], Figure | None]] = field(default_factory=dict)
    browsers: Mapping[str, Callable[[xr.DataTree], dict[str, Any] | None]] = field(
        default_factory=dict
    )
    export: Callable[[xr.DataTree, Any], None] | None = None

    def __post_init__(self):
        if reserved := sorted({*GROUPS} & {*self.measures}):
            raise ValueError(
                f"measures must not be named {', '.join(reserved)}, which are groups of the engine"
            )
        if unknown := sorted({*self.along_training} - {*self.all_measures}):
            raise ValueError(f"along_training must name measures, got {', '.join(unknown)}")
        for preset in self.presets.values():
            if unknown := sorted({*(preset.measures or ())} - {*self.measures}):
                known = ", ".join(self.measures)
                raise ValueError(f"measures of a preset must be of {known}, got {unknown[0]}")
        if len(set(map(first_batch, self.all_measures))) < len(self.all_measures):
            raise ValueError("two measures would share examples: rename one of them")
        if self.trained is not None and self.trained.metric not in self.setup.metrics:
            metrics = ", ".join(self.setup.metrics)
            raise ValueError(
                f"trained.metric must be one of {metrics}, got {self.trained.metric!r}"
            )
        if len({claim.statement for claim in self.claims}) < len(self.claims):
            raise ValueError("claims must have different statements")
        self._check_coordinates()
        measures = {name: configured(measure) for name, measure in self.measures.items()}
        object.__setattr__(self, "measures", measures)
        if self.table is None:
            object.__setattr__(self, "table", metrics_table(self))
        for name in (*self.tuned, *self.draws):
            settings.get(self.setup, name)

    def _check_coordinates(self) -> None:
        """Check that claims name settings, since what no condition has is taken for not run."""
        presets = (preset.setup for preset in self.presets.values())
        setups = (self.setup, *(setup for setup in presets if setup is not None))
        paths = {path for setup in setups for path, *_ in settings.describe(setup)}
        taken = TAKEN.union(*(setup.metrics for setup in setups))
        known = {n for path in paths for n in (*_coordinate_names([path], taken), _joined(path))}
        for claim in self.claims:
            other = claim.other if isinstance(claim.other, Mapping) else {}
            if unknown := sorted({*claim.of, *other} - known):
                raise ValueError(
                    f"coordinates of a claim must be the last parts of settings, of "
                    f"{', '.join(sorted(known))}; got {', '.join(unknown)} in {claim.statement!r}"
                )

    @property
    def all_measures(self) -> dict[str, Measure]:
        """All measures by name: the engine's `scores` and `costs`, and the study's own."""
        return {"scores": Scores(), "costs": model_costs} | dict(self.measures)

    @property
    def settings(self) -> list[tuple[str, Any, str]]:
        """Path, default and documentation of all settings: the setup's, then the measures'."""
        return settings.describe(self.setup) + settings.describe(_with_settings(self.all_measures))

    def judge(self, result: xr.DataTree) -> dict[str, xr.Dataset]:
        """The groups of a result that follow from the others: `fairness`, `claims`, `summary`."""
        fairness = assess(result, self.trained)
        return {
            "fairness": fairness.data,
            "claims": judge(result, self.claims, fairness, self.setup.metrics),
            "summary": self.table.summary(result),
        }

    def plan(self, preset: str = "laptop", changes: Sequence[str] = ()) -> Plan:
        """The plan for a preset with changed settings, such as `["seed=0,1"]`.

        Raises:
            ValueError: the preset or a setting is unknown, a value is not allowed, a preset's
            changes put other values in place of those of its grids, there are no cells, two cells
            would have one folder, or an axis has the name of a variable of results.
            SettingTypeError: a setting has a type that settings cannot have.
        """
        presets = {"laptop": Preset()} | dict(self.presets)
        if preset not in presets:
            raise ValueError(f"preset must be one of {', '.join(presets)}, got {preset!r}")
        planner = _Planner(self, presets[preset])
        planner.change(changes)
        return planner.plan(self, preset)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The cells and measures of one run of a study.

    Attributes:
        study: the study.
        preset: name of the preset.
        setup: the settings that all cells share, except axes and what they imply.
        grids: see `Study`.
        where: see `Study`; with parsed values in place of text.
        measures: see `Study.all_measures`; with their settings.
        cells: the setup of each cell.
        axes: the path of the setting behind each coordinate.
    """

    study: Study
    preset: str
    setup: Setup
    grids: tuple[dict[str, tuple[Any, ...]], ...]
    where: Mapping[str, Mapping[Any, Mapping[str, Any]]]
    measures: Mapping[str, Measure]
    cells: tuple[Setup, ...]
    axes: Mapping[str, str]

    @property
    def config(self) -> dict[str, Any]:
        """All settings as JSON values."""
        fields = ("setup", "grids", "where", "measures")
        values = {name: settings.plain(getattr(self, name)) for name in fields}
        return {"study": self.study.name} | values

    @property
    def settings(self) -> list[tuple[str, Any, str]]:
        """Path, value and documentation of all settings: the setup's, then the measures'."""
        return settings.describe(self.setup) + settings.describe(_with_settings(self.measures))

    @property
    def folder_name(self) -> str:
        """The name of the run's folder: `NAME-HASH`."""
        return f"{self.study.name}-{config_hash(self.config)}"

    def coordinates(self, cell: Setup) -> dict[str, Any]:
        """The values of the axes in a cell: strings and numbers, None if one does not apply."""
        inapplicable = cell.inapplicable()
        return {
            name: None if path in inapplicable else _label(settings.get(cell, path))
            for name, path in self.axes.items()
        }

    def coordinates_of(self, *paths: str) -> list[str]:
        """The names of the coordinates for settings, without settings that are not axes."""
        return [name for path in paths for name, other in self.axes.items() if other == path]


TAKEN = frozenset(
    {
        *("cell", "chosen", "group", "split", "train_step"),
        *("n_examples", "parameters", "operations", "layer_operations", "depth"),
        *("training_loss", "current_rate", "seconds", "tested_step", "validation", "updates"),
        *("batch_size", "late_gain"),
    }
)
"""Names of variables that all results have, which no axis can have."""


class _Planner:
    """Collects the settings of a preset and of the command line, and builds the plan."""

    def __init__(self, study: Study, preset: Preset):
        self._setup, self._measures = preset.setup or study.setup, study.all_measures
        if preset.measures is not None:
            left_out = {*study.measures} - {*preset.measures}
            self._measures = {k: v for k, v in self._measures.items() if k not in left_out}
        grids = study.grids if preset.grids is None else preset.grids
        # Numbers of NumPy, as in np.arange(3), become Python's.
        self._grids = [
            {name: tuple(map(_python_number, values)) for name, values in grid.items()}
            for grid in grids
        ]
        settings.check_types(self._setup)
        settings.check_types(_with_settings(self._measures))
        for path, values in (item for grid in self._grids for item in grid.items()):
            settings.check_types(values, path)
        # Settings that were changed explicitly win over implied ones.
        self._explicit: set[str] = set()
        self.change(preset.changes.split(), replaces=preset.grids is None)
        self._where = {
            name: {key: settings.read_single(text, self._setup) for key, text in table.items()}
            for name, table in (study.where if preset.where is None else preset.where).items()
        }
        models = self._setup.models()
        if unknown := [
            name for name in self._where.get("model", ()) if models and name not in models
        ]:
            raise ValueError(
                f"`where` must be of models {', '.join(models)}, got {', '.join(unknown)}"
            )

    def change(self, changes: Sequence[str], *, replaces: bool = True) -> None:
        """Apply changes such as `["seed=0,1"]` to the setup, the grids and the measures.

        Args:
            changes: the changes.
            replaces: whether they may replace the values of grids.
        """
        measures = _with_settings(self._measures)
        setup_changes: dict[str, Any] = {}
        measure_changes: dict[str, Any] = {}
        for name, values in settings.read(changes, measures, self._setup).items():
            if name.partition(".")[0] in measures:
                if values[1:]:
                    raise ValueError(
                        f"{name} must have a single value, since settings of measures cannot be "
                        f"axes, got {values}"
                    )
                measure_changes[name] = values[0]
                continue
            self._explicit.add(name)
            setup_changes[name] = values[0]
            self._grids = list(_with_axis(self._grids, name, values, replaces=replaces))
        self._setup = settings.put(self._setup, setup_changes)
        self._measures = settings.put(self._measures, measure_changes)

    def plan(self, study: Study, preset: str) -> Plan:
        """The plan with all settings collected so far."""
        cells = dict.fromkeys(cell for grid in self._grids for cell in self._cells(grid))
        if not cells:
            raise ValueError(f"grids must have cells, got {self._grids}")
        named: dict[str, Setup] = {}
        for cell in cells:
            cell.check()
            _check_difference(cell, named.setdefault(config_hash(cell), cell))
        axes = dict.fromkeys(["model", "seed", *(name for grid in self._grids for name in grid)])
        taken = TAKEN | {*self._setup.metrics}
        coordinates = _coordinate_names(list(axes), taken)
        if clash := sorted({*coordinates} & taken):
            raise ValueError(
                f"axes must not be named {', '.join(sorted(taken))}, as dims, metrics and other "
                f"variables of a result are, got {', '.join(clash)}"
            )
        return Plan(
            study=study,
            preset=preset,
            setup=self._setup,
            grids=tuple(self._grids),
            where=self._where,
            measures=self._measures,
            cells=tuple(cells),
            axes=coordinates,
        )

    def _cells(self, grid: Mapping[str, tuple[Any, ...]]) -> Iterator[Setup]:
        """The setups of a grid, with the settings that their values imply."""
        for values in product(*grid.values()):
            changes = dict(zip(grid, values, strict=True))
            for setting, table in self._where.items():
                value = changes.get(setting, settings.get(self._setup, setting))
                implied = table.get(value, {}).items()
                changes |= {k: v for k, v in implied if k not in grid and k not in self._explicit}
            cell = settings.put(self._setup, changes)
            shared = {path: settings.get(self._setup, path) for path in cell.inapplicable()}
            yield settings.put(cell, shared)


def _with_axis(
    grids: Sequence[dict[str, tuple[Any, ...]]],
    name: str,
    values: tuple[Any, ...],
    *,
    replaces: bool,
) -> Iterator[dict[str, tuple[Any, ...]]]:
    """Grids with values of a setting: a part of theirs if they have all, in their place if not.

    So `model=coda` leaves out a grid of other models, instead of giving CoDA its rates.

    Raises:
        ValueError: values would be replaced, and `replaces` is not set.
    """
    axis = dict.fromkeys(value for grid in grids for value in grid.get(name, ()))
    has_all = all(value in axis for value in values)
    if axis and not (has_all or replaces):
        raise ValueError(
            f"a preset's changes must not replace the values of its own grids, got {name} of "
            f"{', '.join(map(str, values))} in the changes and {', '.join(map(str, axis))} in the "
            "grids"
        )
    for grid in grids:
        if name not in grid:
            yield grid | {name: values} if len(values) > 1 else grid
        elif not has_all:
            yield grid | {name: values}
        elif own := tuple(value for value in values if value in grid[name]):
            yield grid | {name: own}


def _check_difference(cell: Setup, other: Setup) -> None:
    """Check that a cell and the one whose folder it would have are the same."""
    if cell == other:
        return
    for path, value, _ in settings.describe(cell):
        if value != settings.get(other, path):
            name = settings.text_of(value)
            raise ValueError(
                f"values of {path} must have different names, by which folders are named, got "
                f"{name} for both {settings.get(other, path)!r} and {value!r}"
            )


def _with_settings(measures: Mapping[str, Measure]) -> dict[str, Any]:
    return {name: measure for name, measure in measures.items() if is_dataclass(measure)}


def metrics_table(study: Study) -> Table:
    """The default table: each metric of a study's setup on each of its splits."""
    rows = [
        Row(f"{name}, {split}", metric(name, split), percent if definition.percent else short)
        for name, definition in study.setup.metrics.items()
        for split in study.setup.splits
    ]
    return Table(title=study.name.replace("_", " "), rows=tuple(rows))


def _coordinate_names(paths: list[str], taken: Collection[str]) -> dict[str, str]:
    """Coordinate names for settings: the last part of the path where it is unique and not taken."""
    last_parts = [path.rpartition(".")[2] for path in paths]
    return {
        (name if last_parts.count(name) == 1 and name not in taken else _joined(path)): path
        for name, path in zip(last_parts, paths, strict=True)
    }


def _joined(path: str) -> str:
    return path.replace(".", "_")


def _python_number(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def _label(value: Any) -> str | int | float:
    """The value of a setting as a coordinate label: a number or a string."""
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, int | float):
        return value
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
