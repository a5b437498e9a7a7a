"""Which retrieval serves which search? Value scores against the true pairing, with controls."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import xarray as xr
from jaxtyping import Bool, Float, Int
from transformer_lens.utilities.statistics import derive_generator

from probes.specialization.scores import POOLED, score_specialization
from probes.statistics.intervals import Interval, bootstrap_ratio, interval_variables

EVERY = "all"

_SCORES = (
    "specialization",
    "collapse",
    "collapse_attainable",
    "normalised_mutual_information",
    "adjusted_mutual_information",
)
_DIMS = ("example", "pos", "search", "retrieval")
_PATTERN_DIMS = ("example", "search", "query_pos", "key_pos")
# Rows of bfloat16 probabilities sum to 1 within 0.004.
_TOLERANCE = 1e-2


def score_pairing(
    value_scores: xr.DataArray,
    truth: xr.DataArray,
    *,
    winner: xr.DataArray | None = None,
    pattern: xr.DataArray | None = None,
    groups: xr.DataArray | None = None,
    resamples: int = 1000,
    seed: int = 0,
) -> xr.Dataset:
    """Score how the value scores of compositional attention follow the true pairing.

    Mittal et al. 2021, "Compositional Attention": in each of S searches, a softmax over R shared
    retrievals, the value scores, decides which of them is taken. If the model disentangles search
    from retrieval, one of its searches and one of its retrievals plays the part of each true one,
    in which order is its own choice. The best one-to-one assignments (Kuhn 1955) are found first:

    - of searches, by their mean attention to the true winner if `winner` and `pattern` are given.
      Without, from the value scores: by how many choices of a model's search could agree with a
      true one, and then in turns with the retrievals as long as more choices agree.
    - of retrievals, all searches together, since they share them: by the most choices (argmax)
      that agree.

    They are found on the even examples of a group, and everything is scored on its odd ones. What
    is left over where the model and the task differ in numbers has no counterpart (-1).

    The control "shuffled" has the true retrievals of each search dealt out anew among the tokens
    of a group before the assignment is found: what is scored if value scores heed no truth.

    Args:
        value_scores: [example, pos, search, retrieval], in any order: probabilities over
            `retrieval`, of one layer: `hook_value_scores`, captured with these dims.
        truth: [example, pos, one further dim: the true searches] int: the true retrieval of each
            search, or -1 where there is none (padding), which is left out.
        winner: like `truth`: the position that each true search should find.
        pattern: [example, search, query_pos, key_pos]: the attention of the model's searches.
        groups: [example], such as the split or the type of question; None: all are one.
        resamples: of the bootstrap.
        seed: of shuffling and bootstrap.

    Returns:
        Coordinates `control` ("observed", "shuffled"), `group` (strings), `fitted` (the group on
        which the assignment was found), `search` (true searches as strings, last "pooled", all
        together), `true_search`, `true_retrieval`, `model_search`, `model_retrieval`.

        - `agreement`, with `_low` and `_high` [control, fitted, group, search]: the share of tokens
          whose choice is the one assigned to the truth, in 0..1; what has no counterpart counts as
          wrong. Beside the diagonal it tells whether the pairing that holds in one group holds in
          another, or switches. Interval: 95%, percentile bootstrap over examples, the assignment
          held fixed.
        - `chance` [fitted, group, search]: the agreement if choices were independent of the truth,
          each as frequent as they are.
        - `search_assignment` [fitted, true_search], `retrieval_assignment` [fitted,
          true_retrieval]: index of the counterpart in the model, -1 for none.
        - `affinity` [fitted, true_search, model_search]: what searches were assigned by: mean
          attention to the winner, or the share of choices that agree at best, each in 0..1.
        - `activation` [group, search, true_retrieval, model_retrieval]: mean value score given the
          true retrieval, of the search's counterpart; NaN where it does not occur.
        - `specialization`, `collapse` and what else is told in `score_specialization` (with the
          retrievals as modules), with `_low` and `_high` [control, group, search]; NaN for a
          search without a counterpart. The control keeps the search's counterpart.
        - `pairing` [group, model_search, model_retrieval]: mean value score, whatever the truth.
        - `entropy`, with `_low` and `_high` [group, model_search]: mean entropy of the value scores
          of a token / log R, 0 (hard) to 1 (even); NaN for a single retrieval. Interval as for
          `agreement`.

    Raises:
        TypeError: `truth` or `winner` that are not integers.
        ValueError: dims or sizes that do not fit, value scores that are no probabilities, only one
            of `winner` and `pattern`, a group with fewer than 2 examples or without any truth.
    """
    if resamples < 1:
        raise ValueError(f"resamples must be at least 1, got {resamples}")
    tokens = _read(value_scores, truth, winner, pattern)
    members = _members(groups, len(tokens.scores))
    names = list(members)
    generator = derive_generator(seed, "pairing")
    shuffled = np.array(tokens.truth)
    for member in members.values():
        shuffled[member] = _dealt_anew(tokens.truth[member], generator)
    truths = {"observed": tokens.truth, "shuffled": shuffled}

    fitted = {
        control: [tokens.fit(member[::2], labels) for member in members.values()]
        for control, labels in truths.items()
    }
    scored = {name: member[1::2] for name, member in members.items()}
    for name, rows in scored.items():
        if (tokens.truth[rows] < 0).all():
            raise ValueError(f"truth must be known in both halves of each group, not of {name!r}")
    ratio = partial(bootstrap_ratio, resamples=resamples, seed=seed)
    agreement, entropy = [], []
    for rows in scored.values():
        found = [
            tokens.agreed(one, rows, truths[control])
            for control, assignments in fitted.items()
            for one in assignments
        ]
        right, known = (np.stack(values, axis=1) for values in zip(*found, strict=True))
        agreement.append(ratio(right, known))
        entropy.append(ratio(*tokens.entropy(rows)))
    # As [end, control, fitted, group, search] and [end, group, model search].
    agreement = np.stack(agreement, axis=-2)
    agreement = agreement.reshape(3, len(truths), len(names), *agreement.shape[2:])
    entropy = np.stack(entropy, axis=1)
    observed = fitted["observed"]
    chance = [[tokens.chance(one, rows) for rows in scored.values()] for one in observed]
    used = [tokens.used(rows) for rows in scored.values()]
    searches, retrievals = tokens.truth.shape[2], tokens.true_retrievals
    result = xr.Dataset(
        {
            "chance": _variable(
                ("fitted", "group", "search"), chance, "agreement of independent choices"
            ),
            "search_assignment": _variable(
                ("fitted", "true_search"),
                [one.searches for one in observed],
                "index of the model's search assigned to the true one",
            ),
            "retrieval_assignment": _variable(
                ("fitted", "true_retrieval"),
                [one.retrievals for one in observed],
                "index of the model's retrieval assigned to the true one",
            ),
            "affinity": _variable(
                ("fitted", "true_search", "model_search"),
                [one.affinity for one in observed],
                "share of choices that agree at best"
                if winner is None
                else "mean attention to the true winner",
            ),
            "pairing": _variable(
                ("group", "model_search", "model_retrieval"), used, "mean value score"
            ),
        },
        coords={
            "control": list(truths),
            "fitted": names,
            "group": names,
            "search": [*map(str, range(searches)), POOLED],
            "true_search": np.arange(searches),
            "true_retrieval": np.arange(retrievals),
            "model_search": np.arange(tokens.scores.shape[2]),
            "model_retrieval": np.arange(tokens.scores.shape[3]),
        },
        attrs={
            "long_name": "pairing of searches and retrievals",
            "seed": seed,
            "interval": f"percentile bootstrap over examples, 95%, {resamples} resamples; of "
            "specialization and its like: basic bootstrap",
        },
    )
    result.update(
        interval_variables(
            "agreement",
            Interval(*agreement),
            ("control", "fitted", "group", "search"),
            long_name="share of choices that agree with the assignment",
        )
        | interval_variables(
            "entropy",
            Interval(*entropy),
            ("group", "model_search"),
            long_name="mean entropy of a token's value scores / log R",
        )
    )
    special = [
        tokens.specialization(one, rows, resamples, seed)
        for one, rows in zip(observed, scored.values(), strict=True)
    ]
    merged = xr.concat(special, xr.DataArray(names, dims="group", name="group"))
    ordered = merged.transpose("control", "group", "search", ...)
    return result.merge(ordered, join="exact", combine_attrs="override")


@dataclass(frozen=True)
class _Assignment:
    """The model's counterpart of each true search and retrieval, -1 for none."""

    searches: Int[np.ndarray, " true_search"]
    retrievals: Int[np.ndarray, " true_retrieval"]
    affinity: Float[np.ndarray, "true_search model_search"]


@dataclass(frozen=True)
class _Tokens:
    """What is known of each token.

    Attributes:
        scores: the value scores.
        choice: their argmax.
        truth: the true retrievals, -1 for none.
        attention: of each of the model's searches to each true winner.
    """

    scores: Float[np.ndarray, "example pos model_search model_retrieval"]
    choice: Int[np.ndarray, "example pos model_search"]
    truth: Int[np.ndarray, "example pos true_search"]
    attention: Float[np.ndarray, "example pos true_search model_search"] | None

    @property
    def true_retrievals(self) -> int:
        return int(self.truth.max()) + 1

    def fit(
        self, rows: Int[np.ndarray, " row"], truth: Int[np.ndarray, "example pos true_search"]
    ) -> _Assignment:
        """The best assignment for some examples."""
        labels, choice = truth[rows], self.choice[rows]
        known = labels >= 0
        counts = np.array(
            [
                [self._count(labels[..., true], choice[..., model]) for model in self._searches]
                for true in range(labels.shape[2])
            ]
        )
        seen = np.maximum(known.sum((0, 1)), 1)[:, None]
        if self.attention is None:
            affinity = np.array([[_attained(table) for table in row] for row in counts]) / seen
        else:
            affinity = np.where(known[..., None], self.attention[rows], 0).sum((0, 1)) / seen
        searches, best = _assign(affinity), -1
        while True:
            true = np.flatnonzero(searches >= 0)
            retrievals = _assign(counts[true, searches[true]].sum(0))
            right = np.flatnonzero(retrievals >= 0)
            agreed = counts[:, :, right, retrievals[right]].sum(2)
            now = agreed[true, searches[true]].sum()
            if self.attention is not None or now <= best:
                return _Assignment(searches, retrievals, affinity)
            searches, best = _assign(agreed), now

    def agreed(
        self,
        assignment: _Assignment,
        rows: Int[np.ndarray, " row"],
        truth: Int[np.ndarray, "example pos true_search"],
    ) -> tuple[Float[np.ndarray, "row search"], Float[np.ndarray, "row search"]]:
        """How many choices of each example agree, and of how many; the last: of all searches."""
        labels = truth[rows]
        wanted = np.where(labels >= 0, assignment.retrievals[labels], -1)
        chosen = np.where(assignment.searches >= 0, self.choice[rows][..., assignment.searches], -2)
        right, known = (x.sum(1).astype(float) for x in (chosen == wanted, labels >= 0))
        return _with_sum(right), _with_sum(known)

    def chance(
        self, assignment: _Assignment, rows: Int[np.ndarray, " row"]
    ) -> Float[np.ndarray, " search"]:
        """The agreement of choices that are independent of the truth."""
        expected, seen = [], []
        right = np.flatnonzero(assignment.retrievals >= 0)
        for true, model in enumerate(assignment.searches):
            table = self._count(self.truth[rows][..., true], self.choice[rows][..., model])
            total = table.sum()
            pairs = table.sum(1)[right] * table.sum(0)[assignment.retrievals[right]]
            expected.append(pairs.sum() / max(total, 1) * (model >= 0))
            seen.append(total)
        with np.errstate(invalid="ignore"):
            return _with_sum(np.array(expected)) / _with_sum(np.array(seen, float))

    def used(
        self, rows: Int[np.ndarray, " row"]
    ) -> Float[np.ndarray, "model_search model_retrieval"]:
        """Mean value scores of tokens that have a truth."""
        return self.scores[rows][self._known(rows)].mean(0)

    def entropy(
        self, rows: Int[np.ndarray, " row"]
    ) -> tuple[Float[np.ndarray, "row model_search"], Float[np.ndarray, "row one"]]:
        """Summed entropies of the tokens of each example that have a truth, and their number."""
        scores = self.scores[rows]
        surprise = -np.log(scores, where=scores > 0, out=np.zeros_like(scores))
        with np.errstate(invalid="ignore"):
            entropy = (scores * surprise).sum(3) / np.log(scores.shape[3])
        known = self._known(rows)[..., None]
        return np.where(known, entropy, 0).sum(1), known.sum(1).astype(float)

    def specialization(
        self, assignment: _Assignment, rows: Int[np.ndarray, " row"], resamples: int, seed: int
    ) -> xr.Dataset:
        """Activation, specialization and its like of the assigned searches, in the true order."""
        true = np.flatnonzero(assignment.searches >= 0)
        routing = self.scores[rows][:, :, assignment.searches[true]]
        found = score_specialization(
            xr.DataArray(
                routing, dims=("example", "pos", "layer", "module"), coords={"layer": true}
            ),
            xr.DataArray(self.truth[rows][..., true], dims=("example", "pos", "layer")),
            operations=self.true_retrievals,
            resamples=resamples,
            seed=seed,
        )
        kept = found[
            [str(name) for name in found if str(name).startswith(("activation", *_SCORES))]
        ]
        every = [*map(str, range(self.truth.shape[2])), POOLED]
        names = {"layer": "search", "operation": "true_retrieval", "module": "model_retrieval"}
        return kept.reindex(layer=every).rename(names)

    @property
    def _searches(self) -> range:
        return range(self.choice.shape[2])

    def _known(self, rows: Int[np.ndarray, " row"]) -> Bool[np.ndarray, "row pos"]:
        return self.truth[rows].max(2) >= 0

    def _count(
        self, labels: Int[np.ndarray, "row pos"], choice: Int[np.ndarray, "row pos"]
    ) -> Int[np.ndarray, "true_retrieval model_retrieval"]:
        """How often each choice is made for each true retrieval."""
        known = labels >= 0
        shape = (self.true_retrievals, self.scores.shape[3])
        cells = np.ravel_multi_index((labels[known], choice[known]), shape)
        return np.bincount(cells, minlength=shape[0] * shape[1]).reshape(shape)


def _assign(gain: Float[np.ndarray, "row column"]) -> Int[np.ndarray, " row"]:
    """The one-to-one assignment with the most gain, -1 where it has none."""
    # Imported here: a wrong argument should not wait for it.
    from scipy.optimize import linear_sum_assignment

    found = np.full(len(gain), -1)
    row, column = linear_sum_assignment(gain, maximize=True)
    found[row] = np.where(gain[row, column] > 0, column, -1)
    return found


def _attained(table: Int[np.ndarray, "row column"]) -> int:
    assigned = _assign(table)
    rows = np.flatnonzero(assigned >= 0)
    return int(table[rows, assigned[rows]].sum())


def _with_sum(values: Float[np.ndarray, "*rest search"]) -> Float[np.ndarray, "*rest search_1"]:
    return np.concatenate([values, values.sum(-1, keepdims=True)], -1)


def _variable(dims: Sequence[str], values: object, about: str) -> xr.Variable:
    return xr.Variable(dims, np.asarray(values), {"long_name": about})


def _dealt_anew(
    truth: Int[np.ndarray, "example pos search"], generator: torch.Generator
) -> Int[np.ndarray, "example pos search"]:
    """The true retrievals of each search in another order, where there are any."""
    dealt = truth.copy()
    for search in range(truth.shape[2]):
        known = truth[..., search] >= 0
        labels = truth[..., search][known]
        dealt[known, search] = labels[torch.randperm(len(labels), generator=generator).numpy()]
    return dealt


def _members(groups: xr.DataArray | None, examples: int) -> dict[str, Int[np.ndarray, " member"]]:
    """The examples of each group, the groups in the order in which they come."""
    if groups is None:
        labels = np.full(examples, EVERY)
    elif groups.dims != ("example",) or len(groups) != examples:
        raise ValueError(
            f"groups must have the dim 'example' of size {examples}, got {dict(groups.sizes)}"
        )
    else:
        labels = groups.to_numpy().astype(str)
    members = {name: np.flatnonzero(labels == name) for name in dict.fromkeys(labels.tolist())}
    for name, member in members.items():
        if len(member) < 2:
            raise ValueError(
                f"each group must have at least 2 examples (one to find the assignment, one to "
                f"score), got {len(member)} of {name!r}"
            )
    return members


def _read(
    value_scores: xr.DataArray,
    truth: xr.DataArray,
    winner: xr.DataArray | None,
    pattern: xr.DataArray | None,
) -> _Tokens:
    scores = _ordered("value_scores", value_scores, _DIMS).astype(np.float64)
    examples, length, searches, _ = scores.shape
    sums = scores.sum(3)
    if not (scores >= 0).all() or not (np.abs(sums - 1) <= _TOLERANCE).all():
        raise ValueError(
            "value_scores must hold probabilities over 'retrieval', at least 0, that sum to 1, "
            f"got values in {scores.min():g}..{scores.max():g} and sums in "
            f"{sums.min():g}..{sums.max():g}"
        )
    labels = _by_true_search("truth", truth, examples, length)
    if labels.min() < -1 or labels.max() < 0:
        raise ValueError(
            "truth must hold true retrievals, at least 0, or -1 for none, got values in "
            f"{labels.min()}..{labels.max()}"
        )
    if (winner is None) != (pattern is None):
        raise ValueError("winner and pattern must be given together, got only one of them")
    attention = None
    if winner is not None and pattern is not None:
        found = _by_true_search("winner", winner, examples, length)
        weights = _ordered("pattern", pattern, _PATTERN_DIMS)
        if found.shape != labels.shape:
            raise ValueError(f"winner must have truth's shape {labels.shape}, got {found.shape}")
        if weights.shape[:3] != (examples, searches, length):
            raise ValueError(
                f"pattern must have {examples} examples, {searches} searches and {length} "
                f"query positions, as value_scores has, got {dict(pattern.sizes)}"
            )
        known = found[labels >= 0]
        if known.min() < 0 or known.max() >= weights.shape[3]:
            raise ValueError(
                f"winner must be in 0..{weights.shape[3] - 1} where there is a truth, got values "
                f"in {known.min()}..{known.max()}"
            )
        place = np.where(labels >= 0, found, 0)[:, None]
        attention = np.take_along_axis(weights, place, axis=3).transpose(0, 2, 3, 1)
    return _Tokens(scores, scores.argmax(3), labels, attention)


def _ordered(name: str, array: xr.DataArray, dims: tuple[str, ...]) -> Float[np.ndarray, "..."]:
    if set(array.dims) != set(dims) or 0 in array.shape:
        raise ValueError(
            f"{name} must have the dims {dims}, none of them empty, got {dict(array.sizes)}"
        )
    return array.transpose(*dims).to_numpy()


def _by_true_search(
    name: str, array: xr.DataArray, examples: int, length: int
) -> Int[np.ndarray, "example pos true_search"]:
    further = [dim for dim in array.dims if dim not in ("example", "pos")]
    sizes = {"example": examples, "pos": length}
    if len(further) != 1 or array.ndim != 3 or 0 in array.shape:
        raise ValueError(
            f"{name} must have the dims 'example', 'pos' and one for the true searches, "
            f"got {dict(array.sizes)}"
        )
    for dim, size in sizes.items():
        if array.sizes[dim] != size:
            raise ValueError(
                f"{name} must have {size} values along {dim!r}, as value_scores has, "
                f"got {array.sizes[dim]}"
            )
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} must hold integers, got {array.dtype}")
    return array.transpose("example", "pos", *further).to_numpy().astype(np.int64)
