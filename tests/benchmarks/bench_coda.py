"""What quasi-attention costs beside softmax attention: time and peak memory, forward and backward.

Ratios of two things measured in turns in one run, as in bench_raven, on one thread, as a worker of
a study has; for memory, in processes of their own.
"""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mechanisms import AttentionConfig, CodaAttentionConfig
from mechanisms.attention.quasi import l1_distances
from studies.engine.training import keep_freed_memory
from tests.benchmarks.timing import in_turns

keep_freed_memory()  # as `train` does

TOKENS = 1024


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


KINDS = {"softmax": AttentionConfig, "coda": CodaAttentionConfig}


def step_of(kind, length, *, n_heads=8, d_head=16, batch=None, causal=False):
    attention = KINDS[kind](n_heads=n_heads, d_head=d_head).build(n_heads * d_head)
    x = torch.randn(batch or max(1, TOKENS // length), length, n_heads * d_head)
    x.requires_grad_()
    mask = torch.ones(1, 1, length, length, dtype=torch.bool).tril() if causal else None

    def step():
        attention(x, x, mask=mask).sum().backward()

    return step


@pytest.mark.parametrize(
    ("length", "n_heads", "d_head"),
    [
        *((length, 8, 16) for length in (64, 128, 256, 512, 1024)),
        (64, 16, 4),
        (64, 4, 64),
        (512, 4, 64),
    ],
)
def test_time_beside_softmax(length, n_heads, d_head, record):
    sizes = {"n_heads": n_heads, "d_head": d_head}
    *_, ratio = in_turns(
        step_of("coda", length, **sizes), step_of("softmax", length, **sizes), rounds=7, repeats=1
    )
    what = f"length {length}, {n_heads} heads of {d_head}, {TOKENS} tokens"
    record(f"CoDA / softmax attention, forward and backward, {what}", f"{ratio:.2f}", "at most 4")


@pytest.mark.parametrize("d", [4, 16, 64])
def test_distances_beside_cdist(d, record):
    x, y = (torch.randn(2, 4, 512, d, requires_grad=True) for _ in range(2))
    *_, ratio = in_turns(
        lambda: torch.cdist(x, y, p=1).sum().backward(),
        lambda: l1_distances(x, y).sum().backward(),
        rounds=7,
        repeats=1,
    )
    what = f"2 x 4 heads x 512 positions x {d}"
    record(f"cdist / l1_distances, forward and backward, {what}", f"{ratio:.2f}")


def peak(kind, length, causal):
    """What a step needs beyond what was there before, in MB; in a process of its own (Linux)."""
    script = (
        "import re, torch\n"
        "from pathlib import Path\n"
        "from tests.benchmarks.bench_coda import step_of\n"
        "torch.set_num_threads(1)\n"
        f"step_of({kind!r}, 64, batch=1, causal={causal})()\n"
        f"step = step_of({kind!r}, {length}, batch=2, causal={causal})\n"
        "def memory(name):\n"
        "    status = Path('/proc/self/status').read_text()\n"
        "    return int(re.search(name + r':\\s+(\\d+) kB', status)[1])\n"
        # From here on the peak counts: importing needs more than what stays.
        "Path('/proc/self/clear_refs').write_text('5')\n"
        "before = memory('VmRSS')\n"
        "step()\n"
        "print(memory('VmHWM') - before)\n"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=root, capture_output=True, text=True, check=True
    )
    return int(done.stdout.split()[-1]) / 2**10


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [512, 1024])
def test_memory_beside_softmax(length, causal, record):
    coda, softmax = (peak(kind, length, causal) for kind in ("coda", "softmax"))
    record(
        f"CoDA / softmax attention, peak memory of forward and backward, length {length}, 2 x 8 "
        f"heads of 16{', causal' if causal else ''}",
        f"{coda / softmax:.2f} ({coda:.0f} / {softmax:.0f} MB)",
        "at most 1.5",
    )
