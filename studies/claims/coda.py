"""Grids, readings and claims of the quasi-attention studies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import xarray as xr

from studies.engine import Claim, Reading, metric, read
from studies.engine.readings import unmeasured
from studies.setups.quasi_attention import PLACES
from studies.views import coda as views

# Grids


def grid(*models: str, **more: Any) -> dict[str, Any]:
    """A grid of models with the paper's settings of CoDA, except the given axes."""
    default = {name: (value,) for name, value in views.BASIC.items()}
    return {"model": models or ("coda",)} | default | more


def centred(*over: str) -> dict[str, Any]:
    """A grid of all pairs of centrings, with the paper's composition functions."""
    return grid(affinity_centring=over, gate_centring=over)


def further(rate: float, seeds: Sequence[int] = (3, 4, 5, 6)) -> dict[str, tuple[Any, ...]]:
    """Axes of further seeds at the best rate of a condition."""
    return {"training.learning_rate": (rate,), "seed": tuple(seeds)}


DOUBLED = grid(doubled=(True,))

# Readings


def agreement(variable: str, weights: str, control: str = "observed") -> Reading:
    """Agreement with the planted signs on `ood`, of the head that agrees best on `id`.

    NaN where no signs are planted.
    """
    select = {"scale": "relative", "weights": weights, "control": control}

    def values(result: xr.DataTree) -> np.ndarray:
        if "signs" not in result.children or variable not in result["signs"]:
            return unmeasured(result)
        scores = result["signs"][variable].sel(select).stack(where=PLACES)
        best = scores.sel(split="id").fillna(-1).argmax("where")
        return scores.sel(split="ood").isel(where=best).to_numpy()

    return Reading(f"{variable} of the best head ({weights}, {control})", values)


def share(kind: str, split: str = "ood") -> Reading:
    """The share of attention weights of a kind, mean over places, layers and heads."""
    where = {"kind": kind, "scale": "weights", "weights": "trained", "split": split}
    return read("signs", "share", mean=PLACES, **where)


def shrunk(result: xr.DataTree) -> np.ndarray:
    """The saturated share of E at the first kept checkpoint minus that at the last, on `id`."""
    if "saturation_along_training" not in result.children:
        return unmeasured(result)
    part = result["saturation_along_training"]["saturated_mean"]
    part = part.sel(split="id", quantity="affinity").sum("side", skipna=False)
    return (part.isel(train_step=0) - part.isel(train_step=-1)).to_numpy()


def raised(reading: Reading, model: str, gain: float) -> Reading:
    """A reading with a gain added for one model, which another model should reach."""

    def values(result: xr.DataTree) -> np.ndarray:
        return reading.values(result) + np.where(result["scores"]["model"] == model, gain, 0.0)

    label = f"{reading.label}, that of {model} + {gain:g}"
    return Reading(label, values, metric=reading.metric)


def without(reading: Reading, **excluded: str) -> Reading:
    """A reading that is NaN in cells with one of these coordinates."""

    def values(result: xr.DataTree) -> np.ndarray:
        found, cells = reading.values(result), result["scores"].coords
        for name, value in excluded.items():
            if name in cells:
                found = np.where(cells[name] == value, np.nan, found)
        return found

    return Reading(reading.label, values)


ON_ID, ON_OOD = metric("accuracy", "id"), metric("accuracy", "ood")
NEGATIVE = share("subtracted") + share("partly_subtracted")
SATURATED = partial(read, "saturation", "saturated_mean", split="id")
CLOSED, OPEN = (SATURATED(quantity="dissimilarity", side=side) for side in ("low", "high"))
# Without centring N is never positive (equation 2).
OPEN_CENTRED = without(OPEN, gate_centring="none")
EARLY = Reading("saturated E, first checkpoint - last", shrunk)
MINUS, PLUS, NEAR_ZERO = (
    partial(read, "composition", name) for name in ("negative", "positive", "near_zero")
)
MINUS_E, PLUS_E = MINUS(quantity="affinity"), PLUS(quantity="affinity")
# The relu in the F of two layers forbids that E is negative.
can_be_negative = partial(without, projection="two_layers")
RARER = can_be_negative(MINUS_E.apply(np.minimum, PLUS_E))
MORE_NEGATIVE = can_be_negative(MINUS_E - PLUS_E)
FOLLOWS = read("composition", "correlation")
SMALL_E, SMALL_M = NEAR_ZERO(quantity="affinity"), NEAR_ZERO(quantity="weight")
SIGNS, MATCHES = (
    {
        "trained": agreement(variable, "trained"),
        "untrained": agreement(variable, "untrained"),
        "planted signs shuffled": agreement(variable, "trained", "shuffled"),
    }
    for variable in ("balanced_accuracy", "matched")
)
"""Agreement with the three planted signs, and on whether a token counts at all, by control."""

GATES = ("sigmoid", "tanh", "arctan", "algebraic")
SOFTMAX = {"model": "softmax"}


def coda(**more: Any) -> dict[str, Any]:
    """Coordinates of CoDA with the paper's settings, except those given."""
    return {"model": "coda"} | views.BASIC | more


EITHER_CENTRING = {name: value for name, value in coda().items() if name != "gate_centring"}
"""CoDA with the paper's settings, whether N is centred or not."""

# A factor of N below 1 is there to keep its sigmoid from saturating.
PRINTED = {"beta": 1.0}
"""The factor of N that the paper prints."""
DRAWN = {"alignment": "networks", "projection": "linear", "beta": 1.0, "d_model": 200}
DRAWN |= {"gate_centring": "matrix"}
"""What the paper draws: E and N are sums over the width, and a gate that opens is centred."""

# Claims

TAY = "Tay et al. 2019, "


def learns(
    statement: str, source: str, of: Any, than: Any, reading: Any = ON_ID, within: float = 0.0
) -> Claim:
    """The claim that a model is more accurate than another, or as accurate `within` a margin."""
    other: Any = {"equals": than, "margin": within} if within else {"exceeds": than}
    return Claim(statement, source, reading, of, **other, of_learning=True)


def no_gain(
    statement: str, source: str, of: Any, than: Any, reading: Reading = ON_ID, by: float = 0.01
) -> Claim:
    """The claim that another model does not gain `by`: it holds where both are alike, with room."""
    return Claim(statement, source, reading, of, than, margin=-by, of_learning=True, no_gain=True)


def weighs(statement: str, source: str, reading: Reading, than: float = 0.0, **more: Any) -> Claim:
    """The claim that a reading of CoDA's weights exceeds a number, for every centring of N."""
    return Claim(statement, source, reading, EITHER_CENTRING | more, than)


def claims_of_both(*centrings: str) -> Iterator[Claim]:
    """Claims of the paper's analysis and of our results page about both tasks."""
    for over in centrings:
        e, n = {"affinity_centring": over}, {"gate_centring": over}
        for what, centring in (("E", e), ("E and N", e | n)):
            source = f"{TAY}Table 8" if over == "matrix" else "ours"
            statement = f"Centring {what} ({over}) does not help: it gains less than a point"
            yield no_gain(statement, source, coda(), coda(**centring))
        statement = f"A doubled gate is as good as N that is centred ({over})"
        source = f"{TAY}section 2.3" if over == "matrix" else "ours"
        yield learns(statement, source, coda(doubled=True), coda(**n), within=0.01)
        yield learns(f"N is better centred ({over})", "ours", coda(**n), coda())
    for e, n in list(product(("tanh", "sigmoid"), GATES))[1:]:
        statement = f"tanh(E) * sigmoid(N) is better than {e}(E) * {n}(N)"
        yield learns(statement, f"{TAY}Table 9", coda(), coda(affinity=e, gate=n))
    yield from of_weights("{}", f"ours, after {TAY}section 5", {})
    statement = "CoDA subtracts: a twentieth of M is below -0.1"
    yield weighs(statement, f"{TAY}section 1", NEGATIVE, 0.05)


def of_weights(words: str, source: str, more: Mapping[str, Any]) -> Iterator[Claim]:
    """The claims about E and N in the paper's visualization, for some models."""
    for statement, reading, than in (
        ("E is saturated early, and less at the end", EARLY, 0.0),
        ("tanh(E) has both signs: the rarer for a tenth of the pairs", RARER, 0.1),
        ("tanh(E) concentrates around 0: within 0.1 for a tenth", SMALL_E, 0.1),
        ("tanh(E) is more often negative than positive", MORE_NEGATIVE, 0.0),
    ):
        yield weighs(words.format(statement), source, reading, than, **more)
    for statement, reading in (
        ("the gate closes: N < -3 for a tenth of the pairs", CLOSED),
        ("the gate opens: N > 3 for a tenth of the pairs, where N is centred", OPEN_CENTRED),
    ):
        yield weighs(words.format(statement), source, reading, 0.1, **{**PRINTED, **more})
    for statement, reading, than in (
        ("M follows tanh(E): their correlation is above 0.5", FOLLOWS, 0.5),
        ("M is near 0 more often than tanh(E)", SMALL_M - SMALL_E, 0.0),
    ):
        yield weighs(words.format(statement), source, reading, than, **more)


def claims_of_lines() -> Iterator[Claim]:
    """All claims about arithmetic."""
    yield from claims_of_both("matrix")
    of, source = EITHER_CENTRING | PRINTED, f"{TAY}Table 6"
    yield learns("CoDA answers better than softmax attention", source, of, SOFTMAX)
    statement = "CoDA gains 8.2 points over softmax attention, within 2 points"
    yield learns(statement, source, of, SOFTMAX, raised(ON_ID, "softmax", 0.082), within=0.02)
    statement = "CoDA answers better than a universal transformer"
    yield learns(statement, source, of, {"model": "universal"})
    for model in ("softmax", "linear", "hyla"):
        statement = f"CoDA answers held-out pairs of numbers better than {model}"
        yield learns(statement, "ours", coda(), {"model": model}, ON_OOD)
    for alpha in (0.1, 0.3):
        statement = f"CoDA answers better without a factor of E than with {alpha:g}"
        yield learns(statement, "ours", coda(alpha=1.0), coda(alpha=alpha))


def claims_of_pairs() -> Iterator[Claim]:
    """All claims about signed pairs."""
    yield from claims_of_both("row", "matrix")
    yield from of_weights("At the width that the paper draws {}", f"{TAY}figure 2", DRAWN)
    headed, single = ({"alignment": name} for name in ("heads", "networks"))
    statement = "In the base model for pairs CoDA answers better than softmax attention"
    yield learns(statement, f"{TAY}Table 3", coda(**single), SOFTMAX | single)
    for what, changes, other in (
        ("heads", headed, headed),
        ("N centred (row)", single | {"gate_centring": "row"}, single),
        ("N centred (matrix)", single | {"gate_centring": "matrix"}, single),
    ):
        statement = f"With {what} CoDA answers as well as softmax attention"
        yield learns(statement, "ours", coda(**changes), SOFTMAX | other, ON_OOD, 0.01)
    for what, agree in (("has the planted signs", SIGNS), ("says which tokens count", MATCHES)):
        statement = f"M {what}, more than that of untrained weights"
        yield weighs(statement, "ours", agree["trained"] - agree["untrained"])
    statement = "M agrees with the planted signs more than all matches without signs would"
    yield weighs(statement, "ours", SIGNS["trained"], 2 / 3)
