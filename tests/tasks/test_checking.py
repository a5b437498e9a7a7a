"""`tasks.check` accepts a correct task, and names what is wrong with broken ones."""

import os
import random
import subprocess
import sys
import types
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

import tasks
from tasks import Batch, checking
from tasks.causal import CausalTask, Variable, integers

ROOT = Path(__file__).parents[2]


@pytest.fixture
def _nearby(monkeypatch):
    """Copies of the task draw in this process, for rules that need no other one."""
    monkeypatch.setattr(checking, "answer_elsewhere", checking.answer)


nearby = pytest.mark.usefixtures("_nearby")


class Parity:
    """Is the number of ones odd? What the broken tasks change one step of."""

    splits = ("train", "ood")

    def batch(self, split, index, size, device="cpu"):
        generator = np.random.default_rng([self.splits.index(split), index])
        return self.drawn(split, size, generator).to(device)

    def drawn(self, split, size, generator):
        bits = torch.from_numpy(generator.integers(2, size=(size, 16)))
        bits[:, 0] = split == "ood"
        return self.described(bits)

    def described(self, bits):
        n_ones = bits.sum(1, keepdim=True)
        latents = {"n_ones": n_ones, "first": bits[:, 0].clone()}
        return Batch(bits, n_ones % 2, torch.ones(len(bits), 1, dtype=torch.bool), latents)


class IsSeededByHash(Parity):
    def __init__(self):
        self.seed = hash("parity") % 2**32

    def batch(self, split, index, size, device="cpu"):
        seeds = [self.seed, self.splits.index(split), index]
        return self.drawn(split, size, np.random.default_rng(seeds))


def test_the_same_batches_must_come_in_another_process():
    message = r"same in another process, .*, but not inputs, latents.* of 'train'; .* of 'ood': "
    with pytest.raises(ValueError, match=message) as caught:
        tasks.check(IsSeededByHash(), build=IsSeededByHash)
    assert str(caught.value).count("\n") == 1


def test_a_task_that_other_processes_cannot_import_is_named(monkeypatch):
    module = types.ModuleType("made_up")
    monkeypatch.setitem(sys.modules, "made_up", module)
    module.Parity = type("Parity", (Parity,), {"__module__": "made_up"})
    with pytest.raises(ValueError, match="there is ModuleNotFoundError: No module named 'made_up'"):
        tasks.check(module.Parity())


class SqueezesSingleExamples(Parity):
    def described(self, bits):
        batch = super().described(bits)
        first = torch.from_numpy(np.squeeze(batch.latents["first"].numpy()))
        return replace(batch, latents=batch.latents | {"first": first})


class CannotDrawOneExample(Parity):
    def described(self, bits):
        if len(bits) == 1:
            raise IndexError("no such row")
        return super().described(bits)


@nearby
def test_a_single_example_is_a_batch_too():
    with pytest.raises(
        ValueError, match=r"latents\['first'\] of batch 0 of 'train' must have 1 rows"
    ):
        tasks.check(SqueezesSingleExamples())
    with pytest.raises(IndexError, match="no such row") as caught:
        tasks.check(CannotDrawOneExample())
    assert "task.batch('train', 0, 1, 'cpu')" in caught.value.__notes__[0]


SEEDS = """
def seed_of(split):
    return hash(split) % 2**32
"""
SCRIPT = """
import sys
sys.path[:0] = sys.argv[1:]
import numpy as np, torch, tasks
from seeds import seed_of

class Sums:
    splits = ("a", "b")

    def batch(self, split, index, size, device="cpu"):
        x = torch.from_numpy(np.random.default_rng([seed_of(split), index]).random((size, 3)))
        total = x.sum(1, keepdim=True)
        return tasks.Batch(x, total, torch.ones_like(total).bool(), {"total": total.clone()})

tasks.check(Sums())
"""


def test_a_class_of_a_script_draws_in_another_process_too(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "seeds.py").write_text(SEEDS)
    done = subprocess.run(
        [sys.executable, tmp_path / "script.py", ROOT, tmp_path / "parts"],
        env=os.environ | {"PYTHONHASHSEED": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Sums must keep the rules of a task, but\n- batches must be the same" in done.stderr


IMPORTABLE = """
import torch, tasks

class Bits:
    splits = ("a", "b")

    def batch(self, split, index, size, device="cpu"):
        generator = torch.Generator().manual_seed(2 * index + self.splits.index(split))
        x = torch.randint(2, (size, 9), generator=generator)
        total = x.sum(1, keepdim=True)
        return tasks.Batch(x, total, torch.ones_like(total).bool(), {"total": total.clone()})

tasks.check(Bits())
print("checked")
"""


def test_a_file_that_checks_its_task_can_be_imported(tmp_path):
    (tmp_path / "bits.py").write_text(IMPORTABLE)
    done = subprocess.run(
        [sys.executable, "-c", "import bits"],
        env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.stdout, done.returncode) == ("checked\n", 0), done.stderr


class CannotBePickled(Parity):
    def __init__(self):
        self.numbers = (i for i in range(3))


@nearby
def test_a_task_must_be_picklable_or_built():
    message = "task must be picklable, .* cannot pickle 'generator' object: pass build"
    with pytest.raises(ValueError, match=message):
        tasks.check(CannotBePickled())
    tasks.check(CannotBePickled(), build=CannotBePickled)
    numbers = CannotBePickled().numbers
    with pytest.raises(ValueError, match=r"build must be picklable, .* 'generator' object$"):
        tasks.check(CannotBePickled(), build=lambda: numbers and CannotBePickled())


@nearby
def test_a_correct_task_stays_as_it_is():
    states = torch.get_rng_state(), random.getstate()
    assert tasks.check(Parity(), build=Parity, disjoint={"first": Parity.splits}) is None
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]


class DrawsFromTorch(Parity):
    def drawn(self, split, size, generator):
        torch.manual_seed(int(generator.integers(1000)))
        return super().drawn(split, size, generator)


class DrawsFromNumpy(Parity):
    def drawn(self, split, size, generator):
        np.random.seed(int(generator.integers(1000)))  # noqa: NPY002
        return super().drawn(split, size, generator)


class DrawsFromRandom(Parity):
    def drawn(self, split, size, generator):
        random.seed(int(generator.integers(1000)))
        return super().drawn(split, size, generator)


class GoesOnWhereItWas(Parity):
    n_calls = 0

    def batch(self, split, index, size, device="cpu"):
        self.n_calls += 1
        return super().batch(split, 10 * index + self.n_calls, size, device)


class DependsOnTheFirstCall(Parity):
    first = None

    def batch(self, split, index, size, device="cpu"):
        self.first = index if self.first is None else self.first
        return super().batch(split, index + 100 * self.first, size, device)


class KeepsItsBatches(Parity):
    def __init__(self):
        self.kept = {}

    def batch(self, split, index, size, device="cpu"):
        key = split, index, size
        return self.kept.setdefault(key, super().batch(*key))


class IgnoresTheIndex(Parity):
    def batch(self, split, index, size, device="cpu"):
        return super().batch(split, 0, size)


class IgnoresTheSplit(Parity):
    def drawn(self, split, size, generator):
        return self.described(torch.from_numpy(generator.integers(2, size=(size, 16))))

    def batch(self, split, index, size, device="cpu"):
        return self.drawn(split, size, np.random.default_rng(index))


class HasTooFewExamples(Parity):
    def batch(self, split, index, size, device="cpu"):
        return super().batch(split, index, size - 1)


class HasALatentOfTheBatch(Parity):
    def described(self, bits):
        batch = super().described(bits)
        return replace(batch, latents=batch.latents | {"mean": bits.double().mean()})


class HasNoLatents(Parity):
    def described(self, bits):
        return replace(super().described(bits), latents={})


class HasLatentsOfOneSplit(Parity):
    def drawn(self, split, size, generator):
        batch = super().drawn(split, size, generator)
        return batch if split == "train" else replace(batch, latents={"first": batch.inputs[:, 0]})


class HasOtherDtypesInOneSplit(Parity):
    def drawn(self, split, size, generator):
        batch = super().drawn(split, size, generator)
        return batch if split == "train" else replace(batch, inputs=batch.inputs.float())


class HasNan(Parity):
    def described(self, bits):
        return replace(super().described(bits), inputs=bits / (bits.sum(1, keepdim=True) - 8))


class HasAMaskOfNumbers(Parity):
    def described(self, bits):
        batch = super().described(bits)
        return replace(batch, mask=batch.mask.long())


class HasAMaskOfExamples(Parity):
    def described(self, bits):
        batch = super().described(bits)
        return replace(batch, mask=batch.mask[:, 0])


class PassesALatent(Parity):
    def described(self, bits):
        batch = super().described(bits)
        return replace(batch, latents=batch.latents | {"bits": batch.inputs[:, 1:]})


class HasNoisyTargets(Parity):
    def drawn(self, split, size, generator):
        # So few bits that the same ones are drawn again.
        batch = self.described(torch.from_numpy(generator.integers(2, size=(size, 6))))
        noise = torch.from_numpy(generator.integers(2, size=(size, 1)))
        return replace(batch, targets=(batch.targets + noise) % 2)


@nearby
@pytest.mark.parametrize(
    ("task", "message"),
    [
        (DrawsFromTorch, "leave the global random state of torch alone"),
        (DrawsFromNumpy, "leave the global random state of numpy alone"),
        (DrawsFromRandom, "leave the global random state of random alone"),
        (GoesOnWhereItWas, "the same call of batch must give the same batch, but not of inputs"),
        (DependsOnTheFirstCall, "must not depend on those drawn before, .* inputs, .* of 'train'"),
        (KeepsItsBatches, "inputs of batch 0 of 'train' shares its memory with what the same call"),
        (IgnoresTheIndex, "batch 0 of 'ood' and batch 2 of 'ood' must differ"),
        (IgnoresTheSplit, "batch 1 of 'train' and batch 1 of 'ood' must differ"),
        (HasTooFewExamples, r"targets of batch 0 of 'ood' must have 61 rows, got shape \(60, 1\)"),
        (HasALatentOfTheBatch, r"latents\['mean'\] of .* must have 61 rows, got shape \(\)"),
        (HasNoLatents, "latents must hold the ground truth .*, but there are none"),
        (HasLatentsOfOneSplit, r"names and dtypes of batch 0 of 'ood' .* latents: first \[61\]"),
        (HasOtherDtypesInOneSplit, r"batch 0 of 'ood' .* got Batch\(inputs \[61, 16\] float32"),
        (HasNan, "inputs of batch 0 of 'train' has [0-9]+ values not finite"),
        (HasAMaskOfNumbers, "mask of batch 0 of 'train' must be boolean .* got torch.int64"),
        (HasAMaskOfExamples, r"the targets' shape \(61, 1\), got torch.bool \(61,\)"),
        (PassesALatent, "inputs of .* must not share memory with latents, but do with 'bits'"),
        (HasNoisyTargets, "inputs and latents of an earlier one, but other targets"),
    ],
)
def test_each_rule_is_checked(task, message):
    with pytest.raises(ValueError, match=message) as caught:
        tasks.check(task())
    assert str(caught.value).startswith(f"{task.__name__} must keep the rules of a task, but\n- ")


@nearby
def test_targets_that_do_not_count_may_be_anything():
    class IsPadded(HasNoisyTargets):
        def batch(self, split, index, size, device="cpu"):
            noisy = super().batch(split, index, size)
            targets = torch.cat([noisy.inputs.sum(1, keepdim=True)] + [noisy.targets] * index, 1)
            return replace(
                noisy, targets=targets, mask=torch.arange(1 + index).expand(size, -1) < 1
            )

    tasks.check(IsPadded())


@nearby
def test_splits_are_disjoint_where_that_is_said():
    tasks.check(Parity(), disjoint={"inputs": ("train", "ood"), "first": ("train", "ood")})
    message = (
        r"n_ones must be disjoint between 'train' and 'ood', but \d+ of the \d+ values drawn of "
        r"'ood' occur in 'train', such as \[\d+\]"
    )
    with pytest.raises(ValueError, match=message):
        tasks.check(Parity(), disjoint={"n_ones": ("train", "ood")})

    class Overlaps(Parity):
        def drawn(self, split, size, generator):
            return self.described(torch.from_numpy(generator.integers(2, size=(size, 6))))

    message = r"inputs must be disjoint .*, but \d+ of the \d+ values drawn of 'ood' occur in 'tr"
    with pytest.raises(ValueError, match=message):
        tasks.check(Overlaps(), disjoint={"inputs": ("train", "ood")})


@nearby
@pytest.mark.parametrize(
    ("disjoint", "message"),
    [
        ({"rule": ("train", "ood")}, r"some of \['inputs', 'n_ones', 'first'\], got 'rule'"),
        ({"first": ("train", "id")}, r"splits of \['train', 'ood'\], got 'id'"),
    ],
)
def test_disjoint_must_name_latents_and_splits(disjoint, message):
    with pytest.raises(ValueError, match=message):
        tasks.check(Parity(), disjoint=disjoint)


@nearby
def test_a_solver_must_agree_where_the_mask_is_true():
    def solve(batch):
        assert not batch.targets.any()
        return batch.inputs.sum(1, keepdim=True) % 2

    tasks.check(Parity(), solve=solve)
    message = r"agree with the targets of batch 0 of 'ood', but not in \d+ of 61 .*: \[1\] against"
    with pytest.raises(ValueError, match=message):
        tasks.check(Parity(), solve=lambda batch: solve(batch) | batch.inputs[:, :1])
    with pytest.raises(ValueError, match=r"solve must give targets \(61, 1\) .*, got .*\[61\]"):
        tasks.check(Parity(), solve=lambda batch: solve(batch)[:, 0])

    class HasUndefinedAnswers(Parity):
        def described(self, bits):
            batch = super().described(bits)
            return replace(batch, targets=batch.targets + bits[:, 1:2], mask=bits[:, 1:2] == 0)

    tasks.check(HasUndefinedAnswers(), solve=solve)


class Drawn(CausalTask):
    """Two numbers, of which the first may be 3 or 4, and their sum."""

    splits = ("train",)

    def batch(self, split, index, size, device="cpu"):
        generator = np.random.default_rng(index)
        a, b = (torch.from_numpy(generator.integers(5, size=size)) for _ in range(2))
        return self._completed({"a": a, "b": b})

    @property
    def _variables(self):
        return {
            "a": Variable(allowed=integers(0, 4)),
            "b": Variable(allowed=integers(0, 4)),
            "inputs": Variable(causes=("a", "b"), compute=lambda a, b: torch.stack([a, b], 1)),
            "sum": Variable(causes=("a", "b"), compute=torch.add),
            "targets": Variable(causes=("sum",), compute=lambda total: total[:, None]),
        }


class GoesRound(Drawn):
    @property
    def _variables(self):
        return super()._variables | {"b": Variable(causes=("sum",), compute=lambda total: total)}

    def batch(self, split, index, size, device="cpu"):
        return Drawn().batch(split, index, size)


class LeavesOutALatent(Drawn):
    def batch(self, split, index, size, device="cpu"):
        batch = super().batch(split, index, size)
        return replace(batch, latents=batch.latents | {"half": batch.latents["a"] // 2})


class ForgetsACause(Drawn):
    @property
    def _variables(self):
        return super()._variables | {"sum": Variable(causes=("a",), compute=lambda a: a + 1)}

    def batch(self, split, index, size, device="cpu"):
        return Drawn().batch(split, index, size)


class ChangesWithoutBeingAsked(Drawn):
    def counterfactual(self, batch, latents):
        made = super().counterfactual(batch, latents)
        return made if latents else replace(made, targets=made.targets + 1)


class ChangesItsBatch(Drawn):
    def counterfactual(self, batch, latents):
        made = Batch.cat([super().counterfactual(batch, latents)])
        batch.targets[0] += 1
        return made


@nearby
@pytest.mark.parametrize(
    ("task", "message"),
    [
        (GoesRound, "causal_graph must be acyclic, but has the cycle .*'sum'"),
        (LeavesOutALatent, r"must have the nodes \['a', 'b', 'half', .*got \['a', 'b', 'inputs'"),
        (ForgetsACause, r"with a, b of other .* but differs in latents\['sum'\], targets"),
        (ChangesWithoutBeingAsked, "of nothing must change nothing, but changes targets"),
        (ChangesItsBatch, r"must not change its batch in place, but changes .*targets"),
    ],
)
def test_each_rule_about_counterfactuals_is_checked(task, message):
    tasks.check(Drawn())
    with pytest.raises(ValueError, match=message):
        tasks.check(task())


@nearby
def test_what_cannot_be_set_is_the_same_in_the_examples_compared():
    @dataclass
    class HasAFixedCause(Drawn):
        """`a` cannot be set; `number` is a label."""

        @property
        def _variables(self):
            variables = super()._variables
            return variables | {"a": Variable(), "number": Variable()}

        def batch(self, split, index, size, device="cpu"):
            batch = Drawn().batch(split, index, size)
            return replace(batch, latents=batch.latents | {"number": torch.arange(size)})

    tasks.check(HasAFixedCause())


@nearby
def test_errors_of_the_task_name_the_call():
    class Fails(Parity):
        def drawn(self, split, size, generator):
            raise RuntimeError("no data")

    with pytest.raises(RuntimeError, match="no data") as caught:
        tasks.check(Fails())
    assert caught.value.__notes__ == ["The call was task.batch('train', 0, 61, 'cpu')"]


def test_what_is_no_task_is_refused():
    with pytest.raises(
        TypeError, match=r"task must have splits and batch.* list without splits and"
    ):
        tasks.check([])

    class ReturnsADictionary(Parity):
        def batch(self, split, index, size, device="cpu"):
            return {"inputs": torch.zeros(size)}

    with pytest.raises(TypeError, match=r"must be tasks.Batch, got dict of 'train'"):
        tasks.check(ReturnsADictionary())

    class HasALatentOfWords(Parity):
        def batch(self, split, index, size, device="cpu"):
            return replace(super().batch(split, index, size), latents={"word": ["a"] * size})

    with pytest.raises(TypeError, match=r"latents\['word'\] must be a tensor, got list"):
        tasks.check(HasALatentOfWords())


def test_a_class_is_no_task():
    with pytest.raises(TypeError, match="must be an instance, got the class Parity"):
        tasks.check(Parity)


def test_a_task_must_have_a_split():
    task = Parity()
    task.splits = ()
    with pytest.raises(ValueError, match=r"Parity must have a split, got splits \(\)"):
        tasks.check(task)


def test_a_rule_that_all_batches_break_is_named_once():
    task = Parity()
    task.described = lambda bits: replace(Parity.described(task, bits), latents={})
    with pytest.raises(ValueError, match="there are none") as error:
        tasks.check(task, build=Parity)
    assert str(error.value).count("there are none") == 1
