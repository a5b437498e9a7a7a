"""The checkpoints of a training run, as safetensors files."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from studies.engine.folders import RunError, write_atomically

Log = list[dict[str, float]]
"""A dict for each evaluation: `step`, `loss` (the mean since the one before), `learning_rate`,
`seconds`, and the figures of the evaluation."""

_MOMENTS = ("step", "exp_avg", "exp_avg_sq")


class Checkpoints:
    """What a run needs to go on: weights, moments and the log, in one file; and kept weights.

    They must have been written with the same `identity`; one process `writes`.
    """

    def __init__(self, folder: Path, identity: str, *, writes: bool):
        self._folder, self._identity, self._writes = folder, identity, writes

    def load(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Log:
        """Put the last state into a model and its optimizer; gives the log, empty if none."""
        path = self._folder / "last.safetensors"
        if not path.exists():
            return []
        tensors, metadata = _read(path, next(model.parameters()).device)
        if metadata.get("identity") != self._identity:
            raise RunError(
                f"{path} is a checkpoint of another config ({metadata.get('identity')}, "
                f"not {self._identity})"
            )
        _put_weights(model, tensors, path)
        for name, parameter in model.named_parameters():
            if f"step/{name}" in tensors:
                moments = {key: tensors[f"{key}/{name}"].clone() for key in _MOMENTS}
                optimizer.state[parameter] = moments
        log = json.loads(metadata["log"])
        # The log file may be ahead of the checkpoint by the line that the kill cut off.
        self._write_log(log)
        return log

    def save(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, log: Log, *, best: bool
    ) -> None:
        """Write the whole state, and if they are the `best` the weights."""
        weights, about = _weights(model), {"log": json.dumps(log)}
        moments = {
            f"{key}/{name}": optimizer.state[parameter][key]
            for name, parameter in model.named_parameters()
            # What is not trained, or was not used so far, has none.
            if parameter in optimizer.state
            for key in _MOMENTS
        }
        # The best weights go first: a kill in between repeats the steps, and finds them again.
        if best:
            self._write("best", weights, about)
        self._write("last", weights | moments, about)
        self._write_log(log)

    def keep(self, model: nn.Module, step: int) -> None:
        """Write the weights after a step, for measures along training."""
        self._write(f"step-{step}", _weights(model), {})

    def _write(self, name: str, tensors: dict[str, Tensor], about: dict[str, str]) -> None:
        if self._writes:
            about = {"identity": self._identity} | about
            path = self._folder / f"{name}.safetensors"
            write_atomically(path, lambda to: save_file(tensors, to, about))

    def _write_log(self, log: Log) -> None:
        if self._writes:
            text = "".join(json.dumps(entry) + "\n" for entry in log)
            write_atomically(self._folder / "log.jsonl", lambda to: to.write_text(text))


def read_log(folder: Path) -> Log:
    """The log of the last checkpoint of a run folder, empty if there is none."""
    path = folder / "last.safetensors"
    return json.loads(_read(path, None)[1].get("log", "[]")) if path.exists() else []


def load_weights(model: nn.Module, path: Path, *, device: torch.device | str = "cpu") -> None:
    """Put the weights of a checkpoint (`best.safetensors`, say) into `model`.

    Raises:
        RunError: the file is missing, damaged, or does not fit the model.
    """
    _put_weights(model, _read(path, device)[0], path)


def _put_weights(model: nn.Module, tensors: dict[str, Tensor], path: Path) -> None:
    weights = {k.removeprefix("model/"): t for k, t in tensors.items() if k.startswith("model/")}
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise RunError(f"{path} does not fit the model: {error}") from error


def _weights(model: nn.Module) -> dict[str, Tensor]:
    return {f"model/{name}": t.detach().contiguous() for name, t in model.state_dict().items()}


def _read(path: Path, device: torch.device | str | None) -> tuple[dict[str, Tensor], dict]:
    """The tensors of a file, on a device, and what else it says; without a device no tensors."""
    try:
        with safe_open(path, framework="pt", device=str(device or "cpu")) as file:
            names = [] if device is None else file.keys()
            return {name: file.get_tensor(name) for name in names}, file.metadata() or {}
    except FileNotFoundError as error:
        raise RunError(f"there is no checkpoint {path}") from error
    except (SafetensorError, OSError) as error:
        raise RunError(f"{path} is damaged or no safetensors file: {error}") from error
