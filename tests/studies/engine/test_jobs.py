"""How cells are divided into jobs, and that a study ends in the same result in any way."""

import time
from dataclasses import replace

import numpy as np
import pytest

from studies.engine import training
from studies.engine.cells import Cell
from studies.engine.execution import Resources, Run
from studies.engine.jobs import jobs_of
from studies.engine.results import read_result
from studies.engine.training import OutOfTime
from tests.studies.engine.toy import TOY, TRAINING, ToySetup

STABLE = replace(TRAINING, schedule="stable", decay_steps=10, checkpoint="last", keep_at=())


def names(jobs):
    return [
        [[(cell.setup.seed, cell.setup.training.n_steps) for cell in group] for group in job]
        for job in jobs
    ]


def cells(tmp_path, *, seeds=(0,), lengths=(40,), training=TRAINING, **changes):
    return [
        Cell(
            ToySetup(
                model="linear", seed=seed, training=replace(training, n_steps=length), **changes
            ),
            root=tmp_path,
        )
        for length in lengths
        for seed in seeds
    ]


def test_by_default_each_cell_is_a_job(tmp_path):
    jobs = jobs_of(cells(tmp_path, seeds=(0, 1), lengths=(40, 20)), 1)
    assert names(jobs) == [[[(0, 40)]], [[(1, 40)]], [[(0, 20)]], [[(1, 20)]]]


def test_cells_that_differ_in_seeds_alone_are_trained_together(tmp_path):
    jobs = jobs_of(cells(tmp_path, seeds=(0, 1, 2), lengths=(40, 20)), 2)
    assert names(jobs) == [[[(0, 40), (1, 40)]], [[(2, 40)]], [[(0, 20), (1, 20)]], [[(2, 20)]]]


def test_cells_with_a_common_constant_part_are_one_job_the_shortest_first(tmp_path):
    some = cells(tmp_path, seeds=(0, 1), lengths=(40, 20), training=STABLE)
    assert names(jobs_of(some, 1)) == [[[(0, 20)], [(0, 40)]], [[(1, 20)], [(1, 40)]]]
    assert names(jobs_of(some, 2)) == [[[(0, 20), (1, 20)], [(0, 40), (1, 40)]]]
    others = cells(tmp_path, training=STABLE) + cells(tmp_path, training=STABLE, n_validation=7)
    assert len(jobs_of(others, 1)) == 2


def result_of(tmp_path, *changes, **resources):
    plan = TOY.plan("laptop", ["model=linear", "training.keep_at=", *changes])
    run = Run(plan, Resources(root=tmp_path, **resources))
    run.finish()
    return run, read_result(run.folder / "result.nc")


def test_cells_trained_together_are_cells_like_others(tmp_path):
    """Each has its own folder and its numbers, and is taken from disk by a run without."""
    _, alone = result_of(tmp_path / "alone", "seed=0,1,2")
    run, together = result_of(tmp_path / "together", "seed=0,1,2", together=3)
    for group in ("training", "weights"):
        for name, values in alone[group].data_vars.items():
            if values.dtype.kind == "f" and name != "seconds":
                theirs = together[group][name].values
                np.testing.assert_allclose(theirs, values.values, atol=1e-5)
    files = {cell.folder: sorted(path.name for path in cell.folder.iterdir()) for cell in run.cells}
    assert len({tuple(names) for names in files.values()}) == 1
    again, _ = result_of(tmp_path / "together", "seed=0,1,2")
    assert again.taken_from_disk


def test_lengths_share_their_constant_part_and_end_as_if_trained_alone(tmp_path, monkeypatch):
    steps = []
    update = training.Updates.update

    def counted(self, batches, step):
        steps.append(step)
        return update(self, batches, step)

    monkeypatch.setattr("studies.engine.updates.Updates.update", counted)
    settings = [
        "training.schedule=stable",
        "training.decay_steps=10",
        "training.checkpoint=last",
        "seed=0",
    ]
    _, both = result_of(tmp_path / "both", *settings, "training.n_steps=40,30")
    assert steps == [*range(30), *range(20, 40)]
    _, alone = result_of(tmp_path / "alone", *settings, "training.n_steps=40")
    steps.clear()
    result_of(tmp_path / "alone", *settings, "training.n_steps=40", fresh=True)
    assert steps == [*range(40)]
    ours = both["weights"].to_dataset().isel(cell=0)["size"]
    np.testing.assert_array_equal(ours, alone["weights"]["size"].isel(cell=0))


def test_a_study_stops_when_its_minutes_are_over_and_goes_on_later(tmp_path, monkeypatch):
    now = [time.time()]
    monkeypatch.setattr(training.Deadline, "__init__", slow_deadline(now))
    with pytest.raises(OutOfTime, match="start again"):
        result_of(tmp_path, "seed=0,1", minutes=1.0)
    assert not list(tmp_path.glob("toy-*/result.nc"))
    run, _ = result_of(tmp_path, "seed=0,1")
    _, whole = result_of(tmp_path / "whole", "seed=0,1")
    assert [cell.finished for cell in run.cells] == [True, True]
    resumed = read_result(run.folder / "result.nc")
    np.testing.assert_array_equal(resumed["weights"]["size"], whole["weights"]["size"])


@pytest.mark.parametrize("minutes", [0.0, -1.0, float("nan")])
def test_a_time_that_is_none_is_refused(minutes):
    with pytest.raises(ValueError, match=f"minutes must be greater than 0, got {minutes}"):
        Resources(minutes=minutes)


def slow_deadline(now):
    """The constructor of a deadline whose clock goes 10 seconds further whenever it is read."""

    def clock():
        now[0] += 10.0
        return now[0]

    def construct(self, at):
        object.__setattr__(self, "at", at)
        object.__setattr__(self, "clock", clock)

    return construct
