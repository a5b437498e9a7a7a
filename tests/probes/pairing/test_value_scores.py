"""Value scores by group: planted choices, loops, and models."""

import numpy as np
import pytest
import torch
import xarray as xr
from torch import nn
from transformer_lens import HookedRootModule
from transformer_lens.hook_points import HookPoint

from probes import measure_value_scores, summarise_value_scores
from tasks import Batch


def label(scores, member, names=None):
    """Scores [example, layer, search, retrieval] and members [group, example]."""
    member = np.asarray(member)
    return (
        xr.DataArray(np.asarray(scores, float), dims=("example", "layer", "search", "retrieval")),
        xr.DataArray(
            member,
            dims=("group", "example"),
            coords={"group": names or [f"g{n}" for n in range(len(member))]},
        ),
    )


def noise(seed, shape):
    return np.random.default_rng(seed).dirichlet(np.ones(shape[-1]), shape[:-1])


def test_it_is_what_a_loop_computes():
    scores, rng = noise(0, (30, 2, 3, 4)), np.random.default_rng(1)
    member = rng.random((3, 30)) < 0.5
    result = summarise_value_scores(*label(scores, member))
    for group in range(3):
        mine = [scores[n] for n in range(30) if member[group, n]]
        mean = sum(mine) / len(mine)
        here = result.isel(group=group)
        assert np.allclose(here["value_scores"], mean)
        for layer in range(2):
            greatest = [max(mean[layer, search]) for search in range(3)]
            assert here["tightness"][layer] == pytest.approx(sum(greatest) / 3)
        for other in range(3):
            theirs = [scores[n] for n in range(30) if member[other, n]]
            apart = np.abs(mean - sum(theirs) / len(theirs)).sum((1, 2)) / 2 / 3
            assert np.allclose(here["distance"].isel(other_group=other), apart)
    assert result["value_scores"].dims == ("group", "layer", "search", "retrieval")
    assert result["distance"].dims == ("group", "other_group", "layer")
    assert all(result[name].attrs["long_name"] for name in result)


def test_a_tight_pairing_that_switches_between_groups():
    first = np.arange(40) < 20
    choice = np.where(first[:, None, None], [0, 1], [1, 0])
    result = summarise_value_scores(*label(np.eye(2)[choice], [first, ~first, first | ~first]))
    assert result["tightness"].to_numpy().ravel().tolist() == [1, 1, 0.5]
    assert np.allclose(result["distance"].squeeze(), [[0, 1, 0.5], [1, 0, 0.5], [0.5, 0.5, 0]])


def test_noise_is_neither_tight_nor_different():
    first = np.arange(4000) < 2000
    result = summarise_value_scores(*label(noise(2, (4000, 1, 3, 4)), [first, ~first]))
    assert (abs(result["tightness"] - 0.25) < 0.03).all()
    assert (result["distance"] < 0.03).all()
    even = summarise_value_scores(*label(np.full((4000, 1, 3, 4), 0.25), [first, ~first]))
    assert np.allclose(even["tightness"], 0.25)


def test_a_group_without_examples_is_nan():
    result = summarise_value_scores(*label(noise(0, (5, 1, 2, 3)), [[True] * 5, [False] * 5]))
    assert result.sel(group="g1")["value_scores"].isnull().all()
    assert result.sel(group="g1")["tightness"].isnull().all()
    assert result["distance"].sel(group="g0", other_group="g1").isnull().all()
    assert np.isfinite(result["distance"].sel(group="g0", other_group="g0")).all()


def test_groups_are_matched_by_the_labels_of_examples():
    scores, member = label(noise(0, (5, 1, 2, 3)), np.arange(10).reshape(2, 5) % 3 == 0)
    scores, member = (each.assign_coords(example=range(5)) for each in (scores, member))
    turned = member.isel(example=slice(None, None, -1))
    expected = summarise_value_scores(scores, member)
    xr.testing.assert_allclose(summarise_value_scores(scores, turned), expected)
    with pytest.raises(ValueError, match="groups must have the labels of value_scores"):
        summarise_value_scores(scores, member.assign_coords(example=range(3, 8)))


def test_invalid_input_is_refused():
    scores, member = label(noise(0, (5, 1, 2, 3)), [[True] * 5])
    with pytest.raises(ValueError, match=r"value_scores must have the dims .*'search'"):
        summarise_value_scores(scores.rename(search="head"), member)
    with pytest.raises(ValueError, match=r"must hold probabilities .* sums in 2\.\.2"):
        summarise_value_scores(2 * scores, member)
    with pytest.raises(ValueError, match=r"'example', of size 5, got .*4"):
        summarise_value_scores(scores, member[:, :4])
    with pytest.raises(ValueError, match=r"names of groups as labels of 'group'"):
        summarise_value_scores(scores, member.drop_vars("group"))
    with pytest.raises(TypeError, match=r"groups must hold bool, got float64"):
        summarise_value_scores(scores, member * 1.0)


class Shows(HookedRootModule):
    """Value scores are its inputs, in the second layer with the retrievals in turned order."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Module() for _ in range(2))
        for block in self.blocks:
            block.attn = nn.Module()
            block.attn.hook_value_scores = HookPoint()
        self.setup()

    def forward(self, scores):
        for turned, block in enumerate(self.blocks):
            block.attn.hook_value_scores(scores.flip(-1) if turned else scores)


def drawn(seed, n):
    """Examples of random value scores [example, pos, search, retrieval]; their sign is a latent."""
    scores = torch.from_numpy(noise(seed, (n, 5, 3, 4))).float()
    sign = torch.arange(n) % 2 == 0
    return Batch(scores, sign[:, None].long(), torch.ones(n, 1).bool(), {"sign": sign})


def signs(batch):
    sign = batch.latents["sign"]
    return {"plus": sign, "minus": ~sign}


def test_it_is_measured_in_all_layers_over_tokens_and_in_the_last_one():
    batches = [drawn(0, 8), drawn(1, 6)]
    result = measure_value_scores(Shows(), batches, signs)
    scores = torch.cat([batch.inputs for batch in batches]).double()
    sign = torch.cat([batch.latents["sign"] for batch in batches])
    assert result["layer"].to_numpy().tolist() == [0, 1]
    for group, member in (("plus", sign), ("minus", ~sign)):
        here = result["value_scores"].sel(group=group)
        for token, of_token in (("all", scores.mean(1)), ("last", scores[:, -1])):
            mean = of_token[member].mean(0)
            assert np.allclose(here.sel(layer=0, token=token), mean, atol=1e-6)
            assert np.allclose(here.sel(layer=1, token=token), mean.flip(-1), atol=1e-6)


def test_groups_that_choose_otherwise_are_apart_and_others_are_not():
    batch = drawn(0, 8)
    hard = torch.where(batch.latents["sign"], 0, 1)[:, None, None].expand(8, 5, 3)
    planted = Batch(
        nn.functional.one_hot(hard, 4).float(), batch.targets, batch.mask, batch.latents
    )
    apart = measure_value_scores(Shows(), [planted], signs)["distance"]
    assert (apart.sel(group="plus", other_group="minus") == 1).all()
    assert (apart.sel(group="plus", other_group="plus") == 0).all()


def test_invalid_batches_are_refused():
    with pytest.raises(ValueError, match="batches must hold at least one batch, got none"):
        measure_value_scores(Shows(), [], signs)
    with pytest.raises(ValueError, match=r"same names .* got \['plus', 'minus'\] and \['plus'\]"):
        measure_value_scores(
            Shows(),
            [drawn(0, 8), drawn(1, 6)],
            lambda batch: signs(batch) if len(batch.inputs) > 6 else {"plus": signs(batch)["plus"]},
        )
    with pytest.raises(KeyError, match="hook_value_scores"):
        measure_value_scores(Shows(), [drawn(0, 4)], signs, attention="blocks.*.attention")
