"""Hooked attention mechanisms and the models made of them.

The names are imported when they are first used, so `import mechanisms` itself costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mechanisms.attention import ATTENTION_VARIANTS, AttentionConfig, MultiHeadAttention
    from mechanisms.copy_gate import CopyGateConfig
    from mechanisms.dnc import Dnc, DncConfig
    from mechanisms.feed_forward import FeedForward, FeedForwardConfig
    from mechanisms.geometric_attention import (
        GeometricAttention,
        GeometricAttentionConfig,
        geometric_weights,
    )
    from mechanisms.halting import HaltingConfig
    from mechanisms.mixture_of_experts import MixtureOfExperts, MixtureOfExpertsConfig
    from mechanisms.neural_data_router import NeuralDataRouter, NeuralDataRouterConfig
    from mechanisms.positions import RelativePositionBias, relative_buckets, sinusoidal_embedding
    from mechanisms.recurrent import Lstm, LstmConfig
    from mechanisms.relative_attention import RelativeAttention, RelativeAttentionConfig
    from mechanisms.sequences import enclose
    from mechanisms.serialization import load, save
    from mechanisms.transformer import Transformer, TransformerConfig

__all__ = [
    "ATTENTION_VARIANTS",
    "AttentionConfig",
    "CopyGateConfig",
    "Dnc",
    "DncConfig",
    "FeedForward",
    "FeedForwardConfig",
    "GeometricAttention",
    "GeometricAttentionConfig",
    "HaltingConfig",
    "Lstm",
    "LstmConfig",
    "MixtureOfExperts",
    "MixtureOfExpertsConfig",
    "MultiHeadAttention",
    "NeuralDataRouter",
    "NeuralDataRouterConfig",
    "RelativeAttention",
    "RelativeAttentionConfig",
    "RelativePositionBias",
    "Transformer",
    "TransformerConfig",
    "enclose",
    "geometric_weights",
    "load",
    "relative_buckets",
    "save",
    "sinusoidal_embedding",
]

_HOME = {
    "ATTENTION_VARIANTS": "attention",
    "AttentionConfig": "attention",
    "CopyGateConfig": "copy_gate",
    "Dnc": "dnc",
    "DncConfig": "dnc",
    "FeedForward": "feed_forward",
    "FeedForwardConfig": "feed_forward",
    "GeometricAttention": "geometric_attention",
    "GeometricAttentionConfig": "geometric_attention",
    "HaltingConfig": "halting",
    "Lstm": "recurrent",
    "LstmConfig": "recurrent",
    "MixtureOfExperts": "mixture_of_experts",
    "MixtureOfExpertsConfig": "mixture_of_experts",
    "MultiHeadAttention": "attention",
    "NeuralDataRouter": "neural_data_router",
    "NeuralDataRouterConfig": "neural_data_router",
    "RelativeAttention": "relative_attention",
    "RelativeAttentionConfig": "relative_attention",
    "RelativePositionBias": "positions",
    "Transformer": "transformer",
    "TransformerConfig": "transformer",
    "enclose": "sequences",
    "geometric_weights": "geometric_attention",
    "load": "serialization",
    "relative_buckets": "positions",
    "save": "serialization",
    "sinusoidal_embedding": "positions",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'mechanisms' has no attribute {name!r}; it has {__all__}")
    return getattr(import_module(f"mechanisms.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
