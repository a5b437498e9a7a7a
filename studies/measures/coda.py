"""Measure of CoDA: what its matrices tanh(E), gate(N) and M are made of."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float

import mechanisms
import probes
from studies import engine
from studies.engine.trained import Measure
from studies.setups.quasi_attention import first_pairs, matrices, saturation, signs, words_of

QUANTITIES = {"affinity": "tanh(E)", "gate": "gate of N", "weight": "M"}
"""The factors of CoDA's attention weights and their product, with their names in figures."""

HOOKS = {"affinity": "affinity", "gate": "gate", "weight": "pattern"}
BINS = np.linspace(-1, 1, 41)
NEAR_ZERO = 0.1
"""Values below it in size are near zero: a tenth of those of a uniform distribution."""


def composition(trained: engine.Trained, n: int = 200) -> xr.Dataset | None:
    """The distributions of tanh(E), the gate and M, and their matrices for one example.

    Over all valid pairs of `n` examples of the setup's first split, `id` if it has one, all
    modules, layers and heads:

    - `distribution` [quantity, bin]: the share of values in each bin of [-1, 1];
    - `negative`, `positive`, `near_zero` [quantity]: the shares of values below 0, above 0, and
      nearer to 0 than `NEAR_ZERO`;
    - `correlation`: that of tanh(E) and M;

    and, of the first example, `matrix` [quantity, query_pos, key_pos], NaN at padding, in the first
    head of the last layer of the setup's `shown` module, with its tokens `query` and `key`. None
    for models without these matrices.

    Args:
        trained: the trained model.
        n: number of examples.

    Source: Tay et al. 2019, section 5 and Figure 2.
    """
    setup = trained.setup
    if setup.composition is None:
        return None
    batch = trained.batch(next(iter(setup.splits)), n)
    captured = probes.capture_places(
        trained.model,
        list(batch.parts(setup.evaluation_batch_size)),
        setup.places(batch),
        list(HOOKS.values()),
    )
    parts = [_by_quantity(data, setup.composition) for data in captured.values()]
    pairs = [_pairs(part) for part in parts]
    values = np.concatenate(pairs, axis=1)
    about = {"long_name": "share of pairs, all modules, layers and heads", "units": "1"}
    found = xr.Dataset(
        {
            "distribution": (("quantity", "bin"), _shares(values), about),
            "negative": ("quantity", (values < 0).mean(1), about),
            "positive": ("quantity", (values > 0).mean(1), about),
            "near_zero": ("quantity", (np.abs(values) < NEAR_ZERO).mean(1), about),
        },
        {"quantity": list(QUANTITIES), "bin": (BINS[:-1] + BINS[1:]) / 2},
    )
    with np.errstate(invalid="ignore", divide="ignore"):
        correlation = np.corrcoef(values[0], values[2])[0, 1]
    found["correlation"] = (), correlation, {"long_name": "correlation of tanh(E) and M"}
    shown = parts[list(captured).index(setup.shown)].isel(example=0, layer=-1, head=0, drop=True)
    shown = first_pairs(shown)
    shown = shown.where(shown["valid"]).drop_vars("valid")
    found["matrix"] = shown.to_dataarray("quantity").transpose("quantity", "query_pos", "key_pos")
    found["matrix"].attrs["long_name"] = "matrix of one example"
    for name, tokens in words_of(trained.task, batch, 0, found.sizes).items():
        about = {"long_name": f"word of each {name}"}
        found[name] = f"{name}_pos", tokens, about
    return found.assign_coords({dim: range(found.sizes[dim]) for dim in ("query_pos", "key_pos")})


MEASURES: Mapping[str, Measure] = {
    "signs": signs,
    "saturation": saturation,
    "composition": composition,
    "matrices": matrices,
}
"""The measures of all quasi-attention studies."""

ALONG_TRAINING = ("saturation", "composition")
"""Those that are also taken along training."""


def _by_quantity(data: xr.Dataset, composition: mechanisms.QuasiAttentionConfig) -> xr.Dataset:
    """The factors and M of one module, with its valid pairs, pairs first."""
    data = data.rename({hook: quantity for quantity, hook in HOOKS.items()})
    affinity = torch.from_numpy(data["affinity"].to_numpy())
    with_open_gates = composition.composed(affinity, torch.ones(()), None)
    data["affinity"] = data["affinity"].dims, with_open_gates.numpy()
    names = [*QUANTITIES, "valid"]
    return data[names].transpose("example", "query_pos", "key_pos", "layer", "head")


def _pairs(data: xr.Dataset) -> Float[np.ndarray, "quantity pair"]:
    """The values of all valid pairs."""
    valid = data["valid"].to_numpy()
    return np.stack([data[name].to_numpy()[valid].ravel() for name in QUANTITIES])


def _shares(values: Float[np.ndarray, "quantity pair"]) -> Float[np.ndarray, "quantity bin"]:
    """The share of values in each of `BINS`; the arctan, which goes beyond, is in the outer two."""
    counts = [np.histogram(row.clip(-1, 1), BINS)[0] for row in values]
    return np.array(counts) / values.shape[1]
