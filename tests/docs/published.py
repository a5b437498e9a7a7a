"""Untrained modules with the names and layouts of published models, which examples port."""

import numpy as np
import torch
from torch import nn

D_MODEL, N_HEADS = 16, 4


def named(parameters=None, **modules):
    """A module with these parts, which is there for its state dict alone."""
    module = nn.ModuleDict(modules)
    for name, parameter in (parameters or {}).items():
        module.register_parameter(name, nn.Parameter(parameter))
    return module


def two_layers(d_in, d_hidden, d_out, *between):
    """Two linear maps with a relu, and what else has a number, between them."""
    return nn.Sequential(nn.Linear(d_in, d_hidden), nn.ReLU(), *between, nn.Linear(d_hidden, d_out))


def searches(**parts):
    """The parts of a compositional attention with 4 searches and 2 retrievals of width 4."""
    maps = {name: nn.Linear(D_MODEL, 16) for name in ("query_net", "key_net", "query_value_net")}
    maps |= {"value_net": nn.Linear(D_MODEL, 2 * 4), "key_value_net": nn.Linear(4, 4)}
    return maps | {"final": nn.Linear(16, D_MODEL)} | parts


def search_block():
    """A block of "Compositional Attention", without the attention of its own name."""
    norms = {name: nn.LayerNorm(D_MODEL) for name in ("norm1", "norm2")}
    return named(**searches(res=two_layers(D_MODEL, 32, D_MODEL, nn.Dropout()), **norms))


def of_compositional_attention():
    """Of "Compositional Attention": attention, block, and the network of each task."""
    encoder = named(
        {"cls_token": torch.zeros(1, 1, D_MODEL // 2)},
        patch_embeddings=nn.Conv2d(3, D_MODEL // 2, 15, stride=15),
        question_representation=nn.Linear(18, D_MODEL // 2),
    )
    images = named(
        encoder=encoder,
        mapping=nn.Linear(D_MODEL, D_MODEL),
        transformer=search_block(),
        final=nn.Linear(D_MODEL, 10),
    )
    convolutions = {f"conv{i}": nn.Conv2d(32 if i > 1 else 1, 32, 4) for i in (1, 2, 3)}
    relations = named(
        {"gamma": torch.ones(D_MODEL), "beta": torch.zeros(D_MODEL)},
        encoder=named(**convolutions, fc1=nn.Linear(128, 256), fc2=nn.Linear(256, D_MODEL)),
        transformer_encoder=search_block(),
        encoder_norm=nn.LayerNorm(D_MODEL),
        out_hidden=nn.Linear(D_MODEL, 256),
        y_out=nn.Linear(256, 4),
    )
    retrieval = named(
        encoder=two_layers(14, 32, D_MODEL),
        model=named(**searches()),
        decoder=two_layers(D_MODEL, 32, 1),
    )
    return {
        "their_attention": named(**searches()),
        "their_block": search_block(),
        "their_network": retrieval,
        "their_image_network": images,
        "their_relation_network": relations,
    }


def of_neural_data_router():
    """Of "The Neural Data Router": geometric attention, layer and classifier."""

    def attention():
        names = ("scale", "scale_pos", "s_bias")
        biases = {"global_content_bias": torch.zeros(N_HEADS, D_MODEL // N_HEADS)}
        return named(
            {name: torch.ones(1) for name in names} | biases,
            data_to_q=nn.Linear(D_MODEL, D_MODEL, bias=False),
            data_to_kv=nn.Linear(D_MODEL, 2 * D_MODEL, bias=False),
            data_to_qp=nn.Linear(D_MODEL, 2 * N_HEADS),
            multi_head_merge=nn.Linear(D_MODEL, D_MODEL, bias=False),
        )

    def layer():
        maps = {name: nn.Linear(D_MODEL, D_MODEL) for name in ("p1", "p2", "g1", "g2")}
        norms = {name: nn.LayerNorm(D_MODEL) for name in ("nmerge", "no")}
        return named(att=attention(), **maps, **norms)

    model = named(
        embedding=nn.Embedding(10 + 2, D_MODEL),
        trafo=named(layer=layer()),
        output_map=nn.Linear(D_MODEL, 3),
    )
    return {"their_attention": attention(), "their_layer": layer(), "their_model": model}


def of_hypernetwork_attention():
    """Of "Attention as a Hypernetwork": the variables of a transformer, as flax has them."""
    rng = np.random.default_rng(0)

    def dense(*shape, features=1):
        kernel = 0.1 * rng.standard_normal(shape)
        return {"kernel": kernel.astype("float32"), "bias": np.zeros(shape[-features:], "float32")}

    def norm():
        return {name: np.ones(D_MODEL, "float32") for name in ("scale", "bias")}

    heads = (D_MODEL, N_HEADS, D_MODEL // N_HEADS)
    mixer = {name: dense(*heads, features=2) for name in ("query", "key", "value")}
    block = {
        "norm1": norm(),
        "norm2": norm(),
        "sequence_mixer": mixer | {"out": dense(*heads[1:], D_MODEL)},
        "state_mixer": {"Dense_0": dense(D_MODEL, 32), "Dense_1": dense(32, D_MODEL)},
        "relative_embedding": {"rel_embedding": np.zeros((N_HEADS, 8), "float32")},
    }
    ends = {"embedding": dense(8, D_MODEL), "logitdense": dense(D_MODEL, 8)}
    blocks = {f"transformer_block_{layer}": block for layer in range(2)}
    return {"variables": {"params": ends | {"decoder_norm": norm()} | blocks}}
