"""The measure of rankings, with models whose answers are known."""

import pytest
import torch
from torch import nn

import tasks
from studies import engine
from studies.engine.examples import Examples
from studies.engine.trained import Trained
from studies.setups.ranking import RankingSetup, ranking
from studies.setups.signed_pairs import SignedPairsSetup

TRAINING = engine.TrainingConfig(n_steps=2, batch_size=4, learning_rate=1e-3)
SIZES = {"d_model": 8, "n_heads": 2, "training": TRAINING}
SETUP = RankingSetup(
    **SIZES, model="coda", alignment="networks", task=tasks.PlantedRankingConfig(n_answers=4)
)


class Rule(nn.Module):
    """Logits from the words: how many of those asked for the answer affirms, less denials."""

    def __init__(self, sign):
        super().__init__()
        self.sign = sign

    def forward(self, a, b):
        n = SETUP.task.n_concepts
        asks = (a > 0) & (a <= n)
        affirmed = asks[:, :, None] & (a[:, :, None] == b[:, None] - n)
        denied = asks[:, :, None] & (a[:, :, None] == b[:, None] - 2 * n)
        total = (affirmed.float() - denied.float()).sum((1, 2))
        return torch.stack([-total, total], -1)[:, None] * self.sign


def trained(setup, model):
    return Trained(setup, model, 0, "cpu", Examples(setup, "cpu").fresh("test"))


@pytest.mark.parametrize(("sign", "expected"), [(1, 1.0), (-1, 1 / 4), (0, 1 / 4)])
def test_the_right_answer_ranks_first_or_last(sign, expected):
    score = ranking(trained(SETUP, Rule(sign)), n=400).sel(control="trained")
    for name in ("average_precision", "reciprocal_rank"):
        assert score[name].to_numpy() == pytest.approx(expected)
    assert (score["recall_at_1"] == (sign == 1)).all()
    assert (score["recall_at_5"] == 1).all()
    assert score["split"].to_numpy().tolist() == ["id", "ood"]


def test_untrained_models_rank_at_chance():
    score = ranking(trained(SETUP, Rule(1)), n=4000).sel(control="untrained")
    chance = sum(1 / rank for rank in range(1, 5)) / 4
    assert score["reciprocal_rank"].to_numpy() == pytest.approx(chance, abs=0.06)


def test_it_does_not_apply_where_nothing_is_ranked():
    setup = SignedPairsSetup(**SIZES, model="softmax", task=tasks.SignedPairsConfig())
    model = setup.build(torch.Generator().manual_seed(0))
    assert ranking(trained(setup, model), n=20) is None


def test_the_model_has_the_words_and_labels_of_the_task():
    model = SETUP.build(torch.Generator().manual_seed(0)).eval()
    batch = SETUP.sampler().batch("id", 0, 8)
    assert SETUP.answer(model, batch).shape == (8, 1, 2)
    assert model.W_E.shape[0] == SETUP.sampler().vocabulary_size
    place = SETUP.places(batch)["a"]
    assert torch.equal(
        place.valid.sum((1, 2)), batch.latents["length_a"] * batch.latents["length_b"]
    )
    assert torch.equal(place.sign, batch.latents["sign"])
    assert SETUP.references("id")["chance"]["accuracy"]["all"] == 0.75
