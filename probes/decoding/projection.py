"""Projections of codes to a few components by PCA or t-SNE."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import xarray as xr

from probes.checking import checked

Method = Literal["pca", "tsne"]

# Points or features up to which principal components are exact, which takes seconds at most.
_EXACT = 2000


@checked
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

    Features are standardised first, as in `decode`, so that both see the same geometry. t-SNE
    starts from the PCA and is reproducible for one `seed` on one machine. If all points are the
    same, all are at 0.

    Args:
        code: [samples..., features...] in any order; coordinates along the sample dims (such as
            labels: `dataset.set_coords("rule")["code"]`) are kept for colouring.
        method: `pca`, or `tsne` (van der Maaten & Hinton 2008); or several of them.
        samples: dims that together index a point; the other dims are its features.
        components: number of components to keep; 2 or 3 for t-SNE.
        perplexity: perplexity of t-SNE, below the number of points; not used by PCA.
        seed: seed of t-SNE, and of PCA's solver for data with more than 2,000 points and features,
            whose components are approximate.

    Returns:
        `projection` [samples..., component] with the coordinates of `code`; for PCA also
        `explained_variance_ratio` [component], in 0..1. Attrs hold method, seed, sizes. Several
        methods are labelled along the first dim `kind`.

    Raises:
        TypeError: values are not real numbers.
        ValueError: the method is missing or unknown, the code lacks a sample dim or is empty,
            values are not finite, or there are too many components or too large a perplexity for
            the data.

    Example:
        >>> project(data.set_coords("rule")["code"], method=["pca", "tsne"])
    """
    if not isinstance(method, str) and method:
        stacked = xr.concat(
            [
                project(
                    code,
                    method=single_method,
                    samples=samples,
                    components=components,
                    perplexity=perplexity,
                    seed=seed,
                )
                for single_method in method
            ],
            xr.Variable("kind", list(method)),
            combine_attrs="drop_conflicts",
        )
        stacked["projection"].attrs["long_name"] = "standardised code in the plane"
        return stacked
    if method not in ("pca", "tsne"):
        raise ValueError(f"method must be 'pca' or 'tsne', got {method!r}")
    missing = [dim for dim in samples if dim not in code.dims]
    if missing or not samples:
        raise ValueError(f"samples must be dims of code, {code.dims}, got {tuple(samples)}")
    features = [str(dim) for dim in code.dims if dim not in samples]
    if code.size == 0:
        raise ValueError(f"code must not be empty, got sizes {dict(code.sizes)}")
    if code.dtype.kind not in "biuf":
        raise TypeError(f"code must hold real numbers, got {code.dtype}")
    ordered = code.transpose(*samples, *features)
    sizes = tuple(ordered.sizes[dim] for dim in samples)
    points = ordered.to_numpy().reshape(int(np.prod(sizes)), -1).astype(np.float64)
    n_points, n_features = points.shape
    if not np.isfinite(points).all():
        raise ValueError("code must be finite, got NaN or infinite values")
    limit = 3 if method == "tsne" else min(n_points, n_features)
    if not 1 <= components <= limit:
        raise ValueError(f"components must be in 1..{limit} for {method}, got {components}")
    if method == "tsne" and not 0 < perplexity < n_points:
        raise ValueError(f"perplexity must be in (0, {n_points}), got {perplexity}")

    # Imported here because scikit-learn takes a second to import.
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
    # scikit-learn's PCA divides by the variance, and its t-SNE crashes on the result.
    # Features that vary have variance 1, others are 0 up to rounding.
    are_same = bool(np.abs(standardised).max() < 1e-6)
    projected = np.zeros((n_points, components))
    if method == "pca":
        solver = "covariance_eigh" if n_features <= n_points else "full"
        if min(n_points, n_features) > _EXACT:
            solver = "auto"
        pca = PCA(n_components=components, svd_solver=solver, random_state=seed)
        ratio = np.zeros(components)
        if not are_same:
            projected = pca.fit_transform(standardised)
            ratio = pca.explained_variance_ratio_
        result["explained_variance_ratio"] = (
            ("component",),
            ratio,
            {"long_name": "share of the variance that the component explains", "units": "1"},
        )
        long_name = "principal components of the standardised code"
    else:
        # PCA initialisation needs as many features as components.
        start = "pca" if n_features >= components else "random"
        tsne = TSNE(n_components=components, perplexity=perplexity, init=start, random_state=seed)
        if not are_same:
            projected = tsne.fit_transform(standardised)
        result.attrs["perplexity"] = perplexity
        long_name = "t-SNE of the standardised code"
    result["projection"] = (
        (*samples, "component"),
        projected.reshape(*sizes, components),
        {"long_name": long_name},
    )
    return result.assign_coords(component=np.arange(components))
