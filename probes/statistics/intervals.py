"""Intervals, for probes and studies alike: over examples, over seeds, and how they are stored."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Float, Int

_CONFIDENCE = 0.95
_RESAMPLES = 1000
# Numbers in an array of weights: 2 MB, which stays in the cache.
_AT_ONCE = 2**18

Statistic = Callable[..., Float[np.ndarray, "draw ..."]]
"""A statistic of weights [draw, size], one array for each of the sizes that are resampled."""


class Interval(NamedTuple):
    """An estimate and the ends of its interval, of one shape and unit.

    Attributes:
        estimate: of the sample itself.
        low: the lower end, NaN where the data do not tell.
        high: the upper end.
    """

    estimate: Float[np.ndarray, "..."]
    low: Float[np.ndarray, "..."]
    high: Float[np.ndarray, "..."]


def bootstrap_ratio(
    parts: Float[np.ndarray, "example ..."],
    wholes: Float[np.ndarray, "example ..."] | None = None,
    *,
    clusters: Int[np.ndarray, " example"] | None = None,
    transform: Callable[[Float[np.ndarray, "..."]], Float[np.ndarray, "..."]] | None = None,
    resamples: int = _RESAMPLES,
    confidence: float = _CONFIDENCE,
    seed: int = 0,
) -> Interval:
    """A ratio of sums over examples, with its percentile bootstrap interval.

    Sum of parts / sum of wholes: an accuracy is right answers / answers, R^2 is 1 minus squared
    errors / variances. Parts and wholes are resampled together, and so are all columns.

    Args:
        parts: [example, ...].
        wholes: [example, ...], of the shape of `parts`; trailing dims may be missing or 1. None:
            all are 1, which makes the ratio a mean.
        clusters: which examples are drawn together, such as questions about one picture; whole
            numbers, in any order. None: each example by itself.
        transform: what becomes of the ratios, entry by entry: `numpy.exp` makes a perplexity of a
            mean loss, `lambda ratio: 1 - ratio` makes R^2. None: nothing.
        resamples: how often is drawn, with replacement; 0: only the estimate is computed.
        confidence: of the interval, in (0, 1).
        seed: of the draws.

    Returns:
        Estimate and ends [...], in the unit of the (transformed) ratio. NaN where the whole sums
        to 0; a resample in which it does is left out. The ends are NaN with fewer than two
        clusters.

    Raises:
        TypeError: parts or wholes that are not numbers, clusters that are not whole numbers.
        ValueError: shapes that do not fit, no examples, numbers out of range.

    Example:
        >>> right, answers = numpy.array([3.0, 0.0, 2.0]), numpy.array([4.0, 1.0, 3.0])
        >>> float(bootstrap_ratio(right, answers).estimate)
        0.625
    """
    part = _numbers("parts", parts)
    if part.ndim == 0 or len(part) == 0:
        raise ValueError(
            f"parts must have the shape (example, ...), at least 1 example, got {part.shape}"
        )
    whole = _wholes(wholes, part.shape)

    def ratio(above: np.ndarray, below: np.ndarray) -> np.ndarray:
        below = np.broadcast_to(below, above.shape)
        found = np.divide(above, below, out=np.full(above.shape, np.nan), where=below != 0)
        return found if transform is None else transform(found)

    with np.errstate(all="ignore"):
        estimate = ratio(part.sum(0), whole.sum(0))
    if clusters is not None:
        part, whole = _sums_by_cluster(np.asarray(clusters), part, whole)
    rows = len(part)
    columns = part.reshape(rows, -1), whole.reshape(rows, -1)
    shapes = part.shape[1:], whole.shape[1:]

    def statistic(weights: np.ndarray) -> np.ndarray:
        above, below = (
            (weights @ column).reshape(-1, *shape)
            for column, shape in zip(columns, shapes, strict=True)
        )
        return ratio(above, below)

    return bootstrap(
        statistic,
        (rows,),
        estimate=estimate,
        resamples=resamples,
        confidence=confidence,
        seed=seed,
    )


def bootstrap(
    statistic: Statistic,
    sizes: Sequence[int],
    *,
    estimate: Float[np.ndarray, "..."] | None = None,
    method: Literal["percentile", "basic"] = "percentile",
    skipna: bool = True,
    resamples: int = _RESAMPLES,
    confidence: float = _CONFIDENCE,
    seed: int = 0,
) -> Interval:
    """Any statistic that can be computed from weighted examples, with its bootstrap interval.

    For what is no ratio of sums (`bootstrap_ratio`): scores of a confusion matrix, entropies.

    Args:
        statistic: from weights [draw, size], how often each example is drawn in each resample, to
            its values [draw, ...]. It gets one array for each of `sizes`, and may be called with
            any number of draws.
        sizes: how many examples there are; or several numbers of things that are drawn
            independently of one another, such as (examples, repeats).
        estimate: [...], what the sample gives; None: the statistic with weights of 1.
        method: "percentile": the ends are quantiles of the resamples. "basic": these mirrored in
            the estimate, for a statistic whose bias is that of its resamples once more.
        skipna: whether a resample in which the statistic is NaN is left out. If not, it makes the
            ends NaN: where it is undefined for a reason, such as a gap that may be none.
        resamples: how often is drawn, with replacement; 0: only the estimate is computed.
        confidence: of the interval, in (0, 1).
        seed: of the draws: equal sizes and seeds give equal draws, whatever the statistic.

    Returns:
        Estimate and ends [...], in the unit of the statistic. The ends are NaN where the statistic
        is so in all resamples, without resamples, and with fewer than two of any of the sizes.

    Raises:
        ValueError: numbers out of range, an estimate or draws of another shape.

    Example:
        >>> counts = numpy.array([[2.0, 1.0], [0.0, 3.0], [1.0, 1.0]])  # [example, class]
        >>> interval = bootstrap(lambda weights: (weights @ counts).max(axis=1), (3,))
        >>> float(interval.estimate)
        5.0
    """
    if not sizes or any(size < 1 for size in sizes):
        raise ValueError(f"sizes must be numbers of at least 1, at least one, got {sizes}")
    if method not in ("percentile", "basic"):
        raise ValueError(f"method must be 'percentile' or 'basic', got {method!r}")
    if resamples < 0:
        raise ValueError(f"resamples must be at least 0, got {resamples}")
    if seed < 0:
        raise ValueError(f"seed must be at least 0, got {seed}")
    _check_confidence(confidence)
    with np.errstate(all="ignore"):
        if estimate is None:
            estimate = statistic(*(np.ones((1, size)) for size in sizes))[0]
        middle = np.asarray(estimate, dtype=float)
        if min(sizes) < 2 or resamples == 0:
            unknown = np.full(middle.shape, np.nan)
            return Interval(middle, unknown, unknown.copy())
        draws = _draw(statistic, sizes, middle.shape, resamples, seed)
        low, high = _quantiles(draws, confidence, skipna=skipna)
        if method == "basic":
            low, high = 2 * middle - high, 2 * middle - low
    return Interval(middle, low, high)


def over_seeds(
    values: Float[np.ndarray, "... seed"], *, confidence: float = _CONFIDENCE
) -> Interval:
    """The mean over seeds with Student's t interval.

    Args:
        values: [..., seed]; NaN for a seed that has no value, which is left out.
        confidence: of the interval, in (0, 1).

    Returns:
        Mean and ends [...], in the unit of the values. The mean of no values is NaN; the ends of
        fewer than two are NaN: one seed tells nothing of the spread.

    Raises:
        TypeError: values that are not numbers.
        ValueError: values without a dim of seeds, a confidence out of range.

    Example:
        >>> [round(float(end), 3) for end in over_seeds(numpy.array([0.8, 0.9, 1.0, numpy.nan]))]
        [0.9, 0.652, 1.148]
    """
    # Imported here: scipy.stats takes a second, and a wrong argument should not wait for it.
    from scipy.stats import t

    _check_confidence(confidence)
    found = _numbers("values", values)
    if found.ndim == 0:
        raise ValueError(f"values must have the shape (..., seed), got {found.shape}")
    known = ~np.isnan(found)
    count = known.sum(-1)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.where(known, found, 0).sum(-1) / count
        deviation = np.where(known, found - mean[..., None], 0)
        # NaN for fewer than two values: 0 / 0 for one, no quantile for none.
        error = np.sqrt((deviation**2).sum(-1) / (count - 1) / count)
        half = t.ppf((1 + confidence) / 2, count - 1) * error
    return Interval(np.asarray(mean), np.asarray(mean - half), np.asarray(mean + half))


def exact_rates(hits: Int[np.ndarray, "*rest example"]) -> Interval:
    """The share of hits with its exact 95% interval (Clopper-Pearson).

    Args:
        hits: [..., example]: 1 for a hit, 0 for none, -1 for what was not tried.

    Returns:
        Share and ends [...], in 0..1; NaN where nothing was tried.
    """
    # Imported here: it takes seconds.
    from transformer_lens.utilities.statistics import success_rate_ci

    rates = np.full((3, *hits.shape[:-1]), np.nan)
    for cell in np.ndindex(hits.shape[:-1]):
        tried = hits[cell][hits[cell] >= 0]
        if len(tried):
            found = success_rate_ci(tried.tolist(), confidence=_CONFIDENCE)
            rates[:, *cell] = found.point_estimate, found.ci_low, found.ci_high
    return Interval(*rates)


def interval_variables(
    name: str,
    interval: Interval,
    dims: str | Sequence[str],
    *,
    long_name: str,
    units: str | None = None,
    confidence: float = _CONFIDENCE,
) -> dict[str, tuple[str | Sequence[str], np.ndarray, dict[str, str]]]:
    """An estimate and the ends of its interval as variables `name`, `name_low`, `name_high`.

    Args:
        name: of the estimate.
        interval: arrays with a dim for each of `dims`.
        dims: name of the dim, or names; () for a number.
        long_name: what is estimated; those of the ends have ", lower 95% bound" or ", upper 95%
            bound" in addition.
        units: None if there are none.
        confidence: of the interval, for the long names.

    Returns:
        For `xarray.Dataset`, `assign` or `update`: (dims, values, attributes) by name.

    Raises:
        ValueError: arrays with another number of dims, a confidence out of range.

    Example:
        >>> mean = bootstrap_ratio(numpy.array([[1.0, 0.0], [1.0, 1.0]]))
        >>> variables = interval_variables("accuracy", mean, "split", long_name="right answers")
        >>> list(xarray.Dataset(variables))
        ['accuracy', 'accuracy_low', 'accuracy_high']
    """
    _check_confidence(confidence)
    names = (dims,) if isinstance(dims, str) else tuple(dims)
    shapes = [np.shape(values) for values in interval]
    if len(set(shapes)) > 1 or len(shapes[0]) != len(names):
        raise ValueError(f"interval must hold arrays of the dims {names}, got shapes {shapes}")
    percent = f"{100 * confidence:g}%"
    ends = {"": "", "_low": f", lower {percent} bound", "_high": f", upper {percent} bound"}
    unit = {} if units is None else {"units": units}
    return {
        f"{name}{suffix}": (dims, np.asarray(values), {"long_name": f"{long_name}{end}"} | unit)
        for (suffix, end), values in zip(ends.items(), interval, strict=True)
    }


def _draw(
    statistic: Statistic, sizes: Sequence[int], shape: tuple[int, ...], resamples: int, seed: int
) -> Float[np.ndarray, "... draw"]:
    """The statistic of each resample."""
    from scipy import stats

    # What scipy resamples are numbers of examples, which become weights: the same draws as if it
    # resampled the examples themselves, but sums over examples are then matrix products. With
    # 5,000 examples, 10 columns and 1,000 resamples that takes 0.2 to 0.4 s instead of 1.2 s.
    def of_drawn(*drawn: Int[np.ndarray, "draw size"], axis: int) -> np.ndarray:
        values = statistic(*map(_weights, drawn))
        if values.shape != (len(drawn[0]), *shape):
            raise ValueError(
                f"statistic must return the shape (draw, ...) of the estimate, "
                f"{(len(drawn[0]), *shape)}, got {values.shape}"
            )
        return np.moveaxis(values, 0, axis)

    with warnings.catch_warnings():
        # Its standard error, which nobody reads, is undefined for one resample.
        warnings.simplefilter("ignore", RuntimeWarning)
        found: Any = stats.bootstrap(
            [np.arange(size) for size in sizes],
            of_drawn,
            vectorized=True,
            axis=-1,
            n_resamples=resamples,
            batch=max(1, _AT_ONCE // max(sizes)),
            method="percentile",
            rng=np.random.default_rng(seed),
        )
    return found.bootstrap_distribution


def _weights(drawn: Int[np.ndarray, "draw size"]) -> Float[np.ndarray, "draw size"]:
    """How often each number is drawn."""
    draws, size = drawn.shape
    cell = drawn + size * np.arange(draws)[:, None]
    return np.bincount(cell.ravel(), minlength=draws * size).reshape(draws, size).astype(float)


def _quantiles(
    draws: Float[np.ndarray, "... draw"], confidence: float, *, skipna: bool
) -> tuple[Float[np.ndarray, "..."], Float[np.ndarray, "..."]]:
    """The quantiles that enclose the middle draws."""
    tail = (1 - confidence) / 2
    # The one for NaN takes much longer.
    of = np.nanquantile if skipna and np.isnan(draws).any() else np.quantile
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of columns that are NaN throughout
        low, high = of(draws, (tail, 1 - tail), axis=-1)
    return np.asarray(low), np.asarray(high)


def _numbers(name: str, values: Any) -> Float[np.ndarray, "..."]:
    array = np.asarray(values)
    if array.dtype.kind not in "biuf":
        raise TypeError(f"{name} must hold real numbers, got {array.dtype}")
    return array.astype(float)


def _wholes(wholes: Any, shape: tuple[int, ...]) -> Float[np.ndarray, "example ..."]:
    """The wholes with as many dims as the parts."""
    if wholes is None:
        return np.ones((shape[0], *(1 for _ in shape[1:])))
    whole = _numbers("wholes", wholes)
    whole = whole.reshape(*whole.shape, *(1 for _ in range(len(shape) - whole.ndim)))
    fits = len(whole.shape) == len(shape) and all(
        size == wanted or (size == 1 and place > 0)
        for place, (size, wanted) in enumerate(zip(whole.shape, shape, strict=True))
    )
    if not fits:
        raise ValueError(
            f"wholes must have the shape of parts, {shape}, where trailing dims may be missing or "
            f"1, got {np.shape(wholes)}"
        )
    return whole


def _sums_by_cluster(
    clusters: Int[np.ndarray, " example"], *columns: Float[np.ndarray, "example ..."]
) -> list[Float[np.ndarray, "cluster ..."]]:
    if clusters.dtype.kind not in "iu":
        raise TypeError(f"clusters must hold whole numbers, got {clusters.dtype}")
    if clusters.shape != (len(columns[0]),):
        raise ValueError(
            f"clusters must have the shape ({len(columns[0])},), one number for each example, got "
            f"{clusters.shape}"
        )
    order = np.argsort(clusters, kind="stable")
    starts = np.unique(clusters[order], return_index=True)[1]
    return [np.add.reduceat(column[order], starts) for column in columns]


def _check_confidence(confidence: float) -> None:
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must be in (0, 1), got {confidence}")
