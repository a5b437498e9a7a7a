from pathlib import Path

import numpy as np
import pytest
import torch

from mechanisms.attention.compositional import CompositionalAttention, CompositionalAttentionConfig
from mechanisms.attention.multi_head import AttentionConfig
from mechanisms.layers.feed_forward import FeedForwardConfig
from mechanisms.models.transformer import Block, TransformerConfig

GOLDEN = Path(__file__).parents[2] / "golden"
CONTRACT_EXAMPLES = {
    "": CompositionalAttentionConfig(n_searches=4, n_retrievals=2, d_head=4),
    "own value": CompositionalAttentionConfig(
        n_searches=4, n_retrievals=3, d_head=4, own_value=True
    ),
    "nonlinear": CompositionalAttentionConfig(
        n_searches=4, n_retrievals=3, d_head=4, d_value=3, own_value=True, nonlinear=True
    ),
}
PARAMETERS = {
    "W_Q": "W_Q",
    "W_K": "W_K",
    "W_V": "W_V",
    "b_Q": "b_Q",
    "b_K": "b_K",
    "b_V": "b_V",
    "b_O": "b_O",
    "W_value_query": "W_Qv",
    "b_value_query": "b_Qv",
    "W_value_key": "W_Kv",
    "b_value_key": "b_Kv",
    "W_score": "w_score",
    "b_score": "b_score",
    "W_own": "W_skip",
    "b_own": "b_skip",
}


def load(name):
    with np.load(GOLDEN / f"{name}.npz") as file:
        return {
            key: torch.from_numpy(value).double() if value.dtype.kind == "f" else value
            for key, value in file.items()
        }


def sizes(golden):
    return {
        "n_searches": golden["W_Q"].shape[0],
        "n_retrievals": golden["W_V"].shape[0],
        "d_head": golden["W_Q"].shape[2],
        "d_value": golden["W_V"].shape[2],
        "d_selection": golden["W_Qv"].shape[2],
    }


def load_parameters(attention, golden):
    attention.double()
    with torch.no_grad():
        for ours, theirs in PARAMETERS.items():
            if theirs in golden:
                getattr(attention, ours).copy_(golden[theirs])
        attention.W_O.copy_(golden["W_O"].reshape(attention.W_O.shape))
    assert {n for n, p in attention.named_parameters() if p.requires_grad} == {
        ours for ours, theirs in PARAMETERS.items() if theirs in golden
    } | {"W_O"}


def record(attention, *arguments, names, **keywords):
    """The activations at the named hook points, and the output."""
    kept = {}
    for name in names:
        getattr(attention, f"hook_{name}").add_hook(
            lambda value, hook, name=name: kept.__setitem__(name, value.detach().clone())
        )
    kept["out"] = attention(*arguments, **keywords)
    for name in names:
        getattr(attention, f"hook_{name}").remove_hooks()
    return kept


GOLDEN_NAMES = {
    "q": ("q", True),
    "k": ("k", True),
    "v": ("v", True),
    "attn_scores": ("search_logits", False),
    "search": ("search_score", False),
    "value_query": ("value_query", False),
    "value_key": ("value_key", False),
    "retrieval": ("retrieved", False),
    "value_logits": ("value_logits", False),
    "value_scores": ("value_score", False),
    "z": ("z", False),
}


def check(attention, golden, *arguments, tag="", out="out", **keywords):
    names = [name for name, (theirs, _) in GOLDEN_NAMES.items() if tag + theirs in golden]
    assert len(names) >= 10
    kept = record(attention, *arguments, names=names, **keywords)
    for name in names:
        theirs, heads_first = GOLDEN_NAMES[name]
        expected = golden[tag + theirs]
        expected = expected.transpose(1, 2) if heads_first else expected
        torch.testing.assert_close(kept[name], expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(kept["out"], golden[tag + out], rtol=1e-10, atol=1e-10)
    # The same without hooks.
    out_without_hooks = attention(*arguments, **keywords)
    torch.testing.assert_close(out_without_hooks, golden[tag + out], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["shared", "separate", "shared_concat"])
def test_contextual_attention_is_the_authors(name):
    golden = load(f"comp_contextual_{name}")
    config = CompositionalAttentionConfig(
        **sizes(golden),
        separate_value_keys=name == "separate",
        own_value=name == "shared_concat",
    )
    attention = config.build(golden["x"].shape[-1])
    load_parameters(attention, golden)
    x = golden["x"]
    others = ~torch.eye(x.shape[1], dtype=torch.bool)
    check(attention, golden, x, x, mask=others[None, None])


def test_sort_of_clevr_block_is_the_authors():
    golden = load("comp_sortofclevr_mlp")
    x = golden["x"]
    config = TransformerConfig(
        d_input=1,
        d_output=1,
        d_model=x.shape[-1],
        n_layers=1,
        attention=CompositionalAttentionConfig(**sizes(golden), scorer="mlp"),
        feed_forward=FeedForwardConfig(d_mlp=golden["W_ff1"].shape[1], activation="relu"),
        positions="none",
    )
    block = Block(config).double()
    load_parameters(block.attn, golden)
    with torch.no_grad():
        for norm, theirs in ((block.ln1, "norm1"), (block.ln2, "norm2")):
            norm.weight.copy_(golden[f"{theirs}.w"])
            norm.bias.copy_(golden[f"{theirs}.b"])
            norm.eps = 1e-5
        block.mlp.W_in.copy_(golden["W_ff1"])
        block.mlp.b_in.copy_(golden["b_ff1"])
        block.mlp.W_out.copy_(golden["W_ff2"])
        block.mlp.b_out.copy_(golden["b_ff2"])
    check(block.attn, golden, golden["x_normed"], golden["x_normed"], out="attn_out")
    torch.testing.assert_close(block(x), golden["out"], rtol=1e-10, atol=1e-10)


def test_scan_attention_is_the_authors():
    golden = load("comp_scan_dot")
    config = CompositionalAttentionConfig(**sizes(golden), biases="selection")
    attention = config.build(golden["x_q"].shape[-1])
    load_parameters(attention, golden)
    x = golden["x_q"]
    padding = torch.from_numpy(golden["pad_mask"])
    causal = torch.from_numpy(golden["self_causal_mask"])
    check(
        attention,
        golden,
        x,
        golden["x_kv"],
        tag="cross_padmask.",
        mask=~padding[:, None, None],
    )
    check(attention, golden, x, x, tag="self_nomask.")
    check(attention, golden, x, x, tag="self_causal.", mask=~causal[None, None])


def build(d_model=12, **changes):
    sizes = {"n_searches": 3, "n_retrievals": 4, "d_head": 5, "d_value": 6, "d_selection": 7}
    config = CompositionalAttentionConfig(**sizes | changes)
    attention = CompositionalAttention(config, d_model, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for parameter in attention.parameters():
            if not parameter.any():
                parameter.normal_(generator=torch.Generator().manual_seed(1))
    return attention


def tokens(n_batch=5, n=6, d_model=12, seed=2):
    return torch.randn(n_batch, n, d_model, generator=torch.Generator().manual_seed(seed))


VARIANTS = {
    "default": {},
    "mlp": {"scorer": "mlp"},
    "separate": {"separate_value_keys": True},
    "gumbel": {"selection": "gumbel"},
    "hard": {"selection": "hard"},
    "top_k": {"selection": "top_k", "n_selected": 2},
    "own value": {"own_value": True},
    "nonlinear": {"nonlinear": True, "own_value": True},
    "nonlinear, separate, no biases": {
        "nonlinear": True,
        "own_value": True,
        "separate_value_keys": True,
        "biases": "none",
    },
    "biases of the selection": {"biases": "selection"},
    "no biases": {"biases": "none"},
    "one retrieval": {"n_retrievals": 1},
}


def literal(attention, x, mask):
    """One query, search and retrieval at a time; in evaluation."""
    c = attention.config

    def plus(value, bias, *index):
        return value if bias is None else value + bias[index]

    out = torch.zeros_like(x)
    for b, i in np.ndindex(*x.shape[:2]):
        mixed = []
        for s in range(c.n_searches):
            q = plus(attention.W_Q[s].T @ x[b, i], attention.b_Q, s)
            scores = torch.stack(
                [
                    q @ plus(attention.W_K[s].T @ x[b, j], attention.b_K, s) / c.d_head**0.5
                    for j in range(x.shape[1])
                ]
            )
            weights = scores.masked_fill(~mask[i], -torch.inf).softmax(0)
            value_query = plus(attention.W_value_query[s].T @ x[b, i], attention.b_value_query, s)
            retrievals, logits = [], []
            for r in range(c.n_retrievals):
                values = [
                    plus(attention.W_V[r].T @ x[b, j], attention.b_V, r) for j in range(x.shape[1])
                ]
                retrievals.append(sum(w * v for w, v in zip(weights, values, strict=True)))
                if c.scorer == "mlp":
                    both = torch.cat([value_query, retrievals[-1]])
                    logits.append(plus(both @ attention.W_score, attention.b_score, 0))
                else:
                    own = (r,) if c.separate_value_keys else ()
                    key = plus(
                        attention.W_value_key[own].T @ retrievals[-1], attention.b_value_key, *own
                    )
                    logits.append(value_query @ key / c.d_selection**0.5)
            logits = torch.stack(logits)
            if c.selection in ("gumbel", "hard"):
                chosen = (logits == logits.max()).to(x)
            elif c.selection == "top_k":
                least = logits.sort(descending=True).values[c.n_selected - 1]
                chosen = logits.exp() * (logits >= least) / logits.exp()[logits >= least].sum()
            else:
                chosen = logits.softmax(0)
            mixed.append(sum(w * r for w, r in zip(chosen, retrievals, strict=True)))
        if c.own_value:
            mixed.append(plus(attention.W_own.T @ x[b, i], attention.b_own, slice(None)))
        total = sum(z @ attention.W_O[s] for s, z in enumerate(mixed))
        total = plus(total, attention.b_O, slice(None))
        if c.nonlinear:
            total = plus(attention.W_O2.T @ total.relu(), attention.b_O2, slice(None))
        out[b, i] = total
    return out


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_every_variant_is_the_literal_formula(changes):
    attention = build(**changes).double().eval()
    x = tokens(n_batch=2, n=4).double()
    mask = ~torch.eye(4, dtype=torch.bool)
    with torch.no_grad():
        expected = literal(attention, x, mask)
        out = attention(x, x, mask=mask[None, None])
        torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)
        single = attention.float()(x.float(), x.float(), mask=mask[None, None])
        torch.testing.assert_close(single, expected.float(), rtol=1e-5, atol=1e-5)


def test_with_identity_scores_it_is_multi_head_attention():
    heads = AttentionConfig(n_heads=3, d_head=5, d_value=6).build(
        12, generator=torch.Generator().manual_seed(5)
    )
    attention = build(n_retrievals=3)
    attention.load_state_dict(heads.state_dict(), strict=False)
    x, keys = tokens(), tokens(n=8, seed=3)
    mask = torch.ones(6, 8, dtype=torch.bool).tril()[None, None]
    attention.hook_value_scores.add_hook(lambda scores, hook: torch.eye(3).expand_as(scores))
    torch.testing.assert_close(attention(x, keys, mask=mask), heads(x, keys, mask=mask))


@pytest.mark.parametrize(
    "changes",
    [{}, {"scorer": "mlp"}, {"biases": "none"}, {"n_retrievals": 1}],
    ids=["dot", "mlp", "no biases", "one retrieval"],
)
@pytest.mark.parametrize("elements", [1, 2**18])
def test_hooks_and_chunk_sizes_change_neither_outputs_nor_gradients(changes, elements, monkeypatch):
    monkeypatch.setattr("mechanisms.chunking.CPU_ELEMENTS", elements)
    attention, x = build(**changes).double(), tokens().double().requires_grad_()
    weight = tokens(seed=7).double()
    parameters = [x, *attention.parameters()]
    outputs = [attention(x, x)]
    attention.hook_retrieval.add_hook(lambda value, hook: value)
    outputs.append(attention(x, x))
    torch.testing.assert_close(*outputs)
    # A parameter without effect has a gradient of zero, since an optimizer needs one for all.
    gradients = [torch.autograd.grad((out * weight).sum(), parameters) for out in outputs]
    torch.testing.assert_close(*gradients)


def test_hooks_change_nothing_in_single_precision():
    attention, x = build(), tokens()
    without_hooks = attention(x, x)
    assert record(attention, x, x, names=["retrieval"])["retrieval"].shape == (5, 6, 3, 4, 6)
    attention.hook_retrieval.add_hook(lambda value, hook: value)
    torch.testing.assert_close(without_hooks, attention(x, x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_each_hook_point_changes_the_output(changes):
    attention, x = build(**changes).eval(), tokens()
    before = attention(x, x)
    names = [name for name, _ in attention.named_children() if name.startswith("hook_")]
    for name in names:
        point = getattr(attention, name)
        # A change that is the same for all retrievals would cancel out in the softmax.
        point.add_hook(lambda value, hook: value.flip(-1) * 1.5 + value.roll(1, dims=0))
        changed = not torch.allclose(attention(x, x), before, atol=1e-3)
        point.remove_hooks()
        # With one retrieval there is nothing to select; the query of the mlp scorer cancels out.
        without_effect = {"hook_value_query", "hook_value_key", "hook_value_logits"}
        if (changes.get("n_retrievals") == 1 and name in without_effect) or (
            changes.get("scorer") == "mlp" and name == "hook_value_query"
        ):
            assert not changed, name
        else:
            assert changed, name


def test_a_query_with_all_keys_masked_retrieves_zeros():
    attention, x = build(), tokens().requires_grad_()
    mask = torch.ones(6, 6, dtype=torch.bool)
    mask[2] = False
    kept = record(attention, x, x, mask=mask[None, None], names=["pattern", "retrieval", "z"])
    assert not kept["retrieval"][:, 2].any()
    assert not kept["z"][:, 2].any()
    attention(x, x, mask=mask[None, None]).sum().backward()
    assert x.grad.isfinite().all()


def test_dropout_and_gumbel_noise_are_applied_in_training_only():
    shared = {"dropout": 0.5}
    for changes in (shared, shared | {"dropout_shared": False}, {"selection": "gumbel"}):
        attention, x = build(**changes), tokens()
        assert not torch.equal(attention(x, x), attention(x, x))
        attention.eval()
        assert torch.equal(attention(x, x), attention(x, x))


@pytest.mark.parametrize("shared", [True, False])
def test_dropout_drops_the_same_pairs_of_all_examples_and_searches_or_other_ones(shared):
    attention, x = build(dropout=0.5, dropout_shared=shared), tokens()
    pattern = record(attention, x, x, names=["pattern"])["pattern"]
    dropped = (pattern == 0).flatten(0, 1).flatten(1)
    n_masks = len({tuple(row.tolist()) for row in dropped})
    assert n_masks == (1 if shared else pattern.shape[0] * pattern.shape[1])


def test_hard_selection_has_the_gradient_of_the_softmax():
    attention, x = build(selection="hard"), tokens()
    kept = record(attention, x, x, names=["value_scores"])["value_scores"]
    assert torch.equal(kept.sort(-1).values[..., -1], torch.ones(5, 6, 3))
    assert torch.equal(kept.sum(-1), torch.ones(5, 6, 3))
    attention(x, x).square().sum().backward()
    assert attention.W_value_query.grad.abs().sum() > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_searches": 0}, "n_searches must be at least 1, got 0"),
        ({"scorer": "cosine"}, "scorer must be one of dot, mlp, got 'cosine'"),
        ({"selection": "top_k"}, "n_selected must be from 1 to n_retrievals=4"),
        ({"n_selected": 2}, "n_selected must be None with selection='softmax', got 2"),
        ({"scorer": "mlp", "separate_value_keys": True}, "separate_value_keys must be False"),
        ({"dropout": 1.0}, "dropout must be in"),
        ({"biases": "some"}, "biases must be one of all, selection, none"),
    ],
)
def test_invalid_settings_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        build(**changes)


def test_parameters_are_counted_as_in_the_paper():
    """2 S + R matrices for queries, keys and values; the rest is selection and output."""
    attention = build(d_value=5, d_selection=5, biases="none")
    count = sum(parameter.numel() for parameter in attention.parameters())
    assert count == (2 * 3 + 4) * 12 * 5 + 3 * 12 * 5 + 5 * 5 + 3 * 5 * 12
