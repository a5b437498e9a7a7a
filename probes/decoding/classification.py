"""Linear decoding of a class label from a code, with intervals and controls."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float, Int64
from torch import Tensor
from transformer_lens.utilities.statistics import derive_generator

from probes.checking import checked
from probes.decoding.cells import Cell, Layout, Split, Table, Tables, read_sources
from probes.decoding.fitting import check_arguments, classes_of, fold_of_samples, over_cells
from probes.decoding.logistic import fit_logistic_cv
from probes.decoding.report import Metrics, Report, decoding_attrs

METRICS = ("accuracy", "balanced_accuracy", "macro_f1")


@checked
def decode(
    fit: xr.Dataset,
    tests: Mapping[str, xr.Dataset],
    *,
    code: str = "code",
    label: str = "rule",
    samples: Sequence[str] = ("example",),
    cells: Sequence[str] = ("layer",),
    joined: bool = True,
    types: str | None = None,
    untrained: Split | None = None,
    penalties: Sequence[float] = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0),
    folds: int = 5,
    positive: object = None,
    resamples: int = 1000,
    draws: bool = False,
    seed: int = 0,
) -> xr.Dataset:
    """Decode a label linearly from a code: fit probes on one dataset, score them on others.

    One multinomial logistic regression with L2 penalty per cell, on features standardised on the
    `fit` dataset, which also chooses C by cross-validation (lowest held-out cross-entropy). Codes
    may be wider than there are samples; those that are not in memory are read cell by cell. Folds
    and bootstrap resamples group samples by example (the first of `samples`), so that samples of
    one example are never in two folds, nor treated as independent in the intervals.

    Controls, each fitted by the same procedure, including the choice of C:

    - "shuffled": labels are permuted within each dataset, which keeps their distribution: the
      chance level of the procedure.
    - "control task", if `types` is passed: that of Hewitt & Liang 2019 ("Designing and Interpreting
      Probes with Control Tasks"). Every *type* of input, such as the digits that are seen, gets a
      random label, the same in all datasets, drawn from their distribution in `fit`. The label does
      not depend on what the model computes, but a probe can memorise the types: what it gets right
      here it owes to itself.
      `selectivity` is the accuracy of the probe minus that under the control task, without types
      minus that with permuted labels.
    - "untrained": codes of a model with random weights, if passed: what is decodable from the
      input and the architecture alone.
    - `majority`: always predict the most frequent label of `fit`. `chance`: 1 / number of classes.
      `majority_of_split`: always predict the most frequent label of the test itself, which is the
      most that any constant answer can reach where labels have other frequencies than in `fit`.
      `majority_of_type`: predict the most frequent label of the sample's type in `fit`, if `types`
      is passed: what the type alone says about the label.

    Args:
        fit: holds `code` [samples..., cells..., features...], dims in any order, and `label`
            [samples...] (integers or strings; missing dims are broadcast). All labels are classes:
            -1 is one, too, so leave out samples whose -1 means that they have no label.
        tests: datasets of the same layout by split name.
        code: name of the variable that holds the code.
        label: name of the variable to decode.
        samples: dims that together index a sample, the example first.
        cells: dims with a separate probe per coordinate. The remaining dims are features.
        joined: whether each cell dim gets the additional coordinate "all", where all its values
            are features.
        types: name of the variable [samples...] that holds the type of each sample (integers or
            strings); types should occur in `fit` and in the tests.
        untrained: (fit, tests) of the same layout and splits with codes of an untrained model.
        penalties: values of C to choose from (scikit-learn's objective, 0.5 |w|^2 + C sum loss).
        folds: number of cross-validation folds.
        positive: the class whose F1 is the additional metric `f1`; None for none.
        resamples: number of bootstrap resamples.
        draws: whether the result has all bootstrap draws, as `score_draws`
            [chain, draw, control, split, *cells, metric], which ArviZ opens.
        seed: seed of folds, control task and bootstrap.

    Returns:
        Coordinates `control` ("probe", "shuffled", "control task", "untrained"), `split`, each cell
        dim (strings, last "all"), `metric` (accuracy, balanced_accuracy, macro_f1, f1), `true`,
        `predicted`.

        - `score, score_low, score_high` [control, split, *cells, metric]: score in 0..1 and its
          percentile bootstrap 95% interval over examples. Balanced accuracy is the mean recall of
          the classes that occur in the split, macro-F1 the mean F1 of the classes that occur or
          are predicted. F1 is 0 where the class neither occurs nor is predicted.
        - `selectivity, selectivity_low, selectivity_high` [split, *cells], in -1..1; both
          accuracies are resampled together.
        - `confusion` [split, *cells, true, predicted]: counts of the probe.
        - `majority`, `majority_of_split`, `majority_of_type` [split, metric]; `chance` [];
          `C` [control, *cells].

    Raises:
        KeyError: a dataset lacks a variable.
        TypeError: `fit` or a test is not a dataset, codes are not real numbers, labels are floats
            (see `decode_continuous`) or of several types, such as strings and None.
        ValueError: dims or layouts do not match, values are not finite, `fit` has fewer than two
            classes, `positive` is not a class, or a number is out of range.

    Example:
        >>> decode(train, {"ood": ood})["score"].sel(control="probe", metric="accuracy")
    """
    check_arguments(penalties, resamples)
    layout = Layout(code, label, types, samples, cells)
    sources = read_sources((fit, tests), untrained, layout)
    probe_tables = sources["probe"]
    all_tables = [table for tables in sources.values() for table in tables.all_tables]
    classes = classes_of(all_tables, label)
    n_classes = len(classes)
    if positive is not None and positive not in classes:
        raise ValueError(f"positive must be one of the classes {classes}, got {positive!r}")
    f1_of = None if positive is None else int(np.flatnonzero(classes == positive)[0])
    report = Report(
        sources,
        METRICS if f1_of is None else (*METRICS, "f1"),
        tasks=("shuffled", "control task") if types else ("shuffled",),
        joined=joined,
        draws=draws,
        resamples=resamples,
        seed=seed,
    )
    confusion = np.zeros((len(tests), *report.sizes, n_classes, n_classes), dtype=np.int64)
    grid = torch.tensor(sorted(penalties), dtype=torch.float64)
    truths: dict[str, dict[str, list[Tensor]]] = {}
    for source, tables in sources.items():
        labels = [_class_indices(table, classes) for table in tables.all_tables]
        truths[source] = {source: labels}
        if source == "probe":
            generator = derive_generator(seed, "control task")
            truths[source]["shuffled"] = [
                y[torch.randperm(len(y), generator=generator)] for y in labels
            ]
            if types:
                truths[source]["control task"] = _labels_of_types(tables, labels[0], generator)
    fold = {source: fold_of_samples(tables.fit, folds, seed) for source, tables in sources.items()}

    def decode_cell(source: str, cell: Cell, index: tuple[int, ...]) -> tuple[int, ...] | None:
        tables, tasks = sources[source], truths[source]
        fit_features, *test_features = tables.principal_axes(cell)
        fit_labels = torch.stack([truth[0] for truth in tasks.values()])
        model, chosen, _ = fit_logistic_cv(
            fit_features, fit_labels, fold[source], grid, classes=n_classes
        )
        for task, penalty in zip(tasks, chosen.tolist(), strict=True):
            report.set_penalty(task, index, penalty)
        for number, (split, table) in enumerate(tables.tests.items()):
            predicted = model.predict(test_features[number])
            example = torch.from_numpy(table.example)
            by_task = [
                _class_counts(example, truth[number + 1], predictions, n_classes)
                for truth, predictions in zip(tasks.values(), predicted, strict=True)
            ]
            counts = torch.stack(by_task, dim=1)
            flat, shape = counts.flatten(1), counts.shape[1:]

            def scores(weights: np.ndarray, flat: Tensor = flat, shape: Any = shape) -> Metrics:
                return _metrics((torch.from_numpy(weights) @ flat).view(-1, *shape), f1_of)

            report.set_scores([*tasks], split, index, scores, len(counts))
            if source == "probe":
                pairs = tasks["probe"][number + 1] * n_classes + predicted[0]
                table_of_pairs = torch.bincount(pairs, minlength=n_classes**2)
                confusion[(number, *index)] = table_of_pairs.view(n_classes, n_classes).numpy()
        return None if model.converged.all() else index

    results = over_cells(decode_cell, sources, joined=joined, what=f"decode {label}")
    if failed := [index for index in results if index is not None]:
        message = f"probes did not converge in the cells {failed[:5]} of {tuple(cells)}"
        warnings.warn(message, RuntimeWarning, stacklevel=3)

    long_name = f"score of decoding {label} from {code}"
    result = report.dataset(long_name)
    names = [str(name) for name in classes]
    result = result.assign_coords(true=names, predicted=names)
    result["confusion"] = (
        ("split", *report.cells, "true", "predicted"),
        confusion,
        {"long_name": "samples of a true class that the probe predicts as a class"},
    )
    guesses = {"majority": "score of always predicting the fit side's most frequent label"}
    if types:
        guesses["majority_of_type"] = "score of predicting the most frequent label of the type"
    for name, about in guesses.items():
        type_numbers = _type_numbers(probe_tables, by_type=name == "majority_of_type")
        guessed = _majority(type_numbers, truths["probe"]["probe"], n_classes, f1_of)
        result[name] = (("split", "metric"), guessed, {"long_name": about})
    one_type, labels = _type_numbers(probe_tables, by_type=False), truths["probe"]["probe"]
    of_tests = zip(one_type[1:], labels[1:], strict=True)
    own = [_majority([types_of] * 2, [y] * 2, n_classes, f1_of) for types_of, y in of_tests]
    about = "score of always predicting the most frequent label of the split"
    result["majority_of_split"] = (("split", "metric"), np.concatenate(own), {"long_name": about})
    result["chance"] = ((), 1 / n_classes, {"long_name": "1 / number of classes"})
    result["C"] = (
        ("control", *report.cells),
        report.penalty,
        {"long_name": "inverse strength of the L2 penalty, by cross-validation"},
    )
    attrs = decoding_attrs(long_name, probe_tables, seed=seed, folds=folds, resamples=resamples)
    return result.assign_attrs(attrs)


def _class_indices(table: Table, classes: np.ndarray) -> Int64[Tensor, " sample"]:
    return torch.from_numpy(np.searchsorted(classes, table.label)).long()


def _labels_of_types(
    tables: Tables, fit_labels: Int64[Tensor, " sample"], generator: torch.Generator
) -> list[Int64[Tensor, " sample"]]:
    """Draw a label for each type from those of `fit`, with their frequencies, for each table."""
    numbers = _type_numbers(tables, by_type=True)
    n_types = int(max(number.max() for number in numbers)) + 1
    drawn = fit_labels[torch.randint(len(fit_labels), (n_types,), generator=generator)]
    return [drawn[number] for number in numbers]


def _type_numbers(tables: Tables, *, by_type: bool) -> list[Int64[Tensor, " sample"]]:
    """Number the types of the samples of each table; all have one type without `by_type`."""
    columns = [
        table.types if by_type else np.zeros(len(table.label)) for table in tables.all_tables
    ]
    given = [column for column in columns if column is not None]
    types = np.unique(np.concatenate(given))
    return [torch.from_numpy(np.searchsorted(types, column)) for column in given]


def _majority(
    types: Sequence[Int64[Tensor, " sample"]],
    labels: Sequence[Int64[Tensor, " sample"]],
    n_classes: int,
    f1_of: int | None,
) -> Float[np.ndarray, "split metric"]:
    """Score predicting each type's most frequent label of the first table in the other tables.

    A type that the first table lacks has the most frequent label of all.
    """
    n_types = int(max(number.max() for number in types)) + 1
    pairs = types[0] * n_classes + labels[0]
    counts = torch.bincount(pairs, minlength=n_types * n_classes).view(n_types, n_classes)
    seen = counts.sum(dim=1) > 0
    guess = torch.where(seen, counts.argmax(dim=1), counts.sum(dim=0).argmax())
    by_split = [
        _class_counts(torch.zeros_like(truth), truth, guess[number], n_classes)
        for truth, number in zip(labels[1:], types[1:], strict=True)
    ]
    return _metrics(torch.cat(by_split), f1_of)


def _class_counts(
    example: Int64[Tensor, " sample"],
    truth: Int64[Tensor, " sample"],
    predicted: Int64[Tensor, " sample"],
    n_classes: int,
) -> Float[Tensor, "example kind class"]:
    """Count how often each class is predicted rightly, true, and predicted in each example."""
    is_right = predicted == truth
    size = int(example.max()) + 1
    counts = [
        torch.bincount(row * n_classes + label, minlength=size * n_classes).view(size, n_classes)
        for row, label in (
            (example[is_right], truth[is_right]),
            (example, truth),
            (example, predicted),
        )
    ]
    return torch.stack(counts, dim=1).double()


def _metrics(
    counts: Float[Tensor, "*rest kind class"], f1_of: int | None = None
) -> Float[np.ndarray, "*rest metric"]:
    """Compute METRICS from the counts of `_class_counts`, and the F1 of class number `f1_of`.

    Means leave out classes that do not occur.
    """
    correct, true, predicted = counts.unbind(dim=-2)
    accuracy = correct.sum(dim=-1) / true.sum(dim=-1)
    balanced = (correct / true.clamp(min=1)).sum(dim=-1) / (true > 0).sum(dim=-1)
    either = true + predicted
    f1 = 2 * correct / either.clamp(min=1)
    macro_f1 = f1.sum(dim=-1) / (either > 0).sum(dim=-1)
    metrics = [accuracy, balanced, macro_f1]
    return torch.stack(metrics if f1_of is None else [*metrics, f1[..., f1_of]], dim=-1).numpy()
