"""Results: the schema that all studies share, and functions to join, write and read them.

A result is an xarray DataTree. All groups except `fairness`, `claims` and `summary` have a dim
`cell` (the trained models, in the same order everywhere) with a coordinate for each axis of the
study:

- `scores` [cell, split, group]: each metric of the setup with `_low`, `_high` (95% interval over
  examples), `_untrained`, and references such as `_chance` and `_paper`.
- `training` [cell, train_step, ...]: `training_loss`, each metric on the validation examples;
  `tested_step`, `updates`, `batch_size`.
- `costs` [cell]: `parameters`, `operations`, `depth`.
- `fairness` [condition]: see `studies.engine.fairness.assess`.
- `claims` [claim]: see `studies.engine.claims.judge`.
- `summary` [condition, reading]: the numbers of the table, over seeds.
- one group per measure, NaN in cells that it does not apply to.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import netCDF4
import numpy as np
import pandas as pd
import xarray as xr

from studies.engine.folders import write_atomically
from studies.engine.settings import with_tuples

Config = TypeVar("Config")

SCHEMA_VERSION = 2

LARGE = 4096
"""Size in bytes above which an array is compressed."""

GROUPS = ("scores", "training", "costs", "fairness", "claims", "summary")
"""The groups that every result has."""

ATTRIBUTES = (
    *("schema_version", "study", "question", "preset", "config", "config_hash", "axes", "seeds"),
    *("created_at", "command", "device", "versions", "code", "accepted_code"),
    *("git_commits_of_training", "git_commits_of_analysis"),
)
"""The attributes that every result has; values other than strings and numbers are JSON."""

DIMS = {
    "cell": "trained model",
    "condition": "cells that differ in seed, draw of the data and tuned settings alone",
    "claim": "comparison that a claim is about",
    "reading": "what is shown of a condition",
    "seed": "seed of the initial weights",
    "split": "split of the task",
    "group": "examples that are scored together",
    "metric": "metric",
    "train_step": "training step",
    "step": "step of the model",
    "layer": "layer, or all of them together",
    "head": "attention head",
    "pos": "position",
    "query_pos": "query position",
    "key_pos": "key position",
    "expert": "module",
    "control": "model, labels or data that a score is computed on: observed, or a control",
} | {name: name for name in ("example", "rule", "feature", "module", "operation")}
"""The dims that studies share, with their long names; any other dim needs a coordinate."""


class SchemaError(ValueError):
    """A result does not follow the schema."""


def described(dims: Any, columns: Mapping[str, tuple[str, Any]]) -> dict[str, tuple]:
    """Variables for a dataset, all with the same dims.

    Args:
        dims: the dims.
        columns: long name and values of each variable, by name.
    """
    return {
        name: (dims, np.asarray(values), {"long_name": long_name})
        for name, (long_name, values) in columns.items()
    }


def make_result(groups: Mapping[str, xr.Dataset], attrs: Mapping[Any, Any]) -> xr.DataTree:
    """Assemble groups into a result and check it.

    Raises:
        SchemaError: the result does not follow the schema; the message lists all problems.
    """
    tree = xr.DataTree.from_dict(dict(groups))
    tree.attrs = {"schema_version": SCHEMA_VERSION, **attrs}
    for group in tree.subtree:
        for name, coordinate in group.coords.items():
            coordinate.attrs.setdefault("long_name", DIMS.get(str(name), str(name)))
    check_result(tree)
    return tree


def check_result(tree: xr.DataTree) -> None:
    """Check that a result follows the schema.

    Raises:
        SchemaError: it does not; the message lists all problems.
    """
    problems = [f"attribute {name} is missing" for name in ATTRIBUTES if name not in tree.attrs]
    if (version := tree.attrs.get("schema_version")) not in (None, SCHEMA_VERSION):
        problems.append(f"schema_version must be {SCHEMA_VERSION}, got {version}")
    problems += [f"group {name} is missing" for name in GROUPS if name not in tree.children]
    cells = {}
    for group in tree.subtree:
        if group.data_vars:
            data = group.to_dataset()
            found = (*_problems(data), *_problems_of_storage(data))
            problems += [f"{group.path}: {problem}" for problem in found]
        if "cell" in group.dims:
            cells[group.path] = tuple(group["cell"].to_numpy().tolist())
    if len(set(cells.values())) > 1:
        problems.append(f"groups have different cells: {', '.join(cells)}")
    if problems:
        raise SchemaError("; ".join(problems))


def check_measured(measured: xr.Dataset | xr.DataTree, axes: Collection[str]) -> None:
    """Check that what a measure returns for a cell will fit into a result.

    Args:
        measured: a dataset, or a tree of them.
        axes: names of the coordinates of cells.

    Raises:
        SchemaError: it will not; the message lists all problems.
    """
    tree = measured if isinstance(measured, xr.DataTree) else xr.DataTree(measured)
    problems = []
    for group in tree.subtree:
        data = group.to_dataset()
        problems += _problems(data)
        problems += [f"dim {dim} is that of models" for dim in data.dims if dim == "cell"]
        problems += [
            f"labels of {dim} must be different from one another, got {list(index)}"
            for dim, index in data.indexes.items()
            if not index.is_unique
        ]
        if clash := sorted({"chosen", *axes} & {*map(str, data.variables)}):
            problems.append(f"variables must not have names of axes, got {', '.join(clash)}")
    if problems:
        raise SchemaError("; ".join(problems))


def _problems_of_storage(data: xr.Dataset) -> Iterator[str]:
    """What a file cannot hold, or would not describe, one message each."""
    for name, values in data.variables.items():
        if name in data.coords and not values.attrs.get("long_name"):
            yield f"{name} has no long_name"
        if values.dtype == object:
            held = values.to_numpy().ravel()
            if any(value is None for value in held):
                yield f"{name} has None, which netCDF cannot store"
            # Where a model has no text, there is NaN.
            elif len({isinstance(value, str) for value in held if not pd.isna(value)}) > 1:
                yield f"{name} has both text and numbers, which netCDF cannot store"


def _problems(data: xr.Dataset) -> Iterator[str]:
    """Everything in a group that breaks the schema, one message each."""
    for name, values in data.data_vars.items():
        if not values.attrs.get("long_name"):
            yield f"{name} has no long_name"
    for dim in data.dims:
        if dim not in DIMS and dim not in data.coords:
            yield f"dim {dim} is not in the schema and has no coordinate"
    for name in data.data_vars:
        bounds = [data[f"{name}{end}"] for end in ("_low", "_high") if f"{name}{end}" in data]
        if len(bounds) == 1:
            yield f"{name} has only one bound"
        elif bounds and (bounds[0] > bounds[1] + 1e-9).any():
            yield f"{name}_low is above {name}_high"


def join_cells(cells: Mapping[str, xr.DataTree]) -> dict[str, xr.Dataset]:
    """Join the groups of all cells along a new dim `cell`.

    The join is outer: a group, training step or depth that only some cells have is NaN in the
    others.

    Args:
        cells: the measurements of each cell, by its name.

    Raises:
        SchemaError: the sizes of a dim without labels differ between cells.
    """
    groups: dict[str, list[xr.Dataset]] = {}
    for name, tree in cells.items():
        for group in tree.subtree:
            if group.data_vars and group.path != "/":
                data = group.to_dataset(inherit=False).expand_dims(cell=[name])
                groups.setdefault(group.path.strip("/"), []).append(data)
    joined = {}
    for path, datasets in groups.items():
        try:
            data = xr.concat(datasets, "cell", join="outer", combine_attrs="drop_conflicts")
        except xr.AlignmentError as error:
            raise SchemaError(f"{path} of different cells cannot be joined: {error}") from error
        for dim in data.dims:
            # An outer join sorts strings; the order of first occurrence is more useful.
            if dim in data.coords and data[dim].dtype.kind in "OUT" and dim != "cell":
                order = dict.fromkeys(
                    label for dataset in datasets for label in dataset[dim].to_numpy()
                )
                data = data.reindex({dim: list(order)})
        # The encoding from a cell's file would store integers that are now NaN as integers.
        joined[path] = data.reindex(cell=list(cells)).drop_encoding()
    return joined


def cell_coordinates(values: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Coordinate variables from the values of each cell; None becomes NaN, or "" among strings."""
    coordinates = {}
    for name in values[0]:
        column = [cell[name] for cell in values]
        if any(isinstance(value, str) for value in column):
            column = ["" if value is None else str(value) for value in column]
        elif None in column:
            column = [np.nan if value is None else float(value) for value in column]
        coordinates[name] = ("cell", np.array(column))
    return coordinates


def write_result(result: xr.DataTree, path: Path) -> None:
    """Write a result as netCDF, with large numeric arrays compressed."""
    encoding = {
        group.path: {
            name: {"zlib": True}
            for name, values in group.data_vars.items()
            if values.dtype.kind in "biuf" and values.nbytes > LARGE
        }
        for group in result.subtree
    }
    write_tree(result, path, encoding)


def write_tree(tree: xr.DataTree, path: Path, encoding: Mapping[str, Any] | None = None) -> None:
    """Write a tree as netCDF, atomically.

    Raises:
        RunError: the file cannot be written (no space, no permission); an old file stays.
    """

    def write(to: Path) -> None:
        try:
            tree.to_netcdf(to, engine="netcdf4", encoding=encoding)
        except RuntimeError as error:
            # HDF5 does not pass on what the operating system says, which mostly is this.
            full = shutil.disk_usage(to.parent).free < tree.nbytes
            raise OSError(os.strerror(errno.ENOSPC) if full else str(error)) from error

    write_atomically(path, write)


def read_result(path: str | Path) -> xr.DataTree:
    """Read a result file and check it.

    Raises:
        SchemaError: the result does not follow the schema.
        FileNotFoundError: there is no file.

    Example:
        `read_result("studies/results/raven_latent_code/curves.nc")["scores"]`
    """
    result = load_tree(path)
    check_result(result)
    return result


def load_tree(path: str | Path) -> xr.DataTree:
    """Load a netCDF file completely into memory."""
    # DataTree.load leaves arrays on disk, and the file may be replaced before they are read.
    with xr.open_datatree(path, engine="netcdf4", cache=False) as tree:
        groups = {group.path: group.to_dataset(inherit=False).load() for group in tree.subtree}
    return xr.DataTree.from_dict(groups)


def code_in(path: Path) -> dict[str, Any] | None:
    """The code digests in a file's attributes, without reading its arrays.

    None if there is no file, or a damaged one, so that it is made anew.
    """
    if not path.exists():
        return None
    try:
        with netCDF4.Dataset(path) as file:
            return json.loads(file.getncattr("code"))
    except OSError:
        return None


def is_result(path: Path) -> bool:
    """Whether a netCDF file is the result of a study, and not of a measure or of the ledger."""
    with netCDF4.Dataset(path) as file:
        return "config_hash" in file.ncattrs()


def config_of(result: xr.DataTree) -> dict[str, Any]:
    """All settings of the study that made a result, as JSON values."""
    return json.loads(result.attrs["config"])


def task_config_of(result: xr.DataTree, kind: type[Config], **changes: Any) -> Config:
    """The config of the task that a study trained on, with changes.

    Args:
        result: the result.
        kind: the dataclass of the config. Settings that an older result lacks have their defaults.
        changes: settings with other values.

    Example:
        `task_config_of(result, tasks.ESBNConfig, n_withheld=0)`
    """
    stored = config_of(result)["setup"]["task"]
    names = {field.name for field in fields(kind)}  # pyright: ignore[reportArgumentType]
    return kind(**{name: with_tuples(stored[name]) for name in names & set(stored)} | changes)
