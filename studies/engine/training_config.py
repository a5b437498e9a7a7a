"""The settings of a training run, and the learning rate that they give each step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

Optimizer = Literal["adamw", "muon"]
Precision = Literal["float32", "tf32", "bf16"]
Schedule = Literal["cosine", "early_cosine", "inverse_sqrt", "stable"]
Decayed = Literal["matrices", "all"]
Checkpoint = Literal["best", "last"]


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """The optimizer, schedule and evaluation of a training run.

    Args:
        n_steps: number of training steps (updates).
        batch_size: examples per step, over all devices together.
        learning_rate: peak learning rate, reached after `warmup_steps`.
        final_learning_rate: learning rate after the last step, as a share of the peak; the schedule
            leads there. 1: constant.
        schedule: `cosine` from the end of warm-up to the last step; `early_cosine`, the schedule
            of Schug et al. 2024 (their code): the rate of the first step is 0, and the cosine ends
            `warmup_steps` before the last step, after which the rate is constant;
            `inverse_sqrt` (Vaswani et al. 2017, Section 5.3): after warm-up the rate falls as
            1 / sqrt(step), and neither `final_learning_rate` nor `n_steps` has an effect on it; or
            `stable` (Zhai et al. 2022; Hägele et al. 2024): constant after warm-up, and linear
            decay in the last `decay_steps`. Models that differ only in `n_steps` and `decay_steps`
            then share their constant part, which is trained once.
        decay_steps: steps of decay at the end of the schedule `stable`.
        optimizer: `adamw`; or `muon` for the weight matrices between hidden layers, with AdamW for
            all other parameters, see `studies.engine.optimizers`.
        weight_decay: decoupled weight decay.
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
        compile: train through `torch.compile`, on CUDA with CUDA graphs; hooks, evaluation and what
            a loss calls besides `forward` use the eager model.

    Raises:
        ValueError: a value is out of its range, or the schedule `stable` has no checkpoint `last`.

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
    decay_steps: int = 0
    optimizer: Optimizer = "adamw"
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
                ("optimizer", Optimizer),
                ("decayed", Decayed),
                ("checkpoint", Checkpoint),
                ("precision", Precision),
            )
        }
        is_stable = self.schedule == "stable"
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
            (
                "decay_steps",
                1 <= self.decay_steps <= self.n_steps if is_stable else not self.decay_steps,
                f"from 1 to n_steps = {self.n_steps}" if is_stable else "0 without `stable`",
            ),
            ("beta2", 0 < self.beta2 < 1, "in (0, 1)"),
            ("epsilon", 0 < self.epsilon < math.inf, "greater than 0"),
            ("clip", self.clip is None or self.clip > 0, "None or greater than 0"),
            *((name, *check) for name, check in literals.items()),
            # The best weights may be those of another model, before this one's decay.
            ("checkpoint", not is_stable or self.checkpoint == "last", "last with `stable`"),
        ):
            if not is_allowed:
                raise ValueError(f"{name} must be {allowed}, got {getattr(self, name)!r}")

    def learning_rate_at(self, step: int) -> float:
        """The learning rate at training step `step`, counted from 0."""
        early = self.schedule == "early_cosine"
        warmup = min(1.0, (step if early else step + 1) / max(1, self.warmup_steps))
        if self.schedule == "inverse_sqrt":
            share = (step + 1) / max(1, self.warmup_steps)
            return self.learning_rate * min(share, share**-0.5)
        if self.schedule == "stable":
            decay = min(1.0, max(0, step + 1 - self.decay_start) / self.decay_steps)
        else:
            n_decay = max(1, self.n_steps - (2 if early else 1) * self.warmup_steps)
            progress = min(1.0, max(0, step - self.warmup_steps) / n_decay)
            decay = (1 - math.cos(math.pi * progress)) / 2
        return self.learning_rate * warmup * (1 - (1 - self.final_learning_rate) * decay)

    @property
    def decay_start(self) -> int:
        """The number of steps before the decay of the schedule `stable`."""
        return self.n_steps - self.decay_steps

    def ends_with(self, log: list[dict[str, float]], select: str, sign: int) -> bool:
        """Whether training with this log is finished: at the last step, or by `stop_at`."""
        if not log or log[-1]["step"] >= self.n_steps:
            return bool(log)
        best = max(preference(sign * entry[select]) for entry in log)
        return self.stop_at is not None and best >= sign * self.stop_at


def preference(value: float) -> float:
    """A value of which the greatest is best, for comparing: NaN is the worst, not the last seen."""
    return -math.inf if math.isnan(value) else value
