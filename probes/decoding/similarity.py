"""Cosine similarity of mean codes by label."""

from collections.abc import Sequence

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float
from transformer_lens.utilities.statistics import derive_generator

from probes.checking import checked
from probes.decoding.cells import Layout, Table, cell_coordinates, grid_of, read_table
from probes.decoding.fitting import check_resamples, classes_of
from probes.statistics.intervals import Interval, bootstrap, interval_variables

Weights = Float[np.ndarray, "draw example"]


@checked
def compare_means(
    data: xr.Dataset,
    *,
    code: str = "code",
    label: str = "rule",
    samples: Sequence[str] = ("example",),
    cells: Sequence[str] = ("layer",),
    resamples: int = 200,
    seed: int = 0,
) -> xr.Dataset:
    """Compare the mean codes of labels, to find labels that share a code.

    The similarity of two labels is the cosine of the angle between their mean codes (Schug et al.
    2024, figure 5E). Where all codes have a common part, as with the positive weights of softmax
    attention, all similarities are near 1: so they are also computed without the mean of all codes.

    Args:
        data: holds `code` [samples..., cells..., features...], dims in any order, and `label`
            [samples...], integers or strings.
        code, label, samples, cells: as in `decode`.
        resamples: number of bootstrap resamples.
        seed: seed of the control and of the bootstrap.

    Returns:
        `similarity, similarity_low, similarity_high` [control, centring, *cells, first, second], in
        -1..1, with percentile bootstrap 95% intervals over examples; NaN where a mean is 0 but for
        rounding.
        `control`: "observed", or "shuffled", with labels permuted among samples, where all labels
        have the same code up to noise. `centring`: "none", or "mean", without the mean of all
        samples. Each cell dim has the additional coordinate "all"; `first` and `second` are labels.

    Raises:
        KeyError, TypeError, ValueError: as in `decode`.

    Example:
        >>> compare_means(data)["similarity"].sel(control="observed", layer="all", centring="none")
    """
    check_resamples(resamples)
    table = read_table("data", data, Layout(code, label, None, samples, cells))
    names = classes_of([table], label)
    number = np.searchsorted(names, table.label)
    order = torch.randperm(len(number), generator=derive_generator(seed, "control task")).numpy()
    coordinates = cell_coordinates(table)
    sizes = tuple(map(len, coordinates.values()))
    values = np.zeros((3, 2, 2, *sizes, len(names), len(names)))
    for control, labels in enumerate((number, number[order])):
        for cell, index in grid_of(table):
            features = table.features(cell).numpy()
            for centring, centre in enumerate((0.0, features.mean(0))):
                interval = _similarities(
                    table, features, centre, labels, len(names), resamples, seed
                )
                values[(slice(None), control, centring, *index)] = np.stack(interval)
    dims = ("control", "centring", *coordinates, "first", "second")
    long_name = f"cosine similarity of the means of {code} by {label}"
    interval = f"percentile bootstrap over examples, 95%, {resamples} resamples"
    return xr.Dataset(
        interval_variables("similarity", Interval(*values), dims, long_name=long_name),
        {
            "control": ["observed", "shuffled"],
            "centring": ["none", "mean"],
            **coordinates,
            "first": names,
            "second": names,
        },
        {"samples": len(number), "seed": seed, "interval": interval},
    )


def _similarities(
    table: Table,
    features: Float[np.ndarray, "sample feature"],
    centre: Float[np.ndarray, " feature"] | float,
    labels: np.ndarray,
    n_labels: int,
    resamples: int,
    seed: int,
) -> Interval:
    """Compute the cosine similarities [label, label] of the means of features, less the centre."""
    # Directions of means are those of sums, which are linear in the weights of examples.
    sums = np.zeros((table.n_examples, n_labels, features.shape[1]))
    np.add.at(sums, (table.example, labels), features - centre)
    flat = sums.reshape(table.n_examples, -1)
    # What may be rounding, of the features as they are.
    rounding = np.zeros((table.n_examples, n_labels))
    size = 100 * np.finfo(features.dtype).eps * np.linalg.norm(features, axis=1)
    np.add.at(rounding, (table.example, labels), size)

    def statistic(weights: Weights) -> Float[np.ndarray, "draw first second"]:
        totals = (weights @ flat).reshape(len(weights), n_labels, -1)
        lengths = np.linalg.norm(totals, axis=-1, keepdims=True)
        units = totals / np.where(lengths > (weights @ rounding)[..., None], lengths, np.nan)
        return units @ units.swapaxes(1, 2)

    return bootstrap(statistic, (table.n_examples,), resamples=resamples, seed=seed)
