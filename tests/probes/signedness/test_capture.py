import numpy as np
import pytest
import torch
from torch import nn
from transformer_lens import HookedRootModule
from transformer_lens.hook_points import HookPoint

import probes
from tasks import Batch

N, QUERIES, KEYS = 40, 3, 5


class Signed(HookedRootModule):
    """Two heads: one weighs by the signs that it is given, times `size`, the other by chance."""

    def __init__(self, size):
        super().__init__()
        self.size = size
        self.attn = nn.Module()
        self.attn.hook_pattern, self.attn.hook_affinity = HookPoint(), HookPoint()
        self.setup()

    def forward(self, sign):
        chance = torch.rand(sign.shape, generator=torch.Generator().manual_seed(len(sign)))
        self.attn.hook_affinity(torch.stack([5 * sign.float(), 0 * chance], 1))
        return self.attn.hook_pattern(torch.stack([self.size * sign, 2 * chance - 1], 1))


def examples_of(*splits):
    """Of each split: a batch of signs; the last key of every query is padding."""
    result = {}
    for number, split in enumerate(splits):
        generator = torch.Generator().manual_seed(number)
        sign = torch.randint(-1, 2, (N, QUERIES, KEYS), generator=generator)
        valid = (torch.arange(KEYS) < KEYS - 1).expand_as(sign)
        batch = Batch(sign, sign, torch.ones(N, QUERIES, dtype=torch.bool), {})
        result[split] = [batch], {"here": probes.AttentionPlace("attn.", valid, sign)}
    return result


@pytest.fixture(scope="module")
def signs():
    models = {"large": Signed(0.8), "small": Signed(-0.01), "none": Signed(0.0)}
    return probes.measure_signedness(models, examples_of("id", "ood"), resamples=20)


def test_planted_signs_are_found_and_chance_is_not(signs):
    right = signs["balanced_accuracy"].sel(place="here", layer=0, control="observed")
    assert (right.sel(head=0, scale="weights", model="large") == 1).all()
    # Weights below a tenth count only beside those of their head.
    assert (right.sel(head=0, scale="relative", model=["large", "small"]) == 1).all()
    assert np.allclose(right.sel(head=0, scale="weights", model=["small", "none"]), 1 / 3)
    assert (abs(right.sel(head=1) - 1 / 3) < 0.1).all()
    shuffled = signs["balanced_accuracy"].sel(control="shuffled")
    assert (abs(shuffled - 1 / 3) < 0.1).all()


def test_shares_are_those_of_the_pairs_that_count(signs):
    added = signs["share"].sel(model="large", scale="weights", kind="partly_added", head=0)
    for split, (_, places) in examples_of("id", "ood").items():
        place = places["here"]
        expected = (place.sign[place.valid] == 1).float().mean().item()
        assert added.sel(split=split, place="here", layer=0).item() == pytest.approx(expected)


def test_saturation_is_beyond_the_limits_of_each_quantity():
    examples, limits = examples_of("id"), {"affinity": 2.0, "pattern": 0.5}
    models = {"large": Signed(0.8), "small": Signed(0.01)}
    result = probes.measure_saturation(models, examples, limits, resamples=20)["saturated"]
    place = examples["id"][1]["here"]
    one = result.sel(split="id", place="here", layer=0, head=0)
    for side, sign in (("low", -1), ("high", 1)):
        share = (place.sign[place.valid] == sign).float().mean().item()
        here = one.sel(side=side)
        assert np.allclose(here.sel(quantity="affinity"), share)
        assert np.allclose(here.sel(quantity="pattern"), [share, 0])
    assert (result.sel(head=1, quantity="affinity") == 0).all()


def test_invalid_input_is_refused():
    models = {"one": Signed(1.0)}
    with pytest.raises(ValueError, match="models and examples must not be empty"):
        probes.measure_signedness(models, {})
    with pytest.raises(KeyError, match="hook_gate"):
        probes.measure_saturation(models, examples_of("id"), {"gate": 0.5})
    with pytest.raises(ValueError, match="low must be below high"):
        probes.measure_saturation(models, examples_of("id"), {"affinity": 0.0})
