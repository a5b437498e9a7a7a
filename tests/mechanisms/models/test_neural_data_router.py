import dataclasses
from typing import get_args

import pytest
import torch

from mechanisms.attention.compositional import CompositionalAttentionConfig
from mechanisms.attention.geometric import GeometricAttentionConfig
from mechanisms.attention.multi_head import AttentionConfig
from mechanisms.attention.relative import RelativeAttentionConfig
from mechanisms.layers.copy_gate import CopyGate, CopyGateConfig
from mechanisms.layers.feed_forward import FeedForwardConfig
from mechanisms.layers.halting import HaltingConfig
from mechanisms.models.neural_data_router import (
    NeuralDataRouter,
    NeuralDataRouterConfig,
    RouterBlock,
    RouterVariant,
)
from tests.mechanisms.ndr_golden import (
    DTYPES,
    TOLERANCE,
    VARIANTS,
    block_weights,
    config,
    load,
    load_weights,
    router,
)
from tests.mechanisms.ndr_literal import classifier, random_layer, sinusoid
from tests.mechanisms.ndr_literal import layer as literal_layer

TOKENS = torch.tensor([[1, 2, 3, 4], [5, 0, -1, -1], [6, -1, -1, -1]])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parity_of_the_geometric_block(dtype):
    golden = load("ndr_layer_geometric_nonorm", dtype)
    block_config = config(
        attention=GeometricAttentionConfig(n_heads=4, d_head=3),
        feed_forward=FeedForwardConfig(d_mlp=20, activation="relu"),
    )
    check_block(block_config, golden, dtype, with_update=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parity_of_the_relative_block(dtype, monkeypatch):
    golden = load("ndr_layer_residual_absgate", dtype)
    table = load("ndr_relative_attn_absgate", dtype)["pos_table"]
    monkeypatch.setattr(
        "mechanisms.attention.relative.interleaved_sinusoids", lambda first, stop, d_model: table
    )
    block_config = config(
        attention=RelativeAttentionConfig(n_heads=2, d_head=6, gated=True),
        feed_forward=FeedForwardConfig(d_mlp=48, activation="relu"),
        gate=CopyGateConfig(update="tanh"),
    )
    check_block(block_config, golden, dtype, with_update=False)


def check_block(block_config, golden, dtype, *, with_update):
    block = load_weights(RouterBlock(block_config), block_weights(golden), dtype)
    activations = {}
    points = {"attn.hook_pattern": "att_attn", "hook_attn_out": "att_out", "hook_gate": "gate"}
    points |= {
        "hook_gate_logit": "gate_logit",
        "hook_resid_mid": "merged_normed",
        "hook_mlp_out": "data_ffn_out",
    }
    points |= {"hook_resid_post": "state"} | ({"hook_update": "update"} if with_update else {})
    for name in points:
        block.get_submodule(name).add_hook(
            lambda x, hook, name=name: activations.__setitem__(name, x)
        )
    h = golden["x"]
    for step in range(4):
        h = block(h, mask=~golden["pad_mask"][:, None, None])
        for name, theirs in points.items():
            error = (activations[name] - golden[theirs][step]).abs().max()
            assert error < TOLERANCE[dtype], (step, name)
    assert (h - golden["out"]).abs().max() < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parity_of_the_full_model(dtype):
    golden = load("ndr_classifier_last_nonorm", dtype)
    model = router(gate=CopyGateConfig())
    weights = {f"core.{name}": w for name, w in block_weights(golden, "layer.").items()}
    weights |= {"W_E": golden["embed"], "W_U": golden["W_out"], "b_U": golden["b_out"]}
    model = load_weights(model, weights, dtype)
    lengths = golden["lengths"]
    tokens = golden["tokens"].masked_fill(torch.arange(6) >= lengths[:, None], -1)
    logits, cache = model.run_with_cache(tokens)
    tolerance = TOLERANCE[dtype]
    assert (logits[:, 0] - golden["logits"]).abs().max() < tolerance
    is_token = torch.arange(8) <= lengths[:, None] + 1
    for step in range(5):
        for ours, theirs in (("hook_resid_post", "state"), ("hook_gate", "gate")):
            difference = cache[f"blocks.{step}.{ours}"] - golden[theirs][step]
            assert difference[is_token].abs().max() < tolerance


@pytest.mark.parametrize("name", VARIANTS)
def test_padding_has_no_effect(name):
    model = router(**VARIANTS[name]).eval()
    logits = model(TOKENS)
    for row, length in enumerate((4, 2, 1)):
        unpadded = model(TOKENS[row : row + 1, :length])
        assert torch.allclose(logits[row], unpadded[0], atol=1e-5)


@pytest.mark.parametrize("readout", ["first", "last"])
def test_the_logits_are_read_at_bos_or_eos(readout):
    model = router(readout=readout).eval()
    last = f"blocks.{model.config.n_steps - 1}.hook_resid_post"
    columns = [0, 0, 0] if readout == "first" else [5, 3, 2]

    def zero_other_columns(h, hook):
        result = torch.zeros_like(h)
        for row, column in enumerate(columns):
            result[row, column] = h[row, column]
        return result

    logits = model.run_with_hooks(TOKENS, fwd_hooks=[(last, zero_other_columns)])
    assert torch.allclose(logits, model(TOKENS), atol=1e-6)
    changed = model.run_with_hooks(TOKENS, fwd_hooks=[(last, lambda h, hook: 2 * h)])
    assert not torch.allclose(changed, model(TOKENS))


@pytest.mark.parametrize("name", VARIANTS)
def test_each_hook_point_changes_the_output(name):
    model = router(**VARIANTS[name]).eval()
    plain, cache = model.run_with_cache(TOKENS)
    assert set(cache) == set(model.hook_dict)
    for point in model.hook_dict:
        changed = model.run_with_hooks(
            TOKENS, fwd_hooks=[(point, lambda x, hook: x.nan_to_num(neginf=-9) ** 3)]
        )
        assert not torch.allclose(changed, plain, atol=1e-7), point


def test_an_intervention_changes_later_activations_only():
    model = router().eval()
    _, before = model.run_with_cache(TOKENS)
    model.add_hook("blocks.2.hook_gate", lambda gate, hook: 1 - gate)
    _, after = model.run_with_cache(TOKENS)
    unchanged = [name for name in before if torch.equal(before[name], after[name])]
    earlier = [name for name in before if name.startswith(("hook_embed", "blocks.0", "blocks.1"))]
    before_gate = {
        "hook_resid_pre",
        "hook_attn_out",
        "hook_resid_mid",
        "hook_mlp_out",
        "hook_update",
        "hook_gate_logit",
    }
    earlier += [f"blocks.2.{name}" for name in before_gate]
    earlier += [name for name in before if name.startswith(("blocks.2.attn", "blocks.2.mlp"))]
    assert sorted(unchanged) == sorted(earlier)


def test_steps_can_be_changed_at_call_time():
    model = router(n_steps=3).eval()
    longer = NeuralDataRouter(dataclasses.replace(model.config, n_steps=6))
    longer.load_state_dict(model.state_dict())
    assert torch.equal(model(TOKENS, n_steps=6), longer.eval()(TOKENS))
    assert "blocks.5.hook_gate" in model.hook_dict
    assert not torch.equal(model(TOKENS), model(TOKENS, n_steps=2))
    with pytest.raises(ValueError, match="n_steps must be at least 1 with shared=True, got 0"):
        model(TOKENS, n_steps=0)


def test_a_closed_gate_keeps_the_state():
    model = router().eval()
    close_gates = [
        (f"blocks.{step}.hook_gate", lambda gate, hook: torch.zeros_like(gate)) for step in range(5)
    ]
    with model.hooks(fwd_hooks=close_gates):
        _, cache = model.run_with_cache(TOKENS)
    assert torch.equal(cache["blocks.4.hook_resid_post"], cache["hook_embed"])


def test_the_logit_of_the_gate_is_that_before_the_sigmoid():
    model = router().eval()
    _, cache = model.run_with_cache(TOKENS)
    for step in range(5):
        logit = cache[f"blocks.{step}.hook_gate_logit"]
        assert torch.equal(logit.sigmoid(), cache[f"blocks.{step}.hook_gate"])
    closed = [(f"blocks.{step}.hook_gate_logit", lambda x, hook: x - 1e4) for step in range(5)]
    with model.hooks(fwd_hooks=closed):
        _, cache = model.run_with_cache(TOKENS)
    assert torch.equal(cache["blocks.4.hook_resid_post"], cache["hook_embed"])


@pytest.mark.parametrize("width", ["vector", "scalar"])
@pytest.mark.parametrize("d_hidden", [5, 40])
def test_blocks_with_any_gate_are_those_of_the_literal_formula(width, d_hidden):
    n_gates = 12 if width == "vector" else 1
    weights = random_layer(d_mlp=20, d_gate=d_hidden, n_gates=n_gates, kind="geometric")
    block_config = config(
        attention=GeometricAttentionConfig(n_heads=3, d_head=4, normalize=True),
        feed_forward=FeedForwardConfig(d_mlp=20, activation="relu"),
        gate=CopyGateConfig(width=width, d_hidden=d_hidden),
    )
    block = load_weights(RouterBlock(block_config), block_weights(weights), torch.float64)
    x = torch.randn(2, 5, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    pad_mask = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    ours, theirs = x, x
    for _ in range(3):
        ours = block(ours, mask=~pad_mask[:, None, None])
        theirs, _, _ = literal_layer(weights, theirs, normalize=True, pad_mask=pad_mask)
    assert torch.allclose(ours, theirs, atol=1e-10)


@pytest.mark.parametrize("sees", ["all", "own"])
@pytest.mark.parametrize("skips", ["layer", "feed_forward"])
def test_what_gates_see_and_skip(sees, skips):
    block = RouterBlock(config(gate=CopyGateConfig(sees=sees, skips=skips))).eval()
    x = torch.randn(1, 4, 12, generator=torch.Generator().manual_seed(0))
    other = torch.cat([x[:, :3], x[:, 3:] + 1], 1)
    gates, states = [], []
    block.hook_gate.add_hook(lambda gate, hook: gates.append(gate))
    block.hook_resid_mid.add_hook(lambda merged, hook: states.append(merged))
    block(x), block(other)
    own = torch.equal(gates[0][:, :3], gates[1][:, :3])
    assert own == (sees == "own")
    assert not torch.equal(gates[0][:, 3], gates[1][:, 3])
    with torch.no_grad():
        block.gate.b_out.fill_(-1000.0)
    kept = x if skips == "layer" else states[0]
    assert torch.allclose(block(x), kept, atol=1e-6)


def test_the_literal_formulas_are_those_of_the_authors():
    golden = load("ndr_layer_geometric_nonorm")
    h = golden["x"]
    for step in range(2):
        h, gate, logit = literal_layer(golden, h, pad_mask=golden["pad_mask"])
        for ours, theirs in ((h, "state"), (gate, "gate"), (logit, "gate_logit")):
            assert torch.allclose(ours, golden[theirs][step], atol=1e-10), theirs
    golden = load("ndr_classifier_last_nonorm")
    logits = classifier(
        golden, golden["tokens"], golden["lengths"], n_steps=5, readout="last", normalize=False
    )
    assert torch.allclose(logits, golden["logits"], atol=1e-10)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("readout", ["first", "last"])
def test_models_are_those_of_the_literal_formula(readout, normalize):
    layer = random_layer(d_mlp=24, d_gate=12, n_gates=12, kind="geometric")
    weights = {f"layer.{name}": weight for name, weight in layer.items()}
    generator = torch.Generator().manual_seed(1)
    for name, shape in {"embed": (9, 12), "W_out": (12, 5), "b_out": (5,)}.items():
        weights[name] = torch.randn(shape, generator=generator, dtype=torch.float64)
    attention = GeometricAttentionConfig(n_heads=3, d_head=4, normalize=normalize)
    model = router(readout=readout, attention=attention)
    ours = {f"core.{name}": w for name, w in block_weights(weights, "layer.").items()}
    ours |= {"W_E": weights["embed"], "W_U": weights["W_out"], "b_U": weights["b_out"]}
    logits = load_weights(model, ours, torch.float64)(TOKENS)[:, 0]
    lengths = torch.tensor([4, 2, 1])
    expected = classifier(weights, TOKENS, lengths, n_steps=5, readout=readout, normalize=normalize)
    assert torch.allclose(logits, expected, atol=1e-10)


@pytest.mark.parametrize("width", ["vector", "scalar"])
def test_gates_start_nearly_closed_and_are_dropped_for_whole_tokens(width):
    gate = CopyGate(CopyGateConfig(width=width, dropout=0.4), 12)
    x = torch.randn(50, 20, 12, generator=torch.Generator().manual_seed(0))
    gates = gate.eval()(x)
    assert gates.shape[-1] == {"vector": 12, "scalar": 1}[width]
    assert 0.02 < gates.mean() < 0.12
    torch.manual_seed(0)
    dropped = gate.train()(x)
    zero = (dropped == 0).all(-1)
    assert 0.35 < zero.float().mean() < 0.45
    assert torch.equal(dropped[~zero], gates[~zero])


def test_hidden_units_of_the_gate_are_dropped():
    gate = CopyGate(CopyGateConfig(d_hidden=7, hidden_dropout=0.3), 12)
    x = torch.randn(50, 20, 12, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        # Each logit is one hidden unit.
        gate.W_out.copy_(torch.eye(7, 12))
        gate.b_in += 10.0
    torch.manual_seed(0)
    factors = (gate.train().logits(x) + 3) / (gate.eval().logits(x) + 3)
    factors = factors[..., :7]
    assert torch.allclose(factors[factors > 0], torch.tensor(1 / 0.7), rtol=1e-4)
    assert torch.allclose((factors > 0).float().mean((0, 1)), torch.tensor(0.7), atol=0.06)
    assert ((factors > 0).sum(-1) % 7 != 0).any()


NAMED = {"d_input": 7, "d_output": 5, "d_model": 12, "d_mlp": 16, "n_heads": 3, "n_steps": 1}
RATES = {"dropout": 0.5, "attention_dropout": 0.2, "gate_dropout": 0.3}
ATTENTION_OUT, HIDDEN, MLP_OUT, GATE_HIDDEN = ((12, 0.5), (16, 0.5), (12, 0.5), (12, 0.5))
QUERIES, EMBEDDED = (4, 0.2), (12, 0.1)
PAPER = {
    # The paper's settings: attention, copy gate, embedding, and the places of dropout in order.
    "transformer": (
        AttentionConfig(n_heads=3, d_head=4, bias=False),
        None,
        "normal",
        [EMBEDDED, ATTENTION_OUT, HIDDEN, MLP_OUT],
    ),
    "relative": (
        RelativeAttentionConfig(n_heads=3, d_head=4, query_dropout=0.2),
        None,
        "kaiming_normal",
        [QUERIES, QUERIES, ATTENTION_OUT, HIDDEN, MLP_OUT],
    ),
    "relative_gate": (
        RelativeAttentionConfig(n_heads=3, d_head=4, query_dropout=0.2),
        CopyGateConfig(update="tanh", dropout=0.3, hidden_dropout=0.5),
        "normal",
        [QUERIES, QUERIES, ATTENTION_OUT, HIDDEN, GATE_HIDDEN],
    ),
    "abs_rel_gate": (
        RelativeAttentionConfig(n_heads=3, d_head=4, query_dropout=0.2, gated=True),
        CopyGateConfig(update="tanh", dropout=0.3, hidden_dropout=0.5),
        "normal",
        [QUERIES, QUERIES, ATTENTION_OUT, HIDDEN, GATE_HIDDEN],
    ),
    "geometric": (
        GeometricAttentionConfig(n_heads=3, d_head=4, query_dropout=0.2, normalize=True),
        None,
        "kaiming_normal",
        [QUERIES, ATTENTION_OUT, HIDDEN, MLP_OUT],
    ),
    "ndr": (
        GeometricAttentionConfig(n_heads=3, d_head=4, query_dropout=0.2),
        CopyGateConfig(dropout=0.3, hidden_dropout=0.5),
        "normal",
        [QUERIES, ATTENTION_OUT, HIDDEN, GATE_HIDDEN],
    ),
}


@pytest.mark.parametrize("variant", get_args(RouterVariant))
def test_named_variants_are_the_papers(variant, monkeypatch):
    attention, gate, embedding, places = PAPER[variant]
    config = NeuralDataRouterConfig.named(variant, **NAMED, **RATES)
    assert (config.attention, config.gate, config.embedding_init) == (attention, gate, embedding)
    assert config.sinusoidal == (variant == "transformer")
    of_keys = NeuralDataRouterConfig.named(variant, **NAMED, **RATES, attention_dropout_of="keys")
    if variant != "transformer":
        assert (of_keys.attention.query_dropout, of_keys.attention.key_dropout) == (0.0, 0.2)
    model = NeuralDataRouter(config)
    names = {name.split(".")[-1] for name, _ in model.core.attn.named_parameters()}
    biases = {name for name in names if name.startswith("b_")}
    assert biases == {"abs_rel_gate": {"b_gate"}}.get(
        variant, {"b_dir"} if variant in ("geometric", "ndr") else set()
    )
    calls = []

    def record(x, rate, training):
        if rate:
            calls.append((x.shape[-1], rate))
        return x

    files = ("models.neural_data_router", "layers.copy_gate", "layers.feed_forward")
    for file in (*files, "attention.geometric", "attention.relative"):
        monkeypatch.setattr(f"mechanisms.{file}.dropout", record)
    model(TOKENS)
    assert calls == places


@pytest.mark.slow
@pytest.mark.parametrize("kind", [GeometricAttentionConfig, RelativeAttentionConfig])
def test_compiled_attention_with_dropout_trains(kind):
    attention = kind(n_heads=3, d_head=4, query_dropout=0.2, key_dropout=0.2).build(12)
    compiled = torch.compile(attention, backend="aot_eager")
    x = torch.randn(2, 5, 12, generator=torch.Generator().manual_seed(0))
    compiled(x, x).square().sum().backward()
    assert all(weight.grad is not None for weight in attention.parameters())
    assert torch.allclose(compiled.eval()(x, x), attention.eval()(x, x), atol=1e-6)


def test_sinusoidal_positions_are_those_of_the_authors():
    model = router(**VARIANTS["transformer"]).eval()
    recorded = []
    model.hook_embed.add_hook(lambda h, hook: recorded.append(h))
    model(TOKENS)
    positions = recorded[0] - model.W_E[torch.tensor([8, 1, 2, 3, 4, 7])]
    expected = torch.stack([sinusoid(position, 12) for position in range(6)]).float()
    assert torch.allclose(positions[0], expected, atol=1e-5)


def test_embeddings_start_as_they_are_set():
    spread = {"normal": 1.0, "kaiming_normal": (2 / 64) ** 0.5, "xavier_uniform": (2 / 266) ** 0.5}
    for init, deviation in spread.items():
        W_E = router(d_input=200, d_model=64, embedding_init=init).W_E
        assert abs(W_E.std() / deviation - 1) < 0.03, init
        uniform = W_E.abs().max() < 3**0.5 * deviation
        assert uniform == (init == "xavier_uniform")


VARIANCES = {
    # Of models with d_model 48, three heads, and a hidden layer of 96, as in the authors' code.
    "ndr": {
        **dict.fromkeys(("attn.W_Q", "attn.W_K", "attn.W_V", "attn.W_O"), 2 / (48 + 16)),
        **dict.fromkeys(("attn.W_dir", "attn.b_dir", "mlp.b_in", "gate.b_in"), 1 / (3 * 48)),
        "mlp.W_in": 4 / (48 + 96),
        "mlp.W_out": (5 / 3) ** 2 * 2 / (48 + 96),
        "mlp.b_out": 1 / (3 * 96),
        "gate.W_in": 4 / (48 + 48),
        "gate.W_out": 2 / (48 + 48),
    },
    "abs_rel_gate": {
        **dict.fromkeys(("attn.W_Q", "attn.W_pos"), 2 / (48 + 48)),
        **dict.fromkeys(("attn.W_K", "attn.W_V"), 2 / (48 + 96)),
        **dict.fromkeys(("attn.W_O", "attn.W_gate", "attn.b_gate"), 1 / (3 * 48)),
        "mlp.W_in": 4 / (48 + 96),
        "mlp.W_out": 1 / (3 * 96),
        "gate.W_in": 4 / (48 + 48),
    },
    "transformer": {
        "attn.W_Q": 2 / (48 + 48),
        **dict.fromkeys(("attn.W_K", "attn.W_V"), 2 / (48 + 96)),
        "attn.W_O": 1 / (3 * 48),
        "mlp.W_in": 4 / (48 + 96),
        "mlp.W_out": 2 / (48 + 96),
    },
}


@pytest.mark.parametrize("variant", VARIANCES)
def test_weights_of_named_variants_start_as_in_the_authors_code(variant):
    sizes = NAMED | {"d_model": 48, "d_mlp": 96, "d_output": 30}
    config = NeuralDataRouterConfig.named(variant, **sizes)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    models = [
        NeuralDataRouter(config, generator=torch.Generator().manual_seed(seed))
        for seed in range(30)
    ]
    assert torch.equal(torch.get_rng_state(), before)
    variances = {f"core.{name}": variance for name, variance in VARIANCES[variant].items()}
    variances |= {"W_U": 1 / (3 * 48), "b_U": 1 / (3 * 48)}
    for name, variance in variances.items():
        weights = torch.stack([model.get_parameter(name).detach() for model in models])
        assert abs(weights.square().mean() / variance - 1) < 0.15, name
        # All are uniform.
        assert 0.9 * (3 * variance) ** 0.5 < weights.abs().max() <= (3 * variance) ** 0.5 + 1e-6
    if variant != "transformer":
        assert (models[0].core.gate.b_out == -3).all()
        assert (models[0].core.attn.content_bias == 0).all()


@pytest.mark.parametrize("initial_bias", [-0.5, -2.0])
def test_columns_halt_when_their_probabilities_sum_to_one_or_at_the_last_step(initial_bias):
    model = router(halting=HaltingConfig(initial_bias=initial_bias), n_steps=6).eval()
    logits, cache = model.run_with_cache(TOKENS)
    running = torch.stack([cache[f"blocks.{t}.halt.hook_running"] for t in range(6)])
    p = torch.stack([cache[f"blocks.{t}.halt.hook_probability"] for t in range(6)])
    states = torch.stack([cache[f"blocks.{t}.hook_resid_post"] for t in range(6)])
    # The definition, one column at a time (Graves 2016, equations 5 to 8).
    result, cost = torch.zeros(3, 6, 12), torch.zeros(3, 6)
    for row in range(3):
        for column in range(6):
            spent = 0.0
            for step in range(6):
                assert running[step, row, column] == 1
                probability = p[step, row, column].item()
                if spent + probability > 0.99 or step == 5:
                    result[row, column] += (1 - spent) * states[step, row, column]
                    cost[row, column] = step + 1 + 1 - spent
                    assert (running[step + 1 :, row, column] == 0).all()
                    break
                result[row, column] += probability * states[step, row, column]
                spent += probability
    expected = result[[0, 1, 2], [5, 3, 2]] @ model.W_U + model.b_U
    assert torch.allclose(logits[:, 0], expected, atol=1e-6)
    assert torch.allclose(model.forward_with_cost(TOKENS)[1], cost, atol=1e-6)
    assert 1 < running.sum(0).mean() < 6


def test_hooks_can_halt_columns():
    model = router(halting=HaltingConfig(initial_bias=-9.0)).eval()
    stop = [("blocks.2.halt.hook_running", lambda running, hook: torch.zeros_like(running))]
    with model.hooks(fwd_hooks=stop):
        _, cost = model.forward_with_cost(TOKENS)
        _, cache = model.run_with_cache(TOKENS)
    assert (cost < 3.01).all()
    assert torch.equal(cache["blocks.4.halt.hook_running"], torch.zeros(3, 6))


def test_halting_stops_early_with_the_same_result():
    model = router(halting=HaltingConfig(initial_bias=9.0), n_steps=4).eval()
    calls = []
    model.core.mlp.register_forward_hook(lambda *_: calls.append(1))
    fast = model(TOKENS)
    assert len(calls) == 1
    assert torch.allclose(model.run_with_cache(TOKENS)[0], fast, atol=1e-6)


def test_the_cost_without_halting_is_the_number_of_steps():
    assert torch.equal(router().forward_with_cost(TOKENS)[1], torch.full((3, 6), 5.0))


@pytest.mark.parametrize("variant", get_args(RouterVariant))
def test_named_variants_train(variant):
    config = NeuralDataRouterConfig.named(
        variant,
        d_input=7,
        d_output=5,
        d_model=12,
        d_mlp=16,
        n_heads=3,
        n_steps=3,
        dropout=0.1,
        attention_dropout=0.1,
        gate_dropout=0.1,
    )
    model = NeuralDataRouter(config, generator=torch.Generator().manual_seed(0))
    assert (config.gate is not None) == (variant in ("relative_gate", "abs_rel_gate", "ndr"))
    model(TOKENS).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all()


def test_invalid_settings_are_refused():
    sizes = {"d_input": 7, "d_output": 5, "d_model": 12, "d_mlp": 16, "n_steps": 3}
    with pytest.raises(ValueError, match=r"variant must be one of transformer, .* got 'lstm'"):
        NeuralDataRouterConfig.named("lstm", n_heads=3, **sizes)
    with pytest.raises(ValueError, match="n_heads must divide d_model = 12, got 5"):
        NeuralDataRouterConfig.named("ndr", n_heads=5, **sizes)
    odd = {"d_model": 11, "sinusoidal": True, "attention": AttentionConfig(n_heads=1, d_head=4)}
    with pytest.raises(ValueError, match="d_model must be even for the sinusoids, got 11"):
        config(**odd)
    compositional = CompositionalAttentionConfig(n_searches=3, n_retrievals=2, d_head=4)
    with pytest.raises(ValueError, match=r"attention must be one of Geometric.* got Comp"):
        config(attention=compositional, initialization="csordas_2021")
    for unknown in ({"activation": "swiglu"}, {"bias": False}):
        with pytest.raises(ValueError, match="feed_forward must be a FeedForwardConfig with bias"):
            config(
                feed_forward=FeedForwardConfig(d_mlp=8, **unknown), initialization="csordas_2021"
            )
    for changes in (
        {"d_model": 0},
        {"readout": "middle"},
        {"dropout": 1.0},
        {"n_steps": 0},
        {"embedding_dropout": -0.1},
        {"embedding_init": "zeros"},
        {"initialization": "torch"},
    ):
        (name,) = changes
        with pytest.raises(ValueError, match=name):
            config(**changes)
    for config_class, settings in (
        (CopyGateConfig, {"width": "wide"}),
        (CopyGateConfig, {"update": "none"}),
        (CopyGateConfig, {"sees": "nothing"}),
        (CopyGateConfig, {"skips": "attention"}),
        (CopyGateConfig, {"dropout": -1.0}),
        (CopyGateConfig, {"hidden_dropout": 1.0}),
        (CopyGateConfig, {"d_hidden": 0}),
        (HaltingConfig, {"epsilon": 0.0}),
    ):
        with pytest.raises(ValueError, match=next(iter(settings))):
            config_class(**settings)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        # The ids of BOS and EOS are refused too: they have embeddings, but are not tokens.
        ([[0, 8]], "token ids must be less than 8, got 8"),
        ([[0, 9]], "token ids must be less than 8, got 9"),
        ([[0, -1, 3]], "padding .* must be at the end of a sequence, got a token after it"),
    ],
)
def test_invalid_token_ids_are_refused(tokens, message):
    config = NeuralDataRouterConfig.named(
        "ndr", d_input=8, d_output=2, d_model=8, d_mlp=8, n_heads=1, n_steps=1
    )
    model = NeuralDataRouter(config)
    assert model(torch.tensor([[0, 7, -1]])).shape == (1, 1, 2)
    with pytest.raises(ValueError, match=message):
        model(torch.tensor(tokens))
