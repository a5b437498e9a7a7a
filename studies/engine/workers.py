"""Jobs side by side: in this process and in others, here or on a dask scheduler's workers."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, cast

from studies.engine.folders import RunError
from studies.engine.training import TrainingError

if TYPE_CHECKING:
    from distributed import Client

Job = Callable[[], object]


def run_side_by_side(
    jobs: Sequence[Job],
    workers: int,
    *,
    scheduler: str | None = None,
    names: Sequence[str] | None = None,
) -> None:
    """Call jobs, several at once.

    With one worker or one job, and no scheduler, they are called one after another in this
    process, and the first error ends that. With several workers this process is one of them, so
    that work begins while the others start; these import once, and live on. A job whose process
    dies is called again, up to three times, and one that raises an error keeps no other from being
    called.

    Args:
        jobs: what to call; picklable.
        workers: processes on this machine, with which a job each is busy.
        scheduler: address of a dask scheduler whose workers are used instead.
        names: of the jobs, for errors; their numbers by default.

    Raises:
        RunError: a job's process died each time, or the scheduler is out of reach.
        RunError, TrainingError, ValueError: a job raised it; the message says which job, and how
            many others failed.
        RuntimeError: a job raised another error, which is the cause of this one.
    """
    if scheduler is None and (workers <= 1 or len(jobs) <= 1):
        for job in jobs:
            job()
        return
    queue = _Queue(jobs)
    if scheduler is not None:
        with _connected(0, scheduler) as client:
            queue.deal_out(client)
    else:
        others = threading.Thread(target=_with_others, args=(queue, min(workers, len(jobs)) - 1))
        others.start()
        try:
            queue.work_off()
        except BaseException:
            queue.clear()
            raise
        finally:
            others.join()
    queue.raise_failures(names)


class _Queue:
    """Jobs that wait, and the errors that some ended in.

    Args:
        jobs: what to call.
    """

    def __init__(self, jobs: Sequence[Job]):
        self._jobs = jobs
        self._waiting = deque(range(len(jobs)))
        self._failed: dict[int, Exception] = {}
        self.broken: Exception | None = None

    def work_off(self) -> None:
        """Call jobs in this process until none waits."""
        while (number := self._next()) is not None:
            try:
                self._jobs[number]()
            except Exception as error:
                self._failed[number] = error

    def deal_out(self, client: Client) -> None:
        """Give jobs to the workers of a client until all are done."""
        from distributed import CancelledError, KilledWorker, wait

        running: dict[Any, int] = {}
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
                number = running.pop(future)
                try:
                    future.result()
                except CancelledError:
                    raise
                except KilledWorker as error:
                    deaths = error.allowed_failures + 1
                    self._failed[number] = RunError(
                        f"its process died {deaths} times (out of memory?)"
                    )
                except Exception as error:
                    self._failed[number] = error
                # Or dask calls the job again if the worker that keeps its result dies.
                future.release()

    def clear(self) -> None:
        """Forget the jobs that wait."""
        self._waiting.clear()

    def raise_failures(self, names: Sequence[str] | None) -> None:
        """Raise the first error, if there is any."""
        if self.broken is not None:
            raise self.broken
        for number, error in sorted(self._failed.items()):
            kinds = (RunError, TrainingError, ValueError)
            kind = next((kind for kind in kinds if isinstance(error, kind)), RuntimeError)
            name = names[number] if names else f"job {number}"
            raise kind(
                f"{name}: {error} ({len(self._failed)} of {len(self._jobs)} failed)"
            ) from error

    def _next(self) -> int | None:
        # Both threads take from the queue.
        with suppress(IndexError):
            return self._waiting.popleft()
        return None


def _with_others(queue: _Queue, n_workers: int) -> None:
    """Let processes of this machine's own work off a queue, from a thread beside the main one."""
    try:
        with _connected(n_workers, None) as client:
            queue.deal_out(client)
    except Exception as error:
        queue.broken = error
        queue.clear()


@contextmanager
def _connected(workers: int, scheduler: str | None) -> Iterator[Client]:
    """A client of `scheduler`, or of a cluster of this machine's own with so many workers."""
    import dask.config
    from distributed import CancelledError, Client, LocalCluster

    if scheduler is not None:
        try:
            client = Client(scheduler)
        except (OSError, ValueError) as error:
            raise RunError(f"there is no dask scheduler at {scheduler!r}: {error}") from error
        try:
            with client:
                yield client
        except (CancelledError, OSError) as error:
            raise RunError(f"the dask scheduler at {scheduler!r} is gone") from error
        return
    settings = {
        # Their parents see them die; one that only keeps silent is at work, or suspended.
        "distributed.scheduler.worker-ttl": None,
        "distributed.worker.profile.enabled": False,
    }
    with (
        dask.config.set(settings),
        LocalCluster(
            n_workers=workers,
            threads_per_worker=1,
            memory_limit=None,
            # Another cluster may have the usual port.
            dashboard_address=":0",
            silence_logs=logging.CRITICAL,
        ) as cluster,
        Client(cluster) as client,
    ):
        yield client


_PROCESS = threading.Lock()


def _alone(job: Job) -> None:
    """Call a job when no other is at work in this process, whose random state it uses."""
    with _PROCESS:
        job()
