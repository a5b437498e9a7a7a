"""How often each search of compositional attention chooses each retrieval."""

from __future__ import annotations

from itertools import product

import numpy as np
import xarray as xr
from matplotlib.figure import Figure

from studies.report.panels import grid


def value_scores(result: xr.DataTree, *, n_retrievals: int) -> Figure | None:
    """Mean value scores by layer (rows) and group (columns), first cell of so many retrievals.

    The last row is the last token, the class token where there is one, in the last layer: what the
    answer is read from. None where there is no such cell.
    """
    if "value_scores" not in result.children:
        return None
    data = result["value_scores"].to_dataset()
    here = (data["n_retrievals"] == n_retrievals) & data["tightness"].notnull()
    if not here.any():
        return None
    cell = data.isel(cell=int(here.to_numpy().argmax()))
    one = cell["value_scores"].isel(retrieval=slice(n_retrievals))
    known = [name for name in one["group"].to_numpy() if ":" not in name]
    groups = [name for name in known if np.isfinite(one.sel(group=name)).any()]
    layers = one["layer"].to_numpy().tolist()
    rows = [*((layer, "all") for layer in layers), (layers[-1], "last")]
    figure, axes = grid(len(rows), len(groups), width=1.5, height=1.5)
    highest = float(one.max())
    for ((layer, token), group), axis in zip(product(rows, groups), axes.ravel(), strict=True):
        shares = one.sel(layer=layer, token=token, group=group).transpose("search", "retrieval")
        axis.imshow(shares, vmin=0, vmax=highest, cmap="viridis", aspect="auto")
        # Beyond so many the numbers would touch one another.
        for search, retrieval in np.argwhere(shares.to_numpy() >= 0) if n_retrievals <= 6 else ():
            share = shares[search, retrieval].item()
            colour, text = "white" if share < 0.6 * highest else "black", f"{share:.2f}"
            look = {"color": colour, "fontsize": 6, "ha": "center", "va": "center"}
            axis.text(retrieval, search, text.removeprefix("0"), **look)
        axis.set_xticks(range(n_retrievals))
        axis.set_yticks(range(len(shares)))
    for axis, group in zip(axes[0], groups, strict=True):
        axis.set_title(group, fontsize=8)
    for axis, (layer, token) in zip(axes[:, 0], rows, strict=True):
        of = f"layer {layer}" if token == "all" else f"layer {layer}, last token"
        axis.set_ylabel(f"{of}\nsearch", fontsize=7)
    for axis in axes[-1]:
        axis.set_xlabel("retrieval", fontsize=8)
    figure.colorbar(
        axes[0, 0].images[0],
        ax=axes,
        shrink=0.6,
        label=f"mean value score, seed {int(cell['seed'])}",
    )
    return figure
