"""A control for control-flow graphs: graphs of another model with the same density."""

import numpy as np
import xarray as xr

from probes.checking import checked
from probes.control_flow.graphs import NO_HEAD, extract_control_flow, ordered


@checked
def match_control_flow(
    graphs: xr.Dataset, gates: xr.DataArray, attention: xr.DataArray, valid: xr.DataArray
) -> xr.Dataset:
    """Extract graphs with about as many nodes and reads as given graphs, on the same examples.

    The gates of an untrained model are nearly closed and its attention is diffuse: at the usual
    thresholds its graphs would be empty, which is no control. So the thresholds are set to the
    quantiles that give the same shares of nodes among cells and of reads among attention weights.

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
    gate_threshold = float(np.quantile(values[cells], 1 - update[cells].mean()))

    weights = ordered("attention", attention, ("example", "step", "head", "query_pos", "key_pos"))
    pairs = (
        valid_columns[:, :, None]
        & valid_columns[:, None, :]
        & ~np.eye(valid_columns.shape[1], dtype=bool)
    )
    pair_weights = weights[np.broadcast_to(pairs[:, None, None], weights.shape)]
    # An update node may read every other valid column with every head.
    possible_reads = update.sum() * weights.shape[2] * (valid_columns.sum(axis=1).mean() - 1)
    reads = (graphs["head"].to_numpy() != NO_HEAD).sum()
    return extract_control_flow(
        gates,
        attention,
        valid,
        gate_threshold=gate_threshold,
        attention_threshold=float(np.quantile(pair_weights, 1 - reads / max(possible_reads, 1))),
    )
