"""Parallel execution of jobs, in processes on this machine or on a dask scheduler's workers."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from typing import Any, cast

import cloudpickle
from tqdm import tqdm

from studies.engine.folders import RunError
from studies.engine.results import SchemaError
from studies.engine.training import OutOfTime, TrainingError

Job = Callable[[], Any]

MAX_ATTEMPTS = 4
"""How often a job whose process dies is tried."""


EXPECTED = (OutOfTime, RunError, TrainingError, SchemaError, ValueError)
"""Errors of jobs that keep their class."""


class Workers:
    """A pool of processes that call jobs in parallel, and that persist between calls.

    This process is one of the workers, so that work begins while the others start. A job whose
    process dies is called again, up to three times. A job that raises an error does not stop the
    others; its error is raised at the end. With one worker or one job, and no scheduler, jobs are
    called in sequence in this process, and the first error stops the sequence.

    Args:
        n: number of worker processes on this machine, this process included.
        scheduler: address of a dask scheduler whose workers are used instead.

    Example:
        `with Workers(4) as workers: powers = workers.call([functools.partial(pow, 2, 3)] * 8)`
    """

    def __init__(self, n: int, *, scheduler: str | None = None):
        self._scheduler = scheduler
        self._processes = [_Process() for _ in range(n - 1)]

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self._processes:
            process.end()

    def begin(self, job: Job, n_jobs: int) -> None:
        """Start the other processes that `n_jobs` jobs will need, with a first job as warm-up.

        Does not wait for the job, and drops its result.
        """
        for process in self._processes[: max(0, n_jobs - 1)]:
            process.submit(job)

    def call(
        self,
        jobs: Sequence[Job],
        names: Sequence[str] | None = None,
        *,
        then: Sequence[Sequence[Job]] = (),
    ) -> list[Any]:
        """Call all jobs and return their results, in order.

        Args:
            jobs: the functions to call; they and their results must be picklable.
            names: names of the jobs for error messages; "job 0", "job 1", ... by default.
            then: for each job further ones, which are called, by any worker, once it has ended and
                all jobs have begun. The result of a job is then the list of theirs.

        Raises:
            RunError: a job's process died at every attempt, the scheduler is out of reach, or its
                workers lack a module.
            RunError, TrainingError, ValueError: a job raised this error.
            RuntimeError: a job raised any other error, which is the cause of this one.
        """
        n_jobs = max(len(jobs), sum(map(len, then)))
        processes = self._processes[: max(0, n_jobs - 1)]
        if self._scheduler is None and not processes:
            results = []
            for number, job in enumerate(jobs):
                try:
                    result = job()
                    results.append([further() for further in then[number]] if then else result)
                except EXPECTED as error:
                    raise _named(error, names, number) from error
            return results
        queue = _Queue(jobs, then)
        with ThreadPoolExecutor(max(1, n_jobs)) as threads:
            if self._scheduler is not None:
                _work_on_scheduler(self._scheduler, threads, queue.work_off)
            else:
                for process in processes:
                    threads.submit(queue.work_off, process.call)
                queue.work_off(lambda job: job())
        failed = queue.failed
        for number, error in sorted(failed.items()):
            share = f" ({len(failed)} of {len(jobs)} failed)"
            raise _named(error, names, number, share) from error
        return [queue.result(number) for number in range(len(jobs))]


def _named(
    error: Exception, names: Sequence[str] | None, number: int, share: str = ""
) -> Exception:
    """The error of a job, with the job's name; a RuntimeError for one that is not expected."""
    error_class = next((cls for cls in EXPECTED if isinstance(error, cls)), RuntimeError)
    return error_class(f"{names[number] if names else f'job {number}'}: {error}{share}")


class _Queue:
    """Jobs that wait, those that each of them will make wait when it has ended, and results.

    Attributes:
        failed: the errors of jobs, or of those that follow them, by the job's number.
    """

    def __init__(self, jobs: Sequence[Job], then: Sequence[Sequence[Job]]):
        self._waiting: deque[tuple[int, int | None, Job]] = deque(
            (number, None, job) for number, job in enumerate(jobs)
        )
        self._then, self._n_running = then, 0
        self._changed = threading.Condition()
        self._results: dict[tuple[int, int | None], Any] = {}
        self.failed: dict[int, Exception] = {}

    def work_off(self, call: Callable[[Job], Any]) -> None:
        """Call jobs until none is waiting and none is running that others follow."""
        while (entry := self._next()) is not None:
            number, place, job = entry
            further: Sequence[Job] = ()
            try:
                self._results[number, place] = call(job)
                further = self._then[number] if self._then and place is None else ()
            except Exception as error:
                self.failed[number] = error
            except BaseException:
                # After an interruption, empty the queue so that the other threads end too.
                with self._changed:
                    self._waiting.clear()
                raise
            finally:
                with self._changed:
                    self._n_running -= 1
                    self._waiting.extend((number, k, job) for k, job in enumerate(further))
                    self._changed.notify_all()

    def result(self, number: int) -> Any:
        """The result of a job, or the list of those of the jobs that follow it."""
        if not self._then:
            return self._results[number, None]
        return [self._results[number, place] for place in range(len(self._then[number]))]

    def _next(self) -> tuple[int, int | None, Job] | None:
        """The next job, which then counts as running; waits for it if need be."""
        with self._changed:
            while not self._waiting and self._then and self._n_running:
                self._changed.wait()
            if not self._waiting:
                return None
            self._n_running += 1
            return self._waiting.popleft()


class _Process:
    """A worker process that starts at its first job, and again if it died."""

    def __init__(self):
        self._executor: ProcessPoolExecutor | None = None

    def submit(self, job: Job) -> Future[Any]:
        """Queue a job in the process."""
        if self._executor is None:
            context = multiprocessing.get_context("spawn")
            self._executor = ProcessPoolExecutor(1, context, initializer=_initialize)
        # cloudpickle, because jobs contain lambdas and closures (readings, views).
        return self._executor.submit(_call_pickled, cloudpickle.dumps(job))

    def call(self, job: Job) -> Any:
        """Call a job in the process and return its result.

        Raises:
            RunError: the process died at every attempt.
        """
        for _ in range(MAX_ATTEMPTS):
            try:
                return self.submit(job).result()
            except BrokenProcessPool:
                self.end()
        raise RunError(f"its process died {MAX_ATTEMPTS} times (out of memory?)")

    def end(self) -> None:
        """End the process at once, without the seconds that a regular exit of torch takes."""
        if self._executor is not None:
            with suppress(BrokenProcessPool):
                self._executor.submit(os._exit, 0)
            self._executor.shutdown()
        self._executor = None


def _call_pickled(job: bytes) -> Any:
    return cloudpickle.loads(job)()


def _initialize() -> None:
    """Initialize a worker process so that it ends with its parent, even if that is killed."""
    # tqdm's default lock is a system resource, which a process that ends at once would leak.
    tqdm.set_lock(threading.RLock())
    parent = multiprocessing.parent_process()

    def watch() -> None:
        if parent is not None:
            parent.join()
            # Otherwise the worker would keep the lock of a folder that a new run may need.
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _work_on_scheduler(
    address: str,
    threads: ThreadPoolExecutor,
    work_off: Callable[[Callable[[Job], Any]], None],
) -> None:
    """Call jobs on a dask scheduler, with one thread for each worker, also for late ones.

    A worker has at most one job at a time, because dask counts the death of a worker against all
    jobs that were assigned to it.
    """
    from distributed import CancelledError, Client, KilledWorker, Security
    from distributed.comm.core import connect

    async def reach() -> None:
        comm = await connect(address, **Security().get_connection_args("client"))
        await comm.close()

    gone = f"the dask scheduler at {address!r} is gone"
    try:
        # A client that cannot connect leaves threads behind, and a minute of waiting at the exit.
        threads.submit(asyncio.run, reach()).result()
    except (OSError, ValueError) as error:
        raise RunError(f"there is no dask scheduler at {address!r}: {error}") from error
    except TypeError as error:  # dask raises it where there are no certificates for tls://
        raise RunError(f"cannot connect to the dask scheduler at {address!r}: {error}") from error

    def call(job: Job) -> Any:
        # As bytes: the scheduler would unpickle the job, and it knows no module of the study.
        pickled = cloudpickle.dumps(job)
        future = client.submit(_call_exclusively, pickled, list(sys.path), pure=False)
        try:
            return future.result()
        except KilledWorker as error:
            deaths = error.allowed_failures + 1
            raise RunError(f"its process died {deaths} times (out of memory?)") from error
        except CancelledError as error:
            raise RunError(gone) from error
        except ModuleNotFoundError as error:
            raise RunError(
                f"the workers of the scheduler cannot import {error.name!r}: install it there, or "
                "start them with its folder in PYTHONPATH"
            ) from error
        finally:
            # Otherwise dask would call the job again if the worker that holds its result dies.
            future.release()

    try:
        # As the default it would be in the way of other uses of dask.
        with Client(address, set_as_default=False) as client:
            client.wait_for_workers(1)
            running: set[Future[None]] = set()
            while not running or wait(running, timeout=1).not_done:
                n_new = len(cast(dict, client.nthreads())) - len(running)
                running |= {threads.submit(work_off, call) for _ in range(n_new)}
    except (CancelledError, OSError) as error:
        raise RunError(gone) from error


_PROCESS_LOCK = threading.Lock()


def _call_exclusively(job: bytes, folders: Sequence[str]) -> Any:
    """Call a job while no other job runs in this process: jobs use the global random state.

    Modules are looked for in `folders`, too: those where the caller finds its own.
    """
    with _PROCESS_LOCK:
        sys.path.extend(folder for folder in folders if folder not in sys.path)
        return _call_pickled(job)
