"""Attributions of nodes and edges, on random models and one with a planted circuit."""

import numpy as np
import pytest
import torch
import transformers
from transformer_lens.model_bridge.sources import build_bridge_from_module
from transformer_lens.tools.analysis import EdgeAttributionConfig, attribution_patch

import mechanisms
from probes import attribute
from tests.probes.interventions.planted import (
    LAST,
    READ,
    bridge,
    difference,
    pairs,
    planted_bridge,
)


def test_labels_are_those_of_the_edges_that_transformer_lens_scores():
    model, (clean, corrupted) = bridge(), pairs(3, differ_at=1)
    found = attribute(model, clean, corrupted, metric=difference(clean, corrupted))
    # One metric for all examples, which is all that TransformerLens takes.
    same = attribute(model, clean, corrupted, metric=lambda logits, rows: logits[:, -1, 0])
    result = attribution_patch(
        model, clean, corrupted, lambda logits: logits[0, -1, 0], EdgeAttributionConfig("edge")
    )
    kinds = {"attn_head_out": "head", "q_input": "q", "k_input": "k", "v_input": "v"}

    def label(node):
        kind = kinds.get(node.kind, node.kind.split("_")[0])
        head = "" if node.head is None else f".{node.head}"
        return kind if kind in ("embed", "logits") else f"{kind} {node.layer}{head}"

    assert int(same["edge"].notnull().sum()) == len(result.edge_scores) == 184
    for (writer, reader), score in result.edge_scores.items():
        at = {"writer": label(writer), "reader": label(reader), "pos": writer.position}
        assert same["edge"].sel(at) == pytest.approx(score, abs=1e-6)
    for node, score in result.node_scores.items():
        at = {"writer": label(node), "pos": node.position}
        assert same["node"].sel(at) == pytest.approx(score, abs=1e-6)
    assert not np.allclose(same["node"], found["node"])
    head = found.sel(writer="head 1.0", reader="mlp 1")
    assert (head["writer_kind"], head["writer_layer"], head["writer_head"]) == (
        "attn_head_out", 1, 0,
    )  # fmt: skip
    assert (head["reader_kind"], head["reader_layer"], head["reader_head"]) == ("mlp_in", 1, -1)
    # A writer has no edge to an earlier reader.
    assert found["edge"].sel(writer="head 1.0", reader="q 1.0").isnull().all()


def test_a_node_is_the_sum_of_its_edges_and_means_are_over_examples():
    model, (clean, corrupted) = bridge(), pairs(6, differ_at=1)
    metric = difference(clean, corrupted)
    edges = attribute(model, clean, corrupted, metric=metric)
    nodes = attribute(model, clean, corrupted, metric=metric, granularity="node")
    assert "edge" not in nodes
    np.testing.assert_allclose(nodes["example_node"], edges["example_node"], atol=1e-5)
    np.testing.assert_allclose(edges["example_edge"].sum("reader"), edges["example_node"])
    for name in ("node", "edge"):
        np.testing.assert_allclose(edges[f"example_{name}"].mean("example"), edges[name])
    assert ((edges["node_low"] <= edges["node"]) & (edges["node"] <= edges["node_high"])).all()
    # Each example is scored with its own metric: alone or with others.
    last = attribute(model, clean[5:], corrupted[5:], metric=difference(clean[5:], corrupted[5:]))
    np.testing.assert_allclose(last["node"], edges["example_node"][..., 5], atol=1e-6)
    # Before the position that differs nothing can change.
    assert (edges["example_node"].sel(pos=0) == 0).all()
    assert all(variable.attrs["long_name"] for variable in edges.data_vars.values())


def test_a_small_change_has_the_effect_that_is_attributed_to_it():
    """The attribution of the embedding is the derivative of the metric along its change."""
    model, (clean, corrupted) = bridge(), pairs(1, differ_at=1)
    found = attribute(model, clean, corrupted, metric=lambda logits, rows: logits[:, -1, 0])
    table = model.original_model.transformer.wte.weight
    change = (table[clean] - table[corrupted]).detach()
    values = []
    for share in (-0.001, 0.001):
        edit = ("hook_embed", lambda embedded, hook, share=share: embedded + share * change)
        with torch.no_grad(), model.hooks(fwd_hooks=[edit]):
            values.append(model(corrupted)[0, -1, 0].item())
    slope = (values[1] - values[0]) / 0.002
    assert abs(slope) > 0.01
    assert found["node"].sel(writer="embed").sum() == pytest.approx(slope, rel=0.02)


def test_the_planted_edges_have_all_of_the_attribution():
    model, (clean, corrupted) = planted_bridge(), pairs(8, differ_at=READ)
    with torch.no_grad():
        assert (model(clean)[:, -1].argmax(-1) == clean[:, READ]).all()
    edge = attribute(model, clean, corrupted, metric=difference(clean, corrupted))["edge"]
    planted = {("embed", "v 0.1", READ), ("head 0.1", "logits", LAST)}
    strong = edge.where(edge.notnull(), 0).stack(edge=("writer", "reader", "pos"))
    assert {tuple(at) for at in strong["edge"].values[np.abs(strong) > 1e-3]} == planted
    assert (strong.values[np.abs(strong) > 1e-3] > 1).all()


@pytest.mark.parametrize("case", ["unread position", "constant metric"])
def test_nothing_is_attributed_where_nothing_depends(case):
    model = planted_bridge()
    clean, corrupted = pairs(4, differ_at=2 if case == "unread position" else READ)
    metric = difference(clean, corrupted, at=2)
    if case == "constant metric":
        metric = lambda logits, rows: 0 * logits[:, 0, 0]  # noqa: E731
    found = attribute(model, clean, corrupted, metric=metric)
    assert np.abs(found["example_node"]).max() < 1e-6
    assert np.abs(found["example_edge"]).max() < 1e-6


def test_the_model_may_be_in_training_and_is_left_as_it_was():
    model, (clean, corrupted) = bridge(), pairs(2, differ_at=1)
    metric = difference(clean, corrupted)
    expected = attribute(model, clean, corrupted, metric=metric)
    model.train()
    assert attribute(model, clean, corrupted, metric=metric).identical(expected)
    assert model.training
    assert all(weight.grad is None for weight in model.parameters())


def test_models_of_shared_keys_have_nodes():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=16, vocab_size=6, max_position_embeddings=8,
    )  # fmt: skip
    llama = transformers.LlamaForCausalLM(config).eval()
    model = build_bridge_from_module(llama, "LlamaForCausalLM", hf_config=config)
    clean, corrupted = pairs(2, differ_at=1)
    settings = {"metric": difference(clean, corrupted)}
    nodes = attribute(model, clean, corrupted, **settings, granularity="node")
    assert nodes["writer"].values.tolist() == ["embed", *(f"head 0.{i}" for i in range(4)), "mlp 0"]
    with pytest.raises(ValueError, match="n_key_value_heads=2 for n_heads=4"):
        attribute(model, clean, corrupted, **settings)


def native_transformer():
    config = mechanisms.TransformerConfig(
        d_input=6, d_output=6, d_model=8, n_layers=1, positions="none",
        attention=mechanisms.AttentionConfig(n_heads=2, d_head=4),
        feed_forward=mechanisms.FeedForwardConfig(d_mlp=8),
    )  # fmt: skip
    return mechanisms.Transformer(config)


CLEAN, CORRUPTED = pairs(3, differ_at=1)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"model": native_transformer()}, TypeError, "TransformerBridge, .* got Transformer; `int"),
        ({"clean": CLEAN[:2]}, ValueError, r"same shape, got \(2, 4\) and \(3, 4\)"),
        ({"clean": CLEAN[0], "corrupted": CORRUPTED[0]}, ValueError, r"\[example, pos\]"),
        ({"clean": CLEAN[:0], "corrupted": CORRUPTED[:0]}, ValueError, r"got \(0, 4\)"),
        (
            {"clean": CLEAN.float()},
            TypeError,
            "clean must hold token ids, integers, got torch.float32",
        ),
        ({"corrupted": CORRUPTED + 90}, ValueError, "corrupted must hold token ids from 0 to"),
        ({"clean": CLEAN - 90}, ValueError, "clean must hold token ids from 0 to"),
        ({"granularity": "head"}, ValueError, "granularity must be one of .*, got 'head'"),
        ({"metric": lambda logits, rows: logits}, ValueError, r"metric must return .*\[1 examples"),
        ({"metric": lambda logits, rows: logits[:, 0, 0] / 0}, ValueError, "metric must be finite"),
        (
            {"metric": lambda logits, rows: (logits[:, 0].argmax(-1) == 0).float()},
            ValueError,
            "metric must have a gradient",
        ),
    ],
)
def test_invalid_input_is_refused(changes, error, message):
    arguments = {
        "model": bridge(), "clean": CLEAN, "corrupted": CORRUPTED,
        "metric": difference(CLEAN, CORRUPTED),
    }  # fmt: skip
    with pytest.raises(error, match=message):
        attribute(**arguments | changes)
