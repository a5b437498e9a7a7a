"""Does the latent code of attention know the terms of a fuzzy logic function?

The fuzzy logic of "Attention as a Hypernetwork" (Schug et al. 2024): a transformer sees points of a
function with their values, and is asked for its value at another point. Attentions are compared on
familiar combinations of terms, on held-out ones, and on terms that were never seen; and the terms
are decoded from the attention weights of the token that is asked for.

    python studies/fuzzy_logic_latent_code.py                      # 10 to 15 minutes
    python studies/fuzzy_logic_latent_code.py --preset smoke
    python studies/fuzzy_logic_latent_code.py --preset context
    python studies/fuzzy_logic_latent_code.py n_points=16,96 held_out=0.3 seed=0
    python studies/fuzzy_logic_latent_code.py --preset paper --device cuda
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import xarray as xr

import probes
import tasks
from studies import engine
from studies.engine import metric, read
from studies.report import plots
from studies.report.curves import training_curves
from studies.report.names import name_of
from studies.setups.fuzzy import FuzzySetup


def code_of_query(pattern: torch.Tensor) -> torch.Tensor:
    """The latent code of the token that is asked for: [example, key, head].

    Its attention weights to itself, and, in the mean, to the points whose values are known.
    """
    last = pattern[:, :, -1]
    return torch.stack([last[:, :, -1], last[:, :, :-1].mean(-1)], dim=1)


def codes_of(model: Any, task: tasks.FuzzyLogic, batches: Iterable[tasks.Batch]) -> xr.Dataset:
    """Codes and what the functions are made of.

    `code` [example, layer, key, head], `target` [example, label]: for each term whether the
    function has it, then for each variable the share of its terms in which it is not negated.
    """
    quantity = probes.Quantity(
        "blocks.*.attn.hook_pattern",
        dims=("example", "key", "head"),
        reduce=code_of_query,
        long_name="latent code of the token that is asked for",
    )
    data = probes.capture(model, batches, {"code": quantity})
    n_terms, n_variables = task.conjunctions.shape
    has = (data["terms"].to_numpy()[:, :, None] == np.arange(n_terms)).any(1)
    target = np.concatenate([has.astype(float), data["literals"].to_numpy().mean(1)], axis=1)
    names = [f"term {n}" for n in range(n_terms)] + [f"variable {n}" for n in range(n_variables)]
    return data[["code"]].assign(target=(("example", "label"), target)).assign_coords(label=names)


@dataclass(frozen=True)
class Decoding:
    """Linear decoding of terms and negations from the code, the same point being asked for.

    Terms of `ood` never occur in `id`, on which decoders are fitted, so of `ood` only variables are
    decoded, and of these not the ones that all its terms have in common.

    Args:
        n: sequences that decoders are fitted to, and as many of each split that they are scored on.
    """

    n: int = 2000

    def __call__(self, trained: engine.Trained) -> xr.Dataset:
        """See `probes.decode_each`; `kind_score`: means over terms and over variables."""
        fit, *tests = (
            [trained.task.with_fixed_query(batch) for batch in trained.batches(split, self.n)]
            for split in ("id", *trained.setup.splits)
        )

        def codes(model: Any) -> tuple[xr.Dataset, dict[str, xr.Dataset]]:
            own, *others = (codes_of(model, trained.task, some) for some in (fit, *tests))
            return own, dict(zip(trained.setup.splits, others, strict=True))

        found = probes.decode_each(
            *codes(trained.model),
            label="target",
            along="label",
            untrained=codes(trained.untrained),
            resamples=200,
            seed=trained.seed,
        )
        kinds = [label.split()[0] for label in found["label"].to_numpy()]
        score = found["score"].assign_coords(kind=("label", kinds))
        found["kind_score"] = score.groupby("kind").mean()
        found["kind_score"].attrs["long_name"] = "R^2 of decoding, mean over terms or variables"
        return found


def decoded(kind: str, split: str, control: str = "probe") -> engine.Reading:
    """R^2 of decoding from the codes of all layers, the mean over terms or variables."""
    at: dict[str, Any] = {"kind": kind, "split": split, "control": control}
    return read("decoding", "kind_score", layer="all", metric="r2", **at)


R2 = {split: metric("r2", split) for split in ("id", "test", "ood")}
EACH = {
    "test, each sequence": metric("r2_of_sequences", "test"),
    "paper": metric("r2_of_sequences_paper", "test"),
}

TABLE_A1, FIGURE_2B, FIGURE_2C, FIGURE_A3C = (
    f"Schug et al. 2024, {where}" for where in ("table A1", "figure 2B", "figure 2C", "figure A3C")
)
NOT_HERE = f"{TABLE_A1}: on Raven, not here"


def better(model: str, than: str, source: str = TABLE_A1) -> engine.Claim:
    """A claim that one attention answers held-out combinations better than another."""
    statement = f"{name_of(model)} answers held-out combinations better than {name_of(than)}"
    return engine.Claim(statement, source, R2["test"], {"model": model}, {"model": than})


def loses(model: str, than: str) -> engine.Claim:
    """A claim that one attention loses more by the step to held-out combinations than another."""
    statement = f"{name_of(model)} loses more than {name_of(than)} by the step to held-out"
    lost = R2["id"] - R2["test"]
    return engine.Claim(
        f"{statement} combinations", FIGURE_2C, lost, {"model": model}, {"model": than}
    )


def legible(statement: str, kind: str, split: str, source: str = "ours") -> engine.Claim:
    """A claim that more is decoded than from the untrained model's codes."""
    more = decoded(kind, split) - decoded(kind, split, "untrained")
    return engine.Claim(statement, source, more, {}, 0.0)


CLAIMS = (
    better("hyla", "linear"),
    better("hyla", "softmax"),
    better("linear_relu", "linear"),
    better("rms_head_linear", "linear"),
    better("hyla", "linear_relu", NOT_HERE),
    better("hyla", "rms_head_linear", NOT_HERE),
    loses("softmax", "hyla"),
    loses("linear", "hyla"),
    engine.Claim(
        "Held-out combinations are answered better where fewer of them are held out",
        FIGURE_2C,
        R2["test"],
        of={"held_out": 0.3},
        exceeds={"held_out": 0.7},
    ),
    engine.Claim(
        "Held-out combinations are answered better where sequences are longer",
        FIGURE_2C,
        R2["test"],
        of={"n_points": 96},
        exceeds={"n_points": 16},
    ),
    engine.Claim(
        "Functions of unseen terms are not answered: most of their variance is not explained",
        FIGURE_A3C,
        engine.constant(0.5) - R2["ood"],
        of={},
        exceeds=0.0,
    ),
    legible("Which terms there are is read better than from the untrained code", "term", "id"),
    legible("Which terms there are is read so in held-out combinations", "term", "test", FIGURE_2B),
    legible(
        "What is negated in unseen terms is read better than from the untrained code",
        "variable",
        "ood",
    ),
)

TABLE = engine.Table(
    title="R^2 of the answers, and of decoding (in %)",
    conditions="rows",
    rows=(
        *(engine.Row(split, reading, spread=split == "test") for split, reading in R2.items()),
        engine.Row("paper", EACH["paper"], spread=False),
        engine.Section("terms"),
        engine.Row("terms,\nid", decoded("term", "id"), spread=False),
        engine.Row("untr.", decoded("term", "id", "untrained"), spread=False),
        engine.Row("test", decoded("term", "test"), spread=False),
        engine.Section("variables"),
        engine.Row("var.,\nood", decoded("variable", "ood"), spread=False),
        engine.Row("untr.", decoded("variable", "ood", "untrained"), spread=False),
    ),
    caption="R^2 of the answers on familiar combinations of terms (id), held-out ones (test) and "
    "unseen terms (ood). Terms, var.: R^2 of ridge regression from the code of the token that is "
    "asked for, all layers, to whether the function has a term, and to how often a variable is not "
    "negated; untr.: with untrained weights. Paper: held-out combinations, 50,000 steps, mean over "
    "sequences of each one's R^2.",
)

LAPTOP = FuzzySetup(
    model="hyla",
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
PAPER = engine.Preset(
    changes=f"{LENGTHS} {SHARES} seed=0,1,2 training.learning_rate=0.001,0.003 "
    "training.weight_decay=0.1,0.03 training.n_steps=50000 training.batch_size=128 "
    "training.warmup_steps=1000 training.evaluate_every=2000",
    departures={
        "training.warmup_steps": "1000; 100 in the published code",
        "model": "no dropout of attention; 0.1 in the published code",
    },
)

answers = partial(plots.against, readings=R2, ylabel="R^2 of the answer")
decoding = partial(plots.profiles, group="decoding", variable="kind_score", along="layer")
of_labels = partial(
    decoding, rows="split", lines="control", ylabel="R^2 of decoding", ylim=(-0.5, 1.02)
)
TERMS = {"kind": "term", "split": ["id", "test"], "metric": "r2"}

STUDY = engine.Study(
    name="fuzzy_logic_latent_code",
    question="Does the latent code of attention know the terms of a fuzzy logic function?",
    setup=LAPTOP,
    grids=(
        {"model": ("softmax", "linear", "hyla", "linear_relu", "rms_head_linear"), "seed": (0,)},
    ),
    presets={
        "smoke": engine.Preset(changes=SMOKE),
        "context": engine.Preset(changes=f"{THREE} {LENGTHS}"),
        "held_out": engine.Preset(changes=f"{THREE} {SHARES}"),
        "paper": PAPER,
    },
    measures={"decoding": Decoding()},
    tuned=("training.learning_rate", "training.weight_decay"),
    # Half of the variance is explained, on familiar combinations.
    trained=engine.TrainedIf(split="id", metric="r2", reaches=0.5),
    claims=CLAIMS,
    table=TABLE,
    views={
        "answers": partial(plots.bars, readings=R2 | EACH, ylabel="R^2 of the answer"),
        "training": partial(training_curves, metric="r2"),
        "terms": partial(of_labels, select=TERMS),
        "variables": partial(of_labels, select={"kind": "variable", "metric": "r2"}),
        "n_points": partial(answers, setting="n_points"),
        "held_out": partial(answers, setting="held_out"),
    },
)

if __name__ == "__main__":
    engine.main(STUDY)
