import json
from dataclasses import replace

import numpy as np
import pytest
import xarray as xr
from scipy import stats

from studies.claims.coda import raised
from studies.engine import Claim, Metric, TrainedIf, above_least, metric, read
from studies.engine.claims import judge
from studies.engine.fairness import assess
from tests.studies.engine.synthetic import result_of, two_models

BETTER = Claim(
    statement="a is better than b",
    source="ours",
    reading=metric("accuracy", "ood"),
    of={"model": "a"},
    exceeds={"model": "b"},
)


PERFECT = {"accuracy": Metric("right answers", best=1.0)}


def judged(result, *claims, trained=None, metrics=None):
    return judge(result, claims or (BETTER,), assess(result, trained), metrics)


def verdicts(result, *claims, trained=None):
    return judged(result, *claims, trained=trained)["verdict"].to_numpy().tolist()


def test_a_clear_difference_over_seeds_holds_and_the_reverse_is_contradicted():
    high, low = [0.80, 0.82, 0.81], [0.50, 0.53, 0.51]
    assert verdicts(two_models(high, low)) == ["holds"]
    assert verdicts(two_models(low, high)) == ["contradicted"]


@pytest.mark.parametrize(
    ("bounded", "verdict", "reverse", "alike"),
    [
        # The better one may be better still, and the worse one as good.
        ("a", "holds", "not comparable", "not comparable"),
        ("b", "not comparable", "contradicted", "not comparable"),
        (None, "holds", "contradicted", "contradicted"),
    ],
)
def test_true_values_above_lower_bounds_could_not_turn_a_verdict_round(
    bounded, verdict, reverse, alike
):
    def at_least(result):
        # A single one of them suffices.
        cells = result["scores"]
        return ((cells["model"] == bounded) & (cells["seed"] == 1)).to_numpy()

    reading = replace(metric("accuracy", "ood"), at_least=at_least)
    more = Claim("A is better", "P", reading, {"model": "a"}, {"model": "b"})
    same = replace(more, exceeds=None, equals={"model": "b"}, margin=0.1)
    high, low = [0.80, 0.82, 0.81], [0.50, 0.53, 0.51]
    assert verdicts(two_models(high, low), more, same) == [verdict, alike]
    assert verdicts(two_models(low, high), more) == [reverse]
    if bounded:
        reason = judged(two_models(low, high), same)["reason"].item()
        assert reason == f"{bounded} has no more than a lower bound"


@pytest.mark.parametrize(
    ("better", "below", "above"),
    [
        # What still improves may come to a number above it, or to one below.
        ("higher", "not comparable", "holds"),
        ("lower", "contradicted", "not comparable"),
    ],
)
def test_what_still_improves_may_come_to_a_number(better, below, above):
    metrics = {"accuracy": Metric("m", better=better)}
    reached = replace(BETTER, exceeds=0.7)

    def verdict(values, claim=reached, late_gain=0.05):
        cells = [{"model": "a", "seed": s, "id": 0, "ood": v} for s, v in enumerate(values)]
        result = result_of(cells, better=better, late_gain=late_gain)
        return judged(result, claim, metrics=metrics)["verdict"].item()

    low, high = [0.60, 0.62, 0.61], [0.80, 0.83, 0.81]
    assert verdict(low) == below
    assert verdict(high) == above
    # Neither training to the end nor a thing that is no metric says so.
    assert verdict(low, late_gain=0.0) == "contradicted"
    assert verdict(high, late_gain=0.0) == "holds"
    other = replace(reached, reading=replace(reached.reading, metric=None))
    assert (verdict(low, other), verdict(high, other)) == ("contradicted", "holds")
    # A margin moves the number.
    assert verdict(low, replace(reached, margin=-0.2)) == above
    # With as many steps, one condition is better than another all the same.
    two = result_of(
        [
            {"model": m, "seed": s, "id": 0, "ood": v}
            for m, values in (("a", low), ("b", high))
            for s, v in enumerate(values)
        ],
        better=better,
        late_gain=0.05,
    )
    assert judged(two, metrics=metrics)["verdict"].item() == "contradicted"


def test_a_single_seed_never_decides_a_claim():
    claims = judged(two_models([0.99], [0.01]))
    assert claims["verdict"].item() == "undecided"
    assert np.isnan(claims["effect_low"].item())
    assert claims["effect"].item() == pytest.approx(0.98)


def test_two_seeds_never_decide_a_claim_even_if_they_agree():
    claims = judged(two_models([0.99, 0.99], [0.01, 0.01]))
    assert claims["verdict"].item() == "undecided"
    assert claims["p"].item() == 0
    assert claims["seeds_needed"].item() == 3


def test_a_difference_within_the_spread_is_undecided_and_reports_the_seeds_needed():
    a, b = [0.60, 0.70, 0.62], [0.59, 0.63, 0.64]
    claims = judged(two_models(a, b))
    assert claims["verdict"].item() == "undecided"
    differences = np.subtract(a, b)
    needed = int(claims["seeds_needed"].item())

    def decides(n):
        standard_error = differences.std(ddof=1) / np.sqrt(n)
        return differences.mean() > stats.t.isf(0.025, n - 1) * standard_error

    assert decides(needed)
    assert not decides(needed - 1)


def test_effect_and_interval_agree_with_scipys_paired_t_test():
    a, b = np.array([0.9, 0.5, 0.7, 0.3]), np.array([0.85, 0.44, 0.66, 0.24])
    claims = judged(two_models(a, b))
    interval = stats.ttest_rel(a, b).confidence_interval(0.95)
    assert claims["effect"].item() == pytest.approx((a - b).mean())
    assert claims["effect_low"].item() == pytest.approx(interval.low)
    assert claims["effect_high"].item() == pytest.approx(interval.high)
    assert claims["p"].item() == pytest.approx(stats.ttest_rel(a, b).pvalue)
    # The spread over seeds is much larger than the difference: only a paired test detects it.
    assert claims["verdict"].item() == "holds"
    assert stats.ttest_ind(a, b).pvalue > 0.5


def test_cells_are_paired_by_seed():
    cells = [
        {"model": model, "seed": seed, "id": 1, "ood": value}
        for model, seed, value in (
            ("a", 0, 0.9), ("a", 1, 0.5), ("a", 2, 0.1), ("b", 2, 0.05), ("b", 0, 0.8),
        )
    ]  # fmt: skip
    claims = judged(result_of(cells))
    assert claims["n_pairs"].item() == 2
    assert claims["effect"].item() == pytest.approx(0.075)


def test_pairs_with_a_nan_are_left_out():
    claims = judged(two_models([0.80, 0.82, np.nan, 0.81], [0.50, 0.53, 0.99, 0.51]))
    assert claims["n_pairs"].item() == 3
    assert claims["verdict"].item() == "holds"


def test_cells_are_also_paired_by_draws_of_the_data():
    cells = [
        {"model": model, "seed": seed, "draw": draw, "id": 1,
         "ood": 0.1 * draw + 0.01 * (model == "a")}
        for model in "ab"
        for seed in range(2)
        for draw in range(3)
    ]  # fmt: skip
    claims = judged(result_of(cells, pairs=("seed", "draw")))
    assert claims["n_pairs"].item() == 6
    assert claims["verdict"].item() == "holds"


def test_the_difference_must_exceed_the_margin():
    result = two_models([0.60, 0.61, 0.62], [0.50, 0.51, 0.52])
    assert verdicts(result, replace(BETTER, margin=0.05)) == ["holds"]
    assert verdicts(result, replace(BETTER, margin=0.15)) == ["contradicted"]


def test_with_a_negative_margin_a_little_less_is_not_worse():
    result = two_models([0.50, 0.51, 0.52], [0.51, 0.52, 0.53])
    assert verdicts(result, replace(BETTER, margin=-0.05)) == ["holds"]
    assert verdicts(result, replace(BETTER, margin=-0.005)) == ["contradicted"]
    assert verdicts(result) == ["contradicted"]
    noisy = two_models([0.30, 0.60, 0.50], [0.51, 0.50, 0.40])
    assert verdicts(noisy, replace(BETTER, margin=-0.05)) == ["undecided"]


def test_a_condition_can_be_compared_with_a_number():
    result = two_models([0.60, 0.61, 0.62], [0.50, 0.51, 0.52])
    assert verdicts(result, replace(BETTER, exceeds=0.5)) == ["holds"]
    assert verdicts(result, replace(BETTER, exceeds=0.7)) == ["contradicted"]


def test_a_difference_too_small_to_count_contradicts_a_claim_of_more():
    a, b = [0.603, 0.609, 0.620, 0.611], [0.600, 0.610, 0.615, 0.612]
    result = two_models(a, b)
    assert verdicts(result) == ["undecided"]
    claims = judged(result, metrics=PERFECT)
    # A tenth of the wrong answers, of which there are 4 in 10.
    assert claims["least"].item() == pytest.approx(0.1 * np.subtract(1, b).mean())
    assert claims["verdict"].item() == "contradicted"
    below = np.subtract(a, b) - 0.1 * np.subtract(1, b)
    assert claims["p"].item() == pytest.approx(stats.ttest_1samp(below, 0).pvalue)


def test_a_small_difference_that_is_there_holds():
    result = two_models([0.605, 0.606, 0.607], [0.600, 0.601, 0.602])
    claims = judged(result, metrics=PERFECT)
    assert claims["effect"].item() < claims["least"].item()
    assert claims["verdict"].item() == "holds"


def test_a_difference_that_may_be_of_a_size_that_counts_is_undecided():
    spread = two_models([0.75, 0.66, 0.60], [0.60, 0.61, 0.62])
    claims = judged(spread, metrics=PERFECT)
    assert claims["verdict"].item() == "undecided"
    assert claims["seeds_needed"].item() == judged(spread)["seeds_needed"].item()
    # Fewer show that it is too small than that it is there.
    alike = two_models([0.60, 0.68, 0.55, 0.62], [0.60, 0.61, 0.62, 0.63])
    claims = judged(alike, metrics=PERFECT)
    assert claims["verdict"].item() == "undecided"
    assert claims["seeds_needed"].item() < judged(alike)["seeds_needed"].item()


def test_where_little_is_right_a_small_difference_counts():
    result = two_models([0.012, 0.011, 0.010], [0.010, 0.011, 0.011])
    claims = judged(result, metrics=PERFECT)
    assert claims["least"].item() == pytest.approx(0.1 * (0.010 + 0.011 + 0.011) / 3)
    assert claims["verdict"].item() == "undecided"


def test_where_lower_is_better_a_tenth_of_the_larger_counts():
    lower = {"accuracy": Metric("error", "lower", best=0.0)}
    result = two_models([0.204, 0.203, 0.199], [0.200, 0.201, 0.202])
    claims = judged(result, metrics=lower)
    assert claims["least"].item() == pytest.approx(0.0202)
    assert claims["verdict"].item() == "contradicted"


def test_differences_count_whatever_their_size_with_a_margin_a_number_or_no_best_value():
    result = two_models([0.603, 0.609, 0.620, 0.611], [0.600, 0.610, 0.615, 0.612])
    for claim in (replace(BETTER, margin=0.001), replace(BETTER, exceeds=0.61)):
        claims = judged(result, claim, metrics=PERFECT)
        assert claims["verdict"].item() == "undecided"
        assert np.isnan(claims["least"].item())
    unbounded = {"accuracy": Metric("right answers")}
    assert judged(result, metrics=unbounded)["verdict"].item() == "undecided"
    gain = replace(BETTER, reading=metric("accuracy", "ood") - metric("accuracy", "id"))
    assert np.isnan(judged(result, gain, metrics=PERFECT)["least"].item())


def test_equality_needs_a_difference_within_the_margin():
    same = replace(BETTER, exceeds=None, equals={"model": "b"}, margin=0.05)
    assert verdicts(two_models([0.50, 0.51, 0.52], [0.51, 0.515, 0.52]), same) == ["holds"]
    different = [0.80, 0.81, 0.82], [0.51, 0.52, 0.52]
    assert verdicts(two_models(*different), same) == ["contradicted"]
    assert verdicts(two_models(*reversed(different)), same) == ["contradicted"]
    assert verdicts(two_models([0.50, 0.60, 0.50], [0.51, 0.50, 0.60]), same) == ["undecided"]


def test_each_value_of_another_coordinate_is_a_comparison_of_its_own():
    cells = [
        {"model": model, "width": width, "seed": seed, "id": 1,
         "ood": 0.01 * seed + (0.2 if (model == "a") == (width == 8) else 0.0)}
        for model in "ab" for width in (8, 16) for seed in range(3)
    ]  # fmt: skip
    claims = judged(result_of(cells))
    assert claims["context"].to_numpy().tolist() == ["width 8", "width 16"]
    assert claims["verdict"].to_numpy().tolist() == ["holds", "contradicted"]


def test_a_model_to_which_a_setting_does_not_apply_is_compared_at_all_its_values():
    cells = [
        {"model": "a", "width": width, "seed": s, "id": 1, "ood": 0.5 + width / 100 + s / 1000}
        for width in (8, 16) for s in range(3)
    ]  # fmt: skip
    cells += [{"model": "b", "width": None, "seed": s, "id": 1, "ood": 0.6} for s in range(3)]
    claims = judged(result_of(cells))
    assert claims["context"].to_numpy().tolist() == ["width 8", "width 16"]
    assert claims["verdict"].to_numpy().tolist() == ["contradicted", "holds"]


def test_claims_about_conditions_or_metrics_that_were_not_run_say_so():
    result = two_models([0.5, 0.6, 0.7], [0.1, 0.2, 0.3])
    assert verdicts(result, replace(BETTER, exceeds={"model": "c"})) == ["not run"]
    assert verdicts(result, replace(BETTER, reading=metric("accuracy", "far"))) == ["not run"]


def test_untrained_conditions_are_not_compared():
    cells = [
        {"model": m, "seed": s, "id": 0.9 if m == "a" else 0.4, "ood": 0.8 if m == "a" else 0.1}
        for m in "ab" for s in range(3)
    ]  # fmt: skip
    claims = judged(result_of(cells), trained=TrainedIf(reaches=0.5))
    assert claims["verdict"].item() == "not comparable"
    assert claims["reason"].item() == "b is not trained"
    learning = replace(BETTER, reading=metric("accuracy", "id"), of_learning=True)
    assert verdicts(result_of(cells), learning, trained=TrainedIf(reaches=0.5)) == ["holds"]
    assert verdicts(result_of(cells), trained=TrainedIf(reaches=0.3)) == ["holds"]


@pytest.mark.parametrize(
    ("of_b", "expected"), [(0.4, "not comparable"), (0.6, "holds"), (0.95, "contradicted")]
)
def test_where_no_side_has_learned_the_answers_there_is_nothing_to_compare(of_b, expected):
    of_a = 0.4 if of_b == 0.4 else 0.8
    cells = [
        {"model": m, "seed": s, "id": value, "ood": value + 0.01 * s * (m == "a")}
        for m, value in (("a", of_a), ("b", of_b))
        for s in range(3)
    ]
    claim = replace(BETTER, of_learning=True, trained=TrainedIf(reaches=0.7))
    claims = judged(result_of(cells), claim)
    assert claims["verdict"].item() == expected
    assert claims["reason"].item() == ("no side has learned all" if of_b == 0.4 else "")
    # A preset may lack the split.
    elsewhere = replace(claim, trained=TrainedIf(split="far", reaches=0.7))
    assert verdicts(result_of(cells), elsewhere) != ["not comparable"]


def test_unequally_tuned_conditions_are_not_compared():
    cells = [
        {"model": "a", "rate": rate, "seed": s, "id": 0.9 - rate, "ood": 0.8}
        for rate in (0.1, 0.2) for s in range(3)
    ]  # fmt: skip
    cells += [{"model": "b", "rate": 0.1, "seed": s, "id": 0.9, "ood": 0.1} for s in range(3)]
    claims = judged(result_of(cells, tuned=("rate",)))
    assert claims["verdict"].item() == "not comparable"
    assert claims["reason"].item() == "tuned unequally: 2 against 1 settings"
    learning = replace(BETTER, of_learning=True)
    assert verdicts(result_of(cells, tuned=("rate",)), learning) == ["not comparable"]


def test_tuned_settings_are_chosen_by_the_selecting_metric_and_not_by_the_claims_reading():
    cells = [
        {"model": m, "rate": rate, "seed": s, "id": 0.5, "validation": v, "ood": ood}
        for m, rate, v, ood in (
            ("a", 0.1, 0.9, 0.3), ("a", 0.2, 0.7, 0.9), ("b", 0.1, 0.6, 0.2), ("b", 0.2, 0.8, 0.5),
        )
        for s in range(3)
    ]  # fmt: skip
    claims = judged(result_of(cells, tuned=("rate",)))
    assert claims["effect"].item() == pytest.approx(0.3 - 0.5)
    assert claims["verdict"].item() == "contradicted"


@pytest.mark.parametrize(("better", "chosen"), [("higher", 0.2), ("lower", 0.1)])
def test_tuned_settings_are_chosen_by_the_mean_over_seeds(better, chosen):
    """The single best seed has the other value."""
    validation = {0.1: (0.1, 0.9, 0.2), 0.2: (0.5, 0.6, 0.55)}
    if better == "lower":
        validation = {0.1: (0.5, 0.6, 0.55), 0.2: (0.1, 0.9, 0.9)}
    cells = [
        {"model": "a", "rate": rate, "seed": s, "id": 0.5, "validation": v, "ood": rate}
        for rate, values in validation.items()
        for s, v in enumerate(values)
    ]
    result = result_of(cells, tuned=("rate",), better=better)
    claims = judged(result, replace(BETTER, exceeds=0.0))
    assert claims["effect"].item() == pytest.approx(chosen)
    assert claims["n_pairs"].item() == 3


@pytest.mark.parametrize(
    ("validation", "chosen"),
    [
        # With further seeds of the best alone its mean is below that of the other value.
        ({0.1: (0.5, 0.6, 0.55), 0.2: (0.6, 0.7, 0.65, 0.1, 0.1)}, 0.2),
        # Those of the two best decide between them: the seeds that all have would choose 0.2.
        ({0.1: (0.5, 0.4), 0.2: (0.7, 0.6, 0.1, 0.2), 0.3: (0.6, 0.6, 0.6, 0.6)}, 0.3),
    ],
)
def test_tuned_values_are_compared_over_the_seeds_that_both_have(validation, chosen):
    cells = [
        {"model": "a", "rate": rate, "seed": s, "id": 0.5, "validation": v, "ood": rate}
        for rate, values in validation.items()
        for s, v in enumerate(values)
    ]
    claims = judged(result_of(cells, tuned=("rate",)), replace(BETTER, exceeds=0.0))
    assert claims["effect"].item() == pytest.approx(chosen)
    assert claims["n_pairs"].item() == len(validation[chosen])


def test_p_values_are_corrected_for_the_number_of_claims():
    result = two_models([0.60, 0.62, 0.61, 0.66], [0.55, 0.58, 0.59, 0.57])
    alone = judged(result)
    assert alone["verdict"].item() == "holds"
    assert 0.01 < alone["p"].item() < 0.05
    others = [replace(BETTER, statement=f"claim {k}", exceeds=0.611 + k / 1000) for k in range(10)]
    together = judged(result, BETTER, *others)
    assert together["verdict"].to_numpy()[0] == "undecided"
    assert together["p_holm"].to_numpy()[0] > alone["p"].item()


@pytest.mark.parametrize("source", ["ours", "ours, after another paper"])
def test_claims_of_ours_do_not_change_what_is_said_of_a_paper(source):
    result = two_models([0.60, 0.62, 0.61, 0.66], [0.55, 0.58, 0.59, 0.57])
    ours = [
        replace(BETTER, statement=f"claim {k}", exceeds=0.611 + k / 1000, source=source)
        for k in range(10)
    ]
    papers = replace(BETTER, source="a paper")
    alone, together = judged(result, papers), judged(result, papers, *ours)
    for name in ("verdict", "p_holm", "seeds_needed"):
        np.testing.assert_array_equal(together[name][:1], alone[name])
    of_ours = judged(result, *ours)
    for name in ("verdict", "p_holm", "seeds_needed"):
        np.testing.assert_array_equal(together[name][1:], of_ours[name])


def test_a_claim_needs_more_seeds_if_there_are_other_claims():
    result = two_models([0.60, 0.70, 0.62], [0.59, 0.63, 0.64])
    alone = judged(result)["seeds_needed"].item()
    others = [replace(BETTER, statement=f"claim {k}", exceeds=0.6 + k / 100) for k in range(4)]
    assert judged(result, BETTER, *others)["seeds_needed"].to_numpy()[0] > alone


def test_the_family_wise_error_rate_is_at_most_five_percent():
    """Without an effect, at most one study in twenty has a decided claim."""
    rng = np.random.default_rng(0)
    claims = [replace(BETTER, statement=f"{k}", of={"model": f"a{k}"}) for k in range(3)]
    decided = 0
    for _ in range(80):
        models = ("a0", "a1", "a2", "b")
        cells = [
            {"model": m, "seed": s, "id": 1, "ood": rng.normal()} for m in models for s in range(4)
        ]
        decided += any(v != "undecided" for v in verdicts(result_of(cells), *claims))
    assert decided <= 9


def test_differences_without_spread_are_decided_unless_they_are_zero():
    assert verdicts(two_models([1.0, 1.0, 1.0], [0.125, 0.125, 0.125])) == ["holds"]
    assert verdicts(two_models([1.0, 1.0], [1.0, 1.0])) == ["undecided"]


def test_what_is_perfect_on_both_sides_is_no_test_of_which_is_better():
    alike = two_models([1.0, 1.0, 1.0], [1.0, 1.0, 1.0])
    found = judged(alike)
    assert found["verdict"].item() == "not comparable"
    assert found["reason"].item() == "no pair differs"
    # It shows that they are as good as one another.
    assert verdicts(alike, replace(BETTER, margin=-0.01)) == ["holds"]
    equal = replace(BETTER, exceeds=None, equals={"model": "b"}, margin=0.01)
    assert judged(alike, equal, metrics=PERFECT)["verdict"].item() == "holds"


NOTHING_GAINED = replace(BETTER, margin=-0.01, no_gain=True)


def test_that_nothing_is_gained_needs_room_for_a_gain():
    perfect, near = [0.999, 0.998, 0.999], [0.997, 0.999, 0.998]
    found = judged(two_models(perfect, near), NOTHING_GAINED, metrics=PERFECT)
    assert found["verdict"].item() == "not comparable"
    assert found["reason"].item() == "no room for the gain: it takes 1.009, the best is 1"
    room = two_models(*(np.subtract(side, 0.01) for side in (perfect, near)))
    assert judged(room, NOTHING_GAINED, metrics=PERFECT)["verdict"].item() == "holds"
    # Without a best value nothing is known, and that one is as good as the other needs no room.
    assert verdicts(two_models(perfect, near), NOTHING_GAINED) == ["holds"]
    as_good = replace(BETTER, margin=-0.01)
    assert judged(two_models(perfect, near), as_good, metrics=PERFECT)["verdict"].item() == "holds"


def test_that_nothing_is_gained_needs_room_where_lower_is_better():
    error = {"accuracy": Metric("error", "lower", best=0.0)}
    worse, perfect = [0.053, 0.051, 0.052], [0.001, 0.002, 0.001]
    # The worse side exceeds: what may gain is named first, and over what it does second.
    found = judged(two_models(worse, perfect), NOTHING_GAINED, metrics=error)
    assert found["verdict"].item() == "not comparable"
    room = two_models(*(np.add(side, 0.01) for side in (worse, perfect)))
    assert judged(room, NOTHING_GAINED, metrics=error)["verdict"].item() == "holds"


@pytest.mark.parametrize("other", ["exceeds", "equals"])
def test_a_gain_beyond_the_best_value_is_no_prediction(other):
    good, best = [0.95, 0.96, 0.97], [0.99, 0.98, 0.985]
    if other == "exceeds":
        claim = replace(BETTER, margin=0.1)
    else:
        reading = raised(BETTER.reading, "b", 0.1)
        claim = replace(BETTER, reading=reading, exceeds=None, equals=BETTER.exceeds, margin=0.02)
    found = judged(two_models(best, good), claim, metrics=PERFECT)
    assert found["verdict"].item() == "not comparable"
    lower = two_models(*(np.subtract(side, 0.3) for side in (best, good)))
    assert judged(lower, claim, metrics=PERFECT)["verdict"].item() == "contradicted"


def test_that_nothing_is_gained_needs_a_negative_margin():
    with pytest.raises(ValueError, match=r"less than 0 with no_gain, got 0\.1"):
        replace(NOTHING_GAINED, margin=0.1)


def test_readings_are_added_subtracted_and_divided():
    result = two_models([0.6], [0.3])
    ood, within = metric("accuracy", "ood"), metric("accuracy", "id")
    np.testing.assert_allclose((ood - within).values(result), [-0.3, -0.6])
    np.testing.assert_allclose((ood / 3 + 1.0).values(result), [1.2, 1.1])
    np.testing.assert_allclose((1 - ood).values(result), [0.4, 0.7])
    assert (1 - ood).label == f"1 - {ood.label}"
    message = "select and mean must name split of scores/accuracy, got group"
    with pytest.raises(ValueError, match=message):
        read("scores", "accuracy", group="all").values(result)


def test_apply_calls_a_function_with_the_values_of_each_reading():
    result = two_models([0.6], [0.2])
    ood, within = metric("accuracy", "ood"), metric("accuracy", "id")
    clipped = ood.apply(np.clip, 0.25, within / 2)
    assert clipped.label == f"{ood.label}, 0.25, {within.label} / 2"
    np.testing.assert_allclose(clipped.values(result), [0.45, 0.25])


def test_sizes_are_compared_at_the_same_seed_and_other_settings():
    values = {(4, "a", 0): 0.1, (8, "a", 0): 0.2, (16, "a", 0): 0.5, (16, "a", 1): 0.9}
    values |= {(4, "b", 0): 0.3, (16, "b", 0): 0.4, (None, "c", 0): 0.7}
    rows = [
        {"width": width, "model": model, "seed": seed, "id": 0.9, "ood": ood}
        for (width, model, seed), ood in values.items()
    ]
    result = result_of(rows)
    found = above_least(metric("accuracy", "ood"), "width").values(result)
    nan = np.nan
    np.testing.assert_allclose(found, [nan, nan, 0.4, nan, nan, 0.1, nan])
    same = result_of([row | {"width": 4} for row in rows[:1]])
    for axis in ("width", "depth"):
        assert np.isnan(above_least(metric("accuracy", "ood"), axis).values(same)).all()


def test_a_reading_among_some_models_is_nan_for_the_others():
    result = two_models([0.6, 0.2], [0.3, 0.4])
    result.attrs["config"] = json.dumps({"setup": {"n_layers": 2}})
    ood = metric("accuracy", "ood")
    is_a = result["scores"]["model"].to_numpy() == "a"
    assert is_a.sum() == 2
    of_a = ood.among(["a"]).values(result)
    np.testing.assert_array_equal(of_a, np.where(is_a, ood.values(result), np.nan))
    # The value of a setting that is not an axis is in the setup.
    np.testing.assert_array_equal(ood.among(["a"], n_layers=2).values(result), of_a)
    assert np.isnan(ood.among(["a"], n_layers=1).values(result)).all()
    of_seed = np.where(result["scores"]["seed"] == 1, of_a, np.nan)
    np.testing.assert_array_equal(ood.among(["a"], seed=1).values(result), of_seed)
    with pytest.raises(KeyError, match="n_heads"):
        ood.among(["a"], n_heads=2).values(result)


@pytest.mark.parametrize(
    ("setting", "width", "verdict"),
    [(8, 8, "holds"), (8, 16, "not run"), (None, None, "holds"), (None, 8, "not run")],
)
def test_claims_can_name_settings_that_a_result_does_not_vary(setting, width, verdict):
    result = two_models([0.80, 0.82, 0.81], [0.50, 0.53, 0.51])
    result.attrs["config"] = json.dumps({"setup": {"task": {"width": setting}}})
    assert verdicts(result, replace(BETTER, of={"model": "a", "width": width})) == [verdict]


def test_a_setting_that_follows_from_another_is_not_that_of_the_study():
    """Some cells may have another value than the setup; no coordinate says which."""
    result = two_models([0.80, 0.82, 0.81], [0.50, 0.53, 0.51])
    config = {"setup": {"width": 8}, "where": {"model": {"b": {"width": 16}}}}
    result.attrs["config"] = json.dumps(config)
    for width in (8, 16):
        claim = replace(BETTER, exceeds={"model": "b", "width": width})
        assert verdicts(result, claim) == ["not run"]


def test_a_coordinate_counts_rather_than_the_setting_that_it_varies():
    result = two_models([0.80, 0.82, 0.81], [0.50, 0.53, 0.51], width=8)
    result.attrs["config"] = json.dumps({"setup": {"width": 16}})
    found = [verdicts(result, replace(BETTER, of={"model": "a", "width": n})) for n in (8, 16)]
    assert found == [["holds"], ["not run"]]


def test_a_setting_that_is_not_for_a_model_does_not_exclude_it():
    cells = [
        {"model": model, "n_heads": n_heads, "kind": kind, "seed": 0, "id": 0.5, "ood": 0.4}
        for model, n_heads, kind in (("a", 2, "x"), ("a", 4, "y"), ("b", None, None))
    ]
    result, ood = result_of(cells), metric("accuracy", "ood")
    for chosen in ({"n_heads": 2}, {"kind": "x"}):
        found = ood.among(["a", "b"], **chosen).values(result)
        assert np.isfinite(found).tolist() == [True, False, True]


def test_a_reading_of_a_nested_group_has_its_bounds():
    result = two_models([0.6], [0.3])
    data = xr.Dataset(
        {
            "x": ("cell", [1.0, 2.0]),
            "x_low": ("cell", [0.5, 1.5]),
            "x_high": ("cell", [3.0, 4.0]),
            "y": ("cell", [5.0, 6.0]),
        }
    )
    result["outer/inner"] = xr.DataTree(data)
    reading = read("outer/inner", "x")
    np.testing.assert_array_equal(reading.values(result), [1, 2])
    np.testing.assert_array_equal(reading.bounds(result), [[0.5, 1.5], [3, 4]])
    for unbounded in (read("outer/inner", "y"), read("outer/other", "x")):
        assert np.isnan(unbounded.bounds(result)).all()
