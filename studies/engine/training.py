"""Training that can be killed at any moment: AdamW with warm-up and a cosine, exact resumption.

A step is a pure function of the weights, the optimizer's state and (seed, step): the batch
and any dropout are drawn from those two alone. A checkpoint therefore holds nothing else, and
a run that was interrupted ends in the same weights, bit for bit on a CPU.

In a run's folder: `log.jsonl` (a line for each evaluation), `last.safetensors` (the whole state),
`best.safetensors` (the weights with the best selecting metric) and `step-N.safetensors` (those of
`TrainingConfig.keep_at`).
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn
from tqdm import tqdm

from studies.engine.checkpoints import Checkpoints, Log
from studies.engine.processes import Processes
from tasks import Batch

CHECK_EVERY = 50
"""Steps between two looks at whether all is finite: each look waits for the device."""

Objective = Callable[[nn.Module, Any, int], Tensor]
"""(model, batch, step) -> the loss to be minimised, a scalar."""

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
        precisions = get_args(Precision)
        for name, is_allowed, allowed in (
            ("n_steps", self.n_steps >= 1, "at least 1"),
            ("batch_size", self.batch_size >= 1, "at least 1"),
            ("evaluate_every", self.evaluate_every >= 1, "at least 1"),
            ("keep_at", all(step >= 1 for step in self.keep_at), "at least 1"),
            ("learning_rate", 0 <= self.learning_rate < math.inf, "at least 0"),
            ("weight_decay", 0 <= self.weight_decay < math.inf, "at least 0"),
            ("warmup_steps", 0 <= self.warmup_steps < math.inf, "at least 0"),
            ("final_learning_rate", 0 <= self.final_learning_rate <= 1, "in [0, 1]"),
            ("beta2", 0 < self.beta2 < 1, "in (0, 1)"),
            ("clip", self.clip is None or self.clip > 0, "None or greater than 0"),
            ("precision", self.precision in precisions, f"one of {', '.join(precisions)}"),
        ):
            if not is_allowed:
                raise ValueError(f"{name} must be {allowed}, got {getattr(self, name)!r}")

    def learning_rate_at(self, step: int) -> float:
        """The learning rate of update number `step`, counted from 0."""
        warm = min(1.0, (step + 1) / max(1, self.warmup_steps))
        left = max(1, self.n_steps - self.warmup_steps)
        progress = min(1.0, max(0, step - self.warmup_steps) / left)
        fall = (1 - self.final_learning_rate) * (1 - math.cos(math.pi * progress)) / 2
        return self.learning_rate * warm * (1 - fall)

    def ends_with(self, log: Log, select: str, sign: int) -> bool:
        """Whether training with this log is done: at its last step, or where it may stop."""
        if not log or log[-1]["step"] >= self.n_steps:
            return bool(log)
        best = max(sign * entry[select] for entry in log)
        return self.stop_at is not None and best >= sign * self.stop_at


def cross_entropy(logits: Tensor, batch: Batch[Any]) -> Tensor:
    """The mean cross-entropy over the targets that count; logits [batch, pos, class]."""
    losses = nn.functional.cross_entropy(
        logits.flatten(0, -2), batch.targets.flatten(), reduction="none"
    )
    counts = batch.mask.flatten()
    return (losses * counts).sum() / counts.sum()


def answer(model: nn.Module, batch: Batch[Any]) -> Tensor:
    """What the model answers to a batch, whose inputs are an argument or several."""
    inputs = batch.inputs
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def train(
    model: nn.Module,
    *,
    config: TrainingConfig,
    sample: Callable[[int, int], Batch[Any]],
    evaluate: Callable[[nn.Module], dict[str, float]],
    select: str,
    sign: int = 1,
    folder: Path,
    identity: str,
    seed: int,
    objective: Objective,
    description: str = "training",
    position: int = 0,
) -> Log:
    """Train `model` in place, or go on from the last checkpoint in `folder`; gives the log.

    The model, which is on its device, ends with the weights of the last step. Under `accelerate
    launch` or `torchrun` every process takes its share of each batch and the first one writes.

    Args:
        sample: (step, size) -> the batch of that step, on the model's device.
        evaluate: gives the figures that go into the log, of the model in evaluation mode.
        select: which of these figures picks the best checkpoint.
        sign: 1 if a higher figure is better, -1 if a lower one is.
        identity: what a checkpoint must have been written with.
        seed: of the dropout masks.
        description, position: of the progress bar: its words, and its line.

    Raises:
        TrainingError: the loss or a weight is not finite; the last checkpoint stays.
        RunError: a checkpoint is damaged or of another config, or files cannot be written.
    """
    device = next(model.parameters()).device
    processes = Processes(device)
    checkpoints = Checkpoints(folder, identity, writes=processes.first)
    optimizer = _optimizer(model, config)
    log = checkpoints.load(model, optimizer)
    if config.ends_with(log, select, sign):
        return log
    handle = processes.prepare(_prepared(model, config, device))
    last = log[-1] if log else {"step": 0, "seconds": 0.0}
    start, clock = int(last["step"]), time.monotonic() - last["seconds"]
    total = torch.zeros((), device=device)
    bar = _bar(range(start, config.n_steps), description, position, shown=processes.first)
    with bar, torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        for step in bar:
            model.train()
            batch = processes.share(sample(step, config.batch_size))
            total += _update(handle, optimizer, objective, batch, config, seed, step)
            done = step + 1
            ends = done % config.evaluate_every == 0 or done == config.n_steps
            if ends or done in config.keep_at or done % CHECK_EVERY == 0:
                _check(total, model, step, start=start)
            if done in config.keep_at:
                checkpoints.keep(model, done)
            if not ends:
                continue
            model.eval()
            entry = {
                "step": done,
                "loss": processes.mean(total) / (done - start),
                "learning_rate": config.learning_rate_at(step),
                "seconds": round(time.monotonic() - clock, 3),
            }
            log.append(entry | evaluate(model))
            total.zero_()
            start = done
            bar.set_postfix({key: log[-1][key] for key in ("loss", select)})
            is_best = max(log, key=lambda entry: sign * entry[select]) is log[-1]
            checkpoints.save(model, optimizer, log, best=is_best)
            if config.ends_with(log, select, sign):
                break
    model.eval()
    return log


def _prepared(model: nn.Module, config: TrainingConfig, device: torch.device) -> nn.Module:
    if device.type == "cpu":
        keep_freed_memory()
    if config.precision == "tf32":
        torch.set_float32_matmul_precision("high")
    # The eager model stays free of compilation: hooks added to it later must be heard.
    return cast(nn.Module, torch.compile(model)) if config.compile else model


def _bar(steps: range, description: str, position: int, *, shown: bool) -> tqdm[int]:
    return tqdm(
        steps,
        desc=description,
        total=steps.stop,
        initial=steps.start,
        disable=None if shown else True,
        leave=False,
        position=position,
    )


def _update(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    objective: Objective,
    batch: Batch[Any],
    config: TrainingConfig,
    seed: int,
    step: int,
) -> Tensor:
    """Make update number `step`; gives its loss."""
    digest = hashlib.sha256(f"{seed}/{step}".encode()).digest()
    torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    for group in optimizer.param_groups:
        group["lr"] = config.learning_rate_at(step)
    with torch.autocast(batch.mask.device.type, torch.bfloat16, enabled=config.precision == "bf16"):
        loss = objective(model, batch, step)
    optimizer.zero_grad()
    loss.backward()
    if config.clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), config.clip)
    optimizer.step()
    return loss.detach()


def _optimizer(model: nn.Module, config: TrainingConfig) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0}
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": config.weight_decay}, others],
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
