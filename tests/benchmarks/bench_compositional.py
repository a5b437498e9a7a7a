"""Compositional against multi-head attention, and how fast the tasks it was judged on are made."""

import subprocess
import sys
import time

import pytest
import torch

import tasks
from mechanisms import AttentionConfig, CompositionalAttentionConfig, FeedForwardConfig
from mechanisms.models.transformer import Block, TransformerConfig
from studies.engine.training import keep_freed_memory
from tests.benchmarks.timing import in_turns, seconds

keep_freed_memory()  # as `train` does

SEARCHES = 8
SIZES = {
    "Sort-of-CLEVR": {"batch": 64, "n": 26, "d_model": 256, "d_mlp": 512},
    "SCAN": {"batch": 128, "n": 49, "d_model": 128, "d_mlp": 256},
    "WikiText": {"batch": 4, "n": 256, "d_model": 512, "d_mlp": 2048},
}
"""Widths of Mittal et al. 2021; batches and lengths that fit the machine."""


def block(attention, d_model, d_mlp, **_):
    config = TransformerConfig(
        d_input=1,
        d_output=1,
        d_model=d_model,
        n_layers=1,
        attention=attention,
        feed_forward=FeedForwardConfig(d_mlp=d_mlp),
        positions="none",
    )
    return Block(config, generator=torch.Generator().manual_seed(0))


def attentions(d_model, n_retrievals):
    d_head = d_model // SEARCHES
    compositional = CompositionalAttentionConfig(
        n_searches=SEARCHES, n_retrievals=n_retrievals, d_head=d_head, d_selection=min(32, d_head)
    )
    return compositional, AttentionConfig(n_heads=SEARCHES, d_head=d_head)


def step(module, size):
    x = torch.randn(size["batch"], size["n"], size["d_model"], requires_grad=True)

    def work():
        module.zero_grad()
        module(x).square().mean().backward()

    return work


class Itself(torch.nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.attention = attention

    def forward(self, x):
        return self.attention(x, x)


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("n_retrievals", [1, 2, 4, 8])
def test_compositional_beside_multi_head_attention(name, n_retrievals, record):
    size = SIZES[name]
    ours, theirs = attentions(size["d_model"], n_retrievals)
    ratios = []
    for pair in (
        [Itself(config.build(size["d_model"])) for config in (ours, theirs)],
        [block(config, **size) for config in (ours, theirs)],
    ):
        first, second = (step(module, size) for module in pair)
        ratios.append(in_turns(first, second, rounds=7, repeats=2)[2])
    record(
        f"compositional / multi-head attention, forward and backward, {name}, R = {n_retrievals}",
        f"{ratios[0]:.2f}; {ratios[1]:.2f} for the whole block",
        "about 1.1 (paper: training time of the model)",
    )


MEMORY = """
import sys, torch
from tests.benchmarks.bench_compositional import SIZES, Itself, attentions, block, step
name, which, n_retrievals = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
size = SIZES[name]
module = block(attentions(size["d_model"], n_retrievals)[which], **size)
torch.set_num_threads(1)
small = dict(size, batch=1)
step(module, small)()
def peak():
    return next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith("VmHWM"))
before = peak()
step(module, size)()
print(peak() - before)
"""


def test_peak_memory(record):
    for name in SIZES:
        multi_head, *ours = (
            int(
                subprocess.run(
                    [sys.executable, "-c", MEMORY, name, str(which), str(n_retrievals)],
                    check=True,
                    capture_output=True,
                    text=True,
                ).stdout
            )
            for which, n_retrievals in ((1, 1), (0, 1), (0, 2), (0, 4), (0, 8))
        )
        shown = ", ".join(
            f"{memory / multi_head:.2f} (R = {r})"
            for memory, r in zip(ours, (1, 2, 4, 8), strict=True)
        )
        record(
            f"peak memory, compositional / multi-head, a block's training step, {name}",
            f"{shown}; multi-head {multi_head / 1024:.0f} MB",
        )


def test_sort_of_clevr_is_made_in_time(record):
    start = time.perf_counter()
    task = tasks.SortOfClevr(tasks.SortOfClevrConfig())
    questions = 0
    for split in task.splits:
        for index in range(task.size(split) // 2000 + 1):
            # Every picture is drawn at least once: there are 30 questions of each.
            if index * 2000 < task.size(split) / 30:
                task.batch(split, index, min(2000, task.size(split)))
        questions += task.size(split)
    taken = time.perf_counter() - start
    record(
        f"Sort-of-CLEVR: 10,200 pictures drawn and {questions:,} questions answered, seconds",
        f"{taken:.1f}",
        "at most 60",
    )


GENERATORS = {
    "contextual retrieval, 2 x 4": (
        lambda: tasks.ContextualRetrieval(tasks.ContextualRetrievalConfig()),
        256,
    ),
    "contextual retrieval, 4 x 16": (
        lambda: tasks.ContextualRetrieval(
            tasks.ContextualRetrievalConfig(n_searches=4, n_retrievals=16)
        ),
        256,
    ),
    "Sort-of-CLEVR": (lambda: tasks.SortOfClevr(tasks.SortOfClevrConfig()), 64),
    "triangles": (lambda: tasks.Triangles(tasks.TrianglesConfig()), 128),
    "ESBN, same/different": (
        lambda: tasks.ESBN(tasks.ESBNConfig(rule="same_different", n_withheld=50)),
        32,
    ),
    "ESBN, distribution of three": (
        lambda: tasks.ESBN(tasks.ESBNConfig(rule="distribution_of_three", n_withheld=50)),
        32,
    ),
    "SCAN, length": (lambda: tasks.Scan(tasks.ScanConfig(split="length")), 256),
}


@pytest.mark.parametrize("name", GENERATORS)
def test_samples_per_second(name, record):
    build, size = GENERATORS[name]
    task = build()
    number = iter(range(10**6))

    def work():
        task.batch("train", next(number), size)

    seconds(work, 3)
    each = min(seconds(work, 10) for _ in range(5))
    record(f"samples per second, {name}, batches of {size}", f"{size / each:,.0f}")
