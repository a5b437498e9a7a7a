"""Setups of readers, and the measure of their connectors, with models whose weights are known."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformer_lens import HookedRootModule
from transformer_lens.hook_points import HookPoint

import tasks
from studies import engine
from studies.engine.examples import Examples
from studies.engine.trained import Trained
from studies.measures.question_answering import pointing
from studies.setups.question_answering import FactQuestionsSetup, StoredQuestionsSetup
from tests.tasks.stored.test_questions import write_own

SETUP = FactQuestionsSetup(
    model="coda",
    task=tasks.FactQuestionsConfig(),
    d_model=8,
    d_embed=6,
    n_layers=2,
    n_factors=2,
    training=engine.TrainingConfig(n_steps=2, batch_size=4, learning_rate=1e-3),
)
SOFTMAX = replace(SETUP, model="softmax")


class Connector(HookedRootModule):
    """Weights of passage words that are 1 in a chosen fact, in the layout of a connector."""

    def __init__(self, is_softmax, find):
        super().__init__()
        self.align = torch.nn.Module()
        name = "hook_pattern_b" if is_softmax else "hook_pattern"
        self.align.add_module(name, HookPoint())
        self.find = find

    def forward(self, weights):
        (hook,) = self.align.children()
        return hook(weights)


class Reader(HookedRootModule):
    """Connectors that weigh the first needed fact (Q1) or the second (Q2); only P1 does so."""

    def __init__(self, is_softmax, support):
        super().__init__()
        self.is_softmax, self.support = is_softmax, support
        self.connectors = torch.nn.ModuleList(
            torch.nn.ModuleList(Connector(is_softmax, (i, j)) for j in range(2)) for i in range(2)
        )
        self.setup()

    def forward(self, passage, question):
        support = torch.stack([self.support[tuple(row)] for row in passage.tolist()])
        for i in range(2):
            for j in range(2):
                weight = (support == j + 1).float() if i == 0 else (passage == 1).float()
                weight = weight[:, :, None].expand(-1, -1, question.shape[1])[:, None]
                # A negative weight counts as well.
                weight = weight.mT if self.is_softmax else -weight
                self.connectors[i][j](weight)
        return torch.zeros(len(passage), 2, passage.shape[1])


def trained(setup):
    model = setup.build(torch.Generator().manual_seed(0))
    first, again = (Examples(setup, "cpu").fresh("pointing") for _ in range(2))
    found = Trained(setup, model, 0, "cpu", first)
    batches = [batch for split in setup.splits for batch in again.batches(split, 200)]
    support = {
        tuple(row): values
        for batch in batches
        for row, values in zip(batch.inputs[0].tolist(), batch.latents["support"], strict=True)
    }
    return replace(found, model=Reader(setup.composition is None, support))


@pytest.mark.parametrize("setup", [SETUP, SOFTMAX], ids=["coda", "softmax"])
def test_pointing_says_which_connector_weighs_which_fact(setup):
    found = pointing(trained(setup), n=200)
    assert found["chance"] == 1 / 8
    share = found["share"].sel(weights="trained", control="observed")
    for split in ("id", "ood"):
        for target, layer in (("first fact", 1), ("second fact", 2)):
            of = share.sel(split=split, target=target)
            assert of.sel(passage_layer=1, question_layer=layer) == 1
            assert of.sel(passage_layer=1, question_layer=3 - layer) == 0
            # Nothing weighs: the first of equal facts.
            assert of.sel(passage_layer=2, question_layer=layer) < 0.3
    shuffled = found["share"].sel(weights="trained", control="shuffled", passage_layer=1)
    assert (shuffled < 0.3).all()
    untrained = found["share"].sel(weights="untrained", control="observed")
    assert untrained.sizes["question_layer"] == 2
    assert np.isfinite(untrained).all()


def test_places_have_the_planted_pairs():
    batch = SETUP.sampler().batch("id", 0, 6)
    places = SETUP.places(batch)
    assert list(places) == ["Q1", "Q2", "core"]
    model = SETUP.build(torch.Generator().manual_seed(0))
    _, cache = model.run_with_cache(*batch.inputs)
    for place in places.values():
        assert torch.equal(place.sign, batch.latents["sign"])
        pattern = cache[place.hooks.replace("*", "1") + "hook_pattern"][:, 0]
        assert torch.equal(pattern != 0, place.valid)


def test_settings_reach_the_model():
    model = replace(SETUP, projection="relu", gate_centring="matrix", beta=0.5, dropout=0.1).build(
        torch.Generator().manual_seed(0)
    )
    config = model.config
    assert config.alignment.projection == "relu"
    assert config.alignment.composition.gate_centring == "matrix"
    assert config.alignment.composition.beta == 0.5
    assert config.dropout == config.alignment.dropout == 0.1
    assert (config.d_hidden, config.d_embed, config.n_layers, config.n_factors) == (4, 6, 2, 2)
    softmax = replace(SOFTMAX, scaled=False).build(torch.Generator().manual_seed(0))
    assert softmax.config.alignment.composition is None
    with pytest.raises(ValueError, match="d_model must be even"):
        replace(SETUP, d_model=7)
    with pytest.raises(ValueError, match="model must be one of softmax, coda, got 'hyla'"):
        replace(SETUP, model="hyla").check()


def test_training_targets_are_both_ends_of_the_span():
    batch = SETUP.sampler().batch("train", 0, 5)
    model = SETUP.build(torch.Generator().manual_seed(0))
    logits = model(*batch.inputs).log_softmax(-1)
    expected = -sum(
        logits[i, 0, batch.latents["start"][i]] + logits[i, 1, batch.latents["end"][i]]
        for i in range(5)
    )
    torch.testing.assert_close(SETUP.loss(model, batch, 0), expected / 10)
    chance = SETUP.references("ood")["chance"]["exact_match"]["two facts"]
    # Of eight facts one is right, and further ones have the same object.
    assert chance == pytest.approx((1 + 13 / 36) / 8)


def test_stored_questions_are_scored_as_texts_and_have_no_planted_facts(tmp_path):
    write_own(tmp_path)
    task = tasks.QuestionsConfig(name="own", path=str(tmp_path), min_count=1)
    settings = {name: getattr(SETUP, name) for name in ("model", "d_model", "d_embed", "n_layers")}
    setup = StoredQuestionsSetup(
        **settings, n_factors=2, task=task, training=SETUP.training, n_validation=2
    )
    setup.prepare()
    batch = setup.sampler().batch("valid", 0, 4)
    model = setup.build(torch.Generator().manual_seed(0))
    assert setup.loss(model, batch, 0).isfinite()
    scores = setup.scores(setup.answer(model, batch), batch, "valid")
    assert set(scores) == set(setup.metrics)
    examples = Examples(setup, "cpu").fresh("pointing")
    assert pointing(Trained(setup, model, 0, "cpu", examples), n=4) is None
    assert all(place.sign is None for place in setup.places(batch).values())
