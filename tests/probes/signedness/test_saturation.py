import numpy as np
import pytest
import xarray as xr

from probes import score_saturation

DIMS = ("example", "query_pos", "key_pos")
LABELS = ["affinity", "dissimilarity"]


def label(array):
    return xr.DataArray(array, dims=DIMS)


def drawn(seed=0):
    """Two quantities of different widths."""
    rng = np.random.default_rng(seed)
    parts = [label(width * rng.standard_normal((20, 3, 4))) for width in (1, 4)]
    return xr.concat(parts, xr.Variable("quantity", LABELS))


def test_saturation_by_hand():
    values = label(np.array([[[-3.0, -2.0, 0.0, 1.0, 5.0]]] * 2)).expand_dims(train_step=[0, 9])
    values = values * xr.DataArray([1, 0], dims="train_step")
    result = score_saturation(values, low=-2, high=2, bins=8, resamples=5)
    assert result["saturated"].dims == ("train_step", "side")
    np.testing.assert_allclose(result["saturated"], [[0.4, 0.2], [0, 0]])
    np.testing.assert_allclose(result["saturated_low"], result["saturated_high"])
    np.testing.assert_allclose(result["bin"], np.arange(-2.5, 5))
    np.testing.assert_allclose(
        result["distribution"].sel(train_step=0), [0.2, 0.2, 0, 0.2, 0.2, 0, 0, 0.2]
    )
    few = xr.DataArray([True, False, False, False, False], dims="key_pos")
    assert score_saturation(values, low=-2, high=2, valid=few, resamples=5)["saturated"][0, 0] == 1


@pytest.mark.parametrize("changes", [{"low": -np.inf}, {"high": np.inf}, {"low": np.nan}])
def test_limits_must_be_finite(changes):
    (name,) = changes
    with pytest.raises(ValueError, match=f"{name} must be finite"):
        score_saturation(label(np.zeros((2, 3, 4))), **{"low": -1, "high": 1} | changes)


def test_quantities_may_have_limits_of_their_own():
    values, limit = drawn(), xr.DataArray([0.5, 3.0], coords={"quantity": LABELS})
    both = score_saturation(values, low=-limit, high=2 * limit, resamples=20)
    assert both["saturated"].dims == ("quantity", "side")
    for name, top in zip(LABELS, (0.5, 3.0), strict=True):
        one = values.sel(quantity=name)
        alone = score_saturation(one, low=-top, high=2 * top, resamples=20)
        assert alone["saturated"].sel(side="low") == pytest.approx((one <= -top).mean().item())
        for variable in ("saturated", "saturated_low", "saturated_high"):
            np.testing.assert_allclose(both[variable].sel(quantity=name), alone[variable])
    np.testing.assert_allclose(both["distribution"].sum("bin"), 1)
    least, greatest = values.min().item(), values.max().item()
    assert both["bin"].min() - least == pytest.approx((greatest - least) / 80)


def test_limits_are_those_of_their_labels():
    values, limit = drawn(), xr.DataArray([0.5, 3.0], coords={"quantity": LABELS})
    turned = limit.isel(quantity=[1, 0])
    one, other = (
        score_saturation(values, low=-top, high=top, resamples=5) for top in (limit, turned)
    )
    xr.testing.assert_identical(one, other)


def test_every_variable_says_what_it_is():
    result = score_saturation(drawn(), low=-0.5, high=0.5, resamples=5)
    assert all(result[name].attrs["long_name"] for name in result.data_vars)
    assert result.attrs["interval"].startswith("percentile bootstrap over examples, 95%")


def test_invalid_input_is_refused():
    values, limit = drawn(), xr.DataArray([0.5, 3.0], coords={"quantity": LABELS})
    with pytest.raises(ValueError, match=r"low must be below high = 0\.5, got 0\.5"):
        score_saturation(values, low=0.5, high=0.5)
    with pytest.raises(ValueError, match=r"low must be below high"):
        score_saturation(values, low=limit, high=1.0)
    with pytest.raises(ValueError, match=r"high must be a number, or have only dims of the cells"):
        score_saturation(values, low=0.0, high=limit.rename(quantity="head"))
    with pytest.raises(ValueError, match=r"high must be finite, for each cell"):
        score_saturation(values, low=-limit, high=limit.assign_coords(quantity=["affinity", "x"]))
