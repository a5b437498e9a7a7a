"""Contextual retrieval: Mittal et al. 2021, "Compositional Attention", contextual retrieval task.

A set of objects, each with search features and retrieval features. In each search, an object finds
the other object that is nearest in that search feature, and retrieves the retrieval feature that it
prefers in this search. Its target is the weighted sum of the retrieved features. Some combinations
of preferences are held out: the model must pair known searches with known retrievals in a new
combination.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from tasks.batch import Batch
from tasks.causal import FINITE, CausalTask, Variable, integers
from tasks.common import Key, require_choice, require_int, require_shape
from tasks.stream_task import StreamTask

_MAX_OBJECTS = 1000
_MAX_SEARCHES = 6  # `baseline` enumerates their 203 partitions
_MAX_COMBINATIONS = 10**6

_PUBLISHED = (-0.71347752, -0.6062312, 0.66062073, -0.61213017, -0.82631877, 0.75908621)
"""The weights of the searches in the authors' code, a draw from U(-1, 1)."""


@dataclass(frozen=True, kw_only=True)
class ContextualRetrievalConfig:
    """Settings of contextual retrieval. The defaults are the smallest of the paper's.

    Attributes:
        n_objects: N, 2 to 1000.
        n_searches: S, 1 to 6. With a single search, `ood` has retrieval features that `train` never
            asks for; with more, `train` asks for each of them in each search.
        n_retrievals: R, at least 2; R^S is at most 10^6.
        coefficients: the weights of the searches, "drawn" from U(-1, 1); "published", the first
            S of the authors' code, the same for all seeds; or all "one".
        trained_on: the combinations that `train` draws from, the "familiar" ones, or "all".
        seed: seeds the weights and every batch, 0 to 2^32 - 1.

    Raises:
        ValueError: an argument is out of its range.

    Example:
        >>> config = ContextualRetrievalConfig(n_objects=6, n_searches=3)
        >>> ContextualRetrieval(config).batch("train", 0, 8).inputs.shape  # 3 + 4 + 3 * 4 features
        torch.Size([8, 6, 19])
    """

    n_objects: int = 10
    n_searches: int = 2
    n_retrievals: int = 4
    coefficients: Literal["drawn", "published", "one"] = "drawn"
    trained_on: Literal["familiar", "all"] = "familiar"
    seed: int = 0

    def __post_init__(self) -> None:
        require_int("n_objects", self.n_objects, 2, _MAX_OBJECTS)
        require_int("n_searches", self.n_searches, 1, _MAX_SEARCHES)
        require_int("n_retrievals", self.n_retrievals, 2, _MAX_COMBINATIONS)
        if self.n_combinations > _MAX_COMBINATIONS:
            raise ValueError(
                f"n_retrievals must make at most {_MAX_COMBINATIONS} combinations, got "
                f"{self.n_retrievals!r} with n_searches={self.n_searches!r}, which makes "
                f"{self.n_combinations}"
            )
        require_choice("coefficients", self.coefficients, ("drawn", "published", "one"))
        require_choice("trained_on", self.trained_on, ("familiar", "all"))
        require_int("seed", self.seed, 0, 2**32 - 1)

    @property
    def n_combinations(self) -> int:
        """Number of combinations of preferences: R^S."""
        return self.n_retrievals**self.n_searches

    @property
    def n_ood(self) -> int:
        """Number of combinations that are held out: a fifth, rounded up."""
        return -(-self.n_combinations // 5)


@dataclass(frozen=True, kw_only=True)
class _Drawn:
    """What features and preferences depend on, and drawn weights."""

    n_objects: int
    n_searches: int
    n_retrievals: int
    seed: int
    coefficients: str = "drawn"


class ContextualRetrieval(StreamTask, CausalTask):
    """Contextual retrieval.

    All features are drawn from N(0, 1). With x_j the features of object j, alpha_s the weight of
    search s, and v_s the retrieval feature that object i prefers in it,

        target_i = sum over s of alpha_s x_w[v_s], w = argmin over j != i of |x_j[s] - x_i[s]|.

    A combination (v_1 .. v_S) has a number, from 0 in lexicographic order (the last search changes
    fastest). Of the odd numbers, the highest are held out, a fifth of all combinations, rounded up:
    of 2 searches and 4 retrievals (2,1), (2,3), (3,1) and (3,3), as in the authors' data.

    Splits are sets of combinations: `id` the familiar ones, `ood` the held-out ones, `all` both;
    `train` is `id`, or `all` with `trained_on="all"`, which leaves none unseen. The combination of
    each object is drawn uniformly and independently. The paper's errors in distribution are on
    `all`, of models that were trained on `all`; those out of distribution on `ood`, of others
    (section 4.1; the authors' code).

    A batch has inputs [batch, N, S + R + S R] float32: search features, retrieval features, and
    the one-hot preferences, the first search's first; targets [batch, N] float32; mask [batch, N],
    all True; and the latents (int64 but for `retrieved` and the features)
    `search_feature` [batch, N, S] float32, `retrieval_feature` [batch, N, R] float32;
    `preference` [batch, N, S]: v, 0 to R - 1;
    `winner` [batch, N, S]: w, the nearest other object;
    `retrieved` [batch, N, S] float32: x_w[v_s], unweighted;
    `combination` [batch, N]: the number of the combination v.

    Causal model: features and preferences can be set, and in between `winner` (to any object) and
    `retrieved`, which change the targets only.

    Example:
        >>> ContextualRetrieval(ContextualRetrievalConfig()).batch("ood", 0, 100)
    """

    SPLITS: ClassVar = ("train", "id", "ood", "all")

    def __init__(self, config: ContextualRetrievalConfig) -> None:
        drawn = _Drawn(
            n_objects=config.n_objects,
            n_searches=config.n_searches,
            n_retrievals=config.n_retrievals,
            seed=config.seed,
        )
        super().__init__(key=Key(drawn))
        self.config = config

    @property
    def n_features(self) -> int:
        """Number of search features, retrieval features and one-hot preferences: S + R + S R."""
        searches, retrievals = self.config.n_searches, self.config.n_retrievals
        return searches + retrievals + searches * retrievals

    @cached_property
    def coefficients(self) -> Float[np.ndarray, " search"]:
        """The weight of each search."""
        if self.config.coefficients == "one":
            return np.ones(self.config.n_searches)
        if self.config.coefficients == "published":
            return np.array(_PUBLISHED[: self.config.n_searches])
        return self._key.generator("/coefficients").uniform(-1, 1, self.config.n_searches)

    def combinations(self, split: str) -> Int[np.ndarray, "combination search"]:
        """Return the combinations of a split, in lexicographic order.

        Raises:
            ValueError: `split` is unknown.
        """
        require_choice("split", split, self.SPLITS)
        numbers = self._numbers(split, np.arange(self._n_combinations(split)))
        return self._preferences(np.sort(numbers))

    def _draw(self, split: str, size: int, generator: np.random.Generator) -> Batch:
        shape = (size, self.config.n_objects)
        ranks = generator.integers(self._n_combinations(split), size=shape)
        combination = self._numbers(split, ranks)
        searches = self.config.n_searches
        n_drawn = searches + self.config.n_retrievals
        features = generator.standard_normal((*shape, n_drawn), np.float32)
        drawn = {
            "search_feature": features[..., :searches].copy(),
            "retrieval_feature": features[..., searches:].copy(),
            "preference": self._preferences(combination),
            "combination": combination,
        }
        return self._completed({name: torch.from_numpy(value) for name, value in drawn.items()})

    @property
    def _variables(self) -> dict[str, Variable]:
        preferences = integers(0, self.config.n_retrievals - 1)
        features = ("search_feature", "retrieval_feature")
        return {
            **{name: Variable(allowed=FINITE) for name in features},
            "preference": Variable(allowed=preferences),
            "combination": Variable(causes=("preference",), compute=self._combination),
            "winner": Variable(
                causes=("search_feature",),
                compute=_nearest,
                allowed=integers(0, self.config.n_objects - 1),
            ),
            "retrieved": Variable(
                causes=("winner", "preference", "retrieval_feature"),
                compute=_retrieve,
                allowed=FINITE,
            ),
            "inputs": Variable(causes=(*features, "preference"), compute=self._shown),
            "targets": Variable(causes=("retrieved",), compute=self._sums),
        }

    def solve(
        self, inputs: Float[Tensor, "batch object feature"]
    ) -> tuple[Float[Tensor, "batch object"], dict[str, Tensor]]:
        """Compute targets and latents from any inputs.

        Args:
            inputs: [batch, object, feature], laid out as in a batch, with at least 2 objects.

        Returns:
            targets [batch, object] and the latents `preference`, `winner` and `retrieved`; floats
            have the precision of `inputs`.

        Raises:
            ValueError: `inputs` has another shape.
        """
        shape = tuple(inputs.shape)
        if len(shape) != 3 or shape[1] < 2 or shape[2] != self.n_features:
            raise ValueError(
                f"inputs must have shape (batch, object, {self.n_features}) with at least 2 "
                f"objects, got {shape}"
            )
        searches, retrievals = self.config.n_searches, self.config.n_retrievals
        search_feature, retrieval_feature, preferred = (
            inputs.detach().cpu().split([searches, retrievals, searches * retrievals], -1)
        )
        preference = preferred.unflatten(-1, (searches, retrievals)).argmax(-1)
        winner = _nearest(search_feature)
        retrieved = _retrieve(winner, preference, retrieval_feature)
        latents = {"preference": preference, "winner": winner, "retrieved": retrieved}
        return self._sums(retrieved).to(inputs), {
            name: value.to(inputs.device) for name, value in latents.items()
        }

    def score(
        self, output: Float[Tensor, "batch object *one"], batch: Batch
    ) -> dict[str, Float[Tensor, "batch object"]]:
        """Return the errors of the predictions.

        Args:
            output: [batch, N] or [batch, N, 1], predicted targets.
            batch: the batch that was answered.

        Returns:
            `absolute_error` and `squared_error`, both [batch, N].

        Raises:
            ValueError: `output` has another shape.
        """
        shape = tuple(batch.targets.shape)
        require_shape("output", output, shape, (*shape, 1))
        error = output.reshape(shape) - batch.targets
        return {"absolute_error": error.abs(), "squared_error": error.square()}

    def baseline(self, split: str) -> dict[str, float]:
        """Return the expected errors of always predicting 0, the best constant, in closed form.

        The winners of an object are independent, each uniform over the N - 1 others. Given winners
        and preferences, the target is normal. Searches with the same winner and the same preference
        retrieve the same number, so the variance is the sum, over distinct pairs
        (winner, preference), of the squared sum of their weights.

        Returns:
            `absolute_error` and `squared_error`.

        Raises:
            ValueError: `split` is unknown.
        """
        combinations = self.combinations(split)
        others = self.config.n_objects - 1
        # Only which searches share their winner or their preference matters.
        agreements, counts = np.unique(_first_equal(combinations), axis=0, return_counts=True)
        expected = np.zeros(2)
        for winners in _partitions(self.config.n_searches):
            n_blocks = winners.max() + 1
            probability = np.prod((others - np.arange(n_blocks)) / others) / others ** (
                len(winners) - n_blocks
            )
            same_pair = _first_equal(agreements * len(winners) + winners)
            variance = sum(
                np.where(same_pair == search, self.coefficients, 0).sum(1) ** 2
                for search in range(len(winners))
            )
            errors = np.stack([np.sqrt(variance * 2 / np.pi), variance])
            expected += probability * np.average(errors, axis=1, weights=counts)
        return {"absolute_error": float(expected[0]), "squared_error": float(expected[1])}

    def _n_combinations(self, split: str) -> int:
        n_all, n_ood = self.config.n_combinations, self.config.n_ood
        if split == "train" and self.config.trained_on == "all":
            split = "all"
        return {"ood": n_ood, "all": n_all}.get(split, n_all - n_ood)

    def _numbers(self, split: str, rank: Int[np.ndarray, "*shape"]) -> Int[np.ndarray, "*shape"]:
        """Return the numbers of the combinations of a split, the even ones before the odd ones."""
        if split == "ood":
            rank = rank + self._n_combinations("id")
        n_even = -(-self.config.n_combinations // 2)
        return np.where(rank < n_even, 2 * rank, 2 * (rank - n_even) + 1)

    def _preferences(
        self, combination: Int[np.ndarray, "*shape"]
    ) -> Int[np.ndarray, "*shape search"]:
        """Return the preferences of each combination: the digits of its number in base R."""
        retrievals = self.config.n_retrievals
        powers = retrievals ** np.arange(self.config.n_searches - 1, -1, -1)
        return combination[..., None] // powers % retrievals

    def _combination(
        self, preference: Int[Tensor, "batch object search"]
    ) -> Int[Tensor, "batch object"]:
        """Return the numbers of combinations, of which the preferences are the digits."""
        powers = self.config.n_retrievals ** torch.arange(self.config.n_searches - 1, -1, -1)
        return (preference * powers).sum(-1)

    def _shown(
        self,
        search_feature: Float[Tensor, "batch object search"],
        retrieval_feature: Float[Tensor, "batch object retrieval"],
        preference: Int[Tensor, "batch object search"],
    ) -> Float[Tensor, "batch object feature"]:
        preferred = preference.numpy()[..., None] == np.arange(self.config.n_retrievals)
        preferred = preferred.reshape(*preference.shape[:2], -1).astype(np.float32)
        parts = [search_feature.numpy(), retrieval_feature.numpy(), preferred]
        return torch.from_numpy(np.concatenate(parts, -1))

    def _sums(
        self, retrieved: Float[Tensor, "batch object search"]
    ) -> Float[Tensor, "batch object"]:
        """Return the weighted sums of what is retrieved, in its precision."""
        return torch.from_numpy(retrieved.numpy() @ self.coefficients).to(retrieved)


def _nearest(
    search_feature: Float[Tensor, "batch object search"],
) -> Int[Tensor, "batch object search"]:
    """Return the other object that is nearest to each object in each search feature."""
    # In double precision, differences of single-precision numbers are exact.
    feature = search_feature.numpy().transpose(0, 2, 1).astype(np.float64)
    distance = np.abs(feature[..., None] - feature[..., None, :])
    diagonal = np.arange(feature.shape[2])
    distance[..., diagonal, diagonal] = np.inf
    return torch.from_numpy(np.ascontiguousarray(distance.argmin(-1).transpose(0, 2, 1)))


def _retrieve(
    winner: Int[Tensor, "batch object search"],
    preference: Int[Tensor, "batch object search"],
    retrieval_feature: Float[Tensor, "batch object retrieval"],
) -> Float[Tensor, "batch object search"]:
    """Return the preferred retrieval features of the winners."""
    example = np.arange(len(winner))[:, None, None]
    retrieved = retrieval_feature.numpy()[example, winner.numpy(), preference.numpy()]
    return torch.from_numpy(retrieved)


def _first_equal(rows: Int[np.ndarray, "row search"]) -> Int[np.ndarray, "row search"]:
    """Return, for each entry, the index of the first equal entry of its row."""
    return (rows[:, :, None] == rows[:, None, :]).argmax(2)


def _partitions(n: int) -> Int[np.ndarray, "partition element"]:
    """Return all partitions of n elements: the block of each, numbered by first occurrence."""
    partitions = [[0]]
    for _ in range(n - 1):
        partitions = [[*blocks, block] for blocks in partitions for block in range(max(blocks) + 2)]
    return np.array(partitions)
