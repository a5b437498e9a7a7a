"""The tasks of Webb, Sinha, Cohen 2021, "Emergent Symbols through Binding in External Memory".

A problem is a row of pictures of objects. Its answer depends on which of them are the same, never
on what they show; objects that training never shows tell whether a model has found the rule.
Mittal et al. 2021, "Compositional Attention", takes these tasks up.
"""

from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from itertools import permutations
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tasks.batch import Batch
from tasks.common import Key, require_choice, require_int

ESBN_CHARACTERS = (
    "7AWwͲζϘϛϝϠϡϢЂЖЗЛЮюњԲԼՀՋՎխղփლრტჯჴჵჷჹ↰↱↳↶↷↸↻⇐⇜⇥⇭⇲∂∑∛"
    "≟≪≫≾⊚⊩⊰⊻⋃⋌⋔⋚⋛⋟⋥⋧⋲⋽□▣▭△▷▽◁◎◯◸◹◺◿♈♉♋♌♍♐♑♒♓♔♖✤✫✶❊❚ⵃⵋⵒ"
)
"""What the objects show; an object's id is its index. They were chosen to look unlike."""

ESBN_RELATIONS = {
    "same_different": ("different", "same"),
    "rmts": ("different", "same"),
    "distribution_of_three": ("ABC", "ACB", "BAC", "BCA", "CAB", "CBA"),
    "identity_rules": ("ABA", "ABB", "AAA"),
}
"""The names of each rule's relations; a relation's id is its index."""

_PIXELS = 32
_FINER = 4  # characters are drawn so many times larger and averaged: hinting does not matter
_POINTS = 24


@dataclass(frozen=True, kw_only=True)
class ESBNConfig:
    """Which of the tasks it is.

    Attributes:
        rule: "same_different", "rmts" (relational match to sample), "distribution_of_three" or
            "identity_rules".
        n_withheld: m, how many of the 100 objects training does not show: 0 (then there is no
            `ood`), or k to 100 - k, where a problem needs k objects, in the order of the rules 2,
            5, 4 and 4. The paper: 0, 50, 85 and 95, and with "same_different" also 98.
        seed: chooses the withheld objects and every batch, 0 to 2^32 - 1. What a smaller m
            withholds, a larger one does too.

    Raises:
        ValueError: an argument is out of its range.
    """

    rule: Literal["same_different", "rmts", "distribution_of_three", "identity_rules"]
    n_withheld: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        require_choice("rule", self.rule, tuple(ESBN_RELATIONS))
        least = int(_problems(self.rule).slot.max()) + 1
        most = len(ESBN_CHARACTERS) - least
        m = self.n_withheld
        if type(m) is not int or not (m == 0 or least <= m <= most):
            raise ValueError(
                f"n_withheld={m!r}: allowed is 0 or a whole number from {least} to {most}, since a "
                f"problem of rule={self.rule!r} needs {least} objects"
            )
        require_int("seed", self.seed, 0, 2**32 - 1)


@dataclass(frozen=True)
class _ObjectsOf:
    """What decides on the withheld objects."""

    seed: int


class ESBN:
    """The sampler of the tasks; one letter stands for one object, another for another.

    `same_different`: AB or AA; the answer is 0 (different) or 1 (same).
    `rmts`: a pair, AB or AA, then two pairs, DE and CC in either order; the answer is which of
    them, 0 or 1, is the same or different as the first pair is.
    `distribution_of_three`: a row ABC, then the first two of a row of the same objects in any of
    the 6 orders, then four candidates for its third, A to D in any order; the answer is the
    candidate's place, 0 to 3.
    `identity_rules`: a row ABA, ABB or AAA, then the first two of a row by the same rule with other
    objects, CD or, of AAA, CC, then four candidates for its third, A to D in any order; the answer
    is the candidate's place, 0 to 3.

    Without the first row or pair, half the answers of `rmts` and `distribution_of_three` can be
    known, and two thirds of those of `identity_rules`.

    Splits: `train` and `id` are two streams without end from the objects that are not withheld,
    `ood` (none if n_withheld is 0) one from the withheld ones. Which objects are A, B, ... is
    drawn anew for each problem. Relations and answers are balanced: counted from the beginning of a
    stream, all pairs of the two come before one of them comes again, but for the order within a
    batch, which is random. Few objects make few problems, so `id` is no set of unseen ones: with
    m = 98, same_different has four in all.
    """

    SPLITS: ClassVar = ("train", "id", "ood")

    def __init__(self, config: ESBNConfig) -> None:
        self.config = config
        self._key = Key(config)
        self._problems = _problems(config.rule)
        order = Key(_ObjectsOf(config.seed)).generator("/objects").permutation(len(ESBN_CHARACTERS))
        n_shown = len(order) - config.n_withheld
        self._shown, self._withheld = np.sort(order[:n_shown]), np.sort(order[n_shown:])

    @property
    def splits(self) -> tuple[str, ...]:
        """The names of the splits."""
        return self.SPLITS if self.config.n_withheld else self.SPLITS[:2]

    @property
    def n_images(self) -> int:
        """Number of pictures of a problem: 2, 6 or 9."""
        return self._problems.slot.shape[-1]

    @property
    def n_answers(self) -> int:
        """Number of answers: 2 or 4."""
        return int(self._problems.answer.max()) + 1

    @property
    def chance(self) -> float:
        """Accuracy of guessing: one over the number of answers."""
        return 1 / self.n_answers

    @property
    def relations(self) -> tuple[str, ...]:
        """The names of the relations of this rule."""
        return ESBN_RELATIONS[self.config.rule]

    @property
    def pictures(self) -> Float[Tensor, "object 1 height width"]:
        """What every object looks like, [100, 1, 32, 32]: 0 is background, 1 is ink.

        Drawn from the font DejaVu Sans, as matplotlib brings it; another version of its font
        library may give edges other shades.
        """
        return _pictures("cpu").clone()

    def objects(self, split: str) -> Int[np.ndarray, " object"]:
        """Return the ids of the objects that a split shows, ascending.

        Raises:
            ValueError: `split` is unknown.
        """
        require_choice("split", split, self.splits)
        return (self._withheld if split == "ood" else self._shown).copy()

    def batch(self, split: str, index: int, size: int, device: str | torch.device = "cpu") -> Batch:
        """Return batch number `index` of a split: always the same one for the same arguments.

        Args:
            split: one of `splits`.
            index: 0 to 2^40.
            size: number of examples, 1 to 2^22; a smaller batch need not be a part of a larger one.
            device: where the batch shall be.

        Returns:
            A batch with
            inputs [batch, image, 1, 32, 32] float32, in [0, 1], the images in the order in which
            the class tells them;
            targets [batch, 1] int64, the answers;
            mask [batch, 1], all True;
            latents (int64):
            `objects` [batch, image]: ids, indices into `ESBN_CHARACTERS`;
            `relation` [batch]: index into `relations`; of distribution_of_three, the order of the
            second row, of rmts, that of the first pair;
            `answer` [batch]: the target.

        Raises:
            ValueError: `split` is unknown, or `index` or `size` is out of range.
        """
        objects = self.objects(split)
        require_int("index", index, 0, 2**40)
        require_int("size", size, 1, 2**22)
        generator = self._key.generator(f"/{split}/{index}")
        slot, relation, answer = self._problems
        outcome = (index * size + generator.permutation(size)) % len(slot)
        pattern = slot[outcome, generator.integers(slot.shape[1], size=size)]
        drawn = objects[generator.random((size, len(objects))).argsort(1)[:, : slot.max() + 1]]
        shown = torch.from_numpy(np.take_along_axis(drawn, pattern, 1)).to(device)

        images = _pictures(str(shown.device)).index_select(0, shown.flatten())
        answers = torch.from_numpy(answer[outcome]).to(device)
        return Batch(
            inputs=images.view(size, self.n_images, 1, _PIXELS, _PIXELS),
            targets=answers[:, None],
            mask=torch.ones_like(answers[:, None], dtype=torch.bool),
            latents={
                "objects": shown,
                "relation": torch.from_numpy(relation[outcome]).to(device),
                "answer": answers,
            },
        )

    def groups(self, batch: Batch) -> dict[str, Bool[Tensor, " batch"]]:
        """Return which problems have which of the `relations`."""
        relation = batch.latents["relation"]
        return {name: relation == number for number, name in enumerate(self.relations)}

    def score(
        self, logits: Float[Tensor, "batch 1 answer"], batch: Batch
    ) -> dict[str, Float[Tensor, " batch"]]:
        """Return whether the most probable answer is right.

        Args:
            logits: [batch, 1, n_answers].
            batch: the batch that they answer.

        Returns:
            `accuracy` [batch]: 1 where it is right, else 0.

        Raises:
            ValueError: `logits` has another shape.
        """
        expected = (*batch.targets.shape, self.n_answers)
        if tuple(logits.shape) != expected:
            raise ValueError(f"logits of shape {tuple(logits.shape)}: allowed is {expected}")
        return {"accuracy": (logits.argmax(-1) == batch.targets).all(-1).float()}


class _Problems(NamedTuple):
    """All patterns of a rule: an outcome is a relation with an answer, a variant how it is set."""

    slot: Int[np.ndarray, "outcome variant image"]  # 0 is the object A, 1 is B, ...
    relation: Int[np.ndarray, " outcome"]
    answer: Int[np.ndarray, " outcome"]


@cache
def _problems(rule: str) -> _Problems:
    # Each of them: relation, pattern, answer.
    found: list[tuple[str, str, int]]
    if rule == "same_different":
        found = [("different", "AB", 0), ("same", "AA", 1)]
    elif rule == "rmts":
        found = [
            ("different", "AB" + "DE" + "CC", 0),
            ("different", "AB" + "CC" + "DE", 1),
            ("same", "AA" + "CC" + "DE", 0),
            ("same", "AA" + "DE" + "CC", 1),
        ]
    else:
        if rule == "distribution_of_three":
            rows = {order: ("ABC", order) for order in ESBN_RELATIONS[rule]}
        else:
            rows = {"ABA": ("ABA", "CDC"), "ABB": ("ABB", "CDD"), "AAA": ("AAA", "CCC")}
        found = [
            (relation, first + second[:2] + "".join(candidates), candidates.index(second[2]))
            for relation, (first, second) in rows.items()
            for candidates in permutations("ABCD")
        ]
    patterns = defaultdict(list)
    for relation, pattern, answer in found:
        slots = ["ABCDE".index(letter) for letter in pattern]
        patterns[ESBN_RELATIONS[rule].index(relation), answer].append(slots)
    outcomes = sorted(patterns)
    relation, answer = np.array(outcomes).T
    return _Problems(np.array([patterns[one] for one in outcomes]), relation, answer)


@cache
def _pictures(device: str) -> Float[Tensor, "object 1 height width"]:
    if device != "cpu":
        return _pictures("cpu").to(device)
    import matplotlib  # only those who look at objects pay for it
    from matplotlib.ft2font import FT2Font

    font = FT2Font(str(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"))
    font.set_size(_POINTS * _FINER, 72)
    size = _PIXELS * _FINER
    canvas = np.zeros((len(ESBN_CHARACTERS), size, size), np.float32)
    for character, picture in zip(ESBN_CHARACTERS, canvas, strict=True):
        font.set_text(character)
        font.draw_glyphs_to_bitmap()
        ink = np.asarray(font.get_image(), np.float32) / 255
        rows, columns = (np.flatnonzero(ink.any(axis)) for axis in (1, 0))
        ink = ink[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
        top, left = (np.array(picture.shape) - ink.shape) // 2
        picture[top : top + ink.shape[0], left : left + ink.shape[1]] = ink
    fine = canvas.reshape(-1, 1, _PIXELS, _FINER, _PIXELS, _FINER)
    return torch.from_numpy(fine.mean((3, 5)))
