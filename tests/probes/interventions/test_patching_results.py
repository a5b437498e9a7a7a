"""Sweeps of activation patching with labels, on the model with the planted head."""

import numpy as np
import pandas as pd
import pytest
import torch
from transformer_lens import patching

from probes import label_patching
from tests.probes.interventions.planted import (
    LAST,
    N_POS,
    READ,
    bridge,
    difference,
    pairs,
    planted_bridge,
)

CLEAN, CORRUPTED = pairs(6, READ)
METRIC = difference(CLEAN, CORRUPTED)
KEPT = {"reduce": "none", "baseline": True}


def per_example(logits):
    return METRIC(logits, slice(6))


def sweep(function, model, metric=per_example, **settings):
    with torch.no_grad():
        cache = model.run_with_cache(CLEAN)[1]
        return function(model, CORRUPTED, cache, metric, **settings)


def test_the_planted_head_has_the_effect_at_its_position():
    model = planted_bridge()
    found = label_patching(sweep(patching.get_act_patch_attn_head_out_by_pos, model, **KEPT))
    assert dict(found["example_value"].sizes) == {"layer": 2, "pos": N_POS, "head": 2, "example": 6}
    with torch.no_grad():
        clean, corrupted = (per_example(model(tokens)) for tokens in (CLEAN, CORRUPTED))
    planted = {"layer": 0, "pos": LAST, "head": 1}
    np.testing.assert_allclose(found["example_value"].sel(planted), clean, rtol=1e-5)
    at = found.sel(planted)
    assert at["effect"] == pytest.approx((clean - corrupted).mean().item(), rel=1e-5)
    assert at["effect_low"] <= at["effect"] + 1e-5
    assert at["p_value"] == pytest.approx(2 / 2**6, abs=0.01)
    assert found["baseline"] == pytest.approx(corrupted.mean().item(), rel=1e-5)
    others = found["effect"].copy()
    others.loc[planted] = 0
    assert np.abs(others).max() < 1e-5
    assert all(variable.attrs["long_name"] for variable in found.data_vars.values())


def test_several_metrics_and_types_of_activations_have_names():
    metrics = {"difference": per_example, "first": lambda logits: logits[:, -1, 0]}
    model = bridge()
    result = sweep(patching.get_act_patch_attn_head_all_pos_every, model, metrics, **KEPT)
    found = label_patching(result)
    assert found["value"].dims == ("metric", "patch_type", "layer", "head")
    assert found["baseline"].dims == ("metric",)
    direct = sweep(patching.get_act_patch_attn_head_v_all_pos, model, metrics["first"], **KEPT)
    at = {"metric": "first", "patch_type": "v"}
    np.testing.assert_allclose(found["value"].sel(at), direct.mean(), atol=1e-6)
    np.testing.assert_allclose(found["effect"].sel(at), direct.effect().mean(-1), atol=1e-6)
    assert (
        (found["effect_low"] <= found["effect"]) & (found["effect"] <= found["effect_high"])
    ).all()
    assert (found["effect_low"] < found["effect_high"]).any()


def test_positions_of_patterns_are_queries_and_keys():
    function = patching.get_act_patch_attn_head_pattern_dest_src_pos
    found = label_patching(sweep(function, planted_bridge(), reduce="none"))
    assert found["value"].dims == ("layer", "head", "query_pos", "key_pos")
    assert "effect" not in found
    assert "baseline" not in found


def test_a_sweep_over_chosen_cells_has_them_as_coordinates():
    cells = pd.DataFrame({"layer": [0, 1], "pos": [LAST, 0]})
    result = sweep(
        patching.generic_activation_patch,
        planted_bridge(),
        patch_setter=patching.layer_pos_patch_setter,
        activation_name="attn_out",
        index_df=cells,
        **KEPT,
    )
    effect = label_patching(result)["effect"]
    assert effect.dims == ("cell",)
    assert effect.where((effect["layer"] == 0) & (effect["pos"] == LAST), drop=True) > 1
    assert abs(effect[1]) < 1e-5


def test_means_are_refused():
    result = sweep(patching.get_act_patch_resid_pre, planted_bridge(), reduce="mean", baseline=True)
    with pytest.raises(ValueError, match="run the sweep with reduce='none'"):
        label_patching(result)
