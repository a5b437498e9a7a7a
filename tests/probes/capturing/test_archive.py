"""Captures on disk: complete, continued after an interruption, and refused where they differ."""

import copy
import os
import subprocess
import sys
from functools import partial
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
import xarray as xr
import zarr
from torch import nn
from transformer_lens.hook_points import HookPoint

from probes import Quantity, capture, hooked, masked_mean
from probes.capturing.digests import digest_of
from probes.capturing.quantity import Labels

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


@pytest.mark.parametrize("kind", ["text", "dataset", "folder"])
def test_a_file_that_is_no_capture_is_not_overwritten(toy_model, make_batches, tmp_path, kind):
    path = tmp_path / "x.nc"
    if kind == "text":
        path.write_text("thesis")
    elif kind == "folder":
        path.mkdir()
    else:
        xr.Dataset({"thesis": ("page", [1, 2])}).to_netcdf(path)
    model = toy_model()
    calls = count_passes(model)
    before = path.read_bytes() if path.is_file() else None
    with pytest.raises(ValueError, match=r"to must be a new path or a capture, got .*x\.nc"):
        capture(model, make_batches(1), QUANTITIES, to=path)
    assert not calls
    assert (path.read_bytes() if path.is_file() else None) == before


def test_a_capture_in_a_file_is_replaced(toy_model, make_batches, tmp_path):
    path = tmp_path / "x.nc"
    capture(toy_model(), make_batches(1), QUANTITIES, to=path)
    assert capture(toy_model(), make_batches(3), QUANTITIES, to=path).attrs["batches"] == 3


def test_the_folder_of_a_file_must_be_there_at_the_start(toy_model, make_batches, tmp_path):
    model = toy_model()
    calls = count_passes(model)
    with pytest.raises(
        FileNotFoundError, match=r"to must be in a folder that exists, got .*missing"
    ):
        capture(model, make_batches(1), QUANTITIES, to=tmp_path / "missing" / "x.nc")
    assert not calls


@pytest.mark.parametrize("change", ["without", "with another"])
def test_batches_with_other_latents_are_not_those_of_the_capture(
    toy_model, make_batches, tmp_path, change
):
    path, batches = tmp_path / "x.zarr", make_batches(2)
    capture(toy_model(), batches, QUANTITIES, to=path)
    for batch in batches:
        if change == "without":
            del batch.latents["rule"]
        else:
            batch.latents["depth"] = batch.latents["rule"]
    wrong = "rule" if change == "without" else "depth"
    with pytest.raises(
        ValueError, match=rf"batches must be those of the earlier .* another '{wrong}'"
    ):
        capture(toy_model(), batches, QUANTITIES, to=path)


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


@pytest.mark.parametrize("to", [None, "x.zarr", "x.nc"])
@pytest.mark.parametrize("order", [1, -1])
def test_latents_that_some_batches_lack_are_named(toy_model, make_batches, tmp_path, to, order):
    batches = make_batches(2)
    del batches[1].latents["rule"]
    path = None if to is None else tmp_path / to
    with pytest.raises(ValueError, match=r"batches must have the latents of the first, .*'rule'"):
        capture(toy_model(), batches[::order], QUANTITIES, to=path)


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


PAST_END = 2


def last(state):
    return state[:, PAST_END - 3]


def taking(position):
    def reduce(state):
        return state[:, position]

    return reduce


def resid(reduce):
    return {"resid": Quantity("blocks.1.hook_resid_post", ("example", "feature"), reduce)}


class Position:
    def __init__(self, position):
        self.position = position

    def __call__(self, state):
        return state[:, self.position]

    def of(self, state):
        return self(state)


@pytest.mark.parametrize(
    ("reduce", "other"),
    [
        (lambda state: state.mean(1), lambda state: state.amax(1)),
        (lambda state: state[:, 1], lambda state: state[:, 2]),
        (lambda state, at=1: state[:, at], lambda state, at=2: state[:, at]),
        (lambda state: (lambda: state[:, 1])(), lambda state: (lambda: state[:, 2])()),
        (taking(1), taking(2)),
        (taking(torch.tensor(1)), taking(torch.tensor(2))),
        (partial(torch.select, dim=1, index=1), partial(torch.select, dim=1, index=2)),
        (partial(torch.amax, dim=1), partial(torch.amin, dim=1)),
        (Position(1), Position(2)),
        (Position(1).of, Position(2).of),
        (masked_mean("mask"), masked_mean("index")),
        (masked_mean(taking(1)), masked_mean(taking(2))),
        (nn.Sequential(nn.Flatten()), nn.Sequential(nn.Flatten(1, 2))),
    ],
)
def test_another_reduction_is_another_capture(reduce, other):
    identity = Labels(resid(reduce), {}, {}).identity()
    assert identity == Labels(resid(copy.deepcopy(reduce)), {}, {}).identity()
    assert identity != Labels(resid(other), {}, {}).identity()


def test_values_that_a_reduction_takes_from_its_module_count(monkeypatch):
    identity = Labels(resid(last), {}, {}).identity()
    assert identity == Labels(resid(last), {}, {}).identity()
    monkeypatch.setitem(last.__globals__, "PAST_END", 1)
    assert identity != Labels(resid(last), {}, {}).identity()


def test_a_reduction_that_cannot_be_told_from_another_is_refused(toy_model, make_batches, tmp_path):
    numbers = (number for number in range(9))
    quantities = resid(lambda state: state[:, next(numbers)])
    with pytest.raises(TypeError, match=r"reduce of 'resid' that can be told from .* got function"):
        capture(toy_model(), make_batches(1), quantities, to=tmp_path / "x.zarr")
    assert capture(toy_model(), make_batches(1), quantities)["resid"].sizes["example"] == 5


class Repeated(nn.Module):
    """A linear map, as often as it is told to."""

    factor = 1.0

    def __init__(self, activation):
        super().__init__()
        self.core, self.activation = nn.Linear(3, 3), activation
        self.power, self.settings, self.seen = 1, {"shift": (0.0, 1)}, {}
        self.after, self.steps = nn.ModuleList([Shifted()]), nn.ModuleList()
        self.register_buffer("scale", torch.ones(3), persistent=False)
        nn.init.constant_(self.core.weight, 0.1)
        nn.init.zeros_(self.core.bias)

    def forward(self, x, n_steps=1, mask=None):
        for _ in range(n_steps):
            x = self.after[0](self.activation(self.core(x)) * self.scale * self.factor)
        x = x**self.power + self.settings["shift"][0]
        self.seen[len(x)] = x
        return x if mask is None else x * mask


class Shifted(nn.Module):
    """Adds a number; below are hook points only."""

    def __init__(self, shift=0):
        super().__init__()
        self.shift, self.hook = shift, HookPoint()

    def forward(self, x):
        return self.hook(x + self.shift)


class StepHooks(nn.Module):
    """The hook points of a step."""

    def __init__(self, step):
        super().__init__()
        self.step, self.hook = step, HookPoint()


class Doubled(Repeated):
    """Other code, the same weights."""

    def forward(self, x, n_steps=1, mask=None):
        return 2 * super().forward(x, n_steps, mask)


class DoubledFactor(Repeated):
    factor = 2.0


def test_another_model_or_other_arguments_are_refused(tmp_path):
    batches = [SimpleNamespace(inputs=torch.ones(2, 3), latents={})]
    kept = {"y": Quantity(None, ("example", "d"))}

    def captured(change=lambda model: None, activation=None, model_class=Repeated, **arguments):
        model = model_class(activation or torch.tanh)
        with torch.no_grad():
            change(model)
        return capture(hooked(model, **arguments), batches, kept, to=tmp_path / "x.zarr")

    xr.testing.assert_equal(captured(), captured())
    captured(lambda model: model.train().core.register_forward_hook(lambda *_: None))
    for arguments in (
        {"change": lambda model: model.core.weight[1, 1].add_(1e-3)},
        {"change": lambda model: model.scale[1].add_(1e-3)},
        {"activation": nn.Tanh()},
        {"activation": torch.relu},
        {"activation": lambda x: x},
        {"model_class": Doubled},
        {"model_class": DoubledFactor},
        {"model_class": type("Repeated", (Repeated,), {"factor": 3.0})},
        {"change": lambda model: setattr(model, "power", 2)},
        {"change": lambda model: setattr(model, "settings", {"shift": (1.0, 1)})},
        {"change": lambda model: setattr(model.after[0], "shift", 1)},
        {"change": lambda model: setattr(model, "dtype", torch.float64)},
        {"n_steps": 2},
        {"mask": torch.ones(3)},
    ):
        with pytest.raises(ValueError, match="must be a new path or hold the same capture"):
            captured(**arguments)


def constant(x):
    return x * PAST_END


def test_what_the_code_of_a_model_takes_from_its_module_is_compared(monkeypatch):
    digest = digest_of("a model", Repeated(constant))
    assert digest == digest_of("a model", Repeated(constant))
    monkeypatch.setitem(constant.__globals__, "PAST_END", 1)
    assert digest != digest_of("a model", Repeated(constant))


def test_a_model_that_was_called_is_the_same():
    model = Repeated(torch.tanh)
    digest = digest_of("a model", model)
    hooked(model)(torch.ones(2, 3))
    assert model.seen
    # As models do that make the hooks of further steps.
    model.steps.append(StepHooks(0))
    assert digest == digest_of("a model", model)


def test_other_inputs_with_the_same_latents_are_refused(toy_model, make_batches, tmp_path):
    batches = make_batches(3)
    for batch in batches:
        batch.latents.clear()
    first = capture(toy_model(), batches[:2], QUANTITIES, to=tmp_path / "x.zarr").load()
    other = [batches[0], SimpleNamespace(inputs=batches[1].inputs + 1e-3, latents={})]
    with pytest.raises(ValueError, match="another 'inputs' for the examples from 5"):
        capture(toy_model(), other, QUANTITIES, to=tmp_path / "x.zarr")
    longer = capture(toy_model(), batches, QUANTITIES, to=tmp_path / "x.zarr")
    xr.testing.assert_equal(longer.isel(example=slice(10)), first)


def test_what_a_reduction_may_read_of_a_batch_is_compared(toy_model, make_batches, tmp_path):
    batch = make_batches(1)[0]
    kept = resid(masked_mean(lambda given: given.mask))

    def captured(mask):
        given = SimpleNamespace(inputs=batch.inputs, latents={}, mask=mask)
        return capture(toy_model(), [given], kept, to=tmp_path / "x.zarr")

    captured(torch.ones(5, 4))
    with pytest.raises(ValueError, match="another 'inputs' for the examples from 0"):
        captured(torch.ones(5, 4).tril())


def test_of_a_longer_capture_only_what_is_asked_for_is_given(toy_model, make_batches, tmp_path):
    capture(toy_model(), make_batches(3), QUANTITIES, to=tmp_path / "x.zarr")
    data = capture(toy_model(), make_batches(3)[:1], QUANTITIES, to=tmp_path / "x.zarr")
    xr.testing.assert_equal(data, capture(toy_model(), make_batches(1), QUANTITIES))
    assert data.attrs["batches"] == 1
    whole = capture(toy_model(), make_batches(3), QUANTITIES, to=tmp_path / "x.zarr")
    assert whole.sizes["example"] == 15
    with pytest.raises(ValueError, match="at least one batch"):
        capture(toy_model(), [], QUANTITIES, to=tmp_path / "x.zarr")


def test_digests_are_the_same_in_each_process():
    program = (
        "from probes import masked_mean; from probes.capturing.digests import digest_of; "
        "names = lambda state: state if state in {'a', 'b', 'c'} else None; "
        "print(digest_of('x', [masked_mean(), names, {'d', 'e', 'f'}]))"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(digests) == 1
