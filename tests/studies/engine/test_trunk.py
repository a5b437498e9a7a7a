"""The schedule `stable`: one constant part for runs of several lengths; and deadlines."""

from dataclasses import replace

import pytest

from studies.engine.checkpoints import Trunk
from studies.engine.training import Deadline, OutOfTime, train
from tests.studies.engine.test_training import CONFIG, objective, run, same, sample, tensors_in

STABLE = replace(
    CONFIG,
    schedule="stable",
    decay_steps=8,
    checkpoint="last",
    warmup_steps=4,
    evaluate_every=5,
    n_steps=28,
)


def steps_drawn(folder, trunk, config):
    """The steps whose batches a run drew."""
    drawn = []

    def draw(step, size):
        drawn.append(step)
        return sample(step, size)

    run(folder, config=config, sample=draw, trunk=trunk)
    return drawn


def test_the_rate_is_constant_after_warmup_and_falls_in_the_last_steps():
    config = replace(STABLE, learning_rate=1.0, final_learning_rate=0.2)
    rates = [config.learning_rate_at(step) for step in range(28)]
    assert rates[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert rates[4:20] == [1.0] * 16
    assert rates[20:] == pytest.approx([1 - 0.1 * k for k in range(1, 9)])


def test_longer_and_shorter_runs_branch_off_and_end_as_if_trained_alone(tmp_path):
    trunk = Trunk(tmp_path / "trunk", "abc")
    assert steps_drawn(tmp_path / "first", trunk, STABLE) == list(range(28))
    longer, shorter = replace(STABLE, n_steps=40), replace(STABLE, n_steps=20, decay_steps=6)
    # Its constant part ends at step 20 (14), of which steps to 20 (10) are on disk.
    assert steps_drawn(tmp_path / "longer", trunk, longer) == list(range(20, 40))
    assert steps_drawn(tmp_path / "shorter", trunk, shorter) == list(range(10, 20))
    for name, config in (("longer", longer), ("shorter", shorter)):
        _, log = run(tmp_path / f"{name}-alone", config=config)
        assert same(tensors_in(tmp_path / name), tensors_in(tmp_path / f"{name}-alone"))
        its_log = run(tmp_path / name, config=config)[1]
        assert [entry["loss"] for entry in its_log] == [entry["loss"] for entry in log]


def test_a_branch_that_the_constant_part_has_ended_has_a_checkpoint_of_its_own(tmp_path):
    trunk, config = Trunk(tmp_path / "trunk", "abc"), replace(STABLE, stop_at=0.3)
    _, log = run(tmp_path / "first", config=config, trunk=trunk)
    assert log[-1]["step"] < config.decay_start
    _, again = run(tmp_path / "longer", config=replace(config, n_steps=40), trunk=trunk)
    assert again == log
    assert same(tensors_in(tmp_path / "longer"), tensors_in(tmp_path / "first"))


def test_a_branch_that_was_interrupted_goes_on_from_its_own_checkpoint(tmp_path):
    trunk = Trunk(tmp_path / "trunk", "abc")
    run(tmp_path / "first", config=STABLE, trunk=trunk)

    def interrupted(step, size):
        if step == 26:
            raise KeyboardInterrupt
        return sample(step, size)

    other = replace(STABLE, decay_steps=12)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "other", config=other, trunk=trunk, sample=interrupted)
    assert steps_drawn(tmp_path / "other", trunk, other) == [25, 26, 27]
    run(tmp_path / "alone", config=other)
    assert same(tensors_in(tmp_path / "other"), tensors_in(tmp_path / "alone"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"decay_steps": 0}, "decay_steps must be from 1 to n_steps = 28, got 0"),
        ({"decay_steps": 29}, "decay_steps must be from 1 to n_steps = 28, got 29"),
        ({"checkpoint": "best"}, "checkpoint must be last with `stable`, got 'best'"),
        ({"schedule": "cosine"}, "decay_steps must be 0 without `stable`, got 8"),
    ],
)
def test_wrong_settings_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(STABLE, **changes)


class Clock:
    """A clock that shows the seconds that it was set forward."""

    def __init__(self):
        self.seconds = 0.0

    def __call__(self):
        return self.seconds


def test_a_run_stops_at_the_last_checkpoint_before_its_deadline_and_goes_on_later(tmp_path):
    clock = Clock()

    def slow(step, size):
        clock.seconds += 1.0
        return sample(step, size)

    from tests.studies.engine.test_training import trainee

    def train_until(at):
        it = trainee(tmp_path / "run", sample=slow)
        arguments = {"config": CONFIG, "objective": objective, "select": "id/accuracy"}
        return train([it], deadline=Deadline(at, clock), **arguments)

    # Evaluations after 10, 20, 30 seconds; another ten seconds would end after 35.
    with pytest.raises(OutOfTime, match="start again to go on"):
        train_until(35.0)
    assert clock.seconds == 30.0
    assert tensors_in(tmp_path / "run")["step/0.weight"] == 30
    (log,) = train_until(100.0)
    assert [entry["seconds"] for entry in log] == [10.0, 20.0, 30.0, 40.0]
    run(tmp_path / "whole")
    assert same(tensors_in(tmp_path / "run"), tensors_in(tmp_path / "whole"))


def test_a_run_that_finishes_in_time_is_not_stopped(tmp_path):
    run(tmp_path / "run", config=replace(CONFIG, n_steps=10))
    Deadline(5.0, lambda: 4.0).check(1.0)
    with pytest.raises(OutOfTime):
        Deadline(5.0, lambda: 4.0).check(1.5)
