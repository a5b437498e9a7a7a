"""Results of the modular routing study with chosen values."""

import json

import numpy as np
import xarray as xr

from studies.setups.equations import MODELS

SETTINGS = {
    "objective": "sampled",
    "selection_bottleneck": 0,
    "functional_bottleneck": "oracle",
    "module_keys": "direct",
    "pool": "mlp",
    "n_layers": 2,
    "n_operators": 5,
    "n_points": 5000,
}
VALUES = {"id": 0.05, "ood": 0.3, "specialization": 0.5, "collapse": 0.8, "attainable": 0.9}
VALUES |= {"sample": 0.001, "task": 0.01, "routed": 0.3, "null_sample": 0.1, "null_task": 0.4}
VALUES |= {"digits": 0.1}
CONSTANT = 0.5


def cell(model, **changes):
    """A condition with settings and values; the first claims of the paper hold for `MODELS`."""
    own = {
        "structural_oracle": {"id": 0.001, "ood": 0.002, "specialization": 1.0, "digits": 0.0}
        | {"selection_bottleneck": None},
        "cross_attention": {"specialization": 0.7, "ood": 0.2},
        "encoder": {"specialization": 0.3, "digits": 0.4},
        "monolithic": dict.fromkeys(VALUES, np.nan)
        | {"id": 0.01, "ood": 0.4}
        | dict.fromkeys(SETTINGS)
        | {"n_operators": 5, "n_points": 5000},
    }
    return {"model": model} | SETTINGS | VALUES | own.get(model, {}) | changes


def all_models(**changes):
    return [cell(model, **changes) for model in MODELS]


def made_up(rows, n_seeds=4):
    """A result of these conditions; the losses of a seed are a hundredth higher than before."""
    losses = {"id", "ood", "sample", "task", "routed", "null_sample", "null_task"}
    rows = [
        row | {name: row[name] * (1 + 0.01 * seed) for name in losses} | {"seed": seed}
        for row in rows
        for seed in range(n_seeds)
    ]

    def of(name):
        return np.array([row[name] for row in rows], dtype=float)

    def coordinate(name):
        column = [row[name] for row in rows]
        missing = "" if any(isinstance(value, str) for value in column) else np.nan
        return ("cell", [missing if value is None else value for value in column])

    coords = {name: coordinate(name) for name in ("model", "seed", *SETTINGS)}
    coords["cell"] = [str(number) for number in range(len(rows))]
    losses = np.array([of("id"), of("ood")]).T[..., None]
    routing = {"split": ["id"], "control": ["observed"], "layer": ["0", "1", "pooled"]}
    dims = ("cell", *routing)
    names = {"specialization": "specialization", "collapse": "collapse"}
    names |= {"collapse_attainable": "attainable"}
    paths = {
        "split": ["ood"],
        "control": ["trained", "untrained"],
        "path": ["sample", "task", "routed"],
    }
    trained, null = (
        np.array([of(name) for name in kinds]).T
        for kinds in (("sample", "task", "routed"), ("null_sample", "null_task", "routed"))
    )
    groups = {
        "scores": xr.Dataset(
            {
                "loss": (("cell", "split", "group"), losses),
                "loss_constant": (("cell", "split", "group"), np.full_like(losses, CONSTANT)),
                "chosen": ("cell", np.ones(len(rows), int)),
            },
            {"split": ["id", "ood"], "group": ["all"]},
        ),
        "specialization": xr.Dataset(
            {
                name: (dims, np.tile(of(value)[:, None, None, None], (1, 1, 1, 3)))
                for name, value in names.items()
            },
            routing,
        ),
        "paths": xr.Dataset(
            {"loss": (("cell", *paths), np.stack([trained, null], axis=1)[:, None])}, paths
        ),
        "combinations": xr.Dataset(
            {
                "digits": (
                    ("cell", "split", "layer"),
                    np.tile(of("digits")[:, None, None], (1, 1, 2)),
                )
            },
            {"split": ["id"], "layer": ["0", "1"]},
        ),
    }
    tree = xr.DataTree.from_dict({k: v.assign_coords(coords) for k, v in groups.items()})
    axes = {name: name for name in ("model", "seed", *SETTINGS)}
    tree.attrs["axes"] = json.dumps({"coordinates": axes, "pairs": ["seed"], "tuned": []})
    tree.attrs["config"] = json.dumps({"setup": {}})
    return tree
