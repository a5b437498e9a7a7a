"""Muon against a singular value decomposition, and the division of parameters among optimizers."""

from dataclasses import replace

import pytest
import torch

from mechanisms import AttentionConfig, FeedForwardConfig, Transformer, TransformerConfig
from studies.engine.optimizers import (
    MOMENTUM,
    Muon,
    hidden_matrices,
    make_optimizers,
    orthogonalized,
    orthogonalized_alike,
)
from tests.studies.engine import toy


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def transformer():
    config = TransformerConfig(
        d_input=4,
        d_output=4,
        d_model=8,
        n_layers=1,
        attention=AttentionConfig.named("softmax", n_heads=2, d_head=3),
        feed_forward=FeedForwardConfig(d_mlp=16),
        max_distance=4,
    )
    return Transformer(config, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("shape", [(6, 6), (4, 20), (20, 4), (3, 5, 8)])
def test_orthogonalized_keeps_singular_vectors_and_sets_singular_values_to_about_one(shape):
    matrix = random(*shape) * 100
    u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
    values = u.mT @ orthogonalized(matrix) @ vh.mT
    diagonal = torch.diagonal(values, dim1=-2, dim2=-1)
    assert (diagonal > 0.5).all()
    assert (diagonal < 1.3).all()
    torch.testing.assert_close(values, torch.diag_embed(diagonal), atol=1e-4, rtol=0)


def test_matrices_of_one_shape_are_orthogonalized_as_each_alone():
    matrices = [random(4, 8), random(8, 4, seed=1), random(2, 4, 8, seed=2), random(4, 8, seed=3)]
    for ours, matrix in zip(orthogonalized_alike(matrices), matrices, strict=True):
        torch.testing.assert_close(ours, orthogonalized(matrix), atol=1e-5, rtol=1e-5)


def test_a_zero_gradient_moves_nothing_but_the_decay():
    weight = torch.nn.Parameter(random(4, 6))
    start = weight.detach().clone()
    weight.grad = torch.zeros_like(weight)
    optimizer = Muon([weight], [None], weight_decay=0.5)
    optimizer.param_groups[0]["lr"] = 0.1
    optimizer.step()
    torch.testing.assert_close(weight.detach(), start * 0.95)


def test_two_steps_follow_the_formula():
    weight = torch.nn.Parameter(random(4, 6))
    expected, momentum = weight.detach().clone(), torch.zeros(4, 6)
    optimizer = Muon([weight], [None], weight_decay=0.2)
    optimizer.param_groups[0]["lr"] = 0.01
    for seed in (1, 2):
        weight.grad = random(4, 6, seed=seed)
        optimizer.step()
        momentum = MOMENTUM * momentum + (1 - MOMENTUM) * weight.grad
        nesterov = MOMENTUM * momentum + (1 - MOMENTUM) * weight.grad
        expected = expected * (1 - 0.01 * 0.2) - 0.01 * 0.2 * 6**0.5 * orthogonalized(nesterov)
    torch.testing.assert_close(weight.detach(), expected)


def test_a_step_has_about_the_size_of_a_step_of_adamw():
    """Root mean squares of 0.2 times the learning rate, whatever the shape (Liu et al. 2025)."""
    for shape in ((64, 64), (64, 256), (256, 64)):
        weight = torch.nn.Parameter(torch.zeros(*shape))
        weight.grad = random(*shape)
        optimizer = Muon([weight], [None], weight_decay=0.0)
        optimizer.param_groups[0]["lr"] = 1.0
        optimizer.step()
        assert weight.detach().square().mean().sqrt() == pytest.approx(0.2, rel=0.2)


def test_the_weights_of_all_heads_are_one_matrix():
    model = transformer()
    config = replace(toy.TRAINING, optimizer="muon", weight_decay=0.0)
    _, muon = make_optimizers(dict(model.named_parameters()), config)
    attention = model.blocks[0].attn
    before = {name: getattr(attention, name).detach().clone() for name in ("W_Q", "W_O")}
    for parameter in model.parameters():
        parameter.grad = random(*parameter.shape)
    muon.param_groups[0]["lr"] = 1.0
    muon.step()
    moved = {name: before[name] - getattr(attention, name).detach() for name in before}
    direction = attention.W_Q.grad.permute(1, 0, 2).reshape(8, 6)
    expected = 0.2 * 8**0.5 * orthogonalized(direction)
    torch.testing.assert_close(moved["W_Q"].permute(1, 0, 2).reshape(8, 6), expected)
    expected = 0.2 * 8**0.5 * orthogonalized(attention.W_O.grad.reshape(6, 8))
    torch.testing.assert_close(moved["W_O"].reshape(6, 8), expected)


def test_muon_has_the_matrices_between_hidden_layers_and_adamw_all_others():
    parameters = dict(transformer().named_parameters())
    names = [f"blocks.0.attn.W_{role}" for role in "QKVO"]
    assert hidden_matrices(parameters) == [*names, "blocks.0.mlp.W_in", "blocks.0.mlp.W_out"]
    config = replace(toy.TRAINING, optimizer="muon")
    of_optimizers = [
        {id(p) for group in optimizer.param_groups for p in group["params"]}
        for optimizer in make_optimizers(parameters, config)
    ]
    assert of_optimizers[1] == {id(parameters[name]) for name in hidden_matrices(parameters)}
    assert not of_optimizers[0] & of_optimizers[1]
    assert of_optimizers[0] | of_optimizers[1] == {id(p) for p in parameters.values()}


def test_of_several_models_the_heads_are_still_found_by_their_dimensions():
    parameters = {f"{name}": p[None] for name, p in transformer().named_parameters()}
    assert len(hidden_matrices(parameters, n_leading=1)) == 6
