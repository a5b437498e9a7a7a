"""What does a trained transformer's latent code know about Raven rules?

The question of "Attention as a Hypernetwork" (Schug et al. 2024): can the rule of a Raven feature
be decoded linearly from the attention weights (the latent code) of a transformer trained on the
task, also for combinations of rules that it never saw? And does the model use that code?

    python studies/raven_latent_code.py                          # about a quarter of an hour
    python studies/raven_latent_code.py --preset smoke
    python studies/raven_latent_code.py training.n_steps=500 seed=0,1 model=hyla,softmax
    python studies/raven_latent_code.py --show
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
import xarray as xr

import probes
import tasks
from studies import engine
from studies.engine import Claim, Row, Section, metric, read
from studies.report import drawings, plots
from studies.report.panels import group, values
from studies.setups.latent_code import RavenSetup

PROBED = FAMILIAR, HELD_OUT = ("id_unpermuted", "ood_unpermuted")
"""Splits without permuted columns: the tokens that determine a feature's answer are known."""

SAMPLES = ("example", "feature")
"""Dims of samples: each feature of an instance has its own rule and its own code."""


def codes_of(model: Any, batches: Iterable[tasks.Batch], n_features: int) -> xr.Dataset:
    """The latent codes of a model, `code` [example, layer, feature, key, head], and the `rule`s.

    The query is feature k of the last panel, the keys feature k of the two panels before it.
    """
    code = probes.latent_code(*tasks.raven_last_row(n_features), dims=("feature", "key"))
    data = probes.capture(model, batches, {"code": code}, latent_dims={"rule": SAMPLES})
    return data[["code", "rule"]].assign_coords(key=["first", "second"])


def ceiling(trained: engine.Trained, n: int = 4096) -> xr.Dataset:
    """The accuracy of the ideal observer of the panels, who knows the splits.

    Args:
        trained: the trained model; only its task is used.
        n: instances of each split.
    """
    return tasks.raven_ceilings(trained.setup.task, trained.setup.all_splits, n)


def decoding(trained: engine.Trained, n: int = 2000) -> xr.Dataset:
    """Linear decoding of each feature's rule from its latent code, fitted on training combinations.

    Args:
        trained: the trained model and its untrained control.
        n: instances for fitting, and for scoring on each split.
    """
    fit = list(trained.batches(FAMILIAR, n))
    tests = {split: list(trained.batches(split, n)) for split in PROBED}

    def codes(model: Any) -> tuple[xr.Dataset, dict[str, xr.Dataset]]:
        codes_on = partial(codes_of, model, n_features=trained.setup.task.n_features)
        return codes_on(fit), {split: codes_on(batches) for split, batches in tests.items()}

    decoded = probes.decode(
        *codes(trained.model),
        samples=SAMPLES,
        cells=("layer", "key"),
        untrained=codes(trained.untrained),
        seed=trained.seed,
    )
    rules = [tasks.RAVEN_RULES[int(rule)] for rule in decoded["true"].to_numpy()]
    return decoded.assign_coords(true=rules, predicted=rules)


def interchange(trained: engine.Trained, n_pairs: int = 500) -> xr.Dataset:
    """Whether the code is used: codes, or whole patterns, of one instance are patched into another.

    Every pair has a base A, a source B and a feature. Outcomes: the answer of B's rule on A's
    panels, and A's own answer; see `tasks.raven_pairs`.

    Args:
        trained: the trained model.
        n_pairs: pairs of each condition.
    """
    rates: list[xr.Dataset] = []
    for split in PROBED:
        # One candidate in eight has the same rule.
        base, source = (trained.batch(split, 16 * n_pairs) for _ in range(2))
        pairs = tasks.raven_pairs(trained.task, base, source, n_pairs)
        answer = partial(torch.argmax, dim=-1)
        rates.append(probes.interchange_pairs(trained.model, pairs, answer=answer))
    return xr.concat(rates, xr.Variable("split", list(PROBED)), combine_attrs="drop_conflicts")


def projection(trained: engine.Trained, n: int = 500) -> xr.Dataset:
    """The codes of held-out combinations in the plane, by PCA and t-SNE.

    Args:
        trained: the trained model.
        n: number of instances.
    """
    data = codes_of(trained.model, trained.batches(HELD_OUT, n), trained.setup.task.n_features)
    code = data.set_coords("rule")["code"]
    points = probes.project(code, method=("pca", "tsne"), samples=SAMPLES, seed=trained.seed)
    points["rule"].attrs["long_name"] = "rule, an index of the rules' names"
    return points.reset_coords("rule")


OF_ALL: dict[str, Any] = {"layer": "all", "key": "all"}
"""The codes of all layers and keys, concatenated."""

OTHER_RULE: dict[str, Any] = {"condition": "other_rule", "outcome": "source_rule"}
"""B's rule differs from A's, and the answer follows B's rule."""

SAME_RULE = {"condition": "same_rule", "outcome": "base_rule"}
"""Both have the same rule, and the answer is right."""

patched = partial(read, "interchange", "rate", split=HELD_OUT, **OTHER_RULE)
CODE, PATTERN = (patched(site="all layers", scope=scope) for scope in ("code", "pattern"))
UNPATCHED = patched(site="none", scope="code")


def decoded(split: str, control: str = "probe") -> engine.Reading:
    """The accuracy of decoding rules from the codes of all layers."""
    return read("decoding", "score", split=split, control=control, **OF_ALL, metric="accuracy")


def legible(than: str, control: str, source: str) -> Claim:
    """The claim that decoding is better than under a control."""
    statement = "The rule is decodable from the latent code, on held-out combinations, better than"
    gain = decoded(HELD_OUT) - decoded(HELD_OUT, control)
    return Claim(f"{statement} from {than}", source, gain, {}, 0.0)


HYLA = {"model": "hyla"}
SCHUG = "Schug et al. 2024"
FIGURES = f"{SCHUG}, latent-code figures"
BETTER = "HYLA answers held-out combinations of rules better than"
CLAIMS = (
    *(
        Claim(f"{BETTER} {name} attention", SCHUG, metric("accuracy", "ood"), HYLA, {"model": name})
        for name in ("softmax", "linear")
    ),
    legible("the untrained model's", "untrained", FIGURES),
    legible("codes with shuffled labels", "shuffled", "ours"),
    Claim(
        "The rule is decodable better from HYLA's code than from softmax attention's, held out",
        FIGURES,
        decoded(HELD_OUT),
        of=HYLA,
        exceeds={"model": "softmax"},
    ),
    Claim(
        "The code is used: patching it makes the answer follow its rule",
        "ours",
        CODE - UNPATCHED,
        of={},
        exceeds=0.0,
    ),
)


def right(split: str) -> Row:
    """The accuracy on a split, with the ideal observer's and chance."""
    limits = {
        "at most": read("ceiling", "accuracy", split=split),
        "chance": metric("accuracy_chance", split),
    }
    return Row(f"right, {split}", metric("accuracy", split), beside=limits)


def rules(label: str, split: str, control: str = "probe") -> Row:
    """The accuracy of decoding rules, with that of the most frequent rule."""
    chance = read("decoding", "majority", split=split, metric="accuracy")
    return Row(label, decoded(split, control), beside={"chance": chance})


TABLE = engine.Table(
    title="What does the latent code know about the rules? (in %)",
    rows=(
        right("id"),
        right("ood"),
        Row("  the paper's, ood", metric("accuracy_paper", "ood"), spread=False),
        Section(),
        rules("decoded, id", FAMILIAR),
        rules("decoded, ood", HELD_OUT),
        rules("  untrained", HELD_OUT, "untrained"),
        rules("  control", HELD_OUT, "shuffled"),
        Section(),
        Row("patched code", CODE),
        Row("patched all", PATTERN),
        Row("  unpatched", UNPATCHED),
    ),
    caption="Right: share of instances with all features right; id: combinations of rules as in "
    "training, ood: held-out ones; at most: the ideal observer. Decoded: a feature's rule, "
    "linearly, from the codes of all layers; chance: the most frequent rule. Patched: how often "
    "the answer follows B's rule when B's codes, or all of its attention patterns, are patched "
    "into the run on A (ood, all layers).",
)

LAPTOP = RavenSetup(
    model="hyla",
    # With 36 combinations the result depends on which nine are held out. Seed 4 is the first with
    # no rule in more than three of them; with seed 0 `difference` is in five of the nine, so
    # that it hardly occurs in training (see the results page).
    task=tasks.RavenConfig(n_features=2, seed=4),
    n_layers=3,
    d_model=64,
    n_heads=8,
    d_head=4,
    d_mlp=128,
    training=engine.TrainingConfig(
        n_steps=14_000,
        batch_size=64,
        learning_rate=3e-3,
        weight_decay=0.1,
        warmup_steps=500,
        evaluate_every=1000,
    ),
)
SMOKE = (
    "n_layers=2 d_model=16 n_heads=4 d_mlp=16 n_validation=64 training.n_steps=40 "
    "training.batch_size=16 training.warmup_steps=5 training.evaluate_every=20 scores.n_test=64 "
    "ceiling.n=64 decoding.n=100 interchange.n_pairs=20 projection.n=40"
)
WIDTHS = {d_model: f"n_heads={d_model // 8} d_mlp={2 * d_model}" for d_model in (128, 256, 512)}
"""The paper's width multipliers 1, 2 and 4."""

PAPER = (
    "task.n_features=4 task.rule_order=sorted task.cover_rules=false seed=0,1,2 n_layers=4 "
    "d_model=128 attention_dropout=0.1 training.n_steps=156250 training.batch_size=128 "
    "training.learning_rate=0.001,0.0003 training.weight_decay=0.1,0.3 training.warmup_steps=1000 "
    "training.schedule=early_cosine training.checkpoint=last training.evaluate_every=10000 "
    "scores.n_test=51200"
)


def of_paper(models: str, changes: str = "") -> engine.Preset:
    """A preset with the settings of the published code; values add to those of `PAPER`.

    Seeds differ in the split and the instances, too. Of 330 combinations int(0.25 * 330) = 82 are
    held out, in the code and here; of other numbers ours is rounded, not cut off.
    """
    by_seed = {seed: f"task.seed={seed}" for seed in range(10)}
    return engine.Preset(
        changes=f"{PAPER} model={models} {changes}",
        # A single head has the width of sixteen.
        where={"seed": by_seed, "d_model": WIDTHS, "n_heads": {1: "d_head=64"}},
        departures={
            "task.id_examples": "new ones: the reference tests on its first training instances"
        },
    )


THREE = "hyla,softmax,linear"
ABLATION = f"{THREE},rms_head,linear_relu,rms_head_linear,linear_linear,softmax_relu"
PRESETS = {
    "smoke": engine.Preset(changes=SMOKE),
    "paper": of_paper(ABLATION),
    "paper-scaling": of_paper(
        THREE,
        "training.n_steps=78125,312500 n_layers=8,16 d_model=256,512 training.warmup_steps=3000",
    ),
    "paper-held-out": of_paper(THREE, "task.ood_fraction=0.1,0.2,0.3,0.4,0.5,0.6,0.7,0.8,0.9"),
    "paper-single-head": of_paper(THREE, "n_heads=1,16"),
    # The paper's numbers of features are not given.
    "paper-features": of_paper(THREE, "task.n_features=2,6,8"),
}

LIMITS = {
    "ideal observer": values("ceiling", "accuracy"),
    "chance": values("scores", "accuracy_chance", group="all"),
}
in_the_plane = partial(probes.draw_projection, label="rule", names=tasks.RAVEN_RULES)
bars = partial(
    probes.draw_interchange,
    scopes={"code": "code patched", "row": "its row patched", "pattern": "all tokens patched"},
)
VIEWS = {
    "accuracy": partial(plots.training, metric="accuracy", references=LIMITS),
    "decoding": partial(
        plots.lines,
        data=values("decoding", "score", metric="accuracy", key="all"),
        along="layer",
        rows="split",
        lines="control",
        ylabel="rule decoded",
        ylim=(0, 1.02),
    ),
    "confusion": partial(
        drawings.matrices,
        data=values("decoding", "confusion", split=HELD_OUT, **OF_ALL),
        y="true",
        x="predicted",
        shares=True,
        title="share of the true rule",
    ),
    "projection": partial(
        drawings.pictures, data=group("projection"), draw=in_the_plane, rows="kind", share=False
    ),
    "interchange": partial(
        drawings.pictures,
        data=values("interchange", "rate", split=HELD_OUT),
        draw=bars,
        mean="rate",
        rows={
            "B has another rule:\nanswer follows B's": OTHER_RULE,
            "B has the same rule:\nanswer follows it": SAME_RULE,
        },
    ),
}

STUDY = engine.Study(
    name="raven_latent_code",
    question="What does a trained transformer's latent code know about Raven rules?",
    setup=LAPTOP,
    # The slowest model first, so that parallel runs end together.
    grids=({"model": ("hyla", "softmax", "linear"), "seed": (0,)},),
    presets=PRESETS,
    tuned=("training.learning_rate", "training.weight_decay", "training.warmup_steps"),
    measures={
        "ceiling": ceiling,
        "decoding": decoding,
        "interchange": interchange,
        "projection": projection,
    },
    claims=CLAIMS,
    table=TABLE,
    views=VIEWS,
)

if __name__ == "__main__":
    engine.main(STUDY)
