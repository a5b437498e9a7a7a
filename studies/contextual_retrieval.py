"""Does attention that pairs searches with retrievals freely answer unseen pairings better?

The contextual retrieval of "Compositional Attention" (Mittal et al. 2021): multi-head attention
against compositional attention, on combinations of preferences that were in training and on ones
that were held out.

    python studies/contextual_retrieval.py                      # 10 to 15 minutes
    python studies/contextual_retrieval.py --preset smoke
    python studies/contextual_retrieval.py d_models=32,128 seeds=0
    python studies/contextual_retrieval.py --preset paper --device cuda

It measures the errors, in which searches which retrievals are chosen and whether that holds where
the combination is new, and how much of the error goes when the pairing that the truth wants is
forced upon the model. What was found is told in `studies/results/contextual_retrieval.md`.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

import numpy as np
import torch
import xarray as xr
from torch import Tensor

import mechanisms
import probes
import tasks
from studies.costs import costs_of
from studies.retrieval_claims import NOT_RUN, PAPER, check_claims, rows_of, summary
from studies.running import (
    Resources,
    command,
    describe_coordinates,
    join_cells,
    run_grid,
)
from studies.runs import config_hash
from studies.training import TrainingConfig, load_weights, train
from tasks import Batch, ContextualRetrievalConfig

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import RenderableType

Mechanism = Literal["multi_head", "multi_head_pairs", "compositional"]
TESTED = ("id", "ood")
SCORES = "blocks.0.attn.hook_value_scores"
PATTERN = "blocks.0.attn.hook_pattern"
MOST_COMBINATIONS = 256
"""Combinations of preferences, up to which the error of each is kept."""

COORDINATES = {
    "cell": "trained model",
    "model": "attention",
    "n_searches": "searches of the task, S",
    "n_retrievals": "retrieval features of the task, R",
    "d_model": "width of the model",
    "seed": "seed of the initial weights and of the task's weights of searches",
    "split": "id: combinations of preferences of training; ood: held-out ones",
    "train_step": "training step",
    "combination": "number of the combination of preferences",
    "condition": "what the value scores are set to",
    "group": "split",
    "fitted": "split on which the model's searches and retrievals were given their parts",
    "control": "whose preferences",
    "claim": "claim of the paper",
    "figure": "what is measured",
}
"""Long names of the result's coordinates."""


@dataclass(frozen=True, kw_only=True)
class RetrievalModel:
    """One network and how it is trained: what makes its run folder, a cell of the grid.

    Args:
        task: its seed is that of the model.
        mechanism: `multi_head`, S heads; `multi_head_pairs`, a head for each pair of a search and a
            retrieval, S R heads of the same width; `compositional`, S searches and R retrievals.
        d_model: S heads together are as wide.
        d_mlp: hidden units of encoder and read-out.
        n_evaluate: examples of each split for the curves; the error on `id` names the best
            checkpoint.
        seed: of the initial weights.
    """

    task: ContextualRetrievalConfig
    mechanism: Mechanism
    d_model: int
    d_mlp: int
    training: TrainingConfig
    n_evaluate: int
    seed: int

    @property
    def folder_name(self) -> str:
        """The name of its run folder."""
        size = f"{self.task.n_searches}s{self.task.n_retrievals}r-d{self.d_model}"
        return f"{self.mechanism}-{size}-seed{self.seed}-{config_hash(self)}"

    @property
    def condition(self) -> dict[str, Any]:
        """What its cell is told from others by, the seed last."""
        return {
            "model": self.mechanism,
            "n_searches": self.task.n_searches,
            "n_retrievals": self.task.n_retrievals,
            "d_model": self.d_model,
            "seed": self.seed,
        }

    def build(self) -> mechanisms.RetrievalNetwork:
        """The untrained network."""
        searches, retrievals = self.task.n_searches, self.task.n_retrievals
        d_head = self.d_model // searches
        if self.mechanism == "compositional":
            attention = mechanisms.CompositionalAttentionConfig(
                n_searches=searches, n_retrievals=retrievals, d_head=d_head
            )
        else:
            heads = searches if self.mechanism == "multi_head" else searches * retrievals
            attention = mechanisms.AttentionConfig(n_heads=heads, d_head=d_head)
        config = mechanisms.RetrievalNetworkConfig(
            d_input=tasks.ContextualRetrieval(self.task).n_features,
            d_output=1,
            d_model=self.d_model,
            d_mlp=self.d_mlp,
            attention=attention,
        )
        return mechanisms.RetrievalNetwork(
            config, generator=torch.Generator().manual_seed(self.seed)
        )


@dataclass(frozen=True, kw_only=True)
class RetrievalStudy:
    """All settings of the study: a cell for each combination of what is a tuple.

    Args:
        task: the retrieval task; searches, retrievals and seed come from the grid.
        mechanisms: those to compare; see `RetrievalModel`.
        sizes: pairs (searches, retrievals) of the task, such as 2x4.
        d_models: widths of the models.
        seeds: every model is trained once for each, with other weights of the searches.
        d_mlp, training, n_evaluate: see `RetrievalModel`.
        n_test: examples of each split that are looked at.
    """

    task: ContextualRetrievalConfig
    mechanisms: tuple[Mechanism, ...] = get_args(Mechanism)
    sizes: tuple[str, ...] = ("2x4",)
    d_models: tuple[int, ...] = (64,)
    seeds: tuple[int, ...] = (0, 1, 2)
    d_mlp: int = 256
    training: TrainingConfig
    n_evaluate: int = 1000
    n_test: int = 4000

    def __post_init__(self):
        for name in ("mechanisms", "sizes", "d_models", "seeds"):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                raise ValueError(f"{name} must be different from one another, got {values}")
        if unknown := [one for one in self.mechanisms if one not in get_args(Mechanism)]:
            allowed = ", ".join(get_args(Mechanism))
            raise ValueError(f"mechanisms must be among {allowed}, got {', '.join(unknown)}")
        for name in ("n_evaluate", "n_test"):
            if getattr(self, name) < 10:
                raise ValueError(f"{name} must be at least 10, got {getattr(self, name)}")
        for size, d_model in product(self.sizes, self.d_models):
            searches, _ = _size(size)
            if d_model % searches:
                raise ValueError(f"d_models must be multiples of {searches} for {size}: {d_model}")

    def tasks(self) -> list[ContextualRetrievalConfig]:
        """The tasks: one for each size and seed."""
        return [
            replace(self.task, n_searches=_size(size)[0], n_retrievals=_size(size)[1], seed=seed)
            for size, seed in product(self.sizes, self.seeds)
        ]

    def trained_models(self) -> list[RetrievalModel]:
        """The cells of the grid."""
        return [
            RetrievalModel(
                task=task,
                mechanism=mechanism,
                d_model=d_model,
                d_mlp=self.d_mlp,
                training=self.training,
                n_evaluate=self.n_evaluate,
                seed=task.seed,
            )
            for d_model, mechanism, task in product(self.d_models, self.mechanisms, self.tasks())
        ]


def _size(text: str) -> tuple[int, int]:
    searches, by, retrievals = text.partition("x")
    if not (by and searches.isdecimal() and retrievals.isdecimal()):
        raise ValueError(f"sizes must be such as 2x4 (searches x retrievals), got {text!r}")
    return int(searches), int(retrievals)


def presets() -> dict[str, RetrievalStudy]:
    """The settings by name: seconds for tests, minutes for a laptop, the paper's for a GPU.

    Beside `laptop`, `widths` compares models of other widths.
    """
    laptop = RetrievalStudy(
        task=ContextualRetrievalConfig(),
        training=TrainingConfig(
            n_steps=6000,
            batch_size=128,
            learning_rate=2e-3,
            final_learning_rate=0.01,
            weight_decay=0.0,
            warmup_steps=300,
            evaluate_every=500,
        ),
    )
    smoke = replace(
        laptop,
        seeds=(0, 1),
        d_models=(8,),
        d_mlp=16,
        training=replace(
            laptop.training, n_steps=20, batch_size=16, warmup_steps=5, evaluate_every=10
        ),
        n_evaluate=20,
        n_test=100,
    )
    # 100,000 updates of 256 examples with a constant rate of 1e-4: Adam, no weight decay.
    paper = replace(
        laptop,
        mechanisms=("multi_head", "compositional"),
        sizes=("2x4", "4x8", "4x16"),
        d_models=(32, 64, 128, 256, 512),
        training=replace(
            laptop.training,
            n_steps=100_000,
            batch_size=256,
            learning_rate=1e-4,
            final_learning_rate=1.0,
            warmup_steps=0,
            evaluate_every=2000,
        ),
        n_test=10_000,
    )
    return {
        "smoke": smoke,
        "laptop": laptop,
        "widths": replace(laptop, d_models=(16, 32, 128)),
        "paper": paper,
    }


# Training


def absolute_error(model: Any, batch: Batch, step: int) -> Tensor:
    """The mean absolute error (L1), which training minimises."""
    return (model(batch.inputs)[..., 0] - batch.targets).abs().mean()


def train_model(cell: RetrievalModel, *, root: Path, device: str, position: int) -> Path:
    """Train one network, or finish its training; gives its run folder."""
    task = tasks.ContextualRetrieval(cell.task)
    model = cell.build().to(device)
    held = {split: task.batch(split, 0, cell.n_evaluate, device) for split in TESTED}
    constant = task.baseline("id")["absolute_error"]

    def evaluate(model: torch.nn.Module) -> dict[str, float]:
        errors = {split: absolute_error(model, batch, 0).item() for split, batch in held.items()}
        # Selected by what is the greater, the better: the share of a constant's error that is gone.
        return {f"{split}/error": error for split, error in errors.items()} | {
            "id/gained": 1 - errors["id"] / constant
        }

    folder = root / "models" / cell.folder_name
    train(
        model,
        config=cell.training,
        sample=functools.partial(task.batch, "train", device=device),
        evaluate=evaluate,
        select="id/gained",
        folder=folder,
        identity=cell,
        seed=cell.seed,
        objective=absolute_error,
        description=f"{cell.mechanism}, d {cell.d_model}, seed {cell.seed}",
        position=position,
    )
    return folder


# What is looked at


def analyse(study: RetrievalStudy, cell: RetrievalModel, folder: Path, device: str) -> xr.DataTree:
    """Everything that is looked at in one trained network."""
    task = tasks.ContextualRetrieval(cell.task)
    model = cell.build().to(device)
    load_weights(model, folder / "best.safetensors", device=device)
    model.eval()
    # Not the examples that the checkpoint was chosen by.
    batches = {split: task.batch(split, 1, study.n_test, device) for split in TESTED}
    errors = errors_of_objects(cell, model, batches)
    found = {
        "errors": mean_errors(cell, errors),
        "training": training_curves(folder),
        "costs": costs_of(model, batches["id"][:1].inputs),
    }
    if cell.task.n_combinations <= MOST_COMBINATIONS:
        found["combinations"] = errors_by_combination(cell, batches, errors)
    if cell.mechanism == "compositional":
        pairing = pairing_of(cell, model, batches)
        found["pairing"] = pairing
        found["forcing"] = probes.force_pairing(
            cast(Any, model),
            batches["ood"].inputs,
            batches["ood"].latents["preference"],
            pairing.sel(fitted="id"),
            SCORES,
            error=lambda output, part: task.score(output, batches["ood"][part])[
                "absolute_error"
            ].mean(1),
            activation=pairing["activation"].sel(group="id"),
            seed=cell.seed,
        ).drop_vars("error")
    return xr.DataTree.from_dict(found)


def errors_of_objects(
    cell: RetrievalModel, model: torch.nn.Module, batches: dict[str, Batch]
) -> dict[str, np.ndarray]:
    """The absolute error [example, object] in each split."""
    task = tasks.ContextualRetrieval(cell.task)
    errors = {}
    for split, batch in batches.items():
        with torch.no_grad():
            answers = torch.cat([model(part.inputs) for part in batch.parts(500)])
        errors[split] = task.score(answers, batch)["absolute_error"].double().cpu().numpy()
    return errors


def mean_errors(cell: RetrievalModel, errors: dict[str, np.ndarray]) -> xr.Dataset:
    """The mean absolute error in each split with its interval: [split]."""
    from scipy.stats import bootstrap

    task = tasks.ContextualRetrieval(cell.task)
    figures = []
    for split, error in errors.items():
        drawn = bootstrap(
            (error.mean(1),), np.mean, n_resamples=1000, method="percentile", rng=cell.seed
        ).confidence_interval
        figures.append(
            (error.mean(), drawn.low, drawn.high, task.baseline(split)["absolute_error"])
        )
    abouts = {
        "error": "mean absolute error",
        "error_low": "mean absolute error, lower 95% bound",
        "error_high": "mean absolute error, upper 95% bound",
        "constant": "mean absolute error of always answering 0",
    }
    return xr.Dataset(
        {
            name: ("split", np.array(values), {"long_name": about})
            for (name, about), values in zip(
                abouts.items(), zip(*figures, strict=True), strict=True
            )
        },
        coords={"split": list(errors)},
        attrs={"interval": "percentile bootstrap over examples, 95%, 1000 resamples"},
    )


def errors_by_combination(
    cell: RetrievalModel, batches: dict[str, Batch], errors: dict[str, np.ndarray]
) -> xr.Dataset:
    """The mean absolute error of each combination of preferences: [combination]."""
    n_combinations = cell.task.n_combinations
    numbers = np.concatenate(
        [batch.latents["combination"].cpu().numpy().ravel() for batch in batches.values()]
    )
    every = np.concatenate([error.ravel() for error in errors.values()])
    totals = np.bincount(numbers, every, minlength=n_combinations)
    with np.errstate(invalid="ignore"):
        means = totals / np.bincount(numbers, minlength=n_combinations)
    held_out = np.isin(np.arange(n_combinations), batches["ood"].latents["combination"].cpu())
    return xr.Dataset(
        {
            "error": (
                "combination",
                means,
                {"long_name": "mean absolute error of a combination of preferences"},
            ),
            "held_out": (
                "combination",
                held_out.astype(np.int8),
                {"long_name": "whether the combination was held out"},
            ),
        },
        coords={"combination": np.arange(n_combinations)},
    )


def pairing_of(
    cell: RetrievalModel, model: torch.nn.Module, batches: dict[str, Batch]
) -> xr.Dataset:
    """Which retrieval each search uses, by split, against the preferences."""
    quantities = {
        "scores": probes.Quantity(SCORES, dims=("example", "pos", "search", "retrieval")),
        "pattern": probes.Quantity(PATTERN, dims=("example", "search", "query_pos", "key_pos")),
    }
    true = ("example", "pos", "true_search")
    data = xr.concat(
        [
            probes.capture(
                cast(Any, model),
                batch.parts(500),
                quantities,
                latent_dims={"preference": true, "winner": true, "retrieved": true},
            )
            for batch in batches.values()
        ],
        "example",
        combine_attrs="drop_conflicts",
    )
    groups = np.repeat(list(batches), [len(batch) for batch in batches.values()])
    return probes.score_pairing(
        data["scores"],
        data["preference"],
        winner=data["winner"],
        pattern=data["pattern"],
        groups=xr.DataArray(groups, dims="example"),
        seed=cell.seed,
    )


def training_curves(folder: Path) -> xr.Dataset:
    """What the log of a training says: `error` [train_step, split]."""
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return xr.Dataset(
        {
            "error": (
                ("train_step", "split"),
                [[line[f"{split}/error"] for split in TESTED] for line in lines],
                {"long_name": "mean absolute error"},
            )
        },
        coords={"train_step": [line["step"] for line in lines], "split": list(TESTED)},
    )


# The run


def run(study: RetrievalStudy, *, resources: Resources, checkpoints: tuple[Path, ...] = ()) -> Path:
    """Run the study, or finish it; gives its folder, `contextual_retrieval-HASH`.

    Args:
        study: the settings.
        resources: where and with what.
        checkpoints: run folders of networks to analyse instead of training any.

    Raises:
        RunError: a folder cannot be used, or a checkpoint is missing, damaged or of another task.
        TrainingError: a loss is not finite.
    """
    return run_grid(
        "contextual_retrieval",
        study,
        kind=RetrievalModel,
        train=train_model,
        analyse=analyse,
        assemble=assemble,
        figures=draw_figures,
        resources=resources,
        checkpoints=checkpoints,
    )


def assemble(cells: list[RetrievalModel], trees: list[xr.DataTree]) -> xr.DataTree:
    """The networks' analyses as one result: along `cell`, whose coordinates tell the condition."""
    result = join_cells(trees, cells)
    rows = rows_of(result)
    result["summary"] = xr.DataTree(summary(rows))
    result["claims"] = xr.DataTree(check_claims(rows))
    describe_coordinates(result, COORDINATES)
    return result


def draw_figures(result: xr.DataTree) -> dict[str, Figure]:
    """All figures; matplotlib is imported only here, when they are drawn."""
    from studies.retrieval_figures import figures

    return figures(result)


def closing_table(result: xr.DataTree) -> RenderableType:
    """The answer in two tables: the errors beside the paper's, and each of the claims."""
    from rich.box import SIMPLE
    from rich.console import Group
    from rich.table import Table

    means = result["summary"].to_dataset()
    measured = Table(title="Mean absolute error", caption=CAPTION, box=SIMPLE)
    measured.caption_justify = "left"
    measured.add_column("attention", no_wrap=True)
    for title in ("parameters", "kFLOP", "ID", "OOD", "paper"):
        measured.add_column(title, justify="right", no_wrap=True)
    for row in range(means.sizes["condition"]):
        one = means.isel(condition=row)
        model, d_model = one["model"].item(), one["d_model"].item()
        size = (one["n_searches"].item(), one["n_retrievals"].item())
        mean = {name: one["mean"].sel(figure=name).item() for name in means["figure"].to_numpy()}

        def spread(name: str, one: xr.Dataset = one) -> str:
            at, share = one.sel(figure=name), one["mean"].sel(figure=f"{name}_share").item()
            low, high = _short(at["lowest"].item()), _short(at["highest"].item())
            return f"{_short(at['mean'].item())}, {100 * share:.0f}%\n[{low}-{high}]"

        paper = PAPER.get((model, *size, d_model))
        measured.add_row(
            f"{model.replace('_', '-')}\n  {size[0]} x {size[1]}, d = {d_model}",
            f"{mean['parameters']:,.0f}",
            f"{mean['operations'] / 1000:,.0f}",
            spread("id"),
            spread("ood"),
            "" if paper is None else " / ".join(map(_short, paper)),
        )
    checked = Table(title="Claims", box=SIMPLE)
    for title in ("claim", "measured", "in", "verdict"):
        checked.add_column(title)
    judged = result["claims"].to_dataset()
    for claim in judged["claim"].to_numpy()[judged["verdict"] != NOT_RUN]:
        one = judged.sel(claim=claim)
        share = f"{one['seeds_for'].item()} of {one['seeds'].item()}"
        checked.add_row(str(claim), one["measured"].item(), share, one["verdict"].item())
        checked.add_section()
    return Group(measured, checked)


def _short(value: float) -> str:
    """Two digits behind the point, none before it."""
    return f"{value:.2f}".removeprefix("0")


CAPTION = (
    "Mean over seeds, and as share of the error of always answering 0; in brackets the least and "
    "the greatest. ID: combinations of preferences of training; OOD: held-out ones. The weights "
    "of the searches, and with them the size of the errors, differ between seeds. Paper: ID / OOD "
    "after 100,000 steps with weights of its own."
)


if __name__ == "__main__":
    command(
        question="Does attention that pairs searches and retrievals answer unseen pairings better?",
        presets=presets,
        run=run,
        table=closing_table,
    )
