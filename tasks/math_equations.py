"""Math equations, as in Ostapenko et al. 2022, "Attention for Compositional Modularity".

An equation is written in reverse Polish notation: two numbers, then operators, each of which acts
on the previous result and the first number; `.1 .04 + .1 *` is .014. The model's inputs are the
numbers and the operators as variables. Some combinations of operators are held out: the model must
apply known operations in new combinations.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from tasks.batch import Batch
from tasks.causal import FINITE, CausalTask, Entries, Variable, integers, numbers
from tasks.common import (
    Key,
    require_bool,
    require_choice,
    require_int,
    require_number,
    require_shape,
)
from tasks.finite import ExampleSet
from tasks.finite_task import FiniteTask

_OPERATIONS: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "add": lambda x, y: x + y,
    "subtract": lambda x, y: x - y,
    "multiply": lambda x, y: x * y,
    "square_first": lambda x, y: x * x,
    "square_second": lambda x, y: y * y,
    "add_multiply": lambda x, y: (x + y) * x,
    "minimum": np.minimum,
    "maximum": np.maximum,
    "add_subtract": lambda x, y: (x + y) - x,
    "add_double": lambda x, y: x + 2 * y,
    "sin_first": lambda x, y: np.sin(x),
    "sin_second": lambda x, y: np.sin(y),
    "cos_first": lambda x, y: np.cos(x),
    "cos_second": lambda x, y: np.cos(y),
    "cos_sum": lambda x, y: np.cos(x + y),
}

MATH_OPERATIONS = tuple(_OPERATIONS)
"""The operations' names, in the paper's order; an operation's id is its index."""

_MAX_LENGTH = 5  # results reach 6e8, and their squares still fit into float32
_MAX_N = 10**6
_MAX_POINTS = 10**7
_MAX_CONSTANT = 100
_GRID = 2**24  # number of evenly spaced numbers from -1 to 1 that are exact in float32


@dataclass(frozen=True, kw_only=True)
class MathEquationsConfig:
    """Settings of math equations. The defaults are the paper's, for one of its five |S|.

    A split of size n (the paper's C) has |S|^L n / (|S| L) points, rounded down (section 3), at
    least one for each of its combinations of operators and at most 10^7. With L = 2 an operator
    then occurs n times on average.

    Attributes:
        n_operators: |S|, number of operations, 2 to 15 (the paper: 3, 5, 7, 10 and 15).
        length: L, operators in an equation, 1 to 5; with a single operator there is no split `ood`,
            since a held-out combination would be a new operator.
        n_points: n of `train`, at most 10^6 (the paper: 150 to 20,000).
        n_id: n of `id`, at most 10^6.
        n_ood: n of `ood`, at most 10^6.
        operators: the operations: the "first" of `MATH_OPERATIONS`, or a random choice ("drawn").
        ood_tasks: the tasks of `ood`: all combinations "held_out", or only "new" functions, those
            that no combination in `train` computes, too.
        variable_id: whether the features of a variable include its one-hot number.
        constant: the scalar of the last variable, -100 to 100; no answer depends on it.
        seed: seeds operations, held-out combinations, points and their order, 0 to 2^32 - 1.

    Raises:
        ValueError: an argument is out of its range.

    Example:
        >>> config = MathEquationsConfig(n_operators=3)
        >>> len(MathEquations(config).task_names), config.n_held_out
        (9, 3)
        >>> MathEquations(config).batch("ood", 0, 8).inputs.shape  # [batch, variable, feature]
        torch.Size([8, 5, 9])
    """

    n_operators: int = 5
    length: int = 2
    n_points: int = 5_000
    n_id: int = 200
    n_ood: int = 2_000
    operators: Literal["first", "drawn"] = "first"
    ood_tasks: Literal["held_out", "new"] = "held_out"
    variable_id: bool = True
    constant: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        require_int("n_operators", self.n_operators, 2, len(MATH_OPERATIONS))
        require_int("length", self.length, 1, _MAX_LENGTH)
        for name, n_tasks in (
            ("n_points", self.n_known),
            ("n_id", self.n_known),
            ("n_ood", self.n_held_out),
        ):
            per_length = self.n_operators ** (self.length - 1)
            low = -(-n_tasks * self.length // per_length)
            high = min(_MAX_N, _MAX_POINTS * self.length // per_length)
            require_int(name, getattr(self, name), low, high)
        require_choice("operators", self.operators, ("first", "drawn"))
        require_choice("ood_tasks", self.ood_tasks, ("held_out", "new"))
        require_bool("variable_id", self.variable_id)
        require_number("constant", self.constant, -_MAX_CONSTANT, _MAX_CONSTANT)
        require_int("seed", self.seed, 0, 2**32 - 1)

    @property
    def n_held_out(self) -> int:
        """Number of held-out combinations of operators: |S|; 0 if L = 1."""
        return self.n_operators if self.length > 1 else 0

    @property
    def n_known(self) -> int:
        """Number of combinations of operators in `train` and `id`."""
        return self.n_operators**self.length - self.n_held_out

    def size(self, split: str) -> int:
        """Return the number of points of a split.

        Raises:
            ValueError: `split` is unknown.
        """
        sizes = {"train": self.n_points, "id": self.n_id, "ood": self.n_ood}
        require_choice("split", split, tuple(sizes))
        if split == "ood" and not self.n_held_out:
            return 0
        return self.n_operators ** (self.length - 1) * sizes[split] // self.length


@dataclass(frozen=True)
class _TasksConfig:
    """The settings that determine the operations and the held-out combinations."""

    n_operators: int
    length: int
    operators: str
    seed: int


class MathEquations(FiniteTask, CausalTask):
    """Math equations.

    With x1, x2 ~ U(-1, 1), the results are r_1 = o_1(x1, x2), r_l = o_l(r_(l-1), x1), and the
    answer is r_L. A task is a combination of operators; of the |S|^L, |S| are held out (section 3),
    chosen at random such that every operator is held out once at each position. With L = 2 it
    occurs there with all other operators in `train`.

    Splits: `train` and `id` have the same tasks, `ood` (unless L = 1) held-out ones. Points
    (x1, x2) are distributed evenly over the tasks of a split, where the paper draws a task for each
    point, and no point occurs twice. The prefixes of `id` and `ood` are balanced over tasks.

    A batch has inputs [batch, variable, feature] float32: the variables x1, x2, o_1 to o_L and
    the constant; the features are a scalar (0 for an operator), the operator (one-hot, 0 for a
    number) and, with `variable_id`, the variable's number (one-hot); targets [batch, 1] float32,
    r_L; mask [batch, 1], all True; and the latents (int64 but for `point` and `result`)
    `point` [batch, 2] float32: x1 and x2;
    `operator` [batch, position]: indices into `operations`;
    `operation` [batch, position]: the same, as indices into `MATH_OPERATIONS`;
    `task` [batch]: the combination's number, its row in `combinations`;
    `result` [batch, position] float32: r_1 to r_L.

    A held-out combination is not always a new function: after `square_second`, `add_subtract`,
    `sin_second` or `cos_second` the answer does not depend on earlier results. With the first 5
    operations and L = 2, one of the 5 held-out tasks therefore has the answers of tasks in `train`;
    `ood_tasks="new"` leaves such tasks out.

    Causal model: `operator`, `point` and, leaving the inputs, `result` can be set. A result that is
    set is the operand of the next operation.

    Example:
        >>> MathEquations(MathEquationsConfig(n_operators=3)).batch("ood", 0, 100)

    Raises:
        ValueError: `ood` would have no task.
    """

    SPLITS: ClassVar = ("train", "id", "ood")

    def __init__(self, config: MathEquationsConfig) -> None:
        # Equations do not depend on the features' layout and on which tasks are tested, and the
        # held-out combinations do not depend on the number of points.
        splits = self.SPLITS if config.n_held_out else ("train", "id")
        super().__init__(
            key=Key(replace(config, variable_id=False, constant=0), without=("ood_tasks",)),
            splits=splits,
        )
        self.config = config
        self._tasks_key = Key(
            _TasksConfig(config.n_operators, config.length, config.operators, config.seed)
        )
        if config.n_held_out and not len(self.tasks("ood")):
            raise ValueError(
                f"no held-out combination of {', '.join(self.operations)} is a new function; "
                "ood_tasks must be held_out, got 'new'"
            )

    @property
    def n_variables(self) -> int:
        """Number of variables, two numbers, the operators and the constant: L + 3."""
        return self.config.length + 3

    @property
    def n_features(self) -> int:
        """Number of features of a variable: scalar, operator and, optionally, variable number."""
        return 1 + self.config.n_operators + self.config.variable_id * self.n_variables

    @property
    def deciding(self) -> tuple[int, ...]:
        """For each of the L steps, the variable that determines the operation: 2 to L + 1."""
        return tuple(range(2, 2 + self.config.length))

    @property
    def operations(self) -> tuple[str, ...]:
        """The name of each operator, in the order of `MATH_OPERATIONS`."""
        return tuple(MATH_OPERATIONS[operation] for operation in self._operations)

    @cached_property
    def combinations(self) -> Int[np.ndarray, "task position"]:
        """The operators of every task; the last position changes fastest."""
        shape = (self.config.n_operators,) * self.config.length
        return np.indices(shape).reshape(len(shape), -1).T

    @property
    def task_names(self) -> tuple[str, ...]:
        """The names of the operators of every task, such as "add, subtract"."""
        names = self.operations
        return tuple(", ".join(names[operator] for operator in row) for row in self.combinations)

    @cached_property
    def held_out(self) -> Int[np.ndarray, " held_out"]:
        """The numbers of the held-out tasks, ascending: |S|, or none if L = 1."""
        n_operators, length = self.config.n_operators, self.config.length
        if not self.config.n_held_out:
            return np.array([], int)
        generator = self._tasks_key.generator("/held out")
        code = np.stack([generator.permutation(n_operators) for _ in range(length)])
        first, second, *others = code[np.arange(length), self.combinations].T
        is_held_out = (first + second) % n_operators == 0
        for other in others:
            is_held_out &= other == second
        return np.flatnonzero(is_held_out)

    def tasks(self, split: str) -> Int[np.ndarray, " of_split"]:
        """The numbers of the tasks of a split, ascending.

        Raises:
            ValueError: `split` is unknown.
        """
        require_choice("split", split, self.splits)
        known = np.setdiff1d(np.arange(len(self.combinations)), self.held_out)
        if split != "ood":
            return known
        if self.config.ood_tasks == "held_out":
            return self.held_out
        # Functions are the same if they agree at points that have nothing in common.
        points = np.random.default_rng(0).uniform(-1, 1, (32, 2))
        answers = np.stack(
            [
                results(self._operations[np.tile(row, (len(points), 1))], points)[:, -1]
                for row in self.combinations
            ]
        )
        distances = np.abs(answers[self.held_out, None] - answers[known]).max(-1)
        return self.held_out[distances.min(1) > 1e-6]

    def score(
        self, output: Float[Tensor, "batch 1"], batch: Batch
    ) -> dict[str, Float[Tensor, " batch"]]:
        """Return the error of each prediction.

        Args:
            output: [batch, 1], predicted answers.
            batch: the batch that was answered.

        Returns:
            `squared_error` and `absolute_error`, both [batch].

        Raises:
            ValueError: `output` has another shape.
        """
        require_shape("output", output, tuple(batch.targets.shape))
        error = (output - batch.targets)[:, 0]
        return {"squared_error": error.square(), "absolute_error": error.abs()}

    def baseline(self, split: str) -> float:
        """Return the mean squared error of always predicting the mean target of `train`.

        Raises:
            ValueError: `split` is unknown.
        """
        targets, train_targets = (
            self._examples(name).targets.double() for name in (split, "train")
        )
        return (targets - train_targets.mean()).square().mean().item()

    def _make(self, split: str) -> ExampleSet:
        points = self._points[split]
        # The tasks take turns; the first ones get a remainder.
        order = self._key.generator(f"/order/{split}").permutation(self.tasks(split))
        task = np.resize(order, len(points))
        drawn = {
            "operator": torch.from_numpy(self.combinations[task]),
            "point": torch.from_numpy(points.astype(np.float32)),  # exact
        }
        batch = self._completed(drawn)
        return ExampleSet(batch.inputs, batch.targets, batch.latents)

    @property
    def _variables(self) -> dict[str, Variable]:
        return {
            "operator": Variable(allowed=integers(0, self.config.n_operators - 1)),
            "point": Variable(allowed=numbers(-1, 1)),
            "operation": Variable(
                causes=("operator",),
                compute=lambda operator: torch.from_numpy(self._operations[operator.numpy()]),
            ),
            "task": Variable(causes=("operator",), compute=self._task),
            "result": Variable(
                causes=("operation", "point"), compute=_single_results, allowed=FINITE, within=True
            ),
            "inputs": Variable(causes=("operator", "point"), compute=self._shown),
            "targets": Variable(causes=("result",), compute=lambda result: result[:, -1:].clone()),
        }

    def _task(self, operator: Int[Tensor, "n position"]) -> Int[Tensor, " n"]:
        """Return the numbers of combinations, of which the operators are the digits."""
        powers = self.config.n_operators ** torch.arange(self.config.length - 1, -1, -1)
        return (operator * powers).sum(-1)

    def _shown(
        self, operator: Int[Tensor, "n position"], point: Float[Tensor, "n 2"]
    ) -> Float[Tensor, "n variable feature"]:
        n_operators = self.config.n_operators
        inputs = torch.zeros(len(point), self.n_variables, self.n_features)
        inputs[:, :2, 0] = point
        inputs[:, -1, 0] = self.config.constant
        inputs[:, self.deciding, 1 : 1 + n_operators] = torch.eye(n_operators)[operator]
        if self.config.variable_id:
            inputs[:, :, 1 + n_operators :] = torch.eye(self.n_variables)
        return inputs

    @cached_property
    def _operations(self) -> Int[np.ndarray, " operator"]:
        """The operation of each operator, an index into `MATH_OPERATIONS`."""
        if self.config.operators == "first":
            return np.arange(self.config.n_operators)
        generator = self._tasks_key.generator("/operations")
        drawn = generator.choice(len(MATH_OPERATIONS), self.config.n_operators, replace=False)
        return np.sort(drawn)

    @cached_property
    def _points(self) -> dict[str, Float[np.ndarray, "point 2"]]:
        """The points of each split, drawn together without repetition."""
        sizes = [self.config.size(split) for split in self.SPLITS]
        drawn = self._key.generator("/points").choice(_GRID**2, sum(sizes), replace=False)
        points = np.stack(np.divmod(drawn, _GRID), -1) / (_GRID // 2) - 1
        return dict(zip(self.SPLITS, np.split(points, np.cumsum(sizes)[:-1]), strict=True))

    def _groups(self, train: ExampleSet) -> list[Int[np.ndarray, " member"]]:
        return [np.arange(len(train))]


def apply_operation(
    name: str, x: Float[np.ndarray, "*shape"], y: Float[np.ndarray, "*shape"]
) -> Float[np.ndarray, "*shape"]:
    """Apply an operation to its two operands, element by element.

    Args:
        name: one of `MATH_OPERATIONS`.
        x: the first operand: the previous result.
        y: the second operand.

    Raises:
        ValueError: `name` is unknown.

    Example:
        >>> apply_operation(MATH_OPERATIONS[0], numpy.ones(3), numpy.ones(3)).shape
        (3,)
    """
    require_choice("name", name, MATH_OPERATIONS)
    return _OPERATIONS[name](x, y)


def results(
    operation: Int[np.ndarray, "n position"],
    points: Float[np.ndarray, "n 2"],
    known: Float[np.ndarray, "n position"] | None = None,
) -> Float[np.ndarray, "n position"]:
    """Return the results r_1 to r_L of equations.

    Args:
        operation: indices into `MATH_OPERATIONS`.
        points: x1 and x2.
        known: results that replace the computed ones, also as operands, but for NaN; None: none.
    """
    result = np.empty(operation.shape)
    x, y = points.T
    for position, operation_ids in enumerate(operation.T):
        for operation_id in np.unique(operation_ids):
            rows = np.flatnonzero(operation_ids == operation_id)
            name = MATH_OPERATIONS[operation_id]
            result[rows, position] = apply_operation(name, x[rows], y[rows])
        if known is not None:
            rows = np.flatnonzero(~np.isnan(known[:, position]))
            result[rows, position] = known[rows, position]
        x, y = result[:, position], points[:, 0]
    return result


def _single_results(
    operation: Int[Tensor, "n position"],
    point: Float[Tensor, "n 2"],
    entries: Entries | None = None,
) -> Float[Tensor, "n position"]:
    """Return the results in single precision; they are computed in double precision."""
    known = None
    if entries is not None:
        known = torch.where(entries.is_set, entries.values, torch.nan).numpy()
    result = results(operation.numpy(), point.double().numpy(), known)
    return torch.from_numpy(result.astype(np.float32))
