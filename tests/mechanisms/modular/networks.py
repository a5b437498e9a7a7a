"""Small modular networks for several tests."""

import torch

from mechanisms import (
    ConcatenationRouterConfig,
    CrossAttentionRouterConfig,
    EncoderRouterConfig,
    MatchingConfig,
    MlpPoolConfig,
    ModularNetwork,
    ModularNetworkConfig,
    StructuralOracleRouterConfig,
)

MATCHING = MatchingConfig(d_key=6)
SMALL = {"n_blocks": 1, "n_heads": 2, "d_mlp": 12}
ROUTERS = {
    "cross": CrossAttentionRouterConfig(matching=MATCHING),
    "cross, bottleneck": CrossAttentionRouterConfig(matching=MATCHING, selection_bottleneck=True),
    "concatenation": ConcatenationRouterConfig(matching=MATCHING),
    "concatenation, bottleneck": ConcatenationRouterConfig(
        matching=MATCHING, selection_bottleneck=True
    ),
    "encoder": EncoderRouterConfig(matching=MATCHING, **SMALL),
    "encoder, bottleneck": EncoderRouterConfig(
        matching=MATCHING, selection_bottleneck=True, **SMALL
    ),
    "structural oracle": StructuralOracleRouterConfig(matching=MATCHING, variables=(2, 3)),
}


def network(router=ROUTERS["cross"], *, seed=0, **changes):
    config = ModularNetworkConfig(
        **{
            "n_variables": 5,
            "d_input": 4,
            "d_model": 8,
            "n_layers": 2,
            "router": router,
            "n_modules": 3,
            "pool": MlpPoolConfig(d_mlp=7),
        }
        | changes
    )
    return ModularNetwork(config, generator=torch.Generator().manual_seed(seed)).eval()


def inputs(n=20, seed=1):
    return torch.randn(n, 5, 4, generator=torch.Generator().manual_seed(seed))
