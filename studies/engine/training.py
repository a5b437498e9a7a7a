"""Training that can be killed at any moment: AdamW with warm-up and a cosine, exact resumption.

A step is a pure function of the weights, the optimizer's state and (seed, step): the batch
and any dropout are drawn from those two alone. A checkpoint therefore holds nothing else, and
a run that was interrupted ends in the same weights, bit for bit on a CPU.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, cast, get_args

import torch
from torch import Tensor, nn
from tqdm import tqdm

from studies.engine.checkpoints import Checkpoints
from studies.engine.processes import Processes

CHECK_EVERY = 50
"""Steps between two looks at whether all is finite: each look waits for the device."""

Precision = Literal["float32", "tf32", "bf16"]


class TrainingError(RuntimeError):
    """A loss, gradient or weight is not finite."""


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
        warmup_steps: steps of linear growth.
        beta2: decay of AdamW's second moment.
        clip: largest norm of the gradient; None for no clipping.
        evaluate_every: steps between evaluations; a checkpoint is written at each.
        stop_at: end early at the first evaluation whose selecting metric is at least as good.
        keep_at: steps after which the weights are kept, for measures along training, as far as
            training comes.
        precision: `float32`, `tf32` (CUDA matrix products), or `bf16` (autocast).
        compile: train through `torch.compile`; hooks see the eager model as ever.

    Raises:
        ValueError: for a value out of its range.
    """

    n_steps: int
    batch_size: int
    learning_rate: float
    weight_decay: float = 0.0
    warmup_steps: int = 0
    evaluate_every: int = 100
    final_learning_rate: float = 0.1
    beta2: float = 0.999
    clip: float | None = None
    stop_at: float | None = None
    keep_at: tuple[int, ...] = ()
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
        if any(step < 1 for step in self.keep_at):
            raise ValueError(f"keep_at must be at least 1, got {self.keep_at}")
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

    def ends_with(self, log: list[dict[str, float]], select: str, sign: int) -> bool:
        """Whether training with this log is done: at its last step, or where it may stop."""
        if not log:
            return False
        if log[-1]["step"] >= self.n_steps:
            return True
        best = max(sign * entry[select] for entry in log)
        return self.stop_at is not None and best >= sign * self.stop_at


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
    sign: int = 1,
    folder: Path,
    identity: str,
    seed: int,
    objective: Callable[[Any, Any, int], Tensor] = answer_cross_entropy,
    description: str = "training",
    position: int = 0,
) -> list[dict[str, float]]:
    """Train `model` in place, or go on from the last checkpoint in `folder`.

    In `folder`: `log.jsonl` (a line for each evaluation), `last.safetensors` (the whole state),
    `best.safetensors` (the weights with the best `select`) and `step-N.safetensors` (those of
    `config.keep_at`). The model ends with the weights of the last step, that of an early end
    included.

    Under `accelerate launch` or `torchrun` every process takes its share of each batch and the
    first one writes.

    Args:
        model: on the device where it is to be trained.
        sample: (step, size) -> the batch of that step, on that device.
        evaluate: gives the figures that go into the log; the model is in evaluation mode.
        select: which of these figures picks the best checkpoint.
        sign: 1 if a higher figure is better, -1 if a lower one is.
        identity: what a checkpoint must have been written with.
        seed: of the dropout masks.
        objective: (model, batch, step) -> the loss to be minimised, a scalar.
        description: what the progress bar says.
        position: the line of the progress bar, where several models are trained side by side.

    Returns:
        The log: one dict for each evaluation with `step`, `loss` (mean since the one before),
        `learning_rate`, `seconds` and what `evaluate` gave.

    Raises:
        TrainingError: the loss or a weight is not finite; the last checkpoint stays.
        RunError: a checkpoint is damaged or of another config, or files cannot be written.
    """
    device = next(model.parameters()).device
    if device.type == "cpu":
        keep_freed_memory()
    optimizer = _optimizer(model, config)
    checkpoints = Checkpoints(folder, identity)
    log = checkpoints.load(model, optimizer)
    if config.ends_with(log, select, sign):
        return log
    if config.precision == "tf32":
        torch.set_float32_matmul_precision("high")
    processes = Processes(device)
    # The eager model stays free of compilation: hooks added to it later must be heard.
    compiled = cast(nn.Module, torch.compile(model)) if config.compile else model
    step = _Step(config, processes.prepare(compiled), optimizer, objective, seed)
    bar = tqdm(
        total=config.n_steps,
        initial=int(log[-1]["step"]) if log else 0,
        desc=description,
        disable=None if processes.first else True,
        leave=False,
        position=position,
    )

    def save(*, best: bool) -> None:
        if processes.first:
            checkpoints.save(model, optimizer, log, best=best)

    cuda = [device] if device.type == "cuda" else []
    with bar, torch.random.fork_rng(devices=cuda):
        for done, loss in _steps(step, sample, model, log, processes):
            bar.update()
            if done in config.keep_at and processes.first:
                checkpoints.keep(model, done)
            if loss is None:
                continue
            model.eval()
            with torch.no_grad():
                found = evaluate(model)
            before = max((sign * entry[select] for entry in log), default=-math.inf)
            log.append(loss | found)
            bar.set_postfix({"loss": loss["loss"], select: found[select]})
            save(best=sign * found[select] > before)
            if config.ends_with(log, select, sign):
                break
    model.eval()
    return log


def _steps(
    step: _Step,
    sample: Callable[[int, int], TrainingBatch],
    model: nn.Module,
    log: list[dict[str, float]],
    processes: Processes,
) -> Iterator[tuple[int, dict[str, float] | None]]:
    """Make one update after the other; gives their number, and what to log where that is due."""
    config = step.config
    start = since = int(log[-1]["step"]) if log else 0
    total = torch.zeros((), device=next(model.parameters()).device)
    clock = time.monotonic() - (log[-1]["seconds"] if log else 0.0)
    for number in range(start, config.n_steps):
        model.train()
        total += step(processes.share(sample(number, config.batch_size)), number)
        done = number + 1
        ends = done % config.evaluate_every == 0 or done == config.n_steps
        if ends or done in config.keep_at or done % CHECK_EVERY == 0:
            _check(total, model, number, start=since)
            _stop_if_orphaned()
        if not ends:
            yield done, None
            continue
        yield (
            done,
            {
                "step": done,
                "loss": processes.mean(total) / (done - since),
                "learning_rate": config.learning_rate_at(number),
                "seconds": round(time.monotonic() - clock, 3),
            },
        )
        total.zero_()
        since = done


class _Step:
    """One update."""

    def __init__(
        self,
        config: TrainingConfig,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        objective: Callable[[Any, Any, int], Tensor],
        seed: int,
    ):
        self.config, self._model, self._seed = config, model, seed
        self._optimizer, self._objective = optimizer, objective

    def __call__(self, batch: TrainingBatch, number: int) -> Tensor:
        """Make update number `number`; gives its loss."""
        config = self.config
        torch.manual_seed(step_seed(self._seed, number))
        for group in self._optimizer.param_groups:
            group["lr"] = config.learning_rate_at(number)
        with self._autocast(batch.mask.device):
            value = self._objective(self._model, batch, number)
        self._optimizer.zero_grad()
        value.backward()
        if config.clip is not None:
            nn.utils.clip_grad_norm_(self._model.parameters(), config.clip)
        self._optimizer.step()
        return value.detach()

    def _autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        if self.config.precision != "bf16":
            return nullcontext()
        return torch.autocast(device.type, torch.bfloat16)


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


def _check(total: Tensor, model: nn.Module, step: int, *, start: int) -> None:
    """Look at the loss, and at the weights, which gradients that are not finite have spoiled."""
    # A finite loss can have a gradient that is not finite, of a square root at 0, say.
    norm = nn.utils.get_total_norm([parameter.detach() for parameter in model.parameters()])
    if not (torch.isfinite(total) & torch.isfinite(norm)):
        low = max(start, (step // CHECK_EVERY) * CHECK_EVERY)
        what = "the loss" if not torch.isfinite(total) else "a gradient"
        raise TrainingError(
            f"{what} is not finite after a step between {low} and {step}; the last good "
            "checkpoint stays. Try a lower learning rate, a longer warm-up or clipping"
        )


def _stop_if_orphaned() -> None:
    """End a worker process whose parent was killed: a new run may want its folder."""
    parent = multiprocessing.parent_process()
    if parent is not None and not parent.is_alive():
        os._exit(1)
