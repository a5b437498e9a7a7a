"""Halting: does a model take more steps where more are needed?"""

import numpy as np
import xarray as xr
from jaxtyping import Float

from probes.checking import check_labels, checked
from probes.loops.answers import first_settled, read_answers
from probes.statistics.intervals import Interval, bootstrap, interval_variables


@checked
def score_halting(
    steps: xr.DataArray,
    needed: xr.DataArray,
    *,
    answers: xr.DataArray | None = None,
    resamples: int = 1000,
    seed: int = 0,
) -> xr.Dataset:
    """Compare the steps that a model takes with the steps that its examples need.

    An exit gate that knows how hard an example is takes more steps for those that need more, such
    as deeper expressions. The simplest rule needs no gate: stop when the answer has stopped
    changing. A gate that is no better than this rule has learned no more than that.

    Args:
        steps: steps that are taken [example], a number.
        needed: steps that are needed [example], such as the depth of an expression.
        answers: answers after each step, from the first on [example, step], see `score_steps`;
            None leaves the rule "answer stays" out.
        resamples: number of bootstrap resamples.
        seed: seed of the control and of the bootstrap.

    Returns:
        Coordinates `rule` ("halting", "answer stays") and `control` ("observed"; "shuffled", the
        needed steps of other examples).

        - `correlation, correlation_low, correlation_high` [rule, control]: Spearman's rank
          correlation with the needed steps, in -1..1, with its percentile bootstrap 95% interval
          over examples (ranks are those of all examples). NaN where all are the same.
        - `advantage, advantage_low, advantage_high` []: the correlation of halting minus that of
          the rule, resampled together; if `answers` are passed.
        - `mean_steps` [rule, needed]: mean number of steps that are taken; of the rule, up to the
          first answer that stays, whatever the coordinate `step`. `examples` [needed].

    Raises:
        TypeError: answers are not integers.
        ValueError: dims or labels of examples do not fit, or values are not finite.

    Example:
        >>> score_halting(data["n_updates"], data["depth"], answers=data["answer"])["correlation"]
    """
    for name, values in (("steps", steps), ("needed", needed)):
        if values.dims != ("example",) or values.sizes != steps.sizes:
            raise ValueError(
                f"{name} must have the dim example of size {steps.sizes.get('example')}, got "
                f"{dict(values.sizes)}"
            )
        if not np.isfinite(values.to_numpy()).all():
            raise ValueError(f"{name} must be finite, got NaN or infinity")
        check_labels(name, values, "steps", steps)
    rules = {"halting": steps.to_numpy().astype(float)}
    if answers is not None:
        settled = first_settled(read_answers("answers", answers))
        if len(settled) != len(needed):
            raise ValueError(f"answers must have {len(needed)} examples, got {len(settled)}")
        check_labels("answers", answers, "steps", steps)
        # The answer after one step has the index 0.
        rules["answer stays"] = settled + 1.0
    truth = needed.to_numpy().astype(float)
    order = np.random.default_rng(seed).permutation(len(truth))
    controls = {"observed": truth, "shuffled": truth[order]}

    pairs = [
        (_ranks(rule), _ranks(control)) for rule in rules.values() for control in controls.values()
    ]

    def statistic(weights: Float[np.ndarray, "draw example"]) -> Float[np.ndarray, "draw ..."]:
        found = np.stack([_correlation(*pair, weights) for pair in pairs], axis=1)
        found = found.reshape(len(weights), len(rules), len(controls))
        return np.concatenate([found, found[:, :1] - found[:, -1:]], axis=1)

    interval = bootstrap(statistic, (len(truth),), resamples=resamples, seed=seed)
    levels, number = np.unique(truth, return_inverse=True)
    counts = np.bincount(number)
    means = [np.bincount(number, weights=rule) / counts for rule in rules.values()]
    variables = interval_variables(
        "correlation",
        Interval(*(values[:-1] for values in interval)),
        ("rule", "control"),
        long_name="rank correlation with the needed steps",
    )
    if answers is not None:
        advantage = Interval(*(values[-1, 0] for values in interval))
        long_name = "correlation of halting minus that of the rule"
        variables |= interval_variables("advantage", advantage, (), long_name=long_name)
    variables["mean_steps"] = (("rule", "needed"), np.stack(means), {"long_name": "mean steps"})
    variables["examples"] = ("needed", counts, {"long_name": "number of examples"})
    coords = {"rule": list(rules), "control": list(controls), "needed": levels}
    attrs = {
        "seed": seed,
        "interval": f"percentile bootstrap over examples, 95%, {resamples} resamples",
    }
    return xr.Dataset(variables, coords, attrs)


def _ranks(values: Float[np.ndarray, " example"]) -> Float[np.ndarray, " example"]:
    from scipy.stats import rankdata

    return rankdata(values)


def _correlation(
    x: Float[np.ndarray, " example"],
    y: Float[np.ndarray, " example"],
    weights: Float[np.ndarray, "draw example"],
) -> Float[np.ndarray, " draw"]:
    total = weights.sum(axis=1)
    mean_x, mean_y = weights @ x / total, weights @ y / total
    covariance = weights @ (x * y) / total - mean_x * mean_y
    variance_x = weights @ x**2 / total - mean_x**2
    variance_y = weights @ y**2 / total - mean_y**2
    scale = np.sqrt(variance_x.clip(min=0) * variance_y.clip(min=0))
    return covariance / np.where(scale > 1e-9 * len(x) ** 2, scale, np.nan)
