"""The checkpoints of a training run, as safetensors files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from mechanisms.serialization import write_tensors
from studies.engine.folders import LAST, RunError, write_atomically

Log = list[dict[str, float]]
"""One dict per evaluation: `step`, `loss` (mean since the previous evaluation), `learning_rate`,
`seconds`, and the metrics on the validation examples."""

State = dict[str, dict[str, Tensor]]
"""The optimizer state of a model, such as `exp_avg`, by the name of the parameter."""


class Checkpoints:
    """The checkpoint files of one run folder.

    `last` holds the complete state: weights, optimizer state and log. `best` and `step-N` hold
    weights only.

    Args:
        folder: the run folder.
        identity: hash of the config; a checkpoint with another identity is refused.
        writes: whether this process writes the files; only one process of a run may.
    """

    def __init__(self, folder: Path, identity: str, *, writes: bool):
        self._folder, self._identity, self._writes = folder, identity, writes

    def load(self, model: nn.Module) -> tuple[Log, State]:
        """Restore the last weights into a model; return the log and the optimizer state.

        Without a checkpoint nothing is restored, and both are empty.

        Raises:
            RunError: the checkpoint is damaged, of another config, or does not fit the model.
        """
        path = self._folder / LAST
        if not path.exists():
            return [], {}
        log, state = _load_state(model, path, self._identity)
        # A kill between the two writes leaves the log file one line behind the checkpoint.
        self._write_log(log)
        return log, state

    def save(self, model: nn.Module, state: State, log: Log, *, best: bool) -> None:
        """Write the complete state to `last`, and the weights to `best` if `best` is set."""
        weights, metadata = _prefixed_weights(model), {"log": json.dumps(log)}
        # `best` goes first: after a kill in between, the repeated steps write it again.
        if best:
            self._write("best", weights, metadata)
        self._write("last", weights | _prefixed_state(state), metadata)
        self._write_log(log)

    def keep(self, model: nn.Module, step: int) -> None:
        """Write the weights after a step to `step-N`, for measures along training."""
        self._write(f"step-{step}", _prefixed_weights(model), {})

    def fill(self, weights: Mapping[str, Tensor], log: Log, *, checkpoint: str) -> None:
        """Write the files of a finished run from its tested weights and its log.

        Unless `checkpoint`, the tested one, is `last`, the file `last` has the log and no tensors.
        """
        tensors, metadata = _prefixed(weights), {"log": json.dumps(log)}
        self._write(checkpoint, tensors, metadata)
        if checkpoint != "last":
            self._write("last", {}, metadata)
        self._write_log(log)

    def _write(self, name: str, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
        if self._writes:
            metadata = {"identity": self._identity} | metadata
            path = self._folder / f"{name}.safetensors"
            _write(path, tensors, metadata)

    def _write_log(self, log: Log) -> None:
        if self._writes:
            text = "".join(json.dumps(entry) + "\n" for entry in log)
            write_atomically(self._folder / "log.jsonl", lambda to: to.write_text(text))


@dataclass(frozen=True)
class Trunk:
    """The complete states along the constant part of the schedule `stable`.

    Models that differ only in the number of steps and of decay steps share them: a longer or a
    shorter run branches off at the last state before its decay, and ends as if trained alone.

    Args:
        folder: where the states are.
        identity: hash of the config without these numbers, and of the code.
    """

    folder: Path
    identity: str

    def load(self, model: nn.Module, *, last: int) -> tuple[Log, State]:
        """Restore the weights of the latest state, at most step `last`; see `Checkpoints.load`."""
        steps = [int(path.stem.partition("-")[2]) for path in self.folder.glob("step-*")]
        if not (steps := [step for step in steps if step <= last]):
            return [], {}
        return _load_state(model, self._path(max(steps)), self.identity)

    def save(self, model: nn.Module, state: State, log: Log) -> None:
        """Write the complete state after the last step of a log, if it is not there."""
        path = self._path(int(log[-1]["step"]))
        if not path.exists():
            tensors = _prefixed_weights(model) | _prefixed_state(state)
            metadata = {"identity": self.identity, "log": json.dumps(log)}
            _write(path, tensors, metadata)

    def _path(self, step: int) -> Path:
        return self.folder / f"step-{step}.safetensors"


def read_log(folder: Path) -> Log:
    """The log in the last checkpoint of a run folder; empty without a checkpoint."""
    path = folder / LAST
    return json.loads(_read(path, None)[1].get("log", "[]")) if path.exists() else []


def load_weights(model: nn.Module, path: Path, *, device: torch.device | str = "cpu") -> None:
    """Load the weights of a checkpoint file, such as `best.safetensors`, into `model`.

    Raises:
        RunError: the file is missing, damaged, or does not fit the model.
    """
    _load_weights(model, _read(path, device)[0], path)


def load_mean_weights(
    model: nn.Module, paths: Sequence[Path], *, device: torch.device | str = "cpu"
) -> None:
    """Load the mean of the weights of some checkpoint files into `model`.

    The mean of the last checkpoints of a run is often better than each (Vaswani et al. 2017,
    section 6.1; tensor2tensor's `avg_checkpoints`).

    Args:
        model: a model that fits the files; of buffers of whole numbers it gets the last ones.
        paths: one or more files, in order of time.
        device: the device that the files are read to.

    Raises:
        RunError: see `load_weights`.
    """
    files = [_read(path, device)[0] for path in paths]
    mean = {
        name: torch.stack([file[name].double() for file in files]).mean(0).to(last.dtype)
        if last.is_floating_point()
        else last
        for name, last in files[-1].items()
    }
    _load_weights(model, mean, paths[-1])


def kept_checkpoints(folder: Path) -> dict[int, Path]:
    """The files of the weights that a run has kept, by their steps, in order."""
    files = {int(path.stem.partition("-")[2]): path for path in folder.glob("step-*.safetensors")}
    return dict(sorted(files.items()))


def _load_weights(model: nn.Module, tensors: dict[str, Tensor], path: Path) -> None:
    weights = {k.removeprefix("model/"): t for k, t in tensors.items() if k.startswith("model/")}
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise RunError(f"{path} does not fit the model: {error}") from error


def _load_state(model: nn.Module, path: Path, identity: str) -> tuple[Log, State]:
    tensors, metadata = _read(path, next(model.parameters()).device)
    if metadata.get("identity") != identity:
        raise RunError(
            f"{path} is a checkpoint of another config ({metadata.get('identity')}, not {identity})"
        )
    _load_weights(model, tensors, path)
    state: State = {}
    for key, tensor in tensors.items():
        kind, _, name = key.partition("/")
        if kind != "model":
            # Cloned: kernels round by memory alignment, which tensors in a file do not have.
            state.setdefault(name, {})[kind] = tensor.clone()
    return json.loads(metadata["log"]), state


def _prefixed_state(state: State) -> dict[str, Tensor]:
    """Tensors of optimizer state for a file; parameters that are frozen or not used have none."""
    return {
        f"{key}/{name}": tensor.contiguous()
        for name, tensors in state.items()
        for key, tensor in tensors.items()
    }


def _prefixed_weights(model: nn.Module) -> dict[str, Tensor]:
    return _prefixed(model.state_dict())


def _prefixed(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights for a file, in which none may share memory, as tied weights do."""
    tensors, seen = {}, set()
    for name, weight in weights.items():
        tensor = weight.detach().contiguous()
        pointer = tensor.untyped_storage().data_ptr()
        tensors[f"model/{name}"] = tensor.clone() if pointer in seen else tensor
        seen.add(pointer)
    return tensors


def _write(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write a file of tensors, atomically; see `write_atomically`."""

    def write(to: Path) -> None:
        try:
            write_tensors(to, tensors, metadata)
        except SafetensorError as error:
            # It hides the error of the operating system, such as that of a full disk.
            raise OSError(str(error)) from error

    write_atomically(path, write)


def _read(path: Path, device: torch.device | str | None) -> tuple[dict[str, Tensor], dict]:
    """The tensors of a file, on a device, and its metadata; no tensors if the device is None."""
    try:
        with safe_open(path, framework="pt", device=str(device or "cpu")) as file:
            names = [] if device is None else file.keys()
            return {name: file.get_tensor(name) for name in names}, file.metadata() or {}
    except FileNotFoundError as error:
        raise RunError(f"there is no checkpoint {path}") from error
    except (SafetensorError, OSError) as error:
        raise RunError(f"{path} is damaged or no safetensors file: {error}") from error
