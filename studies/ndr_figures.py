"""The figures of the control-flow study, drawn from its result alone."""

from __future__ import annotations

import xarray as xr
from matplotlib.figure import Figure


def figures(result: xr.DataTree) -> dict[str, Figure]:
    """All figures by file name, from what `result.nc` holds."""
    return {}
