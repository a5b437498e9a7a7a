"""Results with values that a test chooses, as far as claims and fairness read them."""

import json

import numpy as np
import xarray as xr

from studies.engine.execution import chosen_cells


def result_of(
    cells, *, tuned=(), pairs=("seed",), metric="accuracy", better="higher", late_gain=0.0
):
    """A result of cells: dicts of coordinates with `id`, `ood`, and perhaps `validation`.

    None in a coordinate: it does not apply.
    """
    own = ("id", "ood", "validation", "parameters")
    names = list(dict.fromkeys(name for cell in cells for name in cell if name not in own))
    n = len(cells)
    values = np.array([[[cell["id"]], [cell["ood"]]] for cell in cells], dtype=float)
    about = {"long_name": metric, "better": better, "percent": 1}
    scores = xr.Dataset(
        {
            metric: (("cell", "split", "group"), values, about),
            f"{metric}_chance": (("cell", "split", "group"), 0 * values + 0.1, about),
        },
        coords={"split": ["id", "ood"], "group": ["all"], "cell": [f"c{k}" for k in range(n)]},
    )
    sign = {"long_name": "v", "sign": 1 if better == "higher" else -1}
    numbers = {
        "validation": ([cell.get("validation", cell["id"]) for cell in cells], sign),
        "updates": (np.full(n, 100), {}),
        "batch_size": (np.full(n, 8), {}),
        "late_gain": (np.broadcast_to(late_gain, n), {}),
    }
    training = xr.Dataset({k: ("cell", v, attrs) for k, (v, attrs) in numbers.items()})
    fields = ("operations", "operations_in_training", "depth", "depth_in_training")
    costs = xr.Dataset({name: ("cell", np.full(n, 5.0)) for name in fields})
    costs["parameters"] = ("cell", [float(cell.get("parameters", 100)) for cell in cells])
    coordinates = {}
    for name in names:
        column = [cell.get(name) for cell in cells]
        empty = "" if any(isinstance(one, str) for one in column) else np.nan
        coordinates[name] = ("cell", [empty if one is None else one for one in column])
    groups = {"scores": scores, "training": training, "costs": costs}
    groups = {k: v.assign_coords(coordinates) for k, v in groups.items()}
    axes = {"coordinates": {n: n for n in names}, "pairs": list(pairs), "tuned": list(tuned)}
    chosen = chosen_cells(groups, axes)
    tree = xr.DataTree.from_dict(
        {k: v.assign_coords(chosen=("cell", chosen)) for k, v in groups.items()}
    )
    tree.attrs = {"axes": json.dumps(axes), "seeds": "[0]"}
    return tree


def two_models(first, second, *, better="higher", **more):
    """Cells of models `a` and `b`, a number of out-of-distribution scores each, a seed for each."""
    cells = [
        {"model": model, "seed": seed, "id": 0.9, "ood": value, **more}
        for model, values in (("a", first), ("b", second))
        for seed, value in enumerate(values)
    ]
    return result_of(cells, better=better)
