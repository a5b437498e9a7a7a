"""How well a model answers: the metrics of its setup, by split and group, with intervals."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xarray as xr
from jaxtyping import Bool, Float, Int
from torch import nn

import probes
from studies.engine.setup import ALL, Setup
from tasks import Batch


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

        NaN where a group has no examples.
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

    def estimates(self, setup: Setup) -> Float[np.ndarray, "metric group"]:
        """Each metric in each group, NaN where there are no examples."""
        with np.errstate(invalid="ignore", divide="ignore"):
            ratio = (self.parts.T @ self.member) / (self.wholes.T @ self.member)
        for number, name in enumerate(self.metrics):
            if (transform := setup.metrics[name].transform) is not None:
                ratio[number] = transform(ratio[number])
        return ratio


def score(setup: Setup, model: nn.Module, batches: Iterable[Batch[Any]], split: str) -> Scored:
    """Let a model, in evaluation mode, answer examples of a split."""
    parts, wholes, member, cluster = [], [], [], []
    names: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    with torch.no_grad():
        for batch in batches:
            found = setup.scores(setup.answer(model, batch), batch, split)
            names = tuple(setup.metrics)
            if set(found) != set(names):
                raise ValueError(
                    f"scores must be those of metrics {', '.join(names)}, got {', '.join(found)}"
                )
            parts.append(_columns([found[name][0] for name in names]))
            wholes.append(_columns([found[name][1] for name in names]))
            every = torch.ones(len(batch), dtype=torch.bool)
            of = {ALL: every} | setup.groups(batch)
            groups = tuple(of)
            member.append(np.stack([one.cpu().numpy() for one in of.values()], 1))
            if (drawn := setup.cluster(batch)) is not None:
                cluster.append(drawn.cpu().numpy())
    n = sum(map(len, parts))
    numbers = np.unique(np.concatenate(cluster), return_inverse=True)[1] if cluster else range(n)
    return Scored(
        metrics=names,
        parts=np.concatenate(parts),
        wholes=np.concatenate(wholes),
        groups=groups,
        member=np.concatenate(member),
        cluster=np.asarray(numbers),
    )


def figures(setup: Setup, scored: Scored, split: str) -> dict[str, float]:
    """The metrics of a split for a log: `SPLIT/METRIC`, `SPLIT/METRIC/GROUP` of other groups."""
    values = scored.estimates(setup)
    found = {}
    for row, metric in enumerate(scored.metrics):
        for column, group in enumerate(scored.groups):
            name = f"{split}/{metric}" + ("" if group == ALL else f"/{group}")
            if np.isfinite(values[row, column]) or group == ALL:
                found[name] = float(values[row, column])
    return found


def scores_dataset(
    setup: Setup, scored: dict[str, Scored], untrained: dict[str, Scored]
) -> xr.Dataset:
    """Each metric [split, group] with its interval, that of the untrained model, and known values.

    Args:
        setup: names the metrics, `references` and the paper's figures.
        scored: of the trained model, by split.
        untrained: of the untrained one.
    """
    splits = list(scored)
    first = next(iter(scored.values()))
    groups, dims = list(first.groups), ("split", "group")
    intervals = [one.interval(setup) for one in scored.values()]
    before = [one.estimates(setup) for one in untrained.values()]
    references = {split: setup.references(split) for split in splits}
    kinds = list(dict.fromkeys(kind for known in references.values() for kind in known))
    paper = setup.paper()
    data: dict[str, Any] = {}
    for row, (name, metric) in enumerate(setup.metrics.items()):
        interval = probes.Interval(
            *(np.stack([bound[row] for bound in ends]) for ends in zip(*intervals, strict=True))
        )
        data |= probes.interval_variables(
            name, interval, dims, long_name=metric.long_name, units=metric.units
        )
        data[name][2].update(better=metric.better, percent=int(metric.percent))
        others = {"untrained": [values[row] for values in before]}
        for kind in kinds:
            known = [references[split].get(kind, {}).get(name, {}) for split in splits]
            others[kind] = [[one.get(group, np.nan) for group in groups] for one in known]
        if name in paper:
            known = [paper[name].get(split, {}) for split in splits]
            others["paper"] = [[one.get(group, np.nan) for group in groups] for one in known]
        for kind, values in others.items():
            if not np.isnan(values).all():
                attrs = {"long_name": f"{metric.long_name}, {kind}", "units": metric.units}
                data[f"{name}_{kind}"] = (dims, np.array(values, dtype=float), attrs)
    counts = [one.member.sum(0) for one in scored.values()]
    data["n_examples"] = (dims, np.array(counts), {"long_name": "number of examples"})
    over = "clusters" if len(np.unique(first.cluster)) < len(first.cluster) else "examples"
    return xr.Dataset(
        data,
        coords={"split": splits, "group": groups},
        attrs={"interval": f"percentile bootstrap over {over}, 95%, 1000 resamples"},
    )


def _columns(values: list[torch.Tensor]) -> Float[np.ndarray, "example metric"]:
    return np.stack([value.detach().double().cpu().numpy() for value in values], 1)
