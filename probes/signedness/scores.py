"""Scores of the signs of attention weights (add, subtract or delete tokens), with controls."""

from functools import partial

import numpy as np
import torch
import xarray as xr
from jaxtyping import Bool, Float, Int
from transformer_lens.utilities.statistics import derive_generator

from probes.attention_pairs import PAIRS, PairTable, broadcast_pairs, read_pairs
from probes.checking import checked
from probes.statistics.intervals import Interval, bootstrap, bootstrap_ratio

SHARES = ("subtracted", "partly_subtracted", "deleted", "partly_added", "added")
SIGNS = (-1, 0, 1)

# Replaces a quantile of 0.
_SMALLEST = 1e-12


@checked
def score_signedness(
    pattern: xr.DataArray,
    *,
    valid: xr.DataArray | None = None,
    sign: xr.DataArray | None = None,
    near_zero: float = 0.1,
    near_one: float = 0.9,
    limit: float = 1.0,
    bins: int = 40,
    resamples: int = 1000,
    seed: int = 0,
) -> xr.Dataset:
    """Score how signed an attention pattern is, and whether its signs match planted ones.

    Tay et al. 2019, "Compositional De-Attention Networks": M = tanh(E) * sigmoid(N) should be near
    1 for a token that is added, -1 for one that is subtracted, 0 for one that is deleted. Any
    `hook_pattern` can be scored. Softmax weights are positive and sum to 1, so that only the
    numbers of added tokens are meaningful; linear attention and HYLA have signed but unbounded
    weights, so that "near 1" is meaningless and `near_zero` must be chosen accordingly.

    The sign of a head is a convention: with -q and -v for q and v it computes the same from -M, as
    tanh is odd. So the pattern of each cell is flipped if that agrees better with the planted signs
    (balanced accuracy) on the even examples, and agreement is scored on the odd ones. The control
    "shuffled" permutes the planted signs among all pairs before that.

    Args:
        pattern: weights that multiply the values [example, query_pos, key_pos], in any order.
            Further dims (`layer`, `head`, `train_step`, ...) are cells, which are scored
            separately.
        valid: bool, with some of these three dims: pairs that count, such as those that are not
            masked; None: all.
        sign: planted signs, -1, 0 or 1, with some of these dims.
        near_zero: a token with |weight| up to this counts as deleted, at least 0.
        near_one: from this |weight| on a token counts as fully added or subtracted, above
            `near_zero`.
        limit: the distribution is over -limit..limit, with values outside in the last bins; above
            0, finite.
        bins: number of bins of the distribution.
        resamples: number of bootstrap resamples.
        seed: seed of shuffling and bootstrap.

    Returns:
        The cells are all dims but the three of pairs; `_low` and `_high` are 95% percentile
        bootstrap bounds over examples.

        - `share`, with bounds [*cells, kind]: share of the pairs with a weight up to -near_one
          ("subtracted"), between ("partly_subtracted"), within near_zero of 0 ("deleted"),
          ("partly_added"), and from near_one ("added"); they sum to 1.
        - `distribution` [*cells, bin]: share of the pairs with a weight in each bin, labelled by
          its centre.
        - `added`, `subtracted`, with bounds [*cells]: mean number of tokens per query with weight
          above near_zero, or below -near_zero.
        - `effective_added`, `effective_subtracted`, with bounds [*cells]: mean over queries of
          (sum w)² / sum w² over the positive (negative) weights of a query: their number if they
          are equal, 1 if one dominates; 0 if there are none.

        With `sign`, over odd examples, where the pattern has a sign if outside of near_zero:

        - `confusion` [control, *cells, sign, found]: share of the pairs with each planted sign
          that have each sign of the pattern; NaN for a sign that does not occur.
        - `accuracy`, `balanced_accuracy`, with bounds [control, *cells]: share of pairs with the
          planted sign, and its mean over the planted signs that occur.
        - `chance`, `balanced_chance` [control, *cells]: both for signs that are independent of the
          planted ones, with the same frequencies.
        - `matched` [control, *cells]: balanced accuracy of whether a token counts, regardless of
          its sign: the mean of the share of planted 0 within near_zero and the share of planted
          -1 and 1 (their mean) outside; 1/2 by chance, NaN without planted 0.
        - `turned` [control, *cells]: 1 where the pattern was flipped, else 0.

    Raises:
        TypeError: `valid` is not bool, or `sign` is not integers.
        ValueError: dims or sizes do not match, there are no valid pairs, weights are not finite, a
            sign or number is out of range; or, with `sign`, a half of the examples has no valid
            pair.

    Example:
        >>> score_signedness(data["pattern"], valid=data["valid"])["added"]
    """
    if not 0 <= near_zero < near_one:
        raise ValueError(
            f"near_zero must be in [0, near_one = {near_one}), got near_zero = {near_zero}"
        )
    if not 0 < limit < np.inf:
        raise ValueError(f"limit must be above 0 and finite, got {limit}")
    table = read_pairs("pattern", pattern, valid, bins, resamples)
    weights, valid_pairs = table.values, table.valid
    is_signed = np.abs(weights) > near_zero
    pattern_sign = np.where(is_signed, np.sign(weights), 0).astype(np.int8)
    # -2 and 2 for fully subtracted and added.
    share = pattern_sign * np.where(np.abs(weights) >= near_one, 2, 1)
    counts = np.stack([((share == level) & valid_pairs).sum((2, 3)) for level in range(-2, 3)], -1)

    ratio = partial(bootstrap_ratio, resamples=resamples, seed=seed)
    result = table.dataset("signs of a pattern", seed, resamples)
    result.coords["kind"] = list(SHARES)
    pairs = valid_pairs.sum((2, 3))[..., None]
    long_name = "share of the pairs of query and key"
    table.put(result, "share", ratio(counts, pairs), long_name, "kind")
    table.put_distribution(result, -limit, limit, bins)

    has_keys = valid_pairs.any(3)
    queries = has_keys.sum(2)
    for name, direction in (("added", 1), ("subtracted", -1)):
        one_sided = np.where(valid_pairs, np.maximum(direction * weights, 0), 0)
        number = ((pattern_sign == direction) & valid_pairs).sum((2, 3))
        long_name = f"tokens {name} per query"
        table.put(result, name, ratio(number, queries), long_name)
        square = np.square(one_sided).sum(3)
        effective = np.divide(
            np.square(one_sided.sum(3)), square, out=np.zeros_like(square), where=square > 0
        )
        mean = ratio(effective.sum(2), queries)
        table.put(result, f"effective_{name}", mean, f"effective number of {long_name}")
    if sign is not None:
        _put_agreement(result, table, pattern_sign, _planted(sign, table), resamples, seed)
    return result


@checked
def relative_weights(
    pattern: xr.DataArray, *, valid: xr.DataArray | None = None, quantile: float = 0.99
) -> xr.DataArray:
    """Divide weights by a quantile of their sizes, so that they are relative to the head's largest.

    For `score_signedness` of heads whose weights are unbounded, as in linear attention and HYLA, or
    small throughout, as in CoDA with a nearly closed gate.

    Args:
        pattern: [example, query_pos, key_pos], in any order; further dims are cells with separate
            quantiles.
        valid: bool, with some of these three dims: pairs that count; None: all.
        quantile: quantile of |weight|, above 0 and at most 1.

    Returns:
        Relative weights [as `pattern`], of unchanged sign: 1 or -1 at the quantile.

    Raises:
        TypeError: `valid` is not bool.
        ValueError: dims or sizes do not match, there are no valid pairs, weights are not finite,
            or the quantile is out of range.

    Example:
        Tokens count if their weight exceeds a tenth of the head's largest weights:

        >>> score_signedness(relative_weights(pattern), sign=sign)
    """
    if not 0 < quantile <= 1:
        raise ValueError(f"quantile must be in (0, 1], got {quantile}")
    read_pairs("pattern", pattern, valid, 1, 1)
    sizes = abs(pattern) if valid is None else abs(pattern).where(valid)
    top = sizes.quantile(quantile, PAIRS).drop_vars("quantile")
    return pattern / top.clip(min=_SMALLEST)


@checked
def strongest_head(data: xr.Dataset, pattern: xr.DataArray) -> xr.Dataset:
    """Select the head with the largest weights, and the example with the most queries.

    If `data` has planted signs as `sign`, select the head whose weights correlate most with them,
    positively or negatively.

    Args:
        data: variables with any dims of `pattern`, such as matrices to draw.
        pattern: [example, query_pos, key_pos] and further dims (`layer`, `head`, `model`, ...) to
            select from; NaN for cells to exclude, and for padding.

    Returns:
        `data` without `example` and the further dims, whose labels are coordinates.

    Raises:
        ValueError: dims do not match, or the pattern is NaN everywhere.

    Example:
        >>> plots.matrix(strongest_head(captured, captured["pattern"])["pattern"])
    """
    cells = [dim for dim in pattern.dims if dim not in PAIRS]
    if not set(PAIRS) <= set(pattern.dims) or not cells or not pattern.notnull().any():
        raise ValueError(
            f"pattern must have the dims {PAIRS}, further dims, and a weight that is not NaN, got "
            f"{dict(pattern.sizes)}"
        )
    size = abs(pattern).mean(PAIRS)
    if "sign" in data:
        size = abs(xr.corr(pattern, data["sign"], PAIRS)).where(size.notnull())
    strongest = size.fillna(-1).argmax(cells)
    n_queries = pattern.isel(strongest).notnull().any("key_pos").sum("query_pos")
    return data.isel(strongest).isel(example=n_queries.argmax("example"), drop=True)


def _put_agreement(
    result: xr.Dataset,
    table: PairTable,
    pattern_sign: Int[np.ndarray, "example cell query_pos key_pos"],
    planted: Int[np.ndarray, "example 1 query_pos key_pos"],
    resamples: int,
    seed: int,
) -> None:
    halves = [slice(0, None, 2), slice(1, None, 2)]
    if not all(table.valid[half].any() for half in halves):
        raise ValueError(
            "valid must hold pairs among the even examples (to orient a cell) and among the odd "
            "ones (to score), got none in one half"
        )
    shuffled = planted.copy()
    valid_signs = planted[table.valid]
    order = torch.randperm(len(valid_signs), generator=derive_generator(seed, "signs"))
    shuffled[table.valid] = valid_signs[order.numpy()]
    collected: dict[str, list[np.ndarray]] = {}
    for true_sign in (planted, shuffled):
        counts = _confusion(pattern_sign, true_sign, table.valid)
        fitted = counts[halves[0]].sum(0)
        turned = _balanced(fitted[..., ::-1]) > _balanced(fitted)
        tested = np.where(turned[:, None, None], counts[..., ::-1], counts)[halves[1]]
        total = tested.sum(0)
        accuracies = _score_signs(tested.astype(float), resamples, seed)
        scores = {"turned": turned.astype(np.int8)}
        with np.errstate(invalid="ignore"):
            scores["confusion"] = total / total.sum(2, keepdims=True)
            n_pairs = total.sum((1, 2))
            scores["chance"] = (total.sum(1) * total.sum(2)).sum(1) / n_pairs**2
        is_planted = total.sum(2) > 0
        # Found signs that are not planted are never right.
        by_chance = (total.sum(1) * is_planted).sum(1) / n_pairs
        scores["balanced_chance"] = by_chance / is_planted.sum(1)
        scores["accuracy"], scores["balanced_accuracy"] = np.moveaxis(np.stack(accuracies), -1, 0)
        for name, value in scores.items():
            collected.setdefault(name, []).append(value)
    result.coords["control"] = ["observed", "shuffled"]
    result.coords["sign"] = list(SIGNS)
    result.coords["found"] = list(SIGNS)
    by_control = {name: np.stack(values) for name, values in collected.items()}
    long_name = "share of the pairs with a planted sign that have the found one"
    result["confusion"] = table.variable(
        by_control["confusion"], long_name, ("control",), "sign", "found"
    )
    deleted = result["confusion"].sel(found=0, drop=True)
    counted = 1 - deleted.sel(sign=[-1, 1]).mean("sign")
    matched = (counted + deleted.sel(sign=0, drop=True)) / 2
    long_name = "balanced accuracy of whether a token counts"
    result["matched"] = matched.assign_attrs(long_name=long_name)
    for name, long_name in (
        ("accuracy", "share of the pairs with the planted sign"),
        ("balanced_accuracy", "mean over planted signs of the share with that sign"),
    ):
        interval = Interval(*by_control[name].transpose(1, 0, 2))
        table.put(result, name, interval, long_name, before=("control",))
    for name, long_name in (
        ("chance", "accuracy of independent signs"),
        ("balanced_chance", "balanced accuracy of independent signs"),
        ("turned", "whether the pattern was turned round"),
    ):
        result[name] = table.variable(by_control[name], long_name, ("control",))


def _confusion(
    pattern_sign: Int[np.ndarray, "example cell query_pos key_pos"],
    planted: Int[np.ndarray, "example 1 query_pos key_pos"],
    valid: Bool[np.ndarray, "example 1 query_pos key_pos"],
) -> Int[np.ndarray, "example cell sign found"]:
    counts = np.zeros((*pattern_sign.shape[:2], 3, 3), dtype=int)
    for row, sign in enumerate(SIGNS):
        of_sign = valid & (planted == sign)
        for column, other in enumerate(SIGNS):
            counts[..., row, column] = (of_sign & (pattern_sign == other)).sum((2, 3))
    return counts


def _score_signs(
    counts: Float[np.ndarray, "example cell sign found"], resamples: int, seed: int
) -> Interval:
    """Compute accuracy and balanced accuracy [cell, score] with their intervals."""
    examples, *shape = counts.shape
    flat = counts.reshape(examples, -1)

    def statistic(weights: Float[np.ndarray, "draw example"]) -> Float[np.ndarray, "draw ..."]:
        total = (weights @ flat).reshape(-1, *shape)
        return np.stack([_accuracy(total), _balanced(total)], -1)

    return bootstrap(statistic, (examples,), resamples=resamples, seed=seed)


def _accuracy(counts: Float[np.ndarray, "... sign found"]) -> Float[np.ndarray, "..."]:
    return np.trace(counts, axis1=-2, axis2=-1) / counts.sum((-2, -1))


def _balanced(counts: Float[np.ndarray, "... sign found"]) -> Float[np.ndarray, "..."]:
    planted = counts.sum(-1)
    correct = np.diagonal(counts, axis1=-2, axis2=-1)
    rates = np.divide(correct, planted, out=np.zeros(planted.shape), where=planted > 0)
    return rates.sum(-1) / np.maximum((planted > 0).sum(-1), 1)


def _planted(
    sign: xr.DataArray, table: PairTable
) -> Int[np.ndarray, "example 1 query_pos key_pos"]:
    if sign.dtype.kind not in "iu":
        raise TypeError(f"sign must hold integers, got {sign.dtype}")
    planted = broadcast_pairs("sign", sign, table.valid.shape).astype(int)
    if not np.isin(planted, SIGNS)[table.valid].all():
        raise ValueError(
            f"sign must be -1, 0 or 1 where valid, got values in {planted.min()}..{planted.max()}"
        )
    return planted
