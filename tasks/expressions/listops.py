"""ListOps with dependency depth, as in Csordás, Irie, Schmidhuber 2021, section 4.3.

Nested lists are reduced to their sum modulo 10, minimum, maximum or median:
`[SM 1 [MAX 3 4 ] ]` is 5. (The task itself: Nangia, Bowman 2018, "ListOps".) A minimum ignores all
arguments but one, so what counts as hard is not how deep an expression is nested, but how deep is
what remains when the ignored branches are pruned.
"""

import os
import tempfile
import warnings
import zipfile
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Bool, Int

from tasks.common import Key, require_int, require_range, require_share
from tasks.expressions.base import ExpressionTask
from tasks.expressions.reading import describe, read
from tasks.expressions.trees import CHUNK, N_DIGITS, Notation, collect, grow, held_out
from tasks.finite import ExampleSet, allot, balanced_order

LISTOPS_OPERATORS = ("SM", "MIN", "MAX", "MED")
"""The operators' names: sum modulo 10, minimum, maximum, median; their ids follow the digits'."""

DEFAULT_CACHE = (
    Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "modscope"
)
"""Where generated expressions are kept, if nothing else is said."""

_SUM, _MINIMUM, _MAXIMUM, _MEDIAN = range(N_DIGITS, N_DIGITS + 4)
_CLOSE = N_DIGITS + 4
_MAX_ARGUMENTS = 5
_NOTATION = Notation(
    operators=(_SUM, _MINIMUM, _MAXIMUM, _MEDIAN),
    opening=None,
    closing=_CLOSE,
    n_arguments=(2, _MAX_ARGUMENTS),
)
# Sorts the first four values, merges the fifth into them.
_COMPARATORS = (
    *((0, 1), (2, 3), (0, 3), (1, 2), (0, 1), (2, 3)),
    *((3, 4), (0, 2), (1, 3), (0, 1), (2, 3)),
)
_EXTRA_HEIGHT = 2  # how much deeper than their dependency depth expressions are nested, at most
_MAX_DEPTH = 12
_CACHE_VERSION = 1  # to be raised when the same config gives other expressions


@dataclass(frozen=True, kw_only=True)
class ListOpsConfig:
    """Which ListOps it is. The defaults are the paper's, but for the evaluation splits.

    Attributes:
        n_train: expressions in one epoch.
        n_id, n_valid, n_ood: expressions of the evaluation splits, all distinct.
        train_depth: the largest dependency depth in `train` and `id`, 1 to 10.
        valid_depths: the first and the last dependency depth of `valid`, beyond train_depth.
        ood_depths: the first and the last dependency depth of `ood`, beyond valid_depths.
        nested: probability that an argument is an operation.
        max_length: the longest sequence in tokens, at most 120; longer ones are not kept.
        seed: chooses the expressions and their order, 0 to 2^32 - 1.

    Raises:
        ValueError: an argument is out of its range, or the deepest expressions are longer than
            max_length.
    """

    n_train: int = 1_000_000
    n_id: int = 2_000
    n_valid: int = 1_000
    n_ood: int = 2_000
    train_depth: int = 5
    valid_depths: tuple[int, int] = (6, 6)
    ood_depths: tuple[int, int] = (7, 8)
    nested: float = 0.3
    max_length: int = 50
    seed: int = 0

    def __post_init__(self) -> None:
        require_int("n_train", self.n_train, self.train_depth, 10**7)
        for name, n in (("n_id", self.n_id), ("n_valid", self.n_valid), ("n_ood", self.n_ood)):
            require_int(name, n, 1, 10**6)
        require_int("train_depth", self.train_depth, 1, _MAX_DEPTH - 2)
        require_range("valid_depths", self.valid_depths, self.train_depth + 1, _MAX_DEPTH)
        require_range("ood_depths", self.ood_depths, self.valid_depths[1] + 1, _MAX_DEPTH)
        require_share("nested", self.nested)
        require_int("max_length", self.max_length, _NOTATION.min_length(self.ood_depths[1]), 120)
        require_int("seed", self.seed, 0, 2**32 - 1)

    def counts(self, split: str) -> dict[int, int]:
        """Return how many expressions of each dependency depth a split has: as equal as can be."""
        total, first, last = {
            "train": (self.n_train, 1, self.train_depth),
            "id": (self.n_id, 1, self.train_depth),
            "valid": (self.n_valid, *self.valid_depths),
            "ood": (self.n_ood, *self.ood_depths),
        }[split]
        depths = range(first, last + 1)
        return dict(zip(depths, allot(total, [total] * len(depths)), strict=True))


class ListOps(ExpressionTask):
    """The sampler of the ListOps task; splits and latents: see `ExpressionTask`.

    The pruning rule: the sum depends on all arguments; the minimum and the maximum on the first
    argument that has this value; the median on the one argument in the middle, or on the two, of
    which it is the mean, rounded down. Where arguments tie, the middle is that of the order that a
    certain sorting network gives (`network_order`), as in the authors' results. A branch that no
    result depends on is pruned with all that is in it.

    The dependency depth of a literal is 0; that of an operation is one more than the largest among
    the arguments that it depends on. The latent `depth` is that of the whole expression; a further
    latent, `nesting_depth` [batch], is its depth with nothing pruned, as `node_depth` is. An
    edge is used if neither it nor anything above it is pruned.

    An operation has 2 to 5 arguments. To get expressions of dependency depth k, trees are grown
    whose nesting depth is uniform from k to k + 2: one argument of each operation, at a random
    place, is one less deep than the operation; each of the others is an operation with probability
    `nested`, whose depth is uniform from 1 to that same depth; the rest are digits. Those of other
    dependency depths or over `max_length` are dropped, until there are enough.

    A keyed hash of the sequence decides whether it may be in `train` or in `id`. The splits that
    are evaluated have no sequence twice; `train` is as it was drawn, so it repeats short ones.

    Args:
        config: which task it is.
        cache: folder where each split's expressions are kept, in a file named by the config's hash;
            a damaged file is made again. None: they are made anew in every process.
    """

    def __init__(self, config: ListOpsConfig, *, cache: Path | None = DEFAULT_CACHE) -> None:
        super().__init__(key=Key(config), separator=" ")
        self.config = config
        self._cache = cache

    @property
    def vocabulary(self) -> tuple[str, ...]:
        """The digits, the operators with their opening brackets, the closing bracket."""
        return (*self.answers, *(f"[{name}" for name in LISTOPS_OPERATORS), "]")

    @property
    def answers(self) -> tuple[str, ...]:
        """The digits."""
        return tuple(str(digit) for digit in range(N_DIGITS))

    def _make(self, split: str) -> ExampleSet:
        if self._cache is None:
            return self._generate(split)
        path = self._cache / f"listops-{self._key.hexdigest()[:16]}-v{_CACHE_VERSION}-{split}.npz"
        examples = _load(path)
        if examples is None:
            examples = self._generate(split)
            _save(examples, path)
        return examples

    def _groups(self, train: ExampleSet) -> list[Int[np.ndarray, " member"]]:
        return [np.arange(len(train))]

    def _generate(self, split: str) -> ExampleSet:
        counts = self.config.counts(split)
        tokens = np.concatenate([self._draw(split, depth, n) for depth, n in counts.items()])
        if split != "train":
            depth = np.repeat(list(counts), list(counts.values()))
            generator = self._key.generator(f"/order/{split}")
            tokens = tokens[balanced_order(depth, generator)]
        return describe_listops(tokens)

    def _draw(self, split: str, depth: int, count: int) -> Int[np.ndarray, "count pos"]:
        config = self.config

        def draw(generator: np.random.Generator) -> Int[np.ndarray, "some pos"]:
            tokens = grow(
                generator.integers(depth, depth + _EXTRA_HEIGHT + 1, CHUNK),
                generator,
                notation=_NOTATION,
                nested=config.nested,
                side="balanced",
                max_length=config.max_length,
            )
            if split in ("train", "id"):
                tokens = tokens[held_out(tokens, self._key) == (split == "id")]
            reading = read(tokens, _NOTATION, operate)
            return tokens[reading.dependency_depth[:, 0] == depth]

        path = f"/{split}/depth {depth}"
        return collect(count, draw, key=self._key, path=path, distinct=split != "train")


def describe_listops(tokens: Int[np.ndarray, "n pos"]) -> ExampleSet:
    """Evaluate sequences and describe their graphs.

    Args:
        tokens: ids, -1 behind the end; every sequence is one well-formed expression.

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
    """Return results, and which arguments each depends on. See `expression_reading.Operate`."""
    every = np.arange(len(values))
    values, count = values.astype(np.int64), n_arguments.astype(np.int64)[:, None]
    is_argument = np.arange(values.shape[1]) < count
    result, selected = np.zeros(len(values), np.int64), np.zeros(values.shape, bool)

    rows = np.flatnonzero(symbol == _SUM)
    result[rows] = np.where(is_argument[rows], values[rows], 0).sum(1) % N_DIGITS
    selected[rows] = is_argument[rows]

    for operator, outside, first in ((_MINIMUM, N_DIGITS, np.argmin), (_MAXIMUM, -1, np.argmax)):
        rows = every[symbol == operator]
        chosen = first(np.where(is_argument[rows], values[rows], outside), axis=1)
        result[rows] = values[rows, chosen]
        selected[rows, chosen] = True

    rows = np.flatnonzero(symbol == _MEDIAN)
    values = values[rows]
    order = network_order(np.where(is_argument[rows], values, N_DIGITS))
    each, last = np.arange(len(rows)), count[rows, 0] - 1
    below, above = order[each, last // 2], order[each, (last + 1) // 2]
    result[rows] = (values[each, below] + values[each, above]) // 2
    selected[rows, below] = selected[rows, above] = True
    return result, selected


def network_order(
    values: Int[np.ndarray, "operation argument"],
) -> Int[np.ndarray, "operation argument"]:
    """Return the indices of the values in ascending order, as a sorting network finds it.

    Which of two equal values comes first depends on the network. It is the bitonic one for up to
    five values; a comparator exchanges its two values if the first is larger.
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
    """Write a file at once or not at all; without a place for it, say so and go on."""
    arrays = {"inputs": examples.inputs, "targets": examples.targets} | examples.latents
    plain = {name: values.numpy() for name, values in arrays.items()}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            part = Path(folder) / path.name
            np.savez(part, allow_pickle=False, **plain)
            os.replace(part, path)
    except OSError as error:
        warnings.warn(
            f"{path} could not be written, so it is made anew each time: {error}", stacklevel=2
        )


def _load(path: Path) -> ExampleSet | None:
    """Return what a file holds, or None if there is none or it is damaged."""
    try:
        with np.load(path, allow_pickle=False) as file:  # compares check sums
            arrays = {name: torch.from_numpy(file[name]) for name in file.files}
        return ExampleSet(
            inputs=arrays.pop("inputs"), targets=arrays.pop("targets"), latents=arrays
        )
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None
