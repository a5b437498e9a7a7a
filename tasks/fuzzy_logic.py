"""Fuzzy logic in context: Schug et al. 2024, "Attention as a Hypernetwork", fuzzy logic.

A fuzzy logic function of L variables in [0, 1] is a disjunction of K terms, each a conjunction of
all variables or their negations: with Zadeh's operators, the maximum over terms of the minimum over
variables of x or 1 - x. A model sees examples of a function, and is then asked for its value at
another point. Some combinations of terms are held out, and some terms altogether.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from math import comb
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from tasks.batch import Batch
from tasks.common import Key, require_choice, require_int

_MAX_VARIABLES = 8
_MAX_COMBINATIONS = 10**6
_UNSEEN = 4  # one term of as many is never seen in training


@dataclass(frozen=True, kw_only=True)
class FuzzyLogicConfig:
    """Which functions they are. The default sizes are the smaller ones of the paper's figure.

    Attributes:
        n_variables: L, 3 to 8. There are 2^L terms, of which the last quarter is never seen.
        n_terms: K, terms of a function, 1 to 2^L / 4; there are at most 10^6 functions.
        n_examples: N, points of a sequence, the one that is asked for among them, 2 to 1024.
        held_out: share of the combinations of the seen terms that is held out for `test`, rounded
            down to a whole number of them, which leaves neither side empty.
        seed: chooses what is held out and every batch, 0 to 2^32 - 1.

    Raises:
        ValueError: an argument is out of its range.
    """

    n_variables: int = 4
    n_terms: int = 2
    n_examples: int = 32
    held_out: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        require_int("n_variables", self.n_variables, 3, _MAX_VARIABLES)
        require_int("n_terms", self.n_terms, 1, 2**self.n_variables // _UNSEEN)
        if self.n_combinations > _MAX_COMBINATIONS:
            raise ValueError(
                f"n_terms={self.n_terms!r} with n_variables={self.n_variables!r}: allowed are at "
                f"most {_MAX_COMBINATIONS} combinations, these are {self.n_combinations}"
            )
        require_int("n_examples", self.n_examples, 2, 1024)
        share = self.held_out
        number = isinstance(share, int | float) and not isinstance(share, bool)
        if not number or not 0 < share < 1 or not 0 < self.n_test < self.n_combinations:
            raise ValueError(
                f"held_out={share!r}: allowed is a number between 0 and 1 that holds out at least "
                f"one of the {self.n_combinations} combinations"
            )
        require_int("seed", self.seed, 0, 2**32 - 1)

    @property
    def n_seen(self) -> int:
        """Number of terms that `train` has: three quarters of 2^L."""
        return 2**self.n_variables - 2**self.n_variables // _UNSEEN

    @property
    def n_combinations(self) -> int:
        """Number of combinations of K different ones of these."""
        return comb(self.n_seen, self.n_terms)

    @property
    def n_test(self) -> int:
        """Number of these combinations that are held out."""
        return int(self.held_out * self.n_combinations)


class FuzzyLogic:
    """The sampler of fuzzy logic functions, in context.

    Points are drawn from U(0, 1)^L. A term has a number, whose binary digits say, the first
    variable's first, whether a variable stands as it is (1) or is negated (0).

    Splits: `train` and `id` have the same combinations of K different terms, each equally often;
    `test` has other combinations of the same terms; `ood` those of the terms that `train` never
    has, 3/4 2^L to 2^L - 1, as in the authors' data: in all of them the first two variables stand
    as they are. In `test`, terms that are known must be put together anew; in `ood` they are new.
    """

    SPLITS: ClassVar = ("train", "id", "test", "ood")

    def __init__(self, config: FuzzyLogicConfig) -> None:
        self.config = config
        # How many examples are shown does not change what is held out.
        self._key = Key(replace(config, n_examples=2))

    @property
    def splits(self) -> tuple[str, ...]:
        """The names of the splits."""
        return self.SPLITS

    @property
    def n_features(self) -> int:
        """A point and its value: L + 1."""
        return self.config.n_variables + 1

    @cached_property
    def conjunctions(self) -> Int[np.ndarray, "term variable"]:
        """Every term: 1 where a variable stands as it is, 0 where it is negated."""
        n = self.config.n_variables
        return np.indices((2,) * n).reshape(n, -1).T

    @cached_property
    def query(self) -> Float[np.ndarray, " variable"]:
        """The point that `with_fixed_query` asks for, drawn by the seed."""
        return self._key.generator("/query").random(self.config.n_variables, np.float32)

    def combinations(self, split: str) -> Int[np.ndarray, "combination term"]:
        """Return the combinations of a split in lexicographic order, the terms of each ascending.

        Raises:
            ValueError: `split` is unknown.
        """
        require_choice("split", split, self.SPLITS)
        return self._sides["train" if split == "id" else split]

    def batch(self, split: str, index: int, size: int, device: str | torch.device = "cpu") -> Batch:
        """Return batch number `index` of a split: always the same one for the same arguments.

        Args:
            split: one of `splits`.
            index: 0 to 2^62.
            size: number of examples, 1 to 2^22; a smaller batch need not be a part of a larger one.
            device: where the batch shall be.

        Returns:
            A batch with
            inputs [batch, N, L + 1] float32: points, each with its value; the last value, which is
            asked for, is 0;
            targets [batch, 1] float32: that value, to be read out at the last position;
            mask [batch, 1], all True;
            latents (int64 but for the last two)
            `terms` [batch, K]: the terms' numbers, ascending;
            `literals` [batch, K, L]: 1 where a variable of a term stands as it is, 0 where it is
            negated;
            `combination` [batch]: the row in `combinations(split)`;
            `values` [batch, N] float32: the function's value at each point;
            `variance` [batch] float32: their mean squared distance from their mean, the target's
            among them: the error of answering this mean.

        Raises:
            ValueError: `split` is unknown, or `index` or `size` is out of range.
        """
        known = self.combinations(split)
        require_int("index", index, 0, 2**62)
        require_int("size", size, 1, 2**22)
        generator = self._key.generator(f"/{split}/{index}")
        combination = generator.integers(len(known), size=size)
        shape = (size, self.config.n_examples, self.config.n_variables)
        points = generator.random(shape, np.float32)
        terms = known[combination]
        literals = self.conjunctions[terms]
        values = _values(points, literals)
        inputs = np.concatenate([points, values[..., None]], -1)
        inputs[:, -1, -1] = 0
        targets = torch.from_numpy(values[:, -1:].copy())
        latents = {
            **{"terms": terms, "literals": literals, "combination": combination},
            **{"values": values, "variance": values.var(1)},
        }
        return Batch(
            inputs=torch.from_numpy(inputs),
            targets=targets,
            mask=torch.ones_like(targets, dtype=torch.bool),
            latents={name: torch.from_numpy(value) for name, value in latents.items()},
        ).to(device)

    def fixed_query(
        self, split: str, index: int, size: int, device: str | torch.device = "cpu"
    ) -> Batch:
        """Return `with_fixed_query` of batch number `index`; arguments and errors are `batch`'s."""
        return self.with_fixed_query(self.batch(split, index, size, device))

    def with_fixed_query(self, batch: Batch) -> Batch:
        """Return a batch with the same point, `query`, asked for in every sequence.

        So what differs between the sequences' last tokens is due to the functions and to the points
        before. Functions and known points stay as they are; target, `values` and `variance` are
        those of the new point.

        Args:
            batch: one of this task's, or some of its examples, on any device.
        """
        inputs = batch.inputs.clone()
        inputs[:, -1, :-1] = torch.from_numpy(self.query).to(inputs)
        target = self.solve(inputs[:, -1:, :-1], batch.latents["literals"])
        values = torch.cat([batch.latents["values"][:, :-1], target], 1)
        # By numpy, as in `batch`: the same bits.
        variance = torch.from_numpy(values.cpu().numpy().var(1)).to(values)
        latents = batch.latents | {"values": values, "variance": variance}
        return replace(batch, inputs=inputs, targets=target, latents=latents)

    def solve(
        self,
        points: Float[Tensor, "batch example variable"],
        literals: Int[Tensor, "batch term variable"],
    ) -> Float[Tensor, "batch example"]:
        """Return the values of functions at points.

        Args:
            points: numbers from 0 to 1.
            literals: 1 where a variable of a term stands as it is, 0 where it is negated.
        """
        return torch.from_numpy(_values(points.cpu().numpy(), literals.cpu().numpy())).to(points)

    def score(
        self, output: Float[Tensor, "batch *one"], batch: Batch
    ) -> dict[str, Float[Tensor, " batch"]]:
        """Return how far the answers are off.

        Args:
            output: [batch] or [batch, 1], the answers.
            batch: the batch that they answer.

        Returns:
            `squared_error` [batch];
            `r2` [batch]: 1 - squared_error / `variance`: the share of the variance within the
            sequence that is explained, 1 for the right answer, at most.
            Its mean over sequences weighs those with a small variance more than
            1 - mean(squared_error) / mean(variance) does.

        Raises:
            ValueError: `output` has another shape.
        """
        n = len(batch)
        if tuple(output.shape) not in ((n,), (n, 1)):
            raise ValueError(
                f"output of shape {tuple(output.shape)}: allowed are {(n,)} and {(n, 1)}"
            )
        error = (output.reshape(n) - batch.targets[:, 0]).square()
        return {"squared_error": error, "r2": 1 - error / batch.latents["variance"]}

    @cached_property
    def _sides(self) -> dict[str, Int[np.ndarray, "combination term"]]:
        config = self.config
        seen = _rows(0, config.n_seen, config.n_terms)
        order = self._key.generator("/test").permutation(len(seen))
        return {
            "train": seen[np.sort(order[config.n_test :])],
            "test": seen[np.sort(order[: config.n_test])],
            "ood": _rows(config.n_seen, 2**config.n_variables, config.n_terms),
        }


def _values(
    points: Float[np.ndarray, "batch example variable"],
    literals: Int[np.ndarray, "batch term variable"],
) -> Float[np.ndarray, "batch example"]:
    # One term at a time: all at once, memory would grow with their number.
    terms = (
        np.abs(points - (1 - literals[:, None, number]).astype(points.dtype)).min(-1)
        for number in range(literals.shape[1])
    )
    value = next(terms)
    for term in terms:
        np.maximum(value, term, out=value)
    return value


def _rows(first: int, end: int, size: int) -> Int[np.ndarray, "combination term"]:
    """Return all sets of `size` numbers from `first` to `end` - 1, in lexicographic order."""
    return np.array(list(combinations(range(first, end), size)))
