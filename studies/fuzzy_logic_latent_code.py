"""Does the latent code of attention know the terms of a fuzzy logic function?

The fuzzy logic of "Attention as a Hypernetwork" (Schug et al. 2024): a transformer sees points of a
function with their values, and is asked for its value at another point. Softmax attention, linear
attention, HYLA and its ablations are compared on familiar and held-out combinations of terms, and
on terms that were never seen; and the terms are decoded from the attention weights of the token
that is asked for.

    python studies/fuzzy_logic_latent_code.py                      # 10 to 15 minutes
    python studies/fuzzy_logic_latent_code.py --preset smoke
    python studies/fuzzy_logic_latent_code.py --preset context
    python studies/fuzzy_logic_latent_code.py n_examples=16,96 held_out=0.3 seeds=0
    python studies/fuzzy_logic_latent_code.py --preset paper --device cuda
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
import xarray as xr
from torch import Tensor

import mechanisms
import probes
import tasks
from studies.costs import costs_of
from studies.running import (
    Resources,
    command,
    describe_coordinates,
    join_cells,
    over_seeds,
    run_grid,
)
from studies.runs import config_hash
from studies.training import TrainingConfig, load_weights, train
from tasks import Batch, FuzzyLogicConfig

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import RenderableType

EVALUATED = ("id", "test", "ood")

COORDINATES = {
    "cell": "trained model",
    "model": "attention mechanism",
    "n_variables": "variables of a function, L",
    "n_terms": "terms of a function, K",
    "n_examples": "points of a sequence, N",
    "held_out": "share of the combinations of seen terms that is held out",
    "learning_rate": "learning rate",
    "weight_decay": "weight decay",
    "seed": "seed of the initial weights and of what is held out",
    "split": "id: combinations of training; test: held-out ones of seen terms; ood: unseen terms",
    "train_step": "training step",
    "layer": "layer, or all of them together",
    "control": "whose codes, and what is decoded from them",
    "metric": "what is scored",
    "label": "what is decoded: whether the function has a term, or the share of its terms in which "
    "a variable is not negated",
    "figure": "what is measured",
}
"""Long names of the result's coordinates."""

PAPER = {
    "softmax": 63.3,
    "linear": 59.9,
    "hyla": 81.1,
    "linear_relu": 81.3,
    "rms_head_linear": 84.5,
}
"""R^2 (%) out of distribution, 32 points, 70% held out, as reported for Schug et al. 2024."""


@dataclass(frozen=True, kw_only=True)
class FuzzyModel:
    """One model and how it is trained: what makes its run folder, a cell of the grid.

    Args:
        task: its seed is that of the model.
        mechanism: one of `mechanisms.ATTENTION_VARIANTS`.
        n_evaluate: examples of each split for the curves; R^2 on `id` names the best checkpoint.
        seed: of the initial weights.
    """

    task: FuzzyLogicConfig
    mechanism: str
    n_layers: int
    d_model: int
    n_heads: int
    d_head: int
    d_mlp: int
    training: TrainingConfig
    n_evaluate: int
    seed: int

    @property
    def folder_name(self) -> str:
        """The name of its run folder."""
        task = self.task
        size = f"{task.n_variables}var{task.n_terms}term-N{task.n_examples}-out{task.held_out:g}"
        return f"{self.mechanism}-{size}-seed{self.seed}-{config_hash(self)}"

    @property
    def condition(self) -> dict[str, Any]:
        """What its cell is told from others by, the seed last."""
        return {
            "model": self.mechanism,
            "n_variables": self.task.n_variables,
            "n_terms": self.task.n_terms,
            "n_examples": self.task.n_examples,
            "held_out": self.task.held_out,
            "learning_rate": self.training.learning_rate,
            "weight_decay": self.training.weight_decay,
            "seed": self.seed,
        }

    def build(self) -> mechanisms.Transformer:
        """The untrained model."""
        config = mechanisms.TransformerConfig(
            d_input=self.task.n_variables + 1,
            d_output=1,
            d_model=self.d_model,
            n_layers=self.n_layers,
            attention=mechanisms.AttentionConfig.named(
                self.mechanism, n_heads=self.n_heads, d_head=self.d_head
            ),
            feed_forward=mechanisms.FeedForwardConfig(d_mlp=self.d_mlp),
            positions="relative",
            max_distance=self.task.n_examples,
            n_readout=1,
        )
        return mechanisms.Transformer(config, generator=torch.Generator().manual_seed(self.seed))


@dataclass(frozen=True, kw_only=True)
class FuzzyStudy:
    """All settings of the study: a cell for each combination of what is a tuple.

    Args:
        task: the functions; `n_examples`, `held_out` and `seed` come from the grid.
        mechanisms: the attention variants to compare, names of `mechanisms.ATTENTION_VARIANTS`.
        n_examples, held_out: points of a sequence, and the share of combinations held out.
        learning_rates, weight_decays: of which each condition's are chosen by R^2 on `id`; none:
            those of `training`.
        seeds: every model is trained once for each, with other combinations held out.
        n_test: sequences of each split for the closing R^2.
        n_decode: sequences that decoders are fitted to, and as many that they are scored on.

    The rest: see `FuzzyModel`.
    """

    task: FuzzyLogicConfig
    mechanisms: tuple[str, ...] = ("softmax", "linear", "hyla", "linear_relu", "rms_head_linear")
    n_examples: tuple[int, ...] = (32,)
    held_out: tuple[float, ...] = (0.7,)
    learning_rates: tuple[float, ...] = ()
    weight_decays: tuple[float, ...] = ()
    seeds: tuple[int, ...] = (0,)
    n_layers: int = 2
    d_model: int = 128
    n_heads: int = 8
    d_head: int = 2
    d_mlp: int = 256
    training: TrainingConfig
    n_evaluate: int = 1024
    n_test: int = 4096
    n_decode: int = 2000

    def __post_init__(self):
        grid = ("mechanisms", "n_examples", "held_out", "learning_rates", "weight_decays", "seeds")
        for name in grid:
            values = getattr(self, name)
            optional = name in ("learning_rates", "weight_decays")
            if len(set(values)) < len(values) or not (values or optional):
                raise ValueError(f"{name} must be different from one another, got {values}")
        unknown = set(self.mechanisms) - set(mechanisms.ATTENTION_VARIANTS)
        if unknown:
            raise ValueError(
                f"mechanisms must be among {', '.join(mechanisms.ATTENTION_VARIANTS)}, "
                f"got {', '.join(sorted(unknown))}"
            )
        for name in ("n_evaluate", "n_test", "n_decode"):
            if getattr(self, name) < 10:
                raise ValueError(f"{name} must be at least 10, got {getattr(self, name)}")

    def tasks(self) -> list[FuzzyLogicConfig]:
        """The tasks: one for each length, share held out, and seed."""
        return [
            replace(self.task, n_examples=length, held_out=share, seed=seed)
            for length, share, seed in product(self.n_examples, self.held_out, self.seeds)
        ]

    def trained_models(self) -> list[FuzzyModel]:
        """The cells of the grid."""
        rates = self.learning_rates or (self.training.learning_rate,)
        decays = self.weight_decays or (self.training.weight_decay,)
        grid = product(self.mechanisms, rates, decays, self.tasks())
        return [
            FuzzyModel(
                task=task,
                mechanism=mechanism,
                n_layers=self.n_layers,
                d_model=self.d_model,
                n_heads=self.n_heads,
                d_head=self.d_head,
                d_mlp=self.d_mlp,
                training=replace(self.training, learning_rate=rate, weight_decay=decay),
                n_evaluate=self.n_evaluate,
                seed=task.seed,
            )
            for mechanism, rate, decay, task in grid
        ]


def presets() -> dict[str, FuzzyStudy]:
    """The settings by name: seconds for tests, minutes for a laptop, the paper's for a GPU.

    Beside `laptop`, `context` and `held_out` vary the points of a sequence and the share of
    combinations that is held out; they find the models that `laptop` trained.
    """
    laptop = FuzzyStudy(
        task=FuzzyLogicConfig(),
        training=TrainingConfig(
            n_steps=5000,
            batch_size=64,
            learning_rate=3e-3,
            weight_decay=0.1,
            warmup_steps=200,
            evaluate_every=500,
        ),
    )
    smoke = replace(
        laptop,
        mechanisms=("softmax", "hyla"),
        seeds=(0,),
        n_examples=(8,),
        d_model=16,
        n_heads=2,
        d_mlp=16,
        training=replace(
            laptop.training, n_steps=20, batch_size=16, warmup_steps=5, evaluate_every=10
        ),
        n_evaluate=40,
        n_test=40,
        n_decode=200,
    )
    three = ("softmax", "linear", "hyla")
    paper = replace(
        laptop,
        n_examples=(16, 32, 64, 96),
        held_out=(0.3, 0.5, 0.7),
        learning_rates=(1e-3, 3e-3),
        weight_decays=(0.1, 0.03),
        seeds=(0, 1, 2),
        training=replace(
            laptop.training,
            n_steps=50_000,
            batch_size=128,
            warmup_steps=1000,
            evaluate_every=2000,
        ),
    )
    return {
        "smoke": smoke,
        "laptop": laptop,
        "context": replace(laptop, mechanisms=three, n_examples=(16, 32, 64, 96)),
        "held_out": replace(laptop, mechanisms=three, held_out=(0.3, 0.5, 0.7)),
        "paper": paper,
    }


# Training


def squared_error(model: Any, batch: Batch, step: int) -> Tensor:
    """The mean squared error of the value that is asked for."""
    return (model(batch.inputs)[:, :, 0] - batch.targets).square().mean()


def explained(errors: Tensor, variances: Tensor) -> float:
    """R^2 of all sequences together: 1 - mean squared error / mean variance within a sequence."""
    return 1 - (errors.double().mean() / variances.double().mean()).item()


def train_model(cell: FuzzyModel, *, root: Path, device: str, position: int) -> Path:
    """Train one model, or finish its training; gives its run folder."""
    task = tasks.FuzzyLogic(cell.task)
    model = cell.build().to(device)
    held = {split: task.batch(split, 0, cell.n_evaluate, device) for split in EVALUATED}

    def evaluate(model: torch.nn.Module) -> dict[str, float]:
        figures = {}
        for split, batch in held.items():
            scores = task.score(model(batch.inputs)[:, :, 0], batch)
            figures[f"{split}/r2"] = explained(scores["squared_error"], batch.latents["variance"])
        return figures

    folder = root / "models" / cell.folder_name
    train(
        model,
        config=cell.training,
        sample=functools.partial(task.batch, "train", device=device),
        evaluate=evaluate,
        select="id/r2",
        folder=folder,
        identity=cell,
        seed=cell.seed,
        objective=squared_error,
        description=f"{cell.mechanism}, N {cell.task.n_examples}, seed {cell.seed}",
        position=position,
    )
    return folder


# What is looked at


def analyse(study: FuzzyStudy, cell: FuzzyModel, folder: Path, device: str) -> xr.DataTree:
    """Everything that is looked at in one trained model."""
    task = tasks.FuzzyLogic(cell.task)
    model = cell.build().to(device)
    untrained = cell.build().to(device).eval()
    load_weights(model, folder / "best.safetensors", device=device)
    model.eval()
    return xr.DataTree.from_dict(
        {
            "errors": errors_of(task, model, study.n_test, device),
            "decoding": decode_terms(
                task, model, untrained, study.n_decode, seed=cell.seed, device=device
            ),
            "training": training_curves(folder),
            "costs": costs_of(model, task.batch("id", 0, 1, device).inputs),
        }
    )


def errors_of(task: tasks.FuzzyLogic, model: torch.nn.Module, size: int, device: str) -> xr.Dataset:
    """R^2 in each split, with its interval: [split]."""
    rows = []
    for split in EVALUATED:
        # Batch 0 of `id` chose the checkpoint; this is another.
        batch = task.batch(split, 1, size, device)
        with torch.no_grad():
            answers = torch.cat([model(part.inputs)[:, :, 0] for part in batch.parts(500)])
        scores = task.score(answers, batch)
        errors = scores["squared_error"].double().cpu().numpy()
        variances = batch.latents["variance"].double().cpu().numpy()
        drawn = np.random.default_rng(0).multinomial(size, np.full(size, 1 / size), 1000)
        resampled = 1 - (drawn @ errors) / (drawn @ variances)
        rows.append(
            (
                1 - errors.mean() / variances.mean(),
                *np.percentile(resampled, (2.5, 97.5)),
                scores["r2"].double().median().item(),
                errors.mean(),
                variances.mean(),
            )
        )
    abouts = {
        "r2": "R^2: 1 - mean squared error / mean variance within a sequence",
        "r2_low": "R^2, lower 95% bound",
        "r2_high": "R^2, upper 95% bound",
        "r2_median": "median over sequences of 1 - squared error / variance within it",
        "squared_error": "mean squared error",
        "variance": "mean variance of a sequence's values",
    }
    return xr.Dataset(
        {
            name: ("split", np.array(values), {"long_name": about})
            for (name, about), values in zip(abouts.items(), zip(*rows, strict=True), strict=True)
        },
        coords={"split": list(EVALUATED)},
        attrs={"interval": "percentile bootstrap over sequences, 95%, 1000 resamples"},
    )


def code_of_query(pattern: Tensor) -> Tensor:
    """The latent code of the token that is asked for: [example, key, head].

    Its attention weights to itself, and, in the mean, to the points whose values are known.
    """
    last = pattern[:, :, -1]
    return torch.stack([last[:, :, -1], last[:, :, :-1].mean(-1)], dim=1)


def capture_codes(
    task: tasks.FuzzyLogic, model: torch.nn.Module, split: str, index: int, size: int, device: str
) -> xr.Dataset:
    """Codes and what the functions are made of, the same point being asked for everywhere.

    `code` [example, layer, key, head], `target` [example, label]: for each term whether the
    function has it, then for each variable the share of its terms in which it is not negated.
    """
    quantity = probes.Quantity(
        "blocks.*.attn.hook_pattern",
        dims=("example", "key", "head"),
        reduce=code_of_query,
        long_name="latent code of the token that is asked for",
    )
    batch = task.fixed_query(split, index, size, device)
    data = probes.capture(
        cast(Any, model),
        batch.parts(500),
        {"code": quantity},
        latent_dims={
            "terms": ("example", "place"),
            "literals": ("example", "place", "variable"),
            "values": ("example", "point"),
        },
    )
    n_terms = len(task.conjunctions)
    has = (data["terms"].to_numpy()[:, :, None] == np.arange(n_terms)).any(1)
    shares = data["literals"].to_numpy().mean(1)
    targets = np.concatenate([has.astype(float), shares], axis=1)
    names = [f"term {term}" for term in range(n_terms)]
    names += [f"variable {variable}" for variable in range(shares.shape[1])]
    return data[["code"]].assign(target=(("example", "label"), targets)).assign_coords(label=names)


def decode_terms(
    task: tasks.FuzzyLogic,
    model: torch.nn.Module,
    untrained: torch.nn.Module,
    size: int,
    *,
    seed: int,
    device: str,
) -> xr.Dataset:
    """R^2 of ridge regression from the code to each label, where it varies.

    Fitted on `id`. Terms of `ood` never occur there, so of `ood` only variables are decoded, and of
    these not the ones that all its terms have in common.
    """

    def codes(of: torch.nn.Module) -> tuple[xr.Dataset, dict[str, xr.Dataset]]:
        fit = capture_codes(task, of, "id", 2, size, device)
        return fit, {split: capture_codes(task, of, split, 3, size, device) for split in EVALUATED}

    trained, bare = codes(model), codes(untrained)
    found = []
    for label in trained[0]["label"].to_numpy():

        def only(data: xr.Dataset, label: str = label) -> xr.Dataset:
            return data[["code"]].assign(value=data["target"].sel(label=label, drop=True))

        tests = {split: only(one) for split, one in trained[1].items() if _varies(one, label)}
        if not tests or not _varies(trained[0], label):
            continue
        decoded = probes.decode_continuous(
            only(trained[0]),
            tests,
            untrained=(only(bare[0]), {split: only(bare[1][split]) for split in tests}),
            resamples=200,
            seed=seed,
        )
        found.append(decoded.reindex(split=list(EVALUATED)).expand_dims(label=[label]))
    return cast(xr.Dataset, xr.concat(found, "label", combine_attrs="drop_conflicts"))


def _varies(data: xr.Dataset, label: str) -> bool:
    return float(np.ptp(data["target"].sel(label=label).to_numpy())) > 0


def training_curves(folder: Path) -> xr.Dataset:
    """What the log of a training says: `loss` [train_step], `r2` [train_step, split]."""
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return xr.Dataset(
        {
            "loss": (
                "train_step",
                [line["loss"] for line in lines],
                {"long_name": "mean squared error of training since the step before"},
            ),
            "r2": (
                ("train_step", "split"),
                [[line[f"{split}/r2"] for split in EVALUATED] for line in lines],
                {"long_name": "R^2"},
            ),
        },
        coords={"train_step": [line["step"] for line in lines], "split": list(EVALUATED)},
    )


# The run


def run(study: FuzzyStudy, *, resources: Resources, checkpoints: tuple[Path, ...] = ()) -> Path:
    """Run the study, or finish it; gives its folder, `fuzzy_logic_latent_code-HASH`.

    Args:
        study: the settings.
        resources: where and with what.
        checkpoints: run folders of models to analyse instead of training any.

    Raises:
        RunError: a folder cannot be used, or a checkpoint is missing, damaged or of another task.
        TrainingError: a loss is not finite.
    """
    return run_grid(
        "fuzzy_logic_latent_code",
        study,
        kind=FuzzyModel,
        train=train_model,
        analyse=analyse,
        assemble=assemble,
        figures=draw_figures,
        resources=resources,
        checkpoints=checkpoints,
    )


def assemble(cells: list[FuzzyModel], trees: list[xr.DataTree]) -> xr.DataTree:
    """The models' analyses as one result: along `cell`, whose coordinates tell the condition."""
    result = join_cells(trees, cells)
    result["summary"] = xr.DataTree(summary(result))
    describe_coordinates(result, COORDINATES)
    return result


SYMBOLS = {"n_variables": "L", "n_terms": "K", "n_examples": "N", "held_out": "held out"}
"""What the table calls what tells settings apart."""

SETTING = ("model", "n_variables", "n_terms", "n_examples", "held_out")


def summary(result: xr.DataTree) -> xr.Dataset:
    """`mean`, `lowest` and `highest` over seeds [condition, figure].

    Of each setting only the learning rate and weight decay count that have the highest mean R^2 on
    `id`. Figures: `r2 SPLIT`; `terms SPLIT` and `variables SPLIT`, the mean R^2 of decoding whether
    the function has a term, and how often a variable is not negated, from the codes of all layers;
    with "untrained " or "shuffled " before it, those controls.
    """
    errors, decoding = result["errors"].to_dataset(), result["decoding"].to_dataset()
    figures = {f"r2 {split}": errors["r2"].sel(split=split) for split in EVALUATED}
    scores = decoding["score"].sel(layer="all", metric="r2")
    for kind in ("term", "variable"):
        named = [str(one) for one in scores["label"].to_numpy() if str(one).startswith(kind)]
        for control, split in product(("probe", "untrained", "shuffled"), EVALUATED):
            name = f"{kind}s {split}" if control == "probe" else f"{control} {kind}s {split}"
            figures[name] = scores.sel(label=named, control=control, split=split).mean("label")
    groups: dict[tuple[Any, ...], dict[tuple[Any, ...], list[int]]] = {}
    for number in range(errors.sizes["cell"]):
        one = errors.isel(cell=number)
        setting = tuple(one[name].item() for name in SETTING)
        rates = one["learning_rate"].item(), one["weight_decay"].item()
        groups.setdefault(setting, {}).setdefault(rates, []).append(number)
    on_id = figures["r2 id"].to_numpy()
    chosen = [
        max(rates.values(), key=lambda cells: on_id[cells].mean()) for rates in groups.values()
    ]
    values = {name: figure.to_numpy() for name, figure in figures.items()}
    return over_seeds(values, chosen).assign_coords(
        {
            name: ("condition", [setting[place] for setting in groups])
            for place, name in enumerate(SETTING)
        }
    )


def draw_figures(result: xr.DataTree) -> dict[str, Figure]:
    """All figures; matplotlib is imported only here, when they are drawn."""
    from studies.fuzzy_figures import figures

    return figures(result)


def closing_table(result: xr.DataTree) -> RenderableType:
    """The answer in one table: a row for each mechanism and setting."""
    from rich.box import SIMPLE
    from rich.table import Table

    means = result["summary"].to_dataset()
    told = [name for name in SETTING[1:] if len(np.unique(means[name].to_numpy())) > 1]
    table = Table(title="R^2 of the answers, and of decoding (in %)", caption=CAPTION, box=SIMPLE)
    table.caption_justify, table.padding = "left", (0, 1, 0, 0)
    table.add_column("", no_wrap=True)
    for name in told:
        table.add_column(SYMBOLS[name])
    for title in COLUMNS.values():
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("paper", justify="right")
    for row in range(means.sizes["condition"]):
        one = means.isel(condition=row)
        cells = []
        for name in COLUMNS:
            at = one.sel(figure=name)
            mean, low, high = (100 * at[kind].item() for kind in ("mean", "lowest", "highest"))
            several = name.startswith("r2") and low < high
            spread = f"\n[{low:.0f}-{high:.0f}]" if several else ""
            cells.append("" if np.isnan(mean) else f"{mean:.1f}{spread}")
        model = one["model"].item()
        paper = PAPER.get(model) if _is_the_papers(one) else None
        table.add_row(
            model.replace("_", " "),
            *(f"{one[name].item():g}" for name in told),
            *cells,
            "" if paper is None else f"{paper}",
        )
    return table


def _is_the_papers(one: xr.Dataset) -> bool:
    """Whether the paper's figures are of this setting."""
    setting = tuple(one[name].item() for name in SETTING[1:])
    return setting == (4, 2, 32, 0.7)


COLUMNS = {
    "r2 id": "id",
    "r2 test": "test",
    "r2 ood": "ood",
    "terms id": "terms,\nid",
    "untrained terms id": "untr.",
    "terms test": "test",
    "variables ood": "var.,\nood",
    "untrained variables ood": "untr.",
}
"""What the table shows: figures of `summary`, and their titles."""

CAPTION = (
    "R^2 of the answers on familiar combinations of terms (id), held-out ones (test) and unseen "
    "terms (ood): means over seeds, in brackets the least and the greatest. Terms, var.: R^2 of "
    "ridge regression from the code of the token that is asked for, all layers, to whether the "
    "function has a term, and to how often a variable is not negated; untr.: with untrained "
    "weights. Paper: R^2 out of distribution with 32 points, 70% held out, 50,000 steps."
)


if __name__ == "__main__":
    command(
        question="Does the latent code of attention know the terms of a fuzzy logic function?",
        presets=presets,
        run=run,
        table=closing_table,
    )
