import pytest
import torch

from mechanisms.attention.geometric import GeometricAttentionConfig
from mechanisms.attention.multi_head import AttentionConfig
from mechanisms.attention.relative import RelativeAttentionConfig
from mechanisms.layers.copy_gate import CopyGateConfig
from mechanisms.models.neural_data_router import NeuralDataRouter, NeuralDataRouterConfig
from mechanisms.porting.neural_data_router import (
    copy_gate_from_torch,
    router_attention_from_torch,
    router_block_from_torch,
    router_from_torch,
)
from tests.mechanisms.checks import check_saved_model_loads
from tests.mechanisms.ndr_golden import DTYPES, TOLERANCE, load
from tests.mechanisms.ndr_literal import (
    classifier,
    geometric_attention,
    layer,
    layer_norm,
    part,
    random_attention,
    random_layer,
    relative_attention,
)

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def theirs_of_attention(w, prefix=""):
    """The state dict of the authors' attention with the weights of a golden file."""
    w = part(w, prefix)
    n_heads, d_model, _ = w["W_Q"].shape
    state = {
        "scale": w["scale"],
        "s_bias": torch.zeros(1),
        "global_content_bias": w["content_bias"],
    }
    state["data_to_q.weight"] = w["W_Q"].mT.flatten(0, 1)
    # The golden files have the authors' own matrix.
    rows = [torch.cat((w["W_K"][h].T, w["W_V"][h].T)) for h in range(n_heads)]
    state["data_to_kv.weight"] = w.get("raw.data_to_kv.weight", torch.cat(rows))
    state["multi_head_merge.weight"] = w["W_O"].flatten(0, 1).T
    state["pos_encoding"] = torch.zeros(1999, d_model)
    if "W_dir" in w:
        state |= {"s_bias": w["s_bias"], "scale_pos": w["scale_pos"]}
        state["data_to_qp.weight"] = w["W_dir"].mT.flatten(0, 1)
        state["data_to_qp.bias"] = w["b_dir"].flatten()
        state["pos_to_pq.weight"] = torch.full((d_model, d_model), 7.0)
        return state
    state["global_pos_bias"] = w["pos_bias"]
    state["pos_to_pq.weight"] = w["W_pos"].mT.flatten(0, 1)
    if "W_absgate" in w:
        state["data_to_absgate.weight"] = w["W_absgate"]
        state["data_to_absgate.bias"] = w["b_absgate"]
    return state


def theirs_of_layer(w, prefix=""):
    w = part(w, prefix)
    state = {f"att.{name}": weight for name, weight in theirs_of_attention(w, "att.").items()}
    for theirs, ours in {"p1": "data1", "p2": "data2", "g1": "gate1", "g2": "gate2"}.items():
        state |= {f"{theirs}.weight": w[f"W_{ours}"].T, f"{theirs}.bias": w[f"b_{ours}"]}
    for theirs, ours in {"nmerge": "ln_merge", "no": "ln_out"}.items():
        if f"{ours}.w" in w:
            state |= {f"{theirs}.weight": w[f"{ours}.w"], f"{theirs}.bias": w[f"{ours}.b"]}
    if "no.weight" not in state:
        # A norm that the authors' residual layer has, but does not use.
        state |= {"n1.weight": torch.ones(12), "n1.bias": torch.zeros(12)}
    return state


def theirs_of_classifier(w):
    state = {f"trafo.layer.{name}": v for name, v in theirs_of_layer(w, "layer.").items()}
    state |= {"embedding.weight": w["embed"], "int_seq": torch.arange(5000)}
    return state | {"output_map.weight": w["W_out"].T, "output_map.bias": w["b_out"]}


def random_classifier(seed=0):
    weights = random_layer(d_mlp=24, d_gate=12, n_gates=12, kind="geometric", seed=seed)
    weights = {f"layer.{name}": weight for name, weight in weights.items()}
    generator = torch.Generator().manual_seed(seed + 1)
    for name, shape in {"embed": (9, 12), "W_out": (12, 5), "b_out": (5,)}.items():
        weights[name] = torch.randn(shape, generator=generator, dtype=torch.float64)
    return weights


def columns(*shape, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def assert_near(ours, theirs):
    assert ours.dtype == theirs.dtype
    scale = max(1.0, theirs.abs().max().item())
    assert (ours - theirs).abs().max() < TOLERANCE[theirs.dtype] * scale


@pytest.mark.parametrize("normalize", [False, True])
@every_dtype
def test_geometric_attention_of_the_golden_files(normalize, dtype):
    golden = load(f"ndr_geometric_attn_{'' if normalize else 'no'}norm_A", dtype)
    attention = router_attention_from_torch(theirs_of_attention(golden), normalize=normalize)
    assert not attention.training
    x = golden["x_kv"].clone().requires_grad_()
    out = attention(x, x, mask=~golden["pad_mask"][:, None, None])
    assert_near(out, golden["out"])
    (out * golden["grad_weight"]).sum().backward()
    assert_near(x.grad, golden["grad_x_kv"])
    assert_near(attention.W_dir.grad, golden["grad_W_dir"])
    assert_near(attention.s_bias.grad, golden["grad_s_bias"])


@every_dtype
def test_relative_attention_of_the_golden_file(dtype):
    golden = load("ndr_relative_attn_absgate", dtype)
    attention = router_attention_from_torch(theirs_of_attention(golden))
    assert attention.config == RelativeAttentionConfig(n_heads=3, d_head=4, gated=True)
    x = golden["x"]
    assert_near(attention(x, x, mask=~golden["pad_mask"][:, None, None]), golden["out"])
    assert_near(attention(x, x), golden["out_nomask"])


@pytest.mark.parametrize("name", ["ndr_layer_geometric_nonorm", "ndr_layer_residual_absgate"])
@every_dtype
def test_layers_of_the_golden_files(name, dtype):
    golden = load(name, dtype)
    block = router_block_from_torch(theirs_of_layer(golden))
    gate = copy_gate_from_torch(part_of(theirs_of_layer(golden), "g1.", "g2."))
    h = golden["x"]
    for step in range(4):
        h = block(h, mask=~golden["pad_mask"][:, None, None])
        assert_near(h, golden["state"][step])
        assert_near(gate(golden["merged_normed"][step]), golden["gate"][step])
        assert_near(gate.logits(golden["merged_normed"][step]), golden["gate_logit"][step])
    assert_near(h, golden["out"])


def part_of(state, *prefixes):
    return {name: weight for name, weight in state.items() if name.startswith(prefixes)}


@every_dtype
def test_the_classifier_of_the_golden_file(dtype, tmp_path):
    golden = load("ndr_classifier_last_nonorm", dtype)
    model = router_from_torch(theirs_of_classifier(golden), n_steps=5, readout="last")
    assert model.config.d_input == golden["eos_id"]
    tokens = golden["tokens"].masked_fill(torch.arange(6) >= golden["lengths"][:, None], -1)
    assert_near(model(tokens)[:, 0], golden["logits"])
    check_saved_model_loads(model, (tokens,), tmp_path)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("offset", [0, 3])
def test_geometric_attention_with_offset_and_masks(normalize, offset):
    weights = random_attention(n_heads=2, d_model=12, d_head=6, kind="geometric")
    attention = router_attention_from_torch(theirs_of_attention(weights), normalize=normalize)
    x = columns(2, 7, 12)
    pad_mask = torch.tensor([[False] * 7, [False] * 4 + [True] * 3])
    position_mask = torch.ones(7 - offset, 7).triu(1 + offset).bool()
    out = attention(x[:, offset:], x, mask=~(pad_mask[:, None, None] | position_mask))
    masks = {"pad_mask": pad_mask, "position_mask": position_mask, "offset": offset}
    assert_near(out, geometric_attention(weights, x, normalize=normalize, **masks)[0])


@pytest.mark.parametrize("kind", ["absgate", "noabsgate"])
def test_relative_attention_with_and_without_gate(kind):
    weights = random_attention(n_heads=3, d_model=12, d_head=4, kind=kind)
    attention = router_attention_from_torch(theirs_of_attention(weights))
    assert attention.config.gated == (kind == "absgate")
    x = columns(2, 6, 12)
    # The sinusoids are float32.
    assert (attention(x, x) - relative_attention(weights, x)[0]).abs().max() < 1e-4


@pytest.mark.parametrize(("width", "d_gate"), [("scalar", 48), ("vector", 24), ("scalar", 12)])
@pytest.mark.parametrize("normalize", [False, True])
def test_layers_with_other_gates(width, d_gate, normalize):
    n_gates = 1 if width == "scalar" else 12
    weights = random_layer(d_mlp=20, d_gate=d_gate, n_gates=n_gates, kind="geometric")
    block = router_block_from_torch(theirs_of_layer(weights), normalize=normalize)
    d_hidden = None if d_gate == 12 else d_gate
    assert block.gate.config == CopyGateConfig(width=width, d_hidden=d_hidden)
    x = columns(2, 5, 12)
    assert_near(block(x), layer(weights, x, normalize=normalize)[0])


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("readout", ["first", "last"])
def test_classifiers_with_either_readout(readout, normalize):
    weights = random_classifier()
    state = theirs_of_classifier(weights)
    model = router_from_torch(state, n_steps=3, readout=readout, normalize=normalize)
    tokens = torch.tensor([[1, 2, 3, 4], [5, 0, -1, -1]])
    lengths = torch.tensor([4, 2])
    expected = classifier(weights, tokens, lengths, n_steps=3, readout=readout, normalize=normalize)
    assert_near(model(tokens)[:, 0], expected)


def test_the_transformer_without_copy_gate():
    """Post-LN with plain softmax attention and sinusoids on the embedding, one head at a time."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return 0.5 * torch.randn(*shape, generator=generator, dtype=torch.float64)

    shapes = {"self_attn.data_to_q.weight": (12, 12), "self_attn.data_to_kv.weight": (24, 12)}
    shapes |= {"self_attn.multi_head_merge.weight": (12, 12), "linear1.weight": (20, 12)}
    shapes |= {"linear1.bias": (20,), "linear2.weight": (12, 20), "linear2.bias": (12,)}
    shapes |= {f"norm{i}.{name}": (12,) for i in (1, 2) for name in ("weight", "bias")}
    w = {name: normal(*shape) for name, shape in shapes.items()}
    state = {f"trafo.layer.{name}": weight for name, weight in w.items()}
    state |= {"embedding.weight": normal(9, 12), "output_map.weight": normal(5, 12)}
    state |= {"output_map.bias": normal(5), "pos.pe": torch.zeros(1, 5000, 12)}
    model = router_from_torch(state, n_steps=2, readout="first", n_heads=3)
    assert model.config.attention == AttentionConfig(n_heads=3, d_head=4, bias=False)

    ids = [8, 1, 6, 2, 7]
    waves = [[(torch.sin, torch.cos)[c % 2], 1e4 ** -(c // 2 * 2 / 12)] for c in range(12)]
    places = torch.arange(5, dtype=torch.float64)
    h = state["embedding.weight"][ids]
    h = h + torch.stack([wave(places * rate) for wave, rate in waves], -1)
    for _ in range(2):
        q, both = h @ w["self_attn.data_to_q.weight"].T, h @ w["self_attn.data_to_kv.weight"].T
        heads = []
        for head in range(3):
            k, v = both[:, 8 * head : 8 * head + 4], both[:, 8 * head + 4 : 8 * head + 8]
            scores = q[:, 4 * head : 4 * head + 4] @ k.T / 2
            heads.append(scores.softmax(-1) @ v)
        h = h + torch.cat(heads, -1) @ w["self_attn.multi_head_merge.weight"].T
        h = layer_norm(h, w["norm1.weight"], w["norm1.bias"])
        hidden = (h @ w["linear1.weight"].T + w["linear1.bias"]).relu()
        h = h + hidden @ w["linear2.weight"].T + w["linear2.bias"]
        h = layer_norm(h, w["norm2.weight"], w["norm2.bias"])
    expected = h[0] @ state["output_map.weight"].T + state["output_map.bias"]
    # The sinusoids are float32.
    assert torch.allclose(model(torch.tensor([[1, 6, 2]]))[0, 0], expected, atol=1e-5)


@pytest.mark.parametrize(
    "variant", ["geometric", "relative", "relative_gate", "abs_rel_gate", "ndr"]
)
def test_the_kind_of_model_follows_from_its_weights(variant):
    sizes = {"d_input": 7, "d_output": 5, "d_model": 12, "d_mlp": 24, "n_heads": 3, "n_steps": 4}
    named = NeuralDataRouterConfig.named(variant, **sizes)
    model = NeuralDataRouter(named, generator=torch.Generator().manual_seed(0)).eval()
    ported = router_from_torch(theirs_of_model(model), n_steps=4, readout="last")
    assert (ported.config.attention, ported.config.gate) == (named.attention, named.gate)
    tokens = torch.tensor([[1, 2, 3, 4], [5, 0, -1, -1]])
    assert torch.equal(ported(tokens), model(tokens))


def theirs_of_model(model):
    """The state dict that the authors' code would have for one of our models."""
    core, gated = part(model.state_dict(), "core."), model.core.gate is not None
    attention = part(core, "attn.")
    if "W_gate" in attention:
        attention |= {"W_absgate": attention["W_gate"], "b_absgate": attention["b_gate"]}
    names = {"mlp": ("p1", "p2"), "gate": ("g1", "g2"), "ln_merge": "nmerge", "ln_out": "no"}
    if not gated:
        names = {"mlp": ("linear1", "linear2"), "ln_merge": "norm1", "ln_out": "norm2"}
    prefix = "att." if gated else "self_attn."
    state = {f"{prefix}{name}": w for name, w in theirs_of_attention(attention).items()}
    for ours, theirs in names.items():
        for name, weight in part(core, f"{ours}.").items():
            if isinstance(theirs, str):
                state[f"{theirs}.{name}"] = weight
            else:
                kind, side = name.split("_")
                end = "weight" if kind == "W" else "bias"
                state[f"{theirs[side == 'out']}.{end}"] = weight.T if kind == "W" else weight
    state = {f"trafo.layer.{name}": weight for name, weight in state.items()}
    state |= {"embedding.weight": model.W_E, "output_map.weight": model.W_U.T}
    return state | {"output_map.bias": model.b_U}


def test_biases_that_the_authors_switch_off_are_zero():
    state = theirs_of_attention(random_attention(n_heads=3, d_model=12, d_head=4, kind="geometric"))
    del state["global_content_bias"]
    attention = router_attention_from_torch(state, normalize=False)
    assert attention.config == GeometricAttentionConfig(n_heads=3, d_head=4)
    assert torch.equal(attention.content_bias, torch.zeros(3, 4, dtype=torch.float64))


def test_the_ported_weights_are_copies_and_no_random_numbers_are_drawn():
    state = theirs_of_classifier(random_classifier())
    before = torch.get_rng_state()
    model = router_from_torch(state, n_steps=2, readout="last")
    assert torch.equal(torch.get_rng_state(), before)
    with torch.no_grad():
        model.W_E.zero_()
        model.core.attn.scale.zero_()
    assert state["embedding.weight"].abs().max() > 0
    assert state["trafo.layer.att.scale"] != 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"trafo.p_map.weight": torch.ones(1, 12)},
            "without .*, got trafo.p_map.weight",
        ),
        ({"output_map.bias": None}, r"state must have output_map.bias \[5\], got none"),
        ({"trafo.layer.p1.weight": None}, "state must have trafo.layer.self_attn.data_to_q.weight"),
        (
            {"trafo.layer.g2.bias": torch.ones(3)},
            r"trafo.layer.g2.bias must be \[12\], got \[3\]",
        ),
        (
            {"trafo.layer.g2.weight": torch.ones(5, 12)},
            r"trafo.layer.g2.weight must be \[12, 12\], got \[5, 12\]",
        ),
        (
            {"trafo.layer.att.data_to_kv.weight": torch.ones(12, 12)},
            r"trafo.layer.att.data_to_kv.weight must be \[24, 12\], got \[12, 12\]",
        ),
        (
            {"trafo.layer.att.scale": torch.tensor(1.0)},
            r"trafo.layer.att.scale must be \[1\], got \[\]",
        ),
        (
            {"embedding.weight": torch.ones(9)},
            r"embedding.weight must be \[d_input \+ 2, d_model\]",
        ),
    ],
)
def test_weights_that_do_not_fit_are_named(change, message):
    state = theirs_of_classifier(random_classifier()) | change
    state = {name: weight for name, weight in state.items() if weight is not None}
    with pytest.raises(ValueError, match=message):
        router_from_torch(state, n_steps=2, readout="last")


def test_invalid_arguments_are_refused():
    state = theirs_of_attention(random_attention(n_heads=3, d_model=12, d_head=4, kind="geometric"))
    with pytest.raises(ValueError, match=r"normalize must be True or False .* got None"):
        router_attention_from_torch(state)
    with pytest.raises(ValueError, match="n_heads must be 3 as in global_content_bias, got 4"):
        router_attention_from_torch(state, n_heads=4, normalize=True)
    names = ("data_to_q.weight", "data_to_kv.weight", "multi_head_merge.weight")
    state = {name: state[name] for name in names}
    with pytest.raises(ValueError, match=r"n_heads must be that of the model, .* got None"):
        router_attention_from_torch(state)
    with pytest.raises(ValueError, match=r"n_heads must divide 12, .* got 5"):
        router_attention_from_torch(state, n_heads=5)
    with pytest.raises(ValueError, match="readout must be one of first, last, got 'middle'"):
        router_from_torch(theirs_of_classifier(random_classifier()), n_steps=2, readout="middle")
