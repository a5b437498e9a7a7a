"""Readings and claims of the studies of text: generated data, then published data.

Claims about generated texts are ours. What Tay et al. 2019 claim is about published data, and only
claims about these decide it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from studies.claims.coda import (
    MATCHES,
    NEGATIVE,
    ON_ID,
    ON_OOD,
    SIGNS,
    SOFTMAX,
    TAY,
    coda,
    learns,
    no_gain,
    weighs,
)
from studies.engine import Claim, Reading, metric, read

# Readings

ON_TEST, ON_VALID = metric("accuracy", "test"), metric("accuracy", "valid")


def ranked(name: str, split: str, control: str = "trained") -> Reading:
    """A mean over questions of the measure `ranking`, such as `average_precision`."""
    return read("ranking", name, split=split, control=control)


MAP, MRR, FIRST = "average_precision", "reciprocal_rank", "recall_at_1"

# Claims


def better(statement: str, source: str, reading: Reading, **data: Any) -> Claim:
    """The claim that a reading is higher with CoDA than with softmax attention."""
    return learns(
        f"{statement} than softmax attention", source, coda(**data), SOFTMAX | data, reading
    )


def of_generated(texts: str) -> Iterator[Claim]:
    """Claims about the weights of CoDA on generated texts, whose signs are planted."""
    for what, agree in (("has the planted signs", SIGNS), ("says which words count", MATCHES)):
        statement = f"On generated {texts} M {what}, more than that of untrained weights"
        yield weighs(statement, "ours", agree["trained"] - agree["untrained"])
    statement = f"On generated {texts} CoDA subtracts: a twentieth of M is below -0.1"
    yield weighs(statement, "ours", NEGATIVE, 0.05)


def centring(where: str, name: str, *readings: tuple[str, Reading]) -> Iterator[Claim]:
    """Claims of the paper's Table 8 on a data set, with development scores."""
    e, n = {"affinity_centring": "matrix"}, {"gate_centring": "matrix"}
    for what, centred in (("E", e), ("E and N", e | n)):
        for label, reading in readings:
            statement = (
                f"On {where} centring {what} (matrix) does not help{label}: "
                "it gains less than a point"
            )
            of, than = coda(name=name), coda(name=name, **centred)
            yield no_gain(statement, f"{TAY}Table 8", of, than, reading)


def claims_of_pairs() -> Iterator[Claim]:
    """All claims about inference between pairs of texts."""
    yield better("On generated pairs CoDA answers better", "ours", ON_ID)
    yield better("On generated pairs of held-out words CoDA answers better", "ours", ON_OOD)
    yield from of_generated("pairs")
    for where, name, reading in (
        ("SNLI", "snli", ON_TEST),
        ("matched MNLI", "mnli", ON_VALID),
        ("mismatched MNLI", "mnli", ON_TEST),
        ("SciTail", "scitail", ON_TEST),
        ("Dialogue NLI", "dnli", ON_TEST),
    ):
        yield better(f"On {where} CoDA answers better", f"{TAY}Table 3", reading, name=name)
    yield from centring("SciTail", "scitail", ("", ON_VALID))
    yield from centring("Dialogue NLI", "dnli", ("", ON_VALID))


def claims_of_ranking() -> Iterator[Claim]:
    """All claims about the ranking of answers."""
    for texts, split in (("questions", "id"), ("questions of held-out words", "ood")):
        statement = f"On generated {texts} CoDA has a higher MAP"
        yield better(statement, "ours", ranked(MAP, split))
    yield from of_generated("questions")
    for where, data, label, name in (
        ("TrecQA", "trecqa", "MAP", MAP),
        ("TrecQA", "trecqa", "MRR", MRR),
        ("WikiQA", "wikiqa", "MAP", MAP),
        ("WikiQA", "wikiqa", "MRR", MRR),
        ("the Ubuntu corpus", "ubuntu", "R@1", FIRST),
    ):
        statement = f"On {where} CoDA has a higher {label}"
        yield better(statement, f"{TAY}Table 2", ranked(name, "test"), name=data)
    yield from centring(
        "WikiQA", "wikiqa", (", MAP", ranked(MAP, "valid")), (", MRR", ranked(MRR, "valid"))
    )


def claims_of_sentiment() -> Iterator[Claim]:
    """All claims about the sentiment of texts."""
    yield better("On generated sentences CoDA answers better", "ours", ON_ID)
    statement = "Where known words are negated for the first time CoDA answers better"
    yield better(statement, "ours", ON_OOD)
    yield from of_generated("sentences")
    for where, name in (("IMDb", "imdb"), ("SST", "sst2")):
        yield better(f"On {where} CoDA answers better", f"{TAY}Table 5", ON_TEST, name=name)
