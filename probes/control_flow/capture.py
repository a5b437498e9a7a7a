"""Capture gates, state changes and attention of all columns at every step."""

from collections.abc import Callable, Iterable
from typing import Any

import xarray as xr
from torch import Tensor

from probes.capturing.capture import capture
from probes.capturing.hooking import HookedModel, is_glob
from probes.capturing.passes import Batch
from probes.capturing.quantity import Quantity
from probes.checking import checked

_COLUMN = ("example", "pos")
_NEVER_ZERO = 1e-12


@checked
def capture_control_flow(
    model: HookedModel,
    batches: Iterable[Batch],
    *,
    answer: Callable[[Any], Tensor],
    gates: str | None = "blocks.*.hook_gate",
    attention: str | None = "blocks.*.attn.hook_pattern",
    before: str = "blocks.*.hook_resid_pre",
    after: str = "blocks.*.hook_resid_post",
) -> xr.Dataset:
    """Capture the inputs of `extract_control_flow`, and the answers of the model.

    Two quantities can define when a column computes: its gate is open, or its state changes. They
    differ for a gate that stays open while the update repeats the state of the column.

    Args:
        model: an eager HookedRootModule or TransformerBridge.
        batches: objects with `.inputs` and `.latents`, of one width; at least one.
        answer: maps the model's output to answers, integers [example].
        gates: glob of the gate hooks, one per step, or the name of one hook that fires in each
            step; each [example, pos, d]. None for a model without gates, whose result has no
            `gate`.
        attention: as `gates`, each [example, head, query_pos, key_pos]; None to leave `attention`
            out.
        before, after: as `gates`, the column states [example, pos, d] before and after a step.

    Returns:
        - `gate` [example, step, pos]: averaged over channels.
        - `change` [example, step, pos], in 0..1: |h' - h| / (|h'| + |h|).
        - `attention` [example, step, head, query_pos, key_pos].
        - `answer` [example].

    Raises:
        KeyError: an unknown hook; the message lists the nearest names.
        TypeError, ValueError: the model cannot be hooked or is compiled, there is no batch,
            `before` does not fire before `after` in each step, or shapes do not match.

    Example:
        >>> columns = capture_control_flow(
        ...     model, batch.parts(250), answer=lambda logits: logits[:, 0].argmax(-1)
        ... )
        >>> valid = tasks.column_dataflow(batch)["valid"]
        >>> graphs = extract_control_flow(columns["gate"], columns["attention"], valid)
    """
    if before == after:
        raise ValueError(f"before and after must be different hooks, got {before!r} twice")
    states: list[Tensor] = []

    def remember(h: Tensor) -> Tensor:
        states[:] = [h.clone()]  # a step may change it in place
        return h.norm(dim=-1)

    def change(h: Tensor) -> Tensor:
        if not states:
            raise ValueError(
                "each step must show a state before each state after, got "
                f"before={before!r}, after={after!r}: are they swapped?"
            )
        state = states.pop()
        total = h.norm(dim=-1) + state.norm(dim=-1)
        return (h - state).norm(dim=-1) / total.clamp(min=_NEVER_ZERO)

    weights = ("example", "head", "query_pos", "key_pos")
    long_names = "gate, averaged over channels", "share by which the step changes the state"
    quantities: dict[str, Quantity] = {}
    if gates is not None:
        quantities["gate"] = _stepped(gates, _COLUMN, lambda gate: gate.mean(-1), long_names[0])
    quantities["norm"] = _stepped(before, _COLUMN, remember)
    quantities["change"] = _stepped(after, _COLUMN, change, long_names[1])
    if attention is not None:
        quantities["attention"] = _stepped(attention, weights)
    quantities["answer"] = Quantity(None, ("example",), answer)
    data = capture(model, batches, quantities)
    data = data.rename(layer="step") if "layer" in data.dims else data
    if "step" not in data.coords:
        data = data.assign_coords(step=range(data.sizes["step"]))
    return data[[name for name in quantities if name != "norm"]]


def _stepped(
    hook: str,
    dims: tuple[str, ...],
    reduce: Callable[[Tensor], Tensor] | None = None,
    long_name: str = "",
) -> Quantity:
    fires = "once" if is_glob(hook) else "each"
    return Quantity(hook, dims, reduce, long_name, fires=fires)
