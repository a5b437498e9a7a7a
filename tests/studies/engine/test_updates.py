"""Several models trained as one batched model, against each of them trained alone."""

import functools
import math
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn

import tasks
from mechanisms import AttentionConfig, FeedForwardConfig, Transformer, TransformerConfig
from studies.engine.checkpoints import Checkpoints
from studies.engine.folders import RunError
from studies.engine.training import Deadline, TrainingError, train
from studies.engine.updates import compiled
from tests.studies.engine.test_training import (
    CONFIG,
    objective,
    same,
    sample,
    tensors_in,
    trainee,
)

SEEDS = (0, 1, 2)
SHORT = replace(CONFIG, n_steps=20, evaluate_every=10)


def transformer(seed, **changes):
    config = TransformerConfig(
        d_input=4,
        d_output=4,
        d_model=8,
        n_layers=1,
        attention=AttentionConfig.named("softmax", n_heads=2, d_head=4, dropout=0.2),
        feed_forward=FeedForwardConfig(d_mlp=8),
        dropout=0.3,
        max_distance=4,
    )
    config = replace(config, **changes)
    return Transformer(config, generator=torch.Generator().manual_seed(seed))


def trainees(folder, config, build=transformer, **changes):
    """A model for each seed, with examples of its own."""

    def sampler(seed):
        return lambda step, size: in_parts(1000 * seed + step, size)

    return [
        trainee(
            folder / str(seed),
            model=build(seed),
            config=config,
            seed=seed,
            **({"sample": sampler(seed)} | changes),
        )
        for seed in SEEDS
    ]


def train_all(them, config, **changes):
    return train(them, config=config, select="id/accuracy", **({"objective": objective} | changes))


def in_parts(step, size):
    """Batches that can be cut into parts."""
    batch = sample(step, size)
    return tasks.Batch(batch.inputs, batch.targets, batch.mask, {"one": torch.ones(size)})


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"clip": 0.05},
        {"clip": None, "optimizer": "muon"},
        {"n_parts": 2, "decayed": "all", "precision": "bf16"},
    ],
    ids=["plain", "clipped", "muon", "parts"],
)
def test_models_trained_together_have_the_numbers_of_training_alone(tmp_path, changes):
    config = replace(SHORT, **changes)
    tolerance = 1e-2 if config.precision == "bf16" else 1e-5
    together, alone = trainees(tmp_path / "together", config), trainees(tmp_path / "alone", config)
    logs = train_all(together, config)
    for number, it in enumerate(alone):
        (log,) = train_all([it], config)
        for ours, theirs in zip(logs[number], log, strict=True):
            assert ours["loss"] == pytest.approx(theirs["loss"], abs=tolerance)
        its_state, state = tensors_in(it.folder), tensors_in(together[number].folder)
        assert its_state.keys() == state.keys()
        for name, tensor in its_state.items():
            torch.testing.assert_close(state[name], tensor, atol=tolerance, rtol=1e-3)
    weights = [it.model.blocks[0].mlp.W_in for it in together]
    assert not torch.allclose(weights[0], weights[1], atol=1e-2)


def test_models_share_the_time_of_their_training(tmp_path):
    now = [0.0]

    def slow(step, size):
        now[0] += 3.0
        return in_parts(step, size)

    together = trainees(tmp_path, SHORT)
    together[0] = replace(together[0], sample=slow)
    logs = train_all(together, SHORT, deadline=Deadline(math.inf, lambda: now[0]))
    assert [[entry["seconds"] for entry in log] for log in logs] == [[10.0, 20.0]] * 3


def test_each_gradient_is_clipped_by_its_own_norm(tmp_path):
    """One model's loss is a thousand times larger: the others' gradients stay as they are."""

    def scaled(model, batch, step):
        return objective(model, batch, step) * batch.inputs.abs().max().detach()

    def loud(step, size):
        batch = in_parts(step, size)
        return replace(batch, inputs=batch.inputs * 1000)

    config = replace(SHORT, clip=10.0, n_steps=3)
    together, alone = trainees(tmp_path / "together", config), trainees(tmp_path / "alone", config)
    together[0] = replace(together[0], sample=loud)
    train_all(together, config, objective=scaled)
    train_all(alone[1:2], config, objective=scaled)
    state, expected = tensors_in(together[1].folder), tensors_in(alone[1].folder)
    torch.testing.assert_close(state, expected, atol=1e-5, rtol=1e-4)


def interrupted_at(step):
    """A sampler like those of `trainees` for seed 0, which interrupts training at a step."""

    def draw(number, size):
        if number == step:
            raise KeyboardInterrupt
        return in_parts(number, size)

    return draw


def test_a_group_that_was_killed_ends_in_the_same_weights(tmp_path):
    whole, parts = trainees(tmp_path / "whole", SHORT), trainees(tmp_path / "parts", SHORT)
    train_all(whole, SHORT)
    parts[0] = replace(parts[0], sample=interrupted_at(15))
    with pytest.raises(KeyboardInterrupt):
        train_all(parts, SHORT)
    train_all(trainees(tmp_path / "parts", SHORT), SHORT)
    for ours, theirs in zip(whole, parts, strict=True):
        assert same(tensors_in(ours.folder), tensors_in(theirs.folder))


def test_models_that_are_behind_catch_up(tmp_path, monkeypatch):
    """Killed between the checkpoints of the first and the second model; then all go on."""
    config = replace(SHORT, n_steps=30)
    whole, parts = trainees(tmp_path / "whole", config), trainees(tmp_path / "parts", config)
    train_all(whole, config)
    save = Checkpoints.save

    def killed(self, model, state, log, *, best):
        if self._folder == parts[1].folder and log[-1]["step"] == 20:
            raise KeyboardInterrupt
        save(self, model, state, log, best=best)

    monkeypatch.setattr(Checkpoints, "save", killed)
    with pytest.raises(KeyboardInterrupt):
        train_all(parts, config)
    monkeypatch.undo()
    assert [tensors_in(it.folder)["step/unembed.W_U"].item() for it in parts] == [20, 10, 10]
    logs = train_all(trainees(tmp_path / "parts", config), config)
    assert [[entry["step"] for entry in log] for log in logs] == [[10, 20, 30]] * 3
    for ours, theirs in zip(whole, parts, strict=True):
        expected = tensors_in(theirs.folder)
        torch.testing.assert_close(tensors_in(ours.folder), expected, atol=1e-5, rtol=1e-4)


def test_a_model_that_ends_early_leaves_the_others(tmp_path):
    config = replace(SHORT, n_steps=30, stop_at=0.9)
    scores = {0: iter([0.5, 0.95]), 1: iter([0.1, 0.2, 0.3]), 2: iter([0.1, 0.2, 0.91])}
    them = trainees(tmp_path, config)
    them = [
        replace(it, evaluate=lambda model, it=it: {"id/accuracy": next(scores[it.seed])})
        for it in them
    ]
    logs = train_all(them, config)
    assert [log[-1]["step"] for log in logs] == [20, 30, 30]
    alone = trainees(tmp_path / "alone", replace(config, stop_at=None))[1]
    train_all([alone], replace(config, stop_at=None))
    state, expected = tensors_in(them[1].folder), tensors_in(alone.folder)
    torch.testing.assert_close(state, expected, atol=1e-5, rtol=1e-4)


def test_models_that_draw_random_numbers_of_their_own_are_refused(tmp_path):
    def noisy(model, batch, step):
        return objective(model, batch, step) + torch.rand(())

    with pytest.raises(RunError, match=r"cannot be trained together[\s\S]*random"):
        train_all(trainees(tmp_path, SHORT), SHORT, objective=noisy)


def test_batches_of_different_shapes_are_refused(tmp_path):
    them = trainees(tmp_path, SHORT)
    them[1] = replace(them[1], sample=lambda step, size: in_parts(step, size + 1))
    with pytest.raises(RunError, match=r"cannot be trained together.*size"):
        train_all(them, SHORT)


def test_one_loss_that_is_not_finite_stops_the_group_and_keeps_its_checkpoints(tmp_path):
    def poisoned(step, size):
        batch = in_parts(step, size)
        return replace(batch, inputs=batch.inputs * math.nan) if step >= 15 else batch

    them = trainees(tmp_path, SHORT)
    them[2] = replace(them[2], sample=poisoned)
    with pytest.raises(TrainingError, match=r"seed 2: the loss is not finite"):
        train_all(them, SHORT)
    assert all(tensors_in(it.folder)["step/unembed.W_U"] == 10 for it in them)


class Scaled(nn.Module):
    """A linear model with a scalar parameter, and with values that training changes."""

    def __init__(self, seed):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(4, 4, generator=generator))
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x):
        return self.scale * x @ self.weight


def test_scalar_parameters_are_resumed_model_by_model(tmp_path):
    config = replace(SHORT, optimizer="adamw", clip=0.5)
    whole = trainees(tmp_path / "whole", config, Scaled)
    train_all(whole, config)
    parts = trainees(tmp_path / "parts", config, Scaled)
    parts[0] = replace(parts[0], sample=interrupted_at(15))
    with pytest.raises(KeyboardInterrupt):
        train_all(parts, config)
    train_all(trainees(tmp_path / "parts", config, Scaled), config)
    for ours, theirs in zip(whole, parts, strict=True):
        assert same(tensors_in(ours.folder), tensors_in(theirs.folder))


def test_a_table_that_a_mechanism_caches_is_no_warning_when_compiled():
    @functools.lru_cache
    def table(n):
        return torch.arange(n)

    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        handle = compiled(lambda x: x + table(x.shape[0]), nn.Linear(1, 1))
        torch.testing.assert_close(handle(torch.zeros(3)), torch.arange(3.0))
