"""Training with exact resumption: AdamW with linear warm-up and decay of the learning rate.

A step is a pure function of the weights, the optimizer state and (seed, step): the batch and the
dropout masks are drawn from the latter alone. A checkpoint therefore holds nothing else, and a run
that is killed at any moment and resumed ends in the same weights, bit for bit on a CPU.

Files in the run folder: `log.jsonl` (one line per evaluation), `last.safetensors` (the complete
state), `best.safetensors` (the weights with the best selecting metric) and `step-N.safetensors`
(the weights at the steps `TrainingConfig.keep_at`).
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
"""Steps between checks for values that are not finite; each check synchronises with the device."""

Objective = Callable[[nn.Module, Any, int], Tensor]
"""(model, batch, step) -> the loss to minimise, a scalar."""

Precision = Literal["float32", "tf32", "bf16"]
Schedule = Literal["cosine", "early_cosine", "inverse_sqrt"]
Decayed = Literal["matrices", "all"]
Checkpoint = Literal["best", "last"]


class TrainingError(RuntimeError):
    """A loss, gradient or weight is not finite."""


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """The optimizer, schedule and evaluation of a training run.

    Args:
        n_steps: number of training steps (updates).
        batch_size: examples per step, over all devices together.
        learning_rate: peak learning rate, reached after `warmup_steps`.
        final_learning_rate: learning rate at the last step, as a share of the peak; a cosine
            leads there. 1: constant.
        schedule: `cosine` from the end of warm-up to the last step; `early_cosine`, the schedule
            of Schug et al. 2024 (their code): the rate of the first step is 0, and the cosine ends
            `warmup_steps` before the last step, after which the rate is constant; or
            `inverse_sqrt` (Vaswani et al. 2017, Section 5.3): after warm-up the rate falls as
            1 / sqrt(step), and neither `final_learning_rate` nor `n_steps` has an effect on it.
        weight_decay: AdamW's weight decay.
        decayed: the parameters with weight decay: `matrices`, those with two or more dimensions
            (weights, per-head biases, bias tables; not norms and one-dimensional biases), or `all`.
        warmup_steps: steps of linear warm-up.
        beta2: decay of AdamW's second moment.
        epsilon: what AdamW adds to the root of the second moment.
        clip: largest norm of the gradient; None for no clipping.
        n_parts: number of equal parts of a batch that are computed one after another, which takes
            less memory; it divides the batch size. The loss is the mean of their losses.
        evaluate_every: steps between evaluations; a checkpoint is written at each.
        stop_at: end early at the first evaluation whose selecting metric is at least as good.
        keep_at: steps after which the weights are kept, for measures along training; steps
            after the end of training are ignored.
        checkpoint: the weights that are measured, and by which tuned settings are chosen: `best`,
            with the best selecting metric, or those of the `last` step.
        precision: `float32`, `tf32` (CUDA matrix products), or `bf16` (autocast).
        compile: train through `torch.compile`; hooks, evaluation and what a loss calls besides
            `forward` use the eager model.

    Raises:
        ValueError: a value is out of its range.

    Example:
        `TrainingConfig(n_steps=1000, batch_size=128, learning_rate=1e-3, warmup_steps=100)`
    """

    n_steps: int
    batch_size: int
    learning_rate: float
    weight_decay: float = 0.0
    warmup_steps: int = 0
    evaluate_every: int = 100
    final_learning_rate: float = 0.1
    schedule: Schedule = "cosine"
    decayed: Decayed = "matrices"
    beta2: float = 0.999
    epsilon: float = 1e-8
    clip: float | None = None
    n_parts: int = 1
    stop_at: float | None = None
    keep_at: tuple[int, ...] = ()
    checkpoint: Checkpoint = "best"
    precision: Precision = "float32"
    compile: bool = False

    def __post_init__(self):
        literals = {
            name: (
                getattr(self, name) in get_args(choices),
                f"one of {', '.join(get_args(choices))}",
            )
            for name, choices in (
                ("schedule", Schedule),
                ("decayed", Decayed),
                ("checkpoint", Checkpoint),
                ("precision", Precision),
            )
        }
        for name, is_allowed, allowed in (
            ("n_steps", self.n_steps >= 1, "at least 1"),
            ("batch_size", self.batch_size >= 1, "at least 1"),
            ("evaluate_every", self.evaluate_every >= 1, "at least 1"),
            (
                "n_parts",
                self.n_parts >= 1 and self.batch_size % self.n_parts == 0,
                f"a divisor of batch_size = {self.batch_size}",
            ),
            ("keep_at", all(step >= 1 for step in self.keep_at), "at least 1"),
            ("learning_rate", 0 <= self.learning_rate < math.inf, "at least 0"),
            ("weight_decay", 0 <= self.weight_decay < math.inf, "at least 0"),
            ("warmup_steps", 0 <= self.warmup_steps < math.inf, "at least 0"),
            ("final_learning_rate", 0 <= self.final_learning_rate <= 1, "in [0, 1]"),
            ("beta2", 0 < self.beta2 < 1, "in (0, 1)"),
            ("epsilon", 0 < self.epsilon < math.inf, "greater than 0"),
            ("clip", self.clip is None or self.clip > 0, "None or greater than 0"),
            *((name, *check) for name, check in literals.items()),
        ):
            if not is_allowed:
                raise ValueError(f"{name} must be {allowed}, got {getattr(self, name)!r}")

    def learning_rate_at(self, step: int) -> float:
        """The learning rate at training step `step`, counted from 0."""
        if self.schedule == "inverse_sqrt":
            share = (step + 1) / max(1, self.warmup_steps)
            return self.learning_rate * min(share, share**-0.5)
        early = self.schedule == "early_cosine"
        warmup = min(1.0, (step if early else step + 1) / max(1, self.warmup_steps))
        n_decay = max(1, self.n_steps - (2 if early else 1) * self.warmup_steps)
        progress = min(1.0, max(0, step - self.warmup_steps) / n_decay)
        decay = (1 - self.final_learning_rate) * (1 - math.cos(math.pi * progress)) / 2
        return self.learning_rate * warmup * (1 - decay)

    def ends_with(self, log: Log, select: str, sign: int) -> bool:
        """Whether training with this log is finished: at the last step, or by `stop_at`."""
        if not log or log[-1]["step"] >= self.n_steps:
            return bool(log)
        best = max(sign * entry[select] for entry in log)
        return self.stop_at is not None and best >= sign * self.stop_at


def cross_entropy(logits: Tensor, batch: Batch[Any], *, smoothing: float = 0.0) -> Tensor:
    """The mean cross-entropy over unmasked targets, in nats; logits [batch, pos, class].

    With `smoothing` the target has the probability 1 - smoothing, and the other classes share the
    rest equally (tensor2tensor's label smoothing).
    """
    n_classes = logits.shape[-1]
    losses = nn.functional.cross_entropy(
        logits.flatten(0, -2),
        batch.targets.flatten(),
        reduction="none",
        # torch shares the rest among all classes, the target included.
        label_smoothing=smoothing * n_classes / (n_classes - 1),
    )
    mask = batch.mask.flatten()
    return (losses * mask).sum() / mask.sum()


def answer(model: nn.Module, batch: Batch[Any]) -> Tensor:
    """The model's output for a batch, whose inputs are one argument or a tuple of several."""
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
    """Train `model` in place, or resume from the last checkpoint in `folder`; return the log.

    The model ends with the weights of the last step. Under `accelerate launch` or `torchrun`
    every process takes its share of each batch, and the first process writes the files.

    Args:
        model: the model, on its device.
        config: the optimizer, schedule and evaluation.
        sample: (step, size) -> the batch of that step, on the model's device.
        evaluate: model in evaluation mode -> the metrics for the log.
        select: the metric that chooses the best checkpoint.
        sign: 1 if higher values of it are better, -1 if lower.
        folder: the run folder.
        identity: hash of the run's config; a checkpoint with another identity is refused.
        seed: seed of the dropout masks.
        objective: the loss to minimise.
        description: text of the progress bar.
        position: line of the progress bar.

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
    loss_of = processes.prepare(_Loss(_compiled(model, config, device), objective))
    last = log[-1] if log else {"step": 0, "seconds": 0.0}
    start, clock = int(last["step"]), time.monotonic() - last["seconds"]
    total_loss = torch.zeros((), device=device)
    bar = _progress_bar(range(start, config.n_steps), description, position, shown=processes.first)
    with bar, torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        for step in bar:
            model.train()
            batch = processes.share(sample(step, config.batch_size))
            total_loss += _update(loss_of, optimizer, batch, config, seed, step)
            n_done = step + 1
            evaluates = n_done % config.evaluate_every == 0 or n_done == config.n_steps
            if evaluates or n_done in config.keep_at or n_done % CHECK_EVERY == 0:
                _check_finite(total_loss, model, step, start=start)
            if n_done in config.keep_at:
                checkpoints.keep(model, n_done)
            if not evaluates:
                continue
            model.eval()
            entry = {
                "step": n_done,
                "loss": processes.mean(total_loss) / (n_done - start),
                "learning_rate": config.learning_rate_at(step),
                "seconds": round(time.monotonic() - clock, 3),
            }
            log.append(entry | evaluate(model))
            total_loss.zero_()
            start = n_done
            bar.set_postfix({key: log[-1][key] for key in ("loss", select)})
            is_best = max(log, key=lambda entry: sign * entry[select]) is log[-1]
            checkpoints.save(model, optimizer, log, best=is_best)
            if config.ends_with(log, select, sign):
                break
    model.eval()
    return log


class _Loss(nn.Module):
    """The objective as a module, so that it may call any method of a model in several processes."""

    def __init__(self, model: nn.Module, objective: Objective):
        super().__init__()
        self.model, self.objective = model, objective

    def forward(self, batch: Batch[Any], step: int) -> Tensor:
        return self.objective(self.model, batch, step)


def _compiled(model: nn.Module, config: TrainingConfig, device: torch.device) -> nn.Module:
    """The model to train through, compiled if asked for; also applies settings of the process."""
    if device.type == "cpu":
        keep_freed_memory()
    if config.precision == "tf32":
        torch.set_float32_matmul_precision("high")
    # Only the handle is compiled: a compiled model would ignore hooks that are added later.
    return cast(nn.Module, torch.compile(model)) if config.compile else model


def _progress_bar(steps: range, description: str, position: int, *, shown: bool) -> tqdm[int]:
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
    loss_of: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Batch[Any],
    config: TrainingConfig,
    seed: int,
    step: int,
) -> Tensor:
    """Do training step `step` and return its loss."""
    digest = hashlib.sha256(f"{seed}/{step}".encode()).digest()
    torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    for group in optimizer.param_groups:
        group["lr"] = config.learning_rate_at(step)
    optimizer.zero_grad()
    device, is_half = batch.mask.device.type, config.precision == "bf16"
    losses = []
    for part in _parts(batch, config.n_parts):
        with torch.autocast(device, torch.bfloat16, enabled=is_half):
            loss = loss_of(part, step) * (len(part.mask) / len(batch.mask))
        loss.backward()
        losses.append(loss.detach())
    if config.clip is not None:
        nn.utils.clip_grad_norm_(loss_of.parameters(), config.clip)
    optimizer.step()
    return torch.stack(losses).sum()


def _parts(batch: Batch[Any], n_parts: int) -> list[Batch[Any]]:
    return [batch] if n_parts == 1 else list(batch.parts(-(-len(batch) // n_parts)))


def _optimizer(model: nn.Module, config: TrainingConfig) -> torch.optim.AdamW:
    parameters = list(model.parameters())
    decayed = [p for p in parameters if p.ndim > 1 or config.decayed == "all"]
    others = [p for p in parameters if p.ndim <= 1 and config.decayed == "matrices"]
    return torch.optim.AdamW(
        [
            {"params": decayed, "weight_decay": config.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ],
        lr=config.learning_rate,
        betas=(0.9, config.beta2),
        eps=config.epsilon,
        fused=parameters[0].device.type in ("cpu", "cuda"),
    )


def _check_finite(total_loss: Tensor, model: nn.Module, step: int, *, start: int) -> None:
    """Raise a TrainingError if the loss or a weight has become NaN or infinite."""
    # A finite loss can have an infinite gradient, for example a square root at 0. The weights
    # show it after the update.
    norm = nn.utils.get_total_norm([parameter.detach() for parameter in model.parameters()])
    if not (torch.isfinite(total_loss) & torch.isfinite(norm)):
        first = max(start, (step // CHECK_EVERY) * CHECK_EVERY)
        quantity = "the loss" if not torch.isfinite(total_loss) else "a gradient"
        raise TrainingError(
            f"{quantity} is not finite after a step between {first} and {step}; the last good "
            "checkpoint stays. Try a lower learning rate, a longer warm-up or clipping"
        )


def keep_freed_memory() -> None:
    """Tell the C library to keep freed memory instead of returning it to the system.

    A step frees and allocates the same tens of megabytes. By default glibc returns them to the
    system each time, and the resulting page faults take up to a tenth of a step on a CPU. Has an
    effect on Linux with glibc only.
    """
    if not sys.platform.startswith("linux"):
        return
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        trim_threshold, mmap_threshold = -1, -3  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD in malloc.h
        library.mallopt(trim_threshold, 2**31 - 1)
        library.mallopt(mmap_threshold, 2**25)  # the largest allowed value
