import numpy as np
import pytest
import xarray as xr

from probes import score_timing
from tasks import ListOps, ListOpsConfig, TableLookup, TableLookupConfig, column_dataflow

FEW = {"n_id": 300, "n_valid": 30, "n_ood": 30}


@pytest.fixture(scope="module")
def truth():
    config = ListOpsConfig(
        n_train=120, train_depth=4, valid_depths=(5, 5), ood_depths=(6, 6), **FEW
    )
    return column_dataflow(ListOps(config, cache=None).batch("id", 0, 300))


def updates(done, truth, before=True):
    """Columns of operations that update for the last time at a step, and also before."""
    steps = np.arange(1, int(done.max()) + 1)[:, None]
    operation = ((truth["level"] >= 1) & (truth["span"] >= 1)).to_numpy()
    done = np.where(operation, done, 0)[:, None]
    update = (steps <= done) if before else (steps == done)
    # The readout, which is no operation, is done at the end.
    update[np.arange(len(update)), -1, truth["readout"].to_numpy()] = True
    return xr.DataArray(update, dims=("example", "step", "pos"))


def slopes(result):
    return [float(result["slope"].sel(predictor=name)) for name in ("depth", "length")]


@pytest.mark.parametrize("before", [True, False])
def test_parallel_branches_are_done_with_the_depth(truth, before):
    result = score_timing(updates(2 * truth["level"].to_numpy(), truth, before), truth)
    assert slopes(result) == pytest.approx([2, 0], abs=1e-9)
    step = result["step_of_depth"].dropna("depth")
    assert step.to_numpy().tolist() == (2 * step["depth"]).to_numpy().tolist()
    table = result["step"].to_numpy()
    for depth, row in zip(result["depth"].to_numpy(), table, strict=True):
        assert set(row[np.isfinite(row)].tolist()) <= {2.0 * depth}
    assert np.isfinite(table).sum() > 8


def test_one_operation_after_another_is_done_with_the_length(truth):
    result = score_timing(updates(3 + truth["span"].to_numpy(), truth), truth)
    assert slopes(result) == pytest.approx([0, 1], abs=1e-9)
    middle = result["length"].to_numpy()
    for row in result["step"].to_numpy():
        finite = np.isfinite(row)
        assert (np.abs(row[finite] - 3 - middle[finite]) <= 2).all()


def test_the_interval_has_the_slope_that_noise_hides(truth):
    noise = np.random.default_rng(0).integers(0, 5, truth["level"].shape)
    result = score_timing(updates(1 + 2 * truth["level"].to_numpy() + noise, truth), truth)
    low, high = (result[f"slope_{end}"].sel(predictor="depth") for end in ("low", "high"))
    assert 1.7 < float(low) < 2 < float(high) < 2.3
    low, high = (result[f"slope_{end}"].sel(predictor="length") for end in ("low", "high"))
    assert float(low) < 0 < float(high)


def test_where_depth_is_length_there_is_no_slope():
    task = TableLookup(TableLookupConfig(n_compositions=300, n_id=40, n_valid=30, n_ood=30))
    truth = column_dataflow(task.batch("id", 0, 40))
    result = score_timing(updates(truth["level"].to_numpy(), truth), truth)
    assert bool(result["slope"].isnull().all())
    assert result["step_of_depth"].to_numpy().tolist() == [1, 2, 3, 4, 5]
    assert float(result["step"].sel(depth=3, length=3)) == 3


def test_operations_that_never_update_and_sizes_that_do_not_match(truth):
    level = truth["level"].to_numpy()
    never = updates(2 * level, truth) & False
    result = score_timing(never, truth)
    assert bool(result["step"].isnull().all() & result["slope"].isnull().all())
    # Four operations are too few for a mean, five are enough.
    for n in (4, 5):
        few = np.zeros(never.shape, bool)
        example, column = np.nonzero((level == 1) & (truth["span"].to_numpy() >= 1))
        few[example[:n], 2, column[:n]] = True
        step = score_timing(never.copy(data=few), truth)["step_of_depth"]
        assert step.notnull().sum() == (n == 5)
    with pytest.raises(KeyError, match="truth must hold span, got"):
        score_timing(never, truth.drop_vars("span"))
    with pytest.raises(ValueError, match="update must have the sizes"):
        score_timing(never[:5], truth)
    with pytest.raises(
        TypeError, match=r"update must hold bool, such as gates >= 0.2, got float64"
    ):
        score_timing(never.astype(float), truth)
