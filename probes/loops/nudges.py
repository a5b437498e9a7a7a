"""Sensitivity of a looped model: what becomes of a small change of a state."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import product

import numpy as np
import torch
import xarray as xr
from torch import Tensor
from transformer_lens.utilities.statistics import derive_generator

from probes.capturing.hooking import HookedModel, check_model, evaluating
from probes.capturing.inputs import Inputs, call, count_examples, slices, take_rows
from probes.checking import checked
from probes.interventions.sites import Firing, most_firings
from probes.progress import progress
from probes.statistics.intervals import Interval, bootstrap_ratio, interval_variables

DIRECTIONS = ("random", "other example")


@checked
def nudge_states(
    model: HookedModel,
    inputs: Inputs,
    *,
    hook: str,
    steps: Sequence[int] | None = None,
    size: float = 0.01,
    untrained: HookedModel | None = None,
    batch_size: int = 256,
    resamples: int = 1000,
    seed: int = 0,
) -> xr.Dataset:
    """Change a state by a small share of its length, and see whether the change grows.

    A model that settles forgets the change (growth below 1); one that is sensitive to it, as a
    chaotic system is, makes it larger with each step.

    Args:
        model: an eager model with hooks; see `hooked` for others.
        inputs: inputs of the model [example, ...].
        hook: the states: a hook that fires in each step, or a glob with a hook for each step.
        steps: numbers of the steps whose state is changed; None for all but the last.
        size: length of the change, as a share of the length of the state of the example.
        untrained: the same model with random weights, as a control.
        batch_size: examples per forward pass.
        resamples: number of bootstrap resamples.
        seed: seed of the directions and of the bootstrap.

    Returns:
        - `growth, growth_low, growth_high` [control, direction, nudged, step]: length of the change
          of the state of a step, as a share of the state's length, over `size`; the mean over
          examples, with its percentile bootstrap 95% interval. NaN before the step `nudged`, and 1
          at it. `control`: "trained" and, if passed, "untrained". `direction`: "random", or towards
          the state of an "other example", the one before it, at this step.
        - `rate` [control, direction, nudged]: mean over examples of the logarithm of the growth per
          step, up to the last one: negative where changes become smaller. Without the examples
          whose change is zero at the last step, which have none; NaN if that is so in all.
        - `vanished` [control, direction, nudged]: the share of examples in which it is zero.

        Examples are left out where there is no change: their state is zero, or equal to the other.

    Raises:
        KeyError: an unknown hook; the message lists the nearest names.
        TypeError: the model cannot be hooked, or its states are not float32 or float64: in half
            precision, rounding is as large as a nudge.
        ValueError: there are fewer than two steps or examples, or a number is out of range.
        RuntimeError: a batch, or a nudge, takes fewer steps than other batches.

    Example:
        >>> nudge_states(model, batch.inputs, hook="blocks.*.hook_resid_post")["growth"]
    """
    models = {"trained": model} | ({} if untrained is None else {"untrained": untrained})
    n = count_examples("inputs", inputs)
    if n < 2 or batch_size < 2 or not size > 0:
        raise ValueError(
            "inputs and batch_size must have at least 2 examples and size must be positive, got "
            f"{n}, {batch_size} and {size}"
        )
    lengths, nudged = [], []
    for one in models.values():
        check_model(one)
        places = most_firings(one, inputs, [hook], batch_size)
        nudged = list(range(len(places) - 1) if steps is None else steps)
        if len(places) < 2 or not set(nudged) <= set(range(len(places))):
            raise ValueError(
                f"steps must be in 0..{len(places) - 1}, of at least two steps, got {nudged}"
            )
        with evaluating(one):
            lengths.append(_changes(one, inputs, places, nudged, size, batch_size, seed))
    growth = np.stack(lengths, axis=1) / size
    n_steps = growth.shape[-1]
    is_later = np.arange(n_steps) >= np.array(nudged)[:, None]
    counted = ~np.isnan(growth)
    parts = np.where(counted, growth, 0)
    means = bootstrap_ratio(parts, counted.astype(float), resamples=resamples, seed=seed)
    dims = ("control", "direction", "nudged", "step")
    variables = interval_variables(
        "growth",
        Interval(*(np.where(is_later, values, np.nan) for values in means)),
        dims,
        long_name="relative change of the state, over that of the nudge",
    )
    per_step = np.maximum(n_steps - 1 - np.array(nudged), 1)
    last, at_last = parts[..., -1], counted[..., -1]
    logarithms = np.log(np.where(last > 0, last, 1)) / per_step
    rate = bootstrap_ratio(logarithms, (last > 0).astype(float), resamples=0)
    about = {"long_name": "logarithm of the growth per step, mean over examples"}
    variables["rate"] = (dims[:-1], rate.estimate, about)
    vanished = at_last & (last == 0)
    share = bootstrap_ratio(vanished.astype(float), at_last.astype(float), resamples=0)
    about = {"long_name": "share of examples whose change is zero at the last step"}
    variables["vanished"] = (dims[:-1], share.estimate, about)
    coords = {
        "control": list(models),
        "direction": list(DIRECTIONS),
        "nudged": nudged,
        "step": np.arange(n_steps),
    }
    attrs = {
        "size": size,
        "seed": seed,
        "interval": f"percentile bootstrap over examples, 95%, {resamples} resamples",
    }
    return xr.Dataset(variables, coords, attrs)


def _changes(
    model: HookedModel,
    inputs: Inputs,
    places: Sequence[Firing],
    nudged: Sequence[int],
    size: float,
    batch_size: int,
    seed: int,
) -> np.ndarray:
    """Relative changes of states [example, direction, nudged, step]; NaN where there is none."""
    batches = []
    for rows in progress(slices(count_examples("inputs", inputs), batch_size), "nudge"):
        batch = take_rows(inputs, rows)
        generator = derive_generator(seed, f"directions {rows.start}")
        states = _run(model, batch, places)
        # The example before the first one is the last one.
        before = take_rows(inputs, torch.arange(rows.start - 1, rows.stop - 1))
        others = _run(model, before, places)
        for (name, _), state in zip(places, states, strict=True):
            if state.dtype not in (torch.float32, torch.float64):
                raise TypeError(
                    f"states at {name!r} must be float32 or float64, in which a nudge is more than "
                    f"rounding, got {state.dtype}: pass model.float()"
                )
        changes = []
        for direction, step in product(DIRECTIONS, nudged):
            state = states[step]
            if direction == "random":
                towards = torch.randn(state.shape, generator=generator).to(state)
            else:
                towards = others[step] - state
            change = size * _length(state) / _length(towards).clamp(min=1e-30) * towards
            moved = _run(model, batch, places, places[step], change)
            shares = [_length(a - b) / _length(b) for a, b in zip(moved, states, strict=True)]
            share = torch.stack([share.flatten() for share in shares], dim=1)
            changes.append(share.where(_length(change).flatten()[:, None] > 0, np.nan))
        batches.append(torch.stack(changes, dim=1).double().cpu().numpy())
    changed = np.concatenate(batches)
    return changed.reshape(len(changed), len(DIRECTIONS), len(nudged), len(places))


def _length(state: Tensor) -> Tensor:
    """The length of each example's state, with the dims of the state."""
    return state.flatten(1).norm(dim=1).reshape(-1, *[1] * (state.ndim - 1))


def _run(
    model: HookedModel,
    inputs: Inputs,
    places: Sequence[Firing],
    changed: Firing | None = None,
    change: Tensor | None = None,
) -> list[Tensor]:
    """The states of a forward pass, in which one of them is changed."""
    found: dict[Firing, Tensor] = {}

    def edit(activation: Tensor, step: int, name: str) -> Tensor:
        if change is not None and (name, step) == changed:
            activation = activation + change
        found[name, step] = activation.clone()
        return activation

    call(model, inputs, {name: partial(edit, name=name) for name, _ in places})
    if len(places) > len(found):
        raise RuntimeError(
            f"hooks must fire {len(places)} times in each batch, as they do in the longest, got "
            f"{len(found)} firings of {', '.join(dict.fromkeys(name for name, _ in found))}"
        )
    return [found[place] for place in places]
