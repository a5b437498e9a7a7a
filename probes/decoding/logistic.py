"""Many multinomial logistic regressions over one design matrix, solved together.

The problems of one cross-validation differ in their labels (the probe, the control task), in the
samples that they are fitted to (folds) and in their penalties, but not in their features. So each
pass over the data is two matrix products that all problems share, and a fold starts from the
solution, and from the curvature, of all samples together.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

_HISTORY = 10
_ARMIJO = 1e-4
_MAX_PASSES = 1000
# Elements per block of logits, which then stay in the cache between the operations on them.
_BLOCK = 1 << 17
# Expected remaining decrease of the mean cross-entropy at which cross-validation stops: far below
# what could change a choice, and within what float32 resolves.
_COARSE = 1e-5
# Expected distance to the optimal weights at which the final fit stops.
_FINE = 1e-3


@dataclass(frozen=True)
class Logistic:
    """Fitted problems: `logits = weight @ features + intercept`.

    Classes that a problem's samples do not have get the intercept -inf: they are never predicted.
    """

    weight: Float[Tensor, "problem class feature"]
    intercept: Float[Tensor, "problem class"]
    converged: Bool[Tensor, " problem"]

    def predict(self, features: Float[Tensor, "sample feature"]) -> Int64[Tensor, "problem sample"]:
        """The most probable class."""
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

    The objective of scikit-learn's `LogisticRegression(C=C)`; the intercept is not penalised. With
    two classes scikit-learn penalises the difference of the two weight vectors; so does this.

    Args:
        features: standardised; constant features get the weight 0.
        labels: in [0, classes).
        penalties: C of each problem, the inverse strength of the regularisation, > 0.
        classes: how many classes there are.
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
        features: standardised.
        labels: in [0, classes), one row per task: all tasks share the features.
        folds: the fold in which a sample is held out, 0, 1, ...
        penalties: the values of C to choose from, ascending.
        classes: how many classes there are.

    Returns:
        The fit to all samples, the chosen C, and the mean cross-entropy of the held-out samples:
        the criterion of the choice (accuracy is a coarser function of the same predictions). Of
        equal values the smallest C is taken. Held-out samples of a class that the other folds lack
        do not count.
    """
    design = _Design(features)
    n_folds, n_tasks, n_penalties = int(folds.max()) + 1, len(labels), len(penalties)
    every = torch.ones_like(labels, dtype=torch.bool)
    grid = penalties.expand(n_tasks, -1)
    # problem = (task, penalty)
    problems = _Problems(design, labels, every, grid, classes, torch.float32)
    whole = _minimise(problems, problems.start(), torch.full((grid.numel(),), _COARSE))

    # problem = (fold, task, penalty)
    parts = _Problems(
        design,
        labels.repeat(n_folds, 1),
        (folds != torch.arange(n_folds)[:, None]).repeat_interleave(n_tasks, dim=0),
        penalties.expand(n_folds * n_tasks, -1),
        classes,
        torch.float32,
    )
    tolerance = torch.full((n_folds * grid.numel(),), _COARSE)
    fitted = _minimise(parts, whole.repeat(n_folds), tolerance)
    logits_shape = (n_folds, n_tasks, n_penalties, classes)
    weights = fitted.weights.view(*logits_shape, -1)
    absent = parts.absent.view(*logits_shape, 1)
    total, count = torch.zeros(n_tasks, n_penalties), torch.zeros(n_tasks, 1)
    for fold in range(n_folds):
        held_out = folds == fold
        known = labels[:, held_out]  # [task, sample]
        seen = (absent[fold, :, 0, :, 0] == 0).gather(1, known)
        logits = weights[fold] @ parts.columns[:, held_out] + absent[fold]
        right = logits.gather(2, known[:, None, None].expand(-1, n_penalties, -1, -1))[:, :, 0]
        loss = torch.where(seen[:, None], logits.logsumexp(dim=2) - right, 0.0)
        total += loss.sum(dim=2)
        count += seen.sum(dim=1, keepdim=True)
    losses = total / count.clamp(min=1)
    best = losses.argmin(dim=1)

    chosen = torch.arange(n_tasks) * n_penalties + best
    final = _Problems(design, labels, every, penalties[best, None], classes, torch.float64)
    solution = _minimise(final, whole.select(chosen), _fine(final))
    return design.undo(final, solution), penalties[best], losses


class _Design:
    """Features in their principal axes, and a column of ones.

    The rotation leaves the L2 penalty as it is and makes the Hessian at zero diagonal.
    """

    def __init__(self, features: Tensor) -> None:
        features = features.double()
        squares, self.axes = torch.linalg.eigh(features.T @ features / len(features))
        ones = torch.ones(len(features), 1, dtype=torch.float64)
        self.rows = torch.cat([features @ self.axes, ones], dim=1)  # [sample, axis]
        self.squares = torch.cat([squares.clamp(min=0), ones[0]])  # mean square of each axis

    def undo(self, problems: "_Problems", solution: "_Solution") -> Logistic:
        weights = solution.weights
        intercept = weights[:, :, -1] + torch.where(problems.present, 0.0, -torch.inf)
        return Logistic(weights[:, :, :-1] @ self.axes.T, intercept, solution.converged)


@dataclass(frozen=True)
class _Solution:
    """Weights, the scale in which they were sought, and L-BFGS' memory of the curvature there."""

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
    """Objectives over a shared design: mean cross-entropy + 0.5 ridge |weight|^2 each.

    A problem is a task (labels, and the samples that are used) with one of its penalties; in the
    order of the tasks, then of the penalties.
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
        # The part of the objective that is linear in the weights
        linear = (one_hot.to(dtype) @ self.rows) / counts[:, None, None]

        each = penalties.shape[1]
        self.penalties, self.counts = penalties.flatten(), counts.repeat_interleave(each)
        self.mask, self.linear = (one.repeat_interleave(each, dim=0) for one in (mask, linear))
        self.present = present.repeat_interleave(each, dim=0)
        self.absent = torch.where(self.present, 0.0, -torch.inf).to(dtype)[:, :, None]
        # |w_1 - w_0|^2 / 2 of two classes is twice the |w_0|^2 / 2 + |w_1|^2 / 2 of the softmax
        halved = torch.where(self.present.sum(dim=1) == 2, 0.5, 1.0)
        ridge = (1 / (halved * self.penalties * self.counts)).to(dtype)
        self.ridge = ridge[:, None, None].repeat(1, 1, len(self.squares))
        self.ridge[:, :, -1] = 0

    def start(self) -> _Solution:
        """Zero weights, scaled by the Hessian there, so that the first step is Newton's.

        At zero all classes are equally probable, and on weights that sum to zero over the classes
        (which each step keeps) the Hessian is the mean square of the axis, divided by the classes.
        """
        problems, classes, size = self.linear.shape
        curvature = self.squares / self.present.sum(dim=1)[:, None, None] + self.ridge
        scale = curvature.rsqrt().expand(-1, classes, -1)
        zeros = torch.zeros(problems, classes, size, dtype=scale.dtype)
        memory = torch.zeros(0, problems, classes * size, dtype=scale.dtype)
        return _Solution(zeros, scale, memory, memory, torch.zeros(problems, dtype=torch.bool))

    def narrow(self, index: Tensor) -> "_Problems":
        """Some of the problems, over the same design."""
        some = object.__new__(_Problems)
        some.rows, some.columns, some.squares = self.rows, self.columns, self.squares
        some.penalties, some.counts = self.penalties[index], self.counts[index]
        some.mask, some.linear, some.ridge = self.mask[index], self.linear[index], self.ridge[index]
        some.present, some.absent = self.present[index], self.absent[index]
        return some

    def objective(self, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Value [problem] and gradient [problem, class, axis]."""
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
    # In units of 0.5 |weight|^2 the objective's Hessian is at least 1 on the weights, so an
    # expected decrease g H^-1 g of at most _FINE^2 bounds the distance to the optimum by _FINE.
    # The intercepts have no penalty, but a curvature of about a class's share of the samples.
    return _FINE**2 * (1 / (problems.penalties * problems.counts)).clamp(max=0.01)


def _minimise(
    problems: _Problems, start: _Solution, tolerance: Float[Tensor, " problem"]
) -> _Solution:
    """L-BFGS (Liu & Nocedal 1989) with backtracking for all problems side by side.

    A problem leaves when the expected decrease g H^-1 g is at most its tolerance. Steps that do
    not decrease the objective enough are halved, while the other problems go on.
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
        small = -slope <= tolerance
        leaving = small if passes < _MAX_PASSES else torch.ones_like(small)
        if leaving.any():
            gone = active[leaving]
            done_weights[gone], converged[gone] = weights[leaving], small[leaving]
            if len(steps):
                done_steps[-len(steps) :, gone] = steps[:, leaving]
                done_changes[-len(steps) :, gone] = changes[:, leaving]
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
            # A refused step leaves an empty entry in the memory, which has no effect.
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
    """L-BFGS' inverse Hessian times the gradient, by the two-loop recursion."""
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
    # The curvature along the newest step that was taken, 1 where there is none
    newest = (filled * torch.arange(1, len(steps) + 1)[:, None]).amax(dim=0)
    index = (newest - 1).clamp(min=0)[None]
    squares = changes.square().sum(dim=2)
    curvature = products.gather(0, index)[0] / squares.gather(0, index)[0]
    result *= torch.where(newest > 0, curvature, 1.0)[:, None]
    for entry, alpha in enumerate(reversed(alphas)):
        beta = inverse[entry] * (changes[entry] * result).sum(dim=1, keepdim=True)
        result += (alpha - beta) * steps[entry]
    return result
