"""Jobs side by side: in this process and in others, here or on a dask scheduler's workers."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from typing import TYPE_CHECKING, Any, cast

from studies.engine.folders import RunError
from studies.engine.training import TrainingError

if TYPE_CHECKING:
    from distributed import Client, Future

Job = Callable[[], object]


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
        self._n, self._scheduler = n, scheduler
        self._client: Client | None = None
        self._open = ExitStack()

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *error: Any) -> bool | None:
        return self._open.__exit__(*error)

    def call(self, jobs: Sequence[Job], names: Sequence[str] | None = None) -> list[Any]:
        """What jobs, which must be picklable, return.

        Args:
            jobs: what to call.
            names: of the jobs, for errors; their numbers by default.

        Raises:
            RunError: a job's process died each time, or the scheduler is out of reach.
            RunError, TrainingError, ValueError, RuntimeError: a job raised it or, for the last of
                these, any other error, which is the cause of this one.
        """
        if self._scheduler is None and (self._n <= 1 or len(jobs) <= 1):
            return [job() for job in jobs]
        queue = _Queue(jobs)
        if self._scheduler is not None:
            queue.deal_out(self._connected)
        else:
            with ThreadPoolExecutor(1) as beside:
                others = beside.submit(queue.deal_out, self._connected)
                queue.work_off()
            others.result()
        for number, error in sorted(queue.failed.items()):
            kinds = (RunError, TrainingError, ValueError)
            kind = next((kind for kind in kinds if isinstance(error, kind)), RuntimeError)
            name = names[number] if names else f"job {number}"
            raise kind(f"{name}: {error} ({len(queue.failed)} of {len(jobs)} failed)") from error
        return [queue.results[number] for number in range(len(jobs))]

    def _connected(self) -> Client:
        if self._client is None:
            remote = self._scheduler
            others = _processes(self._n - 1) if remote is None else _scheduler(remote)
            self._client = self._open.enter_context(others)
        return self._client


class _Queue:
    """Jobs that wait, by number, for two threads; and what became of the others."""

    def __init__(self, jobs: Sequence[Job]):
        self._jobs, self._waiting = jobs, deque(range(len(jobs)))
        self.results: dict[int, Any] = {}
        self.failed: dict[int, Exception] = {}

    def work_off(self) -> None:
        """Call jobs in this process until none waits."""
        with self._emptied_by_errors():
            while (number := self._next()) is not None:
                try:
                    self.results[number] = self._jobs[number]()
                except Exception as error:
                    self.failed[number] = error

    def deal_out(self, connected: Callable[[], Client]) -> None:
        """Give jobs to the workers of a client until all are done."""
        from distributed import wait

        running: dict[Future[Any], int] = {}
        with self._emptied_by_errors():
            client = connected()
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
        """What goes wrong beside the jobs ends the other thread too: nothing waits any more."""
        try:
            yield
        except BaseException:
            self._waiting.clear()
            raise


@contextmanager
def _scheduler(address: str) -> Iterator[Client]:
    """A client of a dask scheduler."""
    from distributed import CancelledError, Client

    try:
        client = Client(address)
    except (OSError, ValueError) as error:
        raise RunError(f"there is no dask scheduler at {address!r}: {error}") from error
    try:
        with closing(client):
            yield client
    except (CancelledError, OSError) as error:
        raise RunError(f"the dask scheduler at {address!r} is gone") from error


@contextmanager
def _processes(n_workers: int) -> Iterator[Client]:
    """A client of so many processes of this machine."""
    import dask.config
    from distributed import Client, LocalCluster

    settings = {
        # Their parents see them die; one that only keeps silent is at work, or suspended.
        "distributed.scheduler.worker-ttl": None,
        "distributed.worker.profile.enabled": False,
    }
    with (
        dask.config.set(settings),
        LocalCluster(
            n_workers=n_workers,
            threads_per_worker=1,
            memory_limit=None,
            # Another cluster may have the usual port.
            dashboard_address=":0",
            silence_logs=logging.CRITICAL,
        ) as cluster,
        # As a context a client would have to be closed by the thread that opened it.
        closing(Client(cluster)) as client,
    ):
        yield client


_PROCESS = threading.Lock()


def _alone(job: Job) -> Any:
    """Call a job when no other is at work in this process, whose random state it uses."""
    with _PROCESS:
        return job()
