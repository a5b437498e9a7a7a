"""Hooks at which an intervention does nothing, because nothing reads their value."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from probes.capturing.hooking import HookedModel, evaluating
from probes.capturing.inputs import Inputs, call, take_rows
from probes.capturing.passes import reads_numbers


def check_read(
    model: HookedModel, inputs: Inputs, sites: Iterable[Collection[str]], batch_size: int = 1
) -> None:
    """Check that the output is computed from the values of hooks, as they fire in the first batch.

    A hook that is read passes, whether or not its value makes a difference.

    Args:
        model: the model.
        inputs: its inputs.
        sites: hooks that are changed together, of which one must be read.
        batch_size: size of the first batch.

    Raises:
        ValueError: nothing downstream reads what the hooks of a site show, such as attention
            weights that a module only returns.
    """
    sites = [*sites]
    batch, traces = take_rows(inputs, slice(batch_size)), _Traces()
    functions = [(name, partial(traces.mark, name=name)) for name in {*chain(*sites)}]
    with evaluating(model):
        with model.hooks(fwd_hooks=functions), traces:
            output = call(model, batch)
        reaching = traces.reaching(output)
        for site in sites:
            unread = traces.marked.intersection(site)
            if not unread or unread & reaching:
                continue
            if not _same(output, call(model, batch, dict.fromkeys(unread, _spoil))):
                continue
            raise ValueError(
                "hooks of interventions must have values that are read downstream, got "
                f"{', '.join(map(repr, sorted(unread)))}, which nothing reads, like the attention "
                "weights that some modules return: they can be captured, but not intervened on"
            )


class _Traces(TorchDispatchMode):
    """Notes from which hooks' values the tensors of a pass are computed, also by argmax and masks.

    It does not see sparse tensors, kernels that are not operators, `tolist()` and `numpy()`.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.marked: set[str] = set()
        # By storage, which views share.
        self._origins: dict[StorageWeakRef, set[str]] = {}
        # Of numbers and shapes, on which the course of the pass may depend.
        self._of_numbers: set[str] = set()

    def mark(self, activation: Any, hook: Any, name: str) -> Tensor | None:
        """A copy of a hook's value: only what is downstream of the hook reads it."""
        if not isinstance(activation, Tensor):
            return None
        self.marked.add(name)
        copy = activation.clone()
        self._add([copy], {name})
        return copy

    def reaching(self, output: Any) -> set[str]:
        """The hooks from whose values an output is computed; all if it hides its tensors."""
        leaves = tree_leaves(output)
        if not all(isinstance(leaf, Tensor | int | float | str | None) for leaf in leaves):
            return self.marked
        return self._of_numbers | self._origins_of(leaves)

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), settings: Any = None
    ) -> Any:
        settings = settings or {}
        given = tree_leaves((arguments, settings))
        origins = self._origins_of(given)
        result = function(*arguments, **settings)
        if origins:
            schema = getattr(function, "_schema", None)
            written = tree_leaves(result) + (given if schema and schema.is_mutable else [])
            self._add(written, origins)
            if reads_numbers(function, arguments):
                self._of_numbers |= origins
        return result

    def _add(self, values: Iterable[Any], origins: set[str]) -> None:
        for storage in _storages(values):
            self._origins.setdefault(storage, set()).update(origins)

    def _origins_of(self, values: Iterable[Any]) -> set[str]:
        return set().union(*(self._origins.get(storage, ()) for storage in _storages(values)))


def _storages(values: Iterable[Any]) -> list[StorageWeakRef]:
    return [
        StorageWeakRef(value.untyped_storage())
        for value in values
        if isinstance(value, Tensor) and value.layout == torch.strided
    ]


def _spoil(activation: Tensor, step: int) -> Tensor:
    value = torch.nan if activation.is_floating_point() or activation.is_complex() else 0
    return torch.full_like(activation, value)


def _same(first: Any, second: Any) -> bool:
    return all(
        torch.equal(one, other)
        for one, other in zip(tree_leaves(first), tree_leaves(second), strict=True)
        if isinstance(one, Tensor)
    )
