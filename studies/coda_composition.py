"""Does attention that can subtract answer better, and does it subtract what it should?

The quasi-attention of "Compositional De-Attention Networks" (Tay et al. 2019) gives each token a
weight between -1 and 1. It is compared with softmax attention, linear attention and HYLA on lines
of arithmetic (the paper's mathematical language understanding), and on pairs of sequences in which
it is known what of one is to be added, subtracted or ignored given the other. There, all its
composition functions and ways of centring are compared too (the paper's Tables 8 and 9).

    python studies/coda_composition.py                               # arithmetic, 10 to 15 minutes
    python studies/coda_composition.py --task signed_pairs           # 10 to 15 minutes
    python studies/coda_composition.py --preset smoke
    python studies/coda_composition.py --preset ablation             # of compositions, arithmetic
    python studies/coda_composition.py task.low=-50 task.high=50 seeds=0,1
    python studies/coda_composition.py --preset paper --device cuda

It measures how well known and held-out lines and pairs are answered, how signed attention weights
are, and whether their signs are those that were planted; how far the two functions are saturated,
over training; and it draws the matrices of single examples.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
import xarray as xr

import mechanisms
import probes
from mechanisms import QuasiAttentionConfig
from studies.coda_tasks import (
    ALL,
    TASKS,
    Alignment,
    CodaTask,
    ModelSizes,
    TaskConfig,
    coda_task,
    task_name,
)
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
from studies.training import TrainingConfig, answer, load_weights, train
from tasks import Batch, MLUConfig, SignedPairsConfig

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import RenderableType

COORDINATES = {
    "cell": "trained model",
    "task": "task",
    "model": "attention mechanism",
    "alignment": "heads: multi-head attention; networks: the paper's base model for pairs",
    "affinity": "composition function of the affinity E",
    "gate": "composition function of the dissimilarity N",
    "affinity_centring": "over what E is centred",
    "gate_centring": "over what N is centred",
    "doubled": "whether the gate is doubled",
    "learning_rate": "learning rate",
    "chosen": "whether no other learning rate gives a higher mean accuracy on id",
    "seed": "seed of the initial weights",
    "split": "id: like training; ood: numbers, or sets of tokens, that training never has together",
    "group": "operator, whether operands are one variable, or size of the signed sum",
    "train_step": "training step",
    "weights": "trained, or as they were before",
    "scale": "weights as they are, or divided by the 99th percentile of their sizes in a head",
    "place": "where a model attends: encoder, decoder, cross (the decoder asks the encoder), "
    "a (sequence A asks B), b (B asks A)",
    "layer": "layer",
    "head": "head",
    "quantity": "E, beyond -2 and 2; N, beyond -3 and 3",
    "figure": "what is measured",
}
"""Long names of the result's coordinates."""

CONDITION = (
    "model",
    "alignment",
    "affinity",
    "gate",
    "affinity_centring",
    "gate_centring",
    "doubled",
)
"""What tells models from one another; "" where there is none."""

PAPER = {"softmax": 0.761, "coda": 0.843}
"""Share of right answers on the paper's test, with numbers from -1000 to 999 (Tay et al. 2019)."""

RESAMPLES = 1000
N_MATRICES = 3  # examples whose matrices are kept


@dataclass(frozen=True, kw_only=True)
class CodaModel:
    """One model and how it is trained: what makes its run folder, a cell of the grid.

    Args:
        mechanism: one of `mechanisms.ATTENTION_VARIANTS`, or `coda`.
        composition: how CoDA composes its weights; None for the others.
        alignment: `heads`, or, of pairs, `networks`.
        n_evaluate: examples of each split for the curves; their accuracy on `id` names the best
            checkpoint.
        seed: of the initial weights.
    """

    task: TaskConfig
    mechanism: str
    composition: QuasiAttentionConfig | None
    alignment: Alignment
    sizes: ModelSizes
    training: TrainingConfig
    n_evaluate: int
    seed: int

    @property
    def name(self) -> str:
        """Its attention in short."""
        parts = [self.mechanism, "networks" if self.alignment == "networks" else ""]
        if (one := self.composition) is not None:
            doubled = "2" if one.doubled else ""
            parts += [f"{one.affinity}_{one.affinity_centring}"]
            parts += [f"{doubled}{one.gate}_{one.gate_centring}"]
        return "-".join(filter(None, parts))

    @property
    def folder_name(self) -> str:
        """The name of its run folder."""
        return f"{task_name(self.task)}-{self.name}-seed{self.seed}-{config_hash(self)}"

    @property
    def condition(self) -> dict[str, Any]:
        """What its cell is told from others by, the seed last."""
        one = self.composition
        return {
            "task": task_name(self.task),
            "model": self.mechanism,
            "alignment": self.alignment,
            "affinity": "" if one is None else one.affinity,
            "gate": "" if one is None else one.gate,
            "affinity_centring": "" if one is None else one.affinity_centring,
            "gate_centring": "" if one is None else one.gate_centring,
            "doubled": int(one is not None and one.doubled),
            "learning_rate": self.training.learning_rate,
            "seed": self.seed,
        }

    def build(self) -> torch.nn.Module:
        """The untrained model."""
        generator = torch.Generator().manual_seed(self.seed)
        return coda_task(self.task).build(
            self.sizes, self.alignment, self.mechanism, self.composition, generator
        )


@dataclass(frozen=True, kw_only=True)
class CodaStudy:
    """All settings of the study of one task.

    With heads, each of `mechanisms` is trained, `coda` with its first functions and each of
    `gate_centrings`. The ablation, of `ablated`, are CoDA with all pairs of functions (with the
    first centrings), with all pairs of centrings (with the first functions), and, if `doubled`,
    with a doubled gate; with `networks` softmax attention beside it. What is centred over a matrix
    is trained with `networks` alone.

    Args:
        task: lines or pairs.
        mechanisms: to compare: names of `mechanisms.ATTENTION_VARIANTS`, and `coda`.
        ablated: the alignments in which compositions are varied: none, `heads`, `networks`.
        affinities, gates: composition functions.
        affinity_centrings, gate_centrings: centrings; the task tells which its model allows.
        doubled: whether 2 sigmoid(N) is trained too.
        learning_rates: of which each model's is chosen, by its mean accuracy on `id`; none: that of
            `training`.
        seeds: every model is trained once for each.
        sizes: of the models.
        training: see `studies.training`.
        n_evaluate: see `CodaModel`.
        n_test: examples of each split that are answered.
        n_signs: examples of each split whose weights are looked at.

    Raises:
        ValueError: for a value that is not allowed.
    """

    task: TaskConfig
    mechanisms: tuple[str, ...] = ("softmax", "linear", "hyla", "coda")
    ablated: tuple[str, ...] = ()
    affinities: tuple[str, ...] = ("tanh",)
    gates: tuple[str, ...] = ("sigmoid",)
    affinity_centrings: tuple[str, ...] = ("none",)
    gate_centrings: tuple[str, ...] = ("none", "row")
    doubled: bool = True
    learning_rates: tuple[float, ...] = ()
    seeds: tuple[int, ...] = (0, 1)
    sizes: ModelSizes
    training: TrainingConfig
    n_evaluate: int
    n_test: int = 4000
    n_signs: int = 500

    def __post_init__(self):
        task = coda_task(self.task)
        known = {
            "mechanisms": (*mechanisms.ATTENTION_VARIANTS, "coda"),
            "ablated": task.ALIGNMENTS,
            "affinity_centrings": task.CENTRINGS,
            "gate_centrings": task.CENTRINGS,
        }
        grid = ("mechanisms", "ablated", "affinities", "gates", "affinity_centrings")
        for name in (*grid, "gate_centrings", "learning_rates", "seeds"):
            values = getattr(self, name)
            optional = name in ("mechanisms", "ablated", "learning_rates")
            if len(set(values)) < len(values) or not (values or optional):
                raise ValueError(f"{name} must be different from one another, got {values}")
            if unknown := [one for one in values if one not in known.get(name, values)]:
                allowed = ", ".join(known[name])
                raise ValueError(f"{name} must be among {allowed}, got {', '.join(unknown)}")
        for name in ("n_evaluate", "n_test", "n_signs"):
            if getattr(self, name) < 10:
                raise ValueError(f"{name} must be at least 10, got {getattr(self, name)}")
        if not self.trained_models():
            raise ValueError("mechanisms or ablated must name something, both are empty")

    def tasks(self) -> list[TaskConfig]:
        """The only one."""
        return [self.task]

    def trained_models(self) -> list[CodaModel]:
        """The cells."""
        kinds: list[tuple[Alignment, str, QuasiAttentionConfig | None]] = []
        for name in self.mechanisms:
            coda = name == "coda"
            # A cross-attention with heads has no matrix of all its queries.
            some = [one for one in self._headed() if not one.centres_matrix] if coda else [None]
            kinds.extend(("heads", name, one) for one in some)
        if "networks" in self.ablated:
            kinds.append(("networks", "softmax", None))
        for alignment in cast(Sequence[Alignment], self.ablated):
            matrix = alignment == "networks"
            some = [one for one in self._ablation() if matrix or not one.centres_matrix]
            kinds.extend((alignment, "coda", one) for one in some)
        return [
            CodaModel(
                task=self.task,
                mechanism=mechanism,
                composition=composition,
                alignment=alignment,
                sizes=self.sizes,
                training=replace(self.training, learning_rate=rate),
                n_evaluate=self.n_evaluate,
                seed=seed,
            )
            for (alignment, mechanism, composition), rate, seed in product(
                dict.fromkeys(kinds),
                self.learning_rates or (self.training.learning_rate,),
                self.seeds,
            )
        ]

    def _composition(
        self,
        *,
        affinity: str | None = None,
        gate: str | None = None,
        affinity_centring: str | None = None,
        gate_centring: str | None = None,
        doubled: bool = False,
    ) -> QuasiAttentionConfig:
        """With the first of what is not given."""
        return QuasiAttentionConfig(
            affinity=cast(Any, affinity or self.affinities[0]),
            gate=cast(Any, gate or self.gates[0]),
            affinity_centring=cast(Any, affinity_centring or self.affinity_centrings[0]),
            gate_centring=cast(Any, gate_centring or self.gate_centrings[0]),
            doubled=doubled,
        )

    def _doubled(self) -> list[QuasiAttentionConfig]:
        return [self._composition(doubled=True)] if self.doubled else []

    def _headed(self) -> list[QuasiAttentionConfig]:
        """What CoDA is compared with other mechanisms with."""
        found = [self._composition(gate_centring=one) for one in self.gate_centrings]
        return found + self._doubled()

    def _ablation(self) -> list[QuasiAttentionConfig]:
        functions = [
            self._composition(affinity=affinity, gate=gate)
            for affinity, gate in product(self.affinities, self.gates)
        ]
        centrings = [
            self._composition(affinity_centring=affinity, gate_centring=gate)
            for affinity, gate in product(self.affinity_centrings, self.gate_centrings)
        ]
        return functions + centrings + self._doubled()


# Settings

FUNCTIONS = ("tanh", "sigmoid", "arctan", "algebraic")


def presets(task: str = next(iter(TASKS))) -> dict[str, CodaStudy]:
    """The settings by name: seconds for tests, minutes for a laptop, the paper's for a GPU."""
    laptop = mlu_preset() if task == "mlu" else pairs_preset()
    gates = ("sigmoid", "tanh", "arctan", "algebraic")
    ablation = replace(
        laptop,
        mechanisms=(),
        ablated=("heads",),
        affinities=FUNCTIONS,
        gates=gates,
        affinity_centrings=("none", "row"),
        gate_centrings=("none", "row"),
        seeds=(0,),
    )
    smoke = replace(
        laptop,
        ablated=laptop.ablated[-1:],
        affinities=FUNCTIONS[:2],
        gates=gates[:2],
        affinity_centrings=("none",),
        gate_centrings=("none", "row"),
        seeds=(0,),
        sizes=ModelSizes(d_model=16, d_mlp=16, n_layers=2, n_heads=2),
        training=replace(
            laptop.training, n_steps=4, batch_size=8, warmup_steps=1, evaluate_every=2
        ),
        n_evaluate=20,
        n_test=40,
        n_signs=20,
    )
    return {"smoke": smoke, "laptop": laptop, "ablation": ablation, "paper": paper_preset(task)}


def mlu_preset() -> CodaStudy:
    """Lines with numbers from -20 to 19; a tenth of their pairs are held out."""
    return CodaStudy(
        task=MLUConfig(low=-20, high=20),
        doubled=False,
        learning_rates=(1e-3, 3e-3),
        seeds=(0,),
        sizes=ModelSizes(d_model=64, d_mlp=256, n_layers=2, n_heads=4),
        training=TrainingConfig(
            n_steps=2500,
            batch_size=64,
            learning_rate=3e-3,
            weight_decay=0.01,
            warmup_steps=200,
            evaluate_every=250,
        ),
        n_evaluate=500,
    )


def pairs_preset() -> CodaStudy:
    """Pairs with planted signs, and all compositions in the paper's base model."""
    return CodaStudy(
        task=SignedPairsConfig(),
        ablated=("networks",),
        affinities=FUNCTIONS,
        gates=("sigmoid", "tanh", "arctan", "algebraic"),
        affinity_centrings=("none", "row", "matrix"),
        gate_centrings=("none", "row", "matrix"),
        sizes=ModelSizes(d_model=64, d_mlp=64, n_layers=1, n_heads=4),
        training=TrainingConfig(
            n_steps=900,
            batch_size=128,
            learning_rate=2e-3,
            weight_decay=0.01,
            warmup_steps=100,
            evaluate_every=100,
        ),
        n_evaluate=1000,
    )


def paper_preset(task: str) -> CodaStudy:
    """For lines the paper's numbers and steps; sizes, rates and all of the pairs' are ours."""
    laptop = mlu_preset() if task == "mlu" else pairs_preset()
    mlu = task == "mlu"
    return replace(
        laptop,
        task=MLUConfig() if mlu else SignedPairsConfig(n_keys=20, n_a=4, n_b=16),
        doubled=True,
        learning_rates=(3e-4, 1e-3),
        seeds=(0, 1, 2),
        sizes=ModelSizes(
            d_model=128 if mlu else 200,
            d_mlp=512,
            n_layers=4 if mlu else 1,
            n_heads=8,
        ),
        training=replace(
            laptop.training,
            n_steps=100_000 if mlu else 20_000,
            batch_size=256,
            learning_rate=1e-3,
            warmup_steps=1000,
            evaluate_every=2000,
        ),
        n_evaluate=2000,
    )


# Training


def train_model(cell: CodaModel, *, root: Path, device: str, position: int) -> Path:
    """Train one model, or finish its training; gives its run folder."""
    task = coda_task(cell.task)
    held = {split: task.batch(split, 0, cell.n_evaluate, device) for split in task.SPLITS}
    model = cell.build().to(device)

    def evaluate(model: torch.nn.Module) -> dict[str, float]:
        figures = {}
        for split, batch in held.items():
            figures[f"{split}/accuracy"] = answered(task, model, batch).mean().item()
        if cell.composition is not None:
            some = held[task.SPLITS[0]][:50]
            saturated = saturation_of(task, model, cell, [some], resamples=1)["saturated"]
            for mean in saturated.mean(("place", "layer", "head")).stack(at=["quantity", "side"]):
                figures["saturated/{}/{}".format(*mean["at"].item())] = mean.item()
        return figures

    folder = root / "models" / cell.folder_name
    train(
        model,
        config=cell.training,
        sample=functools.partial(task.batch, "train", device=device),
        evaluate=evaluate,
        select="id/accuracy",
        folder=folder,
        identity=cell,
        seed=cell.seed,
        description=f"{task_name(cell.task)}, {cell.name}, seed {cell.seed}",
        position=position,
    )
    return folder


def answered(task: CodaTask, model: torch.nn.Module, batch: Batch[Any]) -> torch.Tensor:
    """1 for each example that the model answers right, else 0."""
    with torch.no_grad():
        return torch.cat(
            [task.correct(answer(model, part).float(), part) for part in batch.parts(500)]
        )


# What is looked at


def analyse(study: CodaStudy, cell: CodaModel, folder: Path, device: str) -> xr.DataTree:
    """Everything that is looked at in one trained model."""
    task = coda_task(cell.task)
    model, untrained = cell.build().to(device), cell.build().to(device).eval()
    load_weights(model, folder / "best.safetensors", device=device)
    model.eval()
    # Batch 0 of `id` chose the checkpoint; these are others.
    tested = {split: task.batch(split, 1, study.n_test, device) for split in task.SPLITS}
    looked_at = {
        split: list(task.batch(split, 2, study.n_signs, device).parts(250)) for split in task.SPLITS
    }
    signs = [
        xr.concat(
            [signs_of(task, one, cell, batches) for batches in looked_at.values()],
            xr.Variable("split", list(looked_at)),
            combine_attrs="drop_conflicts",
        )
        for one in (model, untrained)
    ]
    found = {
        "errors": errors_of(task, model, tested),
        "signs": xr.concat(
            signs, xr.Variable("weights", ["trained", "untrained"]), combine_attrs="override"
        ),
        "training": training_curves(task, folder),
        "costs": costs_of(model, tested[task.SPLITS[0]][:1].inputs),
    }
    if cell.composition is not None:
        last = looked_at[task.SPLITS[-1]]
        found["saturation"] = saturation_of(task, model, cell, last)
        found["matrices"] = matrices_of(task, model, cell, last[0][:N_MATRICES])
    return xr.DataTree.from_dict(found)


def errors_of(task: CodaTask, model: torch.nn.Module, tested: dict[str, Batch[Any]]) -> xr.Dataset:
    """Accuracy in each split and group, with its interval: [split, group]."""
    rows, names = [], []
    for batch in tested.values():
        right = answered(task, model, batch).double().cpu().numpy()
        groups = {name: of.cpu().numpy() for name, of in task.groups(batch).items()}
        names = list(groups)
        member = np.stack(list(groups.values()), 1).astype(float)
        size = len(right)
        drawn = np.random.default_rng(0).multinomial(size, np.full(size, 1 / size), RESAMPLES)
        with np.errstate(invalid="ignore"):
            resampled = (drawn @ (member * right[:, None])) / (drawn @ member)
            mean = (right @ member) / member.sum(0)
        rows.append((mean, *np.percentile(resampled, (2.5, 97.5), axis=0), member.sum(0)))
    about = "share of right answers"
    abouts = {
        "accuracy": about,
        "accuracy_low": f"{about}, lower 95% bound",
        "accuracy_high": f"{about}, upper 95% bound",
        "n": "number of examples",
    }
    data = {
        name: (("split", "group"), np.stack(values), {"long_name": about})
        for (name, about), values in zip(abouts.items(), zip(*rows, strict=True), strict=True)
    }
    known = task.chance()
    chance = {"long_name": "share of right answers of the most frequent one"}
    return xr.Dataset(
        {**data, "chance": ("group", [known[name] for name in names], chance)},
        coords={"split": list(tested), "group": names},
        attrs={"interval": f"percentile bootstrap over examples, 95%, {RESAMPLES} resamples"},
    )


def captured(
    task: CodaTask,
    model: torch.nn.Module,
    cell: CodaModel,
    batches: Sequence[Batch[Any]],
    hooks: Sequence[str],
) -> dict[str, xr.Dataset]:
    """What hooks say at each place: [example, layer, head, query_pos, key_pos].

    With `valid` [example, query_pos, key_pos]: the pairs that are there.
    """
    found = {}
    for place, start in task.places(cell.alignment).items():
        quantities = {
            hook: probes.Quantity(
                f"{start}hook_{hook}", dims=("example", "head", "query_pos", "key_pos")
            )
            for hook in hooks
        }
        data = probes.capture(cast(Any, model), batches, quantities)[list(hooks)]
        if "layer" not in data.dims:
            data = data.expand_dims(layer=[0])
        valid = torch.cat([task.pairs(batch)[place] for batch in batches])
        dims = ("example", "query_pos", "key_pos")
        found[place] = data.assign(valid=(dims, valid.cpu().numpy())).assign_coords(
            head=np.arange(data.sizes["head"])
        )
    return found


def signs_of(
    task: CodaTask, model: torch.nn.Module, cell: CodaModel, batches: Sequence[Batch[Any]]
) -> xr.Dataset:
    """How signed attention is, everywhere: see `probes.score_signedness`.

    Its weights as they are, and `relative` ones: weights of linear attention and HYLA have no
    limits, and those behind a gate that is nearly closed are small.
    """
    found, planted = [], [task.signs(batch) for batch in batches]
    for place, data in captured(task, model, cell, batches, ["pattern"]).items():
        pattern, valid = data["pattern"], data["valid"]
        sizes = cast(xr.DataArray, np.abs(pattern)).where(valid)
        top = sizes.quantile(0.99, ("example", "query_pos", "key_pos"), skipna=True)
        relative = pattern / top.drop_vars("quantile").clip(min=1e-12)
        scales = xr.Variable("scale", ["weights", "relative"])
        sign = None
        if place in planted[0]:
            values = torch.cat([one[place] for one in planted]).cpu().numpy()
            sign = xr.DataArray(values, dims=("example", "query_pos", "key_pos"))
        scored = probes.score_signedness(
            xr.concat([pattern, relative], scales), valid=valid, sign=sign, resamples=200
        )
        found.append(scored.expand_dims(place=[place]))
    return cast(xr.Dataset, xr.concat(found, "place", combine_attrs="drop_conflicts"))


def saturation_of(
    task: CodaTask,
    model: torch.nn.Module,
    cell: CodaModel,
    batches: Sequence[Batch[Any]],
    *,
    resamples: int = 200,
) -> xr.Dataset:
    """How much of E and N lies where the functions are flat: see `probes.score_saturation`.

    Beyond -2 and 2 of E tanh is within 0.04 of its limits, and beyond -3 and 3 of N the sigmoid
    within 0.05. `saturated` [quantity, place, layer, head, side].
    """
    limits = {"affinity": 2.0, "dissimilarity": 3.0}
    found = []
    for place, data in captured(task, model, cell, batches, list(limits)).items():
        for quantity, limit in limits.items():
            scored = probes.score_saturation(
                data[quantity], low=-limit, high=limit, valid=data["valid"], resamples=resamples
            )
            # Bins differ between quantities.
            scored = scored.drop_vars(["distribution", "bin"])
            found.append(scored.expand_dims(place=[place], quantity=[quantity]))
    return cast(xr.Dataset, xr.combine_by_coords(found, combine_attrs="drop_conflicts"))


def matrices_of(
    task: CodaTask, model: torch.nn.Module, cell: CodaModel, batch: Batch[Any]
) -> xr.Dataset:
    """E, the gate and M of some examples at one place (the paper's Figure 2).

    `affinity_matrix`, `gate_matrix`, `pattern` [example, layer, head, query_pos, key_pos], NaN
    where there is no token; `query` [example, query_pos] and `key` [example, key_pos], their words;
    the planted `sign`, if there is one.
    """
    shown = captured(task, model, cell, [batch], ["affinity", "gate", "pattern"])[task.SHOWN]
    valid = shown["valid"]
    # `affinity` and `gate` are coordinates of a result: the names of the functions.
    named = {"affinity": "affinity_matrix", "gate": "gate_matrix"}
    result = shown.drop_vars("valid").where(valid).rename(named)
    words = [task.words(batch, example) for example in range(len(batch))]
    result["query"] = (("example", "query_pos"), [one for one, _ in words])
    result["key"] = (("example", "key_pos"), [one for _, one in words])
    for name in ("query", "key"):
        result[name].attrs["long_name"] = f"word of each {name}"
    abouts = {"affinity_matrix": "E, centred", "gate_matrix": "gate of N", "pattern": "M"}
    for name, about in abouts.items():
        result[name].attrs["long_name"] = about
    planted = task.signs(batch)
    if planted:
        sign = planted[task.SHOWN].cpu().numpy()
        about = {"long_name": "planted sign"}
        result["sign"] = (("example", "query_pos", "key_pos"), sign, about)
    return result.assign_attrs(place=task.SHOWN, split=task.SPLITS[-1])


def training_curves(task: CodaTask, folder: Path) -> xr.Dataset:
    """What the log of a training says.

    `loss` [train_step], `accuracy` [train_step, split], and, of CoDA, `saturated`
    [train_step, quantity, side], the mean over places, layers and heads.
    """
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    splits = list(task.SPLITS)
    quantities, sides = ["affinity", "dissimilarity"], ["low", "high"]
    saturated = [
        [[line.get(f"saturated/{one}/{side}", np.nan) for side in sides] for one in quantities]
        for line in lines
    ]
    loss = {"long_name": "mean training loss since the step before", "units": "nats"}
    return xr.Dataset(
        {
            "loss": ("train_step", [line["loss"] for line in lines], loss),
            "accuracy": (
                ("train_step", "split"),
                [[line[f"{split}/accuracy"] for split in splits] for line in lines],
                {"long_name": "share of right answers"},
            ),
            "saturated": (
                ("train_step", "quantity", "side"),
                saturated,
                {"long_name": "share of the pairs where E or N is in the function's flat part"},
            ),
        },
        coords={
            "train_step": [line["step"] for line in lines],
            "split": splits,
            "quantity": quantities,
            "side": sides,
        },
    )


# The run


def run(study: CodaStudy, *, resources: Resources, checkpoints: tuple[Path, ...] = ()) -> Path:
    """Run the study, or finish it; gives its folder, `coda_composition-HASH`.

    Args:
        study: the settings.
        resources: where and with what.
        checkpoints: run folders of models to analyse instead of training any.

    Raises:
        RunError: a folder cannot be used, or a checkpoint is missing, damaged or of another task.
        TrainingError: a loss is not finite.
    """
    return run_grid(
        "coda_composition",
        study,
        kind=CodaModel,
        train=train_model,
        analyse=analyse,
        assemble=assemble,
        figures=draw_figures,
        resources=resources,
        checkpoints=checkpoints,
    )


def assemble(cells: list[CodaModel], trees: list[xr.DataTree]) -> xr.DataTree:
    """The models' analyses as one result: along `cell`, whose coordinates tell the condition."""
    result = join_cells(trees, cells)
    chosen = chosen_cells(result["errors"].to_dataset())
    for name, group in result.children.items():
        marks = chosen.sel(cell=group["cell"].to_numpy()).to_numpy()
        result[name] = xr.DataTree(group.to_dataset().assign_coords(chosen=("cell", marks)))
    result["summary"] = xr.DataTree(summary(result))
    describe_coordinates(result, COORDINATES)
    return result


def conditions_of(data: xr.Dataset) -> dict[tuple[Any, ...], list[int]]:
    """The numbers of the cells of each condition."""
    found: dict[tuple[Any, ...], list[int]] = {}
    for number in range(data.sizes["cell"]):
        one = data.isel(cell=number)
        found.setdefault(tuple(one[name].item() for name in CONDITION), []).append(number)
    return found


def chosen_cells(errors: xr.Dataset) -> xr.DataArray:
    """1 for each cell whose learning rate is its condition's best on `id`, over seeds, else 0."""
    on_id = errors["accuracy"].sel(split="id", group=ALL).to_numpy()
    rates = errors["learning_rate"].to_numpy()
    chosen = np.zeros(len(rates), dtype=np.int8)
    for cells in conditions_of(errors).values():
        mine = {rate: [one for one in cells if rates[one] == rate] for rate in rates[cells]}
        chosen[max(mine.values(), key=lambda some: on_id[some].mean())] = 1
    return xr.DataArray(chosen, dims="cell", coords={"cell": errors["cell"].to_numpy()})


def matches_of(signs: xr.Dataset) -> xr.DataArray:
    """Balanced accuracy of whether a token counts, with whatever sign: 1/2 by chance."""
    ignored = signs["confusion"].sel(found=0)
    counted = 1 - ignored.sel(sign=[-1, 1]).mean("sign")
    return (counted + ignored.sel(sign=0, drop=True)) / 2


def summary(result: xr.DataTree) -> xr.Dataset:
    """`mean`, `lowest` and `highest` over seeds [condition, figure], with the chosen rates.

    Figures: `learning rate`; `accuracy SPLIT`, and `accuracy SPLIT, GROUP`; `negative`, the share
    of weights that are below -0.1, over all places, layers and heads, on `ood`; and where signs are
    planted, `signs`, the balanced accuracy of those of the relative weights, of the head that
    agrees best with them on `id`, measured on `ood`, and `matches`, that of `matches_of`, of the
    head that is best at it; with ` untrained` and ` shuffled` behind them, the same of untrained
    weights, and against planted signs that were dealt out anew.
    """
    errors, signs = (
        data.isel(cell=(data["chosen"] == 1).to_numpy())
        for data in (result["errors"].to_dataset(), result["signs"].to_dataset())
    )
    figures = {"learning rate": errors["learning_rate"]}
    for split, group in product(errors["split"].to_numpy(), errors["group"].to_numpy()):
        name = f"accuracy {split}" + ("" if group == ALL else f", {group}")
        figures[name] = errors["accuracy"].sel(split=split, group=group)
    share = signs["share"].sel(weights="trained", scale="weights", split="ood")
    below = share.sel(kind=["subtracted", "partly_subtracted"]).sum("kind", skipna=False)
    figures["negative"] = below.mean(("place", "layer", "head"))
    if "confusion" in signs:
        agreements = {"signs": signs["balanced_accuracy"], "matches": matches_of(signs)}
        for (name, agreement), (suffix, weights, control) in product(
            agreements.items(),
            (
                ("", "trained", "observed"),
                (" untrained", "untrained", "observed"),
                (" shuffled", "trained", "shuffled"),
            ),
        ):
            one = agreement.sel(scale="relative", weights=weights, control=control)
            one = one.stack(where=["place", "layer", "head"])
            best = one.sel(split="id").fillna(-1).argmax("where")
            figures[f"{name}{suffix}"] = one.sel(split="ood").isel(where=best)
    groups = conditions_of(errors)
    values = {name: figure.to_numpy() for name, figure in figures.items()}
    return over_seeds(values, list(groups.values())).assign_coords(
        {
            name: ("condition", [setting[place] for setting in groups])
            for place, name in enumerate(CONDITION)
        }
    )


def draw_figures(result: xr.DataTree) -> dict[str, Figure]:
    """All figures; matplotlib is imported only here, when they are drawn."""
    from studies.coda_figures import figures

    return figures(result)


def closing_table(result: xr.DataTree) -> RenderableType:
    """The answer in one table: a row for each model."""
    from rich.box import SIMPLE
    from rich.table import Table

    from studies.coda_figures import model_name

    means, costs = result["summary"].to_dataset(), result["costs"].to_dataset()
    errors = result["errors"].to_dataset()
    task = str(errors["task"].to_numpy()[0])
    known = means["figure"].to_numpy().tolist()
    columns = {name: title for name, title in COLUMNS.items() if name in known}
    title = f"Quasi-attention and others: {task.replace('_', ' ')} (in %)"
    caption = CAPTION + (PAPER_CAPTION if task == "mlu" else SIGNS_CAPTION)
    table = Table(title=title, caption=caption, box=SIMPLE)
    table.caption_justify, table.padding, table.pad_edge = "left", (0, 1, 0, 0), False
    table.add_column("", no_wrap=True)
    for heading in columns.values():
        table.add_column(heading, justify="right", no_wrap=True)
    several = (means["lowest"] < means["highest"]).sel(figure="accuracy ood").any().item()
    if several:
        table.add_column("least", justify="right", no_wrap=True)
    if task == "mlu":
        table.add_column("paper", justify="right")
        table.add_column("weights", justify="right", no_wrap=True)
    before = means["alignment"].to_numpy()[0]
    for row in range(means.sizes["condition"]):
        one = means.isel(condition=row)
        if (alignment := one["alignment"].item()) != before:
            table.add_section()
            before = alignment
        condition = {name: one[name].item() for name in CONDITION}
        cells = [_percent(one["mean"].sel(figure=name)) for name in columns]
        if several:
            cells.append(_percent(one["lowest"].sel(figure="accuracy ood")))
        if task == "mlu":
            paper = PAPER.get(str(condition["model"]))
            same = np.all([costs[name] == value for name, value in condition.items()], axis=0)
            cells.append("" if paper is None else f"{100 * paper:.1f}")
            cells.append(f"{costs['parameters'].to_numpy()[same][0]:,.0f}")
        table.add_row(model_name(condition), *cells)
    chance = errors["chance"].isel(cell=0)
    groups = {name: name.partition(", ")[2] or ALL for name in columns if "accuracy" in name}
    least = [_percent(chance.sel(group=group)) for group in groups.values()]
    table.add_row("most frequent answer", *least)
    return table


def _percent(share: xr.DataArray) -> str:
    shown = f"{100 * share.item():.1f}"
    return "100" if shown == "100.0" else shown


COLUMNS = {
    "accuracy id": "id",
    "accuracy ood": "ood",
    "accuracy ood, +": "ood, +",
    "accuracy ood, -": "ood, -",
    "accuracy ood, *": "ood, *",
    "negative": "M<0",
    "signs": "signs",
    "signs untrained": "untr.",
    "matches": "match",
    "matches untrained": "untr.",
}
"""What the table shows: figures of `summary`, and their titles."""

CAPTION = (
    "Share of right answers on lines or pairs like those of training (id), and on such as put "
    "together what training never does (ood): means over seeds; least: the least of them on ood. "
    "M<0: share of attention weights below -0.1. "
)
PAPER_CAPTION = (
    "Paper: with numbers from -1000 to 999 and 100,000 steps; 78.8 of a universal transformer, and "
    "84.9 of an adaptive one in the work that it cites."
)
SIGNS_CAPTION = (
    "Signs: balanced accuracy of the signs of a head's weights (beyond a tenth of its largest) "
    "against the planted ones (add, subtract, ignore), of the head that is best on id, on ood; "
    "33.3 by chance. Match: that of whether a token counts at all; 50 by chance. Untr.: with "
    "untrained weights. Single: the paper's base model, with one matrix instead of heads."
)


if __name__ == "__main__":
    command(
        question="Does attention that can subtract answer better, and subtract what it should?",
        presets=presets,
        run=run,
        table=closing_table,
        tasks=tuple(TASKS),
    )
