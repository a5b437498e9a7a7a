"""Linear decoding of a number, or of many, from a code."""

from collections.abc import Mapping, Sequence
from typing import cast

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float
from transformer_lens.utilities.statistics import derive_generator

from probes.decoding.cells import (
    Layout,
    Split,
    Table,
    check_numbers,
    fold_of_samples,
    grid_of,
    one_thread,
    read_sources,
    standardise,
)
from probes.decoding.report import Report, decoding_attrs, with_difference
from probes.statistics.intervals import Interval, bootstrap


def decode_continuous(
    fit: xr.Dataset,
    tests: Mapping[str, xr.Dataset],
    *,
    code: str = "code",
    label: str = "value",
    samples: Sequence[str] = ("example",),
    cells: Sequence[str] = ("layer",),
    untrained: Split | None = None,
    penalties: Sequence[float] = (1e-2, 1e-1, 1.0, 10.0, 1e2, 1e3, 1e4),
    folds: int = 5,
    resamples: int = 1000,
    seed: int = 0,
) -> xr.Dataset:
    """Is a number linearly readable from a code? `decode` with ridge regression and R^2.

    R^2 = 1 - squared error / squared deviation from the split's own mean: 1 is perfect, 0 is as
    good as the mean, and it is negative for a probe that does worse. The control "shuffled"
    permutes the numbers among the samples of each dataset (see `decode`).

    Args:
        fit: holds `code` and `label` (numbers), as for `decode`.
        tests: datasets of the same layout by split name.
        code: name of the variable that holds the code.
        label: name of the variable to decode.
        samples: dims that together make one sample, first the example.
        cells: dims over which separate probes are fitted; each gets one more coordinate, "all".
        untrained: (fit, tests) of the same layout with codes of an untrained model.
        penalties: the strengths alpha of the L2 penalty to choose from: scikit-learn's objective
            sum of squared errors + alpha |w|^2.
        folds: of the cross-validation, by example.
        resamples: of the bootstrap.
        seed: of folds, control task and bootstrap.

    Returns:
        `score, score_low, score_high` [control, split, *cells, metric] with the one metric "r2",
        `selectivity, selectivity_low, selectivity_high` [split, *cells], `alpha`
        [control, *cells]; coordinates and intervals as for `decode`.

    Raises:
        KeyError: a dataset lacks a variable.
        TypeError: labels that are not numbers.
        ValueError: dims or layouts that do not fit, values that are not finite, a label that is
            constant within a split, numbers out of range.
    """
    check_numbers(penalties, resamples)
    sources = read_sources((fit, tests), untrained, Layout(code, label, None, samples, cells))
    report = Report(sources, ("r2",))
    with one_thread():
        for source, tables in sources.items():
            labels = [_numbers(table, label) for table in tables.every]
            tasks = {source: labels}
            if source == "probe":
                generator = derive_generator(seed, "control task")
                tasks["shuffled"] = [
                    one[torch.randperm(len(one), generator=generator).numpy()] for one in labels
                ]
            fold = fold_of_samples(tables.fit, folds, seed).numpy()
            for cell, place in grid_of(tables.fit):
                features = standardise(*(table.features(cell) for table in tables.every))
                here, *elsewhere = (part.numpy() for part in features)
                alphas = [
                    _choose_alpha(here, y, fold, sorted(penalties)) for y, *_ in tasks.values()
                ]
                for task, alpha in zip(tasks, alphas, strict=True):
                    report.choose(task, place, alpha)
                for s, (split, table) in enumerate(tables.tests.items()):
                    sums = [
                        _sums(table, known[s], _predict(here, y, elsewhere[s], [alpha])[0])
                        for (y, *known), alpha in zip(tasks.values(), alphas, strict=True)
                    ]
                    report.record([*tasks], split, place, _scores(sums, resamples, seed))
    about = f"R^2 of decoding {label} from {code}"
    result = report.dataset(about)
    result["alpha"] = (
        ("control", *report.cells),
        report.penalty,
        {"long_name": "strength of the L2 penalty, by cross-validation"},
    )
    attrs = decoding_attrs(about, sources["probe"], seed=seed, folds=folds, resamples=resamples)
    return result.assign_attrs(attrs)


def decode_each(
    fit: xr.Dataset,
    tests: Mapping[str, xr.Dataset],
    *,
    along: str,
    code: str = "code",
    label: str = "value",
    samples: Sequence[str] = ("example",),
    cells: Sequence[str] = ("layer",),
    untrained: Split | None = None,
    resamples: int = 1000,
    seed: int = 0,
) -> xr.Dataset:
    """Which of many numbers are linearly readable from a code? `decode_continuous` for each.

    A number that is constant on the fit side cannot be decoded, and is left out. One that is
    constant in a test split has no R^2 there: its scores in that split are NaN.

    Args:
        fit: holds `code` and `label` [samples..., along], with a coordinate for `along`.
        tests: datasets of the same layout by split name.
        along: the dim of `label` over which numbers go: each is decoded by itself.
        code, label, samples, cells, untrained, resamples, seed: see `decode_continuous`.

    Returns:
        What `decode_continuous` returns, with `along` before all other dims.

    Raises:
        KeyError: a dataset lacks a variable.
        ValueError: each number is constant on the fit side or in all tests; or see
            `decode_continuous`.

    Example:
        decode_each(fit, {"ood": test}, along="term", label="has")["score"].sel(control="probe")
    """
    found: list[xr.Dataset] = []
    for name in fit[label][along].to_numpy():
        here, known = _one_number((fit, tests), label, {along: name})
        if not known or not _varies(here[label]):
            continue
        one = decode_continuous(
            here,
            known,
            code=code,
            label=label,
            samples=samples,
            cells=cells,
            untrained=untrained and _one_number(untrained, label, {along: name}),
            resamples=resamples,
            seed=seed,
        )
        found.append(one.reindex(split=list(tests)).expand_dims({along: [name]}))
    if not found:
        raise ValueError(f"{label!r} must vary along the samples for some {along}, but never does")
    return cast(xr.Dataset, xr.concat(found, along, combine_attrs="drop_conflicts"))


def _one_number(sides: Split, label: str, at: Mapping[str, object]) -> Split:
    """Fit and tests with one number as their label, without the tests in which it is constant."""
    fit, tests = sides
    chosen = {n: one.assign({label: one[label].sel(at, drop=True)}) for n, one in tests.items()}
    varying = {n: one for n, one in chosen.items() if _varies(one[label])}
    return fit.assign({label: fit[label].sel(at, drop=True)}), varying


def _varies(values: xr.DataArray) -> bool:
    return bool(np.ptp(values.to_numpy()) > 0)


def _numbers(table: Table, label: str) -> np.ndarray:
    if table.label.dtype.kind not in "biuf":
        raise TypeError(f"label {label!r} must hold numbers, got {table.label.dtype}; see decode")
    values = table.label.astype(np.float64)
    if np.ptp(values) == 0:
        raise ValueError(f"label {label!r} must vary, but is {values[0]} throughout one dataset")
    return values


def _predict(
    x: Float[np.ndarray, "sample feature"],
    y: Float[np.ndarray, " sample"],
    elsewhere: Float[np.ndarray, "other feature"],
    penalties: Sequence[float],
) -> Float[np.ndarray, "penalty other"]:
    """Ridge regression for several penalties at once; the intercept is not penalised."""
    centre = x.mean(axis=0)
    squares, axes = np.linalg.eigh((x - centre).T @ (x - centre))
    moment = axes.T @ ((x - centre).T @ (y - y.mean()))
    slopes = moment / (squares.clip(min=0) + np.asarray(penalties)[:, None])
    return slopes @ axes.T @ (elsewhere - centre).T + y.mean()


def _choose_alpha(
    x: np.ndarray, y: np.ndarray, fold: np.ndarray, penalties: Sequence[float]
) -> float:
    """The alpha of the lowest held-out squared error; of equal ones the largest."""
    errors = np.zeros(len(penalties))
    for one in np.unique(fold):
        kept, held_out = fold != one, fold == one
        fitted = _predict(x[kept], y[kept], x[held_out], penalties)
        errors += ((fitted - y[held_out]) ** 2).sum(axis=1)
    return float(penalties[len(errors) - 1 - int(errors[::-1].argmin())])


_Sums = tuple[Float[np.ndarray, " example"], ...]
"""Of each example: samples, deviations of the truth, their squares, squared errors."""


def _sums(
    table: Table, known: Float[np.ndarray, " sample"], fitted: Float[np.ndarray, " sample"]
) -> _Sums:
    # Centred on the whole split first, which keeps the difference of squares exact enough
    centred = known - known.mean()
    values = (np.ones_like(known), centred, centred**2, (fitted - known) ** 2)
    return tuple(
        np.bincount(table.example, weights=value, minlength=table.examples) for value in values
    )


def _scores(sums: Sequence[_Sums], resamples: int, seed: int) -> Interval:
    """R^2 [task, metric] of each task, with their difference as a last task."""

    def statistic(weights: Float[np.ndarray, "draw example"]) -> Float[np.ndarray, "draw ..."]:
        r2 = np.stack([_r2(*(weights @ part for part in parts)) for parts in sums], axis=1)
        return with_difference(r2[..., None])

    return bootstrap(statistic, (len(sums[0][0]),), resamples=resamples, seed=seed)


def _r2(
    count: Float[np.ndarray, " draw"],
    deviation: Float[np.ndarray, " draw"],
    square: Float[np.ndarray, " draw"],
    error: Float[np.ndarray, " draw"],
) -> Float[np.ndarray, " draw"]:
    """R^2 of each resample; NaN where the truth does not vary in it."""
    total = square - deviation**2 / count
    return 1 - error / np.where(total > 0, total, np.nan)
