"""Answers over steps, against counts by hand and planted cases."""

import numpy as np
import pytest
import xarray as xr

from probes import score_steps

ANSWERS = xr.DataArray(
    [
        [0, 1, 1, 1],  # right from step 1 on
        [1, 0, 1, 0],  # right, then wrong
        [2, 2, -1, -1],  # halts, wrong throughout
        [1, 1, 1, 1],  # right throughout
    ],
    dims=("example", "step"),
)
TARGETS = xr.DataArray([1, 1, 1, 1], dims="example")


def test_scores_are_those_counted_by_hand():
    found = score_steps(ANSWERS, TARGETS).sel(control="observed")
    assert found["accuracy"].values.tolist() == [0.5, 0.5, 0.75, 0.5]
    assert found["flips"] == (1 + 3) / 4
    assert found["settled"].values.tolist() == [0.5, 0.75, 0.75, 1.0]
    assert found["gained"] == 0.25
    assert found["lost"] == 0.25
    assert found["settles_at"].values.tolist() == [1, 3, 0, 0]
    assert all(variable.attrs["long_name"] for variable in found.data_vars.values())


def test_the_step_from_which_the_answer_stays_is_named_like_the_steps():
    found = score_steps(ANSWERS.assign_coords(step=[1, 2, 4, 8]), TARGETS)
    assert found["settles_at"].values.tolist() == [2, 8, 1, 1]


def test_a_model_that_counts_up_to_its_answer_beats_its_controls():
    generator = np.random.default_rng(0)
    depth = generator.integers(0, 6, size=300)
    # After each step one more is known; the untrained model knows nothing.
    steps = np.arange(6)
    answers = xr.DataArray(np.minimum(depth[:, None], steps), dims=("example", "step"))
    noise = xr.DataArray(generator.integers(0, 6, size=(300, 6)), dims=("example", "step"))
    found = score_steps(answers, xr.DataArray(depth, dims="example"), untrained=noise)
    observed = found.sel(control="observed")
    assert (np.diff(observed["accuracy"]) > 0).all()
    assert observed["accuracy"][-1] == 1
    assert (found["settles_at"].values == depth).all()
    others = found.sel(control=["shuffled", "untrained"])
    assert (others["accuracy_high"].isel(step=-1) < 0.3).all()
    assert (others["flips_low"] > observed["flips_high"]).all()
    assert (others["lost_low"] > 0.3).all()
    assert observed["lost"] == 0


@pytest.mark.parametrize(
    ("answers", "targets", "message"),
    [
        (ANSWERS.rename(step="layer"), TARGETS, "answers must have the dims example and step"),
        (ANSWERS.isel(step=slice(0)), TARGETS, "answers must have the dims example and step, not"),
        (ANSWERS.roll(step=1), TARGETS, "answers must begin with an answer in each example"),
        (ANSWERS, TARGETS[:2], "targets must have the dim example of size 4, got"),
    ],
)
def test_invalid_input_is_refused(answers, targets, message):
    with pytest.raises(ValueError, match=message):
        score_steps(answers, targets)


def test_labels_of_examples_must_be_those_of_the_answers():
    labelled = ANSWERS.assign_coords(example=[3, 1, 0, 2])
    same = TARGETS.assign_coords(example=[3, 1, 0, 2])
    assert score_steps(labelled, same).equals(score_steps(ANSWERS, TARGETS))
    assert score_steps(labelled, TARGETS).equals(score_steps(ANSWERS, TARGETS))
    for targets, untrained, name in (
        (TARGETS.assign_coords(example=range(4)), None, "targets"),
        (same, ANSWERS.assign_coords(example=range(4)), "untrained"),
    ):
        with pytest.raises(ValueError, match=f"{name} must have the coordinate 'example' of answ"):
            score_steps(labelled, targets, untrained=untrained)


@pytest.mark.parametrize(
    ("answers", "targets", "name"),
    [
        (ANSWERS.where(ANSWERS >= 0), TARGETS, "answers"),
        (ANSWERS, TARGETS.astype(float), "targets"),
    ],
)
def test_answers_that_are_no_integers_are_refused(answers, targets, name):
    with pytest.raises(TypeError, match=f"{name} must hold integers, got float64"):
        score_steps(answers, targets)
