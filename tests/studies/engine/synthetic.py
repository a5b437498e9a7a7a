"""Synthetic results with chosen values, with the groups that claims and fairness need."""

import json

import numpy as np
import xarray as xr

from studies.engine.execution import chosen_cells


def result_of(
    cells, *, tuned=(), pairs=("seed",), metric="accuracy", better="higher", late_gain=0.0
):
    """A result with the groups `scores`, `training` and `costs`.

    Args:
        cells: for each cell a dict with its coordinates (None: does not apply), the scores `id`
            and `ood`, and optionally `validation` and `parameters`.
        tuned, pairs: names of the coordinates that are tuned, and that pair cells.
        metric, better: name and direction of the metric.
        late_gain: the late gain, a number or one per cell.
    """
    measured = ("id", "ood", "validation", "parameters")
    names = list(dict.fromkeys(name for cell in cells for name in cell if name not in measured))
    n = len(cells)
    values = np.array([[[cell["id"]], [cell["ood"]]] for cell in cells], dtype=float)
    attrs = {"long_name": metric, "better": better, "percent": 1}
    scores = xr.Dataset(
        {
            metric: (("cell", "split", "group"), values, attrs),
            f"{metric}_chance": (("cell", "split", "group"), 0 * values + 0.1, attrs),
        },
        coords={"split": ["id", "ood"], "group": ["all"], "cell": [f"c{k}" for k in range(n)]},
    )
    validation = [cell.get("validation", cell["id"]) for cell in cells]
    sign = {"long_name": "v", "sign": 1 if better == "higher" else -1}
    training = xr.Dataset(
        {
            "validation": ("cell", validation, sign),
            "updates": ("cell", np.full(n, 100)),
            "batch_size": ("cell", np.full(n, 8)),
            "late_gain": ("cell", np.broadcast_to(late_gain, n)),
            # A minute for each model.
            "seconds": (("cell", "train_step"), np.broadcast_to([30.0, 60.0, np.nan], (n, 3))),
        }
    )
    constant = ("operations", "operations_in_training", "depth", "depth_in_training")
    costs = xr.Dataset({name: ("cell", np.full(n, 5.0)) for name in constant})
    costs["parameters"] = ("cell", [float(cell.get("parameters", 100)) for cell in cells])
    coordinates = {}
    for name in names:
        column = [cell.get(name) for cell in cells]
        missing = "" if any(isinstance(value, str) for value in column) else np.nan
        coordinates[name] = ("cell", [missing if value is None else value for value in column])
    groups = {"scores": scores, "training": training, "costs": costs}
    groups = {name: data.assign_coords(coordinates) for name, data in groups.items()}
    axes = {
        "coordinates": {name: name for name in names},
        "pairs": list(pairs),
        "tuned": list(tuned),
    }
    chosen = ("cell", chosen_cells(groups, axes))
    tree = xr.DataTree.from_dict(
        {name: data.assign_coords(chosen=chosen) for name, data in groups.items()}
    )
    config = json.dumps({"setup": {}})
    tree.attrs = {"axes": json.dumps(axes), "seeds": "[0]", "config": config}
    return tree


def two_models(first, second, **settings):
    """A result of the models `a` and `b` with these `ood` scores, one per seed."""
    return result_of(
        [
            {"model": model, "seed": seed, "id": 0.9, "ood": score, **settings}
            for model, scores in (("a", first), ("b", second))
            for seed, score in enumerate(scores)
        ]
    )
