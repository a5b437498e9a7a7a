"""How well a model answers: the metrics of its setup, by split and group, with intervals."""

from __future__ import annotations

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
from studies.engine.results import described
from studies.engine.setup import ALL, Setup
from tasks import Batch

if TYPE_CHECKING:
    from studies.engine.cells import Trained


@dataclass(frozen=True)
class Scored:
    """Scores of the examples of a split.

    Attributes:
        metrics: their names.
        parts, wholes: of which metrics are ratios of sums.
        groups: their names, that of all examples first.
        member: which examples are in which group.
        cluster: what intervals are over: the number of an example, or of the picture it is about.
    """

    metrics: tuple[str, ...]
    parts: Float[np.ndarray, "example metric"]
    wholes: Float[np.ndarray, "example metric"]
    groups: tuple[str, ...]
    member: Bool[np.ndarray, "example group"]
    cluster: Int[np.ndarray, " example"]

    def interval(self, setup: Setup, *, resamples: int = 1000) -> probes.Interval:
        """Each metric in each group and its 95% interval over examples, [metric, group] each.

        NaN where a group has no examples; the ends also without `resamples`.
        """
        bounds = [
            probes.bootstrap_ratio(
                self.parts[:, number, None] * self.member,
                self.wholes[:, number, None] * self.member,
                clusters=self.cluster,
                resamples=resamples,
                transform=setup.metrics[name].transform,
            )
            for number, name in enumerate(self.metrics)
        ]
        return probes.Interval(*(np.stack(values) for values in zip(*bounds, strict=True)))


def score(setup: Setup, model: nn.Module, batches: Iterable[Batch[Any]], split: str) -> Scored:
    """Let a model, in evaluation mode, answer examples of a split."""
    names = tuple(setup.metrics)
    parts, wholes, member, cluster = [], [], [], []
    groups: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for batch in batches:
            found = setup.scores(setup.answer(model, batch), batch, split)
            if set(found) != set(names):
                raise ValueError(
                    f"scores must be those of metrics {', '.join(names)}, got {', '.join(found)}"
                )
            parts.append(_columns(found[name][0] for name in names))
            wholes.append(_columns(found[name][1] for name in names))
            groups = {ALL: torch.ones(len(batch))} | setup.groups(batch)
            member.append(_columns(groups.values()).astype(bool))
            if (drawn := setup.cluster(batch)) is not None:
                cluster.append(drawn.cpu().numpy())
    n = sum(map(len, parts))
    numbers = np.unique(np.concatenate(cluster), return_inverse=True)[1] if cluster else range(n)
    return Scored(
        metrics=names,
        parts=np.concatenate(parts),
        wholes=np.concatenate(wholes),
        groups=tuple(groups),
        member=np.concatenate(member),
        cluster=np.asarray(numbers),
    )


def _columns(values: Iterable[torch.Tensor]) -> Float[np.ndarray, "example column"]:
    return np.stack([value.detach().double().cpu().numpy() for value in values], 1)


def figures(setup: Setup, scored: Scored, split: str) -> dict[str, float]:
    """The metrics of a split for a log, by `_key`; of all examples, and of groups that have any."""
    values = scored.interval(setup, resamples=0).estimate
    return {
        _key(split, metric, group): float(values[row, column])
        for row, metric in enumerate(scored.metrics)
        for column, group in enumerate(scored.groups)
        if np.isfinite(values[row, column]) or group == ALL
    }


def _key(split: str, metric: str, group: str) -> str:
    return f"{split}/{metric}" if group == ALL else f"{split}/{metric}/{group}"


@dataclass(frozen=True)
class Scores:
    """The metrics of the setup, by split and group, with intervals and the untrained model's.

    Args:
        n_test: examples of each split, at most.
    """

    n_test: int = 4096

    def __post_init__(self):
        if self.n_test < 2:
            raise ValueError(f"n_test must be at least 2, got {self.n_test}")

    def __call__(self, trained: Trained) -> xr.Dataset:
        """[split, group] of each metric."""
        splits = list(trained.setup.splits)
        parts = [self._of_split(trained, split) for split in splits]
        return cast(xr.Dataset, xr.concat(parts, xr.Variable("split", splits)))

    def _of_split(self, trained: Trained, split: str) -> xr.Dataset:
        setup: Setup = trained.setup
        batches = list(trained.batches(split, self.n_test))
        scored = score(setup, trained.model, batches, split)
        untrained = score(setup, trained.untrained, batches, split)
        intervals = np.stack(scored.interval(setup), 1)
        before = untrained.interval(setup, resamples=0).estimate
        counts = scored.member.sum(0)
        data: dict[str, Any] = described("group", {"n_examples": ("number of examples", counts)})
        for row, (name, metric) in enumerate(setup.metrics.items()):
            about: Any = {"long_name": metric.long_name, "units": metric.units}
            interval = probes.Interval(*intervals[row])
            data |= probes.interval_variables(name, interval, "group", **about)
            data[name][2].update(better=metric.better, percent=int(metric.percent))
            others = {"untrained": before[row]}
            for kind, known in setup.references(split).items():
                if name in known:
                    others[kind] = [known[name].get(group, np.nan) for group in scored.groups]
            for kind, values in others.items():
                attrs = about | {"long_name": f"{metric.long_name}, {kind}"}
                data[f"{name}_{kind}"] = ("group", values, attrs)
        over = "clusters" if len(np.unique(scored.cluster)) < len(scored.cluster) else "examples"
        says = f"percentile bootstrap over {over}, 95%, 1000 resamples"
        return xr.Dataset(data, {"group": list(scored.groups)}, {"interval": says})


def training_dataset(setup: Setup, log: Sequence[Mapping[str, float]]) -> xr.Dataset:
    """What the log of a training says: loss and metrics [train_step, split, group], and its end."""
    selection, splits, sign = setup.selection, list(setup.splits), setup.sign
    steps = [int(entry["step"]) for entry in log]
    keys = {key for entry in log for key in entry if key.count("/") == 2}
    groups = [ALL, *dict.fromkeys(key.split("/")[2] for key in sorted(keys))]

    def along(key: str) -> list[float]:
        return [float(entry.get(key, np.nan)) for entry in log]

    data: dict[str, Any] = {}
    for name, metric in setup.metrics.items():
        values = [[along(_key(split, name, group)) for group in groups] for split in splits]
        attrs = {"long_name": f"{metric.long_name}, validation", "units": metric.units}
        data[name] = (("split", "group", "train_step"), np.array(values), attrs)
    selecting = sign * np.array(along(selection.key))
    stopped = setup.training.stop_at is not None and steps[-1] < setup.training.n_steps
    # A run that stopped because it had got where it should was not cut off.
    gain = 0.0 if stopped else late_gain(selecting)
    curves = {
        "training_loss": ("mean of what training minimises since the step before", along("loss")),
        "current_rate": ("learning rate at the step", along("learning_rate")),
        "seconds": ("seconds since the beginning, evaluations included", along("seconds")),
    }
    numbers = {
        "best_step": ("step of the best checkpoint", steps[int(np.nanargmax(selecting))]),
        "validation": (f"best {selection.key}", sign * float(np.nanmax(selecting))),
        "updates": ("updates of training", steps[-1]),
        "batch_size": ("examples of an update", setup.training.batch_size),
        "late_gain": ("share of the improvement that came in the last fifth of training", gain),
    }
    data |= described("train_step", curves) | described((), numbers)
    data["validation"][2]["sign"] = sign
    return xr.Dataset(data, coords={"train_step": steps, "split": splits, "group": groups})
