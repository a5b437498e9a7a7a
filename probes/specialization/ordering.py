"""Modules in the order of the operations that they are assigned to."""

import numpy as np
import xarray as xr

from probes.checking import checked


@checked
def ordered_activation(scores: xr.Dataset) -> xr.DataArray:
    """Sort the modules of activation matrices by the operations assigned to them.

    Modules without an operation follow, the most used first. One module for each operation then
    gives a diagonal. Each layer and each network has a separate order.

    Args:
        scores: `assignment` [..., operation], `utilisation` [..., module] and `activation`
            [..., operation, module] of `score_specialization`, with any further dims.

    Returns:
        The activation, in 0..1; `module` is the position in the order.

    Raises:
        KeyError: a variable is missing.

    Example:
        >>> ordered_activation(scores).sel(layer="pooled")
    """
    # Assignments are positions of modules, not their labels.
    positions = "module", np.arange(scores.sizes["module"]), scores["module"].attrs
    scores = scores.assign_coords(module=positions)
    is_assigned = scores["assignment"] == scores["module"]
    last = scores.sizes["operation"] + 1 - scores["utilisation"]
    rank = is_assigned.argmax("operation").where(is_assigned.any("operation"), last)
    order = rank.copy(data=np.argsort(rank.to_numpy(), axis=rank.get_axis_num("module")))
    shares, order = xr.broadcast(scores["activation"], order)
    axis = shares.get_axis_num("module")
    order = order.transpose(*shares.dims).to_numpy()
    return shares.copy(data=np.take_along_axis(shares.to_numpy(), order, axis))
