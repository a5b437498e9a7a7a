"""Stacked modules, the search of paths, and many cells at once.

Ratios of two things measured in turns in one run, as in bench_raven.
"""

import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import one_hot, relu

import probes
import tasks
from mechanisms import (
    CrossAttentionRouterConfig,
    MatchingConfig,
    MlpPoolConfig,
    ModularNetwork,
    ModularNetworkConfig,
    all_paths_loss,
    sampled_path_loss,
)
from studies.engine import Resources, run
from studies.engine.training import keep_freed_memory
from studies.modular_routing import STUDY
from tests.benchmarks.timing import in_turns, seconds

keep_freed_memory()  # as `train` does

TASK = tasks.MathEquations(tasks.MathEquationsConfig(n_ood=4000))
ROUTER = CrossAttentionRouterConfig(matching=MatchingConfig(d_key=32))


def network(n_modules=30, d_mlp=300, seed=0):
    config = ModularNetworkConfig(
        n_variables=TASK.n_variables,
        d_input=TASK.n_features,
        d_model=64,
        n_layers=2,
        router=ROUTER,
        n_modules=n_modules,
        pool=MlpPoolConfig(d_mlp=d_mlp),
    )
    return ModularNetwork(config, generator=torch.Generator().manual_seed(seed))


class LoopedPool(nn.Module):
    """The same modules as networks of their own."""

    def __init__(self, pool):
        super().__init__()
        self.parts = nn.ModuleList()
        for module in range(len(pool.b_out)):
            inner, outer = nn.Linear(2, pool.W_out.shape[1]), nn.Linear(pool.W_out.shape[1], 1)
            with torch.no_grad():
                inner.weight.copy_(pool.W_in[module].T)
                inner.bias.copy_(pool.b_in[module])
                outer.weight.copy_(pool.W_out[module, None])
                outer.bias.copy_(pool.b_out[module, None])
            self.parts.append(nn.Sequential(inner, nn.ReLU(), outer))

    def forward(self, operands):
        operands = operands[..., 0, :]
        return torch.stack([part(operands)[..., 0] for part in self.parts], dim=-1)


@pytest.mark.parametrize(("n_modules", "d_mlp"), [(30, 300), (30, 64)])
def test_stacked_modules_beside_a_loop(n_modules, d_mlp, record):
    stacked, looped = network(n_modules, d_mlp).train(), network(n_modules, d_mlp).train()
    looped.pool = LoopedPool(looped.pool)
    batch = TASK.batch("train", 0, 256)
    torch.manual_seed(0)
    first = stacked(batch.inputs)
    torch.manual_seed(0)
    assert torch.allclose(first, looped(batch.inputs), atol=1e-5)

    def step(model):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

        def work():
            loss = sampled_path_loss(model, batch.inputs, batch.targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        return work

    fast, _, ratio = in_turns(step(stacked), step(looped), rounds=7, repeats=3)
    what = f"{n_modules} modules of width {d_mlp}, batch 256"
    record(f"loop over modules / stacked modules, training step, {what}", f"{1 / ratio:.2f}", "3")
    record(f"sampled path, steps per second, {what}", f"{1 / fast:.1f}")


def test_training_steps(record):
    for n_modules, d_mlp, size in ((10, 64, 256), (30, 300, 32)):
        model = network(n_modules, d_mlp).train()
        batch = TASK.batch("train", 0, size)
        number = iter(range(1, 10**6))

        def step(loss, model=model, batch=batch):
            model.zero_grad()
            loss(model, batch.inputs, batch.targets).backward()

        sampled, every, _ = in_turns(
            lambda step=step: step(sampled_path_loss),
            lambda step=step: step(all_paths_loss),
            rounds=5,
            repeats=2,
        )
        what = f"{n_modules} modules of width {d_mlp}, batch {size}"
        record(
            f"all paths / a sampled path, forward and backward, {what}", f"{every / sampled:.1f}"
        )
        sampling, _, share = in_turns(
            lambda size=size, number=number: TASK.batch("train", next(number), size),
            lambda step=step: step(sampled_path_loss),
            rounds=5,
            repeats=5,
        )
        assert sampling > 0
        record(f"sampling / step, {what}", f"{100 * share:.1f}%", "at most 5%")


def naive(model, inputs, targets):
    """The least loss of each sample over all paths, each path a run of the whole network."""
    best = torch.full((len(inputs),), torch.inf)
    for path in product(range(model.n_modules), repeat=model.n_layers):
        hooks = [
            (
                f"layers.{layer}.hook_module_choice",
                lambda choice, hook, m=module: one_hot(
                    torch.full((len(choice),), m), choice.shape[1]
                ).to(choice),
            )
            for layer, module in enumerate(path)
        ]
        with torch.no_grad():
            answers = model.run_with_hooks(inputs, fwd_hooks=hooks)
        best = torch.minimum(best, (answers - targets).square()[:, 0])
    return best


def one_module_at_a_time(model, inputs, targets):
    """The same, as fair as a loop over paths can be: only the path's own modules are computed."""
    best = torch.full((len(inputs),), torch.inf)
    x1, x2 = inputs[:, 0, 0], inputs[:, 1, 0]
    pool = model.pool

    def apply(module, x, y):
        hidden = relu(torch.stack([x, y], -1) @ pool.W_in[module] + pool.b_in[module])
        return hidden @ pool.W_out[module] + pool.b_out[module]

    with torch.no_grad():
        for first, second in product(range(model.n_modules), repeat=2):
            answers = apply(second, apply(first, x1, x2), x1)
            best = torch.minimum(best, (answers - targets[:, 0]).square())
    return best


def search(model, inputs, targets):
    routed = torch.zeros(len(inputs), model.n_layers, dtype=torch.long)
    return probes.search_paths(model, inputs, targets, routed=routed)


def test_searching_all_paths_beside_a_loop(record):
    model, batch = network(), TASK.batch("ood", 0, 10_000)
    few = TASK.batch("ood", 0, 200)
    found = torch.from_numpy(search(model, few.inputs, few.targets)["best_loss"].to_numpy())
    assert torch.allclose(found.float(), naive(model, few.inputs, few.targets), atol=1e-5)
    quick = min(seconds(lambda: search(model, batch.inputs, batch.targets), 1) for _ in range(3))
    # A twentieth of the samples: a loop's time grows with them.
    part = batch[:500]
    whole = 20 * seconds(lambda: naive(model, part.inputs, part.targets), 1)
    own = 20 * seconds(lambda: one_module_at_a_time(model, part.inputs, part.targets), 1)
    what = "900 paths x 10,000 samples"
    record(f"search of all paths, seconds, {what}", f"{quick:.1f}")
    record(f"loop over paths / search, {what} (loop: 500 samples)", f"{whole / quick:.1f}", "10")
    record(f"the same, computing only a path's own modules, {what}", f"{own / quick:.1f}")


def test_memory_of_the_search(record):
    script = (
        "import resource, torch\n"
        "from tests.benchmarks.bench_modular import TASK, network, search\n"
        "model, batch = network(), TASK.batch('ood', 0, 10_000)\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "search(model, batch.inputs, batch.targets)\n"
        "print(before, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)\n"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=root, capture_output=True, text=True, check=True
    )
    before, peak = map(int, done.stdout.split()[-2:])
    record("memory of the search of all paths, GB, whole process", f"{peak / 2**20:.2f}", "2")
    record("memory of the search of all paths, GB, its own", f"{(peak - before) / 2**20:.2f}")


def test_many_cells_at_once(record):
    changes = ["seed=0,1,2,3", "training.n_steps=300", "training.evaluate_every=150"]
    assert len(STUDY.plan("smoke", changes).cells) == 20
    taken = {}
    cases = {1: Resources(), 2: Resources(workers=2), "together": Resources(workers=2, together=4)}
    for name, resources in cases.items():
        with tempfile.TemporaryDirectory() as folder:
            start = time.perf_counter()
            run(STUDY, "smoke", changes, resources=replace(resources, root=Path(folder)))
            taken[name] = time.perf_counter() - start
    what = "20 small cells, 2 workers / one after another"
    record(what, f"{taken[2] / taken[1]:.2f}", "at most 0.58")
    record(f"{what}, four seeds together", f"{taken['together'] / taken[1]:.2f}")
    record("20 small cells with 2 workers, seconds", f"{taken[2]:.0f}")
