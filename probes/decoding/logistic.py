"""Many multinomial logistic regressions on one design matrix, solved together.

The problems of a cross-validation differ in labels (probe, control task) and samples (folds), but
share the features, so each pass over the data is two matrix products for all of them. Every fold
has a path of its own, from strong to weak penalties: held-out samples never influence it.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

_HISTORY = 5
_ARMIJO, _ROUNDING = 1e-4, 100
# Elements per block of logits, which limits memory.
_BLOCK = 1 << 19
# Root mean square change of the logits by the next step at which a path and a final fit stop. The
# cross-entropy is then known to less than 1e-3; with many samples per weight, where the estimated
# Hessian is reliable and float32 exact enough, already at `_COARSE`.
_PATH, _FINAL = 5e-4, 1e-5
_COARSE, _MANY_SAMPLES = 2e-3, 4
# Samples from which the curvature is estimated.
_SAMPLED = 500


@dataclass(frozen=True)
class Logistic:
    """Fitted problems: `logits = weight @ features + intercept`.

    Classes that do not occur in a problem have the intercept -inf and are never predicted.
    """

    weight: Float[Tensor, "problem class feature"]
    intercept: Float[Tensor, "problem class"]
    converged: Bool[Tensor, " problem"]

    def predict(self, features: Float[Tensor, "sample feature"]) -> Int64[Tensor, "problem sample"]:
        """Predict the most probable class."""
        logits = features.to(self.weight.dtype) @ self.weight.transpose(1, 2)
        return (logits + self.intercept[:, None, :]).argmax(dim=2)


class Choice(NamedTuple):
    """A penalty chosen for each task by cross-validation, and the fit to all samples with it.

    Attributes:
        fit: the fit to all samples.
        penalty: the chosen C.
        losses: mean cross-entropy of held-out samples in nats, by which C is chosen. Samples of a
            class that the other folds lack are not counted.
    """

    fit: Logistic
    penalty: Float[Tensor, " task"]
    losses: Float[Tensor, "task penalty"]


def fit_logistic(
    features: Float[Tensor, "sample feature"],
    labels: Int64[Tensor, "problem sample"],
    penalties: Float[Tensor, " problem"],
    *,
    classes: int,
) -> Logistic:
    """Minimise 0.5 |weight|^2 + C sum_i cross-entropy_i for each problem.

    This is the objective of scikit-learn's `LogisticRegression(C=C)`: the intercept is not
    penalised, and with two classes the difference of the two weight vectors is. Fastest for
    uncorrelated features, see `probes.decoding.axes`.

    Args:
        features: centred features.
        labels: integers in [0, classes).
        penalties: C of each problem, the inverse strength of the regularisation, > 0.
        classes: number of classes.
    """
    used = torch.ones_like(labels, dtype=torch.bool)
    problems = _Problems(features.double(), labels, used, penalties, classes)
    return problems.solved(_minimise(problems, problems.zeros(), _FINAL))


def fit_logistic_cv(
    features: Float[Tensor, "sample feature"],
    labels: Int64[Tensor, "task sample"],
    folds: Int64[Tensor, " sample"],
    penalties: Float[Tensor, " penalty"],
    *,
    classes: int,
) -> Choice:
    """Choose C by cross-validation (the smallest in case of a tie), then fit to all samples.

    Args:
        features: centred features, shared by all tasks.
        labels: integers in [0, classes), one row per task.
        folds: fold in which each sample is held out, 0, 1, ...
        penalties: values of C to choose from, ascending.
        classes: number of classes.
    """
    n_folds, n_tasks, n_penalties = int(folds.max()) + 1, len(labels), len(penalties)
    # problem = (fold, task)
    used = (folds != torch.arange(n_folds)[:, None]).repeat_interleave(n_tasks, dim=0)
    ones = torch.ones(n_folds * n_tasks, dtype=torch.float64)
    problems = _Problems(features.double(), labels.repeat(n_folds, 1), used, ones, classes)
    path = _path(problems, penalties)
    losses = torch.zeros(n_tasks, n_penalties, dtype=torch.float64)
    for number, fits in enumerate(path):
        losses[:, number] = _held_out_loss(fits, features, labels, folds)
    best = losses.argmin(dim=1)
    means = torch.stack([fits.weight.unflatten(0, (n_folds, n_tasks)).mean(0) for fits in path])
    start = means[best, torch.arange(n_tasks)].double()
    everything = torch.ones_like(labels, dtype=torch.bool)
    final = _Problems(features.double(), labels, everything, penalties[best], classes)
    # Its intercepts start at 0: those of folds that lack a class are infinite.
    weights = torch.nn.functional.pad(start, (0, 1))
    return Choice(final.solved(_minimise(final, weights, _FINAL)), penalties[best], losses)


def _path(problems: _Problems, penalties: Float[Tensor, " penalty"]) -> list[Logistic]:
    """Fits for each penalty, each started from the extrapolation of the two before it."""
    solutions: list[_Solution] = []
    strengths = penalties.log().tolist()
    for number, penalty in enumerate(penalties.tolist()):
        start = problems.zeros()
        if number > 0:
            start = solutions[-1].weights
        if number > 1:
            last, current, following = strengths[number - 2 : number + 1]
            if current > last:  # a penalty may be given twice
                ratio = (following - current) / (current - last)
                start = start + ratio * (start - solutions[-2].weights)
        solutions.append(_minimise(problems.penalised(penalty), start, _PATH))
    return [problems.solved(solution) for solution in solutions]


def _held_out_loss(
    fits: Logistic, features: Tensor, labels: Tensor, folds: Tensor
) -> Float[Tensor, " task"]:
    """Mean cross-entropy of the samples that each fold's fits, ordered (fold, task), leave out."""
    n_tasks = len(labels)
    total, count = torch.zeros(n_tasks, dtype=torch.float64), torch.zeros(n_tasks)
    for fold in range(int(folds.max()) + 1):
        held_out, of_fold = folds == fold, slice(fold * n_tasks, (fold + 1) * n_tasks)
        truth = labels[:, held_out, None]
        logits = features[held_out].to(fits.weight.dtype) @ fits.weight[of_fold].transpose(1, 2)
        logits += fits.intercept[of_fold, None]
        loss = (logits.logsumexp(dim=2, keepdim=True) - logits.gather(2, truth))[:, :, 0]
        total += torch.where(loss.isfinite(), loss, 0.0).sum(dim=1)
        count += loss.isfinite().sum(dim=1)
    return total / count.clamp(min=1)


class _Solution(NamedTuple):
    weights: Float[Tensor, "problem class feature"]  # the last feature is 1
    converged: Bool[Tensor, " problem"]


class _Problems:
    """Objectives on shared features: mean cross-entropy + 0.5 ridge |weight|^2 each."""

    def __init__(
        self,
        features: Float[Tensor, "sample feature"],
        labels: Int64[Tensor, "problem sample"],
        used: Bool[Tensor, "problem sample"],
        penalties: Float[Tensor, " problem"],
        classes: int,
    ) -> None:
        dtype = features.dtype
        self.rows = torch.cat([features, torch.ones(len(features), 1, dtype=dtype)], dim=1)
        self.columns = self.rows.T.contiguous()
        self.squares = self.rows.square().mean(dim=0)
        counts = used.sum(dim=1, keepdim=True).to(dtype)
        self.mask = used.to(dtype) / counts
        one_hot = (labels[:, None] == torch.arange(classes)[:, None]) & used[:, None]
        self.present = one_hot.any(dim=2)
        self.absent = torch.where(self.present, 0.0, -torch.inf).to(dtype)[:, :, None]
        # The term of the objective that is linear in the weights
        self.linear = (one_hot.to(dtype) @ self.rows) / counts[:, :, None]
        # |w_1 - w_0|^2 / 2 of two classes is twice the |w_0|^2 / 2 + |w_1|^2 / 2 of the softmax
        halved = torch.where(self.present.sum(dim=1) == 2, 0.5, 1.0)
        self.unit_ridge = (1 / (halved * counts[:, 0]))[:, None, None].repeat(
            1, 1, len(self.squares)
        )
        self.unit_ridge[:, :, -1] = 0
        self.ridge = self.unit_ridge / penalties.to(dtype)[:, None, None]

    def zeros(self) -> Float[Tensor, "problem class feature"]:
        """Weights of zero."""
        return torch.zeros_like(self.linear)

    def solved(self, solution: _Solution) -> Logistic:
        """The solution as fitted problems."""
        weights = solution.weights
        return Logistic(
            weights[:, :, :-1], weights[:, :, -1] + self.absent[:, :, 0], solution.converged
        )

    def penalised(self, penalty: float) -> _Problems:
        """The same problems with another penalty, the same for all."""
        new = copy.copy(self)
        new.ridge = self.unit_ridge / penalty
        return new

    def narrow(self, index: Tensor) -> _Problems:
        """Select some of the problems on the same features."""
        new = copy.copy(self)
        for name in ("mask", "present", "absent", "linear", "unit_ridge", "ridge"):
            setattr(new, name, getattr(self, name)[index])
        return new

    def to(self, dtype: torch.dtype) -> _Problems:
        """The same problems in another dtype."""
        new = copy.copy(self)
        for name, value in vars(self).items():
            if value.is_floating_point():
                setattr(new, name, value.to(dtype))
        return new

    def curvature(self, weights: Tensor) -> Float[Tensor, "problem 1 feature"]:
        """The mean diagonal of the Hessian for weights that sum to zero over the classes."""
        every = slice(None, None, max(1, len(self.rows) // _SAMPLED))
        mask = self.mask[:, every]
        probability = (weights @ self.columns[:, every] + self.absent).softmax(dim=1)
        spread = ((probability * (1 - probability)).sum(dim=1) * mask).sum(dim=1)
        others = self.present.sum(dim=1) - 1
        spread /= mask.sum(dim=1) * others.clamp(min=1)
        # Of a single class nothing depends on the intercept, and its gradient is rounding.
        spread = torch.where(others > 0, spread, 1.0)
        floor = torch.finfo(weights.dtype).tiny
        return (self.squares * spread[:, None, None] + self.ridge).clamp(min=floor)

    def objective(self, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the value [problem] and the gradient [problem, class, feature]."""
        problems, classes, size = weights.shape
        flat = weights.reshape(-1, size)
        gradient = torch.zeros_like(flat)
        value = torch.zeros(problems, dtype=weights.dtype)
        every_class = bool(self.present.all())
        block = max(64, _BLOCK // len(flat))
        for columns, rows, mask in zip(
            self.columns.split(block, dim=1),
            self.rows.split(block),
            self.mask.split(block, dim=1),
            strict=True,
        ):
            logits = (flat @ columns).view(problems, classes, -1)
            if not every_class:
                logits += self.absent
            highest = logits.amax(dim=1, keepdim=True)
            logits -= highest
            logits.exp_()
            sums = logits.sum(dim=1, keepdim=True)
            value += ((sums.log() + highest)[:, 0] * mask).sum(dim=1)
            logits *= mask[:, None] / sums
            gradient.addmm_(logits.view(len(flat), -1), rows)
        gradient = gradient.view_as(weights) - self.linear + self.ridge * weights
        value += (weights * (0.5 * self.ridge * weights - self.linear)).sum(dim=(1, 2))
        return value, gradient


def _minimise(problems: _Problems, start: Tensor, tolerance: float) -> _Solution:
    """Minimise all problems, with many samples first in float32, which is faster."""
    _, classes, size = start.shape
    if len(problems.rows) >= _MANY_SAMPLES * classes * size:
        coarse = _descend(problems.to(torch.float32), start.float(), _COARSE, 200)
        start = coarse.weights.double()
        if tolerance >= _PATH and coarse.converged.all():
            return _Solution(start, coarse.converged)
    return _descend(problems, start, tolerance, 1000)


def _descend(problems: _Problems, weights: Tensor, tolerance: float, max_passes: int) -> _Solution:
    """Minimise all problems at once by L-BFGS (Liu & Nocedal 1989) with backtracking.

    A problem is done when its next step would change the logits by at most the tolerance (root
    mean square over samples, if features are uncorrelated). Steps that do not decrease the
    objective enough are halved, while the other problems continue.
    """
    dtype = weights.dtype
    count, classes, _ = weights.shape
    done_weights, converged = torch.zeros_like(weights), torch.zeros(count, dtype=torch.bool)
    scale = problems.curvature(weights).rsqrt().expand(-1, classes, -1).flatten(1)
    spread = problems.squares.sqrt().repeat(classes)
    active, length = torch.arange(count), torch.ones(count, dtype=dtype)
    value, gradient = problems.objective(weights)
    gradient = gradient.flatten(1) * scale
    steps = changes = torch.zeros(count, 0, gradient.shape[1], dtype=dtype)
    direction = -gradient
    for passes in range(max_passes + 1):
        moves = (direction * scale * spread).norm(dim=1)
        has_arrived = moves <= tolerance
        leaving = has_arrived if passes < max_passes else torch.ones_like(has_arrived)
        if leaving.any():
            done = active[leaving]
            done_weights[done], converged[done] = weights[leaving], has_arrived[leaving]
            stay = (~leaving).nonzero()[:, 0]
            if len(stay) == 0:
                break
            problems = problems.narrow(stay)
            active, weights, scale, length = active[stay], weights[stay], scale[stay], length[stay]
            value, gradient, direction = value[stay], gradient[stay], direction[stay]
            steps, changes = steps[stay], changes[stay]
        step = length[:, None] * direction
        trial = weights + (step * scale).view_as(weights)
        trial_value, trial_gradient = problems.objective(trial)
        trial_gradient = trial_gradient.flatten(1) * scale
        # Near the minimum rounding hides the decrease of the value, but not that of the slope:
        # the conditions of Wolfe as approximated by Hager & Zhang 2005.
        slope, trial_slope = (gradient * step).sum(dim=1), (trial_gradient * step).sum(dim=1)
        # A small value is a difference of terms of order 1, which set its rounding.
        rounding = _ROUNDING * torch.finfo(dtype).eps * value.abs().clamp(min=1)
        is_flat = trial_value <= value + rounding
        accepted = trial_value <= value + _ARMIJO * slope
        accepted |= is_flat & (trial_slope <= (2 * _ARMIJO - 1) * slope)
        change = trial_gradient - gradient
        if accepted.all():
            weights, value, gradient = trial, trial_value, trial_gradient
        else:
            # A rejected step leaves an empty entry in the memory, which has no effect.
            step, change = step * accepted[:, None], change * accepted[:, None]
            weights = torch.where(accepted[:, None, None], trial, weights)
            value = torch.where(accepted, trial_value, value)
            gradient = torch.where(accepted[:, None], trial_gradient, gradient)
        steps = torch.cat([steps[:, 1 - _HISTORY :], step[:, None]], dim=1)
        changes = torch.cat([changes[:, 1 - _HISTORY :], change[:, None]], dim=1)
        newton = -_inverse_hessian(steps, changes, gradient)
        direction = torch.where(accepted[:, None], newton, direction)
        length = torch.where(accepted, 1.0, length / 2)
    return _Solution(done_weights, converged)


def _inverse_hessian(
    steps: Float[Tensor, "problem entry size"],
    changes: Float[Tensor, "problem entry size"],
    gradient: Float[Tensor, "problem size"],
) -> Float[Tensor, "problem size"]:
    """Multiply the gradient by the inverse Hessian of L-BFGS.

    In the compact form of Byrd, Nocedal & Schnabel 1994 (equation 3.1), which takes fewer calls
    than the recursion. Entries without positive curvature have no effect.
    """
    products, squares = steps @ changes.mT, changes @ changes.mT
    curvature = products.diagonal(dim1=1, dim2=2)
    filled = curvature > 0
    pairs = filled[:, :, None] & filled[:, None]
    upper = torch.where(pairs, products, 0.0).triu() + torch.diag_embed((~filled).to(steps.dtype))
    # The curvature along the newest step, 1 where there is none
    newest = (filled * torch.arange(1, filled.shape[1] + 1)).argmax(dim=1, keepdim=True)
    along = curvature.gather(1, newest) / squares.diagonal(dim1=1, dim2=2).gather(1, newest)
    scale = torch.where(filled.any(dim=1, keepdim=True), along, 1.0)[:, :, None]
    column = gradient[:, :, None]
    of_steps, of_changes = (
        torch.where(filled[:, :, None], part @ column, 0.0) for part in (steps, changes)
    )
    solved = torch.linalg.solve_triangular(upper, of_steps, upper=True)
    middle = curvature[:, :, None] * solved + scale * (
        torch.where(pairs, squares, 0.0) @ solved - of_changes
    )
    weights = torch.linalg.solve_triangular(upper.mT, middle, upper=False)
    # A step without curvature has a weight of 0.
    result = scale * (column - changes.mT @ solved) + steps.mT @ weights
    return result[:, :, 0]
