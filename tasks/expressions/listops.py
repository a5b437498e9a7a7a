"""ListOps with dependency depth, as in Csordás, Irie, Schmidhuber 2021, section 4.3.

Nested lists are reduced to their sum modulo 10, minimum, maximum or median:
`[SM 1 [MAX 3 4 ] ]` is 5. (The original task: Nangia, Bowman 2018, "ListOps".) A minimum depends on
one argument only, so the difficulty of an expression is not its nesting depth, but the depth that
remains when the branches without influence are pruned.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Bool, Int

from tasks.cache import DEFAULT_CACHE, load_arrays, save_arrays
from tasks.causal import Variable
from tasks.common import Key, require_int
from tasks.expressions.causal import ExpressionModel
from tasks.expressions.nested import NestedConfig, NestedTask
from tasks.expressions.reading import describe, read
from tasks.expressions.trees import CHUNK, N_DIGITS, Notation
from tasks.finite import ExampleSet

LISTOPS_OPERATORS = ("SM", "MIN", "MAX", "MED")
"""The operators' names: sum modulo 10, minimum, maximum, median; their ids follow the digits'."""

_SUM, _MINIMUM, _MAXIMUM, _MEDIAN = range(N_DIGITS, N_DIGITS + 4)
_CLOSE = N_DIGITS + 4
_MAX_ARGUMENTS = 5
_NOTATION = Notation(
    operators=(_SUM, _MINIMUM, _MAXIMUM, _MEDIAN),
    opening=None,
    closing=_CLOSE,
    n_arguments=(2, _MAX_ARGUMENTS),
)
# The first line sorts the first four values, the second one inserts the fifth.
_COMPARATORS = (
    *((0, 1), (2, 3), (0, 3), (1, 2), (0, 1), (2, 3)),
    *((3, 4), (0, 2), (1, 3), (0, 1), (2, 3)),
)
_EXTRA_HEIGHT = 2  # the most by which the nesting depth exceeds the dependency depth
_CACHE_VERSION = 3  # to be increased when the same config gives other expressions or latents


@dataclass(frozen=True, kw_only=True)
class ListOpsConfig(NestedConfig):
    """Settings of ListOps. The defaults are the paper's, but for the evaluation splits.

    Attributes:
        train_depth: the largest dependency depth in `train` and `id`, 1 to 10.
        valid_depths: the smallest and the largest dependency depth of `valid`, beyond train_depth.
        ood_depths: the smallest and the largest dependency depth of `ood`, beyond valid_depths.
        nested: probability that an argument is an operation, 0 to 1.
        max_arguments: the most arguments of an operation, 2 to 5; fewer make each operation easier.

    Raises:
        ValueError: an argument is out of its range, or the deepest expressions are longer than
            max_length. Where they rarely fit, with `nested` near 1, the first batch raises it.

    Example:
        >>> depths = {"train_depth": 2, "valid_depths": (3, 3), "ood_depths": (4, 4)}
        >>> config = ListOpsConfig(n_train=50, n_id=20, n_valid=20, n_ood=20, **depths)
        >>> ListOps(config, cache=None).batch("ood", 0, 3).latents["depth"]
        tensor([4, 4, 4])
    """

    NOTATION: ClassVar = _NOTATION
    TRAIN_FROM: ClassVar = 0
    ID_FROM: ClassVar = 1  # the digits alone, depth 0, are all in `train`
    MAX_TRAIN_DEPTH: ClassVar = 10

    n_train: int = 1_000_000
    nested: float = 0.3
    max_arguments: int = _MAX_ARGUMENTS

    def __post_init__(self) -> None:
        super().__post_init__()
        require_int("max_arguments", self.max_arguments, _NOTATION.n_arguments[0], _MAX_ARGUMENTS)

    @property
    def notation(self) -> Notation:
        """The syntax of the expressions that are drawn."""
        return replace(_NOTATION, n_arguments=(_NOTATION.n_arguments[0], self.max_arguments))


class ListOps(NestedTask):
    """ListOps; splits and latents: see `ExpressionTask`.

    Pruning: a sum depends on all arguments; minimum and maximum on the first argument that has this
    value; a median on the middle argument, or on the two middle ones, of which it is the mean,
    rounded down. Ties are ordered by a sorting network (`network_order`), as in the authors'
    results. A branch that no result depends on is pruned as a whole.

    The dependency depth of a literal is 0; that of an operation is one more than the largest among
    the arguments that it depends on. The latent `depth` is that of the whole expression; a further
    latent, `nesting_depth` [batch], is its depth without pruning, as `node_depth` is. An edge is
    used if neither it nor any operation above it is pruned.

    An operation has 2 to `max_arguments` arguments. For expressions of dependency depth k, trees
    are drawn whose nesting depth is uniform from k to k + 2: one random argument of each operation
    is one level shallower than the operation; each other argument is an operation with probability
    `nested`, whose depth is uniform from 1 to the same depth; the remaining arguments are digits.
    Trees of other dependency depths or over `max_length` are rejected.

    `train` has depths from 0, a digit alone, as section B.1 says; the other splits begin at 1, as
    in table 3. A keyed hash of the sequence assigns it to `train` or `id`. The evaluation splits
    have no sequence twice; `train` repeats short ones.

    Args:
        config: the settings.
        cache: folder of the cached splits, in files named by the config's hash; a damaged file is
            replaced. None: the examples are generated in every process.

    Example:
        >>> ListOps(ListOpsConfig(n_train=1000)).batch("train", 0, 64)
    """

    def __init__(self, config: ListOpsConfig, *, cache: Path | None = DEFAULT_CACHE) -> None:
        # The setting came later: expressions of the paper's settings stay what they were.
        later = ("max_arguments",) if config.max_arguments == _MAX_ARGUMENTS else ()
        super().__init__(
            config,
            key=Key(config, without=later),
            separator=" ",
            side="balanced",
            width=config.max_length,
        )
        self.config = config
        self._cache = cache

    @property
    def vocabulary(self) -> tuple[str, ...]:
        """The digits, the operators with their opening brackets, the closing bracket."""
        return (*self.answers, *(f"[{name}" for name in LISTOPS_OPERATORS), "]")

    @property
    def _variables(self) -> dict[str, Variable]:
        model = ExpressionModel(_NOTATION, operate, N_DIGITS)
        return {"nesting_depth": Variable(), **model.variables(), **model.pruned()}

    @property
    def _operation(self) -> str:
        fewest, most = _NOTATION.n_arguments
        return rf"\[({'|'.join(LISTOPS_OPERATORS)})( [0-9]){{{fewest},{most}}} \]"

    def _make(self, split: str) -> ExampleSet:
        if self._cache is None:
            return self._generate(split)
        path = self._cache / f"listops-{self._key.hexdigest()[:16]}-v{_CACHE_VERSION}-{split}.npz"
        examples = _load(path)
        if examples is None:
            examples = self._generate(split)
            _save(examples, path)
        return examples

    def _describe(self, tokens: Int[np.ndarray, "n pos"]) -> ExampleSet:
        return describe_listops(tokens)

    def _heights(self, depth: int, generator: np.random.Generator) -> Int[np.ndarray, " tree"]:
        return generator.integers(depth, depth + _EXTRA_HEIGHT + 1, CHUNK)

    def _of_depth(
        self, tokens: Int[np.ndarray, "n pos"], depth: int
    ) -> Int[np.ndarray, "kept pos"]:
        reading = read(tokens, _NOTATION, operate)
        return tokens[reading.dependency_depth[:, 0] == depth]


def describe_listops(tokens: Int[np.ndarray, "n pos"]) -> ExampleSet:
    """Evaluate sequences and compute their latents.

    Args:
        tokens: ids, padded with -1; every sequence is one well-formed expression.

    Returns:
        The examples, with the latents of `ListOps`.
    """
    examples = describe(tokens, _NOTATION, operate)
    latents = dict(examples.latents)
    latents["nesting_depth"], latents["depth"] = latents["depth"], latents.pop("dependency_depth")
    return replace(examples, latents=latents)


def operate(
    symbol: Int[np.ndarray, " operation"],
    values: Int[np.ndarray, "operation argument"],
    n_arguments: Int[np.ndarray, " operation"],
) -> tuple[Int[np.ndarray, " operation"], Bool[np.ndarray, "operation argument"]]:
    """Return results, and the arguments that each depends on: see `reading.Operate`."""
    values, count = values.astype(np.int64), n_arguments.astype(np.int64)[:, None]
    is_argument = np.arange(values.shape[1]) < count
    result, selected = np.zeros(len(values), np.int64), np.zeros(values.shape, bool)

    rows = np.flatnonzero(symbol == _SUM)
    result[rows] = np.where(is_argument[rows], values[rows], 0).sum(1) % N_DIGITS
    selected[rows] = is_argument[rows]

    for operator, padding, argbest in ((_MINIMUM, N_DIGITS, np.argmin), (_MAXIMUM, -1, np.argmax)):
        rows = np.flatnonzero(symbol == operator)
        best = argbest(np.where(is_argument[rows], values[rows], padding), axis=1)
        result[rows] = values[rows, best]
        selected[rows, best] = True

    rows = np.flatnonzero(symbol == _MEDIAN)
    values = values[rows]
    order = network_order(np.where(is_argument[rows], values, N_DIGITS))
    index, last = np.arange(len(rows)), count[rows, 0] - 1
    lower, upper = order[index, last // 2], order[index, (last + 1) // 2]
    result[rows] = (values[index, lower] + values[index, upper]) // 2
    selected[rows, lower] = selected[rows, upper] = True
    return result, selected


def network_order(
    values: Int[np.ndarray, "operation argument"],
) -> Int[np.ndarray, "operation argument"]:
    """Return the indices that sort the values, with ties ordered by a sorting network.

    The network is the bitonic one for up to five values; a comparator exchanges its two values if
    the first is larger.
    """
    values = values.copy()
    order = np.tile(np.arange(values.shape[1]), (len(values), 1))
    for first, second in _COMPARATORS:
        rows = np.flatnonzero(values[:, first] > values[:, second])
        for column in (values, order):
            column[rows, first], column[rows, second] = (
                column[rows, second],
                column[rows, first],
            )
    return order


def _save(examples: ExampleSet, path: Path) -> None:
    arrays = {"inputs": examples.inputs, "targets": examples.targets} | examples.latents
    save_arrays({name: values.numpy() for name, values in arrays.items()}, path)


def _load(path: Path) -> ExampleSet | None:
    """Return the examples of a file, or None where it is missing or damaged."""
    arrays = load_arrays(path)
    if arrays is None or not {"inputs", "targets"} <= arrays.keys():
        return None
    tensors = {name: torch.from_numpy(values) for name, values in arrays.items()}
    return ExampleSet(inputs=tensors.pop("inputs"), targets=tensors.pop("targets"), latents=tensors)
