"""Exports of the package and the modules that define them: the only list of exports."""

from .attention.alignment import Alignment as Alignment
from .attention.alignment import AlignmentConfig as AlignmentConfig
from .attention.base import Attention as Attention
from .attention.bidirectional_connector import BidirectionalConnector as BidirectionalConnector
from .attention.coda import CodaAttention as CodaAttention
from .attention.coda import CodaAttentionConfig as CodaAttentionConfig
from .attention.compositional import CompositionalAttention as CompositionalAttention
from .attention.compositional import CompositionalAttentionConfig as CompositionalAttentionConfig
from .attention.gated_alignment import GatedAlignment as GatedAlignment
from .attention.geometric import GeometricAttention as GeometricAttention
from .attention.geometric import GeometricAttentionConfig as GeometricAttentionConfig
from .attention.geometric import geometric_weights as geometric_weights
from .attention.multi_head import ATTENTION_VARIANTS as ATTENTION_VARIANTS
from .attention.multi_head import AttentionConfig as AttentionConfig
from .attention.multi_head import MultiHeadAttention as MultiHeadAttention
from .attention.positions import RelativePositionBias as RelativePositionBias
from .attention.positions import relative_buckets as relative_buckets
from .attention.positions import rotate as rotate
from .attention.positions import sinusoidal_embedding as sinusoidal_embedding
from .attention.quasi import QuasiAttentionConfig as QuasiAttentionConfig
from .attention.relative import RelativeAttention as RelativeAttention
from .attention.relative import RelativeAttentionConfig as RelativeAttentionConfig
from .checking import check as check
from .layers.copy_gate import CopyGate as CopyGate
from .layers.copy_gate import CopyGateConfig as CopyGateConfig
from .layers.factorization_machine import FactorizationMachine as FactorizationMachine
from .layers.feed_forward import FeedForward as FeedForward
from .layers.feed_forward import FeedForwardConfig as FeedForwardConfig
from .layers.halting import HaltingConfig as HaltingConfig
from .layers.mixture_of_experts import MixtureOfExperts as MixtureOfExperts
from .layers.mixture_of_experts import MixtureOfExpertsConfig as MixtureOfExpertsConfig
from .model_zoo import zoo as zoo
from .models.beam_search import beam_search as beam_search
from .models.decaprop import DecaProp as DecaProp
from .models.decaprop import DecaPropConfig as DecaPropConfig
from .models.decomposable_attention import DecomposableAttention as DecomposableAttention
from .models.decomposable_attention import (
    DecomposableAttentionConfig as DecomposableAttentionConfig,
)
from .models.dnc import Dnc as Dnc
from .models.dnc import DncConfig as DncConfig
from .models.encoder_decoder import EncoderDecoder as EncoderDecoder
from .models.encoder_decoder import EncoderDecoderConfig as EncoderDecoderConfig
from .models.lstm import Lstm as Lstm
from .models.lstm import LstmConfig as LstmConfig
from .models.neural_data_router import NeuralDataRouter as NeuralDataRouter
from .models.neural_data_router import NeuralDataRouterConfig as NeuralDataRouterConfig
from .models.neural_data_router import RouterBlock as RouterBlock
from .models.patch_transformer import PatchTransformer as PatchTransformer
from .models.patch_transformer import PatchTransformerConfig as PatchTransformerConfig
from .models.relation_classifier import RelationClassifier as RelationClassifier
from .models.relation_classifier import RelationClassifierConfig as RelationClassifierConfig
from .models.retrieval_network import RetrievalNetwork as RetrievalNetwork
from .models.retrieval_network import RetrievalNetworkConfig as RetrievalNetworkConfig
from .models.sequence_classifier import SequenceClassifier as SequenceClassifier
from .models.sequence_classifier import SequenceClassifierConfig as SequenceClassifierConfig
from .models.transformer import Block as Block
from .models.transformer import BlockConfig as BlockConfig
from .models.transformer import Transformer as Transformer
from .models.transformer import TransformerConfig as TransformerConfig
from .modular.module_pools import MlpPool as MlpPool
from .modular.module_pools import MlpPoolConfig as MlpPoolConfig
from .modular.module_pools import OperationPool as OperationPool
from .modular.module_pools import OperationPoolConfig as OperationPoolConfig
from .modular.monolithic import Monolithic as Monolithic
from .modular.monolithic import MonolithicConfig as MonolithicConfig
from .modular.network import ModularNetwork as ModularNetwork
from .modular.network import ModularNetworkConfig as ModularNetworkConfig
from .modular.objectives import all_paths_loss as all_paths_loss
from .modular.objectives import sampled_path_loss as sampled_path_loss
from .modular.routers import ConcatenationRouter as ConcatenationRouter
from .modular.routers import ConcatenationRouterConfig as ConcatenationRouterConfig
from .modular.routers import CrossAttentionRouter as CrossAttentionRouter
from .modular.routers import CrossAttentionRouterConfig as CrossAttentionRouterConfig
from .modular.routers import EncoderRouter as EncoderRouter
from .modular.routers import EncoderRouterConfig as EncoderRouterConfig
from .modular.routers import MatchingConfig as MatchingConfig
from .modular.routers import RouterSizes as RouterSizes
from .modular.routers import StructuralOracleRouter as StructuralOracleRouter
from .modular.routers import StructuralOracleRouterConfig as StructuralOracleRouterConfig
from .porting.compositional_attention import (
    compositional_attention_from_torch as compositional_attention_from_torch,
)
from .porting.compositional_attention import (
    compositional_block_from_torch as compositional_block_from_torch,
)
from .porting.compositional_attention import (
    patch_transformer_from_torch as patch_transformer_from_torch,
)
from .porting.compositional_attention import (
    published_sort_of_clevr_answers as published_sort_of_clevr_answers,
)
from .porting.compositional_attention import (
    published_sort_of_clevr_images as published_sort_of_clevr_images,
)
from .porting.compositional_attention import published_triangle_images as published_triangle_images
from .porting.compositional_attention import published_word_ids as published_word_ids
from .porting.compositional_attention import (
    relation_classifier_from_torch as relation_classifier_from_torch,
)
from .porting.compositional_attention import (
    retrieval_network_from_torch as retrieval_network_from_torch,
)
from .porting.hypernetwork_attention import SEQUENCE_MIXERS as SEQUENCE_MIXERS
from .porting.hypernetwork_attention import attention_from_flax as attention_from_flax
from .porting.hypernetwork_attention import block_from_flax as block_from_flax
from .porting.hypernetwork_attention import transformer_from_flax as transformer_from_flax
from .porting.neural_data_router import copy_gate_from_torch as copy_gate_from_torch
from .porting.neural_data_router import router_attention_from_torch as router_attention_from_torch
from .porting.neural_data_router import router_block_from_torch as router_block_from_torch
from .porting.neural_data_router import router_from_torch as router_from_torch
from .protocols import AttentionProtocol as AttentionProtocol
from .protocols import ComponentConfig as ComponentConfig
from .randomness import independent_draws as independent_draws
from .sequences import enclose as enclose
from .serialization import load as load
from .serialization import save as save
