"""Networks with a path of modules: their interface, losses, limits, and numbered paths."""

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

BUDGET = 10**6
"""Maximum of module applications per example."""

MEMORY_LIMIT = 2**30
"""Maximum of memory for simultaneous computations, in bytes."""

PathLoss = Callable[[Tensor, Tensor], Tensor]
"""Maps answers [example, path, state] and targets [example, ...] to losses [example, path]."""

PathBound = Callable[[Tensor, int, Tensor, Tensor], Tensor]
"""Maps (inputs, layer, partial results [example, path, state], targets) to lower bounds of the loss
of any completion [example, path]. `layer` is the next one, as in `PathModel.advance`."""


@runtime_checkable
class PathModel(Protocol):
    """A network whose layers each apply one module of a pool.

    A path is the sequence of modules (m_1, ..., m_L); the result of a layer depends only on the
    inputs, the partial result and the module.

    Example:
        >>> isinstance(model, PathModel), model.n_layers, model.n_modules
        (True, 2, 4)
        >>> results = model.advance(inputs, 0, model.begin(inputs))
        >>> results.shape  # [example, path, module, state]: of each module of the first layer
        torch.Size([300, 1, 4, 1])
    """

    @property
    def n_layers(self) -> int:
        """Number of layers L, the length of a path."""
        ...

    @property
    def n_modules(self) -> int:
        """Number of modules M to choose from in each layer."""
        ...

    @property
    def bytes_per_result(self) -> int:
        """Temporary memory of `advance` for each example x path x module, in bytes."""
        ...

    def begin(self, inputs: Tensor) -> Float[Tensor, "example 1 state"]:
        """Compute the partial result before the first layer."""
        ...

    def advance(
        self, inputs: Tensor, layer: int, partial: Float[Tensor, "example path state"]
    ) -> Float[Tensor, "example path module state"]:
        """Apply each module of a layer to each partial result; the last layer gives answers."""
        ...


def squared_error(
    answers: Float[Tensor, "example path state"], targets: Float[Tensor, "example state"]
) -> Float[Tensor, "example path"]:
    """Compute the squared error, summed over the state.

    Raises:
        ValueError: targets do not have the shape of the answers.
    """
    expected = (len(answers), answers.shape[-1])
    if targets.shape != expected:
        raise ValueError(
            f"targets must have the shape {expected} of the answers, [example, state], for the "
            f"squared error, got {tuple(targets.shape)}"
        )
    return (answers - targets[:, None]).square().sum(-1)


def path_numbers(paths: Int[Tensor, "*row layer"], n_modules: int) -> Int[Tensor, "*row"]:
    """Number the paths; the module of the last layer changes fastest."""
    return (paths * _place_values(paths.shape[-1], n_modules, paths.device)).sum(-1)


def paths_of(
    numbers: Int[Tensor, "*row"], n_layers: int, n_modules: int
) -> Int[Tensor, "*row layer"]:
    """Convert numbers to paths, the inverse of `path_numbers`."""
    return numbers[..., None] // _place_values(n_layers, n_modules, numbers.device) % n_modules


def _place_values(n_layers: int, n_modules: int, device: torch.device) -> Int[Tensor, " layer"]:
    return n_modules ** torch.arange(n_layers - 1, -1, -1, device=device)
