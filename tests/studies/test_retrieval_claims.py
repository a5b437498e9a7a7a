"""The verdicts on figures that were made up, so that it is known which claims hold."""

import numpy as np
import pytest

from studies.retrieval_claims import FIGURES, HOLDS, HOLDS_NOT, NOT_RUN, check_claims, summary

NAN = dict.fromkeys(FIGURES, np.nan)
SETTING = {"n_searches": 2, "n_retrievals": 4, "d_model": 64}
GOOD = {
    "multi_head": {"id": 0.3, "ood": 0.9},
    "multi_head_pairs": {"id": 0.2, "ood": 0.5},
    "compositional": {
        "id": 0.1,
        "ood": 0.2,
        "agreement_id": 0.9,
        "agreement_ood": 0.8,
        "chance_ood": 0.4,
        "removed_true": 0.6,
        "removed_familiar": 0.6,
    },
}


def rows(seeds=(0, 1), **changes):
    return [
        NAN | SETTING | {"model": model, "seed": seed} | figures | changes.get(f"{model}{seed}", {})
        for model, figures in GOOD.items()
        for seed in seeds
    ]


def verdicts(made):
    return check_claims(made)["verdict"].to_numpy().tolist()


def test_all_claims_hold_where_all_seeds_say_so():
    assert verdicts(rows()) == [HOLDS] * 6
    assert check_claims(rows())["seeds"].to_numpy().tolist() == [2] * 6


@pytest.mark.parametrize(
    ("claim", "worse"),
    [
        (0, {"id": 0.31, "ood": 0.4}),
        (1, {"ood": 0.95, "id": 0.29}),
        (2, {"id": 0.05, "ood": 0.7}),
        (3, {"ood": 0.51}),
        (4, {"agreement_ood": 0.69}),
        (5, {"removed_familiar": 0.49}),
    ],
)
def test_one_seed_against_it_is_enough(claim, worse):
    found = check_claims(rows(compositional1=worse))
    assert found["verdict"][claim] == HOLDS_NOT
    assert (found["seeds_for"][claim], found["seeds"][claim]) == (1, 2)


def test_what_needs_another_model_is_not_run():
    alone = [row for row in rows() if row["model"] == "compositional"]
    assert verdicts(alone) == [NOT_RUN] * 4 + [HOLDS] * 2


def test_models_are_compared_within_their_size():
    small = [row | {"d_model": 8} for row in rows() if row["model"] == "multi_head"]
    large = [row for row in rows() if row["model"] == "compositional"]
    assert verdicts(small + large)[:3] == [NOT_RUN] * 3


def test_the_summary_keeps_conditions_apart():
    found = summary(rows(compositional1={"id": 0.2}) + [row | {"d_model": 8} for row in rows()])
    assert found.sizes["condition"] == 6
    one = found.isel(condition=2).sel(figure="id")
    assert one["model"].item() == "compositional"
    assert one["mean"].item() == pytest.approx(0.15)
    assert (one["lowest"].item(), one["highest"].item()) == (0.1, 0.2)


def test_conditions_may_have_different_numbers_of_seeds():
    made = [row for row in rows() if row["model"] != "multi_head" or row["seed"] == 0]
    assert summary(made).sel(figure="id")["mean"].to_numpy()[:2] == pytest.approx([0.3, 0.2])
