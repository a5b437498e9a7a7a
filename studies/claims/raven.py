"""Readings and claims of the study of Raven rules (Schug et al. 2024)."""

from __future__ import annotations

from functools import partial
from typing import Any

from studies import engine
from studies.claims.experts import of_experts
from studies.engine import Claim, above_least, metric, read
from studies.measures.raven import HELD_OUT
from studies.report.names import name_of

OF_ALL: dict[str, Any] = {"layer": "all", "key": "all"}
"""The codes of all layers and keys, concatenated."""

OTHER_RULE: dict[str, Any] = {"condition": "other_rule", "outcome": "source_rule"}
"""B's rule differs from A's, and the answer follows B's rule."""

SAME_RULE = {"condition": "same_rule", "outcome": "base_rule"}
"""Both have the same rule, and the answer is right."""

patched = partial(read, "interchange", "rate", split=HELD_OUT, **OTHER_RULE)
CODE, PATTERN = (patched(site="all layers", scope=scope) for scope in ("code", "pattern"))
UNPATCHED = patched(site="none", scope="code")

erased = partial(read, "erasure", "rate", split=HELD_OUT, site="all layers")
ERASED, PERMUTED_ERASED, NOT_ERASED = (
    erased(condition=name) for name in ("erased", "control", "none")
)
"""Right answers for a feature whose rule was erased; a permuted rule; no rule."""


def decoded(split: str, control: str = "probe") -> engine.Reading:
    """The accuracy of decoding rules from the codes of all layers."""
    return read("decoding", "score", split=split, control=control, **OF_ALL, metric="accuracy")


def decoded_after(n_steps: int) -> engine.Reading:
    """`decoded` on held-out combinations, at a checkpoint along training."""
    of_probe = {"split": HELD_OUT, "control": "probe", "metric": "accuracy"}
    return read("decoding_along_training", "score", train_step=n_steps, **of_probe, **OF_ALL)


def legible(than: str, control: engine.Reading, source: str) -> Claim:
    """The claim that decoding is better than a control."""
    statement = "The rule is decodable from the latent code, on held-out combinations, better than"
    return Claim(f"{statement} {than}", source, decoded(HELD_OUT) - control, {}, 0.0)


def of_tokens(tokens: str, control: str = "probe") -> engine.Reading:
    """The accuracy of decoding rules on permuted, held-out instances, from chosen tokens."""
    at: dict[str, Any] = {"split": "ood", "layer": "all", "metric": "accuracy", "control": control}
    return read("permuted", "score", tokens=tokens, **at)


def correspondence(control: str = "probe") -> engine.Reading:
    """The accuracy of decoding which token of the second column corresponds to an answer token."""
    at: dict[str, Any] = {"split": "ood", "layer": "all", "metric": "accuracy", "control": control}
    return read("alignment", "score", column="second", **at)


BY_VALUES = read("decoding", "majority_of_type", split=HELD_OUT, metric="accuracy")
"""The accuracy of guessing rules from the values that a code's tokens show."""

RIGHT = metric("accuracy", "ood")
related = partial(read, "similarity", "related", centring="none", **OF_ALL)
RELATED = related(control="observed")
SCHUG = "Schug et al. 2024"
FIGURES = f"{SCHUG}, latent-code figures"
ABLATED = f"{SCHUG}, table A1"
HELD = "held-out combinations of rules"


def better(of: str, than: str, source: str = ABLATED) -> Claim:
    """The claim that one mechanism answers held-out combinations better than another."""
    statement = f"{name_of(of)} answers {HELD} better than {name_of(than)}"
    return Claim(statement, source, RIGHT, {"model": of}, {"model": than})


CLAIMS = (
    better("hyla", "softmax", SCHUG),
    better("hyla", "linear", SCHUG),
    better("hyla", "linear_relu"),
    better("hyla", "rms_head_linear"),
    better("linear", "softmax_relu"),
    Claim(
        f"Many heads answer {HELD} better than one",
        f"{SCHUG}, figure 5C",
        RIGHT,
        {},
        {"n_heads": 1},
    ),
    *(
        Claim(
            f"Models answer {HELD} better with more {what}",
            f"{SCHUG}, figure 4",
            above_least(RIGHT, axis),
            of={},
            exceeds=0.0,
        )
        for what, axis in (("instances", "n_steps"), ("layers", "n_layers"), ("width", "d_model"))
    ),
    *of_experts(RIGHT, 128),
    legible("from the untrained model's", decoded(HELD_OUT, "untrained"), FIGURES),
    legible("from the values that its tokens show", BY_VALUES, "ours"),
    legible(
        "a random rule for each pair of values",
        decoded(HELD_OUT, "control task"),
        "ours, after Hewitt & Liang 2019",
    ),
    Claim(
        "The rule is decodable better from HYLA's code than from softmax attention's, held out",
        FIGURES,
        decoded(HELD_OUT),
        of={"model": "hyla"},
        exceeds={"model": "softmax"},
    ),
    *(
        Claim(f"Sum and difference have more similar codes than {than}", FIGURES, reading, {}, 0.0)
        for than, reading in (
            ("other rules", RELATED),
            ("other rules, beyond the untrained model's", RELATED - related(control="untrained")),
        )
    ),
    Claim(
        "The rule is decoded better after 20,000 steps than after 4,000, on held-out combinations",
        "ours",
        decoded_after(20_000) - decoded_after(4000),
        of={},
        exceeds=0.0,
    ),
    Claim(
        "With permuted columns the rule is decodable from the code of the corresponding tokens, "
        "better than from that of the tokens at the same position",
        "ours",
        of_tokens("corresponding") - of_tokens("same position"),
        of={},
        exceeds=0.0,
    ),
    Claim(
        "Attention tells which token corresponds, better than the untrained model's",
        "ours",
        correspondence() - correspondence("untrained"),
        of={},
        exceeds=0.0,
    ),
    Claim(
        "The code is used: patching it makes the answer follow its rule",
        "ours",
        CODE - UNPATCHED,
        of={},
        exceeds=0.0,
    ),
    Claim(
        "The code is used: erasing its rule makes answers wrong, more than erasing a permuted one",
        "ours, after Belrose et al. 2023",
        PERMUTED_ERASED - ERASED,
        of={},
        exceeds=0.0,
    ),
)
