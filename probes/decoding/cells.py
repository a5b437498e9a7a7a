"""What the decoders share: datasets to matrices, cells of a grid, folds."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float, Int, Shaped
from torch import Tensor
from transformer_lens.utilities.statistics import derive_generator

ALL = "all"

Split = tuple[xr.Dataset, Mapping[str, xr.Dataset]]
"""The dataset to fit to, and the named datasets to score on."""


@dataclass(frozen=True)
class Table:
    """One dataset as samples.

    Attributes:
        code: [sample, *cells, feature].
        label: [sample].
        kind: which samples share a label in the control task [sample].
        example: index of the example that a sample belongs to [sample].
        examples: how many examples there are.
        cells: by dim, the coordinate values as strings.
    """

    code: Float[np.ndarray, "sample ..."]
    label: Shaped[np.ndarray, " sample"]
    kind: Shaped[np.ndarray, " sample"] | None
    example: Int[np.ndarray, " sample"]
    examples: int
    cells: dict[str, list[str]]

    def features(self, cell: Sequence[int | None]) -> Float[Tensor, "sample feature"]:
        """The code of a cell; None stands for all values of that dim together."""
        index = tuple(slice(None) if at is None else at for at in cell)
        chosen = self.code[(slice(None), *index)]
        return torch.from_numpy(chosen.reshape(len(chosen), -1).astype(np.float64))


@dataclass(frozen=True)
class Layout:
    """Names of the variables, and the dims that make samples and cells."""

    code: str
    label: str
    kind: str | None
    samples: Sequence[str]
    cells: Sequence[str]


def read_table(name: str, data: xr.Dataset, layout: Layout) -> Table:
    """A dataset as a table of samples.

    Raises:
        KeyError: the dataset lacks a variable.
        ValueError: dims that do not fit, no samples, NaN or infinite values in code or label.
    """
    code, label, kind = layout.code, layout.label, layout.kind
    samples, cells = layout.samples, layout.cells
    for variable in (code, label, *([kind] if kind else [])):
        if variable not in data:
            raise KeyError(f"{name} has no variable {variable!r}, only {sorted(map(str, data))}")
    array = data[code]
    wanted = (*samples, *cells)
    missing = [dim for dim in wanted if dim not in array.dims]
    if missing or not samples or len(set(wanted)) != len(wanted):
        raise ValueError(
            f"samples {tuple(samples)} and cells {tuple(cells)} must be different dims of "
            f"{code!r}, which has {array.dims} in {name}"
        )
    features = [dim for dim in array.dims if dim not in wanted]
    ordered = array.transpose(*wanted, *features)
    sizes = [array.sizes[dim] for dim in samples]
    grid = [array.sizes[dim] for dim in cells]
    values = ordered.to_numpy().reshape(int(np.prod(sizes)), *grid, -1)
    if values.size == 0:
        raise ValueError(f"{code!r} is empty in {name}: sizes {dict(array.sizes)}")
    bad = int((~np.isfinite(values)).reshape(len(values), -1).any(axis=1).sum())
    if bad:
        raise ValueError(
            f"{code!r} must be finite, but in {name} {bad} of {len(values)} samples hold NaN or "
            "infinite values"
        )

    def per_sample(variable: str) -> np.ndarray:
        column = data[variable]
        extra = [dim for dim in column.dims if dim not in samples]
        if extra:
            raise ValueError(
                f"{variable!r} must have no dims but the samples {tuple(samples)}, "
                f"it has {column.dims} in {name}"
            )
        absent = {dim: array.sizes[dim] for dim in samples if dim not in column.dims}
        flat = column.expand_dims(absent).transpose(*samples).to_numpy().reshape(-1)
        if flat.dtype.kind == "f" and not np.isfinite(flat).all():
            raise ValueError(f"{variable!r} must be finite, it holds NaN or infinity in {name}")
        return flat

    return Table(
        code=values,
        label=per_sample(label),
        kind=per_sample(kind) if kind else None,
        example=np.repeat(np.arange(sizes[0]), len(values) // sizes[0]),
        examples=sizes[0],
        cells={
            dim: [str(value) for value in array[dim].to_numpy()]  # the index when it has no coord
            for dim in cells
        },
    )


@dataclass(frozen=True)
class Tables:
    """The table to fit to, and the tables to score on."""

    fit: Table
    tests: dict[str, Table]

    @property
    def every(self) -> list[Table]:
        """All of them, first the one to fit to."""
        return [self.fit, *self.tests.values()]


def read_sources(trained: Split, untrained: Split | None, layout: Layout) -> dict[str, Tables]:
    """Tables of the "probe", and of the "untrained" model when there is one, all of one layout.

    Raises:
        KeyError, ValueError: as `read_table`; layouts or splits that differ, no split.
    """
    sources: dict[str, Tables] = {}
    for source, split in {"probe": trained, "untrained": untrained}.items():
        if split is None:
            continue
        prefix = "" if source == "probe" else "untrained "
        fit, tests = split
        table = read_table(f"{prefix}fit", fit, layout)
        named = {
            name: read_table(f"{prefix}tests[{name!r}]", data, layout)
            for name, data in tests.items()
        }
        sources[source] = Tables(table, named)
        first = sources["probe"]
        if not tests or list(named) != list(first.tests):
            raise ValueError(
                f"{prefix}tests must name at least one dataset, and for an untrained model the "
                f"splits {list(first.tests)}, got {list(named)}"
            )
        for name, test in {"fit": table, **named}.items():
            if test.cells != first.fit.cells or test.code.shape[1:] != table.code.shape[1:]:
                raise ValueError(
                    f"{prefix}{name!r} must have the layout of fit: cells {first.fit.cells} and "
                    f"shape {table.code.shape[1:]} after the samples, got {test.cells} and "
                    f"{test.code.shape[1:]}"
                )
    return sources


def grid_of(table: Table) -> list[tuple[tuple[int | None, ...], tuple[int, ...]]]:
    """Each cell (an index or None per dim) with its place in an array that ends in "all"."""
    sizes = [len(values) for values in table.cells.values()]
    places = product(*(range(size + 1) for size in sizes))
    return [
        (tuple(None if at == size else at for at, size in zip(place, sizes, strict=True)), place)
        for place in places
    ]


def cell_coordinates(table: Table) -> dict[str, list[str]]:
    """Coordinate values of the cells' dims, with "all" at the end."""
    return {dim: [*values, ALL] for dim, values in table.cells.items()}


def standardise(
    fit: Float[Tensor, "sample feature"], *others: Float[Tensor, "other feature"]
) -> list[Tensor]:
    """Zero mean and unit variance on the fit side, and the others by the same map.

    Constant features (up to rounding) become zero on the fit side and stay unscaled.
    """
    mean, deviation = fit.mean(dim=0), fit.std(dim=0, correction=0)
    constant = deviation <= 1e-9 * (fit.abs().amax(dim=0) + 1e-30)
    scale = torch.where(constant, 1.0, deviation)
    # A constant feature tells nothing, whatever it is elsewhere.
    return [torch.where(constant, 0.0, (part - mean) / scale) for part in (fit, *others)]


def fold_of_samples(table: Table, folds: int, seed: int) -> Int[Tensor, " sample"]:
    """A fold per sample: examples are dealt out at random, in equal numbers.

    Raises:
        ValueError: fewer than 2 folds, or more folds than examples.
    """
    if not 2 <= folds <= table.examples:
        raise ValueError(f"folds must be in 2..{table.examples} (examples), got {folds}")
    order = torch.randperm(table.examples, generator=derive_generator(seed, "folds"))
    fold = torch.empty(table.examples, dtype=torch.long)
    fold[order] = torch.arange(table.examples) % folds
    return fold[torch.from_numpy(table.example)]


def check_numbers(penalties: Sequence[float], resamples: int) -> None:
    """Validate what both decoders take."""
    if not penalties or not all(0 < penalty < float("inf") for penalty in penalties):
        raise ValueError(f"penalties must be positive numbers, at least one, got {penalties}")
    if resamples < 1:
        raise ValueError(f"resamples must be at least 1, got {resamples}")


@contextmanager
def one_thread() -> Iterator[None]:
    """Keep torch on one thread: blocks this small only lose time in waiting for a second one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
