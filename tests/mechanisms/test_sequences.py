import re

import pytest
import torch
from torch.func import vmap

import mechanisms
from mechanisms.sequences import rows_of_table


def test_ids_are_rows_and_padding_is_row_0():
    ids = torch.tensor([[2, -1, 0], [1, 2, -1]])
    assert rows_of_table(ids, 3, padding=-1).tolist() == [[2, 0, 0], [1, 2, 0]]
    assert rows_of_table(ids + 1, 4, padding=3).tolist() == [[0, 0, 1], [2, 0, 0]]
    assert rows_of_table(torch.zeros(0, 4, dtype=torch.long), 3).shape == (0, 4)


@pytest.mark.parametrize(
    ("padding", "wrong", "message"),
    [
        (None, -1, "token ids must be in [0, 3), got -1"),
        (-1, -2, "token ids must be in [0, 3), or -1 for padding, got -2"),
        (9, 3, "token ids must be in [0, 3), or 9 for padding, got 3"),
    ],
)
def test_other_ids_are_refused(padding, wrong, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        rows_of_table(torch.tensor([1, wrong]), 3, padding=padding)


def test_ids_are_taken_as_they_are_inside_of_vmap():
    ids = torch.tensor([[2, -1, 0], [1, 2, -1]])
    rows = vmap(lambda one: rows_of_table(one, 3, padding=-1))(ids)
    assert torch.equal(rows, rows_of_table(ids, 3, padding=-1))


TRANSFORMER = {"d_input": 9, "d_output": 3, "d_model": 8, "n_layers": 1}


@pytest.mark.parametrize(
    ("build", "given", "error", "message"),
    [
        ("tokens", torch.zeros(2, 5), TypeError, "token ids must be int64 or int32, got .*float32"),
        ("tokens", torch.ones(2, 5).bool(), TypeError, "token ids must be int64 .*bool"),
        ("tokens", torch.ones(5).long(), ValueError, r"tokens must be \[batch, pos\], got \[5\]"),
        ("vectors", torch.zeros(2, 5, 7), ValueError, r"inputs must be \[batch, pos, 9\], got"),
        ("router", torch.ones(5).long(), ValueError, r"tokens must be \[batch, pos\], got \[5\]"),
        ("router", torch.ones(2, 5), TypeError, "tokens must be int64 or int32, got torch.float32"),
        ("retrieval", torch.ones(2, 5, 7), ValueError, r"inputs must be \[batch, pos, 9\], got"),
    ],
)
def test_inputs_of_other_shapes_and_types_are_named(build, given, error, message):
    if build == "router":
        sizes = {"d_input": 9, "d_output": 3, "d_model": 8, "d_mlp": 8, "n_heads": 2, "n_steps": 2}
        model = mechanisms.NeuralDataRouter(mechanisms.NeuralDataRouterConfig.named("ndr", **sizes))
    elif build == "retrieval":
        attention = mechanisms.AttentionConfig(n_heads=2, d_head=4)
        sizes = {"d_input": 9, "d_output": 1, "d_model": 8, "d_mlp": 8}
        config = mechanisms.RetrievalNetworkConfig(attention=attention, **sizes)
        model = mechanisms.RetrievalNetwork(config)
    else:
        attention = mechanisms.AttentionConfig(n_heads=2, d_head=4)
        mlp = mechanisms.FeedForwardConfig(d_mlp=8)
        parts = {"attention": attention, "feed_forward": mlp, "positions": "none"}
        config = mechanisms.TransformerConfig(**TRANSFORMER, **parts, inputs=build)
        model = mechanisms.Transformer(config)
    with pytest.raises(error, match=message):
        model(given)
