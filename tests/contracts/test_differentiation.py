"""Half precision, second derivatives and transforms of `torch.func` for all that is exported."""

import inspect

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.func import functional_call, grad, hessian, jacrev, jvp, vmap
from torch.testing import assert_close

import mechanisms
from tests.contracts.examples import ATTENTION_CONFIGS, ATTENTIONS, examples_of
from tests.contracts.models import MODELS, build

WIDTH = 8
every_attention = pytest.mark.parametrize("config", ATTENTIONS)
every_model = pytest.mark.parametrize("name", MODELS)
# Roundings of 2^-8 and 2^-11, relative to the numbers, accumulate over some tens of operations.
HALF_PRECISIONS = {torch.bfloat16: 0.1, torch.float16: 0.0125}
every_precision = pytest.mark.parametrize("dtype", HALF_PRECISIONS, ids=str)


def attention_of(config):
    return config.build(WIDTH, generator=torch.Generator().manual_seed(0)).double().eval()


def tokens(n_examples, n_positions):
    generator = torch.Generator().manual_seed(0)
    shape = (n_examples, n_positions, WIDTH)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def model_of(name):
    """A model in float64, its weights by name, and its inputs in float64."""
    config, inputs = MODELS[name]
    model = build(config).double().eval()
    weights = {key: weight.detach() for key, weight in model.named_parameters()}
    return model, weights, [x.double() if x.is_floating_point() else x for x in inputs]


def gradients(loss, weights, **options):
    """One vector of all gradients; weights without one count as 0."""
    found = torch.autograd.grad(loss, weights, allow_unused=True, **options)
    pairs = zip(found, weights, strict=True)
    return torch.cat([(torch.zeros_like(w) if g is None else g).flatten() for g, w in pairs])


def trained(module, call, dtype=None):
    """Loss and gradients of a training step, under autocast if a dtype is given."""
    module = module.train()
    module.zero_grad()
    torch.manual_seed(0)
    with torch.autocast("cpu", dtype, enabled=dtype is not None):
        loss = call(module).float().square().mean()
    loss.backward()
    for name, weight in module.named_parameters():
        assert weight.grad is not None, name
        assert weight.grad.dtype == weight.dtype, name
    return loss.detach(), torch.cat([w.grad.flatten() for w in module.parameters()])


def check_half_precision(module, call, dtype):
    loss, gradient = trained(module, call, dtype)
    exact_loss, exact = trained(module, call)
    tolerance = HALF_PRECISIONS[dtype]
    assert gradient.isfinite().all()
    assert_close(loss, exact_loss, rtol=tolerance, atol=0)
    assert (gradient - exact).norm() < 2 * tolerance * exact.norm()


def test_every_exported_module_is_in_a_model():
    exported = [getattr(mechanisms, name) for name in mechanisms.__all__]
    modules = {
        export
        for export in exported
        if inspect.isclass(export)
        and issubclass(export, nn.Module)
        and not inspect.isabstract(export)
    }
    used = {type(part) for config, _ in MODELS.values() for part in build(config).modules()}
    assert modules <= used


@every_attention
@every_precision
def test_attention_trains_in_half_precision(config, dtype):
    x = tokens(3, 6).float()
    mask = torch.ones(3, 1, 1, 6, dtype=torch.bool)
    mask[0, :, :, -1] = False
    bias = torch.linspace(-1, 1, config.n_heads * 36).view(1, config.n_heads, 6, 6)
    module = attention_of(config).float()
    check_half_precision(module, lambda module: module(x, x, mask=mask, bias=bias), dtype)


@every_model
@every_precision
def test_models_train_in_half_precision(name, dtype):
    config, inputs = MODELS[name]
    check_half_precision(build(config), lambda model: model(*inputs), dtype)


@every_attention
def test_first_and_second_derivatives_of_attention_are_differences(config):
    module, x = attention_of(config), tokens(1, 3).requires_grad_()
    bias = tokens(1, config.n_heads * 9)[..., :1].view(1, config.n_heads, 3, 3).requires_grad_()

    def call(x, bias):
        return module(x, x, bias=bias)

    assert gradcheck(call, (x, bias), fast_mode=True, check_batched_grad=True)
    assert gradcheck(call, (x, bias), fast_mode=True, check_forward_ad=True)
    assert gradgradcheck(call, (x, bias), fast_mode=True)


@every_attention
def test_transforms_of_attention_are_loops(config):
    module, x = attention_of(config), tokens(4, 3)

    def loss(x):
        return module(x[None], x[None]).square().sum()

    assert_close(vmap(module)(x[:, None], x[:, None])[:, 0], module(x, x))
    expected = torch.stack(
        [torch.autograd.grad(loss(each), each)[0] for each in x.clone().requires_grad_()]
    )
    assert_close(vmap(grad(loss))(x), expected)
    assert_close(vmap(jacrev(loss))(x), expected)
    with torch.no_grad():
        assert_close(jacrev(loss)(x[0]), expected[0])
    with forward_ad.dual_level():
        along = forward_ad.unpack_dual(loss(forward_ad.make_dual(x[0], x[1]))).tangent
    assert_close(along, (expected[0] * x[1]).sum())
    curvature = torch.autograd.functional.hessian(loss, x[0])
    assert_close(hessian(loss)(x[0]), curvature)


@every_attention
def test_what_a_transform_leaves_behind_does_not_change_later_training(config):
    module = attention_of(config)
    # A length of its own, so that no other test has filled what is cached.
    x = tokens(1, 11)
    vmap(grad(lambda x: module(x, x).square().sum()))(x[None])
    x.requires_grad_()
    gradient = torch.autograd.grad(module(x, x).square().sum(), x)[0]
    assert_close(grad(lambda x: module(x, x).square().sum())(x), gradient)


@pytest.mark.slow
@pytest.mark.parametrize("config", [examples_of(export)[0] for export in ATTENTION_CONFIGS])
def test_compiled_attention_trains(config):
    torch._dynamo.reset()
    module, x = attention_of(config), tokens(2, 4)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    weights = list(module.parameters())
    ours = gradients(compiled(x, x).square().sum(), weights)
    assert_close(ours, gradients(module(x, x).square().sum(), weights))


@every_model
def test_gradients_of_models_for_each_example_are_loops(name):
    model, weights, inputs = model_of(name)

    def loss(weights, *inputs):
        return functional_call(model, weights, tuple(x[None] for x in inputs)).square().sum()

    each = vmap(grad(loss), (None, *[0] * len(inputs)))(weights, *inputs)
    parameters = list(model.parameters())
    for i in range(len(inputs[0])):
        output = model(*[x[i : i + 1] for x in inputs])
        ours = torch.cat([gradient[i].flatten() for gradient in each.values()])
        assert_close(ours, gradients(output.square().sum(), parameters))


@every_model
def test_second_derivatives_of_models_agree(name):
    model, weights, inputs = model_of(name)

    def loss(weights):
        return functional_call(model, weights, tuple(inputs)).square().sum()

    _, product = jvp(grad(loss), (weights,), (weights,))
    parameters = list(model.parameters())
    first = gradients(model(*inputs).square().sum(), parameters, create_graph=True)
    direction = torch.cat([weight.flatten() for weight in weights.values()])
    second = gradients((first * direction).sum(), parameters)
    assert_close(torch.cat([part.flatten() for part in product.values()]), second)
