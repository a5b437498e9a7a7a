"""What geometric attention costs beside softmax attention, and how fast the router trains.

Ratios of two things measured in turns in one run, as in bench_raven.
"""

import math
import sys

import pytest
import torch
from torch.nn import functional
from torch.nn.functional import logsigmoid
from torch.profiler import ProfilerActivity, profile

from mechanisms import (
    AttentionConfig,
    GeometricAttentionConfig,
    geometric_weights,
)
from mechanisms.dropout import dropout
from studies.engine.training import cross_entropy, keep_freed_memory
from studies.ndr_control_flow import STUDY
from tests.benchmarks.timing import in_turns, seconds

keep_freed_memory()  # as `train` does


@pytest.mark.parametrize(
    ("batch", "length", "d_model", "n_heads"),
    [(128, 8, 64, 1), (32, 50, 256, 4), (32, 50, 512, 16)],
)
def test_geometric_attention_beside_softmax(batch, length, d_model, n_heads, record):
    generator = torch.Generator().manual_seed(0)
    heads = {"n_heads": n_heads, "d_head": d_model // n_heads}
    x = torch.randn(batch, length, d_model, generator=generator).requires_grad_()

    def work(config):
        attention = config.build(d_model, generator=generator)

        def run():
            x.grad = None
            attention(x, x).sum().backward()

        return run

    geometric, softmax, ratio = in_turns(
        work(GeometricAttentionConfig(**heads)), work(AttentionConfig(**heads)), rounds=9, repeats=5
    )
    assert geometric > 0 < softmax
    size = f"{batch} x {length} x {d_model}, {n_heads} heads"
    wanted = "at most 3 at length 50" if length == 50 else ""
    record(f"geometric / softmax attention, forward and backward, {size}", f"{ratio:.2f}", wanted)


def by_gathering(logits):
    """The weights from sums of logarithms in the order of distance, put into it by gathering."""
    n = logits.shape[-1]
    offset = torch.arange(n) - torch.arange(n)[:, None]
    order = (2 * offset.abs() - (offset > 0).long()).argsort(1)
    ordered = logits.gather(-1, order.expand(logits.shape))
    missed = logsigmoid(-ordered).cumsum(-1)
    before = torch.cat([torch.zeros_like(missed[..., :1]), missed[..., :-1]], -1)
    weights = (logsigmoid(ordered) + before).exp()
    return weights.gather(-1, order.argsort(1).expand(logits.shape))


@pytest.mark.parametrize(("batch", "heads", "length"), [(128, 1, 8), (64, 4, 50)])
def test_geometric_weights_beside_gathering(batch, heads, length, record):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(batch, heads, length, length, generator=generator)
    itself = torch.eye(length, dtype=torch.bool)
    logits = logits.masked_fill(itself, -math.inf).requires_grad_()
    gradient = torch.randn(logits.shape, generator=generator)
    assert torch.allclose(geometric_weights(logits), by_gathering(logits), atol=1e-6)

    def work(function):
        def run():
            logits.grad = None
            function(logits).backward(gradient)

        return run

    *_, ratio = in_turns(work(by_gathering), work(geometric_weights), rounds=9, repeats=5)
    record(
        f"log-space gathering / geometric_weights, {batch} x {heads} heads x {length}",
        f"{ratio:.2f}",
        "more than 1",
    )


def test_a_step_with_dropout_beside_torchs(record, monkeypatch):
    setup = STUDY.plan("laptop", ["model=ndr", "task.direction=forward"]).cells[0]
    model = setup.build(torch.Generator().manual_seed(0)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    batch = setup.sampler().batch("train", 0, setup.training.batch_size)
    users = [
        module
        for name, module in sys.modules.items()
        if name.startswith("mechanisms.") and getattr(module, "dropout", None) is dropout
    ]
    assert len(users) > 5

    def step_with(function):
        def step():
            for module in users:
                monkeypatch.setattr(module, "dropout", function)
            loss = cross_entropy(model(batch.inputs), batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        return step

    *_, ratio = in_turns(step_with(dropout), step_with(functional.dropout), rounds=25, repeats=2)
    record(
        "step / step with torch's dropout, table lookup, laptop sizes", f"{ratio:.2f}", "below 1"
    )


@pytest.mark.parametrize("name", ["laptop", "paper"])
def test_training_steps_per_second(name, record):
    setup = STUDY.plan(name, ["model=ndr", "task.direction=forward"]).cells[0]
    task, model = setup.sampler(), setup.build(torch.Generator().manual_seed(0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    size = setup.training.batch_size
    batch = task.batch("train", 0, size)
    number = iter(range(1, 10**6))

    def step():
        loss = cross_entropy(model(batch.inputs), batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    rounds = {"laptop": (9, 5), "paper": (3, 1)}[name]
    stepping, sampling, _ = in_turns(
        step,
        lambda: task.batch("train", next(number), size),
        rounds=rounds[0],
        repeats=rounds[1],
    )
    what = f"table lookup, {name} sizes, batch {size}"
    record(f"Neural Data Router, steps per second, {what}", f"{1 / stepping:.2f}")
    record(f"sampling / step, {what}", f"{100 * sampling / stepping:.2f}%", "at most 5%")

    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        seconds(step, 2)
    events = profiled.key_averages()
    total = sum(event.self_cpu_time_total for event in events)
    events = sorted(events, key=lambda event: -event.self_cpu_time_total)[:6]
    shares = [
        f"{event.key.removeprefix('aten::')} {100 * event.self_cpu_time_total / total:.0f}%"
        for event in events
    ]
    record(f"where a step's time goes, {what}", ", ".join(shares))
