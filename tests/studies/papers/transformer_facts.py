"""Facts about the models of several studies, see `facts`."""

import functools
from dataclasses import replace
from typing import Any

import torch

from mechanisms import Transformer
from studies.engine import Setup


def normalised(setup: Setup) -> Setup:
    """The setup with the training and the seeds of no cell: the model does not depend on them."""
    training = replace(setup.training, n_steps=1, learning_rate=1.0, weight_decay=0.0)
    return replace(setup, seed=0, n_validation=2, training=replace(training, warmup_steps=0))


@functools.cache
def drops_shared_pairs(config: Any) -> bool | str:
    """Whether an attention with this config drops the same pairs of all examples and heads.

    "no pairs" if it drops none.
    """
    attention = config.build(32, generator=torch.Generator().manual_seed(0)).train()
    patterns = []
    attention.hook_pattern.add_hook(lambda value, hook: patterns.append(value))
    x = torch.randn(3, 24, 32, generator=torch.Generator().manual_seed(1))
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        attention(x, x)
    dropped = patterns[0] == 0
    if not dropped.any():
        return "no pairs"
    return torch.equal(dropped, dropped[:1, :1].expand_as(dropped))


@functools.cache
def transformer_facts(setup: Setup) -> dict[str, Any]:
    """Facts about a `Transformer`: its config, the parameters that it has, and their number."""
    with torch.device("meta"):
        model = setup.build(torch.Generator())
    assert isinstance(model, Transformer)
    config, block = model.config, model.blocks[0]
    attention, mlp = block.attn.config, block.mlp.config
    names = "positions bidirectional causal shared inputs tied n_layers d_model n_readout d_output"
    facts = {f"model.{name}": getattr(config, name) for name in names.split()}
    parameters = {name.rpartition(".")[2] for name, _ in block.named_parameters()}
    biases = {"b_Q", "b_K", "b_V", "b_O"} & parameters
    assert not biases or len(biases) == 4
    assert ({"b_in", "b_out"} <= parameters) == (mlp.activation != "swiglu")
    return facts | {
        "model.normalization": attention.normalization,
        "model.value_network": attention.value_network,
        "model.normalize_qk": hasattr(block.attn, "ln_q"),
        "model.n_heads": block.attn.W_Q.shape[0],
        "model.d_head": block.attn.W_Q.shape[2],
        "model.d_value": block.attn.W_V.shape[2],
        "model.d_mlp": block.mlp.W_in.shape[1],
        "model.activation": mlp.activation,
        "model.norm": {"LayerNorm": "layer_norm", "RMSNorm": "rms_norm"}[type(block.ln1).__name__],
        "model.norm_epsilon": block.ln1.eps,
        "model.biases": bool(biases),
        "model.dropout.attention": attention.dropout,
        "model.dropout.attention_shared": drops_shared_pairs(attention),
        "model.dropout.mlp": mlp.dropout,
        "model.dropout.residual": block.dropout,
        # The embedding has none.
        "model.dropout.embedding": 0.0,
        "model.n_parameters": sum(parameter.numel() for parameter in model.parameters()),
    }
