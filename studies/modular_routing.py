"""Which router lets a modular network find the sub-tasks of its data, and where does it fail?

The claims of "Attention for Compositional Modularity" (Ostapenko et al. 2022): out of
distribution it is routing that fails, while the modules are excellent on the best path. The task
is equations with held-out combinations of operators. Compared are networks whose router is given
the variable that decides (the structural oracle), networks that must learn it, and a monolithic
network.

    python studies/modular_routing.py                                     # 10 to 15 minutes
    python studies/modular_routing.py --preset smoke
    python studies/modular_routing.py selection_bottleneck=false,true objective=sampled,all_paths
    python studies/modular_routing.py --preset paper --device cuda --scheduler tcp://HOST:8786
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.figure import Figure

import probes
import tasks
from studies import engine
from studies.engine import Claim, Row, metric, read, short
from studies.report import drawings, panels, plots
from studies.report.names import name_of
from studies.report.panels import group, values
from studies.setups.equations import MODELS, MODULAR, ROUTERS, EquationsSetup


def measure_specialization(trained: engine.Trained, n: int = 5000) -> xr.Dataset | None:
    """Specialization and collapse, on training and on held-out combinations.

    Args:
        trained: the trained model.
        n: largest number of examples of each split.
    """
    setup = trained.setup
    if setup.model not in MODULAR:
        return None
    return probes.measure_specialization(
        trained.model,
        {split: trained.batches(split, n) for split in setup.splits},
        # A single layer performs a whole combination of operations.
        operation="operator" if setup.n_layers > 1 else "task",
        operations=setup.operations,
        seed=trained.seed,
    ).rename(group="split")


def measure_paths(
    trained: engine.Trained,
    n: int = 5000,
    examples: tuple[int, ...] = (1, 4, 16, 64),
    memory: int = 2**28,
) -> xr.Dataset | None:
    """Losses of the best paths, apart from the router, and of paths chosen by a few labels.

    Args:
        trained: the trained model and its untrained control.
        n: largest number of examples of each split.
        examples: numbers of labelled examples of a held-out combination that choose its path; at
            most half of its examples.
        memory: memory limit of the search, in bytes.
    """
    if trained.setup.model not in MODULAR:
        return None
    losses = probes.measure_paths(
        trained.model,
        trained.untrained,
        {split: trained.batch(split, n) for split in trained.setup.splits},
        adapted="ood",
        examples=examples,
        memory_limit=memory,
        seed=trained.seed,
    )
    names = [trained.task.task_names[number] for number in losses["task"].to_numpy()]
    return losses.rename(group="split").assign_coords(task=names)


FULL, LOW, FAR = 0.95, 0.05, 0.1
"""Thresholds: full specialization, a low loss relative to that of a constant answer, and the ratio
at which one loss is far below another."""

routing = partial(read, "specialization", split="id", control="observed")
ROUTING = ("specialization", "collapse", "collapse_attainable")
SCORES = {name: routing(name, layer="pooled") for name in ROUTING}
SPECIAL, COLLAPSE = SCORES["specialization"], SCORES["collapse"]
path_loss = partial(read, "paths", "loss", split="ood")
PATHS = ("sample", "task", "routed", "mean")
TRAINED = {path: path_loss(control="trained", path=path) for path in PATHS}
NULL = {path: path_loss(control="untrained", path=path) for path in PATHS}
ID, OOD = metric("loss", "id"), metric("loss", "ood")
ID_SHARE, OOD_SHARE = ID / metric("loss_constant", "id"), OOD / metric("loss_constant", "ood")
BY_LAYER = routing("specialization", mean=("layer",), layer=["0", "1"])
# Above 1 if specialization is not full or the OOD loss is not low.
SHORTFALL = ((1 - BY_LAYER) / (1 - FULL)).apply(np.maximum, OOD_SHARE / LOW)
# Below 1 if the best path is far below the routed one and below that of untrained modules.
BEST = {
    path: (TRAINED[path] / TRAINED["routed"] / FAR).apply(np.maximum, TRAINED[path] / NULL[path])
    for path in ("sample", "task")
}
# The loss of true operations is rounding error, and collapse can be 0.
LOG_OOD, LOG_COLLAPSE = ((reading + 1e-8).apply(np.log2) for reading in (OOD, COLLAPSE))

ORACLE, ENCODER, MONOLITHIC = ["structural_oracle"], ["encoder"], {"model": "monolithic"}
SAMPLED, ALL_PATHS = {"objective": "sampled"}, {"objective": "all_paths"}
FREE, TIGHT = ({"model": "encoder", "selection_bottleneck": value} for value in (0, 1))
GIVEN, ATTENTION = ({"functional_bottleneck": name} for name in ("oracle", "attention"))

PAPER = "Ostapenko et al. 2022, "
MORE_THAN = "The OOD loss of the monolithic network exceeds that of: "
FAR_BELOW = "is far below the routed one on OOD loss, and below that of untrained modules"
SAME = "Functional bottlenecks, oracle and attention, give the same"


def claim(
    statement: str,
    reading: engine.Reading,
    exceeds: Any,
    of: Any = None,
    at: str = "section 4.1",
    of_learning: bool = False,
) -> Claim:
    """A claim of the paper."""
    return Claim(statement, PAPER + at, reading, of or {}, exceeds, of_learning=of_learning)


of_learning = partial(claim, of_learning=True)
factor_of_two = partial(Claim, source=f"{PAPER}section 4.2 (a factor of 2: ours)", margin=1.0)

CLAIMS = (
    claim(
        "The structural oracle reaches full specialization and a low OOD loss",
        1 - SHORTFALL.among(ORACLE, n_layers=2),
        exceeds=0.0,
    ),
    claim("No other router reaches both", SHORTFALL.among(ROUTERS, n_layers=2), exceeds=1.0),
    *(claim(MORE_THAN + name_of(name), OOD, {"model": name}, MONOLITHIC) for name in MODULAR),
    *(
        claim(f"The best path of each {path} {FAR_BELOW}", 1 - best.among(ROUTERS, n_layers=2), 0.0)
        for path, best in BEST.items()
    ),
    claim("The selection bottleneck raises the encoder's specialization", SPECIAL, FREE, TIGHT),
    of_learning(
        "All paths lower the ID loss", ID.among(ROUTERS, n_layers=2), ALL_PATHS, of=SAMPLED
    ),
    of_learning(
        "All paths raise the ID loss of the structural oracle",
        ID.among(ORACLE, n_layers=2),
        exceeds=SAMPLED,
        of=ALL_PATHS,
    ),
    claim("OOD loss falls from |S| = 3 to 5", OOD, {"n_operators": 5}, of={"n_operators": 3}),
    factor_of_two(f"{SAME} OOD loss", reading=LOG_OOD, of=ATTENTION, equals=GIVEN),
    factor_of_two(f"{SAME} collapse", reading=LOG_COLLAPSE, of=ATTENTION, equals=GIVEN),
    factor_of_two(
        "Without functional bottleneck modules collapse",
        reading=LOG_COLLAPSE,
        of=GIVEN,
        exceeds={"functional_bottleneck": "none"},
    ),
    of_learning(
        "With one layer the encoder's ID loss is low",
        LOW - ID_SHARE.among(ENCODER, n_layers=1),
        exceeds=0.0,
        at="figure 6",
    ),
    of_learning(
        "With one layer no other router's ID loss is low",
        ID_SHARE.among(ROUTERS[:2], n_layers=1),
        exceeds=LOW,
        at="figure 6",
    ),
)

TABLE = engine.Table(
    title="Losses and routing",
    conditions="rows",
    rows=(
        Row("ID", ID, short, spread=False),
        Row("OOD", OOD, short),
        Row("best", TRAINED["sample"], short, spread=False),
        Row("null", NULL["sample"], short, spread=False),
        Row("task", TRAINED["task"], short, spread=False),
        Row("its null", NULL["task"], short, spread=False),
        Row("spec.", SPECIAL, short, spread=False),
        Row("coll.", COLLAPSE, short, spread=False),
    ),
    caption="Mean squared error. Best: OOD, on the best path of each sample; task: on the best one "
    "of each held-out task, chosen on half of its samples, scored on the other half; null: with "
    "untrained modules. Spec., coll.: specialization and collapse over all layers, ID; 1 is best "
    "for both, but one module for each operation gives a collapse of log |S| / log M.",
)

LAPTOP = EquationsSetup(
    model="structural_oracle",
    task=tasks.MathEquationsConfig(),
    training=engine.TrainingConfig(
        n_steps=6000,
        batch_size=256,
        learning_rate=3e-3,
        weight_decay=0.0,
        warmup_steps=100,
        evaluate_every=500,
        clip=1.0,
    ),
    # With |S| = 3 half of the points of `id`; measures use the rest.
    n_validation=150,
)

TESTED = "scores.n_test=5000 "
SHORTER = TESTED + "training.n_steps=3000 "
PAPERS_OWN = TESTED + (
    "n_modules=30 d_mlp=300 paths.memory=1073741824 seed=0,1,2,3,4 training.n_steps=50000 "
    "training.evaluate_every=2000 training.learning_rate=3e-4 "
)
MODULAR_ONLY = f"model={','.join(MODULAR)} "
BOTH = "objective=sampled,all_paths selection_bottleneck=false,true "
FUNCTIONAL = MODULAR_ONLY + "functional_bottleneck=oracle,attention,none"
KEYS = "module_keys=direct,projected,shared "
ONE_LAYER, TRUE = MODULAR_ONLY + "n_layers=1 ", MODULAR_ONLY + "pool=operations"

PRESETS = {
    "smoke": "n_validation=30 scores.n_test=300 seed=0,1 task.n_operators=3 task.n_points=150 "
    "task.n_id=40 task.n_ood=200 n_modules=4 d_mlp=8 d_model=16 d_key=8 d_encoder=16 "
    "training.n_steps=20 training.batch_size=32 training.warmup_steps=5 training.evaluate_every=10 "
    "specialization.n=300 paths.n=300 paths.examples=1,4",
    "laptop": TESTED,
    # Further claims, one preset each.
    "selection": SHORTER + BOTH + MODULAR_ONLY,
    "operators": SHORTER + "task.n_operators=3,5,7,10 task.n_points=500,5000",
    "functional": SHORTER + FUNCTIONAL,
    "keys": SHORTER + KEYS + f"model={','.join(ROUTERS)}",
    "one_layer": SHORTER + ONE_LAYER + "n_modules=25",
    "true_modules": SHORTER + TRUE,
    # The learning rate of the other presets was chosen here, by the loss on `id`.
    "learning_rate": TESTED + "training.learning_rate=3e-4,1e-3,3e-3 seed=10",
    "paper": PAPERS_OWN + BOTH + "task.n_points=150,500,1000,5000,10000,20000 "
    "task.n_operators=3,5,7,10,15",
    "paper-functional": PAPERS_OWN + FUNCTIONAL,
    "paper-keys": PAPERS_OWN + KEYS + MODULAR_ONLY,
    "paper-one-layer": PAPERS_OWN + ONE_LAYER,
    "paper-true-modules": PAPERS_OWN + TRUE,
}


def specialization(result: xr.DataTree) -> Figure | None:
    """Specialization against collapse on `id`, see `probes.draw_specialization`."""
    if "specialization" not in result.children:
        return None
    data = result["specialization"].to_dataset().sel(split="id")
    data = data.isel(layer=data["specialization"].notnull().any(["cell", "control"]))
    conditions = panels.shown_conditions(result)
    figure, axes = panels.grid(1, data.sizes["layer"], height=3.2)
    scores = {condition.label: data.isel(cell=condition.cells) for condition in conditions}
    colours = [condition.colour for condition in conditions]
    probes.draw_specialization(axes[0], scores, colours=colours)
    return panels.finished(figure)


def ordered_activation(result: xr.DataTree) -> xr.Dataset:
    """The share of each operation that each module gets; a diagonal is perfect specialization."""
    scores = group("specialization", split="id")(result)
    return probes.ordered_activation(scores).to_dataset(name="value") if scores else scores


LOSSES = {
    "router's path, id": ID,
    "router's path, ood": OOD,
    "best of each task": TRAINED["task"],
    "best of each sample": TRAINED["sample"],
    "mean of all paths": TRAINED["mean"],
    "best of each task, untrained": NULL["task"],
    "best of each sample, untrained": NULL["sample"],
}
BOTH_LOSSES = {"id": ID, "ood": OOD}
CONSTANT = {"constant": values("scores", "loss_constant", group="all")}
AXES = ("n_operators", "n_layers", "objective", "selection_bottleneck")
AXES += ("functional_bottleneck", "module_keys", "pool")
ERROR, ON_OOD = "mean squared error", "mean squared error, ood"
paths = partial(values, "paths", split="ood", control="trained")
KNOWN_PATHS = {name: paths(name) for name in ("routed", "oracle")}
paths_view = partial(plots.lines, ylabel=ON_OOD)
losses_by = partial(plots.against, readings=BOTH_LOSSES, ylabel=ERROR)

VIEWS = {
    "training": partial(plots.training, metric="loss", references=CONSTANT, log="y"),
    "losses": partial(plots.points, readings=LOSSES, log=True, xlabel=ERROR),
    "routing": partial(plots.points, readings=SCORES, xlabel="score"),
    "specialization": specialization,
    "activation": partial(
        drawings.matrices,
        data=ordered_activation,
        y="operation",
        x="module",
        rows="layer",
        shares=True,
        title="share of the operation (numbers: %)",
    ),
    "regret": partial(
        paths_view,
        data=paths("regret"),
        along="layer",
        references={"routed": KNOWN_PATHS["routed"]},
        log="y",
    ),
    "adaptation": partial(
        paths_view, data=paths("adapted"), along="examples", references=KNOWN_PATHS, log="xy"
    ),
    "by_task": partial(paths_view, data=paths("task_loss"), along="task", lines="path", log="y"),
    "loss_against_specialization": partial(
        plots.scatter, x=SPECIAL, y=OOD, xlabel="specialization", ylabel=ON_OOD, log="y"
    ),
    "routing_by_n_operators": partial(
        plots.against, setting="n_operators", readings=SCORES, ylabel="score"
    ),
    "by_n_points": partial(losses_by, setting="n_points", log="xy"),
    **{f"by_{name}": partial(losses_by, setting=name, log="y") for name in AXES},
}

STUDY = engine.Study(
    name="modular_routing",
    question="Which router lets a modular network find the sub-tasks of its data?",
    setup=LAPTOP,
    grids=({"model": MODELS, "seed": (0, 1, 2)},),
    presets={name: engine.Preset(changes=changes) for name, changes in PRESETS.items()},
    tuned=("training.learning_rate",),
    trained=engine.TrainedIf(split="id", metric="loss", reaches=0.1, share_of="constant"),
    measures={"specialization": measure_specialization, "paths": measure_paths},
    claims=CLAIMS,
    table=TABLE,
    views=VIEWS,
)


if __name__ == "__main__":
    engine.main(STUDY)
