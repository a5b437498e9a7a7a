"""Are tokens added, subtracted or deleted? The signs of attention weights, with controls."""

from functools import partial

import numpy as np
import torch
import xarray as xr
from jaxtyping import Bool, Float, Int
from transformer_lens.utilities.statistics import derive_generator

from probes.attention_pairs import PAIRS, PairTable, broadcast_pairs, read_pairs
from probes.statistics.intervals import Interval, bootstrap, bootstrap_ratio

SHARES = ("subtracted", "partly_subtracted", "deleted", "partly_added", "added")
SIGNS = (-1, 0, 1)

# What takes the place of a quantile of 0.
_SMALLEST = 1e-12


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
    """Tell how signed a pattern is, and whether its signs are those that were planted.

    Tay et al. 2019, "Compositional De-Attention Networks": M = tanh(E) * sigmoid(N) is to be near
    1 for a token that is added, -1 for one that is subtracted, 0 for one that is deleted. Any
    `hook_pattern` will do. A softmax has no negative weights and its weights sum to 1, so that
    only the numbers of added tokens mean something; linear attention and HYLA have signs, but no
    limit, so that what is near 1 means nothing and `near_zero` wants a choice of its own.

    A head's sign is a convention: with -q and -v for q and v it computes the same from -M, as
    tanh is odd. Agreement with planted signs is therefore scored with each cell's pattern as it
    is, or turned round, whichever agrees better (balanced accuracy) on the even examples; scored
    are the odd ones. The control "shuffled" has the planted signs dealt out anew among all pairs
    before that.

    Args:
        pattern: [example, query_pos, key_pos], in any order: what multiplies the values. Every
            further dim (`layer`, `head`, `train_step`, ...) makes cells, scored one by one.
        valid: bool, with some of these three dims: the pairs that are looked at, such as those
            that a mask leaves; None: all.
        sign: like `valid`, but -1, 0 or 1: the planted signs.
        near_zero: a token with |weight| up to here counts as deleted, at least 0.
        near_one: from here on a weight counts as added or subtracted in full, above `near_zero`.
        limit: the distribution is over -limit..limit, what is beyond in the last bins; above 0.
        bins: of the distribution.
        resamples: of the bootstrap.
        seed: of shuffling and bootstrap.

    Returns:
        The dims of cells stand for all but the three of pairs; `_low` and `_high` are 95%
        percentile bootstrap bounds over examples.

        - `share`, with bounds [*cells, kind]: of the pairs, those with a weight up to -near_one
          ("subtracted"), between ("partly_subtracted"), within near_zero of 0 ("deleted"),
          ("partly_added"), and from near_one ("added"); their sum is 1.
        - `distribution` [*cells, bin]: share of the pairs with a weight in each bin, named by its
          middle.
        - `added`, `subtracted`, with bounds [*cells]: mean number of a query's tokens with weight
          above near_zero, or below -near_zero.
        - `effective_added`, `effective_subtracted`, with bounds [*cells]: mean over queries of
          (sum w)² / sum w² over a query's positive (negative) weights: their number if they are
          equal, 1 if one outweighs the others; 0 if there are none.

        With `sign`, over odd examples, signs of the pattern being those outside of near_zero:

        - `confusion` [control, *cells, sign, found]: of the pairs with each planted sign, the share
          with each sign of the pattern; NaN for a sign that does not occur.
        - `accuracy`, `balanced_accuracy`, with bounds [control, *cells]: share of pairs whose sign
          is the planted one, and the mean of that over the planted signs that occur.
        - `chance`, `balanced_chance` [control, *cells]: both, if signs were independent of the
          planted ones, each as frequent as they are.
        - `matched` [control, *cells]: balanced accuracy of whether a token counts at all, whatever
          the sign: the mean of the shares of the planted 0 that are within near_zero, and of the
          other planted signs (their mean) that are outside; 1/2 by chance, NaN without any 0.
        - `turned` [control, *cells]: 1 where the pattern was turned round, else 0.

    Raises:
        TypeError: `valid` that is not bool, or `sign` that is not integers.
        ValueError: dims or sizes that do not fit, no valid pairs, weights that are not finite,
            signs or numbers out of range; with `sign`, halves of examples without any valid pair.
    """
    if not 0 <= near_zero < near_one:
        raise ValueError(
            f"near_zero must be in [0, near_one = {near_one}), got near_zero = {near_zero}"
        )
    if not limit > 0:
        raise ValueError(f"limit must be above 0, got {limit}")
    table = read_pairs("pattern", pattern, valid, bins, resamples)
    weights, seen = table.values, table.valid
    beyond = np.abs(weights) > near_zero
    found = np.where(beyond, np.sign(weights), 0).astype(np.int8)
    # -2 and 2 where in full.
    share = found * np.where(np.abs(weights) >= near_one, 2, 1)
    counts = np.stack([((share == kind) & seen).sum((2, 3)) for kind in range(-2, 3)], -1)

    ratio = partial(bootstrap_ratio, resamples=resamples, seed=seed)
    result = table.dataset("signs of a pattern", seed, resamples)
    result.coords["kind"] = list(SHARES)
    pairs = seen.sum((2, 3))[..., None]
    about = "share of the pairs of query and key"
    table.put(result, "share", ratio(counts, pairs), about, "kind")
    table.put_distribution(result, -limit, limit, bins)

    asked = seen.any(3)
    queries = asked.sum(2)
    for name, way in (("added", 1), ("subtracted", -1)):
        part = np.where(seen, np.maximum(way * weights, 0), 0)
        number = ((found == way) & seen).sum((2, 3))
        about = f"tokens {name} per query"
        table.put(result, name, ratio(number, queries), about)
        square = np.square(part).sum(3)
        effective = np.divide(
            np.square(part.sum(3)), square, out=np.zeros_like(square), where=square > 0
        )
        mean = ratio(effective.sum(2), queries)
        table.put(result, f"effective_{name}", mean, f"effective number of {about}")
    if sign is not None:
        _put_agreement(result, table, found, _planted(sign, table), resamples, seed)
    return result


def relative_weights(
    pattern: xr.DataArray, *, valid: xr.DataArray | None = None, quantile: float = 0.99
) -> xr.DataArray:
    """Weights relative to the largest of their head: divided by a quantile of their sizes.

    For `score_signedness` of heads whose weights have no limit, as those of linear attention and
    HYLA, or are small throughout, as those of CoDA behind a gate that is nearly closed.

    Args:
        pattern: [example, query_pos, key_pos], in any order; every further dim makes cells, each
            with a quantile of its own.
        valid: bool, with some of these three dims: the pairs whose weights count; None: all.
        quantile: of |weight|, above 0 and at most 1.

    Returns:
        [as `pattern`], of its signs: 1 or -1 for a weight as large as the quantile.

    Raises:
        TypeError: `valid` that is not bool.
        ValueError: dims or sizes that do not fit, no valid pairs, weights that are not finite, a
            quantile out of range.

    Example:
        `score_signedness(relative_weights(pattern), sign=sign)`, in which all counts that is
        beyond a tenth of a head's largest weights.
    """
    if not 0 < quantile <= 1:
        raise ValueError(f"quantile must be above 0 and at most 1, got {quantile}")
    read_pairs("pattern", pattern, valid, 1, 1)
    sizes = abs(pattern) if valid is None else abs(pattern).where(valid)
    top = sizes.quantile(quantile, PAIRS).drop_vars("quantile")
    return pattern / top.clip(min=_SMALLEST)


def strongest_head(data: xr.Dataset, pattern: xr.DataArray) -> xr.Dataset:
    """What is known of the head whose weights are greatest, in the example with most queries.

    Or that agrees best with planted signs, if `data` has them as `sign`: whose weights correlate
    most with them, whichever way round.

    Args:
        data: variables with any of the dims of `pattern`: matrices to be drawn.
        pattern: [example, query_pos, key_pos] and further dims (`layer`, `head`, `model`, ...),
            among whose cells is chosen; NaN for what must not be chosen, and where no token is.

    Returns:
        `data` without `example` and the further dims, whose labels are coordinates.

    Raises:
        ValueError: dims that do not fit, or a pattern that is NaN everywhere.

    Example:
        `draw_matrices(strongest_head(captured, captured["pattern"]))`
    """
    cells = [dim for dim in pattern.dims if dim not in PAIRS]
    if not set(PAIRS) <= set(pattern.dims) or not cells or not pattern.notnull().any():
        raise ValueError(
            f"pattern must have the dims {PAIRS}, further ones, and a weight that is known, got "
            f"{dict(pattern.sizes)}"
        )
    size = abs(pattern).mean(PAIRS)
    if "sign" in data:
        size = abs(xr.corr(pattern, data["sign"], PAIRS)).where(size.notnull())
    best = size.fillna(-1).argmax(cells)
    n_queries = pattern.isel(best).notnull().any("key_pos").sum("query_pos")
    return data.isel(best).isel(example=n_queries.argmax("example"), drop=True)


def _put_agreement(
    result: xr.Dataset,
    table: PairTable,
    found: Int[np.ndarray, "example cell query_pos key_pos"],
    planted: Int[np.ndarray, "example 1 query_pos key_pos"],
    resamples: int,
    seed: int,
) -> None:
    halves = [slice(0, None, 2), slice(1, None, 2)]
    if not all(table.valid[half].any() for half in halves):
        raise ValueError(
            "sign needs valid pairs among the even examples (to find which way round a cell is) "
            "and among the odd ones (to score)"
        )
    dealt = planted.copy()
    known = planted[table.valid]
    order = torch.randperm(len(known), generator=derive_generator(seed, "signs"))
    dealt[table.valid] = known[order.numpy()]
    parts: dict[str, list[np.ndarray]] = {}
    for truth in (planted, dealt):
        counts = _confusion(found, truth, table.valid)
        fitted = counts[halves[0]].sum(0)
        turned = _balanced(fitted[..., ::-1]) > _balanced(fitted)
        tested = np.where(turned[:, None, None], counts[..., ::-1], counts)[halves[1]]
        total = tested.sum(0)
        of_signs = _score_signs(tested.astype(float), resamples, seed)
        one = {"turned": turned.astype(np.int8)}
        with np.errstate(invalid="ignore"):
            one["confusion"] = total / total.sum(2, keepdims=True)
            every = total.sum((1, 2))
            one["chance"] = (total.sum(1) * total.sum(2)).sum(1) / every**2
        one["balanced_chance"] = 1 / (total.sum(2) > 0).sum(1)
        one["accuracy"], one["balanced_accuracy"] = np.moveaxis(np.stack(of_signs), -1, 0)
        for name, value in one.items():
            parts.setdefault(name, []).append(value)
    result.coords["control"] = ["observed", "shuffled"]
    result.coords["sign"] = list(SIGNS)
    result.coords["found"] = list(SIGNS)
    both = {name: np.stack(values) for name, values in parts.items()}
    about = "share of the pairs with a planted sign that have the found one"
    result["confusion"] = table.variable(both["confusion"], about, ("control",), "sign", "found")
    deleted = result["confusion"].sel(found=0, drop=True)
    counted = 1 - deleted.sel(sign=[-1, 1]).mean("sign")
    matched = (counted + deleted.sel(sign=0, drop=True)) / 2
    about = "balanced accuracy of whether a token counts"
    result["matched"] = matched.assign_attrs(long_name=about)
    for name, about in (
        ("accuracy", "share of the pairs with the planted sign"),
        ("balanced_accuracy", "mean over planted signs of the share with that sign"),
    ):
        interval = Interval(*both[name].transpose(1, 0, 2))
        table.put(result, name, interval, about, before=("control",))
    for name, about in (
        ("chance", "accuracy of independent signs"),
        ("balanced_chance", "balanced accuracy of independent signs"),
        ("turned", "whether the pattern was turned round"),
    ):
        result[name] = table.variable(both[name], about, ("control",))


def _confusion(
    found: Int[np.ndarray, "example cell query_pos key_pos"],
    planted: Int[np.ndarray, "example 1 query_pos key_pos"],
    valid: Bool[np.ndarray, "example 1 query_pos key_pos"],
) -> Int[np.ndarray, "example cell sign found"]:
    counts = np.zeros((*found.shape[:2], 3, 3), dtype=int)
    for row, sign in enumerate(SIGNS):
        here = valid & (planted == sign)
        for column, other in enumerate(SIGNS):
            counts[..., row, column] = (here & (found == other)).sum((2, 3))
    return counts


def _score_signs(
    counts: Float[np.ndarray, "example cell sign found"], resamples: int, seed: int
) -> Interval:
    """Accuracy and balanced accuracy [cell, score], with their intervals."""
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
    right = np.diagonal(counts, axis1=-2, axis2=-1)
    rates = np.divide(right, planted, out=np.zeros(planted.shape), where=planted > 0)
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
