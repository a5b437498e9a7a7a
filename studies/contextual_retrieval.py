"""Does attention that pairs searches with retrievals freely answer unseen pairings better?

Contextual retrieval of "Compositional Attention" (Mittal et al. 2021): multi-head attention and
compositional attention, trained on all combinations of preferences or on some of them and tested
on those that were held out; which retrieval each search chooses; and how much of the error a
forced pairing removes.

    python studies/contextual_retrieval.py                      # about a quarter of an hour
    python studies/contextual_retrieval.py --preset smoke
    python studies/contextual_retrieval.py d_model=32,128 seed=0
    python studies/contextual_retrieval.py --preset specialization
    python studies/contextual_retrieval.py --preset paper --device cuda
"""

from functools import partial
from typing import Any

import tasks
from studies import engine
from studies.engine import Claim, Reading, Row, metric, read
from studies.measures.retrieval import (
    as_compositional,
    chosen_retrievals,
    combinations,
    early_error,
)
from studies.report import browsers, drawings, plots
from studies.report.panels import values
from studies.setups.retrieval import RetrievalSetup
from studies.views import retrieval

ALL, ID, OOD = (metric("error", split) for split in ("all", "id", "ood"))
SHARE = {s: metric("error", s) / metric("error_constant", s) for s in ("all", "id", "ood")}
PAPER = {s: metric("error_paper", s) for s in ("all", "ood")}
of_pairing = partial(read, "pairing", search="pooled")
familiar = partial(of_pairing, "agreement", fitted="id", control="observed")
AGREE = of_pairing("agreement", fitted="all", group="all", control="observed")
SHUFFLED = of_pairing("agreement", fitted="all", group="all", control="shuffled")
CHANCE_OOD = of_pairing("chance", fitted="id", group="ood")
SWITCH = read("pairing", "switch") - read("pairing", "unevenness", group="all")
THROUGHOUT = read("training", "error", split="all", group="all", mean=("train_step",))
REMOVED = read("pairing", "removed", condition="familiar")

TABLE_6 = "Mittal et al. 2021, Table 6"
COMPOSITIONAL = {"model": "compositional"}


def less(
    statement: str,
    reading: Reading,
    source: str = TABLE_6,
    of: dict[str, Any] | None = None,
    than: dict[str, Any] | None = None,
    of_learning: bool = False,
) -> Claim:
    """The claim that a reading of compositional attention is below that of multi-head attention.

    By default at the same width and against every number of heads.
    """
    multi_head = {"model": "multi_head"} | (than or {})
    return Claim(
        statement, source, reading, multi_head, COMPOSITIONAL | (of or {}), of_learning=of_learning
    )


def exceeds(statement: str, reading: Reading, value: float, source: str) -> Claim:
    """The claim that a reading of compositional attention exceeds a number."""
    return Claim(statement, source, reading, COMPOSITIONAL, value)


LOWER = (
    "Trained on all combinations of preferences, compositional attention has a lower error than "
    "multi-head attention of the same width, with any number of heads"
)
UNSEEN = "Its error is lower on combinations that were held out from training, too"
FEWER = (
    "With width {} it has a lower error on held-out combinations than multi-head attention with "
    "width {} and more parameters"
)
FASTER = "It learns faster: its error is lower {}"
SPECIALISED = (
    "Its retrievals specialise: choices agree with a pairing, more than halfway from that with one "
    "of shuffled preferences to always"
)
FOLLOWED = "Choices of retrievals agree with a pairing more than with one of shuffled preferences"
SWITCHES = (
    "Its use of retrievals differs more between familiar and held-out combinations than the use "
    "on all combinations differs from an even one"
)
PREFERRED = (
    "Its searches choose the preferred retrieval on held-out combinations too: more than halfway "
    "from chance to always"
)
MENDED = (
    "Its remaining error is in the pairing: forcing its own pairing of training combinations "
    "removes at least half of the error on held-out ones"
)
SUPERSET = "With the identity as value scores, its outputs are those of multi-head attention"
PAIRS = "On held-out combinations, a head of full width for each pair does not make up for it"
CLAIMS = (
    less(LOWER, ALL, of_learning=True),
    less(UNSEEN, OOD),
    *(
        less(FEWER.format(narrow, wide), OOD, of={"d_model": narrow}, than={"d_model": wide})
        for narrow, wide in ((64, 128), (128, 256), (256, 512))
    ),
    *(
        less(FASTER.format(when), error, "Mittal et al. 2021, figure 10", of_learning=True)
        for when, error in (
            ("after a tenth of the training", early_error("all", 0.1)),
            ("over training", THROUGHOUT),
        )
    ),
    exceeds(SPECIALISED, AGREE - SHUFFLED / 2, 0.5, "Mittal et al. 2021, figures 5 and 11"),
    exceeds(FOLLOWED, AGREE - SHUFFLED, 0.0, "ours"),
    exceeds(SWITCHES, SWITCH, 0.0, "Mittal et al. 2021, figure 4"),
    less(PAIRS, OOD, "ours", than={"model": "multi_head_pairs"}),
    exceeds(PREFERRED, familiar(group="ood") - CHANCE_OOD / 2, 0.5, "ours"),
    exceeds(MENDED, REMOVED, 0.5, "ours"),
    Claim(
        SUPERSET,
        "Mittal et al. 2021, section 3",
        read("as_compositional", "distance"),
        of={"model": "multi_head"},
        equals=0.0,
        margin=1e-4,
        of_learning=True,
    ),
)

TABLE = engine.Table(
    title="Mean absolute error",
    conditions="rows",
    rows=(
        Row("param.", read("costs", "parameters"), engine.count, spread=False),
        Row("all", ALL, engine.short),
        Row("share", SHARE["all"], spread=False),
        Row("paper", PAPER["all"], engine.short, spread=False),
        engine.Section("familiar"),
        Row("familiar", ID, engine.short),
        Row("share", SHARE["id"], spread=False),
        engine.Section("held out"),
        Row("held out", OOD, engine.short),
        Row("share", SHARE["ood"], spread=False),
        Row("paper", PAPER["ood"], engine.short, spread=False),
    ),
    caption="Trained on all: on all combinations of preferences; the others on the familiar ones "
    "alone. All, familiar, held out: the combinations that are tested. Share: in percent of the "
    "error of always answering 0. Paper: after 100,000 steps of 256 examples.",
)

LAPTOP = RetrievalSetup(
    model="compositional",
    task=tasks.ContextualRetrievalConfig(coefficients="published"),
    d_model=64,
    n_validation=1000,
    training=engine.TrainingConfig(
        n_steps=6000,
        batch_size=128,
        optimizer="muon",
        learning_rate=6e-3,
        final_learning_rate=0.01,
        weight_decay=0.0,
        warmup_steps=300,
        clip=1.0,
        evaluate_every=500,
    ),
)
SEEDS, PROTOCOLS = (0, 1, 2), ("familiar", "all")
GRIDS = (
    {
        "model": ("multi_head", "compositional"),
        "n_heads": (2, 8),
        "task.trained_on": PROTOCOLS,
        "seed": SEEDS,
    },
    {"model": ("multi_head_pairs",), "seed": SEEDS},
)


def table_6(searches: int, retrievals: int, widths: tuple[int, ...]) -> dict[str, tuple[Any, ...]]:
    """The rows of Table 6 for one size of the task: by width and number of heads."""
    return {
        "task.n_searches": (searches,),
        "task.n_retrievals": (retrievals,),
        "d_model": widths,
        "model": ("multi_head", "compositional"),
        "n_heads": (searches, retrievals, searches * retrievals),
        "task.trained_on": PROTOCOLS,
        "seed": SEEDS,
    }


PAPER_TRAINING = (
    "training.optimizer=adamw training.clip=none training.n_steps=100000 "
    "training.batch_size=256 training.evaluate_every=5000 "
    "training.learning_rate=1e-4 training.final_learning_rate=1.0 training.warmup_steps=0 "
    "training.checkpoint=last n_validation=25600 scores.n_test=25600 combinations.n=10000 "
    "pairing.n=10000"
)
# Figures 5, 11 and 12; their width is not given.
SPECIALIZATION = tuple(
    {"task.n_searches": (searches,), "task.n_retrievals": (retrievals,), "seed": tuple(range(5))}
    for searches, retrievals in ((1, 2), (1, 4), (2, 4))
)
PRESETS = {
    "smoke": engine.Preset(
        changes="seed=0,1 n_heads=2 d_model=8 training.n_steps=20 training.batch_size=16 "
        "training.warmup_steps=5 training.evaluate_every=10 n_validation=20 "
        "scores.n_test=100 combinations.n=100 pairing.n=100"
    ),
    # Five seeds at each rate, and three more at those two that are best for some network.
    "tuned": engine.Preset(
        grids=tuple(
            {**grid, "training.learning_rate": rates, "seed": seeds}
            for rates, seeds in (
                ((0.003, 0.006, 0.012, 0.024), tuple(range(5))),
                ((0.006, 0.012), (5, 6, 7)),
            )
            for grid in GRIDS
        )
    ),
    # Multi-head attention of twice the width; `tuned` has both of the same.
    "widths": engine.Preset(
        grids=tuple(
            models | {"training.learning_rate": (0.003, 0.006, 0.012), "seed": (0, 1, 2, 3, 4)}
            for models in (
                {"model": ("multi_head",), "d_model": (128,), "n_heads": (2, 8)},
                {"model": ("compositional",), "d_model": (64,)},
            )
        ),
    ),
    # Twice the searches and retrievals need twice the width and the steps. A head for each pair of
    # them would be of width 4. Three seeds at each rate, three more at that which is best, and as
    # many more of the mechanism alone as their spread asks for, to say how it uses its retrievals.
    "more-pairings": engine.Preset(
        changes="task.n_searches=4 task.n_retrievals=8 d_model=128 training.n_steps=12000",
        grids=(
            *(
                {
                    "task.trained_on": (protocol,),
                    "training.learning_rate": rates,
                    "model": ("multi_head", "compositional"),
                    "n_heads": (4, 8),
                    "seed": seeds,
                }
                for protocol in PROTOCOLS
                for rates, seeds in (
                    ((0.0015, 0.003, 0.006, 0.012), SEEDS),
                    ((0.003,), (3, 4, 5)),
                )
            ),
            {
                "task.trained_on": ("familiar",),
                "training.learning_rate": (0.003,),
                "model": ("compositional",),
                "seed": tuple(range(6, 17)),
            },
        ),
    ),
    "specialization": engine.Preset(changes="task.trained_on=all", grids=SPECIALIZATION),
    # Adam with a constant rate of 1e-4; the number of seeds is not given.
    "paper": engine.Preset(
        changes=PAPER_TRAINING,
        grids=(
            table_6(2, 4, (64, 128)),
            table_6(4, 8, (128, 256, 512)),
            table_6(4, 16, (128, 256, 512)),
        ),
    ),
    "paper-specialization": engine.Preset(
        changes=f"task.trained_on=all {PAPER_TRAINING}", grids=SPECIALIZATION
    ),
}

ZERO = {"always answering 0": values("scores", "error_constant", group="all")}
FITTED = {"all": "all", "id": "familiar", "ood": "held out"}
MAP = {"y": "preference_0", "x": "preference_1", "rows": "split"}
VIEWS = {
    "example": retrieval.example,
    "losses_all": partial(retrieval.losses, split="all"),
    "losses_ood": partial(retrieval.losses, split="ood"),
    "shares": partial(plots.points, readings=SHARE, xlabel="error / that of always answering 0"),
    "training": partial(plots.training, metric="error", references=ZERO, log="y"),
    "tuning": partial(plots.tuning, log="y"),
    "combinations": partial(
        drawings.matrices, data=values("combinations", "error"), title="mean absolute error", **MAP
    ),
    "switching": retrieval.switching,
    "specialization": retrieval.specialization,
    "pairing": retrieval.pairing,
    # Trained on all combinations, there is one group and one fit.
    "agreement": partial(
        plots.only,
        trained_on="familiar",
        view=partial(
            plots.lines,
            data=values("pairing", "agreement", search="pooled"),
            along="group",
            columns={f"fitted on: {name}": {"fitted": split} for split, name in FITTED.items()},
            lines="control",
            references={"chance": values("pairing", "chance", search="pooled")},
            seeds="points",
            ylabel="choices that agree",
            ylim=(0.0, 1.03),
        ),
    ),
    "forcing": partial(
        plots.lines,
        data=values("pairing", "mean_error"),
        along="condition",
        seeds="points",
        ylabel="error on held-out combinations",
    ),
}

BROWSERS = {
    "retrievals_by_network": partial(
        browsers.matrices,
        data=values("pairing", "pairing"),
        y="model_search",
        x="model_retrieval",
        title="how often a search uses a retrieval",
    ),
    "errors_by_network": partial(
        browsers.matrices,
        data=values("combinations", "error"),
        y="preference_0",
        x="preference_1",
        title="mean absolute error by combination of preferences",
    ),
}
"""Charts with which networks are stepped through."""

STUDY = engine.Study(
    name="contextual_retrieval",
    question="Does attention that pairs searches and retrievals answer unseen pairings better?",
    setup=LAPTOP,
    grids=GRIDS,
    presets=PRESETS,
    tuned=("training.learning_rate",),
    measures={
        "combinations": combinations,
        "pairing": chosen_retrievals,
        "as_compositional": as_compositional,
    },
    # Half the error of a constant answer.
    trained=engine.TrainedIf(split="id", metric="error", reaches=0.5, share_of="constant"),
    claims=CLAIMS,
    table=TABLE,
    views=VIEWS,
    browsers=BROWSERS,
)

if __name__ == "__main__":
    engine.main(STUDY)
