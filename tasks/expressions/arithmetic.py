"""Nested sums and products modulo 10, as in Csordás, Irie, Schmidhuber 2021, section 4.2.

Every operation has brackets: `(3+(4*5))` is 3. The model must evaluate expressions that are nested
more deeply than those of training.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np
from jaxtyping import Bool, Int

from tasks.causal import Variable
from tasks.common import Key, require_choice
from tasks.expressions.causal import ExpressionModel
from tasks.expressions.nested import NestedConfig, NestedTask
from tasks.expressions.reading import describe
from tasks.expressions.trees import CHUNK, N_DIGITS, Notation
from tasks.finite import ExampleSet

_PLUS, _TIMES, _OPEN, _CLOSE = range(N_DIGITS, N_DIGITS + 4)
_NOTATION = Notation(operators=(_PLUS, _TIMES), opening=_OPEN, closing=_CLOSE, n_arguments=(2, 2))


@dataclass(frozen=True, kw_only=True)
class ArithmeticConfig(NestedConfig):
    """Settings of arithmetic. The defaults are the paper's, but for the evaluation splits.

    Attributes:
        train_depth: the largest nesting depth of operations in `train` and `id`, 2 to 11.
        nested: probability that the shallower side of an operation is an operation too, 0 to 1.
        side: position of the deeper side: "balanced" draws it for every operation; "right" is the
            authors' generator, from which a model may learn where to look.

    Raises:
        ValueError: an argument is out of its range, or the deepest expressions are longer than
            max_length. Where they rarely fit, with `nested` near 1, the first batch raises it.

    Example:
        >>> config = ArithmeticConfig(n_train=200, n_id=20, n_valid=20, n_ood=20)
        >>> batch = Arithmetic(config).batch("ood", 0, 8)
        >>> sorted(set(batch.latents["depth"].tolist()))  # `train` has depths up to 5
        [7, 8]
    """

    NOTATION: ClassVar = _NOTATION
    TRAIN_FROM: ClassVar = 0
    ID_FROM: ClassVar = 2  # there are too few shallower expressions to hold some out
    MAX_TRAIN_DEPTH: ClassVar = 11

    n_train: int = 100_000
    nested: float = 0.2
    side: Literal["balanced", "right"] = "balanced"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choice("side", self.side, ("balanced", "right"))


class Arithmetic(NestedTask):
    """Nested sums and products modulo 10; splits and latents: see `ExpressionTask`.

    One side of an operation of depth d > 0 has depth d - 1. The other side is a digit or, with
    probability `nested` if d > 1, an operation of a depth uniform from 1 to d - 1, drawn in the
    same way. Operators and digits are uniform. Expressions longer than `max_length` are redrawn, so
    the deepest ones branch slightly less.

    From depth 2 on, a keyed hash of the expression assigns it to `train` or `id`. The 10
    expressions of depth 0 and the 200 of depth 1 are all left to `train`, where they are repeated,
    as some of depth 2 are.

    The answers are not equally frequent: "0" is right in about a quarter of the examples, since a
    product is 0 with a factor 0, and with the factors 5 and an even digit.

    `depth` is the nesting depth. All dataflow counts as used, even where it is multiplied by zero.

    Example:
        >>> Arithmetic(ArithmeticConfig(n_train=1000)).batch("train", 0, 64)
    """

    def __init__(self, config: ArithmeticConfig) -> None:
        # The greatest possible length: a digit, and four more tokens for each operation.
        width = _NOTATION.min_length(_NOTATION.max_operations(config.max_length))
        super().__init__(config, key=Key(config), separator="", side=config.side, width=width)
        self.config = config

    @property
    def vocabulary(self) -> tuple[str, ...]:
        """The digits, the two operators and the two brackets."""
        return (*self.answers, "+", "*", "(", ")")

    @property
    def _variables(self) -> dict[str, Variable]:
        constant = {"depth": Variable(), "edge_used": Variable()}
        return constant | ExpressionModel(_NOTATION, operate, N_DIGITS).variables()

    @property
    def _operation(self) -> str:
        return r"\([0-9][+*][0-9]\)"

    def _make(self, split: str) -> ExampleSet:
        return self._generate(split)

    def _describe(self, tokens: Int[np.ndarray, "n pos"]) -> ExampleSet:
        return describe_arithmetic(tokens)

    def _heights(self, depth: int, generator: np.random.Generator) -> Int[np.ndarray, " tree"]:
        return np.full(CHUNK, depth)

    def _of_depth(
        self, tokens: Int[np.ndarray, "n pos"], depth: int
    ) -> Int[np.ndarray, "kept pos"]:
        return tokens  # the depth is the nesting depth


def describe_arithmetic(tokens: Int[np.ndarray, "n pos"]) -> ExampleSet:
    """Evaluate sequences and compute their latents.

    Args:
        tokens: ids, padded with -1; every sequence is one well-formed expression.

    Returns:
        The examples, with the latents of `ExpressionTask`.
    """
    examples = describe(tokens, _NOTATION, operate)
    latents = dict(examples.latents)
    del latents["dependency_depth"]  # equals `depth`, since no branch is pruned
    return replace(examples, latents=latents)


def operate(
    symbol: Int[np.ndarray, " operation"],
    values: Int[np.ndarray, "operation 2"],
    n_arguments: Int[np.ndarray, " operation"],
) -> tuple[Int[np.ndarray, " operation"], Bool[np.ndarray, "operation 2"]]:
    """Return sums and products modulo 10, which depend on all arguments: see `reading.Operate`."""
    left, right = values.T.astype(np.int64)
    result = np.where(symbol == _PLUS, left + right, left * right) % N_DIGITS
    return result, np.ones(values.shape, bool)
