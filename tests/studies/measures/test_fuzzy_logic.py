"""Measures of fuzzy logic models: planted terms and literals are decoded from self-attention."""

import numpy as np
import pytest
import torch

from studies.engine import Trained
from studies.engine.examples import Examples
from studies.fuzzy_logic_latent_code import STUDY
from studies.measures import fuzzy_logic
from tests.studies.test_fuzzy_logic_latent_code import Solver


def setup_of(*changes):
    changes = ["n_points=16", "n_layers=1", "model=hyla", *changes]
    (setup,) = STUDY.plan("smoke", changes).cells
    return setup


class Names(Solver):
    """A head for each term, with which the queried token attends to itself; others show nothing."""

    def code(self, literals):
        numbers = (literals * torch.tensor([8, 4, 2, 1])).sum(-1)
        return torch.nn.functional.one_hot(numbers, 16).sum(1).float()


class Literals(Solver):
    """A head for each literal of both terms."""

    def code(self, literals):
        return literals.flatten(1).float()


def trained(setup, model_class):
    fresh = Examples(setup, "cpu").fresh("terms")
    return Trained(setup, model_class(setup.sampler()), 0, "cpu", fresh)


def test_planted_terms_are_decoded_in_held_out_combinations():
    found = fuzzy_logic.terms(trained(setup_of("n_heads=16"), Names), n=150)
    f1 = found["f1"].sel(layer="all")
    assert (f1.sel(control="probe", split=["id", "test"]) > 0.95).all()
    assert (f1.sel(control="shuffled", split=["id", "test"]) < 0.5).all()
    assert (f1.sel(control="untrained", split=["id", "test"]) < 0.5).all()
    # Unseen terms have no decoder, and the others do not occur.
    assert np.isnan(f1.sel(split="ood")).all()
    assert found.sizes["term"] == 12
    mean = found["score"].sel(metric="f1", split="test", control="probe", layer="all").mean()
    assert float(f1.sel(control="probe", split="test")) == pytest.approx(float(mean))


def test_planted_literals_are_decoded():
    found = fuzzy_logic.literals(trained(setup_of("n_heads=8"), Literals), n=150)
    r2 = found["mean_r2"].sel(layer="all", split=["id", "test"])
    assert (r2.sel(control="probe") > 0.99).all()
    assert (r2.sel(control=["shuffled", "untrained"]) < 0.6).all()


def test_codes_of_self_attention_are_those_that_are_projected():
    setup = setup_of("n_heads=16")
    points = fuzzy_logic.projection(trained(setup, Names), n=120)
    assert points["projection"].shape == (120, 2)
    batch = Examples(setup, "cpu").fresh("terms").batches("test", 120)
    (batch,) = (setup.sampler().with_fixed_query(part) for part in batch)
    assert (points["first_term"].to_numpy() == batch.latents["terms"][:, 0].numpy()).all()
    np.testing.assert_allclose(points["value"], batch.targets[:, 0])
    terms = list(map(tuple, batch.latents["terms"].tolist()))
    numbers = points["function"].to_numpy()
    pairs = [(a, b) for a in range(120) for b in range(a)]
    assert all((numbers[a] == numbers[b]) == (terms[a] == terms[b]) for a, b in pairs)


def test_samples_are_sequences_with_their_function():
    setup = setup_of("n_heads=2")
    model = setup.build(torch.Generator().manual_seed(0)).eval()
    fresh = Examples(setup, "cpu").fresh("samples")
    data = fuzzy_logic.samples(Trained(setup, model, 0, "cpu", fresh), n=3)
    points = torch.from_numpy(data["point"].to_numpy())
    literals = torch.from_numpy(data["literal"].to_numpy())
    np.testing.assert_allclose(data["value"], setup.sampler().solve(points, literals))
    (batch,) = Examples(setup, "cpu").fresh("samples").batches("test", 3)
    np.testing.assert_allclose(data["answer"], model(batch.inputs)[:, -1, 0].detach(), rtol=1e-5)
