"""Linear decoding of a class label from a code, with its uncertainty and its controls."""

import warnings
from collections.abc import Mapping, Sequence

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float, Int64
from torch import Tensor
from transformer_lens.utilities.statistics import derive_generator

from probes.decoding.cells import (
    Layout,
    Split,
    Table,
    Tables,
    check_numbers,
    fold_of_samples,
    grid_of,
    one_thread,
    read_sources,
    standardise,
)
from probes.decoding.logistic import fit_logistic_cv
from probes.decoding.report import Report, decoding_attrs, with_difference
from probes.statistics.intervals import Interval, bootstrap

METRICS = ("accuracy", "balanced_accuracy", "macro_f1")


def decode(
    fit: xr.Dataset,
    tests: Mapping[str, xr.Dataset],
    *,
    code: str = "code",
    label: str = "rule",
    samples: Sequence[str] = ("example",),
    cells: Sequence[str] = ("layer",),
    types: str | None = None,
    untrained: Split | None = None,
    penalties: Sequence[float] = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0),
    folds: int = 5,
    resamples: int = 1000,
    seed: int = 0,
) -> xr.Dataset:
    """Is a label linearly readable from a code? Fitted on one dataset, scored on others.

    One multinomial logistic regression per cell, with L2 penalty, on features standardised by the
    fit side; C is chosen by cross-validation on the fit side (lowest held-out cross-entropy).
    Folds and bootstrap resamples go by example (the first of `samples`), so that two samples of
    one example are never on both sides, and intervals do not take them for independent.

    Controls, each fitted by the same procedure, C included:

    - "shuffled": the control task of Hewitt & Liang 2019 ("Designing and Interpreting Probes with
      Control Tasks"): every *type* of input gets one label, drawn at random, the same in all
      datasets. Renaming the labels would not do: a permuted label is as decodable as the label.
      What they break is the relation between code and label, while a probe can still succeed by
      memorising types. `types` names a variable that says which samples are of one type (say, the
      digits in the first row); labels are then drawn per type from the fit side's distribution.
      Without it each sample is its own type: the labels of each dataset are permuted among its
      samples, which keeps their distribution exactly; nothing can be memorised for new samples,
      so that this is the probe's chance level under its own procedure.
      `selectivity` is the accuracy of the probe minus that of this control.
    - "untrained": codes of a model with random weights, when passed: what the input and the
      architecture alone make readable.
    - `majority`: always the fit side's most frequent label. `chance`: 1 / number of classes.

    Args:
        fit: holds `code` [samples..., cells..., features...], dims in any order, and `label`
            [samples...] (integers or strings; dims may be missing, it is then broadcast).
        tests: datasets of the same layout by split name.
        code: name of the variable that holds the code.
        label: name of the variable to decode.
        samples: dims that together make one sample, first the example.
        cells: dims over which separate probes are fitted. Each gets one more coordinate, "all":
            all its values together as features. The dims that remain are the features.
        types: name of the variable [samples...] that holds the types of the control task.
        untrained: (fit, tests) of the same layout with codes of an untrained model; its test
            splits are those of `tests`.
        penalties: the values of C to choose from (scikit-learn's objective, 0.5 |w|^2 + C sum
            loss).
        folds: of the cross-validation.
        resamples: of the bootstrap.
        seed: of folds, control task and bootstrap.

    Returns:
        Coordinates `control` ("probe", "shuffled", "untrained"), `split`, each cell dim (strings,
        last "all"), `metric` (accuracy, balanced_accuracy, macro_f1), `true`, `predicted`.

        - `score, score_low, score_high` [control, split, *cells, metric]: score in 0..1 and its
          percentile bootstrap 95% interval over examples. Balanced accuracy is the mean recall of
          the classes that occur in the split, macro-F1 the mean over those that occur or are
          predicted.
        - `selectivity, selectivity_low, selectivity_high` [split, *cells], in -1..1; both
          accuracies are resampled together.
        - `confusion` [split, *cells, true, predicted]: counts of the probe.
        - `majority` [split, metric]; `chance` [] ; `C` [control, *cells].

    Raises:
        KeyError: a dataset lacks a variable.
        TypeError: labels that are floats (see `decode_continuous`).
        ValueError: dims or layouts that do not fit, values that are not finite, fewer than two
            classes on the fit side, numbers out of range.
    """
    check_numbers(penalties, resamples)
    layout = Layout(code, label, types, samples, cells)
    sources = read_sources((fit, tests), untrained, layout)
    trained = sources["probe"]
    classes = _classes([table for tables in sources.values() for table in tables.every], label)
    n = len(classes)
    report = Report(sources, METRICS)
    confusion = np.zeros((len(tests), *report.sizes, n, n), dtype=np.int64)
    grid = torch.tensor(sorted(penalties), dtype=torch.float64)

    with one_thread():
        for source, tables in sources.items():
            labels = [_codes(table, classes) for table in tables.every]
            tasks = {source: labels}
            if source == "probe":
                tasks["shuffled"] = _control_labels(tables, labels, seed)
            fold = fold_of_samples(tables.fit, folds, seed)
            for cell, place in grid_of(tables.fit):
                here, *elsewhere = standardise(*(table.features(cell) for table in tables.every))
                fitted_labels = torch.stack([known[0] for known in tasks.values()])
                model, best, _ = fit_logistic_cv(here, fitted_labels, fold, grid, classes=n)
                if not model.converged.all():
                    message = f"a probe did not converge in the cell {place} of {tuple(cells)}"
                    warnings.warn(message, RuntimeWarning, stacklevel=2)
                for task, penalty in zip(tasks, best.tolist(), strict=True):
                    report.choose(task, place, penalty)
                for s, (split, table) in enumerate(tables.tests.items()):
                    predicted = model.predict(elsewhere[s])
                    counts = torch.stack(
                        [
                            _example_confusions(table, known[s + 1], found, n)
                            for known, found in zip(tasks.values(), predicted, strict=True)
                        ],
                        dim=1,
                    )
                    report.record([*tasks], split, place, _scores(counts, resamples, seed))
                    if source == "probe":
                        confusion[(s, *place)] = counts[:, 0].sum(dim=0).numpy()

    about = f"score of decoding {label} from {code}"
    result = report.dataset(about)
    names = [str(name) for name in classes]
    result = result.assign_coords(true=names, predicted=names)
    result["confusion"] = (
        ("split", *report.cells, "true", "predicted"),
        confusion,
        {"long_name": "samples of a true class that the probe predicts as a class"},
    )
    result["majority"] = (
        ("split", "metric"),
        _majority(trained, classes),
        {"long_name": "score of always predicting the fit side's most frequent label"},
    )
    result["chance"] = ((), 1 / n, {"long_name": "1 / number of classes"})
    result["C"] = (
        ("control", *report.cells),
        report.penalty,
        {"long_name": "inverse strength of the L2 penalty, by cross-validation"},
    )
    attrs = decoding_attrs(about, trained, seed=seed, folds=folds, resamples=resamples)
    return result.assign_attrs(attrs)


def _classes(tables: Sequence[Table], label: str) -> np.ndarray:
    kinds = {table.label.dtype.kind for table in tables}
    if not kinds <= set("biuUSO"):
        raise TypeError(
            f"label {label!r} must hold classes (integers or strings), got "
            f"{sorted({str(table.label.dtype) for table in tables})}; see decode_continuous"
        )
    fitted = np.unique(tables[0].label)
    if len(fitted) < 2:
        raise ValueError(f"label {label!r} must have at least two classes in fit, got {fitted}")
    return np.unique(np.concatenate([table.label for table in tables]))


def _codes(table: Table, classes: np.ndarray) -> Int64[Tensor, " sample"]:
    return torch.from_numpy(np.searchsorted(classes, table.label)).long()


def _control_labels(tables: Tables, labels: list[Tensor], seed: int) -> list[Tensor]:
    """Labels of the control task, for fit and each test in turn."""
    generator = derive_generator(seed, "control task")
    kinds = [table.kind for table in tables.every if table.kind is not None]
    if not kinds:
        return [one[torch.randperm(len(one), generator=generator)] for one in labels]
    known = np.unique(np.concatenate(kinds))
    # One draw per type from the labels of the fit side, as often as they occur there
    drawn = labels[0][torch.randint(len(labels[0]), (len(known),), generator=generator)]
    return [drawn[torch.from_numpy(np.searchsorted(known, kind))] for kind in kinds]


def _majority(tables: Tables, classes: np.ndarray) -> Float[np.ndarray, "split metric"]:
    n = len(classes)
    most = torch.bincount(_codes(tables.fit, classes), minlength=n).argmax()
    confusion = torch.zeros(len(tables.tests), n, n)
    for s, table in enumerate(tables.tests.values()):
        confusion[s, :, most] = torch.bincount(_codes(table, classes), minlength=n).float()
    return _metrics(confusion)


def _example_confusions(
    table: Table, truth: Tensor, predicted: Tensor, classes: int
) -> Float[Tensor, "example true predicted"]:
    cell = (torch.from_numpy(table.example) * classes + truth) * classes + predicted
    counts = torch.bincount(cell, minlength=table.examples * classes**2)
    return counts.view(table.examples, classes, classes).double()


def _scores(
    counts: Float[Tensor, "example task true predicted"], resamples: int, seed: int
) -> Interval:
    """METRICS [task, metric] of the examples' confusions, with their difference as a last task."""
    examples, *shape = counts.shape
    flat = counts.flatten(1)

    def statistic(weights: Float[np.ndarray, "draw example"]) -> Float[np.ndarray, "draw ..."]:
        confusion = (torch.from_numpy(weights) @ flat).view(-1, *shape)
        return with_difference(_metrics(confusion))

    return bootstrap(statistic, (examples,), resamples=resamples, seed=seed)


def _metrics(
    confusion: Float[Tensor, "*rest true predicted"],
) -> Float[np.ndarray, "*rest metric"]:
    """METRICS of confusion matrices; classes that do not occur do not count in the means."""
    confusion = confusion.double()
    right = confusion.diagonal(dim1=-2, dim2=-1)
    true, guessed = confusion.sum(dim=-1), confusion.sum(dim=-2)
    accuracy = right.sum(dim=-1) / confusion.sum(dim=(-2, -1))
    balanced = (right / true.clamp(min=1)).sum(dim=-1) / (true > 0).sum(dim=-1)
    both = true + guessed
    f1 = (2 * right / both.clamp(min=1)).sum(dim=-1) / (both > 0).sum(dim=-1)
    return torch.stack([accuracy, balanced, f1], dim=-1).numpy()
