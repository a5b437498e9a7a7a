"""Jobs side by side: in this process and in others, here or on a dask scheduler's workers."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, cast

import cloudpickle

from studies.engine.folders import RunError
from studies.engine.training import TrainingError

if TYPE_CHECKING:
    from distributed import Client, Future

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
        queue = _Queue(jobs)
        if self._scheduler is not None:
            with _client(self._scheduler) as client:
                queue.deal_out(client)
        else:
            with ThreadPoolExecutor(len(others)) as threads:
                ends = [threads.submit(queue.work_off, other.call) for other in others]
                queue.work_off(lambda job: job())
            for end in ends:
                end.result()
        for number, error in sorted(queue.failed.items()):
            kinds = (RunError, TrainingError, ValueError)
            kind = next((kind for kind in kinds if isinstance(error, kind)), RuntimeError)
            name = names[number] if names else f"job {number}"
            raise kind(f"{name}: {error} ({len(queue.failed)} of {len(jobs)} failed)") from error
        return [queue.results[number] for number in range(len(jobs))]


class _Process:
    """Another process: started at its first job, and again if it died."""

    def __init__(self):
        self._executor: ProcessPoolExecutor | None = None

    def call(self, job: Job) -> Any:
        """What the job returns there."""
        for _ in range(MOST_DEATHS):
            if self._executor is None:
                context = multiprocessing.get_context("spawn")
                self._executor = ProcessPoolExecutor(1, context, initializer=_end_with_parent)
            try:
                # What pickle itself cannot send: readings and views that are made in place.
                return self._executor.submit(_called, cloudpickle.dumps(job)).result()
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


def _end_with_parent() -> None:
    """Let this process end with the one that started it, also if that is killed."""
    parent = multiprocessing.parent_process()

    def watch() -> None:
        if parent is not None:
            parent.join()
            # A new run may want the folder that this one is at work in.
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


class _Queue:
    """Jobs that wait, by number, for several threads; and what became of the others."""

    def __init__(self, jobs: Sequence[Job]):
        self._jobs, self._waiting = jobs, deque(range(len(jobs)))
        self.results: dict[int, Any] = {}
        self.failed: dict[int, Exception] = {}

    def work_off(self, call: Callable[[Job], Any]) -> None:
        """Call jobs until none waits."""
        with self._emptied_by_errors():
            while (number := self._next()) is not None:
                try:
                    self.results[number] = call(self._jobs[number])
                except Exception as error:
                    self.failed[number] = error

    def deal_out(self, client: Client) -> None:
        """Give jobs to the workers of a client until all are done."""
        from distributed import wait

        running: dict[Future[Any], int] = {}
        while self._waiting or running:
            # One for each worker and no more: dask blames a death on all that it was given.
            free = len(cast(dict, client.nthreads())) - len(running)
            while free > 0 and (number := self._next()) is not None:
                running[client.submit(_alone, self._jobs[number], pure=False)] = number
                free -= 1
            if not running:
                if self._waiting:
                    client.wait_for_workers(1)
                continue
            # Not for ever: meanwhile workers may have come.
            with suppress(TimeoutError):
                wait(list(running), timeout=1, return_when="FIRST_COMPLETED")
            for future in [future for future in running if future.done()]:
                self._finish(running.pop(future), future)

    def _finish(self, number: int, future: Future[Any]) -> None:
        """Note what a job returned, or what error it ended in."""
        from distributed import CancelledError, KilledWorker

        try:
            self.results[number] = future.result()
        except CancelledError:
            raise
        except KilledWorker as error:
            deaths = error.allowed_failures + 1
            self.failed[number] = RunError(f"its process died {deaths} times (out of memory?)")
        except Exception as error:
            self.failed[number] = error
        # Or dask calls the job again if the worker that keeps its result dies.
        future.release()

    def _next(self) -> int | None:
        with suppress(IndexError):
            return self._waiting.popleft()
        return None

    @contextmanager
    def _emptied_by_errors(self) -> Iterator[None]:
        """What goes wrong beside the jobs ends the other threads too: nothing waits any more."""
        try:
            yield
        except BaseException:
            self._waiting.clear()
            raise


@contextmanager
def _client(address: str) -> Iterator[Client]:
    """A client of a dask scheduler."""
    from distributed import CancelledError, Client

    try:
        client = Client(address)
    except (OSError, ValueError) as error:
        raise RunError(f"there is no dask scheduler at {address!r}: {error}") from error
    try:
        with client:
            yield client
    except (CancelledError, OSError) as error:
        raise RunError(f"the dask scheduler at {address!r} is gone") from error


_PROCESS = threading.Lock()


def _alone(job: Job) -> Any:
    """Call a job when no other is at work in this process, whose random state it uses."""
    with _PROCESS:
        return job()
