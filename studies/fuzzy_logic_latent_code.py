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
from torch import Tensor

import probes
from studies.engine import (
    Claim,
    Preset,
    Reading,
    Row,
    Section,
    Study,
    Table,
    Trained,
    TrainedIf,
    TrainingConfig,
    constant,
    main,
    metric,
    read,
)
from studies.report import plots
from studies.report.curves import training_curves
from studies.report.names import name_of
from studies.setups.fuzzy import FuzzySetup
from tasks import Batch, FuzzyLogic


def code_of_query(pattern: Tensor) -> Tensor:
    """The latent code of the token that is asked for: [example, key, head].

    Its attention weights to itself, and, in the mean, to the points whose values are known.
    """
    last = pattern[:, :, -1]
    return torch.stack([last[:, :, -1], last[:, :, :-1].mean(-1)], dim=1)


def codes_of(model: Any, task: FuzzyLogic, batches: Iterable[Batch]) -> xr.Dataset:
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
    dims = {"terms": ("example", "place"), "literals": ("example", "place", "variable")}
    dims["values"] = ("example", "point")
    data = probes.capture(model, batches, {"code": quantity}, latent_dims=dims)
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

    def __call__(self, trained: Trained) -> xr.Dataset:
        """See `probes.decode_continuous`, for each label; `kind_score`: means over labels."""
        task, splits = trained.task, list(trained.setup.splits)
        drawn = [
            [task.with_fixed_query(batch) for batch in trained.batches(split, self.n)]
            for split in ("id", *splits)
        ]
        models = trained.model, trained.untrained
        own, bare = ([codes_of(model, task, some) for some in drawn] for model in models)
        found: list[xr.Dataset] = []
        for label in own[0]["label"].to_numpy():
            (fit, *tests), (bare_fit, *bare_tests) = (
                [
                    one[["code"]].assign(value=one["target"].sel(label=label, drop=True))
                    for one in side
                ]
                for side in (own, bare)
            )
            known = [n for n, one in enumerate(tests) if np.ptp(one["value"].to_numpy()) > 0]
            if not known or np.ptp(fit["value"].to_numpy()) == 0:
                continue
            one = probes.decode_continuous(
                fit,
                {splits[n]: tests[n] for n in known},
                untrained=(bare_fit, {splits[n]: bare_tests[n] for n in known}),
                resamples=200,
                seed=trained.seed,
            )
            found.append(one.reindex(split=splits).expand_dims(label=[label]))
        joined = xr.concat(found, "label", combine_attrs="drop_conflicts")
        kinds = [str(label).split()[0] for label in joined["label"].to_numpy()]
        score = joined["score"].assign_coords(kind=("label", kinds))
        joined["kind_score"] = score.groupby("kind").mean()
        joined["kind_score"].attrs["long_name"] = "R^2 of decoding, mean over terms or variables"
        return joined


def decoded(kind: str, split: str, control: str = "probe") -> Reading:
    """R^2 of decoding from the codes of all layers, the mean over terms or variables."""
    at: dict[str, Any] = {"kind": kind, "split": split, "control": control}
    return read("decoding", "kind_score", layer="all", metric="r2", **at)


def beyond_untrained(kind: str, split: str) -> Reading:
    """The same, beyond what the untrained model's codes say."""
    return decoded(kind, split) - decoded(kind, split, "untrained")


R2 = {split: metric("r2", split) for split in ("id", "test", "ood")}
LOST = R2["id"] - R2["test"]
EACH = {"test, each sequence": metric("r2_of_sequences", "test")}
EACH["paper"] = metric("r2_of_sequences_paper", "test")


def claim(statement: str, source: str, reading: Reading, of: Any = None, exceeds: Any = 0.0):
    """A claim; `of` and `exceeds`: names of models, or see `Claim`."""
    of, exceeds = ({"model": one} if isinstance(one, str) else one for one in (of or {}, exceeds))
    return Claim(statement=statement, source=source, reading=reading, of=of, exceeds=exceeds)


TABLE_A1, FIGURE_2C = (f"Schug et al. 2024, {where}" for where in ("table A1", "figure 2C"))
BETTER = "{} answers held-out combinations better than {}"
LOSES = "{} loses more than {} by the step to held-out combinations"
CLAIMS = (
    *(
        claim(said.format(name_of(a), name_of(b)), source, reading, of=a, exceeds=b)
        for said, a, b, reading, source in (
            (BETTER, "hyla", "linear", R2["test"], TABLE_A1),
            (BETTER, "hyla", "softmax", R2["test"], TABLE_A1),
            (BETTER, "linear_relu", "linear", R2["test"], TABLE_A1),
            (BETTER, "rms_head_linear", "linear", R2["test"], TABLE_A1),
            (BETTER, "hyla", "linear_relu", R2["test"], f"{TABLE_A1}: on Raven, not here"),
            (BETTER, "hyla", "rms_head_linear", R2["test"], f"{TABLE_A1}: on Raven, not here"),
            (LOSES, "softmax", "hyla", LOST, FIGURE_2C),
            (LOSES, "linear", "hyla", LOST, FIGURE_2C),
        )
    ),
    claim(
        "Held-out combinations are answered better where fewer of them are held out",
        FIGURE_2C,
        R2["test"],
        of={"held_out": 0.3},
        exceeds={"held_out": 0.7},
    ),
    claim(
        "Held-out combinations are answered better where sequences are longer",
        FIGURE_2C,
        R2["test"],
        of={"n_points": 96},
        exceeds={"n_points": 16},
    ),
    claim(
        "Functions of unseen terms are not answered: most of their variance is not explained",
        "Schug et al. 2024, figure A3C",
        constant(0.5) - R2["ood"],
    ),
    claim(
        "Which terms there are is read better than from the untrained code",
        "ours",
        beyond_untrained("term", "id"),
    ),
    claim(
        "Which terms there are is read so in held-out combinations",
        "Schug et al. 2024, figure 2B",
        beyond_untrained("term", "test"),
    ),
    claim(
        "What is negated in unseen terms is read better than from the untrained code",
        "ours",
        beyond_untrained("variable", "ood"),
    ),
)

TABLE = Table(
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
    caption="R^2 of the answers on familiar combinations of terms (id), held-out ones (test) and "
    "unseen terms (ood). Terms, var.: R^2 of ridge regression from the code of the token that is "
    "asked for, all layers, to whether the function has a term, and to how often a variable is not "
    "negated; untr.: with untrained weights. Paper: held-out combinations, 50,000 steps, mean over "
    "sequences of each one's R^2.",
)

LAPTOP = FuzzySetup(
    model="hyla",
    training=TrainingConfig(
        n_steps=5000,
        batch_size=64,
        learning_rate=3e-3,
        weight_decay=0.1,
        warmup_steps=200,
        evaluate_every=500,
    ),
)
SMOKE = Preset(
    changes={
        "model": ("softmax", "hyla"),
        "n_points": 8,
        "d_model": 16,
        "n_heads": 2,
        "d_mlp": 16,
        "training.n_steps": 20,
        "training.batch_size": 16,
        "training.warmup_steps": 5,
        "training.evaluate_every": 10,
        "n_validation": 40,
        "scores.n_test": 40,
        "decoding.n": 200,
    }
)
THREE = ("softmax", "linear", "hyla")
PAPER = Preset(
    changes={
        "n_points": (16, 32, 64, 96),
        "held_out": (0.3, 0.5, 0.7),
        "seed": (0, 1, 2),
        "training.learning_rate": (1e-3, 3e-3),
        "training.weight_decay": (0.1, 0.03),
        "training.n_steps": 50_000,
        "training.batch_size": 128,
        "training.warmup_steps": 1000,
        "training.evaluate_every": 2000,
    },
    departures={
        "training.warmup_steps": "1000; 100 in the published code",
        "model": "no dropout of attention; 0.1 in the published code",
    },
)

answers = partial(plots.against, readings=R2, ylabel="R^2 of the answer")
decoding = partial(
    plots.profiles, group="decoding", variable="kind_score", along="layer", rows="split"
)
of_labels = partial(decoding, lines="control", ylabel="R^2 of decoding", ylim=(-0.5, 1.02))

STUDY = Study(
    name="fuzzy_logic_latent_code",
    question="Does the latent code of attention know the terms of a fuzzy logic function?",
    setup=LAPTOP,
    grids=(
        {"model": ("softmax", "linear", "hyla", "linear_relu", "rms_head_linear"), "seed": (0,)},
    ),
    presets={
        "smoke": SMOKE,
        "context": Preset(changes={"model": THREE, "n_points": (16, 32, 64, 96)}),
        "held_out": Preset(changes={"model": THREE, "held_out": (0.3, 0.5, 0.7)}),
        "paper": PAPER,
    },
    measures={"decoding": Decoding()},
    tuned=("training.learning_rate", "training.weight_decay"),
    # Half of the variance is explained, on familiar combinations.
    trained=TrainedIf(split="id", metric="r2", reaches=0.5),
    claims=CLAIMS,
    table=TABLE,
    views={
        "answers": partial(plots.bars, readings=R2 | EACH, ylabel="R^2 of the answer"),
        "training": partial(training_curves, metric="r2"),
        "terms": partial(
            of_labels, select={"kind": "term", "split": ["id", "test"], "metric": "r2"}
        ),
        "variables": partial(of_labels, select={"kind": "variable", "metric": "r2"}),
        "n_points": partial(answers, setting="n_points"),
        "held_out": partial(answers, setting="held_out"),
    },
)

if __name__ == "__main__":
    main(STUDY)
