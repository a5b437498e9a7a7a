from dataclasses import replace

import pytest
import torch
from torch import nn

import mechanisms
from mechanisms import (
    AttentionConfig,
    CompositionalAttentionConfig,
    FeedForwardConfig,
    RelationClassifier,
    RelationClassifierConfig,
)
from mechanisms.attention.positions import interleaved_sinusoids
from mechanisms.models.relation_classifier import ContextNormalization, ImageEncoder
from tests.mechanisms.checks import (
    check_seed_determines_weights,
)
from tests.mechanisms.torch_layers import encoder_layer, shake

SMALL = RelationClassifierConfig(
    d_output=3,
    attention=AttentionConfig(n_heads=2, d_head=4),
    feed_forward=FeedForwardConfig(d_mlp=12, activation="relu"),
    d_model=8,
    n_layers=2,
    image_size=16,
)
CONFIGS = {
    "plain": SMALL,
    "windows": replace(SMALL, windows=(2, 3)),
    "linear": replace(SMALL, attention=AttentionConfig.named("linear", n_heads=2, d_head=4)),
    "compositional": replace(
        SMALL, attention=CompositionalAttentionConfig(n_searches=2, n_retrievals=3, d_head=4)
    ),
}
IMAGES = torch.rand(4, 5, 1, 16, 16, generator=torch.Generator().manual_seed(1))


def build(config, seed=0):
    return shake(RelationClassifier(config, generator=torch.Generator().manual_seed(seed)))


@pytest.fixture(params=CONFIGS.values(), ids=CONFIGS.keys())
def model(request):
    return build(request.param)


def test_context_normalization_agrees_with_a_literal_loop():
    norm = shake(ContextNormalization(3))
    z = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(0))
    for example in range(2):
        for feature in range(3):
            values = [float(z[example, image, feature]) for image in range(4)]
            mean = sum(values) / 4
            deviation = (sum((value - mean) ** 2 for value in values) / 3 + 1e-8) ** 0.5
            for image, value in enumerate(values):
                expected = (value - mean) / deviation * norm.gain[feature] + norm.shift[feature]
                assert torch.isclose(norm(z)[example, image, feature], expected, atol=1e-5)


def test_equal_images_are_normalised_to_the_shift_with_a_finite_gradient():
    norm = ContextNormalization(3)
    z = torch.ones(1, 2, 3, requires_grad=True)
    out = norm(z)
    assert torch.equal(out, norm.shift.expand(1, 2, 3))
    out.square().sum().backward()
    assert torch.isfinite(z.grad).all()


def test_the_encoder_agrees_with_torchs_own_layers():
    encoder = shake(ImageEncoder(16, 8))
    layers = []
    for weight, bias in zip(encoder.W_conv, encoder.b_conv, strict=True):
        convolution = nn.Conv2d(weight.shape[1], 32, 4, stride=2, padding=1)
        convolution.load_state_dict({"weight": weight, "bias": bias})
        layers += [convolution, nn.ReLU()]
    first, second = nn.Linear(32 * 2 * 2, 256), nn.Linear(256, 8)
    first.load_state_dict({"weight": encoder.W_in.T, "bias": encoder.b_in})
    second.load_state_dict({"weight": encoder.W_out.T, "bias": encoder.b_out})
    reference = nn.Sequential(*layers, nn.Flatten(), first, nn.ReLU(), second, nn.ReLU())
    assert torch.allclose(encoder(IMAGES[0]), reference(IMAGES[0]), rtol=1e-4, atol=1e-3)


def test_the_encoder_preserves_the_scale_of_its_input():
    encoder = ImageEncoder(32, 128, generator=torch.Generator().manual_seed(0))
    images = torch.randn(64, 1, 32, 32, generator=torch.Generator().manual_seed(0))
    assert 0.3 < encoder(images).square().mean() < 3


@pytest.mark.parametrize("name", ["plain", "windows"])
def test_the_model_agrees_with_its_components(name):
    model = build(CONFIGS[name])
    for example in range(4):
        codes = torch.stack([model.encoder(image[None])[0] for image in IMAGES[example]])
        windows = [codes] if name == "plain" else [codes[:2], codes[2:]]
        x = torch.cat([model.normalization(window[None]) for window in windows], 1)
        x = x + interleaved_sinusoids(0, 5, 8)
        for block in model.blocks:
            x = encoder_layer(block)(x)
        assert {norm.eps for norm in (model.ln_final, model.blocks[0].ln1)} == {1e-5}
        hidden = (model.ln_final(x).mean(1) @ model.W_hidden + model.b_hidden).relu()
        logits = hidden @ model.W_U + model.b_U
        assert torch.allclose(model(IMAGES)[example], logits, atol=1e-4)


def test_equal_images_are_encoded_once_and_alike():
    model = build(SMALL).requires_grad_()
    images = IMAGES[:, [0, 1, 0, 2, 1]]
    counts = []
    model.encoder.register_forward_hook(lambda module, args, out: counts.append(len(args[0])))

    def gradients(images):
        model.zero_grad()
        logits = model(images)
        logits.square().sum().backward()
        return logits, [weight.grad for weight in model.parameters()]

    logits, found = gradients(images)
    each, expected = gradients(images.requires_grad_())
    assert counts == [4 * 3, 4 * 5]
    torch.testing.assert_close(logits, each, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    assert (images.grad.abs().sum((2, 3, 4)) > 0).all()


def test_normalisation_removes_affine_changes_of_encodings():
    plain, windows = build(CONFIGS["plain"]), build(CONFIGS["windows"])

    def change_all(z, hook):
        return 3 * z - 2

    def change_windows(z, hook):
        return torch.cat([3 * z[:, :2] - 2, 0.5 * z[:, 2:] + 7], 1)

    def logits(model, change):
        return model.run_with_hooks(IMAGES, fwd_hooks=[("hook_encoded", change)])

    assert torch.allclose(logits(plain, change_all), plain(IMAGES), atol=1e-4)
    assert torch.allclose(logits(windows, change_windows), windows(IMAGES), atol=1e-4)
    assert not torch.allclose(logits(plain, change_windows), plain(IMAGES), atol=1e-3)


def test_hook_names_and_shapes_and_outputs_with_hooks(model):
    logits, cache = model.run_with_cache(IMAGES)
    assert torch.allclose(model(IMAGES), logits, atol=1e-6)
    assert logits.shape == (4, 1, 3)
    assert set(cache) == set(model.hook_dict)
    for name in ("hook_encoded", "hook_normalized", "hook_embed", "blocks.1.hook_resid_post"):
        assert cache[name].shape == (4, 5, 8), name
    assert cache["blocks.0.attn.hook_pattern"].shape == (4, 2, 5, 5)


def test_it_keeps_the_rules_of_a_mechanism(model):
    mechanisms.check(model, IMAGES)


@pytest.mark.parametrize("n_retrievals", [None, 2])
def test_initial_weights_are_those_of_the_authors(n_retrievals):
    """torch's own initialisers, for linear layers of the same sizes."""
    attention = AttentionConfig(n_heads=4, d_head=32)
    if n_retrievals:
        attention = CompositionalAttentionConfig(
            n_searches=4, n_retrievals=n_retrievals, d_head=32, d_selection=16
        )
    config = RelationClassifierConfig(
        d_output=40, attention=attention, feed_forward=FeedForwardConfig(d_mlp=512)
    )
    model = RelationClassifier(config, generator=torch.Generator().manual_seed(0))

    def spread(initialize, fan_in, fan_out, **arguments):
        weight = torch.empty(fan_out, fan_in)
        initialize(weight, **arguments)
        return weight.std().item()

    xavier, kaiming = nn.init.xavier_normal_, nn.init.kaiming_normal_
    half, relu = {"gain": 0.5**0.5}, {"nonlinearity": "relu"}
    expected = {
        "attn.W_Q": (xavier, 128, 128, half),
        "attn.W_V": (xavier, 128, 32 * (n_retrievals or 4), half),
        "attn.W_O": (xavier, 128, 128, {}),
        "mlp.W_in": (kaiming, 128, 512, relu),
        "mlp.W_out": (kaiming, 512, 128, relu),
    }
    if n_retrievals:
        expected |= {
            "attn.W_value_query": (xavier, 128, 64, half),
            "attn.W_value_key": (xavier, 32, 16, half),
        }
    pairs = {f"blocks.0.{name}": value for name, value in expected.items()}
    pairs |= {"W_hidden": (kaiming, 128, 256, relu), "W_U": (xavier, 256, 40, {})}
    for name, (initialize, fan_in, fan_out, arguments) in pairs.items():
        weight = model.get_parameter(name)
        assert weight.numel() == fan_in * fan_out, name
        theirs = spread(initialize, fan_in, fan_out, **arguments)
        assert weight.std().item() == pytest.approx(theirs, rel=0.12), name
    assert not any(p.any() for name, p in model.named_parameters() if ".b_" in name)


def test_the_seed_determines_the_weights():
    check_seed_determines_weights(lambda generator: RelationClassifier(SMALL, generator=generator))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"image_size": 12}, r"image_size must be a multiple of 8, got 12"),
        ({"d_output": 0}, r"d_output must be at least 1, got 0"),
        ({"d_model": 7}, "d_model must be even, got 7"),
        ({"windows": (2, 0)}, r"windows must be None or numbers of at least 2, got \(2, 0\)"),
    ],
)
def test_invalid_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        replace(SMALL, **settings)


def test_invalid_images_are_refused():
    with pytest.raises(ValueError, match=r"images must be \[batch, image, 1, 16, 16\], got \[4, 5"):
        build(SMALL)(IMAGES[..., :8])
    with pytest.raises(
        ValueError, match=r"number of images must be 5 with windows = \(2, 3\), got 4"
    ):
        build(CONFIGS["windows"])(IMAGES[:, :4])
    with pytest.raises(ValueError, match="number of images must be at least 2, got 1"):
        build(CONFIGS["plain"])(IMAGES[:, :1])
