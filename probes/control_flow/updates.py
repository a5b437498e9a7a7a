"""Threshold gate values: which columns update at which steps."""

import warnings
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Bool, Float
from scipy.special import expit, logit

GateThreshold = float | tuple[float, float] | Literal["mixture"]

_FALLBACK = 0.5
_CLIP = 1e-4  # gates that float32 rounds to 0 or 1 keep a finite logit
_MOST_SAMPLES = 100_000
_SEPARABLE = 2.0
_LEAST_CONTRAST = 0.1


@dataclass(frozen=True)
class Levels:
    """Gate values at which updates begin and end.

    Attributes:
        low: an update continues while the gate is at least this.
        high: an update begins where the gate is at least this.
        rule: "constant", "hysteresis", "mixture", or "fallback" (a mixture that does not separate).
    """

    low: float
    high: float
    rule: str


def gate_levels(
    gates: Float[np.ndarray, " gate"], threshold: GateThreshold, *, seed: int
) -> Levels:
    """Compute the levels of a `gate_threshold`, see `extract_control_flow`.

    Raises:
        ValueError: a threshold is outside (0, 1], low is above high, or the rule is unknown.
    """
    if isinstance(threshold, str):
        if threshold != "mixture":
            raise ValueError(
                "gate_threshold must be a number, a pair (low, high) or 'mixture', "
                f"got {threshold!r}"
            )
        return _mixture_levels(gates, seed)
    low, high = threshold if isinstance(threshold, tuple) else (threshold, threshold)
    if not 0 < low <= high <= 1:
        raise ValueError(
            f"gate_threshold must be in (0, 1], a pair in ascending order, got {threshold}"
        )
    rule = "hysteresis" if isinstance(threshold, tuple) else "constant"
    return Levels(float(low), float(high), rule)


def open_gates(
    gates: Float[np.ndarray, "example step pos"], levels: Levels
) -> Bool[np.ndarray, "example step pos"]:
    """Mark updates: they begin at `levels.high` and last until the gate is below `levels.low`."""
    is_open = np.zeros((len(gates), gates.shape[2]), dtype=bool)
    result = np.zeros(gates.shape, dtype=bool)
    for step in range(gates.shape[1]):
        gate = gates[:, step]
        is_open = (gate >= levels.high) | (is_open & (gate >= levels.low))
        result[:, step] = is_open
    return result


def _mixture_levels(gates: Float[np.ndarray, " gate"], seed: int) -> Levels:
    """Find where both components of a Gaussian mixture of gate logits are equally likely."""
    # Imported here because these take a second to import.
    from scipy.optimize import brentq
    from scipy.stats import norm
    from sklearn.mixture import GaussianMixture

    logits = logit(np.clip(gates.astype(np.float64), _CLIP, 1 - _CLIP))
    if len(logits) > _MOST_SAMPLES:
        logits = np.random.default_rng(seed).choice(logits, _MOST_SAMPLES, replace=False)
    # Two components need two different values; EM on one value warns and fails.
    if len(logits) < 2 or np.ptp(logits) < 1e-6:
        return _not_separable("all gates are equal")
    mixture = GaussianMixture(n_components=2, random_state=seed).fit(logits[:, None])
    mean = np.asarray(mixture.means_)[:, 0]
    order = np.argsort(mean)
    mean = mean[order]
    weight = np.asarray(mixture.weights_)[order]
    deviation = np.sqrt(np.asarray(mixture.covariances_)[order, 0, 0])
    distance = np.sqrt(2) * (mean[1] - mean[0]) / np.sqrt((deviation**2).sum())
    if distance < _SEPARABLE:
        return _not_separable(f"Ashman's D is {distance:.2f}, less than {_SEPARABLE}")
    # Two distinct groups of gates that are both nearly closed are no control flow.
    contrast = float(expit(mean[1]) - expit(mean[0]))
    if contrast < _LEAST_CONTRAST:
        return _not_separable(f"the means are {contrast:.3f} apart, less than {_LEAST_CONTRAST}")

    def closed_minus_open(x: float) -> float:
        closed, opened = np.log(weight) + norm.logpdf(x, mean, deviation)
        return float(closed - opened)

    if not closed_minus_open(mean[0]) > 0 > closed_minus_open(mean[1]):
        return _not_separable("one component covers the other's mean")
    level = float(expit(brentq(closed_minus_open, mean[0], mean[1])))
    return Levels(level, level, "mixture")


def _not_separable(reason: str) -> Levels:
    warnings.warn(
        f"the gates do not fall into two groups ({reason}): gate_threshold='mixture' falls back to "
        f"the constant {_FALLBACK}",
        RuntimeWarning,
        stacklevel=5,
    )
    return Levels(_FALLBACK, _FALLBACK, "fallback")
