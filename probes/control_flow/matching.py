"""A control for control-flow graphs: graphs of another model with the same density."""

import numpy as np
import xarray as xr
from jaxtyping import Float

from probes.checking import checked
from probes.control_flow.graphs import NO_HEAD, extract_control_flow, ordered


@checked
def match_control_flow(
    graphs: xr.Dataset, gates: xr.DataArray, attention: xr.DataArray, valid: xr.DataArray
) -> xr.Dataset:
    """Extract graphs with about as many nodes and reads as given graphs, on the same examples.

    The gates of an untrained model are nearly closed and its attention is diffuse: at the usual
    thresholds its graphs would be empty, which is no control. So the thresholds are set to the
    quantiles of gates, and of what its nodes may read, that give the same numbers of nodes and
    reads. Gates and weights of 0 give none: a control with fewer others has fewer nodes or reads.

    Args:
        graphs: result of `extract_control_flow` for a trained model.
        gates: [example, step, pos], in 0..1, of the control.
        attention: [example, step, head, query_pos, key_pos], of the control.
        valid: [example, pos] bool.

    Returns:
        The result of `extract_control_flow` for the control; its attrs hold the thresholds.

    Raises:
        TypeError, ValueError: dims or sizes do not match the graphs; or as in
            `extract_control_flow`.

    Example:
        >>> matched = match_control_flow(graphs, other["gate"], other["attention"], valid)
        >>> score_control_flow(graphs, truth, untrained=matched)
    """
    values = ordered("gates", gates, ("example", "step", "pos"))
    update, valid_columns = graphs["update"].to_numpy(), ordered("valid", valid, ("example", "pos"))
    if values.shape != update.shape:
        raise ValueError(
            f"gates must have the shape {update.shape} of the graphs, got {values.shape}"
        )
    cells = np.broadcast_to(valid_columns[:, None], values.shape)
    gate_threshold = _least(values[cells], int(update[cells].sum()))

    weights = ordered("attention", attention, ("example", "step", "head", "query_pos", "key_pos"))
    # A node may read every other valid column with every head.
    nodes = (values >= gate_threshold) & cells
    others = valid_columns[:, None, :] & ~np.eye(valid_columns.shape[1], dtype=bool)
    may_read = nodes[:, :, None, :, None] & others[:, None, None]
    n_reads = int((graphs["head"].to_numpy() != NO_HEAD).sum())
    attention_threshold = _least(weights[np.broadcast_to(may_read, weights.shape)], n_reads)
    return extract_control_flow(
        gates,
        attention,
        valid,
        gate_threshold=gate_threshold,
        attention_threshold=attention_threshold,
    )


def _least(values: Float[np.ndarray, " value"], count: int) -> float:
    """The level that about this many of the values reach, or all above 0 if these are fewer."""
    above = values[values > 0]
    if len(above) == 0:
        return 1.0
    return float(max(np.quantile(values, max(1 - count / len(values), 0)), above.min()))
