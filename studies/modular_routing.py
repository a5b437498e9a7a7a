"""Which router lets a modular network find the sub-tasks of its data, and where does it fail?

The claims of "Attention for Compositional Modularity" (Ostapenko et al. 2022): routing is what
fails out of distribution; the modules, on the best path, are excellent. Equations are learned, of
which some combinations of operators are held out, by networks whose router is told where to look
(the structural oracle) or must find out, and by one without modules.

    python studies/modular_routing.py                                     # 10 to 15 minutes
    python studies/modular_routing.py --preset smoke
    python studies/modular_routing.py selection_bottleneck=false,true objective=sampled,all_paths
    python studies/modular_routing.py --preset paper --device cuda --scheduler tcp://HOST:8786
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xarray as xr

import probes
from studies.engine import (
    Claim,
    Preset,
    Reading,
    Row,
    Study,
    Table,
    Trained,
    TrainedIf,
    TrainingConfig,
    constant,
    main,
    metric,
    read,
    short,
)
from studies.engine.results import config_of
from studies.report import plots
from studies.report.curves import training_curves
from studies.report.names import name_of
from studies.setups.equations import MODELS, MODULAR, ROUTERS, EquationsSetup
from studies.views import modular as views
from tasks import Batch, MathEquationsConfig

FULL, LOW, FAR = 0.95, 0.05, 0.1
"""Specialization that is full; loss that is low, as a share of a constant answer's; share of a loss
that is far below it."""


def choices(trained: Trained, batch: Batch) -> xr.DataArray:
    """The modules that the router chooses, one-hot [example, layer, module]."""
    hook, dims = "layers.*.hook_module_choice", ("example", "module")
    choice = probes.Quantity(hook, dims=dims, long_name="chosen module")
    batches = batch.parts(trained.setup.at_once)
    return probes.capture(trained.model, batches, {"choice": choice})["choice"]


@dataclass(frozen=True)
class Specialization:
    """Does each module serve one operation? On familiar and held-out combinations.

    Args:
        n: examples of each split, at most.
    """

    n: int = 5000

    def __call__(self, trained: Trained) -> xr.Dataset | None:
        """The figures of `probes.score_specialization` [split, ...]."""
        if trained.setup.model not in MODULAR:
            return None
        parts: list[xr.Dataset] = []
        for split in trained.setup.splits:
            batch = trained.batch(split, self.n)
            # A single layer has to perform a whole combination of operations.
            stacked = trained.setup.n_layers > 1
            wanted = batch.latents["operator"] if stacked else batch.latents["task"][:, None]
            scored = probes.score_specialization(
                choices(trained, batch),
                xr.DataArray(wanted.cpu().numpy(), dims=("example", "layer")),
                operations=trained.setup.operations,
                seed=trained.seed,
            )
            parts.append(scored.expand_dims(split=[split]))
        return xr.concat(parts, "split", combine_attrs="drop_conflicts")


@dataclass(frozen=True)
class Paths:
    """How good are the modules, apart from the router? And how many labels find the best path?

    Args:
        n: examples of each split, at most.
        examples: labelled ones of each held-out combination, from which its path is chosen; at most
            half of those that are looked at.
        memory: for the search, in bytes.
    """

    n: int = 5000
    examples: tuple[int, ...] = (1, 4, 16, 64)
    memory: int = 2**28

    def __call__(self, trained: Trained) -> xr.Dataset | None:
        """`loss`, `regret` [split, ...] and `task_loss` of `ood`, see `probes.score_paths`;
        `adapted`, `gap_closed` [examples], `routed`, `oracle` of `ood`, see `probes.adapt_paths`.
        """
        if trained.setup.model not in MODULAR:
            return None
        parts: list[xr.Dataset] = []
        held_out: list[xr.Dataset] = []
        for split in trained.setup.splits:
            batch = trained.batch(split, self.n)
            routed = torch.from_numpy(choices(trained, batch).argmax("module").to_numpy())
            more: dict[str, Any] = {"task": batch.latents["task"], "seed": trained.seed}
            more |= {"routed": routed.to(batch.mask.device), "memory_limit": self.memory}
            given = trained.model, batch.inputs, batch.targets
            scored = probes.score_paths(*given, untrained=trained.untrained, **more)
            parts.append(scored.drop_dims("task").expand_dims(split=[split]))
            if split == "ood":
                names = [trained.setup.combinations[task] for task in scored["task"].to_numpy()]
                adapted = probes.adapt_paths(*given, examples=self.examples, **more)
                held_out = [scored[["task_loss"]].assign_coords(task=names), adapted]
        found = xr.concat(parts, "split", combine_attrs="drop_conflicts")
        found["layer"] = found["layer"].astype(str)
        return xr.merge([found, *held_out], combine_attrs="drop_conflicts").drop_dims("repeat")


def routing(score: str) -> Reading:
    """A score of the routing of familiar combinations, all layers together."""
    return read("specialization", score, split="id", control="observed", layer="pooled")


def path_loss(path: str, control: str = "trained") -> Reading:
    """The loss of a kind of path on held-out combinations."""
    return read("paths", "loss", split="ood", control=control, path=path)


def calculated(apply: Callable[..., Any], *readings: Reading) -> Reading:
    """What a function makes of readings."""
    label = ", ".join(one.label for one in readings)
    return Reading(label, lambda result: apply(*(one.values(result) for one in readings)))


def among(models: tuple[str, ...], reading: Reading, n_layers: int = 2) -> Reading:
    """A reading of some models of a depth alone, NaN for all others."""

    def values(result: xr.DataTree) -> np.ndarray:
        cells, setup = result["scores"].coords, config_of(result)["setup"]
        deep = cells.get("n_layers", setup["n_layers"]) == n_layers
        return np.where(deep & np.isin(cells["model"], models), reading.values(result), np.nan)

    return Reading(f"{reading.label} of {', '.join(models)}", values)


ID, OOD = metric("loss", "id"), metric("loss", "ood")
ID_SHARE, OOD_SHARE = ID / metric("loss_constant", "id"), OOD / metric("loss_constant", "ood")
AT = {"split": "id", "control": "observed", "layer": ["0", "1"]}
BY_LAYER = read("specialization", "specialization", mean=("layer",), **AT)
# Above 1 where specialization is not full, or the OOD loss not low.
SHORTFALL = calculated(np.maximum, (constant(1) - BY_LAYER) / (1 - FULL), OOD_SHARE / LOW)
# Below 1 where the best path is far below the routed one, and below that of untrained modules.
BEST = {
    path: calculated(
        np.maximum,
        path_loss(path) / path_loss("routed") / FAR,
        path_loss(path) / path_loss(path, "untrained"),
    )
    for path in ("sample", "task")
}
ORACLE, ENCODER = ("structural_oracle",), ("encoder",)

# True operations err by rounding alone, and a collapse can be 0.
LEAST = 1e-8

claim = functools.partial(Claim, source="Ostapenko et al. 2022, section 4.1")
functional = functools.partial(
    Claim, source="Ostapenko et al. 2022, section 4.2 (a factor of 2: ours)", margin=1.0
)
one_layer = functools.partial(Claim, source="Ostapenko et al. 2022, figure 6", of_learning=True)

CLAIMS = (
    claim(
        statement="The structural oracle reaches full specialization and a low OOD loss",
        reading=constant(1) - among(ORACLE, SHORTFALL),
        of={},
        exceeds=0.0,
    ),
    claim(
        statement="No other router reaches both",
        reading=among(ROUTERS, SHORTFALL),
        of={},
        exceeds=1.0,
    ),
    *(
        claim(
            statement=f"The OOD loss of the monolithic network exceeds that of: {name_of(model)}",
            reading=OOD,
            of={"model": "monolithic"},
            exceeds={"model": model},
        )
        for model in MODULAR
    ),
    *(
        claim(
            statement=f"The best path of each {path} is far below the routed one on OOD loss, and "
            "below that of untrained modules",
            reading=constant(1) - among(ROUTERS, best),
            of={},
            exceeds=0.0,
        )
        for path, best in BEST.items()
    ),
    claim(
        statement="The selection bottleneck raises the encoder's specialization",
        reading=routing("specialization"),
        of={"model": "encoder", "selection_bottleneck": 1},
        exceeds={"model": "encoder", "selection_bottleneck": 0},
    ),
    claim(
        statement="All paths lower the ID loss",
        reading=among(ROUTERS, ID),
        of={"objective": "sampled"},
        exceeds={"objective": "all_paths"},
        of_learning=True,
    ),
    claim(
        statement="All paths raise the ID loss of the structural oracle",
        reading=among(ORACLE, ID),
        of={"objective": "all_paths"},
        exceeds={"objective": "sampled"},
        of_learning=True,
    ),
    claim(
        statement="OOD loss falls from |S| = 3 to 5",
        reading=OOD,
        of={"n_operators": 3},
        exceeds={"n_operators": 5},
    ),
    *(
        functional(
            statement=f"Functional bottlenecks, oracle and attention, give the same {name}",
            reading=calculated(np.log2, reading + LEAST),
            of={"functional_bottleneck": "attention"},
            equals={"functional_bottleneck": "oracle"},
        )
        for name, reading in {"OOD loss": OOD, "collapse": routing("collapse")}.items()
    ),
    functional(
        statement="Without functional bottleneck modules collapse",
        reading=calculated(np.log2, routing("collapse") + LEAST),
        of={"functional_bottleneck": "oracle"},
        exceeds={"functional_bottleneck": "none"},
    ),
    one_layer(
        statement="With one layer the encoder's ID loss is low",
        reading=constant(LOW) - among(ENCODER, ID_SHARE, n_layers=1),
        of={},
        exceeds=0.0,
    ),
    one_layer(
        statement="With one layer no other router's ID loss is low",
        reading=among(ROUTERS[:2], ID_SHARE, n_layers=1),
        of={},
        exceeds=LOW,
    ),
)

TABLE = Table(
    title="Losses and routing",
    conditions="rows",
    rows=(
        Row("ID", ID, short, spread=False),
        Row("OOD", OOD, short),
        Row("best", path_loss("sample"), short, spread=False),
        Row("null", path_loss("sample", "untrained"), short, spread=False),
        Row("task", path_loss("task"), short, spread=False),
        Row("its null", path_loss("task", "untrained"), short, spread=False),
        Row("spec.", routing("specialization"), short, spread=False),
        Row("coll.", routing("collapse"), short, spread=False),
    ),
    caption="Mean squared error. Best: OOD, on the best path of each sample; task: on that of each "
    "held-out task, chosen on half of its samples and scored on the other; null: with untrained "
    "modules. Spec., coll.: specialization and collapse, all layers together, ID; 1 is good for "
    "both, but one module for each operation gives a collapse of log |S| / log M.",
)

LAPTOP = EquationsSetup(
    model="structural_oracle",
    task=MathEquationsConfig(),
    training=TrainingConfig(
        n_steps=6000,
        batch_size=256,
        learning_rate=3e-3,
        weight_decay=0.0,
        warmup_steps=100,
        evaluate_every=500,
        clip=1.0,
    ),
    # Half of the points of `id` with |S| = 3; measures get the others.
    n_validation=150,
)

TESTED: dict[str, Any] = {"scores.n_test": 5000}
SHORTER = TESTED | {"training.n_steps": 3000}
PAPER = TESTED | {"n_modules": 30, "d_mlp": 300, "paths.memory": 2**30, "seed": (0, 1, 2, 3, 4)}
PAPER |= {"training.n_steps": 50_000, "training.evaluate_every": 2000}
PAPER |= {"training.learning_rate": 3e-4}
BOTH = {"objective": ("sampled", "all_paths"), "selection_bottleneck": (False, True)}
POINTS = {"task.n_points": (150, 500, 1000, 5000, 10_000, 20_000)}
FUNCTIONAL = {"model": MODULAR, "functional_bottleneck": ("oracle", "attention", "none")}
KEYS = {"module_keys": ("direct", "projected", "shared")}
ONE_LAYER, TRUE = {"model": MODULAR, "n_layers": 1}, {"model": MODULAR, "pool": "operations"}

PRESETS = {
    "smoke": {"n_validation": 30, "scores.n_test": 300, "seed": (0, 1), "task.n_operators": 3}
    | {"task.n_points": 150, "task.n_id": 40, "task.n_ood": 200, "n_modules": 4, "d_mlp": 8}
    | {"d_model": 16, "d_key": 8, "d_encoder": 16, "training.n_steps": 20}
    | {"training.batch_size": 32, "training.warmup_steps": 5, "training.evaluate_every": 10}
    | {"specialization.n": 300, "paths.n": 300, "paths.examples": (1, 4)},
    "laptop": TESTED,
    # Each decides further claims.
    "selection": SHORTER | BOTH | {"model": MODULAR},
    "operators": SHORTER | {"task.n_operators": (3, 5, 7, 10), "task.n_points": (500, 5000)},
    "functional": SHORTER | FUNCTIONAL,
    "keys": SHORTER | KEYS | {"model": ROUTERS},
    "one_layer": SHORTER | ONE_LAYER | {"n_modules": 25},
    "true_modules": SHORTER | TRUE,
    # Of which the others' rate was chosen, by the loss on `id`.
    "learning_rate": TESTED | {"training.learning_rate": (3e-4, 1e-3, 3e-3), "seed": 10},
    "paper": PAPER | BOTH | POINTS | {"task.n_operators": (3, 5, 7, 10, 15)},
    "paper-functional": PAPER | FUNCTIONAL,
    "paper-keys": PAPER | KEYS | {"model": MODULAR},
    "paper-one-layer": PAPER | ONE_LAYER,
    "paper-true-modules": PAPER | TRUE,
}

LOSSES = {
    "router's path, id": ID,
    "router's path, ood": OOD,
    "best of each task": path_loss("task"),
    "best of each sample": path_loss("sample"),
    "mean of all paths": path_loss("mean"),
    "best of each task, untrained": path_loss("task", "untrained"),
    "best of each sample, untrained": path_loss("sample", "untrained"),
}
SCORES = {name: routing(name) for name in ("specialization", "collapse", "collapse_attainable")}
AXES = ("n_points", "n_operators", "n_layers", "objective", "selection_bottleneck")
AXES += ("functional_bottleneck", "module_keys", "pool")
draw, error = functools.partial, {"ylabel": "mean squared error"}
on_ood: dict[str, Any] = {"ylabel": "mean squared error, ood", "log": True}
by = draw(functools.partial, plots.against, readings={"id": ID, "ood": OOD}, log_y=True, **error)

VIEWS = {
    "training": draw(
        training_curves, metric="loss", limits={"constant": ("scores", "loss_constant")}, log=True
    ),
    "losses": draw(plots.bars, readings=LOSSES, log=True, **error),
    "routing": draw(plots.bars, readings=SCORES, ylabel="score"),
    "specialization": views.specialization,
    "activation": views.activation,
    "regret": draw(views.of_paths, variable="regret", along="layer", reference="routed"),
    "adaptation": draw(
        views.of_paths,
        variable="adapted",
        along="examples",
        reference=("routed", "oracle"),
        log_x=True,
    ),
    "by_task": draw(views.of_paths, variable="task_loss", along="task", lines="path"),
    "loss_against_specialization": draw(
        plots.scatter, x=SCORES["specialization"], y=OOD, xlabel="specialization", **on_ood
    ),
    "routing_by_n_operators": draw(
        plots.against, setting="n_operators", readings=SCORES, ylabel="score"
    ),
} | {f"by_{name}": by(setting=name, log_x=name == "n_points") for name in AXES}

STUDY = Study(
    name="modular_routing",
    question="Which router lets a modular network find the sub-tasks of its data?",
    setup=LAPTOP,
    grids=({"model": MODELS, "seed": (0, 1, 2)},),
    presets={name: Preset(changes=changes) for name, changes in PRESETS.items()},
    tuned=("training.learning_rate",),
    trained=TrainedIf(split="id", metric="loss", reaches=0.1, share_of="constant"),
    measures={"specialization": Specialization(), "paths": Paths()},
    claims=CLAIMS,
    table=TABLE,
    views=VIEWS,
)


if __name__ == "__main__":
    main(STUDY)
