"""Everything that `mechanisms` exports computes the same on the device as on the CPU."""

from copy import deepcopy

import pytest
import torch
from torch import nn
from transformer_lens.hook_points import HookPoint

import mechanisms
from tests.contracts.examples import ATTENTIONS
from tests.contracts.models import MODELS, build, vectors

WIDTH = 16
X = vectors(3, 6, WIDTH)
CASES = [
    *(pytest.param(build(config), inputs, id=name) for name, (config, inputs) in MODELS.items()),
    *(
        pytest.param(
            example.values[0].build(WIDTH, generator=torch.Generator().manual_seed(0)),
            [X, X],
            id=example.id,
        )
        for example in ATTENTIONS
    ),
]
every_mechanism = pytest.mark.parametrize(("module", "inputs"), CASES)


def on(device, module, inputs):
    """A copy of a module and its inputs on a device; a tensor that is passed twice stays one."""
    moved = {id(x): x.to(device) for x in inputs}
    return deepcopy(module).to(device), [moved[id(x)] for x in inputs]


def call(module, inputs):
    torch.manual_seed(0)
    output = module(*inputs)
    outputs = output if isinstance(output, tuple) else (output,)
    return [x for x in outputs if x is not None]


def gradients(module, inputs):
    outputs = [x for x in call(module, inputs) if x.requires_grad]
    torch.stack([x.masked_fill(x.isneginf(), 0).square().sum() for x in outputs]).sum().backward()
    return {name: x.grad for name, x in module.named_parameters() if x.grad is not None}


def points_of(module):
    return {name: part for name, part in module.named_modules() if isinstance(part, HookPoint)}


def observed(module, inputs):
    """The outputs, and what each hook point shows."""
    shown = {}
    points = points_of(module)
    for name, point in points.items():
        point.add_hook(lambda x, hook, name=name: shown.__setitem__(name, x.detach().clone()))
    outputs = call(module, inputs)
    for point in points.values():
        point.remove_hooks()
    return outputs, shown


def assert_agrees(actual, expected, device, name="output"):
    """Check the device, and that rounding explains what differs."""
    assert actual.device.type == device, name
    assert actual.dtype == expected.dtype, name
    actual, expected = (x.detach().cpu().double() for x in (actual, expected))
    scale = max(1.0, float(expected.masked_fill(expected.isinf(), 0).abs().max()))
    torch.testing.assert_close(
        actual, expected, rtol=0, atol=1e-4 * scale, msg=lambda text: f"{name}: {text}"
    )


def is_random(module, inputs):
    """Whether training mode draws random numbers, of which devices have different streams."""
    before = torch.get_rng_state()
    module(*inputs)
    return not torch.equal(torch.get_rng_state(), before)


@every_mechanism
def test_outputs_and_hooks_agree_with_the_cpu(module, inputs, device):
    here, there = on("cpu", module, inputs), on(device, module, inputs)
    with torch.no_grad():
        outputs, shown = observed(here[0].eval(), here[1])
        their_outputs, their_shown = observed(there[0].eval(), there[1])
        # Without listeners a mechanism may take another kernel.
        unobserved = call(there[0], there[1])
    for expected, *others in zip(outputs, their_outputs, unobserved, strict=True):
        for other in others:
            assert_agrees(other, expected, device)
    assert shown.keys() == their_shown.keys()
    for name, expected in shown.items():
        assert_agrees(their_shown[name], expected, device, name)


@every_mechanism
def test_gradients_agree_with_the_cpu(module, inputs, device):
    here, there = on("cpu", module, inputs), on(device, module, inputs)
    random = is_random(here[0].train(), here[1])
    expected = gradients(here[0], here[1])
    actual = gradients(there[0].train(), there[1])
    assert actual.keys() == expected.keys()
    for name, gradient in actual.items():
        assert gradient.isfinite().all(), name
        if not random:
            assert_agrees(gradient, expected[name], device, name)


@every_mechanism
def test_a_change_at_a_hook_point_has_the_effect_that_it_has_on_the_cpu(module, inputs, device):
    changed = []
    for at in ("cpu", device):
        copy, arguments = on(at, module.eval(), inputs)
        *_, point = points_of(copy).values()
        point.add_hook(lambda x, hook: torch.zeros_like(x))
        with torch.no_grad():
            changed.append(call(copy, arguments))
    for expected, actual in zip(*changed, strict=True):
        assert_agrees(actual, expected, device)


def test_a_saved_model_is_loaded_on_the_device(device, tmp_path):
    config, inputs = MODELS["Transformer"]
    model = build(config).eval()
    mechanisms.save(deepcopy(model).to(device), tmp_path / "model.safetensors")
    loaded = mechanisms.load(tmp_path / "model.safetensors", device=device)
    assert isinstance(loaded, nn.Module)
    with torch.no_grad():
        assert_agrees(loaded.eval()(inputs[0].to(device)), model(inputs[0]), device)
