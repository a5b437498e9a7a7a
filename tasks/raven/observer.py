"""The ideal observer of the Raven task: the upper bound of any model's accuracy.

It gets a model's inputs and knows the generative process (Schug et al. 2024, "Attention as a
Hypernetwork", SRAVEN) and the rule combinations of a split. Its posterior over the answers is
exact: a sum over all correspondences of the columns' features and all assignments of rules to
features.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from math import factorial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tasks.raven.rules import DIFFERENCE, DISTRIBUTE, RAVEN_RULES, STEPS, SUM, rule_answers
from tasks.raven.task import Raven, RavenConfig

if TYPE_CHECKING:
    import xarray as xr

_CHUNK = 512  # instances at a time: bounds the memory


@dataclass(frozen=True, eq=False)
class Observation:
    """The exact posterior over answers, as a list of the possible answers of each instance.

    Attributes:
        example: [n] int64, sorted: the instance of each possible answer.
        candidate: [n, K] int64, the possible answer; each occurs once per instance.
        weight: [n] float64, its posterior probability, > 0; sums to 1 over an instance. Instances
            that the split's prior excludes have no candidates.
        n_answers_by_any_rules: [batch] int64, the number of answers that any rules explain,
            whether or not the split has that combination of rules.
        n_values: F.

    Example:
        >>> observation = IdealObserver(task, "id_unpermuted").observe(batch.inputs)
        >>> observation.posterior.shape, observation.marginals.shape  # [batch, F**K], [batch, K, F]
        (torch.Size([20, 64]), torch.Size([20, 2, 8]))
    """

    example: Tensor
    candidate: Tensor
    weight: Tensor
    n_answers_by_any_rules: Tensor
    n_values: int

    @property
    def n_examples(self) -> int:
        """Number of instances."""
        return len(self.n_answers_by_any_rules)

    @property
    def posterior(self) -> Tensor:
        """[batch, F**K] float64, the posterior of each answer; the last feature changes fastest."""
        n_answers = self.n_values ** self.candidate.shape[1]
        dense = self.weight.new_zeros(self.n_examples, n_answers)
        dense[self.example, _encode(self.candidate, self.n_values)] = self.weight
        return dense

    @property
    def marginals(self) -> Tensor:
        """[batch, K, F] float64, the posterior of each value of each token."""
        n_features = self.candidate.shape[1]
        marginals = self.weight.new_zeros(self.n_examples, n_features, self.n_values)
        features = torch.arange(n_features).expand_as(self.candidate)
        where = (self.example[:, None].expand_as(self.candidate), features, self.candidate)
        weight = self.weight[:, None].expand(self.candidate.shape)
        return marginals.index_put(where, weight, accumulate=True)

    @property
    def probability(self) -> Tensor:
        """[batch] float64, the probability of the most probable answer; 0 where there is none.

        Its mean over a split is the highest accuracy that a model can reach.
        """
        best = self.weight.new_zeros(self.n_examples)
        return best.scatter_reduce(0, self.example, self.weight, "amax")

    @property
    def answer(self) -> Tensor:
        """[batch, K] int64, the most probable answer (the first of ties); -1 if there is none."""
        is_best = self.weight == self.probability[self.example]
        n = len(self.weight)
        rows = torch.arange(n).where(is_best, n)
        first = rows.new_full((self.n_examples,), n)
        first = first.scatter_reduce(0, self.example, rows, "amin")
        no_answer = self.candidate.new_full((1, self.candidate.shape[1]), -1)
        return torch.cat([self.candidate, no_answer])[first]

    @property
    def feature_ceiling(self) -> Tensor:
        """[batch, K] float64, the probability of the most probable value of each token."""
        return self.marginals.amax(-1)

    @property
    def ambiguous(self) -> Tensor:
        """[batch] bool: whether several answers are possible under the split's prior."""
        return torch.bincount(self.example, minlength=self.n_examples) > 1

    @property
    def ambiguous_by_any_rules(self) -> Tensor:
        """[batch] bool: whether several answers are possible without a prior over the rules.

        On a permuted split, all correspondences of the features that any rules explain count: 9%,
        16% and 24% of the instances of `id` for K = 2, 3 and 4 with F = 8. On an unpermuted split
        the correspondence is known, and rules that fit the same feature must disagree: 7%, 11% and
        14%. (20,000 instances, standard errors 0.3% or less.)
        """
        return self.n_answers_by_any_rules > 1


@dataclass(frozen=True)
class RavenCeiling:
    """The ideal observer's results on a split, as means with standard errors (`..._se`).

    Attributes:
        accuracy: the highest possible share of instances with all features correct.
        feature_accuracy: the highest possible share of correct features.
        ambiguous: the share of instances with several possible answers under the prior.
        ambiguous_by_any_rules: the share with several possible answers without a prior.
        n_instances: number of instances of the measurement.

    Example:
        >>> ceiling = IdealObserver(task, "ood").ceiling(100)
        >>> 0.5 < ceiling.accuracy <= ceiling.feature_accuracy <= 1
        True
    """

    accuracy: float
    accuracy_se: float
    feature_accuracy: float
    feature_accuracy_se: float
    ambiguous: float
    ambiguous_se: float
    ambiguous_by_any_rules: float
    ambiguous_by_any_rules_se: float
    n_instances: int


_CEILINGS = {
    "accuracy": "highest share of instances with all features right that a split allows",
    "accuracy_se": "standard error of the highest accuracy",
    "feature_accuracy": "highest share of right features that a split allows",
    "feature_accuracy_se": "standard error of the highest share of right features",
    "ambiguous": "share of instances with several possible answers, known prior",
    "ambiguous_by_any_rules": "share of instances that some rules explain with several answers",
}
"""The fields of `RavenCeiling` that `raven_ceilings` returns, with their long names."""


def raven_ceilings(config: RavenConfig, splits: Sequence[str], n_instances: int) -> xr.Dataset:
    """Return the ideal observer's results on several splits.

    Results are cached in the process.

    Args:
        config: the settings of the task.
        splits: a subset of `Raven.SPLITS`.
        n_instances: number of instances of each split, at least 2.

    Returns:
        `accuracy`, `feature_accuracy` with their standard errors `..._se`, `ambiguous` and
        `ambiguous_by_any_rules`, [split] each, in 0..1: see `RavenCeiling`.

    Raises:
        ValueError: a split is unknown, or `n_instances` is less than 2.

    Example:
        >>> raven_ceilings(RavenConfig(n_features=2), ("id", "ood"), 1000)["accuracy"]
    """
    import xarray as xr  # imported here to keep `import tasks` fast

    ceilings = [_ceiling(config, split, n_instances) for split in splits]
    variables = {
        name: ("split", [getattr(ceiling, name) for ceiling in ceilings], {"long_name": long_name})
        for name, long_name in _CEILINGS.items()
    }
    return xr.Dataset(variables, {"split": list(splits)}, {"instances": n_instances})


@functools.lru_cache(maxsize=64)
def _ceiling(config: RavenConfig, split: str, n_instances: int) -> RavenCeiling:
    return IdealObserver(Raven(config), split).ceiling(n_instances)


class IdealObserver:
    """Computes the exact posterior over answers under the prior of one split.

    Example:
        >>> observation = IdealObserver(task, "id_unpermuted").observe(batch.inputs)
        >>> is_right = (observation.answer == batch.targets).all(-1)
        >>> is_right[~observation.ambiguous].all()  # where a single answer is possible
        tensor(True)
    """

    def __init__(self, task: Raven, split: str) -> None:
        """Build the observer of a split.

        Args:
            task: the task.
            split: determines the prior, uniform over its rule combinations, and whether the columns
                are permuted.

        Raises:
            ValueError: `split` is unknown.
        """
        self._task = task
        self._split = split
        self._permuted = task.is_permuted(split)
        # With random orders in all columns, the order of the rules carries no information.
        self._any_order = self._permuted or task.config.rule_order == "random"
        combinations = task.combinations(split)
        self._combination_codes = _encode(combinations, len(RAVEN_RULES))
        self._likelihood = _rule_likelihoods(task.config.n_values)

    def observe(self, inputs: Tensor) -> Observation:
        """Return the posterior over the last panel's values.

        Args:
            inputs: [batch, 9 K, F], one-hot, as in a batch of the task; the last panel is not read.

        Raises:
            ValueError: `inputs` has another shape, or is not one-hot in the first eight panels.
        """
        panels = self._panels(inputs)
        parts = [self._observe_chunk(chunk) for chunk in panels.split(_CHUNK)]
        starts = range(0, len(panels), _CHUNK)
        return Observation(
            example=torch.cat([part[0] + start for part, start in zip(parts, starts, strict=True)]),
            candidate=torch.cat([part[1] for part in parts]),
            weight=torch.cat([part[2] for part in parts]),
            n_answers_by_any_rules=torch.cat([part[3] for part in parts]),
            n_values=self._task.config.n_values,
        )

    def ceiling(self, n_instances: int = 2_000) -> RavenCeiling:
        """Return the highest possible accuracy on the first batch of that size of the split.

        Raises:
            ValueError: `n_instances` is less than 2.
        """
        if n_instances < 2:
            raise ValueError(f"n_instances must be at least 2, got {n_instances!r}")
        observation = self.observe(self._task.batch(self._split, 0, n_instances).inputs)
        accuracy, accuracy_se = _mean_and_error(observation.probability)
        feature, feature_se = _mean_and_error(observation.feature_ceiling.mean(-1))
        ambiguous, ambiguous_se = _mean_and_error(observation.ambiguous.double())
        by_any, by_any_se = _mean_and_error(observation.ambiguous_by_any_rules.double())
        return RavenCeiling(
            accuracy=accuracy,
            accuracy_se=accuracy_se,
            feature_accuracy=feature,
            feature_accuracy_se=feature_se,
            ambiguous=ambiguous,
            ambiguous_se=ambiguous_se,
            ambiguous_by_any_rules=by_any,
            ambiguous_by_any_rules_se=by_any_se,
            n_instances=n_instances,
        )

    def _panels(self, inputs: Tensor) -> Tensor:
        """Return the values of the panels, [batch, 9, K]; those of the last panel are arbitrary."""
        n_features, n_values = self._task.config.n_features, self._task.config.n_values
        if inputs.ndim != 3 or inputs.shape[1:] != (9 * n_features, n_values):
            raise ValueError(
                f"inputs must have shape (batch, {9 * n_features}, {n_values}), got "
                f"{tuple(inputs.shape)}"
            )
        panels = inputs.cpu().unflatten(1, (9, n_features))
        context = panels[:, :8]
        if not (((context == 0) | (context == 1)).all() and (context.sum(-1) == 1).all()):
            raise ValueError("inputs must be one-hot in the first eight panels, got other values")
        return panels.argmax(-1)

    def _observe_chunk(self, panels: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the first four fields of an `Observation`."""
        config = self._task.config
        n_features, n_values = config.n_features, config.n_values
        fits, answers = self._fits(panels.unflatten(1, (3, 3)))

        # A partial explanation assigns corresponding features of the other two columns, and a rule,
        # to the first tokens of the last column. Few of them fit, so they are extended token by
        # token instead of enumerating all (K!)^2 alignments times 8^K rules.
        n_examples = len(panels)
        example = torch.arange(n_examples)
        used = torch.zeros(n_examples, 2, dtype=torch.int64)  # bit sets of features
        rules = answer = torch.zeros(n_examples, 0, dtype=torch.int64)
        for token in range(n_features):
            fit = fits[:, :, :, token].nonzero()  # sorted by example: [n, (example, i, j, rule)]
            left, right = _join(example, fit[:, 0], n_examples)
            bits = 1 << fit[right, 1:3]
            is_free = ((used[left] & bits) == 0).all(-1)
            left, right, bits = left[is_free], right[is_free], bits[is_free]
            i, j, rule = fit[right, 1:].unbind(-1)
            example = example[left]
            used = used[left] | bits
            rules = torch.cat([rules[left], rule[:, None]], 1)
            value = answers[example, i, j, token, rule]
            answer = torch.cat([answer[left], value[:, None]], 1)

        weight = self._prior(rules) * self._likelihood[rules].prod(-1)
        n_answers = n_values**n_features
        codes = example * n_answers + _encode(answer, n_values)
        codes, inverse = codes.unique(return_inverse=True)
        weight = weight.new_zeros(len(codes)).index_add(0, inverse, weight)
        example, answer = codes // n_answers, _decode(codes % n_answers, n_values, n_features)
        n_explained = torch.bincount(example, minlength=n_examples)

        possible = weight > 0
        example, answer, weight = example[possible], answer[possible], weight[possible]
        total = weight.new_zeros(n_examples).index_add(0, example, weight)
        return example, answer, weight / total[example], n_explained

    def _fits(self, grid: Tensor) -> tuple[Tensor, Tensor]:
        """Try every rule on every triple of features, one of each column.

        Args:
            grid: [batch, 3 (row), 3 (column), K].

        Returns:
            Whether the rule fits the shown panels, and its value of the last panel: both
            [batch, K (of column 0), K (of column 1), K (of column 2), 8].
        """
        n_features, n_values = grid.shape[-1], self._task.config.n_values
        shape = (len(grid), 3, n_features, n_features, n_features)
        a = grid[:, :, 0, :, None, None].expand(shape)
        b = grid[:, :, 1, None, :, None].expand(shape)
        c = grid[:, :, 2, None, None, :].expand(shape)

        is_step = ((b - a)[..., None] - torch.tensor(STEPS)) % n_values == 0
        fits = torch.ones(*shape[:1], *shape[2:], len(RAVEN_RULES), dtype=torch.bool)
        fits[..., : len(STEPS)] = is_step.all(1)
        first_row = torch.stack([a[:, 0], b[:, 0], c[:, 0]], -1)
        for row in range(2):
            answer, _ = rule_answers(first_row, a[:, row], b[:, row], n_values)
            fits &= answer == c[:, row, ..., None]
        answer, defined = rule_answers(first_row, a[:, 2], b[:, 2], n_values)
        fits &= defined

        if not self._permuted:
            same = torch.eye(n_features, dtype=torch.bool)
            fits &= (same[:, :, None] & same[None])[..., None]
        return fits, answer

    def _prior(self, rules: Tensor) -> Tensor:
        """Return the prior of rules for the tokens of the last panel: [n, K] -> [n]."""
        ordered = rules.sort(-1).values
        in_split = torch.isin(_encode(ordered, len(RAVEN_RULES)), self._combination_codes)
        if not self._any_order:
            in_split = in_split & (ordered == rules).all(-1)
            return in_split.double() / len(self._combination_codes)
        n_features = rules.shape[1]
        factorials = torch.tensor([factorial(n) for n in range(n_features + 1)])
        counts = torch.nn.functional.one_hot(rules, len(RAVEN_RULES)).sum(1)
        n_orders = factorial(n_features) / factorials[counts].prod(-1)
        return in_split.double() / n_orders / len(self._combination_codes)


def _rule_likelihoods(n_values: int) -> Tensor:
    """Return the likelihood of the eight shown values under each rule that fits them, [8].

    Likelihoods are relative to F^-3, that of a constant or a progression, to keep products near 1.
    """
    likelihoods = torch.ones(len(RAVEN_RULES), dtype=torch.float64)
    likelihoods[[SUM, DIFFERENCE]] = float(n_values) ** -3
    n_triples = n_values * (n_values - 1) * (n_values - 2)
    likelihoods[DISTRIBUTE] = n_values**3 / (n_triples * 6 * 6)
    return likelihoods


def _join(left: Tensor, right: Tensor, n_keys: int) -> tuple[Tensor, Tensor]:
    """Return the indices of all pairs with equal keys, sorted by left; `right` must be sorted."""
    counts = torch.bincount(right, minlength=n_keys)
    starts = counts.cumsum(0) - counts
    repeats = counts[left]
    pairs = torch.arange(len(left)).repeat_interleave(repeats)
    offsets = torch.arange(len(pairs)) - (repeats.cumsum(0) - repeats)[pairs]
    return pairs, starts[left[pairs]] + offsets


def _encode(digits: Tensor, base: int) -> Tensor:
    """Return the numbers [...] with the given digits [..., K], the most significant first."""
    powers = base ** torch.arange(digits.shape[-1] - 1, -1, -1)
    return (digits * powers).sum(-1)


def _decode(codes: Tensor, base: int, n_digits: int) -> Tensor:
    powers = base ** torch.arange(n_digits - 1, -1, -1)
    return codes[..., None] // powers % base


def _mean_and_error(values: Tensor) -> tuple[float, float]:
    return values.mean().item(), (values.std() / len(values) ** 0.5).item()
