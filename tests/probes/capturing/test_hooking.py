import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from probes import hooked, resolve_hooks
from probes.capturing.hooking import check_model, evaluating, layer_numbers


@pytest.mark.parametrize(
    "code",
    [
        "import sys, probes; "
        "assert not {'transformer_lens', 'sklearn', 'torch'} & set(sys.modules); "
        "assert {'capture', 'decode', 'interchange'} <= set(dir(probes))",
        # Submodules do not shadow the functions of the same name.
        "import probes.capturing.capture, probes.statistics.intervals; "
        "from probes import Quantity, capture; "
        "assert callable(capture) and callable(Quantity)",
    ],
)
def test_importing_the_package_is_light_and_order_does_not_matter(code):
    subprocess.run([sys.executable, "-c", code], check=True)


def test_public_names_are_callable():
    import probes

    names = set(probes.__all__) - {"plots"}
    assert all(callable(getattr(probes, name)) for name in names)
    with pytest.raises(AttributeError, match="nothing"):
        probes.nothing  # noqa: B018


def test_unknown_hook_lists_the_nearest_names(toy_model):
    with pytest.raises(
        KeyError, match=r"blocks\.0\.attn\.hook_patern.*nearest: .*blocks\.0\.attn\.hook_p"
    ):
        resolve_hooks(toy_model(), "blocks.0.attn.hook_patern")
    with pytest.raises(KeyError, match=r"blocks\.\d\.attn\.hook_pattern"):
        resolve_hooks(toy_model(), "blocks.*.attention.hook_pattern")


def test_globs_do_not_cross_dots_and_sort_by_number(toy_model):
    model = toy_model(12)
    names = resolve_hooks(model, "blocks.*.attn.hook_pattern")
    assert names == [f"blocks.{i}.attn.hook_pattern" for i in range(12)]
    assert layer_numbers("blocks.*.attn.hook_pattern", names) == list(range(12))
    # "*" does not match a dot.
    assert resolve_hooks(model, "blocks.0.hook_*") == ["blocks.0.hook_resid_post"]
    assert resolve_hooks(model, "hook_unused") == ["hook_unused"]
    assert resolve_hooks(model, "blocks.[13].hook_resid_post") == [
        "blocks.1.hook_resid_post",
        "blocks.3.hook_resid_post",
    ]


def test_names_that_differ_in_more_than_a_layer_have_no_layer_axis():
    with pytest.raises(ValueError, match="one layer number only"):
        layer_numbers("blocks.*.*", ["blocks.0.hook_a", "blocks.1.hook_b"])
    with pytest.raises(ValueError, match="one layer number only"):
        layer_numbers("hook_*", ["hook_a", "hook_b"])


def test_a_compiled_model_is_refused(toy_model):
    handle = torch.compile(toy_model())
    with pytest.raises(ValueError, match="eager model"):
        check_model(handle)
    in_place = toy_model()
    in_place.compile()
    with pytest.raises(ValueError, match="eager model"):
        check_model(in_place)
    forward = toy_model()
    forward.forward = torch.compile(forward.forward)
    with pytest.raises(ValueError, match="eager model"):
        check_model(forward)
    part = toy_model()
    part.blocks[1].attn.compile()
    with pytest.raises(ValueError, match=r"blocks\.1\.attn"):
        check_model(part)
    # An eager model is accepted after a handle was compiled from it.
    eager = toy_model()
    torch.compile(eager)
    check_model(eager)


def test_a_model_without_hooks_is_refused():
    with pytest.raises(TypeError, match=r"HookedRootModule.*Linear"):
        check_model(nn.Linear(2, 2))


def test_evaluating_restores_each_flag(toy_model, bridge):
    model = toy_model().train()
    model.blocks[0].eval()
    before = [part.training for part in model.modules()]

    def fail():
        with evaluating(model):
            assert not any(part.training for part in model.modules())
            assert not torch.is_grad_enabled()
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        fail()
    assert [part.training for part in model.modules()] == before
    assert torch.is_grad_enabled()

    bridge.train()
    # A bridge does not register the model that it wraps; neither does what holds the bridge.
    for one in (bridge, hooked(bridge, return_type="logits"), SimpleNamespace(model=bridge)):
        with evaluating(one):
            assert not any(part.training for part in bridge.original_model.modules())
        assert all(part.training for part in bridge.original_model.modules())
