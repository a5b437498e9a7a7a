"""The memory of processes that train, capture and run many cells for long does not grow."""

import subprocess
import sys
import time

import numpy as np
import psutil
import pytest

from tests.stress.processes import ENVIRONMENT, ROOT

MINUTES = 20
CELLS = 1000
GROWTH = 0.03
"""Of the memory after the first fifth of the time."""

TRAINING = (
    str(ROOT / "studies" / "contextual_retrieval.py"),
    *("--preset", "smoke", "--workers", "1", "--out", "out"),
    *("model=compositional", "seed=0", "training.n_steps=100000000", "training.evaluate_every=500"),
)
CAPTURE = """
import itertools
import mechanisms, probes
from studies.zoo import setup_of

name = "raven-softmax-k2-seed0"
task = setup_of(name).sampler()
batches = (task.batch("id", index, 8) for index in itertools.count())
stream = probes.Quantity("blocks.0.hook_resid_post", ("example", "pos", "d_model"))
probes.capture(mechanisms.load(f"zoo:{name}"), batches, {"stream": stream}, to="x.zarr")
"""
MANY_CELLS = """
from dataclasses import replace
from pathlib import Path
from studies.engine import Resources, run
from tests.studies.engine.toy import TOY

if __name__ == "__main__":
    n = int(__import__("sys").argv[1])
    study = replace(TOY, grids=({"seed": tuple(range(n))},))
    resources = Resources(root=Path("out"), workers=1)
    run(study, changes=["training.n_steps=4", "training.keep_at="], resources=resources)
"""


def memory_of(process):
    """Megabytes that a process and its children have in memory."""
    processes = (process, *process.children(recursive=True))
    return sum(one.memory_info().rss for one in processes) / 1e6


def memory_over_time(command, folder, seconds, is_joining=lambda: False):
    """The memory each second, until the end of the command or of the time.

    What a run takes while it joins the results of all cells is left out: it must hold them.
    """
    with (folder / "log").open("w") as log:
        process = psutil.Popen(
            [sys.executable, *command],
            env=ENVIRONMENT,
            cwd=folder,
            stdout=subprocess.DEVNULL,
            stderr=log,
        )
        values, end = [], time.monotonic() + seconds
        while process.poll() is None and time.monotonic() < end:
            if not is_joining():
                values.append(memory_of(process))
            time.sleep(1)
        ended = process.poll()
        if ended is None:
            for one in (*process.children(recursive=True), process):
                one.kill()
            process.wait()
    assert ended in (None, 0), (folder / "log").read_text()
    return np.array(values)


@pytest.mark.parametrize(
    ("what", "command", "minutes"),
    [
        ("training", TRAINING, MINUTES),
        ("capture", ("-c", CAPTURE), MINUTES / 2),
        ("cells", None, MINUTES),
    ],
)
def test_memory_does_not_grow(what, command, minutes, tmp_path, share, record):
    label, n = f"{what}, {minutes * share:.2g} minutes", np.inf
    if command is None:
        n, label = max(200, round(CELLS * share)), f"{max(200, round(CELLS * share))} cells"
        (tmp_path / "many.py").write_text(MANY_CELLS)
        command = ("many.py", str(n))
    values = memory_over_time(
        command,
        tmp_path,
        60 * minutes * (1 if what == "cells" else share),
        is_joining=lambda: len(list(tmp_path.glob("out/models/*"))) == n,
    )
    fifth = max(1, len(values) // 5)
    first, last = np.median(values[fifth : 2 * fifth]), np.median(values[-fifth:])
    record(f"{label}: MB in the second and the last fifth", f"{first:.0f}, {last:.0f}", "+3%")
    assert last < (1 + GROWTH) * first
