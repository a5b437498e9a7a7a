import numpy as np
import pytest
import xarray as xr

from probes import score_reads
from tasks import TableLookup, TableLookupConfig, column_dataflow

N_STEPS, N_HEADS = 6, 2
DIMS = ("example", "step", "head", "query_pos", "key_pos")


@pytest.fixture(scope="module")
def truth():
    config = TableLookupConfig(direction="backward", n_compositions=400, n_id=60, n_valid=30)
    return column_dataflow(TableLookup(config).batch("id", 0, 60))


def even(truth):
    """Attention that is spread evenly over valid columns."""
    valid = truth["valid"].to_numpy()
    weights = valid / valid.sum(1, keepdims=True)
    shape = (len(valid), N_STEPS, N_HEADS, valid.shape[1], valid.shape[1])
    return xr.DataArray(np.broadcast_to(weights[:, None, None, None], shape).copy(), dims=DIMS)


def updates(truth, steps):
    """Columns update at one step, counted from 0; -1: never."""
    happens = np.asarray(steps)[:, None] == np.arange(N_STEPS)[:, None]
    return xr.DataArray(happens, dims=("example", "step", "pos"))


def focused(truth, keys, head=1):
    """Even attention, but one head that has all its weight on one key per column."""
    attention = even(truth)
    n, width = truth["valid"].shape
    attention[:, :, head] = 0.0
    example, query = np.indices((n, width))
    values = attention.to_numpy()
    values[example, :, head, query, np.clip(keys, 0, width - 1)] = 1.0
    return attention.copy(data=values)


def operations(truth):
    is_operation = (truth["level"] >= 1).to_numpy()
    is_operation[np.arange(len(is_operation)), truth["readout"].to_numpy()] = False
    return is_operation


def columns(truth):
    return np.broadcast_to(np.arange(truth.sizes["pos"]), truth["valid"].shape)


@pytest.mark.parametrize("side", [-1, 1])
def test_columns_that_read_their_neighbour(truth, side):
    level = truth["level"].to_numpy()
    result = score_reads(focused(truth, columns(truth) + side), updates(truth, level), truth)
    assert float(result["neighbour"]) == 1
    # Each operation has two neighbours among the other valid columns.
    n = np.broadcast_to(truth["valid"].sum("pos").to_numpy()[:, None], level.shape)
    expected = (2 / (n - 1))[operations(truth)].mean()
    assert float(result["neighbour_chance"]) == pytest.approx(expected)
    apart = score_reads(focused(truth, columns(truth) + 2 * side), updates(truth, level), truth)
    assert float(apart["neighbour"]) < 0.3


def test_what_is_read_before_the_last_update_does_not_count(truth):
    level = truth["level"].to_numpy()
    attention, early = focused(truth, columns(truth) - 2), focused(truth, columns(truth) + 1)
    attention[:, 0] = early[:, 0]
    both = updates(truth, level) | updates(truth, np.where(operations(truth), 0, -1))
    assert float(score_reads(attention, both, truth)["neighbour"]) < 0.3
    at_first = updates(truth, np.where(operations(truth), 0, -1))
    assert float(score_reads(attention, at_first, truth)["neighbour"]) == 1


@pytest.mark.parametrize("place", ["offset", "position"])
def test_a_readout_that_reads_at_a_fixed_place(truth, place):
    readout = truth["readout"].to_numpy()[:, None]
    keys = columns(truth) * 0 + (readout - 3 if place == "offset" else 1)
    steps = np.full(truth["valid"].shape, N_STEPS - 1)
    result = score_reads(focused(truth, keys), updates(truth, steps), truth)
    same = result["same"].sel(place=place)
    other = result["same"].drop_sel(place=place)
    assert float(same) == 1
    assert float(result["same_low"].sel(place=place)) == 1
    # Each of five lengths has another one.
    n_lengths = result.sizes["length"]
    assert n_lengths >= 4
    assert other.item() == pytest.approx(1 / n_lengths)
    expected = {"offset": -3, "position": 1}[place]
    assert result["most_frequent"].sel(place=place).item() == expected
    for row in result["readout_reads"]:
        column = expected if place == "position" else int(row["length"]) - 1 - 3
        assert row.sel(position=column).item() == 1
        assert row.sum().item() == 1


def test_all_lengths_count_alike(truth):
    # Nearly all examples are of one length, and read column 1; the others read column 2.
    depth = truth["depth"].to_numpy()
    truth = truth.isel(example=(depth == 5) | (np.arange(len(depth)) < 8))
    is_long = truth["depth"].to_numpy() == 5
    assert is_long.mean() > 0.6
    n_lengths = len(np.unique(truth["depth"]))
    keys = columns(truth) * 0 + np.where(is_long, 1, 2)[:, None]
    steps = np.full(truth["valid"].shape, 2)
    result = score_reads(focused(truth, keys), updates(truth, steps), truth)
    position = result["same"].sel(place="position")
    assert position.item() == pytest.approx(1 - 1 / n_lengths)
    assert result["most_frequent"].sel(place="position").item() == 2


def test_a_sharp_read_of_each_operation_in_turn(truth):
    level = truth["level"].to_numpy()
    steps = np.where(operations(truth), level, -1)
    result = score_reads(focused(truth, columns(truth) - 1), updates(truth, steps), truth)
    depths = result["depth"].to_numpy()
    for row in result["mean_count"].transpose("depth", "count").to_numpy():
        assert row[0] + 1 == row[1]
    assert result["mean_count"].sel(count="sharp reads").to_numpy().tolist() == depths.tolist()
    assert result["slope"].to_numpy() == pytest.approx([1, 1])
    assert result["slope_low"].to_numpy() == pytest.approx([1, 1])


def test_a_read_is_sharp_by_its_weight_in_a_column_that_updates(truth):
    steps = np.where(operations(truth), truth["level"].to_numpy(), -1)
    sharp = focused(truth, columns(truth) - 1)
    never = score_reads(sharp, updates(truth, steps) & False, truth)
    assert (never["mean_count"] == 0).all()
    assert np.isnan(never["neighbour"].item())
    assert never["same"].isnull().all()
    weak = score_reads(0.6 * sharp, updates(truth, steps), truth, sharp=0.7)
    assert (weak["mean_count"] == 0).all()
    enough = score_reads(0.6 * sharp, updates(truth, steps), truth, sharp=0.6)
    assert (enough["mean_count"] > 0).all()


def test_all_that_is_returned_has_a_name(truth):
    result = score_reads(even(truth), updates(truth, truth["level"].to_numpy()), truth)
    assert all(variable.attrs["long_name"] for variable in result.variables.values())


def test_of_one_depth_there_is_no_slope(truth):
    some = truth.isel(example=truth["depth"].to_numpy() == 4)
    steps = some["level"].to_numpy()
    result = score_reads(even(some), updates(some, steps), some)
    assert result["slope"].isnull().all()


def test_even_attention_is_blurred_and_that_to_a_single_column_is_not(truth):
    attention = focused(truth, columns(truth) - 1)
    attention[:, :, 0] = attention[:, :, 1]
    attention[:, 3:] = even(truth)[:, 3:]
    update = updates(truth, truth["level"].to_numpy())
    result = score_reads(attention, update, truth)
    expected = [0] * 3 + [1] * (N_STEPS - 3)
    assert result["entropy"].to_numpy() == pytest.approx(expected, abs=1e-9)
    # Weights of geometric attention can sum to less than 1.
    less = score_reads(0.4 * attention, update, truth)
    assert less["entropy"].to_numpy() == pytest.approx(expected, abs=1e-9)
    half = attention.copy()
    half[:, :, 0] = even(truth)[:, :, 0]
    mixed = score_reads(half, update, truth)["entropy"]
    assert mixed.to_numpy() == pytest.approx([0.5] * 3 + [1] * (N_STEPS - 3), abs=1e-9)


@pytest.mark.parametrize("padding", [0.5, np.nan])
def test_attention_of_padding_does_not_count(truth, padding):
    update = updates(truth, truth["level"].to_numpy())
    valid = truth["valid"]
    pairs = valid.rename(pos="query_pos") & valid.rename(pos="key_pos")
    assert not pairs.all()
    attention = focused(truth, columns(truth) - 1)
    clean, padded = (
        score_reads(attention.where(pairs, each), update, truth) for each in (0.0, padding)
    )
    xr.testing.assert_identical(padded, clean)


def test_wrong_input_is_named(truth):
    attention, update = even(truth), updates(truth, truth["level"].to_numpy())
    with pytest.raises(ValueError, match="attention must be finite between valid columns"):
        score_reads(attention * np.nan, update, truth)
    with pytest.raises(ValueError, match="attention must have 60 examples"):
        score_reads(attention[:5], update, truth)
    with pytest.raises(ValueError, match="update must have the sizes"):
        score_reads(attention, update[:, :2], truth)
    with pytest.raises(
        TypeError, match=r"update must hold bool, such as gates >= 0.2, got float64"
    ):
        score_reads(attention, update.astype(float), truth)
    with pytest.raises(ValueError, match=r"sharp must be between 0 and 1, got 1\.5"):
        score_reads(attention, update, truth, sharp=1.5)
    with pytest.raises(KeyError, match="truth must hold depth"):
        score_reads(attention, update, truth.drop_vars("depth"))
    with pytest.raises(ValueError, match="attention must have the dims"):
        score_reads(attention.rename(head="channel"), update, truth)
