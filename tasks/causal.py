"""Tasks as causal models: what an example would be if some of its latents had other values.

A task declares what each latent, the inputs and the targets are computed from: a structural causal
model. From the declaration follow the task's graph, its counterfactuals and which latents can be
set. Counterfactuals are those of Pearl 2009, "Causality", section 7.1: what no latent determines is
taken from the example, the latents are set, and their effects are computed anew.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, final

import torch
from jaxtyping import Bool
from torch import Tensor

from tasks.batch import Batch, Inputs
from tasks.common import require_choice, require_shape

if TYPE_CHECKING:
    import networkx


class Allowed(NamedTuple):
    """The values that a latent can be set to.

    Attributes:
        text: describes them; completes "must be".
        permits: maps new and old values [batch, ...] to a mask of the entries that are allowed.
    """

    text: str
    permits: Callable[[Tensor, Tensor], Bool[Tensor, "batch ..."]]


def integers(low: int, high: int) -> Allowed:
    """Return that all integers from `low` to `high` are allowed."""
    return Allowed(f"integers from {low} to {high}", lambda new, _: (new >= low) & (new <= high))


def numbers(low: float, high: float) -> Allowed:
    """Return that all numbers from `low` to `high` are allowed."""
    return Allowed(f"numbers from {low} to {high}", lambda new, _: (new >= low) & (new <= high))


FINITE = Allowed("finite numbers", lambda new, _: new.isfinite())
"""All numbers are allowed."""


class Entries(NamedTuple):
    """The entries of a variable before it is computed.

    Attributes:
        values: [batch, ...], the new value where an entry is set, else that of the example; several
            inputs are a tuple.
        is_set: bool, in the shape of the values.
    """

    values: Any
    is_set: Any


@dataclass(frozen=True, kw_only=True)
class Variable:
    """A latent, the inputs, the targets or the mask in the causal model of a task.

    Attributes:
        causes: the names of the variables that it is computed from.
        compute: maps the causes' values, each [batch, ...] on the CPU, to those of the variable;
            None: it has no causes.
        allowed: the values that it can be set to; None: it cannot be set.
        within: whether entries are computed from other entries of the same variable; `compute` then
            gets its `Entries` as the keyword argument `entries`. What it returns for set entries is
            not used.
        exogenous: whether there are entries that follow from no other latent, though it has causes.
    """

    causes: tuple[str, ...] = ()
    compute: Callable[..., Any] | None = None
    allowed: Allowed | None = None
    within: bool = False
    exogenous: bool = False


class CausalTask(ABC, Generic[Inputs]):
    """A task that answers what its examples would be if some latents had other values.

    For interchange interventions: a model runs on the inputs of `base`, with activations of its run
    on `source`; its output is compared with `wanted.targets` where `wanted.mask` is True.

    Example:
        >>> base, source = (task.batch("id", index, 100) for index in (0, 1))
        >>> wanted = task.counterfactual(base, {"rule": source.latents["rule"]})
    """

    @property
    @abstractmethod
    def _variables(self) -> dict[str, Variable]:
        """All latents, `inputs`, `targets` and, unless it is constant, `mask`; causes first."""

    @final
    @property
    def causal_graph(self) -> "networkx.DiGraph":
        """The causal graph: nodes are the latents, "inputs" and "targets", edges lead to effects.

        Attributes of a node:
        `can_be_set`: whether `counterfactual` accepts it;
        `exogenous`: whether other latents do not determine all of its entries. An example is
        determined by its exogenous latents.
        """
        import networkx  # imported here to keep `import tasks` fast

        graph = networkx.DiGraph()
        for name, variable in self._variables.items():
            if name != "mask":
                exogenous = variable.exogenous or not variable.causes
                can_be_set = variable.allowed is not None
                graph.add_node(name, can_be_set=can_be_set, exogenous=exogenous)
                graph.add_edges_from((cause, name) for cause in variable.causes)
        return graph

    @final
    def counterfactual(self, batch: Batch[Inputs], latents: Mapping[str, Tensor]) -> Batch[Inputs]:
        """Return the examples with other values of some latents, and everything that follows.

        An entry that differs from the batch's is set: it no longer follows from its causes. An
        equal entry is not. Of each example, variables whose causes change are computed anew; all
        others stay, among them what earlier counterfactuals have set.

        Args:
            batch: a batch of this task, or some of its examples, on any device.
            latents: new values of latents that can be set (see `causal_graph`), in the shape and
                dtype of the batch's. They are typically taken from another batch, or mixed with
                `torch.where`.

        Returns:
            A new batch, which shares the memory of what stays. Its mask is False where the task
            documents that an answer is not defined.

        Raises:
            ValueError: a latent is unknown or cannot be set, or its shape, dtype or values are not
                allowed; `batch` is of another task.

        Example:
            `task.counterfactual(base, {"rule": source.latents["rule"]}).targets`
        """
        self._require_can_be_set(batch, latents)
        base = batch.to("cpu")
        answers = {"inputs": base.inputs, "targets": base.targets, "mask": base.mask}
        old: dict[str, Any] = base.latents | answers
        nothing = torch.zeros(len(batch), dtype=torch.bool)
        new, changed = dict(old), {}
        for name, variable in self._variables.items():
            given = latents[name].to("cpu") if name in latents else old[name]
            differs = _differs(given, old[name])
            affected = sum((changed[cause] for cause in variable.causes), nothing)
            if variable.within:
                affected = affected | differs
            new[name] = _computed(variable, given, old[name], new, affected.nonzero()[:, 0])
            changed[name] = _differs(new[name], old[name])
        inputs, targets, mask = (new.pop(name) for name in answers)
        return Batch(inputs, targets, mask, new).to(batch.targets.device)

    @final
    def _completed(self, latents: Mapping[str, Tensor]) -> Batch[Inputs]:
        """Return the batch that follows from latents, the exogenous ones and any others."""
        values: dict[str, Any] = dict(latents)
        for name, variable in self._variables.items():
            if name not in values and variable.compute is not None:
                values[name] = variable.compute(*(values[cause] for cause in variable.causes))
        inputs, targets = values.pop("inputs"), values.pop("targets")
        all_true = torch.ones_like(targets, dtype=torch.bool)
        return Batch(inputs, targets, values.pop("mask", all_true), values)

    @final
    def _require_can_be_set(self, batch: Batch[Inputs], latents: Mapping[str, Tensor]) -> None:
        variables = self._variables
        missing = variables.keys() - batch.latents.keys() - {"inputs", "targets", "mask"}
        if missing:
            raise ValueError(
                f"batch must have the latents of {type(self).__name__}, got one without "
                f"{', '.join(sorted(missing))}"
            )
        settable = {
            name: variable.allowed
            for name, variable in variables.items()
            if variable.allowed is not None
        }
        for name, new in latents.items():
            causes = variables[name].causes if name in variables else ()
            if name not in settable and causes:
                raise ValueError(
                    f"latents must be of {', '.join(settable)}, got {name!r}, which follows from "
                    f"{', '.join(causes)}"
                )
            require_choice("latents", name, tuple(settable))
            argument, old = f"latents[{name!r}]", batch.latents[name]
            if not isinstance(new, Tensor) or new.dtype != old.dtype:
                kind = new.dtype if isinstance(new, Tensor) else type(new).__name__
                raise ValueError(f"{argument} must be a tensor of {old.dtype}, got {kind}")
            require_shape(argument, new, tuple(old.shape))
            new, old = new.to("cpu"), old.to("cpu")
            is_bad = (new != old) & ~settable[name].permits(new, old)
            if is_bad.any():
                example = _any(is_bad).nonzero()[0, 0].item()
                raise ValueError(
                    f"{argument} must be {settable[name].text} where it differs from the batch, "
                    f"got {new[is_bad][0].item()} in example {example}"
                )


def _computed(
    variable: Variable, given: Any, old: Any, values: dict[str, Any], rows: Tensor
) -> Any:
    """Return a variable with the values of some rows computed anew, and with the set entries."""
    new = old
    if variable.compute is not None and len(rows):
        causes = [_rows(values[cause], rows) for cause in variable.causes]
        own = {}
        if variable.within:
            own["entries"] = Entries(*(_rows(part, rows) for part in (given, _unequal(given, old))))
        new = _with_rows(old, rows, variable.compute(*causes, **own))
    return torch.where(given != old, given, new) if given is not old else new


# The inputs are a tensor or a tuple of several.


def _rows(value: Any, rows: Tensor) -> Any:
    return tuple(part[rows] for part in value) if isinstance(value, tuple) else value[rows]


def _with_rows(value: Any, rows: Tensor, new: Any) -> Any:
    if isinstance(value, tuple):
        parts = zip(value, new, strict=True)
        return tuple(_with_rows(part, rows, new_part) for part, new_part in parts)
    return value.index_copy(0, rows, new)


def _unequal(new: Any, old: Any) -> Any:
    if isinstance(new, tuple):
        return tuple(new_part != part for new_part, part in zip(new, old, strict=True))
    return new != old


def _differs(new: Any, old: Any) -> Bool[Tensor, " batch"]:
    if isinstance(new, tuple):
        return torch.stack([_any(part) for part in _unequal(new, old)]).any(0)
    return _any(_unequal(new, old))


def _any(mask: Bool[Tensor, "batch ..."]) -> Bool[Tensor, " batch"]:
    return mask[..., None].flatten(1).any(1)
