"""The tasks of Webb, Sinha, Cohen 2021, "Emergent Symbols through Binding in External Memory".

A problem is a row of images of objects. Its answer depends only on which of them are the same;
objects that are withheld from training test whether a model has learned the rule. Mittal et al.
2021, "Compositional Attention", uses these tasks too.
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

from tasks.answers import is_correct
from tasks.batch import Batch
from tasks.causal import CausalTask, Variable, integers
from tasks.common import Key, SeedConfig, require_choice, require_int

ESBN_CHARACTERS = (
    "7AWwͲζϘϛϝϠϡϢЂЖЗЛЮюњԲԼՀՋՎխղփლრტჯჴჵჷჹ↰↱↳↶↷↸↻⇐⇜⇥⇭⇲∂∑∛"
    "≟≪≫≾⊚⊩⊰⊻⋃⋌⋔⋚⋛⋟⋥⋧⋲⋽□▣▭△▷▽◁◎◯◸◹◺◿♈♉♋♌♍♐♑♒♓♔♖✤✫✶❊❚ⵃⵋⵒ"
)
"""The characters of the objects; an object's id is its index. They were chosen to look unlike."""

ESBN_RELATIONS = {
    "same_different": ("different", "same"),
    "rmts": ("different", "same"),
    "distribution_of_three": ("ABC", "ACB", "BAC", "BCA", "CAB", "CBA"),
    "identity_rules": ("ABA", "ABB", "AAA"),
}
"""The names of each rule's relations; a relation's id is its index."""

_PIXELS = 32
_OVERSAMPLING = 4  # characters are drawn larger by this factor and averaged: no effect of hinting
_FONT_SIZE = 24


@dataclass(frozen=True, kw_only=True)
class ESBNConfig:
    """Settings of the ESBN tasks.

    Attributes:
        rule: "same_different", "rmts" (relational match to sample), "distribution_of_three" or
            "identity_rules".
        n_withheld: m, number of the 100 objects that are withheld from training: 0 (then there is
            no `ood`), or k to 100 - k, where a problem needs k objects: 2, 5, 4 and 4 in the order
            of the rules. The paper: 0, 50, 85 and 95, and with "same_different" also 98.
        seed: seeds the withheld objects and every batch, 0 to 2^32 - 1. The objects withheld for a
            smaller m are also withheld for a larger one.

    Raises:
        ValueError: an argument is out of its range.

    Example:
        >>> task = ESBN(ESBNConfig(rule="rmts", n_withheld=50))
        >>> task.batch("train", 0, 8).inputs.shape  # three pairs of images
        torch.Size([8, 6, 1, 32, 32])
        >>> len(set(task.objects("train")) & set(task.objects("ood")))
        0
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
                f"n_withheld must be 0 or an integer from {least} to {most}, since a problem of "
                f"rule={self.rule!r} needs {least} objects, got {m!r}"
            )
        require_int("seed", self.seed, 0, 2**32 - 1)


class ESBN(CausalTask):
    """The ESBN tasks; below, different letters stand for different objects.

    `same_different`: AB or AA; the answer is 0 (different) or 1 (same).
    `rmts`: a pair, AB or AA, then two pairs, DE and CC in either order; the answer is the index, 0
    or 1, of the pair that has the relation of the first pair.
    `distribution_of_three`: a row ABC, then the first two of a row of the same objects in any of
    the 6 orders, then four candidates for its third, A to D in any order; the answer is the index
    of the correct candidate, 0 to 3.
    `identity_rules`: a row ABA, ABB or AAA, then the first two of a row of the same rule with other
    objects, CD or, for AAA, CC, then four candidates for its third, A to D in any order; the answer
    is the index of the correct candidate, 0 to 3.

    Without the first row or pair, the best accuracy is 1/2 in `rmts` and `distribution_of_three`
    and 2/3 in `identity_rules`.

    Splits: `train` and `id` are two endless streams of problems from the objects that are not
    withheld, `ood` (absent if n_withheld is 0) one from the withheld objects. The objects A, B, ...
    are drawn for each problem. Relations and answers are balanced: counted from the beginning of a
    stream, each pair of relation and answer occurs once before any occurs again, up to the order
    within a batch, which is random. Few objects make few problems, so those of `id` can occur in
    `train`: with m = 98, same_different has four problems in all.

    Causal model: `relation`, `answer` (but in same_different, where it follows from the relation),
    `variant` and `letters` can be set. The mask is False where two letters have the same object.

    Example:
        >>> ESBN(ESBNConfig(rule="rmts", n_withheld=50)).batch("ood", 0, 32)
    """

    SPLITS: ClassVar = ("train", "id", "ood")

    def __init__(self, config: ESBNConfig) -> None:
        self.config = config
        self._key = Key(config)
        self._problems = _problems(config.rule)
        generator = Key(SeedConfig(config.seed)).generator("/objects")
        order = generator.permutation(len(ESBN_CHARACTERS))
        n_shown = len(order) - config.n_withheld
        self._shown, self._withheld = np.sort(order[:n_shown]), np.sort(order[n_shown:])

    @property
    def splits(self) -> tuple[str, ...]:
        """The names of the splits."""
        return self.SPLITS if self.config.n_withheld else self.SPLITS[:2]

    @property
    def n_images(self) -> int:
        """Number of images of a problem: 2, 6 or 9."""
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
        """The image of every object, [100, 1, 32, 32]: 0 is background, 1 is ink.

        Drawn in DejaVu Sans, which comes with matplotlib; the antialiasing may depend on the
        version of its font library.
        """
        return _pictures("cpu").clone()

    def objects(self, split: str) -> Int[np.ndarray, " object"]:
        """Return the ids of the objects of a split, ascending.

        Raises:
            ValueError: `split` is unknown.
        """
        require_choice("split", split, self.splits)
        return (self._withheld if split == "ood" else self._shown).copy()

    def batch(self, split: str, index: int, size: int, device: str | torch.device = "cpu") -> Batch:
        """Return batch `index` of a split, a pure function of the config and the arguments.

        Args:
            split: one of `splits`.
            index: 0 to 2^41.
            size: number of examples, 1 to 2^21; a smaller batch is in general not a part of a
                larger one.
            device: the device of the batch.

        Returns:
            A batch with
            inputs [batch, image, 1, 32, 32] float32, in [0, 1], the images in the order given for
            the rule;
            targets [batch, 1] int64, the answers;
            mask [batch, 1], all True;
            latents (int64):
            `objects` [batch, image]: ids, indices into `ESBN_CHARACTERS`;
            `letters` [batch, letter]: the ids of the objects A, B, ..., also of those not shown;
            `variant` [batch]: which of the patterns of images with this relation and answer;
            `relation` [batch]: index into `relations`; in distribution_of_three the order of the
            second row, in rmts the relation of the first pair;
            `answer` [batch]: the target.

        Raises:
            ValueError: `split` is unknown, or `index` or `size` is out of range.
        """
        objects = self.objects(split)
        require_int("index", index, 0, 2**41)
        require_int("size", size, 1, 2**21)
        generator = self._key.generator(f"/{split}/{index}")
        slot, relation, answer = self._problems
        outcome = (index * size + generator.permutation(size)) % len(slot)
        variant = generator.integers(slot.shape[1], size=size)
        order = generator.random((size, len(objects))).argsort(1)
        drawn = {
            **{"relation": relation[outcome], "answer": answer[outcome], "variant": variant},
            "letters": objects[order[:, : slot.max() + 1]],
        }
        on_device = {name: torch.from_numpy(value).to(device) for name, value in drawn.items()}
        return self._completed(on_device)

    @property
    def _variables(self) -> dict[str, Variable]:
        answer = Variable(allowed=integers(0, self.n_answers - 1))
        if self.config.rule == "same_different":
            answer = Variable(causes=("relation",), compute=torch.clone)
        return {
            "relation": Variable(allowed=integers(0, len(self.relations) - 1)),
            "answer": answer,
            "variant": Variable(allowed=integers(0, self._problems.slot.shape[1] - 1)),
            "letters": Variable(allowed=integers(0, len(ESBN_CHARACTERS) - 1)),
            "objects": Variable(
                causes=("relation", "answer", "variant", "letters"), compute=self._objects
            ),
            "inputs": Variable(causes=("objects",), compute=_shown),
            "targets": Variable(causes=("answer",), compute=lambda answer: answer[:, None].clone()),
            "mask": Variable(causes=("letters",), compute=_are_different),
        }

    def _objects(
        self,
        relation: Int[Tensor, " batch"],
        answer: Int[Tensor, " batch"],
        variant: Int[Tensor, " batch"],
        letters: Int[Tensor, "batch letter"],
    ) -> Int[Tensor, "batch image"]:
        slot, relations, answers = map(torch.from_numpy, self._problems)
        is_outcome = (relation.cpu()[:, None] == relations) & (answer.cpu()[:, None] == answers)
        pattern = slot[is_outcome.int().argmax(1), variant.cpu()]
        return letters.gather(1, pattern.to(letters.device))

    def groups(self, batch: Batch) -> dict[str, Bool[Tensor, " batch"]]:
        """Return, for each of the `relations`, the mask of the problems that have it."""
        relation = batch.latents["relation"]
        return {name: relation == index for index, name in enumerate(self.relations)}

    def score(
        self, logits: Float[Tensor, "batch 1 answer"], batch: Batch
    ) -> dict[str, Float[Tensor, " batch"]]:
        """Return `accuracy` [batch]: 1 where the most probable answer is correct, else 0.

        Args:
            logits: [batch, 1, n_answers].
            batch: the batch that was answered.

        Raises:
            ValueError: `logits` has another shape.
        """
        return {"accuracy": is_correct(logits, batch, self.n_answers)}


class _Problems(NamedTuple):
    """All patterns of a rule: an outcome is a relation and an answer; it has several variants."""

    slot: Int[np.ndarray, "outcome variant image"]  # 0 is the object A, 1 is B, ...
    relation: Int[np.ndarray, " outcome"]
    answer: Int[np.ndarray, " outcome"]


@cache
def _problems(rule: str) -> _Problems:
    problems: list[tuple[str, str, int]]  # relation, pattern, answer
    if rule == "same_different":
        problems = [("different", "AB", 0), ("same", "AA", 1)]
    elif rule == "rmts":
        problems = [
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
        problems = [
            (relation, first + second[:2] + "".join(candidates), candidates.index(second[2]))
            for relation, (first, second) in rows.items()
            for candidates in permutations("ABCD")
        ]
    patterns = defaultdict(list)
    for relation, pattern, answer in problems:
        slots = ["ABCDE".index(letter) for letter in pattern]
        patterns[ESBN_RELATIONS[rule].index(relation), answer].append(slots)
    outcomes = sorted(patterns)
    relation, answer = np.array(outcomes).T
    return _Problems(np.array([patterns[outcome] for outcome in outcomes]), relation, answer)


def _shown(objects: Int[Tensor, "batch image"]) -> Float[Tensor, "batch image 1 height width"]:
    images = _pictures(str(objects.device)).index_select(0, objects.flatten())
    return images.view(*objects.shape, 1, _PIXELS, _PIXELS)


def _are_different(letters: Int[Tensor, "batch letter"]) -> Bool[Tensor, "batch 1"]:
    return (letters.sort(1).values.diff(dim=1) != 0).all(1, keepdim=True)


@cache
def _pictures(device: str) -> Float[Tensor, "object 1 height width"]:
    if device != "cpu":
        return _pictures("cpu").to(device)
    import matplotlib  # imported here, since it is slow
    from matplotlib.ft2font import FT2Font

    font = FT2Font(str(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"))
    font.set_size(_FONT_SIZE * _OVERSAMPLING, 72)
    size = _PIXELS * _OVERSAMPLING
    canvas = np.zeros((len(ESBN_CHARACTERS), size, size), np.float32)
    for character, picture in zip(ESBN_CHARACTERS, canvas, strict=True):
        font.set_text(character)
        font.draw_glyphs_to_bitmap()
        ink = np.asarray(font.get_image(), np.float32) / 255
        rows, columns = (np.flatnonzero(ink.any(axis)) for axis in (1, 0))
        ink = ink[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
        top, left = (np.array(picture.shape) - ink.shape) // 2
        picture[top : top + ink.shape[0], left : left + ink.shape[1]] = ink
    blocks = canvas.reshape(-1, 1, _PIXELS, _OVERSAMPLING, _PIXELS, _OVERSAMPLING)
    return torch.from_numpy(blocks.mean((3, 5)))
