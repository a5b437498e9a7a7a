"""Scores of the pairing of searches and retrievals against the true pairing, with controls."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import xarray as xr
from jaxtyping import Bool, Float, Int
from transformer_lens.utilities.statistics import derive_generator

from probes.checking import checked
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


@checked
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
    retrievals (the value scores) selects one of them. If the model disentangles search from
    retrieval, each true search and retrieval has a counterpart in the model, in any order. The best
    one-to-one assignments (Kuhn 1955) are fitted first:

    - of searches, by their mean attention to the true winner if `winner` and `pattern` are given;
      otherwise by the number of choices that could agree with a true search, and then in
      alternation with the retrievals while the number of agreeing choices grows.
    - of retrievals, for all searches together, which share them: by the number of choices (argmax)
      that agree.

    They are fitted on the even examples of a group and scored on its odd ones. If the numbers of
    model and task differ, the surplus has no counterpart (-1).

    The control "shuffled" permutes the true retrievals of each search among the tokens of a group
    before fitting: the scores of value scores that ignore the truth.

    Args:
        value_scores: probabilities over `retrieval` [example, pos, search, retrieval], in any
            order, of one layer: `hook_value_scores`, captured with these dims.
        truth: true retrieval of each search [example, pos, true search] int (the last dim has any
            name), or -1 for none (padding), which is left out.
        winner: position that each true search should find, with the dims of `truth`.
        pattern: attention of the model's searches [example, search, query_pos, key_pos].
        groups: [example], such as the split or the type of question; None: one group.
        resamples: number of bootstrap resamples.
        seed: seed of shuffling and bootstrap.

    Returns:
        Coordinates `control` ("observed", "shuffled"), `group` (strings), `fitted` (the group on
        which the assignment was fitted), `search` (true searches as strings, last "pooled", all
        together), `true_search`, `true_retrieval`, `model_search`, `model_retrieval`.

        - `agreement`, with `_low` and `_high` [control, fitted, group, search]: share of tokens
          whose choice is the one assigned to the truth, in 0..1; without a counterpart it counts as
          wrong. Off the diagonal of `fitted` and `group` it shows whether the pairing of one group
          holds in another. Interval: 95%, percentile bootstrap over examples, with the assignment
          held fixed.
        - `chance` [fitted, group, search]: agreement of choices that are independent of the truth,
          with the same frequencies.
        - `search_assignment` [fitted, true_search], `retrieval_assignment` [fitted,
          true_retrieval]: index of the counterpart in the model, -1 for none.
        - `affinity` [fitted, true_search, model_search]: criterion of the assignment of searches:
          mean attention to the winner, or the largest possible share of agreeing choices, in 0..1.
        - `activation` [group, search, true_retrieval, model_retrieval]: mean value score of the
          search's counterpart given the true retrieval; NaN where it does not occur.
        - `specialization`, `collapse` and the other scores of `score_specialization` (with
          retrievals as modules), with `_low` and `_high` [control, group, search]; NaN for a search
          without a counterpart. The control keeps the counterparts.
        - `pairing` [group, model_search, model_retrieval]: mean value score.
        - `entropy`, with `_low` and `_high` [group, model_search]: mean entropy of the value scores
          of a token / log R, 0 (one-hot) to 1 (uniform); NaN for a single retrieval. Interval as
          for `agreement`.

    Raises:
        TypeError: `truth` or `winner` are not integers.
        ValueError: dims or sizes do not match, value scores are no probabilities, only one of
            `winner` and `pattern` is given, or a group has fewer than 2 examples or no truth.

    Example:
        >>> score_pairing(data["value_scores"], data["preference"])["agreement"]
    """
    if resamples < 1:
        raise ValueError(f"resamples must be at least 1, got {resamples}")
    tokens = _read(value_scores, truth, winner, pattern)
    members = _members(groups, len(tokens.scores))
    names = list(members)
    generator = derive_generator(seed, "pairing")
    shuffled = np.array(tokens.truth)
    for member in members.values():
        shuffled[member] = _shuffle_truth(tokens.truth[member], generator)
    truths = {"observed": tokens.truth, "shuffled": shuffled}

    fitted = {
        control: [tokens.fit(member[::2], labels) for member in members.values()]
        for control, labels in truths.items()
    }
    scored = {name: member[1::2] for name, member in members.items()}
    for name, rows in scored.items():
        if (tokens.truth[rows] < 0).all():
            raise ValueError(f"truth must be known in both halves of each group, got {name!r}")
    ratio = partial(bootstrap_ratio, resamples=resamples, seed=seed)
    agreement, entropy = [], []
    for rows in scored.values():
        agreements = [
            tokens.agreed(assignment, rows, truths[control])
            for control, assignments in fitted.items()
            for assignment in assignments
        ]
        agreeing, counted = (np.stack(values, axis=1) for values in zip(*agreements, strict=True))
        agreement.append(ratio(agreeing, counted))
        entropy.append(ratio(*tokens.entropy(rows)))
    # As [end, control, fitted, group, search] and [end, group, model search].
    agreement = np.stack(agreement, axis=-2)
    agreement = agreement.reshape(3, len(truths), len(names), *agreement.shape[2:])
    entropy = np.stack(entropy, axis=1)
    observed = fitted["observed"]
    chance = [
        [tokens.chance(assignment, rows) for rows in scored.values()] for assignment in observed
    ]
    mean_scores = [tokens.mean_scores(rows) for rows in scored.values()]
    searches, retrievals = tokens.truth.shape[2], tokens.true_retrievals
    result = xr.Dataset(
        {
            "chance": _variable(
                ("fitted", "group", "search"), chance, "agreement of independent choices"
            ),
            "search_assignment": _variable(
                ("fitted", "true_search"),
                [assignment.searches for assignment in observed],
                "index of the model's search assigned to the true one",
            ),
            "retrieval_assignment": _variable(
                ("fitted", "true_retrieval"),
                [assignment.retrievals for assignment in observed],
                "index of the model's retrieval assigned to the true one",
            ),
            "affinity": _variable(
                ("fitted", "true_search", "model_search"),
                [assignment.affinity for assignment in observed],
                "share of choices that agree at best"
                if winner is None
                else "mean attention to the true winner",
            ),
            "pairing": _variable(
                ("group", "model_search", "model_retrieval"), mean_scores, "mean value score"
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
    specializations = [
        tokens.specialization(assignment, rows, resamples, seed)
        for assignment, rows in zip(observed, scored.values(), strict=True)
    ]
    merged = xr.concat(specializations, xr.DataArray(names, dims="group", name="group"))
    transposed = merged.transpose("control", "group", "search", ...)
    return result.merge(transposed, join="exact", combine_attrs="override")


@dataclass(frozen=True)
class _Assignment:
    """The counterpart in the model of each true search and retrieval, -1 for none."""

    searches: Int[np.ndarray, " true_search"]
    retrievals: Int[np.ndarray, " true_retrieval"]
    affinity: Float[np.ndarray, "true_search model_search"]


@dataclass(frozen=True)
class _Tokens:
    """Value scores and truth of each token.

    Attributes:
        scores: value scores.
        choice: argmax of the value scores.
        truth: true retrievals, -1 for none.
        attention: attention of each search of the model to each true winner.
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
        """Fit the best assignment to some examples."""
        labels, choice = truth[rows], self.choice[rows]
        has_truth = labels >= 0
        counts = np.array(
            [
                [self._count(labels[..., true], choice[..., model]) for model in self._searches]
                for true in range(labels.shape[2])
            ]
        )
        n_tokens = np.maximum(has_truth.sum((0, 1)), 1)[:, None]
        if self.attention is None:
            affinity = (
                np.array([[_assigned_count(table) for table in row] for row in counts]) / n_tokens
            )
        else:
            affinity = (
                np.where(has_truth[..., None], self.attention[rows], 0).sum((0, 1)) / n_tokens
            )
        searches, best = _assign(affinity), -1
        while True:
            true = np.flatnonzero(searches >= 0)
            retrievals = _assign(counts[true, searches[true]].sum(0))
            matched = np.flatnonzero(retrievals >= 0)
            agreed = counts[:, :, matched, retrievals[matched]].sum(2)
            n_agreed = agreed[true, searches[true]].sum()
            if self.attention is not None or n_agreed <= best:
                return _Assignment(searches, retrievals, affinity)
            searches, best = _assign(agreed), n_agreed

    def agreed(
        self,
        assignment: _Assignment,
        rows: Int[np.ndarray, " row"],
        truth: Int[np.ndarray, "example pos true_search"],
    ) -> tuple[Float[np.ndarray, "row search"], Float[np.ndarray, "row search"]]:
        """Count the choices that agree, and all choices, by example; last of all searches."""
        labels = truth[rows]
        expected = np.where(labels >= 0, assignment.retrievals[labels], -1)
        chosen = np.where(assignment.searches >= 0, self.choice[rows][..., assignment.searches], -2)
        agreeing, counted = (x.sum(1).astype(float) for x in (chosen == expected, labels >= 0))
        return _with_sum(agreeing), _with_sum(counted)

    def chance(
        self, assignment: _Assignment, rows: Int[np.ndarray, " row"]
    ) -> Float[np.ndarray, " search"]:
        """Compute the agreement of choices that are independent of the truth."""
        expected, totals = [], []
        assigned = np.flatnonzero(assignment.retrievals >= 0)
        for true, model in enumerate(assignment.searches):
            table = self._count(self.truth[rows][..., true], self.choice[rows][..., model])
            total = table.sum()
            pairs = table.sum(1)[assigned] * table.sum(0)[assignment.retrievals[assigned]]
            expected.append(pairs.sum() / max(total, 1) * (model >= 0))
            totals.append(total)
        with np.errstate(invalid="ignore"):
            return _with_sum(np.array(expected)) / _with_sum(np.array(totals, float))

    def mean_scores(
        self, rows: Int[np.ndarray, " row"]
    ) -> Float[np.ndarray, "model_search model_retrieval"]:
        """Average the value scores of tokens that have a truth."""
        return self.scores[rows][self._has_truth(rows)].mean(0)

    def entropy(
        self, rows: Int[np.ndarray, " row"]
    ) -> tuple[Float[np.ndarray, "row model_search"], Float[np.ndarray, "row one"]]:
        """Sum the entropies of tokens that have a truth by example, and count these tokens."""
        scores = self.scores[rows]
        surprise = -np.log(scores, where=scores > 0, out=np.zeros_like(scores))
        with np.errstate(invalid="ignore"):
            entropy = (scores * surprise).sum(3) / np.log(scores.shape[3])
        has_truth = self._has_truth(rows)[..., None]
        return np.where(has_truth, entropy, 0).sum(1), has_truth.sum(1).astype(float)

    def specialization(
        self, assignment: _Assignment, rows: Int[np.ndarray, " row"], resamples: int, seed: int
    ) -> xr.Dataset:
        """Compute the scores of `score_specialization` for the assigned searches, in true order."""
        true = np.flatnonzero(assignment.searches >= 0)
        routing = self.scores[rows][:, :, assignment.searches[true]]
        scores = score_specialization(
            xr.DataArray(
                routing, dims=("example", "pos", "layer", "module"), coords={"layer": true}
            ),
            xr.DataArray(self.truth[rows][..., true], dims=("example", "pos", "layer")),
            operations=self.true_retrievals,
            resamples=resamples,
            seed=seed,
        )
        kept = scores[
            [str(name) for name in scores if str(name).startswith(("activation", *_SCORES))]
        ]
        all_searches = [*map(str, range(self.truth.shape[2])), POOLED]
        names = {"layer": "search", "operation": "true_retrieval", "module": "model_retrieval"}
        return kept.reindex(layer=all_searches).rename(names)

    @property
    def _searches(self) -> range:
        return range(self.choice.shape[2])

    def _has_truth(self, rows: Int[np.ndarray, " row"]) -> Bool[np.ndarray, "row pos"]:
        return self.truth[rows].max(2) >= 0

    def _count(
        self, labels: Int[np.ndarray, "row pos"], choice: Int[np.ndarray, "row pos"]
    ) -> Int[np.ndarray, "true_retrieval model_retrieval"]:
        """Count the choices for each true retrieval."""
        has_truth = labels >= 0
        shape = (self.true_retrievals, self.scores.shape[3])
        cells = np.ravel_multi_index((labels[has_truth], choice[has_truth]), shape)
        return np.bincount(cells, minlength=shape[0] * shape[1]).reshape(shape)


def _assign(gain: Float[np.ndarray, "row column"]) -> Int[np.ndarray, " row"]:
    """Find the one-to-one assignment with the largest gain, -1 where it has none."""
    # Imported here because the import takes long.
    from scipy.optimize import linear_sum_assignment

    assignment = np.full(len(gain), -1)
    row, column = linear_sum_assignment(gain, maximize=True)
    assignment[row] = np.where(gain[row, column] > 0, column, -1)
    return assignment


def _assigned_count(table: Int[np.ndarray, "row column"]) -> int:
    assigned = _assign(table)
    rows = np.flatnonzero(assigned >= 0)
    return int(table[rows, assigned[rows]].sum())


def _with_sum(values: Float[np.ndarray, "*rest search"]) -> Float[np.ndarray, "*rest search_1"]:
    return np.concatenate([values, values.sum(-1, keepdims=True)], -1)


def _variable(dims: Sequence[str], values: object, long_name: str) -> xr.Variable:
    return xr.Variable(dims, np.asarray(values), {"long_name": long_name})


def _shuffle_truth(
    truth: Int[np.ndarray, "example pos search"], generator: torch.Generator
) -> Int[np.ndarray, "example pos search"]:
    """Permute the true retrievals of each search among the tokens that have one."""
    shuffled = truth.copy()
    for search in range(truth.shape[2]):
        has_truth = truth[..., search] >= 0
        labels = truth[..., search][has_truth]
        shuffled[has_truth, search] = labels[
            torch.randperm(len(labels), generator=generator).numpy()
        ]
    return shuffled


def _members(groups: xr.DataArray | None, examples: int) -> dict[str, Int[np.ndarray, " member"]]:
    """List the examples of each group, with groups in the order of their first example."""
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
                f"groups must have at least 2 examples each (one to fit the assignment, one to "
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
        raise ValueError("winner and pattern must be passed together, got only one of them")
    attention = None
    if winner is not None and pattern is not None:
        positions = _by_true_search("winner", winner, examples, length)
        weights = _ordered("pattern", pattern, _PATTERN_DIMS)
        if positions.shape != labels.shape:
            raise ValueError(
                f"winner must have truth's shape {labels.shape}, got {positions.shape}"
            )
        if weights.shape[:3] != (examples, searches, length):
            raise ValueError(
                f"pattern must have {examples} examples, {searches} searches and {length} "
                f"query positions, as value_scores has, got {dict(pattern.sizes)}"
            )
        known_positions = positions[labels >= 0]
        if known_positions.min() < 0 or known_positions.max() >= weights.shape[3]:
            raise ValueError(
                f"winner must be in 0..{weights.shape[3] - 1} where there is a truth, got values "
                f"in {known_positions.min()}..{known_positions.max()}"
            )
        indices = np.where(labels >= 0, positions, 0)[:, None]
        attention = np.take_along_axis(weights, indices, axis=3).transpose(0, 2, 3, 1)
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
    extra_dims = [dim for dim in array.dims if dim not in ("example", "pos")]
    sizes = {"example": examples, "pos": length}
    if len(extra_dims) != 1 or array.ndim != 3 or 0 in array.shape:
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
    return array.transpose("example", "pos", *extra_dims).to_numpy().astype(np.int64)
