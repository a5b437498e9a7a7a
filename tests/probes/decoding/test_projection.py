import numpy as np
import pytest
import xarray as xr

from probes import project


@pytest.fixture
def code():
    rng = np.random.default_rng(0)
    rule = np.repeat([0, 1, 2], 40)
    values = 0.3 * rng.standard_normal((120, 2, 4)) + 5 * np.eye(12)[rule, :8].reshape(120, 2, 4)
    data = xr.Dataset(
        {"code": (("example", "layer", "head"), values), "rule": ("example", rule)},
        coords={"layer": [0, 1]},
    )
    return data.set_coords("rule")["code"]


def between_over_within(projection, rule):
    centres = np.stack([projection[rule == r].mean(axis=0) for r in range(3)])
    within = max(projection[rule == r].std(axis=0).max() for r in range(3))
    between = min(np.linalg.norm(centres[a] - centres[b]) for a, b in ((0, 1), (0, 2), (1, 2)))
    return between / within


@pytest.mark.parametrize("method", ["pca", "tsne"])
def test_clusters_stay_apart_and_repeat(code, method):
    first, second = (project(code, method=method, seed=3) for _ in range(2))
    assert first.identical(second)
    assert first["projection"].dims == ("example", "component")
    assert first["rule"].to_numpy().tolist() == code["rule"].to_numpy().tolist()
    assert "layer" not in first.coords
    assert between_over_within(first["projection"].to_numpy(), code["rule"].to_numpy()) > 3
    assert first["projection"].attrs["long_name"]


def test_pca_is_the_singular_value_decomposition(code):
    result = project(code, components=3)
    flat = code.to_numpy().reshape(120, 8)
    flat = (flat - flat.mean(axis=0)) / flat.std(axis=0)
    u, s, _ = np.linalg.svd(flat, full_matrices=False)
    np.testing.assert_allclose(np.abs(result["projection"]), np.abs(u * s)[:, :3], atol=1e-6)
    np.testing.assert_allclose(
        result["explained_variance_ratio"], (s**2 / (s**2).sum())[:3], atol=1e-9
    )


def test_several_sample_dims(code):
    result = project(code.transpose("head", "layer", "example"), samples=("example", "layer"))
    assert result["projection"].sizes == {"example": 120, "layer": 2, "component": 2}
    assert result["layer"].to_numpy().tolist() == [0, 1]
    alone = project(code, samples=("example", "layer"))
    np.testing.assert_allclose(result["projection"], alone["projection"], atol=1e-9)


def test_several_methods_have_their_labels(code):
    both = project(code, method=("tsne", "pca"), seed=3)
    assert both["projection"].dims == ("kind", "example", "component")
    assert both["rule"].dims == ("example",)
    for method in ("pca", "tsne"):
        alone = project(code, method=method, seed=3)["projection"]
        np.testing.assert_array_equal(both["projection"].sel(kind=method), alone)
    assert both["projection"].attrs["long_name"]


def test_invalid_input_is_refused(code):
    with pytest.raises(ValueError, match=r"\(\)"):
        project(code, method=())
    with pytest.raises(ValueError, match="'umap'"):
        project(code, method="umap")
    with pytest.raises(ValueError, match="samples must be dims"):
        project(code, samples=("pos",))
    with pytest.raises(ValueError, match=r"components must be in 1\.\.8"):
        project(code, components=9)
    with pytest.raises(ValueError, match="perplexity"):
        project(code, method="tsne", perplexity=120)
    with pytest.raises(ValueError, match="NaN"):
        project(code.where(code["layer"] > 0))


@pytest.mark.parametrize("shape", [(200, 1024), (600, 100)])
def test_components_of_noise_are_exact_too(shape):
    """Its variances are so alike that a randomised solver does not tell them apart."""
    noise = np.random.default_rng(0).standard_normal(shape)
    found = project(xr.DataArray(noise, dims=("example", "unit")))["projection"].to_numpy()
    scaled = (noise - noise.mean(axis=0)) / noise.std(axis=0)
    left, singular, _ = np.linalg.svd(scaled, full_matrices=False)
    expected = left[:, :2] * singular[:2]
    signs = np.sign((found * expected).sum(axis=0))
    np.testing.assert_allclose(found * signs, expected, atol=1e-8)


@pytest.mark.parametrize(
    ("code", "error", "message"),
    [
        (
            np.zeros((0, 4)),
            ValueError,
            r"code must not be empty, got sizes {'example': 0, 'unit': 4}",
        ),
        (np.ones((9, 4)) * 1j, TypeError, "code must hold real numbers, got complex128"),
    ],
)
def test_what_cannot_be_projected_is_named(code, error, message):
    with pytest.raises(error, match=message):
        project(xr.DataArray(code, dims=("example", "unit")))


def test_points_that_are_all_the_same_are_projected_to_one_point():
    """In the first layer a query of zeros has the same code in all examples."""
    code = xr.DataArray(np.full((50, 4), 0.3), dims=("example", "head"))
    result = project(code, method=["pca", "tsne"])
    assert (result["projection"] == 0).all()
    assert (result["explained_variance_ratio"].sel(kind="pca") == 0).all()
