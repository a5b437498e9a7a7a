from types import SimpleNamespace

import numpy as np
import pytest
import torch
import xarray as xr
from torch import nn
from torch.nn.functional import one_hot
from transformer_lens import HookedRootModule
from transformer_lens.hook_points import HookPoint

from probes import adapt_paths, measure_paths, measure_specialization, score_paths
from probes import score_specialization as score
from tests.probes.oracle.path_models import OPERATIONS, Operations

NAMES = ["add", "multiply", "sine", "higher"]


class Numbers(Operations):
    """Inputs also name operations, after the numbers."""

    def begin(self, inputs):
        return super().begin(inputs[:, :2])


class Routed(HookedRootModule, Numbers):
    """The true operations as modules; `sent` maps those that inputs name to modules."""

    def __init__(self, sent=(0, 1, 2, 3)):
        HookedRootModule.__init__(self)
        Numbers.__init__(self, OPERATIONS)
        self.sent = torch.tensor(sent)
        self.layers = nn.ModuleList([nn.Module() for _ in range(2)])
        for layer in self.layers:
            layer.hook_module_choice = HookPoint()
        self.setup()

    def forward(self, inputs):
        for layer, operation in zip(self.layers, inputs[:, 2:].long().unbind(1), strict=True):
            layer.hook_module_choice(one_hot(self.sent[operation], 4).double())
        return inputs


def batch(seed, examples=320):
    """All 16 tasks of two operations, and what these give."""
    generator = torch.Generator().manual_seed(seed)
    task = torch.arange(examples) % 16
    operator = torch.stack([task // 4, task % 4], 1)
    numbers = torch.rand(examples, 2, generator=generator) * 2 - 1
    truth = Operations(OPERATIONS)
    partial = truth.begin(numbers)
    for layer in range(2):
        reached = truth.advance(numbers, layer, partial)
        partial = reached[torch.arange(examples), :, operator[:, layer]]
    return SimpleNamespace(
        inputs=torch.cat([numbers, operator], 1),
        targets=partial[:, 0],
        latents={"operator": operator, "task": task, "number": numbers},
    )


def specialized(model, groups=None, *, operation="operator", operations=NAMES):
    groups = groups or {"id": [batch(0), batch(1)], "ood": [batch(2)]}
    return measure_specialization(
        model, groups, operation=operation, operations=operations, resamples=20, seed=3
    )


def test_a_model_whose_modules_serve_one_operation_each_is_specialized_in_each_group():
    result = specialized(Routed((1, 2, 3, 0))).sel(control="observed")
    assert result["group"].to_numpy().tolist() == ["id", "ood"]
    assert result["layer"].to_numpy().tolist() == ["0", "1", "pooled"]
    assert np.allclose(result["specialization"], 1)
    assert np.allclose(result["collapse"], 1)
    assert (result["assignment"] == [1, 2, 3, 0]).all()
    assert (result["seen"].sel(layer="0").sum("operation") == [640, 320]).all()


def test_a_model_that_sends_all_to_one_module_has_collapsed():
    result = specialized(Routed((1, 1, 1, 1))).sel(control="observed")
    assert np.allclose(result["collapse"], 0)


def test_it_is_what_score_specialization_says_of_the_same_arrays():
    one, sent = batch(0), np.array([1, 0, 0, 2])
    operator = one.latents["operator"].numpy()
    routing = xr.DataArray(np.eye(4)[sent[operator]], dims=("example", "layer", "module"))
    wanted = xr.DataArray(operator, dims=("example", "layer"))
    expected = score(routing, wanted, operations=NAMES, resamples=20, seed=3)
    result = specialized(Routed(tuple(sent)), {"id": [one]}).sel(group="id", drop=True)
    xr.testing.assert_equal(result.transpose(*expected.dims), expected.transpose(*expected.dims))


def test_a_label_for_all_layers_is_that_of_the_whole_task():
    result = specialized(Routed(), operation="task", operations=16).sel(control="observed")
    # Each task goes to one module in each layer, which serves four of them.
    assert np.allclose(result["specialization"].sel(layer=["0", "1"]), 1)
    assert result["activation"].sizes["operation"] == 16


def test_unknown_hooks_and_latents_are_refused():
    with pytest.raises(
        KeyError, match="operation must be one of number, operator, task, got 'rule'"
    ):
        specialized(Routed(), operation="rule")
    with pytest.raises(KeyError, match="hook_choice"):
        measure_specialization(
            Routed(), {"id": [batch(0)]}, operation="task", operations=16, hook="hook_choice"
        )
    with pytest.raises(ValueError, match="at least one group"):
        measure_specialization(Routed(), {}, operation="task", operations=16)


# Paths


def untrained():
    generator = torch.Generator().manual_seed(5)
    draws = torch.randn(4, 3, generator=generator).tolist()
    return Numbers([lambda r, x, a=a, b=b, c=c: a * r + b * x + c for a, b, c in draws])


def on_paths(model, groups, **more):
    given = {"adapted": "ood", "examples": (1, 4), "resamples": 20, "seed": 3} | more
    return measure_paths(model, untrained(), groups, **given)


def test_a_router_that_is_right_leaves_no_regret_and_a_wrong_one_does():
    groups = {"id": batch(0), "ood": batch(1)}
    right = on_paths(Routed(), groups).sel(control="trained")
    assert right["loss"].dims == ("group", "path")
    assert (right["loss"].sel(path=["sample", "task", "routed"]) < 1e-12).all()
    assert (right["regret"] < 1e-12).all()
    wrong = on_paths(Routed((1, 2, 3, 0)), groups).sel(control="trained")
    assert (wrong["loss"].sel(path="task") < 1e-12).all()
    assert (wrong["loss"].sel(path="routed") > 0.05).all()
    assert wrong["gap_closed"].sel(examples=4) > 0.95


def test_an_unknown_task_is_refused():
    groups = {"ood": batch(1)}
    with pytest.raises(
        KeyError, match="task must be one of the latents of 'ood', number, operator, task, got 'x'"
    ):
        on_paths(Routed(), groups, task="x")


def test_each_group_is_what_the_probes_say_of_it():
    groups, sent = {"id": batch(0), "ood": batch(1, 640)}, torch.tensor([1, 0, 2, 2])
    model = Routed(tuple(sent.tolist()))
    # However many examples the router sees at once.
    result = on_paths(model, groups, batch_size=100)
    for name, one in groups.items():
        given = {"routed": sent[one.latents["operator"]], "task": one.latents["task"]}
        given |= {"resamples": 20, "seed": 3}
        expected = score_paths(model, one.inputs, one.targets, untrained=untrained(), **given)
        here = result.sel(group=name)
        for variable in ("loss", "loss_low", "regret", "regret_high"):
            np.testing.assert_array_equal(here[variable], expected[variable])
        if name == "ood":
            few = adapt_paths(model, one.inputs, one.targets, examples=(1, 4), **given)
            np.testing.assert_array_equal(result["task_loss"], expected["task_loss"])
            for variable in ("adapted", "gap_closed", "routed", "oracle"):
                np.testing.assert_array_equal(result[variable], few[variable])
    assert result["layer"].to_numpy().tolist() == ["0", "1"]
    assert result["task"].to_numpy().tolist() == list(range(16))


def test_the_group_to_adapt_in_must_be_there():
    with pytest.raises(KeyError, match="adapted must be one of id, got 'ood'"):
        on_paths(Routed(), {"id": batch(0)})
