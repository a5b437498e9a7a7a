"""Which router lets a modular network find the sub-tasks of its data, and where does it fail?

The claims of "Attention for Compositional Modularity" (Ostapenko et al. 2022), checked one by one:
routing is what fails out of distribution; the modules, on the best path, are excellent.

    python studies/modular_routing.py                                     # 10 to 15 minutes
    python studies/modular_routing.py --preset smoke
    python studies/modular_routing.py selection_bottlenecks=false,true objectives=sampled,all_paths
    python studies/modular_routing.py --preset paper --device cuda --scheduler tcp://HOST:8786

Networks whose router is told where to look (the structural oracle), or must find out, and one
without modules are trained on math equations, of which some combinations of operators are held
out. It measures their losses, how specialized their modules are, the loss of the best path, how
much of it a few labelled examples of an unseen task recover, and draws. What was found is told in
`studies/results/modular_routing.md`.
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
from studies.modular_claims import (
    CONDITION,
    MODULAR,
    NOT_RUN,
    as_dataset,
    cells_of,
    check_claims,
    in_words,
    selected_cells,
    summary,
)
from studies.running import (
    Resources,
    command,
    describe_coordinates,
    join_cells,
    run_grid,
)
from studies.runs import config_hash
from studies.training import TrainingConfig, load_weights, train
from tasks import Batch, MathEquationsConfig

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import RenderableType

MODELS = (*MODULAR, "monolithic")
TESTED = ("id", "ood")
AT_ONCE = 500
"""Examples that are run together: what is kept of them fits into memory."""
Objective = Literal["sampled", "all_paths"]
Pool = Literal["mlp", "operations"]

COORDINATES = {
    "cell": "trained model",
    "model": "router, or the network without modules",
    "objective": "what is minimised: a sampled path's error, or every path's by its probability",
    "selection_bottleneck": "whether the router sees one variable only",
    "functional_bottleneck": "what a module is given",
    "module_keys": "where the modules' keys come from",
    "pool": "learned modules, or true operations",
    "n_layers": "modules that work one after another",
    "n_operators": "operators in the data, |S|",
    "n_points": "training points per operator, times 2",
    "learning_rate": "learning rate",
    "seed": "seed of the initial weights",
    "split": "id: combinations of operators of training; ood: held-out ones",
    "operation": "operation that a layer should perform",
    "module": "module",
    "layer": "layer, or all of them together",
    "train_step": "training step",
    "path": "path through the modules",
    "control": "whose modules, or routing, is looked at",
    "examples": "labelled examples of a task",
    "claim": "claim of the paper",
}
"""Long names of the result's coordinates."""


@dataclass(frozen=True, kw_only=True)
class ModularSizes:
    """Sizes and training of a network.

    Args:
        n_modules, d_mlp: of the pool; the network without modules is n_modules * d_mlp wide.
        d_model, d_key: of variables and of what is matched.
        n_blocks, n_heads, d_encoder: of the encoder router's transformer.
        temperature, final_temperature: of the Gumbel softmax, at the first and at the last step.
        entropy: weight of the paths' entropy where all of them are trained on.
        training: see `studies.training`.
    """

    n_modules: int
    d_mlp: int
    d_model: int
    d_key: int
    n_blocks: int
    n_heads: int
    d_encoder: int
    temperature: float
    final_temperature: float
    entropy: float
    training: TrainingConfig


@dataclass(frozen=True, kw_only=True)
class ModularModel:
    """One network and how it is trained: what makes its run folder, a cell of the grid.

    Args:
        router: one of `MODELS`.
        n_evaluate: examples of each split for the curves; the loss on `id` names the best
            checkpoint.
        seed: of the initial weights and of what is drawn in training.

    The rest: see `mechanisms`. What does not apply to a network has its first value.
    """

    task: MathEquationsConfig
    router: str
    selection_bottleneck: bool
    objective: Objective
    functional_bottleneck: str
    keys: str
    pool: Pool
    n_layers: int
    sizes: ModularSizes
    n_evaluate: int
    seed: int

    @property
    def folder_name(self) -> str:
        """The name of its run folder."""
        size = f"S{self.task.n_operators}-C{self.task.n_points}"
        return f"{self.router}-{size}-seed{self.seed}-{config_hash(self)}"

    @property
    def condition(self) -> dict[str, Any]:
        """What its cell is told from others by, the seed last."""
        return {
            "model": self.router,
            "objective": self.objective,
            "selection_bottleneck": int(self.selection_bottleneck),
            "functional_bottleneck": self.functional_bottleneck,
            # Not `keys`: xarray would take an array with that coordinate for a mapping.
            "module_keys": self.keys,
            "pool": self.pool,
            "n_layers": self.n_layers,
            "n_operators": self.task.n_operators,
            "n_points": self.task.n_points,
            "learning_rate": self.sizes.training.learning_rate,
            "seed": self.seed,
        }

    def build(self) -> torch.nn.Module:
        """The untrained network."""
        task, sizes = task_of(self.task), self.sizes
        generator = torch.Generator().manual_seed(self.seed)
        if self.router == "monolithic":
            config = mechanisms.MonolithicConfig(
                n_variables=task.n_variables,
                d_input=task.n_features,
                d_mlp=sizes.n_modules * sizes.d_mlp,
            )
            return mechanisms.Monolithic(config, generator=generator)
        true = self.pool == "operations"
        pool = (
            mechanisms.OperationPoolConfig(names=task.operations)
            if true
            else mechanisms.MlpPoolConfig(d_mlp=sizes.d_mlp)
        )
        config = mechanisms.ModularNetworkConfig(
            n_variables=task.n_variables,
            d_input=task.n_features,
            d_model=sizes.d_model,
            n_layers=self.n_layers,
            router=self._router(task),
            n_modules=len(task.operations) if true else sizes.n_modules,
            pool=pool,
            functional_bottleneck=cast(Any, self.functional_bottleneck),
            temperature=sizes.temperature,
        )
        return mechanisms.ModularNetwork(config, generator=generator)

    def _router(self, task: tasks.MathEquations) -> Any:
        matching = mechanisms.MatchingConfig(d_key=self.sizes.d_key, keys=cast(Any, self.keys))
        if self.router == "structural_oracle":
            return mechanisms.StructuralOracleRouterConfig(
                matching=matching, variables=task.deciding[: self.n_layers]
            )
        if self.router == "cross_attention":
            return mechanisms.CrossAttentionRouterConfig(
                matching=matching, selection_bottleneck=self.selection_bottleneck
            )
        if self.router == "concatenation":
            return mechanisms.ConcatenationRouterConfig(
                matching=matching, selection_bottleneck=self.selection_bottleneck
            )
        return mechanisms.EncoderRouterConfig(
            matching=matching,
            selection_bottleneck=self.selection_bottleneck,
            n_blocks=self.sizes.n_blocks,
            n_heads=self.sizes.n_heads,
            d_mlp=self.sizes.d_encoder,
        )


@dataclass(frozen=True, kw_only=True)
class ModularStudy:
    """All settings of the study: a cell for each combination of what is a tuple.

    Args:
        task: the equations; `n_operators` and `n_points` come from the grid.
        models: those to compare, of `MODELS`.
        objectives: what is minimised: `sampled`, `all_paths`.
        selection_bottlenecks: whether routers see one variable only; not asked of the structural
            oracle, which always does.
        functional_bottlenecks: what a module is given: `oracle`, `attention`, `none`.
        keys: `direct`, `projected`, `shared`; see `mechanisms.MatchingConfig`.
        pools: `mlp`, learned modules, or `operations`, the true ones.
        n_layers: modules that work one after another.
        n_operators, n_points: |S| and C of the data.
        learning_rates: of which each condition's is chosen by its loss on `id`.
        seeds: every network is trained once for each.
        sizes: of the networks, and their training.
        n_evaluate: see `ModularModel`.
        n_test: examples of `ood` that are looked at, at most.
        adapted_to: labelled examples of an unseen task, from which its path is chosen; at most
            half of those of it that are looked at.
        memory: for the search of paths, in bytes.
    """

    task: MathEquationsConfig
    models: tuple[str, ...] = MODELS
    objectives: tuple[str, ...] = ("sampled",)
    selection_bottlenecks: tuple[bool, ...] = (False,)
    functional_bottlenecks: tuple[str, ...] = ("oracle",)
    keys: tuple[str, ...] = ("direct",)
    pools: tuple[str, ...] = ("mlp",)
    n_layers: tuple[int, ...] = (2,)
    n_operators: tuple[int, ...] = (5,)
    n_points: tuple[int, ...] = (5000,)
    learning_rates: tuple[float, ...] = (3e-4,)
    seeds: tuple[int, ...] = (0, 1, 2)
    sizes: ModularSizes
    n_evaluate: int = 1000
    n_test: int = 5000
    adapted_to: tuple[int, ...] = (1, 4, 16, 64)
    memory: int = 2**28

    def __post_init__(self):
        allowed = {
            "models": MODELS,
            "objectives": get_args(Objective),
            "functional_bottlenecks": ("oracle", "attention", "none"),
            "keys": ("direct", "projected", "shared"),
            "pools": get_args(Pool),
        }
        for name in (*allowed, "selection_bottlenecks", "n_layers", "n_operators", "n_points"):
            self._distinct(name)
        for name in ("learning_rates", "seeds"):
            self._distinct(name)
        for name, known in allowed.items():
            if unknown := [value for value in getattr(self, name) if value not in known]:
                names = ", ".join(known)
                raise ValueError(f"{name} must be among {names}, got {', '.join(unknown)}")
        for name in ("n_evaluate", "n_test"):
            if getattr(self, name) < 10:
                raise ValueError(f"{name} must be at least 10, got {getattr(self, name)}")
        if any(layers not in (1, self.task.length) for layers in self.n_layers):
            raise ValueError(f"n_layers must be 1 or {self.task.length}, got {self.n_layers}")

    def _distinct(self, name: str) -> None:
        values = getattr(self, name)
        if not values or len(set(values)) < len(values):
            raise ValueError(f"{name} must be different from one another, got {values}")

    def tasks(self) -> list[MathEquationsConfig]:
        """The tasks: one for each |S| and C."""
        return [
            replace(self.task, n_operators=operators, n_points=points)
            for operators, points in product(self.n_operators, self.n_points)
        ]

    def trained_models(self) -> list[ModularModel]:
        """The cells of the grid."""
        grid = product(
            self.tasks(),
            self.models,
            self.objectives,
            self.selection_bottlenecks,
            self.functional_bottlenecks,
            self.keys,
            self.pools,
            self.n_layers,
            self.learning_rates,
            self.seeds,
        )
        cells = []
        for task, model, objective, sees_one, functional, keys, pool, layers, rate, seed in grid:
            modular, told = model != "monolithic", model == "structural_oracle"
            training = replace(self.sizes.training, learning_rate=rate)
            cells.append(
                ModularModel(
                    task=task,
                    router=model,
                    selection_bottleneck=sees_one and modular and not told,
                    objective=cast(Any, objective if modular else self.objectives[0]),
                    functional_bottleneck=functional if modular else self.functional_bottlenecks[0],
                    keys=keys if modular else self.keys[0],
                    pool=cast(Any, pool if modular else self.pools[0]),
                    n_layers=layers if modular else self.n_layers[0],
                    sizes=replace(self.sizes, training=training),
                    n_evaluate=self.n_evaluate,
                    seed=seed,
                )
            )
        return list(dict.fromkeys(cells))


@functools.lru_cache(maxsize=64)
def task_of(config: MathEquationsConfig) -> tasks.MathEquations:
    """The sampler of a task; kept, since it makes its points once."""
    return tasks.MathEquations(config)


def presets() -> dict[str, ModularStudy]:
    """The settings by name: seconds for tests, minutes for a laptop, the paper's for a GPU.

    Beside `laptop`, which decides the first three claims, further presets, with half as many steps,
    decide one or two more: `selection` (the selection bottleneck, and all paths), `operators` (|S|
    and C), `functional`, `keys`, `one_layer` (a mixture of experts) and `true_modules`;
    `learning_rate` is that from which the others' learning rate was chosen, by the loss on `id`.
    """
    laptop = ModularStudy(
        task=MathEquationsConfig(),
        learning_rates=(3e-3,),
        sizes=ModularSizes(
            n_modules=10,
            d_mlp=64,
            d_model=64,
            d_key=32,
            n_blocks=1,
            n_heads=4,
            d_encoder=128,
            temperature=3.0,
            final_temperature=0.5,
            entropy=0.0,
            training=TrainingConfig(
                n_steps=6000,
                batch_size=256,
                learning_rate=3e-3,
                weight_decay=0.0,
                warmup_steps=100,
                evaluate_every=500,
                clip=1.0,
            ),
        ),
    )
    training = laptop.sizes.training
    shorter = replace(
        laptop,
        sizes=replace(laptop.sizes, training=replace(training, n_steps=training.n_steps // 2)),
    )
    beside = {
        "selection": replace(
            shorter,
            models=MODULAR,
            objectives=get_args(Objective),
            selection_bottlenecks=(False, True),
        ),
        "operators": replace(shorter, n_operators=(3, 5, 7, 10), n_points=(500, 5000)),
        "functional": replace(
            shorter, models=MODULAR, functional_bottlenecks=("oracle", "attention", "none")
        ),
        "keys": replace(shorter, models=MODULAR[1:], keys=("direct", "projected", "shared")),
        "one_layer": replace(
            shorter,
            models=MODULAR,
            n_layers=(1,),
            sizes=replace(shorter.sizes, n_modules=25),
        ),
        "true_modules": replace(shorter, models=MODULAR, pools=("operations",)),
        "learning_rate": replace(laptop, learning_rates=(3e-4, 1e-3, 3e-3), seeds=(10,)),
    }
    tiny = replace(
        laptop.sizes,
        n_modules=4,
        d_mlp=8,
        d_model=16,
        d_key=8,
        d_encoder=16,
        training=replace(
            laptop.sizes.training, n_steps=20, batch_size=32, warmup_steps=5, evaluate_every=10
        ),
    )
    smoke = replace(
        laptop,
        task=replace(laptop.task, n_id=40, n_ood=200),
        n_operators=(3,),
        n_points=(150,),
        seeds=(0, 1),
        sizes=tiny,
        n_evaluate=50,
        n_test=300,
        adapted_to=(1, 4),
    )
    return {"smoke": smoke, "laptop": laptop} | beside | paper_presets(laptop)


def paper_presets(laptop: ModularStudy) -> dict[str, ModularStudy]:
    """The paper's sizes: the whole grid, and its ablations at |S| = 5 and C = 5,000."""
    sizes = replace(
        laptop.sizes,
        n_modules=30,
        d_mlp=300,
        training=replace(laptop.sizes.training, n_steps=50_000, evaluate_every=2000),
    )
    ablation = replace(
        laptop, learning_rates=(3e-4,), sizes=sizes, seeds=(0, 1, 2, 3, 4), memory=2**30
    )
    grid = replace(
        ablation,
        objectives=get_args(Objective),
        selection_bottlenecks=(False, True),
        n_operators=(3, 5, 7, 10, 15),
        n_points=(150, 500, 1000, 5000, 10_000, 20_000),
    )
    return {
        "paper": grid,
        "paper-functional": replace(
            ablation, models=MODULAR, functional_bottlenecks=("oracle", "attention", "none")
        ),
        "paper-keys": replace(ablation, models=MODULAR, keys=("direct", "projected", "shared")),
        "paper-one-layer": replace(ablation, models=MODULAR, n_layers=(1,)),
        "paper-true-modules": replace(ablation, models=MODULAR, pools=("operations",)),
    }


# Training


def temperature_at(sizes: ModularSizes, step: int) -> float:
    """The temperature of update number `step`, counted from 0: geometric from first to last."""
    progress = step / max(1, sizes.training.n_steps - 1)
    return sizes.temperature * (sizes.final_temperature / sizes.temperature) ** progress


def objective_of(cell: ModularModel, model: Any, batch: Batch, step: int) -> Tensor:
    """What the training of a cell minimises."""
    if cell.router == "monolithic":
        return (model(batch.inputs) - batch.targets).square().mean()
    if cell.objective == "all_paths":
        return mechanisms.all_paths_loss(
            model, batch.inputs, batch.targets, entropy=cell.sizes.entropy
        )
    return mechanisms.sampled_path_loss(
        model, batch.inputs, batch.targets, temperature=temperature_at(cell.sizes, step)
    )


def train_model(cell: ModularModel, *, root: Path, device: str, position: int) -> Path:
    """Train one network, or finish its training; gives its run folder."""
    task = task_of(cell.task)
    model = cell.build().to(device)
    held = {
        split: task.batch(split, 0, min(cell.n_evaluate, task.size(split)), device)
        for split in TESTED
    }
    constant = task.baseline("id")

    def evaluate(model: torch.nn.Module) -> dict[str, float]:
        losses = {
            split: task.score(model(batch.inputs), batch)["squared_error"].mean().item()
            for split, batch in held.items()
        }
        # Selected by what is the greater, the better: the share of the variance explained.
        return {f"{split}/loss": loss for split, loss in losses.items()} | {
            "id/r2": 1 - losses["id"] / constant
        }

    folder = root / "models" / cell.folder_name
    train(
        model,
        config=cell.sizes.training,
        sample=functools.partial(task.batch, "train", device=device),
        evaluate=evaluate,
        select="id/r2",
        folder=folder,
        identity=cell,
        seed=cell.seed,
        objective=functools.partial(objective_of, cell),
        description=f"{cell.router}, seed {cell.seed}",
        position=position,
    )
    return folder


# What is looked at


def losses(cell: ModularModel, model: torch.nn.Module, batches: dict[str, Batch]) -> xr.Dataset:
    """Mean squared error in each split with its interval, beside that of a constant answer."""
    from scipy.stats import bootstrap

    task = task_of(cell.task)
    found = []
    for split, batch in batches.items():
        with torch.no_grad():
            answers = torch.cat([model(part.inputs) for part in batch.parts(AT_ONCE)])
        errors = task.score(answers, batch)["squared_error"].double().cpu().numpy()
        drawn = bootstrap(
            (errors,), np.mean, n_resamples=1000, method="percentile", rng=cell.seed, batch=50
        ).confidence_interval
        found.append((errors.mean(), drawn.low, drawn.high, task.baseline(split)))
    abouts = {
        "loss": "mean squared error",
        "loss_low": "mean squared error, lower 95% bound",
        "loss_high": "mean squared error, upper 95% bound",
        "constant": "mean squared error of answering the mean of the training answers",
    }
    values = zip(*found, strict=True)
    return xr.Dataset(
        {
            name: ("split", np.array(value), {"long_name": about})
            for (name, about), value in zip(abouts.items(), values, strict=True)
        },
        coords={"split": list(batches)},
        attrs={"interval": "percentile bootstrap over examples, 95%, 1000 resamples"},
    )


def routing_of(cell: ModularModel, model: torch.nn.Module, batch: Batch) -> xr.Dataset:
    """`choice` [example, layer, module], one-hot, and the wanted `operation` [example, layer].

    A network of one layer has to perform a whole combination of operations: that is its operation.
    """
    choice = probes.Quantity(
        "layers.*.hook_module_choice", dims=("example", "module"), long_name="chosen module"
    )
    data = probes.capture(cast(Any, model), batch.parts(AT_ONCE), {"choice": choice})
    wanted = batch.latents["operator"] if cell.n_layers > 1 else batch.latents["task"][:, None]
    return data[["choice"]].assign(operation=(("example", "layer"), wanted.cpu().numpy()))


def operations_of(cell: ModularModel) -> tuple[str, ...]:
    """What a layer can have to perform, by name."""
    task = task_of(cell.task)
    if cell.n_layers > 1:
        return task.operations
    return tuple(
        ", ".join(task.operations[operator] for operator in combination)
        for combination in task.combinations.tolist()
    )


def analyse(study: ModularStudy, cell: ModularModel, folder: Path, device: str) -> xr.DataTree:
    """Everything that is looked at in one trained network."""
    task = task_of(cell.task)
    model = cell.build().to(device)
    load_weights(model, folder / "best.safetensors", device=device)
    model.eval()
    sizes = {"id": task.size("id"), "ood": min(study.n_test, task.size("ood"))}
    batches = {split: task.batch(split, 0, size, device) for split, size in sizes.items()}
    found: dict[str, Any] = {
        "losses": losses(cell, model, batches),
        "training": training_curves(folder),
    }
    if cell.router == "monolithic":
        return xr.DataTree.from_dict(found)

    network = cast(mechanisms.ModularNetwork, model)
    untrained = cell.build().to(device).eval()
    scores, searched = [], []
    for split, batch in batches.items():
        routing = routing_of(cell, model, batch)
        choice = routing["choice"]
        scored = probes.score_specialization(
            choice, routing["operation"], operations=operations_of(cell), seed=cell.seed
        )
        scores.append(scored.expand_dims(split=[split]))
        paths = {
            "routed": torch.from_numpy(choice.argmax("module").to_numpy()).to(device),
            "task": batch.latents["task"],
            "memory_limit": study.memory,
            "seed": cell.seed,
        }
        best = probes.score_paths(
            network,
            batch.inputs,
            batch.targets,
            untrained=cast(mechanisms.ModularNetwork, untrained),
            **paths,
        )
        searched.append(best.expand_dims(split=[split]))
        if split == "ood":
            found["adaptation"] = probes.adapt_paths(
                network,
                batch.inputs,
                batch.targets,
                examples=study.adapted_to,
                **paths,
            )
    found["specialization"] = xr.concat(scores, "split", combine_attrs="drop_conflicts")
    found["oracle"] = xr.concat(searched, "split", join="outer", combine_attrs="drop_conflicts")
    return xr.DataTree.from_dict(found)


def training_curves(folder: Path) -> xr.Dataset:
    """What the log of a training says: `training_loss` [train_step], `loss`
    [train_step, split].
    """
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return xr.Dataset(
        {
            "training_loss": (
                "train_step",
                [line["loss"] for line in lines],
                {"long_name": "mean of what is minimised since the step before"},
            ),
            "loss": (
                ("train_step", "split"),
                [[line[f"{split}/loss"] for split in TESTED] for line in lines],
                {"long_name": "mean squared error"},
            ),
        },
        coords={"train_step": [line["step"] for line in lines], "split": list(TESTED)},
    )


# The run


def run(study: ModularStudy, *, resources: Resources, checkpoints: tuple[Path, ...] = ()) -> Path:
    """Run the study, or finish it; gives its folder, `modular_routing-HASH`.

    Args:
        study: the settings.
        resources: where and with what.
        checkpoints: run folders of networks to analyse instead of training any.

    Raises:
        RunError: a folder cannot be used, or a checkpoint is missing, damaged or of another task.
        TrainingError: a loss is not finite.
    """
    return run_grid(
        "modular_routing",
        study,
        kind=ModularModel,
        train=train_model,
        analyse=analyse,
        assemble=assemble,
        figures=draw_figures,
        resources=resources,
        checkpoints=checkpoints,
    )


def assemble(cells: list[ModularModel], trees: list[xr.DataTree]) -> xr.DataTree:
    """The networks' analyses as one result: along `cell`, whose coordinates tell the condition."""
    # Operations that only some of the networks had to perform are missing in the others.
    result = join_cells(trees, cells)
    counted = selected_cells(cells_of(result))
    result["claims"] = xr.DataTree(as_dataset(check_claims(counted)))
    result["summary"] = xr.DataTree(summary(counted))
    describe_coordinates(result, COORDINATES)
    return result


def draw_figures(result: xr.DataTree) -> dict[str, Figure]:
    """All figures; matplotlib is imported only here, when they are drawn."""
    from studies.modular_figures import figures

    return figures(result)


def closing_table(result: xr.DataTree) -> RenderableType:
    """The answer in two tables: what was measured for each condition, and each of the claims."""
    from rich.box import SIMPLE
    from rich.console import Group
    from rich.table import Table

    means = result["summary"].to_dataset()
    told = [name for name in CONDITION if len(np.unique(means[name].to_numpy())) > 1]
    measured = Table(title="Losses and routing", caption=CAPTION, box=SIMPLE, padding=(0, 1, 0, 0))
    measured.caption_justify = "left"
    measured.add_column("", min_width=13)
    columns = {name: title for name, title in COLUMNS.items() if name in means["figure"]}
    for title in columns.values():
        measured.add_column(title, justify="right", no_wrap=True)
    for row in range(min(means.sizes["condition"], MOST_ROWS)):
        one = means.isel(condition=row)
        cells = [
            ", ".join(in_words(name, one[name].item()) for name in told) or one["model"].item()
        ]
        for name in columns:
            figure = one.sel(figure=name)
            mean, low, high = (
                _short(figure[kind].item()) for kind in ("mean", "lowest", "highest")
            )
            cells.append(f"{mean}\n[{low}-{high}]" if name == "ood" else mean)
        measured.add_row(*cells)
    if means.sizes["condition"] > MOST_ROWS:
        measured.add_row("... (all are in result.nc, group summary)")

    checked = Table(title="The paper's claims", box=SIMPLE)
    for title in ("claim", "measured", "verdict"):
        checked.add_column(title)
    claims = result["claims"].to_dataset()
    run = claims["verdict"] != NOT_RUN
    for claim in claims["claim"].to_numpy()[run]:
        one = claims.sel(claim=claim)
        checked.add_row(str(claim), one["measured"].item(), one["verdict"].item())
        checked.add_section()
    left = int((~run).sum())
    if left:
        checked.caption = f"{left} further claims ask for settings that were not run."
    return Group(measured, checked)


def _short(value: float) -> str:
    """One or two digits, without needless zeros."""
    if not np.isfinite(value):
        return ""
    if value < 1e-3:
        return f"{value:.0e}".replace("e-0", "e-")
    return f"{value:.2g}".removeprefix("0")


MOST_ROWS = 60

COLUMNS = {
    "id": "ID",
    "ood": "OOD",
    "best_sample": "best",
    "null_sample": "null",
    "best_task": "by task",
    "null_task": "null",
    "specialization": "spec.",
    "collapse": "coll.",
}
"""What the table shows: figures of `studies.modular_claims.cells_of`, and their titles."""

CAPTION = (
    "Mean squared error, mean over seeds; in brackets that of the best and the worst. Best: on "
    "ood, the path with the least error of each sample; by task: the best path of each held-out "
    "task, chosen on half of its samples and scored on the other; null: the same two with "
    "untrained modules. Spec., coll.: specialization and collapse, of all layers together, on id; "
    "1 is good for both, but one module for each operation gives a collapse of log |S| / log M."
)


if __name__ == "__main__":
    command(
        question="Which router lets a modular network find the sub-tasks of its data?",
        presets=presets,
        run=run,
        table=closing_table,
    )
