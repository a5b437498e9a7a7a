from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from studies.engine import folders, worklist
from studies.engine.checkpoints import read_log
from studies.engine.examples import Examples
from studies.engine.results import read_result
from studies.engine.training import Deadline
from studies.engine.worklist import Entry, Options, forecast, run_list, run_of
from tests.studies.engine.toy import TOY, ToySetup


def entry(name, changes, together=1):
    return Entry(
        name=name,
        why="to test",
        study=TOY,
        preset="laptop",
        changes=f"dropout=0 {changes}",
        tiny="",
        together=together,
    )


ENTRIES = (
    entry("linear", "model=linear seed=0"),
    entry("two seeds", "model=mlp seed=0,1", together=2),
    entry("wide", "model=mlp width=16 seed=0"),
)
# Each has 40 steps, and a checkpoint every 10; the two seeds draw two batches a step.


class Clock:
    """A clock in which drawing a batch for training takes a second, and nothing else any time."""

    def __init__(self, monkeypatch, *, killed_at=None):
        self.now, self.steps = 0.0, []
        draw = Examples.train

        def slow_draw(examples, step, size):
            if self.now == killed_at:
                raise KeyboardInterrupt
            self.now += 1
            self.steps.append((examples._setup.model, examples._setup.seed, step))
            return draw(examples, step, size)

        monkeypatch.setattr(Examples, "train", slow_draw)

    def __call__(self):
        return self.now

    def deadline(self, seconds):
        return Deadline(self.now + seconds, self)


@pytest.fixture(autouse=True)
def _quick_measuring(monkeypatch):
    """A step is timed after a single other one: two seconds for each job."""
    monkeypatch.setattr(worklist, "MEASURED_STEPS", 1)


@pytest.fixture
def no_results(monkeypatch):
    """Results, which take most of the time here, are not written."""
    monkeypatch.setattr(worklist, "write_result", lambda run, deadline: None)


def options_of(folder, **changes):
    return Options(root=folder, device="cpu", **changes)


def steps_in(folder, entries=ENTRIES):
    """The steps that each cell has done, in the order of the list."""
    return [
        [int((read_log(cell.folder) or [{"step": 0}])[-1]["step"]) for cell in run.cells]
        for run in (run_of(each, options_of(folder)) for each in entries)
    ]


def weights_in(folder):
    paths = sorted(folder.glob("models/*/last.safetensors"))
    return {path.parent.name: load_file(path) for path in paths}


def assert_same_weights(first, second):
    assert first.keys() == second.keys()
    for name, tensors in first.items():
        for key, x in tensors.items():
            assert torch.equal(second[name][key], x), (name, key)


def test_the_list_is_worked_off_in_order_and_reported(tmp_path, monkeypatch, capsys):
    clock = Clock(monkeypatch)
    call = run_list(ENTRIES, options_of(tmp_path), clock.deadline(1000))
    # Two steps of each job were timed first: 2 + 4 + 2 batches.
    trained = [(model, seed) for model, seed, _ in clock.steps[8:]]
    expected = [[("linear", 0)] * 40, [("mlp", 0), ("mlp", 1)] * 40, [("mlp", 0)] * 40]
    assert trained == [each for part in expected for each in part]
    assert [each["state"] for each in call["entries"]] == ["finished"] * 3
    assert call["errors"] == {}
    assert call["seconds"] == 168
    for run in call["entries"]:
        result = read_result(tmp_path / run["folder"] / "result.nc")
        assert result["scores"].sizes["cell"] == len(run["cells"])
        # In a second of its share of the time, whether alone or together with others.
        for cell in run["cells"].values():
            assert cell == {"step": 40, "of": 40, "new_steps": 40, "steps_per_second": 1.0}
    assert folders.read_json(tmp_path / "worklist.json") == {"calls": [call]}
    assert call["device"] == "cpu"
    assert "left: nothing" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("seconds", "steps"),
    [
        # Timing takes 2 seconds, the first checkpoint 10.
        (11, [[0], [0, 0], [0]]),
        (12, [[10], [0, 0], [0]]),
        (31, [[20], [0, 0], [0]]),
        # The second entry is within reach, and is timed in 4 seconds.
        (46 + 20, [[40], [10, 10], [0]]),
        (46 + 39, [[40], [10, 10], [0]]),
        (46 + 40, [[40], [20, 20], [0]]),
        (48 + 80 + 30, [[40], [40, 40], [30]]),
    ],
)
def test_it_stops_at_the_last_checkpoint_before_its_time_is_over(
    seconds, steps, tmp_path, monkeypatch, capsys
):
    clock = Clock(monkeypatch)
    call = run_list(ENTRIES, options_of(tmp_path), clock.deadline(seconds))
    assert steps_in(tmp_path) == steps
    assert clock.now <= seconds
    names = {0: "not begun", 40: "trained"}
    states = [names.get(min(each), "part") for each in steps]
    assert [each["state"] for each in call["entries"]] == states
    printed = " ".join(capsys.readouterr().out.split())
    for each, state in zip(ENTRIES, states, strict=True):
        assert f"{each.name} ({state})" in printed


@pytest.mark.usefixtures("no_results")
def test_calls_go_on_where_the_last_one_stopped_and_end_in_the_same_weights(tmp_path, monkeypatch):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run_list(ENTRIES, options_of(whole), Clock(monkeypatch).deadline(1000))
    with pytest.MonkeyPatch.context() as patch:
        clock = Clock(patch, killed_at=75)
        with pytest.raises(KeyboardInterrupt):
            run_list(ENTRIES, options_of(parts), clock.deadline(1000))
    assert steps_in(parts) == [[40], [10, 10], [0]]
    clock, n_calls, done = Clock(monkeypatch), 0, []
    while True:
        run_list(ENTRIES, options_of(parts), clock.deadline(50))
        n_calls += 1
        assert clock.now <= 50 * n_calls
        if steps_in(parts) == [[40], [40, 40], [40]]:
            break
        assert steps_in(parts) != done
        done = steps_in(parts)
    assert n_calls > 2
    assert_same_weights(weights_in(whole), weights_in(parts))
    calls = folders.read_json(parts / "worklist.json")["calls"]
    # The killed call could not write its part.
    assert len(calls) == n_calls
    news = [
        sum(c["new_steps"] for e in call["entries"] for c in e["cells"].values()) for call in calls
    ]
    assert sum(news) == 160 - 40 - 20


def test_results_alone_are_those_of_the_entries_that_are_trained(tmp_path, monkeypatch, capsys):
    clock = Clock(monkeypatch)
    run_list(ENTRIES, options_of(tmp_path), clock.deadline(48 + 40))
    now = clock.now
    call = run_list(ENTRIES, options_of(tmp_path, results=True), clock.deadline(0))
    assert clock.now == now
    assert [each["state"] for each in call["entries"]] == ["finished", "part", "not begun"]
    assert steps_in(tmp_path) == [[40], [20, 20], [0]]


@pytest.mark.usefixtures("no_results")
def test_what_is_expected_of_each_entry(tmp_path, monkeypatch):
    clock, options = Clock(monkeypatch), options_of(tmp_path)
    run_list(ENTRIES[:1], options, clock.deadline(1000))
    more = (*ENTRIES, entry("last", "model=linear seed=1"))
    found = forecast(more, options, clock.deadline(4 + 80 + 2 + 30))
    assert [each.expected for each in found] == ["done", "trained", "part", "not"]
    assert [each.steps for each in found] == [0, 40, 40, None]
    assert [each.seconds for each in found] == [0, 80, 40, None]


@pytest.mark.usefixtures("no_results")
def test_models_that_differ_in_their_seeds_alone_are_timed_once(tmp_path, monkeypatch):
    clock, options = Clock(monkeypatch), options_of(tmp_path)
    entries = (entry("seeds", "model=linear,mlp seed=0,1,2"), entry("others", "seed=3"))
    before = clock.now
    seeds, _ = forecast(entries, options, clock.deadline(1000))
    assert len(seeds.pace) == 6
    # Two seconds for each of two kinds of models.
    assert clock.now - before == 2 * 2


@pytest.mark.usefixtures("no_results")
def test_the_pace_of_models_that_are_trained_together_is_read_from_their_logs(
    tmp_path, monkeypatch
):
    clock, options = Clock(monkeypatch), options_of(tmp_path)
    run_list(ENTRIES, options, clock.deadline(46 + 40))
    now, found = clock.now, forecast(ENTRIES[:2], options, clock.deadline(1000))
    assert clock.now == now
    assert [each.steps for each in found] == [0, 20]
    assert [each.seconds for each in found] == [0, 40]


@pytest.mark.usefixtures("no_results")
def test_a_part_that_runs_share_is_expected_once(tmp_path, monkeypatch):
    clock, options = Clock(monkeypatch), options_of(tmp_path)
    changes = (
        "model=linear seed=0 training.schedule=stable training.decay_steps=10 training.keep_at= "
        "training.checkpoint=last training.n_steps=20,60,40"
    )
    curve = (entry("curve", changes),)
    (found,) = forecast(curve, options, clock.deadline(1000))
    # 20, then from 10 to 40, then from 30 to 60.
    assert found.steps == 20 + 30 + 30
    before = clock.now
    run_list(curve, options, clock.deadline(1000))
    assert clock.now - before == 2 + 80


def test_an_entry_that_fails_is_noted_and_the_others_are_trained(tmp_path, monkeypatch, capsys):
    """The dropout of torch draws its masks in its own way, which a batched model cannot do."""
    fails = replace(ENTRIES[1], name="fails", changes="model=mlp dropout=0.1 seed=0,1")
    clock = Clock(monkeypatch)
    entries = (fails, ENTRIES[0])
    call = run_list(entries, options_of(tmp_path), clock.deadline(1000))
    assert "cannot be trained together" in call["errors"]["fails"]
    assert [each["state"] for each in call["entries"]] == ["not begun", "finished"]
    assert "fails failed: the models cannot be trained together" in capsys.readouterr().out


class Faulty(ToySetup):
    """A setup with a mistake."""

    def scores(self, output, batch, split):
        raise KeyError("rigth")


def test_a_mistake_in_the_code_of_an_entry_does_not_end_the_others(tmp_path, monkeypatch):
    setup = Faulty(**{field: getattr(TOY.setup, field) for field in vars(TOY.setup)})
    fails = replace(entry("faulty", "model=linear seed=0"), study=replace(TOY, setup=setup))
    clock = Clock(monkeypatch)
    call = run_list((fails, ENTRIES[0]), options_of(tmp_path), clock.deadline(1000))
    assert call["errors"] == {"faulty": "KeyError: 'rigth'"}
    assert [each["state"] for each in call["entries"]] == ["not begun", "finished"]


@pytest.mark.usefixtures("no_results")
def test_several_processes_train_the_same_models_at_the_same_time(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    # The last one has a model of the first.
    entries = (*ENTRIES, entry("more", "model=linear seed=0,1"))
    for root, workers in ((one, 1), (two, 2)):
        call = run_list(entries, options_of(root, workers=workers), Deadline.after(5))
        assert call["errors"] == {}
        assert steps_in(root, entries) == [[40], [40, 40], [40], [40, 40]]
    assert_same_weights(weights_in(one), weights_in(two))
