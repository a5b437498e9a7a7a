"""Contextual retrieval: Mittal et al. 2021, "Compositional Attention", contextual retrieval task.

A set of objects, each with some search features and some retrieval features. In each of the
searches, an object finds the other one that is nearest in that search feature, and retrieves from
it the retrieval feature that it prefers in this search. Its target is the weighted sum of what it
retrieves. Some combinations of preferences are held out: the model must pair searches with
retrievals that it knows in a combination that it never saw.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from tasks.batch import Batch
from tasks.common import Key, require_choice, require_int

_MAX_OBJECTS = 1000
_MAX_SEARCHES = 6  # `baseline` goes through their 203 partitions
_MAX_COMBINATIONS = 10**6


@dataclass(frozen=True, kw_only=True)
class ContextualRetrievalConfig:
    """Which retrieval task it is. The defaults are the smallest of the paper's.

    Attributes:
        n_objects: N, 2 to 1000.
        n_searches: S, 1 to 6. With a single one, what is held out is not a combination: `train`
            never asks for these retrieval features. With more, it asks for each in each search.
        n_retrievals: R, at least 2; R^S is at most 10^6.
        coefficients: the weights of the searches, "drawn" from U(-1, 1) by the seed, or all "one".
        seed: chooses the weights and every batch, 0 to 2^32 - 1.

    Raises:
        ValueError: an argument is out of its range.
    """

    n_objects: int = 10
    n_searches: int = 2
    n_retrievals: int = 4
    coefficients: Literal["drawn", "one"] = "drawn"
    seed: int = 0

    def __post_init__(self) -> None:
        require_int("n_objects", self.n_objects, 2, _MAX_OBJECTS)
        require_int("n_searches", self.n_searches, 1, _MAX_SEARCHES)
        require_int("n_retrievals", self.n_retrievals, 2, _MAX_COMBINATIONS)
        if self.n_combinations > _MAX_COMBINATIONS:
            raise ValueError(
                f"n_retrievals={self.n_retrievals!r} with n_searches={self.n_searches!r}: allowed "
                f"are at most {_MAX_COMBINATIONS} combinations, {self.n_retrievals} to the power "
                f"of {self.n_searches} are {self.n_combinations}"
            )
        require_choice("coefficients", self.coefficients, ("drawn", "one"))
        require_int("seed", self.seed, 0, 2**32 - 1)

    @property
    def n_combinations(self) -> int:
        """Number of combinations of preferences: R^S."""
        return self.n_retrievals**self.n_searches

    @property
    def n_ood(self) -> int:
        """Number of combinations that are held out: a fifth, rounded up."""
        return -(-self.n_combinations // 5)


class ContextualRetrieval:
    """The sampler of contextual retrieval.

    All features are drawn from N(0, 1). With x_j the features of object j, alpha_s the weight of
    search s, and v_s the retrieval feature that object i prefers in it,

        target_i = sum over s of alpha_s x_w[v_s], w = argmin over j != i of |x_j[s] - x_i[s]|.

    A combination (v_1 .. v_S) has a number, from 0 in lexicographic order (the last search changes
    fastest). Of the odd numbers, the highest are held out, a fifth of all combinations, rounded up:
    of 2 searches and 4 retrievals (2,1), (2,3), (3,1) and (3,3), as in the authors' data.

    Splits: `train` and `id` draw from the same combinations, `ood` from the held-out ones. Every
    object has a combination of its own, with equal chances for all of the split.
    """

    SPLITS: ClassVar = ("train", "id", "ood")

    def __init__(self, config: ContextualRetrievalConfig) -> None:
        self.config = config
        # How what is retrieved is weighted does not change what it is.
        self._key = Key(replace(config, coefficients="drawn"))

    @property
    def splits(self) -> tuple[str, ...]:
        """The names of the splits."""
        return self.SPLITS

    @property
    def n_features(self) -> int:
        """Search features, retrieval features, and for each search a one-hot preference."""
        searches, retrievals = self.config.n_searches, self.config.n_retrievals
        return searches + retrievals + searches * retrievals

    @cached_property
    def coefficients(self) -> Float[np.ndarray, " search"]:
        """The weight of each search."""
        if self.config.coefficients == "one":
            return np.ones(self.config.n_searches)
        return self._key.generator("/coefficients").uniform(-1, 1, self.config.n_searches)

    def combinations(self, split: str) -> Int[np.ndarray, "combination search"]:
        """Return the combinations of a split, in lexicographic order.

        Raises:
            ValueError: `split` is unknown.
        """
        require_choice("split", split, self.SPLITS)
        return self._preferences(np.sort(self._numbers(split, np.arange(self._count(split)))))

    def batch(self, split: str, index: int, size: int, device: str | torch.device = "cpu") -> Batch:
        """Return batch number `index` of a split: always the same one for the same arguments.

        Args:
            split: one of `splits`.
            index: 0 to 2^62.
            size: number of examples, 1 to 2^22; a smaller batch need not be a part of a larger one.
            device: where the batch shall be.

        Returns:
            A batch with
            inputs [batch, N, S + R + S R] float32: search features, retrieval features, and the
            one-hot preferences, those of the first search first;
            targets [batch, N] float32;
            mask [batch, N], all True;
            latents (int64 but for `retrieved`)
            `preference` [batch, N, S]: v, in 0..R-1;
            `winner` [batch, N, S]: w, the nearest other object;
            `retrieved` [batch, N, S] float32: x_w[v_s], without its weight;
            `combination` [batch, N]: the number of v.

        Raises:
            ValueError: `split` is unknown, or `index` or `size` is out of range.
        """
        require_choice("split", split, self.SPLITS)
        require_int("index", index, 0, 2**62)
        require_int("size", size, 1, 2**22)
        generator = self._key.generator(f"/{split}/{index}")
        shape = (size, self.config.n_objects)
        combination = self._numbers(split, generator.integers(self._count(split), size=shape))
        preference = self._preferences(combination)

        searches, retrievals = self.config.n_searches, self.config.n_retrievals
        n_drawn = searches + retrievals
        inputs = np.zeros((*shape, self.n_features), np.float32)
        inputs[..., :n_drawn] = generator.standard_normal((*shape, n_drawn), np.float32)
        one_hot = preference[..., None] == np.arange(retrievals)
        inputs[..., n_drawn:] = one_hot.reshape(*shape, -1)

        targets, latents = self._solve(inputs, preference)
        targets = torch.from_numpy(targets.astype(np.float32))
        made = Batch(
            inputs=torch.from_numpy(inputs),
            targets=targets,
            mask=torch.ones_like(targets, dtype=torch.bool),
            latents={name: torch.from_numpy(value) for name, value in latents.items()}
            | {"combination": torch.from_numpy(combination)},
        )
        return made if torch.device(device).type == "cpu" else made.to(device)

    def solve(
        self, inputs: Float[Tensor, "batch object feature"]
    ) -> tuple[Float[Tensor, "batch object"], dict[str, Tensor]]:
        """Return the targets that belong to any inputs, and how they come about.

        Args:
            inputs: [batch, object, feature], laid out as in `batch`, of at least 2 objects.

        Returns:
            targets [batch, object] and the latents `preference`, `winner` and `retrieved` as in
            `batch`; what is not an index has the precision of `inputs`.

        Raises:
            ValueError: `inputs` has another shape.
        """
        shape = tuple(inputs.shape)
        if len(shape) != 3 or shape[1] < 2 or shape[2] != self.n_features:
            raise ValueError(
                f"inputs of shape {shape}: allowed is (batch, object, {self.n_features}) with at "
                "least 2 objects"
            )
        values = inputs.detach().cpu().numpy()
        searches, retrievals = self.config.n_searches, self.config.n_retrievals
        preferred = values[..., searches + retrievals :]
        preference = preferred.reshape(*shape[:2], searches, retrievals).argmax(-1)
        targets, latents = self._solve(values, preference)
        made = {name: torch.from_numpy(value).to(inputs.device) for name, value in latents.items()}
        return torch.from_numpy(targets).to(inputs), made

    def score(
        self, output: Float[Tensor, "batch object *one"], batch: Batch
    ) -> dict[str, Float[Tensor, "batch object"]]:
        """Return how far the answers are off.

        Args:
            output: [batch, N] or [batch, N, 1], the answers.
            batch: the batch that they answer.

        Returns:
            `absolute_error` and `squared_error`, both [batch, N].

        Raises:
            ValueError: `output` has another shape.
        """
        expected = tuple(batch.targets.shape)
        if tuple(output.shape) not in (expected, (*expected, 1)):
            raise ValueError(
                f"output of shape {tuple(output.shape)}: allowed are {expected} and "
                f"{(*expected, 1)}"
            )
        error = output.reshape(expected) - batch.targets
        return {"absolute_error": error.abs(), "squared_error": error.square()}

    def baseline(self, split: str) -> dict[str, float]:
        """Return the mean errors of always answering 0, the best constant, by formula.

        The winners of an object are independent of one another, each uniform over the N - 1 others.
        Given them and the preferences, the target is normal; searches with the same winner and the
        same preference retrieve the same number, so that its variance is the sum, over distinct
        (winner, preference), of the squared sum of their weights.

        Returns:
            `absolute_error` and `squared_error`.

        Raises:
            ValueError: `split` is unknown.
        """
        combinations = self.combinations(split)
        others = self.config.n_objects - 1
        # Only which searches agree matters, of winners as of preferences.
        agreements, counts = np.unique(_first_equal(combinations), axis=0, return_counts=True)
        found = np.zeros(2)
        for winners in _partitions(self.config.n_searches):
            blocks = winners.max() + 1
            chance = np.prod((others - np.arange(blocks)) / others) / others ** (
                len(winners) - blocks
            )
            both = _first_equal(agreements * len(winners) + winners)
            variance = sum(
                np.where(both == search, self.coefficients, 0).sum(1) ** 2
                for search in range(len(winners))
            )
            errors = np.stack([np.sqrt(variance * 2 / np.pi), variance])
            found += chance * np.average(errors, axis=1, weights=counts)
        return {"absolute_error": float(found[0]), "squared_error": float(found[1])}

    def _count(self, split: str) -> int:
        """How many combinations a split has."""
        n_ood = self.config.n_ood
        return n_ood if split == "ood" else self.config.n_combinations - n_ood

    def _numbers(self, split: str, place: Int[np.ndarray, "*shape"]) -> Int[np.ndarray, "*shape"]:
        """The number of each combination in the order: all even ones, then all odd ones."""
        if split == "ood":
            place = place + self._count("train")
        n_even = -(-self.config.n_combinations // 2)
        return np.where(place < n_even, 2 * place, 2 * (place - n_even) + 1)

    def _preferences(
        self, combination: Int[np.ndarray, "*shape"]
    ) -> Int[np.ndarray, "*shape search"]:
        """The digits of the numbers."""
        retrievals = self.config.n_retrievals
        powers = retrievals ** np.arange(self.config.n_searches - 1, -1, -1)
        return combination[..., None] // powers % retrievals

    def _solve(
        self,
        inputs: Float[np.ndarray, "batch object feature"],
        preference: Int[np.ndarray, "batch object search"],
    ) -> tuple[Float[np.ndarray, "batch object"], dict[str, np.ndarray]]:
        searches = self.config.n_searches
        # In double precision, differences of single precision are exact.
        place = inputs[..., :searches].transpose(0, 2, 1).astype(np.float64)
        distance = np.abs(place[..., None] - place[..., None, :])
        itself = np.arange(inputs.shape[1])
        distance[..., itself, itself] = np.inf
        winner = np.ascontiguousarray(distance.argmin(-1).transpose(0, 2, 1))
        example = np.arange(len(inputs))[:, None, None]
        retrieved = inputs[example, winner, searches + preference]
        latents = {"preference": preference, "winner": winner, "retrieved": retrieved}
        return retrieved @ self.coefficients, latents


def _first_equal(rows: Int[np.ndarray, "row search"]) -> Int[np.ndarray, "row search"]:
    """For each entry, the first place in its row that holds the same."""
    return (rows[:, :, None] == rows[:, None, :]).argmax(2)


def _partitions(size: int) -> Int[np.ndarray, "partition place"]:
    """All ways to part `size` places into blocks, numbered by their first places."""
    found = [[0]]
    for _ in range(size - 1):
        found = [[*blocks, block] for blocks in found for block in range(max(blocks) + 2)]
    return np.array(found)
