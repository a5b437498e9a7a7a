"""Is compositional attention better than multi-head attention where nobody knows the pairing?

The benchmarks of "Compositional Attention" (Mittal et al. 2021) beside contextual retrieval, which
has a study of its own: relations in pictures (Sort-of-CLEVR, equilateral triangles), between images
(ESBN's tasks), commands (SCAN), several data sets of images in one network, and text. In otherwise
the same model S heads are compared with S searches and R retrievals.

    python studies/compositional_benchmarks.py                              # Sort-of-CLEVR
    python studies/compositional_benchmarks.py --task scan cutoffs=22,26
    python studies/compositional_benchmarks.py --task esbn rules=rmts n_withheld=0,50,95
    python studies/compositional_benchmarks.py --task triangles --preset smoke
    python studies/compositional_benchmarks.py --task images task.sources=birds task.folder=~/images
    python studies/compositional_benchmarks.py --task text task.path=book.txt
    python studies/compositional_benchmarks.py --task sort_of_clevr --preset paper --device cuda

At laptop size (5 to 8 minutes on 2 cores, for each task) models are smaller and trained for less;
`images` then has the triangles and scikit-learn's digits, and `text` what Python's `help()` says.
It measures how well each split and each kind of question is answered, what a model costs, and which
retrievals its searches choose, and puts the paper's figures beside that.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Hashable
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float, Int

import mechanisms
import probes
from studies.benchmark_tasks import (
    ALL,
    BUNDLED_IMAGES,
    METRICS,
    PYTHON_HELP,
    TASKS,
    Benchmark,
    ModelSizes,
    TaskConfig,
    batches,
    benchmark_of,
)
from studies.costs import costs_of
from studies.running import (
    Resources,
    command,
    describe_coordinates,
    join_cells,
    run_grid,
)
from studies.runs import RunError, config_hash
from studies.training import TrainingConfig, answer, load_weights, train
from tasks import (
    ESBN_RELATIONS,
    ESBNConfig,
    ImagesConfig,
    ScanConfig,
    SortOfClevrConfig,
    TextConfig,
    TrianglesConfig,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import RenderableType

Mechanism = Literal["multi_head", "compositional"]
MODELS = get_args(Mechanism)
RESAMPLES = 1000

COORDINATES = {
    "cell": "trained model",
    "task": "benchmark",
    "model": "attention",
    "n_searches": "searches, or heads",
    "n_retrievals": "retrievals; of multi-head attention one for each head",
    "rule": "rule of the ESBN task",
    "n_withheld": "objects, of 100, that training does not show",
    "scan": "split of the commands",
    "cutoff": "most actions of a command of training; 0: no limit",
    "sources": "data sets",
    "text": "text",
    "seed": "seed of the initial weights and of dropout",
    "split": "split",
    "group": "question type, relation, data set or number of actions",
    "train_step": "training step",
    "layer": "layer, or step through the shared one",
    "token": "all tokens, or the last one, of pictures the class token",
    "search": "search",
    "retrieval": "retrieval",
}
"""Long names of the result's coordinates."""


@dataclass(frozen=True, kw_only=True)
class BenchmarkModel:
    """One model and how it is trained: what makes its run folder, a cell of the grid.

    Args:
        mechanism: `multi_head`, or `compositional`.
        n_retrievals: R; of multi-head attention its number of heads.
        n_evaluate: examples of each split for the curves; which figure of them names the best
            checkpoint is told by the benchmark.
        seed: of the initial weights and of dropout.
    """

    task: TaskConfig
    mechanism: Mechanism
    n_retrievals: int
    sizes: ModelSizes
    training: TrainingConfig
    n_evaluate: int
    seed: int

    @property
    def name(self) -> str:
        """Its attention in short."""
        compositional = self.mechanism == "compositional"
        return f"compositional-R{self.n_retrievals}" if compositional else self.mechanism

    @property
    def folder_name(self) -> str:
        """The name of its run folder."""
        return f"{task_name(self.task)}-{self.name}-seed{self.seed}-{config_hash(self)}"

    @property
    def condition(self) -> dict[str, Any]:
        """What its cell is told from others by, the seed last."""
        return {
            "task": task_name(self.task),
            **benchmark_of(self.task).condition,
            "model": self.mechanism,
            "n_searches": self.sizes.n_heads,
            "n_retrievals": self.n_retrievals,
            "seed": self.seed,
        }

    def build(self) -> torch.nn.Module:
        """The untrained model."""
        n_heads, d_head = self.sizes.n_heads, self.sizes.d_model // self.sizes.n_heads
        if self.mechanism == "multi_head":
            attention = mechanisms.AttentionConfig(n_heads=n_heads, d_head=d_head)
        else:
            attention = mechanisms.CompositionalAttentionConfig(
                n_searches=n_heads,
                n_retrievals=self.n_retrievals,
                d_head=d_head,
                d_selection=self.sizes.d_selection,
            )
        generator = torch.Generator().manual_seed(self.seed)
        return benchmark_of(self.task).build(self.sizes, attention, generator)


@dataclass(frozen=True, kw_only=True)
class BenchmarkStudy:
    """All settings of the study of one task: a cell for each combination of what is a tuple.

    Args:
        task: see `tasks`; `esbn`'s rule and n_withheld, and the cut-off of `scan`, come from the
            grid.
        models: those to compare: `multi_head`, `compositional`.
        n_retrievals: R of compositional attention.
        rules, n_withheld: of `esbn`; pairs that there are none of are left out.
        cutoffs: of `scan`, with the split `length`.
        seeds: every model is trained once for each.
        sizes: of the models.
        training: see `studies.training`.
        n_evaluate: see `BenchmarkModel`.
        n_test: examples of each split that are scored, at most.

    Raises:
        ValueError: for a value that is not allowed, or asked of another task.
    """

    task: TaskConfig
    models: tuple[str, ...] = MODELS
    n_retrievals: tuple[int, ...]
    rules: tuple[str, ...] = ()
    n_withheld: tuple[int, ...] = ()
    cutoffs: tuple[int, ...] = ()
    seeds: tuple[int, ...] = (0,)
    sizes: ModelSizes
    training: TrainingConfig
    n_evaluate: int
    n_test: int = 10_000

    def __post_init__(self):
        grid = {
            "rules": isinstance(self.task, ESBNConfig),
            "n_withheld": isinstance(self.task, ESBNConfig),
            "cutoffs": isinstance(self.task, ScanConfig) and self.task.split == "length",
        }
        for name in ("models", "n_retrievals", "seeds", *grid):
            values = getattr(self, name)
            if not grid.get(name, True):
                if values:
                    raise ValueError(f"{name} must be left out with {self.task}, got {values}")
            elif not values or len(set(values)) < len(values):
                raise ValueError(f"{name} must be different from one another, got {values}")
        for name, known in (("models", MODELS), ("rules", tuple(ESBN_RELATIONS))):
            if unknown := [value for value in getattr(self, name) if value not in known]:
                names = ", ".join(known)
                raise ValueError(f"{name} must be among {names}, got {', '.join(unknown)}")
        for name in ("n_evaluate", "n_test"):
            if getattr(self, name) < 2:
                raise ValueError(f"{name} must be at least 2, got {getattr(self, name)}")
        for withheld in self.n_withheld:
            if not any(_esbn(self.task, rule, withheld) for rule in self.rules):
                replace(cast(ESBNConfig, self.task), rule=self.rules[0], n_withheld=withheld)

    def tasks(self) -> list[TaskConfig]:
        """The tasks: one, or those of the grid."""
        if isinstance(self.task, ESBNConfig):
            pairs = product(self.rules, self.n_withheld)
            found = [_esbn(self.task, rule, withheld) for rule, withheld in pairs]
            return [one for one in found if one is not None]
        if isinstance(self.task, ScanConfig) and self.cutoffs:
            return [replace(self.task, cutoff=cutoff) for cutoff in self.cutoffs]
        return [self.task]

    def trained_models(self) -> list[BenchmarkModel]:
        """The cells of the grid."""
        kinds: list[tuple[Mechanism, int]] = []
        if "multi_head" in self.models:
            kinds.append(("multi_head", self.sizes.n_heads))
        if "compositional" in self.models:
            kinds.extend(("compositional", n_retrievals) for n_retrievals in self.n_retrievals)
        return [
            BenchmarkModel(
                task=task,
                mechanism=mechanism,
                n_retrievals=n_retrievals,
                sizes=self.sizes,
                training=self.training,
                n_evaluate=self.n_evaluate,
                seed=seed,
            )
            for task, (mechanism, n_retrievals), seed in product(self.tasks(), kinds, self.seeds)
        ]


def _esbn(task: TaskConfig, rule: str, n_withheld: int) -> ESBNConfig | None:
    """The task with this rule, unless it asks for more objects than are left."""
    try:
        return replace(cast(ESBNConfig, task), rule=cast(Any, rule), n_withheld=n_withheld)
    except ValueError:
        return None


def task_name(task: TaskConfig) -> str:
    """The name that `--task` has for it."""
    return next(name for name, kind in TASKS.items() if isinstance(task, kind))


# Settings


def presets(task: str = next(iter(TASKS))) -> dict[str, BenchmarkStudy]:
    """The settings by name: seconds for tests, minutes for a laptop, the paper's for a GPU.

    What is ours in that of the paper is told in `paper_preset`.
    """
    laptop, paper = laptop_preset(task), paper_preset(task)
    return {"smoke": smoke_preset(laptop), "laptop": laptop, "paper": paper}


def paper_preset(task: str) -> BenchmarkStudy:
    """The paper's sizes.

    Ours are, everywhere, 1000 steps of warm-up, no weight decay and clipping at 1; batches and
    learning rates of `triangles`, `images` and `text`; the number of steps of all but
    `sort_of_clevr` and `triangles`; widths and patches of `images`; and the seeds.
    """
    shared = ModelSizes(d_model=256, d_mlp=512, n_layers=4, n_heads=4, patch_size=15)

    def training(steps: int, batch: int, rate: float, **more: Any) -> TrainingConfig:
        return TrainingConfig(
            n_steps=steps,
            batch_size=batch,
            learning_rate=rate,
            weight_decay=0.0,
            warmup_steps=1000,
            evaluate_every=max(1, steps // 50),
            clip=1.0,
            **more,
        )

    seeds = (0, 1, 2, 3, 4)
    match task:
        case "sort_of_clevr":
            return BenchmarkStudy(
                task=SortOfClevrConfig(),
                n_retrievals=(1, 2, 3, 4),
                seeds=seeds,
                sizes=shared,
                # 9,800 pictures with 30 questions each, 100 times, 64 at a time.
                training=training(459_400, 64, 1e-4, final_learning_rate=1.0),
                n_evaluate=6000,
            )
        case "triangles":
            return BenchmarkStudy(
                task=TrianglesConfig(),
                n_retrievals=(1, 2, 4),
                seeds=seeds,
                sizes=replace(shared, patch_size=4),
                # 50,000 pictures, 200 times, 128 at a time.
                training=training(78_200, 128, 1e-4, final_learning_rate=0.0),
                n_evaluate=2000,
            )
        case "esbn":
            return BenchmarkStudy(
                task=ESBNConfig(rule="same_different"),
                n_retrievals=(1, 2, 4, 8),
                rules=tuple(ESBN_RELATIONS),
                n_withheld=(0, 50, 85, 95, 98),
                seeds=seeds,
                sizes=ModelSizes(d_model=128, d_mlp=512, n_layers=1, n_heads=8, d_selection=16),
                training=training(20_000, 32, 5e-4, final_learning_rate=1.0),
                n_evaluate=1000,
            )
        case "scan":
            return BenchmarkStudy(
                task=ScanConfig(split="length"),
                n_retrievals=(1, 2, 4),
                cutoffs=(22, 24, 25, 26, 27, 28, 29, 30),
                seeds=seeds,
                sizes=ModelSizes(d_model=128, d_mlp=256, n_layers=3, n_heads=8, dropout=0.5),
                training=training(50_000, 256, 1e-3, final_learning_rate=1.0),
                n_evaluate=500,
            )
        case "images":
            return BenchmarkStudy(
                task=ImagesConfig(),
                n_retrievals=(1, 2, 3, 4),
                seeds=seeds,
                sizes=replace(shared, n_layers=2, patch_size=4),
                training=training(200_000, 128, 1e-4),
                n_evaluate=2000,
            )
        case _:
            return BenchmarkStudy(
                task=TextConfig(),
                n_retrievals=(8,),
                seeds=(0,),
                sizes=ModelSizes(d_model=512, d_mlp=2048, n_layers=6, n_heads=8, d_selection=32),
                training=training(200_000, 64, 3e-4, precision="bf16"),
                n_evaluate=256,
            )


def laptop_preset(task: str) -> BenchmarkStudy:
    """Minutes on two cores: two models side by side, with `esbn` two for each of four tasks."""
    small = ModelSizes(d_model=64, d_mlp=128, n_layers=2, n_heads=4)

    def training(steps: int, batch: int, rate: float) -> TrainingConfig:
        return TrainingConfig(
            n_steps=steps,
            batch_size=batch,
            learning_rate=rate,
            weight_decay=0.0,
            warmup_steps=200,
            evaluate_every=max(1, steps // 10),
            clip=1.0,
        )

    match task:
        case "sort_of_clevr":
            return BenchmarkStudy(
                task=SortOfClevrConfig(),
                n_retrievals=(3,),
                sizes=replace(small, patch_size=15),
                training=training(7000, 64, 1e-3),
                n_evaluate=600,
            )
        case "triangles":
            return BenchmarkStudy(
                task=TrianglesConfig(n_train=20_000, n_valid=2000, n_test=4000, image_size=48),
                n_retrievals=(4,),
                sizes=replace(small, patch_size=8),
                training=training(8000, 64, 1e-3),
                n_evaluate=500,
            )
        case "esbn":
            return BenchmarkStudy(
                task=ESBNConfig(rule="rmts"),
                n_retrievals=(8,),
                rules=("distribution_of_three", "identity_rules"),
                n_withheld=(50, 95),
                sizes=replace(small, n_layers=1, n_heads=8, d_selection=16),
                training=training(800, 32, 5e-4),
                n_evaluate=200,
                n_test=2000,
            )
        case "scan":
            return BenchmarkStudy(
                task=ScanConfig(split="length"),
                n_retrievals=(1,),
                cutoffs=(26,),
                sizes=replace(small, dropout=0.1),
                training=training(3000, 64, 1e-3),
                n_evaluate=200,
                n_test=2000,
            )
        case "images":
            return BenchmarkStudy(
                task=ImagesConfig(
                    sources=("digits", "triangles"),
                    folder=BUNDLED_IMAGES,
                    n_valid=200,
                    triangles=TrianglesConfig(n_train=20_000, n_valid=1000, n_test=2000),
                ),
                n_retrievals=(3,),
                sizes=replace(small, patch_size=4),
                training=training(4000, 64, 1e-3),
                n_evaluate=500,
            )
        case _:
            return BenchmarkStudy(
                task=TextConfig(path=PYTHON_HELP, vocabulary_size=1024, length=64),
                n_retrievals=(4,),
                sizes=replace(small, n_layers=3, dropout=0.1),
                training=training(3000, 16, 1e-3),
                n_evaluate=64,
            )


def smoke_preset(laptop: BenchmarkStudy) -> BenchmarkStudy:
    """The laptop's with tiny models, few steps and little data."""
    smoke = replace(
        laptop,
        n_retrievals=(2,),
        sizes=replace(laptop.sizes, d_model=16, d_mlp=16, n_layers=2, n_heads=2),
        training=replace(
            laptop.training, n_steps=4, batch_size=8, warmup_steps=1, evaluate_every=2
        ),
        n_evaluate=20,
        n_test=60,
    )
    few = TrianglesConfig(n_train=100, n_valid=20, n_test=60, image_size=48)
    match smoke.task:
        case SortOfClevrConfig():
            task = SortOfClevrConfig(n_train=20, n_valid=2, n_test=4)
            return replace(smoke, task=task, seeds=(0, 1))
        case TrianglesConfig():
            return replace(smoke, task=few, sizes=replace(smoke.sizes, patch_size=16))
        case ESBNConfig():
            return replace(smoke, rules=("same_different",), n_withheld=(0, 98))
        case ImagesConfig():
            return replace(smoke, task=replace(smoke.task, triangles=few))
    return smoke


# Training


def train_model(cell: BenchmarkModel, *, root: Path, device: str, position: int) -> Path:
    """Train one model, or finish its training; gives its run folder."""
    benchmark = benchmark_of(cell.task)
    model = cell.build().to(device)

    def evaluate(model: torch.nn.Module) -> dict[str, float]:
        figures = {}
        for split in benchmark.splits:
            found = score_split(benchmark, model, split, cell.n_evaluate, device).figures()
            for (metric, group), figure in found.items():
                name = f"{split}/{metric}" if group == ALL else f"{split}/{metric}/{group}"
                if group == ALL or metric == benchmark.headline:
                    figures[name] = figure
        return figures

    folder = root / "models" / cell.folder_name
    train(
        model,
        config=cell.training,
        sample=functools.partial(benchmark.batch, "train", device=device),
        evaluate=evaluate,
        select=benchmark.select,
        folder=folder,
        identity=cell,
        seed=cell.seed,
        description=f"{task_name(cell.task)}, {cell.name}, seed {cell.seed}",
        position=position,
    )
    return folder


# What is looked at


@dataclass(frozen=True)
class SplitScores:
    """Scores of the examples of a split.

    Attributes:
        metrics: their names.
        parts, wholes: of which the figures are ratios of sums.
        groups: which examples are in which group, that of all among them.
        unit: what intervals are over: the number of an example, or of the picture that it is about.
    """

    metrics: tuple[str, ...]
    parts: Float[np.ndarray, "metric example"]
    wholes: Float[np.ndarray, "metric example"]
    groups: dict[str, np.ndarray]
    unit: Int[np.ndarray, " example"]

    def figures(self) -> dict[tuple[str, str], float]:
        """The figure of each metric in each group, NaN where there are no examples."""
        ratio = self._ratio(*self._sums(np.zeros_like(self.unit)))[0]
        return {
            (metric, group): ratio[place, number].item()
            for place, metric in enumerate(self.metrics)
            for number, group in enumerate(self.groups)
        }

    def intervals(self, seed: int) -> Float[np.ndarray, "bound metric group"]:
        """The ends of percentile bootstrap intervals, 95%."""
        parts, wholes = self._sums(self.unit)
        n_units, rng = len(parts), np.random.default_rng(seed)
        drawn = rng.multinomial(n_units, np.full(n_units, 1 / n_units), RESAMPLES).astype(float)
        ratios = self._ratio(
            np.tensordot(drawn, parts, axes=1), np.tensordot(drawn, wholes, axes=1)
        )
        # Groups without examples stay NaN; nanpercentile would warn of them.
        return np.stack([np.percentile(ratios, bound, axis=0) for bound in (2.5, 97.5)])

    def _sums(
        self, unit: Int[np.ndarray, " example"]
    ) -> tuple[Float[np.ndarray, "unit metric group"], Float[np.ndarray, "unit metric group"]]:
        """The sums of all examples of a unit, by group."""
        member = np.stack(list(self.groups.values()), -1)
        found = []
        for values in (self.parts, self.wholes):
            sums = np.zeros((unit.max() + 1, len(values), member.shape[1]))
            np.add.at(sums, unit, values.T[:, :, None] * member[:, None])
            found.append(sums)
        return found[0], found[1]

    def _ratio(self, parts: np.ndarray, wholes: np.ndarray) -> np.ndarray:
        with np.errstate(invalid="ignore"):
            ratio = parts / wholes
        grows = [METRICS[metric].exponential for metric in self.metrics]
        ratio[:, grows] = np.exp(ratio[:, grows])
        return ratio


def score_split(
    benchmark: Benchmark, model: torch.nn.Module, split: str, n_examples: int, device: str
) -> SplitScores:
    """Let a model, in evaluation mode, answer the first examples of a split."""
    scores, groups, units = [], [], []
    with torch.no_grad():
        for batch in batches(benchmark, split, n_examples, device):
            scores.append(benchmark.score(split, answer(model, batch).float(), batch))
            everything = torch.ones(len(batch), dtype=torch.bool)
            groups.append({ALL: everything} | benchmark.groups(batch))
            if benchmark.resampled is not None:
                units.append(batch.latents[benchmark.resampled])
    metrics = tuple(scores[0])
    parts, wholes = (
        np.stack([torch.cat([one[metric][place] for one in scores]).cpu() for metric in metrics])
        for place in (0, 1)
    )
    n = parts.shape[1]
    unit = np.unique(torch.cat(units).cpu(), return_inverse=True)[1] if units else np.arange(n)
    return SplitScores(
        metrics=metrics,
        parts=parts.astype(float),
        wholes=wholes.astype(float),
        groups={name: torch.cat([one[name].cpu() for one in groups]).numpy() for name in groups[0]},
        unit=unit,
    )


def scores_of(
    benchmark: Benchmark, model: torch.nn.Module, cell: BenchmarkModel, n_test: int, device: str
) -> xr.Dataset:
    """Each metric [split, group] with its interval, chance, and the paper's figure."""
    found = {
        split: score_split(benchmark, model, split, n_test, device) for split in benchmark.splits
    }
    first = next(iter(found.values()))
    names, groups = first.metrics, list(first.groups)
    bounds = np.stack([one.intervals(cell.seed) for one in found.values()])
    figures = [one.figures() for one in found.values()]
    dims = ("split", "group")
    data = {}
    for place, name in enumerate(names):
        about = METRICS[name].long_name
        values = [[one[name, group] for group in groups] for one in figures]
        data[name] = (dims, values, {"long_name": about})
        for bound, side in enumerate(("low", "high")):
            about_bound = {"long_name": f"{about}, {'lower' if not bound else 'upper'} 95% bound"}
            data[f"{name}_{side}"] = (dims, bounds[:, bound, place], about_bound)
    chance = [
        [known.get(group, np.nan) for group in groups] for known in map(benchmark.chance, found)
    ]
    retrievals = 0 if cell.mechanism == "multi_head" else cell.n_retrievals
    paper = benchmark.paper().get(retrievals, {})
    theirs = np.full((len(found), len(groups)), np.nan)
    theirs[-1] = [paper.get(group, np.nan) for group in groups]
    counts = [[int(one.groups[group].sum()) for group in groups] for one in found.values()]
    data |= {
        "chance": (dims, chance, {"long_name": "the headline metric without seeing the inputs"}),
        "paper": (dims, theirs, {"long_name": "the paper's figure of the headline metric"}),
        "n": (dims, counts, {"long_name": "number of examples"}),
    }
    over = "examples" if benchmark.resampled is None else f"{benchmark.resampled}s"
    return xr.Dataset(
        data,
        coords={"split": list(found), "group": groups},
        attrs={
            "headline": benchmark.headline,
            "interval": f"percentile bootstrap over {over}, 95%, {RESAMPLES} resamples",
        },
    )


def value_scores_of(
    benchmark: Benchmark, model: torch.nn.Module, n_test: int, device: str
) -> xr.Dataset:
    """Mean value scores, on the last split: which retrievals searches choose, by group.

    `value_scores` [layer, group, token, search, retrieval], and their standard deviation over
    examples. Of a network of patches the last layer's other tokens go nowhere.
    """
    split = benchmark.splits[-1]
    quantity = probes.Quantity(
        cast(str, benchmark.value_scores),
        dims=("example", "token", "search", "retrieval"),
        reduce=lambda scores: torch.stack([scores.mean(1), scores[:, -1]], 1),
        long_name="value scores",
    )
    examples = list(batches(benchmark, split, n_test, device))
    data = probes.capture(cast(Any, model), examples, {"value_scores": quantity})["value_scores"]
    known = [
        {ALL: torch.ones(len(batch), dtype=torch.bool)} | benchmark.groups(batch)
        for batch in examples
    ]
    means, deviations = [], []
    for name in known[0]:
        some = data.isel(example=torch.cat([one[name].cpu() for one in known]).numpy())
        means.append(some.mean("example"))
        deviations.append(some.std("example"))
    groups = xr.DataArray(list(known[0]), dims="group", name="group")
    result = xr.Dataset(
        {
            "value_scores": xr.concat(means, groups),
            "value_scores_deviation": xr.concat(deviations, groups),
        },
        attrs={"split": split},
    )
    result["value_scores"].attrs = {"long_name": "mean value score"}
    result["value_scores_deviation"].attrs = {
        "long_name": "standard deviation of value scores over examples"
    }
    ordered = result.transpose("layer", "group", "token", "search", "retrieval")
    numbers = {dim: np.arange(result.sizes[dim]) for dim in ("search", "retrieval")}
    return ordered.assign_coords({"token": ["all", "last"], **numbers})


def analyse(study: BenchmarkStudy, cell: BenchmarkModel, folder: Path, device: str) -> xr.DataTree:
    """Everything that is looked at in one trained model."""
    benchmark = benchmark_of(cell.task)
    model = cell.build().to(device)
    load_weights(model, folder / "best.safetensors", device=device)
    model.eval()
    inputs = next(batches(benchmark, benchmark.splits[-1], 2, device)).inputs
    found = {
        "scores": scores_of(benchmark, model, cell, study.n_test, device),
        "training": training_curves(benchmark, folder),
        "costs": costs_of(model, inputs),
    }
    if cell.mechanism == "compositional" and benchmark.value_scores is not None:
        found["value_scores"] = value_scores_of(benchmark, model, study.n_test, device)
    return xr.DataTree.from_dict(found)


def training_curves(benchmark: Benchmark, folder: Path) -> xr.Dataset:
    """What the log of a training says: `loss` [train_step], the headline [train_step, ...]."""
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    splits, headline = list(benchmark.splits), benchmark.headline
    start = f"{splits[0]}/{headline}"
    groups = [ALL, *(name.removeprefix(f"{start}/") for name in lines[0] if f"{start}/" in name)]
    values = [
        [
            [line[f"{split}/{headline}" + (f"/{one}" if one != ALL else "")] for one in groups]
            for split in splits
        ]
        for line in lines
    ]
    return xr.Dataset(
        {
            "loss": (
                "train_step",
                [line["loss"] for line in lines],
                {"long_name": "mean training loss since the step before", "units": "nats"},
            ),
            headline: (
                ("train_step", "split", "group"),
                values,
                {"long_name": METRICS[headline].long_name},
            ),
        },
        coords={
            "train_step": [line["step"] for line in lines],
            "split": splits,
            "group": groups,
        },
    )


# The run


def run(study: BenchmarkStudy, *, resources: Resources, checkpoints: tuple[Path, ...] = ()) -> Path:
    """Run the study, or finish it; gives its folder, `compositional_benchmarks-HASH`.

    Args:
        study: the settings.
        resources: where and with what.
        checkpoints: run folders of models to analyse instead of training any.

    Raises:
        RunError: a folder cannot be used, or a checkpoint is missing, damaged or of another task;
            or images or a text are not there: it says what to put where.
        TrainingError: a loss is not finite.
    """
    try:
        # Before there are workers: what they all read is missed, or made, once.
        for cell in {cell.task: cell for cell in study.trained_models()}.values():
            cell.build()
    except FileNotFoundError as error:
        raise RunError(str(error)) from error
    return run_grid(
        "compositional_benchmarks",
        study,
        kind=BenchmarkModel,
        train=train_model,
        analyse=analyse,
        assemble=assemble,
        figures=draw_figures,
        resources=resources,
        checkpoints=checkpoints,
    )


def assemble(cells: list[BenchmarkModel], trees: list[xr.DataTree]) -> xr.DataTree:
    """The models' analyses as one result: along `cell`, whose coordinates tell the condition."""
    result = join_cells(trees, cells)
    describe_coordinates(result, COORDINATES)
    return result


def draw_figures(result: xr.DataTree) -> dict[str, Figure]:
    """All figures; matplotlib is imported only here, when they are drawn."""
    from studies.benchmark_figures import figures

    return figures(result)


def closing_table(result: xr.DataTree) -> RenderableType:
    """The answer in one table: a row for each task and attention."""
    from rich.box import SIMPLE
    from rich.table import Table

    from studies.benchmark_figures import (
        as_number,
        cells_by_condition,
        columns_of,
        mean_and_range,
        model_name,
        varied,
    )

    scores, costs = result["scores"].to_dataset(), result["costs"].to_dataset()
    headline = scores.attrs["headline"]
    columns, told = columns_of(scores), varied(scores)
    named = str(scores["task"].to_numpy()[0]).replace("_", " ")
    table = Table(title=f"Multi-head and compositional attention: {named}", caption=CAPTION)
    table.box, table.caption_justify, table.padding = SIMPLE, "left", (0, 1, 0, 0)
    for name in told:
        table.add_column(name.removeprefix("n_"))
    table.add_column("")
    for column in columns:
        table.add_column(column.title.replace(", ", "\n"), justify="right")
    for name in ("paper", "weights", "MFLOP"):
        table.add_column(name, justify="right", no_wrap=True)

    def numbers(one: xr.Dataset, name: str) -> list[str]:
        """Of one cell, what stands beside the headline."""
        return [
            as_number(one[name].sel(column.place).item(), headline)
            if column.metric == headline
            else ""
            for column in columns
        ]

    by_task: dict[tuple[Hashable, ...], dict[tuple[Hashable, ...], list[int]]] = {}
    for condition, cells in cells_by_condition(scores).items():
        by_task.setdefault(condition[: len(told)], {})[condition] = cells
    for place, models in by_task.items():
        where = [str(value).replace("_", " ") for value in place]
        for condition, cells in models.items():
            one, cost = scores.isel(cell=cells), costs.isel(cell=cells[0])
            table.add_row(
                *where,
                model_name(condition),
                *(mean_and_range(one, column) for column in columns),
                "/".join(filter(None, numbers(one.isel(cell=0), "paper"))),
                f"{int(cost['parameters']):,}",
                f"{float(cost['operations']) / 1e6:.1f}",
            )
        chance = numbers(scores.isel(cell=next(iter(models.values()))[0]), "chance")
        if any(chance):
            table.add_row(*where, "chance", *chance, "", "", "")
        table.add_section()
    return table


CAPTION = (
    "Accuracies in percent. R: retrievals, of as many searches as there are heads. Chance: the "
    "best guess of who sees the question, but no picture; the frequencies of tokens. Paper: its "
    "figures for this attention, at its sizes and with its training. MFLOP: of one forward pass, "
    "for one example. Brackets: 95% intervals over examples (pictures, windows), or the range of "
    "several seeds."
)


if __name__ == "__main__":
    command(
        question="Is compositional attention better than multi-head attention?",
        presets=presets,
        run=run,
        table=closing_table,
        tasks=tuple(TASKS),
    )
