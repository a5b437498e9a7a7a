"""Hooked attention mechanisms and the models made of them.

The names are imported when they are first used, so `import mechanisms` itself costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mechanisms.attention import ATTENTION_VARIANTS, AttentionConfig, MultiHeadAttention
    from mechanisms.coda import CodaAttention, CodaAttentionConfig
    from mechanisms.compositional import CompositionalAttention, CompositionalAttentionConfig
    from mechanisms.copy_gate import CopyGateConfig
    from mechanisms.decomposable_attention import (
        DecomposableAttention,
        DecomposableAttentionConfig,
    )
    from mechanisms.dnc import Dnc, DncConfig
    from mechanisms.encoder_decoder import EncoderDecoder, EncoderDecoderConfig
    from mechanisms.feed_forward import FeedForward, FeedForwardConfig
    from mechanisms.geometric_attention import (
        GeometricAttention,
        GeometricAttentionConfig,
        geometric_weights,
    )
    from mechanisms.halting import HaltingConfig
    from mechanisms.mixture_of_experts import MixtureOfExperts, MixtureOfExpertsConfig
    from mechanisms.modular import ModularNetwork, ModularNetworkConfig
    from mechanisms.module_pools import MlpPool, MlpPoolConfig, OperationPool, OperationPoolConfig
    from mechanisms.monolithic import Monolithic, MonolithicConfig
    from mechanisms.neural_data_router import NeuralDataRouter, NeuralDataRouterConfig
    from mechanisms.patch_transformer import PatchTransformer, PatchTransformerConfig
    from mechanisms.path_objectives import all_paths_loss, sampled_path_loss
    from mechanisms.positions import (
        RelativePositionBias,
        relative_buckets,
        rotate,
        sinusoidal_embedding,
    )
    from mechanisms.protocols import AttentionProtocol, ComponentConfig
    from mechanisms.quasi_attention import QuasiAttentionConfig
    from mechanisms.recurrent import Lstm, LstmConfig
    from mechanisms.relation_classifier import RelationClassifier, RelationClassifierConfig
    from mechanisms.relative_attention import RelativeAttention, RelativeAttentionConfig
    from mechanisms.retrieval_network import RetrievalNetwork, RetrievalNetworkConfig
    from mechanisms.routers import (
        ConcatenationRouter,
        ConcatenationRouterConfig,
        CrossAttentionRouter,
        CrossAttentionRouterConfig,
        EncoderRouter,
        EncoderRouterConfig,
        MatchingConfig,
        RouterSizes,
        StructuralOracleRouter,
        StructuralOracleRouterConfig,
    )
    from mechanisms.sequences import enclose
    from mechanisms.serialization import load, save
    from mechanisms.transformer import Transformer, TransformerConfig

__all__ = [
    "ATTENTION_VARIANTS",
    "AttentionConfig",
    "AttentionProtocol",
    "CodaAttention",
    "CodaAttentionConfig",
    "ComponentConfig",
    "CompositionalAttention",
    "CompositionalAttentionConfig",
    "ConcatenationRouter",
    "ConcatenationRouterConfig",
    "CopyGateConfig",
    "CrossAttentionRouter",
    "CrossAttentionRouterConfig",
    "DecomposableAttention",
    "DecomposableAttentionConfig",
    "Dnc",
    "DncConfig",
    "EncoderDecoder",
    "EncoderDecoderConfig",
    "EncoderRouter",
    "EncoderRouterConfig",
    "FeedForward",
    "FeedForwardConfig",
    "GeometricAttention",
    "GeometricAttentionConfig",
    "HaltingConfig",
    "Lstm",
    "LstmConfig",
    "MatchingConfig",
    "MixtureOfExperts",
    "MixtureOfExpertsConfig",
    "MlpPool",
    "MlpPoolConfig",
    "ModularNetwork",
    "ModularNetworkConfig",
    "Monolithic",
    "MonolithicConfig",
    "MultiHeadAttention",
    "NeuralDataRouter",
    "NeuralDataRouterConfig",
    "OperationPool",
    "OperationPoolConfig",
    "PatchTransformer",
    "PatchTransformerConfig",
    "QuasiAttentionConfig",
    "RelationClassifier",
    "RelationClassifierConfig",
    "RelativeAttention",
    "RelativeAttentionConfig",
    "RelativePositionBias",
    "RetrievalNetwork",
    "RetrievalNetworkConfig",
    "RouterSizes",
    "StructuralOracleRouter",
    "StructuralOracleRouterConfig",
    "Transformer",
    "TransformerConfig",
    "all_paths_loss",
    "enclose",
    "geometric_weights",
    "load",
    "relative_buckets",
    "rotate",
    "sampled_path_loss",
    "save",
    "sinusoidal_embedding",
]

_HOME = {
    "ATTENTION_VARIANTS": "attention",
    "AttentionConfig": "attention",
    "AttentionProtocol": "protocols",
    "CodaAttention": "coda",
    "CodaAttentionConfig": "coda",
    "ComponentConfig": "protocols",
    "CompositionalAttention": "compositional",
    "CompositionalAttentionConfig": "compositional",
    "ConcatenationRouter": "routers",
    "ConcatenationRouterConfig": "routers",
    "CopyGateConfig": "copy_gate",
    "CrossAttentionRouter": "routers",
    "CrossAttentionRouterConfig": "routers",
    "DecomposableAttention": "decomposable_attention",
    "DecomposableAttentionConfig": "decomposable_attention",
    "Dnc": "dnc",
    "DncConfig": "dnc",
    "EncoderDecoder": "encoder_decoder",
    "EncoderDecoderConfig": "encoder_decoder",
    "EncoderRouter": "routers",
    "EncoderRouterConfig": "routers",
    "FeedForward": "feed_forward",
    "FeedForwardConfig": "feed_forward",
    "GeometricAttention": "geometric_attention",
    "GeometricAttentionConfig": "geometric_attention",
    "HaltingConfig": "halting",
    "Lstm": "recurrent",
    "LstmConfig": "recurrent",
    "MatchingConfig": "routers",
    "MixtureOfExperts": "mixture_of_experts",
    "MixtureOfExpertsConfig": "mixture_of_experts",
    "MlpPool": "module_pools",
    "MlpPoolConfig": "module_pools",
    "ModularNetwork": "modular",
    "ModularNetworkConfig": "modular",
    "Monolithic": "monolithic",
    "MonolithicConfig": "monolithic",
    "MultiHeadAttention": "attention",
    "NeuralDataRouter": "neural_data_router",
    "NeuralDataRouterConfig": "neural_data_router",
    "OperationPool": "module_pools",
    "OperationPoolConfig": "module_pools",
    "PatchTransformer": "patch_transformer",
    "PatchTransformerConfig": "patch_transformer",
    "QuasiAttentionConfig": "quasi_attention",
    "RelationClassifier": "relation_classifier",
    "RelationClassifierConfig": "relation_classifier",
    "RelativeAttention": "relative_attention",
    "RelativeAttentionConfig": "relative_attention",
    "RelativePositionBias": "positions",
    "RetrievalNetwork": "retrieval_network",
    "RetrievalNetworkConfig": "retrieval_network",
    "RouterSizes": "routers",
    "StructuralOracleRouter": "routers",
    "StructuralOracleRouterConfig": "routers",
    "Transformer": "transformer",
    "TransformerConfig": "transformer",
    "all_paths_loss": "path_objectives",
    "enclose": "sequences",
    "geometric_weights": "geometric_attention",
    "load": "serialization",
    "relative_buckets": "positions",
    "rotate": "positions",
    "sampled_path_loss": "path_objectives",
    "save": "serialization",
    "sinusoidal_embedding": "positions",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'mechanisms' has no attribute {name!r}; it has {__all__}")
    return getattr(import_module(f"mechanisms.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
