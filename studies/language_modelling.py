"""Which attention models a text best with as many parameters?

Causal transformers whose blocks differ in their attention alone: softmax and linear attention, HYLA
(Schug et al. 2024, "Attention as a Hypernetwork", who compare these three on language), CoDA (Tay
et al. 2019), compositional attention (Mittal et al. 2021) and Transformer-XL's (Dai et al. 2019).
Positions are relative (a bias of T5's kind) or rotary. Every model has as many parameters as one
with softmax attention: what its attention has more of, its feed-forward layers have less of.

    python studies/language_modelling.py                        # at most 12 minutes
    python studies/language_modelling.py --preset smoke
    python studies/language_modelling.py --preset positions
    python studies/language_modelling.py task.path=FILE relative=softmax,transformer_xl rotary=coda
    python studies/language_modelling.py --preset paper --device cuda --workers 1
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float

import mechanisms
from studies.costs import costs_of, count_parameters
from studies.language_models import (
    PYTHON_HELP,
    Positions,
    language_model,
    text_of,
    unigram_scores,
    windows_scored,
)
from studies.running import (
    Resources,
    command,
    describe_coordinates,
    join_cells,
    over_seeds,
    run_grid,
)
from studies.runs import RunError, config_hash
from studies.training import TrainingConfig, load_weights, train
from tasks import Batch, Text, TextConfig

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import RenderableType

    from mechanisms.transformer import HeadedConfig

POSITIONS: tuple[Positions, ...] = get_args(Positions)
EVALUATED = ("valid", "test")
AT_ONCE = 16
"""Windows that are scored together."""
RESAMPLES = 1000

METRICS = {
    "loss": ("mean loss of a token", "nats"),
    "accuracy": ("share of tokens that are the most probable one", "1"),
    "bits_per_byte": ("loss per byte of text", "bits"),
    "perplexity": ("perplexity per word, the ends of lines included", "1"),
    "token_perplexity": ("perplexity per token", "1"),
}
"""What a figure is, and its unit."""

COORDINATES = {
    "cell": "trained model",
    "model": "attention mechanism",
    "positions": "how positions are known",
    "learning_rate": "learning rate",
    "seed": "seed of the initial weights and of the windows of training",
    "split": "part of the text",
    "window": "window of the text, as long as a model sees at once",
    "position": "tokens before the one that a token is predicted from, in its window",
    "train_step": "training step",
    "figure": "what is measured",
}
"""Long names of the result's coordinates."""


def mechanism_names(positions: Positions) -> tuple[str, ...]:
    """The mechanisms that positions of this kind can be given to."""
    rotary = (*mechanisms.ATTENTION_VARIANTS, "coda")
    return rotary if positions == "rotary" else (*rotary, "compositional", "transformer_xl")


def attention_of(
    mechanism: str, *, positions: Positions, d_model: int, n_heads: int
) -> HeadedConfig:
    """The attention of a name from `mechanism_names`, with heads of width d_model / n_heads.

    CoDA's gate is centred by row: it would start nearly closed, and is causal that way.
    Compositional attention has half as many retrievals as searches.
    """
    d_head, rotary = d_model // n_heads, positions == "rotary"
    match mechanism:
        case "coda":
            return mechanisms.CodaAttentionConfig(
                n_heads=n_heads,
                d_head=d_head,
                composition=mechanisms.QuasiAttentionConfig(gate_centring="row"),
                rotary=rotary,
            )
        case "compositional":
            return mechanisms.CompositionalAttentionConfig(
                n_searches=n_heads, n_retrievals=max(1, n_heads // 2), d_head=d_head
            )
        case "transformer_xl":
            return mechanisms.RelativeAttentionConfig(n_heads=n_heads, d_head=d_head)
        case _:
            return mechanisms.AttentionConfig.named(
                mechanism, n_heads=n_heads, d_head=d_head, rotary=rotary
            )


def matched_d_mlp(make: Callable[[int], mechanisms.TransformerConfig], n_parameters: int) -> int:
    """The d_mlp with which a transformer's number of parameters is nearest to `n_parameters`.

    Args:
        make: d_mlp -> the config; each unit of d_mlp has as many parameters.
        n_parameters: what is to be matched.

    Raises:
        ValueError: there are more even with d_mlp=1.
    """
    least, next_ = (parameters_of(make(d_mlp)) for d_mlp in (1, 2))
    d_mlp = 1 + round((n_parameters - least) / (next_ - least))
    if d_mlp < 1:
        raise ValueError(
            f"n_parameters must be at least {least}, which {make(1).attention} needs with "
            f"d_mlp=1, got {n_parameters}; a greater d_mlp of softmax attention leaves room"
        )
    return d_mlp


def parameters_of(config: mechanisms.TransformerConfig) -> int:
    """How many parameters a transformer has; no memory is taken for them."""
    with torch.device("meta"):
        return count_parameters(mechanisms.Transformer(config))


@dataclass(frozen=True, kw_only=True)
class LanguageModel:
    """One model and how it is trained: what makes its run folder, a cell of the grid.

    Args:
        task: its seed is that of the model.
        mechanism: one of `mechanism_names(positions)`.
        positions: see `studies.language_models.language_model`.
        n_layers, d_model, n_heads: sizes.
        d_mlp: of softmax attention with relative positions; see `own_d_mlp`.
        dropout: of the hidden activations of feed-forward layers.
        n_evaluate: windows of `valid` for the curves; their loss names the best checkpoint.
        seed: of the initial weights.
    """

    task: TextConfig
    mechanism: str
    positions: Positions
    n_layers: int
    d_model: int
    n_heads: int
    d_mlp: int
    dropout: float
    training: TrainingConfig
    n_evaluate: int
    seed: int

    @property
    def folder_name(self) -> str:
        """The name of its run folder."""
        return f"{self.mechanism}-{self.positions}-seed{self.seed}-{config_hash(self)}"

    @property
    def condition(self) -> dict[str, Any]:
        """What its cell is told from others by, the seed last."""
        return {
            "model": self.mechanism,
            "positions": self.positions,
            "learning_rate": self.training.learning_rate,
            "seed": self.seed,
        }

    def reference(self, vocabulary_size: int) -> mechanisms.TransformerConfig:
        """The transformer whose number of parameters it has: softmax attention with `d_mlp`."""
        softmax = replace(self, mechanism="softmax", positions="relative")
        return softmax._with_d_mlp(vocabulary_size, self.d_mlp)

    def own_d_mlp(self, vocabulary_size: int) -> int:
        """The d_mlp that its number of parameters is matched with."""
        make = functools.partial(self._with_d_mlp, vocabulary_size)
        return matched_d_mlp(make, parameters_of(self.reference(vocabulary_size)))

    def build(self, vocabulary_size: int) -> mechanisms.Transformer:
        """The untrained model."""
        config = self._with_d_mlp(vocabulary_size, self.own_d_mlp(vocabulary_size))
        return mechanisms.Transformer(config, generator=torch.Generator().manual_seed(self.seed))

    def _with_d_mlp(self, vocabulary_size: int, d_mlp: int) -> mechanisms.TransformerConfig:
        return language_model(
            self.task,
            vocabulary_size=vocabulary_size,
            attention=attention_of(
                self.mechanism,
                positions=self.positions,
                d_model=self.d_model,
                n_heads=self.n_heads,
            ),
            d_model=self.d_model,
            d_mlp=d_mlp,
            n_layers=self.n_layers,
            positions=self.positions,
            shared=False,
            dropout=self.dropout,
        )


@dataclass(frozen=True, kw_only=True)
class LanguageStudy:
    """All settings of the study: a cell for each mechanism with each kind of positions, and seed.

    Args:
        task: the text; its seed comes from the grid.
        relative: mechanisms that are trained with relative positions: variants of
            `mechanisms.ATTENTION_VARIANTS`, `coda`, `compositional`, and `transformer_xl`, which
            has relative positions of its own.
        rotary: mechanisms that are trained with rotary positions: the same but for the last two.
        learning_rates: of which each condition's is chosen by the loss on `valid`; none: that of
            `training`.
        seeds: every model is trained once for each.

    The rest: see `LanguageModel`.

    Raises:
        ValueError: for a value that is not allowed.
    """

    task: TextConfig
    relative: tuple[str, ...] = ("softmax", "linear", "hyla", "coda", "compositional")
    rotary: tuple[str, ...] = ("softmax", "hyla")
    learning_rates: tuple[float, ...] = ()
    seeds: tuple[int, ...] = (0,)
    n_layers: int = 2
    d_model: int = 128
    n_heads: int = 4
    d_mlp: int = 512
    dropout: float = 0.1
    training: TrainingConfig
    n_evaluate: int = 128

    def __post_init__(self):
        for name in ("relative", "rotary", "learning_rates", "seeds"):
            values = getattr(self, name)
            if len(set(values)) < len(values):
                raise ValueError(f"{name} must be different from one another, got {values}")
        if not self.seeds:
            raise ValueError("seeds must not be empty")
        if not self.relative + self.rotary:
            raise ValueError("relative and rotary must not both be empty")
        for positions in POSITIONS:
            allowed = mechanism_names(positions)
            if unknown := [name for name in getattr(self, positions) if name not in allowed]:
                raise ValueError(
                    f"{positions} must be among {', '.join(allowed)}, got {', '.join(unknown)}"
                )
        if self.n_heads < 1 or self.d_model % self.n_heads:
            raise ValueError(f"n_heads must divide d_model = {self.d_model}, got {self.n_heads}")
        if self.n_evaluate < 1:
            raise ValueError(f"n_evaluate must be at least 1, got {self.n_evaluate}")

    def tasks(self) -> list[TextConfig]:
        """The tasks: one for each seed."""
        return [replace(self.task, seed=seed) for seed in self.seeds]

    def trained_models(self) -> list[LanguageModel]:
        """The cells of the grid."""
        return [
            LanguageModel(
                task=task,
                mechanism=mechanism,
                positions=positions,
                n_layers=self.n_layers,
                d_model=self.d_model,
                n_heads=self.n_heads,
                d_mlp=self.d_mlp,
                dropout=self.dropout,
                training=replace(self.training, learning_rate=rate),
                n_evaluate=self.n_evaluate,
                seed=task.seed,
            )
            for positions in POSITIONS
            for mechanism in getattr(self, positions)
            for rate in self.learning_rates or (self.training.learning_rate,)
            for task in self.tasks()
        ]


def presets() -> dict[str, LanguageStudy]:
    """The settings by name: seconds for tests, minutes for a laptop, sizes for a GPU.

    `positions` gives both kinds of positions to each mechanism that can have them. The sizes of
    `paper`, those of WikiText-103 included, are ours.
    """
    laptop = LanguageStudy(
        task=TextConfig(path=PYTHON_HELP, vocabulary_size=1024, length=64),
        training=TrainingConfig(
            n_steps=1200,
            batch_size=16,
            learning_rate=3e-3,
            weight_decay=0.1,
            warmup_steps=100,
            evaluate_every=100,
            clip=1.0,
        ),
    )
    smoke = replace(
        laptop,
        relative=("softmax", "compositional"),
        rotary=("softmax", "hyla"),
        d_model=16,
        n_heads=2,
        d_mlp=32,
        training=replace(
            laptop.training, n_steps=20, batch_size=8, warmup_steps=5, evaluate_every=10
        ),
        n_evaluate=16,
    )
    both = ("softmax", "linear", "hyla", "coda")
    paper = replace(
        laptop,
        task=TextConfig(),
        relative=(*laptop.relative, "linear_relu", "rms_head_linear", "transformer_xl"),
        rotary=both,
        learning_rates=(3e-4, 1e-3),
        seeds=(0, 1, 2),
        n_layers=6,
        d_model=512,
        n_heads=8,
        d_mlp=2048,
        training=replace(
            laptop.training,
            n_steps=100_000,
            batch_size=64,
            warmup_steps=2000,
            evaluate_every=2500,
            precision="bf16",
        ),
        n_evaluate=256,
    )
    return {
        "smoke": smoke,
        "laptop": laptop,
        "positions": replace(laptop, relative=(*both, "transformer_xl"), rotary=both),
        "paper": paper,
    }


# Training


def train_model(cell: LanguageModel, *, root: Path, device: str, position: int) -> Path:
    """Train one model, or finish its training; gives its run folder."""
    task = text_of(cell.task)
    model = cell.build(task.vocabulary_size).to(device)

    def evaluate(model: torch.nn.Module) -> dict[str, float]:
        sums = sums_of(task, model, "valid", cell.n_evaluate, device)
        found = figures_of(
            {name: (part.sum(), whole.sum()) for name, (part, whole) in sums.items()}
        )
        # The best checkpoint is that of the highest figure.
        return {"valid/log_likelihood": -float(found["loss"])} | {
            f"valid/{name}": float(found[name]) for name in ("accuracy", "perplexity")
        }

    folder = root / "models" / cell.folder_name
    train(
        model,
        config=cell.training,
        sample=functools.partial(task.batch, "train", device=device),
        evaluate=evaluate,
        select="valid/log_likelihood",
        folder=folder,
        identity=cell,
        seed=cell.seed,
        description=f"{cell.mechanism}, {cell.positions}, seed {cell.seed}",
        position=position,
    )
    return folder


def windows(task: Text, split: str, n_windows: int | None, device: str) -> Iterator[Batch]:
    """The first windows of a split (None: all), some at a time."""
    size = task.size(split) if n_windows is None else min(n_windows, task.size(split))
    for first in range(0, size, AT_ONCE):
        yield task.batch(split, first // AT_ONCE, AT_ONCE, device)[: size - first]


Sums = Mapping[str, tuple[Any, Any]]
"""Of each metric of `windows_scored` what is summed, and what it is divided by: arrays."""


def sums_of(
    task: Text, model: torch.nn.Module, split: str, n_windows: int | None, device: str
) -> dict[str, tuple[Float[np.ndarray, " window"], Float[np.ndarray, " window"]]]:
    """`windows_scored` of the first windows of a split (None: of all)."""
    found = []
    with torch.no_grad():
        for batch in windows(task, split, n_windows, device):
            found.append(windows_scored(task, split, model(batch.inputs).float(), batch))

    def joined(metric: str, place: int) -> Float[np.ndarray, " window"]:
        return torch.cat([one[metric][place] for one in found]).double().cpu().numpy()

    return {metric: (joined(metric, 0), joined(metric, 1)) for metric in found[0]}


def figures_of(sums: Sums) -> dict[str, Any]:
    """`METRICS` from sums over the same windows."""
    ratio = {name: part / whole for name, (part, whole) in sums.items()}
    loss = -ratio["log_likelihood"]
    return {
        "loss": loss,
        "accuracy": ratio["accuracy"],
        "bits_per_byte": ratio["bits_per_byte"],
        "perplexity": np.exp(ratio["perplexity"]),
        "token_perplexity": np.exp(loss),
    }


# What is looked at


def analyse(study: LanguageStudy, cell: LanguageModel, folder: Path, device: str) -> xr.DataTree:
    """Everything that is looked at in one trained model."""
    task = text_of(cell.task)
    model = cell.build(task.vocabulary_size).to(device)
    load_weights(model, folder / "best.safetensors", device=device)
    model.eval()
    sums = {split: sums_of(task, model, split, None, device) for split in EVALUATED}
    log_likelihood, tokens = sums["test"]["log_likelihood"]
    return xr.DataTree.from_dict(
        {
            "errors": errors_of(task, sums),
            "windows": xr.Dataset(
                {
                    "loss": ("window", -log_likelihood, {"long_name": "summed loss in a window"}),
                    "tokens": ("window", tokens, {"long_name": "tokens of a window"}),
                },
                coords={"window": np.arange(len(tokens))},
                attrs={"split": "test"},
            ),
            "position": by_position(task, model, device),
            "training": training_curves(folder),
            "costs": costs_with_match(cell, task, model, device),
        }
    )


def errors_of(task: Text, sums: Mapping[str, Sums]) -> xr.Dataset:
    """Each metric [split] with its interval, and with what token frequencies alone give."""
    data: dict[str, list[float]] = {}
    for split, found in sums.items():
        figures = figures_of({name: (a.sum(), b.sum()) for name, (a, b) in found.items()})
        drawn = resampled(len(found["accuracy"][0]))
        spread = figures_of({name: (drawn @ a, drawn @ b) for name, (a, b) in found.items()})
        known = unigram_scores(task, split)
        known["loss"] = -known.pop("log_likelihood")
        known["token_perplexity"] = np.exp(known["loss"])
        for name, figure in figures.items():
            low, high = np.percentile(spread[name], (2.5, 97.5))
            values = {name: figure, f"{name}_low": low, f"{name}_high": high}
            if name in known:
                values[f"{name}_baseline"] = known[name]
            for key, value in values.items():
                data.setdefault(key, []).append(float(value))
    abouts = {
        "": "",
        "_low": ", lower 95% bound",
        "_high": ", upper 95% bound",
        "_baseline": ", with how often each token occurs in training",
    }
    variables = {}
    for name, values in data.items():
        metric = max((one for one in METRICS if name.startswith(one)), key=len)
        about, unit = METRICS[metric]
        about += abouts[name.removeprefix(metric)]
        variables[name] = ("split", values, {"long_name": about, "units": unit})
    return xr.Dataset(
        variables,
        coords={"split": list(sums)},
        attrs={"interval": f"percentile bootstrap over windows, 95%, {RESAMPLES} resamples"},
    )


def resampled(n_windows: int) -> Float[np.ndarray, "resample window"]:
    """How often each window is drawn in each resample: the same for every model."""
    rng = np.random.default_rng(0)
    return rng.multinomial(n_windows, np.full(n_windows, 1 / n_windows), RESAMPLES).astype(float)


def by_position(task: Text, model: torch.nn.Module, device: str) -> xr.Dataset:
    """Loss and accuracy on `test` by position in the window: does it help to see more?"""
    totals = torch.zeros(3, task.config.length, dtype=torch.float64)
    with torch.no_grad():
        for batch in windows(task, "test", None, device):
            found = task.score(model(batch.inputs).float(), batch)
            for row, values in enumerate((found["loss"], found["correct"], batch.mask)):
                totals[row] += values.sum(0).double().cpu()
    loss, correct, tokens = totals.numpy()
    # A text may be shorter than a window.
    seen = tokens > 0
    return xr.Dataset(
        {
            "loss": (
                "position",
                np.divide(loss, tokens, where=seen, out=np.full_like(loss, np.nan)),
                {"long_name": "mean loss of a token", "units": "nats"},
            ),
            "accuracy": (
                "position",
                np.divide(correct, tokens, where=seen, out=np.full_like(loss, np.nan)),
                {"long_name": METRICS["accuracy"][0], "units": "1"},
            ),
            "tokens": ("position", tokens, {"long_name": "tokens at this position"}),
        },
        coords={"position": np.arange(len(tokens))},
        attrs={"split": "test"},
    )


def training_curves(folder: Path) -> xr.Dataset:
    """What the log of a training says, along `train_step`."""
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]

    def curve(name: str, about: str, units: str, sign: int = 1) -> Any:
        values = [sign * line[name] for line in lines]
        return "train_step", values, {"long_name": about, "units": units}

    return xr.Dataset(
        {
            "loss": curve("loss", "mean loss of training since the step before", "nats"),
            "valid_loss": curve("valid/log_likelihood", "loss on windows of valid", "nats", -1),
            "valid_accuracy": curve("valid/accuracy", "accuracy on windows of valid", "1"),
            "valid_perplexity": curve("valid/perplexity", METRICS["perplexity"][0], "1"),
            "seconds": curve("seconds", "time since the beginning, evaluations included", "s"),
        },
        coords={"train_step": [line["step"] for line in lines]},
    )


def costs_with_match(
    cell: LanguageModel, task: Text, model: mechanisms.Transformer, device: str
) -> xr.Dataset:
    """`costs_of` a window, the d_mlp, and the parameters over those of what they are matched to."""
    found = costs_of(model, task.batch("test", 0, 1, device).inputs)
    matched = parameters_of(cell.reference(task.vocabulary_size))
    d_mlp = cell.own_d_mlp(task.vocabulary_size)
    return found.assign(
        d_mlp=((), d_mlp, {"long_name": "width of feed-forward layers"}),
        parameter_ratio=(
            (),
            found["parameters"].item() / matched,
            {"long_name": "parameters over those of softmax attention, relative positions"},
        ),
    )


# The run


def run(study: LanguageStudy, *, resources: Resources, checkpoints: tuple[Path, ...] = ()) -> Path:
    """Run the study, or finish it; gives its folder, `language_modelling-HASH`.

    Args:
        study: the settings.
        resources: where and with what.
        checkpoints: run folders of models to analyse instead of training any.

    Raises:
        RunError: a folder cannot be used, or a checkpoint is missing, damaged or of another task;
            or the text is not there: it says what to put where.
        TrainingError: a loss is not finite.
    """
    try:
        # Before there are workers: what they all read is missed, or made, once.
        for task in study.tasks():
            _ = text_of(task).vocabulary_size
    except FileNotFoundError as error:
        raise RunError(str(error)) from error
    return run_grid(
        "language_modelling",
        study,
        kind=LanguageModel,
        train=train_model,
        analyse=analyse,
        assemble=assemble,
        figures=draw_figures,
        resources=resources,
        checkpoints=checkpoints,
    )


def assemble(cells: list[LanguageModel], trees: list[xr.DataTree]) -> xr.DataTree:
    """The models' analyses as one result: along `cell`, whose coordinates tell the condition."""
    result = join_cells(trees, cells)
    result["summary"] = xr.DataTree(summary(result))
    describe_coordinates(result, COORDINATES)
    return result


def summary(result: xr.DataTree) -> xr.Dataset:
    """`mean`, `lowest` and `highest` over seeds [condition, figure], and paired differences.

    Of each mechanism with its positions only the learning rate counts that has the lowest mean loss
    on `valid`. Figures: `METRIC SPLIT` of `METRICS`; `parameters`, `parameter_ratio` and `d_mlp`;
    `seconds` of training. `difference` [condition]: test loss per token less that of softmax
    attention with the same positions and seeds, with its interval over windows, which both have in
    common; NaN where there is no such softmax attention.
    """
    errors, costs = result["errors"].to_dataset(), result["costs"].to_dataset()
    figures = {
        f"{metric} {split}": errors[metric].sel(split=split).to_numpy()
        for split in EVALUATED
        for metric in METRICS
    }
    figures |= {name: costs[name].to_numpy() for name in ("parameters", "parameter_ratio", "d_mlp")}
    figures["seconds"] = result["training"]["seconds"].max("train_step").to_numpy()
    groups: dict[tuple[str, str], dict[float, list[int]]] = {}
    for number in range(errors.sizes["cell"]):
        one = errors.isel(cell=number)
        kind = one["model"].item(), one["positions"].item()
        groups.setdefault(kind, {}).setdefault(one["learning_rate"].item(), []).append(number)
    on_valid = figures["loss valid"]
    chosen = {
        kind: min(rates.items(), key=lambda of_rate: on_valid[of_rate[1]].mean())
        for kind, rates in groups.items()
    }
    seeds = errors["seed"].to_numpy()
    scored = result["windows"].to_dataset()
    differences = []
    for (_, positions), (_, cells) in chosen.items():
        softmax = chosen.get(("softmax", positions), (0.0, []))[1]
        mine, theirs = ({seeds[cell]: cell for cell in some} for some in (cells, softmax))
        pairs = [(mine[seed], theirs[seed]) for seed in mine if seed in theirs]
        differences.append(paired_difference(scored, pairs))
    abouts = ("", ", lower 95% bound", ", upper 95% bound")
    about = "test loss of a token less that of softmax attention with the same positions"
    means = over_seeds(figures, [cells for _, cells in chosen.values()])
    return (
        means.assign(
            {
                name: (
                    "condition",
                    [one[place] for one in differences],
                    {"long_name": about + abouts[place], "units": "nats"},
                )
                for place, name in enumerate(("difference", "difference_low", "difference_high"))
            }
        )
        .assign_coords(
            model=("condition", [model for model, _ in chosen]),
            positions=("condition", [positions for _, positions in chosen]),
            learning_rate=("condition", [rate for rate, _ in chosen.values()]),
        )
        .assign_attrs(interval=f"paired bootstrap over windows, 95%, {RESAMPLES} resamples")
    )


def paired_difference(
    scored: xr.Dataset, pairs: list[tuple[int, int]]
) -> tuple[float, float, float]:
    """The mean difference of loss per token of pairs of cells, and its interval over windows.

    Args:
        scored: `loss` and `tokens` [cell, window], of the same windows for all cells.
        pairs: numbers of cells.
    """
    if not pairs:
        return np.nan, np.nan, np.nan
    loss, tokens = scored["loss"].to_numpy(), scored["tokens"].to_numpy()[0]
    apart = np.mean([loss[one] - loss[other] for one, other in pairs], axis=0)
    drawn = resampled(len(tokens))
    low, high = np.percentile((drawn @ apart) / (drawn @ tokens), (2.5, 97.5))
    return apart.sum() / tokens.sum(), low, high


def draw_figures(result: xr.DataTree) -> dict[str, Figure]:
    """All figures; matplotlib is imported only here, when they are drawn."""
    from studies.language_figures import figures

    return figures(result)


def closing_table(result: xr.DataTree) -> RenderableType:
    """The answer in one table: a row for each mechanism with its positions."""
    from rich.box import SIMPLE
    from rich.table import Table

    means, errors = result["summary"].to_dataset(), result["errors"].to_dataset()
    table = Table(title="Which attention models the text best?", caption=CAPTION, box=SIMPLE)
    table.caption_justify, table.padding = "left", (0, 1, 0, 0)
    table.add_column("", no_wrap=True)
    for title in COLUMNS:
        table.add_column(title, justify="right", no_wrap=True)
    for row in range(means.sizes["condition"]):
        one = means.isel(condition=row)
        mean = one["mean"]
        at = one.sel(figure="perplexity test")
        low, high = at["lowest"].item(), at["highest"].item()
        spread = f"\n[{_whole(low)}-{_whole(high)}]" if low < high else ""
        parameters, ratio = (mean.sel(figure=f"parameter{end}").item() for end in ("s", "_ratio"))
        apart, low, high = (one[f"difference{end}"].item() for end in ("", "_low", "_high"))
        compared = one["model"].item() != "softmax" and not np.isnan(apart)
        table.add_row(
            f"{one['model'].item().replace('_', ' ')}\n{one['positions'].item()}",
            f"{parameters:,.0f}\n{100 * ratio:.2f}%",
            f"{mean.sel(figure='d_mlp').item():.0f}",
            f"{_whole(at['mean'].item())}{spread}",
            f"{mean.sel(figure='bits_per_byte test').item():.3f}",
            f"{100 * mean.sel(figure='accuracy test').item():.1f}%",
            f"{apart:+.3f}\n[{low:+.2f} {high:+.2f}]" if compared else "",
            f"{mean.sel(figure='seconds').item() / 60:.1f}",
        )
    known = errors.isel(cell=0).sel(split="test")
    table.add_section()
    table.add_row(
        "frequencies",
        "",
        "",
        _whole(known["perplexity_baseline"].item()),
        f"{known['bits_per_byte_baseline'].item():.3f}",
    )
    return table


def _whole(perplexity: float) -> str:
    return f"{perplexity:.0f}" if perplexity < 1e6 else f"{perplexity:.1e}"


COLUMNS = (
    "param-\neters",
    "d_mlp",
    "per-\nplexity",
    "bits/\nbyte",
    "right",
    "loss less\nsoftmax's",
    "min.",
)
"""What the table shows."""

CAPTION = (
    "On the test text. Below the parameters: their share of those of softmax attention with "
    "relative positions, to which d_mlp matches them. Perplexity per word; of several seeds the "
    "mean, in brackets the least and the greatest. Right: tokens that are the most probable one. "
    "Loss, in nats per token, less that of softmax attention with the same positions, and its "
    "paired 95% interval over windows. Minutes of training depend on the machine. Frequencies: how "
    "often each token occurs in training."
)


if __name__ == "__main__":
    command(
        question="Which attention models a text best with as many parameters?",
        presets=presets,
        run=run,
        table=closing_table,
    )
