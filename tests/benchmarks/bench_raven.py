"""What hooks, sampling and capture cost, and how fast each mechanism trains.

All are ratios of two things measured in turns in one run, since machines are shared: the median
over rounds of the ratio within a round.
"""

import resource
import subprocess
import sys
import tempfile
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import probes
import tasks
from mechanisms import AttentionConfig, FeedForwardConfig, Transformer, TransformerConfig
from studies.engine.checkpoints import read_log
from studies.engine.trainees import run_training
from studies.engine.training import cross_entropy, keep_freed_memory
from studies.raven_latent_code import LAPTOP
from tests.benchmarks.timing import in_turns

keep_freed_memory()  # as `train` does

SIZES = {
    2: {"d_model": 64, "n_heads": 8, "d_mlp": 128, "batch_size": 64},
    4: {"d_model": 128, "n_heads": 16, "d_mlp": 256, "batch_size": 128},
}


REFERENCE = {"softmax": 5.3, "linear": 5.9, "hyla": 3.4}
"""Steps per second of the same formulas at K = 4 in JAX 0.10.2, compiled, float32, without sampling
and dropout, on 2 cores of an AMD EPYC (AVX-512), 2026-11-23: means of two runs."""

REFERENCE_RATE = 181e9
"""Operations per second of torch's matrix products on that machine on that day."""


def build(n_features, mechanism="softmax", **changes):
    size = SIZES[n_features]
    config = TransformerConfig(
        **{
            "d_input": 8,
            "d_output": 8,
            "d_model": size["d_model"],
            "n_layers": 4,
            "attention": AttentionConfig.named(mechanism, n_heads=size["n_heads"], d_head=4),
            "feed_forward": FeedForwardConfig(d_mlp=size["d_mlp"]),
            "max_distance": 9 * n_features,
            "n_readout": n_features,
        }
        | changes
    )
    return Transformer(config, generator=torch.Generator().manual_seed(0))


def task_of(n_features):
    return tasks.Raven(tasks.RavenConfig(n_features=n_features))


def step_of(model, batch):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step():
        loss = cross_entropy(model(batch.inputs)[:, -batch.targets.shape[1] :], batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


class Bare:
    """What stands for a hook point: returns what it gets, and has no hooks."""

    def __call__(self, x):
        return x

    def modules(self):
        return ()


def without_hook_points(model):
    """The same model with a plain function where every hook point was."""
    for module in list(model.modules()):
        for name, _ in list(module.named_children()):
            if name.startswith("hook_"):
                delattr(module, name)
                object.__setattr__(module, name, Bare())
    return model


@pytest.mark.parametrize("n_features", SIZES)
def test_unobserved_hooks(n_features, record):
    batch = task_of(n_features).batch("train", 0, SIZES[n_features]["batch_size"])
    hooked, bare = build(n_features), without_hook_points(build(n_features))
    # A percent is looked for, on a machine whose speed drifts: many short rounds.
    rounds, repeats = (301, 3) if n_features == 2 else (41, 2)
    *_, ratio = in_turns(
        step_of(hooked, batch), step_of(bare, batch), rounds=rounds, repeats=repeats
    )
    record(
        f"step with unobserved hooks / without hook points, K={n_features}",
        f"{ratio:.3f}",
        "at most 1.03",
    )
    assert ratio <= 1.03


@pytest.mark.parametrize("n_features", SIZES)
def test_sampling(n_features, record):
    size = SIZES[n_features]["batch_size"]
    task = task_of(n_features)
    step = step_of(build(n_features), task.batch("train", 0, size))
    sampled, _, ratio = in_turns(lambda: task.batch("train", 1, size), step)
    record(f"sampling / training step, K={n_features}", f"{ratio:.3f}", "at most 0.05")
    record(f"instances sampled per second, K={n_features}", f"{size / sampled:,.0f}")
    assert ratio <= 0.05


def capture_batches(number):
    task, model = task_of(2), build(2).eval()
    quantity = probes.latent_code(*tasks.raven_last_row(2), dims=("feature", "key"))
    batches = [task.batch("id_unpermuted", index, 64) for index in range(number)]
    return model, batches, quantity


def test_capture_time(record):
    model, batches, quantity = capture_batches(100)

    @torch.no_grad()
    def plain():
        for batch in batches:
            model(batch.inputs)

    # Plain passes over everything that a listener may see: all positions of the last block too.
    whole = build(2, n_readout=None).eval()

    @torch.no_grad()
    def plain_whole():
        for batch in batches:
            whole(batch.inputs)

    def captured():
        probes.capture(model, batches, {"code": quantity})

    *_, ratio = in_turns(captured, plain_whole, rounds=9, repeats=1)
    record("capture / forward passes, 100 batches", f"{ratio:.2f}", "at most 1.2")
    *_, skipping = in_turns(captured, plain, rounds=9, repeats=1)
    record("  the same / passes that skip what is not read out", f"{skipping:.2f}")
    assert ratio <= 1.2


def test_capture_memory(record):
    script = (
        "import sys; from tests.benchmarks.bench_raven import peak_of_capture;"
        "print(peak_of_capture(int(sys.argv[1])))"
    )
    peaks = [
        int(
            subprocess.run(
                [sys.executable, "-c", script, str(number)], check=True, capture_output=True
            ).stdout
        )
        for number in (10, 100)
    ]
    ratio = peaks[1] / peaks[0]
    record("capture: peak memory over 100 batches / over 10", f"{ratio:.3f}", "at most 1.1")
    assert ratio <= 1.1


def peak_of_capture(number):
    """Peak resident memory in KiB of a process that captures `number` batches."""
    model, _, quantity = capture_batches(0)
    task = task_of(2)
    batches = (task.batch("id_unpermuted", index, 64) for index in range(number))
    probes.capture(model, batches, {"code": quantity})
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@pytest.mark.parametrize("mechanism", ["softmax", "linear", "hyla"])
@pytest.mark.parametrize("n_features", SIZES)
def test_training_speed(n_features, mechanism, record):
    batch = task_of(n_features).batch("train", 0, SIZES[n_features]["batch_size"])
    step = step_of(build(n_features, mechanism), batch)
    done = arithmetic_of(step)
    # That of the model as it is written down, which reads out every position.
    whole = arithmetic_of(step_of(build(n_features, mechanism, n_readout=None), batch))

    matrix = torch.randn(2048, 2048)
    repeats = 10 if n_features == 2 else 3
    taken, product, _ = in_turns(step, lambda: matrix @ matrix, rounds=9, repeats=repeats)
    rate = 2 * 2048**3 / product
    shares = [f"{arithmetic / taken / rate:.0%}" for arithmetic in (done, whole)]
    wanted = "at least 55%" if (n_features, mechanism) == (4, "softmax") else ""
    where = f"{mechanism}, K={n_features}"
    of_rate = f"{shares[0]} of the matrix-product rate ({rate / 1e9:.0f} GFLOP/s)"
    if_whole = f"{shares[1]} counting positions that are not read out too"
    record(f"training, {where}", f"{1 / taken:.1f} steps/s, {of_rate}; {if_whole}", wanted)
    if n_features == 4:
        of_reference = REFERENCE[mechanism] * rate / REFERENCE_RATE
        faster, aim = f"{1 / taken / of_reference:.1f}x", {"hyla": 4}.get(mechanism, 3)
        record(f"  as fast as the same formulas in JAX, {where}", faster, f"{aim}x")
    profile(step, where, record)


def test_bfloat16(record):
    """Steps through autocast beside float32's, as `training.precision=bf16` does them."""
    for n_features, mechanism in product(SIZES, ("softmax", "linear", "hyla")):
        batch = task_of(n_features).batch("train", 0, SIZES[n_features]["batch_size"])
        step = step_of(build(n_features, mechanism), batch)

        def half(step=step):
            with torch.autocast("cpu", torch.bfloat16):
                step()

        *_, ratio = in_turns(step, half, rounds=7, repeats=5 if n_features == 2 else 2)
        record(f"float32 step / bfloat16 step, {mechanism}, K={n_features}", f"{ratio:.2f}")


@pytest.mark.parametrize("mechanism", ["softmax", "linear", "hyla"])
def test_learning_in_bfloat16(mechanism, record):
    """The accuracy of the main study's preset along training, beside float32's."""
    curves = []
    for precision in ("float32", "bf16"):
        setup = replace(
            LAPTOP,
            model=mechanism,
            training=replace(
                LAPTOP.training, n_steps=1500, evaluate_every=500, precision=precision
            ),
        )
        with tempfile.TemporaryDirectory() as folder:
            run_training([setup], [Path(folder, "models", "it")], "cpu")
            log = read_log(Path(folder, "models", "it"))
        curves.append(", ".join(f"{100 * entry['id/accuracy']:.0f}" for entry in log))
    measured = f"float32 {curves[0]}; bfloat16 {curves[1]}"
    record(f"% right after 500, 1000, 1500 of 1500 steps, {mechanism}, K=2", measured)


def arithmetic_of(step):
    """Floating-point operations of a training step's matrix products."""
    with FlopCounterMode(display=False) as counter:
        step()
    return counter.get_total_flops()


def profile(step, where, record):
    """Where the time goes: the operators that take the most processor time."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
        for _ in range(5):
            step()
    events = profiled.key_averages()
    total = sum(event.self_cpu_time_total for event in events)
    top = sorted(events, key=lambda event: -event.self_cpu_time_total)[:6]
    shares = ", ".join(
        f"{event.key.removeprefix('aten::')} {event.self_cpu_time_total / total:.0%}"
        for event in top
    )
    record(f"  time of a step, {where}", shares)


def test_reading_out_only_the_answers(record):
    batch = task_of(4).batch("train", 0, SIZES[4]["batch_size"])
    steps = [step_of(build(4, n_readout=n_readout), batch) for n_readout in (None, 4)]
    *_, ratio = in_turns(*steps, rounds=9, repeats=2)
    record("step reading out all positions / the answers alone, K=4", f"{ratio:.2f}")
