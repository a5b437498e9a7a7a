"""Captures on disk: complete, continued after an interruption, and refused where they differ."""

import sys
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
import xarray as xr
import zarr

from probes import Quantity, capture

QUANTITIES = {
    "pattern": Quantity("blocks.*.attn.hook_pattern", ("example", "head", "query_pos", "key_pos")),
    "last": Quantity("blocks.1.hook_resid_post", ("example", "feature"), lambda x: x[:, -1]),
}


class Interrupted(Exception):
    pass


def count_passes(model):
    """The calls of the first block."""
    calls = []
    model.blocks[0].register_forward_hook(lambda *_: calls.append(1))
    return calls


@pytest.mark.parametrize("ending", ["zarr", "nc"])
def test_a_capture_on_disk_is_that_in_memory(toy_model, make_batches, tmp_path, ending):
    expected = capture(toy_model(), make_batches(4), QUANTITIES)
    result = capture(toy_model(), make_batches(4), QUANTITIES, to=tmp_path / f"x.{ending}")
    assert not result["pattern"]._in_memory
    xr.testing.assert_equal(result, expected)
    for name, variable in expected.variables.items():
        assert result[name].attrs == variable.attrs
        assert result[name].dtype == variable.dtype
    assert result.attrs["batches"] == 4
    if ending == "zarr":
        # A decoder reads one layer of all examples.
        assert result["pattern"].encoding["chunks"] == (5, 1, 2, 4, 4)
        again = xr.open_zarr(tmp_path / "x.zarr", consolidated=False)
        xr.testing.assert_equal(again.compute(), expected)


@pytest.mark.parametrize("n_done", [0, 1, 3])
def test_an_interrupted_capture_continues(toy_model, make_batches, tmp_path, n_done):
    def interrupted():
        yield from make_batches(5)[:n_done]
        raise Interrupted

    path = tmp_path / "x.zarr"
    with pytest.raises(Interrupted):
        capture(toy_model(), interrupted(), QUANTITIES, to=path)
    if n_done:
        # As after a kill in the middle of the next batch.
        array = zarr.open_group(path, mode="r+")["pattern"]
        array.resize((array.shape[0] + 5, *array.shape[1:]))
        array[-5:] = 7.0
    model = toy_model()
    calls = count_passes(model)
    result = capture(model, make_batches(5), QUANTITIES, to=path)
    assert len(calls) == 5 - n_done
    xr.testing.assert_equal(result, capture(toy_model(), make_batches(5), QUANTITIES))
    # Once it is complete, it is only read; with more batches it grows.
    calls.clear()
    xr.testing.assert_equal(capture(model, make_batches(5), QUANTITIES, to=path), result)
    assert not calls
    assert capture(model, make_batches(6), QUANTITIES, to=path).sizes["example"] == 30
    assert len(calls) == 1


def test_what_differs_is_refused(toy_model, make_batches, tmp_path):
    path = tmp_path / "x.zarr"
    capture(toy_model(), make_batches(2), QUANTITIES, to=path)
    changed = toy_model()
    with torch.no_grad():
        changed.blocks[1].attn.qkv.bias += 1
    for model, batches, quantities, message in (
        (changed, make_batches(2), QUANTITIES, "must be a new path or hold the same capture"),
        (toy_model(), make_batches(2), {"pattern": QUANTITIES["pattern"]}, "hold the same capture"),
        (toy_model(), make_batches(3)[1:], QUANTITIES, "another 'index' for the examples from 0"),
        (toy_model(), [*make_batches(2), *make_batches(1, pos=3)], QUANTITIES,
         r"'pattern' must have one shape in all batches, got \(2, 2, 4, 4\) and \(2, 2, 3, 3\)"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            capture(model, batches, quantities, to=path)
    xr.testing.assert_equal(
        capture(toy_model(), make_batches(2), QUANTITIES, to=path),
        capture(toy_model(), make_batches(2), QUANTITIES),
    )
    (tmp_path / "mine.zarr").mkdir()
    (tmp_path / "mine.zarr" / "thesis.txt").touch()
    with pytest.raises(ValueError, match="to must be a new path or a capture"):
        capture(toy_model(), make_batches(1), QUANTITIES, to=tmp_path / "mine.zarr")
    zarr.open_group(tmp_path / "other.zarr", mode="w").create_array("a", shape=3, dtype=float)
    with pytest.raises(ValueError, match=r"got .*other.zarr with None"):
        capture(toy_model(), make_batches(1), QUANTITIES, to=tmp_path / "other.zarr")
    assert "a" in zarr.open_group(tmp_path / "other.zarr", mode="r")
    with pytest.raises(ValueError, match=r"to must end in .zarr or .nc, got 'x.csv'"):
        capture(toy_model(), make_batches(1), QUANTITIES, to="x.csv")


@pytest.mark.parametrize("to", [None, "x.zarr"])
def test_a_pass_ends_at_the_last_hook(toy_model, make_batches, tmp_path, to):
    model, calls = toy_model(3), []
    model.blocks[2].register_forward_hook(lambda *_: calls.append(1))
    path = None if to is None else tmp_path / to
    early = {"code": Quantity("blocks.[01].attn.hook_pattern", QUANTITIES["pattern"].dims)}
    capture(model, make_batches(4), early, to=path)
    # In the first batch it is checked that a hook fires once.
    assert len(calls) == 1
    calls.clear()
    both = early | {"answer": Quantity(None, ("example", "pos", "feature"))}
    capture(model, make_batches(4), both)
    assert len(calls) == 4
    assert not any(point.fwd_hooks for point in model.hook_dict.values())


@pytest.mark.parametrize("to", [None, "x.zarr", "x.nc"])
def test_latents_may_be_arrays_and_strings(toy_model, make_batches, tmp_path, to):
    names = [["sum", "permutation"], ["a much longer name", "b"]]
    batches = [
        SimpleNamespace(
            inputs=batch.inputs[:2],
            latents={"name": np.array(words), "value": np.array([0.5, np.nan]), "list": [1, 2]},
        )
        for batch, words in zip(make_batches(2), names, strict=True)
    ]
    path = None if to is None else tmp_path / to
    for _ in range(2):
        data = capture(toy_model(), batches, QUANTITIES, to=path)
        assert data["name"].to_numpy().tolist() == [*names[0], *names[1]]
        assert data["list"].to_numpy().tolist() == [1, 2, 1, 2]
        np.testing.assert_array_equal(data["value"], [0.5, np.nan] * 2)


@pytest.mark.parametrize("batch", [(torch.zeros(2, 4, 8), 1), {"inputs": 0}, torch.zeros(2, 4, 8)])
def test_batches_without_latents_are_refused(toy_model, batch):
    with pytest.raises(TypeError, match=r"batches must have inputs and latents .* got ") as caught:
        capture(toy_model(), [batch], QUANTITIES)
    assert len(str(caught.value)) < 300


def test_without_zarr_it_is_named(toy_model, make_batches, tmp_path):
    with (
        mock.patch.dict(sys.modules, {"zarr": None}),
        pytest.raises(ImportError, match=r"need zarr: pip install 'modscope\[disk\]'"),
    ):
        capture(toy_model(), make_batches(1), QUANTITIES, to=tmp_path / "x.zarr")
    assert not (tmp_path / "x.zarr").exists()
