import asyncio
import functools
import importlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import dask
import numpy as np
import psutil
import pytest

from studies.engine import Resources, RunError, TrainingError, metric, read_result, run
from studies.engine.workers import Workers
from studies.report import plots
from tests.studies.engine.toy import TOY

ROOT = Path(__file__).parents[3]


# Jobs run in other processes, so they record their calls in a file.


def record(folder, text):
    with (folder / "calls").open("a") as file:
        file.write(f"{text}\n")


def recorded(folder):
    """How often each text was recorded."""
    return Counter((folder / "calls").read_text().split("\n")[:-1])


def works(folder, name, *, seconds=0.0):
    record(folder, name)
    time.sleep(seconds)


def raises(folder, name, *, error):
    record(folder, name)
    raise error


def dies(folder, name, *, times):
    record(folder, name)
    if recorded(folder)[name] <= times:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)


def returns(folder, name):
    record(folder, name)
    return name


def pid_of(folder, name, *, seconds=0.0):
    works(folder, name, seconds=seconds)
    return os.getpid()


def records_process(folder):
    record(folder, os.getpid())
    time.sleep(0.3)
    return 3


def unpickled_elsewhere(pid):
    assert os.getpid() != pid
    return functools.partial(pow, 2, 3)


class OfWorkers:
    """A job that cannot be unpickled in the process that made it."""

    def __reduce__(self):
        return unpickled_elsewhere, (os.getpid(),)

    def __call__(self):
        raise AssertionError("was not pickled")


def call(jobs, n, *, scheduler=None, names=None):
    with Workers(n, scheduler=scheduler) as workers:
        return workers.call(jobs, names)


@pytest.fixture(scope="module")
def scheduler():
    """The address of a dask scheduler with two workers."""
    from distributed import LocalCluster

    with LocalCluster(
        n_workers=2,
        threads_per_worker=1,
        memory_limit=None,
        dashboard_address=None,
        silence_logs=50,
        scheduler_kwargs={"allowed_failures": 1},
    ) as cluster:
        yield cluster.scheduler_address


@pytest.mark.slow
def test_the_death_of_a_process_repeats_only_its_job(scheduler, tmp_path):
    names = [f"work {n}" for n in range(20)]
    jobs = [functools.partial(works, tmp_path, name, seconds=0.1) for name in names]
    jobs = [functools.partial(dies, tmp_path, "death", times=1), *jobs]
    call(jobs, 1, scheduler=scheduler)
    assert recorded(tmp_path) == {"death": 2} | dict.fromkeys(names, 1)


@pytest.mark.slow
def test_this_process_is_one_of_the_workers_and_the_others_persist(tmp_path):
    job, own = functools.partial(records_process, tmp_path), str(os.getpid())
    with Workers(2) as workers:
        assert workers.call([job] * 40) == [3] * 40
        first = recorded(tmp_path)
        assert sum(first.values()) == 40
        assert len(first) == 2
        assert first[own] >= 5
        workers.call([job] * 4)
    assert recorded(tmp_path).keys() == first.keys()
    assert recorded(tmp_path)[own] < first[own] + 4


def test_results_are_in_the_order_of_the_jobs(scheduler):
    jobs = [functools.partial(pow, 2, n) for n in range(10)]
    assert call(jobs, 1) == call(jobs, 1, scheduler=scheduler) == [2**n for n in range(10)]


def test_a_scheduler_finds_a_study_of_a_file_of_its_own(scheduler, tmp_path, monkeypatch):
    (tmp_path / "my_own.py").write_text("def answer():\n    return 42\n")
    with monkeypatch.context() as patched:
        patched.syspath_prepend(tmp_path)
        answer = importlib.import_module("my_own").answer
        assert call([answer], 1, scheduler=scheduler) == [42]


def test_only_workers_unpickle_a_job(scheduler):
    # The scheduler of a local cluster runs in this process.
    assert call([OfWorkers()], 1, scheduler=scheduler) == [8]


def test_a_module_that_workers_do_not_have_is_named(scheduler, tmp_path, monkeypatch):
    (tmp_path / "only_here.py").write_text("def answer():\n    return 42\n")
    with monkeypatch.context() as patched:
        patched.syspath_prepend(tmp_path)
        answer = importlib.import_module("only_here").answer
    expected = "cannot import 'only_here': install it there, or start them with its folder"
    with pytest.raises(RunError, match=expected):
        call([answer], 1, scheduler=scheduler)


@pytest.mark.parametrize("n", [1, 3])
def test_jobs_that_follow_others_run_after_them_and_give_the_results(n, tmp_path):
    """Two jobs with two and no followers; all jobs have begun before the first follower does."""
    of = functools.partial(returns, tmp_path)
    jobs = [functools.partial(of, "a"), functools.partial(of, "b")]
    then = [[functools.partial(of, "a1"), functools.partial(of, "a2")], []]
    with Workers(n) as workers:
        assert workers.call(jobs, then=then) == [["a1", "a2"], []]
    assert recorded(tmp_path) == Counter(["a", "b", "a1", "a2"])
    calls = (tmp_path / "calls").read_text().split("\n")
    assert calls.index("a1") > calls.index("a")


@pytest.mark.slow
def test_idle_workers_take_what_follows_a_slow_job(tmp_path):
    """While the second job runs, the first one's followers do; its own are shared at the end."""
    slow = functools.partial(pid_of, tmp_path, "slow", seconds=1.0)
    quick = functools.partial(pid_of, tmp_path, "quick")
    rest = [[functools.partial(pid_of, tmp_path, "rest", seconds=1.0)] * 2] * 2
    with Workers(2) as workers:
        workers.call([quick, quick])
        start = time.monotonic()
        first, second = workers.call([quick, slow], then=rest)
        # One after another, what follows would take four seconds beside the slow job's one.
        assert time.monotonic() - start < 4.0
    assert len({*first, *second}) == 2


def test_what_follows_a_failed_job_is_not_called(tmp_path):
    fails_first = functools.partial(raises, tmp_path, "bad", error=ValueError("no"))
    others = functools.partial(returns, tmp_path, "good")
    then = [[functools.partial(returns, tmp_path, "never")], [others]]
    with Workers(2) as workers, pytest.raises(ValueError, match="job 0: no"):
        workers.call([fails_first, others], then=then)
    assert recorded(tmp_path) == Counter(["bad", "good", "good"])


def test_with_one_worker_the_first_error_stops_the_jobs(tmp_path):
    jobs = [
        functools.partial(works, tmp_path, "a"),
        functools.partial(raises, tmp_path, "b", error=KeyError("b")),
        functools.partial(works, tmp_path, "c"),
    ]
    with pytest.raises(KeyError):
        call(jobs, 1)
    assert recorded(tmp_path) == {"a": 1, "b": 1}


def test_with_one_worker_an_error_names_its_job(tmp_path):
    jobs = [
        functools.partial(works, tmp_path, "good"),
        functools.partial(raises, tmp_path, "bad", error=TrainingError("the loss is not finite")),
    ]
    with Workers(1) as workers, pytest.raises(TrainingError, match="mlp-seed5: the loss is not"):
        workers.call(jobs, ["mlp-seed4", "mlp-seed5"])


def test_an_error_in_this_process_is_raised_after_all_jobs(tmp_path):
    jobs = [functools.partial(raises, tmp_path, "b", error=RunError("broken"))]
    jobs += [functools.partial(works, tmp_path, name) for name in "cde"]
    with pytest.raises(RunError, match=r"job 0: broken \(1 of 4 failed\)"):
        call(jobs, 2)
    assert recorded(tmp_path) == dict.fromkeys("bcde", 1)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (TrainingError("not finite"), TrainingError),
        (RunError("not finite"), RunError),
        (UnicodeError("not finite"), ValueError),
        (KeyError("not finite"), RuntimeError),
    ],
    ids=lambda x: getattr(x, "__name__", None),
)
def test_an_error_is_raised_after_all_jobs(error, expected, scheduler, tmp_path):
    jobs = [
        functools.partial(works, tmp_path, "a"),
        functools.partial(raises, tmp_path, "b", error=error),
        functools.partial(raises, tmp_path, "c", error=ValueError()),
        *[functools.partial(works, tmp_path, name, seconds=0.2) for name in "defg"],
    ]
    message = r"model b: .*not finite.* \(2 of 7 failed\)"
    with pytest.raises(expected, match=message) as caught:
        call(jobs, 1, scheduler=scheduler, names=[f"model {name}" for name in "abcdefg"])
    assert type(caught.value) is expected
    assert isinstance(caught.value.__cause__, type(error))
    # The traceback reaches into the job.
    assert any(
        entry.name == "raises"
        for entry in pytest.ExceptionInfo.from_exception(caught.value.__cause__).traceback
    )
    assert recorded(tmp_path) == dict.fromkeys("abcdefg", 1)


@pytest.mark.slow
def test_only_a_job_whose_process_always_dies_is_given_up(scheduler, tmp_path):
    jobs = [
        functools.partial(dies, tmp_path, "death", times=99),
        *[functools.partial(works, tmp_path, name, seconds=2) for name in "abc"],
    ]
    with pytest.raises(RunError, match=r"^job 0: its process died 2 times.* \(1 of 4 failed\)"):
        call(jobs, 1, scheduler=scheduler)
    assert recorded(tmp_path) == {"death": 2} | dict.fromkeys("abc", 1)


def test_a_missing_scheduler_is_an_error(tmp_path):
    with pytest.raises(RunError, match="there is no dask scheduler at 'nowhere'"):
        call([functools.partial(works, tmp_path, "a")], 1, scheduler="nowhere")


def test_a_scheduler_that_wants_certificates_is_an_error_without_them():
    with pytest.raises(RunError, match="TLS expects"):
        call([functools.partial(pow, 2, 3)], 1, scheduler="tls://127.0.0.1:1")


@pytest.mark.parametrize("address", ["nowhere", "tcp://127.0.0.1:1", "tls://127.0.0.1:1"])
def test_nothing_is_left_of_a_scheduler_out_of_reach(address):
    before = threading.enumerate()
    with dask.config.set({"distributed.comm.timeouts.connect": "10ms"}), pytest.raises(RunError):
        call([functools.partial(pow, 2, 3)], 1, scheduler=address)
    assert set(threading.enumerate()) <= set(before)
    assert dask.config.get("scheduler", None) is None


def test_a_scheduler_is_found_where_an_event_loop_runs(scheduler):
    async def notebook():
        return call([functools.partial(pow, 2, 3)], 1, scheduler=scheduler)

    assert asyncio.run(notebook()) == [8]


@pytest.mark.slow
def test_workers_end_with_a_process_that_is_killed(tmp_path):
    script = f"""
import functools, pathlib
from studies.engine.workers import Workers
from studies.report import plots
from tests.studies.engine.test_workers import works
if __name__ == "__main__":
    job = functools.partial(works, pathlib.Path({str(tmp_path)!r}), "a", seconds=100)
    with Workers(2) as workers:
        workers.call([job, job])
"""
    (tmp_path / "script.py").write_text(script)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, str(tmp_path / "script.py")], env=environment)
    try:
        deadline = time.monotonic() + 120
        while not (tmp_path / "calls").exists() or recorded(tmp_path)["a"] < 2:
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.05)
        workers = psutil.Process(process.pid).children(recursive=True)
    finally:
        process.kill()
        process.wait()
    assert workers
    assert not psutil.wait_procs(workers, timeout=20)[1]


@pytest.mark.slow
def test_a_study_on_a_scheduler_has_the_same_result(scheduler, tmp_path, monkeypatch):
    # The root is a relative path, and the workers have another working directory.
    monkeypatch.chdir(tmp_path)
    changes = ["training.n_steps=20", "scores.n_test=200"]
    readings = {"ood": metric("accuracy", "ood")}
    study = replace(TOY, views={"right": functools.partial(plots.points, readings=readings)})
    folders = [
        run(study, changes=changes, resources=Resources(root=Path(root), scheduler=address))
        for root, address in (("here", None), ("there", scheduler))
    ]
    for folder in folders:
        assert (folder / "right.png").stat().st_size > 1000
        assert (folder / "right.pdf").stat().st_size > 1000
    here, there = (read_result(folder / "result.nc") for folder in folders)
    for name in ("accuracy", "loss", "accuracy_low"):
        np.testing.assert_array_equal(here["scores"][name], there["scores"][name])
    np.testing.assert_array_equal(here["weights"]["size"], there["weights"]["size"])
