"""Codes in the plane, by PCA or t-SNE."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import xarray as xr

Method = Literal["pca", "tsne"]


def project(
    code: xr.DataArray,
    *,
    method: Method | Sequence[Method] = "pca",
    samples: Sequence[str] = ("example",),
    components: int = 2,
    perplexity: float = 30.0,
    seed: int = 0,
) -> xr.Dataset:
    """Project a code to a few components (scikit-learn's PCA or t-SNE).

    The code is standardised first, feature by feature, as it is for `decode`, so that both look at
    the same geometry. t-SNE starts from the PCA and is repeatable for one `seed` on one machine.

    Args:
        code: [samples..., features...] in any order; coordinates that live on the sample dims
            (labels: `dataset.set_coords("rule")["code"]`) are kept for colouring.
        method: `pca`, or `tsne` (van der Maaten & Hinton 2008); or several of them.
        samples: the dims that together make one point; the other dims are its features.
        components: how many components to keep; 2 or 3 for t-SNE.
        perplexity: of t-SNE, below the number of points; PCA does not use it.
        seed: of t-SNE's and of a large PCA's random numbers.

    Returns:
        `projection` [samples..., component] with the coordinates of `code`; for PCA also
        `explained_variance_ratio` [component], in 0..1. Attrs hold method, seed, sizes. Of several
        methods, each has its label of the first dim `kind`.

    Raises:
        ValueError: no method or an unknown one, a sample dim that the code lacks, values that are
            not finite, too many components or too large a perplexity for the data.
    """
    if not isinstance(method, str) and method:
        joined = xr.concat(
            [
                project(
                    code,
                    method=one,
                    samples=samples,
                    components=components,
                    perplexity=perplexity,
                    seed=seed,
                )
                for one in method
            ],
            xr.Variable("kind", list(method)),
            combine_attrs="drop_conflicts",
        )
        joined["projection"].attrs["long_name"] = "standardised code in the plane"
        return joined
    if method not in ("pca", "tsne"):
        raise ValueError(f"method must be 'pca' or 'tsne', got {method!r}")
    missing = [dim for dim in samples if dim not in code.dims]
    if missing or not samples:
        raise ValueError(f"samples must be dims of the code {code.dims}, got {tuple(samples)}")
    features = [str(dim) for dim in code.dims if dim not in samples]
    ordered = code.transpose(*samples, *features)
    sizes = tuple(ordered.sizes[dim] for dim in samples)
    points = ordered.to_numpy().reshape(int(np.prod(sizes)), -1).astype(np.float64)
    n_points, n_features = points.shape
    if not np.isfinite(points).all():
        raise ValueError("code must be finite, but it holds NaN or infinite values")
    limit = 3 if method == "tsne" else min(n_points, n_features)
    if not 1 <= components <= limit:
        raise ValueError(f"components must be in 1..{limit} for {method}, got {components}")
    if method == "tsne" and not 0 < perplexity < n_points:
        raise ValueError(f"perplexity must be in (0, {n_points}), got {perplexity}")

    # Imported here: scikit-learn takes a second, and a wrong argument should not wait for it.
    from sklearn.decomposition import PCA
    from sklearn.manifold import TSNE
    from sklearn.preprocessing import StandardScaler

    standardised = StandardScaler().fit_transform(points)
    result = xr.Dataset(
        coords={
            name: coordinate
            for name, coordinate in ordered.coords.items()
            if set(coordinate.dims) <= set(samples)
        },
        attrs={
            "method": method,
            "seed": seed,
            "points": n_points,
            "features": n_features,
        },
    )
    if method == "pca":
        pca = PCA(n_components=components, random_state=seed)
        projected = pca.fit_transform(standardised)
        result["explained_variance_ratio"] = (
            ("component",),
            pca.explained_variance_ratio_,
            {"long_name": "share of the variance that the component explains", "units": "1"},
        )
        long_name = "principal components of the standardised code"
    else:
        # The automatic start needs as many features as components.
        start = "pca" if n_features >= components else "random"
        tsne = TSNE(n_components=components, perplexity=perplexity, init=start, random_state=seed)
        projected = tsne.fit_transform(standardised)
        result.attrs["perplexity"] = perplexity
        long_name = "t-SNE of the standardised code"
    result["projection"] = (
        (*samples, "component"),
        projected.reshape(*sizes, components),
        {"long_name": long_name},
    )
    return result.assign_coords(component=np.arange(components))
