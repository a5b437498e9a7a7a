"""Readings and claims of the study of generated texts."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import xarray as xr

from studies.claims.coda import (
    GATES,
    NEGATIVE,
    SOFTMAX,
    TAY,
    coda,
    learns,
    no_gain,
    raised,
    weighs,
)
from studies.engine import Claim, Reading, metric, read
from studies.engine.readings import unmeasured

# Readings

BLEU = partial(read, "decoding", "bleu", search="beam")
"""BLEU of beam search on a split."""
SOLVED = partial(read, "execution", "solved", search="beam")
"""The share of programs of beam search that pass all tests, on a split."""


def aligned(control: str = "observed", target: str = "aligned") -> Reading:
    """How often cross-attention points to a target on `ood`, in the head that is best on `id`."""

    def values(result: xr.DataTree) -> np.ndarray:
        if "alignment" not in result.children:
            return unmeasured(result)
        share = result["alignment"]["share"].stack(head_of=("layer", "head"))
        share = share.sel(control=control, target=target)
        best = share.sel(split="id").fillna(-1).argmax("head_of")
        return share.sel(split="ood").isel(head_of=best).to_numpy()

    return Reading(f"pointing to the {target} token, best head ({control})", values)


# Claims

GENERATED, IWSLT = "generated grammars", "IWSLT'15"
OWN, PUBLISHED = "generated programs", "published AlgoLisp"


def claims_of_translation() -> Iterator[Claim]:
    """All claims about translation: on generated grammars, and on the paper's data."""
    for data, test, development in (
        (GENERATED, BLEU(split="id"), BLEU(split="id")),
        (IWSLT, BLEU(split="test"), BLEU(split="valid")),
    ):
        compared: Any = {"of": coda(), "than": SOFTMAX, "reading": test}
        statement = f"CoDA translates better than softmax attention ({data})"
        yield learns(statement, f"{TAY}Table 4", **compared)
        for what, changes in (
            ("E", {"affinity_centring": "matrix"}),
            ("E and N", {"affinity_centring": "matrix", "gate_centring": "matrix"}),
        ):
            statement = (
                f"Centring {what} does not help to translate ({data}): it gains less than 0.5 BLEU"
            )
            yield no_gain(statement, f"{TAY}Table 8", coda(), coda(**changes), development, by=0.5)
        for e, n in list(product(("tanh", "sigmoid"), GATES))[1:]:
            statement = f"tanh(E) * sigmoid(N) is better than {e}(E) * {n}(N) ({data})"
            other = coda(affinity=e, gate=n)
            yield learns(statement, f"{TAY}Table 9", coda(), other, development)
    statement = "CoDA gains 1.41 BLEU over softmax attention, within 0.5 (IWSLT'15)"
    gained: Any = {"reading": raised(BLEU(split="test"), "softmax", 1.41), "within": 0.5}
    yield learns(statement, f"{TAY}Table 4", coda(), SOFTMAX, **gained)
    statement = "CoDA translates held-out pairs better than softmax attention (generated grammars)"
    yield learns(statement, "ours", coda(), SOFTMAX, BLEU(split="ood"))
    for of, name in ((SOFTMAX, "Softmax attention"), (coda(), "CoDA")):
        reading = aligned() - aligned("untrained")
        statement = f"{name} points to the word that a word comes from, more than when untrained"
        yield Claim(statement, "ours", reading, of, 0.0)
    statement = "CoDA subtracts when it translates: a twentieth of M is below -0.1"
    yield weighs(statement, f"{TAY}section 1", NEGATIVE, 0.05)


def claims_of_programs() -> Iterator[Claim]:
    """All claims about programs: on generated ones, and on the paper's data."""
    for data, test in ((OWN, metric("accuracy", "id")), (PUBLISHED, metric("accuracy", "test"))):
        statement = f"CoDA writes more programs right than softmax attention ({data})"
        yield learns(statement, f"{TAY}Table 7", coda(), SOFTMAX, test)
    statement = f"CoDA gains 0.9 points over softmax attention, within 0.5 ({PUBLISHED})"
    gained: Any = {"reading": raised(metric("accuracy", "test"), "softmax", 0.009)}
    yield learns(statement, f"{TAY}Table 7", coda(), SOFTMAX, **gained, within=0.005)
    statement = f"CoDA writes more programs that pass all tests ({OWN})"
    yield learns(statement, "ours", coda(), SOFTMAX, SOLVED(split="id"))
    statement = f"CoDA writes more programs of held-out compositions that pass all tests ({OWN})"
    yield learns(statement, "ours", coda(), SOFTMAX, SOLVED(split="ood"))
    statement = "CoDA subtracts when it writes programs: a twentieth of M is below -0.1"
    yield weighs(statement, f"{TAY}section 1", NEGATIVE, 0.05)
