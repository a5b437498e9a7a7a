"""Answers after each step of a model: accuracy, changes, and when they end."""

import numpy as np
import xarray as xr
from jaxtyping import Bool, Float, Int

from probes.checking import check_labels, checked
from probes.statistics.intervals import bootstrap_ratio, interval_variables

NO_ANSWER = -1
"""No step: the model has halted."""


@checked
def score_steps(
    answers: xr.DataArray,
    targets: xr.DataArray,
    *,
    untrained: xr.DataArray | None = None,
    resamples: int = 1000,
    seed: int = 0,
) -> xr.Dataset:
    """Score the answers of a looped model after each step: accuracy, flips, and when they end.

    The answer of a step is what the model's read-out, or a decoder that is fitted to the states of
    this step, makes of the state. A model that computes step by step gets more answers right with
    each; one that is done early, or that loses answers again, shows it here.

    Args:
        answers: answers after each step [example, step], integers; -1 after the last step of an
            example, whose answer then stays as it is.
        targets: right answers [example].
        untrained: answers of an untrained model, in the layout of `answers`.
        resamples: number of bootstrap resamples.
        seed: seed of the control and of the bootstrap.

    Returns:
        Coordinate `control`: "observed"; "shuffled", the answers of each step permuted among the
        examples, so that they are as frequent but do not depend on the example; and "untrained".
        All with percentile bootstrap 95% intervals over examples (`_low`, `_high`):

        - `accuracy` [control, step]: share of right answers.
        - `settled` [control, step]: share of examples whose answer stays from this step on.
        - `flips` [control]: mean number of changes of the answer.
        - `gained`, `lost` [control]: share of examples whose first answer is wrong and whose last
          is right; or that are right after some step and wrong at the end.
        - `settles_at` [example]: the first step from which the observed answer stays: a value of
          the coordinate `step`, which counts from 0 where the answers have none.

    Raises:
        TypeError: answers or targets are not integers.
        ValueError: dims or labels of examples do not fit, there are no steps, or an example has no
            answer at first.

    Example:
        >>> def read(state): return head(state).argmax(-1)
        >>> step = Quantity("core.hook_out", ("example",), read, fires="each")
        >>> answers = capture(model, batches, {"answer": step})["answer"]
        >>> score_steps(answers, targets)["accuracy"].sel(control="observed").plot()
    """
    filled = read_answers("answers", answers)
    if targets.dims != ("example",) or targets.sizes["example"] != len(filled):
        raise ValueError(
            f"targets must have the dim example of size {len(filled)}, got {dict(targets.sizes)}"
        )
    check_integers("targets", targets)
    check_labels("targets", targets, "answers", answers)
    generator = np.random.default_rng(seed)
    sources = {"observed": filled, "shuffled": generator.permuted(filled, axis=0)}
    if untrained is not None:
        sources["untrained"] = read_answers("untrained", untrained)
        if sources["untrained"].shape != filled.shape:
            raise ValueError(
                f"untrained must have the shape of answers, {filled.shape}, got "
                f"{sources['untrained'].shape}"
            )
        check_labels("untrained", untrained, "answers", answers)
    truth = targets.to_numpy()
    scores = [_scores(values, truth) for values in sources.values()]
    steps = answers["step"] if "step" in answers.coords else np.arange(filled.shape[1])
    coords = {"control": list(sources), "step": steps}
    about = {
        "accuracy": (("control", "step"), "share of right answers"),
        "settled": (("control", "step"), "share of examples whose answer stays from this step on"),
        "flips": (("control",), "changes of the answer"),
        "gained": (("control",), "share of examples whose answer becomes right"),
        "lost": (("control",), "share of examples that were right and end wrong"),
    }
    variables = {}
    for name, (dims, long_name) in about.items():
        columns = np.stack([score[name] for score in scores], axis=1)
        interval = bootstrap_ratio(columns, resamples=resamples, seed=seed)
        variables |= interval_variables(name, interval, dims, long_name=long_name)
    long_name = "first step from which the answer stays"
    variables["settles_at"] = (
        "example",
        np.asarray(steps)[first_settled(filled)],
        {"long_name": long_name},
    )
    attrs = {
        "seed": seed,
        "interval": f"percentile bootstrap over examples, 95%, {resamples} resamples",
    }
    return xr.Dataset(variables, coords, attrs)


def read_answers(name: str, answers: xr.DataArray) -> Int[np.ndarray, "example step"]:
    """The answers, with the last one repeated after the last step of an example.

    Raises:
        TypeError: answers are not integers.
        ValueError: dims do not fit, there are no steps, or an example has no answer at first.
    """
    check_integers(name, answers)
    if set(answers.dims) != {"example", "step"} or not all(answers.shape):
        raise ValueError(
            f"{name} must have the dims example and step, not empty, got {dict(answers.sizes)}"
        )
    values = answers.transpose("example", "step").to_numpy()
    if (values[:, 0] == NO_ANSWER).any():
        raise ValueError(f"{name} must begin with an answer in each example, got {NO_ANSWER}")
    step = np.where(values == NO_ANSWER, 0, np.arange(values.shape[1]))
    return np.take_along_axis(values, np.maximum.accumulate(step, axis=1), axis=1)


def check_integers(name: str, values: xr.DataArray) -> None:
    """Raise a TypeError unless values are integers or booleans; NaN would equal no answer."""
    if values.dtype.kind not in "iub":
        raise TypeError(f"{name} must hold integers, got {values.dtype}")


def first_settled(answers: Int[np.ndarray, "example step"]) -> Int[np.ndarray, " example"]:
    """The index of the first step from which each answer stays."""
    return _stays(answers).argmax(axis=1)


def _stays(answers: Int[np.ndarray, "example step"]) -> Bool[np.ndarray, "example step"]:
    return np.logical_and.accumulate((answers == answers[:, -1:])[:, ::-1], axis=1)[:, ::-1]


def _scores(
    answers: Int[np.ndarray, "example step"], truth: Int[np.ndarray, " example"]
) -> dict[str, Float[np.ndarray, "example ..."]]:
    right = answers == truth[:, None]
    scores = {
        "accuracy": right,
        "settled": _stays(answers),
        "flips": (answers[:, 1:] != answers[:, :-1]).sum(axis=1),
        "gained": ~right[:, 0] & right[:, -1],
        "lost": right.any(axis=1) & ~right[:, -1],
    }
    return {name: values.astype(float) for name, values in scores.items()}
