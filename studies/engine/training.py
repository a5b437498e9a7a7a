"""Training with exact resumption.

A step is a pure function of the weights, the optimizer state and (seed, step): the batch and the
dropout masks are drawn from the latter alone. A checkpoint therefore holds nothing else, and a run
that is killed at any moment and resumed ends in the same weights, bit for bit on a CPU.

Files in the run folder: `log.jsonl` (one line per evaluation), `last.safetensors` (the complete
state), `best.safetensors` (the weights with the best selecting metric) and `step-N.safetensors`
(the weights at the steps `TrainingConfig.keep_at`).
"""

from __future__ import annotations

import ctypes
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from tqdm import tqdm

from studies.engine.checkpoints import Checkpoints, Log, Trunk
from studies.engine.folders import RunError
from studies.engine.processes import Processes
from studies.engine.training_config import TrainingConfig, preference
from studies.engine.updates import Objective, SingleUpdates, StackedUpdates, State, Updates
from tasks import Batch

CHECK_EVERY = 50
"""Steps between checks for values that are not finite; each check synchronises with the device."""


class TrainingError(RuntimeError):
    """A loss, gradient or weight is not finite."""


class OutOfTime(RunError):
    """The time of a run is over; what it has done is on disk."""


@dataclass(frozen=True)
class Deadline:
    """The moment at which a run stops, to be started again later; by default never.

    Args:
        at: the moment, in seconds of the clock.
        clock: the clock.

    Example:
        `Deadline(time.time() + 60)`
    """

    at: float = math.inf
    clock: Callable[[], float] = time.time

    @classmethod
    def after(cls, minutes: float) -> Deadline:
        """The deadline some minutes from now.

        Raises:
            ValueError: `minutes` is not greater than 0.
        """
        if not minutes > 0:
            raise ValueError(f"minutes must be greater than 0, got {minutes}")
        return cls(time.time() + 60 * minutes)

    def check(self, seconds: float = 0.0) -> None:
        """Check that work of a duration can still be done.

        Raises:
            OutOfTime: it would end after the deadline.
        """
        if self.clock() + seconds > self.at:
            raise OutOfTime("the time is over; what was done is on disk: start again to go on")


NEVER = Deadline()


@dataclass(frozen=True, kw_only=True)
class Trainee:
    """A model in training, with its examples and its folder.

    Args:
        model: the model, on its device.
        sample: (step, size) -> the batch of that step, on the model's device.
        evaluate: model in evaluation mode -> the metrics for the log.
        folder: the run folder.
        identity: hash of the run's config; a checkpoint with another identity is refused.
        seed: seed of the dropout masks.
        trunk: the complete states of the constant part of the schedule `stable`, shared with other
            runs; None for other schedules.
    """

    model: nn.Module
    sample: Callable[[int, int], Batch[Any]]
    evaluate: Callable[[nn.Module], dict[str, float]]
    folder: Path
    identity: str
    seed: int
    trunk: Trunk | None = None


def check_logits(logits: Tensor, batch: Batch[Any]) -> None:
    """Refuse logits that are not [*targets, class]; others would be broadcast.

    Raises:
        ValueError: they have another shape.
    """
    if logits.shape[:-1] != batch.targets.shape:
        shape = ", ".join(map(str, batch.targets.shape))
        raise ValueError(f"logits must be [{shape}, class] here, got shape {tuple(logits.shape)}")


def cross_entropy(logits: Tensor, batch: Batch[Any], *, smoothing: float = 0.0) -> Tensor:
    """The mean cross-entropy over unmasked targets, in nats; logits [batch, pos, class].

    With `smoothing` the target has the probability 1 - smoothing, and the other classes share the
    rest equally (tensor2tensor's label smoothing).

    Raises:
        ValueError: the logits are not one vector for each target.
    """
    check_logits(logits, batch)
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


@dataclass
class _Run:
    """A trainee with its files, its log and its optimizer state so far."""

    trainee: Trainee
    checkpoints: Checkpoints
    log: Log = field(default_factory=list)
    state: State = field(default_factory=dict)

    @property
    def step(self) -> int:
        return int(self.log[-1]["step"]) if self.log else 0


def train(
    trainees: Sequence[Trainee],
    *,
    config: TrainingConfig,
    objective: Objective,
    select: str,
    sign: int = 1,
    description: str = "training",
    position: int = 0,
    deadline: Deadline = NEVER,
) -> list[Log]:
    """Train models in place, or resume from the last checkpoints in their folders; return the logs.

    Several models are trained together, as one batched model; they must have the same architecture
    and batches of the same shapes. Models that are behind, after a kill between two writes, catch
    up first; models that end early leave the others.

    The models end with the weights of the last step. Under `accelerate launch` or `torchrun`
    every process takes its share of each batch, and the first process writes the files.

    Args:
        trainees: the models with their examples and folders.
        config: the optimizer, schedule and evaluation.
        objective: the loss to minimise.
        select: the metric that chooses the best checkpoint.
        sign: 1 if higher values of it are better, -1 if lower.
        description: text of the progress bar.
        position: line of the progress bar.
        deadline: stop at the last checkpoint before it.

    Raises:
        TrainingError: the loss or a weight is not finite; the last checkpoint stays.
        OutOfTime: the next checkpoint would come after the deadline.
        RunError: a checkpoint is damaged or of another config, files cannot be written, or the
            models cannot be trained together.
    """
    device = next(trainees[0].model.parameters()).device
    processes = Processes(device)
    _prepare_process(config, device)
    runs = []
    for trainee in trainees:
        files = Checkpoints(trainee.folder, trainee.identity, writes=processes.first)
        log, state = files.load(trainee.model)
        if not log and trainee.trunk is not None:
            log, state = trainee.trunk.load(trainee.model, last=config.decay_start)
            if config.ends_with(log, select, sign):
                # No further step would write it.
                files.save(trainee.model, state, log, best=False)
        runs.append(_Run(trainee, files, log, state))
    while waiting := [run for run in runs if not config.ends_with(run.log, select, sign)]:
        start = min(run.step for run in waiting)
        group = [run for run in waiting if run.step == start]
        stretch = _Stretch(group, config, objective, select, sign, processes, deadline)
        others = [run.step for run in waiting if run.step > start]
        steps = range(start, min(others, default=config.n_steps))
        with (
            _progress_bar(steps, config, description, position, shown=processes.first) as bar,
            torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
        ):
            stretch.train(bar)
    for run in runs:
        run.trainee.model.eval()
    return [run.log for run in runs]


class _Stretch:
    """Training of models that are at the same step, until one of them ends or others join."""

    def __init__(
        self,
        runs: Sequence[_Run],
        config: TrainingConfig,
        objective: Objective,
        select: str,
        sign: int,
        processes: Processes,
        deadline: Deadline,
    ):
        self._runs, self._config, self._processes = runs, config, processes
        self._select, self._sign, self._deadline = select, sign, deadline
        # Those that have caught up were evaluated last, others were not.
        models = [run.trainee.model.train() for run in runs]
        seeds = [run.trainee.seed for run in runs]
        if len(runs) == 1:
            self._updates: Updates = SingleUpdates(
                *models, config=config, objective=objective, seed=seeds[0], processes=processes
            )
        else:
            if processes.several:
                raise RunError("several processes train one model at a time, not several together")
            self._updates = StackedUpdates(models, config=config, objective=objective, seeds=seeds)
        self._updates.restore([run.state for run in runs])

    def train(self, bar: tqdm[int]) -> None:
        """Do the steps of the progress bar, with evaluations and checkpoints."""
        runs, config = self._runs, self._config
        models = [run.trainee.model for run in runs]
        start, clock = runs[0].step, self._deadline.clock
        elapsed = [run.log[-1]["seconds"] if run.log else 0.0 for run in runs]
        began = evaluated = clock()
        losses = torch.zeros(len(runs), device=next(models[0].parameters()).device)
        for step in bar:
            for model in models:
                model.train()
            batches = [
                self._processes.share(run.trainee.sample(step, config.batch_size)) for run in runs
            ]
            losses += self._updates.update(batches, step)
            n_done = step + 1
            evaluates = n_done % config.evaluate_every == 0 or n_done == config.n_steps
            if evaluates or n_done in config.keep_at or n_done % CHECK_EVERY == 0:
                _check_finite(losses, runs, step, start=start)
            if n_done in config.keep_at:
                for run in runs:
                    run.checkpoints.keep(run.trainee.model, n_done)
            if not evaluates:
                continue
            for number, run in enumerate(runs):
                entry = {
                    "step": n_done,
                    "loss": self._processes.mean(losses[number]) / (n_done - start),
                    "learning_rate": config.learning_rate_at(step),
                    # Its share of the time of models that are trained together.
                    "seconds": round(elapsed[number] + (clock() - began) / len(runs), 3),
                }
                self._evaluate(run, number, entry)
            losses.zero_()
            start = n_done
            bar.set_postfix({key: runs[0].log[-1][key] for key in ("loss", self._select)})
            if any(config.ends_with(run.log, self._select, self._sign) for run in runs):
                return
            self._deadline.check(clock() - evaluated)
            evaluated = clock()

    def _evaluate(self, run: _Run, number: int, entry: dict[str, float]) -> None:
        """Add an entry with the metrics to the log of a run, and write its checkpoint."""
        model, log = run.trainee.model, run.log
        model.eval()
        log.append(entry | run.trainee.evaluate(model))
        run.state = self._updates.state(number)
        best = max(log, key=lambda entry: preference(self._sign * entry[self._select]))
        run.checkpoints.save(model, run.state, log, best=best is log[-1])
        if run.trainee.trunk is not None and entry["step"] <= self._config.decay_start:
            run.trainee.trunk.save(model, run.state, log)


def _prepare_process(config: TrainingConfig, device: torch.device) -> None:
    """Apply the settings of a config that hold for the whole process."""
    if device.type == "cpu":
        keep_freed_memory()
    if config.precision == "tf32":
        torch.set_float32_matmul_precision("high")


def _progress_bar(
    steps: range, config: TrainingConfig, description: str, position: int, *, shown: bool
) -> tqdm[int]:
    return tqdm(
        steps,
        desc=description,
        total=config.n_steps,
        initial=steps.start,
        disable=None if shown else True,
        leave=False,
        position=position,
    )


def _check_finite(
    losses: Float[Tensor, " model"], runs: Sequence[_Run], step: int, *, start: int
) -> None:
    """Raise a TrainingError if a loss or a weight has become NaN or infinite."""
    for run, is_finite in zip(runs, torch.isfinite(losses), strict=True):
        # A finite loss can have an infinite gradient, for example a square root at 0. The weights
        # show it after the update.
        norm = nn.utils.get_total_norm([p.detach() for p in run.trainee.model.parameters()])
        if not (is_finite & torch.isfinite(norm)):
            first = max(start, (step // CHECK_EVERY) * CHECK_EVERY)
            model = f"seed {run.trainee.seed}: " if runs[1:] else ""
            quantity = "a gradient" if is_finite else "the loss"
            raise TrainingError(
                f"{model}{quantity} is not finite after a step between {first} and {step}; the "
                "last good checkpoint stays. Try a lower learning rate, a longer warm-up or "
                "clipping"
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
