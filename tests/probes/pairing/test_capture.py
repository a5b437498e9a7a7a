from types import SimpleNamespace

import numpy as np
import pytest
import torch
import xarray as xr
from torch import nn
from torch.nn.functional import one_hot
from transformer_lens import HookedRootModule
from transformer_lens.hook_points import HookPoint

from probes import measure_pairing, score_pairing

SEARCHES, RETRIEVALS, LENGTH = 2, 4, 5


class Planted(HookedRootModule):
    """Its search 1 - s takes retrieval (r + 1) % 4 where s should take r; or any, if deaf."""

    def __init__(self, *, deaf=False):
        super().__init__()
        self.deaf = deaf
        self.layer = nn.Module()
        self.layer.hook_value_scores, self.layer.hook_pattern = HookPoint(), HookPoint()
        self.setup()

    def forward(self, inputs):
        preference, winner = inputs.unbind(1)
        chosen = (preference + 1) % RETRIEVALS
        chosen = torch.zeros_like(chosen) if self.deaf else chosen.flip(2)
        self.layer.hook_value_scores(one_hot(chosen, RETRIEVALS).double())
        self.layer.hook_pattern(one_hot(winner.flip(2), LENGTH).double().transpose(1, 2))
        return inputs


def batch(seed, examples=40):
    generator = torch.Generator().manual_seed(seed)
    shape = (examples, LENGTH, SEARCHES)
    preference = torch.randint(RETRIEVALS, shape, generator=generator)
    winner = torch.randint(LENGTH, shape, generator=generator)
    latents = {"preference": preference, "winner": winner}
    return SimpleNamespace(inputs=torch.stack([preference, winner], 1), latents=latents)


def measured(model, groups=None, **more):
    groups = groups or {"id": [batch(0), batch(1)], "ood": [batch(2, 60)]}
    return measure_pairing(model, groups, attention="layer", resamples=2, **more)


@pytest.mark.parametrize("winner", ["winner", None])
def test_the_planted_pairing_is_found_in_each_group(winner):
    result = measured(Planted(), winner=winner)
    assert result["group"].to_numpy().tolist() == ["id", "ood"]
    assert (result["search_assignment"] == [1, 0]).all()
    assert (result["retrieval_assignment"] == [1, 2, 3, 0]).all()
    assert (result["agreement"].sel(control="observed") == 1).all()
    assert (result["agreement"].sel(control="shuffled") < 0.6).all()


def test_a_model_that_heeds_no_preference_agrees_by_chance():
    result = measured(Planted(deaf=True)).sel(search="pooled", control="observed")
    assert np.allclose(result["agreement"], result["chance"])
    assert (result["agreement"] < 0.45).all()


def test_it_is_what_score_pairing_says_of_the_same_arrays():
    latents = batch(0).latents
    dims = ("example", "pos", "true_search")
    truth, winner = (xr.DataArray(latents[name].numpy(), dims=dims) for name in latents)
    choices = np.eye(RETRIEVALS)[(truth.to_numpy() + 1)[..., ::-1] % RETRIEVALS]
    pattern = np.eye(LENGTH)[winner.to_numpy()[..., ::-1]].swapaxes(1, 2)
    expected = score_pairing(
        xr.DataArray(choices, dims=("example", "pos", "search", "retrieval")),
        truth,
        winner=winner,
        pattern=xr.DataArray(pattern, dims=("example", "search", "query_pos", "key_pos")),
        groups=xr.DataArray(["one"] * 40, dims="example"),
        resamples=20,
        seed=3,
    )
    result = measure_pairing(
        Planted(), {"one": [batch(0)]}, attention="layer", resamples=20, seed=3
    )
    xr.testing.assert_identical(result, expected)


def test_unknown_hooks_and_latents_are_refused():
    with pytest.raises(
        KeyError, match="latents of the batches, which are preference, winner, got wanted"
    ):
        measured(Planted(), truth="wanted")
    with pytest.raises(KeyError, match="hook_value_scores"):
        measure_pairing(Planted(), {"id": [batch(0)]})
    with pytest.raises(ValueError, match="at least one group"):
        measure_pairing(Planted(), {}, attention="layer")
