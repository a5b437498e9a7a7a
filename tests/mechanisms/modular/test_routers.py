import math

import pytest
import torch

from mechanisms import (
    CrossAttentionRouterConfig,
    EncoderRouterConfig,
    MatchingConfig,
    RouterSizes,
    StructuralOracleRouterConfig,
)
from tests.mechanisms.modular.networks import ROUTERS

SIZES = RouterSizes(n_variables=5, d_model=8, n_layers=2, n_modules=3)


def build(config, sizes=SIZES):
    return config.build(sizes, generator=torch.Generator().manual_seed(0))


def encoded(n=4):
    return torch.randn(n, 5, 8, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("keys", ["direct", "projected", "shared"])
@pytest.mark.parametrize("scaled", [False, True])
def test_cross_attention_scores_are_products_of_queries_and_keys(keys, scaled):
    matching = MatchingConfig(d_key=6, keys=keys, scaled=scaled)
    router, x = build(CrossAttentionRouterConfig(matching=matching)), encoded()
    scores = router(x)
    assert scores.variables is None
    assert scores.modules.shape == (4, 2, 5, 3)
    for layer in range(2):
        if keys == "direct":
            key = router.matching.keys[layer]
        else:
            W_K = router.matching.W_K[layer if keys == "projected" else 0]
            key = torch.stack([s @ W_K for s in router.matching.signatures])
        for example in range(4):
            for variable in range(5):
                query = x[example, variable] @ router.W_Q[layer]
                expected = torch.stack([query @ k for k in key]) / (math.sqrt(6) if scaled else 1)
                actual = scores.modules[example, layer, variable]
                assert torch.allclose(actual, expected, atol=1e-5)


def test_shared_keys_are_the_same_in_every_layer_and_direct_ones_are_not():
    for keys, same in (("shared", True), ("projected", False), ("direct", False)):
        router = build(CrossAttentionRouterConfig(matching=MatchingConfig(d_key=6, keys=keys)))
        with torch.no_grad():
            router.W_Q[1] = router.W_Q[0]
        scores = router(encoded()).modules
        assert torch.allclose(scores[:, 0], scores[:, 1]) == same


def test_a_concatenated_query_is_a_linear_map_of_all_variables():
    router, x = build(ROUTERS["concatenation"]), encoded()
    scores = router(x).modules
    assert scores.shape == (4, 2, 1, 3)
    flat = router.W_Q[1].flatten(0, 1)
    query = x.flatten(1) @ flat
    assert torch.allclose(scores[:, 1, 0], query @ router.matching.keys[1].T, atol=1e-5)


def test_with_the_bottleneck_other_variables_are_replaced_by_zeros():
    router, x = build(ROUTERS["concatenation, bottleneck"]), encoded()
    scores = router(x).modules
    assert scores.shape == (4, 2, 5, 3)
    masked = torch.zeros_like(x)
    masked[:, 3] = x[:, 3]
    query = masked.flatten(1) @ router.W_Q[0].flatten(0, 1)
    assert torch.allclose(scores[:, 0, 3], query @ router.matching.keys[0].T, atol=1e-5)


@pytest.mark.parametrize("name", [name for name in ROUTERS if "bottleneck" in name])
def test_with_the_bottleneck_a_score_depends_on_its_variable_only(name):
    router, x = build(ROUTERS[name]), encoded()
    other = x.clone()
    other[:, [0, 1, 3, 4]] *= -2
    before, after = router(x), router(other)
    assert torch.allclose(before.modules[:, :, 2], after.modules[:, :, 2], atol=1e-5)
    assert not torch.allclose(before.modules[:, :, 3], after.modules[:, :, 3], atol=1e-2)
    assert before.variables.shape == (4, 2, 5)
    expected = x[2, 4] @ router.selector.W_S @ router.selector.signatures[1]
    assert torch.allclose(before.variables[2, 1, 4], expected, atol=1e-5)


def test_the_encoder_depends_on_all_variables_but_not_on_their_order():
    router, x = build(ROUTERS["encoder"]), encoded()
    scores = router(x).modules
    assert scores.shape == (4, 2, 1, 3)
    assert torch.allclose(scores, router(x[:, [4, 2, 0, 1, 3]]).modules, atol=1e-5)
    for variable in range(5):
        other = x.clone()
        other[:, variable] *= -2
        assert not torch.allclose(scores, router(other).modules, atol=1e-3)


def test_the_structural_oracle_selects_the_correct_variables():
    scores = build(ROUTERS["structural oracle"])(encoded())
    assert scores.variables.softmax(-1)[0].tolist() == [[0, 0, 1, 0, 0], [0, 0, 0, 1, 0]]


@pytest.mark.parametrize("name", ROUTERS)
def test_every_parameter_is_used(name):
    router = build(ROUTERS[name])
    scores = router(encoded())
    total = scores.modules.square().sum()
    if scores.variables is not None and scores.variables.requires_grad:
        total = total + scores.variables.square().sum()
    total.backward()
    unused = [n for n, p in router.named_parameters() if p.grad is None or not p.grad.any()]
    assert not unused


def test_invalid_settings_are_refused():
    with pytest.raises(ValueError, match=r"d_key must be at least 1, got 0"):
        MatchingConfig(d_key=0)
    with pytest.raises(ValueError, match=r"keys must be one of direct, projected, shared, got 'x'"):
        MatchingConfig(d_key=1, keys="x")
    with pytest.raises(ValueError, match=r"n_blocks must be at least 1, got 0"):
        EncoderRouterConfig(matching=MatchingConfig(d_key=1), n_blocks=0)
    with pytest.raises(ValueError, match=r"n_heads must divide d_model = 8, got 3"):
        build(EncoderRouterConfig(matching=MatchingConfig(d_key=1), n_heads=3))
    for variables in ((2,), (2, 5), (2, -1)):
        config = StructuralOracleRouterConfig(matching=MatchingConfig(d_key=1), variables=variables)
        with pytest.raises(ValueError, match=r"variables must be 2 indices in \[0, 5\)"):
            build(config)
