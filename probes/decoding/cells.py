"""Datasets as tables of samples, and the grid of cells that get a probe each."""

import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from probes.decoding.axes import principal_axes

ALL = "all"

Split = tuple[xr.Dataset, Mapping[str, xr.Dataset]]
"""The dataset to fit on, and the datasets to score on by name."""


Cell = Sequence[int | None]
"""An index for each cell dim; None for all its values joined."""


@dataclass(frozen=True)
class Table:
    """A dataset as a table of samples.

    Attributes:
        name: what errors call the dataset.
        code: [*samples, *cells, *features], not in memory if the dataset is not.
        label: label of each sample [sample].
        types: type of each sample in the control task [sample].
        example: index of each sample's example [sample].
        n_examples: number of examples.
        cells: coordinate values of each cell dim, as strings.
    """

    name: str
    code: xr.DataArray
    label: Shaped[np.ndarray, " sample"]
    types: Shaped[np.ndarray, " sample"] | None
    example: Int[np.ndarray, " sample"]
    n_examples: int
    cells: dict[str, list[str]]

    def n_features(self, cell: Cell) -> int:
        """The number of features of a cell."""
        per_cell = self.code.size // len(self.label) // math.prod(map(len, self.cells.values()))
        counts = zip(cell, self.cells.values(), strict=True)
        return per_cell * math.prod(len(values) for number, values in counts if number is None)

    def blocks(self, cell: Cell) -> Iterator[Float[Tensor, "sample feature"]]:
        """Read the features of a cell, one value of its joined dims after another.

        Raises:
            ValueError: a value is not finite.
        """
        numbers = (
            range(len(values)) if number is None else (number,)
            for number, values in zip(cell, self.cells.values(), strict=True)
        )
        for index in product(*numbers):
            position = dict(zip(self.cells, index, strict=True))
            values = self.code[position].to_numpy().reshape(len(self.label), -1)
            if bad := int((~np.isfinite(values)).any(axis=1).sum()):
                where = ", ".join(f"{d} {self.cells[d][i]}" for d, i in position.items()) or "all"
                raise ValueError(
                    f"{self.code.name!r} must be finite, got {bad} of {len(values)} samples with "
                    f"NaN or infinite values in {self.name} ({where}); where samples lack some "
                    "steps, decode each step of those that have it: "
                    "data.isel(step=[i]).dropna('example')"
                )
            yield torch.from_numpy(values.astype(np.float64))

    def features(self, cell: Cell) -> Float[Tensor, "sample feature"]:
        """Read all features of a cell."""
        return torch.cat(list(self.blocks(cell)), dim=1)


@dataclass(frozen=True)
class Layout:
    """Names of the variables of a dataset, and its dims that index samples and cells."""

    code: str
    label: str
    types: str | None
    samples: Sequence[str]
    cells: Sequence[str]


def _check_order(variable: str, values: np.ndarray, name: str) -> None:
    """Check that objects can be sorted, as those of one type can."""
    try:
        np.unique(values)
    except TypeError:
        kinds = " and ".join(sorted({type(value).__name__ for value in values}))
        raise TypeError(
            f"{variable} must hold integers or strings, the same in all samples, got {kinds} in "
            f"{name}; leave out samples without a label (NaN or None)"
        ) from None


def read_table(name: str, data: xr.Dataset, layout: Layout) -> Table:
    """Read a dataset as a table of samples.

    Raises:
        KeyError: the dataset lacks a variable.
        TypeError: codes are not real numbers, or labels of several types.
        ValueError: dims do not match, there are no samples, or labels are not finite.
    """
    code, label, types = layout.code, layout.label, layout.types
    samples, cells = layout.samples, layout.cells
    for variable in (code, label, *([types] if types else [])):
        if variable not in data:
            held = textwrap.shorten(", ".join(sorted(map(str, data))), 500, placeholder=" ...")
            raise KeyError(f"{name} must hold {variable!r}, got {held or 'no variables'}")
    array = data[code]
    leading = (*samples, *cells)
    missing = [dim for dim in leading if dim not in array.dims]
    if missing or not samples or len(set(leading)) != len(leading):
        raise ValueError(
            f"samples and cells must be distinct dims of {code!r} in {name}, {array.dims}, got "
            f"{tuple(samples)} and {tuple(cells)}; pass the dims of which each value has a decoder "
            "of its own as `cells` (`cells=()`: there is one)"
        )
    if array.dtype.kind not in "biuf":
        raise TypeError(f"{code!r} must hold real numbers, got {array.dtype} in {name}")
    ordered = array.transpose(*leading, ...)
    sizes = [array.sizes[dim] for dim in samples]
    n_samples = math.prod(sizes)
    if array.size == 0:
        raise ValueError(f"{code!r} must not be empty, got sizes {dict(array.sizes)} in {name}")

    def per_sample(variable: str) -> np.ndarray:
        column = data[variable]
        extra = [dim for dim in column.dims if dim not in samples]
        if extra:
            raise ValueError(
                f"{variable!r} must have no dims but the samples {tuple(samples)}, "
                f"got {column.dims} in {name}"
            )
        missing_sizes = {dim: array.sizes[dim] for dim in samples if dim not in column.dims}
        flat = column.expand_dims(missing_sizes).transpose(*samples).to_numpy().reshape(-1)
        if flat.dtype.kind == "f" and not np.isfinite(flat).all():
            raise ValueError(f"{variable!r} must be finite, got NaN or infinity in {name}")
        if flat.dtype.kind == "O":
            _check_order(repr(variable), flat, name)
        return flat

    return Table(
        name=name,
        code=ordered,
        label=per_sample(label),
        types=per_sample(types) if types else None,
        example=np.repeat(np.arange(sizes[0]), n_samples // sizes[0]),
        n_examples=sizes[0],
        cells={
            dim: [str(value) for value in array[dim].to_numpy()]  # the index when it has no coord
            for dim in cells
        },
    )


@dataclass(frozen=True)
class Tables:
    """The table to fit on, and the tables to score on."""

    fit: Table
    tests: dict[str, Table]

    @property
    def all_tables(self) -> list[Table]:
        """The table to fit on, then the tables to score on."""
        return [self.fit, *self.tests.values()]

    def principal_axes(self, cell: Cell) -> list[Float[Tensor, "sample axis"]]:
        """The features of a cell in all tables, see `principal_axes`."""
        blocks = zip(*(table.blocks(cell) for table in self.all_tables), strict=True)
        return principal_axes(blocks, self.fit.n_features(cell))


def read_sources(trained: Split, untrained: Split | None, layout: Layout) -> dict[str, Tables]:
    """Read the tables of the "probe" and, if given, the "untrained" model, in one layout.

    Features are in the order of `fit`, by the names of their dims and by their labels.

    Raises:
        KeyError, ValueError: as in `read_table`; or layouts, labels of features or splits differ,
            or there is no split.
    """
    sources: dict[str, Tables] = {}
    for source, split in {"probe": trained, "untrained": untrained}.items():
        if split is None:
            continue
        prefix = "" if source == "probe" else "untrained "
        fit, tests = split
        table = read_table(f"{prefix}fit", fit, layout)
        test_tables = {
            name: read_table(f"{prefix}tests[{name!r}]", data, layout)
            for name, data in tests.items()
        }
        probe = sources.get("probe", Tables(table, test_tables))
        if not tests or list(test_tables) != list(probe.tests):
            raise ValueError(
                f"{prefix}tests must name at least one dataset, and for an untrained model the "
                f"splits {list(probe.tests)}, got {list(test_tables)}"
            )
        for name, test in {"fit": table, **test_tables}.items():
            sizes = [
                {str(dim): n for dim, n in one.code.sizes.items() if dim not in layout.samples}
                for one in (table, test)
            ]
            if test.cells != probe.fit.cells or sizes[0] != sizes[1]:
                raise ValueError(
                    f"{prefix}{name!r} must have the layout of fit: cells "
                    f"{_short(probe.fit.cells)} and sizes {sizes[0]} after the samples, got "
                    f"{_short(test.cells)} and {sizes[1]}"
                )
        aligned = {name: _aligned(test, table, layout) for name, test in test_tables.items()}
        sources[source] = Tables(table, aligned)
    return sources


def _aligned(test: Table, fit: Table, layout: Layout) -> Table:
    """Put the features of a table in the order of those of another one.

    Raises:
        ValueError: labels of features differ.
    """
    order = {}
    for dim in fit.code.dims[len(layout.samples) + len(layout.cells) :]:
        if dim not in fit.code.indexes or dim not in test.code.indexes:
            continue
        wanted, labels = fit.code.indexes[dim], test.code.indexes[dim]
        if labels.equals(wanted):
            continue
        if set(labels) != set(wanted) or not labels.is_unique:
            raise ValueError(
                f"{layout.code!r} must have the labels of {fit.name} along {dim!r}, "
                f"{_short(list(wanted))}, got {_short(list(labels))} in {test.name}"
            )
        order[dim] = labels.get_indexer(wanted)
    return replace(test, code=test.code.transpose(*fit.code.dims).isel(order))


def _short(value: object) -> str:
    return textwrap.shorten(str(value), 500, placeholder=" ...")


def grid_of(
    table: Table, *, joined: bool = True
) -> list[tuple[tuple[int | None, ...], tuple[int, ...]]]:
    """List the cells (an index per dim, None for "all") with their index in the results.

    In the results "all" is the last coordinate of each cell dim, if values are `joined`.
    """
    sizes = [len(values) for values in table.cells.values()]
    indices = product(*(range(size + joined) for size in sizes))
    return [
        (tuple(None if i == size else i for i, size in zip(index, sizes, strict=True)), index)
        for index in indices
    ]


def cell_coordinates(table: Table, *, joined: bool = True) -> dict[str, list[str]]:
    """List the coordinate values of each cell dim in the results, "all" last if `joined`."""
    return {dim: [*values, *[ALL] * joined] for dim, values in table.cells.items()}
