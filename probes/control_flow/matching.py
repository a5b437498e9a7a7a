"""A control for control-flow graphs: those of another model, as dense."""

import numpy as np
import xarray as xr

from probes.control_flow.graphs import NO_HEAD, extract_control_flow, ordered


def match_control_flow(
    graphs: xr.Dataset, gates: xr.DataArray, attention: xr.DataArray, valid: xr.DataArray
) -> xr.Dataset:
    """Graphs with about as many nodes and reads as others, of the same examples.

    An untrained model's gates are nearly closed and its attention is spread: at usual thresholds
    its graphs would be empty, and no control. The thresholds become the quantiles at which the
    same shares of cells are nodes, and of attention weights are read.

    Args:
        graphs: of a trained model, of `extract_control_flow`.
        gates: [example, step, pos], in 0..1, of the control; see there.
        attention: [example, step, head, query_pos, key_pos], of the control.
        valid: [example, pos] bool.

    Returns:
        The control's graphs, as `extract_control_flow` gives them; its attrs hold the thresholds.

    Raises:
        TypeError, ValueError: dims or sizes that do not fit the graphs, or see there.

    Example:
        `score_control_flow(graphs, truth, untrained=match_control_flow(graphs, gate, attention,
        valid))`
    """
    values = ordered("gates", gates, ("example", "step", "pos"))
    update, real = graphs["update"].to_numpy(), ordered("valid", valid, ("example", "pos"))
    if values.shape != update.shape:
        raise ValueError(
            f"gates must have the shape {update.shape} of the graphs, got {values.shape}"
        )
    cells = np.broadcast_to(real[:, None], values.shape)
    gate_threshold = float(np.quantile(values[cells], 1 - update[cells].mean()))

    weights = ordered("attention", attention, ("example", "step", "head", "query_pos", "key_pos"))
    pairs = real[:, :, None] & real[:, None, :] & ~np.eye(real.shape[1], dtype=bool)
    others = weights[np.broadcast_to(pairs[:, None, None], weights.shape)]
    # An update node may read every other valid column, by every head.
    could_read = update.sum() * weights.shape[2] * (real.sum(axis=1).mean() - 1)
    reads = (graphs["head"].to_numpy() != NO_HEAD).sum()
    return extract_control_flow(
        gates,
        attention,
        valid,
        gate_threshold=gate_threshold,
        attention_threshold=float(np.quantile(others, 1 - reads / max(could_read, 1))),
    )
