"""Transformer layers of torch with the weights of our blocks, as references."""

import torch
from torch import nn


def encoder_layer(block):
    """An nn.TransformerEncoderLayer equivalent to a `Block` with softmax attention and relu."""
    layer = nn.TransformerEncoderLayer(**_sizes(block), norm_first=not block.post_norm)
    _fill(layer, block, {"norm1": block.ln1, "norm2": block.ln2}, {"self_attn": block.attn})
    return layer.eval()


def decoder_layer(block):
    """An nn.TransformerDecoderLayer equivalent to a `DecoderBlock`."""
    layer = nn.TransformerDecoderLayer(**_sizes(block), norm_first=not block.post_norm)
    norms = {"norm1": block.ln1, "norm2": block.ln_cross, "norm3": block.ln2}
    _fill(layer, block, norms, {"self_attn": block.attn, "multihead_attn": block.cross_attn})
    return layer.eval()


def _sizes(block):
    n_heads, d_model, _ = block.attn.W_Q.shape
    return {
        "d_model": d_model,
        "nhead": n_heads,
        "dim_feedforward": block.mlp.W_in.shape[1],
        "dropout": 0.0,
        "batch_first": True,
        "layer_norm_eps": block.ln1.eps,
    }


@torch.no_grad()
def _fill(layer, block, norms, attentions):
    for name, norm in norms.items():
        getattr(layer, name).load_state_dict(norm.state_dict())
    for name, ours in attentions.items():
        theirs = getattr(layer, name)
        weights = [w.transpose(1, 2).flatten(0, 1) for w in (ours.W_Q, ours.W_K, ours.W_V)]
        theirs.in_proj_weight.copy_(torch.cat(weights))
        theirs.in_proj_bias.copy_(torch.cat([b.flatten() for b in (ours.b_Q, ours.b_K, ours.b_V)]))
        theirs.out_proj.weight.copy_(ours.W_O.flatten(0, 1).T)
        theirs.out_proj.bias.copy_(ours.b_O)
    for linear, side in ((layer.linear1, "in"), (layer.linear2, "out")):
        linear.weight.copy_(getattr(block.mlp, f"W_{side}").T)
        linear.bias.copy_(getattr(block.mlp, f"b_{side}"))


@torch.no_grad()
def shake(model, seed=0):
    """Add noise to all parameters, so that biases and gains affect the output."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model.requires_grad_(False).eval()
