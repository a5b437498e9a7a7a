"""A study is a value: a question, a setup, axes, presets, measures, claims, a table and views."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

import xarray as xr

from studies.engine import settings
from studies.engine.cells import Measure, model_costs
from studies.engine.claims import Claim
from studies.engine.examples import first_batch
from studies.engine.fairness import TrainedIf
from studies.engine.folders import config_hash
from studies.engine.measures import configured
from studies.engine.readings import metric
from studies.engine.scoring import Scores
from studies.engine.setup import Setup
from studies.report.table import Row, Table, percent, short

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Grid = Mapping[str, Sequence[Any]]
"""The values of each axis by the name of its setting; cells are all combinations."""

Where = Mapping[str, Mapping[Any, str]]
"""Settings that follow from another one: `{"model": {"lstm": "training.clip=5 dropout=0.1"}}`."""


@dataclass(frozen=True, kw_only=True)
class Preset:
    """Named settings of a study: what differs from the study's own.

    Args:
        changes: as on the command line, `"n_layers=2 seed=0,1 decoding.n=100"`.
        grids: in place of the study's.
        where: in place of the study's.
        setup: in place of the study's.
        departures: what differs from the source that the preset follows, by setting, with the
            reason.
    """

    changes: str = ""
    grids: tuple[Grid, ...] | None = None
    where: Where | None = None
    setup: Setup | None = None
    departures: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Study:
    """A question, and all that answers it.

    Args:
        name: of its folders: `NAME-HASH`.
        question: in one sentence.
        setup: what is trained, with the settings of the preset `laptop`.
        grids: what varies: each maps settings to their values, and has a cell for every
            combination. Several make a grid that is not full.
        presets: further named settings; `laptop` is the study's own.
        where: settings that follow from another one's value; axes and the command line win.
        tuned: settings of which, for every condition, the value counts whose models have the best
            selecting metric, in the mean over seeds.
        draws: axes that are draws of the data: with the seed, they pair what claims compare.
        measures: what is looked at in every trained model, by the name of its group in the result:
            functions of a `Trained`, whose further parameters are settings; or dataclasses.
        along_training: measures that are also taken at the checkpoints of `training.keep_at`.
        trained: when a condition counts as trained.
        claims: what is claimed, of which the engine gives the verdicts.
        table: what is printed at the end; by default each metric on each split.
        views: the figures, by file name.
        export: writes further files into a folder, from the result.

    Raises:
        ValueError: names that are not known or taken.
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
    export: Callable[[xr.DataTree, Any], None] | None = None

    def __post_init__(self):
        own = {"training", "fairness", "claims", "summary", "scores", "costs"}
        if taken := sorted(own & set(self.measures)):
            raise ValueError(f"measures must not be named {', '.join(taken)}: the engine's own are")
        if unknown := sorted(set(self.along_training) - set(self.all_measures)):
            raise ValueError(f"along_training must name measures, got {', '.join(unknown)}")
        if len(set(map(first_batch, self.all_measures))) < len(self.all_measures):
            raise ValueError("two measures would share examples: rename one of them")
        if self.trained is not None and self.trained.metric not in self.setup.metrics:
            known = ", ".join(self.setup.metrics)
            raise ValueError(f"trained.metric must be one of {known}, got {self.trained.metric!r}")
        if len({claim.statement for claim in self.claims}) < len(self.claims):
            raise ValueError("claims must have different statements")
        measures = {name: configured(one) for name, one in self.measures.items()}
        object.__setattr__(self, "measures", measures)
        if self.table is None:
            object.__setattr__(self, "table", metrics_table(self))
        for name in (*self.tuned, *self.draws):
            settings.get(self.setup, name)

    @property
    def all_measures(self) -> dict[str, Measure]:
        """The engine's measures and the study's."""
        return {"scores": Scores(), "costs": model_costs} | dict(self.measures)

    def plan(self, preset: str = "laptop", changes: Sequence[str] = ()) -> Plan:
        """What is run with a preset and changed settings, such as `["seed=0,1"]`.

        Raises:
            ValueError: the preset or a setting is unknown, or a value is not allowed.
        """
        known = {"laptop": Preset()} | dict(self.presets)
        if preset not in known:
            raise ValueError(f"preset must be one of {', '.join(known)}, got {preset!r}")
        planning = _Planning(self, known[preset])
        planning.change(changes)
        return planning.plan(self, preset)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a study runs.

    Attributes:
        study: of which study.
        preset: the name of its settings.
        setup: the settings that all cells have but for axes and what follows from them.
        grids: see `Study`.
        where: the same, with values by setting in place of text.
        measures: see `Study.all_measures`, with their settings.
        cells: the setups.
        axes: by coordinate the setting that it is a value of.
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
        parts = ("setup", "grids", "where", "measures")
        of_parts = {name: settings.plain(getattr(self, name)) for name in parts}
        return {"study": self.study.name} | of_parts

    @property
    def settings(self) -> list[tuple[str, Any, str]]:
        """Name, value and documentation of all settings, those of measures after the setup's."""
        return settings.describe(self.setup) + settings.describe(_with_settings(self.measures))

    @property
    def folder_name(self) -> str:
        """The name of its folder."""
        return f"{self.study.name}-{config_hash(self.config)}"

    def coordinates(self, cell: Setup) -> dict[str, Any]:
        """The values of the axes in a cell: strings and numbers, None where one does not apply."""
        without = cell.inapplicable()
        return {
            name: None if path in without else _label(settings.get(cell, path))
            for name, path in self.axes.items()
        }

    def coordinates_of(self, *paths: str) -> list[str]:
        """The coordinates that settings are the values of, those that are axes."""
        return [name for path in paths for name, one in self.axes.items() if one == path]


class _Planning:
    """Settings of a preset, changed step by step."""

    def __init__(self, study: Study, preset: Preset):
        self._setup, self._measures = preset.setup or study.setup, study.all_measures
        grids = study.grids if preset.grids is None else preset.grids
        self._grids = [{name: tuple(values) for name, values in grid.items()} for grid in grids]
        # These win over what follows from other settings.
        self._fixed: set[str] = set()
        self.change(preset.changes.split())
        self._where = {
            name: {key: settings.read_single(text, self._setup) for key, text in table.items()}
            for name, table in (study.where if preset.where is None else preset.where).items()
        }

    def change(self, changes: Sequence[str]) -> None:
        """Put new values; all of one config at once, so that it is checked as a whole."""
        measures = _with_settings(self._measures)
        of_setup: dict[str, Any] = {}
        of_measures: dict[str, Any] = {}
        for name, values in settings.read(changes, measures, self._setup).items():
            if name.partition(".")[0] in measures:
                if values[1:]:
                    raise ValueError(f"{name} is a measure's and no axis: it has one value")
                of_measures[name] = values[0]
                continue
            self._fixed.add(name)
            of_setup[name] = next(iter(values))
            for grid in self._grids:
                if len(values) > 1 or name in grid:
                    grid[name] = values
        self._setup = settings.put(self._setup, of_setup)
        self._measures = settings.put(self._measures, of_measures)

    def plan(self, study: Study, preset: str) -> Plan:
        """What is run with these settings."""
        cells = dict.fromkeys(cell for grid in self._grids for cell in self._cells(grid))
        for cell in cells:
            cell.check()
        axes = dict.fromkeys(["model", "seed", *(name for grid in self._grids for name in grid)])
        return Plan(
            study=study,
            preset=preset,
            setup=self._setup,
            grids=tuple(self._grids),
            where=self._where,
            measures=self._measures,
            cells=tuple(cells),
            axes=_coordinate_names(list(axes)),
        )

    def _cells(self, grid: Mapping[str, tuple[Any, ...]]) -> Iterator[Setup]:
        """The setups of a grid, with what follows from the values of their settings."""
        for values in product(*grid.values()):
            changes = dict(zip(grid, values, strict=True))
            for setting, table in self._where.items():
                value = changes.get(setting, settings.get(self._setup, setting))
                follows = table.get(value, {}).items()
                changes |= {k: v for k, v in follows if k not in grid and k not in self._fixed}
            cell = settings.put(self._setup, changes)
            usual = {path: settings.get(self._setup, path) for path in cell.inapplicable()}
            yield settings.put(cell, usual)


def _with_settings(measures: Mapping[str, Measure]) -> dict[str, Any]:
    return {name: measure for name, measure in measures.items() if is_dataclass(measure)}


def metrics_table(study: Study) -> Table:
    """Each metric of a study's setup on each of its splits."""
    rows = [
        Row(f"{name}, {split}", metric(name, split), percent if one.percent else short)
        for name, one in study.setup.metrics.items()
        for split in study.setup.splits
    ]
    return Table(title=study.name.replace("_", " "), rows=tuple(rows))


def _coordinate_names(paths: list[str]) -> dict[str, str]:
    """Short names for settings: the last part, where no other has the same."""
    last = [path.rpartition(".")[2] for path in paths]
    return {
        (name if last.count(name) == 1 else path.replace(".", "_")): path
        for name, path in zip(last, paths, strict=True)
    }


def _label(value: Any) -> str | int | float:
    """The value of a setting as a coordinate."""
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, int | float):
        return value
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
