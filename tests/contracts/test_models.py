"""What holds for every model that `mechanisms` exports."""

import pytest
import torch

import mechanisms
from tests.contracts.models import MODELS, build

# Nothing is in memory that could be freed at the first step, and at the last one the weight is what
# remains, whatever the probability.
WITHOUT_EFFECT = {
    "Dnc": ["steps.0.hook_free_gates"],
    "NeuralDataRouter that halts": ["blocks.2.halt.hook_probability"],
}


@pytest.mark.parametrize("name", MODELS)
def test_every_model_keeps_the_rules_of_a_mechanism(name):
    config, inputs = MODELS[name]
    mechanisms.check(
        build(config),
        tuple(inputs),
        build=lambda generator: build(config, generator),
        optional=WITHOUT_EFFECT.get(name, ()),
    )


@pytest.mark.parametrize("wrong", [-2, 60])
@pytest.mark.parametrize(
    "name", [name for name, (_, inputs) in MODELS.items() if not inputs[0].is_floating_point()]
)
def test_ids_that_no_token_has_are_refused(name, wrong):
    config, inputs = MODELS[name]
    model = build(config)
    for i, tokens in enumerate(inputs):
        changed = tokens.clone()
        changed[0, 0] = wrong
        with pytest.raises(ValueError, match="ids"), torch.no_grad():
            model(*inputs[:i], changed, *inputs[i + 1 :])


@pytest.mark.parametrize("name", MODELS)
def test_an_empty_batch_has_empty_logits(name):
    config, inputs = MODELS[name]
    model = build(config).eval()
    assert model(*(x[:0] for x in inputs)).shape == (0, *model(*inputs).shape[1:])
