"""Fuzzy logic in context: Schug et al. 2024, "Attention as a Hypernetwork", fuzzy logic.

A fuzzy logic function of L variables in [0, 1] is a disjunction of K terms, each a conjunction of
all variables or their negations: with Zadeh's operators, the maximum over terms of the minimum over
variables of x or 1 - x. A model gets examples of a function and must predict its value at another
point. Some combinations of terms are held out, and some terms altogether.
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
from tasks.causal import CausalTask, Variable, integers, numbers
from tasks.common import (
    Key,
    require_choice,
    require_held_out,
    require_int,
    require_number,
    require_shape,
)
from tasks.rows import find_rows
from tasks.stream_task import StreamTask

_MAX_VARIABLES = 8
_MAX_COMBINATIONS = 10**6
_UNSEEN = 4  # one term in so many never occurs in training


@dataclass(frozen=True, kw_only=True)
class FuzzyLogicConfig:
    """Settings of fuzzy logic. The default sizes are the smaller ones of the paper's figure.

    Attributes:
        n_variables: L, 3 to 8. There are 2^L terms; the last quarter of them is not in `train`.
        n_terms: K, terms of a function, 1 to 2^L / 4; at most 10^6 functions.
        n_examples: N, points of a sequence, with the query, 2 to 1024.
        held_out: share of the combinations of the terms of `train` that is held out for `test`,
            rounded down to a number of combinations; neither side may be empty. The fewer are
            left, the more often is a term in `test` alone; see `FuzzyLogic`.
        seed: seeds the split and every batch, 0 to 2^32 - 1.

    Raises:
        ValueError: an argument is out of its range.

    Example:
        >>> FuzzyLogicConfig().seed
        0
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
                f"n_terms must make at most {_MAX_COMBINATIONS} combinations, got {self.n_terms!r} "
                f"with n_variables={self.n_variables!r}, which makes {self.n_combinations}"
            )
        require_int("n_examples", self.n_examples, 2, 1024)
        require_number("held_out", self.held_out, 0, 1)
        require_held_out(
            "held_out", self.held_out, self.n_test, self.n_combinations, "combinations"
        )
        require_int("seed", self.seed, 0, 2**32 - 1)

    @property
    def n_seen(self) -> int:
        """Number of terms that `train` has: three quarters of 2^L."""
        return 2**self.n_variables - 2**self.n_variables // _UNSEEN

    @property
    def n_combinations(self) -> int:
        """Number of combinations of K different terms of `train`."""
        return comb(self.n_seen, self.n_terms)

    @property
    def n_test(self) -> int:
        """Number of combinations held out for `test`."""
        return int(self.held_out * self.n_combinations)


class FuzzyLogic(StreamTask, CausalTask):
    """Fuzzy logic functions in context.

    Points are drawn from U(0, 1)^L. The binary digits of a term's number, the first variable's
    first, are 1 where the variable is plain and 0 where it is negated.

    Splits: `train` and `id` have the same combinations of K different terms, each equally often;
    `test` has other combinations of terms from 0 to 3/4 2^L - 1; `ood` has the combinations of the
    terms from 3/4 2^L to 2^L - 1, in which the first two variables are plain, as in the authors'
    data, none of which is in `train`. So `test` has new combinations of known terms, `ood` new
    terms: the names of the authors' code. Where the paper says OOD it means `test`, and `ood` are
    its unknown terms.

    What is held out is drawn at random, and in some draws a term is in `test` alone: in 3 of the
    seeds from 0 to 299 with the default settings (89 is the first), and in one of those from 0 to
    20 with `held_out` of 0.7 (9). With K = 1 no term of `test` is in `train`.
    `numpy.setdiff1d(task.combinations("test"), task.combinations("train"))` are these terms.

    A batch has inputs [batch, N, L + 1] float32: points, each with its value, where the last value,
    the query's, is 0; targets [batch, 1] float32: the query's value, to be read out at the last
    position; mask [batch, 1], all True; and the latents (int64 but for the last three)
    `terms` [batch, K]: the terms' numbers, ascending;
    `literals` [batch, K, L]: 1 where a variable of a term is plain, 0 where it is negated;
    `combination` [batch]: the row in `combinations(split)`;
    `points` [batch, N, L] float32;
    `values` [batch, N] float32: the function's value at each point;
    `variance` [batch] float32: the variance of `values`: the squared error of predicting their
    mean, averaged over the points.

    Causal model: `terms` and `points` can be set, and in between `literals` and `values`, which the
    inputs show but for the query's. Terms stay in the order in which they are set; `combination`
    is then the row in the combinations of the split that has these terms, -1 if none does.

    Example:
        >>> FuzzyLogic(FuzzyLogicConfig()).batch("ood", 0, 100)
    """

    SPLITS: ClassVar = ("train", "id", "test", "ood")

    def __init__(self, config: FuzzyLogicConfig) -> None:
        # The split does not depend on the number of examples.
        super().__init__(key=Key(replace(config, n_examples=2)))
        self.config = config

    @property
    def n_features(self) -> int:
        """Width of the inputs, a point and its value: L + 1."""
        return self.config.n_variables + 1

    @cached_property
    def conjunctions(self) -> Int[np.ndarray, "term variable"]:
        """All terms: 1 where a variable is plain, 0 where it is negated."""
        n = self.config.n_variables
        return np.indices((2,) * n).reshape(n, -1).T

    @cached_property
    def query(self) -> Float[np.ndarray, " variable"]:
        """The query of `with_fixed_query`, drawn from the seed."""
        return self._key.generator("/query").random(self.config.n_variables, np.float32)

    def combinations(self, split: str) -> Int[np.ndarray, "combination term"]:
        """Return the combinations of a split in lexicographic order, with ascending terms.

        Raises:
            ValueError: `split` is unknown.
        """
        require_choice("split", split, self.SPLITS)
        return self._sides["train" if split == "id" else split]

    def _draw(self, split: str, size: int, generator: np.random.Generator) -> Batch:
        combinations = self.combinations(split)
        combination = generator.integers(len(combinations), size=size)
        shape = (size, self.config.n_examples, self.config.n_variables)
        points = generator.random(shape, np.float32)
        drawn = {
            "terms": combinations[combination],
            "combination": combination,
            "points": points,
        }
        return self._completed({name: torch.from_numpy(value) for name, value in drawn.items()})

    @property
    def _variables(self) -> dict[str, Variable]:
        return {
            "terms": Variable(allowed=integers(0, 2**self.config.n_variables - 1)),
            "literals": Variable(
                causes=("terms",),
                compute=lambda terms: torch.from_numpy(self.conjunctions[terms.numpy()]),
                allowed=integers(0, 1),
            ),
            "combination": Variable(causes=("terms",), compute=self._combination),
            "points": Variable(allowed=numbers(0, 1)),
            "values": Variable(
                causes=("points", "literals"), compute=self.solve, allowed=numbers(0, 1)
            ),
            "variance": Variable(causes=("values",), compute=_variance),
            "inputs": Variable(causes=("points", "values"), compute=_shown),
            "targets": Variable(causes=("values",), compute=lambda values: values[:, -1:].clone()),
        }

    def _combination(self, terms: Int[Tensor, "batch term"]) -> Int[Tensor, " batch"]:
        return torch.from_numpy(find_rows(np.sort(terms.numpy()), self._sides.values()))

    def fixed_query(
        self, split: str, index: int, size: int, device: str | torch.device = "cpu"
    ) -> Batch:
        """Return batch `index` with a fixed query; arguments and errors are those of `batch`."""
        return self.with_fixed_query(self.batch(split, index, size, device))

    def with_fixed_query(self, batch: Batch) -> Batch:
        """Replace the last point of every sequence by `query`.

        Then differences between the sequences at the last position are due to the functions and
        the points before it. Functions and other points stay; targets, `values` and `variance` are
        recomputed.

        Args:
            batch: a batch of this task, or some of its examples, on any device.
        """
        points = batch.latents["points"].clone()
        points[:, -1] = torch.from_numpy(self.query)
        return self.counterfactual(batch, {"points": points})

    def solve(
        self,
        points: Float[Tensor, "batch example variable"],
        literals: Int[Tensor, "batch term variable"],
    ) -> Float[Tensor, "batch example"]:
        """Return the values of functions at points.

        Args:
            points: numbers from 0 to 1.
            literals: 1 where a variable of a term is plain, 0 where it is negated.
        """
        return torch.from_numpy(_values(points.cpu().numpy(), literals.cpu().numpy())).to(points)

    def score(
        self, output: Float[Tensor, "batch *one"], batch: Batch
    ) -> dict[str, Float[Tensor, " batch"]]:
        """Return the error of each prediction.

        Args:
            output: [batch] or [batch, 1], predicted values.
            batch: the batch that was answered.

        Returns:
            `squared_error` [batch];
            `r2` [batch]: 1 - squared_error / `variance`, the explained share of the variance within
            the sequence, at most 1. Its mean over sequences gives sequences of small variance more
            weight than 1 - mean(squared_error) / mean(variance) does.

        Raises:
            ValueError: `output` has another shape.
        """
        n = len(batch)
        require_shape("output", output, (n,), (n, 1))
        error = (output.reshape(n) - batch.targets[:, 0]).square()
        return {"squared_error": error, "r2": 1 - error / batch.latents["variance"]}

    @cached_property
    def _sides(self) -> dict[str, Int[np.ndarray, "combination term"]]:
        config = self.config
        of_seen = _combinations_of(range(config.n_seen), config.n_terms)
        order = self._key.generator("/test").permutation(len(of_seen))
        unseen = range(config.n_seen, 2**config.n_variables)
        return {
            "train": of_seen[np.sort(order[config.n_test :])],
            "test": of_seen[np.sort(order[: config.n_test])],
            "ood": _combinations_of(unseen, config.n_terms),
        }


def _values(
    points: Float[np.ndarray, "batch example variable"],
    literals: Int[np.ndarray, "batch term variable"],
) -> Float[np.ndarray, "batch example"]:
    # Term by term, so memory does not grow with the number of terms.
    terms = (
        np.abs(points - (1 - literals[:, None, i]).astype(points.dtype)).min(-1)
        for i in range(literals.shape[1])
    )
    value = next(terms)
    for term in terms:
        np.maximum(value, term, out=value)
    return value


def _variance(values: Float[Tensor, "batch example"]) -> Float[Tensor, " batch"]:
    return torch.from_numpy(values.numpy().var(1))


def _shown(
    points: Float[Tensor, "batch example variable"], values: Float[Tensor, "batch example"]
) -> Float[Tensor, "batch example feature"]:
    """Return points and values without the query's value."""
    inputs = np.concatenate([points.numpy(), values.numpy()[..., None]], -1)
    inputs[:, -1, -1] = 0
    return torch.from_numpy(inputs)


def _combinations_of(terms: range, size: int) -> Int[np.ndarray, "combination term"]:
    """Return all sets of `size` terms in lexicographic order."""
    return np.array(list(combinations(terms, size)))
