"""A small study that trains in a second: which of four numbers is the largest?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import xarray as xr
from torch import nn

from studies.engine import (
    ALL,
    Claim,
    Metric,
    Preset,
    Setup,
    Study,
    TrainedIf,
    TrainingConfig,
    metric,
)
from tasks import Batch

SPLITS = ("train", "id", "ood")


@dataclass(frozen=True)
class LargestConfig:
    """The config of `Largest`.

    Args:
        n: how many numbers an example has.
        shift: added to the numbers of `ood`.
        size: examples per split; 0: endless.
    """

    n: int = 4
    shift: float = 0.5
    size: int = 0


class Largest:
    """The task. It records all batches that are drawn."""

    def __init__(self, config: LargestConfig):
        self.config = config

    def batch(self, split, index, size, device="cpu"):
        if self.config.size and split != "train":
            numbers = torch.arange(index * size, (index + 1) * size) % self.config.size
            inputs = torch.cat([self._draw(split, int(number), 1) for number in numbers])
        else:
            inputs = self._draw(split, index, size)
            numbers = torch.full((size,), index)
        mask = torch.ones(size, 1, dtype=torch.bool)
        latents = {"number": numbers, "position": inputs.argmax(-1)[:, 0]}
        return Batch(inputs, inputs.argmax(-1), mask, latents).to(device)

    def _draw(self, split, index, size):
        seed = 3 * (index % 2**32) + SPLITS.index(split)
        generator = torch.Generator().manual_seed(seed + index // 2**30 * 7919)
        shift = self.config.shift * (split == "ood")
        return torch.randn(size, 1, self.config.n, generator=generator) + shift


@dataclass(frozen=True, kw_only=True)
class ToySetup(Setup):
    """A multi-layer perceptron, or a linear model.

    Args:
        model: `mlp`, or `linear`, to which width and dropout do not apply.
        task: the task.
        width: number of hidden units.
        dropout: dropout rate of the hidden units.
    """

    task: LargestConfig = LargestConfig()
    width: int = 8
    dropout: float = 0.1

    metrics: ClassVar = {
        "accuracy": Metric("share of right answers", percent=True),
        "loss": Metric("mean loss", better="lower", units="nats"),
    }
    evaluation_batch_size: ClassVar = 64

    def models(self):
        return ("mlp", "linear")

    def inapplicable(self):
        return frozenset({"width", "dropout"} if self.model == "linear" else ())

    def sampler(self):
        return SAMPLERS.setdefault(self.task, Largest(self.task))

    def size(self, split):
        return self.task.size or None

    def build(self, generator):
        n = self.task.n
        with torch.random.fork_rng():
            torch.manual_seed(int(torch.randint(2**31, (), generator=generator)))
            if self.model == "linear":
                return nn.Sequential(nn.Linear(n, n))
            hidden = nn.Linear(n, self.width)
            drop = nn.Dropout(self.dropout)
            return nn.Sequential(hidden, nn.ReLU(), drop, nn.Linear(self.width, n))

    def scores(self, output, batch, split):
        ones = torch.ones(len(batch))
        loss = nn.functional.cross_entropy(output[:, 0], batch.targets[:, 0], reduction="none")
        right = (output.argmax(-1) == batch.targets)[:, 0].float()
        return {"accuracy": (right, ones), "loss": (loss, ones)}

    def groups(self, batch):
        return {"first": batch.latents["position"] == 0}

    def references(self, split):
        return {"chance": {"accuracy": {ALL: 1 / self.task.n}}}


SAMPLERS: dict[LargestConfig, Largest] = {}


@dataclass(frozen=True)
class Weights:
    """The mean magnitude of the first layer's weights, trained and untrained.

    Args:
        n: examples for the mean input.
    """

    n: int = 20

    def __call__(self, trained):
        batch = trained.batch("id", self.n)
        values = [
            float(model[0].weight.detach().abs().mean())
            for model in (trained.model, trained.untrained)
        ]
        return xr.Dataset(
            {
                "size": ("control", values, {"long_name": "mean size of weights"}),
                "input": ((), float(batch.inputs.mean()), {"long_name": "mean input"}),
            },
            {"control": ["trained", "untrained"]},
        )


def only_mlp(trained):
    """The width, which only one of the models has."""
    if trained.setup.model != "mlp":
        return None
    return xr.Dataset({"hidden": ((), trained.setup.width, {"long_name": "width"})})


TRAINING = TrainingConfig(
    n_steps=40,
    batch_size=16,
    learning_rate=1e-2,
    weight_decay=0.1,
    warmup_steps=5,
    evaluate_every=10,
    keep_at=(10, 30),
)

TOY = Study(
    name="toy",
    question="Which is the largest?",
    setup=ToySetup(model="mlp", training=TRAINING, n_validation=100),
    grids=({"model": ("mlp", "linear"), "seed": (0, 1)},),
    presets={
        "wide": Preset(changes="width=16 weights.n=30"),
        "rates": Preset(changes="training.learning_rate=1e-3,1e-2"),
    },
    measures={"weights": Weights(), "hidden": only_mlp},
    along_training=("weights",),
    tuned=("training.learning_rate",),
    trained=TrainedIf(reaches=0.3),
    claims=(
        Claim(
            statement="hidden units help",
            source="ours",
            reading=metric("accuracy", "id"),
            of={"model": "mlp"},
            exceeds={"model": "linear"},
        ),
    ),
)
