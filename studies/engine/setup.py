"""A setup: a task, the model that learns it, how it is trained, and how its answers are scored."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from studies.engine import settings
from studies.engine.reported import Reported
from studies.engine.training import TrainingConfig, answer, cross_entropy
from tasks import Batch

ALL = "all"
"""The group of all examples."""

Role = Literal["in", "out"]
"""Whether a split is like training, or outside of its distribution."""

Scores = dict[str, tuple[Float[Tensor, " batch"], Float[Tensor, " batch"]]]
"""By metric two numbers for each example: the metric is the sum of the first over that of the
second ones, of all examples, or of those of a group."""

References = dict[str, dict[str, dict[str, float]]]
"""Known values: of `chance`, say, by metric and group."""

Kept = TypeVar("Kept")


@functools.lru_cache(maxsize=64)
def kept(kind: Callable[[Any], Kept], config: Any) -> Kept:
    """`kind(config)`, made once for equal configs: a task that prepares its examples, say."""
    return kind(config)


class Task(Protocol):
    """What draws examples; `tasks` has many."""

    def batch(self, split: str, index: int, size: int, device: Any = "cpu") -> Batch[Any]:
        """Batch number `index` of a split: the same one for the same arguments."""
        ...


@runtime_checkable
class FiniteTask(Protocol):
    """A task whose splits have an end."""

    def size(self, split: str) -> int:
        """The number of examples of a split."""
        ...


@runtime_checkable
class ScoringTask(Protocol):
    """A task that says how right answers are."""

    def score(self, output: Any, batch: Batch[Any]) -> dict[str, Tensor]:
        """By name [batch], or [batch, target], of which the mean counts."""
        ...


@runtime_checkable
class GroupingTask(Protocol):
    """A task whose examples are of several kinds."""

    def groups(self, batch: Batch[Any]) -> dict[str, Bool[Tensor, " batch"]]:
        """Which examples are of which kind; the same names for every batch."""
        ...


@dataclass(frozen=True)
class Metric:
    """A figure of merit, computed as a ratio of sums over examples.

    Args:
        long_name: what it is, for files and figures.
        better: whether `higher` or `lower` values are better.
        units: its unit; "1" for a share.
        percent: whether tables and figures show it in percent.
        transform: applied to the ratio, for example `numpy.exp` for a perplexity.

    Example:
        `Metric("share of right answers", percent=True)`
    """

    long_name: str
    better: Literal["higher", "lower"] = "higher"
    units: str = "1"
    percent: bool = False
    transform: Callable[[Any], Any] | None = None

    def sign(self) -> int:
        """1 if higher values are better, else -1."""
        return 1 if self.better == "higher" else -1


@dataclass(frozen=True)
class Selection:
    """What chooses checkpoints and tuned settings: a metric on a split that measures never see.

    Args:
        split: one whose role is `in`; one `out` of distribution only with a `protocol`.
        metric: one of the setup's metrics.
        protocol: the source that selects outside of the training distribution, for example
            "Csordas et al. 2021, appendix: deeper validation depths". Results and pages repeat it.
    """

    split: str
    metric: str
    protocol: str | None = None

    @property
    def key(self) -> str:
        """Its name in a training log."""
        return f"{self.split}/{self.metric}"


@dataclass(frozen=True, kw_only=True)
class Setup(ABC):
    """The settings of one cell of a study: what is trained, on what, and how.

    A setup is a frozen dataclass with further settings of its own. The engine draws every batch:
    training sees `train` alone, `n_validation` examples of the selecting split choose checkpoints,
    and measures get others.

    Args:
        model: name of the mechanism that is trained.
        training: steps, batch size, learning rate, ...
        n_validation: examples of each split for the curves of training.
        seed: of the initial weights, of dropout and of the order of training examples.

    Attributes:
        kind: the class of the task, which is made of the setting `task`: see `sampler`.
        metrics: the figures of merit by name.
        selection: what chooses the checkpoint, and the tuned settings.
        at_once: examples that are run together where a model is scored or measured.
        reported: what a paper reports, of these settings and of others.
    """

    model: str
    training: TrainingConfig
    n_validation: int = 1024
    seed: int = 0

    kind: ClassVar[Callable[[Any], Task] | None] = None
    metrics: ClassVar[Mapping[str, Metric]] = {
        "accuracy": Metric("share of right answers", percent=True)
    }
    selection: ClassVar[Selection] = Selection("id", "accuracy")
    at_once: ClassVar[int] = 1024
    reported: ClassVar[tuple[Reported, ...]] = ()

    def __post_init__(self):
        if self.n_validation < 1:
            raise ValueError(f"n_validation must be at least 1, got {self.n_validation}")
        if not 0 <= self.seed < 1024:
            raise ValueError(f"seed must be a whole number from 0 to 1023, got {self.seed}")
        role = self.splits.get(self.selection.split)
        if role is None or self.selection.metric not in self.metrics:
            raise ValueError(
                f"selection {self.selection.key!r} must name one of the splits "
                f"{', '.join(self.splits)} and of the metrics {', '.join(self.metrics)}"
            )
        if role == "out" and self.selection.protocol is None:
            raise ValueError(
                f"checkpoints must not be chosen by {self.selection.split!r}, which is out of the "
                "training distribution, unless a published protocol is named"
            )

    @property
    def splits(self) -> Mapping[str, Role]:
        """The splits that are scored, each like training (`in`) or not (`out`)."""
        return {"id": "in", "ood": "out"}

    @property
    def sign(self) -> int:
        """1 if a higher selecting metric is better, -1 if a lower one is."""
        return self.metrics[self.selection.metric].sign()

    @property
    def all_splits(self) -> tuple[str, ...]:
        """The splits that measures can draw from: those that are scored, and further ones."""
        return tuple(self.splits)

    def models(self) -> tuple[str, ...]:
        """The names that `model` can have; none: any."""
        return ()

    def check(self) -> None:
        """Raise a ValueError if there is no such model: before a run, not where a study is defined,
        so that `--help` need not import what models are made of.
        """
        if self.model not in (allowed := self.models() or (self.model,)):
            raise ValueError(f"model must be one of {', '.join(allowed)}, got {self.model!r}")

    def sampler(self) -> Any:
        """What examples are drawn from, a `Task`: the `kind` of the setting `task`, made once."""
        # Of the class: a function would be a method of the setup.
        kind = type(self).kind
        if kind is None:
            raise TypeError(f"{type(self).__name__} must have a `kind`, or a sampler of its own")
        return kept(kind, settings.get(self, "task"))

    @abstractmethod
    def build(self, generator: torch.Generator) -> nn.Module:
        """The untrained model; all its random numbers come from `generator`."""

    def scores(self, output: Any, batch: Batch[Any], split: str) -> Scores:
        """Of each metric two numbers for each example of a batch; see `Scores`.

        What the task's own `score` gives by the metrics' names; of a task that has none, the
        accuracy: whether all targets that count are the most probable classes.
        """
        task, every = self.sampler(), torch.ones(len(batch), device=batch.mask.device)
        if isinstance(task, ScoringTask):
            scored = task.score(output, batch)
            return {
                name: (scored[name].reshape(len(batch), -1).mean(1), every) for name in self.metrics
            }
        right = (output.argmax(-1) == batch.targets) | ~batch.mask
        return {"accuracy": (right.all(1).float(), every)}

    def answer(self, model: nn.Module, batch: Batch[Any]) -> Any:
        """What a model answers to a batch where it is tested."""
        return answer(model, batch)

    def loss(self, model: nn.Module, batch: Batch[Any], step: int) -> Tensor:
        """What training minimises at update number `step`, counted from 0: a scalar."""
        return cross_entropy(answer(model, batch).float(), batch)

    def build_tested(self, generator: torch.Generator) -> nn.Module:
        """The model as it is tested and measured: with more steps, say, but the same weights."""
        return self.build(generator)

    def groups(self, batch: Batch[Any]) -> dict[str, Bool[Tensor, " batch"]]:
        """Which examples are in which group; by default what the task says, if it has groups."""
        task = self.sampler()
        return task.groups(batch) if isinstance(task, GroupingTask) else {}

    def cluster(self, batch: Batch[Any]) -> Int[Tensor, " batch"] | None:
        """What intervals are over, if not over examples: the picture that a question is about."""
        return None

    def references(self, split: str) -> References:
        """What is known of a split."""
        return {}

    def paper(self) -> list[Reported]:
        """What a paper reports of a model with these settings."""
        return [one for one in self.reported if one.is_of(self)]

    def size(self, split: str) -> int | None:
        """The number of examples of a split; None for a stream without end."""
        task = self.sampler()
        return task.size(split) if isinstance(task, FiniteTask) else None

    def inapplicable(self) -> frozenset[str]:
        """Full names of settings that mean nothing to this model.

        They get the values that all cells share, so that a grid holds such a model once, and claims
        compare it with models of any value.
        """
        return frozenset()

    def prepare(self) -> None:
        """Make or miss, once, what all workers read: a text, say. Raises FileNotFoundError."""
        self.sampler()
