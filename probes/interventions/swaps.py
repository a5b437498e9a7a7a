"""Pairs of examples in which a causal model exchanges one variable."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from probes.capturing.inputs import Inputs, count_examples
from probes.checking import checked

NO_ANSWER = -1


@dataclass(frozen=True, eq=False)
class Swaps:
    """Base and source examples, and the causal model's answers after exchanging a variable.

    Attributes:
        base: inputs of the model: a tensor [example, ...], or a tuple or mapping of them.
        source: the same layout; example i is the source of base example i.
        answers: by variable of the causal model, its answers to the base with the variable taken
            from the source: integers [example] or [example, answer], -1 where there is none.
        own: its answers to the base as it is, of the same shape.
        base_pos: [example] int64: the position in each base at which vectors are exchanged, for
            inputs in which it differs; None for hooks without positions, or for entries that are
            the same in all examples.
        source_pos: [example] int64: that in each source; None for that of the base.

    Raises:
        TypeError: answers or positions are not integers.
        ValueError: there is no variable, shapes differ, answers are below -1, or positions of the
            source are given without those of the base.

    Example:
        >>> Swaps(base, source, answers={"carry": with_carry_of_source}, own=base_answers)
    """

    base: Inputs
    source: Inputs
    answers: Mapping[str, Tensor]
    own: Tensor
    base_pos: Tensor | None = None
    source_pos: Tensor | None = None

    def __post_init__(self) -> None:
        n = count_examples("base", self.base)
        if count_examples("source", self.source) != n:
            raise ValueError(
                f"source must have the {n} examples of base, got "
                f"{count_examples('source', self.source)}"
            )
        if not self.answers:
            raise ValueError("answers must name at least one variable, got an empty mapping")
        for name, tensor in {"own": self.own, **self.answers}.items():
            if tensor.is_floating_point() or tensor.dtype == torch.bool:
                raise TypeError(f"answers of {name!r} must be integers, got {tensor.dtype}")
            if tensor.ndim not in (1, 2) or len(tensor) != n or tensor.shape != self.own.shape:
                raise ValueError(
                    f"answers of {name!r} must have the shape of own, ({n},) or ({n}, answers), "
                    f"got {tuple(tensor.shape)} and own {tuple(self.own.shape)}"
                )
            if len(tensor) and int(tensor.min()) < NO_ANSWER:
                raise ValueError(f"answers of {name!r} must be at least -1, got {tensor.min()}")
        if self.base_pos is None and self.source_pos is not None:
            raise ValueError("source_pos must come with base_pos, got None")
        for name, pos in {"base_pos": self.base_pos, "source_pos": self.source_pos}.items():
            if pos is not None and (pos.shape != (n,) or pos.dtype != torch.int64):
                raise ValueError(
                    f"{name} must be int64 of shape ({n},), got {pos.dtype} {tuple(pos.shape)}"
                )

    def __len__(self) -> int:
        return len(self.own)


@runtime_checkable
class Causal(Protocol):
    """A task as a causal model, such as `tasks.CausalTask`."""

    def counterfactual(self, batch: Any, latents: Mapping[str, Tensor]) -> Any:
        """Return the batch with other values of latents, and all that follows from them."""
        ...


@checked
def swap(
    task: Causal, base: Any, source: Any, variables: Mapping[str, Mapping[str, Tensor]]
) -> Swaps:
    """Exchange variables between two batches of a task, and compute the right answers.

    Args:
        task: a task with `counterfactual`, see `tasks.CausalTask`.
        base: a batch with `.inputs`, `.targets`, `.mask` and `.latents`.
        source: a batch of the same size.
        variables: by name, the latents of the base that are set, with the values that they are set
            to, mostly those of the source: `{"rule": {"rule": source.latents["rule"]}}`.

    Returns:
        The pairs. There is no answer (-1) where the mask of the counterfactual is False, or that of
        the base.

    Raises:
        KeyError, TypeError, ValueError: of `task.counterfactual`; or as in `Swaps`.

    Example:
        >>> base, source = (task.batch("id", index, 1000) for index in (0, 1))
        >>> rule = {"rule": source.latents["rule"]}
        >>> pairs = probes.swap(task, base, source, {"rule": rule})
    """

    def answers_of(batch: Any) -> Tensor:
        return torch.where(batch.mask & base.mask, batch.targets, NO_ANSWER)

    answers = {
        name: answers_of(task.counterfactual(base, latents)) for name, latents in variables.items()
    }
    return Swaps(base.inputs, source.inputs, answers, own=answers_of(base))
