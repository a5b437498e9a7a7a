"""What columns do at every step: gates, changes of state and attention, as graphs take them."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import xarray as xr
from torch import Tensor

from probes.capturing.capture import Batch, Quantity, capture
from probes.capturing.hooking import HookedModel

_COLUMN = ("example", "pos")
_NEVER_ZERO = 1e-12


def capture_control_flow(
    model: HookedModel,
    batches: Iterable[Batch],
    *,
    answer: Callable[[Any], Tensor],
    gates: str = "blocks.*.hook_gate",
    attention: str = "blocks.*.attn.hook_pattern",
    before: str = "blocks.*.hook_resid_pre",
    after: str = "blocks.*.hook_resid_post",
) -> xr.Dataset:
    """Keep what `extract_control_flow` makes graphs of, and the answers.

    Two quantities can say when a column computes: its gate is open, or its state changes. A gate
    that stays open while the update repeats what the column holds is of the first kind, not of the
    second.

    Args:
        model: an eager HookedRootModule or TransformerBridge.
        batches: objects with `.inputs` and `.latents`, of one width; at least one.
        answer: from the model's output to the answers, integers [example].
        gates: glob of the gates' hooks, one for each step, each [example, pos, d].
        attention: glob of the attention's hooks, each [example, head, query_pos, key_pos].
        before, after: globs of the columns' states, [example, pos, d], before and after a step.

    Returns:
        - `gate` [example, step, pos]: averaged over channels.
        - `change` [example, step, pos], in 0..1: |h' - h| / (|h'| + |h|).
        - `attention` [example, step, head, query_pos, key_pos].
        - `answer` [example].

    Raises:
        KeyError: an unknown hook; the message lists the nearest.
        TypeError, ValueError: a model that cannot be hooked or was compiled, no batch, shapes
            that do not fit.

    Example:
        ::

            columns = capture_control_flow(
                model, batch.parts(250), answer=lambda logits: logits[:, 0].argmax(-1)
            )
            valid = tasks.column_dataflow(batch)["valid"]
            graphs = extract_control_flow(columns["gate"], columns["attention"], valid)
    """
    state = torch.empty(0)

    def remember(h: Tensor) -> Tensor:
        nonlocal state
        state = h
        return h.norm(dim=-1)

    def change(h: Tensor) -> Tensor:
        whole = h.norm(dim=-1) + state.norm(dim=-1)
        return (h - state).norm(dim=-1) / whole.clamp(min=_NEVER_ZERO)

    weights = ("example", "head", "query_pos", "key_pos")
    about = "gate, averaged over channels", "share by which the step changes the state"
    quantities = {
        "gate": Quantity(gates, _COLUMN, lambda gate: gate.mean(-1), about[0]),
        "norm": Quantity(before, _COLUMN, remember),
        "change": Quantity(after, _COLUMN, change, about[1]),
        "attention": Quantity(attention, weights),
        "answer": Quantity(None, ("example",), answer),
    }
    data = capture(model, batches, quantities).rename(layer="step")
    return data[["gate", "change", "attention", "answer"]]
