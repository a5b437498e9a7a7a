from dataclasses import replace

import numpy as np
import pytest

from studies.engine import TrainedIf
from studies.engine.fairness import assess, late_gain
from studies.engine.scoring import training_dataset
from tests.studies.engine.synthetic import result_of
from tests.studies.engine.toy import TOY


def cells(**columns):
    return [
        {"model": m, "rate": rate, "seed": s, "id": 0.9 - abs(rate - best), "ood": 0.5}
        for m, best in (("a", 0.2), ("b", 0.4))
        for rate in (0.1, 0.2, 0.4)
        for s in range(2)
    ]


def test_a_condition_has_the_values_that_were_tried_and_whether_the_best_lies_at_their_edge():
    data = assess(result_of(cells(), tuned=("rate",)), None).data
    assert data["values_tried"].to_numpy().tolist() == [3, 3]
    assert data["at_edge"].to_numpy().tolist() == [0, 1]
    assert data["n_seeds"].to_numpy().tolist() == [2, 2]
    assert data["trained"].to_numpy().tolist() == [-1, -1]
    assert data["label"].to_numpy().tolist() == ["a", "b"]


def test_without_tuned_settings_rates_make_conditions():
    data = assess(result_of(cells()), None).data
    assert data["values_tried"].to_numpy().tolist() == [1] * 6
    assert data["at_edge"].to_numpy().tolist() == [0] * 6


@pytest.mark.parametrize(
    ("better", "bound", "expected"),
    [("higher", 0.5, [1, 0]), ("lower", 0.5, [0, 1]), ("higher", 0.1, [1, 1])],
)
def test_trained_is_as_good_as_the_bound_in_distribution(better, bound, expected):
    some = [
        {"model": m, "seed": s, "id": value + 0.1 * s, "ood": 1 - value}
        for m, value in (("a", 0.8), ("b", 0.2))
        for s in range(2)
    ]
    data = assess(result_of(some, better=better), TrainedIf(reaches=bound)).data
    assert data["trained"].to_numpy().tolist() == expected


def test_trained_can_be_a_share_of_a_reference():
    some = [{"model": "a", "seed": 0, "id": 0.35, "ood": 0.0}]
    for share, expected in ((3.0, 1), (4.0, 0)):
        bound = TrainedIf(reaches=share, share_of="chance")
        assert assess(result_of(some), bound).data["trained"].item() == expected


def test_costs_and_success_are_those_of_the_models_with_the_chosen_settings():
    some = [
        {"model": "a", "rate": rate, "seed": s, "id": right, "ood": 0.5, "parameters": n}
        for rate, right, n in ((0.1, 0.9, 100), (0.2, 0.1, 300))
        for s in range(2)
    ]
    data = assess(result_of(some, tuned=("rate",)), TrainedIf(reaches=0.8)).data
    assert data["parameters"].item() == 100
    assert data["trained"].item() == 1
    # 100 updates of 8.
    assert (data["updates"].item(), data["examples"].item()) == (100, 800)


@pytest.mark.parametrize(
    ("values", "gain"),
    [
        ([0.0, 0.5, 0.9, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0], 0.0),
        ([0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9], 2 / 9),
        ([0.5, 0.4, 0.3, 0.2, 0.1], 0.0),
        ([0.0, 1.0, np.nan, np.nan], 1.0),
        ([0.3], np.nan),
    ],
)
def test_late_gain_is_the_share_of_the_last_fifth(values, gain):
    np.testing.assert_allclose(late_gain(np.array(values)), gain)


def test_training_that_stopped_where_it_may_was_not_cut_off():
    log = [
        {"step": 10 * n, "loss": 1.0, "learning_rate": 0.1, "seconds": 1.0, "id/accuracy": n / 4}
        for n in range(1, 4)
    ]
    for stop_at, gain in ((None, 0.5), (0.7, 0.0)):
        training = replace(TOY.setup.training, stop_at=stop_at)
        found = training_dataset(replace(TOY.setup, training=training), log)
        assert found["late_gain"] == pytest.approx(gain)


def test_what_still_improves_is_said():
    some = [{"model": m, "seed": 0, "id": 0.5, "ood": 0.5} for m in "ab"]
    data = assess(result_of(some, late_gain=[0.3, 0.01]), None).data
    assert data["still_improving"].to_numpy().tolist() == [1, 0]
