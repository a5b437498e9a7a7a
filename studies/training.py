"""Training that can be killed at any moment: AdamW with warm-up and a cosine, exact resumption.

A step is a pure function of the weights, the optimizer's state and (seed, step): the batch
and any dropout are drawn from those two alone. A checkpoint therefore holds nothing else, and
a run that was interrupted ends in the same weights, bit for bit on a CPU.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, cast, get_args

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm import tqdm

from studies.runs import RunError, config_hash, locked, open_folder, plain, write_atomically

CHECK_EVERY = 50
"""Steps between two looks at whether the loss is finite: each look waits for the device."""

Precision = Literal["float32", "tf32", "bf16"]


class TrainingError(RuntimeError):
    """The loss is not finite."""


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """How a model is trained.

    Args:
        n_steps: number of updates.
        batch_size: examples per update, over all devices together.
        learning_rate: its peak, after `warmup_steps` of linear growth.
        final_learning_rate: to which share of the peak a cosine takes it down until the last
            step; 1 keeps it.
        weight_decay: AdamW's, on parameters with two or more dimensions (weights, per-head
            biases, bias tables), not on norms and one-dimensional ones.
        beta2: decay of AdamW's second moment.
        clip: largest norm of the gradient; None for no clipping.
        evaluate_every: steps between evaluations; a checkpoint is written at each.
        stop_at: end early at the first evaluation whose selecting figure is at least this.
        precision: `float32`, `tf32` (CUDA matrix products), or `bf16` (autocast).
        compile: train through `torch.compile`; hooks see the eager model as ever.

    Raises:
        ValueError: for a value out of its range.
    """

    n_steps: int
    batch_size: int
    learning_rate: float
    weight_decay: float
    warmup_steps: int
    evaluate_every: int
    final_learning_rate: float = 0.1
    beta2: float = 0.999
    clip: float | None = None
    stop_at: float | None = None
    precision: Precision = "float32"
    compile: bool = False

    def __post_init__(self):
        for name in ("n_steps", "batch_size", "evaluate_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("learning_rate", "weight_decay", "warmup_steps"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        if not 0 <= self.final_learning_rate <= 1:
            raise ValueError(
                f"final_learning_rate must be in [0, 1], got {self.final_learning_rate}"
            )
        if not 0 < self.beta2 < 1:
            raise ValueError(f"beta2 must be in (0, 1), got {self.beta2}")
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"clip must be None or greater than 0, got {self.clip}")
        if self.precision not in get_args(Precision):
            allowed = ", ".join(get_args(Precision))
            raise ValueError(f"precision must be one of {allowed}, got {self.precision!r}")

    def learning_rate_at(self, step: int) -> float:
        """The learning rate of update number `step`, counted from 0."""
        warm = min(1.0, (step + 1) / max(1, self.warmup_steps))
        left = max(1, self.n_steps - self.warmup_steps)
        progress = min(1.0, max(0, step - self.warmup_steps) / left)
        fall = (1 - self.final_learning_rate) * (1 - math.cos(math.pi * progress)) / 2
        return self.learning_rate * warm * (1 - fall)

    def reached(self, figure: float) -> bool:
        """Whether training may end with this selecting figure."""
        return self.stop_at is not None and figure >= self.stop_at


class TrainingBatch(Protocol):
    """What a batch must have to be trained on; `tasks.Batch` does."""

    @property
    def inputs(self) -> Tensor | tuple[Tensor, ...]:
        """What the model is called with: an argument, or several."""
        ...

    @property
    def targets(self) -> Tensor:
        """[batch, pos] class ids."""
        ...

    @property
    def mask(self) -> Tensor:
        """[batch, pos] bool, True where a target counts."""
        ...

    def __getitem__(self, examples: slice) -> TrainingBatch:
        """Some of the examples; asked for only when several processes share a batch."""
        ...


def cross_entropy(logits: Tensor, batch: TrainingBatch) -> Tensor:
    """The mean cross-entropy over the targets that count; logits [batch, pos, class]."""
    losses = nn.functional.cross_entropy(
        logits.flatten(0, -2), batch.targets.flatten(), reduction="none"
    )
    counts = batch.mask.flatten()
    return (losses * counts).sum() / counts.sum()


def answer(model: nn.Module, batch: TrainingBatch) -> Tensor:
    """What the model answers to a batch."""
    inputs = batch.inputs
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def answer_cross_entropy(model: nn.Module, batch: TrainingBatch, step: int) -> Tensor:
    """The cross-entropy of what the model answers to a batch; the same at every step."""
    return cross_entropy(answer(model, batch).float(), batch)


def train(
    model: nn.Module,
    *,
    config: TrainingConfig,
    sample: Callable[[int, int], TrainingBatch],
    evaluate: Callable[[nn.Module], dict[str, float]],
    select: str,
    folder: Path,
    identity: object,
    seed: int,
    objective: Callable[[Any, Any, int], Tensor] = answer_cross_entropy,
    description: str = "training",
    position: int = 0,
) -> list[dict[str, float]]:
    """Train `model` in place, or go on from the last checkpoint in `folder`.

    In `folder`: `config.json`, `log.jsonl` (a line for each evaluation), `last.safetensors` (the
    whole state) and `best.safetensors` (the weights with the highest `select`). The model
    ends with the weights of the last step, that of an early end included.

    Under `accelerate launch` or `torchrun` every process takes its share of each batch and the
    first one writes.

    Args:
        model: on the device where it is to be trained.
        sample: (step, size) -> the batch of that step, on that device.
        evaluate: gives the figures that go into the log; the model is in evaluation mode.
        select: which of these figures picks the best checkpoint; higher is better.
        identity: the config that makes this run what it is; a checkpoint of another is refused.
        seed: of the dropout masks.
        objective: (model, batch, step) -> the loss to be minimised, a scalar.
        description: what the progress bar says.
        position: the line of the progress bar, where several models are trained side by side.

    Returns:
        The log: one dict for each evaluation with `step`, `loss` (mean since the one before),
        `learning_rate`, `seconds` and what `evaluate` gave.

    Raises:
        TrainingError: the loss is not finite; the last checkpoint stays.
        RunError: a checkpoint is damaged or of another config, or files cannot be written.
    """
    device = next(model.parameters()).device
    if device.type == "cpu":
        keep_freed_memory()
    workers = _Workers(device)
    with locked(open_folder(folder, identity)) if workers.first else nullcontext():
        optimizer = _optimizer(model, config)
        state = _State(folder, config_hash(identity))
        log = state.load(model, optimizer, device)
        start = int(log[-1]["step"]) if log else 0
        best = max((entry[select] for entry in log), default=-math.inf)
        if start >= config.n_steps or config.reached(best):
            return log

        if config.precision == "tf32":
            torch.set_float32_matmul_precision("high")
        autocast = (
            torch.autocast(device.type, torch.bfloat16)
            if config.precision == "bf16"
            else nullcontext()
        )
        # The eager model stays free of compilation: hooks added to it later must be heard.
        stepper = workers.prepare(
            cast(nn.Module, torch.compile(model)) if config.compile else model
        )
        cuda = [device] if device.type == "cuda" else []
        total, since = torch.zeros((), device=device), start
        clock = time.monotonic() - (log[-1]["seconds"] if log else 0.0)
        bar = tqdm(
            total=config.n_steps,
            initial=start,
            desc=description,
            disable=None if workers.first else True,
            leave=False,
            position=position,
        )
        with bar, torch.random.fork_rng(devices=cuda):
            for step in range(start, config.n_steps):
                torch.manual_seed(step_seed(seed, step))
                for group in optimizer.param_groups:
                    group["lr"] = config.learning_rate_at(step)
                model.train()
                batch = workers.share(sample(step, config.batch_size))
                with autocast:
                    value = objective(stepper, batch, step)
                optimizer.zero_grad()
                value.backward()
                if config.clip is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), config.clip)
                optimizer.step()
                total += value.detach()
                bar.update()

                done = step + 1
                ends = done % config.evaluate_every == 0 or done == config.n_steps
                if ends or done % CHECK_EVERY == 0:
                    _check(total, step, start=since)
                    _stop_if_orphaned()
                if not ends:
                    continue
                model.eval()
                with torch.no_grad():
                    figures = evaluate(model)
                entry = {
                    "step": done,
                    "loss": workers.mean(total) / (done - since),
                    "learning_rate": config.learning_rate_at(step),
                    "seconds": round(time.monotonic() - clock, 3),
                    **figures,
                }
                total.zero_()
                since = done
                log.append(entry)
                bar.set_postfix({"loss": entry["loss"], select: entry[select]})
                if workers.first:
                    improved, best = entry[select] > best, max(best, entry[select])
                    state.save(model, optimizer, log, best=improved)
                if config.reached(entry[select]):
                    break
    model.eval()
    return log


def process_device(device: str) -> tuple[int, str]:
    """This process's rank under `accelerate launch` or `torchrun`, and its own device.

    (0, device) in a process that runs alone.
    """
    rank = int(os.environ.get("RANK", "0"))
    if device == "cuda" and "LOCAL_RANK" in os.environ:
        device = f"cuda:{os.environ['LOCAL_RANK']}"
    return rank, device


def keep_freed_memory() -> None:
    """Ask the C library not to give memory back to the system between steps.

    A step frees and asks again for the same tens of megabytes; glibc returns them each time, and
    the page faults that follow take up to a tenth of a step on a CPU. Elsewhere it does nothing.
    """
    if not sys.platform.startswith("linux"):
        return
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        trim_threshold, mmap_threshold = -1, -3  # the parameters' numbers in malloc.h
        library.mallopt(trim_threshold, 2**31 - 1)
        library.mallopt(mmap_threshold, 2**25)  # the largest that is allowed


def step_seed(seed: int, step: int) -> int:
    """The seed of one step's dropout: 63 bits of a hash of (seed, step)."""
    digest = hashlib.sha256(f"{seed}/{step}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def load_weights(model: nn.Module, path: Path, *, device: torch.device | str = "cpu") -> None:
    """Put the weights of a checkpoint (`best.safetensors`, say) into `model`.

    Raises:
        RunError: the file is missing, damaged, or does not fit the model.
    """
    tensors, _ = _read(path, device)
    weights = {name[len("model/") :]: t for name, t in tensors.items() if name.startswith("model/")}
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise RunError(f"{path} does not fit the model: {error}") from error


def _optimizer(model: nn.Module, config: TrainingConfig) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    return torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": config.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ],
        lr=config.learning_rate,
        betas=(0.9, config.beta2),
        fused=matrices[0].device.type in ("cpu", "cuda"),
    )


def _check(total: Tensor, step: int, *, start: int) -> None:
    if not math.isfinite(total.item()):
        low = max(start, (step // CHECK_EVERY) * CHECK_EVERY)
        raise TrainingError(
            f"the loss is not finite after a step between {low} and {step}; the last good "
            "checkpoint stays. Try a lower learning rate, a longer warm-up or clipping"
        )


def _stop_if_orphaned() -> None:
    """End a worker process whose parent was killed: a new run may want its folder."""
    parent = multiprocessing.parent_process()
    if parent is not None and not parent.is_alive():
        os._exit(1)


class _State:
    """What a run needs to go on: weights, moments and the log, in one safetensors file."""

    def __init__(self, folder: Path, identity_hash: str):
        self.folder = folder
        self.identity_hash = identity_hash

    def load(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device
    ) -> list[dict[str, float]]:
        path = self.folder / "last.safetensors"
        if not path.exists():
            return []
        tensors, metadata = _read(path, device)
        if metadata.get("identity") != self.identity_hash:
            raise RunError(
                f"{path} is a checkpoint of another config ({metadata.get('identity')}, "
                f"not {self.identity_hash})"
            )
        load_weights(model, path, device=device)
        for name, parameter in model.named_parameters():
            optimizer.state[parameter] = {
                key: tensors[f"{key}/{name}"].clone() for key in ("step", "exp_avg", "exp_avg_sq")
            }
        log = json.loads(metadata["log"])
        # The log file may be ahead of the checkpoint by the line that the kill cut off.
        self._write_log(log)
        return log

    def save(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        log: list[dict[str, float]],
        *,
        best: bool,
    ) -> None:
        weights = {
            f"model/{name}": tensor.detach().contiguous()
            for name, tensor in model.state_dict().items()
        }
        moments = {
            f"{key}/{name}": optimizer.state[parameter][key]
            for name, parameter in model.named_parameters()
            for key in ("step", "exp_avg", "exp_avg_sq")
        }
        metadata = {"identity": self.identity_hash, "log": json.dumps(log)}
        # The best weights go first: a kill in between repeats the steps, and finds them again.
        if best:
            write_atomically(
                self.folder / "best.safetensors",
                lambda place: save_file(weights, place, metadata),
            )
        write_atomically(
            self.folder / "last.safetensors",
            lambda place: save_file(weights | moments, place, metadata),
        )
        self._write_log(log)

    def _write_log(self, log: list[dict[str, float]]) -> None:
        text = "".join(json.dumps(plain(entry)) + "\n" for entry in log)
        write_atomically(self.folder / "log.jsonl", lambda place: place.write_text(text))


def _read(path: Path, device: torch.device | str) -> tuple[dict[str, Tensor], dict[str, str]]:
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return tensors, file.metadata() or {}
    except FileNotFoundError as error:
        raise RunError(f"there is no checkpoint {path}") from error
    except (SafetensorError, OSError) as error:
        raise RunError(f"{path} is damaged or no safetensors file: {error}") from error


class _Workers:
    """The processes that train one model together; most often there is one."""

    def __init__(self, device: torch.device):
        self._accelerator = None
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            from accelerate import Accelerator

            self._accelerator = Accelerator(cpu=device.type == "cpu")

    @property
    def first(self) -> bool:
        return self._accelerator is None or self._accelerator.is_main_process

    def prepare(self, model: nn.Module) -> nn.Module:
        return model if self._accelerator is None else self._accelerator.prepare_model(model)

    def share(self, batch: TrainingBatch) -> TrainingBatch:
        """This process's part of a batch: every n-th example."""
        if self._accelerator is None:
            return batch
        mine = slice(self._accelerator.process_index, None, self._accelerator.num_processes)
        return batch[mine]

    def mean(self, value: Tensor) -> float:
        if self._accelerator is not None:
            value = cast(Tensor, self._accelerator.reduce(value, reduction="mean"))
        return float(value)
