"""Cells of a study's grid: one trained model each, with its folder and its measurements."""

from __future__ import annotations

import json
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xarray as xr
from safetensors.torch import load_file

import probes
from mechanisms import model_zoo
from studies.engine import folders, results
from studies.engine.checkpoints import Checkpoints, Trunk, load_weights, read_log
from studies.engine.examples import Examples, first_batch
from studies.engine.fingerprints import changed_files, code_of, sources_of
from studies.engine.folders import RunError
from studies.engine.results import SchemaError
from studies.engine.scoring import tested_entry, training_dataset
from studies.engine.settings import plain, put
from studies.engine.setup import Setup
from studies.engine.trained import Measure, Trained, initial_model
from studies.engine.trainees import run_training, trunk_of
from studies.engine.training import NEVER, Deadline, answer


def model_costs(trained: Trained) -> xr.Dataset:
    """Number of parameters, and operations and depth of the model as tested and in training."""
    setup = trained.setup
    batch = next(trained.batches(next(reversed(setup.splits)), 1))
    training_model = setup.build(torch.Generator().manual_seed(setup.seed)).to(trained.device)
    n = len(batch)
    costs = probes.measure_costs(trained.model, lambda model: setup.answer(model, batch), n)
    in_training = probes.measure_costs(training_model, lambda model: answer(model, batch), n)
    for name in ("operations", "depth"):
        long_name = in_training[name].attrs["long_name"]
        costs[name].attrs["long_name"] = f"{long_name}, as tested"
        costs[f"{name}_in_training"] = in_training[name].assign_attrs(
            long_name=f"{long_name}, in training"
        )
    return costs


class Cell:
    """One trained model and its measurements, in the folder `models/MODEL-seedN-HASH`.

    A model of the zoo is in `models/MODEL-seedN-HASH-zoo-HASH`, apart from what is trained here.

    Args:
        setup: the settings.
        root: folder that holds `models/`.
        device: where models run.
        accept_code: accept models that other code trained, and resume their training.
        measures: the measures by name.
        along: names of the measures that are also taken at the checkpoints along training.
        axes: names of the axes of the study, which variables of measures must not have.
        zoo: names of models of the zoo, by `identity_of_weights`. A cell that it has, and that has
            not begun to train, gets its model from there, in a folder of its own; but not if
            measures are taken along training, since the zoo has tested checkpoints only.
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
        axes: Collection[str] = (),
        zoo: Mapping[str, str] | None = None,
    ):
        self.setup, self.device = setup, device
        self._measures, self._along, self._axes = dict(measures or {}), along, axes
        self.identity = folders.config_hash(setup)
        self.name = f"{setup.model}-seed{setup.seed}-{self.identity}"
        self.folder = root / "models" / self.name
        self.zoo_name = None
        if not (self.folder / "config.json").exists() and not (along and setup.training.keep_at):
            self.zoo_name = (zoo or {}).get(identity_of_weights(setup))
        if self.zoo_name is not None:
            # Another model of that name in the zoo, trained again, is another folder.
            trained = folders.config_hash(model_zoo.record_of(self.zoo_name))
            self.folder = self.folder.with_name(f"{self.name}-zoo-{trained}")
        self._accept = accept_code or self.zoo_name is not None

    @property
    def finished(self) -> bool:
        """Whether training has ended."""
        setup = self.setup
        return setup.training.ends_with(read_log(self.folder), setup.selection.key, setup.sign)

    @property
    def complete(self) -> bool:
        """Whether the model is trained and all measures are on disk, by the current code."""
        return not self.lacks()

    def lacks(self) -> str:
        """What the cell lacks to be complete; "" if it is."""
        if not self.finished:
            return "its training has not ended"
        if changed := [] if self._accept else self._changed():
            return f"it was trained with other code; changed since: {', '.join(changed)}"
        missing = [name for name in self._measures if not self.has(name)]
        return f"not measured, or by other code: {', '.join(missing)}" if missing else ""

    def code(self) -> dict[str, str]:
        """Digests of the current code that training runs."""
        return code_of(self.setup, run_training)

    def code_of_measures(self, *names: str) -> dict[str, str]:
        """Digests of the current code that some measures run, or, without names, all."""
        measures = [self._measures[name] for name in names or self._measures]
        return code_of(*measures, self.setup, Trained, Examples)

    @property
    def trunk(self) -> Trunk | None:
        """The states that the model shares with others; see `trunk_of`."""
        return trunk_of(self.setup, self.folder.parents[1])

    def other_code(self) -> list[str]:
        """The files that have changed since any part of the training."""
        current = self.code()
        return sorted(
            {file for record in self._codes() for file in changed_files(record["files"], current)}
        )

    def provenance(self) -> dict[str, Any]:
        """The time, git commits, versions and device of the last code that trained the model."""
        return next(reversed(self._codes()), {})

    def train(self, *, position: int = 0, shared: bool = False) -> None:
        """Train the model, or resume its training; see `train_together`.

        Args:
            position: line of the progress bar.
            shared: whether another process trains the model too, and holds the lock of the folder.
        """
        if shared:
            run_training([self.setup], [self.folder], self.device, position=position)
        else:
            train_together([self], position=position)

    def set_aside(self) -> None:
        """Move the model and its measures aside, to make them anew.

        Raises:
            RunError: another process trains the model.
        """
        with folders.locked(self.folder):
            folders.set_aside(self.folder)
            if (trunk := self.trunk) is not None:
                folders.set_aside(trunk.folder)

    def remove(self, measures: Sequence[str]) -> None:
        """Remove some measures, to make them anew.

        Raises:
            RunError: another process trains or measures the model.
        """
        with folders.locked(self.folder):
            for name in measures:
                self.path_of(name).unlink(missing_ok=True)

    def take_from_zoo(self) -> None:
        """If the model is one of the zoo, write it to the folder, as that of a finished training.

        Raises:
            RunError: the folder cannot be written.
        """
        if self.zoo_name is None:
            return
        path, record = self.folder / "config.json", model_zoo.record_of(self.zoo_name)
        with folders.locked(self.folder, wait=True):
            if path.exists():
                return
            weights = load_file(model_zoo.weights_path(self.zoo_name))
            checkpoints = Checkpoints(self.folder, self.identity, writes=True)
            checkpoints.fill(weights, record["log"], checkpoint=self.setup.training.checkpoint)
            codes = {"codes": record["codes"], "zoo": self.zoo_name}
            folders.write_json(path, {"config": plain(self.setup)} | codes)

    def path_of(self, name: str) -> Path:
        """The file of a measure, named by the measure and the hash of its settings."""
        settings = self._measures[name]
        identity = [settings, "along training"] if name in self._along else settings
        return self.folder / f"{name}-{folders.config_hash(identity)}.nc"

    def has(self, name: str) -> bool:
        """Whether a measure is on disk, made by the current code."""
        code = results.code_in(self.path_of(name))
        return code is not None and not changed_files(code, self.code_of_measures(name))

    def measure(self) -> None:
        """Compute and write the measures that are not on disk."""
        for name in self._measures:
            with folders.locked(self.folder, wait=True):
                if not self.has(name):
                    self._measure(name)

    def load(self) -> xr.DataTree:
        """The measurements on disk: a group per measure that applies to it, and `training`."""
        tree = xr.DataTree()
        for name in self._measures:
            tree.update(results.load_tree(self.path_of(name)).children)
        tree["training"] = xr.DataTree(training_dataset(self.setup, read_log(self.folder)))
        return tree

    def _codes(self) -> list[dict[str, Any]]:
        """The records of the code that has trained the model, in order of time."""
        return folders.read_json(self.folder / "config.json").get("codes", [])

    def _changed(self) -> list[str]:
        """The files that have changed since the last code that trained the model.

        Code before it was accepted when the training was resumed.
        """
        codes = self._codes()
        return changed_files(codes[-1]["files"], self.code()) if codes else []

    def check_code(self) -> None:
        """Check that the code is that of the model; record new code if it is the first or accepted.

        Raises:
            RunError: the folder has another config, or the code has changed and is not accepted.
        """
        path, config, codes = self.folder / "config.json", plain(self.setup), self._codes()
        if codes and folders.read_json(path)["config"] != json.loads(json.dumps(config)):
            raise RunError(f"{self.folder} holds a run of another config: see {path}")
        changed = self._changed()
        if changed and not self._accept:
            raise RunError(
                f"{self.folder} was trained with other code; changed since: {', '.join(changed)}. "
                "Train again with --fresh, or accept the model with --accept-code, which the "
                "result will record"
            )
        if not codes or (changed and not self.finished):
            record = {
                "step": int((read_log(self.folder) or [{"step": 0}])[-1]["step"]),
                "at": folders.now(),
                "git": folders.git_commits(sources_of(self.setup)),
                "versions": folders.library_versions(),
                "device": self.device,
                "files": self.code(),
            }
            folders.write_json(path, {"config": config, "codes": [*codes, record]})

    def _measure(self, name: str) -> None:
        """Compute a measure, at the tested checkpoint and if asked for along training; write it.

        Raises:
            SchemaError: it does not follow the schema, or cannot be written.
        """
        log, setup = read_log(self.folder), self.setup
        tested = log[tested_entry(setup, log)]
        groups = {name: self._measure_at(name, setup.training.checkpoint, int(tested["step"]))}
        if name in self._along:
            steps = [step for step in setup.training.keep_at if step <= log[-1]["step"]]
            datasets = [self._measure_at(name, f"step-{step}", step) for step in steps]
            groups[f"{name}_along_training"] = _concat_steps(name, steps, datasets)
        made = {
            "at": folders.now(),
            "git": folders.git_commits(sources_of(setup, self._measures[name])),
        }
        attrs = {"code": json.dumps(self.code_of_measures(name)), "made": json.dumps(made)}
        try:
            tree = xr.DataTree()
            for group, data in groups.items():
                if data is not None:
                    tree[group] = data if isinstance(data, xr.DataTree) else xr.DataTree(data)
            tree.attrs = attrs
            results.write_tree(tree, self.path_of(name))
        except (TypeError, ValueError) as error:
            raise SchemaError(f"measure {name!r} returns what no file can hold: {error}") from error

    def _measure_at(self, name: str, checkpoint: str, step: int) -> xr.Dataset | xr.DataTree | None:
        """The result of a measure for the model at a checkpoint.

        Raises:
            TypeError: it is no dataset, no tree of them, and not None.
            SchemaError: it does not follow the schema.
        """
        model = initial_model(self.setup, self.device)
        load_weights(model, self.folder / f"{checkpoint}.safetensors", device=self.device)
        fresh = Examples(self.setup, self.device).fresh(name)
        trained = Trained(self.setup, model.eval(), step, self.device, fresh, self.folder)
        # Of what was measured before, in this process or another, nothing may depend.
        with seeded(self.setup.seed + first_batch(name)):
            measured = self._measures[name](trained)
        if not (measured is None or isinstance(measured, xr.Dataset | xr.DataTree)):
            raise TypeError(
                f"measure {name!r} must return an xarray.Dataset or DataTree, or None where it "
                f"does not apply, got {type(measured).__name__}"
            )
        if measured is not None:
            try:
                results.check_measured(measured, self._axes)
            except SchemaError as error:
                raise SchemaError(f"measure {name!r}: {error}") from None
        return measured


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the global random numbers of Python, NumPy and torch, then restore their states."""
    of_python, of_numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
    with torch.random.fork_rng():
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002
        torch.manual_seed(seed)
        try:
            yield
        finally:
            random.setstate(of_python)
            np.random.set_state(of_numpy)  # noqa: NPY002


def identity_of_weights(setup: Setup) -> str:
    """The hash of the settings on which the tested weights depend, but for rounding."""
    return folders.config_hash(put(setup, {"training.keep_at": (), "training.compile": False}))


def train_together(cells: Sequence[Cell], *, position: int = 0, deadline: Deadline = NEVER) -> None:
    """Train models that differ in their seeds alone as one batched model, or resume that.

    Args:
        cells: the cells.
        position: line of the progress bar.
        deadline: stop at the last checkpoint before it.

    Raises:
        RunError: a folder cannot be used, or holds a model that other code trained; or see
            `studies.engine.training.train`.
        TrainingError: see `studies.engine.training.train`.
    """
    with ExitStack() as locks:
        # In order, since another study, or a worker that was believed dead, may train some of them.
        for cell in sorted(cells, key=lambda cell: cell.name):
            locks.enter_context(folders.locked(cell.folder, wait=True))
            cell.check_code()
        waiting = [cell for cell in cells if not cell.finished]
        if waiting:
            run_training(
                [cell.setup for cell in waiting],
                [cell.folder for cell in waiting],
                cells[0].device,
                position=position,
                deadline=deadline,
            )


def _concat_steps(
    name: str, steps: Sequence[int], datasets: Sequence[Any]
) -> xr.Dataset | xr.DataTree | None:
    """The results of a measure along `train_step`; None if it does not apply to the model.

    Raises:
        SchemaError: it applies at some steps only, or its results do not fit together.
    """
    without = [step for step, data in zip(steps, datasets, strict=True) if data is None]
    if len(without) == len(steps):
        return None
    if without:
        raise SchemaError(
            f"measure {name!r} must apply to a model at all checkpoints along training or at none, "
            f"got None at steps {', '.join(map(str, without))} of {', '.join(map(str, steps))}"
        )
    train_step = xr.Variable("train_step", steps, {"long_name": "training step"})
    try:
        return xr.concat(datasets, train_step, combine_attrs="override")
    except ValueError as error:
        raise SchemaError(f"measure {name!r} along training: {error}") from error
