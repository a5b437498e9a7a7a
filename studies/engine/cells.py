"""A cell of a study's grid: its folder, its training, and what is measured in its model."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
import xarray as xr
from torch import nn

import probes
from studies.engine import folders, results
from studies.engine.checkpoints import load_weights, read_log
from studies.engine.examples import Examples, Fresh
from studies.engine.fingerprints import changed_files, code_of, sources_of
from studies.engine.folders import RunError
from studies.engine.scoring import figures, score, training_dataset
from studies.engine.settings import plain
from studies.engine.setup import Setup
from studies.engine.training import train
from tasks import Batch


@dataclass(frozen=True)
class Trained:
    """What a measure receives: a trained model, the untrained one, and examples that neither saw.

    Attributes:
        setup: the settings of the cell.
        model: at its best checkpoint, in evaluation mode; or at one along training.
        step: the updates after which that was.
        device: where it lies.
    """

    setup: Any
    model: Any
    step: int
    device: str
    _fresh: Fresh

    @property
    def task(self) -> Any:
        """The sampler of the setup's task, for its labels, solvers and scores."""
        return self.setup.sampler()

    @property
    def seed(self) -> int:
        """That of the cell, for what a measure draws of its own."""
        return self.setup.seed

    @cached_property
    def untrained(self) -> Any:
        """The model of the same seed before training, in evaluation mode."""
        return initial_model(self.setup, self.device).eval()

    def batches(self, split: str, n: int | None = None) -> Iterator[Batch[Any]]:
        """The next `n` examples of a split, `setup.at_once` at a time; see `Fresh.batches`.

        Nothing that training, the choice of the checkpoint, another measure (in a split without
        end) or an earlier call has seen.
        """
        return self._fresh.batches(split, n)

    def batch(self, split: str, n: int | None = None) -> Batch[Any]:
        """The same in one batch."""
        return Batch.cat(list(self.batches(split, n)))


Measure = Callable[[Trained], "xr.Dataset | xr.DataTree | None"]
"""What is looked at in a trained model; None where it does not apply to the model."""


def initial_model(setup: Setup, device: str) -> nn.Module:
    """The model of a setup before training, as it is tested."""
    return setup.build_tested(torch.Generator().manual_seed(setup.seed)).to(device)


def model_costs(trained: Trained) -> xr.Dataset:
    """Parameters, and operations and depth of the model as it is tested and as it is trained."""
    setup = trained.setup
    batch = next(trained.batches(next(reversed(setup.splits)), 1))
    inputs = batch.inputs if isinstance(batch.inputs, tuple) else (batch.inputs,)
    as_trained = setup.build(torch.Generator().manual_seed(setup.seed)).to(trained.device)
    n = len(batch)
    costs = probes.measure_costs(trained.model, lambda model: setup.answer(model, batch), n)
    in_training = probes.measure_costs(as_trained, lambda model: model(*inputs), n)
    for name in ("operations", "depth"):
        about = in_training[name].attrs["long_name"]
        costs[name].attrs["long_name"] = f"{about}, as tested"
        costs[f"{name}_in_training"] = in_training[name].assign_attrs(
            long_name=f"{about}, in training"
        )
    return costs


class Cell:
    """A setup's model, and what is measured in it: the folder `models/MODEL-seedN-HASH`.

    Args:
        setup: the settings.
        root: folder under which `models/` lies.
        device: where models run.
        accept_code: take models, and go on with training, that other code made.
        measures: what is looked at, by name.
        along: which of the measures are also taken at the checkpoints that training kept.
    """

    def __init__(
        self,
        setup: Setup,
        *,
        root: Path,
        device: str = "cpu",
        accept_code: bool = False,
        measures: Mapping[str, Measure] | None = None,
        along: Sequence[str] = (),
    ):
        self.setup, self._device, self._accept = setup, device, accept_code
        self._measures, self._along = dict(measures or {}), along
        self.identity = folders.config_hash(setup)
        self.name = f"{setup.model}-seed{setup.seed}-{self.identity}"
        self.folder = root / "models" / self.name

    @property
    def finished(self) -> bool:
        """Whether the model is trained to the end."""
        setup = self.setup
        return setup.training.ends_with(read_log(self.folder), setup.selection.key, setup.sign)

    @property
    def complete(self) -> bool:
        """Whether the model is trained and all is measured, by the code as it is now."""
        if not self.finished or (self.other_code() and not self._accept):
            return False
        return all(map(self.has, self._measures))

    def code(self) -> dict[str, str]:
        """The digests, as they are now, of the code that training runs."""
        return code_of(self.setup, run_training)

    def other_code(self) -> list[str]:
        """The files whose code differs from what the model was trained with, so far."""
        current = self.code()
        return sorted({k for one in self._codes() for k in changed_files(one["files"], current)})

    def made(self) -> dict[str, Any]:
        """When, with which commits and versions the training began."""
        return next(reversed(self._codes()), {})

    def train(self, *, position: int = 0, shared: bool = False) -> None:
        """Train the model, or finish its training.

        Args:
            position: the line of the progress bar.
            shared: whether another process, the first one, keeps the folder.

        Raises:
            RunError: the folder cannot be used, or holds what other code made; or see `train`.
            TrainingError: see `train`.
        """
        # Another study may be at the same model, or a worker that was given up for lost.
        with nullcontext() if shared else folders.locked(self.folder, wait=True):
            if not shared:
                self._check_code()
            if shared or not self.finished:
                run_training(self.setup, self.folder, self.identity, self._device, position)

    def path_of(self, name: str) -> Path:
        """The file of a measure: its name and its settings' hash."""
        return self.folder / f"{name}-{folders.config_hash(self._measures[name])}.nc"

    def has(self, name: str) -> bool:
        """Whether a measure is on disk, made by the code as it is now."""
        written = results.code_in(self.path_of(name))
        return written is not None and not changed_files(written, self._code_of(name))

    def measured(self) -> xr.DataTree:
        """What is measured: a group for each measure that applies to the model, and `training`.

        What is not on disk is computed, and written.
        """
        tree = xr.DataTree()
        for name in self._measures:
            with folders.locked(self.folder, wait=True):
                groups = (
                    results.load_tree(self.path_of(name)) if self.has(name) else self._measure(name)
                )
            tree.update(groups.children)
        tree["training"] = xr.DataTree(training_dataset(self.setup, read_log(self.folder)))
        return tree

    def _codes(self) -> list[dict[str, Any]]:
        """What is written of the code that has trained the model."""
        return folders.read_json(self.folder / "config.json").get("codes", [])

    def _check_code(self) -> None:
        """Write with which code training begins, or goes on if that is accepted."""
        path, config, codes = self.folder / "config.json", plain(self.setup), self._codes()
        if codes and folders.read_json(path)["config"] != json.loads(json.dumps(config)):
            raise RunError(f"{self.folder} holds a run of another config: see {path}")
        current = self.code()
        changed = changed_files(codes[-1]["files"], current) if codes else []
        if changed and not self._accept:
            raise RunError(
                f"{self.folder} was trained with other code; changed since: {', '.join(changed)}. "
                "Train anew with --fresh, or take it as it is with --accept-code, which the "
                "result then says"
            )
        if not codes or (changed and not self.finished):
            code = {
                "step": int((read_log(self.folder) or [{"step": 0}])[-1]["step"]),
                "at": folders.now(),
                "git": folders.git_commits(sources_of(self.setup)),
                "versions": folders.library_versions(),
                "device": self._device,
                "files": current,
            }
            folders.write_json(path, {"config": config, "codes": [*codes, code]})

    def _code_of(self, name: str) -> dict[str, str]:
        return code_of(self._measures[name], self.setup, Trained, Examples)

    def _measure(self, name: str) -> xr.DataTree:
        """Compute a measure and write it: a group, or two with that along training."""
        log, setup = read_log(self.folder), self.setup
        best = max(log, key=lambda entry: setup.sign * entry[setup.selection.key])
        groups = {name: self._looked_at(name, "best", int(best["step"]))}
        if name in self._along:
            steps = [step for step in setup.training.keep_at if step <= log[-1]["step"]]
            parts = [self._looked_at(name, f"step-{step}", step) for step in steps]
            groups[f"{name}_along_training"] = _along(steps, parts)
        tree = xr.DataTree()
        for group, data in groups.items():
            if data is not None:
                tree[group] = data if isinstance(data, xr.DataTree) else xr.DataTree(data)
        made = {
            "at": folders.now(),
            "git": folders.git_commits(sources_of(setup, self._measures[name])),
        }
        tree.attrs = {"code": json.dumps(self._code_of(name)), "made": json.dumps(made)}
        write = functools.partial(tree.to_netcdf, engine="h5netcdf")
        folders.write_atomically(self.path_of(name), write)
        return tree

    def _looked_at(self, name: str, checkpoint: str, step: int) -> xr.Dataset | xr.DataTree | None:
        """What a measure sees in the model at a checkpoint."""
        model = initial_model(self.setup, self._device)
        load_weights(model, self.folder / f"{checkpoint}.safetensors", device=self._device)
        fresh = Examples(self.setup, self._device).fresh(name)
        trained = Trained(self.setup, model.eval(), step, self._device, fresh)
        return self._measures[name](trained)


def run_training(setup: Setup, folder: Path, identity: str, device: str, position: int = 0) -> None:
    """Train the model of a setup: from `train`, its checkpoints chosen by `setup.selection`."""
    examples = Examples(setup, device)
    held = {split: examples.validation(split) for split in setup.splits}

    def evaluate(model: nn.Module) -> dict[str, float]:
        found: dict[str, float] = {}
        for split, batches in held.items():
            found |= figures(setup, score(setup, model, batches, split), split)
        return found

    train(
        setup.build(torch.Generator().manual_seed(setup.seed)).to(device),
        config=setup.training,
        sample=examples.train,
        evaluate=evaluate,
        select=setup.selection.key,
        sign=setup.sign,
        folder=folder,
        identity=identity,
        seed=setup.seed,
        objective=setup.loss,
        description=f"{setup.model}, seed {setup.seed}",
        position=position,
    )


def _along(steps: Sequence[int], parts: list[Any]) -> xr.Dataset | None:
    if not parts or parts[0] is None:
        return None
    train_step = xr.Variable("train_step", steps, {"long_name": "training step"})
    return cast(xr.Dataset, xr.concat(parts, train_step, combine_attrs="override"))
