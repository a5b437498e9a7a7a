"""The checkpoints of a training run, as safetensors files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from studies.engine.folders import RunError, write_atomically

Log = list[dict[str, float]]
"""One dict per evaluation: `step`, `loss` (mean since the previous evaluation), `learning_rate`,
`seconds`, and the metrics on the validation examples."""

_OPTIMIZER_STATE = ("step", "exp_avg", "exp_avg_sq")


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

    def load(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Log:
        """Restore the last state into a model and its optimizer; return the log.

        Without a checkpoint nothing is restored and the log is empty.

        Raises:
            RunError: the checkpoint is damaged, of another config, or does not fit the model.
        """
        path = self._folder / "last.safetensors"
        if not path.exists():
            return []
        tensors, metadata = _read(path, next(model.parameters()).device)
        if metadata.get("identity") != self._identity:
            raise RunError(
                f"{path} is a checkpoint of another config ({metadata.get('identity')}, "
                f"not {self._identity})"
            )
        _load_weights(model, tensors, path)
        for name, parameter in model.named_parameters():
            if f"step/{name}" in tensors:
                state = {key: tensors[f"{key}/{name}"].clone() for key in _OPTIMIZER_STATE}
                optimizer.state[parameter] = state
        log = json.loads(metadata["log"])
        # A kill between the two writes leaves the log file one line behind the checkpoint.
        self._write_log(log)
        return log

    def save(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, log: Log, *, best: bool
    ) -> None:
        """Write the complete state to `last`, and the weights to `best` if `best` is set."""
        weights, metadata = _prefixed_weights(model), {"log": json.dumps(log)}
        state = {
            f"{key}/{name}": optimizer.state[parameter][key]
            for name, parameter in model.named_parameters()
            # Frozen and not yet used parameters have no optimizer state.
            if parameter in optimizer.state
            for key in _OPTIMIZER_STATE
        }
        # `best` goes first: after a kill in between, the repeated steps write it again.
        if best:
            self._write("best", weights, metadata)
        self._write("last", weights | state, metadata)
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
            write_atomically(path, lambda to: save_file(tensors, to, metadata))

    def _write_log(self, log: Log) -> None:
        if self._writes:
            text = "".join(json.dumps(entry) + "\n" for entry in log)
            write_atomically(self._folder / "log.jsonl", lambda to: to.write_text(text))


def read_log(folder: Path) -> Log:
    """The log in the last checkpoint of a run folder; empty without a checkpoint."""
    path = folder / "last.safetensors"
    return json.loads(_read(path, None)[1].get("log", "[]")) if path.exists() else []


def load_weights(model: nn.Module, path: Path, *, device: torch.device | str = "cpu") -> None:
    """Load the weights of a checkpoint file, such as `best.safetensors`, into `model`.

    Raises:
        RunError: the file is missing, damaged, or does not fit the model.
    """
    _load_weights(model, _read(path, device)[0], path)


def _load_weights(model: nn.Module, tensors: dict[str, Tensor], path: Path) -> None:
    weights = {k.removeprefix("model/"): t for k, t in tensors.items() if k.startswith("model/")}
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise RunError(f"{path} does not fit the model: {error}") from error


def _prefixed_weights(model: nn.Module) -> dict[str, Tensor]:
    return _prefixed(model.state_dict())


def _prefixed(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"model/{name}": tensor.detach().contiguous() for name, tensor in weights.items()}


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
