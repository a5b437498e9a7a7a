"""Captures on disk against the plain forward passes: time, and memory that does not grow.

The residual stream of 12 layers of width 768 at all of 32 positions is kept: 1.2 MB for each
example. Run as a script with a number of gigabytes, it captures so much.
"""

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

import probes
from mechanisms import AttentionConfig, FeedForwardConfig, Transformer, TransformerConfig

LAYERS, WIDTH, LENGTH, BATCH = 12, 768, 32, 16


class Sample:
    def __init__(self, number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        self.inputs = torch.randint(0, 1000, (BATCH, LENGTH), generator=generator)
        self.latents = {"label": torch.randint(0, 8, (BATCH,), generator=generator)}


def measure(gigabytes: float) -> dict[str, float]:
    """Seconds of plain passes and of the capture, and the peak memory before and after in MB."""
    torch.set_num_threads(2)
    config = TransformerConfig(
        d_input=1000,
        d_output=1000,
        d_model=WIDTH,
        n_layers=LAYERS,
        attention=AttentionConfig(n_heads=12, d_head=64),
        feed_forward=FeedForwardConfig(d_mlp=2048),
        inputs="tokens",
        positions="sinusoidal",
        shared=True,
    )
    model = Transformer(config).eval()
    per_batch = BATCH * LENGTH * LAYERS * WIDTH * 4
    count = max(2, round(gigabytes * 1e9 / per_batch))
    stream = probes.Quantity("blocks.*.hook_resid_post", ("example", "pos", "feature"))

    def plain(numbers: range) -> float:
        start = time.perf_counter()
        with torch.no_grad():
            for number in numbers:
                model(Sample(number).inputs)
        return time.perf_counter() - start

    plain(range(2))
    # Half of the plain passes before, half after: the speed of machines drifts.
    before = plain(range(count // 2))
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        path = Path(folder) / "codes.zarr"
        data = probes.capture(model, map(Sample, range(count)), {"code": stream}, to=path)
        captured = time.perf_counter() - start
        assert data["code"].nbytes == count * per_batch
    after = plain(range(count // 2, count))
    return {
        "plain": before + after,
        "captured": captured,
        "memory": memory,
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "gigabytes": count * per_batch / 1e9,
    }


def test_captures_take_the_time_of_the_passes_and_no_memory(record) -> None:
    command = [sys.executable, __file__, "1.5"]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(run.stdout.splitlines()[-1])
    ratio = found["captured"] / found["plain"]
    size = f"{found['gigabytes']:.1f} GB of residual streams to disk"
    record(f"{size} / plain passes, seconds", f"{ratio:.2f}", "at most 1.3")
    megabytes = f"{found['peak']:.0f} ({found['memory']:.0f} before)"
    record(f"{size}, peak memory of the process in MB", megabytes, "below 1,000")
    assert found["peak"] < 1000


if __name__ == "__main__":
    print(json.dumps(measure(float(sys.argv[1]))))
