"""Ported models against golden files of the authors' code, and against its formulas in loops."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

import tasks
from mechanisms import (
    AttentionConfig,
    CompositionalAttentionConfig,
    compositional_attention_from_torch,
    compositional_block_from_torch,
    patch_transformer_from_torch,
    published_sort_of_clevr_answers,
    published_sort_of_clevr_images,
    published_triangle_images,
    published_word_ids,
    relation_classifier_from_torch,
    retrieval_network_from_torch,
)
from tests.mechanisms.checks import check_saved_model_loads

GOLDEN = Path(__file__).parents[2] / "golden"
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-9}
both_precisions = pytest.mark.parametrize("dtype", TOLERANCE, ids=["float32", "float64"])
CONTEXTUAL = {"value_query": "value_query", "value_key": "value_key", "out": "out_proj"}
VISION = {"value_query": "query_value_net", "value_key": "key_value_net", "out": "final"}
SCAN = VISION | {"out": "multi_head_merge"}
FAIRSEQ = {"query": "q_proj", "key": "k_proj", "value": "v_proj"}
FAIRSEQ |= {"value_query": "value_q", "value_key": "value_k", "out": "out_proj"}


def load(name, dtype):
    with np.load(GOLDEN / f"{name}.npz") as file:
        arrays = {key: torch.from_numpy(value) for key, value in file.items()}
    return {k: w.to(dtype) if w.is_floating_point() else w for k, w in arrays.items()}


def theirs(golden, names):
    """The state dict of the authors' module with the weights of a golden file."""
    state = {}
    parts = {"query": "Q", "key": "K", "value": "V", "value_query": "Qv"}
    for part, letters in parts.items():
        name = names.get(part, f"{part}_net")
        state[f"{name}.weight"] = golden[f"W_{letters}"].mT.flatten(0, 1)
        if f"b_{letters}" in golden:
            state[f"{name}.bias"] = golden[f"b_{letters}"].flatten()
    if "w_score" in golden:
        state["score_network.weight"] = golden["w_score"][None]
        state["score_network.bias"] = golden["b_score"]
    elif golden["W_Kv"].ndim == 3:
        state |= {"value_key.w": golden["W_Kv"], "value_key.b": golden["b_Kv"][None]}
    else:
        name = names["value_key"]
        state |= {f"{name}.weight": golden["W_Kv"].T, f"{name}.bias": golden["b_Kv"]}
    maps = {"O": names["out"], "skip": "in_", "ff1": "res.0", "ff2": "res.3"}
    for letters, name in maps.items():
        if f"W_{letters}" in golden:
            state[f"{name}.weight"] = golden[f"W_{letters}"].T
        if f"b_{letters}" in golden:
            state[f"{name}.bias"] = golden[f"b_{letters}"]
    for name in ("norm1", "norm2"):
        if f"{name}.w" in golden:
            state |= {f"{name}.weight": golden[f"{name}.w"], f"{name}.bias": golden[f"{name}.b"]}
    return state


def assert_near(ours, expected):
    assert ours.dtype == expected.dtype
    scale = max(1.0, expected.abs().max().item())
    assert (ours - expected).abs().max() < TOLERANCE[expected.dtype] * scale


# Their modules, one example, query and search at a time. Weights have their names and layouts.


class Weights:
    """Random weights of linear maps and norms, by their names."""

    def __init__(self, dtype=torch.float64, seed=0):
        self.generator = torch.Generator().manual_seed(seed)
        self.state, self.dtype = {}, dtype

    def normal(self, *shape):
        values = torch.randn(*shape, generator=self.generator, dtype=torch.float64)
        return (0.4 * values).to(self.dtype)

    def linear(self, name, d_out, d_in, *, bias=True):
        self.state[f"{name}.weight"] = self.normal(d_out, d_in)
        if bias:
            self.state[f"{name}.bias"] = self.normal(d_out)

    def norm(self, name, width):
        self.state |= {f"{name}.weight": 1 + self.normal(width), f"{name}.bias": self.normal(width)}


def linear(state, name, x):
    return state[f"{name}.weight"] @ x + state.get(f"{name}.bias", 0)


def layer_norm(state, name, x):
    x = x - x.mean()
    scale = (x.square().mean() + 1e-5).sqrt()
    return x / scale * state[f"{name}.weight"] + state[f"{name}.bias"]


def part(state, prefix):
    return {k.removeprefix(prefix): w for k, w in state.items() if k.startswith(prefix)}


def attention_of_queries(state, names, x_query, x_key, n_searches, hidden):
    """The output [query, d_model]; `hidden` [query, key] is True for keys that are not seen."""
    names = {"query": "query_net", "key": "key_net", "value": "value_net"} | names
    keys = [linear(state, names["key"], x).chunk(n_searches) for x in x_key]
    outputs = []
    for i, x in enumerate(x_query):
        query, found = linear(state, names["query"], x).chunk(n_searches), []
        for s in range(n_searches):
            scores = torch.stack([query[s] @ key[s] / len(query[s]) ** 0.5 for key in keys])
            pattern = scores.masked_fill(hidden[i], -math.inf).softmax(0)
            values = torch.stack([linear(state, names["value"], x) for x in x_key])
            mixture = pattern @ values
            found.append(select(state, names, x, mixture, s, n_searches))
        if "in_.weight" in state:
            found.append(linear(state, "in_", x))
        found = torch.cat(found)
        if "out_proj.2.weight" in state:
            outputs.append(linear(state, "out_proj.2", linear(state, "out_proj.0", found).relu()))
        else:
            outputs.append(linear(state, names["out"], found))
    return torch.stack(outputs)


def select(state, names, x, mixture, search, n_searches):
    """What search number `search` retrieves for the query's token x."""
    if f"{names['value_query']}.weight" not in state:
        return mixture.chunk(n_searches)[search]
    query = linear(state, names["value_query"], x).chunk(n_searches)[search]
    scores, is_separate = [], "value_key.w" in state
    if "score_network.weight" in state:
        d_value = state["score_network.weight"].shape[1] - len(query)
    elif is_separate:
        d_value = state["value_key.w"].shape[1]
    else:
        d_value = state[f"{names['value_key']}.weight"].shape[1]
    retrievals = mixture.split(d_value)
    for r, retrieval in enumerate(retrievals):
        if "score_network.weight" in state:
            pair = [retrieval, query] if names["query"] == "q_proj" else [query, retrieval]
            scores.append(linear(state, "score_network", torch.cat(pair))[0])
            continue
        if is_separate:
            key = retrieval @ state["value_key.w"][r]
            has_bias = f"{names['query']}.bias" in state
            key = key + state["value_key.b"][0, r] if has_bias else key
        else:
            key = linear(state, names["value_key"], retrieval)
        scores.append(query @ key / len(query) ** 0.5)
    chosen = torch.stack(scores).softmax(0)
    return sum(weight * retrieval for weight, retrieval in zip(chosen, retrievals, strict=True))


def attend(state, names, x, n_searches, *, x_key=None, hidden=None):
    x_key = x if x_key is None else x_key
    if hidden is None:
        hidden = torch.zeros(len(x), x.shape[1], x_key.shape[1], dtype=torch.bool)
    return torch.stack(
        [
            attention_of_queries(state, names, *each, n_searches, hides)
            for *each, hides in zip(x, x_key, hidden, strict=True)
        ]
    )


def themselves(x):
    return torch.eye(x.shape[1], dtype=torch.bool).expand(len(x), -1, -1)


def run_block(state, names, x, n_searches, *, post_norm, layers=("res.0", "res.3")):
    def every(function, x):
        return torch.stack([torch.stack([function(row) for row in example]) for example in x])

    def forward(row):
        return linear(state, layers[1], linear(state, layers[0], row).relu())

    def norm(name):
        return lambda row: layer_norm(state, name, row)

    of_attention = part(state, "self_attn.") or state
    if post_norm:
        x = every(norm("norm1"), x + attend(of_attention, names, x, n_searches))
        return every(norm("norm2"), x + every(forward, x))
    x = x + attend(of_attention, names, every(norm("norm1"), x), n_searches)
    return x + every(forward, every(norm("norm2"), x))


def draw_attention(
    weights,
    names,
    *,
    d_model=12,
    n_searches=3,
    n_retrievals=2,
    d_head=4,
    d_value=4,
    d_selection=5,
    biases="all",
    scorer="dot",
    own=False,
    nonlinear=False,
):
    """Add the weights of an attention; without retrievals, of multi-head attention."""
    names = {"query": "query_net", "key": "key_net", "value": "value_net"} | names
    everywhere, selection = biases == "all", biases != "none"
    weights.linear(names["query"], n_searches * d_head, d_model, bias=everywhere)
    weights.linear(names["key"], n_searches * d_head, d_model, bias=everywhere)
    values = (n_retrievals or n_searches) * d_value
    weights.linear(names["value"], values, d_model, bias=everywhere)
    if n_retrievals:
        weights.linear(names["value_query"], n_searches * d_selection, d_model, bias=selection)
        if scorer == "mlp":
            weights.linear("score_network", 1, d_value + d_selection, bias=selection)
        elif scorer == "separate":
            weights.state["value_key.w"] = weights.normal(n_retrievals, d_value, d_selection)
            weights.state["value_key.b"] = weights.normal(1, n_retrievals, d_selection)
        else:
            weights.linear(names["value_key"], d_selection, d_value, bias=selection)
    if own:
        weights.linear("in_", d_value, d_model, bias=everywhere)
    outs = {f"{names['out']}{'.0' if nonlinear else ''}": (n_searches + own) * d_value}
    outs |= {f"{names['out']}.2": d_model} if nonlinear else {}
    for name, d_in in outs.items():
        weights.linear(name, d_model, d_in, bias=everywhere)


def draw_block(weights, names, *, d_model=12, layers=("res.0", "res.3"), **attention):
    draw_attention(weights, names, d_model=d_model, **attention)
    weights.linear(layers[0], 2 * d_model, d_model)
    weights.linear(layers[1], d_model, 2 * d_model)
    for name in ("norm1", "norm2"):
        weights.norm(name, d_model)


# Golden files.


@pytest.mark.parametrize("name", ["shared", "separate", "shared_concat"])
@both_precisions
def test_contextual_attention_of_the_golden_files(name, dtype):
    golden = load(f"comp_contextual_{name}", dtype)
    attention = compositional_attention_from_torch(theirs(golden, CONTEXTUAL))
    assert not attention.training
    x = golden["x"]
    assert_near(attention(x, x, mask=~themselves(x)[:, None]), golden["out"])
    names = CONTEXTUAL
    literal = attend(theirs(golden, names), names, x, len(golden["W_Q"]), hidden=themselves(x))
    assert_near(literal, golden["out"])


@both_precisions
def test_the_block_of_the_golden_file(dtype):
    golden = load("comp_sortofclevr_mlp", dtype)
    state = theirs(golden, VISION)
    block = compositional_block_from_torch(state, post_norm=False)
    assert_near(block(golden["x"]), golden["out"])
    assert_near(block.attn(golden["x_normed"], golden["x_normed"]), golden["attn_out"])
    assert_near(run_block(state, VISION, golden["x"], 2, post_norm=False), golden["out"])


@both_precisions
def test_attention_of_scan_of_the_golden_file(dtype):
    golden = load("comp_scan_dot", dtype)
    attention = compositional_attention_from_torch(theirs(golden, SCAN))
    assert attention.config.biases == "selection"
    x, x_key = golden["x_q"], golden["x_kv"]
    mask = ~golden["pad_mask"][:, None, None]
    assert_near(attention(x, x_key, mask=mask), golden["cross_padmask.out"])
    assert_near(attention(x, x), golden["self_nomask.out"])
    causal = ~golden["self_causal_mask"][None, None]
    assert_near(attention(x, x, mask=causal), golden["self_causal.out"])


# Formulas.


VARIANTS = {
    "shared": {},
    "separate": {"scorer": "separate", "n_retrievals": 4},
    "concat": {"own": True, "d_value": 3},
    "nonlinear": {"nonlinear": True, "d_value": 6},
    "concat, nonlinear, no bias": {"own": True, "nonlinear": True, "biases": "none"},
    "separate, no bias": {"scorer": "separate", "biases": "none"},
    "separate, concat": {"scorer": "separate", "own": True, "n_retrievals": 1},
}


@pytest.mark.parametrize("variant", VARIANTS)
@both_precisions
def test_contextual_attention_in_all_variants(variant, dtype):
    weights = Weights(dtype)
    draw_attention(weights, CONTEXTUAL, **VARIANTS[variant] | {"d_selection": 4})
    attention = compositional_attention_from_torch(weights.state)
    x = weights.normal(2, 5, 12)
    expected = attend(weights.state, CONTEXTUAL, x, 3, hidden=themselves(x))
    assert_near(attention(x, x, mask=~themselves(x)[:, None]), expected)


STANDARD = {
    "own value": {"own": True, "d_value": 3},
    "own value, nonlinear": {"own": True, "nonlinear": True},
    "own value, nonlinear, no bias": {"own": True, "nonlinear": True, "biases": "none"},
    "no own value": {},
}


@pytest.mark.parametrize("variant", STANDARD)
@both_precisions
def test_multi_head_attention_in_all_variants(variant, dtype):
    weights, settings = Weights(dtype), STANDARD[variant]
    draw_attention(weights, CONTEXTUAL, n_retrievals=0, **settings)
    n_heads = None if "own" in settings else 3
    attention = compositional_attention_from_torch(weights.state, n_heads=n_heads)
    assert isinstance(attention.config, AttentionConfig)
    assert (attention.config.n_heads, attention.config.own_value) == (3, "own" in settings)
    x = weights.normal(2, 5, 12)
    expected = attend(weights.state, CONTEXTUAL, x, 3, hidden=themselves(x))
    assert_near(attention(x, x, mask=~themselves(x)[:, None]), expected)


@pytest.mark.parametrize("scorer", ["dot", "mlp"])
@pytest.mark.parametrize(
    ("names", "biases"), [(SCAN, "selection"), (FAIRSEQ, "all"), (FAIRSEQ, "none")]
)
@both_precisions
def test_attention_of_sequences(names, biases, scorer, dtype):
    weights = Weights(dtype)
    draw_attention(weights, names, biases=biases, scorer=scorer, d_value=6, d_selection=2)
    attention = compositional_attention_from_torch(weights.state)
    assert attention.config == CompositionalAttentionConfig(
        n_searches=3,
        n_retrievals=2,
        d_head=4,
        d_value=6,
        d_selection=2,
        scorer=scorer,
        biases=biases,
    )
    x, x_key = weights.normal(2, 4, 12), weights.normal(2, 5, 12)
    hidden = torch.zeros(2, 4, 5, dtype=torch.bool)
    hidden[1, :, 3:] = True
    expected = attend(weights.state, names, x, 3, x_key=x_key, hidden=hidden)
    assert_near(attention(x, x_key, mask=~hidden[:, None]), expected)


@pytest.mark.parametrize("scorer", ["dot", "mlp", "multi-head"])
@pytest.mark.parametrize("post_norm", [False, True])
@both_precisions
def test_blocks_with_either_order_of_norms(scorer, post_norm, dtype):
    weights = Weights(dtype)
    draw_block(weights, VISION, n_retrievals=0 if scorer == "multi-head" else 2, scorer=scorer)
    n_heads = 3 if scorer == "multi-head" else None
    block = compositional_block_from_torch(weights.state, post_norm=post_norm, n_heads=n_heads)
    x = weights.normal(2, 4, 12)
    assert_near(block(x), run_block(weights.state, VISION, x, 3, post_norm=post_norm))


def test_an_encoder_layer_of_scan():
    weights, layers = Weights(), ("linear1", "linear2")
    draw_block(weights, SCAN, biases="selection", scorer="mlp", layers=layers)
    of_block = ("linear", "norm")
    state = {
        name if name.startswith(of_block) else f"self_attn.{name}": weight
        for name, weight in weights.state.items()
    }
    block = compositional_block_from_torch(state, post_norm=True)
    x = weights.normal(2, 4, 12)
    assert_near(block(x), run_block(state, SCAN, x, 3, post_norm=True, layers=layers))


@pytest.mark.parametrize("model", ["compositional", "standard"])
@both_precisions
def test_the_network_of_contextual_retrieval(model, dtype, tmp_path):
    weights = Weights(dtype)
    n_retrievals = 4 if model == "compositional" else 0
    draw_attention(weights, CONTEXTUAL, n_retrievals=n_retrievals, own=True, d_selection=4)
    weights.state = {f"model.{name}": weight for name, weight in weights.state.items()}
    weights.linear("encoder.0", 12, 14)
    weights.linear("encoder.2", 12, 12)
    weights.linear("decoder.0", 12, 12)
    weights.linear("decoder.2", 1, 12)
    network = retrieval_network_from_torch(weights.state)
    inputs = load("contextual_retrieval_data", dtype)["ood.seed1.test.inputs"][:3]

    def maps(first, second, x):
        hidden = [[linear(weights.state, first, row).relu() for row in rows] for rows in x]
        outs = [[linear(weights.state, second, row) for row in rows] for rows in hidden]
        return torch.stack([torch.stack(rows) for rows in outs])

    x = maps("encoder.0", "encoder.2", inputs)
    x = attend(part(weights.state, "model."), CONTEXTUAL, x, 3, hidden=themselves(x))
    assert_near(network(inputs), maps("decoder.0", "decoder.2", x))
    check_saved_model_loads(network, (inputs,), tmp_path)


def their_positions(n_positions, width):
    table = torch.zeros(n_positions, width)
    for position in range(n_positions):
        for c in range(width):
            wave = (math.sin, math.cos)[c % 2](position / 10000 ** (2 * c / width))
            table[position, c] = wave / (1 + math.exp(-1))
    return table


@pytest.mark.parametrize("scorer", ["dot", "mlp", "multi-head"])
@pytest.mark.parametrize("task", ["sort of clevr", "triangles"])
def test_the_networks_of_pictures(task, scorer, tmp_path):
    is_clevr = task == "sort of clevr"
    d_token, n_channels, size, n_steps = (6, 3, 5, 2) if is_clevr else (12, 1, 4, 3)
    weights = Weights()
    draw_block(weights, VISION, n_retrievals=0 if scorer == "multi-head" else 2, scorer=scorer)
    block, weights.state = weights.state, {}
    weights.state["encoder.patch_embeddings.weight"] = weights.normal(
        d_token, n_channels, size, size
    )
    weights.state["encoder.patch_embeddings.bias"] = weights.normal(d_token)
    weights.state["encoder.cls_token"] = weights.normal(1, 1, d_token)
    if is_clevr:
        weights.linear("encoder.question_representation", d_token, 18)
        weights.linear("mapping", 12, 12)
    weights.linear("final", 10 if is_clevr else 1, 12)
    state = weights.state | {f"transformer.{name}": weight for name, weight in block.items()}
    n_heads = 3 if scorer == "multi-head" else None
    model = patch_transformer_from_torch(
        state, image_size=2 * size, n_steps=n_steps, n_heads=n_heads
    )
    images, questions = weights.normal(2, n_channels, 2 * size, 2 * size), weights.normal(2, 18)
    x = []
    for image, question in zip(images, questions, strict=True):
        tokens = [state["encoder.cls_token"][0, 0]]
        for number, place in enumerate(their_positions(4, d_token).double()):
            row, column = divmod(number, 2)
            patch = image[:, size * row : size * (row + 1), size * column : size * (column + 1)]
            kernel = state["encoder.patch_embeddings.weight"]
            embedded = (kernel * patch).sum((1, 2, 3)) + state["encoder.patch_embeddings.bias"]
            tokens.append(embedded + place)
        if is_clevr:
            asked = linear(state, "encoder.question_representation", question)
            tokens = [linear(state, "mapping", torch.cat([token, asked])) for token in tokens]
        x.append(torch.stack(tokens))
    x = torch.stack(x)
    for _ in range(n_steps):
        x = run_block(block, VISION, x, 3, post_norm=False)
    expected = torch.stack([linear(state, "final", row) for row in x[:, 0]])
    inputs = (images, questions) if is_clevr else (images,)
    assert_near(model(*inputs)[:, 0], expected)
    check_saved_model_loads(model, inputs, tmp_path)


@pytest.mark.parametrize("scorer", ["dot", "multi-head"])
@pytest.mark.parametrize("windows", [None, (2, 3)])
def test_the_network_of_relations(scorer, windows, tmp_path):
    weights = Weights()
    draw_block(weights, VISION, n_retrievals=0 if scorer == "multi-head" else 2)
    block, weights.state = weights.state, {}
    state = weights.state
    for i in range(3):
        name = f"encoder.conv{i + 1}"
        state[f"{name}.weight"] = weights.normal(32, 32 if i else 1, 4, 4) / 4
        state[f"{name}.bias"] = weights.normal(32)
    weights.linear("encoder.fc1", 256, 128)
    weights.linear("encoder.fc2", 12, 256)
    state |= {"gamma": weights.normal(12), "beta": weights.normal(12)}
    weights.norm("encoder_norm", 12)
    weights.linear("out_hidden", 256, 12)
    weights.linear("y_out", 4, 256)
    state |= {f"transformer_encoder.{name}": weight for name, weight in block.items()}
    state["pos_encoder.pe"] = torch.zeros(5000, 1, 12)
    n_heads = 3 if scorer == "multi-head" else None
    model = relation_classifier_from_torch(state, windows=windows, n_heads=n_heads)

    images = weights.normal(2, 5, 16, 16)
    encoded = images.flatten(0, 1)[:, None]
    for i in range(3):
        name = f"encoder.conv{i + 1}"
        kernel, bias = state[f"{name}.weight"], state[f"{name}.bias"]
        encoded = torch.conv2d(encoded, kernel, bias, stride=2, padding=1).relu()
    rows = [linear(state, "encoder.fc1", row.flatten()).relu() for row in encoded]
    z = torch.stack([linear(state, "encoder.fc2", row).relu() for row in rows]).unflatten(0, (2, 5))
    parts = []
    for window in z.split(list(windows or (5,)), 1):
        deviation = (window.var(1, keepdim=True) + 1e-8).sqrt()
        parts.append((window - window.mean(1, keepdim=True)) / deviation)
    x = torch.cat(parts, 1) * state["gamma"] + state["beta"]
    rates = torch.exp(torch.arange(0, 12, 2).float() * (-math.log(10000.0) / 12))
    for position in range(5):
        x[:, position, 0::2] += torch.sin(position * rates).double()
        x[:, position, 1::2] += torch.cos(position * rates).double()
    x = run_block(block, VISION, x, 3, post_norm=True)
    x = torch.stack([torch.stack([layer_norm(state, "encoder_norm", r) for r in e]) for e in x])
    hidden = [linear(state, "out_hidden", row).relu() for row in x.mean(1)]
    expected = torch.stack([linear(state, "y_out", row) for row in hidden])
    assert_near(model(images[:, :, None])[:, 0], expected)
    check_saved_model_loads(model, (images[:, :, None],), tmp_path)


# Conventions.


def test_pictures_and_answers_of_sort_of_clevr_are_those_of_the_published_generator():
    task = tasks.SortOfClevr(tasks.SortOfClevrConfig(n_train=60, n_valid=1, n_test=1))
    batch = task.batch("train", 0, 1800)
    images, questions = batch.inputs
    published = published_sort_of_clevr_images(images)
    # Colours as OpenCV has them, blue first.
    colours = [(0, 0, 255), (0, 255, 0), (255, 0, 0), (0, 156, 255), (128, 128, 128), (0, 255, 255)]
    answers = published_sort_of_clevr_answers(batch.targets, questions)[:, 0].tolist()
    counted = set()
    for i, positions in enumerate(batch.latents["positions"].tolist()):
        for (x, y), colour in zip(positions, colours, strict=True):
            assert torch.allclose(255 * published[i, :, x, y], torch.tensor(colour).float())
        question = questions[i].tolist()
        kind, subtype = question[12:15].index(1), question[15:18].index(1)
        first = question[:6].index(1)
        shapes = batch.latents["shapes"][i].tolist()
        if (kind, subtype) == (0, 0):
            assert answers[i] == 2 + shapes[first]
        elif kind == 0:
            place = positions[first][subtype - 1]
            # The middle line is left and above there, and neither here.
            assert answers[i] == int(place >= 75 / 2) or place == 37
        elif (kind, subtype) == (1, 2):
            assert answers[i] == 4 + sum(shape == shapes[first] for shape in shapes) - 1
        elif (kind, subtype) == (2, 0):
            second = question[6:12].index(1)
            corners = np.array([positions[first], positions[second]])
            others = [p for j, p in enumerate(positions) if j not in (first, second)]
            inside = [np.all((corners.min(0) <= p) & (p <= corners.max(0))) for p in others]
            assert answers[i] == 4 + sum(inside)
            counted.add(sum(inside))
        elif (kind, subtype) == (2, 1):
            assert answers[i] == batch.targets[i]
    assert {0, 1, 2} <= counted


def test_points_of_triangles_are_bright():
    batch = tasks.Triangles(tasks.TrianglesConfig()).batch("test", 0, 4)
    images = published_triangle_images(batch.inputs)
    points = batch.latents["points"].flatten(1, 2)
    for image, corners in zip(images, points.tolist(), strict=True):
        assert all(image[0, y, x] == 255 for x, y in corners)
        assert image.count_nonzero() == len({tuple(corner) for corner in corners})


def test_words_are_numbered_alphabetically():
    words = [word for word in tasks.SCAN_WORDS if word != "<pad>"]
    ids = published_word_ids(words)
    assert [ids[word] for word in ("after", "and", "around", "jump", "walk")] == [0, 1, 2, 3, 12]
    assert len(ids) == 13


# Errors.


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"value_key.weight": None}, r"must have value_key.weight \[d_selection, d_value\], got n"),
        ({"extra.weight": torch.ones(1)}, r"without counterpart in Compos.*, got extra.weight"),
        ({"key_net.bias": torch.ones(3)}, r"key_net.bias must be \[12\], got \[3\]; sizes follow"),
        ({"out_proj.weight": None}, r"state must have out_proj.weight"),
        ({"value_net.weight": torch.ones(9, 12)}, r"value_net.weight must be \[8, 12\], got \[9"),
    ],
)
def test_weights_that_do_not_fit_are_named(change, message):
    weights = Weights()
    draw_attention(weights, CONTEXTUAL, d_selection=4)
    state = {k: w for k, w in (weights.state | change).items() if w is not None}
    with pytest.raises(ValueError, match=message):
        compositional_attention_from_torch(state)


def test_numbers_of_heads_that_do_not_fit_are_refused():
    weights = Weights()
    draw_attention(weights, CONTEXTUAL, d_selection=4)
    with pytest.raises(ValueError, match="n_heads must be None or 3 as in the weights, got 2"):
        compositional_attention_from_torch(weights.state, n_heads=2)
    weights = Weights()
    draw_attention(weights, CONTEXTUAL, n_retrievals=0)
    for n_heads in (None, 5):
        with pytest.raises(ValueError, match="n_heads must be that of the model, a divisor of 12"):
            compositional_attention_from_torch(weights.state, n_heads=n_heads)


def test_the_weights_are_copies_and_no_random_numbers_are_drawn():
    weights = Weights()
    draw_attention(weights, CONTEXTUAL)
    before = torch.get_rng_state()
    attention = compositional_attention_from_torch(weights.state)
    assert torch.equal(torch.get_rng_state(), before)
    with torch.no_grad():
        attention.W_value_key.zero_()
        attention.b_Q.zero_()
    assert weights.state["value_key.weight"].any()
    assert weights.state["query_net.bias"].any()
