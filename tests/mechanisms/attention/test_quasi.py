import math

import pytest
import torch

from mechanisms.attention.quasi import QuasiAttentionConfig, l1_distances


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("pairs", [1, 20, 2**18])
def test_distances_and_their_gradients_are_the_broadcast_ones(pairs, monkeypatch):
    monkeypatch.setattr("mechanisms.attention.quasi._CPU_PAIRS", pairs)
    x, y = normal(3, 2, 5, 4).requires_grad_(), normal(3, 2, 7, 4, seed=1).requires_grad_()
    weight = normal(3, 2, 5, 7, seed=2)
    literal = (x[:, :, :, None] - y[:, :, None]).abs().sum(-1)
    ours = l1_distances(x, y)
    torch.testing.assert_close(ours, literal)
    torch.testing.assert_close(
        torch.autograd.grad((ours * weight).sum(), (x, y)),
        torch.autograd.grad((literal * weight).sum(), (x, y)),
    )


def test_the_gradient_is_zero_for_equal_numbers():
    x = normal(1, 1, 3, 2).requires_grad_()
    y = x.detach().clone().requires_grad_()
    l1_distances(x, y).diagonal(dim1=-2, dim2=-1).sum().backward()
    assert not x.grad.any()
    assert not y.grad.any()


def test_distances_allow_different_numbers_of_queries_and_keys():
    x, y = normal(2, 1, 1, 3), normal(2, 1, 4, 3, seed=1)
    assert l1_distances(x, y).shape == (2, 1, 1, 4)
    # Not contiguous, as after a transposition.
    torch.testing.assert_close(
        l1_distances(normal(2, 4, 3, 5).transpose(1, 2), normal(2, 3, 6, 5, seed=1)),
        torch.cdist(normal(2, 4, 3, 5).transpose(1, 2), normal(2, 3, 6, 5, seed=1), p=1),
    )


REFERENCES = {
    "tanh": lambda x: math.tanh(x),
    "sigmoid": lambda x: 1 / (1 + math.exp(-x)),
    "arctan": lambda x: math.atan(x),
    "arctan_scaled": lambda x: math.atan(x) / (math.pi / 2),
    "algebraic": lambda x: x / math.sqrt(1 + x * x),
}
BOUNDS = {"tanh": 1, "sigmoid": 1, "arctan": math.pi / 2, "arctan_scaled": 1, "algebraic": 1}


@pytest.mark.parametrize("name", REFERENCES)
def test_composition_functions_are_those_of_the_ablation(name):
    config = QuasiAttentionConfig(affinity=name, gate=name, doubled=True)
    values = [-3.0, -0.5, 0.0, 0.25, 40.0]
    x = torch.tensor(values, dtype=torch.float64).reshape(1, 1, 1, -1)
    expected = torch.tensor([REFERENCES[name](value) for value in values], dtype=torch.float64)
    torch.testing.assert_close(config.gated(x).flatten(), 2 * expected)
    ones = torch.ones_like(x)
    composed = config.composed(x, ones, None).flatten()
    torch.testing.assert_close(composed, expected)
    far = config.composed(1e3 * ones, ones, None).max().item()
    assert far == pytest.approx(BOUNDS[name], abs=2e-3)


def test_the_mask_comes_after_the_composition():
    config = QuasiAttentionConfig(affinity="sigmoid", gate="sigmoid")
    x = torch.full((1, 1, 1, 2), -torch.inf)
    mask = torch.tensor([[[[True, False]]]])
    composed = QuasiAttentionConfig().composed(x, torch.ones_like(x), mask)
    assert composed.flatten().tolist() == [-1, 0]
    # A sigmoid of 0 would be 1/2.
    assert config.composed(0 * x.clamp(min=0), torch.ones_like(x), mask).flatten()[1] == 0


def test_centring_averages_over_valid_pairs_only():
    values = torch.tensor([[1.0, 2.0, 100.0], [3.0, 7.0, 100.0], [100.0, 100.0, 100.0]])
    real = torch.tensor([True, True, False])
    valid = (real[:, None] & real)[None, None]
    values = values[None, None]
    row = QuasiAttentionConfig(affinity_centring="row").centred_affinity(values, valid)
    assert row[0, 0, :2, :2].tolist() == [[-0.5, 0.5], [-2.0, 2.0]]
    matrix = QuasiAttentionConfig(gate_centring="matrix").centred_dissimilarity(values, valid)
    assert matrix[0, 0, :2, :2].tolist() == [[-2.25, -1.25], [-0.25, 3.75]]
    assert row.isfinite().all()
    none = QuasiAttentionConfig(gate_centring="matrix").centred_affinity(values, valid)
    assert torch.equal(none, values)
    all_pairs = QuasiAttentionConfig(affinity_centring="matrix").centred_affinity(values, None)
    assert all_pairs.mean().abs() < 1e-5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"alpha": 0.0}, r"alpha must be above 0 and finite, got 0\.0"),
        ({"beta": -1.0}, r"beta must be above 0 and finite, got -1\.0"),
        ({"affinity": "relu"}, r"affinity must be one of tanh, sigmoid, .* got 'relu'"),
        ({"gate": "step"}, r"gate must be one of tanh"),
        ({"gate_centring": "column"}, r"gate_centring must be one of none, matrix, row"),
    ],
)
def test_invalid_settings_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        QuasiAttentionConfig(**changes)
