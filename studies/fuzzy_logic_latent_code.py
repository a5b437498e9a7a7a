"""Does the latent code of attention know the terms of a fuzzy logic function?

Fuzzy logic of "Attention as a Hypernetwork" (Schug et al. 2024): a transformer sees points of a
function with their values and predicts its value at another point. Attention mechanisms are
compared on training combinations of terms, on held-out ones, and on unseen terms; and the terms are
decoded from the attention weights of the queried token.

    python studies/fuzzy_logic_latent_code.py                      # 10 to 15 minutes
    python studies/fuzzy_logic_latent_code.py --preset smoke
    python studies/fuzzy_logic_latent_code.py --preset context
    python studies/fuzzy_logic_latent_code.py n_points=16,96 held_out=0.3 seed=0
    python studies/fuzzy_logic_latent_code.py --preset paper --device cuda
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np
import torch
import xarray as xr

import probes
import tasks
from studies import engine
from studies.engine import Claim, Row, Section, metric, read
from studies.report import plots
from studies.report.names import name_of
from studies.report.panels import values
from studies.setups.latent_code import FuzzySetup


def code_of_query(pattern: torch.Tensor) -> torch.Tensor:
    """The latent code of the queried token: [example, key, head].

    Its attention weight to itself, and the mean of those to the points with known values.
    """
    last = pattern[:, :, -1]
    return torch.stack([last[:, :, -1], last[:, :, :-1].mean(-1)], dim=1)


def codes_of(model: Any, task: tasks.FuzzyLogic, batches: Iterable[tasks.Batch]) -> xr.Dataset:
    """Latent codes with the composition of the functions.

    `code` [example, layer, key, head], `target` [example, label]: for each term whether the
    function has it, then for each variable the share of terms in which it is not negated.
    """
    quantity = probes.Quantity(
        "blocks.*.attn.hook_pattern",
        dims=("example", "key", "head"),
        reduce=code_of_query,
        long_name="latent code of the queried token",
    )
    data = probes.capture(model, batches, {"code": quantity})
    n_terms, n_variables = task.conjunctions.shape
    has = (data["terms"].to_numpy()[:, :, None] == np.arange(n_terms)).any(1)
    target = np.concatenate([has.astype(float), data["literals"].to_numpy().mean(1)], axis=1)
    names = [f"term {n}" for n in range(n_terms)] + [f"variable {n}" for n in range(n_variables)]
    return data[["code"]].assign(target=(("example", "label"), target)).assign_coords(label=names)


def decode_terms(trained: engine.Trained, n: int = 2000) -> xr.Dataset:
    """Linear decoding of terms and negations from the code, with the same queried point.

    Decoders are fitted on `id`, where the terms of `ood` never occur: on `ood` only variables are
    decoded, except those that all its terms share. `kind_score`: means over terms and over
    variables.

    Args:
        trained: the trained model and its untrained control.
        n: sequences for fitting, and for scoring on each split.
    """
    task, splits = trained.task, trained.setup.splits
    fit, *tests = (
        [task.with_fixed_query(batch) for batch in trained.batches(split, n)]
        for split in ("id", *splits)
    )

    def codes(model: Any) -> tuple[xr.Dataset, dict[str, xr.Dataset]]:
        scored = (codes_of(model, task, batches) for batches in tests)
        return codes_of(model, task, fit), dict(zip(splits, scored, strict=True))

    scores = probes.decode_each(
        *codes(trained.model),
        label="target",
        along="label",
        untrained=codes(trained.untrained),
        resamples=200,
        seed=trained.seed,
    )
    kinds = [label.split()[0] for label in scores["label"].to_numpy()]
    score = scores["score"].assign_coords(kind=("label", kinds))
    about = "R^2 of decoding, mean over terms or variables"
    return scores.assign(kind_score=score.groupby("kind").mean().assign_attrs(long_name=about))


def decoded(kind: str, split: str, control: str = "probe") -> engine.Reading:
    """R^2 of decoding from the codes of all layers, mean over terms or over variables."""
    at: dict[str, Any] = {"kind": kind, "split": split, "control": control}
    return read("decoding", "kind_score", layer="all", metric="r2", **at)


R2 = {split: metric("r2", split) for split in ("id", "test", "ood")}
EACH = {
    "test, each sequence": metric("r2_of_sequences", "test"),
    "paper": metric("r2_of_sequences_paper", "test"),
}

SCHUG = "Schug et al. 2024"
TABLE_A1, FIGURE_2C = f"{SCHUG}, table A1", f"{SCHUG}, figure 2C"


def better(model: str, than: str, source: str = TABLE_A1) -> Claim:
    """The claim that one mechanism answers held-out combinations better than another."""
    statement = f"{name_of(model)} answers held-out combinations better than {name_of(than)}"
    return Claim(statement, source, R2["test"], {"model": model}, {"model": than})


def loses(model: str, than: str) -> Claim:
    """The claim that one mechanism loses more on held-out combinations than another."""
    statement = f"{name_of(model)} loses more than {name_of(than)} from training to held-out"
    loss, of, other = R2["id"] - R2["test"], {"model": model}, {"model": than}
    return Claim(f"{statement} combinations", FIGURE_2C, loss, of, other)


def legible(statement: str, kind: str, split: str, source: str = "ours") -> Claim:
    """The claim that decoding is better than from the untrained model's codes."""
    gain = decoded(kind, split) - decoded(kind, split, "untrained")
    return Claim(statement, source, gain, {}, 0.0)


NOT_HERE = f"{TABLE_A1}: on Raven, not here"
WHERE = "Held-out combinations are answered better where"
BETTER = "is decoded better than from the untrained code"
CLAIMS = (
    better("hyla", "linear"),
    better("hyla", "softmax"),
    better("linear_relu", "linear"),
    better("rms_head_linear", "linear"),
    better("hyla", "linear_relu", NOT_HERE),
    better("hyla", "rms_head_linear", NOT_HERE),
    loses("softmax", "hyla"),
    loses("linear", "hyla"),
    *(
        Claim(f"{WHERE} {what}", FIGURE_2C, R2["test"], {name: of}, {name: than})
        for what, name, of, than in (
            ("fewer of them are held out", "held_out", 0.3, 0.7),
            ("sequences are longer", "n_points", 96, 16),
        )
    ),
    Claim(
        "Functions of unseen terms are not answered: most of the variance is not explained",
        f"{SCHUG}, figure A3C",
        0.5 - R2["ood"],
        of={},
        exceeds=0.0,
    ),
    legible(f"Which terms a function has {BETTER}", "term", "id"),
    legible(
        "So it is in held-out combinations",
        "term",
        "test",
        f"{SCHUG}, figure 2B",
    ),
    legible(f"What is negated in unseen terms {BETTER}", "variable", "ood"),
)

TABLE = engine.Table(
    title="R^2 of the answers, and of decoding (in %)",
    conditions="rows",
    rows=(
        *(Row(split, reading, spread=split == "test") for split, reading in R2.items()),
        Row("paper", EACH["paper"], spread=False),
        Section("terms"),
        Row("terms,\nid", decoded("term", "id"), spread=False),
        Row("untr.", decoded("term", "id", "untrained"), spread=False),
        Row("test", decoded("term", "test"), spread=False),
        Section("variables"),
        Row("var.,\nood", decoded("variable", "ood"), spread=False),
        Row("untr.", decoded("variable", "ood", "untrained"), spread=False),
    ),
    caption="R^2 of the answers on combinations of terms as in training (id), held-out ones (test) "
    "and unseen terms (ood). Terms, var.: R^2 of ridge regression from the code of the queried "
    "token, all layers, to whether the function has a term, and to how often a variable is not "
    "negated; untr.: with untrained weights. Paper: held-out combinations, 50,000 steps, mean of "
    "the R^2 of each sequence.",
)

LAPTOP = FuzzySetup(
    model="hyla",
    n_layers=2,
    d_model=128,
    n_heads=8,
    d_head=2,
    d_mlp=256,
    training=engine.TrainingConfig(
        n_steps=5000,
        batch_size=64,
        learning_rate=3e-3,
        weight_decay=0.1,
        warmup_steps=200,
        evaluate_every=500,
    ),
)
SMOKE = (
    "model=softmax,hyla n_points=8 d_model=16 n_heads=2 d_mlp=16 training.n_steps=20 "
    "training.batch_size=16 training.warmup_steps=5 training.evaluate_every=10 n_validation=40 "
    "scores.n_test=40 decoding.n=200"
)
THREE = "model=softmax,linear,hyla"
LENGTHS, SHARES = "n_points=16,32,64,96", "held_out=0.3,0.5,0.7"
PAPER = (
    "attention_dropout=0.1 n_validation=16000 scores.n_test=16000 training.n_steps=50000 "
    "training.batch_size=128 training.warmup_steps=100 training.schedule=early_cosine "
    "training.checkpoint=last training.evaluate_every=10000"
)
RATES = "seed=0,1,2 training.learning_rate=0.001,0.003 training.weight_decay=0.1,0.03"
ABLATION = f"{THREE} model=rms_head,linear_relu,rms_head_linear,linear_linear,softmax_relu"


def of_paper(changes: str) -> engine.Preset:
    """A preset with the settings of the published code."""
    new = "new ones: the reference validates on its first training sequences"
    return engine.Preset(changes=f"{PAPER} {changes}", departures={"task.id_examples": new})


PRESETS = {
    "smoke": engine.Preset(changes=SMOKE),
    "context": engine.Preset(changes=f"{THREE} {LENGTHS}"),
    "held_out": engine.Preset(changes=f"{THREE} {SHARES}"),
    "paper": of_paper(f"{ABLATION} {RATES} n_points=32 held_out=0.7"),
    "paper-context": of_paper(f"{THREE} {RATES} {LENGTHS} {SHARES}"),
    "paper-latent-code": of_paper(
        f"{THREE} seed=2024 training.learning_rate=0.001 training.weight_decay=0.1 n_points=96 "
        "held_out=0.5"
    ),
}

answers = partial(plots.against, readings=R2, ylabel="R^2 of the answer")
of_kind = partial(values, "decoding", "kind_score", metric="r2")
decoding = partial(
    plots.lines,
    along="layer",
    rows="split",
    lines="control",
    ylabel="R^2 of decoding",
    ylim=(-0.5, 1.02),
)

STUDY = engine.Study(
    name="fuzzy_logic_latent_code",
    question="Does the latent code of attention know the terms of a fuzzy logic function?",
    setup=LAPTOP,
    grids=(
        {"model": ("softmax", "linear", "hyla", "linear_relu", "rms_head_linear"), "seed": (0,)},
    ),
    presets=PRESETS,
    measures={"decoding": decode_terms},
    tuned=("training.learning_rate", "training.weight_decay"),
    trained=engine.TrainedIf(split="id", metric="r2", reaches=0.5),
    claims=CLAIMS,
    table=TABLE,
    views={
        "answers": partial(plots.points, readings=R2 | EACH, xlabel="R^2 of the answer"),
        "training": partial(plots.training, metric="r2"),
        "terms": partial(decoding, data=of_kind(kind="term", split=["id", "test"])),
        "variables": partial(decoding, data=of_kind(kind="variable")),
        "n_points": partial(answers, setting="n_points"),
        "held_out": partial(answers, setting="held_out"),
    },
)

if __name__ == "__main__":
    engine.main(STUDY)
