"""The figures of the study of language modelling, drawn from its result alone."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

LOOKS = {
    "softmax": "#4477aa",
    "linear": "#228833",
    "hyla": "#aa3377",
    "coda": "#cc3311",
    "compositional": "#dd8822",
    "transformer_xl": "#66ccee",
    "linear_relu": "#999933",
    "rms_head_linear": "#882255",
}
"""Colour of each mechanism; others are grey."""

STYLES = {"relative": "-", "rotary": "--"}


def figures(result: xr.DataTree) -> dict[str, Figure]:
    """All figures by file name."""
    return {
        "training": training(result),
        "losses": losses(result),
        "position": position(result),
    }


def training(result: xr.DataTree) -> Figure:
    """Loss on `valid` over training: mean over seeds (thick), and each of them."""
    curves = result["training"].to_dataset()
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axis = figure.subplots()
    ends = []
    for one, label, cells in _conditions(result):
        values = curves["valid_loss"].isel(cell=cells)
        colour, style = _colour(one), STYLES[one["positions"].item()]
        for seed in values.to_numpy() if len(cells) > 1 else ():
            axis.plot(curves["train_step"], seed, style, color=colour, lw=0.6, alpha=0.5)
        mean = values.mean("cell")
        axis.plot(curves["train_step"], mean, style, color=colour, label=label)
        ends.append(mean.to_numpy())
    # The first steps would squeeze what there is to be seen.
    low, start = np.nanmin(ends), np.nanmax(np.array(ends)[:, len(ends[0]) // 5])
    if low < start:
        axis.set_ylim(low - 0.05 * (start - low), start + 0.02 * (start - low))
    axis.set_xlabel("training step")
    axis.set_ylabel("loss on valid, nats per token")
    axis.set_title("While training: solid with relative, dashed with rotary positions", fontsize=9)
    axis.legend(fontsize=7)
    return figure


def losses(result: xr.DataTree) -> Figure:
    """Test loss of each network, and its difference to softmax attention, with intervals."""
    errors = result["errors"].to_dataset().sel(split="test")
    rows = list(_conditions(result))
    figure = Figure(figsize=(8.4, 0.7 + 0.42 * len(rows)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for row, (one, _, cells) in enumerate(rows):
        offsets = np.linspace(-0.2, 0.2, len(cells)) if len(cells) > 1 else [0.0]
        for cell, offset in zip(cells, offsets, strict=True):
            found = [errors[f"loss{end}"].isel(cell=cell).item() for end in ("", "_low", "_high")]
            _interval(left, row + offset, found, _colour(one), one["positions"].item())
        found = [one[f"difference{end}"].item() for end in ("", "_low", "_high")]
        if one["model"].item() != "softmax" and np.isfinite(found).all():
            _interval(right, row, found, _colour(one), one["positions"].item())
    left.set_yticks(range(len(rows)), [label for _, label, _ in rows], fontsize=8)
    left.set_ylim(len(rows) - 0.5, -0.5)
    baseline = errors["loss_baseline"].isel(cell=0).item()
    left.set_xlabel(
        f"test loss, nats per token (frequencies of tokens: {baseline:.2f})", fontsize=8
    )
    right.set_xlabel("test loss less that of softmax, same positions (paired)", fontsize=8)
    right.axvline(0, color="black", lw=0.8)
    for axis in (left, right):
        axis.grid(axis="x", lw=0.3)
    figure.suptitle("Parameters matched; 95% intervals over windows of the test text", fontsize=10)
    return figure


def position(result: xr.DataTree) -> Figure:
    """Test loss by how much of the text before it a token is predicted from."""
    found = result["position"].to_dataset()
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axis = figure.subplots()
    for one, label, cells in _conditions(result):
        some = found.isel(cell=cells).mean("cell")
        seen, loss = binned(some["loss"].to_numpy(), some["tokens"].to_numpy())
        style = STYLES[one["positions"].item()]
        axis.plot(seen, loss, style, marker="o", ms=3, color=_colour(one), label=label)
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter("{x:g}")
    axis.set_xlabel("tokens of the window that are seen: so many, or down to half of it")
    axis.set_ylabel("test loss, nats per token")
    axis.set_title("Does it help to see more of the text?", fontsize=9)
    axis.legend(fontsize=7)
    return figure


def binned(loss: np.ndarray, tokens: np.ndarray) -> tuple[list[int], list[float]]:
    """Means of a loss [position] where 1, 2, 3 to 4, 5 to 8, ... tokens are seen: ends and means.

    Args:
        loss: NaN where there are no tokens; position 0 sees one.
        tokens: how many stand behind each mean.
    """
    ends, means = [], []
    first, end = 0, 1
    while first < len(loss):
        total = tokens[first:end].sum()
        if total:
            ends.append(min(end, len(loss)))
            means.append(float(np.nansum(loss[first:end] * tokens[first:end]) / total))
        first, end = end, 2 * end
    return ends, means


def _conditions(result: xr.DataTree) -> Iterator[tuple[xr.Dataset, str, list[int]]]:
    """Each condition of the summary, what it is called, and its cells, all of its seeds."""
    means, cells = result["summary"].to_dataset(), result["errors"].to_dataset()
    for row in range(means.sizes["condition"]):
        one = means.isel(condition=row)
        mine = np.logical_and.reduce(
            [
                cells[name].to_numpy() == one[name].item()
                for name in ("model", "positions", "learning_rate")
            ]
        )
        label = f"{one['model'].item().replace('_', ' ')}, {one['positions'].item()}"
        yield one, label, np.flatnonzero(mine).tolist()


def _interval(axis: Axes, row: float, found: list[float], colour: str, positions: str) -> None:
    """A mean and its interval; open where positions are rotary."""
    value, low, high = found
    axis.errorbar(
        value,
        row,
        xerr=[[value - low], [high - value]],
        fmt="o",
        color=colour,
        markerfacecolor="white" if positions == "rotary" else colour,
        capsize=2,
    )


def _colour(one: xr.Dataset) -> str:
    return LOOKS.get(one["model"].item(), "#888888")
