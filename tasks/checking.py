"""What holds for every task, checked of a task of your own."""

import hashlib
import json
import os
import pickle
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, permutations
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from tasks.batch import Batch
from tasks.causal import CausalTask

_INDICES = (0, 1, 2)
_MOST_PAIRS = 64

# By split and index; digests by name of the tensor.
Key = tuple[str, int]
Batches = dict[Key, Batch[Any]]
Digests = Mapping[Key, Mapping[str, str]]


@runtime_checkable
class Task(Protocol):
    """What the package, the studies and the probes expect of a task."""

    @property
    def splits(self) -> Sequence[str]:
        """The names of the splits."""
        ...

    def batch(self, split: str, index: int, size: int, device: str = "cpu") -> Batch[Any]:
        """Batch `index` of a split."""
        ...


def check(
    task: Task,
    *,
    build: Callable[[], Task] | None = None,
    disjoint: Mapping[str, Sequence[str]] | None = None,
    solve: Callable[[Batch[Any]], Tensor] | None = None,
    size: int = 61,
) -> None:
    """Check that a task keeps what holds for every task; return nothing if it does.

    Batches 0, 1 and 2 of each split are drawn, with `size` examples, and one with a single example.
    Checked are:

    - `batch` is a pure function: the same when it is called again, in another order, and in a new
      Python process with another PYTHONHASHSEED; it leaves the global random states of torch,
      NumPy and `random` alone; what it returns shares no memory with what it returns next time.
    - Batches of different indices, and of different splits, differ.
    - Inputs, targets, mask and latents have one row for each example and the same dtypes in all
      batches; numbers are finite; the mask is boolean, in the targets' shape; there are latents,
      the same in all splits, and they share no memory with the inputs.
    - Examples with equal inputs and latents have equal targets, where the mask is True.
    - Of a `CausalTask`: the graph has no cycles and names each latent, a counterfactual of nothing
      changes nothing, and with the exogenous latents of another example it is that example.

    Rules are checked of the examples drawn: that no violation was seen proves none of them.

    Args:
        task: has `splits` and `batch(split, index, size, device)`. A pickled copy of it draws in
            the other process, which imports its class (a class of a notebook or script is sent
            along).
        build: makes the task anew in the other process. Without it, what the constructor computed
            is sent along, so that a use of `hash()` in there is not noticed.
        disjoint: for names of latents, or "inputs", the splits of which no two may have an example
            with the same value. All of a finite split is compared if 3 `size` examples are.
        solve: computes the targets from the inputs and latents, independently of the task; it gets
            batches whose targets are 0. Compared where the mask is True.
        size: number of examples in a batch; a prime number divides few sizes of finite splits.

    Raises:
        ValueError: the task breaks a rule, and the message lists all that it breaks (where
            single batches break one, the rules that compare batches are not tried); it has no
            split; `disjoint` names what the task does not have.
        TypeError: `task` is a class, or has no `splits` or `batch`; a batch is no `tasks.Batch` of
            tensors.

    Example:
        >>> config = tasks.RavenConfig(n_features=2)
        >>> tasks.check(
        ...     tasks.Raven(config),
        ...     build=lambda: tasks.Raven(config),
        ...     disjoint={"combination": ("train", "ood")},
        ... )
    """
    # There the file of the task may be imported, which may call this function, without end.
    if _IS_ELSEWHERE in os.environ:
        return
    if isinstance(task, type):
        raise TypeError(f"task must be an instance, got the class {task.__name__}")
    if not isinstance(task, Task):
        missing = [name for name in ("splits", "batch") if not hasattr(task, name)]
        raise TypeError(
            "task must have splits and batch(split, index, size, device), got "
            f"{type(task).__name__} without {' and '.join(missing)}"
        )
    if not task.splits:
        raise ValueError(f"{type(task).__name__} must have a split, got splits {task.splits!r}")
    # Pickled before the first draw, so that the copies are as new as the task.
    request = _request(build or task, is_task=build is None)
    states = _random_states()
    batches = _draw(task, [(split, index) for split in task.splits for index in _INDICES], size)
    touched = [name for name, state in _random_states().items() if state != states[name]]
    single = _draw(task, [(split, 0) for split in task.splits], 1)
    broken = list(dict.fromkeys([*_batches(batches, size), *_batches(single, 1)]))
    # The other rules compare rows.
    if not broken:
        broken = [
            *(f"batch must leave the global random state of {name} alone" for name in touched),
            *_again(task, batches, size),
            *_elsewhere(request, batches, size),
            *_different(batches),
            *_disjoint(batches, disjoint or {}),
            *_function(batches),
            *(_solved(batches, solve) if solve else ()),
            *(_causal(task, batches) if isinstance(task, CausalTask) else ()),
        ]
    if broken:
        raise ValueError(
            f"{type(task).__name__} must keep the rules of a task, but\n- " + "\n- ".join(broken)
        )


def _draw(task: Task, keys: Iterable[Key], size: int) -> Batches:
    """Batches by split and index, drawn in this order."""
    batches = {}
    for split, index in keys:
        try:
            batch = task.batch(split, index, size, "cpu")
        except Exception as error:
            error.add_note(f"The call was task.batch({split!r}, {index}, {size}, 'cpu')")
            raise
        if not isinstance(batch, Batch):
            raise TypeError(f"batches must be tasks.Batch, got {type(batch).__name__} of {split!r}")
        for name, value in _parts(batch).items():
            if not isinstance(value, Tensor):
                raise TypeError(f"{name} must be a tensor, got {type(value).__name__} of {split!r}")
        batches[split, index] = batch
    return batches


def _inputs(batch: Batch[Any]) -> dict[str, Tensor]:
    if isinstance(batch.inputs, tuple):
        return {f"inputs[{i}]": part for i, part in enumerate(batch.inputs)}
    return {"inputs": batch.inputs}


def _parts(batch: Batch[Any]) -> dict[str, Tensor]:
    """All tensors of a batch by name."""
    answers = {"targets": batch.targets, "mask": batch.mask}
    latents = {f"latents[{name!r}]": latent for name, latent in batch.latents.items()}
    return _inputs(batch) | answers | latents


def _batches(batches: Batches, size: int) -> Iterator[str]:
    """Shapes, dtypes and values of single batches."""
    first = next(iter(batches.values()))
    kinds = {name: value.dtype for name, value in _parts(first).items()}
    if not first.latents:
        yield "latents must hold the ground truth behind each example, but there are none"
    for (split, index), batch in batches.items():
        parts, where = _parts(batch), f"of batch {index} of {split!r}"
        for name, value in parts.items():
            if not value.ndim or len(value) != size:
                yield f"{name} {where} must have {size} rows, got shape {tuple(value.shape)}"
            if value.is_floating_point() and not value.isfinite().all():
                yield f"{name} {where} has {int((~value.isfinite()).sum())} values not finite"
        if {name: value.dtype for name, value in parts.items()} != kinds:
            yield (
                f"names and dtypes {where} must be those of the first batch, got "
                f"{batch!r}, not {first!r}"
            )
        if batch.mask.dtype != torch.bool or batch.mask.shape != batch.targets.shape:
            yield (
                f"the mask {where} must be boolean in the targets' shape "
                f"{tuple(batch.targets.shape)}, got {batch.mask.dtype} {tuple(batch.mask.shape)}"
            )
        if names := _sharing(_inputs(batch), batch.latents):
            yield f"inputs {where} must not share memory with latents, but do with {names[0]!r}"


def _again(task: Task, batches: Batches, size: int) -> Iterator[str]:
    """Draw again, in the reverse order."""
    again = _draw(task, reversed(batches), size)
    if changed := _changed(_digests(batches), _digests(again)):
        yield f"the same call of batch must give the same batch, but not of {changed}"
    for key, batch in batches.items():
        if names := _sharing(_parts(batch), _parts(again[key])):
            yield (
                f"{names[0]} of batch {key[1]} of {key[0]!r} shares its memory with what the same "
                "call gives again, which a change in place would change: copy it"
            )
            return


def _elsewhere(request: bytes | str, batches: Batches, size: int) -> Iterator[str]:
    if isinstance(request, str):
        yield request
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "task.pkl").write_bytes(request)
        (folder / "calls.json").write_text(json.dumps([list(batches), size]))
        if error := answer_elsewhere(folder):
            yield (
                f"the task must draw in another process too, but there is {error}: define it in a "
                "file that can be imported there"
            )
            return
        in_order, reverse = json.loads((folder / "answers.json").read_text())
    keys = list(batches)
    there = dict(zip(keys, in_order, strict=True))
    if changed := _changed(_digests(batches), there):
        yield (
            f"batches must be the same in another process, with another PYTHONHASHSEED, but not "
            f"{changed}: seed with numbers or hashlib, not with hash(), and sort sets"
        )
    if changed := _changed(there, dict(zip(reversed(keys), reverse, strict=True))):
        yield f"batches must not depend on those drawn before, in another order not so {changed}"


def answer_elsewhere(folder: Path) -> str | None:
    """Run `answer` on a folder in a new Python process; return its error, None if there is none."""
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, json.dumps(sys.path), str(folder)],
        env=os.environ | {"PYTHONHASHSEED": seed, _IS_ELSEWHERE: "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stderr.strip().splitlines()[-1] if done.returncode else None


_IS_ELSEWHERE = "MODSCOPE_TASK_IS_CHECKED"
"""The variable of the environment of a process that draws for `check`."""

_PROGRAM = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from tasks.checking import answer
answer(sys.argv[2])
"""


def answer(folder: str) -> None:
    """Draw the batches that `calls.json` lists from the task in `task.pkl`; see `check`."""
    keys, size = json.loads(Path(folder, "calls.json").read_text())
    answers = []
    for order in (keys, reversed(keys)):
        # A copy for each order, neither of which has drawn before.
        made, is_task = pickle.loads(Path(folder, "task.pkl").read_bytes())
        task = made if is_task else made()
        answers.append(list(_digests(_draw(task, map(tuple, order), size)).values()))
    Path(folder, "answers.json").write_text(json.dumps(answers))


def _request(made: Any, *, is_task: bool) -> bytes | str:
    """A pickled task, or a pickled function that builds it; what is wrong if there is none."""
    import cloudpickle

    try:
        return cloudpickle.dumps((made, is_task))
    except Exception as error:
        kind = "task" if is_task else "build"
        return (
            f"{kind} must be picklable, to draw in another process, but {error}"
            f"{': pass build, which makes the task there' if is_task else ''}"
        )


def _different(batches: Batches) -> Iterator[str]:
    """Different indices and splits give different inputs."""
    inputs = {key: list(map(_hash, _inputs(batch).values())) for key, batch in batches.items()}
    for (one, i), (other, j) in combinations(inputs, 2):
        if (one == other or i == j) and inputs[one, i] == inputs[other, j]:
            yield (
                f"batch {i} of {one!r} and batch {j} of {other!r} must differ, but have the same "
                "inputs (of a finite split, pass a size that does not divide its own)"
            )


def _disjoint(batches: Batches, disjoint: Mapping[str, Sequence[str]]) -> Iterator[str]:
    splits = list(dict.fromkeys(split for split, _ in batches))
    for name, sides in disjoint.items():
        for split in sides:
            if split not in splits:
                raise ValueError(f"disjoint[{name!r}] must name splits of {splits}, got {split!r}")
        values: dict[str, dict[bytes, str]] = {split: {} for split in splits}
        for (split, _), batch in batches.items():
            if name != "inputs" and name not in batch.latents:
                known = ["inputs", *batch.latents]
                raise ValueError(f"disjoint must be for some of {known}, got {name!r}")
            if name == "inputs":
                values[split] |= dict.fromkeys(_rows(_inputs(batch).values()), "")
            else:
                latent = batch.latents[name]
                shown = (f", such as {value}" for value in latent.tolist())
                values[split] |= dict(zip(_rows([latent]), shown, strict=True))
        for one, other in combinations(sides, 2):
            if shared := values[one].keys() & values[other].keys():
                yield (
                    f"{name} must be disjoint between {one!r} and {other!r}, but {len(shared)} of "
                    f"the {len(values[other])} values drawn of {other!r} occur in {one!r}"
                    f"{values[one][min(shared)]}"
                )


def _function(batches: Batches) -> Iterator[str]:
    """What is in the inputs and latents decides the targets."""
    targets_of: dict[Any, bytes] = {}
    for (split, index), batch in batches.items():
        known = [value for name, value in _parts(batch).items() if name not in ("targets", "mask")]
        targets = _rows([batch.targets.masked_fill(~batch.mask, 0), batch.mask])
        # Padding may differ in width.
        width = batch.targets.shape[1:]
        for i, (row, answer) in enumerate(zip(_rows(known), targets, strict=True)):
            if targets_of.setdefault((row, width), answer) != answer:
                yield (
                    f"example {i} of batch {index} of {split!r} has the inputs and latents of an "
                    "earlier one, but other targets: what decides the answer must be in a latent"
                )
                return


def _solved(batches: Batches, solve: Callable[[Batch[Any]], Tensor]) -> Iterator[str]:
    for (split, index), batch in batches.items():
        solved = solve(replace(batch, targets=torch.zeros_like(batch.targets)))
        where, targets = f"of batch {index} of {split!r}", batch.targets
        if solved.shape != targets.shape:
            yield f"solve must give targets {tuple(targets.shape)} {where}, got {solved.shape}"
            continue
        wrong = ~torch.isclose(solved.double(), targets.double(), 1e-4, 1e-5) & batch.mask
        if wrong.any():
            i = int(wrong.flatten(1).any(1).nonzero()[0])
            yield (
                f"solve must agree with the targets {where}, but not in "
                f"{int(wrong.flatten(1).any(1).sum())} of {len(batch)} examples, first in example "
                f"{i}: {solved[i][wrong[i]].tolist()} against {targets[i][wrong[i]].tolist()}"
            )


def _causal(task: CausalTask[Any], batches: Batches) -> Iterator[str]:
    import networkx

    graph = task.causal_graph
    if not networkx.is_directed_acyclic_graph(graph):
        yield f"causal_graph must be acyclic, but has the cycle {networkx.find_cycle(graph)}"
        return
    batch = next(iter(batches.values()))
    nodes = {"inputs", "targets", *batch.latents}
    if set(graph) != nodes:
        yield f"causal_graph must have the nodes {sorted(nodes)}, got {sorted(graph)}"
        return
    settable = {name for name, can_be_set in graph.nodes(data="can_be_set") if can_be_set}
    exogenous = {name for name, is_exogenous in graph.nodes(data="exogenous") if is_exogenous}
    before = _digest(batch)
    if changed := _differing(before, _digest(task.counterfactual(batch, {}))):
        yield f"a counterfactual of nothing must change nothing, but changes {', '.join(changed)}"
    # Pairs that agree in what cannot be set; without effects, it is a label such as a number.
    fixed = exogenous - settable
    labels = {f"latents[{name!r}]" for name in fixed if not graph.out_degree(name)}
    alike = [batch.latents[name] for name in fixed if graph.out_degree(name)]
    numbers = permutations(range(len(batch)), 2)
    pairs = [(i, j) for i, j in numbers if all(torch.equal(x[i], x[j]) for x in alike)]
    if pairs:
        pairs = pairs[:: len(pairs) // _MOST_PAIRS + 1]
        base, source = (batch.take(side) for side in zip(*pairs, strict=True))
        wanted = {name: source.latents[name] for name in exogenous & settable}
        made = _digest(task.counterfactual(base, wanted))
        if changed := set(_differing(made, _digest(source))) - labels:
            yield (
                f"with {', '.join(sorted(wanted))} of other examples, a counterfactual must be "
                f"those examples, but differs in {', '.join(sorted(changed))}"
            )
    if changed := _differing(before, _digest(batch)):
        yield f"counterfactual must not change its batch in place, but changes {', '.join(changed)}"


def _digests(batches: Batches) -> dict[Key, dict[str, str]]:
    return {key: _digest(batch) for key, batch in batches.items()}


def _random_states() -> dict[str, Any]:
    kind, keys, position, *rest = np.random.get_state()  # noqa: NPY002
    return {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "numpy": (kind, np.asarray(keys).tobytes(), position, rest),
        "random": random.getstate(),
    }


def _digest(batch: Batch[Any]) -> dict[str, str]:
    return {name: _hash(value) for name, value in _parts(batch).items()}


def _hash(value: Tensor) -> str:
    """A hash of dtype, shape and values."""
    kind = f"{value.dtype} {tuple(value.shape)} "
    return hashlib.sha256(kind.encode() + _bytes(value)).hexdigest()


def _bytes(value: Tensor) -> bytes:
    return value.detach().flatten().contiguous().view(torch.uint8).numpy().tobytes()


def _rows(values: Iterable[Tensor]) -> list[bytes]:
    """What tensors have in each row."""
    rows = ([_bytes(row) for row in value] for value in values)
    return list(map(b"".join, zip(*rows, strict=True)))


def _differing(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    return sorted(name for name in {*one, *other} if one.get(name) != other.get(name))


def _changed(one: Digests, other: Digests) -> str:
    """The splits and names of what differs; empty if nothing does."""
    splits: dict[str, set[str]] = {}
    for key, digest in one.items():
        if names := _differing(digest, other[key]):
            splits.setdefault(key[0], set()).update(names)
    return "; ".join(f"{', '.join(sorted(names))} of {split!r}" for split, names in splits.items())


def _sharing(ones: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> list[str]:
    """The names of those of `others` that are, or are views of, the memory of `ones`."""
    memory = {one.untyped_storage().data_ptr() for one in ones.values() if one.numel()}
    return [name for name, x in others.items() if x.untyped_storage().data_ptr() in memory]
