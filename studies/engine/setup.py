"""Setups: a task, the model that learns it, its training, and the scoring of its answers."""

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
from studies.engine.papers import Reported
from studies.engine.training import answer, check_logits, cross_entropy
from studies.engine.training_config import TrainingConfig
from tasks import Batch

ALL = "all"
"""The group of all examples."""

Role = Literal["in", "out"]
"""Whether a split is in the training distribution or out of it."""

Scores = dict[str, tuple[Float[Tensor, " batch"], Float[Tensor, " batch"]]]
"""For each metric a numerator and a denominator per example; the metric is the ratio of their sums
over all examples, or over those of a group."""

References = dict[str, dict[str, dict[str, float]]]
"""Reference values, such as `chance`: `{reference: {metric: {group: value}}}`."""

Instance = TypeVar("Instance")


@functools.lru_cache(maxsize=64)
def cached(function: Callable[[Any], Instance], config: Any) -> Instance:
    """`function(config)`, cached: equal configs share one instance, such as a task.

    Args:
        function: a class or function of a config.
        config: a hashable config.

    Example:
        `cached(tasks.MLU, tasks.MLUConfig())`
    """
    return function(config)


class Task(Protocol):
    """A sampler of examples; `tasks` has many."""

    def batch(self, split: str, index: int, size: int, device: Any = "cpu") -> Batch[Any]:
        """Batch number `index` of a split; equal arguments give equal batches."""
        ...


@runtime_checkable
class FiniteTask(Protocol):
    """A task whose splits are finite."""

    def size(self, split: str) -> int:
        """The number of examples in a split."""
        ...


@runtime_checkable
class ScoringTask(Protocol):
    """A task with its own scores."""

    def score(self, output: Any, batch: Batch[Any]) -> dict[str, Tensor]:
        """Scores by name, [batch] or [batch, target]; the mean over targets counts."""
        ...


@runtime_checkable
class GroupingTask(Protocol):
    """A task whose examples fall into groups."""

    def groups(self, batch: Batch[Any]) -> dict[str, Bool[Tensor, " batch"]]:
        """Membership of the examples in each group; the same names for every batch."""
        ...


@dataclass(frozen=True)
class Metric:
    """A metric, computed as a ratio of sums over examples.

    Args:
        long_name: description for files and figures.
        better: whether `higher` or `lower` values are better.
        units: unit of the values; "1" for a share.
        percent: whether tables and figures show it in percent.
        transform: function applied to the ratio, for example `numpy.exp` for a perplexity.
        best: the value of a perfect model, where it is known. Differences that are small beside
            what a model lacks do not count (see `Claim`).

    Example:
        `Metric("share of right answers", percent=True, best=1.0)`
    """

    long_name: str
    better: Literal["higher", "lower"] = "higher"
    units: str = "1"
    percent: bool = False
    transform: Callable[[Any], Any] | None = None
    best: float | None = None

    def sign(self) -> int:
        """1 if higher values are better, else -1."""
        return 1 if self.better == "higher" else -1


@dataclass(frozen=True)
class Selection:
    """The criterion for checkpoints and tuned settings: a metric on validation examples of a split.

    Args:
        split: a split with the role `in`, or `out` if there is a `protocol`.
        metric: one of the setup's metrics.
        protocol: published source of a selection outside of the training distribution, such as
            "Csordas et al. 2021, appendix: deeper validation depths"; results record it.

    Example:
        `Selection("id", "accuracy")`
    """

    split: str
    metric: str
    protocol: str | None = None

    @property
    def key(self) -> str:
        """The key of the metric in a training log."""
        return f"{self.split}/{self.metric}"


@dataclass(frozen=True, kw_only=True)
class Setup(ABC):
    """The settings of one cell of a study: the model, its task and its training.

    A subclass is a frozen dataclass that adds its own settings. The engine draws every batch:
    training sees only `train`, `n_validation` examples of the selecting split choose checkpoints,
    and measures get other examples.

    Args:
        model: name of the mechanism that is trained.
        training: steps, batch size, learning rate, ...
        n_validation: examples of each split for training curves and checkpoint selection.
        seed: seed of the initial weights, of dropout and of the order of training examples.

    Attributes:
        task_type: the class of the task, called with the setting `task`; see `sampler`.
        metrics: the metrics by name.
        selection: the criterion for checkpoints and tuned settings.
        evaluation_batch_size: batch size where a model is scored or measured.
        reported: numbers that papers report, for these and other settings.
        depends_on_length: whether the loss of a step depends on `training.n_steps`, by annealing.

    Raises:
        ValueError: `n_validation` or `seed` is out of range, or `selection` names no split or
            metric, or a split out of distribution without a protocol.
    """

    model: str
    training: TrainingConfig
    n_validation: int = 1024
    seed: int = 0

    task_type: ClassVar[Callable[[Any], Task] | None] = None
    metrics: ClassVar[Mapping[str, Metric]] = {
        "accuracy": Metric("share of right answers", percent=True, best=1.0)
    }
    selection: ClassVar[Selection] = Selection("id", "accuracy")
    evaluation_batch_size: ClassVar[int] = 1024
    reported: ClassVar[tuple[Reported, ...]] = ()
    depends_on_length: ClassVar[bool] = False

    def __post_init__(self):
        if self.n_validation < 1:
            raise ValueError(f"n_validation must be at least 1, got {self.n_validation}")
        if not 0 <= self.seed < 2048:
            raise ValueError(f"seed must be a whole number from 0 to 2047, got {self.seed}")
        role = self.splits.get(self.selection.split)
        if role is None or self.selection.metric not in self.metrics:
            raise ValueError(
                f"selection must be one of the splits {', '.join(self.splits)} and one of the "
                f"metrics {', '.join(self.metrics)}, got {self.selection.key!r}"
            )
        if role == "out" and self.selection.protocol is None:
            raise ValueError(
                f"checkpoints must not be chosen by {self.selection.split!r}, which is out of the "
                "training distribution, unless selection.protocol is given"
            )

    @property
    def splits(self) -> Mapping[str, Role]:
        """The splits that are scored, with their roles: in or out of the training distribution."""
        return {"id": "in", "ood": "out"}

    @property
    def sign(self) -> int:
        """1 if higher values of the selecting metric are better, else -1."""
        return self.metrics[self.selection.metric].sign()

    @property
    def all_splits(self) -> tuple[str, ...]:
        """The splits that measures can draw from: by default those that are scored."""
        return tuple(self.splits)

    def models(self) -> tuple[str, ...]:
        """The allowed values of `model`; empty if all are."""
        return ()

    def check(self) -> None:
        """Check the setting `model`.

        Called before a run and not in `__post_init__`, so that `--help` need not import the models.

        Raises:
            ValueError: there is no such model.
        """
        if self.model not in (allowed := self.models() or (self.model,)):
            raise ValueError(f"model must be one of {', '.join(allowed)}, got {self.model!r}")

    def sampler(self) -> Any:
        """The `Task` that examples are drawn from: `task_type(task)`, one instance per config."""
        # From the class, because a function would become a method of the instance.
        task_type = type(self).task_type
        if task_type is None:
            raise TypeError(f"{type(self).__name__} must define `task_type` or override `sampler`")
        return cached(task_type, settings.get(self, "task"))

    @abstractmethod
    def build(self, generator: torch.Generator) -> nn.Module:
        """The untrained model; all its random numbers come from `generator`."""

    def scores(self, output: Any, batch: Batch[Any], split: str) -> Scores:
        """The numerator and denominator of each metric for each example of a batch.

        By default the scores of a `ScoringTask`; for other tasks the accuracy: 1 if the argmax is
        right at all unmasked targets.

        Args:
            output: the answer of the model, see `answer`.
            batch: the examples.
            split: the split that they are from.

        Raises:
            ValueError: the output is not [batch, pos, class], with a row for each target.
        """
        task, ones = self.sampler(), torch.ones(len(batch), device=batch.mask.device)
        if isinstance(task, ScoringTask):
            scores = task.score(output, batch)
            return {
                name: (scores[name].reshape(len(batch), -1).mean(1), ones) for name in self.metrics
            }
        check_logits(output, batch)
        right = (output.argmax(-1) == batch.targets) | ~batch.mask
        return {"accuracy": (right.all(1).float(), ones)}

    def answer(self, model: nn.Module, batch: Batch[Any]) -> Any:
        """The model's output for a batch when it is tested."""
        return answer(model, batch)

    def loss(self, model: nn.Module, batch: Batch[Any], step: int) -> Tensor:
        """The training loss at step `step`, counted from 0: a scalar."""
        return cross_entropy(answer(model, batch).float(), batch)

    def build_tested(self, generator: torch.Generator) -> nn.Module:
        """The model as it is tested and measured: same weights, but for example more steps."""
        return self.build(generator)

    def groups(self, batch: Batch[Any]) -> dict[str, Bool[Tensor, " batch"]]:
        """Membership of the examples in each group; by default the groups of a `GroupingTask`."""
        task = self.sampler()
        return task.groups(batch) if isinstance(task, GroupingTask) else {}

    def cluster(self, batch: Batch[Any]) -> Int[Tensor, " batch"] | None:
        """The unit that the bootstrap resamples, such as a shared picture; None for examples."""
        return None

    def references(self, split: str) -> References:
        """Reference values of the metrics on a split, such as chance."""
        return {}

    def paper(self) -> list[Reported]:
        """The reported numbers that apply to these settings."""
        return [number for number in self.reported if number.is_of(self)]

    def size(self, split: str) -> int | None:
        """The number of examples in a split; None if it is endless."""
        task = self.sampler()
        return task.size(split) if isinstance(task, FiniteTask) else None

    def inapplicable(self) -> frozenset[str]:
        """Full names of settings that have no effect on this model.

        They are set to the values that all cells share, so that a grid holds such a model only
        once, and claims compare it with other models at any value.
        """
        return frozenset()

    def prepare(self) -> None:
        """Make what all workers read, such as a text, before they start.

        Raises:
            FileNotFoundError: a file that the task reads is missing.
        """
        self.sampler()
