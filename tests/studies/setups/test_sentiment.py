"""The setup of negated sentiment."""

import pytest
import torch

import tasks
from studies import engine
from studies.setups.sentiment import NegatedSentimentSetup

TRAINING = engine.TrainingConfig(n_steps=2, batch_size=4, learning_rate=1e-3)
SIZES = {"d_model": 8, "n_heads": 2, "d_mlp": 8, "n_layers": 2, "training": TRAINING}


def setup_of(model="coda", **changes):
    return NegatedSentimentSetup(
        **SIZES, model=model, task=tasks.NegatedSentimentConfig(), **changes
    )


def test_negators_are_to_subtract_the_polar_words_of_their_scope():
    setup = setup_of()
    batch = setup.sampler().batch("ood", 0, 50)
    place = setup.places(batch)["attention"]
    assert place.sign is not None
    for i in range(50):
        words = setup.sampler().words(batch, i)
        width, scope = len(words), None
        for at, word in enumerate(words):
            scope = None if word == "," else at if word.startswith("not") else scope
            expected = torch.zeros(width, dtype=torch.long)
            if word.startswith("not"):
                for later in range(at + 1, width):
                    if words[later] == ",":
                        break
                    expected[later] = -1 if words[later].startswith("p") else 0
            assert torch.equal(place.sign[i, at, :width], expected)
            assert place.valid[i, at, :width].all() == word.startswith("not")
            assert place.valid[i, at, :width].any() == word.startswith("not")
        assert not place.valid[i, :, width:].any()
        assert not place.valid[i, width:].any()


@pytest.mark.parametrize("model", setup_of().models())
def test_every_model_answers_and_has_a_loss(model):
    setup = setup_of(model)
    net = setup.build(torch.Generator().manual_seed(0))
    batch = setup.sampler().batch("train", 0, 6)
    assert setup.answer(net, batch).shape == (6, 1, 2)
    setup.loss(net, batch, 0).backward()
    assert net.W_E.grad.any()


def test_a_centred_composition_is_allowed():
    setup = setup_of(gate_centring="matrix")
    setup.check()
    assert setup.build(torch.Generator()).config.attention.composition.gate_centring == "matrix"
