"""What arithmetic and ListOps share: splits by depth, and examples that are drawn at random."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal, final

import numpy as np
from jaxtyping import Int

from tasks.common import Key, require_choice, require_int, require_number, require_range
from tasks.expressions.base import ExpressionTask
from tasks.expressions.trees import N_DIGITS, Notation, collect, grow, held_out
from tasks.finite import ExampleSet, allot, balanced_order

_MAX_DEPTH = 12


@dataclass(frozen=True, kw_only=True)
class NestedConfig:
    """Settings of a task of nested expressions, whose splits differ in depth.

    Attributes:
        n_train: expressions in one epoch.
        n_id, n_valid, n_ood: expressions of the evaluation splits, all distinct.
        valid_depths: the smallest and the largest depth of `valid`, both beyond train_depth.
        ood_depths: the smallest and the largest depth of `ood`, both beyond valid_depths.
        max_length: the greatest length of a sequence in tokens, at most 120; longer ones are
            rejected.
        seed: seeds the expressions and their order, 0 to 2^32 - 1.
    """

    NOTATION: ClassVar[Notation]
    TRAIN_FROM: ClassVar[int]
    """The smallest depth in `train`."""
    ID_FROM: ClassVar[int]
    """The smallest depth in `id`, and the least train_depth."""
    MAX_TRAIN_DEPTH: ClassVar[int]

    n_train: int
    n_id: int = 2_000
    n_valid: int = 1_000
    n_ood: int = 2_000
    train_depth: int = 5
    valid_depths: tuple[int, int] = (6, 6)
    ood_depths: tuple[int, int] = (7, 8)
    nested: float
    max_length: int = 50
    seed: int = 0

    def __post_init__(self) -> None:
        n_depths = self.train_depth + 1 - self.TRAIN_FROM
        require_int("n_train", self.n_train, n_depths, 10**7)
        for name, n in (("n_id", self.n_id), ("n_valid", self.n_valid), ("n_ood", self.n_ood)):
            require_int(name, n, 1, 10**6)
        require_int("train_depth", self.train_depth, self.ID_FROM, self.MAX_TRAIN_DEPTH)
        require_range("valid_depths", self.valid_depths, self.train_depth + 1, _MAX_DEPTH)
        require_range("ood_depths", self.ood_depths, self.valid_depths[1] + 1, _MAX_DEPTH)
        require_number("nested", self.nested, 0, 1)
        least = self.NOTATION.min_length(self.ood_depths[1])
        require_int("max_length", self.max_length, least, 120)
        if self.nested == 1 and (least := self.NOTATION.min_length_nested(self.ood_depths[1])) > (
            self.max_length
        ):
            raise ValueError(
                f"nested must be below 1 with ood_depths={self.ood_depths} and max_length="
                f"{self.max_length}, got {self.nested!r}: the shortest expression of depth "
                f"{self.ood_depths[1]} then has {least} tokens"
            )
        require_int("seed", self.seed, 0, 2**32 - 1)

    @property
    def notation(self) -> Notation:
        """The syntax of the expressions that are drawn."""
        return self.NOTATION

    def counts(self, split: str) -> dict[int, int]:
        """Return the number of expressions of each depth of a split, as equal as possible.

        Raises:
            ValueError: `split` is unknown.
        """
        require_choice("split", split, ExpressionTask.SPLITS)
        total, first, last = {
            "train": (self.n_train, self.TRAIN_FROM, self.train_depth),
            "id": (self.n_id, self.ID_FROM, self.train_depth),
            "valid": (self.n_valid, *self.valid_depths),
            "ood": (self.n_ood, *self.ood_depths),
        }[split]
        depths = range(first, last + 1)
        return dict(zip(depths, allot(total, [total] * len(depths)), strict=True))


class NestedTask(ExpressionTask):
    """A task of nested expressions over digits."""

    def __init__(
        self,
        config: NestedConfig,
        *,
        key: Key,
        separator: str,
        side: Literal["balanced", "right"],
        width: int,
    ) -> None:
        """Set up the task without making any examples.

        Args:
            config: the settings.
            key: seeds the expressions.
            separator: the separator of tokens in a text.
            side: the argument that makes an operation deep, see `grow`.
            width: the width of the sequences, at least the greatest length of an expression.
        """
        super().__init__(key=key, separator=separator, width=width)
        self._settings = config
        self._side: Literal["balanced", "right"] = side
        self._width = width

    @abstractmethod
    def _heights(self, depth: int, generator: np.random.Generator) -> Int[np.ndarray, " tree"]:
        """Return the nesting depths of a chunk of trees, among them trees of a depth."""

    @abstractmethod
    def _of_depth(
        self, tokens: Int[np.ndarray, "n pos"], depth: int
    ) -> Int[np.ndarray, "kept pos"]:
        """Return the sequences that have a depth."""

    @final
    @property
    def answers(self) -> tuple[str, ...]:
        """The digits."""
        return tuple(str(digit) for digit in range(N_DIGITS))

    def _generate(self, split: str) -> ExampleSet:
        counts = self._settings.counts(split)
        tokens = np.concatenate([self._draw(split, depth, n) for depth, n in counts.items()])
        if split != "train":
            depth = np.repeat(list(counts), list(counts.values()))
            generator = self._key.generator(f"/order/{split}")
            tokens = tokens[balanced_order(depth, generator)]
        return self._describe(tokens)

    @final
    def _draw(self, split: str, depth: int, count: int) -> Int[np.ndarray, "count pos"]:
        config = self._settings
        if depth == 0:
            tokens = np.full((count, self._width), -1, np.int8)
            tokens[:, 0] = np.arange(count) % N_DIGITS
            return tokens

        def draw(generator: np.random.Generator) -> Int[np.ndarray, "n pos"]:
            tokens = grow(
                self._heights(depth, generator),
                generator,
                notation=config.notation,
                nested=config.nested,
                side=self._side,
                max_length=self._width,
            )
            if split in ("train", "id") and depth >= config.ID_FROM:
                tokens = tokens[held_out(tokens, self._key) == (split == "id")]
            return self._of_depth(tokens, depth)

        path = f"/{split}/depth {depth}"
        return collect(count, draw, key=self._key, path=path, distinct=split != "train")

    @final
    def _groups(self, train: ExampleSet) -> list[Int[np.ndarray, " member"]]:
        return [np.arange(len(train))]
