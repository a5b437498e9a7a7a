"""Does attention that can subtract read pairs of texts, rank answers and tell sentiment better?

The comparisons of "Compositional De-Attention Networks" (Tay et al. 2019) on text, CoDA against
softmax attention: inference between sentences (Table 3) and the ranking of answers (Table 2) with
decomposable attention, sentiment with a transformer (Table 5), and the centring of E and N
(Table 8). On generated texts it is known which words are to be added, subtracted or ignored.

    python studies/text_pairs_and_sentiment.py                            # pairs, generated
    python studies/text_pairs_and_sentiment.py --study text_ranking
    python studies/text_pairs_and_sentiment.py --study text_sentiment
    python studies/text_pairs_and_sentiment.py --preset smoke
    python studies/text_pairs_and_sentiment.py --preset paper --device cuda
    python studies/text_pairs_and_sentiment.py --preset paper task.name=scitail task.path=FOLDER

The preset `paper` reads the published data, which is not in the package, from data/NAME: `snli`,
`mnli`, `scitail`, `dnli`; `trecqa`, `wikiqa`, `ubuntu`; `imdb`, `sst2`. Without them it says what
to fetch.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import tasks
from studies import engine
from studies.claims.coda import (
    DOUBLED,
    MATCHES,
    NEGATIVE,
    ON_ID,
    ON_OOD,
    SIGNS,
    centred,
    grid,
    share,
)
from studies.claims.text import (
    FIRST,
    MAP,
    MRR,
    ON_TEST,
    ON_VALID,
    claims_of_pairs,
    claims_of_ranking,
    claims_of_sentiment,
    ranked,
)
from studies.engine import Preset, Row, metric
from studies.measures.coda import ALONG_TRAINING, MEASURES
from studies.report import plots
from studies.setups.entailment import EntailmentSetup
from studies.setups.quasi_transformer import TINY, tiny_training
from studies.setups.ranking import RankingSetup, ranking
from studies.setups.sentiment import NegatedSentimentSetup
from studies.setups.stored_texts import StoredPairsSetup, StoredTextSetup
from studies.views import coda as views

# Generated texts

TEXTS: dict[str, Any] = {"n_concepts": 20, "n_asked": 3, "n_synonyms": 3, "n_others": 4}
READER: dict[str, Any] = {
    "model": "coda",
    "d_model": 64,
    "n_heads": 4,
    "alignment": "networks",
    # Distances grow with the width, so that with a factor of 1 the gate is closed at first.
    "beta": 0.1,
    "n_validation": 1000,
}


def schedule(n_steps: int, batch_size: int) -> engine.TrainingConfig:
    """Training with ten evaluations and kept checkpoints."""
    every = n_steps // 10
    return engine.TrainingConfig(
        n_steps=n_steps,
        batch_size=batch_size,
        learning_rate=2e-3,
        warmup_steps=100,
        weight_decay=0.01,
        evaluate_every=every,
        keep_at=tuple(range(every, n_steps + 1, every)),
    )


PAIRS = EntailmentSetup(
    **READER, task=tasks.PlantedTextsConfig(**TEXTS), training=schedule(4000, 128)
)
QUESTIONS = RankingSetup(
    **READER,
    task=tasks.PlantedRankingConfig(**TEXTS, n_answers=5),
    training=schedule(3000, 160),
)
SENTENCES = NegatedSentimentSetup(
    model="coda",
    d_model=64,
    n_heads=4,
    d_mlp=128,
    n_layers=2,
    task=tasks.NegatedSentimentConfig(n_polar=40, held_out=0.2, clauses=(1, 3), words=(2, 3)),
    training=schedule(2000, 64),
    n_validation=1000,
)
BOTH = grid("softmax", "coda")
LAPTOP = BOTH | {"training.learning_rate": (1e-3, 2e-3, 4e-3), "seed": (0, 1, 2)}
SMOKE = (
    "d_model=16 n_heads=2 training.n_steps=4 training.keep_at=2,4 training.evaluate_every=2 "
    "training.batch_size=10 training.warmup_steps=1 n_validation=20 scores.n_test=40 signs.n=20 "
    "saturation.n=20 composition.n=20 training.learning_rate=0.002 seed=0"
)
TESTED = "scores.n_test=4000"

# Published texts

SEEDS = {"seed": (0, 1, 2)}
ALL_EXAMPLES = 10**7
PUBLISHED = f"scores.n_test={ALL_EXAMPLES} matrices.n=2"
BASE = StoredPairsSetup(
    # The width and the training of the base model, sections 3.2 and 3.3. Neither projection nor
    # embeddings, dropout, schedule and lengths are given.
    model="coda",
    task=tasks.PairsConfig(name="snli", path="data/snli"),
    d_model=200,
    n_heads=8,
    alignment="networks",
    training=engine.TrainingConfig(
        n_steps=1,
        batch_size=64,
        learning_rate=3e-4,
        final_learning_rate=1.0,
        evaluate_every=2000,
        keep_at=(200, 1000, 5000, 20_000),
    ),
    n_validation=500,
)
TEXT = StoredTextSetup(
    **TINY,
    model="coda",
    task=tasks.ClassificationConfig(name="imdb", path="data/imdb"),
    training=tiny_training(2000, 16, evaluate_every=200, keep_at=(200, 1000, 2000)),
    n_validation=500,
)
NLI = {"snli": 549_367, "mnli": 392_702, "scitail": 23_596, "dnli": 310_110}
RANKED = {"trecqa": 53_417, "wikiqa": 20_360, "ubuntu": 1_000_000}
"""Numbers of training pairs, by the name of the data set."""


def from_folder(name: str, n_epochs: int, pairs: int, batch_size: int = 64) -> str:
    """The folder of a data set, and the steps that see each of its pairs so many times."""
    steps = n_epochs * pairs // batch_size
    return f"task.path=data/{name} training.batch_size={batch_size} training.n_steps={steps}"


def of_data(names: Any, *grids: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    """Grids on each of some data sets, with three seeds."""
    return tuple({"task.name": tuple(names), **axes, **SEEDS} for axes in grids)


VARIANTS = (grid("softmax", "coda", gate_centring=("none", "matrix")), DOUBLED)
"""Both models, and what the paper tries so that the gate lies between 0 and 1."""
READERS = (*VARIANTS, grid("softmax", "coda", projection=("two_layers",)))
"""The same, and with the F of Parikh et al. 2016, whose relu forbids a negative E."""
CENTRED = centred("none", "matrix")
LONG = " task.max_length=200"
"""Dialogues are longer than sentences."""

# Tables

CAPTION = (
    "In percent. On generated texts: examples like those of training (id), and {ood} (ood). On "
    "published data: development (valid) and test examples; the paper's number. M<0: share of "
    "attention weights below -0.1. Signs: balanced accuracy of a head's signed weights (beyond a "
    "tenth of its largest) against the planted signs, on ood, of the head that is best on id; "
    "chance is {chance}. Match: the same for whether a word counts at all; chance is 50. Untr., "
    "untrained: the same with untrained weights."
)
WEIGHTS = (
    Row("M<0", NEGATIVE),
    Row("M<0, test", share("subtracted", "test") + share("partly_subtracted", "test")),
    Row("signs", SIGNS["trained"]),
    Row("untr.", SIGNS["untrained"], spread=False),
    Row("match", MATCHES["trained"]),
    Row("untrained", MATCHES["untrained"], spread=False),
)
UNSEEN = "held-out sets of concepts in pairs of words that training never has"


def paper(split: str) -> dict[str, engine.Reading]:
    """The paper's accuracy, beside ours."""
    return {"paper": metric("accuracy_paper", split)}


CHANCE = {"chance": metric("accuracy_chance", "ood")}
ACCURACIES = (
    Row("id", ON_ID),
    Row("ood", ON_OOD, beside=CHANCE),
    Row("valid", ON_VALID, beside=paper("valid")),
    Row("test", ON_TEST, beside=paper("test")),
)


RANKS = (
    # There is one right answer to a generated question: its MRR is the MAP.
    Row("MAP, id", ranked(MAP, "id")),
    Row("MAP, ood", ranked(MAP, "ood")),
    Row("MAP untr.", ranked(MAP, "ood", "untrained"), spread=False),
    *(
        Row(
            f"{label}, {split}",
            ranked(name, split),
            beside={"paper": ranked(f"{name}_paper", split)},
        )
        for label, name in (("MAP", MAP), ("MRR", MRR))
        for split in ("valid", "test")
    ),
    Row("R@1, test", ranked(FIRST, "test"), beside={"paper": ranked(f"{FIRST}_paper", "test")}),
)


def table(title: str, rows: tuple[Row, ...], ood: str, chance: str = "33.3") -> engine.Table:
    """A table of scores and of the weights of attention."""
    return engine.Table(
        title=f"CoDA and softmax attention: {title} (in %)",
        conditions="rows",
        rows=(*rows, *WEIGHTS),
        caption=CAPTION.format(ood=ood, chance=chance),
    )


# Studies

RIGHT = {"id": ON_ID, "ood": ON_OOD, "valid": ON_VALID, "test": ON_TEST}
RIGHT |= CHANCE | paper("test")
RANKED_FIRST = {row.label: row.reading for row in RANKS}
COMMON: dict[str, Any] = {
    "grids": (LAPTOP,),
    "tuned": ("training.learning_rate",),
    "along_training": ALONG_TRAINING,
}
VIEWS = {
    "accuracy": partial(plots.points, readings=RIGHT, xlabel="right answers"),
    "tuning": plots.tuning,
    **views.DRAWN,
    "signs": partial(plots.points, readings=SIGNS, xlabel="balanced accuracy of signs"),
    "matches": partial(plots.points, readings=MATCHES, xlabel="balanced accuracy of matches"),
    "matrices": views.matrices,
    "composition": views.composition,
}

TEXT_PAIRS = engine.Study(
    name="text_pairs",
    question="Does attention that can subtract infer better whether one text follows from another?",
    setup=PAIRS,
    presets={
        "laptop": Preset(changes=TESTED),
        "smoke": Preset(changes=SMOKE),
        "paper": Preset(
            changes=PUBLISHED,
            setup=BASE,
            grids=(*of_data(NLI, *READERS), *of_data(("scitail", "dnli"), CENTRED)),
            where={
                "task.name": {
                    name: from_folder(name, 50, n, 32 if name == "scitail" else 64)
                    for name, n in NLI.items()
                }
            },
        ),
    },
    measures=MEASURES,
    trained=engine.TrainedIf(reaches=0.9),
    claims=tuple(claims_of_pairs()),
    table=table("inference", ACCURACIES, UNSEEN),
    views=VIEWS,
    **COMMON,
)
TEXT_RANKING = engine.Study(
    name="text_ranking",
    question="Does attention that can subtract rank answers to a question better?",
    setup=QUESTIONS,
    presets={
        "laptop": Preset(changes=TESTED),
        "smoke": Preset(changes=f"{SMOKE} ranking.n=40"),
        "paper": Preset(
            # Most answers are wrong, so that the accuracy is no criterion for a checkpoint.
            changes=f"{PUBLISHED} ranking.n={ALL_EXAMPLES} training.checkpoint=last",
            setup=BASE,
            grids=(*of_data(RANKED, *READERS), *of_data(("wikiqa",), CENTRED)),
            where={
                "task.name": {
                    name: from_folder(name, 20, n) + LONG * (name == "ubuntu")
                    for name, n in RANKED.items()
                }
            },
        ),
    },
    measures={**MEASURES, "ranking": ranking},
    trained=engine.TrainedIf(reaches=0.9),
    claims=tuple(claims_of_ranking()),
    table=table("ranking", RANKS, UNSEEN),
    views={
        "ranks": partial(plots.points, readings=RANKED_FIRST, xlabel="mean over questions"),
        **VIEWS,
    },
    **COMMON,
)
TEXT_SENTIMENT = engine.Study(
    name="text_sentiment",
    question="Does attention that can subtract tell the sentiment of a text better?",
    setup=SENTENCES,
    presets={
        "laptop": Preset(changes=TESTED),
        "smoke": Preset(changes=f"{SMOKE} d_mlp=16"),
        "paper": Preset(
            changes=PUBLISHED,
            setup=TEXT,
            grids=of_data(("imdb", "sst2"), *VARIANTS, grid(scaled=(False,))),
            # Sizes of vocabularies of tensor2tensor; with the padding 4,096 tokens in a batch.
            where={
                "task.name": {
                    "imdb": "task.path=data/imdb task.vocabulary_size=8192 task.max_length=256 "
                    "training.batch_size=16",
                    "sst2": "task.path=data/sst2 task.vocabulary_size=16384 task.max_length=64 "
                    "training.batch_size=64",
                }
            },
            departures={
                "task.tokens": "words, as section 3.5 also says; it names byte pairs, too",
                "training.length_bucketed_batches": "texts of all lengths, padded",
            },
        ),
    },
    measures=MEASURES,
    trained=engine.TrainedIf(reaches=0.9),
    claims=tuple(claims_of_sentiment()),
    table=table(
        "sentiment",
        ACCURACIES,
        "sentences in which known words are negated for the first time",
        "50, since negators only subtract",
    ),
    views=VIEWS,
    **COMMON,
)

if __name__ == "__main__":
    engine.main(TEXT_PAIRS, TEXT_RANKING, TEXT_SENTIMENT)
