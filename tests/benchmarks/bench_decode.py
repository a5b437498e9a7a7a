"""The batched logistic solver of `probes.decode` against scikit-learn.

Both do what `decode` needs for 32 cells: for the labels and for the control task, C by 5-fold
cross-validation over a grid, then a fit to all samples. scikit-learn's default tolerance and its
warm start along the grid are used, serially and with joblib over the cores; ours runs on one
thread. The solver is kept as long as it agrees to 1e-3 in accuracy and 1e-2 in coefficients and is
5x faster on one core.
"""

import time
import warnings
from dataclasses import dataclass

import numpy as np
import torch
from joblib import Parallel, delayed
from sklearn.linear_model import LogisticRegression, LogisticRegressionCV
from threadpoolctl import threadpool_limits

from probes.decoding.fitting import one_thread
from probes.decoding.logistic import fit_logistic_cv

PENALTIES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)
FOLDS = 5


@dataclass(frozen=True)
class Comparison:
    """Times in seconds for all cells; agreement as the worst over cells.

    `ours` and `sklearn_serial` are processor time, which other programs do not disturb;
    `sklearn_joblib` is time on the clock and means something on an idle machine only.
    """

    cells: int
    ours: float
    sklearn_serial: float
    sklearn_joblib: float
    accuracy_difference: float
    coefficient_difference: float
    same_penalty: float

    @property
    def speedup(self) -> float:
        return self.sklearn_serial / self.ours

    @property
    def speedup_joblib(self) -> float:
        return self.sklearn_joblib / self.ours


def make_cell(
    seed: int, samples: int, features: int, classes: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Correlated standardised features, labels (from noise to clear), and shuffled labels."""
    rng = np.random.default_rng(seed)
    mix = np.eye(features) + rng.standard_normal((features, features)) / np.sqrt(features) / 2
    x = rng.standard_normal((samples, features)) @ mix
    x = (x - x.mean(axis=0)) / x.std(axis=0)
    strength = (0.0, 0.3, 1.0, 2.0)[seed % 4]
    logits = x @ rng.standard_normal((features, classes)) * strength
    y = (logits + rng.gumbel(size=logits.shape)).argmax(axis=1)
    return x, y, rng.permutation(y)


def fit_sklearn(x: np.ndarray, y: np.ndarray, fold: np.ndarray) -> LogisticRegressionCV:
    """As scikit-learn would do it: cross-validation with its warm start, then a refit."""
    warnings.simplefilter("ignore")
    splits = [(np.flatnonzero(fold != i), np.flatnonzero(fold == i)) for i in range(FOLDS)]
    return LogisticRegressionCV(
        Cs=PENALTIES,
        cv=splits,
        scoring="neg_log_loss",
        l1_ratios=(0.0,),
        use_legacy_attributes=False,
    ).fit(x, y)


def compare(
    cells: int = 32, samples: int = 4000, features: int = 16, classes: int = 8, jobs: int = 2
) -> Comparison:
    """Time both and measure how far they agree."""
    data = [make_cell(seed, samples, features, classes) for seed in range(cells)]
    fold = np.random.default_rng(0).permutation(samples) % FOLDS
    grid = torch.tensor(PENALTIES, dtype=torch.float64)

    def ours() -> list:
        with one_thread():
            return [
                fit_logistic_cv(
                    torch.from_numpy(x),
                    torch.from_numpy(np.stack([y, shuffled])),
                    torch.from_numpy(fold),
                    grid,
                    classes=classes,
                )
                for x, y, shuffled in data
            ]

    fit_logistic_cv(  # warm up
        torch.from_numpy(data[0][0]),
        torch.from_numpy(data[0][1])[None],
        torch.from_numpy(fold),
        grid,
        classes=classes,
    )
    start = time.process_time()
    fitted = ours()
    seconds = time.process_time() - start

    pairs = [(x, labels) for x, y, shuffled in data for labels in (y, shuffled)]
    start = time.process_time()
    with threadpool_limits(1):  # as ours: waiting threads would count as work
        reference = [fit_sklearn(x, labels, fold) for x, labels in pairs]
    serial = time.process_time() - start

    with Parallel(n_jobs=jobs) as pool:
        pool(delayed(fit_sklearn)(*pairs[0], fold) for _ in range(jobs))  # start the workers
        start = time.perf_counter()
        pool(delayed(fit_sklearn)(x, labels, fold) for x, labels in pairs)
        parallel = time.perf_counter() - start

    accuracy, coefficients, same = [], [], []
    for cell, (x, y, shuffled) in enumerate(data):
        model, chosen, _ = fitted[cell]
        predicted = model.predict(torch.from_numpy(x)).numpy()
        for task, labels in enumerate((y, shuffled)):
            same.append(bool(chosen[task].item() == reference[2 * cell + task].C_))
            # At scikit-learn's default tolerance its own coefficients are off by up to 2e-2.
            exact = LogisticRegression(C=chosen[task].item(), tol=1e-9, max_iter=20_000)
            exact.fit(x, labels)
            right = (predicted[task] == labels).mean()
            accuracy.append(abs(right - exact.score(x, labels)))
            coefficients.append(np.abs(model.weight[task].numpy() - exact.coef_).max())
    return Comparison(
        cells,
        seconds,
        serial,
        parallel,
        max(accuracy),
        max(coefficients),
        float(np.mean(same)),
    )


def test_solver_agrees_and_is_five_times_faster(record) -> None:
    result = compare()
    times = f"{result.speedup:.1f}x one core's, {result.speedup_joblib:.1f}x joblib's on all cores"
    record("logistic solver against scikit-learn, 32 cells", times, "at least 5x")
    agreement = f"{result.accuracy_difference:.1e}, {result.coefficient_difference:.1e}"
    record("  difference in accuracy, in coefficients", agreement, "at most 1e-3, 1e-2")
    assert result.accuracy_difference <= 1e-3
    assert result.coefficient_difference <= 1e-2
    assert result.same_penalty >= 0.95
    assert result.speedup >= 5
