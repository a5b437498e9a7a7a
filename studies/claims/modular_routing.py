"""The claims of "Attention for Compositional Modularity" (Ostapenko et al. 2022), and ours."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from studies import engine
from studies.engine import Claim, Reading
from studies.measures.modular_routing import (
    COLLAPSE,
    CONSTANT_OOD,
    DIGITS,
    ID,
    NULL,
    OOD,
    SCORES,
    SPECIAL,
    TRAINED,
    over_methods,
)
from studies.report.names import name_of, setting_names
from studies.setups.equations import MODULAR, ROUTERS

FULL, LOW, FAR = 0.95, 0.05, 0.1
"""Thresholds: full specialization, a low loss relative to that of a constant answer, and the ratio
at which one loss is far below another."""
SPREAD, ALIKE, HALF = 0.75, 0.1, 0.5
"""Thresholds of collapse: a high one, the largest difference of two that are alike, and the least
share of the attainable that is no severe collapse."""

ID_SHARE, OOD_SHARE = ID / engine.metric("loss_constant", "id"), OOD / CONSTANT_OOD
# Above 1 if specialization is not full or the OOD loss is not low.
SHORTFALL = ((1 - SPECIAL) / (1 - FULL)).apply(np.maximum, OOD_SHARE / LOW)
LOG_ID, LOG_OOD, LOG_SPECIAL = ((reading + 1e-3).apply(np.log2) for reading in (ID, OOD, SPECIAL))
NOT_BY_A_TENTH = float(np.log2(0.9))
"""The margin of "does not": logarithms of losses may differ by less than that."""

ORACLE, CROSS, CONCATENATION, ENCODER = ([name] for name in MODULAR)
PLAIN: Any = {"objective": "sampled", "selection_bottleneck": False}
TWO_LAYERS: Any = {"n_layers": 2, "functional_bottleneck": "oracle", "module_keys": "direct"}
END_TO_END: Any = TWO_LAYERS | {"pool": "mlp"}
TRUE_MODULES: Any = TWO_LAYERS | {"pool": "operations"}
MONOLITHIC = {"model": "monolithic"}
SAMPLED, ALL_PATHS = {"objective": "sampled"}, {"objective": "all_paths"}
FREE, TIGHT = ({"model": "encoder", "selection_bottleneck": value} for value in (0, 1))
FEW, MANY = {"n_points": 1000}, {"n_points": 20_000}
MIN_METHODS = 6
"""How many methods are ranked at least: more than the routers."""

PAPER = "Ostapenko et al. 2022, "


def at_size(n_operators: int) -> dict[str, int]:
    """The condition of a number of operations |S|."""
    return {"n_operators": n_operators}


def claim(
    statement: str,
    reading: Reading,
    exceeds: Any,
    of: Any = None,
    at: str = "section 4.1",
    **options: Any,
) -> Claim:
    """A claim of the paper; where it has thresholds, they are ours."""
    return Claim(statement, PAPER + at, reading, of or {}, exceeds, **options)


of_learning = partial(claim, of_learning=True)


def claims_about_methods() -> Iterator[Claim]:
    """The paper's claims about strategies, with learned and with true modules."""
    for the, no, settings in (
        ("The", "No", END_TO_END),
        ("With true modules the", "With true modules no", TRUE_MODULES),
    ):
        yield claim(
            f"{the} structural oracle reaches full specialization and a low OOD loss",
            1 - SHORTFALL.among(ORACLE, **settings),
            exceeds=0.0,
        )
        yield claim(
            f"{no} other router reaches both",
            SHORTFALL.among(ROUTERS, **settings),
            exceeds=1.0,
        )
    tight_encoder = {"model": "encoder", "selection_bottleneck": True}
    yield from beats_each(
        tight_encoder,
        [method for method in methods(*ROUTERS) if method != tight_encoder],
        "With true modules the encoder with selection bottleneck",
        TRUE_MODULES,
    )
    yield from beats_each(
        {"model": "cross_attention"} | PLAIN,
        methods("concatenation", "encoder", objective=("sampled", "all_paths")),
        "Cross-attention",
        END_TO_END,
    )
    for name in MODULAR:
        yield claim(
            f"The OOD loss of the monolithic network exceeds that of: {name_of(name)}",
            OOD,
            exceeds={"model": name},
            of=MONOLITHIC,
        )


def methods(*models: str, **settings: Sequence[str]) -> list[dict[str, Any]]:
    """The methods that routers make, with and without selection bottleneck, at other settings."""
    values = {"model": models} | settings | {"selection_bottleneck": (False, True)}
    return [dict(zip(values, method, strict=True)) for method in product(*values.values())]


def beats_each(
    best: Mapping[str, Any], rivals: Sequence[Mapping[str, Any]], name: str, settings: Any
) -> Iterator[Claim]:
    """The claims that a method is second to the structural oracle alone, one for each rival.

    The best of all rivals of a draw would be better than each of them by chance alone, and is no
    condition, of which it can be asked whether it was trained.
    """
    for rival in rivals:
        than = ", ".join(setting_names(rival))
        special, ood = (
            reading.among([best["model"], rival["model"]], **settings) for reading in (SPECIAL, OOD)
        )
        yield claim(f"{name} specializes more than: {than}", special, rival, of=best)
        yield claim(f"{name} has a lower OOD loss than: {than}", ood, best, of=rival)


def where_routing_fails(reading: Reading) -> Reading:
    """This reading for routers whose own path has no low OOD loss.

    A network that composes has no poor loss which the choice of its path could explain, and its
    best path cannot be far below it.
    """
    share = TRAINED["routed"] / CONSTANT_OOD
    failing = reading.apply(lambda values, routed: np.where(routed > LOW, values, np.nan), share)
    return failing.among(ROUTERS, **END_TO_END)


def claims_about_routing() -> Iterator[Claim]:
    """The paper's claims about best paths, objectives, specialization and the bottleneck."""
    yield claim(
        "The best path of each sample has a low OOD loss",
        LOW - (TRAINED["sample"] / CONSTANT_OOD).among(MODULAR, **END_TO_END),
        exceeds=0.0,
    )
    yield claim(
        "The OOD loss of the best path of each sample is far below the router's, where that is not "
        "low",
        FAR - where_routing_fails(TRAINED["sample"] / TRAINED["routed"]),
        exceeds=0.0,
    )
    yield of_learning(
        "All paths lower the ID loss", ID.among(ROUTERS, **END_TO_END), ALL_PATHS, of=SAMPLED
    )
    yield of_learning(
        "All paths do not lower the ID loss of the structural oracle by a tenth",
        LOG_ID.among(ORACLE, **END_TO_END),
        exceeds=SAMPLED,
        of=ALL_PATHS,
        margin=NOT_BY_A_TENTH,
    )
    ranked = (reading.among(MODULAR, **END_TO_END) for reading in (SPECIAL, OOD))
    yield claim(
        "Among methods low OOD loss goes with high specialization (rank correlation)",
        (0.0 - over_methods(rank_correlation, *ranked)).among(ORACLE, **PLAIN),
        exceeds=0.0,
    )
    of_all_paths: Any = PLAIN | ALL_PATHS | END_TO_END
    yield Claim(
        "On all paths, encoder and cross-attention have about the same OOD loss (a factor of 2)",
        f"{PAPER}section 4.1",
        LOG_OOD.among(ENCODER + CROSS, **of_all_paths),
        {"model": "encoder"},
        equals={"model": "cross_attention"},
        margin=1.0,
    )
    yield claim(
        "On all paths, cross-attention specializes 1.5 times as much as the encoder, or more",
        LOG_SPECIAL.among(ENCODER + CROSS, **of_all_paths),
        exceeds={"model": "encoder"},
        of={"model": "cross_attention"},
        margin=float(np.log2(1.5)),
    )
    encoder: Any = {"selection_bottleneck": False} | END_TO_END
    for other in ORACLE + CROSS + CONCATENATION:
        special, digits = (
            reading.among([other, *ENCODER], **encoder) for reading in (SPECIAL, DIGITS)
        )
        yield claim(
            f"The encoder specializes less than: {name_of(other)}",
            special,
            {"model": "encoder"},
            of={"model": other},
        )
        yield claim(
            f"The encoder's choice depends on the digits more than that of: {name_of(other)}",
            digits,
            {"model": other},
            of={"model": "encoder"},
        )
    yield claim("The encoder's collapse score is high", COLLAPSE.among(ENCODER, **encoder), SPREAD)
    yield claim(
        "The selection bottleneck raises the encoder's specialization",
        SPECIAL.among(ENCODER, **END_TO_END),
        exceeds=FREE,
        of=TIGHT,
    )
    yield claim(
        "No method collapses severely",
        SCORES["collapse_attainable"].among(MODULAR, **END_TO_END),
        exceeds=HALF,
        at="section 4",
    )


def rank_correlation(first: np.ndarray, second: np.ndarray) -> float:
    """Spearman's correlation; NaN for fewer than `MIN_METHODS` pairs, or if one side is constant.

    Of the four routers alone it would be chance that decides: one order in 24 has a value of 1.
    """
    from scipy.stats import rankdata

    if len(first) < MIN_METHODS or np.ptp(first) == 0 or np.ptp(second) == 0:
        return np.nan
    return float(np.corrcoef(rankdata(first), rankdata(second))[0, 1])


def claims_about_sizes() -> Iterator[Claim]:
    """The paper's claims about the numbers of operations |S| and of points C."""
    yield claim("OOD loss falls from |S| = 3 to 5", OOD, at_size(5), of=at_size(3))
    yield Claim(
        "From |S| = 5 to 15 the OOD loss stays about the same (a factor of 2)",
        f"{PAPER}section 4.1",
        LOG_OOD,
        at_size(15),
        equals=at_size(5),
        margin=1.0,
    )
    yield claim(
        "OOD loss rises from |S| = 5 to 15 (for some methods)",
        OOD.among(ROUTERS),
        at_size(5),
        of=at_size(15),
    )
    yield claim(
        "At |S| = 15 the structural oracle's OOD loss is low",
        LOW - OOD_SHARE.among(ORACLE),
        exceeds=0.0,
        of=at_size(15),
    )
    yield claim(
        "At |S| = 15 no other OOD loss is low",
        OOD_SHARE.among((*ROUTERS, "monolithic")),
        exceeds=LOW,
        of=at_size(15),
    )
    yield claim(
        "Specialization falls from |S| = 10 to 15",
        SPECIAL.among(ROUTERS),
        exceeds=at_size(15),
        of=at_size(10),
    )
    yield Claim(
        "The structural oracle's specialization is alike at |S| = 10 and 15",
        f"{PAPER}section 4.1",
        SPECIAL.among(ORACLE),
        at_size(15),
        equals=at_size(10),
        margin=1 - FULL,
    )
    yield claim(
        "More points lower the monolithic network's OOD loss",
        OOD.among(["monolithic"]),
        exceeds=MANY,
        of=FEW,
    )
    helped = ORACLE + CROSS
    yield claim("More points raise specialization", SPECIAL.among(helped, **PLAIN), FEW, of=MANY)
    yield claim("More points lower the OOD loss", OOD.among(helped, **PLAIN), MANY, of=FEW)
    for name, models, settings in (
        ("concatenation", CONCATENATION, PLAIN),
        ("the encoder on all paths", ENCODER, ALL_PATHS),
    ):
        yield claim(
            f"More points lower the specialization of {name}",
            SPECIAL.among(models, **settings),
            exceeds=MANY,
            of=FEW,
        )
    yield claim(
        "More points raise the OOD loss of concatenation",
        OOD.among(CONCATENATION, **PLAIN),
        exceeds=FEW,
        of=MANY,
    )
    yield claim(
        "More points do not raise the OOD loss of the encoder on all paths by a tenth",
        LOG_OOD.among(ENCODER, **ALL_PATHS),
        exceeds=MANY,
        of=FEW,
        margin=NOT_BY_A_TENTH,
    )
    small, larger = at_size(3), at_size(5)
    yield of_learning("With |S| = 3 more points raise the ID loss", ID, small | FEW, small | MANY)
    yield of_learning(
        "With |S| = 5 more points do not raise the ID loss by a tenth",
        LOG_ID,
        exceeds=larger | MANY,
        of=larger | FEW,
        margin=NOT_BY_A_TENTH,
    )


def claims_of_ablations() -> Iterator[Claim]:
    """The paper's claims about functional bottlenecks, one layer, and keys."""
    drawn = COLLAPSE.among(ORACLE + ENCODER + CROSS)
    oracle, attention, none = (
        {"functional_bottleneck": name} for name in ("oracle", "attention", "none")
    )
    yield Claim(
        "Functional bottlenecks, oracle and attention, give the same collapse (to .1)",
        f"{PAPER}section 4.2",
        drawn,
        attention,
        equals=oracle,
        margin=ALIKE,
    )
    yield claim(
        "Without functional bottleneck modules collapse more", drawn, none, oracle, "section 4.2"
    )
    for other in ORACLE + CROSS + CONCATENATION:
        yield of_learning(
            f"With one layer the encoder has a lower ID loss than: {name_of(other)}",
            ID.among([other, *ENCODER], n_layers=1),
            exceeds={"model": "encoder"},
            of={"model": other},
            at="figure 6",
        )
    yield of_learning(
        "With one layer cross-attention's ID loss is not low",
        ID_SHARE.among(CROSS, n_layers=1),
        exceeds=LOW,
        at="figure 6",
    )
    direct, projected = ({"module_keys": name} for name in ("direct", "projected"))
    for split, reading in (("ID", ID), ("OOD", OOD)):
        yield of_learning(
            f"Keys that share a matrix give a higher {split} loss",
            reading.among(MODULAR),
            exceeds=direct,
            of=projected,
            at="section 4, figure 7",
        )


def claims_of_ours() -> Iterator[Claim]:
    """Our claims: is the best path due to what the modules learned?"""
    yield Claim(
        "The best path of each sample has a lower OOD loss than in untrained modules",
        "ours",
        1 - (TRAINED["sample"] / NULL["sample"]).among(ROUTERS, **END_TO_END),
        {},
        exceeds=0.0,
    )
    best = (TRAINED["task"] / TRAINED["routed"] / FAR).apply(
        np.maximum, TRAINED["task"] / NULL["task"]
    )
    yield Claim(
        "The best path of each task is far below the routed one on OOD loss, where that is not "
        "low, and below that of untrained modules",
        "ours",
        1 - where_routing_fails(best),
        {},
        exceeds=0.0,
    )


CLAIMS = (
    *claims_about_methods(),
    *claims_about_routing(),
    *claims_of_ablations(),
    *claims_of_ours(),
)
CLAIMS_ABOUT_SIZES = tuple(claims_about_sizes())
