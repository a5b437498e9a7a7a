"""Vectors of activations as the only hook of a model, for interchange within subspaces."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from probes.capturing.hooking import HookedModel
from probes.capturing.inputs import Inputs, call, take_rows
from probes.checking import described
from probes.interventions.erasure import Entries
from probes.interventions.readers import check_read
from probes.interventions.sites import most_firings
from probes.interventions.swaps import Swaps


@dataclass(frozen=True)
class Vector:
    """A vector of an activation: some of its entries, at one firing of a hook.

    Attributes:
        hook: a hook name.
        entries: index of the entries, from the example dim on: `...` for all of them,
            `numpy.s_[:, -1]` for the last position of a residual stream, `numpy.s_[:, -1, 3]` for
            head 3 there. With positions that differ by example (`Swaps.base_pos`) the position is
            taken first, and the index is for what remains: `...`, or `numpy.s_[:, 3]`.
        step: number of the firing, from 0, of a module that a model applies several times; None
            for one that it applies once.

    Raises:
        ValueError: the step is negative.

    Example:
        >>> Vector("blocks.0.attn.hook_z", numpy.s_[:, -1, 3])
    """

    hook: str
    entries: Entries = ...
    step: int | None = None

    def __post_init__(self) -> None:
        if self.step is not None and self.step < 0:
            raise ValueError(f"step must be at least 0, got {self.step}")


class VectorModel:
    """A model as TransformerLens' interchange takes it: its only hook is a vector [batch, d].

    Its inputs are indices of pairs: `i` for base i, `len(swaps) + i` for source i.

    Args:
        model: the model.
        vector: which vector.
        swaps: the pairs.
        logits: maps the model's output to logits [example, class] or [example, answer, class].
    """

    HOOK = "vector"

    def __init__(
        self,
        model: HookedModel,
        vector: Vector,
        swaps: Swaps,
        logits: Callable[[Any], Tensor],
    ) -> None:
        self.model, self.vector, self.swaps, self.logits = model, vector, swaps, logits
        self._positions: Tensor | None = None
        self._largest = max(int(answers.max()) for answers in swaps.answers.values())

    @property
    def original_model(self) -> object:
        """The model, whose training flags TransformerLens checks."""
        return self.model

    def parameters(self) -> Iterator[nn.Parameter]:
        """The model's parameters."""
        assert isinstance(self.model, nn.Module)
        return self.model.parameters()

    def requires_grad_(self, requires_grad: bool) -> VectorModel:
        """Set whether the model's parameters have gradients."""
        assert isinstance(self.model, nn.Module)
        self.model.requires_grad_(requires_grad)
        return self

    def __call__(self, pairs: Int[Tensor, " batch"]) -> Float[Tensor, "batch class ..."]:
        """Task logits of these examples, the classes first, as the cross-entropy takes them."""
        swaps, n = self.swaps, len(self.swaps)
        is_source = bool((pairs >= n).any())
        inputs = take_rows(swaps.source if is_source else swaps.base, pairs % n)
        positions = swaps.base_pos
        if is_source and swaps.source_pos is not None:
            positions = swaps.source_pos
        self._positions = None if positions is None else positions[pairs % n]
        logits = self.logits(call(self.model, inputs))
        if logits.ndim not in (2, 3) or len(logits) != len(pairs):
            raise ValueError(
                f"logits must return [{len(pairs)} examples, class] or [.., answer, class], got "
                f"{tuple(logits.shape)}"
            )
        if self._largest >= logits.shape[-1]:
            raise ValueError(
                f"answers must be below the {logits.shape[-1]} classes of logits, got "
                f"{self._largest}"
            )
        return logits.movedim(-1, 1)

    @contextmanager
    def hooks(self, fwd_hooks: Sequence[tuple[str, Callable[..., Any]]]) -> Iterator[VectorModel]:
        """Attach functions of the vector."""
        ((_, function),) = fwd_hooks
        firing = -1

        def on_activation(activation: Tensor, hook: Any) -> Tensor | None:
            nonlocal firing
            firing += 1
            if firing and self.vector.step is None:
                raise RuntimeError(
                    f"hook {self.vector.hook!r} must fire once in each batch, or the vector must "
                    "have a step, it fired again"
                )
            if firing != (self.vector.step or 0):
                return None
            part = self._part(activation)
            try:
                vector = part[self.vector.entries]
            except (IndexError, TypeError) as error:
                raise ValueError(
                    "entries must be those of the activation, of shape "
                    f"{tuple(part.shape)}, at {self.vector.hook!r}, got "
                    f"{described(self.vector.entries)}: {error}"
                ) from None
            # Subspaces of half precision are computed in single precision.
            wide = vector.to(torch.promote_types(vector.dtype, torch.float32))
            changed = function(wide.reshape(len(vector), -1), hook)
            if changed is None:
                return None
            part = part.clone()
            part[self.vector.entries] = changed.reshape(vector.shape).to(part.dtype)
            if self._positions is None:
                return part
            whole = activation.clone()
            whole[self._rows(activation), self._positions.to(activation.device)] = part
            return whole

        with self.model.hooks(fwd_hooks=[(self.vector.hook, on_activation)]):
            yield self
        if firing < (self.vector.step or 0):
            raise RuntimeError(
                f"hook {self.vector.hook!r} must fire at step {self.vector.step} in each batch, "
                f"got a batch with {firing + 1} firings"
            )

    def _part(self, activation: Tensor) -> Tensor:
        if self._positions is None:
            return activation
        return activation[self._rows(activation), self._positions.to(activation.device)]

    @staticmethod
    def _rows(activation: Tensor) -> Tensor:
        return torch.arange(len(activation), device=activation.device)


def check_vector(
    model: HookedModel, name: str, vector: Vector, inputs: Inputs, batch_size: int
) -> None:
    """Check that a vector's hook fires at its step.

    Raises:
        KeyError: an unknown hook.
        RuntimeError: the hook does not fire, or not so often.
        ValueError: the hook is a glob of several, fires several times and there is no step, or
            nothing downstream reads its value.
    """
    fired = len(most_firings(model, inputs, [vector.hook], batch_size))
    if vector.hook not in model.hook_dict:
        raise ValueError(f"sites[{name!r}] must be one hook, got the glob {vector.hook!r}")
    if vector.step is None and fired > 1:
        raise ValueError(
            f"sites[{name!r}] must have a step, 0 to {fired - 1}, since {vector.hook!r} fires "
            f"{fired} times, got None"
        )
    if (vector.step or 0) >= fired:
        raise RuntimeError(
            f"sites[{name!r}] must have a step below {fired}, the number of firings of "
            f"{vector.hook!r}, got {vector.step}"
        )
    check_read(model, inputs, [[vector.hook]], batch_size)
