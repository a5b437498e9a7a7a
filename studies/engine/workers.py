"""Jobs side by side: in this process and in others, here or on a dask scheduler's workers."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from typing import Any, cast

import cloudpickle
from tqdm import tqdm

from studies.engine.folders import RunError
from studies.engine.training import TrainingError

Job = Callable[[], Any]

MOST_DEATHS = 4
"""How often a job's process may die until the job is given up."""


class Workers:
    """This process and others, which call jobs side by side; between calls they live on.

    With one worker or one job, and no scheduler, jobs are called one after another in this process,
    and the first error ends that. With several workers this process is one of them, so that work
    begins while the others start. A job whose process dies is called again, up to three times, and
    one that raises an error keeps no other from being called.

    Args:
        n: processes on this machine, with which a job each is busy.
        scheduler: address of a dask scheduler whose workers are used instead.

    Example:
        `with Workers(4) as workers: found = workers.call([functools.partial(pow, 2, 3)] * 8)`
    """

    def __init__(self, n: int, *, scheduler: str | None = None):
        self._scheduler = scheduler
        self._others = [_Process() for _ in range(n - 1)]

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *error: object) -> None:
        for other in self._others:
            other.end()

    def begin(self, job: Job, n_jobs: int) -> None:
        """Let the others that so many jobs need start with this one, for which nobody waits."""
        for other in self._others[: max(0, n_jobs - 1)]:
            other.submit(job)

    def call(self, jobs: Sequence[Job], names: Sequence[str] | None = None) -> list[Any]:
        """What jobs return, which must be picklable, as they themselves.

        Args:
            jobs: what to call.
            names: of the jobs, for errors; their numbers by default.

        Raises:
            RunError: a job's process died each time, or the scheduler is out of reach.
            RunError, TrainingError, ValueError, RuntimeError: a job raised it or, for the last of
                these, any other error, which is the cause of this one.
        """
        others = self._others[: max(0, len(jobs) - 1)]
        if self._scheduler is None and not others:
            return [job() for job in jobs]
        results: dict[int, Any] = {}
        failed: dict[int, Exception] = {}
        waiting = iter(enumerate(jobs))

        def work_off(call: Callable[[Job], Any]) -> None:
            try:
                for number, job in waiting:
                    try:
                        results[number] = call(job)
                    except Exception as error:
                        failed[number] = error
            finally:
                # After an interruption the other threads end too: nothing waits any more.
                for _ in waiting:
                    pass

        with ThreadPoolExecutor(max(1, len(jobs))) as threads:
            if self._scheduler is not None:
                _on_scheduler(self._scheduler, threads, work_off)
            else:
                for other in others:
                    threads.submit(work_off, other.call)
                work_off(lambda job: job())
        for number, error in sorted(failed.items()):
            kinds = (RunError, TrainingError, ValueError)
            kind = next((kind for kind in kinds if isinstance(error, kind)), RuntimeError)
            name = names[number] if names else f"job {number}"
            raise kind(f"{name}: {error} ({len(failed)} of {len(jobs)} failed)") from error
        return [results[number] for number in range(len(jobs))]


class _Process:
    """Another process: started at its first job, and again if it died."""

    def __init__(self):
        self._executor: ProcessPoolExecutor | None = None

    def submit(self, job: Job) -> Future[Any]:
        """Let it call a job."""
        if self._executor is None:
            context = multiprocessing.get_context("spawn")
            self._executor = ProcessPoolExecutor(1, context, initializer=_begin)
        # What pickle itself cannot send: readings and views that are made in place.
        return self._executor.submit(_called, cloudpickle.dumps(job))

    def call(self, job: Job) -> Any:
        """What the job returns there."""
        for _ in range(MOST_DEATHS):
            try:
                return self.submit(job).result()
            except BrokenProcessPool:
                self.end()
        raise RunError(f"its process died {MOST_DEATHS} times (out of memory?)")

    def end(self) -> None:
        """End it, if it was started, at once: taking torch down would last seconds."""
        if self._executor is not None:
            with suppress(BrokenProcessPool):
                self._executor.submit(os._exit, 0)
            self._executor.shutdown()
        self._executor = None


def _called(job: bytes) -> Any:
    return cloudpickle.loads(job)()


def _begin() -> None:
    """Prepare this process, which ends with the one that started it, also if that is killed."""
    # The bars' own lock is the system's, which a process that ends at once would leave there.
    tqdm.set_lock(threading.RLock())
    parent = multiprocessing.parent_process()

    def watch() -> None:
        if parent is not None:
            parent.join()
            # A new run may want the folder that this one is at work in.
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _on_scheduler(
    address: str,
    threads: ThreadPoolExecutor,
    work_off: Callable[[Callable[[Job], Any]], None],
) -> None:
    """Work jobs off with a thread for each worker of a dask scheduler, also for those that come.

    A worker has one job and no more: dask blames a death on all that it was given.
    """
    from distributed import CancelledError, Client, KilledWorker

    gone = f"the dask scheduler at {address!r} is gone"
    try:
        client = Client(address)
    except (OSError, ValueError) as error:
        raise RunError(f"there is no dask scheduler at {address!r}: {error}") from error

    def call(job: Job) -> Any:
        future = client.submit(_alone, job, pure=False)
        try:
            return future.result()
        except KilledWorker as error:
            deaths = error.allowed_failures + 1
            raise RunError(f"its process died {deaths} times (out of memory?)") from error
        except CancelledError as error:
            raise RunError(gone) from error
        finally:
            # Or dask calls the job again if the worker that keeps its result dies.
            future.release()

    try:
        with client:
            client.wait_for_workers(1)
            ends: set[Future[None]] = set()
            while not ends or wait(ends, timeout=1).not_done:
                n_new = len(cast(dict, client.nthreads())) - len(ends)
                ends |= {threads.submit(work_off, call) for _ in range(n_new)}
    except (CancelledError, OSError) as error:
        raise RunError(gone) from error


_PROCESS = threading.Lock()


def _alone(job: Job) -> Any:
    """Call a job when no other is at work in this process, whose random state it uses."""
    with _PROCESS:
        return job()
