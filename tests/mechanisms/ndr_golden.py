"""Golden files of the Neural Data Router: the authors' weights, loaded into our modules."""

from pathlib import Path

import numpy as np
import torch

from mechanisms.attention.geometric import GeometricAttentionConfig
from mechanisms.attention.multi_head import AttentionConfig
from mechanisms.attention.relative import RelativeAttentionConfig
from mechanisms.layers.copy_gate import CopyGateConfig
from mechanisms.layers.feed_forward import FeedForwardConfig
from mechanisms.models.neural_data_router import NeuralDataRouter, NeuralDataRouterConfig

GOLDEN = Path(__file__).parents[1] / "golden"
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}
DTYPES = tuple(TOLERANCE)

ATTENTION = ("W_Q", "W_K", "W_V", "W_O", "W_dir", "b_dir", "content_bias", "scale", "scale_pos")
RELATIVE = {"W_pos": "W_pos", "pos_bias": "pos_bias", "W_absgate": "W_gate", "b_absgate": "b_gate"}


def load(name, dtype=torch.float64):
    """The arrays of a golden file, with floating-point arrays as `dtype`."""
    with np.load(GOLDEN / f"{name}.npz") as file:
        arrays = {key: torch.from_numpy(np.asarray(file[key])) for key in file.files}
    return {k: v.to(dtype) if v.is_floating_point() else v for k, v in arrays.items()}


def attention_weights(golden, prefix=""):
    names = {name: name for name in (*ATTENTION, "s_bias")} | RELATIVE
    return {
        ours: golden[prefix + theirs] for theirs, ours in names.items() if prefix + theirs in golden
    }


def block_weights(golden, prefix=""):
    weights = {f"attn.{k}": v for k, v in attention_weights(golden, f"{prefix}att.").items()}
    for theirs, ours in (("data", "mlp"), ("gate", "gate")):
        for number, side in (("1", "in"), ("2", "out")):
            weights[f"{ours}.W_{side}"] = golden[f"{prefix}W_{theirs}{number}"]
            weights[f"{ours}.b_{side}"] = golden[f"{prefix}b_{theirs}{number}"]
    for norm in ("ln_merge", "ln_out"):
        if f"{prefix}{norm}.w" in golden:
            weights[f"{norm}.weight"] = golden[f"{prefix}{norm}.w"]
            weights[f"{norm}.bias"] = golden[f"{prefix}{norm}.b"]
    return weights


def load_weights(module, weights, dtype):
    """Load exactly these weights into `module`; missing or unexpected ones are an error."""
    module = module.to(dtype).eval()
    module.load_state_dict(weights)
    return module


def config(**changes):
    """The config of a small router."""
    small = {
        "d_input": 7,
        "d_output": 5,
        "d_model": 12,
        "n_steps": 5,
        "attention": GeometricAttentionConfig(n_heads=3, d_head=4),
        "feed_forward": FeedForwardConfig(d_mlp=24, activation="relu"),
        "gate": CopyGateConfig(),
    }
    return NeuralDataRouterConfig(**small | changes)


def router(*, seed=0, **changes):
    """A small router with random weights."""
    return NeuralDataRouter(config(**changes), generator=torch.Generator().manual_seed(seed))


VARIANTS = {
    "ndr": {},
    "scalar gate": {"gate": CopyGateConfig(width="scalar", d_hidden=30)},
    "geometric": {
        "gate": None,
        "attention": GeometricAttentionConfig(n_heads=3, d_head=4, normalize=True),
    },
    "published weights": {"initialization": "csordas_2021"},
    "transformer": {
        "gate": None,
        "attention": AttentionConfig(n_heads=3, d_head=4),
        "sinusoidal": True,
    },
    "abs_rel_gate": {
        "gate": CopyGateConfig(update="tanh"),
        "attention": RelativeAttentionConfig(n_heads=3, d_head=4, gated=True),
    },
}
