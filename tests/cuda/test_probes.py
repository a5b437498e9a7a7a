"""Probes of a model on the device give what they give on the CPU."""

import numpy as np
import pytest
import torch

import mechanisms
import probes
import tasks

TASK = tasks.Raven(tasks.RavenConfig(n_features=2, seed=4))
PATTERN = probes.Quantity(
    "blocks.*.attn.hook_pattern", dims=("example", "head", "query_pos", "key_pos")
)


@pytest.fixture
def models(device):
    """The same transformer on the device and on the CPU."""
    config = mechanisms.TransformerConfig(
        d_input=8,
        d_output=8,
        d_model=16,
        n_layers=2,
        attention=mechanisms.AttentionConfig.named("hyla", n_heads=4, d_head=4),
        feed_forward=mechanisms.FeedForwardConfig(d_mlp=16),
        max_distance=18,
        n_readout=2,
    )
    built = [
        mechanisms.Transformer(config, generator=torch.Generator().manual_seed(0)).eval()
        for _ in range(2)
    ]
    return built[0].to(device), built[1]


def test_captured_activations_agree(models, device):
    there, here = models
    batches = [TASK.batch("id", index, 20) for index in range(3)]
    captured = probes.capture(there, [batch.to(device) for batch in batches], {"p": PATTERN})
    expected = probes.capture(here, batches, {"p": PATTERN})
    assert captured.sizes == expected.sizes
    assert np.allclose(captured["p"], expected["p"], atol=1e-4)
    assert np.array_equal(captured["rule"], expected["rule"])


def test_decoding_agrees(models, device):
    scores = []
    for model, at in zip(models, (device, "cpu"), strict=True):
        fit, test = (
            probes.capture(model, [TASK.batch("id", index, 150).to(at)], {"code": PATTERN}).isel(
                query_pos=16, rule_1=0
            )
            for index in (0, 1)
        )
        result = probes.decode(fit, {"test": test}, penalties=(0.1,), folds=2, resamples=10)
        scores.append(result["score"].sel(metric="accuracy"))
    assert np.allclose(*scores, atol=0.03)


def test_interchange_agrees(models, device):
    rates = []
    for model, at in zip(models, (device, "cpu"), strict=True):
        base, source = (TASK.batch("id", index, 40).to(at) for index in (0, 1))
        result = probes.interchange(
            model,
            base.inputs,
            source.inputs,
            hooks={"blocks.0": "blocks.0.hook_resid_post", "all": "blocks.*.hook_resid_post"},
            where=torch.ones(1, 1, 1, dtype=torch.bool),
            answer=lambda logits: logits.argmax(-1),
            outcomes={"base": base.targets, "source": source.targets},
        )
        rates.append(result["rate"])
    assert np.allclose(rates[0], rates[1], atol=0.03)
