"""Readings, which take one number per cell from a result, and the conditions that cells form."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr
from jaxtyping import Bool, Float, Int

from studies.engine.results import config_of
from studies.report.names import name_of, setting_names

Values = Float[np.ndarray, " cell"]


@dataclass(frozen=True)
class Reading:
    """A function from a result to one number per cell, NaN where it was not measured.

    Readings can be added, subtracted and divided, with one another and with numbers.

    Args:
        label: a short description.
        values: result -> values [cell].
        bounds: result -> lower and upper bounds [cell] of a 95% interval over examples; None
            where there are none.
        requires: settings that a cell must have to be read, with the allowed values.
        varies: settings of which a result must have several values to be read.
        metric: the metric of the setup whose values it has; None if it reads another thing.
        at_least: result -> whether a value is no more than a lower bound [cell], such as the steps
            of a training that ended before what they are counted to; None if none is. Lost where
            readings are combined.

    Example:
        `metric("accuracy", "id") - metric("accuracy", "ood")`
    """

    label: str
    values: Callable[[xr.DataTree], Values]
    bounds: Callable[[xr.DataTree], tuple[Values, Values]] | None = None
    requires: tuple[tuple[str, tuple[Any, ...]], ...] = ()
    varies: tuple[str, ...] = ()
    metric: str | None = None
    at_least: Callable[[xr.DataTree], Bool[np.ndarray, " cell"]] | None = None

    def __add__(self, other: Reading | float) -> Reading:
        return self.apply(np.add, other, between=" + ")

    def __sub__(self, other: Reading | float) -> Reading:
        return self.apply(np.subtract, other, between=" - ")

    def __rsub__(self, other: float) -> Reading:
        return constant(other) - self

    def __truediv__(self, other: Reading | float) -> Reading:
        return self.apply(np.divide, other, between=" / ")

    def apply(
        self, function: Callable[..., Any], *others: Reading | float, between: str = ", "
    ) -> Reading:
        """A reading computed by a function from this reading and others.

        Args:
            function: takes an array [cell] for each reading, and returns an array [cell].
            others: the other readings, or numbers.
            between: separator of the labels.

        Example:
            `metric("loss", "ood").apply(np.log2)`
        """
        readings = [self, *(x if isinstance(x, Reading) else constant(x) for x in others)]

        def values(result: xr.DataTree) -> Values:
            # Not as a decorator, which cannot be sent to the workers that draw.
            with np.errstate(invalid="ignore", divide="ignore"):
                return function(*(reading.values(result) for reading in readings))

        requires = tuple(one for reading in readings for one in reading.requires)
        varies = tuple(one for reading in readings for one in reading.varies)
        label = between.join(reading.label for reading in readings)
        return Reading(label, values, requires=requires, varies=varies)

    def among(self, models: Sequence[str], **settings: Any) -> Reading:
        """This reading for some models only, with these settings of the setup; NaN for others.

        Args:
            models: names of the models.
            settings: required values of settings; one that does not apply matches all.

        Raises:
            KeyError: there is no such setting.

        Example:
            `metric("loss", "ood").among(["encoder"], n_layers=2)`
        """

        def values(result: xr.DataTree) -> Values:
            cells, setup = result["scores"].coords, config_of(result)["setup"]
            selected = np.isin(cells["model"], models)
            for name, value in settings.items():
                if name in cells:
                    actual = with_none(cells[name].to_numpy())
                    selected &= [given is None or given == value for given in actual]
                else:
                    selected &= setup[name] == value
            return np.where(selected, self.values(result), np.nan)

        requires = (("model", tuple(models)), *((name, (of,)) for name, of in settings.items()))
        label = f"{self.label} of {', '.join(models)}"
        return replace(
            self, label=label, values=values, bounds=None, requires=self.requires + requires
        )


def unmeasured(result: xr.DataTree) -> Values:
    """What a reading gives where a result lacks what it reads: NaN for each cell."""
    return np.full(result["scores"].sizes["cell"], np.nan)


def read(part: str, variable: str, /, *, mean: tuple[str, ...] = (), **select: Any) -> Reading:
    """A reading of a variable in a group of the result, at given labels of its dims.

    Args:
        part: the group of the result, for example "scores".
        variable: the variable in that group.
        mean: dims to average over.
        select: labels of the other dims, for example `group="all"`. A dim with a list of labels
            must be in `mean`.

    Raises:
        ValueError: when read, if a dim other than `cell` is neither selected nor averaged over.

    Example:
        `read("scores", "accuracy", split="ood", group="all")`
    """

    def take(result: xr.DataTree, suffix: str = "") -> Values:
        try:
            data = result[part][variable + suffix].sel(select).mean(mean)
        except KeyError:
            # Not every preset has every split, depth or model, and not every variable has bounds.
            return unmeasured(result)
        if data.dims != ("cell",):
            missing = ", ".join(str(dim) for dim in data.dims if dim != "cell")
            names = ", ".join((*map(str, select), *mean)) or "none"
            raise ValueError(
                f"select and mean must name {missing} of {part}/{variable}, got {names}"
            )
        return data.to_numpy().astype(float)

    label = f"{part}/{variable} ({', '.join(map(str, select.values()))})"
    # The bounds of a mean are not the mean of the bounds.
    bounds = None if mean else lambda result: (take(result, "_low"), take(result, "_high"))
    return Reading(label, take, bounds)


def metric(name: str, split: str, group: str = "all") -> Reading:
    """A reading of a metric of the setup on a split: `metric("accuracy", "ood")`."""
    return replace(read("scores", name, split=split, group=group), metric=name)


def constant(value: float) -> Reading:
    """A reading that has the same value in every cell."""
    return Reading(f"{value:g}", lambda result: np.full(result["scores"].sizes["cell"], value))


@dataclass(frozen=True)
class Condition:
    """A group of cells that differ only in seed, draw of the data and tuned settings.

    Attributes:
        number: its index among the conditions of the result.
        values: the value of each other coordinate; None where it does not apply.
        fixed: the settings that all cells of the result share, by the last part of their path
            where it is unique.
        tried: indices of all its cells.
        cells: indices of the cells with the chosen values of the tuned settings.
    """

    number: int
    values: Mapping[str, Any]
    fixed: Mapping[str, Any]
    tried: Int[np.ndarray, " cell"]
    cells: Int[np.ndarray, " cell"]

    def matches(self, values: Mapping[str, Any]) -> bool:
        """Whether the condition has these values; one that does not apply matches all."""
        # None of a setting that all share is its value, such as no limit.
        return all(
            self.values[name] in (None, value)
            if name in self.values
            else name in self.fixed and self.fixed[name] == value
            for name, value in values.items()
        )

    def value_names(self, coordinates: Sequence[str]) -> list[str]:
        """Display names of some of its values, without those that need no mention."""
        names = setting_names({name: self.values[name] for name in coordinates})
        return names or [name_of(self.values["model"])]

    def label(self, coordinates: Sequence[str]) -> str:
        """`value_names`, joined by commas."""
        return ", ".join(self.value_names(coordinates))


def conditions_of(result: xr.DataTree) -> list[Condition]:
    """The conditions of a result, in the order of their first cells."""
    scores = result["scores"].to_dataset()
    axes = json.loads(result.attrs["axes"])
    names = [name for name in axes["coordinates"] if name not in axes["pairs"] + axes["tuned"]]
    columns = [with_none(scores[name].to_numpy()) for name in names]
    chosen = np.flatnonzero(scores["chosen"])
    fixed = _fixed(result.attrs["config"], tuple(axes["coordinates"].values()))
    cells: dict[tuple[Any, ...], list[int]] = {}
    for cell in range(scores.sizes["cell"]):
        cells.setdefault(tuple(column[cell] for column in columns), []).append(cell)
    return [
        Condition(
            number,
            dict(zip(names, values, strict=True)),
            fixed,
            np.array(tried),
            np.intersect1d(tried, chosen),
        )
        for number, (values, tried) in enumerate(cells.items())
    ]


@lru_cache(maxsize=256)
def _fixed(config_text: str, varied: tuple[str, ...]) -> Mapping[str, Any]:
    """The settings that all cells share, by the last part of their path.

    Args:
        config_text: all settings of the study that made a result, as JSON.
        varied: paths that differ between cells; what follows from them differs, too.
    """
    config = json.loads(config_text)
    follow = {
        path
        for table in config.get("where", {}).values()
        for implied in table.values()
        for path in implied
    }
    (flat,) = pd.json_normalize(config["setup"]).to_dict("records")
    last = {path: str(path).rpartition(".")[2] for path in flat}
    n_of_name = Counter(last.values())
    differ = follow.union(varied)
    return MappingProxyType(
        {
            name: flat[path]
            for path, name in last.items()
            if n_of_name[name] == 1 and path not in differ
        }
    )


def varied(result: xr.DataTree) -> list[str]:
    """The coordinates in which conditions differ; `["model"]` if they do not."""
    conditions = conditions_of(result)
    return [
        name
        for name in conditions[0].values
        if len({condition.values[name] for condition in conditions}) > 1
    ] or ["model"]


def pairs_of(result: xr.DataTree, cells: Int[np.ndarray, " n"]) -> list[tuple[Any, ...]]:
    """The seed and draws of the data of each cell, by which cells are paired."""
    names = json.loads(result.attrs["axes"])["pairs"]
    columns = [result["scores"][name].to_numpy()[cells].tolist() for name in names]
    return list(zip(*columns, strict=True))


def minus_that_of(
    reading: Reading,
    other: Callable[[Condition, Sequence[Condition]], Mapping[str, Any] | None],
    label: str,
) -> Reading:
    """A reading minus that of another condition, of the cell with the same seed and data.

    NaN for conditions that are not compared, and where there is no such cell.

    Args:
        reading: the reading.
        other: a condition, all conditions -> coordinates of the other condition; None if this one
            is not compared.
        label: a short description of the other condition.
    """

    def values(result: xr.DataTree) -> Values:
        value, conditions = reading.values(result), conditions_of(result)
        differences = unmeasured(result)
        for condition in conditions:
            if (wanted := other(condition, conditions)) is None:
                continue
            found = next((one for one in conditions if one.matches(wanted)), None)
            if found is None:
                continue
            theirs = dict(zip(pairs_of(result, found.cells), found.cells, strict=True))
            pairs = pairs_of(result, condition.cells)
            for cell, pair in zip(condition.cells, pairs, strict=True):
                if pair in theirs:
                    differences[cell] = value[cell] - value[theirs[pair]]
        return differences

    label = f"{reading.label}, minus {label}"
    return Reading(label, values, requires=reading.requires, varies=reading.varies)


def above_least(reading: Reading, axis: str) -> Reading:
    """A reading at the greatest value of a coordinate minus that at its least value.

    Example:
        `above_least(metric("accuracy", "ood"), "d_model")`
    """

    def least(condition: Condition, conditions: Sequence[Condition]) -> Mapping[str, Any] | None:
        values = sorted(
            {one.values[axis] for one in conditions if one.values.get(axis) is not None}
        )
        if len(values) < 2 or condition.values[axis] != values[-1]:
            return None
        return {**condition.values, axis: values[0]}

    difference = minus_that_of(reading, least, f"the least {axis}")
    return replace(difference, varies=(*reading.varies, axis))


def pairs_name(result: xr.DataTree) -> str:
    """What cells of a condition differ in: "seeds", or with draws of the data "models"."""
    return "seeds" if len(json.loads(result.attrs["axes"])["pairs"]) == 1 else "models"


def most_seeds(result: xr.DataTree) -> int:
    """The largest number of seeds of a condition."""
    seeds = result["scores"]["seed"].to_numpy()
    return max(len(np.unique(seeds[condition.cells])) for condition in conditions_of(result))


def with_none(values: np.ndarray) -> list[Any]:
    """The values of a coordinate, with None for NaN and "", which mean that it does not apply.

    Beside NaN, whole numbers are stored as floats: they are turned back.
    """

    def value_of(value: Any) -> Any:
        if value == "" or value != value:
            return None
        return int(value) if isinstance(value, float) and value.is_integer() else value

    return [value_of(value) for value in values.tolist()]
