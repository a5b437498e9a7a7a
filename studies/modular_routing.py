"""Which router lets a modular network find the sub-tasks of its data, and where does it fail?

The claims of "Attention for Compositional Modularity" (Ostapenko et al. 2022): out of
distribution it is routing that fails, while the modules are excellent on the best path. The task
is equations with held-out combinations of operators. Compared are networks whose router is given
the variable that decides (the structural oracle), networks that must learn it, and a monolithic
network.

    python studies/modular_routing.py                                     # 10 to 15 minutes
    python studies/modular_routing.py --preset smoke
    python studies/modular_routing.py selection_bottleneck=false,true objective=sampled,all_paths
    python studies/modular_routing.py --study routing_sizes --preset operators --together 6
    python studies/modular_routing.py --study routing_tuning --together 3
    python studies/modular_routing.py --preset paper --device cuda --scheduler tcp://HOST:8786
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import tasks
from studies import engine
from studies.claims.modular_routing import CLAIMS, CLAIMS_ABOUT_SIZES
from studies.engine import Row, short
from studies.engine.study import Grid
from studies.measures import modular_routing as measures
from studies.measures.modular_routing import COLLAPSE, ID, NULL, OOD, SPECIAL, TRAINED
from studies.setups.equations import MODELS, MODULAR, ROUTERS, EquationsSetup
from studies.views.modular_routing import BROWSERS, VIEWS

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
    "untrained modules. Spec.: specialization, mean over layers; coll.: collapse, all layers "
    "together; both ID. 1 is best for both, but one module for each operation gives a collapse of "
    "log |S| / log M.",
)

LAPTOP = EquationsSetup(
    model="structural_oracle",
    # Held-out equations that others in training also solve say nothing about composition.
    task=tasks.MathEquationsConfig(ood_tasks="new", n_id=2000),
    training=engine.TrainingConfig(
        n_steps=6000,
        batch_size=256,
        learning_rate=3e-3,
        weight_decay=0.0,
        warmup_steps=100,
        evaluate_every=500,
        clip=1.0,
    ),
    # With |S| = 3 a third of the points of `id`; measures use the rest.
    n_validation=1000,
)


def drawn_anew(numbers: Iterable[int], **axes: tuple[Any, ...]) -> tuple[Grid, ...]:
    """Grids of seeds, each with a draw of the data of its own."""
    return tuple({"seed": (number,), "task.seed": (number,), **axes} for number in numbers)


RATE, RATES = "training.learning_rate", (3e-4, 1e-3, 3e-3, 1e-2)
RATES_ALONE = (1e-4, 2e-4, 3e-4, 5e-4, 7e-4, 1e-3, 2e-3, 3e-3, 5e-3, 7e-3, 1e-2, 2e-2)
APART: Grid = {"seed": (100, 101, 102)}
# Chosen in `routing_tuning`. Training on all paths does not converge without a reward of entropy.
TUNED: engine.Where = {
    "model": {
        "structural_oracle": "temperature=10.0",
        "cross_attention": "temperature=30.0",
        "encoder": "training.learning_rate=1e-3 temperature=10.0",
    },
    "objective": {"all_paths": "entropy=0.03"},
}


TESTED = "scores.n_test=5000 "
MODULAR_ONLY = f"model={','.join(MODULAR)} "
BOTH = "objective=sampled,all_paths selection_bottleneck=false,true "
FUNCTIONAL = "functional_bottleneck=oracle,attention,none "
ONE_LAYER, TRUE = MODULAR_ONLY + "n_layers=1 ", MODULAR_ONLY + "pool=operations "

PAPERS_OWN = (
    "n_modules=30 d_mlp=300 seed=0,1,2,3,4 task.ood_tasks=held_out task.n_id=200 n_validation=150 "
    "scores.n_test=15000 specialization.n=15000 combinations.n=15000 paths.n=15000 "
    # The paper gives no optimiser, rate, batch size, steps, clipping or temperature, and no widths
    # of encoders and keys: these and the other settings of `LAPTOP` are ours.
    "paths.memory=1073741824 training.n_steps=50000 training.evaluate_every=2000 "
    "training.learning_rate=3e-4 temperature=3.0 "
)
POINTS = "task.n_points=1000,5000,10000,20000 "
OPERATORS = "task.n_operators=5,7,10,15 "
WITHOUT_CHOOSING = {"task.points_id": "without those that choose the checkpoint"}
OF_EACH = {"model.n_modules": "one for each true operation: that of 30 is not described"}


def of_paper(changes: str, departures: Mapping[str, str], **options: Any) -> engine.Preset:
    """A preset with the settings of the paper."""
    evenly = "evenly, so that every combination of operators has points for its measures"
    departures = {"task.sampling": evenly, **departures}
    return engine.Preset(changes=PAPERS_OWN + changes, departures=departures, **options)


SMALL = (
    "n_validation=30 scores.n_test=300 seed=0,1 task.n_operators=3 task.n_points=150 "
    "task.n_id=40 task.n_ood=200 n_modules=4 d_mlp=8 d_model=16 d_key=8 d_encoder=16 "
    "training.n_steps=20 training.batch_size=32 training.warmup_steps=5 training.evaluate_every=10"
)
SMOKE = f"{SMALL} specialization.n=300 combinations.n=300 paths.n=300 paths.examples=1,4"
PRESETS = {
    # Further claims, one preset each.
    "selection": TESTED + BOTH + MODULAR_ONLY,
    "end_to_end": TESTED,
    "functional": TESTED + MODULAR_ONLY + FUNCTIONAL,
    "keys": TESTED + f"module_keys=direct,projected,shared model={','.join(ROUTERS)}",
    "one_layer": TESTED + ONE_LAYER + "n_modules=25",
    "true_modules": TESTED + TRUE + "selection_bottleneck=false,true",
}
PRESETS_OF_SIZES = {
    # As many modules for all |S|, and enough for a module of each operation.
    "operators": TESTED + "task.n_operators=3,5,10,15 task.n_points=1000,20000 n_modules=20",
    "points": TESTED + "task.n_points=1000,20000 model=encoder objective=all_paths",
}
# Six networks of each kind left the comparison undecided; from their spread, as many are needed.
N_NETWORKS = {"one_layer": 14, "true_modules": 28, "end_to_end": 28}
PAPERS_PRESETS = {
    "paper": of_paper(BOTH + OPERATORS + POINTS, WITHOUT_CHOOSING),
    "paper-true-modules": of_paper(
        TRUE + "selection_bottleneck=false,true task.n_points=10000 " + OPERATORS,
        WITHOUT_CHOOSING | OF_EACH,
    ),
    # |S| and C of this ablation are not given: those of the paper's Figure 2b.
    "paper-functional": of_paper(
        "model=structural_oracle,encoder,cross_attention " + FUNCTIONAL + OPERATORS + POINTS, {}
    ),
    # Nor here: there must be a module for each of |S|^2 combinations.
    "paper-one-layer": of_paper(ONE_LAYER + "task.n_operators=3,5 " + POINTS, {}),
    "paper-keys": of_paper(
        MODULAR_ONLY + "pool=mlp,operations module_keys=direct,projected " + OPERATORS + POINTS,
        WITHOUT_CHOOSING | OF_EACH,
    ),
}
PAPERS_SIZES = of_paper(
    "task.n_operators=3,5,7,10,15 task.n_points=150,500,1000,5000,10000,20000",
    WITHOUT_CHOOSING,
    grids=(
        {"model": MODELS},
        {
            "model": ("encoder",),
            "objective": ("all_paths",),
            "selection_bottleneck": (False, True),
        },
    ),
)


def near_a_decision() -> tuple[Grid, ...]:
    """New networks for comparisons that the first six left open, but not by much."""
    few, many = (1000,), (20_000,)
    return tuple(
        one
        for model, n_operators, n_points in (
            ("monolithic", (3,), few + many),
            ("concatenation", (3, 5), many),
            ("encoder", (10, 15), many),
            ("cross_attention", (3,), few + many),
        )
        for one in drawn_anew(
            range(6, 34),
            **{"model": (model,), "task.n_operators": n_operators, "task.n_points": n_points},
        )
    )


def of_draws(presets: Mapping[str, str]) -> dict[str, engine.Preset]:
    """Presets with changes by name, each with several networks on data of their own."""
    return {
        name: engine.Preset(
            changes=changes,
            grids=drawn_anew(range(N_NETWORKS.get(name, 6)), model=MODELS),
            where=TUNED,
        )
        for name, changes in presets.items()
    }


STUDY = engine.Study(
    name="modular_routing",
    question="Which router lets a modular network find the sub-tasks of its data?",
    setup=LAPTOP,
    grids=({"model": MODELS, "seed": (0, 1, 2)},),
    presets=of_draws(PRESETS)
    | {
        "smoke": engine.Preset(changes=SMOKE),
        "laptop": engine.Preset(changes=TESTED, where=TUNED),
        "pairs": engine.Preset(
            changes=f"{TESTED}task.seed=0,1,2 seed=0,1,2,3,4,5,6,7,8,9", where=TUNED
        ),
        # New networks: the six of `functional` left open by how much these differ.
        "bottlenecks": engine.Preset(
            changes=TESTED,
            grids=drawn_anew(
                range(6, 30), model=("encoder",), functional_bottleneck=("oracle", "attention")
            ),
            where=TUNED,
        ),
        # New networks: 28 of `true_modules` left open which of these two generalises better.
        "second_best": engine.Preset(
            changes=f"{TESTED}pool=operations selection_bottleneck=true",
            grids=drawn_anew(range(28, 106), model=("encoder", "concatenation")),
            where=TUNED,
        ),
        # Six networks of `selection` left open how much worse one of these two is.
        "all_paths": engine.Preset(
            changes=f"{TESTED}objective=all_paths",
            grids=drawn_anew(range(24), model=("encoder", "cross_attention")),
            where=TUNED,
        ),
    }
    | PAPERS_PRESETS,
    tuned=("training.learning_rate", "temperature", "entropy"),
    draws=("task.seed",),
    trained=engine.TrainedIf(split="id", metric="loss", reaches=0.1, share_of="constant"),
    measures={
        "specialization": measures.measure_specialization,
        "paths": measures.measure_paths,
        "combinations": measures.measure_combinations,
        "gaps": measures.measure_gaps,
    },
    claims=CLAIMS,
    table=TABLE,
    views=VIEWS,
    browsers=BROWSERS,
)
# A study of its own, so that its many comparisons and those above are corrected apart.
SIZES = replace(
    STUDY,
    name="routing_sizes",
    question="What do more operations and more points change?",
    grids=({"model": MODELS, "seed": (0, 1, 2), "task.n_operators": (3, 5)},),
    presets=of_draws(PRESETS_OF_SIZES)
    | {name: STUDY.presets[name] for name in ("smoke", "laptop", "paper")}
    | {
        "near-a-decision": engine.Preset(
            changes=f"{TESTED}n_modules=20", grids=near_a_decision(), where=TUNED
        ),
        # New networks: six of `operators` left open whether specialization falls with |S|.
        "specialization": engine.Preset(
            changes=f"{TESTED}n_modules=20 task.n_operators=10,15 task.n_points=1000,20000",
            grids=drawn_anew(range(34, 84), model=("concatenation",)),
            where=TUNED,
        ),
        # New networks again: fifty of `specialization` left six of eight comparisons open.
        "ten-to-fifteen": engine.Preset(
            changes=f"{TESTED}n_modules=20 task.n_operators=10,15 task.n_points=1000,20000",
            grids=drawn_anew(range(84, 184), model=("concatenation",)),
            where=TUNED,
        ),
        # New networks: six of `operators` said that more points help here, newer ones did not.
        "more-points": engine.Preset(
            changes=f"{TESTED}n_modules=20 task.n_operators=3 task.n_points=1000,20000",
            grids=drawn_anew(range(34, 74), model=("concatenation",)),
            where=TUNED,
        ),
    }
    | {"paper-sizes": PAPERS_SIZES},
    claims=CLAIMS_ABOUT_SIZES,
)
# A study of its own, whose few networks of a single draw decide no claim.
TUNING = replace(
    STUDY,
    name="routing_tuning",
    question="At which learning rate and temperature does each router learn best?",
    grids=(
        {"model": MODULAR, "temperature": (3.0, 10.0, 30.0), RATE: RATES, **APART},
        # Of three temperatures one router was best at the highest, another at the lowest.
        {"model": ("cross_attention",), "temperature": (100.0,), RATE: RATES, **APART},
        {"model": ("concatenation",), "temperature": (1.0,), RATE: RATES, **APART},
        {"model": ("monolithic",), RATE: RATES_ALONE, **APART},
    ),
    presets={
        "smoke": engine.Preset(
            changes=SMALL,
            grids=({"model": MODELS, "temperature": (3.0, 10.0), RATE: RATES[:2]},),
        ),
        "all-paths": engine.Preset(
            changes="objective=all_paths entropy=0.01,0.03,0.1",
            grids=({"model": MODULAR, RATE: RATES, **APART},),
        ),
    },
    measures={},
    claims=(),
    table=engine.Table(title="Losses", rows=(Row("ID", ID, short),)),
    views={name: VIEWS[name] for name in ("training", "tuning")},
    browsers={},
)


if __name__ == "__main__":
    engine.main(STUDY, SIZES, TUNING)
