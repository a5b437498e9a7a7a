"""Results: one schema for all studies, and one way to join cells.

A result is an xarray DataTree. Every group but `fairness`, `claims` and `summary` has a dim `cell`,
the trained models, all in the same order, with a coordinate for each axis of the study:

- `scores` [cell, split, group]: each metric of the setup with `_low`, `_high` (95% over examples),
  `_untrained`, and known values such as `_chance` and `_paper`.
- `training` [cell, train_step, ...]: `loss`, each metric on the validation examples; `best_step`,
  `updates`, `batch_size`.
- `costs` [cell]: `parameters`, `operations`, `depth`.
- `fairness` [condition]: see `studies.engine.fairness.assess`.
- `claims` [claim]: see `studies.engine.claims.judge`.
- `summary` [condition, reading]: what the table shows, over seeds.
- a group for each measure, NaN in cells that it does not apply to.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import xarray as xr

from studies.engine.folders import write_atomically

SCHEMA_VERSION = 2

LARGE = 4096
"""Bytes of arrays that are worth compressing."""

GROUPS = ("scores", "training", "costs", "fairness", "claims", "summary")
"""Those that every result has."""

ATTRIBUTES = (
    *("schema_version", "study", "question", "preset", "config", "config_hash", "axes", "seeds"),
    *("created_at", "command", "device", "versions", "code", "accepted_code"),
    *("git_commits_of_training", "git_commits_of_analysis"),
)
"""Those that every result has: how it was made. Whatever is no string or number is JSON."""

DIMS = {
    "cell": "trained model",
    "condition": "cells that differ in seed, draw of the data and tuned settings alone",
    "claim": "comparison that a claim is about",
    "reading": "what is shown of a condition",
    "seed": "seed of the initial weights",
    "split": "split of the task",
    "group": "examples that are scored together",
    "metric": "what is scored",
    "train_step": "training step",
    "step": "step of the model",
    "layer": "layer, or all of them together",
    "head": "attention head",
    "pos": "position",
    "query_pos": "position that asks",
    "key_pos": "position that is asked",
    "expert": "module",
    "control": "whose data, or what labels, the score is of",
} | {name: name for name in ("example", "rule", "feature", "module", "operation")}
"""The dims that studies share, and what they are; further ones have a coordinate with its own."""


class SchemaError(ValueError):
    """A result does not follow the schema."""


def described(dims: Any, columns: Mapping[str, tuple[str, Any]]) -> dict[str, tuple]:
    """Variables for a dataset, by name: of the same dims, from what each is and its values."""
    return {
        name: (dims, np.asarray(values), {"long_name": about})
        for name, (about, values) in columns.items()
    }


def make_result(groups: Mapping[str, xr.Dataset], attrs: Mapping[Any, Any]) -> xr.DataTree:
    """A result of these groups, which are checked.

    Raises:
        SchemaError: says all that is wrong.
    """
    tree = xr.DataTree.from_dict(dict(groups))
    tree.attrs = {"schema_version": SCHEMA_VERSION, **attrs}
    for group in tree.subtree:
        for name, coordinate in group.coords.items():
            coordinate.attrs.setdefault("long_name", DIMS.get(str(name), str(name)))
    check_result(tree)
    return tree


def check_result(tree: xr.DataTree) -> None:
    """Raise a SchemaError, which says all that is wrong, unless a result follows the schema."""
    wrong = [f"attribute {name} is missing" for name in ATTRIBUTES if name not in tree.attrs]
    if (version := tree.attrs.get("schema_version")) not in (None, SCHEMA_VERSION):
        wrong.append(f"schema_version is {version}, not {SCHEMA_VERSION}")
    wrong += [f"group {name} is missing" for name in GROUPS if name not in tree.children]
    cells = {}
    for group in tree.subtree:
        if group.data_vars:
            wrong += [f"{group.path}: {problem}" for problem in _problems(group.to_dataset())]
        if "cell" in group.dims:
            cells[group.path] = tuple(group["cell"].to_numpy().tolist())
    if len(set(cells.values())) > 1:
        wrong.append(f"groups have different cells: {', '.join(cells)}")
    if wrong:
        raise SchemaError("; ".join(wrong))


def _problems(data: xr.Dataset) -> Iterator[str]:
    for name, values in data.variables.items():
        if not values.attrs.get("long_name"):
            yield f"{name} has no long_name"
        if values.dtype == object and any(value is None for value in values.to_numpy().ravel()):
            yield f"{name} has None, which no file can hold"
    for dim in data.dims:
        if dim not in DIMS and dim not in data.coords:
            yield f"dim {dim} is none of the schema's and has no coordinate"
    for name in data.data_vars:
        bounds = [data[f"{name}{end}"] for end in ("_low", "_high") if f"{name}{end}" in data]
        if len(bounds) == 1:
            yield f"{name} has one bound"
        elif bounds and (bounds[0] > bounds[1] + 1e-9).any():
            yield f"{name}_low is above {name}_high"


def join_cells(parts: Mapping[str, xr.DataTree]) -> dict[str, xr.Dataset]:
    """The groups of all cells, each along `cell`; cells without a group have NaN there.

    Labels are joined: a training step or depth that only some cells have is NaN in the others.
    `parts` is what was measured in each cell, by its name.
    """
    groups: dict[str, list[xr.Dataset]] = {}
    for name, tree in parts.items():
        for group in tree.subtree:
            if group.data_vars and group.path != "/":
                data = group.to_dataset(inherit=False).expand_dims(cell=[name])
                groups.setdefault(group.path.strip("/"), []).append(data)
    joined = {}
    for path, some in groups.items():
        whole = xr.concat(some, "cell", join="outer", combine_attrs="drop_conflicts")
        for dim in whole.dims:
            # Strings are sorted by an outer join; their first occurrence says more.
            if dim in whole.coords and whole[dim].dtype.kind in "OUT" and dim != "cell":
                order = dict.fromkeys(one for part in some for one in part[dim].to_numpy())
                whole = whole.reindex({dim: list(order)})
        # Whole numbers from a file would be written as such again, also where they are missing.
        joined[path] = whole.reindex(cell=list(parts)).drop_encoding()
    return joined


def cell_coordinates(values: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Coordinates of the cells for a file: what does not apply is NaN, or an empty string."""
    coordinates = {}
    for name in values[0]:
        column = [one[name] for one in values]
        if any(isinstance(value, str) for value in column):
            column = ["" if value is None else str(value) for value in column]
        elif None in column:
            column = [np.nan if value is None else float(value) for value in column]
        coordinates[name] = ("cell", np.array(column))
    return coordinates


def write_result(result: xr.DataTree, path: Path) -> None:
    """Write a result as netCDF, its large arrays of numbers compressed."""
    encoding = {
        group.path: {
            name: {"zlib": True}
            for name, values in group.data_vars.items()
            if values.dtype.kind in "biuf" and values.nbytes > LARGE
        }
        for group in result.subtree
    }
    write = functools.partial(result.to_netcdf, engine="h5netcdf", encoding=encoding)
    write_atomically(path, write)


def read_result(path: Path) -> xr.DataTree:
    """A result from its file, which is checked.

    Raises:
        SchemaError: it does not follow the schema.
        FileNotFoundError: there is none.
    """
    result = load_tree(path)
    check_result(result)
    return result


def load_tree(path: Path) -> xr.DataTree:
    """All that a netCDF file holds, in memory."""
    # DataTree.load leaves arrays on disk, and what is read later may be another file of that name.
    with xr.open_datatree(path, engine="h5netcdf", cache=False) as tree:
        groups = {group.path: group.to_dataset(inherit=False).load() for group in tree.subtree}
    return xr.DataTree.from_dict(groups)


def code_in(path: Path) -> dict[str, Any] | None:
    """The digests of the code that made a file, whose arrays stay unread; None without a file."""
    if not path.exists():
        return None
    with h5py.File(path) as file:
        return json.loads(str(file.attrs["code"]))


def config_of(result: xr.DataTree) -> dict[str, Any]:
    """All settings of a result, as JSON values."""
    return json.loads(result.attrs["config"])
