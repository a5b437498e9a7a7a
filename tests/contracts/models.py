"""Small models that together have every module which `mechanisms` exports."""

import torch

import mechanisms

SIZES = {"d_input": 6, "d_output": 3, "d_model": 8}
ATTENTION = mechanisms.AttentionConfig(n_heads=2, d_head=4)
MLP = mechanisms.FeedForwardConfig(d_mlp=8)
BLOCKS = {"n_layers": 2, "attention": ATTENTION, "feed_forward": MLP}
MATCHING = mechanisms.MatchingConfig(d_key=4)
MODULAR = {"n_variables": 4, "d_input": 4, "d_model": 8, "n_layers": 2, "n_modules": 3}
TRUE = {"pool": mechanisms.OperationPoolConfig(names=("add", "multiply", "sin_first"))}


def vectors(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def tokens(*shape):
    return torch.randint(6, shape, generator=torch.Generator().manual_seed(1))


def transformer(**changes):
    return mechanisms.TransformerConfig(**SIZES | BLOCKS | {"max_distance": 5} | changes)


def modular(router, **changes):
    settings = {"pool": mechanisms.MlpPoolConfig(d_mlp=8), "selection": "soft"} | changes
    return mechanisms.ModularNetworkConfig(**MODULAR, **settings, router=router)


EXPERTS = mechanisms.MixtureOfExpertsConfig(n_experts=3, top_k=2, d_mlp=6)
RECURRENT = {"d_input": 6, "d_output": 3, "d_embed": 5, "d_hidden": 8}
PAIRS = {"d_input": 6, "d_output": 3, "d_model": 8, "padding": -1}
READER = {"d_input": 6, "padding": -1, "d_embed": 5, "d_hidden": 4, "n_layers": 2, "n_factors": 3}
VARIABLES = vectors(5, 4, 4)
MODELS = {
    "Transformer": (transformer(), [vectors(3, 5, 6)]),
    "Transformer of tokens, experts": (
        transformer(inputs="tokens", causal=True, feed_forward=EXPERTS),
        [tokens(3, 5)],
    ),
    "Lstm": (mechanisms.LstmConfig(**RECURRENT, bidirectional=True), [tokens(3, 5)]),
    "Dnc": (mechanisms.DncConfig(**RECURRENT, n_cells=4, d_cell=3), [tokens(3, 5)]),
    "EncoderDecoder": (
        mechanisms.EncoderDecoderConfig(
            **SIZES | BLOCKS | {"d_output": 6}, begin=4, end=5, padding=-1
        ),
        [tokens(3, 5), tokens(3, 4)],
    ),
    "EncoderDecoder that halts": (
        mechanisms.EncoderDecoderConfig(
            **SIZES | BLOCKS | {"d_output": 6},
            begin=4,
            end=5,
            padding=-1,
            positions_each_step=True,
            step_signal="learned",
            halting=mechanisms.HaltingConfig(rule="tensor2tensor"),
        ),
        [tokens(3, 5), tokens(3, 4)],
    ),
    "NeuralDataRouter": (
        mechanisms.NeuralDataRouterConfig.named("ndr", **SIZES, d_mlp=8, n_heads=2, n_steps=2),
        [tokens(3, 5)],
    ),
    "NeuralDataRouter with relative attention": (
        mechanisms.NeuralDataRouterConfig.named(
            "abs_rel_gate", **SIZES, d_mlp=8, n_heads=2, n_steps=2
        ),
        [tokens(3, 5)],
    ),
    "NeuralDataRouter that halts": (
        mechanisms.NeuralDataRouterConfig(
            **SIZES,
            n_steps=3,
            attention=ATTENTION,
            feed_forward=mechanisms.FeedForwardConfig(d_mlp=8, activation="relu"),
            halting=mechanisms.HaltingConfig(),
        ),
        [tokens(3, 5)],
    ),
    "PatchTransformer": (
        mechanisms.PatchTransformerConfig(
            image_size=4, patch_size=2, n_channels=3, d_output=3, d_model=8, **BLOCKS
        ),
        [vectors(3, 3, 4, 4)],
    ),
    "RelationClassifier": (
        mechanisms.RelationClassifierConfig(
            d_output=3, d_model=8, image_size=16, attention=ATTENTION, feed_forward=MLP
        ),
        [vectors(3, 4, 1, 16, 16)],
    ),
    "RetrievalNetwork": (
        mechanisms.RetrievalNetworkConfig(
            **SIZES,
            d_mlp=8,
            attention=mechanisms.CompositionalAttentionConfig(
                n_searches=2, n_retrievals=2, d_head=4
            ),
        ),
        [vectors(3, 5, 6)],
    ),
    "SequenceClassifier": (
        mechanisms.SequenceClassifierConfig(**PAIRS, **BLOCKS),
        [tokens(3, 5)],
    ),
    "SequenceClassifier of pairs, with CoDA": (
        mechanisms.SequenceClassifierConfig(
            **PAIRS,
            **BLOCKS
            | {
                "attention": mechanisms.CodaAttentionConfig(
                    n_heads=2,
                    d_head=4,
                    composition=mechanisms.QuasiAttentionConfig(gate_centring="matrix"),
                )
            },
            n_sequences=2,
            shared=True,
        ),
        [tokens(3, 5), tokens(3, 4)],
    ),
    "DecomposableAttention": (
        mechanisms.DecomposableAttentionConfig(**PAIRS),
        [tokens(3, 5), tokens(3, 4)],
    ),
    "DecomposableAttention with CoDA": (
        mechanisms.DecomposableAttentionConfig(
            **PAIRS, composition=mechanisms.QuasiAttentionConfig(gate_centring="matrix")
        ),
        [tokens(3, 5), tokens(3, 4)],
    ),
    "DecomposableAttention with heads": (
        mechanisms.DecomposableAttentionConfig(
            **PAIRS, attention=mechanisms.CodaAttentionConfig(n_heads=2, d_head=4)
        ),
        [tokens(3, 5), tokens(3, 4)],
    ),
    "DecaProp": (mechanisms.DecaPropConfig(**READER), [tokens(2, 3), tokens(2, 2)]),
    "DecaProp with CoDA": (
        mechanisms.DecaPropConfig(
            **READER | {"n_layers": 1},
            alignment=mechanisms.AlignmentConfig(
                projection="linear",
                composition=mechanisms.QuasiAttentionConfig(gate_centring="matrix"),
            ),
        ),
        [tokens(2, 3), tokens(2, 2)],
    ),
    "Monolithic": (mechanisms.MonolithicConfig(n_variables=4, d_input=4, d_mlp=8), [VARIABLES]),
    "ModularNetwork": (
        modular(mechanisms.CrossAttentionRouterConfig(matching=MATCHING)),
        [VARIABLES],
    ),
    "ModularNetwork, concatenation": (
        modular(
            mechanisms.ConcatenationRouterConfig(matching=MATCHING, selection_bottleneck=True),
            functional_bottleneck="attention",
        ),
        [VARIABLES],
    ),
    "ModularNetwork, encoder": (
        modular(
            mechanisms.EncoderRouterConfig(matching=MATCHING, n_blocks=1, n_heads=2, d_mlp=8),
            functional_bottleneck="none",
        ),
        [VARIABLES],
    ),
    "ModularNetwork, oracle": (
        modular(
            mechanisms.StructuralOracleRouterConfig(matching=MATCHING, variables=(2, 3)), **TRUE
        ),
        [VARIABLES],
    ),
}
"""Config and inputs of each; all have dropout 0."""


def build(config, generator=None):
    """The model of a config, with weights from the generator, or from seed 0."""
    model_class = getattr(mechanisms, type(config).__name__.removesuffix("Config"))
    return model_class(config, generator=generator or torch.Generator().manual_seed(0))
