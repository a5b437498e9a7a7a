"""Is compositional attention better than multi-head attention where nobody knows the pairing?

The benchmarks of "Compositional Attention" (Mittal et al. 2021) except contextual retrieval, which
has its own study: relations in pictures (Sort-of-CLEVR, equilateral triangles), relations between
images (ESBN's tasks), commands (SCAN), several image data sets in one network, and text. The same
model has S heads, or S searches and R retrievals.

    python studies/compositional_benchmarks.py                              # Sort-of-CLEVR
    python studies/compositional_benchmarks.py --study scan task.cutoff=22,26
    python studies/compositional_benchmarks.py --study esbn task.rule=rmts task.n_withheld=0,50,95
    python studies/compositional_benchmarks.py --study images task.sources=birds task.folder=FOLDER
    python studies/compositional_benchmarks.py --study text task.path=book.txt
    python studies/compositional_benchmarks.py --study sort_of_clevr --preset paper --device cuda

At laptop size (5 to 8 minutes on 2 cores for each task) models are smaller and trained for fewer
steps; `images` has triangles and scikit-learn's digits, and `text` the pages of Python's `help()`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import tasks
from studies import engine
from studies.engine import ALL, Preset, TrainedIf, metric, read
from studies.report import plots
from studies.setups import benchmark as shared
from studies.setups import pictures, scan, text
from studies.setups.benchmark import benchmark, by_group, fewer, grids, learned, paper, small, smoke

RULES = tuple(tasks.ESBN_RELATIONS)
SOURCES = ("digits", *pictures.PAPER_SOURCES)
IN_AND_OUT = {split: metric("accuracy", split) for split in ("id", "ood")}
PUBLISHED = {"the paper's, ood": metric("accuracy_paper", "ood")}
ALL_OF_BOTH = {split: (split, ALL) for split in ("id", "ood")}

against = partial(plots.against, ylabel="accuracy")


def withheld(rules: tuple[str, ...], *numbers: int) -> dict[str, Any]:
    """Axes: rules, and numbers of objects withheld from training."""
    return {"task.rule": rules, "task.n_withheld": numbers}


LEAST = withheld(RULES[:1], 98)

SORT_OF_CLEVR = benchmark(
    "sort_of_clevr",
    "Does compositional attention answer questions about relations in a picture better?",
    pictures.SortOfClevrSetup(
        **small(7000, 64, 1e-3, n_validation=600, n_retrievals=3),
        task=tasks.SortOfClevrConfig(),
        patch_size=15,
    ),
    grids(3),
    {
        "smoke": smoke(
            "n_validation=20 task.n_train=20 task.n_valid=2 task.n_test=4", grids(2, seeds=2)
        ),
        # 100 passes over 9,800 pictures with 30 questions. Half of `valid` is left to score.
        "paper": paper(
            "d_model=256 d_mlp=512 n_layers=4 n_validation=3000 training.n_steps=459400 "
            "training.learning_rate=1e-4 training.final_learning_rate=1 "
            "training.evaluate_every=9188",
            grids(1, 2, 3, 4, seeds=5),
        ),
    },
    columns={kind: ("test", kind) for kind in pictures.QUESTION_TYPES},
    source="Table 1",
    trained=TrainedIf(split="valid", reaches=0.7),
    claims=(
        fewer(3, 4, metric("accuracy", "test", "binary"), "Table 1"),
        learned("Question types use different retrievals", "difference", "Figure 14"),
    ),
    views={"training_by_type": by_group(*pictures.QUESTION_TYPES)},
)

TRIANGLES = benchmark(
    "triangles",
    "Does compositional attention recognise equilateral triangles better?",
    pictures.TrianglesSetup(
        **small(8000, 64, 1e-3, n_validation=500, n_retrievals=4),
        task=tasks.TrianglesConfig(n_train=20_000, n_valid=2000, n_test=4000, image_size=48),
        patch_size=8,
    ),
    grids(4),
    {
        "smoke": smoke(
            "patch_size=16 n_validation=10 task.n_train=100 task.n_valid=20 task.n_test=60",
            grids(2),
        ),
        # 200 passes over 50,000 pictures.
        "paper": paper(
            "d_model=256 d_mlp=512 n_layers=4 n_validation=2000 training.n_steps=78200 "
            "training.batch_size=128 training.learning_rate=1e-4 training.final_learning_rate=0 "
            "training.evaluate_every=1564 patch_size=4 task.n_train=50000 task.n_valid=10000 "
            "task.n_test=10000 task.image_size=64",
            grids(1, 2, 4, seeds=5),
        ),
    },
    columns={"accuracy": ("test", ALL)},
    source="Table 3",
    trained=TrainedIf(split="valid", reaches=0.75),
    claims=(learned("Searches and retrievals pair tightly", "tightness", "Figure 15"),),
)

ESBN = benchmark(
    "esbn",
    "Does compositional attention carry relations over to unseen objects?",
    pictures.EsbnSetup(
        **small(800, 32, 5e-4, n_validation=200, n_retrievals=8, n_layers=1, n_heads=8),
        task=tasks.ESBNConfig(rule="rmts"),
        d_selection=16,
    ),
    grids(8, of_task=[withheld(RULES[2:], 50, 95)]),
    {
        "laptop": Preset(changes="scores.n_test=2000"),
        "smoke": smoke("n_validation=20", grids(2, of_task=[withheld(RULES[:1], 0, 98)])),
        "paper": paper(
            "d_model=128 d_mlp=512 n_validation=1000 training.n_steps=20000 "
            "training.final_learning_rate=1 training.evaluate_every=400",
            # Only for `same_different` two objects are enough.
            grids(1, 2, 4, 8, seeds=5, of_task=[withheld(RULES, 0, 50, 85, 95), LEAST]),
            **{"training.learning_rate": "as in the code; C.5 has 1e-4"},
        ),
    },
    columns=ALL_OF_BOTH,
    source="Figures 6 and 17",
    trained=TrainedIf(reaches=0.9),
    views={"withheld": partial(against, readings=IN_AND_OUT, setting="n_withheld", rows="rule")},
)

SCAN = benchmark(
    "scan",
    "Does compositional attention follow commands longer than in training better?",
    scan.ScanSetup(
        **small(3000, 64, 1e-3, n_validation=200, n_retrievals=1),
        task=tasks.ScanConfig(split="length", cutoff=26),
        dropout=0.1,
    ),
    grids(1, of_task=[{"task.cutoff": (26,)}]),
    {
        "laptop": Preset(changes="scores.n_test=2000"),
        "smoke": smoke("n_validation=20", grids(2, of_task=[{"task.cutoff": (26,)}])),
        # Half of `id` is left to score.
        "paper": paper(
            "d_model=128 d_mlp=256 n_layers=3 n_heads=8 dropout=0.5 n_validation=250 "
            "training.n_steps=50000 training.batch_size=256 training.final_learning_rate=1 "
            "training.evaluate_every=1000",
            grids(1, 2, 4, seeds=5, of_task=[{"task.cutoff": scan.PAPER_CUTOFFS}]),
        ),
    },
    columns=ALL_OF_BOTH,
    further={"tokens, ood": metric("token_accuracy", "ood")},
    source="Table 4",
    trained=TrainedIf(reaches=0.9),
    claims=(fewer(1, 4, metric("accuracy", "ood"), "Table 4"),),
    views={"cutoffs": partial(against, readings=IN_AND_OUT | PUBLISHED, setting="cutoff")},
)

IMAGES = benchmark(
    "images",
    "Does compositional attention classify images of several data sets at once better?",
    pictures.ImagesSetup(
        **small(4000, 64, 1e-3, n_validation=500, n_retrievals=3),
        task=tasks.ImagesConfig(
            sources=("digits", "triangles"),
            folder=tasks.BUNDLED_IMAGES,
            n_valid=200,
            triangles=tasks.TrianglesConfig(n_train=20_000, n_valid=1000, n_test=2000),
        ),
        patch_size=4,
    ),
    grids(3),
    {
        "smoke": smoke(
            "n_validation=20 task.triangles.n_train=100 task.triangles.n_valid=20 "
            "task.triangles.n_test=60 task.triangles.image_size=48",
            grids(2),
        ),
        "paper": paper(
            "d_model=256 d_mlp=512 n_validation=2000 training.n_steps=200000 "
            "training.batch_size=128 training.learning_rate=1e-4 training.evaluate_every=4000 "
            f"task.sources={','.join(pictures.PAPER_SOURCES)} task.folder=none task.n_valid=2000 "
            "task.triangles.n_train=50000 task.triangles.n_valid=10000 "
            "task.triangles.n_test=10000",
            grids(1, 2, 3, 4, seeds=5),
            **{"training.final_learning_rate": "a cosine to .1; the authors' rate is constant"},
        ),
    },
    columns={name: ("test", name) for name in SOURCES},
    source="Table 2",
    trained=TrainedIf(split="valid", reaches=0.7),
    claims=(fewer(3, 4, metric("accuracy", "test", "cifar10"), "Table 2"),),
    views={"training_by_source": by_group(*SOURCES)},
)

TEXT = benchmark(
    "text",
    "Does compositional attention predict a text better?",
    text.TextPairingSetup(
        **small(3000, 16, 1e-3, n_validation=64, n_retrievals=4, n_layers=3),
        task=tasks.TextConfig(path=tasks.PYTHON_HELP, vocabulary_size=1024, length=64),
        dropout=0.1,
    ),
    grids(4),
    {
        "smoke": smoke("n_validation=20", grids(2)),
        "paper": paper(
            "d_model=512 d_mlp=2048 n_layers=6 n_heads=8 d_selection=32 dropout=0 "
            "n_validation=256 training.n_steps=200000 training.batch_size=64 "
            "training.learning_rate=3e-4 training.evaluate_every=4000 training.precision=bf16 "
            "task.path=none task.vocabulary_size=16384 task.length=256",
            grids(8),
            **{
                "training.learning_rate": "a cosine from 3e-4; the authors' 4e-3, an inverse "
                "square root",
                "task": "16,384 byte pairs, windows of 256; the authors' words, windows of 512",
            },
        ),
    },
    columns={"perplexity": ("test", ALL)},
    further={"bits per byte": metric("bits_per_byte", "test")},
    source="section 4.7",
    trained=TrainedIf(split="valid", metric="loss", reaches=0.75, share_of="frequencies"),
    claims=(
        engine.Claim(
            "Compositional attention converges faster: its loss is lower over training",
            f"{shared.MITTAL}, Figure 7",
            read("training", "loss", split="valid", group=ALL, mean=("train_step",)),
            of=shared.MULTI_HEAD,
            exceeds=shared.COMPOSITIONAL,
            of_learning=True,
        ),
    ),
)


if __name__ == "__main__":
    engine.main(SORT_OF_CLEVR, TRIANGLES, ESBN, SCAN, IMAGES, TEXT)
