"""A new mechanism, task and probe are each one file, one export and one test file.

All three are added to a copy of the packages; then the contract tests run over them as they do over
everything else.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

MECHANISM = '''
"""Uniform attention: each query attends equally to all keys that are not masked."""

from dataclasses import dataclass

import torch
from torch.nn.functional import linear
from transformer_lens.hook_points import HookPoint

from mechanisms.attention.base import Attention
from mechanisms.attention.multi_head import normalize_scores
from mechanisms.initialization import lecun_normal


@dataclass(frozen=True, kw_only=True)
class UniformAttentionConfig:
    """Configuration of `UniformAttention`."""

    n_heads: int
    measures_distances = False
    needs_all_queries = False

    def build(self, d_model, *, generator=None):
        return UniformAttention(self, d_model, generator=generator)


class UniformAttention(Attention):
    """The mean of a projection of all keys."""

    def __init__(self, config, d_model, *, generator=None):
        super().__init__(config)
        self.W_V = lecun_normal(d_model, d_model, fan_in=d_model, generator=generator)
        self.hook_pattern = HookPoint()

    def _attend(self, x_query, x_key, bias, mask, points):
        shape = (len(x_key), self.config.n_heads, x_query.shape[1], x_key.shape[1])
        scores = x_key.new_zeros(shape) if bias is None else bias.expand(shape)
        scores = scores if mask is None else scores.masked_fill(~mask, -torch.inf)
        pattern = points.hook_pattern(normalize_scores(scores, "softmax", mask))
        return pattern.mean(1) @ linear(x_key, self.W_V)
'''
MECHANISM_TEST = """
import torch

from mechanisms import UniformAttentionConfig

CONTRACT_EXAMPLES = {"": UniformAttentionConfig(n_heads=4)}


def test_the_output_is_a_mean():
    module, x = UniformAttentionConfig(n_heads=4).build(16), torch.randn(2, 5, 16)
    assert torch.allclose(module(x, x)[:, 0], x.mean(1) @ module.W_V.T, atol=1e-5)
"""

TASK = '''
"""Parity: is the number of ones even?"""

from dataclasses import dataclass

import torch

from tasks.batch import Batch
from tasks.common import Key
from tasks.stream_task import StreamTask


@dataclass(frozen=True, kw_only=True)
class ParityConfig:
    """Configuration of `Parity`."""

    length: int = 16
    seed: int = 0


class Parity(StreamTask):
    """Sequences of bits; the target is whether the number of ones is odd."""

    SPLITS = ("train", "id")

    def __init__(self, config):
        super().__init__(key=Key(config))
        self.config = config

    def _draw(self, split, size, generator):
        bits = torch.from_numpy(generator.integers(2, size=(size, self.config.length)))
        n_ones = bits.sum(1, keepdim=True)
        return Batch(bits, n_ones % 2, torch.ones(size, 1, dtype=torch.bool), {"n_ones": n_ones})
'''
TASK_TEST = """
from tasks import Parity, ParityConfig

CONTRACT_EXAMPLES = {"": lambda folder: Parity(ParityConfig())}


def test_the_target_is_the_parity():
    batch = Parity(ParityConfig()).batch("id", 0, 50)
    assert ((batch.inputs.sum(1, keepdim=True) + batch.targets) % 2 == 0).all()
"""

PROBE = '''
"""How spread out is attention? The entropy of each query's weights."""

import numpy as np
import xarray as xr

from probes.checking import checked


@checked
def attention_entropy(pattern: xr.DataArray) -> xr.DataArray:
    """The entropy of attention weights over `key_pos`, in nats."""
    return -(pattern * np.log(pattern.where(pattern > 0, 1))).sum("key_pos")
'''
PROBE_TEST = """
import numpy as np
import xarray as xr

from probes import attention_entropy


def test_uniform_attention_has_the_largest_entropy():
    pattern = xr.DataArray(np.full((2, 4), 0.25), dims=("query_pos", "key_pos"))
    assert np.allclose(attention_entropy(pattern), np.log(4))
"""

ADDED = {
    "mechanisms/attention/uniform.py": MECHANISM,
    "tests/mechanisms/attention/test_uniform.py": MECHANISM_TEST,
    "tasks/parity.py": TASK,
    "tests/tasks/test_parity.py": TASK_TEST,
    "probes/entropy.py": PROBE,
    "tests/probes/test_entropy.py": PROBE_TEST,
}
EXPORTS = {
    "mechanisms": ("attention.uniform", "UniformAttention", "UniformAttentionConfig"),
    "tasks": ("parity", "Parity", "ParityConfig"),
    "probes": ("entropy", "attention_entropy"),
}
CONTRACTS = ("test_packages", "test_attention", "test_tasks", "test_probes_on_models")


@pytest.mark.slow
def test_one_file_one_export_and_one_test_file_are_enough(tmp_path):
    for folder in ("mechanisms", "tasks", "probes", "tests"):
        ignored = shutil.ignore_patterns("__pycache__", "studies", "benchmarks")
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for name, text in ADDED.items():
        (tmp_path / name).write_text(text.lstrip())
    for package, (module, *names) in EXPORTS.items():
        with (tmp_path / package / "__init__.pyi").open("a") as stub:
            stub.writelines(f"from .{module} import {name} as {name}\n" for name in names)
    files = [name for name in ADDED if name.startswith("tests")]
    files += [f"tests/contracts/{name}.py" for name in CONTRACTS]
    options = ["-q", "-rA", "-p", "no:cacheprovider", "-k", "niform or arity or entropy"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *files],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    passed = [line for line in done.stdout.splitlines() if line.startswith("PASSED")]
    for contract in CONTRACTS:
        assert any(f"{contract}.py" in line for line in passed), contract
    assert len(passed) >= 15
