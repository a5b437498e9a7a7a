"""Does CoDA help a reader that connects all its layers by attention to point to answers?

Open-domain question answering of "Compositional De-Attention Networks" (Tay et al. 2019, section
3.1 and Table 1): DecaProp (Tay et al. 2018), whose attention between passage and question is
softmax, or CoDA in its place. The paper's data have to be fetched. By default both answer generated
questions that need one fact of a passage, or two, where it is known which; pairs of relations are
held out. It is measured whether the attention is signed, and whether connectors weigh the needed
facts most.

    python studies/open_domain_question_answering.py                 # 75 minutes on two cores
    python studies/open_domain_question_answering.py --preset smoke
    python studies/open_domain_question_answering.py --preset ablation      # of F and of centring
    python studies/open_domain_question_answering.py --preset paper --device cuda
    python studies/open_domain_question_answering.py --preset paper-quasar-t task.path=FOLDER \\
        --device cuda --workers 1
    python studies/open_domain_question_answering.py --preset paper-searchqa task.path=FOLDER \\
        --device cuda --workers 1
"""

from __future__ import annotations

from functools import partial
from typing import Any

import probes
import tasks
from studies import engine
from studies.claims.coda import NEGATIVE
from studies.engine import Claim, Preset, Reading, Row, metric, read
from studies.measures.question_answering import pointing
from studies.report import drawings, plots
from studies.report.panels import values
from studies.setups.quasi_attention import PLACES, saturation, signs
from studies.setups.question_answering import FactQuestionsSetup, StoredQuestionsSetup

# Readings

SOFTMAX, CODA = {"model": "softmax"}, {"model": "coda"}
EM, F1 = (partial(metric, name) for name in ("exact_match", "f1"))
ONE, TWO, HELD_OUT = EM("id", "one fact"), EM("id", "two facts"), EM("ood")
CONNECTORS = ("passage_layer", "question_layer")


def matched(weights: str, control: str = "observed") -> Reading:
    """Whether M says which pairs of words count, on `ood`: balanced accuracy, mean over places."""
    where = {"split": "ood", "scale": "relative", "weights": weights, "control": control}
    return read("signs", "matched", mean=PLACES, **where)


def pointed(target: str, weights: str, control: str = "observed") -> Reading:
    """The share of questions on `ood` whose largest weight is on a needed fact, mean over pairs."""
    where = {"split": "ood", "target": target, "weights": weights, "control": control}
    return read("pointing", "share", mean=CONNECTORS, **where)


FIRST, SECOND = (
    {
        "trained": pointed(target, "trained"),
        "untrained": pointed(target, "untrained"),
        "facts shuffled": pointed(target, "trained", "shuffled"),
    }
    for target in ("first fact", "second fact")
)
RIGHT = {
    "one fact, id": ONE,
    "two facts, id": TWO,
    "two facts, ood": HELD_OUT,
    "chance": metric("exact_match_chance", "id"),
}

# Claims

TABLE_1 = "Tay et al. 2019, Table 1"
HERE = f"{TABLE_1}, there on Quasar-T and SearchQA"


def better(statement: str, source: str, reading: Reading, **more: str) -> Claim:
    """The claim that DecaProp is better with CoDA than with softmax attention."""
    return Claim(statement, source, reading, CODA | more, SOFTMAX | more, of_learning=True)


CLAIMS = (
    better("On generated questions CoDA in DecaProp matches more answers exactly", HERE, EM("id")),
    better("On generated questions CoDA in DecaProp has a higher F1", HERE, F1("id")),
    *(
        better(f"On {title} CoDA in DecaProp {what}", TABLE_1, metric(name, "test"), name=data)
        for title, data in (("Quasar-T", "quasar-t"), ("SearchQA", "searchqa"))
        for what, name in (
            ("matches more answers exactly", "exact_match"),
            ("has a higher F1", "f1"),
        )
    ),
    better("On generated questions for one fact CoDA matches more answers exactly", "ours", ONE),
    better("On generated questions for two facts CoDA matches more answers exactly", "ours", TWO),
    better(
        "On generated questions for held-out pairs of relations CoDA matches more answers exactly",
        "ours",
        HELD_OUT,
    ),
    *(
        Claim(
            f"In generated questions connectors weigh the {name} most, more often than untrained",
            "ours",
            readings["trained"] - readings["untrained"],
            {},
            0.0,
        )
        for name, readings in (("first fact", FIRST), ("second fact", SECOND))
    ),
    Claim(
        "In generated questions M says which pairs of words count, more than untrained",
        "ours",
        matched("trained") - matched("untrained"),
        CODA,
        0.0,
    ),
    Claim(
        "In generated questions CoDA subtracts: a twentieth of M is below -0.1",
        "Tay et al. 2019, section 1",
        NEGATIVE,
        CODA,
        0.05,
    ),
)

# Settings

FACTS = FactQuestionsSetup(
    model="softmax",
    task=tasks.FactQuestionsConfig(),
    d_model=48,
    d_embed=24,
    n_layers=2,
    n_factors=8,
    training=engine.TrainingConfig(
        n_steps=3000,
        batch_size=64,
        learning_rate=3e-3,
        weight_decay=0.01,
        warmup_steps=100,
        evaluate_every=200,
        clip=1.0,
    ),
    n_validation=500,
)
# The sizes are the defaults of DecaProp's published code; rates, steps and batches are ours.
SIZES: dict[str, Any] = {
    "model": "softmax",
    "d_model": 128,
    "d_embed": 300,
    "n_layers": 3,
    "n_factors": 32,
    "projection": "relu",
    "dropout": 0.2,
}


def schedule(n_steps: int, every: int) -> engine.TrainingConfig:
    """Adam at a constant rate, as far as the steps go, with clipped gradients."""
    return engine.TrainingConfig(
        n_steps=n_steps,
        batch_size=32,
        learning_rate=1e-3,
        final_learning_rate=0.1,
        evaluate_every=every,
        clip=5.0,
    )


LARGE_FACTS = FactQuestionsSetup(
    **SIZES,
    task=tasks.FactQuestionsConfig(n_entities=1000, n_relations=40, n_paragraphs=20, n_facts=5),
    training=schedule(20_000, 1000),
    n_validation=1000,
)
QUASAR = StoredQuestionsSetup(
    **SIZES,
    task=tasks.QuestionsConfig(name="quasar-t", path="quasar-t", n_contexts=100, max_passage=1500),
    training=schedule(15_000, 1000),
    n_validation=1500,
)
SEARCH = StoredQuestionsSetup(
    **SIZES,
    task=tasks.QuestionsConfig(name="searchqa", path="SearchQA", max_passage=700),
    training=schedule(40_000, 2000),
    n_validation=4000,
)
BOTH = {"model": ("softmax", "coda")}
"""CoDA's functions are the paper's, without centring, the best of its Table 8."""
CODA_CENTRED = {"model": ("coda",), "gate_centring": ("matrix",), "doubled": (False,)}
CODA_DOUBLED = {"model": ("coda",), "gate_centring": ("none",), "doubled": (True,)}
RATES = {"training.learning_rate": (1e-3, 3e-3, 1e-2)}
SEEDS = {"seed": (0, 1, 2)}
PAPER_RATES = {"training.learning_rate": (3e-4, 1e-3, 3e-3)}
FEW = "signs.n=100 saturation.n=100"
TESTED = f"scores.n_test=2000 {FEW}"
SMOKE = (
    "d_model=8 d_embed=8 n_factors=2 training.n_steps=4 training.evaluate_every=2 "
    "training.batch_size=8 training.warmup_steps=1 n_validation=20 scores.n_test=40 signs.n=20 "
    "saturation.n=20 pointing.n=40"
)
CHANCE = {"chance": values("scores", "exact_match_chance", group="all")}
DEPARTURES = {
    "model.embedding": "pretrained GloVe vectors would have to be fetched; embeddings are learned",
    "model.d_character": "words have ids, from which characters cannot be read",
}

# Table

TABLE = engine.Table(
    title="DecaProp with softmax attention and with CoDA (in %)",
    rows=(
        Row("exact match, id", EM("id")),
        Row("  one fact", ONE),
        Row("  two facts", TWO),
        Row("exact match, ood", HELD_OUT),
        Row("F1, id", F1("id")),
        Row("F1, ood", F1("ood")),
        Row("exact match, test", EM("test"), note="Test, the paper's: of Quasar-T or SearchQA."),
        Row("  the paper's match", metric("exact_match_paper", "test"), spread=False),
        Row("F1, test", F1("test")),
        Row("  the paper's F1", metric("f1_paper", "test"), spread=False),
        *(
            Row(f"{fact}, {weights}".removesuffix(", trained"), readings[weights])
            for fact, readings in (("first fact", FIRST), ("second fact", SECOND))
            for weights in readings
        ),
        Row("M < -0.1", NEGATIVE),
    ),
    caption="On generated questions (id, ood). One, two facts: questions that need so many; those "
    "of ood need two, with pairs of relations that are held out. First, second fact: share of "
    "questions of ood of which a connector weighs the first or the second needed fact most, mean "
    "over connectors; untrained: with untrained weights; shuffled: the fact of another question. "
    "M < -0.1: share of weights.",
)

STUDY = engine.Study(
    name="open_domain_question_answering",
    question="Does CoDA help a reader that connects its layers by attention to point to answers?",
    setup=FACTS,
    grids=(BOTH | RATES | SEEDS,),
    presets={
        "laptop": Preset(changes=TESTED),
        "smoke": Preset(changes=SMOKE, grids=(BOTH,)),
        "ablation": Preset(
            changes=TESTED,
            grids=(
                BOTH | RATES | SEEDS | {"projection": ("linear", "relu")},
                *(grid | RATES | SEEDS for grid in (CODA_CENTRED, CODA_DOUBLED)),
            ),
        ),
        "paper": Preset(
            changes=f"scores.n_test=4000 {FEW}",
            setup=LARGE_FACTS,
            grids=(BOTH | PAPER_RATES | SEEDS,),
        ),
        "paper-quasar-t": Preset(
            changes=f"scores.n_test=3000 {FEW}",
            setup=QUASAR,
            grids=({"task.name": ("quasar-t",)} | BOTH | PAPER_RATES | SEEDS,),
            departures=DEPARTURES,
        ),
        "paper-searchqa": Preset(
            changes=f"scores.n_test=30000 {FEW}",
            setup=SEARCH,
            grids=({"task.name": ("searchqa",)} | BOTH | PAPER_RATES | SEEDS,),
            departures=DEPARTURES,
        ),
    },
    tuned=("training.learning_rate",),
    measures={
        "signs": signs,
        "saturation": saturation,
        "pointing": pointing,
    },
    trained=engine.TrainedIf(metric="exact_match", reaches=0.5),
    claims=CLAIMS,
    table=TABLE,
    views={
        "accuracy": partial(plots.points, readings=RIGHT, xlabel="exact match"),
        "training": partial(plots.training, metric="exact_match", references=CHANCE),
        "tuning": plots.tuning,
        "pointing": partial(plots.points, readings=FIRST, xlabel="first fact weighed most, ood"),
        "pointing_second": partial(
            plots.points, readings=SECOND, xlabel="second fact weighed most, ood"
        ),
        "connectors": partial(
            drawings.matrices,
            data=values("pointing", "share", split="ood", weights="trained", control="observed"),
            y="passage_layer",
            x="question_layer",
            rows="target",
            title="share of questions",
            numbers="{:.2f}".format,
        ),
        "weights": partial(
            drawings.pictures,
            data=values("signs", "distribution", scale="weights", weights="trained"),
            mean="distribution",
            rows="split",
            draw=probes.plots.distribution,
        ),
    },
)

if __name__ == "__main__":
    engine.main(STUDY)
