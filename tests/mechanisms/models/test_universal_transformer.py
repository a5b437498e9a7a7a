"""Encoder-decoders with signals before each step, and with adaptive computation time."""

from dataclasses import replace

import pytest
import torch

import mechanisms
from mechanisms import (
    AttentionConfig,
    EncoderDecoder,
    EncoderDecoderConfig,
    FeedForwardConfig,
    HaltingConfig,
    sinusoidal_embedding,
)
from mechanisms.layers.step_signals import StepSignals
from tests.mechanisms.checks import check_saved_model_loads
from tests.mechanisms.torch_layers import decoder_layer, encoder_layer, shake

PLAIN = EncoderDecoderConfig(
    d_input=4,
    d_output=7,
    d_model=8,
    n_layers=4,
    attention=AttentionConfig(n_heads=2, d_head=4),
    feed_forward=FeedForwardConfig(d_mlp=12, activation="relu"),
    begin=5,
    end=6,
    padding=-1,
)
STEPPED = replace(PLAIN, positions_each_step=True, step_signal="learned")
GRAVES, T2T = HaltingConfig(initial_bias=-1.0), HaltingConfig(initial_bias=-1, rule="tensor2tensor")
CONFIGS = {
    "positions": replace(PLAIN, positions_each_step=True),
    "learned steps": STEPPED,
    "sinusoidal steps": replace(PLAIN, step_signal="sinusoidal"),
    "graves": replace(PLAIN, halting=GRAVES),
    "graves, with signals": replace(STEPPED, halting=GRAVES),
    "tensor2tensor": replace(STEPPED, halting=T2T),
    "tensor2tensor, post-LN": replace(STEPPED, halting=T2T, post_norm=True),
}
HALTING = [name for name, config in CONFIGS.items() if config.halting is not None]
SOURCE = torch.tensor([[0, 1, 2, 3], [3, 2, -1, -1], [1, -1, -1, -1]])
TARGET_IN = torch.tensor([[5, 0, 1, 2, 3], [5, 4, 4, -1, -1], [5, -1, -1, -1, -1]])


def build(config, seed=0, dtype=torch.float32):
    model = EncoderDecoder(config, generator=torch.Generator().manual_seed(seed))
    return shake(model).to(dtype)


@pytest.fixture(params=CONFIGS.values(), ids=CONFIGS.keys())
def model(request):
    return build(request.param)


def literal(config, x, signals, halt, update):
    """One sequence of columns through all steps, each column by itself; the states and costs.

    With tensor2tensor's rule line by line as in its code, including a slip: it subtracts the
    weights from all components.
    """
    n, d_model = x.shape
    columns = [{"spent": x.new_zeros(()), "steps": 0, "rest": x.new_zeros(())} for _ in range(n)]
    totals = [x.new_zeros(d_model) for _ in range(n)]
    for step in range(config.n_layers):
        before = x.clone()
        for i in range(n):
            if config.positions_each_step:
                before[i] = before[i] + sinusoidal_embedding(n, d_model)[i]
            if config.step_signal == "learned":
                before[i] = before[i] + d_model**0.5 * signals.table[step]
            if config.step_signal == "sinusoidal":
                before[i] = before[i] + sinusoidal_embedding(config.n_layers, d_model)[step]
        after = update(before)
        if halt is None:
            x = after
            continue
        is_graves, new = halt.config.rule == "graves_2016", []
        for i, column in enumerate(columns):
            if column["spent"] >= 1:
                new.append(x[i] if is_graves else after[i])
                continue
            new.append(after[i])
            p = torch.sigmoid((after if is_graves else before)[i] @ halt.w[0] + halt.b[0])
            column["steps"] += 1
            is_last = is_graves and step == config.n_layers - 1
            if column["spent"] + p > 1 - halt.config.epsilon or is_last:
                p = column["rest"] = 1 - column["spent"]
                column["spent"] = x.new_ones(())
            else:
                column["spent"] = column["spent"] + p
            totals[i] = totals[i] + p * after[i] - (0 if is_graves or config.post_norm else p)
        x = torch.stack(new)
    if halt is None:
        return x, x.new_full((n,), config.n_layers)
    return torch.stack(totals), torch.stack([one["steps"] + one["rest"] for one in columns])


def reference(model, row):
    """Logits and costs of one pair of sequences, without any padding."""
    config, encoder, decoder = model.config, model.encoder_core, model.decoder_core
    source, target = SOURCE[row][SOURCE[row] >= 0], TARGET_IN[row][TARGET_IN[row] >= 0]
    x, y = model.W_E[source], model.W_E_target[target]
    if not config.positions_each_step:
        x = x + sinusoidal_embedding(*x.shape)
        y = y + sinusoidal_embedding(*y.shape)
    layer, other = encoder_layer(encoder).to(x), decoder_layer(decoder).to(x)
    future = torch.ones(len(target), len(target), dtype=torch.bool).triu(1)
    halts = [getattr(core, "halt", None) for core in (encoder, decoder)]
    x, cost = literal(
        config, x, model.encoder_signals, halts[0], lambda state: layer(state[None])[0]
    )
    x = model.ln_encoded(x)[None]
    y, other_cost = literal(
        config,
        y,
        model.decoder_signals,
        halts[1],
        lambda state: other(state[None], x, tgt_mask=future)[0],
    )
    return model.ln_final(y) @ model.W_U + model.b_U, cost, other_cost


@pytest.mark.parametrize("name", CONFIGS)
def test_agrees_with_one_column_at_a_time(name):
    model = build(CONFIGS[name], dtype=torch.float64)
    logits, costs = model.forward_with_cost(SOURCE, TARGET_IN)
    assert torch.equal(model(SOURCE, TARGET_IN), logits)
    steps = []
    for row in range(3):
        expected, *expected_costs = reference(model, row)
        is_token = TARGET_IN[row] >= 0
        torch.testing.assert_close(logits[row][is_token], expected, rtol=0, atol=1e-9)
        for cost, one, there in zip(
            costs, expected_costs, (SOURCE[row] >= 0, is_token), strict=True
        ):
            torch.testing.assert_close(cost[row][there], one, rtol=0, atol=1e-9, check_dtype=False)
            steps += one.floor().tolist()
    # Some columns halt before others, so that the rules differ.
    assert len(set(steps)) > 1 or model.config.halting is None


@pytest.mark.parametrize("name", HALTING)
def test_the_gradient_of_the_ponder_cost_is_that_of_the_definition(name):
    model = build(CONFIGS[name], dtype=torch.float64).requires_grad_(True)
    costs = model.forward_with_cost(SOURCE, TARGET_IN)[1]
    ours = costs[0][SOURCE >= 0].sum() + costs[1][TARGET_IN >= 0].sum()
    theirs = sum(sum(cost.sum() for cost in reference(model, row)[1:]) for row in range(3))
    weights = [model.W_E, model.W_E_target, model.encoder_core.halt.w, model.decoder_core.halt.b]
    weights += [one for one in (model.encoder_signals.table,) if one is not None]
    for one, other in zip(
        torch.autograd.grad(ours, weights), torch.autograd.grad(theirs, weights), strict=True
    ):
        assert one.abs().sum() > 0
        # What is before the layers alone: the reference has copies of the layers' weights.
        torch.testing.assert_close(one, other, rtol=0, atol=1e-9)


def test_columns_that_never_halt_give_the_plain_transformer_and_the_whole_remainder():
    halting = HaltingConfig(initial_bias=-60.0)
    model, plain = (
        build(replace(STEPPED, halting=one), dtype=torch.float64) for one in (halting, None)
    )
    for core in (model.encoder_core, model.decoder_core):
        core.halt.b.fill_(-60.0)
    plain.load_state_dict({k: v for k, v in model.state_dict().items() if ".halt." not in k})
    logits, costs = model.forward_with_cost(SOURCE, TARGET_IN)
    torch.testing.assert_close(logits, plain(SOURCE, TARGET_IN), rtol=0, atol=1e-9)
    assert all(torch.allclose(cost, torch.full_like(cost, 4 + 1)) for cost in costs)
    assert all((cost == 4).all() for cost in plain.forward_with_cost(SOURCE, TARGET_IN)[1])


@pytest.mark.parametrize("rule", ["graves_2016", "tensor2tensor"])
def test_columns_that_halt_at_once_take_one_step(rule):
    model = build(replace(STEPPED, halting=HaltingConfig(rule=rule)))
    for core in (model.encoder_core, model.decoder_core):
        core.halt.b.fill_(60.0)
    plain = build(replace(STEPPED, halting=None))
    plain.load_state_dict({k: v for k, v in model.state_dict().items() if ".halt." not in k})
    calls = []
    model.encoder_core.mlp.register_forward_hook(lambda *_: calls.append(1))
    logits, costs = model.forward_with_cost(SOURCE, TARGET_IN)
    torch.testing.assert_close(logits, plain(SOURCE, TARGET_IN, n_steps=1))
    assert all((cost == 2).all() for cost in costs)
    assert len(calls) == 1
    observed, _ = model.run_with_cache(SOURCE, TARGET_IN)
    torch.testing.assert_close(observed, logits)
    assert len(calls) == 1 + 4


def test_padding_and_future_tokens_have_no_effect(model):
    logits = model(SOURCE, TARGET_IN)
    assert torch.allclose(logits[1:2, :3], model(SOURCE[1:2, :2], TARGET_IN[1:2, :3]), atol=1e-5)
    changed = TARGET_IN.clone()
    changed[0, 3:] = 0
    other = model(SOURCE, changed)[0]
    assert torch.equal(logits[0, :3], other[:3])
    assert not torch.allclose(logits[0, 3:], other[3:])


@pytest.mark.slow
@pytest.mark.parametrize("name", HALTING)
def test_each_hook_point_changes_the_output(name):
    model = build(CONFIGS[name])
    for core in (model.encoder_core, model.decoder_core):
        core.halt.b.fill_(-3.0)  # so that some columns run to the last step
    for stack in ("encoder", "decoder"):
        for step in range(4):
            for point in ("hook_running", "hook_probability"):
                assert f"{stack}_blocks.{step}.halt.{point}" in model.hook_dict
    # At the last step the weight is the remaining one, whatever the probability.
    last = ["*_blocks.3.halt.hook_probability"]
    optional = last if model.config.halting.rule == "graves_2016" else []
    mechanisms.check(model, (SOURCE, TARGET_IN), optional=optional)


@pytest.mark.parametrize("name", HALTING)
def test_hooks_can_halt_columns(name):
    model = build(CONFIGS[name])
    for core in (model.encoder_core, model.decoder_core):
        core.halt.b.fill_(-9.0)
    stop = ("encoder_blocks.2.halt.hook_running", lambda running, hook: torch.zeros_like(running))
    with model.hooks(fwd_hooks=[stop]):
        costs = model.forward_with_cost(SOURCE, TARGET_IN)[1]
        _, cache = model.run_with_cache(SOURCE, TARGET_IN)
    assert (costs[0] < 3.01).all()
    assert (costs[1] >= 4).all()
    assert (cache["encoder_blocks.3.halt.hook_running"] == 0).all()
    assert (cache["decoder_blocks.3.halt.hook_running"] == 1).all()


def test_greedy_equals_one_sequence_at_a_time(model):
    decoded = model.greedy(SOURCE, 6)
    for row in range(3):
        ids, prefix = SOURCE[row][SOURCE[row] >= 0][None], [5]
        while len(prefix) <= 6 and prefix[-1] != 6:
            prefix.append(int(model(ids, torch.tensor([prefix]))[0, -1].argmax()))
        assert decoded[row].tolist() == prefix[1:] + [-1] * (7 - len(prefix))


@pytest.mark.parametrize("halting", [None, GRAVES, T2T])
def test_sinusoidal_steps_allow_other_numbers_of_steps(halting):
    config = replace(STEPPED, step_signal="sinusoidal", halting=halting)
    model, longer = build(config), build(replace(config, n_layers=6))
    longer.load_state_dict(model.state_dict())
    inputs = SOURCE, TARGET_IN
    assert torch.allclose(model(*inputs, n_steps=6), longer(*inputs), atol=1e-6)
    assert not torch.allclose(model(*inputs, n_steps=1), model(*inputs))
    model.set_steps(8)
    assert "decoder_blocks.7.attn.hook_pattern" in model.hook_dict


def test_learned_steps_are_as_many_as_were_trained():
    model = build(STEPPED)
    assert not torch.allclose(model(SOURCE, TARGET_IN, n_steps=3), model(SOURCE, TARGET_IN))
    with pytest.raises(ValueError, match=r"n_steps must be at most n_layers = 4 .* got 5"):
        model(SOURCE, TARGET_IN, n_steps=5)
    with pytest.raises(ValueError, match=r"n_steps must be at most n_layers = 4 .* got 5"):
        model.greedy(SOURCE, 3, n_steps=5)


def test_signals_and_halting_units_start_as_in_tensor2tensor():
    """Signals with the scale 1 where they are added; encoder and decoder have their own."""
    config = replace(STEPPED, d_model=64, n_layers=100, initialization="xavier_uniform")
    model = EncoderDecoder(config, generator=torch.Generator().manual_seed(0))
    tables = [signals.table for signals in (model.encoder_signals, model.decoder_signals)]
    assert not torch.equal(*tables)
    for signals in (model.encoder_signals, model.decoder_signals):
        added = torch.stack([signals(torch.zeros(1, 1, 64), step)[0, 0] for step in range(100)])
        added = added - sinusoidal_embedding(1, 64)
        assert added.std().item() == pytest.approx(1, rel=0.03)
        assert added.abs().max() > 2.5  # not truncated
    halting = replace(PLAIN, d_model=64, halting=T2T, initialization="xavier_uniform")
    models = [EncoderDecoder(halting, generator=torch.Generator().manual_seed(i)) for i in range(9)]
    weights = torch.stack([model.encoder_core.halt.w for model in models])
    bound = (6 / (64 + 1)) ** 0.5
    assert 0.95 * bound < weights.abs().max() <= bound
    assert weights.std().item() == pytest.approx(bound / 3**0.5, rel=0.1)
    assert all(model.encoder_core.halt.b == -1 for model in models)
    plain = StepSignals("none", positions=False, n_steps=3, d_model=4)
    assert not list(plain.parameters())
    assert torch.equal(plain(torch.ones(1, 2, 4), 2), torch.ones(1, 2, 4))


@pytest.mark.parametrize("name", CONFIGS)
def test_trains_under_autocast(name):
    model = build(CONFIGS[name]).requires_grad_(True).train()
    losses = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            logits, costs = model.forward_with_cost(SOURCE, TARGET_IN)
        losses.append(logits.float().square().mean() + 0.01 * sum(one.mean() for one in costs))
    losses[1].backward()
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=0.1)
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


def test_a_saved_model_is_loaded_unchanged(model, tmp_path):
    check_saved_model_loads(model, (SOURCE, TARGET_IN), tmp_path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"step_signal": "cosine"}, "step_signal must be one of none, learned, sinusoidal, got"),
        ({"step_signal": "learned", "shared": False}, "shared must be True with .*, got False"),
        ({"halting": GRAVES, "shared": False}, "shared must be True with .*, got False"),
        ({"positions_each_step": True, "shared": False}, "shared must be True with .*, got False"),
    ],
)
def test_invalid_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        replace(PLAIN, **settings)


def test_an_unknown_rule_is_refused():
    with pytest.raises(ValueError, match="rule must be one of graves_2016, tensor2tensor, got"):
        HaltingConfig(rule="dehghani_2019")
