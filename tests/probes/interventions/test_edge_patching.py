"""Patched edges: the planted ones, and agreement with TransformerLens' exact patching."""

import numpy as np
import pytest
import torch
from transformer_lens.patching import get_act_patch_direct_path
from transformer_lens.tools.analysis import faithfulness

from probes import attribute, patch_edges
from probes.interventions.attribution import label_of, ranked_edges
from tests.probes.interventions.planted import (
    LAST,
    N_POS,
    READ,
    bridge,
    difference,
    pairs,
    planted_bridge,
)


def shuffled(found):
    """The attribution with the values of all edges exchanged at random."""
    edge = found["edge"].copy(deep=True)
    there = edge.notnull().values
    edge.values[there] = np.random.default_rng(0).permutation(edge.values[there])
    return found.assign(edge=edge)


def test_the_planted_edges_have_the_effect_and_random_edges_none():
    model = planted_bridge()
    (clean, corrupted), (test, test_corrupted) = (pairs(8, READ, seed) for seed in range(2))
    found = attribute(model, clean, corrupted, metric=difference(clean, corrupted))
    metric = difference(test, test_corrupted)
    patched = patch_edges(
        model, test, test_corrupted, found, metric=metric, n_edges=2, batch_size=3
    )
    strongest, random = (patched.sel(group=group) for group in ("strongest", "random"))
    edges = {
        tuple(map(np.ndarray.item, map(np.asarray, at)))
        for at in zip(
            *(strongest[name].values for name in ("writer", "reader", "pos")), strict=True
        )
    }
    assert edges == {("embed", "v 0.1", READ), ("head 0.1", "logits", LAST)}
    with torch.no_grad():
        both = metric(model(test), slice(8)) - metric(model(test_corrupted), slice(8))
    # Either edge alone carries all of the difference between the clean and the corrupted run.
    np.testing.assert_allclose(strongest["example_effect"], both.expand(2, -1), rtol=1e-5)
    assert np.abs(random["effect"]).max() < 1e-5
    assert patched["size"].sel(group="strongest") == pytest.approx(both.mean().item(), rel=1e-5)
    assert patched["size_difference_low"] > 1
    # The estimates have the sign, not the size, since the normalisation is not linear.
    assert (strongest["attribution"] / strongest["effect"]).values == pytest.approx(0.5, abs=0.1)
    assert all(variable.attrs["long_name"] for variable in patched.data_vars.values())


def test_a_shuffled_attribution_is_no_better_than_random_edges():
    model, (clean, corrupted) = planted_bridge(), pairs(8, READ)
    metric = difference(clean, corrupted)
    found = shuffled(attribute(model, clean, corrupted, metric=metric))
    patched = patch_edges(model, clean, corrupted, found, metric=metric, n_edges=2)
    assert patched["size"].sel(group="strongest") < 1e-5


def test_a_metric_that_does_not_depend_has_no_effects():
    model, (clean, corrupted) = bridge(), pairs(4, READ)
    constant = {"metric": lambda logits, rows: 0 * logits[:, 0, 0]}
    found = attribute(model, clean, corrupted, **constant)
    patched = patch_edges(model, clean, corrupted, found, **constant)
    assert (patched["example_effect"] == 0).all()
    assert patched["size_difference"] == patched["size_difference_high"] == 0


def test_effects_are_those_of_cutting_all_other_edges():
    """The corrupted run with one edge outside of the "circuit", by TransformerLens, pair by pair.

    With clean and corrupted exchanged, a circuit of all other edges gets the clean value of one.
    """
    model, (clean, corrupted) = bridge(), pairs(2, differ_at=0)
    metric = difference(clean, corrupted, at=0)
    found = attribute(model, clean, corrupted, metric=metric)
    patched = patch_edges(model, clean, corrupted, found, metric=metric, n_edges=8)
    ranked = ranked_edges(found, N_POS)
    names = [(label_of(writer), label_of(reader), writer.position) for writer, reader in ranked]
    kinds = set()
    for place in patched.stack(place=("group", "rank")).transpose("place", ...)["place"].values:
        at = patched.sel(group=place[0], rank=place[1])
        number = names.index((at["writer"].item(), at["reader"].item(), at["pos"].item()))
        kinds |= {node.kind for node in ranked[number]}
        others = ranked[:number] + ranked[number + 1 :]
        for i in range(2):
            row = slice(i, i + 1)
            result = faithfulness(
                model, corrupted[row], clean[row], lambda out, row=row: metric(out, row)[0], others
            )
            # From the corrupted run, called "full" here, the share 1 - recovered of the way back.
            effect = (result.recovered - 1) * (result.full_metric - result.corrupt_metric)
            assert at["example_effect"][i] == pytest.approx(effect, abs=1e-4)
    assert {"embed", "attn_head_out", "mlp_out", "mlp_in", "logits"} <= kinds
    assert np.abs(patched["effect"].sel(group="strongest")).min() > 1e-3


def test_effects_between_heads_are_those_of_direct_path_patching():
    model, (clean, corrupted) = bridge(), pairs(1, differ_at=LAST)
    metric = difference(clean, corrupted, at=LAST)
    found = attribute(model, clean, corrupted, metric=metric)
    n_edges = int(found["edge"].notnull().sum()) // 2
    patched = patch_edges(model, clean, corrupted, found, metric=metric, n_edges=n_edges)
    flat = patched.stack(edge=("group", "rank"))
    # No edge is drawn that is measured already: two halves are all edges.
    assert len(
        set(zip(*(flat[name].values for name in ("writer", "reader", "pos")), strict=True))
    ) == (2 * n_edges)
    np.testing.assert_allclose(patched["size"], np.abs(patched["effect"]).mean("rank"))
    assert (patched["effect"] < 0).any()
    with torch.no_grad():
        caches = [model.run_with_cache(tokens)[1] for tokens in (clean, corrupted)]
        unpatched = metric(model(corrupted), slice(1)).item()
        for part in "qkv":
            for head in range(2):
                expected = get_act_patch_direct_path(
                    model, corrupted, *caches, lambda out: metric(out, slice(1))[0], 0, head, part,
                    verbose=False,
                )[1]  # fmt: skip
                for reader in range(2):
                    effect = flat["effect"].values[
                        (flat["writer"] == f"head 0.{head}")
                        & (flat["reader"] == f"{part} 1.{reader}")
                        & (flat["pos"] == LAST)
                    ]
                    assert effect == pytest.approx(expected[reader].item() - unpatched, abs=1e-5)


def test_the_seed_decides_and_the_settings_of_the_model_stay():
    model, (clean, corrupted) = bridge(), pairs(3, READ)
    settings = {"metric": difference(clean, corrupted), "n_edges": 5}
    found = attribute(model, clean, corrupted, metric=settings["metric"])
    model.set_use_attn_in(True)
    first = patch_edges(model, clean, corrupted, found, **settings)
    assert model.cfg.use_attn_in
    assert not model.cfg.use_split_qkv_input
    assert not model.cfg.use_attn_result
    assert first.identical(patch_edges(model, clean, corrupted, found, **settings))
    other = patch_edges(model, clean, corrupted, found, **settings, seed=1)
    strongest = {"group": "strongest"}
    assert (other["effect"].sel(strongest) == first["effect"].sel(strongest)).all()
    assert not (other["pos"] == first["pos"]).all()
    largest = np.sort(np.abs(found["edge"].values[found["edge"].notnull()]))[:-6:-1]
    np.testing.assert_array_equal(np.abs(first["attribution"].sel(strongest)), largest)
    assert (first["attribution"].sel(strongest) < 0).any()


def test_invalid_input_is_refused():
    model, (clean, corrupted) = bridge(), pairs(3, READ)
    metric = difference(clean, corrupted)
    found = attribute(model, clean, corrupted, metric=metric)
    nodes = found.drop_vars(["edge", "example_edge"])
    for changes, message in (
        ({"attribution": nodes}, "attribution must have the variable 'edge'"),
        ({"n_edges": 93}, r"n_edges must be in 1\.\.92, half of the 184 edges, got 93"),
        ({"clean": clean[:, :3], "corrupted": corrupted[:, :3]}, "the 4 positions .*, got 3"),
        ({"clean": clean[:2]}, "same shape"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"metric": lambda logits, rows: logits}, r"metric must return a tensor \[3 examples"),
    ):
        arguments = {"attribution": found, "clean": clean, "corrupted": corrupted}
        with pytest.raises(ValueError, match=message):
            patch_edges(model, **{**arguments, "metric": metric, **changes})
