"""kill -9 at random moments: what was killed and is run again ends like what was not."""

import hashlib
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
from safetensors.numpy import load_file

from studies.engine import read_result
from tests.stress.processes import ROOT, run_until
from tests.studies.engine.test_execution import StudyFolder

RESULT = ROOT / "studies" / "results" / "contextual_retrieval" / "result.nc"

CAPTURE = """
import sys, time
from pathlib import Path
import mechanisms, probes
from studies.zoo import setup_of

name = "raven-softmax-k2-seed0"
task = setup_of(name).sampler()

def batches():
    for index in range(40):
        time.sleep(0.1)
        yield task.batch("id", index, 8)

hidden = {
    "stream": probes.Quantity("blocks.*.hook_resid_post", ("example", "pos", "d_model")),
    "pattern": probes.Quantity(
        "blocks.*.attn.hook_pattern", ("example", "head", "query_pos", "key_pos")
    ),
}
probes.capture(mechanisms.load(f"zoo:{name}"), batches(), hidden, to=Path(sys.argv[1], "x.zarr"))
"""


def of_arrays(arrays):
    """A hash of each array."""
    return {
        name: hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()
        for name, array in arrays.items()
        if array.dtype.kind in "fiub"
    }


def of_run(folder):
    """What a study has left: files, all numbers but times, and weights."""
    (path,) = folder.glob("*/result.nc")
    result, models = read_result(path), sorted((folder / "models").iterdir())
    found = {
        f"{group.path}/{name}": values.to_numpy()
        for group in result.subtree
        for name, values in group.data_vars.items()
        if name != "seconds"
    }
    for model in models:
        for weights in sorted(model.glob("*.safetensors")):
            found |= {f"{weights.name} {key}": one for key, one in load_file(weights).items()}
    return of_arrays(found) | {"files": sorted(file.name for file in path.parent.iterdir())}


def of_capture(folder):
    data = xr.open_zarr(folder / "x.zarr", consolidated=False)
    return of_arrays({str(name): values.to_numpy() for name, values in data.variables.items()})


def of_page(folder):
    return hashlib.sha256((folder / "page.html").read_bytes()).hexdigest()


@dataclass(frozen=True)
class Kind:
    """A kind of run: its command, for a folder to write to, and what is compared at the end."""

    command: Callable[[Path], list[str]]
    digest: Callable[[Path], object]
    kills: int


def of_study(*words):
    """The command of a study in a file of its own, two models with pauses."""

    def command(folder):
        made = StudyFolder(folder.parent, "own_study")
        options = ["--out", str(folder), "pause=0.1", "training.keep_at=5,15"]
        return [str(made.study_file), *options, *words]

    return command


def of_package(study, *words):
    file = str(ROOT / "studies" / study)
    return lambda folder: [file, *words, "--preset", "smoke", "--out", str(folder)]


def capture(folder):
    return ["-c", CAPTURE, str(folder)]


def view(folder):
    script = "from studies.cli import app; app()"
    return ["-c", script, "view", str(RESULT), "--to", str(folder / "page.html")]


KINDS = {
    "one worker": Kind(of_study("--workers", "1"), of_run, 15),
    "two workers": Kind(of_study("--workers", "2"), of_run, 20),
    "seeds together": Kind(of_study("--together", "2"), of_run, 15),
    "a dask scheduler, triangles": Kind(
        of_package("compositional_benchmarks.py", "--study", "triangles", "--scheduler", "ADDRESS"),
        of_run,
        15,
    ),
    "triangles, all of a study": Kind(
        of_package("compositional_benchmarks.py", "--study", "triangles", "--workers", "2"),
        of_run,
        15,
    ),
    "a capture on disk": Kind(capture, of_capture, 10),
    "a page": Kind(view, of_page, 10),
}


@pytest.fixture(scope="module")
def scheduler():
    from distributed import LocalCluster

    options = {"threads_per_worker": 1, "memory_limit": None, "dashboard_address": None}
    with LocalCluster(n_workers=2, silence_logs=50, **options) as cluster:
        yield cluster.scheduler_address


@pytest.mark.parametrize("name", KINDS)
def test_killed_runs_end_like_undisturbed_ones(name, tmp_path, scheduler, share, record):
    kind, rng = KINDS[name], random.Random(name)

    def command_for(folder):
        folder.mkdir(parents=True)
        words = kind.command(folder)
        return [scheduler if word == "ADDRESS" else word for word in words]

    undisturbed = tmp_path / "undisturbed" / "out"
    command, began = command_for(undisturbed), time.monotonic()
    run_until(command, tmp_path / "log")
    seconds = time.monotonic() - began
    expected, n_kills, n_ends = kind.digest(undisturbed), 0, 0
    wanted = max(1, round(kind.kills * share))
    while n_kills < wanted:
        folder = tmp_path / f"killed-{n_ends}" / "out"
        command = command_for(folder)
        while n_kills < wanted and not run_until(
            command, tmp_path / "log", rng.uniform(0, seconds)
        ):
            n_kills += 1
        run_until(command, tmp_path / "log")
        n_ends += 1
        assert kind.digest(folder) == expected
    record(f"{name}: kills", f"{n_kills}, {n_ends} runs identical", "all identical")
