"""Cells on workers that die every few seconds: none is lost, none is done twice."""

import json
import os
import random
import signal
import threading
from dataclasses import replace

import numpy as np
import psutil
from distributed import LocalCluster

from studies.engine import Resources, read_result, run
from tests.studies.engine.toy import TOY

CELLS = 200
SECONDS = 10
LOOPBACK = ("127.0.0.1", "::1")


def listening(process):
    """The addresses at which a process and its children listen."""
    found = set()
    for one in (process, *process.children(recursive=True)):
        try:
            connections = one.net_connections(kind="inet")
        except psutil.NoSuchProcess:  # a worker that was killed
            continue
        found |= {c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN}
    return found


def steps_of(folder):
    """The steps in the log of a model."""
    return [json.loads(line)["step"] for line in (folder / "log.jsonl").read_text().splitlines()]


def test_cells_on_workers_that_die(tmp_path, share, record):
    n, rng, stop = max(10, round(CELLS * share)), random.Random(0), threading.Event()
    study = replace(TOY, grids=({"seed": tuple(range(n))},))
    killed, addresses = [], set()

    def kill():
        while not stop.wait(SECONDS):
            # A worker that is still starting is given up by its nanny.
            known = cluster.scheduler.workers
            running = [one for one in cluster.workers.values() if one.worker_address in known]
            if running:
                chosen = rng.choice(running)
                os.kill(chosen.pid, signal.SIGKILL)
                killed.append(chosen.pid)
            addresses.update(listening(psutil.Process()))

    options = {"threads_per_worker": 1, "memory_limit": None, "dashboard_address": None}
    with LocalCluster(n_workers=3, silence_logs=50, **options) as cluster:
        thread = threading.Thread(target=kill)
        thread.start()
        try:
            resources = Resources(root=tmp_path / "runs", scheduler=cluster.scheduler_address)
            folder = run(study, resources=resources)
        finally:
            stop.set()
            thread.join()
    result, models = read_result(folder / "result.nc"), tmp_path / "runs" / "models"
    seeds = result["scores"]["seed"].to_numpy()
    assert sorted(seeds) == list(range(n))
    assert len(list(models.iterdir())) == n
    assert all(steps_of(one) == steps_of(next(models.iterdir())) for one in models.iterdir())
    few = replace(study, grids=({"seed": tuple(range(5))},))
    alone = read_result(
        run(few, resources=Resources(root=tmp_path / "alone", workers=1)) / "result.nc"
    )
    for name in ("accuracy", "loss"):
        mine = result["scores"].to_dataset()[name][np.argsort(seeds)][:5]
        np.testing.assert_array_equal(mine, alone["scores"][name])
    assert addresses <= set(LOOPBACK)
    record(
        "cells on three workers of which one dies every ten seconds",
        f"{n} of {n} cells, each once",
    )
    record("workers killed meanwhile", str(len(killed)), "at least 1")
    record(
        "addresses that scheduler and workers listen at", ", ".join(sorted(addresses)), "loopback"
    )
    assert killed
