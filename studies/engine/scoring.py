"""Scoring of models: the metrics of a setup, by split and group, with bootstrap intervals."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
import xarray as xr
from jaxtyping import Bool, Float, Int
from torch import nn

import probes
from studies.engine.fairness import late_gain
from studies.engine.folders import RunError
from studies.engine.results import described
from studies.engine.setup import ALL, Setup
from studies.engine.training_config import preference
from tasks import Batch

if TYPE_CHECKING:
    from studies.engine.trained import Trained


@dataclass(frozen=True)
class Scored:
    """The scores of all examples of a split; each metric is a ratio of sums over examples.

    Attributes:
        metrics: names of the metrics.
        numerators, denominators: the terms of the two sums.
        groups: names of the groups; the first has all examples.
        member: whether each example is in each group.
        cluster: the unit that the bootstrap resamples: the example itself, or the picture that
            several examples share.
    """

    metrics: tuple[str, ...]
    numerators: Float[np.ndarray, "example metric"]
    denominators: Float[np.ndarray, "example metric"]
    groups: tuple[str, ...]
    member: Bool[np.ndarray, "example group"]
    cluster: Int[np.ndarray, " example"]

    def interval(self, setup: Setup, *, resamples: int = 1000) -> probes.Interval:
        """Each metric in each group with its 95% interval over examples, arrays [metric, group].

        The values are NaN for groups without examples, the bounds also if `resamples` is 0.
        """
        intervals = [
            probes.bootstrap_ratio(
                self.numerators[:, number, None] * self.member,
                self.denominators[:, number, None] * self.member,
                clusters=self.cluster,
                resamples=resamples,
                transform=setup.metrics[name].transform,
            )
            for number, name in enumerate(self.metrics)
        ]
        return probes.Interval(*(np.stack(values) for values in zip(*intervals, strict=True)))


def score(setup: Setup, model: nn.Module, batches: Iterable[Batch[Any]], split: str) -> Scored:
    """Score a model, in evaluation mode, on batches of a split.

    Raises:
        ValueError: `setup.scores` does not return exactly the metrics of the setup, each with two
            numbers per example; or the groups of two batches have different names.
    """
    metrics = tuple(setup.metrics)
    numerators, denominators, member, clusters = [], [], [], []
    groups: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for batch in batches:
            scores = setup.scores(setup.answer(model, batch), batch, split)
            if set(scores) != set(metrics):
                raise ValueError(
                    f"scores must be given for metrics {', '.join(metrics)}, "
                    f"got {', '.join(scores)}"
                )
            for name in metrics:
                if any(value.shape != (len(batch),) for value in scores[name]):
                    shapes = " and ".join(str(list(value.shape)) for value in scores[name])
                    raise ValueError(
                        f"scores of {name} must be two tensors [batch], here [{len(batch)}], "
                        f"got {shapes}"
                    )
            numerators.append(_columns(scores[name][0] for name in metrics))
            denominators.append(_columns(scores[name][1] for name in metrics))
            before, groups = groups, {ALL: torch.ones(len(batch))} | setup.groups(batch)
            if before and list(before) != list(groups):
                raise ValueError(
                    "groups must have the same names, in the same order, in every batch, got "
                    f"{', '.join(before)} and {', '.join(groups)}"
                )
            member.append(_columns(groups.values()).astype(bool))
            if (cluster := setup.cluster(batch)) is not None:
                clusters.append(cluster.cpu().numpy())
    n = sum(map(len, numerators))
    numbers = np.unique(np.concatenate(clusters), return_inverse=True)[1] if clusters else range(n)
    return Scored(
        metrics=metrics,
        numerators=np.concatenate(numerators),
        denominators=np.concatenate(denominators),
        groups=tuple(groups),
        member=np.concatenate(member),
        cluster=np.asarray(numbers),
    )


def _columns(values: Iterable[torch.Tensor]) -> Float[np.ndarray, "example column"]:
    return np.stack([value.detach().double().cpu().numpy() for value in values], 1)


def log_entries(setup: Setup, scored: Scored, split: str) -> dict[str, float]:
    """The metrics of a split as entries of a training log, without groups that have no examples."""
    values = scored.interval(setup, resamples=0).estimate
    return {
        _log_key(split, metric, group): float(values[row, column])
        for row, metric in enumerate(scored.metrics)
        for column, group in enumerate(scored.groups)
        if np.isfinite(values[row, column]) or group == ALL
    }


def _log_key(split: str, metric: str, group: str) -> str:
    return f"{split}/{metric}" if group == ALL else f"{split}/{metric}/{group}"


@dataclass(frozen=True)
class Scores:
    """The metrics of the setup, by split and group, with intervals and an untrained baseline.

    Args:
        n_test: largest number of examples per split.
    """

    n_test: int = 4096

    def __post_init__(self):
        if self.n_test < 2:
            raise ValueError(f"n_test must be at least 2, got {self.n_test}")

    def __call__(self, trained: Trained) -> xr.Dataset:
        """Score the trained and the untrained model; variables [split, group]."""
        splits = list(trained.setup.splits)
        scores = [self._score_split(trained, split) for split in splits]
        return cast(xr.Dataset, xr.concat(scores, xr.Variable("split", splits)))

    def _score_split(self, trained: Trained, split: str) -> xr.Dataset:
        setup: Setup = trained.setup
        batches = list(trained.batches(split, self.n_test))
        scored = score(setup, trained.model, batches, split)
        untrained = score(setup, trained.untrained, batches, split)
        intervals = np.stack(scored.interval(setup), 1)
        untrained_values = untrained.interval(setup, resamples=0).estimate
        counts = scored.member.sum(0)
        data: dict[str, Any] = described("group", {"n_examples": ("number of examples", counts)})
        for row, (name, metric) in enumerate(setup.metrics.items()):
            attrs: Any = {"long_name": metric.long_name, "units": metric.units}
            interval = probes.Interval(*intervals[row])
            data |= probes.interval_variables(name, interval, "group", **attrs)
            data[name][2].update(better=metric.better, percent=int(metric.percent))
            baselines = {"untrained": untrained_values[row]}
            for baseline, by_metric in setup.references(split).items():
                if name in by_metric:
                    by_group = by_metric[name]
                    baselines[baseline] = [by_group.get(group, np.nan) for group in scored.groups]
            for baseline, values in baselines.items():
                long_name = {"long_name": f"{metric.long_name}, {baseline}"}
                data[f"{name}_{baseline}"] = ("group", values, attrs | long_name)
        unit = "clusters" if len(np.unique(scored.cluster)) < len(scored.cluster) else "examples"
        method = f"percentile bootstrap over {unit}, 95%, 1000 resamples"
        return xr.Dataset(data, {"group": list(scored.groups)}, {"interval": method})


def tested_entry(setup: Setup, log: Sequence[Mapping[str, float]]) -> int:
    """The index of the tested checkpoint in a training log; see `TrainingConfig.checkpoint`.

    Raises:
        RunError: the selecting metric is NaN at every evaluation.
    """
    if setup.training.checkpoint == "last":
        return len(log) - 1
    values = [preference(setup.sign * entry[setup.selection.key]) for entry in log]
    if max(values) == -math.inf:
        raise RunError(
            f"no checkpoint can be chosen: {setup.selection.key} is NaN at every evaluation; "
            "choose by another metric, or test the last one with training.checkpoint=last"
        )
    return int(np.argmax(values))


def training_dataset(setup: Setup, log: Sequence[Mapping[str, float]]) -> xr.Dataset:
    """The group `training` of a result, from a training log.

    Curves of the loss and the learning rate [train_step], the metrics on the validation examples
    [split, group, train_step], and scalars about the tested checkpoint and the end of training.
    """
    selection, splits, sign = setup.selection, list(setup.splits), setup.sign
    steps = [int(entry["step"]) for entry in log]
    keys = {key for entry in log for key in entry if key.count("/") == 2}
    groups = [ALL, *dict.fromkeys(key.split("/")[2] for key in sorted(keys))]

    def curve(key: str) -> list[float]:
        return [float(entry.get(key, np.nan)) for entry in log]

    data: dict[str, Any] = {}
    for name, metric in setup.metrics.items():
        values = [[curve(_log_key(split, name, group)) for group in groups] for split in splits]
        attrs = {"long_name": f"{metric.long_name}, validation", "units": metric.units}
        data[name] = (("split", "group", "train_step"), np.array(values), attrs)
    selecting = sign * np.array(curve(selection.key))
    tested = tested_entry(setup, log)
    stopped = setup.training.stop_at is not None and steps[-1] < setup.training.n_steps
    # A run that stopped because it reached `stop_at` was not cut off.
    gain = 0.0 if stopped else late_gain(selecting)
    curves = {
        "training_loss": ("mean training loss since the previous evaluation", curve("loss")),
        "current_rate": ("learning rate at the step", curve("learning_rate")),
        "seconds": ("seconds since the beginning, evaluations included", curve("seconds")),
    }
    numbers = {
        "tested_step": ("step of the tested checkpoint", steps[tested]),
        "validation": (
            f"{selection.key} at the tested checkpoint",
            sign * float(selecting[tested]),
        ),
        "updates": ("updates of training", steps[-1]),
        "batch_size": ("examples of an update", setup.training.batch_size),
        "late_gain": ("share of the improvement that came in the last fifth of training", gain),
    }
    data |= described("train_step", curves) | described((), numbers)
    data["validation"][2].update(sign=sign, units=setup.metrics[selection.metric].units)
    data["seconds"][2]["units"] = "s"
    return xr.Dataset(data, coords={"train_step": steps, "split": splits, "group": groups})
