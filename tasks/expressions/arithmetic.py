"""Nested sums and products modulo 10, as in Csordás, Irie, Schmidhuber 2021, section 4.2.

Every operation stands in brackets: `(3+(4*5))` is 3. The model must evaluate expressions that are
nested deeper than any it ever saw.
"""

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from jaxtyping import Bool, Int

from tasks.common import Key, require_choice, require_int, require_range, require_share
from tasks.expressions.base import ExpressionTask
from tasks.expressions.reading import describe
from tasks.expressions.trees import CHUNK, N_DIGITS, Notation, collect, grow, held_out
from tasks.finite import ExampleSet, allot, balanced_order

_PLUS, _TIMES, _OPEN, _CLOSE = range(N_DIGITS, N_DIGITS + 4)
_NOTATION = Notation(operators=(_PLUS, _TIMES), opening=_OPEN, closing=_CLOSE, n_arguments=(2, 2))
_MAX_DEPTH = 12
_HELD_OUT_FROM = 2  # shallower expressions are too few to hold some out


@dataclass(frozen=True, kw_only=True)
class ArithmeticConfig:
    """Which arithmetic it is. The defaults are the paper's, but for the evaluation splits.

    Attributes:
        n_train: expressions in one epoch.
        n_id, n_valid, n_ood: expressions of the evaluation splits, all distinct.
        train_depth: the deepest nesting of operations in `train` and `id`, 2 to 11.
        valid_depths: the first and the last depth of `valid`, both beyond train_depth.
        ood_depths: the first and the last depth of `ood`, both beyond valid_depths.
        nested: probability that the less deep side of an operation is an operation too.
        side: where the deeper side stands: "balanced" flips a coin for every operation, "right" is
            how the authors' generator has it, from which a model may learn where to look.
        max_length: the longest sequence in tokens, at most 120; longer ones are not kept.
        seed: chooses the expressions and their order, 0 to 2^32 - 1.

    Raises:
        ValueError: an argument is out of its range, or the deepest expressions are longer than
            max_length.
    """

    n_train: int = 100_000
    n_id: int = 2_000
    n_valid: int = 1_000
    n_ood: int = 2_000
    train_depth: int = 5
    valid_depths: tuple[int, int] = (6, 6)
    ood_depths: tuple[int, int] = (7, 8)
    nested: float = 0.2
    side: Literal["balanced", "right"] = "balanced"
    max_length: int = 50
    seed: int = 0

    def __post_init__(self) -> None:
        require_int("n_train", self.n_train, self.train_depth + 1, 10**7)
        for name, n in (("n_id", self.n_id), ("n_valid", self.n_valid), ("n_ood", self.n_ood)):
            require_int(name, n, 1, 10**6)
        require_int("train_depth", self.train_depth, _HELD_OUT_FROM, _MAX_DEPTH - 1)
        require_range("valid_depths", self.valid_depths, self.train_depth + 1, _MAX_DEPTH)
        require_range("ood_depths", self.ood_depths, self.valid_depths[1] + 1, _MAX_DEPTH)
        require_share("nested", self.nested)
        require_choice("side", self.side, ("balanced", "right"))
        require_int("max_length", self.max_length, _NOTATION.min_length(self.ood_depths[1]), 120)
        require_int("seed", self.seed, 0, 2**32 - 1)

    def counts(self, split: str) -> dict[int, int]:
        """Return how many expressions of each depth a split has: as equal as can be."""
        total, first, last = {
            "train": (self.n_train, 0, self.train_depth),
            "id": (self.n_id, _HELD_OUT_FROM, self.train_depth),
            "valid": (self.n_valid, *self.valid_depths),
            "ood": (self.n_ood, *self.ood_depths),
        }[split]
        depths = range(first, last + 1)
        return dict(zip(depths, allot(total, [total] * len(depths)), strict=True))


class Arithmetic(ExpressionTask):
    """The sampler of the arithmetic task; splits and latents: see `ExpressionTask`.

    An expression of depth d > 0 is an operation one side of which has depth d - 1; the other side
    is a digit, or with probability `nested`, if d > 1, an operation, whose depth is uniform from 1
    to d - 1 and which is drawn likewise. Symbols and digits are uniform. What gets longer than
    `max_length` is drawn again, so the deepest expressions branch a little less.

    From depth 2 on, a keyed hash of the expression decides whether it may be in `train` or in `id`.
    There are only 10 expressions of depth 0 and 200 of depth 1: all of these are left to `train`,
    and occur in it many times, as some of depth 2 do.

    `depth` is the nesting depth. All flow counts as used, also what a product with zero ignores.
    """

    def __init__(self, config: ArithmeticConfig) -> None:
        super().__init__(key=Key(config), separator="")
        self.config = config

    @property
    def vocabulary(self) -> tuple[str, ...]:
        """The digits, the two symbols, the two brackets."""
        return (*self.answers, "+", "*", "(", ")")

    @property
    def answers(self) -> tuple[str, ...]:
        """The digits."""
        return tuple(str(digit) for digit in range(N_DIGITS))

    def _make(self, split: str) -> ExampleSet:
        counts = self.config.counts(split)
        tokens = np.concatenate([self._draw(split, depth, n) for depth, n in counts.items()])
        if split != "train":
            depth = np.repeat(list(counts), list(counts.values()))
            generator = self._key.generator(f"/order/{split}")
            tokens = tokens[balanced_order(depth, generator)]
        return describe_arithmetic(tokens)

    def _groups(self, train: ExampleSet) -> list[Int[np.ndarray, " member"]]:
        return [np.arange(len(train))]

    def _draw(self, split: str, depth: int, count: int) -> Int[np.ndarray, "count pos"]:
        config = self.config
        # The longest sequence that can be: one digit, and four tokens more with every operation.
        width = _NOTATION.min_length(_NOTATION.max_operations(config.max_length))
        if depth == 0:
            tokens = np.full((count, width), -1, np.int8)
            tokens[:, 0] = np.arange(count) % N_DIGITS
            return tokens

        def draw(generator: np.random.Generator) -> Int[np.ndarray, "some pos"]:
            tokens = grow(
                np.full(CHUNK, depth),
                generator,
                notation=_NOTATION,
                nested=config.nested,
                side=config.side,
                max_length=width,
            )
            if split in ("train", "id") and depth >= _HELD_OUT_FROM:
                tokens = tokens[held_out(tokens, self._key) == (split == "id")]
            return tokens

        path = f"/{split}/depth {depth}"
        return collect(count, draw, key=self._key, path=path, distinct=split != "train")


def describe_arithmetic(tokens: Int[np.ndarray, "n pos"]) -> ExampleSet:
    """Evaluate sequences and describe their graphs.

    Args:
        tokens: ids, -1 behind the end; every sequence is one well-formed expression.

    Returns:
        The examples, with the latents of `ExpressionTask`.
    """
    examples = describe(tokens, _NOTATION, operate)
    latents = dict(examples.latents)
    del latents["dependency_depth"]  # nothing is pruned, so it is `depth`
    return replace(examples, latents=latents)


def operate(
    symbol: Int[np.ndarray, " operation"],
    values: Int[np.ndarray, "operation 2"],
    n_arguments: Int[np.ndarray, " operation"],
) -> tuple[Int[np.ndarray, " operation"], Bool[np.ndarray, "operation 2"]]:
    """Return sums and products modulo 10; all arguments matter. See `expression_reading`."""
    left, right = values.T.astype(np.int64)
    result = np.where(symbol == _PLUS, left + right, left * right) % N_DIGITS
    return result, np.ones(values.shape, bool)
