"""Plots of looped models: answers and states over steps, nudges, and halting."""

from __future__ import annotations

from typing import Literal

import numpy as np
import xarray as xr
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import to_hex

from probes.checking import checked
from probes.plots.axes import given_or_current, variable_of
from probes.plots.curves import level, line, lines
from probes.plots.style import CONTROL, MARKERS


@checked
def steps(
    result: xr.Dataset,
    ax: Axes | None = None,
    *,
    variable: Literal["accuracy", "settled"] = "accuracy",
) -> Axes:
    """Draw the accuracy of the answers after each step, beside its controls.

    The legend has the mean number of changes (flips) of an answer.

    Args:
        result: `accuracy` and `settled` [control, step] with bounds, and `flips` [control], of
            `score_steps`.
        ax: the axes to draw on; None: the current ones.
        variable: `accuracy`, or `settled`: the share of answers that stay from a step on.

    Returns:
        The axes.

    Raises:
        KeyError: the result is not that of `score_steps`.

    Example:
        >>> probes.plots.steps(score_steps(answers, targets))
    """
    variable_of(result, variable, "control", "step", probe="score_steps")
    flips = variable_of(result, "flips", "control", probe="score_steps")
    named = [f"{one['control'].item()}, {one.item():.2g} flips" for one in flips]
    ax = lines(result.assign_coords(control=named), variable, ax, along="step")
    ax.set_ylim(0, 1.02)
    return ax


@checked
def states(result: xr.Dataset, ax: Axes | None = None) -> Axes:
    """Draw how far the state moves in each step: near 0, it is at a fixed point.

    The control is the distance to the states of other examples; the black line is the distance up
    to which states count as the same.

    Args:
        result: `distance` [control, step] with bounds, and the attr `tolerance`, of `score_states`.
        ax: the axes to draw on; None: the current ones.

    Returns:
        The axes.

    Raises:
        KeyError: the result is not that of `score_states`.

    Example:
        >>> probes.plots.states(score_states(capture(model, batches, {"state": state})["state"]))
    """
    variable_of(result, "distance", "control", "step", probe="score_states")
    ax = lines(result, "distance", ax, along="step")
    level(ax, result.attrs["tolerance"], "the same", 0)
    ax.set_ylim(0, None)
    return ax


@checked
def nudges(result: xr.Dataset, ax: Axes | None = None) -> Axes:
    """Draw what becomes of a small change of a state: a line for each step that is nudged.

    Below the black line at 1 the change vanishes, above it grows. Later nudges are brighter; the
    untrained model, if there is one, is grey.

    Args:
        result: `growth` [control, nudged, step] with bounds, of `nudge_states`, for one direction.
        ax: the axes to draw on, whose y-axis becomes logarithmic; None: the current ones.

    Returns:
        The axes.

    Raises:
        KeyError: the result is not that of `nudge_states`.
        ValueError: both directions are left.

    Example:
        >>> probes.plots.nudges(nudge_states(model, inputs, hook=hook).sel(direction="random"))
    """
    growth = variable_of(result, "growth", "control", "nudged", "step", probe="nudge_states")
    ax = given_or_current(ax)
    nudged = growth["nudged"].to_numpy().tolist()
    shades = [to_hex(shade) for shade in colormaps["viridis"](np.linspace(0, 0.85, len(nudged)))]
    for number, control in enumerate(growth["control"].to_numpy().tolist()):
        for step, shade in zip(nudged, shades, strict=True):
            label = f"nudged at step {step}" if number == 0 else control
            line(
                result.sel(control=control, nudged=step),
                "growth",
                ax,
                along="step",
                label=label if number == 0 or step == nudged[0] else None,
                color=CONTROL if number else shade,
                marker=MARKERS[number],
                linestyle="--" if number else "-",
            )
    level(ax, 1.0, "as at the nudge", 1)
    ax.set_yscale("log")
    return ax


@checked
def halting(result: xr.Dataset, ax: Axes | None = None) -> Axes:
    """Draw the mean steps that are taken by the steps that are needed, a line for each rule.

    The legend has the rank correlations of both with their intervals, and beside them that with
    the needed steps of other examples.

    Args:
        result: `mean_steps` [rule, needed] and `correlation` [rule, control] with bounds, of
            `score_halting`.
        ax: the axes to draw on; None: the current ones.

    Returns:
        The axes.

    Raises:
        KeyError: the result is not that of `score_halting`.

    Example:
        >>> probes.plots.halting(score_halting(data["n_updates"], data["depth"]))
    """
    variable_of(result, "mean_steps", "rule", "needed", probe="score_halting")
    variable_of(result, "correlation", "rule", "control", probe="score_halting")
    named = []
    for rule in result["rule"].to_numpy().tolist():
        of_rule = result.sel(rule=rule)
        value, low, high = (
            of_rule[f"correlation{end}"].sel(control="observed").item()
            for end in ("", "_low", "_high")
        )
        shuffled = of_rule["correlation"].sel(control="shuffled").item()
        named.append(f"{rule}: {value:.2f} [{low:.2f}, {high:.2f}]\n(shuffled {shuffled:.2f})")
    ax = lines(result.assign_coords(rule=named), "mean_steps", ax, along="needed", by="rule")
    ax.set(xlabel="steps needed", ylabel="mean steps taken")
    return ax
