"""Which attention models a text best at the same number of parameters?

Causal transformers that differ only in their attention: softmax and linear attention, HYLA (Schug
et al. 2024, "Attention as a Hypernetwork", who compare these three on language), CoDA (Tay et al.
2019), compositional attention (Mittal et al. 2021) and Transformer-XL's (Dai et al. 2019).
Positions are relative (T5's bias) or rotary. The width of the feed-forward layers gives every model
the number of parameters of softmax attention.

    python studies/language_modelling.py                        # at most 12 minutes
    python studies/language_modelling.py --preset smoke
    python studies/language_modelling.py --preset positions
    python studies/language_modelling.py task.path=FILE positions=relative model=softmax,coda
    python studies/language_modelling.py --preset paper --device cuda --workers 1
    python studies/language_modelling.py --preset paper-c4 task.path=FILE --device cuda --workers 1
"""

from functools import partial

import numpy as np
import xarray as xr

import probes
import tasks
from studies import engine
from studies.engine import Claim, Row, metric, read
from studies.engine.readings import conditions_of, pairs_of
from studies.engine.study import Grid
from studies.report import plots
from studies.report.panels import CONDITIONS, values
from studies.setups.text import LanguageSetup, perplexity_in_words


def windows(trained: engine.Trained) -> xr.Dataset:
    """Loss on `test` by window, and by the number of preceding tokens."""
    return probes.measure_loss_by_context(trained.model, trained.batches("test"))


def match(trained: engine.Trained) -> xr.Dataset:
    """How parameters are matched: `own_d_mlp`, and `parameter_ratio` to softmax attention."""
    ratio = probes.count_parameters(trained.model) / trained.setup.reference_parameters()
    about = "parameters over those of softmax attention with relative positions"
    width = ((), trained.setup.own_d_mlp(), {"long_name": "width of feed-forward layers"})
    return xr.Dataset({"own_d_mlp": width, "parameter_ratio": ((), ratio, {"long_name": about})})


def less_softmax(result: xr.DataTree) -> probes.Interval:
    """Test loss per token minus that of softmax attention with the same settings and seed, [cell].

    Paired over windows; NaN without such a model.
    """
    windows, conditions = result["windows"].to_dataset(), conditions_of(result)
    loss, tokens = (windows[name].to_numpy() for name in ("window_loss", "window_tokens"))
    values = np.full((3, len(loss)), np.nan)
    for condition in conditions:
        if condition.values["model"] == "softmax":
            continue
        shared = {name: value for name, value in condition.values.items() if value is not None}
        softmax = [one for one in conditions if one.matches(shared | {"model": "softmax"})]
        theirs = {
            pair: cell
            for one in softmax[:1]
            for pair, cell in zip(pairs_of(result, one.cells), one.cells, strict=True)
        }
        pairs = pairs_of(result, condition.cells)
        for pair, cell in zip(pairs, condition.cells, strict=True):
            if pair in theirs:
                # The shorter windows are, the more there are of them.
                known = np.isfinite(tokens[cell])
                difference = loss[cell] - loss[theirs[pair]]
                ratio = probes.bootstrap_ratio(difference[known], tokens[cell][known])
                values[:, cell] = ratio
    return probes.Interval(*values)


LOSS = metric("loss", "test")
LESS_SOFTMAX = engine.Reading(
    "test loss minus that of softmax attention",
    lambda result: less_softmax(result).estimate,
    lambda result: (less_softmax(result).low, less_softmax(result).high),
)
LEARNING = read("training", "loss", split="valid", group="all", mean=("train_step",))


# The loss after this many tokens, or down to more than half of them.
SEEN = {tokens: read("windows", "loss", seen=tokens) for tokens in (1, 16, 64)}


def worse(statement: str, source: str, of: str, than: str, reading: engine.Reading = LOSS) -> Claim:
    """The claim that a mechanism has a higher loss than another with the same positions."""
    return Claim(statement, source, reading, of={"model": of}, exceeds={"model": than})


def close(statement: str, source: str, model: str) -> Claim:
    """The claim that a mechanism is within .05 nats per token of softmax attention."""
    of, equals = {"model": model}, {"model": "softmax"}
    return Claim(statement, source, LOSS, of=of, equals=equals, margin=0.05)


SCHUG = "Schug et al. 2024, on C4"
MITTAL = "ours, after Mittal et al. 2021, Figure 7: without shared layers, with half the retrievals"
ABLATION = "Schug et al. 2024, Table A1, there on SRAVEN"
TAY = "Tay et al. 2019, there on translation and dialogue"
SLOWER = "Compositional attention converges faster: its loss on valid is lower over training"
FAR = "Tokens more than 16 back help softmax attention with rotary positions"
ROTARY, RELATIVE = {"positions": "rotary"}, {"positions": "relative"}
CLAIMS = (
    worse("HYLA models text better than linear attention", SCHUG, "linear", "hyla"),
    close("HYLA is close to softmax attention", SCHUG, "hyla"),
    worse("HYLA needs RMSHead", ABLATION, "linear_relu", "hyla"),
    worse("HYLA needs the nonlinearity", ABLATION, "rms_head_linear", "hyla"),
    worse("Compositional attention is better than softmax", MITTAL, "softmax", "compositional"),
    worse(SLOWER, MITTAL, "softmax", "compositional", LEARNING),
    close("Compositional attention is close to softmax attention", "ours", "compositional"),
    worse("CoDA models text better than softmax attention", TAY, "softmax", "coda"),
    worse("Softmax attention is better than linear attention", "ours", "linear", "softmax"),
    worse("Softmax attention is better than HYLA", "ours", "hyla", "softmax"),
    worse("Softmax attention is better than CoDA", "ours", "coda", "softmax"),
    Claim("Rotary positions are better than T5's bias", "ours", LOSS, RELATIVE, ROTARY),
    Claim("The nearest 16 tokens help", "ours", SEEN[1] - SEEN[16], {}, 0.0),
    Claim(FAR, "ours", SEEN[16] - SEEN[64], {"model": "softmax"} | ROTARY, 0.0),
)

TABLE = engine.Table(
    title="Which attention models the text best?",
    conditions="rows",
    rows=(
        Row("weights", read("costs", "parameters"), engine.count),
        Row("d_mlp", read("match", "own_d_mlp"), engine.count),
        Row("per word", metric("perplexity", "test"), perplexity_in_words, spread=False),
        Row("bits/B", metric("bits_per_byte", "test"), lambda value: f"{value:.3f}", spread=False),
        Row("right", metric("accuracy", "test"), engine.percent, spread=False),
        Row("- softmax", LESS_SOFTMAX, lambda value: f"{value:+.2f}"),
        Row(
            "frequencies", metric("bits_per_byte_frequencies", "test"), lambda value: f"{value:.3f}"
        ),
    ),
    caption="On the test text. Numbers of weights are matched, by d_mlp, to softmax attention with "
    "relative positions. Perplexity per word; bits per byte; share of tokens that are predicted "
    "right. - softmax: loss in nats per token minus that of softmax attention with the same "
    "positions, paired over windows. Frequencies: bits per byte of predicting the token "
    "frequencies of training.",
)

LAPTOP = LanguageSetup(
    model="softmax",
    task=tasks.TextConfig(path=tasks.PACKAGE_DOCS, vocabulary_size=1024, length=64),
    n_layers=2,
    d_model=128,
    n_heads=4,
    d_mlp=512,
    dropout=0.1,
    training=engine.TrainingConfig(
        n_steps=2000,
        batch_size=16,
        learning_rate=3e-3,
        weight_decay=0.1,
        warmup_steps=100,
        evaluate_every=200,
        clip=1.0,
    ),
    n_validation=256,
)

WHOLE = "scores.n_test=1000000 "
SMOKE = (
    "d_model=16 n_heads=2 d_mlp=32 training.n_steps=20 training.batch_size=8 "
    "training.warmup_steps=5 training.evaluate_every=10 n_validation=16 scores.n_test=32"
)
# The run of the published code of Schug et al. 2024, on WikiText-103.
PAPER = (
    "task.path=none task.vocabulary_size=6144 max_distance=256 activation=swiglu tied=true "
    "n_layers=8 d_model=128 n_heads=16 d_mlp=256 dropout=0.0 attention_dropout=0.1 "
    "training.batch_size=128 training.warmup_steps=1000 training.schedule=early_cosine "
    "training.clip=none training.checkpoint=last training.evaluate_every=10000 n_validation=1024"
)
# Five epochs of 150 million tokens, which this vocabulary makes of WikiText-103.
STEPS = {
    length: f"training.n_steps={5 * 150_000_000 // (128 * length)}" for length in (32, 64, 128, 256)
}
# The sizes of Schug et al. 2024 on C4; steps, length and rates are ours, the text is the user's.
C4 = (
    "task.path=none task.vocabulary_size=32000 task.length=512 tied=true "
    "n_layers=6 d_model=512 n_heads=8 d_mlp=2048 dropout=0.0 "
    "training.n_steps=100000 training.batch_size=256 training.warmup_steps=1000 "
    "training.clip=none training.evaluate_every=2500 training.precision=bf16 n_validation=256"
)


Names = tuple[str, ...]


def grids(relative: Names, rotary: Names, **more: tuple[object, ...]) -> tuple[Grid, ...]:
    """Grids of mechanisms with relative and with rotary positions; `more`: axes of both."""
    return tuple(
        {"positions": (positions,), "model": models, **({"seed": (0,)} | more)}
        for positions, models in (("relative", relative), ("rotary", rotary))
    )


BOTH = ("softmax", "linear", "hyla", "coda")
THREE = ("softmax", "linear", "hyla")
ALL = (*BOTH, "compositional")
TWO = ("softmax", "compositional")
RATE = "training.learning_rate"
FEW = grids(TWO, ("softmax", "hyla"))

STUDY = engine.Study(
    name="language_modelling",
    question="Which attention models a text best at the same number of parameters?",
    setup=LAPTOP,
    grids=grids(ALL, ("softmax", "hyla")),
    presets={
        "laptop": engine.Preset(changes=WHOLE),
        "smoke": engine.Preset(changes=SMOKE, grids=FEW),
        "rates": engine.Preset(
            changes=WHOLE + "training.learning_rate=1e-3,3e-3,1e-2",
            grids=grids(ALL, ("softmax", "hyla"), seed=(0, 1, 2)),
        ),
        # Of the rates of `rates`, compositional attention has its best at the edge. Then new seeds
        # at the rate that is best for both.
        "compositional": engine.Preset(
            changes=WHOLE,
            grids=(
                {"model": TWO, "seed": (100, 101, 102), RATE: (3e-3, 5e-3, 1e-2, 2e-2)},
                {"model": TWO, "seed": tuple(range(3, 15)), RATE: (5e-3,)},
            ),
        ),
        "positions": engine.Preset(changes=WHOLE, grids=grids((*BOTH, "transformer_xl"), BOTH)),
        "paper": engine.Preset(
            changes=WHOLE + PAPER,
            grids=(
                {
                    "model": THREE,
                    "task.length": tuple(STEPS),
                    "training.learning_rate": (3e-4, 1e-3, 3e-3),
                    "seed": (0, 1, 2),
                },
            ),
            where={"task.length": STEPS},
            departures={
                "task.examples": "windows of the whole text; in the published code pieces of lines",
            },
        ),
        "paper-c4": engine.Preset(
            changes=WHOLE + C4,
            grids=({"positions": ("rotary",), "model": THREE, "seed": (0, 1, 2)},),
            departures={
                "task.name": "WikiText-103, or the text at `task.path`; C4 has to be fetched",
            },
        ),
    },
    measures={"windows": windows, "match": match},
    tuned=("training.learning_rate",),
    trained=engine.TrainedIf(split="valid", metric="loss", reaches=0.75, share_of="frequencies"),
    claims=CLAIMS,
    table=TABLE,
    views={
        "training": partial(plots.training, metric="loss"),
        "tuning": plots.tuning,
        "losses": partial(
            plots.points,
            separate=True,
            readings={"test loss": LOSS, "minus softmax (paired)": LESS_SOFTMAX},
        ),
        "position": partial(
            plots.lines,
            data=values("windows", "loss"),
            along="seen",
            columns=None,
            lines=CONDITIONS,
            log="x",
            ylabel="test loss, nats per token",
        ),
    },
)


if __name__ == "__main__":
    engine.main(STUDY)
