"""Small programs of AlgoLisp from their descriptions, made up so that their parts are known.

After the data of Polosukhin, Skidanov 2018 ("Neural Program Search"), on which Tay et al. 2019
("CoDA", section 3.7) write programs: the forms of text, program and tests are those of the data,
the problems are fewer and simpler.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from tasks.algolisp.interpreter import PRIMITIVES, Tree, run_program, write_program
from tasks.algolisp.problems import AlgoLispProblem
from tasks.answers import score_sequence
from tasks.batch import Batch
from tasks.common import Key, require_choice, require_held_out, require_int, require_number
from tasks.stream_task import StreamTask

_MARKS = ("<pad>", "<bos>", "<eos>")
_PAD, _BOS, _EOS = range(3)
_MOST_ITEMS, _LARGEST_ITEM, _LARGEST_NUMBER = 8, 30, 9

_HOLE = "X"
"""In a program: that of the array that it is applied to."""

_Part = tuple[Tree, tuple[str, str]]
"""A part of a program, and two texts that say it."""

_SOURCES: dict[str, _Part] = {
    "all": ("a", ("the elements of a", "the numbers in a")),
    "first": (["slice", "a", "0", "b"], ("the first b elements of a", "the first b numbers in a")),
    "range": (["range", "0", "b"], ("the integers from 0 to b", "the numbers below b")),
}
_EVEN, _ODD = (["lambda1", ["==", ["%", "arg1", "2"], rest]] for rest in ("0", "1"))
_SELECTIONS: dict[str, _Part] = {
    "none": (_HOLE, ("", "")),
    "prime": (["filter", _HOLE, "is_prime"], ("that are prime", "which are prime numbers")),
    "composed": (
        ["filter", _HOLE, ["combine", "!", "is_prime"]],
        ("that are not prime", "which are no prime numbers"),
    ),
    "even": (["filter", _HOLE, _EVEN], ("that are even", "which are divisible by two")),
    "odd": (["filter", _HOLE, _ODD], ("that are odd", "which are not divisible by two")),
    "greater": (
        ["filter", _HOLE, ["partial0", "b", "<"]],
        ("that are greater than b", "which are bigger than b"),
    ),
    "less": (
        ["filter", _HOLE, ["partial1", "b", "<"]],
        ("that are less than b", "which are smaller than b"),
    ),
}
_TRANSFORMATIONS: dict[str, _Part] = {
    "none": (_HOLE, ("", "")),
    "squared": (["map", _HOLE, "square"], ("squared", "multiplied by themselves")),
    "doubled": (["map", _HOLE, ["partial0", "2", "*"]], ("doubled", "multiplied by two")),
    "halved": (["map", _HOLE, ["partial1", "2", "/"]], ("halved", "divided by two")),
    "increased": (["map", _HOLE, ["partial0", "b", "+"]], ("increased by b", "plus b")),
    "subtracted": (
        ["map", _HOLE, ["partial0", "b", "-"]],
        ("subtracted from b", "taken away from b"),
    ),
    "last digit": (["map", _HOLE, ["partial1", "10", "%"]], ("modulo 10", "reduced modulo 10")),
}
_AGGREGATIONS: dict[str, _Part] = {
    "none": (_HOLE, ("all of", "the list of")),
    "sum": (["reduce", _HOLE, "0", "+"], ("the sum of", "the total of")),
    "largest": (["reduce", _HOLE, "0", "max"], ("the largest of", "the maximum of")),
    "smallest": (["reduce", _HOLE, "1000000000", "min"], ("the smallest of", "the minimum of")),
    "number": (["len", _HOLE], ("the number of", "how many there are of")),
    "sorted": (["sort", _HOLE], ("in ascending order", "in sorted order")),
    "reversed": (["reverse", _HOLE], ("in reverse order", "from last to first")),
}
_OPENINGS = ("given an array a and a number b", "you have numbers a and a number b", "for a and b")
_VERBS = ("find", "compute", "return")

_PARTS = {
    "source": _SOURCES,
    "selection": _SELECTIONS,
    "transformation": _TRANSFORMATIONS,
    "aggregation": _AGGREGATIONS,
}


@dataclass(frozen=True, kw_only=True)
class AlgoLispConfig:
    """Settings of generated AlgoLisp.

    Attributes:
        held_out: share of the pairs of a selection and a transformation that is held out for `ood`,
            rounded to a number of pairs; neither side may be empty.
        n_tests: number of tests of a problem, 1 to 100; the published data have ten.
        seed: seeds the pairs and every batch, 0 to 2^32 - 1.

    Raises:
        ValueError: an argument is out of its range.

    Example:
        >>> AlgoLispConfig(held_out=0.5).n_tests
        10
    """

    held_out: float = 0.25
    n_tests: int = 10
    seed: int = 0

    def __post_init__(self) -> None:
        require_number("held_out", self.held_out, 0, 1)
        n_pairs = (len(_SELECTIONS) - 1) * (len(_TRANSFORMATIONS) - 1)
        items = "pairs of a selection and a transformation"
        require_held_out("held_out", self.held_out, self.n_ood, n_pairs, items)
        require_int("n_tests", self.n_tests, 1, 100)
        require_int("seed", self.seed, 0, 2**32 - 1)

    @property
    def n_ood(self) -> int:
        """Number of pairs of a selection and a transformation that are held out."""
        return round(self.held_out * (len(_SELECTIONS) - 1) * (len(_TRANSFORMATIONS) - 1))


class AlgoLisp(StreamTask[tuple[Tensor, Tensor]]):
    """Programs from descriptions, with tests.

    A program takes an array `a` and a number `b`. It takes numbers from a source, selects some of
    them, transforms each, or both in one of two orders, and sums up the result:

        given an array a and a number b , find the sum of the elements of a that are prime , squared
        reduce ( map ( filter a is_prime ) square ) 0 +

    Each part is said in one of two ways.

    Splits: `train` and `id` have the same pairs of selection and transformation, `ood` the held-out
    ones. In known pairs is every selection and every transformation, and each is there alone.

    A batch has (int64 ids in `vocabulary`, padded with 0) inputs: the text [batch, source_pos];
    and, for teacher forcing, the begin token 1 and the program [batch, target_pos]; targets
    [batch, target_pos]: the program and the end token 2; mask [batch, target_pos]: True for both;
    and the latents
    `source`, `selection`, `transformation`, `aggregation` [batch] int64: numbers of the parts,
    named in `PARTS`; 0 for no selection, transformation or aggregation;
    `order` [batch] int64: 1 if the transformation comes before the selection;
    `primitives` [batch, primitive] bool: which of `PRIMITIVE_NAMES` are in the program;
    `length` [batch] int64: tokens of the program;
    `a` [batch, test, item], -1 for padding, and `b` [batch, test], int64: arguments of the tests.

    Raises:
        ValueError: too many pairs are to be held out.

    Example:
        >>> task = AlgoLisp(AlgoLispConfig())
        >>> task.problem(task.batch("id", 0, 1), 0).is_solved_by("(")
        False
    """

    SPLITS: ClassVar = ("train", "id", "ood")
    PARTS: ClassVar = {name: tuple(parts) for name, parts in _PARTS.items()}
    PRIMITIVE_NAMES: ClassVar = tuple(
        name
        for name in (*PRIMITIVES, "lambda1")
        if any(
            name in write_program(tree if isinstance(tree, list) else [tree])
            for parts in _PARTS.values()
            for tree, _ in parts.values()
        )
    )

    def __init__(self, config: AlgoLispConfig) -> None:
        super().__init__(key=Key(config))
        self.config = config
        self._known, self._held_out = self._split_pairs()

    def pairs(self, split: str) -> Int[np.ndarray, "pair 2"]:
        """The pairs of selection and transformation of a split.

        Raises:
            ValueError: `split` is unknown.
        """
        require_choice("split", split, self.SPLITS)
        return self._held_out if split == "ood" else self._known

    @cached_property
    def vocabulary(self) -> tuple[str, ...]:
        """The words of texts and programs; a token's id is its index."""
        texts = [
            *_OPENINGS,
            *_VERBS,
            ",",
            *(text for parts in _PARTS.values() for _, texts in parts.values() for text in texts),
        ]
        words = {word for text in texts for word in text.split()}
        for parts in _PARTS.values():
            for tree, _ in parts.values():
                words |= {*write_program(tree), "(", ")"} - {_HOLE}
        return (*_MARKS, *sorted(words))

    def _split_pairs(self) -> tuple[Int[np.ndarray, "pair 2"], Int[np.ndarray, "pair 2"]]:
        n_selections, n_transformations = len(_SELECTIONS), len(_TRANSFORMATIONS)
        is_known = np.ones((n_selections, n_transformations), bool)
        inner = np.array(list(product(range(1, n_selections), range(1, n_transformations))))
        for row, column in self._key.generator("/pairs").permutation(inner):
            is_known[row, column] = False
            if not is_known[row, 1:].any() or not is_known[1:, column].any():
                is_known[row, column] = True
            if (~is_known).sum() == self.config.n_ood:
                return np.argwhere(is_known), np.argwhere(~is_known)
        raise ValueError(
            f"held_out must leave every selection a transformation and the other way round, got "
            f"{self.config.held_out!r}: {self.config.n_ood} pairs, of which "
            f"{(~is_known).sum()} can be"
        )

    def _draw(
        self, split: str, size: int, generator: np.random.Generator
    ) -> Batch[tuple[Tensor, Tensor]]:
        pairs = self.pairs(split)[generator.integers(len(self.pairs(split)), size=size)]
        source = generator.integers(len(_SOURCES), size=size)
        aggregation = generator.integers(len(_AGGREGATIONS), size=size)
        # Without both there is no order.
        order = generator.integers(2, size=size) * (pairs > 0).all(1)
        said = generator.integers(6, size=(size, 6)).tolist()
        shape = (size, self.config.n_tests)
        a = generator.integers(_LARGEST_ITEM + 1, size=(*shape, _MOST_ITEMS))
        n_items = generator.integers(_MOST_ITEMS + 1, size=shape)
        a[np.arange(_MOST_ITEMS) >= n_items[..., None]] = -1
        b = generator.integers(1, _LARGEST_NUMBER + 1, size=shape)
        parts = np.stack([source, pairs[:, 0], pairs[:, 1], aggregation, order], 1)
        rows = [
            (_text(*numbers, said=choices), write_program(_tree(*numbers)))
            for numbers, choices in zip(parts.tolist(), said, strict=True)
        ]
        names = (*_PARTS, "order")
        latents = {name: torch.from_numpy(parts[:, at].copy()) for at, name in enumerate(names)}
        programs = [set(program) for _, program in rows]
        latents["primitives"] = torch.tensor(
            [[name in program for name in self.PRIMITIVE_NAMES] for program in programs]
        )
        latents["length"] = torch.tensor([len(program) for _, program in rows])
        latents |= {"a": torch.from_numpy(a), "b": torch.from_numpy(b)}
        return self._encoded(rows, latents)

    def _encoded(
        self, rows: Sequence[tuple[list[str], list[str]]], latents: dict[str, Tensor]
    ) -> Batch[tuple[Tensor, Tensor]]:
        most_source, most_target = self._widths
        source = torch.full((len(rows), most_source), _PAD)
        shifted = torch.full((len(rows), most_target), _PAD)
        targets = torch.full_like(shifted, _PAD)
        for row, sides in enumerate(rows):
            text, program = ([self._ids[word] for word in words] for words in sides)
            source[row, : len(text)] = torch.tensor(text)
            shifted[row, : len(program) + 1] = torch.tensor([_BOS, *program])
            targets[row, : len(program) + 1] = torch.tensor([*program, _EOS])
        return Batch(
            inputs=(source, shifted), targets=targets, mask=targets != _PAD, latents=latents
        )

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {word: number for number, word in enumerate(self.vocabulary)}

    @cached_property
    def _widths(self) -> tuple[int, int]:
        """The lengths of the longest text, and of the longest program with its end."""
        every = list(product(*(range(len(parts)) for parts in _PARTS.values()), (0,)))
        programs = [write_program(_tree(*numbers)) for numbers in every]
        texts = [
            _text(*numbers, said=[opening, 0, said, said, said, said])
            for numbers in every
            for said in range(2)
            for opening in range(len(_OPENINGS))
        ]
        return max(map(len, texts)), max(map(len, programs)) + 1

    def program(self, batch: Batch[Any], example: int) -> Tree:
        """Return the program of an example."""
        return _tree(*(int(batch.latents[name][example]) for name in (*_PARTS, "order")))

    def problem(self, batch: Batch[Any], example: int) -> AlgoLispProblem:
        """Return the program of an example with its tests."""
        tree, tests = self.program(batch, example), []
        arrays, numbers = (batch.latents[name][example].tolist() for name in ("a", "b"))
        for array, number in zip(arrays, numbers, strict=True):
            arguments = {"a": [item for item in array if item >= 0], "b": number}
            tests.append((arguments, run_program(tree, arguments)))
        return AlgoLispProblem(tree=tree, tests=tests)

    def words(
        self, batch: Batch[tuple[Tensor, Tensor]], example: int
    ) -> tuple[list[str], list[str]]:
        """Return the program and the text of one example as lists of words, "" for padding.

        They label the queries and the keys of attention from the program to the text. `<eos>` ends
        the program.
        """
        program, text = (
            ["" if token == _PAD else self.vocabulary[token] for token in ids[example].tolist()]
            for ids in (batch.targets, batch.inputs[0])
        )
        return program, text

    def decode(self, ids: Int[Tensor, " pos"]) -> str:
        """Return the words before the first `<eos>`, with spaces.

        Args:
            ids: of `vocabulary`; `<pad>` and `<bos>` are skipped.
        """
        tokens = ids.tolist()
        end = tokens.index(_EOS) if _EOS in tokens else len(tokens)
        return " ".join(self.vocabulary[token] for token in tokens[:end] if token > _EOS)

    score = staticmethod(score_sequence)


def _part(kind: str, number: int) -> _Part:
    return list(_PARTS[kind].values())[number]


def _tree(source: int, selection: int, transformation: int, aggregation: int, order: int) -> Tree:
    """The program of some parts."""
    steps = [_part("selection", selection)[0], _part("transformation", transformation)[0]]
    tree = _part("source", source)[0]
    for step in [*(steps[::-1] if order else steps), _part("aggregation", aggregation)[0]]:
        tree = _filled(step, tree)
    return tree


def _filled(tree: Tree, inner: Tree) -> Tree:
    """A program with another one in place of its hole."""
    if isinstance(tree, list):
        return [_filled(item, inner) for item in tree]
    return inner if tree == _HOLE else tree


def _text(
    source: int,
    selection: int,
    transformation: int,
    aggregation: int,
    order: int,
    *,
    said: Sequence[int],
) -> list[str]:
    """The words that describe a program; `said` chooses the texts of opening, verb and parts."""
    numbers = {
        "source": source,
        "selection": selection,
        "transformation": transformation,
        "aggregation": aggregation,
    }
    texts = {
        kind: _part(kind, number)[1][choice % 2]
        for (kind, number), choice in zip(numbers.items(), said[2:], strict=True)
    }

    def parts() -> Iterator[str]:
        yield f"{_OPENINGS[said[0] % 3]} , {_VERBS[said[1] % 3]}"
        yield texts["aggregation"]
        yield texts["source"]
        chosen = [texts["selection"], texts["transformation"]]
        yield " , ".join(filter(None, chosen[::-1] if order else chosen))

    return " ".join(parts()).split()
