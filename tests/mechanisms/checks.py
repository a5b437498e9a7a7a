"""Checks that every model has to pass, called by the tests of each model."""

from collections.abc import Callable

import torch
from torch import nn

from mechanisms import load, save


def check_saved_model_loads(model, inputs, tmp_path):
    save(model, tmp_path / "model.safetensors")
    loaded = load(tmp_path / "model.safetensors")
    assert type(loaded) is type(model)
    assert loaded.config == model.config
    assert torch.allclose(loaded(*inputs), model(*inputs), atol=1e-6)


def check_seed_determines_weights(build: Callable[[torch.Generator], nn.Module]):
    """Models with the same seed are equal, and the global random state is not used."""
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, second, other = (build(torch.Generator().manual_seed(seed)) for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(map(torch.equal, first.parameters(), second.parameters()))
    for (name, weight), other_weight in zip(
        first.named_parameters(), other.parameters(), strict=True
    ):
        is_constant = weight.numel() == 1 or (weight == weight.flatten()[0]).all()
        is_bias = name.split(".")[-1].startswith("b")
        assert is_constant or is_bias or not torch.equal(weight, other_weight), name


def dropout_calls(model, tokens, monkeypatch):
    """Shape, probability and training flag of every dropout call of a forward pass."""
    calls = []

    def record(x, probability, training):
        calls.append((tuple(x.shape), probability, training))
        return x

    output = model(tokens)
    with monkeypatch.context() as patched:
        patched.setattr(f"{type(model).__module__}.dropout", record)
        assert torch.equal(model(tokens), output)
    return calls
