"""Datasets as tables of samples, and the grid of cells that get a probe each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float, Int, Shaped
from torch import Tensor

ALL = "all"

Split = tuple[xr.Dataset, Mapping[str, xr.Dataset]]
"""The dataset to fit on, and the datasets to score on by name."""


@dataclass(frozen=True)
class Table:
    """A dataset as a table of samples.

    Attributes:
        code: features of each cell [sample, *cells, feature].
        label: label of each sample [sample].
        types: type of each sample in the control task [sample].
        example: index of each sample's example [sample].
        n_examples: number of examples.
        cells: coordinate values of each cell dim, as strings.
    """

    code: Float[np.ndarray, "sample ..."]
    label: Shaped[np.ndarray, " sample"]
    types: Shaped[np.ndarray, " sample"] | None
    example: Int[np.ndarray, " sample"]
    n_examples: int
    cells: dict[str, list[str]]

    def features(self, cell: Sequence[int | None]) -> Float[Tensor, "sample feature"]:
        """Take the code of a cell; None means all values of that dim together."""
        index = tuple(slice(None) if number is None else number for number in cell)
        code = self.code[(slice(None), *index)]
        return torch.from_numpy(code.reshape(len(code), -1).astype(np.float64))


@dataclass(frozen=True)
class Layout:
    """Names of the variables of a dataset, and its dims that index samples and cells."""

    code: str
    label: str
    types: str | None
    samples: Sequence[str]
    cells: Sequence[str]


def read_table(name: str, data: xr.Dataset, layout: Layout) -> Table:
    """Read a dataset as a table of samples.

    Raises:
        KeyError: the dataset lacks a variable.
        ValueError: dims do not match, there are no samples, or code or label are not finite.
    """
    code, label, types = layout.code, layout.label, layout.types
    samples, cells = layout.samples, layout.cells
    for variable in (code, label, *([types] if types else [])):
        if variable not in data:
            raise KeyError(f"{name} must hold {variable!r}, got {sorted(map(str, data))}")
    array = data[code]
    leading = (*samples, *cells)
    missing = [dim for dim in leading if dim not in array.dims]
    if missing or not samples or len(set(leading)) != len(leading):
        raise ValueError(
            f"samples and cells must be distinct dims of {code!r} in {name}, {array.dims}, got "
            f"{tuple(samples)} and {tuple(cells)}"
        )
    features = [dim for dim in array.dims if dim not in leading]
    ordered = array.transpose(*leading, *features)
    sizes = [array.sizes[dim] for dim in samples]
    cell_sizes = [array.sizes[dim] for dim in cells]
    values = ordered.to_numpy().reshape(int(np.prod(sizes)), *cell_sizes, -1)
    if values.size == 0:
        raise ValueError(f"{code!r} must not be empty, got sizes {dict(array.sizes)} in {name}")
    bad = int((~np.isfinite(values)).reshape(len(values), -1).any(axis=1).sum())
    if bad:
        raise ValueError(
            f"{code!r} must be finite, got {bad} of {len(values)} samples with NaN or infinite "
            f"values in {name}"
        )

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
        return flat

    return Table(
        code=values,
        label=per_sample(label),
        types=per_sample(types) if types else None,
        example=np.repeat(np.arange(sizes[0]), len(values) // sizes[0]),
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


def read_sources(trained: Split, untrained: Split | None, layout: Layout) -> dict[str, Tables]:
    """Read the tables of the "probe" and, if given, the "untrained" model, in one layout.

    Raises:
        KeyError, ValueError: as in `read_table`; or layouts or splits differ, or there is none.
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
        sources[source] = Tables(table, test_tables)
        probe = sources["probe"]
        if not tests or list(test_tables) != list(probe.tests):
            raise ValueError(
                f"{prefix}tests must name at least one dataset, and for an untrained model the "
                f"splits {list(probe.tests)}, got {list(test_tables)}"
            )
        for name, test in {"fit": table, **test_tables}.items():
            if test.cells != probe.fit.cells or test.code.shape[1:] != table.code.shape[1:]:
                raise ValueError(
                    f"{prefix}{name!r} must have the layout of fit: cells {probe.fit.cells} and "
                    f"shape {table.code.shape[1:]} after the samples, got {test.cells} and "
                    f"{test.code.shape[1:]}"
                )
    return sources


def grid_of(table: Table) -> list[tuple[tuple[int | None, ...], tuple[int, ...]]]:
    """List the cells (an index per dim, None for "all") with their index in the results.

    In the results "all" is the last coordinate of each cell dim.
    """
    sizes = [len(values) for values in table.cells.values()]
    indices = product(*(range(size + 1) for size in sizes))
    return [
        (tuple(None if i == size else i for i, size in zip(index, sizes, strict=True)), index)
        for index in indices
    ]


def cell_coordinates(table: Table) -> dict[str, list[str]]:
    """List the coordinate values of each cell dim in the results, "all" last."""
    return {dim: [*values, ALL] for dim, values in table.cells.items()}
