import math
from dataclasses import replace

import pytest
import torch

import mechanisms
from mechanisms import (
    AttentionConfig,
    CompositionalAttentionConfig,
    FeedForwardConfig,
    GeometricAttentionConfig,
    PatchTransformer,
    PatchTransformerConfig,
    sinusoidal_embedding,
)
from tests.mechanisms.checks import (
    check_seed_determines_weights,
)
from tests.mechanisms.torch_layers import encoder_layer, shake

SMALL = PatchTransformerConfig(
    image_size=6,
    patch_size=2,
    n_channels=3,
    d_output=4,
    d_model=8,
    n_layers=2,
    attention=AttentionConfig(n_heads=2, d_head=4),
    feed_forward=FeedForwardConfig(d_mlp=12, activation="relu"),
)
CONFIGS = {
    "plain": SMALL,
    "question": replace(SMALL, d_condition=5),
    "question beside": replace(
        SMALL,
        d_condition=5,
        condition="beside",
        positions="fast_sinusoidal",
        final_norm=False,
        norm_epsilon=1e-5,
        initialization="uniform",
    ),
    "tasks": replace(SMALL, d_output=(4, 2, 3)),
    "hidden layers": replace(SMALL, d_output=(4, 2, 3), embedding="mlp", d_readout=7),
    "separate": replace(SMALL, shared=False),
    "sinusoidal": replace(SMALL, positions="sinusoidal"),
    "geometric": replace(SMALL, attention=GeometricAttentionConfig(n_heads=2, d_head=4)),
    "hyla": replace(SMALL, attention=AttentionConfig.named("hyla", n_heads=2, d_head=4)),
    "compositional": replace(
        SMALL, attention=CompositionalAttentionConfig(n_searches=2, n_retrievals=3, d_head=4)
    ),
}
TASK_IDS = torch.tensor([0, 1, 2, 1, 0])


def build(config, seed=0):
    return shake(PatchTransformer(config, generator=torch.Generator().manual_seed(seed)))


def inputs_for(config, seed=1):
    generator = torch.Generator().manual_seed(seed)
    image = torch.rand(5, 3, 6, 6, generator=generator)
    if config.d_condition is not None:
        return image, torch.randn(5, config.d_condition, generator=generator)
    return (image, TASK_IDS) if isinstance(config.d_output, tuple) else (image,)


@pytest.fixture(params=CONFIGS.values(), ids=CONFIGS.keys())
def model(request):
    return build(request.param)


LITERAL = (
    *("plain", "question", "question beside", "tasks", "hidden layers", "separate", "sinusoidal"),
)


def literal_sinusoids(n, d):
    """The formula in the published code, entry by entry."""
    scale = 1 / (1 + math.exp(-1))
    table = torch.zeros(n, d)
    for p in range(n):
        for c in range(0, d, 2):
            table[p, c] = scale * math.sin(p / 10_000 ** (2 * c / d))
            table[p, c + 1] = scale * math.cos(p / 10_000 ** (2 * (c + 1) / d))
    return table


@pytest.mark.parametrize("name", LITERAL)
def test_agrees_with_literal_patches_and_torchs_own_layers(name):
    config = CONFIGS[name]
    model = build(config)
    inputs = inputs_for(config)
    is_fast = config.positions == "fast_sinusoidal"
    positions = literal_sinusoids(9, 4) if is_fast else sinusoidal_embedding(9, 8)
    positions = positions if model.W_pos is None else model.W_pos
    for example, image in enumerate(inputs[0]):
        tokens = []
        for row in range(3):
            for column in range(3):
                patch = image[:, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2]
                code = patch.flatten() @ model.W_E + model.b_E
                if model.W_E2 is not None:
                    code = code.relu() @ model.W_E2 + model.b_E2
                tokens.append(code + positions[len(tokens)])
        task = int(TASK_IDS[example]) if isinstance(config.d_output, tuple) else 0
        cls = model.cls[task] if isinstance(config.d_output, tuple) else model.cls
        if config.d_condition:
            question = inputs[1][example] @ model.W_condition + model.b_condition
        if name == "question beside":
            pairs = [torch.cat([token, question]) for token in (*tokens, cls)]
            x = torch.stack([pair @ model.W_join + model.b_join for pair in pairs])[None]
        else:
            x = torch.stack([*tokens, *([question] if name == "question" else []), cls])[None]
        for layer in range(2):
            x = encoder_layer(model.core or model.blocks[layer])(x)
        n_classes = config.n_classes[task]
        state = x[0, -1] if model.ln_final is None else model.ln_final(x[0, -1])
        if model.W_hidden is not None:
            state = (state @ model.W_hidden + model.b_hidden).relu()
        logits = (state @ model.W_U[task] + model.b_U[task])[:n_classes]
        ours = model(*inputs)[example, 0]
        assert torch.allclose(ours[:n_classes], logits, atol=1e-5)
        assert torch.equal(ours[n_classes:], torch.full((4 - n_classes,), -torch.inf))


def test_hooks_leave_outputs_unchanged(model):
    inputs = inputs_for(model.config)
    logits, cache = model.run_with_cache(*inputs)
    assert torch.allclose(model(*inputs), logits, atol=1e-5)
    assert set(cache) == set(model.hook_dict)
    assert logits.shape == (5, 1, 4)
    config = model.config
    n_positions = 9 + 1 + (config.d_condition is not None and config.condition == "token")
    for layer in range(2):
        block = f"blocks.{layer}"
        for name in ("resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post"):
            assert cache[f"{block}.hook_{name}"].shape == (5, n_positions, 8)
        assert cache[f"{block}.attn.hook_pattern"].shape == (5, 2, n_positions, n_positions)
        assert cache[f"{block}.attn.hook_z"].shape == (5, n_positions, 2, 4)


def test_it_keeps_the_rules_of_a_mechanism(model):
    mechanisms.check(model, inputs_for(model.config))


def test_the_last_block_computes_only_the_class_token():
    model, (image,) = build(SMALL), inputs_for(SMALL)
    n_positions, forward = [], model.core.mlp.forward

    def count_positions(x, *, hooks):
        n_positions.append(x.shape[1])
        return forward(x, hooks=hooks)

    # Not a hook: hooks make the block compute all positions.
    model.core.mlp.forward = count_positions
    model(image)
    model.run_with_cache(image)
    assert n_positions == [10, 1, 10, 10]


def test_shared_weights_equal_a_stack_of_copies():
    shared = build(SMALL)
    stack = build(CONFIGS["separate"])
    weights = shared.state_dict()
    stack.load_state_dict(
        {
            name: weights["core." + name.split(".", 2)[2]] if "blocks." in name else weights[name]
            for name in stack.state_dict()
        }
    )
    assert sum(w.numel() for w in weights.values()) < sum(
        w.numel() for w in stack.state_dict().values()
    )
    assert torch.allclose(stack(*inputs_for(SMALL)), shared(*inputs_for(SMALL)), atol=1e-6)


def test_shared_weights_allow_other_numbers_of_steps():
    model, inputs = build(SMALL), inputs_for(SMALL)
    longer = PatchTransformer(replace(SMALL, n_layers=4)).eval()
    longer.load_state_dict(model.state_dict())
    assert torch.allclose(model(*inputs, n_steps=4), longer(*inputs), atol=1e-6)
    assert "blocks.3.attn.hook_pattern" in model.hook_dict
    assert not torch.allclose(model(*inputs, n_steps=1), model(*inputs))
    with pytest.raises(ValueError, match="n_steps must be 2 with shared=False, got 3"):
        build(CONFIGS["separate"])(*inputs, n_steps=3)


def test_the_gradient_of_a_task_reaches_its_own_head_only():
    model = PatchTransformer(CONFIGS["tasks"]).train()
    logits = model(inputs_for(CONFIGS["tasks"])[0], torch.full((5,), 1))
    torch.nn.functional.cross_entropy(logits[:, 0], torch.tensor([0, 1, 0, 1, 1])).backward()
    used = model.W_U.grad.abs().amax(1) > 0
    assert used.tolist() == [[False] * 4, [True, True, False, False], [False] * 4]
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


def test_dropout_is_applied_in_training_only():
    model = build(replace(SMALL, dropout=0.5))
    inputs = inputs_for(SMALL)
    assert torch.equal(model(*inputs), build(SMALL)(*inputs))
    model.train()
    assert not torch.equal(model(*inputs), model(*inputs))


def test_uniform_weights_are_those_of_torchs_linear_layers():
    """The largest of many entries is close to 1 / sqrt(fan_in), and the variance is a third."""
    config = replace(
        CONFIGS["question beside"],
        d_model=64,
        d_condition=50,
        attention=AttentionConfig(n_heads=4, d_head=16),
    )
    model = PatchTransformer(config, generator=torch.Generator().manual_seed(0))
    fans = {"W_E": 12, "W_condition": 50, "W_join": 64, "W_U": 64}
    fans |= {f"core.attn.W_{letter}": 64 for letter in "QKVO"}
    fans |= {"core.mlp.W_in": 64, "core.mlp.W_out": 12, "b_join": 64}
    for name, fan_in in fans.items():
        weight = model.get_parameter(name).detach()
        assert 0.9 < weight.abs().max() * fan_in**0.5 <= 1, name
        if weight.numel() > 500:
            assert weight.var() * fan_in == pytest.approx(1 / 3, rel=0.15), name
    assert model.cls.abs().max() > 1
    assert (model.core.ln1.weight == 1).all()


def test_the_seed_determines_the_weights():
    check_seed_determines_weights(
        lambda generator: PatchTransformer(CONFIGS["question"], generator=generator)
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"patch_size": 4}, r"patch_size must divide image_size = 6, got 4"),
        ({"n_layers": 0}, r"n_layers must be at least 1, got 0"),
        ({"d_output": 0}, r"d_output must be at least 1 for every task, got 0"),
        ({"d_output": ()}, r"d_output must be at least 1 for every task, got \(\)"),
        ({"d_condition": 0}, r"d_condition must be None or at least 1, got 0"),
        ({"d_condition": 3, "d_output": (2, 3)}, r"d_condition must be None with several tasks"),
        ({"d_model": 7, "d_condition": 3, "condition": "beside"}, r"d_model must be even .* got 7"),
        ({"initialization": "uniform"}, r"positions must be sinusoidal or .* got 'learned'"),
        ({"d_readout": 0}, r"d_readout must be at least 1, got 0"),
        ({"norm_epsilon": 0.0}, r"norm_epsilon must be greater than 0, got 0.0"),
        ({"embedding": "conv"}, r"embedding must be one of linear, mlp, got 'conv'"),
        ({"positions": "relative"}, r"positions must be one of learned, sinusoidal"),
        ({"dropout": 1.0}, r"dropout must be in \[0, 1\), got 1.0"),
    ],
)
def test_invalid_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        replace(SMALL, **settings)


def test_invalid_inputs_are_refused():
    image = torch.zeros(2, 3, 6, 6)
    with pytest.raises(ValueError, match=r"image must be \[batch, \*\(3, 6, 6\)\], got \[2, 1"):
        build(SMALL)(image[:, :1])
    with pytest.raises(ValueError, match=r"condition must not be None with d_condition = 5"):
        build(CONFIGS["question"])(image)
    with pytest.raises(
        ValueError, match=r"condition must not be None .* d_output = \(4, 2, 3\), got None"
    ):
        build(CONFIGS["tasks"])(image)
    with pytest.raises(ValueError, match=r"condition must be None .* got \[2, 5\]"):
        build(SMALL)(image, torch.zeros(2, 5))


@pytest.mark.parametrize("task", [-1, 3])
def test_a_task_that_there_is_not_is_refused(task):
    model = build(CONFIGS["tasks"])
    with pytest.raises(ValueError, match=rf"tasks must be in \[0, 3\), got {task}"):
        model(inputs_for(model.config)[0], torch.tensor([0, 1, 2, 1, task]))
