from dataclasses import replace

import numpy as np
import pytest
import torch

import mechanisms
from mechanisms.models.lstm import Lstm, LstmConfig
from tests.mechanisms.checks import (
    check_seed_determines_weights,
    dropout_calls,
)

SMALL = LstmConfig(d_input=6, d_output=3, d_embed=5, d_hidden=4)
CONFIGS = {
    "one layer": SMALL,
    "two layers": replace(SMALL, n_layers=2),
    "both directions": replace(SMALL, bidirectional=True),
    "both, two layers": replace(SMALL, n_layers=2, bidirectional=True),
}
LENGTHS = (5, 1, 3, 2)
TOKENS = torch.tensor([[2, 0, 5, 1, 1], [4, -1, -1, -1, -1], [1, 3, 3, -1, -1], [5, 2, -1, -1, -1]])


def build(config, seed=0, dtype=torch.float32):
    model = Lstm(config, generator=torch.Generator().manual_seed(seed)).eval().to(dtype)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in model.parameters():
            # Zero biases would hide a missing bias.
            noise = torch.randn(parameter.shape, generator=generator, dtype=dtype)
            parameter.add_(0.5 * noise)
    return model.requires_grad_(False)


def add_identity_hooks(model):
    """Add hooks to all steps that change nothing."""
    model.set_positions(TOKENS.shape[1])
    for name in model.hook_dict:
        if "steps" in name:
            model.add_hook(name, lambda activation, hook: activation)
    return model


@pytest.fixture(params=CONFIGS.values(), ids=list(CONFIGS))
def model(request):
    return build(request.param)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def slow_direction(inputs, lstm):
    """Hochreiter & Schmidhuber with forget gates, one number at a time."""
    weights = [parameter.numpy() for parameter in lstm.parameters()]
    input_weights, hidden_weights, input_bias, hidden_bias = weights
    width = lstm.hidden_size
    hidden, cell, hiddens, cells = np.zeros(width), np.zeros(width), [], []
    for x in inputs:
        sums = np.zeros(4 * width)
        for row in range(4 * width):
            sums[row] = input_bias[row] + hidden_bias[row]
            sums[row] += sum(w * value for w, value in zip(input_weights[row], x, strict=True))
            sums[row] += sum(w * h for w, h in zip(hidden_weights[row], hidden, strict=True))
        new_hidden, new_cell = np.zeros(width), np.zeros(width)
        for unit in range(width):
            write, forget, content, out = (sums[unit + width * gate] for gate in range(4))
            new_cell[unit] = sigmoid(forget) * cell[unit] + sigmoid(write) * np.tanh(content)
            new_hidden[unit] = sigmoid(out) * np.tanh(new_cell[unit])
        hidden, cell = new_hidden, new_cell
        hiddens.append(hidden)
        cells.append(cell)
    return hiddens, cells


def slow_model(model, tokens):
    """Logits and every layer's states for one sequence without padding."""
    config = model.config
    x = [model.W_E.numpy()[token] for token in tokens]
    states, final = [], np.zeros(0)
    for layer in model.layers:
        hiddens, cells = slow_direction(x, layer.lstm)
        states.append({"hidden": hiddens, "cell": cells})
        final = hiddens[-1]
        if config.bidirectional:
            backward, backward_cells = slow_direction(x[::-1], layer.backward_lstm)
            states[-1] |= {"backward_hidden": backward[::-1], "backward_cell": backward_cells[::-1]}
            final = np.concatenate((hiddens[-1], backward[-1]))
            hiddens = [np.concatenate(pair) for pair in zip(hiddens, backward[::-1], strict=True)]
        x = hiddens
    return final @ model.W_U.numpy() + model.b_U.numpy(), states


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("stepwise", [False, True], ids=["fused", "stepwise"])
def test_agrees_with_the_equations_one_number_at_a_time(config, stepwise):
    model = build(config, dtype=torch.float64)
    if stepwise:
        add_identity_hooks(model)
    logits = model(TOKENS)
    _, cache = model.run_with_cache(TOKENS)
    assert logits.shape == (4, 1, config.d_output)
    for row, length in enumerate(LENGTHS):
        expected, states = slow_model(model, TOKENS[row, :length].tolist())
        np.testing.assert_allclose(logits[row, 0], expected, atol=1e-12)
        for layer, state in enumerate(states):
            for position in range(length):
                for direction in ("", "backward_")[: 1 + config.bidirectional]:
                    for quantity in ("hidden", "cell"):
                        name = f"layers.{layer}.{direction}steps.{position}.hook_{quantity}"
                        theirs = state[direction + quantity][position]
                        np.testing.assert_allclose(cache[name][row], theirs, atol=1e-12)


def test_hooks_change_neither_outputs_nor_gradients(model):
    fused, stepwise = model, add_identity_hooks(build(model.config))
    results = []
    for network in (fused, stepwise):
        network.requires_grad_(True)
        hiddens = []
        network.add_hook(
            "layers.0.hook_hidden",
            lambda tensor, *, hook, hiddens=hiddens: hiddens.append(tensor.detach()),
        )
        logits = network(TOKENS)
        logits.square().sum().backward()
        results.append((logits.detach(), *hiddens, *(p.grad for p in network.parameters())))
    for ours, theirs in zip(*results, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)
    for name, parameter in fused.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 1e-4, name


def test_the_fused_kernel_runs_only_without_hooks(model, monkeypatch):
    calls = []
    kernel = torch.nn.LSTM.forward
    monkeypatch.setattr(
        torch.nn.LSTM, "forward", lambda self, x: calls.append(self) or kernel(self, x)
    )
    directions = 1 + model.config.bidirectional
    model(TOKENS)
    assert len(calls) == model.config.n_layers * directions
    calls.clear()
    model.run_with_hooks(TOKENS, fwd_hooks=[("layers.0.hook_hidden", lambda x, hook: x)])
    assert len(calls) == model.config.n_layers * directions
    calls.clear()
    model.run_with_hooks(TOKENS, fwd_hooks=[("layers.0.steps.1.hook_cell", lambda x, hook: x)])
    assert len(calls) == model.config.n_layers * directions - 1


def test_logits_do_not_depend_on_padding(model):
    for prepare in (lambda model: model, add_identity_hooks):
        logits = prepare(model)(TOKENS)
        wider = torch.cat((TOKENS, torch.full((4, 3), -1)), 1)
        assert torch.allclose(model(wider), logits, atol=1e-6)
        for row, length in enumerate(LENGTHS):
            unpadded = model(TOKENS[row : row + 1, :length])
            assert torch.allclose(unpadded, logits[row : row + 1], atol=1e-6)


def test_hook_names_and_shapes(model):
    config = model.config
    model.set_positions(5)
    _, cache = model.run_with_cache(TOKENS)
    assert set(cache) == set(model.hook_dict)
    directions = ("steps", "backward_steps") if config.bidirectional else ("steps",)
    shapes = {"hook_embed": (4, 5, config.d_embed)}
    for layer in range(config.n_layers):
        width = config.d_hidden * len(directions)
        shapes[f"layers.{layer}.hook_hidden"] = (4, 5, width)
        shapes |= {
            f"layers.{layer}.{direction}.{position}.hook_{quantity}": (4, config.d_hidden)
            for direction in directions
            for position in range(5)
            for quantity in ("cell", "hidden")
        }
        # The hidden states of the layer are those of the steps, and 0 at padding.
        hidden = cache[f"layers.{layer}.hook_hidden"]
        for position in range(5):
            steps = [
                cache[f"layers.{layer}.{direction}.{position}.hook_hidden"]
                for direction in directions
            ]
            inside = torch.tensor([position < length for length in LENGTHS])[:, None]
            assert torch.equal(hidden[:, position], torch.cat(steps, -1) * inside)
    assert {name: tuple(cache[name].shape) for name in cache} == shapes


def test_hook_points_of_steps_are_created_as_needed():
    model = build(SMALL)
    assert "layers.0.steps.0.hook_hidden" not in model.hook_dict
    model.set_positions(2)
    assert "layers.0.steps.1.hook_hidden" in model.hook_dict
    assert "layers.0.steps.2.hook_hidden" not in model.hook_dict
    step = model.hook_dict["layers.0.steps.1.hook_hidden"]
    model(TOKENS)
    assert "layers.0.steps.4.hook_cell" in model.hook_dict
    assert model.hook_dict["layers.0.steps.1.hook_hidden"] is step
    model.set_positions(1)
    assert "layers.0.steps.4.hook_cell" in model.hook_dict
    assert not any("steps" in name for name in model.state_dict())
    with pytest.raises(ValueError, match="n_positions must be at least 0, got -1"):
        model.set_positions(-1)


@pytest.mark.parametrize("quantity", ["cell", "hidden"])
@pytest.mark.parametrize("direction", ["steps", "backward_steps"])
def test_a_changed_step_affects_only_later_steps_of_its_direction(quantity, direction):
    model = build(CONFIGS["both directions"])
    model.set_positions(5)
    unchanged, before = model.run_with_cache(TOKENS)
    with model.hooks([(f"layers.0.{direction}.2.hook_{quantity}", lambda x, hook: x + 1)]):
        logits, after = model.run_with_cache(TOKENS, reset_hooks_end=False)
    for other in ("steps", "backward_steps"):
        for position in range(5):
            name = f"layers.0.{other}.{position}.hook_hidden"
            changed = other == direction and (
                position >= 2 if direction == "steps" else position <= 2
            )
            # The first sequence has 5 positions, the last one 2, hence no position 2.
            assert torch.allclose(before[name][0], after[name][0], atol=1e-6) != changed, name
            if position < 2 or other != direction:
                assert torch.allclose(before[name][3], after[name][3], atol=1e-6), name
    assert not torch.allclose(unchanged[0], logits[0], atol=1e-4)
    assert torch.allclose(unchanged[3], logits[3], atol=1e-6)


def test_each_hook_point_changes_the_output_of_the_longest_sequence(model):
    model.set_positions(5)
    unchanged = model(TOKENS)
    for name in model.hook_dict:
        logits = model.run_with_hooks(TOKENS, fwd_hooks=[(name, lambda x, hook: x + 1)])
        assert not torch.allclose(logits[0], unchanged[0], atol=1e-6), name
    assert torch.equal(model(TOKENS), unchanged)


def test_dropout_is_on_embeddings_and_between_layers(monkeypatch):
    config = replace(CONFIGS["both, two layers"], dropout=0.25)
    model = build(config)
    shapes = [(4, 5, 5), (4, 5, 8)]
    calls = dropout_calls(model, TOKENS, monkeypatch)
    assert calls == [(shape, 0.25, False) for shape in shapes]
    output = model(TOKENS)
    model.train()
    assert not torch.allclose(model(TOKENS), output)


def test_the_seed_determines_the_weights():
    check_seed_determines_weights(
        lambda generator: Lstm(CONFIGS["both, two layers"], generator=generator)
    )


def test_initial_weights_are_those_of_torch():
    """Uniform as torch's LSTM and linear layers, biases too; embeddings N(0, 1)."""
    config = replace(SMALL, d_input=50, d_embed=100, d_hidden=64, d_output=50, n_layers=2)
    model = Lstm(config, generator=torch.Generator().manual_seed(0))
    assert model.W_E.shape == (50, 100)
    for name, weight in model.named_parameters():
        if name == "W_E":
            assert abs(weight.std() - 1) < 0.05
            assert weight.abs().max() > 3
        else:
            assert 0.9 / 8 < weight.abs().max() <= 1 / 8, name
            assert abs(weight.square().mean() * 3 * 64 - 1) < 0.3, name


def test_a_sequence_without_tokens_is_refused():
    model = build(SMALL)
    with pytest.raises(ValueError, match="at least one token, got padding only"):
        model(torch.tensor([[1, 2], [-1, -1]]))
    with pytest.raises(ValueError, match="token ids must be less than 6, got 6"):
        model(torch.tensor([[1, 6]]))


def test_it_keeps_the_rules_of_a_mechanism(model):
    mechanisms.check(model.requires_grad_(True), TOKENS)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"d_input": 0}, "d_input must be at least 1, got 0"),
        ({"d_hidden": -2}, "d_hidden must be at least 1, got -2"),
        ({"n_layers": 0}, "n_layers must be at least 1, got 0"),
        ({"dropout": 1.0}, r"dropout must be in \[0, 1\), got 1.0"),
    ],
)
def test_invalid_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        replace(SMALL, **settings)
