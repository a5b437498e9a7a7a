"""What the quasi-attention study looks at: signs, saturation, and matrices of single examples."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass

import xarray as xr

import probes
from studies.engine import Trained
from studies.setups.quasi_attention import PAIRS

PLACES = ("place", "layer", "head")
LIMITS = {"affinity": 2.0, "dissimilarity": 3.0}
"""Beyond these tanh is within 0.04 of its limits, and the sigmoid within 0.05."""

ABOUT = {
    "affinity_matrix": "E, centred",
    "gate_matrix": "gate of N",
    "pattern": "M",
    "sign": "planted sign",
    "query": "word of each query",
    "key": "word of each key",
}
"""What `Matrices` keeps."""


def joined(parts: Iterable[xr.Dataset], dim: str, labels: Iterable[str]) -> xr.Dataset:
    """Datasets along a new dim."""
    close = functools.partial(xr.concat, coords="minimal", compat="override")
    return close(list(parts), xr.Variable(dim, list(labels)), combine_attrs="drop_conflicts")


def signs_in(data: xr.Dataset) -> xr.Dataset:
    """See `probes.score_signedness`: [scale, layer, head, ...], of what was captured at a place.

    Of weights as they are, and `relative` to the 99th percentile of a head's: those of linear
    attention and HYLA have no limits, those behind a gate that is nearly closed are small.
    """
    pattern, valid = data["pattern"], data["valid"]
    top = abs(pattern).where(valid).quantile(0.99, PAIRS).drop_vars("quantile").clip(min=1e-12)
    both = xr.concat([pattern, pattern / top], xr.Variable("scale", ["weights", "relative"]))
    return probes.score_signedness(both, valid=valid, sign=data.get("sign"), resamples=200)


def saturation_in(data: xr.Dataset) -> xr.Dataset:
    """See `probes.score_saturation`: `saturated` [quantity, layer, head, side] beyond `LIMITS`."""
    score = functools.partial(probes.score_saturation, valid=data["valid"], resamples=200)
    found = [score(data[name], low=-top, high=top) for name, top in LIMITS.items()]
    return joined([one.drop_vars(["distribution", "bin"]) for one in found], "quantity", LIMITS)


@dataclass(frozen=True)
class Signs:
    """How signed attention is, everywhere, and whether its signs are those that were planted.

    Args:
        n: examples of each split.
    """

    n: int = 500

    def __call__(self, trained: Trained) -> xr.Dataset:
        """`probes.score_signedness` [split, weights, scale, place, layer, head, ...].

        `distribution` is the mean over places, layers and heads; `matched` the balanced accuracy of
        whether a token counts at all, with whatever sign.
        """
        models = {"trained": trained.model, "untrained": trained.untrained}
        parts = []
        for split in trained.setup.splits:
            batches = list(trained.batches(split, self.n))
            for model in models.values():
                places = trained.setup.captured(model, batches, "pattern")
                parts.append(joined(map(signs_in, places.values()), "place", places))
        halves = [joined(parts[number::2], "split", trained.setup.splits) for number in (0, 1)]
        found = joined(halves, "weights", models)
        found["distribution"] = found["distribution"].mean(PLACES, keep_attrs=True)
        if "confusion" in found:
            ignored = found["confusion"].sel(found=0)
            counted = 1 - ignored.sel(sign=[-1, 1]).mean("sign")
            found["matched"] = (counted + ignored.sel(sign=0, drop=True)) / 2
            found["matched"].attrs["long_name"] = "balanced accuracy of whether a token counts"
        return found


@dataclass(frozen=True)
class Saturation:
    """How much of CoDA's E and N lies where the functions are flat.

    Args:
        n: examples of each split.
    """

    n: int = 500

    def __call__(self, trained: Trained) -> xr.Dataset | None:
        """`saturated` [split, quantity, place, layer, head, side], and its `saturated_mean`."""
        setup, parts = trained.setup, []
        if setup.composition is None:
            return None
        for split in setup.splits:
            places = setup.captured(trained.model, list(trained.batches(split, self.n)), *LIMITS)
            parts.append(joined(map(saturation_in, places.values()), "place", places))
        found = joined(parts, "split", setup.splits)
        found["saturated_mean"] = found["saturated"].mean(PLACES)
        found["saturated_mean"].attrs["long_name"] = "share of pairs, mean over places and heads"
        return found


@dataclass(frozen=True)
class Matrices:
    """CoDA's E, its gate and M in single examples of `ood`: the paper's Figure 2.

    Args:
        n: examples.
    """

    n: int = 3

    def __call__(self, trained: Trained) -> xr.Dataset | None:
        """`affinity_matrix`, `gate_matrix`, `pattern` [example, layer, head, query_pos, key_pos].

        NaN where there is no token; `query`, `key`: their words; `sign`, where it is planted.
        """
        setup = trained.setup
        if setup.composition is None:
            return None
        batch = trained.batch("ood", self.n)
        data = setup.captured(trained.model, [batch], "affinity", "gate", "pattern")[setup.shown]
        data = data.where(data["valid"]).drop_vars("valid")
        data = data.rename(affinity="affinity_matrix", gate="gate_matrix")
        words = [setup.words(batch, example) for example in range(len(batch))]
        data["query"] = (("example", "query_pos"), [queries for queries, _ in words])
        data["key"] = (("example", "key_pos"), [keys for _, keys in words])
        for name in data.data_vars:
            data[name].attrs["long_name"] = ABOUT[str(name)]
        # Lines of other tasks have other lengths.
        return data.assign_coords({dim: range(data.sizes[dim]) for dim in PAIRS})
