"""Does attention that can subtract answer better, and does it subtract what it should?

The quasi-attention of "Compositional De-Attention Networks" (Tay et al. 2019) gives each token a
weight between -1 and 1. It is compared with softmax attention, linear attention and HYLA on lines
of arithmetic (the paper's mathematical language understanding), and on pairs of sequences where it
is known which tokens must be added, subtracted or ignored. On the pairs, all its centrings and
composition functions are compared as well (the paper's Tables 8 and 9), and the factors of E and N.

    python studies/coda_composition.py                               # arithmetic, about 30 minutes
    python studies/coda_composition.py --study coda_signed_pairs     # about 20 minutes
    python studies/coda_composition.py --preset smoke
    python studies/coda_composition.py --preset ablation             # of functions, arithmetic
    python studies/coda_composition.py task.low=-50 task.high=50 seed=0,1
    python studies/coda_composition.py model=softmax,universal,adaptive_universal
    python studies/coda_composition.py --preset paper --device cuda
"""

from __future__ import annotations

from functools import partial
from typing import Any

from studies import engine
from studies.claims.coda import (
    DOUBLED,
    GATES,
    MATCHES,
    NEGATIVE,
    ON_ID,
    ON_OOD,
    SIGNS,
    centred,
    claims_of_lines,
    claims_of_pairs,
    further,
    grid,
)
from studies.engine import Preset, Row, metric, read
from studies.measures.coda import ALONG_TRAINING, MEASURES
from studies.report import browsers, plots
from studies.report.panels import values
from studies.setups.mlu import MluSetup
from studies.setups.quasi_attention import ABOUT
from studies.setups.quasi_transformer import TINY, tiny_training
from studies.setups.signed_pairs import SignedPairsSetup
from studies.views import coda as views
from tasks import MLUConfig, MLULinesConfig, SignedPairsConfig

# Axes

FUNCTIONS = {"affinity": ("tanh", "sigmoid", "arctan", "algebraic"), "gate": GATES}
COMPOSED = grid(affinity=("tanh", "sigmoid"), gate=GATES)
"""The eight compositions of E and N in the paper's Table 9."""

OTHERS = ("softmax", "linear", "hyla", "coda")
BY_MATRIX, BY_ROW = (grid(*OTHERS, gate_centring=("none", over)) for over in ("matrix", "row"))
"""All models, and CoDA with N centred; heads that align pairs have no mean over the matrix."""
UNIVERSAL = grid("universal", "adaptive_universal")
"""The transformers that the paper's Table 6 quotes, with steps instead of layers."""
SOFTENED = grid(beta=(0.25,))
SCALES = grid(beta=(0.25, 1.0), scaled=(True, False))
"""Factors with which the gate is open at first, and E and N not divided by sqrt(d_head)."""
BY_HEADS, BY_NETWORKS = ({"alignment": (name,)} for name in ("heads", "networks"))
"""Pairs are aligned by attention heads, or by the networks of the paper's base model."""
OPEN_NETWORKS = BY_NETWORKS | {"beta": (0.1,)}
"""Distances grow with the width, so that with a factor of 1 the gate is closed at first."""
LAYERED = OPEN_NETWORKS | grid("softmax", "coda", projection=("two_layers",))
"""With the F of Parikh et al. 2016, whose relu forbids a negative E."""

# Tables

CAPTION = (
    "Share of right answers, on examples like those of training (id) and on held-out combinations "
    "(ood)."
)
SUBTRACTED = Row("M<0", NEGATIVE, note="M<0: share of attention weights below -0.1 (ood).")
LINES_OF = {"right, id": ("id",), "right, ood": ("ood",)} | {f"  {x}": ("ood", x) for x in "+-*"}
ARITHMETIC_TABLE = engine.Table(
    title="Quasi-attention and others: arithmetic (in %)",
    rows=(
        *(
            Row(label, metric("accuracy", *of), beside={"chance": metric("accuracy_chance", *of)})
            for label, of in LINES_OF.items()
        ),
        Row(
            "paper",
            metric("accuracy_paper", "id"),
            spread=False,
            note="Paper: with numbers from -1000 to 999 and 100,000 steps; it cites 78.8 for a "
            "universal transformer and 84.9 for an adaptive one.",
        ),
        SUBTRACTED,
        Row("weights", read("costs", "parameters"), shown=engine.count, spread=False),
    ),
    caption=f"{CAPTION} Chance: the most frequent answer.",
)
PAIRS_TABLE = engine.Table(
    title="Quasi-attention and others: signed pairs (in %)",
    conditions="rows",
    rows=(
        Row("id", ON_ID),
        Row("ood", ON_OOD),
        SUBTRACTED,
        Row(
            "signs",
            SIGNS["trained"],
            note="Signs: balanced accuracy of a head's signed weights (beyond a tenth of its "
            "largest) against the planted signs, on ood, of the head that is best on id; chance "
            "is 33.3.",
        ),
        Row(
            "untr.",
            SIGNS["untrained"],
            spread=False,
            note="Untr., untrained: the same with untrained weights.",
        ),
        Row(
            "match",
            MATCHES["trained"],
            note="Match: the same for whether a token counts at all; chance is 50.",
        ),
        Row("untrained", MATCHES["untrained"], spread=False),
    ),
    caption=f"{CAPTION} Chance is 50. Single: the paper's base model, with one matrix instead of "
    "heads.",
)

# Settings

SIZES = {"model": "coda", "d_model": 64, "n_heads": 4}


def schedule(n_steps: int, every: int, **more: Any) -> engine.TrainingConfig:
    """Training with an evaluation and a kept checkpoint after every `every` steps."""
    kept = tuple(range(every, n_steps + 1, every))
    return engine.TrainingConfig(
        n_steps=n_steps, evaluate_every=every, keep_at=kept, weight_decay=0.01, **more
    )


LINES = MluSetup(
    **SIZES,
    task=MLUConfig(low=-20, high=20),
    d_mlp=256,
    n_layers=2,
    training=schedule(
        2500,
        250,
        batch_size=64,
        optimizer="muon",
        learning_rate=6e-3,
        clip=1.0,
        warmup_steps=200,
    ),
    n_validation=500,
)
SIGNED = SignedPairsSetup(
    **SIZES,
    task=SignedPairsConfig(),
    training=schedule(900, 100, batch_size=128, learning_rate=2e-3, warmup_steps=100),
    n_validation=1000,
)
RATES = {"training.learning_rate": (3e-3, 6e-3, 1.2e-2)}
LOWER_RATES = {"training.learning_rate": (1.5e-3, 3e-3, 6e-3)}
"""Axes of models that are trained for longer."""
CHOOSING = {"training.learning_rate": (1.5e-3, 3e-3, 6e-3, 1.2e-2), "seed": (0, 1, 2)}
"""Axes of the models by which the best rate of a condition is chosen."""
SHORT = {"training.learning_rate": (2e-3, 4e-3, 8e-3, 1.6e-2), "seed": tuple(range(10))}
"""Axes of models that are trained for less long, of which all are trained at each rate."""


TESTED = "scores.n_test=4000"
SMOKE = (
    "d_model=16 n_heads=2 training.n_steps=4 training.keep_at=2,4 training.evaluate_every=2 "
    "training.batch_size=8 training.warmup_steps=1 n_validation=20 scores.n_test=40 signs.n=20 "
    "saturation.n=20 composition.n=20"
)
PAPER = f"{TESTED} seed=0,1,2"
PAPERS_LINES = MluSetup(
    **TINY,
    model="coda",
    task=MLULinesConfig(),
    one_embedding=True,
    training=tiny_training(
        100_000,
        4096 // 19,  # 4,096 tokens in lines of 19
        evaluate_every=2000,
        keep_at=(1000, 5000, 10_000, 20_000, 50_000, 100_000),
    ),
    n_validation=2000,
)
PAPERS_PAIRS = SignedPairsSetup(
    # The width and the training of the base model, sections 3.2 and 3.3.
    model="coda",
    task=SignedPairsConfig(n_keys=20, n_a=4, n_b=16),
    d_model=200,
    n_heads=8,
    training=engine.TrainingConfig(
        n_steps=20_000,
        batch_size=64,
        learning_rate=3e-4,
        final_learning_rate=1.0,
        evaluate_every=1000,
        keep_at=(200, 1000, 5000, 20_000),
    ),
    n_validation=2000,
)
COMMON: dict[str, Any] = {
    "tuned": ("training.learning_rate",),
    "measures": MEASURES,
    "along_training": ALONG_TRAINING,
}
RIGHT = {"id": ON_ID, "ood": ON_OOD, "chance": metric("accuracy_chance", "ood")}
OPERATORS = {name: metric("accuracy", "ood", name) for name in ("+", "-", "*", "two variables")}
LAST = {
    "ablation": partial(views.ablation, reading=ON_OOD, title="right answers, ood"),
    "matrices": views.matrices,
}
TOKENS = {"query_pos": values("matrices", "query"), "key_pos": values("matrices", "key")}
BROWSERS = {
    name: partial(
        browsers.matrices,
        data=values("matrices", name),
        y="query_pos",
        x="key_pos",
        names=TOKENS,
        title=ABOUT[name],
    )
    for name in ("pattern", "affinity_matrix", "gate_matrix")
}
"""Charts with which examples, layers and heads are stepped through."""
TANH_SIGMOID = {"model": "coda", "affinity": "tanh", "gate": "sigmoid", "affinity_centring": "none"}


def drawn(kind: str, **coordinates: Any) -> dict[str, Any]:
    """The views of the conditions with these coordinates."""
    return {
        f"{name}_{kind}": partial(plots.only, view=view, **coordinates)
        for name, view in views.DRAWN.items()
    }


ARITHMETIC = engine.Study(
    name="coda_arithmetic",
    question="Does attention that can subtract answer lines of arithmetic better?",
    setup=LINES,
    grids=(BY_MATRIX | RATES, SOFTENED | RATES),
    presets={
        "laptop": Preset(changes=TESTED),
        # With universal transformers and the doubled gate. Three seeds left open by how much CoDA
        # is behind softmax attention: four more at the best rates.
        "seeds": Preset(
            changes=f"{TESTED} n_steps=4",
            grids=(
                *(of | CHOOSING for of in (BY_MATRIX, SOFTENED, DOUBLED, UNIVERSAL)),
                {"model": ("softmax",)} | further(6e-3),
                BY_MATRIX | {"model": ("coda",)} | further(3e-3),
                SOFTENED | further(6e-3),
            ),
        ),
        "smoke": Preset(changes=f"{SMOKE} d_mlp=16"),
        "ablation": Preset(
            changes=TESTED,
            grids=(
                grid(**FUNCTIONS) | RATES,
                centred("none", "matrix") | RATES,
                DOUBLED | RATES,
                SCALES | RATES,
            ),
        ),
        # After 2,500 steps most curves still rise.
        "longer": Preset(
            changes=f"{TESTED} n_steps=4 training.n_steps=7500 training.compile=true seed=0,1,2",
            grids=(grid("softmax", "coda", "universal", "adaptive_universal") | LOWER_RATES,),
            measures=(),
        ),
        "centring": Preset(
            changes=f"{TESTED} training.n_steps=7500 seed=0,1,2",
            grids=(centred("none", "matrix") | LOWER_RATES, DOUBLED | LOWER_RATES),
            measures=(),
        ),
        # Of the factor of E the paper says that it is at most 1, and not what it was.
        "alpha": Preset(
            changes=f"{TESTED} n_steps=4 seed=0,1,2",
            grids=(grid(alpha=(0.1, 0.3, 1.0)) | LOWER_RATES,),
            measures=(),
        ),
        # Two seeds choose the rates, and leave everything open: eight more at the best.
        "compositions": Preset(
            changes=TESTED,
            grids=(
                COMPOSED | CHOOSING | {"seed": (0, 1)},
                *(
                    grid(affinity=(affinity,), gate=gates) | further(rate, range(2, 10))
                    for affinity, gates, rate in (
                        ("tanh", ("sigmoid", "arctan", "algebraic"), 6e-3),
                        ("tanh", ("tanh",), 3e-3),
                        ("sigmoid", ("sigmoid",), 6e-3),
                        ("sigmoid", ("tanh", "arctan", "algebraic"), 3e-3),
                    )
                ),
            ),
            measures=(),
        ),
        "paper": Preset(
            changes=PAPER,
            setup=PAPERS_LINES,
            grids=(BY_MATRIX, UNIVERSAL, DOUBLED, grid(scaled=(False,))),
        ),
    },
    trained=engine.TrainedIf(reaches=0.5),
    claims=tuple(claims_of_lines()),
    table=ARITHMETIC_TABLE,
    browsers=BROWSERS,
    views={
        "accuracy": partial(plots.points, readings=RIGHT, xlabel="right answers"),
        "operators": partial(
            plots.points, readings=OPERATORS, xlabel="right answers, out of distribution"
        ),
        "tuning": plots.tuning,
        **views.DRAWN,
        **LAST,
        "composition": partial(plots.only, view=views.composition, **TANH_SIGMOID),
    },
    **COMMON,
)
SIGNED_PAIRS = engine.Study(
    name="coda_signed_pairs",
    question="Does attention that can subtract subtract what it should?",
    setup=SIGNED,
    grids=(
        BY_HEADS | BY_ROW,
        BY_HEADS | DOUBLED,
        BY_HEADS | SOFTENED,
        OPEN_NETWORKS | grid("softmax", "coda", **FUNCTIONS),
        OPEN_NETWORKS | centred("none", "row", "matrix"),
        OPEN_NETWORKS | DOUBLED,
        LAYERED,
        BY_NETWORKS | grid(gate_centring=("none", "matrix")),
    ),
    presets={
        "laptop": Preset(changes=f"{TESTED} seed=0,1"),
        "smoke": Preset(
            changes=SMOKE,
            grids=(
                BY_HEADS | BY_ROW,
                BY_HEADS | DOUBLED,
                OPEN_NETWORKS
                | grid("softmax", "coda", affinity=("tanh", "sigmoid"), gate=GATES[:2]),
                OPEN_NETWORKS | grid(gate_centring=("none", "row")),
                OPEN_NETWORKS | DOUBLED,
            ),
        ),
        "ablation": Preset(
            changes=TESTED,
            grids=(
                BY_HEADS | grid(**FUNCTIONS),
                BY_HEADS | centred("none", "row"),
                BY_HEADS | DOUBLED,
            ),
        ),
        # After 900 steps all are nearly perfect, and no composition can be better than another.
        "compositions": Preset(
            changes=f"{TESTED} training.n_steps=400",
            grids=tuple(
                OPEN_NETWORKS | one | SHORT
                for one in (
                    COMPOSED,
                    centred("none", "matrix"),
                    DOUBLED,
                )
            ),
            measures=(),
        ),
        # The width of the paper's figure of E and N, which are sums over it. Five seeds left open
        # whether the gate closes: seven more at the best rate, as many as their spread asks for.
        "width": Preset(
            changes=f"{TESTED} d_model=200",
            grids=(
                BY_NETWORKS
                | grid(gate_centring=("none", "matrix"))
                | {"training.learning_rate": (5e-4, 1e-3, 2e-3), "seed": tuple(range(5))},
                BY_NETWORKS | grid(gate_centring=("matrix",)) | further(1e-3, range(5, 12)),
            ),
        ),
        "paper": Preset(
            changes=PAPER,
            setup=PAPERS_PAIRS,
            grids=(
                BY_HEADS | BY_ROW,
                BY_HEADS | DOUBLED,
                BY_NETWORKS | grid("softmax", "coda", **FUNCTIONS),
                BY_NETWORKS | centred("none", "row", "matrix"),
                BY_NETWORKS | DOUBLED,
                BY_NETWORKS | grid("softmax", "coda", projection=("two_layers",)),
                OPEN_NETWORKS | grid(gate_centring=("none", "matrix")),
            ),
        ),
    },
    trained=engine.TrainedIf(reaches=0.9),
    claims=tuple(claims_of_pairs()),
    table=PAIRS_TABLE,
    browsers=BROWSERS,
    views={
        "accuracy": partial(plots.points, readings=RIGHT, xlabel="right answers"),
        "tuning": plots.tuning,
        **drawn("heads", alignment="heads"),
        **drawn(
            "single",
            alignment="networks",
            affinity="tanh",
            gate="sigmoid",
            affinity_centring="none",
        ),
        "signs": partial(plots.points, readings=SIGNS, xlabel="balanced accuracy of signs"),
        "matches": partial(plots.points, readings=MATCHES, xlabel="balanced accuracy of matches"),
        **LAST,
        "composition": partial(
            plots.only, view=views.composition, alignment="networks", **TANH_SIGMOID
        ),
    },
    **COMMON,
)

if __name__ == "__main__":
    engine.main(ARITHMETIC, SIGNED_PAIRS)
