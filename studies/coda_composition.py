"""Does attention that can subtract answer better, and does it subtract what it should?

The quasi-attention of "Compositional De-Attention Networks" (Tay et al. 2019) gives each token a
weight between -1 and 1. It is compared with softmax attention, linear attention and HYLA on lines
of arithmetic (the paper's mathematical language understanding), and on pairs of sequences where it
is known which tokens must be added, subtracted or ignored. On the pairs, all its composition
functions and centrings are compared as well (the paper's Tables 8 and 9).

    python studies/coda_composition.py                               # arithmetic, 10 to 15 minutes
    python studies/coda_composition.py --study coda_signed_pairs     # 10 to 15 minutes
    python studies/coda_composition.py --preset smoke
    python studies/coda_composition.py --preset ablation             # of functions, arithmetic
    python studies/coda_composition.py task.low=-50 task.high=50 seed=0,1
    python studies/coda_composition.py --preset paper --device cuda
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import xarray as xr

import probes
from studies import engine
from studies.engine import Claim, Preset, Reading, Row, metric, read
from studies.report import drawings, plots
from studies.report.panels import values
from studies.setups.mlu import MluSetup
from studies.setups.quasi_attention import PLACES, matrices, saturation, signs
from studies.setups.signed_pairs import SignedPairsSetup
from studies.views import coda as views
from tasks import MLUConfig, SignedPairsConfig

# Readings


def agreement(variable: str, weights: str, control: str = "observed") -> Reading:
    """Agreement with the planted signs on `ood`, of the head that agrees best on `id`."""
    select = {"scale": "relative", "weights": weights, "control": control}

    def values(result: xr.DataTree) -> np.ndarray:
        scores = result["signs"][variable].sel(select).stack(where=PLACES)
        best = scores.sel(split="id").fillna(-1).argmax("where")
        return scores.sel(split="ood").isel(where=best).to_numpy()

    return Reading(f"{variable} of the best head ({weights}, {control})", values)


def share(kind: str) -> Reading:
    """The share of attention weights of a kind, mean over places, layers and heads, on `ood`."""
    where = {"kind": kind, "scale": "weights", "weights": "trained", "split": "ood"}
    return read("signs", "share", mean=PLACES, **where)


def shrunk(result: xr.DataTree) -> np.ndarray:
    """The saturated share of E at the first kept checkpoint minus that at the last, on `id`."""
    if "saturation_along_training" not in result.children:
        return np.full(result["scores"].sizes["cell"], np.nan)
    part = result["saturation_along_training"]["saturated_mean"]
    part = part.sel(split="id", quantity="affinity").sum("side", skipna=False)
    return (part.isel(train_step=0) - part.isel(train_step=-1)).to_numpy()


ON_ID, ON_OOD = metric("accuracy", "id"), metric("accuracy", "ood")
NEGATIVE = share("subtracted") + share("partly_subtracted")
POSITIVE = share("added") + share("partly_added")
SATURATED = partial(read, "saturation", "saturated_mean", split="ood")
CLOSED, OPEN = (SATURATED(quantity="dissimilarity", side=side) for side in ("low", "high"))
EARLY = Reading("saturated E, first checkpoint - last", shrunk)
SIGNS, MATCHES = (
    {
        "trained": agreement(variable, "trained"),
        "untrained": agreement(variable, "untrained"),
        "planted signs shuffled": agreement(variable, "trained", "shuffled"),
    }
    for variable in ("balanced_accuracy", "matched")
)
"""Agreement with the three planted signs, and on whether a token counts at all, by control."""

# Axes

GATES = ("sigmoid", "tanh", "arctan", "algebraic")
FUNCTIONS = {"affinity": ("tanh", "sigmoid", "arctan", "algebraic"), "gate": GATES}
SOFTMAX = {"model": "softmax"}


def coda(**more: Any) -> dict[str, Any]:
    """Coordinates of CoDA with the paper's settings, except those given."""
    return {"model": "coda"} | views.BASIC | more


def grid(*models: str, **more: Any) -> dict[str, Any]:
    """A grid of models with the paper's settings of CoDA, except the given axes."""
    default = {name: (value,) for name, value in views.BASIC.items()}
    return {"model": models or ("coda",)} | default | more


def centred(*over: str) -> dict[str, Any]:
    """A grid of all pairs of centrings, with the paper's composition functions."""
    return grid(affinity_centring=over, gate_centring=over)


MODELS = grid("softmax", "linear", "hyla", "coda", gate_centring=("none", "row"))
DOUBLED = grid(doubled=(True,))
BY_HEADS, BY_NETWORKS = ({"alignment": (name,)} for name in ("heads", "networks"))
"""Pairs are aligned by attention heads, or by the networks of the paper's base model."""

# Claims

TAY = "Tay et al. 2019, "


def learns(
    statement: str, source: str, of: Any, than: Any, reading: Any = ON_ID, within: float = 0.0
) -> Claim:
    """The claim that a model is more accurate than another, or as accurate `within` a margin."""
    other: Any = {"equals": than, "margin": within} if within else {"exceeds": than}
    return Claim(statement, source, reading, of, **other, of_learning=True)


def weighs(statement: str, source: str, reading: Reading, than: float = 0.0) -> Claim:
    """The claim that a reading of CoDA's weights exceeds a number, for every centring of N."""
    of = {name: value for name, value in coda().items() if name != "gate_centring"}
    return Claim(statement, source, reading, of, than)


def claims_of_both(*centrings: str) -> Iterator[Claim]:
    """Claims of the paper's analysis and of our results page about both tasks."""
    for over in centrings:
        e, n = {"affinity_centring": over}, {"gate_centring": over}
        for what, centring in (("E", e), ("E and N", e | n)):
            statement = f"Centring {what} ({over}) does not help"
            yield learns(statement, f"{TAY}Table 8", coda(), coda(**centring))
        statement = f"A doubled gate is as good as N that is centred ({over})"
        yield learns(statement, f"{TAY}section 2.3", coda(doubled=True), coda(**n), within=0.01)
        yield learns(f"N is better centred ({over})", "ours", coda(**n), coda())
    for e, n in list(product(("tanh", "sigmoid"), GATES))[1:]:
        statement = f"tanh(E) * sigmoid(N) is better than {e}(E) * {n}(N)"
        yield learns(statement, f"{TAY}Table 9", coda(), coda(affinity=e, gate=n))
    for section, statement, reading, than in (
        (5, "The gate closes: N < -3 for a tenth of the pairs", CLOSED, 0.1),
        (5, "The gate opens: N > 3 for a tenth of the pairs", OPEN, 0.1),
        (5, "E is saturated early, and less at the end", EARLY, 0.0),
        (5, "M is more often negative than positive", NEGATIVE - POSITIVE, 0.0),
        (1, "CoDA subtracts: a twentieth of M is below -0.1", NEGATIVE, 0.05),
    ):
        yield weighs(statement, f"{TAY}section {section}", reading, than)


def claims_of_lines() -> Iterator[Claim]:
    """All claims about arithmetic."""
    yield from claims_of_both("row")
    statement = "CoDA answers better than softmax attention"
    yield learns(statement, f"{TAY}Table 6", {"model": "coda"}, SOFTMAX)
    for model in ("softmax", "linear", "hyla"):
        statement = f"CoDA answers held-out pairs of numbers better than {model}"
        yield learns(statement, "ours", coda(), {"model": model}, ON_OOD)


def claims_of_pairs() -> Iterator[Claim]:
    """All claims about signed pairs."""
    yield from claims_of_both("row", "matrix")
    headed, single = ({"alignment": name} for name in ("heads", "networks"))
    statement = "In the base model for pairs CoDA answers better than softmax attention"
    yield learns(statement, f"{TAY}Table 3", coda(**single), SOFTMAX | single)
    for what, changes, other in (
        ("heads", headed, headed),
        ("N centred (row)", single | {"gate_centring": "row"}, single),
        ("N centred (matrix)", single | {"gate_centring": "matrix"}, single),
    ):
        statement = f"With {what} CoDA answers as well as softmax attention"
        yield learns(statement, "ours", coda(**changes), SOFTMAX | other, ON_OOD, 0.01)
    for what, agree in (("has the planted signs", SIGNS), ("says which tokens count", MATCHES)):
        statement = f"M {what}, more than that of untrained weights"
        yield weighs(statement, "ours", agree["trained"] - agree["untrained"])
    statement = "M agrees with the planted signs more than all matches without signs would"
    yield weighs(statement, "ours", SIGNS["trained"], 2 / 3)


# Tables

CAPTION = (
    "Share of right answers, on examples like those of training (id) and on held-out combinations "
    "(ood). M<0: share of attention weights below -0.1 (ood). "
)
LINES_OF = {"right, id": ("id",), "right, ood": ("ood",)} | {f"  {x}": ("ood", x) for x in "+-*"}
ARITHMETIC_TABLE = engine.Table(
    title="Quasi-attention and others: arithmetic (in %)",
    rows=(
        *(
            Row(label, metric("accuracy", *of), beside={"chance": metric("accuracy_chance", *of)})
            for label, of in LINES_OF.items()
        ),
        Row("paper", metric("accuracy_paper", "id"), spread=False),
        Row("M<0", NEGATIVE),
        Row("weights", read("costs", "parameters"), shown=engine.count, spread=False),
    ),
    caption=f"{CAPTION}Chance: the most frequent answer. Paper: with numbers from -1000 to 999 and "
    "100,000 steps; it cites 78.8 for a universal transformer and 84.9 for an adaptive one.",
)
PAIRS_TABLE = engine.Table(
    title="Quasi-attention and others: signed pairs (in %)",
    conditions="rows",
    rows=(
        Row("id", ON_ID),
        Row("ood", ON_OOD),
        Row("M<0", NEGATIVE),
        Row("signs", SIGNS["trained"]),
        Row("untr.", SIGNS["untrained"], spread=False),
        Row("match", MATCHES["trained"]),
        Row("untrained", MATCHES["untrained"], spread=False),
    ),
    caption=f"{CAPTION}Chance is 50. Signs: balanced accuracy of a head's signed weights (beyond a "
    "tenth of its largest) against the planted signs, on ood, of the head that is best on id; "
    "chance is 33.3. Match: the same for whether a token counts at all; chance is 50. Untr., "
    "untrained: the same with untrained weights. Single: the paper's base model, with one matrix "
    "instead of heads.",
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
    training=schedule(2500, 250, batch_size=64, learning_rate=3e-3, warmup_steps=200),
    n_validation=500,
)
SIGNED = SignedPairsSetup(
    **SIZES,
    task=SignedPairsConfig(),
    training=schedule(900, 100, batch_size=128, learning_rate=2e-3, warmup_steps=100),
    n_validation=1000,
)
RATES = {"training.learning_rate": (1e-3, 3e-3)}
TESTED = "scores.n_test=4000"
SMOKE = (
    "d_model=16 n_heads=2 training.n_steps=4 training.keep_at=2,4 training.evaluate_every=2 "
    "training.batch_size=8 training.warmup_steps=1 n_validation=20 scores.n_test=40 signs.n=20 "
    "saturation.n=20"
)
PAPER = (
    f"{TESTED} n_heads=8 training.learning_rate=0.0003,0.001 training.batch_size=256 "
    "training.warmup_steps=1000 training.evaluate_every=2000 n_validation=2000 seed=0,1,2"
)
STEPS = ",".join(str(step) for step in range(10_000, 100_001, 10_000))
COMMON: dict[str, Any] = {
    "tuned": ("training.learning_rate",),
    "measures": {"signs": signs, "saturation": saturation, "matrices": matrices},
    "along_training": ("saturation",),
}
RIGHT = {"id": ON_ID, "ood": ON_OOD, "chance": metric("accuracy_chance", "ood")}
OPERATORS = {name: metric("accuracy", "ood", name) for name in ("+", "-", "*", "two variables")}
CHANCE = {"chance": values("scores", "accuracy_chance", group="all")}
DRAWN = {
    "training": partial(plots.training, metric="accuracy", references=CHANCE),
    "saturation": partial(
        plots.lines,
        data=values("saturation_along_training", "saturated_mean", split="id"),
        along="train_step",
        rows="quantity",
        lines="side",
        ylabel="saturated share",
        ylim=(-0.02, 1.02),
    ),
    "weights": partial(
        drawings.pictures,
        data=values("signs", "distribution", scale="weights", split="ood"),
        mean="distribution",
        rows={"share of weights": {}},
        draw=probes.draw_distribution,
    ),
}
LAST = {
    "ablation": partial(views.ablation, reading=ON_OOD, title="right answers, ood"),
    "matrices": views.matrices,
}


def drawn(kind: str, **coordinates: Any) -> dict[str, Any]:
    """The views of the conditions with these coordinates."""
    return {
        f"{name}_{kind}": partial(plots.only, view=view, **coordinates)
        for name, view in DRAWN.items()
    }


ARITHMETIC = engine.Study(
    name="coda_arithmetic",
    question="Does attention that can subtract answer lines of arithmetic better?",
    setup=LINES,
    grids=(MODELS | RATES,),
    presets={
        "laptop": Preset(changes=TESTED),
        "smoke": Preset(changes=f"{SMOKE} d_mlp=16"),
        "ablation": Preset(
            changes=TESTED, grids=(grid(**FUNCTIONS) | RATES, centred("none", "row") | RATES)
        ),
        "paper": Preset(
            changes=f"{PAPER} task.low=-1000 task.high=1000 d_model=128 d_mlp=512 n_layers=4 "
            f"training.n_steps=100000 training.keep_at={STEPS}",
            grids=(MODELS, DOUBLED),
            departures={
                "n_layers": "not in the text; the code that it names has 2",
                "n_heads": "not in the text; the code that it names has 4",
                "training": "all but the steps is ours: the paper names neither rates nor seeds",
            },
        ),
    },
    trained=engine.TrainedIf(reaches=0.5),
    claims=tuple(claims_of_lines()),
    table=ARITHMETIC_TABLE,
    views={
        "accuracy": partial(plots.points, readings=RIGHT, xlabel="right answers"),
        "operators": partial(
            plots.points, readings=OPERATORS, xlabel="right answers, out of distribution"
        ),
        **DRAWN,
        **LAST,
    },
    **COMMON,
)
SIGNED_PAIRS = engine.Study(
    name="coda_signed_pairs",
    question="Does attention that can subtract subtract what it should?",
    setup=SIGNED,
    grids=(
        BY_HEADS | MODELS,
        BY_HEADS | DOUBLED,
        BY_NETWORKS | grid("softmax", "coda", **FUNCTIONS),
        BY_NETWORKS | centred("none", "row", "matrix"),
        BY_NETWORKS | DOUBLED,
    ),
    presets={
        "laptop": Preset(changes=f"{TESTED} seed=0,1"),
        "smoke": Preset(
            changes=SMOKE,
            grids=(
                BY_HEADS | MODELS,
                BY_HEADS | DOUBLED,
                BY_NETWORKS | grid("softmax", "coda", affinity=("tanh", "sigmoid"), gate=GATES[:2]),
                BY_NETWORKS | grid(gate_centring=("none", "row")),
                BY_NETWORKS | DOUBLED,
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
        "paper": Preset(
            changes=f"{PAPER} task.n_keys=20 task.n_a=4 task.n_b=16 d_model=200 "
            "training.n_steps=20000 training.keep_at=10000,20000",
            departures={"task": "ours: the paper has language tasks for its base model for pairs"},
        ),
    },
    trained=engine.TrainedIf(reaches=0.9),
    claims=tuple(claims_of_pairs()),
    table=PAIRS_TABLE,
    views={
        "accuracy": partial(plots.points, readings=RIGHT, xlabel="right answers"),
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
    },
    **COMMON,
)

if __name__ == "__main__":
    engine.main(ARITHMETIC, SIGNED_PAIRS)
