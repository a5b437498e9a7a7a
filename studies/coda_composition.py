"""Does attention that can subtract answer better, and does it subtract what it should?

The quasi-attention of "Compositional De-Attention Networks" (Tay et al. 2019) gives each token a
weight between -1 and 1. It is compared with softmax attention, linear attention and HYLA on lines
of arithmetic (the paper's mathematical language understanding), and on pairs of sequences in which
it is known what of one is to be added, subtracted or ignored given the other. There, all its
composition functions and ways of centring are compared too (the paper's Tables 8 and 9).

    python studies/coda_composition.py                               # arithmetic, 10 to 15 minutes
    python studies/coda_composition.py --study coda_signed_pairs     # 10 to 15 minutes
    python studies/coda_composition.py --preset smoke
    python studies/coda_composition.py --preset ablation             # of compositions, arithmetic
    python studies/coda_composition.py task.low=-50 task.high=50 seed=0,1
    python studies/coda_composition.py --preset paper --device cuda
"""

from __future__ import annotations

import functools
from itertools import product
from typing import Any

from studies.coda_claims import (
    AGREE,
    BASIC,
    GATES,
    NEGATIVE,
    ON_ID,
    ON_OOD,
    arithmetic_claims,
    claims_of_both,
    pairs_claims,
)
from studies.coda_measures import Matrices, Saturation, Signs
from studies.engine import (
    Preset,
    Row,
    Study,
    Table,
    TrainedIf,
    TrainingConfig,
    count,
    main,
    metric,
    read,
)
from studies.report import plots
from studies.report.curves import training_curves
from studies.setups.mlu import MluSetup
from studies.setups.signed_pairs import SignedPairsSetup
from studies.views import coda as views
from tasks import MLUConfig, SignedPairsConfig

# What varies

Values = dict[str, tuple[Any, ...]]
FUNCTIONS = {"affinity": ("tanh", "sigmoid", "arctan", "algebraic"), "gate": GATES}


def grid(*models: str, **more: Any) -> Values:
    """CoDA as the paper has it, or further models, but for what varies."""
    return {"model": models or ("coda",)} | {name: (value,) for name, value in BASIC.items()} | more


def centred(*over: str) -> Values:
    """All pairs of centrings, with the paper's functions."""
    return grid(affinity_centring=over, gate_centring=over)


MODELS = grid("softmax", "linear", "hyla", "coda", gate_centring=("none", "row"))
DOUBLED = grid(doubled=(True,))


def aligned(alignment: str, *grids: Values) -> list[Values]:
    """Grids of pairs, aligned by `heads`, or by the `networks` of the paper's base model."""
    return [{"alignment": (alignment,)} | one for one in grids]


# Tables

CAPTION = (
    "Right: share of lines or pairs like those of training (id), and of such as put together what "
    "training never does (ood). M<0: share of attention weights below -0.1 (ood). "
)
ARITHMETIC_TABLE = Table(
    title="Quasi-attention and others: arithmetic (in %)",
    rows=(
        *(
            Row(
                f"right, {split}" if group == "all" else f"  {group}",
                metric("accuracy", split, group),
                beside={"chance": metric("accuracy_chance", split, group)},
            )
            for split, group in (("id", "all"), *product(("ood",), ("all", "+", "-", "*")))
        ),
        Row("paper", metric("accuracy_paper", "id"), spread=False),
        Row("M<0", NEGATIVE),
        Row("weights", read("costs", "parameters"), shown=count, spread=False),
    ),
    caption=f"{CAPTION}Chance: the most frequent answer. Paper: with numbers from -1000 to 999 and "
    "100,000 steps; 78.8 of a universal transformer, 84.9 of an adaptive one that it cites.",
)
PAIRS_TABLE = Table(
    title="Quasi-attention and others: signed pairs (in %)",
    conditions="rows",
    rows=(
        Row("id", ON_ID),
        Row("ood", ON_OOD),
        Row("M<0", NEGATIVE),
        Row("signs", AGREE["trained"][0]),
        Row("untr.", AGREE["untrained"][0], spread=False),
        Row("match", AGREE["trained"][1]),
        Row("untrained", AGREE["untrained"][1], spread=False),
    ),
    caption=f"{CAPTION}50 by chance. Signs: balanced accuracy of the signs of a head's weights "
    "(beyond a tenth of its largest) against the planted ones, of the head that is best on id, on "
    "ood; 33.3 by chance. Match: that of whether a token counts at all; 50 by chance. Beside both: "
    "of untrained weights. Single: the paper's base model, with one matrix instead of heads.",
)

# Settings

TANH = {"affinity": "tanh", "gate": "sigmoid", "affinity_centring": "none"}
LINES = MluSetup(
    model="coda",
    task=MLUConfig(low=-20, high=20),
    d_model=64,
    d_mlp=256,
    n_layers=2,
    n_heads=4,
    training=TrainingConfig(
        n_steps=2500,
        batch_size=64,
        learning_rate=3e-3,
        weight_decay=0.01,
        warmup_steps=200,
        evaluate_every=250,
        keep_at=tuple(range(250, 2501, 250)),
    ),
    n_validation=500,
)
PAIRS = SignedPairsSetup(
    model="coda",
    task=SignedPairsConfig(),
    d_model=64,
    n_heads=4,
    training=TrainingConfig(
        n_steps=900,
        batch_size=128,
        learning_rate=2e-3,
        weight_decay=0.01,
        warmup_steps=100,
        evaluate_every=100,
        keep_at=tuple(range(100, 901, 100)),
    ),
    n_validation=1000,
)
RATES = {"training.learning_rate": (1e-3, 3e-3)}
TESTED = {"scores.n_test": 4000}
SMOKE = {
    "d_model": 16,
    "n_heads": 2,
    "training.keep_at": (2, 4),
    "training.n_steps": 4,
    "training.batch_size": 8,
    "training.warmup_steps": 1,
    "training.evaluate_every": 2,
    "n_validation": 20,
    "scores.n_test": 40,
    "signs.n": 20,
    "saturation.n": 20,
}
PAPER = TESTED | {
    "n_heads": 8,
    "training.learning_rate": (3e-4, 1e-3),
    "training.batch_size": 256,
    "training.warmup_steps": 1000,
    "training.evaluate_every": 2000,
    "n_validation": 2000,
    "seed": (0, 1, 2),
}
STEPS = range(10_000, 100_001, 10_000)
ARITHMETIC_PRESETS = {
    "laptop": Preset(changes=TESTED),
    "smoke": Preset(changes=SMOKE | {"d_mlp": 16}),
    "ablation": Preset(
        changes=TESTED, grids=(grid(**FUNCTIONS) | RATES, centred("none", "row") | RATES)
    ),
    "paper": Preset(
        changes=PAPER
        | {"task": MLUConfig(), "d_model": 128, "d_mlp": 512, "n_layers": 4}
        | {"training.n_steps": 100_000, "training.keep_at": tuple(STEPS)},
        grids=(MODELS, DOUBLED),
        departures={
            "n_layers": "not in the text; the code that it names has 2",
            "n_heads": "not in the text; the code that it names has 4",
            "training": "all but the steps is ours: of rates and seeds the paper says nothing",
        },
    ),
}
PAIRS_GRIDS = (
    *aligned("heads", MODELS, DOUBLED),
    *aligned("networks", grid("softmax", "coda", **FUNCTIONS)),
    *aligned("networks", centred("none", "row", "matrix"), DOUBLED),
)
PAIRS_PRESETS = {
    "laptop": Preset(changes=TESTED | {"seed": (0, 1)}),
    "smoke": Preset(
        changes=SMOKE,
        grids=(
            *aligned("heads", MODELS, DOUBLED),
            *aligned(
                "networks",
                grid("softmax", "coda", affinity=("tanh", "sigmoid"), gate=GATES[:2]),
                grid(gate_centring=("none", "row")),
                DOUBLED,
            ),
        ),
    ),
    "ablation": Preset(
        changes=TESTED,
        grids=(*aligned("heads", grid(**FUNCTIONS), centred("none", "row"), DOUBLED),),
    ),
    "paper": Preset(
        changes=PAPER
        | {"task": SignedPairsConfig(n_keys=20, n_a=4, n_b=16), "d_model": 200}
        | {"training.n_steps": 20_000, "training.keep_at": tuple(STEPS)[:2]},
        departures={"task": "ours: the paper has language tasks for its base model for pairs"},
    ),
}

# Studies

MEASURES = {"signs": Signs(), "saturation": Saturation(), "matrices": Matrices()}
RIGHT = {"id": ON_ID, "ood": ON_OOD, "chance": metric("accuracy_chance", "ood")}

ABLATION = functools.partial(views.ablation, reading=ON_OOD, title="right answers, ood")


def drawn(**values: Any) -> dict[str, Any]:
    """The figures of conditions with these values."""
    training = functools.partial(
        training_curves, metric="accuracy", limits={"chance": ("scores", "accuracy_chance")}
    )
    saturation = functools.partial(
        plots.profiles,
        group="saturation_along_training",
        variable="saturated_mean",
        along="train_step",
        select={"split": "id"},
        rows="quantity",
        lines="side",
        ylabel="saturated share",
        ylim=(-0.02, 1.02),
    )
    every = {"training": training, "saturation": saturation, "weights": views.weights}
    return {
        name: functools.partial(views.only, view=view, **values) for name, view in every.items()
    }


ARITHMETIC = Study(
    name="coda_arithmetic",
    question="Does attention that can subtract answer lines of arithmetic better?",
    setup=LINES,
    grids=(MODELS | RATES,),
    presets=ARITHMETIC_PRESETS,
    tuned=("training.learning_rate",),
    measures=MEASURES,
    along_training=("saturation",),
    trained=TrainedIf(reaches=0.5),
    claims=(*claims_of_both("row"), *arithmetic_claims()),
    table=ARITHMETIC_TABLE,
    views={
        "accuracy": functools.partial(plots.bars, readings=RIGHT, ylabel="right answers"),
        "operators": functools.partial(
            plots.bars,
            readings={
                name: metric("accuracy", "ood", name) for name in ("+", "-", "*", "two variables")
            },
            ylabel="right answers, out of distribution",
        ),
        **drawn(),
        "ablation": ABLATION,
        "matrices": views.matrices,
    },
)

SIGNED_PAIRS = Study(
    name="coda_signed_pairs",
    question="Does attention that can subtract subtract what it should?",
    setup=PAIRS,
    grids=PAIRS_GRIDS,
    presets=PAIRS_PRESETS,
    tuned=("training.learning_rate",),
    measures=MEASURES,
    along_training=("saturation",),
    trained=TrainedIf(reaches=0.9),
    claims=(*claims_of_both("row", "matrix"), *pairs_claims()),
    table=PAIRS_TABLE,
    views={
        "accuracy": functools.partial(plots.bars, readings=RIGHT, ylabel="right answers"),
    }
    | {f"{name}_heads": view for name, view in drawn(alignment="heads").items()}
    | {f"{name}_single": view for name, view in drawn(alignment="networks", **TANH).items()}
    | {
        name: functools.partial(
            plots.bars,
            readings={label: pair[number] for label, pair in AGREE.items()},
            ylabel=f"balanced accuracy of {name}",
        )
        for number, name in enumerate(("signs", "matches"))
    }
    | {"ablation": ABLATION, "matrices": views.matrices},
)

if __name__ == "__main__":
    main(ARITHMETIC, SIGNED_PAIRS)
