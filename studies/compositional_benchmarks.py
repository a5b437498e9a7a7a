"""Is compositional attention better than multi-head attention where nobody knows the pairing?

The benchmarks of "Compositional Attention" (Mittal et al. 2021) beside contextual retrieval, which
has a study of its own: relations in pictures (Sort-of-CLEVR, equilateral triangles), between images
(ESBN's tasks), commands (SCAN), several data sets of images in one network, and text. In otherwise
the same model S heads are compared with S searches and R retrievals.

    python studies/compositional_benchmarks.py                              # Sort-of-CLEVR
    python studies/compositional_benchmarks.py --study scan task.cutoff=22,26
    python studies/compositional_benchmarks.py --study esbn task.rule=rmts task.n_withheld=0,50,95
    python studies/compositional_benchmarks.py --study images task.sources=birds task.folder=FOLDER
    python studies/compositional_benchmarks.py --study text task.path=book.txt
    python studies/compositional_benchmarks.py --study sort_of_clevr --preset paper --device cuda

At laptop size (5 to 8 minutes on 2 cores, for each task) models are smaller and trained for less;
`images` then has the triangles and scikit-learn's digits, and `text` what Python's `help()` says.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import tasks
from studies.engine import ALL, Claim, TrainedIf, main, metric, read
from studies.pairing_benchmark import (
    MITTAL,
    benchmark,
    by_group,
    fewer,
    grids,
    more_than_untrained,
    over,
    training,
)
from studies.setups.esbn import EsbnSetup
from studies.setups.pictures import (
    BUNDLED_IMAGES,
    PAPER_SOURCES,
    ImagesSetup,
    SortOfClevrSetup,
    TrianglesSetup,
)
from studies.setups.scan import PAPER_CUTOFFS, ScanSetup
from studies.setups.text import PYTHON_HELP, TextPairingSetup
from tasks import (
    ESBNConfig,
    ImagesConfig,
    ScanConfig,
    SortOfClevrConfig,
    TextConfig,
    TrianglesConfig,
)

TYPES, RULES = tuple(tasks.SORT_OF_CLEVR_QUESTIONS), tuple(tasks.ESBN_RELATIONS)
SOURCES = ("digits", *PAPER_SOURCES)
IN_AND_OUT = {split: metric("accuracy", split) for split in ("id", "ood")}

SMALL: dict[str, Any] = {"d_model": 64, "d_mlp": 128, "n_layers": 2, "n_heads": 4}
LARGE: dict[str, Any] = {"d_model": 256, "d_mlp": 512, "n_layers": 4}
FEW = TrianglesConfig(n_train=100, n_valid=20, n_test=60, image_size=48)

long = partial(training, warmup=1000, evaluations=50)
constant_rate = partial(long, final_learning_rate=1.0)

SORT_OF_CLEVR = benchmark(
    "sort_of_clevr",
    "Does compositional attention answer questions about relations in a picture better?",
    setup=SortOfClevrSetup(
        **SMALL,
        model="multi_head",
        task=SortOfClevrConfig(),
        n_retrievals=3,
        patch_size=15,
        training=training(7000, 64, 1e-3),
        n_validation=600,
    ),
    laptop=grids((3,)),
    smoke=(grids((2,), 2), {"task": SortOfClevrConfig(n_train=20, n_valid=2, n_test=4)}),
    paper=(
        grids((1, 2, 3, 4), 5),
        # 9,800 pictures with 30 questions each, 100 times. One half of `valid` is left to score.
        LARGE | {"n_validation": 3000, "training": constant_rate(459_400, 64, 1e-4)},
    ),
    columns={kind: ("test", kind) for kind in TYPES},
    source="Table 1",
    trained=TrainedIf(split="valid", reaches=0.7),
    claims=(
        fewer(3, 4, metric("accuracy", "test", "binary"), "Table 1"),
        more_than_untrained("Question types use different retrievals", "difference", "Figure 14"),
    ),
    views={"training_by_type": by_group(*TYPES)},
)

TRIANGLES = benchmark(
    "triangles",
    "Does compositional attention recognise equilateral triangles better?",
    setup=TrianglesSetup(
        **SMALL,
        model="multi_head",
        task=TrianglesConfig(n_train=20_000, n_valid=2000, n_test=4000, image_size=48),
        n_retrievals=4,
        patch_size=8,
        training=training(8000, 64, 1e-3),
        n_validation=500,
    ),
    laptop=grids((4,)),
    smoke=(grids((2,)), {"task": FEW, "patch_size": 16, "n_validation": 10}),
    paper=(
        grids((1, 2, 4), 5),
        LARGE
        | {"task": TrianglesConfig(), "patch_size": 4, "n_validation": 2000}
        # 50,000 pictures, 200 times.
        | {"training": long(78_200, 128, 1e-4, final_learning_rate=0.0)},
    ),
    columns={"accuracy": ("test", ALL)},
    source="Table 3",
    trained=TrainedIf(split="valid", reaches=0.75),
    claims=(more_than_untrained("Searches and retrievals pair tightly", "tightness", "Figure 15"),),
)

ESBN = benchmark(
    "esbn",
    "Does compositional attention carry relations over to objects that training lacks?",
    setup=EsbnSetup(
        **SMALL | {"n_layers": 1, "n_heads": 8},
        model="multi_head",
        task=ESBNConfig(rule="rmts"),
        n_retrievals=8,
        d_selection=16,
        training=training(800, 32, 5e-4),
        n_validation=200,
    ),
    laptop=grids((8,), 1, {"task.rule": RULES[2:], "task.n_withheld": (50, 95)}),
    n_test=2000,
    smoke=(grids((2,), 1, {"task.rule": RULES[:1], "task.n_withheld": (0, 98)}), {}),
    paper=(
        grids(
            (1, 2, 4, 8),
            5,
            {"task.rule": RULES, "task.n_withheld": (0, 50, 85, 95)},
            # Only of these are two objects enough.
            {"task.rule": RULES[:1], "task.n_withheld": (98,)},
        ),
        {"d_model": 128, "d_mlp": 512, "n_validation": 1000}
        | {"training": constant_rate(20_000, 32, 5e-4)},
    ),
    departures={"training.learning_rate": "the code's; C.5 has 1e-4"},
    columns={"id": ("id", ALL), "ood": ("ood", ALL)},
    source="Figures 6 and 17",
    trained=TrainedIf(reaches=0.9),
    conditions="rows",
    views={"withheld": over("n_withheld", IN_AND_OUT, "rule")},
)

SCAN = benchmark(
    "scan",
    "Does compositional attention follow commands longer than those of training better?",
    setup=ScanSetup(
        **SMALL,
        model="multi_head",
        task=ScanConfig(split="length", cutoff=26),
        n_retrievals=1,
        dropout=0.1,
        training=training(3000, 64, 1e-3),
        n_validation=200,
    ),
    laptop=grids((1,), 1, {"task.cutoff": (26,)}),
    n_test=2000,
    smoke=(grids((2,), 1, {"task.cutoff": (26,)}), {}),
    paper=(
        grids((1, 2, 4), 5, {"task.cutoff": PAPER_CUTOFFS}),
        {"d_model": 128, "d_mlp": 256, "n_layers": 3, "n_heads": 8, "dropout": 0.5}
        # One half of `id` is left to score.
        | {"n_validation": 250, "training": constant_rate(50_000, 256, 1e-3)},
    ),
    columns={"id": ("id", ALL), "ood": ("ood", ALL)},
    further={"tokens, ood": ("token_accuracy", "ood", ALL)},
    source="Table 4",
    trained=TrainedIf(reaches=0.9),
    claims=(fewer(1, 4, metric("accuracy", "ood"), "Table 4"),),
    conditions="rows",
    views={
        "cutoffs": over(
            "cutoff", IN_AND_OUT | {"the paper's, ood": metric("accuracy_paper", "ood")}
        )
    },
)

IMAGES = benchmark(
    "images",
    "Does compositional attention recognise images of several data sets at once better?",
    setup=ImagesSetup(
        **SMALL,
        model="multi_head",
        task=ImagesConfig(
            sources=("digits", "triangles"),
            folder=BUNDLED_IMAGES,
            n_valid=200,
            triangles=TrianglesConfig(n_train=20_000, n_valid=1000, n_test=2000),
        ),
        n_retrievals=3,
        patch_size=4,
        training=training(4000, 64, 1e-3),
        n_validation=500,
    ),
    laptop=grids((3,)),
    smoke=(grids((2,)), {"task.triangles": FEW}),
    paper=(
        grids((1, 2, 3, 4), 5),
        LARGE
        | {"task": ImagesConfig(), "n_layers": 2, "n_validation": 2000}
        | {"training": long(200_000, 128, 1e-4)},
    ),
    departures={"training.final_learning_rate": "a cosine to .1; the authors' rate stays"},
    columns={name: ("test", name) for name in SOURCES},
    source="Table 2",
    trained=TrainedIf(split="valid", reaches=0.7),
    claims=(fewer(3, 4, metric("accuracy", "test", "cifar10"), "Table 2"),),
    views={"training_by_source": by_group(*SOURCES)},
)

TEXT = benchmark(
    "text",
    "Does compositional attention predict a text better?",
    setup=TextPairingSetup(
        **SMALL | {"n_layers": 3},
        model="multi_head",
        task=TextConfig(path=PYTHON_HELP, vocabulary_size=1024, length=64),
        n_retrievals=4,
        dropout=0.1,
        training=training(3000, 16, 1e-3),
        n_validation=64,
    ),
    laptop=grids((4,)),
    smoke=(grids((2,)), {}),
    paper=(
        grids((8,)),
        {"task": TextConfig(), "d_model": 512, "d_mlp": 2048, "n_layers": 6, "n_heads": 8}
        | {"d_selection": 32, "dropout": 0.0, "n_validation": 256}
        | {"training": long(200_000, 64, 3e-4, precision="bf16")},
    ),
    departures={
        "training.learning_rate": "a cosine from 3e-4; the authors' 4e-3, an inverse square root",
        "task": "16,384 byte pairs, windows of 256; the authors' words, windows of 512",
    },
    columns={"perplexity": ("test", ALL)},
    further={"bits per byte": ("bits_per_byte", "test", ALL)},
    metric_name="perplexity",
    source="section 4.7",
    trained=TrainedIf(split="valid", metric="loss", reaches=0.75, share_of="frequencies"),
    claims=(
        Claim(
            statement="Compositional attention converges faster: its loss is lower over training",
            source=f"{MITTAL}, Figure 7",
            reading=read("training", "loss", split="valid", group=ALL, mean=("train_step",)),
            of={"model": "multi_head"},
            exceeds={"model": "compositional"},
            of_learning=True,
        ),
    ),
)


if __name__ == "__main__":
    main(SORT_OF_CLEVR, TRIANGLES, ESBN, SCAN, IMAGES, TEXT)
