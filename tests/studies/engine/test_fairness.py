from dataclasses import replace

import numpy as np
import pytest

from studies.engine import TrainedIf
from studies.engine.fairness import assess, late_gain
from studies.engine.scoring import training_dataset
from tests.studies.engine.synthetic import result_of
from tests.studies.engine.toy import TOY


def cells_with_rates():
    """Two models at three learning rates; the best rate of `b` is the largest."""
    return [
        {"model": m, "rate": rate, "seed": s, "id": 0.9 - abs(rate - best), "ood": 0.5}
        for m, best in (("a", 0.2), ("b", 0.4))
        for rate in (0.1, 0.2, 0.4)
        for s in range(2)
    ]


def test_conditions_have_the_number_of_tuned_values_and_whether_the_best_is_at_the_edge():
    data = assess(result_of(cells_with_rates(), tuned=("rate",)), None).data
    assert data["values_tried"].to_numpy().tolist() == [3, 3]
    assert data["at_edge"].to_numpy().tolist() == [0, 1]
    assert data["n_seeds"].to_numpy().tolist() == [2, 2]
    assert data["trained"].to_numpy().tolist() == [-1, -1]
    assert data["label"].to_numpy().tolist() == ["a", "b"]


def test_values_that_are_as_good_as_the_chosen_one_are_counted():
    """Two rates of `a` are perfect for all seeds that both have; of `b` one is, on average."""
    right = {("a", 0.1): [1, 1], ("a", 0.2): [1, 1], ("b", 0.1): [0.9, 0.9], ("b", 0.2): [1, 0.9]}
    cells = [
        {"model": m, "rate": rate, "seed": s, "id": value, "ood": 0.5}
        for (m, rate), values in right.items()
        for s, value in enumerate(values)
    ] + [{"model": "a", "rate": 0.1, "seed": 2, "id": 0.5, "ood": 0.5}]
    data = assess(result_of(cells, tuned=("rate",)), None).data
    assert data["values_tied"].to_numpy().tolist() == [2, 1]


def test_a_tuned_setting_that_does_not_apply_is_one_value():
    without = [{"model": "c", "rate": None, "seed": s, "id": 0.5, "ood": 0.5} for s in range(5)]
    data = assess(result_of(cells_with_rates() + without, tuned=("rate",)), None).data
    assert data["values_tried"].to_numpy().tolist() == [3, 3, 1]


def test_a_rate_whose_metric_is_not_a_number_is_not_chosen():
    cells = [cell | ({"id": np.nan} if cell["rate"] == 0.1 else {}) for cell in cells_with_rates()]
    data = assess(result_of(cells, tuned=("rate",)), None).data
    assert data["at_edge"].to_numpy().tolist() == [0, 1]


@pytest.mark.parametrize(("better", "chosen"), [("higher", 0.4), ("lower", 0.1)])
def test_the_best_rate_is_that_with_the_better_metric(better, chosen):
    cells = [
        {"model": "a", "rate": rate, "seed": s, "id": rate, "ood": 0.5}
        for rate in (0.1, 0.2, 0.4)
        for s in range(2)
    ]
    scores = result_of(cells, tuned=("rate",), better=better)["scores"]
    assert set(scores["rate"].values[scores["chosen"].values == 1]) == {chosen}


def test_further_seeds_of_the_two_best_rates_decide_between_them():
    """By the seeds that all rates have the first is best, by those of the two best the second."""
    values = {0.1: [0.9, 0.1, 0.1], 0.2: [0.8, 0.7, 0.7], 0.4: [0.2]}
    cells = [
        {"model": "a", "rate": rate, "seed": s, "id": value, "ood": 0.5}
        for rate, of_rate in values.items()
        for s, value in enumerate(of_rate)
    ]
    scores = result_of(cells, tuned=("rate",))["scores"]
    assert set(scores["rate"].values[scores["chosen"].values == 1]) == {0.2}


def test_each_rate_is_a_condition_if_it_is_not_tuned():
    data = assess(result_of(cells_with_rates()), None).data
    assert data["values_tried"].to_numpy().tolist() == [1] * 6
    assert data["at_edge"].to_numpy().tolist() == [0] * 6


@pytest.mark.parametrize(
    ("better", "bound", "expected"),
    [("higher", 0.5, [1, 0]), ("lower", 0.5, [0, 1]), ("higher", 0.1, [1, 1])],
)
def test_a_condition_is_trained_if_it_reaches_the_bound_in_distribution(better, bound, expected):
    cells = [
        {"model": m, "seed": s, "id": value + 0.1 * s, "ood": 1 - value}
        for m, value in (("a", 0.8), ("b", 0.2))
        for s in range(2)
    ]
    data = assess(result_of(cells, better=better), TrainedIf(reaches=bound)).data
    assert data["trained"].to_numpy().tolist() == expected


def test_the_bound_can_be_a_multiple_of_a_reference():
    cells = [{"model": "a", "seed": 0, "id": 0.35, "ood": 0.0}]
    for share, expected in ((3.0, 1), (4.0, 0)):
        bound = TrainedIf(reaches=share, share_of="chance")
        assert assess(result_of(cells), bound).data["trained"].item() == expected


def test_without_the_split_nothing_is_judged():
    cells = [{"model": "a", "seed": 0, "id": 0.9, "ood": 0.1}]
    trained = {
        split: assess(result_of(cells), TrainedIf(split=split, reaches=0.5)).data["trained"].item()
        for split in ("id", "ood", "test")
    }
    assert trained == {"id": 1, "ood": 0, "test": -1}


def test_costs_and_training_are_judged_on_the_chosen_settings():
    cells = [
        {"model": "a", "rate": rate, "seed": s, "id": right, "ood": 0.5, "parameters": n}
        for rate, right, n in ((0.1, 0.9, 100), (0.2, 0.1, 300))
        for s in range(2)
    ]
    data = assess(result_of(cells, tuned=("rate",)), TrainedIf(reaches=0.8)).data
    assert data["parameters"].item() == 100
    assert data["trained"].item() == 1
    # 100 updates with 8 examples each.
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
def test_late_gain_is_the_share_of_improvement_in_the_last_fifth(values, gain):
    np.testing.assert_allclose(late_gain(np.array(values)), gain)


def test_training_that_reached_stop_at_has_no_late_gain():
    log = [
        {"step": 10 * n, "loss": 1.0, "learning_rate": 0.1, "seconds": 1.0, "id/accuracy": n / 4}
        for n in range(1, 4)
    ]
    for stop_at, gain in ((None, 0.5), (0.7, 0.0)):
        training = replace(TOY.setup.training, stop_at=stop_at)
        training_data = training_dataset(replace(TOY.setup, training=training), log)
        assert training_data["late_gain"] == pytest.approx(gain)


def test_conditions_that_still_improve_are_marked():
    cells = [{"model": m, "seed": 0, "id": 0.5, "ood": 0.5} for m in "ab"]
    data = assess(result_of(cells, late_gain=[0.3, 0.01]), None).data
    assert data["still_improving"].to_numpy().tolist() == [1, 0]
