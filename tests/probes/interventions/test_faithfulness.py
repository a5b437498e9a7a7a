"""Faithfulness of circuits on a model whose circuit is known."""

import numpy as np
import pytest
import torch
from transformer_lens.tools.analysis import faithfulness

from probes import attribute, measure_faithfulness
from probes.interventions.attribution import ranked_edges
from tests.probes.interventions.planted import (
    N_POS,
    READ,
    bridge,
    difference,
    pairs,
    planted_bridge,
)
from tests.probes.interventions.test_edge_patching import shuffled


def test_the_planted_circuit_recovers_all_and_random_circuits_nothing():
    model, (clean, corrupted) = planted_bridge(), pairs(3, READ)
    metric = difference(clean, corrupted)
    found = attribute(model, clean, corrupted, metric=metric)
    measured = measure_faithfulness(
        model, clean, corrupted, found, metric=metric, sizes=(1, 2, 184), draws=2
    )
    recovered = measured["recovered"]
    assert recovered.dims == ("circuit", "size")
    assert recovered.sel(circuit="strongest").values == pytest.approx([0, 1, 1], abs=1e-5)
    # 184 random edges are all edges.
    assert recovered.sel(circuit="random").values == pytest.approx([0, 0, 1], abs=1e-5)
    assert recovered.sel(circuit="empty").values == pytest.approx(0, abs=1e-5)
    assert recovered.sel(circuit="complete").values == pytest.approx(1, abs=1e-5)
    with torch.no_grad():
        gap = (metric(model(clean), slice(3)) - metric(model(corrupted), slice(3))).mean()
    assert measured["gap"] == pytest.approx(gap.item(), rel=1e-5)
    assert (measured.attrs["without_gap"], measured.attrs["edges"]) == (0, 184)
    assert all(variable.attrs["long_name"] for variable in measured.data_vars.values())
    control = measure_faithfulness(
        model, clean, corrupted, shuffled(found), metric=metric, sizes=(2,), draws=1
    )
    assert control["recovered"].sel(circuit="strongest") == pytest.approx(0, abs=1e-5)


def test_recovered_is_a_ratio_of_sums_over_examples():
    model, (clean, corrupted) = bridge(), pairs(3, READ)
    metric = difference(clean, corrupted)
    found = attribute(model, clean, corrupted, metric=metric)
    settings = {"metric": metric, "sizes": (60,), "draws": 3}
    measured = measure_faithfulness(model, clean, corrupted, found, **settings)
    circuit = ranked_edges(found, N_POS)[:60]
    above = below = 0.0
    for i in range(3):
        row = slice(i, i + 1)
        result = faithfulness(
            model, clean[row], corrupted[row], lambda out, row=row: metric(out, row)[0], circuit
        )
        above += result.recovered * (result.full_metric - result.corrupt_metric)
        below += result.full_metric - result.corrupt_metric
    strongest = measured["recovered"].sel(circuit="strongest", size=60)
    assert strongest == pytest.approx(above / below, rel=1e-4)
    assert abs(strongest) > 0.05
    by_draw = measured["recovered_by_draw"]
    assert by_draw.dims == ("draw", "size")
    assert len(np.unique(by_draw)) > 1
    random = measured["recovered"].sel(circuit="random", size=60)
    assert random == pytest.approx(by_draw.mean().item(), rel=1e-4)
    assert measured.identical(measure_faithfulness(model, clean, corrupted, found, **settings))


def test_pairs_without_a_difference_are_left_out():
    model, (clean, corrupted) = planted_bridge(), pairs(3, READ)
    metric = difference(clean, corrupted)
    found = attribute(model, clean, corrupted, metric=metric)
    settings = {"sizes": (2,), "draws": 1}
    same = corrupted.clone()
    same[0] = clean[0]
    measured = measure_faithfulness(model, clean, same, found, metric=metric, **settings)
    assert measured.attrs["without_gap"] == 1
    assert measured["recovered"].sel(circuit="strongest") == pytest.approx(1, abs=1e-5)
    constant = {"metric": lambda logits, rows: 0 * logits[:, 0, 0] + 1}
    measured = measure_faithfulness(model, clean, corrupted, found, **constant, **settings)
    assert measured.attrs["without_gap"] == 3
    assert measured["recovered"].isnull().all()
    assert measured["gap"] == 0


def test_invalid_input_is_refused():
    model, (clean, corrupted) = bridge(), pairs(2, READ)
    metric = difference(clean, corrupted)
    found = attribute(model, clean, corrupted, metric=metric)
    for changes, message in (
        ({"sizes": (10, 185)}, r"sizes must be .* in 1\.\.184 \(all edges\), got \[10, 185\]"),
        ({"sizes": ()}, "sizes must be one or more numbers"),
        ({"draws": 0}, "draws must be at least 1, got 0"),
        ({"attribution": found.drop_vars("edge")}, "must have the variable 'edge'"),
        ({"clean": clean[:1]}, "same shape"),
    ):
        arguments = {"attribution": found, "clean": clean, "corrupted": corrupted}
        with pytest.raises(ValueError, match=message):
            measure_faithfulness(model, **{**arguments, "metric": metric, **changes})
