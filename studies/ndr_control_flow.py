"""Do the gates and attention of a Neural Data Router draw the flow of its computation?

The claim of "The Neural Data Router" (Csordás, Irie and Schmidhuber 2021), turned into graphs that
are scored against the true computation: which column computes when, and who reads whom?

    python studies/ndr_control_flow.py                              # 15 to 20 minutes
    python studies/ndr_control_flow.py --preset smoke
    python studies/ndr_control_flow.py directions=forward models=ndr,geometric,lstm
    python studies/ndr_control_flow.py --preset paper-listops --device cuda --workers 1

It trains the Neural Data Router and baselines on expressions (table lookup; in the other presets
arithmetic or ListOps), measures their accuracy at depths within and beyond training, extracts the
control flow of those that have gates, scores it with controls, closes gates and cuts attention on
and off the graph's path to the answer, and draws. What was found is told in
`studies/results/ndr_control_flow.md`.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

import numpy as np
import torch
import xarray as xr
from torch import Tensor

import mechanisms
import probes
import tasks
from studies.running import (
    Resources,
    command,
    describe_coordinates,
    load_model_config,
    merge,
    percent,
    run_models,
)
from studies.runs import config_hash
from studies.training import TrainingConfig, load_weights, train
from tasks import ArithmeticConfig, Batch, ListOpsConfig, TableLookupConfig

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.table import Table

    from tasks import ExpressionTask

ROUTERS = ("ndr", "geometric", "abs_rel_gate", "relative_gate", "relative", "transformer")
RECURRENT = ("lstm", "bilstm", "dnc")
MODELS = ROUTERS + RECURRENT
GATED = ("ndr", "abs_rel_gate", "relative_gate")
"""The models whose gates can be read as control flow."""

TESTED = ("id", "valid", "ood")
AT_ONCE = 250
"""Examples that are run together: what is kept of them fits into memory."""

NODES = {"gate": (0.1, 0.2), "change": 0.2}
"""What makes a node of the graph, with its threshold (see `probes.extract_control_flow`).

`gate`: the gate is open, averaged over channels, of which many stay closed: an update begins at
0.2 and lasts down to 0.1 (untrained gates are at 0.05). `change`: the state changes by this share,
|h' - h| / (|h'| + |h|). A gate that stays open while the update repeats what the column holds is a
node of the first kind, not of the second.
"""

ATTENTION_THRESHOLD = 0.5
"""The smallest weight of a read: geometric attention gives it to one key of a head, hardly to two.
"""

COORDINATES = {
    "task": "direction of the table lookup, or the task",
    "model": "model",
    "seed": "seed of the initial weights",
    "split": "id: depths of training; valid: beyond, picks the checkpoint; ood: deepest",
    "depth": "depth of the expression",
    "correct": "whether the model's answer is right",
    "control": "whose graphs are scored",
    "metric": "score of the graph",
    "nodes": "what makes a node of the graph: an open gate, or a state that changes",
    "cut": "whether a cut holds for one step or until the last",
    "condition": "what is set to zero",
    "outcome": "what becomes of the answer",
    "train_step": "training step",
    "step": "step of the model",
    "pos": "column, counted from the mark before the first token",
    "head": "attention head",
    "query_pos": "column that reads",
    "key_pos": "column that is read",
}
"""Long names of the result's coordinates."""

PAPER = {
    ("forward", "ndr"): 1.00,
    ("backward", "ndr"): 1.00,
    ("forward", "relative_gate"): 0.99,
    ("backward", "relative_gate"): 0.19,
    ("arithmetic", "ndr"): 0.98,
    ("arithmetic", "lstm"): 0.74,
    ("arithmetic", "relative"): 0.77,
    ("listops", "ndr"): 0.99,
    ("listops", "lstm"): 0.71,
    ("listops", "relative"): 0.79,
    ("listops", "abs_rel_gate"): 0.90,
}
"""Test accuracies reported by Csordás et al. 2021, tables 1 to 3."""

TaskConfig = TableLookupConfig | ArithmeticConfig | ListOpsConfig
Readout = Literal["first", "last"]


@dataclass(frozen=True, kw_only=True)
class RouterSizes:
    """Sizes and training of a model of `mechanisms.NeuralDataRouterConfig.named`.

    Args:
        n_test_steps: steps that are taken when it is tested and looked at.
        initial_s_bias: what geometric attention's `s_bias` starts from; the lower, the farther a
            column sees at first.

    The rest: see there and `studies.training`.
    """

    d_model: int
    d_mlp: int
    n_heads: int
    n_steps: int
    n_test_steps: int
    dropout: float
    attention_dropout: float = 0.1
    gate_dropout: float = 0.1
    initial_s_bias: float = 0.0
    training: TrainingConfig


@dataclass(frozen=True, kw_only=True)
class RecurrentSizes:
    """Sizes and training of the LSTM, in one or both directions, and of the DNC.

    Args:
        d_hidden: width of the embedding and of the state.
        n_layers: of the LSTM; the DNC's controller has one.
        n_cells: cells of the DNC's memory.
        d_cell: width of each.
        n_read_heads: of the DNC.

    The rest: see `mechanisms` and `studies.training`.
    """

    d_hidden: int
    n_layers: int
    dropout: float
    n_cells: int = 32
    d_cell: int = 32
    n_read_heads: int = 4
    training: TrainingConfig


@dataclass(frozen=True, kw_only=True)
class NdrModel:
    """One model and how it is trained: what makes its run folder.

    Args:
        name: one of `MODELS`.
        readout: the mark, before the first or after the last token, whose column is read out;
            recurrent models always answer at the last.
        n_evaluate: examples of each split for the curves; accuracy on `valid` names the best
            checkpoint.
        seed: of the initial weights and the dropout.
    """

    task: TaskConfig
    name: str
    sizes: RouterSizes | RecurrentSizes
    readout: Readout
    n_evaluate: int
    seed: int

    @property
    def folder_name(self) -> str:
        """The name of its run folder."""
        return f"{self.name}-{condition(self.task)}-seed{self.seed}-{config_hash(self)}"

    def build(self, *, testing: bool = False) -> torch.nn.Module:
        """The untrained model, with as many steps as in training, or as when it is tested."""
        task = task_of(self.task)
        n_tokens, n_answers = len(task.vocabulary), len(task.answers)
        generator = torch.Generator().manual_seed(self.seed)
        if isinstance(self.sizes, RouterSizes):
            config = mechanisms.NeuralDataRouterConfig.named(
                cast(Any, self.name),
                d_input=n_tokens,
                d_output=n_answers,
                d_model=self.sizes.d_model,
                d_mlp=self.sizes.d_mlp,
                n_heads=self.sizes.n_heads,
                n_steps=self.sizes.n_test_steps if testing else self.sizes.n_steps,
                dropout=self.sizes.dropout,
                attention_dropout=self.sizes.attention_dropout,
                gate_dropout=self.sizes.gate_dropout,
            )
            config = replace(config, readout=self.readout)
            model = mechanisms.NeuralDataRouter(config, generator=generator)
            if isinstance(model.core.attn, mechanisms.GeometricAttention):
                torch.nn.init.constant_(model.core.attn.s_bias, self.sizes.initial_s_bias)
            return model
        width = self.sizes.d_hidden
        if self.name == "dnc":
            config = mechanisms.DncConfig(
                d_input=n_tokens,
                d_output=n_answers,
                d_embed=width,
                d_hidden=width,
                n_cells=self.sizes.n_cells,
                d_cell=self.sizes.d_cell,
                n_read_heads=self.sizes.n_read_heads,
                dropout=self.sizes.dropout,
            )
            return mechanisms.Dnc(config, generator=generator)
        config = mechanisms.LstmConfig(
            d_input=n_tokens,
            d_output=n_answers,
            d_embed=width,
            d_hidden=width,
            n_layers=self.sizes.n_layers,
            bidirectional=self.name == "bilstm",
            dropout=self.sizes.dropout,
        )
        return mechanisms.Lstm(config, generator=generator)


@dataclass(frozen=True, kw_only=True)
class NdrStudy:
    """All settings of the study.

    Args:
        task: the expressions.
        directions: of the table lookup, each a task of its own; empty for the other tasks.
        backward_readout: the mark that is read out in the backward direction, where the
            computation ends beside the `first`; everything else is read out at the last.
        models: those to compare, names of `MODELS`.
        seeds: every model is trained once for each.
        router: sizes of `ndr` and `geometric`.
        gated: sizes of `relative_gate` and `abs_rel_gate`.
        ungated: sizes of `transformer` and `relative`.
        recurrent: sizes of `lstm`, `bilstm` and `dnc`.
        n_test: examples of each split for the closing accuracy, at most.
        n_graphs: examples whose control flow is scored and cut, spread over all depths.
        n_drawn: examples for each depth beyond training whose graphs are kept and drawn.

    The rest is handed on to `NdrModel`.
    """

    task: TaskConfig
    directions: tuple[str, ...] = ()
    backward_readout: Readout = "last"
    models: tuple[str, ...] = ("ndr", "transformer")
    seeds: tuple[int, ...] = (0,)
    router: RouterSizes
    gated: RouterSizes
    ungated: RouterSizes
    recurrent: RecurrentSizes
    n_evaluate: int = 1000
    n_test: int = 2000
    n_graphs: int = 1000
    n_drawn: int = 2

    def __post_init__(self):
        for name in ("models", "seeds"):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                raise ValueError(f"{name} must be different from one another, got {values}")
        for name in ("n_evaluate", "n_test", "n_graphs"):
            if getattr(self, name) < 10:
                raise ValueError(f"{name} must be at least 10, got {getattr(self, name)}")
        if self.backward_readout not in get_args(Readout):
            raise ValueError(
                f"backward_readout must be first or last, got {self.backward_readout!r}"
            )
        if self.n_drawn < 1:
            raise ValueError(f"n_drawn must be at least 1, got {self.n_drawn}")
        if unknown := [name for name in self.models if name not in MODELS]:
            raise ValueError(f"models must be among {', '.join(MODELS)}, got {', '.join(unknown)}")
        allowed = ("forward", "backward") if isinstance(self.task, TableLookupConfig) else ()
        wrong = [direction for direction in self.directions if direction not in allowed]
        if wrong or bool(allowed) != bool(self.directions):
            raise ValueError(
                f"directions must be among {allowed} for this task, got {self.directions}"
            )

    def tasks(self) -> list[TaskConfig]:
        """The tasks: one for each direction of the table lookup."""
        if not isinstance(self.task, TableLookupConfig):
            return [self.task]
        return [replace(self.task, direction=cast(Any, way)) for way in self.directions]

    def trained_models(self) -> list[NdrModel]:
        """The models to train."""
        sizes = {
            **dict.fromkeys(("ndr", "geometric"), self.router),
            **dict.fromkeys(("relative_gate", "abs_rel_gate"), self.gated),
            **dict.fromkeys(("transformer", "relative"), self.ungated),
            **dict.fromkeys(RECURRENT, self.recurrent),
        }
        return [
            NdrModel(
                task=task,
                name=name,
                sizes=sizes[name],
                readout=self.backward_readout if condition(task) == "backward" else "last",
                n_evaluate=self.n_evaluate,
                seed=seed,
            )
            for name in self.models
            for task in self.tasks()
            for seed in self.seeds
        ]


def condition(task: TaskConfig) -> str:
    """What a task is called in the result: the direction of a table lookup, or its name."""
    if isinstance(task, TableLookupConfig):
        return task.direction
    return "arithmetic" if isinstance(task, ArithmeticConfig) else "listops"


@functools.lru_cache(maxsize=8)
def task_of(config: TaskConfig) -> ExpressionTask:
    """The sampler of a task; kept, since it makes its examples once."""
    if isinstance(config, TableLookupConfig):
        return tasks.TableLookup(config)
    if isinstance(config, ArithmeticConfig):
        return tasks.Arithmetic(config)
    return tasks.ListOps(config)


def presets() -> dict[str, NdrStudy]:
    """The settings by name: seconds for tests, minutes for a laptop, the paper's for a GPU."""
    training = TrainingConfig(
        n_steps=12_000,
        stop_at=0.995,
        batch_size=128,
        learning_rate=3e-3,
        weight_decay=0.01,
        warmup_steps=100,
        evaluate_every=500,
        beta2=0.98,
        clip=5.0,
    )
    sizes = RouterSizes(
        d_model=64,
        d_mlp=128,
        n_heads=4,
        n_steps=8,
        n_test_steps=14,
        dropout=0.2,
        attention_dropout=0.0,
        initial_s_bias=-2.0,
        training=training,
    )
    slow = replace(training, n_steps=3000, stop_at=None, learning_rate=1e-3)
    recurrent = RecurrentSizes(d_hidden=128, n_layers=1, dropout=0.1, training=slow)
    laptop = NdrStudy(
        task=TableLookupConfig(
            n_tables=8,
            n_lone=0,
            valid_depths=(6, 7),
            ood_depths=(8, 10),
            n_compositions=20_000,
            n_id=400,
            n_valid=1000,
            n_ood=2000,
            sampling="depth",
        ),
        directions=("forward", "backward"),
        router=sizes,
        gated=replace(sizes, training=slow),
        ungated=replace(sizes, n_test_steps=8, training=slow),
        recurrent=recurrent,
    )
    short = replace(
        training, stop_at=None, n_steps=20, batch_size=16, warmup_steps=5, evaluate_every=10
    )
    tiny = replace(sizes, d_model=16, d_mlp=16, n_steps=4, n_test_steps=6, training=short)
    smoke = replace(
        laptop,
        task=replace(
            laptop.task,
            n_tables=3,
            train_depth=3,
            valid_depths=(4, 4),
            ood_depths=(5, 5),
            n_compositions=150,
            n_id=20,
            n_valid=50,
            n_ood=50,
        ),
        router=tiny,
        gated=tiny,
        ungated=tiny,
        recurrent=RecurrentSizes(
            d_hidden=16,
            n_layers=1,
            dropout=0.0,
            n_cells=4,
            d_cell=4,
            n_read_heads=1,
            training=short,
        ),
        n_evaluate=20,
        n_test=50,
        n_graphs=40,
        n_drawn=1,
    )
    return {"smoke": smoke, "laptop": laptop} | paper_presets(laptop)


def paper_presets(laptop: NdrStudy) -> dict[str, NdrStudy]:
    """The paper's sizes (its appendix), a preset for each task.

    The learning rate is constant, and the best checkpoint is chosen by the deeper validation
    split every 1,000 steps.
    """

    def training(steps: int, rate: float, decay: float, clip: float, size: int = 512):
        return TrainingConfig(
            n_steps=steps,
            batch_size=size,
            learning_rate=rate,
            final_learning_rate=1.0,
            weight_decay=decay,
            warmup_steps=0,
            evaluate_every=1000,
            clip=clip,
        )

    def router(
        widths: tuple[int, int, int],
        steps: tuple[int, int],
        dropout: float,
        how: TrainingConfig,
        gate_dropout: float = 0.1,
    ) -> RouterSizes:
        d_model, d_mlp, n_heads = widths
        return RouterSizes(
            d_model=d_model,
            d_mlp=d_mlp,
            n_heads=n_heads,
            n_steps=steps[0],
            n_test_steps=steps[1],
            dropout=dropout,
            gate_dropout=gate_dropout,
            training=how,
        )

    table_lookup = replace(
        laptop,
        task=TableLookupConfig(),
        router=router((256, 512, 1), (14, 14), 0.5, training(30_000, 1.5e-4, 0.01, 5.0)),
        gated=router((256, 512, 1), (14, 14), 0.5, training(30_000, 2e-4, 0.01, 5.0)),
        ungated=router((128, 256, 4), (11, 11), 0.1, training(30_000, 1.5e-4, 0.0025, 5.0)),
        recurrent=RecurrentSizes(
            d_hidden=200,
            n_layers=1,
            dropout=0.5,
            training=training(20_000, 1e-3, 0.0, 5.0, size=256),
        ),
    )
    arithmetic = replace(
        laptop,
        task=ArithmeticConfig(),
        directions=(),
        router=router((256, 1024, 4), (15, 15), 0.5, training(100_000, 1.5e-4, 0.01, 1.0)),
        gated=router((256, 1024, 4), (15, 15), 0.5, training(100_000, 1.5e-4, 0.01, 1.0)),
        ungated=router((128, 256, 4), (11, 11), 0.5, training(200_000, 1.5e-4, 0.0025, 1.0)),
        recurrent=RecurrentSizes(
            d_hidden=200,
            n_layers=2,
            dropout=0.5,
            training=training(200_000, 1e-3, 0.0, 1.0, size=256),
        ),
    )
    listops = replace(
        laptop,
        task=ListOpsConfig(),
        directions=(),
        router=router(
            (512, 1024, 16), (20, 24), 0.1, training(100_000, 2e-4, 0.09, 1.0), gate_dropout=0.05
        ),
        gated=router((512, 2048, 16), (20, 24), 0.1, training(100_000, 2e-4, 0.09, 1.0)),
        ungated=router((256, 1024, 16), (6, 6), 0.015, training(200_000, 4e-4, 0.05, 1.0)),
        recurrent=RecurrentSizes(
            d_hidden=512,
            n_layers=4,
            dropout=0.1,
            training=training(200_000, 1e-3, 0.08, 1.0),
        ),
    )
    return {"paper": table_lookup, "paper-arithmetic": arithmetic, "paper-listops": listops}


# Training


def train_model(model_config: NdrModel, *, root: Path, device: str, position: int) -> Path:
    """Train one model, or finish its training; gives its run folder."""
    task = task_of(model_config.task)
    model = model_config.build().to(device)
    sizes = model_config.sizes
    held = {split: task.batch(split, 0, model_config.n_evaluate, device) for split in TESTED[:2]}
    more = {"n_steps": sizes.n_test_steps} if isinstance(sizes, RouterSizes) else {}

    def evaluate(model: torch.nn.Module) -> dict[str, float]:
        return {
            f"{split}/accuracy": task.score(model(batch.inputs, **more), batch)["accuracy"]
            .mean()
            .item()
            for split, batch in held.items()
        }

    folder = root / "models" / model_config.folder_name
    train(
        model,
        config=sizes.training,
        sample=functools.partial(task.batch, "train", device=device),
        evaluate=evaluate,
        select="valid/accuracy",
        folder=folder,
        identity=model_config,
        seed=model_config.seed,
        description=f"{model_config.name}, {condition(model_config.task)}",
        position=position,
    )
    return folder


# What is looked at


def accuracy(model: torch.nn.Module, task: ExpressionTask, size: int, device: str) -> xr.Dataset:
    """Share of right answers in each split and at each depth, with exact 95% intervals."""
    from transformer_lens.utilities.statistics import success_rate_ci

    right: dict[str, dict[str | int, list[bool]]] = {"split": {}, "depth": {}}
    for split in TESTED:
        batch = task.batch(split, 0, min(size, task.size(split)), device)
        with torch.no_grad():
            logits = torch.cat([model(part.inputs) for part in batch.parts(AT_ONCE)])
        hits = (task.score(logits, batch)["accuracy"] > 0).tolist()
        right["split"][split] = hits
        for depth, hit in zip(batch.latents["depth"].tolist(), hits, strict=True):
            right["depth"].setdefault(depth, []).append(hit)
    bounds = {"": "", "_low": ", lower 95% bound", "_high": ", upper 95% bound"}
    result = xr.Dataset(
        coords={"split": list(TESTED), "depth": sorted(cast(Any, right["depth"]))},
        attrs={"examples": size, "interval": "exact 95% (Clopper-Pearson) over examples"},
    )
    for dim, name in (("split", "accuracy"), ("depth", "accuracy_at_depth")):
        found = [success_rate_ci(right[dim][key]) for key in result[dim].to_numpy().tolist()]
        values = np.array([(one.point_estimate, one.ci_low, one.ci_high) for one in found])
        for place, (suffix, about) in enumerate(bounds.items()):
            attrs = {"long_name": f"share of right answers{about}"}
            result[name + suffix] = (dim, values[:, place], attrs)
    return result


def spread_over_depths(task: ExpressionTask, size: int, device: str) -> Batch:
    """Examples of all test splits in one batch, about equally many of each depth."""
    parts = [task.batch(split, 0, min(size, task.size(split)), device) for split in TESTED]
    joined = Batch(
        inputs=_stack([part.inputs for part in parts]),
        targets=torch.cat([part.targets for part in parts]),
        mask=torch.cat([part.mask for part in parts]),
        latents={name: _stack([part.latents[name] for part in parts]) for name in parts[0].latents},
    )
    depth = joined.latents["depth"]
    places = [(depth == one).nonzero()[:, 0] for one in depth.unique()]
    chosen = torch.cat([place[: max(1, size // len(places))] for place in places])
    return Batch(
        inputs=joined.inputs[chosen],
        targets=joined.targets[chosen],
        mask=joined.mask[chosen],
        latents={name: values[chosen] for name, values in joined.latents.items()},
    )


def true_dataflow(batch: Batch, readout: Readout) -> xr.Dataset:
    """The true computation over the model's columns, as `probes.score_control_flow` takes it.

    Column 0 is the mark before the first token, and that after the last one stands behind the
    sequence. The mark that is read out takes the root's value, one level later.
    """
    latents = {name: values.cpu().numpy() for name, values in batch.latents.items()}
    n, width = batch.inputs.shape
    rows = np.arange(n)
    root = latents["root"] + 1
    end = latents["length"] + 1 if readout == "last" else np.zeros_like(root)
    to_end = np.stack([root, end], -1)[:, None]
    edges = np.concatenate([_shifted(latents["edges"]), to_end], axis=1)
    used = np.concatenate([latents["edge_used"], np.ones((n, 1), dtype=bool)], axis=1)

    level, group = (np.full((n, width + 2), -1) for _ in range(2))
    group[:, 1:-1] = latents["node"]
    example, node = np.nonzero(latents["node_token"] >= 0)
    level[example, latents["node_token"][example, node] + 1] = latents["node_depth"][example, node]
    level[rows, end] = level[rows, root] + 1
    group[rows, end] = latents["node"].max(1) + 1
    return xr.Dataset(
        {
            "edges": (("example", "edge", "end"), edges),
            "used": (("example", "edge"), used),
            "level": (("example", "pos"), level),
            "group": (("example", "pos"), group),
            "readout": ("example", end),
            "root": ("example", root),
            "depth": ("example", latents["depth"]),
        }
    )


class StateChange:
    """The share by which each step changes each column's state, reduced inside the hooks."""

    def __init__(self):
        self._before = torch.empty(0)

    def before(self, h: Tensor) -> Tensor:
        """Remember the state [batch, pos, d_model]; its norm is kept, [batch, pos]."""
        self._before = h
        return h.norm(dim=-1)

    def after(self, h: Tensor) -> Tensor:
        """|h' - h| / (|h'| + |h|), in 0..1, [batch, pos]."""
        whole = h.norm(dim=-1) + self._before.norm(dim=-1)
        return (h - self._before).norm(dim=-1) / whole.clamp(min=1e-12)


def capture_columns(model: torch.nn.Module, batch: Batch) -> xr.Dataset:
    """What the graphs are made of, and the answers.

    `gate`, `change` [example, step, pos]; `attention` [example, step, head, query_pos, key_pos];
    `valid` [example, pos]; `answer` [example].
    """
    state = StateChange()
    column = ("example", "pos")
    quantities = {
        "gate": probes.Quantity(
            "blocks.*.hook_gate",
            dims=column,
            reduce=lambda gate: gate.mean(-1),
            long_name="gate, averaged over channels",
        ),
        "norm": probes.Quantity("blocks.*.hook_resid_pre", dims=column, reduce=state.before),
        "change": probes.Quantity(
            "blocks.*.hook_resid_post",
            dims=column,
            reduce=state.after,
            long_name="share by which the step changes the state",
        ),
        "attention": probes.Quantity(
            "blocks.*.attn.hook_pattern",
            dims=("example", "head", "query_pos", "key_pos"),
            long_name="attention weight",
        ),
        "answer": probes.Quantity(
            None, dims=("example",), reduce=lambda logits: logits[:, 0].argmax(-1)
        ),
    }
    data = probes.capture(cast(Any, model), batch.parts(AT_ONCE), quantities)
    data = data[["gate", "change", "attention", "answer"]].rename(layer="step")
    length = batch.latents["length"].cpu().numpy()
    columns = np.arange(data.sizes["pos"])
    return data.assign(valid=(column, columns <= length[:, None] + 1))


def graphs_of(columns: xr.Dataset, nodes: str) -> xr.Dataset:
    """The graphs whose nodes are of this kind, one of `NODES`."""
    return probes.extract_control_flow(
        columns[nodes],
        columns["attention"],
        columns["valid"],
        gate_threshold=cast(Any, NODES[nodes]),
        attention_threshold=ATTENTION_THRESHOLD,
    )


def graphs_as_dense(columns: xr.Dataset, nodes: str, graphs: xr.Dataset) -> xr.Dataset:
    """Graphs of another model of the same examples, with as many nodes and as strong a selection.

    An untrained model's gates are all nearly closed and its attention is spread: at the thresholds
    of a trained one its graphs would be empty, and no control. Its thresholds are the quantiles
    at which the same share of cells are nodes, and of attention weights are read.
    """
    valid = columns["valid"].to_numpy()
    cells = np.broadcast_to(valid[:, None], columns[nodes].shape)
    share = graphs["update"].to_numpy()[cells].mean()
    pairs = valid[:, :, None] & valid[:, None, :] & ~np.eye(valid.shape[1], dtype=bool)
    pairs = np.broadcast_to(pairs[:, None, None], columns["attention"].shape)
    reads = (graphs["head"] >= 0).sum().item()
    candidates = graphs["update"].sum().item() * columns.sizes["head"] * (valid.sum(1).mean() - 1)
    weights = columns["attention"].to_numpy()[pairs]
    return probes.extract_control_flow(
        columns[nodes],
        columns["attention"],
        columns["valid"],
        gate_threshold=float(np.quantile(columns[nodes].to_numpy()[cells], 1 - share)),
        attention_threshold=float(np.quantile(weights, 1 - reads / max(candidates, 1))),
    )


def analyse(study: NdrStudy, model_config: NdrModel, folder: Path, device: str) -> xr.DataTree:
    """Everything that is looked at in one trained model."""
    task = task_of(model_config.task)
    model = model_config.build(testing=True).to(device)
    load_weights(model, folder / "best.safetensors", device=device)
    model.eval()
    found = {
        "accuracy": accuracy(model, task, study.n_test, device),
        "training": training_curves(folder),
    }
    if model_config.name in GATED:
        untrained = model_config.build(testing=True).to(device).eval()
        found |= analyse_control_flow(study, model_config, model, untrained, device)
    return xr.DataTree.from_dict(found)


def analyse_control_flow(
    study: NdrStudy,
    model_config: NdrModel,
    model: torch.nn.Module,
    untrained: torch.nn.Module,
    device: str,
) -> dict[str, xr.Dataset]:
    """Graphs of a model with gates: their scores, what cuts do, and some of them to draw."""
    task, seed = task_of(model_config.task), model_config.seed
    batch = spread_over_depths(task, study.n_graphs, device)
    columns, control = capture_columns(model, batch), capture_columns(untrained, batch)
    targets = batch.targets[:, 0].cpu()
    truth = true_dataflow(batch, model_config.readout)
    truth["correct"] = ("example", columns["answer"].to_numpy() == targets.numpy())
    shown = beyond_training(batch, model_config.task, study.n_drawn)

    found, scores, cuts = {}, [], []
    for nodes in NODES:
        graphs = graphs_of(columns, nodes)
        scored = probes.score_control_flow(
            graphs,
            truth,
            untrained=graphs_as_dense(control, nodes, graphs),
            by=("depth", "correct"),
            routes=None if isinstance(model_config.task, TableLookupConfig) else 1,
            seed=seed,
        )
        scores.append(scored.drop_vars("example_score").assign_coords(nodes=nodes))
        for lasting, cut in ((False, "one step"), (True, "lasting")):
            broken = probes.cut(
                cast(Any, model),
                batch.inputs,
                graphs,
                readout=truth["readout"],
                gates="blocks.*.hook_gate",
                attention="blocks.*.attn.hook_pattern",
                answer=lambda logits: logits[:, 0].argmax(-1),
                targets=targets,
                lasting=lasting,
                seed=seed,
            )
            broken = broken[["rate", "rate_low", "rate_high", "trials"]]
            cuts.append(broken.expand_dims(nodes=[nodes], cut=[cut]))
        found[f"graphs/{nodes}"] = graphs_to_keep(graphs, shown)
    found["control_flow"] = xr.concat(scores, "nodes", combine_attrs="drop_conflicts")
    found["cuts"] = xr.combine_by_coords(cuts, combine_attrs="drop_conflicts")
    found["examples"] = examples_to_draw(
        columns[["gate", "change", "attention"]].isel(example=shown),
        task,
        batch,
        shown,
        columns["answer"],
    )
    return found


def beyond_training(batch: Batch, task: TaskConfig, n: int) -> list[int]:
    """The first `n` examples of the deepest expressions of training, and of each depth beyond."""
    depth = batch.latents["depth"]
    depths = [one for one in depth.unique().tolist() if one >= task.train_depth]
    return [place for one in depths for place in (depth == one).nonzero()[:n, 0].tolist()]


def examples_to_draw(
    data: xr.Dataset, task: ExpressionTask, batch: Batch, shown: list[int], answers: xr.DataArray
) -> xr.Dataset:
    """Gates and attention of some examples, with what stands in each column."""
    names = []
    for example in shown:
        ids = [i for i in batch.inputs[example].tolist() if i >= 0]
        marked = ["BOS", *(task.vocabulary[i] for i in ids), "EOS"]
        names.append(marked + [""] * (data.sizes["pos"] - len(marked)))
    about = {
        "token": (("example", "pos"), names, "what stands in the column"),
        "target": (
            "example",
            [task.answers[int(batch.targets[one, 0])] for one in shown],
            "right answer",
        ),
        "answer": (
            "example",
            [task.answers[int(answer)] for answer in answers.to_numpy()[shown]],
            "the model's answer",
        ),
        "depth": ("example", batch.latents["depth"][shown].cpu().numpy(), "depth"),
    }
    return data.assign({k: (dims, v, {"long_name": name}) for k, (dims, v, name) in about.items()})


def graphs_to_keep(graphs: xr.Dataset, shown: list[int]) -> xr.Dataset:
    """The graphs of some examples, numbered anew."""
    number = {example: place for place, example in enumerate(shown)}
    of_edge = graphs["edge_example"].to_numpy()
    kept = graphs.isel(example=shown, edge=np.isin(of_edge, shown))
    renumbered = [number[example] for example in kept["edge_example"].to_numpy().tolist()]
    kept["edge_example"] = ("edge", renumbered, graphs["edge_example"].attrs)
    return kept


def training_curves(folder: Path) -> xr.Dataset:
    """What the log of a training says: loss [train_step], accuracy [train_step, split]."""
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    splits = list(TESTED[:2])
    return xr.Dataset(
        {
            "loss": (
                "train_step",
                [line["loss"] for line in lines],
                {"long_name": "mean training loss since the step before", "units": "nats"},
            ),
            "accuracy": (
                ("train_step", "split"),
                [[line[f"{split}/accuracy"] for split in splits] for line in lines],
                {"long_name": "share of right answers"},
            ),
        },
        coords={"train_step": [line["step"] for line in lines], "split": splits},
    )


def _stack(tensors: list[Tensor]) -> Tensor:
    """Tensors one after another, padded behind the end to one shape: with -1, or False."""
    shape = [max(sizes) for sizes in zip(*(one.shape[1:] for one in tensors), strict=True)]
    padded = []
    for one in tensors:
        fill = False if one.dtype == torch.bool else -1
        place = one.new_full((len(one), *shape), fill)
        place[(slice(None), *(slice(size) for size in one.shape[1:]))] = one
        padded.append(place)
    return torch.cat(padded)


def _shifted(edges: np.ndarray) -> np.ndarray:
    """Positions of tokens as columns; -1 stays padding."""
    return np.where(edges >= 0, edges + 1, -1)


# The run


def run(study: NdrStudy, *, resources: Resources, checkpoints: tuple[Path, ...] = ()) -> Path:
    """Run the study, or finish it; gives its folder, `ndr_control_flow-HASH`.

    Beside the result and the figures, `graphs/` holds the drawn examples' graphs as GraphML and as
    node-link JSON.

    Args:
        study: the settings.
        resources: where and with what.
        checkpoints: run folders of models to analyse instead of training any.

    Raises:
        RunError: a folder cannot be used, or a checkpoint is missing, damaged or of another task.
        TrainingError: a loss is not finite.
    """
    loaded = [load_model_config(place, NdrModel, study.tasks()) for place in checkpoints]
    models = loaded or study.trained_models()
    folder = run_models(
        "ndr_control_flow",
        identity={"study": study, "checkpoints": loaded},
        models=models,
        train=train_model,
        analyse=functools.partial(analyse, study),
        assemble=functools.partial(assemble, models),
        figures=draw_figures,
        seed=study.seeds,
        resources=resources,
        checkpoints=checkpoints,
    )
    if not (folder / "graphs").exists():
        with xr.open_datatree(folder / "result.nc", engine="h5netcdf") as result:
            export_graphs(result, folder / "graphs")
    return folder


def assemble(models: list[NdrModel], trees: list[xr.DataTree]) -> xr.DataTree:
    """The models' analyses as one result; each graph's table has a group of its own."""
    places = [{"task": condition(one.task), "model": one.name, "seed": one.seed} for one in models]
    tables = {}
    for place, tree in zip(places, trees, strict=True):
        if "graphs" in tree.children:
            path = "graphs/" + "/".join(str(value) for value in place.values())
            for nodes, graphs in tree["graphs"].children.items():
                tables[f"{path}/{nodes}"] = graphs.to_dataset()
            del tree["graphs"]
    result = merge(trees, places)
    chance = {condition(one.task): task_of(one.task).chance for one in models}
    result["accuracy"] = result["accuracy"].to_dataset()
    result["accuracy"]["chance"] = xr.DataArray(
        [chance[str(task)] for task in result["accuracy"]["task"].to_numpy()],
        dims="task",
        attrs={"long_name": "accuracy of guessing"},
    )
    for path, table in tables.items():
        result[path] = xr.DataTree(table)
    describe_coordinates(result, COORDINATES)
    return result


def export_graphs(result: xr.DataTree, folder: Path) -> None:
    """Write every kept graph, as GraphML and as node-link JSON: all of them, or no folder."""
    if "graphs" not in result.children:
        return
    part = folder.with_name(f".{folder.name}")
    part.mkdir(parents=True, exist_ok=True)
    for group in result["graphs"].leaves:
        _, task, model, seed, nodes = Path(group.path).parts[1:]
        graphs = group.to_dataset()
        for example in range(graphs.sizes["example"]):
            graph = probes.to_networkx(graphs, example)
            place = part / f"{model}-{task}-seed{seed}-{nodes}-{example}"
            probes.write_graphml(graph, place.with_suffix(".graphml"))
            probes.write_node_link(graph, place.with_suffix(".json"))
    part.rename(folder)


def draw_figures(result: xr.DataTree) -> dict[str, Figure]:
    """All figures; matplotlib is imported only here, when they are drawn."""
    from studies.ndr_figures import figures

    return figures(result)


def closing_table(result: xr.DataTree) -> Table:
    """The answer in one table: a column for each task and model."""
    from rich.box import SIMPLE
    from rich.table import Table

    from studies.ndr_figures import deepest_trained

    scores, deepest = result["accuracy"].to_dataset(), deepest_trained(result)
    columns = [
        (str(task), str(model))
        for task in scores["task"].to_numpy()
        for model in scores["model"].to_numpy()
    ]
    table = Table(title="Accuracy and control flow (in %)", caption=CAPTION)
    table.box, table.caption_justify = SIMPLE, "left"
    table.add_column("")
    for task, model in columns:
        table.add_column(f"{model}\n{task}", justify="right")

    def row(label: str, data: xr.Dataset, name: str) -> None:
        cells = []
        for task, model in columns:
            here = task in data["task"].to_numpy() and model in data["model"].to_numpy()
            cells.append(percent(data.sel(task=task, model=model), name) if here else "")
        table.add_row(label, *cells)

    row("right, id", scores.sel(split="id"), "accuracy")
    for depth in scores["depth"].to_numpy():
        if depth > deepest:
            row(f"  depth {depth}", scores.sel(depth=depth), "accuracy_at_depth")
    paper = [PAPER.get(column) for column in columns]
    table.add_row("  the paper", *("" if one is None else f"{100 * one:.0f}" for one in paper))
    chance = [float(scores["chance"].sel(task=task)) for task, _ in columns]
    table.add_row("  chance", *(f"{100 * one:.1f}" for one in chance))
    if "control_flow" not in result.children:
        return table
    flow = result["control_flow"].to_dataset().sel(depth="all", correct="all")
    for nodes, title in (("gate", "open gates"), ("change", "changes")):
        table.add_section()
        table.add_row(title)
        for metric, label in (("f1", "edges, F1"), ("order", "in order"), ("tau", "tau x 100")):
            one = flow.sel(nodes=nodes, metric=metric)
            row(f" {label}", one.sel(control="trained"), "score")
            for control in ("shuffled", "untrained"):
                row(f"  {control}", one.sel(control=control), "score")
    cuts = result["cuts"].to_dataset().sel(outcome="broken", nodes="change", cut="lasting")
    for kind, title in (("node", "closed gate"), ("edge", "cut read")):
        table.add_section()
        table.add_row(title)
        for place, label in (
            (f"{kind} on the path", "on path"),
            (f"{kind} off the path", "off path"),
            (f"no {kind}", "elsewhere"),
        ):
            row(f"  {label}", cuts.sel(condition=place), "rate")
    return table


CAPTION = (
    "Right: share of right answers at depths of training (id) and at each depth beyond; the paper: "
    "its test, at its size. The graph's nodes are columns at steps where their gate is open, or "
    "where their state changes. Edges: who reads whom, by attention, against the true dataflow; in "
    "order: share of dependencies whose source is done first; tau: of first update and true depth; "
    "shuffled: the same graphs, columns permuted; untrained: as many nodes. Closed gate, cut read: "
    "how often a right answer becomes wrong when, from one node (change) on, the gate stays closed "
    "or the attention to one column zero. Brackets: 95% intervals over examples, or the range of "
    "several seeds."
)


if __name__ == "__main__":
    command(
        question="Do gates and attention of a Neural Data Router draw its computation?",
        presets=presets,
        run=run,
        table=closing_table,
    )
