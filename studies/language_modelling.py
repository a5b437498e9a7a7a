"""Which attention models a text best with as many parameters?

Causal transformers whose blocks differ in their attention alone: softmax and linear attention, HYLA
(Schug et al. 2024, "Attention as a Hypernetwork", who compare these three on language), CoDA (Tay
et al. 2019), compositional attention (Mittal et al. 2021) and Transformer-XL's (Dai et al. 2019).
Positions are relative (a bias of T5's kind) or rotary. Every model has as many parameters as one
with softmax attention: what its attention has more of, its feed-forward layers have less of.

    python studies/language_modelling.py                        # at most 12 minutes
    python studies/language_modelling.py --preset smoke
    python studies/language_modelling.py --preset positions
    python studies/language_modelling.py task.path=FILE positions=relative model=softmax,coda
    python studies/language_modelling.py --preset paper --device cuda --workers 1
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
import xarray as xr

import probes
from studies.engine import (
    Claim,
    Preset,
    Reading,
    Row,
    Study,
    Table,
    Trained,
    TrainedIf,
    TrainingConfig,
    count,
    main,
    metric,
    percent,
    read,
)
from studies.engine.readings import conditions_of, pairs_of
from studies.engine.study import Grid
from studies.report import comparisons
from studies.report.curves import training_curves
from studies.setups.text import PYTHON_HELP, LanguageSetup, perplexity_in_words
from tasks import TextConfig


def windows(trained: Trained) -> xr.Dataset:
    """Loss on `test`: of each window, and where 1, 2, 3 to 4, 5 to 8, ... tokens of it are seen.

    `window_loss`, `window_tokens` [window]: sums; `loss` [seen], mean of a token with its interval
    over windows, and `tokens` [seen], by the most tokens that are seen.
    """
    losses, masks = [], []
    for batch in trained.batches("test"):
        with torch.no_grad():
            logits = trained.model(batch.inputs).float()
        losses.append(trained.task.score(logits, batch)["loss"].double().cpu())
        masks.append(batch.mask.double().cpu())
    loss, mask = (torch.cat(some).numpy() for some in (losses, masks))
    powers = [2**power for power in range(loss.shape[1].bit_length())]
    starts = [0, *(start for start in powers if start < loss.shape[1])]
    sums, tokens = (np.add.reduceat(values, starts, axis=1) for values in (loss, mask))
    by_seen = probes.interval_variables(
        "loss", probes.bootstrap_ratio(sums, tokens), ("seen",), long_name="loss", units="nats"
    )
    data: dict[str, Any] = by_seen | {
        "tokens": ("seen", tokens.sum(0), {"long_name": "tokens that were predicted so"}),
        "window_loss": ("window", loss.sum(1), {"long_name": "summed loss", "units": "nats"}),
        "window_tokens": ("window", mask.sum(1), {"long_name": "tokens"}),
    }
    ends = ("seen", [*starts[1:], loss.shape[1]], {"long_name": "tokens that are seen, at most"})
    return xr.Dataset(data, coords={"seen": ends, "window": np.arange(len(loss))})


def match(trained: Trained) -> xr.Dataset:
    """What parameters are matched by: `own_d_mlp`; `parameter_ratio` to softmax attention."""
    asked = trained.setup.reference_parameters()
    ratio = sum(weights.numel() for weights in trained.model.parameters()) / asked
    about = "parameters over those of softmax attention with relative positions"
    own = ((), trained.setup.own_d_mlp(), {"long_name": "width of feed-forward layers"})
    return xr.Dataset({"own_d_mlp": own, "parameter_ratio": ((), ratio, {"long_name": about})})


def less_softmax(result: xr.DataTree) -> probes.Interval:
    """Test loss of a token less that of softmax attention with the same positions and seed, [cell].

    Paired over windows; NaN where there is no such softmax attention.
    """
    found = result["windows"].to_dataset()
    loss, tokens = found["window_loss"].to_numpy(), found["window_tokens"].to_numpy()[0]
    cells = {
        (one.values["positions"], *pair, one.values["model"]): cell
        for one in conditions_of(result)
        for pair, cell in zip(pairs_of(result, one.cells), one.cells.tolist(), strict=True)
    }
    values = np.full((3, len(loss)), np.nan)
    for key, cell in cells.items():
        softmax = cells.get((*key[:-1], "softmax"), cell)
        if cell != softmax:
            values[:, cell] = probes.bootstrap_ratio(loss[cell] - loss[softmax], tokens)
    return probes.Interval(*values)


LOSS, BITS = metric("loss", "test"), metric("bits_per_byte", "test")
LESS_SOFTMAX = Reading(
    "test loss less that of softmax attention",
    lambda result: less_softmax(result).estimate,
    lambda result: (less_softmax(result).low, less_softmax(result).high),
)
LEARNING = read("training", "loss", split="valid", group="all", mean=("train_step",))


def seen(tokens: int) -> Reading:
    """The loss where so many tokens are seen, or down to more than half of them."""
    return read("windows", "loss", seen=tokens)


def claim(statement: str, source: str, worse: str, better: str, reading: Reading = LOSS) -> Claim:
    """That one mechanism has a greater loss than another, with the same positions."""
    of, exceeds = {"model": worse}, {"model": better}
    return Claim(statement=statement, source=source, reading=reading, of=of, exceeds=exceeds)


def close(statement: str, source: str, model: str) -> Claim:
    """That a mechanism comes within .05 nats per token of softmax attention."""
    of, equals = {"model": model}, {"model": "softmax"}
    return Claim(
        statement=statement, source=source, reading=LOSS, of=of, equals=equals, margin=0.05
    )


SCHUG, MITTAL = "Schug et al. 2024, on C4", "Mittal et al. 2021, section 4.7, Figure 7"
ABLATION = "Schug et al. 2024, Table A1, there on SRAVEN"
TAY = "Tay et al. 2019, there on translation and dialogue"
SLOWER = "Compositional attention converges faster: its loss on valid is lower over training"
CLAIMS = (
    claim("HYLA models text better than linear attention", SCHUG, "linear", "hyla"),
    close("HYLA is close to softmax attention", SCHUG, "hyla"),
    claim("HYLA needs RMSHead", ABLATION, "linear_relu", "hyla"),
    claim("HYLA needs the nonlinearity", ABLATION, "rms_head_linear", "hyla"),
    claim("Compositional attention is better than softmax", MITTAL, "softmax", "compositional"),
    claim(SLOWER, MITTAL, "softmax", "compositional", LEARNING),
    close("Compositional attention is close to softmax attention", "ours", "compositional"),
    claim("CoDA models text better than softmax attention", TAY, "softmax", "coda"),
    claim("Softmax attention is better than linear attention", "ours", "linear", "softmax"),
    claim("Softmax attention is better than HYLA", "ours", "hyla", "softmax"),
    claim("Softmax attention is better than CoDA", "ours", "coda", "softmax"),
    Claim(
        statement="Rotary positions are better than T5's bias",
        source="ours",
        reading=LOSS,
        of={"positions": "relative"},
        exceeds={"positions": "rotary"},
    ),
    Claim(
        statement="The nearest 16 tokens help",
        source="ours",
        reading=seen(1) - seen(16),
        of={},
        exceeds=0.0,
    ),
    Claim(
        statement="Tokens further back than 16 help softmax attention with rotary positions",
        source="ours",
        reading=seen(16) - seen(64),
        of={"model": "softmax", "positions": "rotary"},
        exceeds=0.0,
    ),
)


def number(text: str) -> Any:
    """Writes a number as a format string has it."""
    return lambda value: text.format(value)


TABLE = Table(
    title="Which attention models the text best?",
    conditions="rows",
    rows=(
        Row("weights", read("costs", "parameters"), count),
        Row("d_mlp", read("match", "own_d_mlp"), count),
        Row("per word", metric("perplexity", "test"), perplexity_in_words, spread=False),
        Row("bits/B", BITS, number("{:.3f}"), spread=False),
        Row("right", metric("accuracy", "test"), percent, spread=False),
        Row("less softmax", LESS_SOFTMAX, number("{:+.2f}")),
        Row("known", metric("bits_per_byte_frequencies", "test"), number("{:.3f}")),
    ),
    caption="On the test text. Weights are matched, by d_mlp, to those of softmax attention with "
    "relative positions. Perplexity per word; bits per byte; share of tokens that are the most "
    "probable one. Less softmax: loss in nats per token less that of softmax attention with the "
    "same positions, paired over windows. Known: bits per byte of predicting how often each token "
    "occurs in training.",
)

LAPTOP = LanguageSetup(
    model="softmax",
    task=TextConfig(path=PYTHON_HELP, vocabulary_size=1024, length=64),
    n_layers=2,
    d_model=128,
    n_heads=4,
    d_mlp=512,
    dropout=0.1,
    training=TrainingConfig(
        n_steps=1200,
        batch_size=16,
        learning_rate=3e-3,
        weight_decay=0.1,
        warmup_steps=100,
        evaluate_every=100,
        clip=1.0,
    ),
    # One half of the windows of `valid`; the other half is scored.
    n_validation=64,
)

WHOLE = {"scores.n_test": 1_000_000}

SMOKE = WHOLE | {
    "d_model": 16,
    "n_heads": 2,
    "d_mlp": 32,
    "training.n_steps": 20,
    "training.batch_size": 8,
    "training.warmup_steps": 5,
    "training.evaluate_every": 10,
    "n_validation": 16,
}

# All sizes are ours.
PAPER = WHOLE | {
    "task": TextConfig(),
    "n_layers": 6,
    "d_model": 512,
    "n_heads": 8,
    "d_mlp": 2048,
    "training.n_steps": 100_000,
    "training.batch_size": 64,
    "training.warmup_steps": 2000,
    "training.evaluate_every": 2500,
    "training.precision": "bf16",
    "n_validation": 256,
}


def grids(relative: tuple[str, ...], rotary: tuple[str, ...], **more: Any) -> tuple[Grid, ...]:
    """The mechanisms with relative and with rotary positions; `more` axes of both."""
    kinds = (("relative", relative), ("rotary", rotary))
    return tuple(
        {"positions": (kind,), "model": some, **({"seed": (0,)} | more)} for kind, some in kinds
    )


BOTH = ("softmax", "linear", "hyla", "coda")
MORE = ("compositional", "linear_relu", "rms_head_linear", "transformer_xl")
RATES = {"training.learning_rate": (3e-4, 1e-3), "seed": (0, 1, 2)}

STUDY = Study(
    name="language_modelling",
    question="Which attention models a text best with as many parameters?",
    setup=LAPTOP,
    grids=grids((*BOTH, "compositional"), ("softmax", "hyla")),
    presets={
        "laptop": Preset(changes=WHOLE),
        "smoke": Preset(
            changes=SMOKE, grids=grids(("softmax", "compositional"), ("softmax", "hyla"))
        ),
        "positions": Preset(changes=WHOLE, grids=grids((*BOTH, "transformer_xl"), BOTH)),
        "paper": Preset(changes=PAPER, grids=grids((*BOTH, *MORE), BOTH, **RATES)),
    },
    measures={"windows": windows, "match": match},
    tuned=("training.learning_rate",),
    trained=TrainedIf(split="valid", metric="loss", reaches=0.75, share_of="frequencies"),
    claims=CLAIMS,
    table=TABLE,
    views={
        "training": functools.partial(training_curves, metric="loss"),
        "losses": functools.partial(
            comparisons.intervals,
            readings={"test loss": LOSS, "less softmax's (paired)": LESS_SOFTMAX},
        ),
        "position": functools.partial(
            comparisons.lines,
            group="windows",
            variable="loss",
            along="seen",
            log_x=True,
            ylabel="test loss, nats per token",
        ),
    },
)


if __name__ == "__main__":
    main(STUDY)
