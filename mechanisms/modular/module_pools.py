"""Pools of modules: small functions of the same operands that are computed together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from einops import einsum
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import relu

from mechanisms.initialization import lecun_normal, zeros
from mechanisms.layers.perceptrons import perceptrons
from mechanisms.validation import check_sizes

OPERATIONS = {
    "add": lambda x, y: x + y,
    "subtract": lambda x, y: x - y,
    "multiply": lambda x, y: x * y,
    "square_first": lambda x, y: x * x,
    "square_second": lambda x, y: y * y,
    "add_multiply": lambda x, y: (x + y) * x,
    "minimum": lambda x, y: torch.minimum(x, y),
    "maximum": lambda x, y: torch.maximum(x, y),
    "add_subtract": lambda x, y: (x + y) - x,
    "add_double": lambda x, y: x + 2 * y,
    "sin_first": lambda x, y: x.sin(),
    "sin_second": lambda x, y: y.sin(),
    "cos_first": lambda x, y: x.cos(),
    "cos_second": lambda x, y: y.cos(),
    "cos_sum": lambda x, y: (x + y).cos(),
}
"""Operations on two numbers, in the order of Ostapenko et al. 2022."""


class ModulePool(Protocol):
    """Modules, each of which maps operands to a number."""

    def bytes_per_result(self, *, shared: bool) -> int:
        """Peak memory per output number; `shared`: all modules have the same operands."""
        ...

    def __call__(
        self, operands: Float[Tensor, "*batch #module operand"]
    ) -> Float[Tensor, "*batch module"]:
        """The result of each module; with module size 1, all modules have the same operands."""
        ...

    def selected(
        self,
        operands: Float[Tensor, "batch one_or_module operand"],
        index: Int[Tensor, " batch"],
    ) -> Float[Tensor, " batch"]:
        """The result of the module `index` of each example."""
        ...


class PoolConfig(Protocol):
    """A frozen config that builds a pool of modules."""

    def build(
        self, n_modules: int, d_operands: int, *, generator: torch.Generator | None = None
    ) -> ModulePool:
        """The pool of `n_modules` modules with `d_operands` operands each."""
        ...


@dataclass(frozen=True, kw_only=True)
class MlpPoolConfig:
    """Configuration of an `MlpPool`: width and depth of its modules.

    Args:
        d_mlp: width of the hidden layers of each module.
        depth: number of linear maps, at least 2. With the default of 2 a pool of 30 modules of
            width 300 has as many hidden units as one network of width 9,000, to which
            Ostapenko et al. 2022 compare it.

    Raises:
        ValueError: a setting is not allowed.

    Example:
        >>> pool = MlpPoolConfig(d_mlp=32).build(n_modules=4, d_operands=2)
        >>> pool(torch.randn(3, 1, 2)).shape  # all modules have the same operands
        torch.Size([3, 4])
    """

    d_mlp: int = 300
    depth: int = 2

    def __post_init__(self):
        check_sizes(self, "d_mlp")
        check_sizes(self, "depth", minimum=2)

    def build(
        self, n_modules: int, d_operands: int, *, generator: torch.Generator | None = None
    ) -> ModulePool:
        """The pool of `n_modules` perceptrons."""
        return MlpPool(self, n_modules, d_operands, generator=generator)


class MlpPool(nn.Module):
    """`n_modules` ReLU perceptrons with stacked parameters and one output each.

    Parameters: `W_in` [module, operand, d_mlp], depth - 2 times `W_hidden` [module, d_mlp, d_mlp],
    `W_out` [module, d_mlp] and their biases.

    Example:
        >>> pool, operands = MlpPool(MlpPoolConfig(d_mlp=32), 4, 2), torch.randn(3, 1, 2)
        >>> result = pool.selected(operands, torch.tensor([0, 3, 1]))  # of one module each
        >>> torch.allclose(result[1], pool(operands)[1, 3], atol=1e-5)
        True
    """

    def __init__(
        self,
        config: MlpPoolConfig,
        n_modules: int,
        d_operands: int,
        *,
        generator: torch.Generator | None = None,
    ):
        super().__init__()
        d_mlp, n_hidden_maps = config.d_mlp, config.depth - 2
        # Biases are drawn like weights, so that with few operands not all kinks are at zero.
        self.W_in = lecun_normal(
            n_modules, d_operands, d_mlp, fan_in=d_operands, generator=generator
        )
        self.b_in = lecun_normal(n_modules, d_mlp, fan_in=d_operands, generator=generator)
        self.W_hidden = nn.ParameterList(
            lecun_normal(n_modules, d_mlp, d_mlp, fan_in=d_mlp, generator=generator)
            for _ in range(n_hidden_maps)
        )
        self.b_hidden = nn.ParameterList(zeros(n_modules, d_mlp) for _ in range(n_hidden_maps))
        self.W_out = lecun_normal(n_modules, d_mlp, fan_in=d_mlp, generator=generator)
        self.b_out = zeros(n_modules)

    def bytes_per_result(self, *, shared: bool) -> int:
        """Peak memory per output number; `shared`: all modules have the same operands."""
        if shared and not len(self.W_hidden):
            return self.W_out.element_size()
        return 3 * self.W_out.shape[1] * self.W_out.element_size()

    def forward(
        self, operands: Float[Tensor, "*batch #module operand"]
    ) -> Float[Tensor, "*batch module"]:
        """The result of each module; with module size 1, all modules have the same operands."""
        if operands.shape[-2] == 1 and not len(self.W_hidden):
            rows = operands.flatten(0, -2)
            out = perceptrons(rows, self.W_in, self.b_in, self.W_out) + self.b_out
            return out.unflatten(0, operands.shape[:-2])
        operands = operands.expand(*operands.shape[:-2], len(self.b_out), -1)
        x = einsum(operands, self.W_in, "... module operand, module operand mlp -> ... module mlp")
        x = relu(x + self.b_in)
        for weight, bias in zip(self.W_hidden, self.b_hidden, strict=True):
            x = einsum(x, weight, "... module mlp, module mlp out -> ... module out") + bias
            x = relu(x)
        return einsum(x, self.W_out, "... module mlp, module mlp -> ... module") + self.b_out

    def selected(
        self,
        operands: Float[Tensor, "batch one_or_module operand"],
        index: Int[Tensor, " batch"],
    ) -> Float[Tensor, " batch"]:
        """The result of the module `index` of each example.

        With depth > 2 all modules are computed: gathering their hidden weights would cost more.
        """
        if len(self.W_hidden):
            return self(operands).gather(-1, index[:, None])[:, 0]
        rows = torch.arange(len(index), device=index.device)
        module_operands = operands[rows, index] if operands.shape[1] > 1 else operands[:, 0]
        x = einsum(
            module_operands, self.W_in[index], "batch operand, batch operand mlp -> batch mlp"
        )
        x = relu(x + self.b_in[index])
        return (x * self.W_out[index]).sum(-1) + self.b_out[index]


@dataclass(frozen=True, kw_only=True)
class OperationPoolConfig:
    """Configuration of an `OperationPool`: with true operations only the routing is learned.

    Args:
        names: names of `OPERATIONS`, in the order of the modules.

    Raises:
        ValueError: an operation is unknown, or there is none.

    Example:
        >>> pool = OperationPoolConfig(names=("add", "multiply")).build(n_modules=2, d_operands=2)
        >>> pool(torch.tensor([[[3.0, 4.0]]]))
        tensor([[ 7., 12.]])
    """

    names: tuple[str, ...]

    def __post_init__(self):
        unknown = [name for name in self.names if name not in OPERATIONS]
        if unknown or not self.names:
            raise ValueError(f"names must be among {', '.join(OPERATIONS)}, got {self.names}")

    def build(
        self, n_modules: int, d_operands: int, *, generator: torch.Generator | None = None
    ) -> ModulePool:
        """The pool of the named operations.

        Raises:
            ValueError: n_modules is not the number of names, or d_operands is not 2.
        """
        if n_modules != len(self.names):
            raise ValueError(f"n_modules must be {len(self.names)}, got {n_modules}")
        if d_operands != 2:
            raise ValueError(f"d_operands must be 2 for operations, got {d_operands}")
        return OperationPool(self, generator=generator)


class OperationPool(nn.Module):
    """The operations of a config as modules, without parameters; `generator` is not used.

    Example:
        >>> pool = OperationPool(OperationPoolConfig(names=("subtract", "maximum")))
        >>> operands = torch.tensor([[[3.0, 4.0]], [[3.0, 4.0]]])
        >>> pool.selected(operands, torch.tensor([0, 1]))
        tensor([-1.,  4.])
    """

    def __init__(self, config: OperationPoolConfig, *, generator: torch.Generator | None = None):
        super().__init__()
        self.names = config.names

    def bytes_per_result(self, *, shared: bool) -> int:
        """Peak memory per output number; `shared`: all modules have the same operands."""
        return 4

    def forward(
        self, operands: Float[Tensor, "*batch #module operand"]
    ) -> Float[Tensor, "*batch module"]:
        """The result of each operation; with module size 1, all have the same operands."""
        operands = operands.expand(*operands.shape[:-2], len(self.names), 2)
        return torch.stack(
            [
                OPERATIONS[name](operands[..., module, 0], operands[..., module, 1])
                for module, name in enumerate(self.names)
            ],
            dim=-1,
        )

    def selected(
        self,
        operands: Float[Tensor, "batch one_or_module operand"],
        index: Int[Tensor, " batch"],
    ) -> Float[Tensor, " batch"]:
        """The result of the operation `index` of each example."""
        return self(operands).gather(-1, index[:, None])[:, 0]
