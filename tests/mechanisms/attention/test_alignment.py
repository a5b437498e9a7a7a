import pytest
import torch

from mechanisms.attention.alignment import Alignment, AlignmentConfig
from mechanisms.attention.quasi import QuasiAttentionConfig
from mechanisms.models.decomposable_attention import (
    DecomposableAttention,
    DecomposableAttentionConfig,
)

CENTRED = QuasiAttentionConfig(alpha=0.7, beta=0.3, gate_centring="matrix", doubled=True)
COMPOSITIONS = {"coda": QuasiAttentionConfig(beta=0.4), "centred": CENTRED}


def mask_of(*lengths):
    return torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]


@pytest.mark.parametrize("composition", COMPOSITIONS.values(), ids=COMPOSITIONS)
def test_coda_has_the_matrix_of_decomposable_attention(composition):
    """With the same F; there E and N are not divided by the root of the width."""
    width = 4
    config = DecomposableAttentionConfig(
        d_input=9,
        d_output=2,
        d_model=width,
        padding=-1,
        composition=composition,
        projection="linear",
    )
    model = DecomposableAttention(config, generator=torch.Generator().manual_seed(0))
    align = Alignment(
        AlignmentConfig(projection="linear", composition=composition, scaled=False), width, width
    )
    with torch.no_grad():
        align.W_F.copy_(model.attend.W)
    a, b = torch.tensor([[1, 2, 3], [4, 5, -1]]), torch.tensor([[6, 7], [8, -1]])
    _, cache = model.run_with_cache(a, b)
    patterns = align(cache["hook_embed_a"], cache["hook_embed_b"], a >= 0, b >= 0)
    torch.testing.assert_close(patterns[0], cache["hook_pattern"][:, 0])
    torch.testing.assert_close(patterns[1], patterns[0].mT)
    assert (patterns[0] < 0).any()
    scaled = Alignment(AlignmentConfig(projection="linear", composition=composition), width, width)
    scaled.load_state_dict(align.state_dict())
    seen = {}
    for name in ("hook_attn_scores", "hook_dissimilarity"):
        getattr(scaled, name).add_hook(lambda x, hook: seen.__setitem__(hook.name, x))
        getattr(scaled, name).name = name
    scaled(cache["hook_embed_a"], cache["hook_embed_b"], a >= 0, b >= 0)
    for name, values in seen.items():
        torch.testing.assert_close(values, cache[name] / width**0.5)
    assert len(seen) == 2


def test_softmax_is_over_valid_tokens_of_the_other_sequence():
    generator = torch.Generator().manual_seed(0)
    align = Alignment(AlignmentConfig(), 6, 5, generator=generator)
    a, b = torch.randn(2, 4, 6, generator=generator), torch.randn(2, 3, 6, generator=generator)
    to_b, to_a = align(a, b, mask_of(4, 2), mask_of(3, 1))
    scores = (a @ align.W_F).relu() @ (b @ align.W_F).relu().mT / 5**0.5
    torch.testing.assert_close(to_b[0], scores[0].softmax(1))
    torch.testing.assert_close(to_a[0], scores[0].softmax(0).T)
    assert to_b[1].tolist() == [[1, 0, 0], [1, 0, 0], [0, 0, 0], [0, 0, 0]]
    torch.testing.assert_close(to_a[1, 0, :2], scores[1, :2, 0].softmax(0))
    assert not to_a[1, 1:].any()


@pytest.mark.parametrize("composition", [None, *COMPOSITIONS.values()])
def test_a_token_without_a_partner_has_no_weights_and_finite_gradients(composition):
    align = Alignment(AlignmentConfig(composition=composition), 6, 6)
    a, b = torch.randn(2, 4, 6, requires_grad=True), torch.randn(2, 3, 6, requires_grad=True)
    mask_a, mask_b = mask_of(4, 4), mask_of(3, 0)
    patterns = align(a, b, mask_a, mask_b)
    assert not any(pattern[1].any() for pattern in patterns)
    sum(pattern.square().sum() for pattern in patterns).backward()
    for tensor in (a, b, *align.parameters()):
        assert tensor.grad.isfinite().all()


@pytest.mark.parametrize(("projection", "has_negative"), [("relu", False), ("linear", True)])
def test_only_a_linear_projection_lets_coda_subtract(projection, has_negative):
    config = AlignmentConfig(projection=projection, composition=QuasiAttentionConfig())
    align = Alignment(config, 8, 8, generator=torch.Generator().manual_seed(0))
    x = torch.randn(5, 7, 8, generator=torch.Generator().manual_seed(1))
    mask = torch.ones(5, 7, dtype=torch.bool)
    assert bool((align(x, x, mask, mask)[0] < 0).any()) is has_negative


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"projection": "tanh"}, "projection must be one of relu, linear, got 'tanh'"),
        ({"dropout": 1.0}, "dropout must be in"),
        ({"scaled": False}, "scaled must be True without a composition"),
    ],
)
def test_settings_are_checked(changes, message):
    with pytest.raises(ValueError, match=message):
        AlignmentConfig(**changes)
