"""Many multinomial logistic regressions on one design matrix, solved together.

The problems of a cross-validation differ in labels (probe, control task), samples (folds) and
penalties, but share the features. So each pass over the data is two matrix products for all
problems, and each fold starts from the solution and the curvature for all samples.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

_HISTORY = 10
_ARMIJO = 1e-4
_MAX_PASSES = 1000
# Elements per block of logits, so that a block fits into the cache.
_BLOCK = 1 << 17
# Expected remaining decrease of the mean cross-entropy at which cross-validation stops: too small
# to change a choice, and within the resolution of float32.
_COARSE = 1e-5
# Expected distance to the optimal weights at which the final fit stops.
_FINE = 1e-3


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


def fit_logistic(
    features: Float[Tensor, "sample feature"],
    labels: Int64[Tensor, "problem sample"],
    penalties: Float[Tensor, " problem"],
    *,
    classes: int,
) -> Logistic:
    """Minimise 0.5 |weight|^2 + C sum_i cross-entropy_i for each problem, to 1e-3 in the weights.

    This is the objective of scikit-learn's `LogisticRegression(C=C)`: the intercept is not
    penalised, and with two classes the difference of the two weight vectors is.

    Args:
        features: standardised features; constant ones get the weight 0.
        labels: integers in [0, classes).
        penalties: C of each problem, the inverse strength of the regularisation, > 0.
        classes: number of classes.
    """
    design = _Design(features)
    used = torch.ones_like(labels, dtype=torch.bool)
    problems = _Problems(design, labels, used, penalties[:, None], classes, torch.float64)
    return design.undo(problems, _minimise(problems, problems.start(), _fine(problems)))


def fit_logistic_cv(
    features: Float[Tensor, "sample feature"],
    labels: Int64[Tensor, "task sample"],
    folds: Int64[Tensor, " sample"],
    penalties: Float[Tensor, " penalty"],
    *,
    classes: int,
) -> tuple[Logistic, Float[Tensor, " task"], Float[Tensor, "task penalty"]]:
    """Choose C by cross-validation, then fit to all samples.

    Args:
        features: standardised features, shared by all tasks.
        labels: integers in [0, classes), one row per task.
        folds: fold in which each sample is held out, 0, 1, ...
        penalties: values of C to choose from, ascending.
        classes: number of classes.

    Returns:
        The fit to all samples, the chosen C, and the mean cross-entropy of held-out samples, by
        which C is chosen (the smallest in case of a tie). Held-out samples of a class that the
        other folds lack are not counted.
    """
    design = _Design(features)
    n_folds, n_tasks, n_penalties = int(folds.max()) + 1, len(labels), len(penalties)
    all_samples = torch.ones_like(labels, dtype=torch.bool)
    grid = penalties.expand(n_tasks, -1)
    # problem = (task, penalty)
    problems = _Problems(design, labels, all_samples, grid, classes, torch.float32)
    full_fit = _minimise(problems, problems.start(), torch.full((grid.numel(),), _COARSE))

    # problem = (fold, task, penalty)
    fold_problems = _Problems(
        design,
        labels.repeat(n_folds, 1),
        (folds != torch.arange(n_folds)[:, None]).repeat_interleave(n_tasks, dim=0),
        penalties.expand(n_folds * n_tasks, -1),
        classes,
        torch.float32,
    )
    tolerance = torch.full((n_folds * grid.numel(),), _COARSE)
    fold_fits = _minimise(fold_problems, full_fit.repeat(n_folds), tolerance)
    logits_shape = (n_folds, n_tasks, n_penalties, classes)
    weights = fold_fits.weights.view(*logits_shape, -1)
    absent = fold_problems.absent.view(*logits_shape, 1)
    total, count = torch.zeros(n_tasks, n_penalties), torch.zeros(n_tasks, 1)
    for fold in range(n_folds):
        held_out = folds == fold
        truth = labels[:, held_out]  # [task, sample]
        in_training = (absent[fold, :, 0, :, 0] == 0).gather(1, truth)
        logits = weights[fold] @ fold_problems.columns[:, held_out] + absent[fold]
        true_logit = logits.gather(2, truth[:, None, None].expand(-1, n_penalties, -1, -1))[:, :, 0]
        loss = torch.where(in_training[:, None], logits.logsumexp(dim=2) - true_logit, 0.0)
        total += loss.sum(dim=2)
        count += in_training.sum(dim=1, keepdim=True)
    losses = total / count.clamp(min=1)
    best = losses.argmin(dim=1)

    chosen = torch.arange(n_tasks) * n_penalties + best
    final = _Problems(design, labels, all_samples, penalties[best, None], classes, torch.float64)
    solution = _minimise(final, full_fit.select(chosen), _fine(final))
    return design.undo(final, solution), penalties[best], losses


class _Design:
    """Features in their principal axes, and a column of ones.

    The rotation keeps the L2 penalty and makes the Hessian at zero diagonal.
    """

    def __init__(self, features: Tensor) -> None:
        features = features.double()
        squares, self.axes = torch.linalg.eigh(features.T @ features / len(features))
        ones = torch.ones(len(features), 1, dtype=torch.float64)
        self.rows = torch.cat([features @ self.axes, ones], dim=1)  # [sample, axis]
        self.squares = torch.cat([squares.clamp(min=0), ones[0]])  # mean square of each axis

    def undo(self, problems: "_Problems", solution: "_Solution") -> Logistic:
        """Rotate a solution back to the original features."""
        weights = solution.weights
        intercept = weights[:, :, -1] + torch.where(problems.present, 0.0, -torch.inf)
        return Logistic(weights[:, :, :-1] @ self.axes.T, intercept, solution.converged)


@dataclass(frozen=True)
class _Solution:
    """Weights, the scale in which they were optimised, and the curvature memory of L-BFGS."""

    weights: Float[Tensor, "problem class axis"]
    scale: Float[Tensor, "problem class axis"]
    steps: Float[Tensor, "entry problem size"]
    changes: Float[Tensor, "entry problem size"]
    converged: Bool[Tensor, " problem"]

    def select(self, index: Tensor) -> "_Solution":
        return _Solution(
            self.weights[index],
            self.scale[index],
            self.steps[:, index],
            self.changes[:, index],
            self.converged[index],
        )

    def repeat(self, times: int) -> "_Solution":
        return self.select(torch.arange(len(self.weights)).repeat(times))


class _Problems:
    """Objectives on a shared design: mean cross-entropy + 0.5 ridge |weight|^2 each.

    A problem is a task (labels, and the samples to use) with one of its penalties; problems are
    ordered by task, then by penalty.
    """

    def __init__(
        self,
        design: _Design,
        labels: Int64[Tensor, "task sample"],
        used: Bool[Tensor, "task sample"],
        penalties: Float[Tensor, "task penalty"],
        classes: int,
        dtype: torch.dtype,
    ) -> None:
        self.rows = design.rows.to(dtype)
        self.columns = self.rows.T.contiguous()
        self.squares = design.squares.to(dtype)
        counts = used.sum(dim=1).to(dtype)
        mask = used.to(dtype) / counts[:, None]
        one_hot = (labels[:, None] == torch.arange(classes)[:, None]) & used[:, None]
        present = one_hot.any(dim=2)  # [task, class]
        # The term of the objective that is linear in the weights
        linear = (one_hot.to(dtype) @ self.rows) / counts[:, None, None]

        n_penalties = penalties.shape[1]
        self.penalties, self.counts = penalties.flatten(), counts.repeat_interleave(n_penalties)
        self.mask, self.linear = (
            array.repeat_interleave(n_penalties, dim=0) for array in (mask, linear)
        )
        self.present = present.repeat_interleave(n_penalties, dim=0)
        self.absent = torch.where(self.present, 0.0, -torch.inf).to(dtype)[:, :, None]
        # |w_1 - w_0|^2 / 2 of two classes is twice the |w_0|^2 / 2 + |w_1|^2 / 2 of the softmax
        halved = torch.where(self.present.sum(dim=1) == 2, 0.5, 1.0)
        ridge = (1 / (halved * self.penalties * self.counts)).to(dtype)
        self.ridge = ridge[:, None, None].repeat(1, 1, len(self.squares))
        self.ridge[:, :, -1] = 0

    def start(self) -> _Solution:
        """Start from zero weights, scaled by the Hessian there: the first step is Newton's.

        At zero all classes are equally probable. For weights that sum to zero over the classes
        (as all steps keep them) the Hessian is the mean square of the axis / number of classes.
        """
        problems, classes, size = self.linear.shape
        curvature = self.squares / self.present.sum(dim=1)[:, None, None] + self.ridge
        scale = curvature.rsqrt().expand(-1, classes, -1)
        zeros = torch.zeros(problems, classes, size, dtype=scale.dtype)
        memory = torch.zeros(0, problems, classes * size, dtype=scale.dtype)
        return _Solution(zeros, scale, memory, memory, torch.zeros(problems, dtype=torch.bool))

    def narrow(self, index: Tensor) -> "_Problems":
        """Select some of the problems on the same design."""
        new = object.__new__(_Problems)
        new.rows, new.columns, new.squares = self.rows, self.columns, self.squares
        new.penalties, new.counts = self.penalties[index], self.counts[index]
        new.mask, new.linear, new.ridge = self.mask[index], self.linear[index], self.ridge[index]
        new.present, new.absent = self.present[index], self.absent[index]
        return new

    def objective(self, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the value [problem] and the gradient [problem, class, axis]."""
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


def _fine(problems: _Problems) -> Tensor:
    # In units of 0.5 |weight|^2 the Hessian of the objective is at least 1 on the weights, so an
    # expected decrease g H^-1 g of at most _FINE^2 bounds the distance to the optimum by _FINE.
    # Intercepts have no penalty, but a curvature of about the class's share of the samples.
    return _FINE**2 * (1 / (problems.penalties * problems.counts)).clamp(max=0.01)


def _minimise(
    problems: _Problems, start: _Solution, tolerance: Float[Tensor, " problem"]
) -> _Solution:
    """Minimise all problems at once by L-BFGS (Liu & Nocedal 1989) with backtracking.

    A problem is done when the expected decrease g H^-1 g is at most its tolerance. Steps that do
    not decrease the objective enough are halved, while the other problems continue.
    """
    dtype = problems.linear.dtype
    count, classes, size = problems.linear.shape
    done_weights = torch.zeros(count, classes, size, dtype=dtype)
    done_steps = torch.zeros(_HISTORY, count, classes * size, dtype=dtype)
    done_changes = torch.zeros_like(done_steps)
    converged = torch.zeros(count, dtype=torch.bool)

    weights, scale = start.weights.to(dtype), start.scale.to(dtype).flatten(1)
    steps, changes = start.steps.to(dtype), start.changes.to(dtype)
    whole_scale = start.scale
    active = torch.arange(count)
    length = torch.ones(count, dtype=dtype)
    value, gradient = problems.objective(weights)
    gradient = gradient.flatten(1) * scale
    direction = -_inverse_hessian(steps, changes, gradient)
    for passes in range(_MAX_PASSES + 1):
        slope = (gradient * direction).sum(dim=1)
        below_tolerance = -slope <= tolerance
        leaving = below_tolerance if passes < _MAX_PASSES else torch.ones_like(below_tolerance)
        if leaving.any():
            done = active[leaving]
            done_weights[done], converged[done] = weights[leaving], below_tolerance[leaving]
            if len(steps):
                done_steps[-len(steps) :, done] = steps[:, leaving]
                done_changes[-len(steps) :, done] = changes[:, leaving]
            stay = (~leaving).nonzero()[:, 0]
            if len(stay) == 0:
                break
            problems = problems.narrow(stay)
            active, weights, scale, length = active[stay], weights[stay], scale[stay], length[stay]
            value, gradient, direction = value[stay], gradient[stay], direction[stay]
            slope, tolerance = slope[stay], tolerance[stay]
            steps, changes = steps[:, stay], changes[:, stay]
        step = length[:, None] * direction
        trial = weights + (step * scale).view_as(weights)
        trial_value, trial_gradient = problems.objective(trial)
        trial_gradient = trial_gradient.flatten(1) * scale
        rounding = 4 * torch.finfo(dtype).eps * value.abs()
        accepted = trial_value <= value + _ARMIJO * length * slope + rounding
        change = trial_gradient - gradient
        if accepted.all():
            weights, value, gradient = trial, trial_value, trial_gradient
        else:
            # A rejected step leaves an empty entry in the memory, which has no effect.
            step, change = step * accepted[:, None], change * accepted[:, None]
            weights = torch.where(accepted[:, None, None], trial, weights)
            value = torch.where(accepted, trial_value, value)
            gradient = torch.where(accepted[:, None], trial_gradient, gradient)
        steps = torch.cat([steps[1 - _HISTORY :], step[None]])
        changes = torch.cat([changes[1 - _HISTORY :], change[None]])
        newton = -_inverse_hessian(steps, changes, gradient)
        direction = torch.where(accepted[:, None], newton, direction)
        length = torch.where(accepted, 1.0, length / 2)
    return _Solution(done_weights, whole_scale, done_steps, done_changes, converged)


def _inverse_hessian(
    steps: Float[Tensor, "entry problem size"],
    changes: Float[Tensor, "entry problem size"],
    gradient: Float[Tensor, "problem size"],
) -> Float[Tensor, "problem size"]:
    """Multiply the gradient by the inverse Hessian of L-BFGS (two-loop recursion)."""
    result = gradient.clone()
    if len(steps) == 0:
        return result
    products = (steps * changes).sum(dim=2)  # [entry, problem]
    filled = products > 0
    inverse = torch.where(filled, 1 / products, 0.0)[:, :, None]
    alphas = []
    for entry in reversed(range(len(steps))):
        alpha = inverse[entry] * (steps[entry] * result).sum(dim=1, keepdim=True)
        result -= alpha * changes[entry]
        alphas.append(alpha)
    # The curvature along the newest accepted step, 1 where there is none
    newest = (filled * torch.arange(1, len(steps) + 1)[:, None]).amax(dim=0)
    index = (newest - 1).clamp(min=0)[None]
    squares = changes.square().sum(dim=2)
    curvature = products.gather(0, index)[0] / squares.gather(0, index)[0]
    result *= torch.where(newest > 0, curvature, 1.0)[:, None]
    for entry, alpha in enumerate(reversed(alphas)):
        beta = inverse[entry] * (changes[entry] * result).sum(dim=1, keepdim=True)
        result += (alpha - beta) * steps[entry]
    return result
