"""Linear decoding of numbers from a code by ridge regression, with intervals and controls."""

from collections.abc import Callable, Mapping, Sequence
from typing import cast

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float
from transformer_lens.utilities.statistics import derive_generator

from probes.checking import checked
from probes.decoding.cells import Cell, Layout, Split, Table, read_sources
from probes.decoding.fitting import check_arguments, fold_of_samples, over_cells
from probes.decoding.report import Metrics, Report, decoding_attrs


@checked
def decode_continuous(
    fit: xr.Dataset,
    tests: Mapping[str, xr.Dataset],
    *,
    code: str = "code",
    label: str = "value",
    samples: Sequence[str] = ("example",),
    cells: Sequence[str] = ("layer",),
    joined: bool = True,
    untrained: Split | None = None,
    penalties: Sequence[float] = (1e-2, 1e-1, 1.0, 10.0, 1e2, 1e3, 1e4),
    folds: int = 5,
    resamples: int = 1000,
    draws: bool = False,
    seed: int = 0,
) -> xr.Dataset:
    """Decode a number linearly from a code: `decode` with ridge regression and R^2.

    R^2 = 1 - squared error / squared deviation from the mean of the split: 1 is perfect, 0 is as
    good as predicting the mean, and negative is worse. The control "shuffled" permutes the numbers
    among the samples of each dataset (see `decode`).

    Args:
        fit: holds `code` and `label` (numbers), as for `decode`.
        tests: datasets of the same layout by split name.
        code: name of the variable that holds the code.
        label: name of the variable to decode.
        samples: dims that together index a sample, the example first.
        cells, joined: dims with a separate probe per coordinate, and whether each gets the
            additional coordinate "all"; see `decode`.
        untrained: (fit, tests) of the same layout with codes of an untrained model.
        penalties: strengths alpha of the L2 penalty to choose from (scikit-learn's objective, sum
            of squared errors + alpha |w|^2).
        folds: number of cross-validation folds, by example.
        resamples: number of bootstrap resamples.
        draws: whether the result has all bootstrap draws, see `decode`.
        seed: seed of folds, control task and bootstrap.

    Returns:
        `score, score_low, score_high` [control, split, *cells, metric] with the single metric
        "r2", `selectivity, selectivity_low, selectivity_high` [split, *cells], and `alpha`
        [control, *cells]; coordinates and intervals as for `decode`.

    Raises:
        KeyError: a dataset lacks a variable.
        TypeError: `fit` or a test is not a dataset, or labels are not numbers.
        ValueError: dims or layouts do not match, values are not finite, a label is constant within
            a split, or a number is out of range.

    Example:
        >>> decode_continuous(train, {"ood": ood}, label="number")["score"].sel(control="probe")
    """
    check_arguments(penalties, resamples)
    sources = read_sources((fit, tests), untrained, Layout(code, label, None, samples, cells))
    report = Report(sources, ("r2",), joined=joined, draws=draws, resamples=resamples, seed=seed)
    truths: dict[str, dict[str, list[np.ndarray]]] = {}
    for source, tables in sources.items():
        labels = [_numbers(table, label) for table in tables.all_tables]
        truths[source] = {source: labels}
        if source == "probe":
            generator = derive_generator(seed, "control task")
            truths[source]["shuffled"] = [
                y[torch.randperm(len(y), generator=generator).numpy()] for y in labels
            ]
    fold = {
        source: fold_of_samples(tables.fit, folds, seed).numpy()
        for source, tables in sources.items()
    }

    def decode_cell(source: str, cell: Cell, index: tuple[int, ...]) -> None:
        tables, tasks = sources[source], truths[source]
        fit_features, *test_features = (array.numpy() for array in tables.principal_axes(cell))
        alphas = [
            _choose_alpha(fit_features, y[0], fold[source], sorted(penalties))
            for y in tasks.values()
        ]
        for task, alpha in zip(tasks, alphas, strict=True):
            report.set_penalty(task, index, alpha)
        for number, (split, table) in enumerate(tables.tests.items()):
            x = test_features[number]
            sums = [
                _sums(table, y[number + 1], _predict(fit_features, y[0], x, [alpha])[0])
                for y, alpha in zip(tasks.values(), alphas, strict=True)
            ]

            def scores(weights: np.ndarray, sums: Sequence[_Sums] = sums) -> Metrics:
                r2 = np.stack([_r2(*(weights @ part for part in parts)) for parts in sums], axis=1)
                return r2[..., None]

            report.set_scores([*tasks], split, index, scores, table.n_examples)

    over_cells(decode_cell, sources, joined=joined, what=f"decode {label}")
    long_name = f"R^2 of decoding {label} from {code}"
    result = report.dataset(long_name)
    result["alpha"] = (
        ("control", *report.cells),
        report.penalty,
        {"long_name": "strength of the L2 penalty, by cross-validation"},
    )
    attrs = decoding_attrs(long_name, sources["probe"], seed=seed, folds=folds, resamples=resamples)
    return result.assign_attrs(attrs)


@checked
def decode_each(
    fit: xr.Dataset,
    tests: Mapping[str, xr.Dataset],
    *,
    along: str,
    decoder: Callable[..., xr.Dataset] = decode_continuous,
    code: str = "code",
    label: str = "value",
    samples: Sequence[str] = ("example",),
    cells: Sequence[str] = ("layer",),
    untrained: Split | None = None,
    resamples: int = 1000,
    seed: int = 0,
) -> xr.Dataset:
    """Decode each of several labels linearly from a code.

    A label that is constant in `fit` cannot be decoded and is left out. One that is constant in a
    test split has no R^2 there: its scores in that split are NaN.

    Args:
        fit: holds `code` and `label` [samples..., along], with a coordinate for `along`.
        tests: datasets of the same layout by split name.
        along: dim of `label` that indexes the labels.
        decoder: `decode_continuous` for numbers, `decode` for classes; or one of them with settings
            bound, such as `functools.partial(decode, positive=True)`.
        code, label, samples, cells, untrained, resamples, seed: as in `decode_continuous`.

    Returns:
        The results of the decoder, with `along` as first dim.

    Raises:
        KeyError: a dataset lacks a variable, or `label` the dim `along`.
        ValueError: each label is constant in `fit` or in all tests; or as in the decoder.

    Example:
        >>> decode_each(fit, {"ood": test}, along="term", label="has")["score"].sel(control="probe")
    """
    if label in fit and along not in fit[label].dims:
        dims = ", ".join(map(str, fit[label].dims))
        raise KeyError(f"along must be a dim of {label!r}, {dims}, got {along!r}")
    results: list[xr.Dataset] = []
    for name in fit[label][along].to_numpy():
        fit_number, varying_tests = _select_number((fit, tests), label, {along: name})
        if not varying_tests or not _varies(fit_number[label]):
            continue
        result = decoder(
            fit_number,
            varying_tests,
            code=code,
            label=label,
            samples=samples,
            cells=cells,
            untrained=untrained and _select_number(untrained, label, {along: name}),
            resamples=resamples,
            seed=seed,
        )
        results.append(result.reindex(split=list(tests)).expand_dims({along: [name]}))
    if not results:
        raise ValueError(f"{label!r} must vary among samples for some {along}, got constants only")
    return cast(xr.Dataset, xr.concat(results, along, combine_attrs="drop_conflicts"))


def _select_number(split: Split, label: str, index: Mapping[str, object]) -> Split:
    """Select one of the labels, and leave out the tests in which it is constant."""

    def select(data: xr.Dataset) -> xr.Dataset:
        return data.assign({label: data[label].sel(index, drop=True)})

    fit, tests = split
    selected = {name: select(test) for name, test in tests.items()}
    return select(fit), {name: test for name, test in selected.items() if _varies(test[label])}


def _varies(values: xr.DataArray) -> bool:
    return bool((values != values.values.flat[0]).any())


def _numbers(table: Table, label: str) -> np.ndarray:
    if table.label.dtype.kind not in "biuf":
        raise TypeError(f"label {label!r} must hold numbers, got {table.label.dtype}; see decode")
    values = table.label.astype(np.float64)
    if np.ptp(values) == 0:
        raise ValueError(f"label {label!r} must vary in each dataset, got {values[0]} throughout")
    return values


def _predict(
    x: Float[np.ndarray, "sample feature"],
    y: Float[np.ndarray, " sample"],
    other_x: Float[np.ndarray, "other feature"],
    penalties: Sequence[float],
) -> Float[np.ndarray, "penalty other"]:
    """Predict by ridge regression for several penalties; the intercept is not penalised."""
    centre = x.mean(axis=0)
    squares, axes = np.linalg.eigh((x - centre).T @ (x - centre))
    moment = axes.T @ ((x - centre).T @ (y - y.mean()))
    slopes = moment / (squares.clip(min=0) + np.asarray(penalties)[:, None])
    return slopes @ axes.T @ (other_x - centre).T + y.mean()


def _choose_alpha(
    x: np.ndarray, y: np.ndarray, fold: np.ndarray, penalties: Sequence[float]
) -> float:
    """Choose the alpha with the lowest held-out squared error, the largest in case of a tie."""
    errors = np.zeros(len(penalties))
    for number in np.unique(fold):
        training, held_out = fold != number, fold == number
        predicted = _predict(x[training], y[training], x[held_out], penalties)
        errors += ((predicted - y[held_out]) ** 2).sum(axis=1)
    return float(penalties[len(errors) - 1 - int(errors[::-1].argmin())])


_Sums = tuple[Float[np.ndarray, " example"], ...]
"""Sums per example: samples, deviations of the truth, squared deviations, squared errors."""


def _sums(
    table: Table, truth: Float[np.ndarray, " sample"], predicted: Float[np.ndarray, " sample"]
) -> _Sums:
    # Centring on the mean of the split keeps the difference of squares exact enough.
    centred = truth - truth.mean()
    values = (np.ones_like(truth), centred, centred**2, (predicted - truth) ** 2)
    return tuple(
        np.bincount(table.example, weights=summand, minlength=table.n_examples)
        for summand in values
    )


def _r2(
    count: Float[np.ndarray, " draw"],
    deviation: Float[np.ndarray, " draw"],
    square: Float[np.ndarray, " draw"],
    error: Float[np.ndarray, " draw"],
) -> Float[np.ndarray, " draw"]:
    """Compute R^2 of each resample; NaN where the truth does not vary."""
    total = square - deviation**2 / count
    return 1 - error / np.where(total > 0, total, np.nan)
