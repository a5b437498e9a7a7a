"""The problem of a path search: network and checked examples, in chunks that fit into memory."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from probes.capturing.inputs import slices
from probes.oracle.paths import PathLoss, PathModel
from probes.progress import progress

_MOST_EXAMPLES = 2**12  # per chunk: limits the memory of what depends on the inputs alone


@dataclass(frozen=True)
class PathProblem:
    """A network whose paths are searched, and the examples; made by `read_problem`.

    Attributes:
        routed: path of the router.
        state_bytes: memory of one partial result.
        memory_limit: in bytes.
    """

    model: PathModel
    inputs: Float[Tensor, "example ..."]
    targets: Float[Tensor, "example ..."]
    routed: Int[Tensor, "example layer"]
    loss: PathLoss
    state_bytes: int
    memory_limit: int

    def __len__(self) -> int:
        return len(self.inputs)

    @property
    def n_layers(self) -> int:
        """Number of layers, the length of a path."""
        return self.model.n_layers

    @property
    def n_modules(self) -> int:
        """Number of modules to choose from in each layer."""
        return self.model.n_modules

    @property
    def entry_bytes(self) -> int:
        """Memory for each example x path x module, in bytes."""
        # A result of each layer, the error and its square, and temporary losses.
        results = (self.n_layers + 3) * self.state_bytes + 40
        return self.model.bytes_per_result + results

    def take(self, rows: slice | Int[Tensor, " row"]) -> "PathProblem":
        """Take some of the examples."""
        return replace(
            self, inputs=self.inputs[rows], targets=self.targets[rows], routed=self.routed[rows]
        )

    def advance(
        self, layer: int, partial: Float[Tensor, "example path state"]
    ) -> Float[Tensor, "example path module state"]:
        """Apply each module of a layer to each partial result.

        Raises:
            ValueError: the result of the model has another shape.
        """
        result = self.model.advance(self.inputs, layer, partial)
        expected = (*partial.shape[:2], self.n_modules)
        if result.ndim != 4 or result.shape[:3] != expected:
            raise ValueError(
                f"model.advance must return [example, path, module, state], "
                f"{(*expected, '...')} in layer {layer}, got {tuple(result.shape)}"
            )
        return result

    def losses(self, answers: Float[Tensor, "example path state"]) -> Float[Tensor, "example path"]:
        """Compute the losses of answers.

        Raises:
            ValueError: losses have another shape, or are not finite numbers of at least 0.
        """
        losses = self.loss(answers, self.targets)
        if losses.shape != answers.shape[:2]:
            raise ValueError(
                f"loss must return [example, path], {tuple(answers.shape[:2])}, "
                f"got {tuple(losses.shape)}"
            )
        if not ((losses >= 0) & (losses < torch.inf)).all():
            raise ValueError(
                "loss must return finite numbers of at least 0, got "
                f"{losses.min().item():g}..{losses.max().item():g}"
            )
        return losses


def read_problem(
    model: PathModel,
    inputs: Float[Tensor, "example ..."],
    targets: Float[Tensor, "example ..."],
    routed: Int[Tensor, "example layer"],
    loss: PathLoss,
    memory_limit: int,
) -> PathProblem:
    """Check the arguments of a search; the model must be in evaluation mode.

    Raises:
        TypeError: `routed` does not hold integers.
        ValueError: shapes do not match, there are no examples, targets are not finite, modules of
            `routed` are out of range, or the memory limit is too small for one partial result.
    """
    examples = len(inputs) if inputs.ndim else 0
    if not examples:
        raise ValueError(f"inputs must hold at least 1 example, got shape {tuple(inputs.shape)}")
    if targets.ndim == 0 or len(targets) != examples:
        raise ValueError(
            f"targets must have the {examples} examples of inputs, got shape {tuple(targets.shape)}"
        )
    if not targets.isfinite().all():
        not_finite = int((~targets.isfinite()).sum())
        raise ValueError(f"targets must be finite, got {not_finite} NaN or infinite values")
    check_integers("routed", routed)
    if routed.shape != (examples, model.n_layers):
        raise ValueError(
            f"routed must be [example, layer], {(examples, model.n_layers)}, "
            f"got {tuple(routed.shape)}"
        )
    if routed.min() < 0 or routed.max() >= model.n_modules:
        raise ValueError(
            f"routed must be in 0..{model.n_modules - 1}, got "
            f"{int(routed.min())}..{int(routed.max())}"
        )
    start = model.begin(inputs[:1])
    if start.ndim != 3 or start.shape[:2] != (1, 1):
        raise ValueError(
            "model.begin must return [example, 1, state], for 1 example (1, 1, ...), "
            f"got {tuple(start.shape)}"
        )
    state_bytes = start.shape[2] * start.element_size()
    routed = routed.to(inputs.device, torch.long)
    problem = PathProblem(model, inputs, targets, routed, loss, state_bytes, memory_limit)
    needed = model.n_modules * problem.entry_bytes
    if memory_limit < needed:
        raise ValueError(f"memory_limit must be at least {needed} bytes, got {memory_limit}")
    return problem


def example_chunks(
    problem: PathProblem, bytes_per_example: int
) -> Iterator[tuple[slice, PathProblem]]:
    """Yield slices of the examples, with their problems, that fit into the memory limit."""
    size = min(_MOST_EXAMPLES, max(1, problem.memory_limit // bytes_per_example))
    for rows in progress(slices(len(problem), size), "paths"):
        yield rows, problem.take(rows)


def path_chunks(problem: PathProblem, partial: Float[Tensor, "example path state"]) -> list[slice]:
    """Slices of the paths that can be advanced within the memory limit."""
    bytes_per_path = len(partial) * problem.n_modules * problem.entry_bytes
    return slices(partial.shape[1], max(1, problem.memory_limit // bytes_per_path))


def check_integers(name: str, tensor: Tensor) -> None:
    """Raise a TypeError unless the tensor holds integers."""
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise TypeError(f"{name} must hold integers, got {tensor.dtype}")
