"""What the quasi-attention study reads from its results, and what is claimed of that."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import xarray as xr

from studies.coda_measures import PLACES
from studies.engine import Claim, Reading, metric, read

GATES = ("sigmoid", "tanh", "arctan", "algebraic")
BASIC = {"affinity": "tanh", "gate": "sigmoid"}
BASIC |= {"affinity_centring": "none", "gate_centring": "none", "doubled": False}
"""CoDA's settings as the paper has them."""
SOFTMAX = {"model": "softmax"}

ON_ID, ON_OOD = metric("accuracy", "id"), metric("accuracy", "ood")


def agreement(variable: str, weights: str = "trained", control: str = "observed") -> Reading:
    """Of the head that agrees best with the planted signs on `id`, the agreement on `ood`."""

    def values(result: xr.DataTree) -> np.ndarray:
        one = result["signs"][variable]
        one = one.sel(scale="relative", weights=weights, control=control).stack(where=PLACES)
        best = one.sel(split="id").fillna(-1).argmax("where")
        return one.sel(split="ood").isel(where=best).to_numpy()

    return Reading(f"{variable} of the best head ({weights}, {control})", values)


def share(kind: str) -> Reading:
    """The share of trained weights of a kind, over all places, layers and heads, on `ood`."""
    where = {"scale": "weights", "weights": "trained", "split": "ood"}
    return read("signs", "share", mean=PLACES, kind=kind, **where)


def saturated(quantity: str, side: str) -> Reading:
    """The share of E or N beyond its limit, on `ood`."""
    return read("saturation", "saturated_mean", split="ood", quantity=quantity, side=side)


def shrunk(result: xr.DataTree) -> np.ndarray:
    """How much less of E is saturated at the last kept checkpoint than at the first, on `id`."""
    if "saturation_along_training" not in result.children:
        return np.full(result["scores"].sizes["cell"], np.nan)
    part = result["saturation_along_training"]["saturated_mean"]
    part = part.sel(split="id", quantity="affinity").sum("side", skipna=False)
    return (part.isel(train_step=0) - part.isel(train_step=-1)).to_numpy()


NEGATIVE = share("subtracted") + share("partly_subtracted")
POSITIVE = share("added") + share("partly_added")
AGREE = {
    label: (agreement("balanced_accuracy", *where), agreement("matched", *where))
    for label, *where in (
        ("trained",),
        ("untrained", "untrained"),
        ("planted signs shuffled", "trained", "shuffled"),
    )
}
"""Agreement with the three planted signs, and on whether a token counts at all."""


def coda(**more: Any) -> dict[str, Any]:
    """CoDA as the paper has it, but for some settings."""
    return {"model": "coda"} | BASIC | more


def learns(
    statement: str, source: str, of: Any, than: Any, reading: Reading = ON_ID, within: float = 0.0
) -> Claim:
    """That a model answers better than another one, or as well: `within` a difference."""
    side = {"equals": than, "margin": within} if within else {"exceeds": than}
    told = {"statement": statement, "source": source, "reading": reading, "of_learning": True}
    return Claim(of=of, **told, **side)


def weighs(statement: str, source: str, reading: Reading, than: float) -> Claim:
    """That something of CoDA's weights, with N centred or not, is greater than a number."""
    of = {name: value for name, value in coda().items() if name != "gate_centring"}
    return Claim(statement=statement, source=source, reading=reading, of=of, exceeds=than)


def claims_of_both(*centrings: str) -> Iterator[Claim]:
    """What the paper's analysis, and our results page, say of any task with these centrings."""
    tay, ours = "Tay et al. 2019, ", "ours"
    for over in centrings:
        e, n = {"affinity_centring": over}, {"gate_centring": over}
        for what, one in (("E", e), ("E and N", e | n)):
            statement = f"Centring {what} ({over}) does not help"
            yield learns(statement, f"{tay}Table 8", coda(), coda(**one))
        statement = f"A doubled gate is as good as N that is centred ({over})"
        yield learns(statement, f"{tay}section 2.3", coda(doubled=True), coda(**n), within=0.01)
        yield learns(f"N is better centred ({over})", ours, coda(**n), coda())
    for e, n in list(product(("tanh", "sigmoid"), GATES))[1:]:
        statement = f"tanh(E) * sigmoid(N) is better than {e}(E) * {n}(N)"
        yield learns(statement, f"{tay}Table 9", coda(), coda(affinity=e, gate=n))
    for way, sign, side in (("closes", "< -", "low"), ("opens", "> ", "high")):
        statement = f"The gate {way}: N {sign}3 for a tenth of the pairs"
        yield weighs(statement, f"{tay}section 5", saturated("dissimilarity", side), 0.1)
    early = Reading("saturated E, first checkpoint - last", shrunk)
    yield weighs("E is saturated early, and less at the end", f"{tay}section 5", early, 0.0)
    yield weighs(
        "M is more often negative than positive", f"{tay}section 5", NEGATIVE - POSITIVE, 0.0
    )
    yield weighs(
        "CoDA subtracts: a twentieth of M is below -0.1", f"{tay}section 1", NEGATIVE, 0.05
    )


def arithmetic_claims() -> Iterator[Claim]:
    """Further ones, of lines."""
    statement = "CoDA answers better than softmax attention"
    yield learns(statement, "Tay et al. 2019, Table 6", {"model": "coda"}, SOFTMAX)
    for model in ("softmax", "linear", "hyla"):
        statement = f"CoDA answers held-out pairs of numbers better than {model}"
        yield learns(statement, "ours", coda(), {"model": model}, ON_OOD)


def pairs_claims() -> Iterator[Claim]:
    """Further ones, of pairs."""
    headed, single = ({"alignment": name} for name in ("heads", "networks"))
    statement = "In the base model for pairs CoDA answers better than softmax attention"
    yield learns(statement, "Tay et al. 2019, Table 3", coda(**single), SOFTMAX | single)
    statement = "With heads CoDA answers as well as softmax attention"
    yield learns(statement, "ours", coda(**headed), SOFTMAX | headed, ON_OOD, 0.01)
    for over in ("row", "matrix"):
        statement = f"With N centred ({over}) CoDA answers as well as softmax attention"
        of = coda(gate_centring=over, **single)
        yield learns(statement, "ours", of, SOFTMAX | single, ON_OOD, 0.01)
    for number, what in enumerate(("has the planted signs", "says which tokens count")):
        gain = AGREE["trained"][number] - AGREE["untrained"][number]
        yield weighs(f"M {what}, more than that of untrained weights", "ours", gain, 0.0)
    statement = "M has the planted signs, more than one would with all matches and no sign"
    yield weighs(statement, "ours", AGREE["trained"][0], 2 / 3)
