"""What is read from a result: a number for each cell, and the conditions that cells belong to."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr
from jaxtyping import Float, Int

from studies.report.names import name_of, setting_name

Values = Float[np.ndarray, " cell"]


@dataclass(frozen=True)
class Reading:
    """A number for each cell of a result, NaN where it was not measured.

    Readings are added, subtracted and divided, with one another and with numbers.

    Args:
        label: what it is.
        values: the result -> the numbers.
        bounds: the result -> lower and upper bounds over examples; None where there are none.
    """

    label: str
    values: Callable[[xr.DataTree], Values]
    bounds: Callable[[xr.DataTree], tuple[Values, Values]] | None = None

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
        """What a function makes of the numbers of this reading and others.

        Args:
            function: from an array [cell] of each reading to one of all.
            others: further readings, or numbers.
            between: joins the labels.

        Example:
            `metric("loss", "ood").apply(np.log2)`
        """
        readings = [self, *(x if isinstance(x, Reading) else constant(x) for x in others)]

        @np.errstate(invalid="ignore", divide="ignore")
        def values(result: xr.DataTree) -> Values:
            return function(*(reading.values(result) for reading in readings))

        return Reading(between.join(reading.label for reading in readings), values)

    def among(self, models: Sequence[str], **settings: Any) -> Reading:
        """The same of some models alone, with these values of the setup's settings; NaN for others.

        Example:
            `metric("loss", "ood").among(["encoder"], n_layers=2)`
        """

        def values(result: xr.DataTree) -> Values:
            cells, setup = result["scores"].coords, json.loads(result.attrs["config"])["setup"]
            known = np.isin(cells["model"], models)
            for name, value in settings.items():
                own = cells[name].to_numpy() if name in cells else setup[name]
                known = known & (own == value)
            return np.where(known, self.values(result), np.nan)

        return Reading(f"{self.label} of {', '.join(models)}", values)


def read(part: str, variable: str, /, *, mean: tuple[str, ...] = (), **select: Any) -> Reading:
    """A variable of a result's group, at one place.

    Args:
        part: a group of the result, for example "scores".
        variable: of that group.
        mean: dims to take the mean over.
        select: labels of the other dims; `group="all"`, say. A dim of a list of labels must be
            among `mean`.

    Example:
        `read("scores", "accuracy", split="ood", group="all")`
    """

    def take(result: xr.DataTree, suffix: str = "") -> Values:
        try:
            data = result[part][variable + suffix].sel(select).mean(mean)
        except KeyError:
            # A preset need not have every split, depth or model, nor a number its bounds.
            return np.full(result["scores"].sizes["cell"], np.nan)
        if data.dims != ("cell",):
            left = ", ".join(str(dim) for dim in data.dims if dim != "cell")
            raise ValueError(f"select or mean must name {left} of {part}/{variable}")
        return data.to_numpy().astype(float)

    label = f"{part}/{variable} ({', '.join(map(str, select.values()))})"
    # The bounds of a mean are not the mean of the bounds.
    bounds = None if mean else lambda result: (take(result, "_low"), take(result, "_high"))
    return Reading(label, take, bounds)


def metric(name: str, split: str, group: str = "all") -> Reading:
    """A metric of the setup on a split: `metric("accuracy", "ood")`."""
    return read("scores", name, split=split, group=group)


def constant(value: float) -> Reading:
    """The same number for every cell."""
    return Reading(f"{value:g}", lambda result: np.full(result["scores"].sizes["cell"], value))


@dataclass(frozen=True)
class Condition:
    """What cells that differ in seed, draw of the data and tuned settings have in common.

    Attributes:
        number: of it, among those of the result.
        values: by coordinate; None where one does not apply.
        tried: numbers of its cells.
        cells: of those with the chosen values of the tuned settings.
    """

    number: int
    values: Mapping[str, Any]
    tried: Int[np.ndarray, " cell"]
    cells: Int[np.ndarray, " cell"]

    def matches(self, wanted: Mapping[str, Any]) -> bool:
        """Whether it has these values; one that does not apply matches every value."""
        return all(
            self.values.get(name) == value or self.values.get(name, value) is None
            for name, value in wanted.items()
        )

    def words(self, names: Sequence[str]) -> list[str]:
        """What some of its values are called, where they apply and do not go without saying."""
        words = [setting_name(one, self.values[one]) for one in names]
        return [word for word in words if word] or [name_of(self.values["model"])]

    def label(self, names: Sequence[str]) -> str:
        """The same in a line."""
        return ", ".join(self.words(names))


def shown(value: Any) -> str:
    """The value of a coordinate in words: 2 for the 2.0 that it is beside cells without a value."""
    return str(int(value) if isinstance(value, float) and value.is_integer() else value)


def conditions_of(result: xr.DataTree) -> list[Condition]:
    """The conditions of a result, in the order of their first cells."""
    scores = result["scores"].to_dataset()
    axes = json.loads(result.attrs["axes"])
    names = [name for name in axes["coordinates"] if name not in axes["pairs"] + axes["tuned"]]
    columns = [_with_none(scores[name].to_numpy()) for name in names]
    chosen = np.flatnonzero(scores["chosen"])
    cells: dict[tuple[Any, ...], list[int]] = {}
    for cell in range(scores.sizes["cell"]):
        cells.setdefault(tuple(column[cell] for column in columns), []).append(cell)
    return [
        Condition(
            number,
            dict(zip(names, values, strict=True)),
            np.array(tried),
            np.intersect1d(tried, chosen),
        )
        for number, (values, tried) in enumerate(cells.items())
    ]


def varied(result: xr.DataTree) -> list[str]:
    """The coordinates in which conditions differ, `model` first."""
    conditions = conditions_of(result)
    return [
        name for name in conditions[0].values if len({one.values[name] for one in conditions}) > 1
    ] or ["model"]


def pairs_of(result: xr.DataTree, cells: Int[np.ndarray, " n"]) -> list[tuple[Any, ...]]:
    """What cells are paired by: their seed and draws of the data."""
    names = json.loads(result.attrs["axes"])["pairs"]
    columns = [result["scores"][name].to_numpy()[cells].tolist() for name in names]
    return list(zip(*columns, strict=True))


def _with_none(values: np.ndarray) -> list[Any]:
    """A coordinate's values, None where it does not apply (NaN or an empty string in a file)."""
    return [None if value == "" or value != value else value for value in values.tolist()]
