"""What a cell of the control-flow study really is, in the names of the tables of papers."""

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

import mechanisms
from mechanisms import AttentionConfig, GeometricAttentionConfig, RelativeAttentionConfig
from studies.setups.expressions import ExpressionSetup
from tasks import TableLookup, TableLookupConfig

INITS = {"normal": "normal", "kaiming_normal": "kaiming", "xavier_uniform": "xavier"}
"""The tables' names of what embeddings are drawn from."""


def expression_facts(setup: ExpressionSetup) -> dict[str, Any]:
    """Facts about the task and the model of a setup."""
    # They depend neither on the training nor on the seed.
    training = replace(setup.training, n_steps=1, learning_rate=1.0, weight_decay=0.0)
    same = replace(setup, seed=0, training=training)
    is_lookup = isinstance(setup.task, TableLookupConfig)
    task_facts = lookup_facts(setup.task) if is_lookup else nested_facts(setup.task)
    return common_task_facts(same) | task_facts | model_facts(same)


# Tasks


@functools.cache
def common_task_facts(setup: ExpressionSetup) -> dict[str, Any]:
    """Facts about splits, which all tasks have."""
    task, config = setup.sampler(), setup.task
    assert task.config == config
    counts = {split: config.counts(split) for split in task.SPLITS}
    facts = {f"task.n_{split}": sum(count.values()) for split, count in counts.items()}
    facts |= {f"task.{split}_depths": ends(count) for split, count in counts.items()}
    return facts | {
        "task.train_depth": max(counts["train"]),
        "task.vocabulary_size": len(task.vocabulary),
        "task.n_answers": len(task.answers),
        "task.chance": task.chance,
    }


def ends(counts: dict[int, int]) -> tuple[int, int]:
    return min(counts), max(counts)


@functools.cache
def lookup_facts(config: TableLookupConfig) -> dict[str, Any]:
    """Facts about table lookup, from the whole training set and a few examples."""
    task = TableLookup(config)
    tables, n_train = task.tables, task.size("train")
    first = task.words(task.batch("ood", 0, 1), 0)[0]
    n_compositions = sum(config.counts("train").values())
    lone = n_train - n_compositions - tables.size
    return {
        "task.direction": "forward" if first in task.answers else "backward",
        "task.n_symbols": tables.shape[1],
        "task.n_tables": len(tables) - config.n_lone,
        "task.n_lone": config.n_lone,
        "task.lone_repeats": lone // (config.n_lone * tables.shape[1]) if config.n_lone else 0,
        "task.tables_bijective": bool((np.sort(tables, 1) == np.arange(tables.shape[1])).all()),
        "task.n_train": n_train,
        "task.n_single_in_train": n_train - n_compositions,
        "task.n_compositions": n_compositions,
    }


def nested_facts(config: Any) -> dict[str, Any]:
    """Facts about arithmetic and ListOps, from their settings: the splits are large."""
    numbers = [set(config.counts(split).values()) for split in ("train", "id", "valid", "ood")]
    return {
        "task.modulus": 10,
        "task.max_length": config.max_length,
        "task.n_arguments": config.notation.n_arguments,
        "task.nested": config.nested,
        "task.side": getattr(config, "side", "balanced"),
        "task.balanced_over_depth": all(max(each) - min(each) <= 1 for each in numbers),
    }


# Models


@functools.cache
def model_facts(setup: ExpressionSetup) -> dict[str, Any]:
    """Facts about the model that a setup builds, in training and as it is tested."""
    model = setup.build(torch.Generator().manual_seed(0))
    n_marks = model.W_E.shape[0] - len(setup.sampler().vocabulary)
    assert n_marks in (0, 2)
    facts = {"model.marks": n_marks == 2}
    match model:
        case mechanisms.NeuralDataRouter():
            tested = setup.build_tested(torch.Generator().manual_seed(0))
            steps = {"model.n_steps": len(model.blocks), "model.n_test_steps": len(tested.blocks)}
            return facts | steps | router_facts(model)
        case mechanisms.Lstm():
            return facts | recurrent_facts(model) | lstm_facts(model)
        case mechanisms.Dnc():
            return facts | recurrent_facts(model) | dnc_facts(model)
    raise AssertionError(model)


def router_facts(model: Any) -> dict[str, Any]:
    """Facts about a `NeuralDataRouter`."""
    config, core = model.config, model.core
    n_heads, d_model, d_head = core.attn.W_Q.shape
    facts = {
        "model.d_model": d_model,
        "model.n_heads": n_heads,
        "model.d_head": d_head,
        "model.d_mlp": core.mlp.W_in.shape[1],
        "model.activation": core.mlp.config.activation,
        "model.readout": config.readout,
        "model.embedding_init": embedding_init(model),
        "model.copy_gate": core.gate is not None,
        "model.dropout.embedding": config.embedding_dropout,
        "model.dropout.attention_output": core.dropout,
        "model.dropout.feed_forward_hidden": core.mlp.config.dropout,
    }
    if core.gate is None:
        facts["model.dropout.feed_forward_output"] = core.dropout
    else:
        facts |= gate_facts(core)
    return facts | attention_facts(core.attn)


def embedding_init(model: Any) -> str:
    """What the embeddings were drawn from: the entries' spread agrees with the config."""
    n, d_model = model.W_E.shape
    spreads = {"normal": 1.0, "kaiming_normal": (2 / d_model) ** 0.5}
    spreads["xavier_uniform"] = (2 / (n + d_model)) ** 0.5
    name = model.config.embedding_init
    assert abs(model.W_E.std().item() / spreads[name] - 1) < 0.1
    return INITS[name]


def gate_facts(core: nn.Module) -> dict[str, Any]:
    """Facts about the copy gate of a block."""
    gate: Any = core.gate
    d_model, d_hidden = gate.W_in.shape
    (bias,) = set(gate.b_out.tolist())
    return {
        "model.gate_width": "vector" if len(gate.b_out) == d_model else "scalar",
        "model.gate_hidden": d_hidden,
        "model.gate_initial_bias": bias,
        "model.gate_update": "tanh" if core.ln_out is None else "layer_norm",
        "model.dropout.gate_hidden": gate.config.hidden_dropout,
        "model.dropout.gate": gate.config.dropout,
    }


def attention_facts(attn: Any) -> dict[str, Any]:
    """Facts about the attention of a block."""
    match attn.config:
        case AttentionConfig():
            return {"model.attention": "softmax"}
        case RelativeAttentionConfig(gated=gated, query_dropout=rate, key_dropout=0.0):
            dropouts = {f"model.dropout.{part}_query": rate for part in ("content", "position")}
            return dropouts | {"model.attention": "abs_rel" if gated else "relative"}
        case GeometricAttentionConfig(query_dropout=rate, key_dropout=0.0):
            return {
                "model.attention": "geometric",
                "model.normalize": attn.config.normalize,
                "model.scale_pos_initial": attn.scale_pos.item(),
                "model.s_bias_initial": attn.s_bias.item(),
                "model.dropout.content_query": rate,
            }
    raise AssertionError(attn.config)


def recurrent_facts(model: Any) -> dict[str, Any]:
    """Facts that LSTM and DNC share."""
    return {
        "model.d_embed": model.W_E.shape[1],
        "model.readout": "last",
        "model.dropout.embedding": model.config.dropout,
    }


def lstm_facts(model: Any) -> dict[str, Any]:
    """Facts about an LSTM."""
    directions = {layer.backward_lstm is not None for layer in model.layers}
    assert len(directions) == 1
    return {
        "model.bidirectional": directions.pop(),
        "model.d_hidden": model.layers[0].lstm.hidden_size,
        "model.n_layers": len(model.layers),
        "model.dropout.between_layers": model.config.dropout,
    }


def dnc_facts(model: Any) -> dict[str, Any]:
    """Facts about a DNC, whose controller is an LSTM of one layer."""
    core = model.core
    return {
        "model.bidirectional": False,
        "model.d_hidden": core.d_hidden,
        "model.n_layers": 1,
        "model.n_cells": core.n_cells,
        "model.d_cell": core.d_cell,
        "model.n_read_heads": core.n_heads,
        "model.masked_content_addressing": "masks" in core.splits,
        "model.link_sharpness": "sharpness" in core.splits,
        "model.deallocation": core.deallocation,
        "model.clip_controls": core.clip,
    }
