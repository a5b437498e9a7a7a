"""What does a trained transformer's latent code know about Raven rules?

The question of "Attention as a Hypernetwork" (Schug et al. 2024): is the rule that a Raven feature
follows linearly decodable from the attention weights (the latent code) of a transformer trained
on the task, also for combinations of rules that it never saw? And is that code used?

    python studies/raven_latent_code.py                          # about a quarter of an hour
    python studies/raven_latent_code.py --preset smoke
    python studies/raven_latent_code.py training.n_steps=500 seed=0,1 model=hyla,softmax
    python studies/raven_latent_code.py --show
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
import xarray as xr
from torch import Tensor

import probes
import tasks
from studies.engine import (
    Claim,
    Preset,
    Reading,
    Row,
    Section,
    Study,
    Table,
    Trained,
    TrainingConfig,
    main,
    metric,
    read,
)
from studies.report import plots
from studies.report.curves import training_curves
from studies.setups.raven import RavenSetup
from studies.views import raven as views
from tasks import RavenConfig

if TYPE_CHECKING:
    from tasks import Batch

PROBED = ("id_unpermuted", "ood_unpermuted")


def code_positions(n_features: int) -> tuple[Tensor, Tensor]:
    """The query position [feature] and the key positions [feature, key] of each feature's code.

    Feature k of the last panel asks feature k of the two panels before it, in the same row.
    """
    panels = torch.arange(6, 9) * n_features + torch.arange(n_features)[:, None]
    return panels[:, 2], panels[:, :2]


def latent_code(n_features: int) -> Callable[[Tensor], Tensor]:
    """The code that asks about the last row: from each answer token to its two predecessors.

    Takes a pattern [example, head, query_pos, key_pos], and gives [example, feature, key, head],
    at `code_positions`.
    """
    query, keys = code_positions(n_features)

    def reduce(pattern: Tensor) -> Tensor:
        return pattern[:, :, query[:, None], keys].permute(0, 2, 3, 1)

    return reduce


def codes_of(model: Any, batches: Iterable[Batch], n_features: int) -> xr.Dataset:
    """Codes and rules of a model: `code` [example, layer, feature, key, head], `rule`."""
    quantity = probes.Quantity(
        "blocks.*.attn.hook_pattern",
        dims=("example", "feature", "key", "head"),
        reduce=latent_code(n_features),
        long_name="latent code: attention weights from answer token to the row's other panels",
    )
    dims = {"rule": ("example", "feature")}
    data = probes.capture(model, batches, {"code": quantity}, latent_dims=dims)
    data = data[["code", "rule"]].assign_coords(key=["first", "second"])
    data["key"].attrs["long_name"] = "key token: the same feature in the row's first, second panel"
    return data


@dataclass(frozen=True)
class Decoding:
    """Linear decoding of each feature's rule from its latent code, with controls.

    Args:
        n: instances that decoders are fitted to, and as many that they are scored on.
    """

    n: int = 2000

    def __call__(self, trained: Trained) -> xr.Dataset:
        """See `probes.decode`: fitted on `id_unpermuted`, scored on other instances."""
        n_features = trained.setup.task.n_features
        fit = list(trained.batches(PROBED[0], self.n))
        tests = {split: list(trained.batches(split, self.n)) for split in PROBED}

        def codes(model: Any) -> tuple[xr.Dataset, dict[str, xr.Dataset]]:
            scored = {split: codes_of(model, some, n_features) for split, some in tests.items()}
            return codes_of(model, fit, n_features), scored

        found = probes.decode(
            *codes(trained.model),
            samples=("example", "feature"),
            cells=("layer", "key"),
            untrained=codes(trained.untrained),
            seed=trained.seed,
        )
        rules = [tasks.RAVEN_RULES[int(rule)] for rule in found["true"].to_numpy()]
        return found.assign_coords(true=rules, predicted=rules)


@dataclass(frozen=True)
class Interchange:
    """Is the code used? Codes, or whole patterns, of an instance are patched into another.

    For every pair: a base A, a source B and a feature k. Outcomes: the answer that B's rule gives
    on A's panels, and A's own. Pairs of `other_rule` are those for which the two are defined and
    differ; of `same_rule`, those whose rule at k is the same, so that the answers are too.

    Patched are the entries of the attention pattern from the answer token of feature k to the key
    tokens of its `code`; or its whole `row`, to all tokens; or the whole `pattern`, of all tokens:
    if that has no effect, what the rule decides is not in the attention at all.

    Args:
        n_pairs: of each kind.
    """

    n_pairs: int = 500

    def __call__(self, trained: Trained) -> xr.Dataset:
        """`rate` and its interval [split, condition, scope, site, outcome]."""
        parts = [self._on(trained, split).assign_coords(split=split) for split in PROBED]
        return xr.concat(parts, "split", combine_attrs="drop_conflicts")

    def _on(self, trained: Trained, split: str) -> xr.Dataset:
        # One pair in eight has the same rule: enough candidates for that.
        base, source = (trained.batch(split, 16 * self.n_pairs) for _ in range(2))
        n_features = trained.setup.task.n_features
        feature = torch.arange(len(base), device=base.mask.device) % n_features
        answers, conditions = self._pairs(trained.task, base, source, feature)
        n_layers = len(trained.model.blocks)
        sites = {f"layer {n}": f"blocks.{n}.attn.hook_pattern" for n in range(n_layers)}
        sites["all layers"] = "blocks.*.attn.hook_pattern"
        # Only the answer at k is asked for: -1 lets the other features be anything.
        left_open = torch.full_like(base.targets, -1)
        results = []
        for condition, chosen in conditions.items():
            pairs = chosen.nonzero()[: self.n_pairs, 0]
            outcomes = {
                name: left_open[pairs].scatter(1, feature[pairs, None], value[pairs, None])
                for name, value in answers.items()
            }
            for scope, where in self._scopes(n_features).items():
                found = probes.interchange(
                    trained.model,
                    base.inputs[pairs],
                    source.inputs[pairs],
                    hooks=sites,
                    where=where.to(feature.device)[feature[pairs]],
                    answer=lambda logits: logits.argmax(-1),
                    outcomes=outcomes,
                )
                found = found.drop_vars("hit").expand_dims(condition=[condition], scope=[scope])
                results.append(found)
        return cast(xr.Dataset, xr.combine_by_coords(results, combine_attrs="drop_conflicts"))

    def _pairs(
        self, task: tasks.Raven, base: Batch, source: Batch, feature: Tensor
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """What each rule answers [pair], and which pairs are of which condition."""
        pair = torch.arange(len(base), device=feature.device)
        rule, other = (one.latents["rule"][pair, feature] for one in (base, source))
        own = base.targets[pair, feature]
        by_rule, defined = task.answers_by_rule(base.latents["values"])
        by_source = by_rule[pair, feature, other]
        differs = defined[pair, feature, other] & (by_source != own)
        conditions = {"other_rule": (rule != other) & differs, "same_rule": rule == other}
        return {"source_rule": by_source, "base_rule": own}, conditions

    def _scopes(self, n_features: int) -> dict[str, Tensor]:
        """Which entries are patched, [feature, 1, query_pos, key_pos] each."""
        n_pos, each = 9 * n_features, torch.arange(n_features)
        query, keys = code_positions(n_features)
        code, row, pattern = torch.zeros(3, n_features, 1, n_pos, n_pos, dtype=torch.bool)
        code[each[:, None], 0, query[:, None], keys] = True
        row[each, 0, query] = True
        return {"code": code, "row": row, "pattern": ~pattern}


@dataclass(frozen=True)
class Projection:
    """The codes of held-out combinations in the plane, by PCA and t-SNE.

    Args:
        n: instances.
    """

    n: int = 500

    def __call__(self, trained: Trained) -> xr.Dataset:
        """`projection` [kind, example, feature, component], `rule` [example, feature]."""
        batches = trained.batches(PROBED[1], self.n)
        data = codes_of(trained.model, batches, trained.setup.task.n_features)
        code = data.set_coords("rule")["code"]
        parts = [
            probes.project(code, method=method, samples=("example", "feature"), seed=trained.seed)[
                ["projection"]
            ].assign_coords(kind=method)
            for method in ("pca", "tsne")
        ]
        joined = xr.concat(parts, "kind", combine_attrs="drop_conflicts")
        joined["projection"].attrs["long_name"] = "codes of all layers in the plane"
        joined["rule"].attrs["long_name"] = "rule, an index of the rules' names"
        return joined.reset_coords("rule")


@dataclass(frozen=True)
class Ceiling:
    """What the ideal observer of the panels, who knows the splits, reaches.

    Args:
        n: instances of each split.
    """

    n: int = 4096

    def __call__(self, trained: Trained) -> xr.Dataset:
        """The highest accuracies that a split allows, and the share of ambiguous instances."""
        return _ceiling(trained.setup.task, trained.setup.all_splits, self.n).copy()


@functools.lru_cache(maxsize=4)
def _ceiling(config: RavenConfig, splits: tuple[str, ...], n: int) -> xr.Dataset:
    task = tasks.Raven(config)
    observed = [tasks.IdealObserver(task, split).ceiling(n) for split in splits]
    abouts = {
        "accuracy": "highest share of instances with all features right that a split allows",
        "accuracy_se": "standard error of the highest accuracy",
        "feature_accuracy": "highest share of right features that a split allows",
        "feature_accuracy_se": "standard error of the highest share of right features",
        "ambiguous": "share of instances with several possible answers, known prior",
        "ambiguous_by_any_rules": "share of instances that some rules explain with several answers",
    }
    return xr.Dataset(
        {
            name: ("split", [getattr(one, name) for one in observed], {"long_name": about})
            for name, about in abouts.items()
        },
        coords={"split": list(splits)},
        attrs={"instances": n},
    )


def decoded(split: str, control: str = "probe") -> Reading:
    """The share of rules that is read from the codes of all layers."""
    where = "all"
    return read(
        "decoding", "score", split=split, control=control, layer=where, key=where, metric="accuracy"
    )


def most_frequent(split: str) -> Reading:
    """The share of rules that are the most frequent one."""
    return read("decoding", "majority", split=split, metric="accuracy")


def patched(site: str, scope: str) -> Reading:
    """How often the answer becomes that of the rule whose code is patched in, held out."""
    return read(
        "interchange",
        "rate",
        split=PROBED[1],
        condition="other_rule",
        outcome="source_rule",
        site=site,
        scope=scope,
    )


SCHUG = "Schug et al. 2024"

CLAIMS = (
    *(
        Claim(
            f"HYLA answers held-out combinations of rules better than {other} attention",
            SCHUG,
            metric("accuracy", "ood"),
            {"model": "hyla"},
            {"model": other},
        )
        for other in ("softmax", "linear")
    ),
    *(
        Claim(
            f"The rule is decodable from the latent code, on held-out combinations, better than "
            f"from {than}",
            source,
            decoded(PROBED[1]) - decoded(PROBED[1], control),
            {},
            0.0,
        )
        for control, than, source in (
            ("untrained", "the untrained model's", f"{SCHUG}, latent-code figures"),
            ("shuffled", "codes with labels dealt out anew", "ours"),
        )
    ),
    Claim(
        "HYLA's code says more of the rule on held-out combinations than softmax attention's",
        f"{SCHUG}, latent-code figures",
        decoded(PROBED[1]),
        {"model": "hyla"},
        {"model": "softmax"},
    ),
    Claim(
        "The code is used: patching it in brings the answer of its rule",
        "ours",
        patched("all layers", "code") - patched("none", "code"),
        {},
        0.0,
    ),
)

TABLE = Table(
    title="What does the latent code know about the rules? (in %)",
    rows=(
        *(
            Row(
                f"right, {split}",
                metric("accuracy", split),
                beside={
                    "at most": read("ceiling", "accuracy", split=split),
                    "chance": metric("accuracy_chance", split),
                },
            )
            for split in ("id", "ood")
        ),
        Row("  the paper's, ood", metric("accuracy_paper", "ood"), spread=False),
        Section(),
        *(
            Row(label, decoded(split, control), beside={"chance": most_frequent(split)})
            for label, split, control in (
                ("decoded, id", PROBED[0], "probe"),
                ("decoded, ood", PROBED[1], "probe"),
                ("  untrained", PROBED[1], "untrained"),
                ("  control", PROBED[1], "shuffled"),
            )
        ),
        Section(),
        Row("patched code", patched("all layers", "code")),
        Row("patched all", patched("all layers", "pattern")),
        Row("  unpatched", patched("none", "code")),
    ),
    caption="Right: share of instances with all features right; id: familiar combinations of "
    "rules, ood: held-out ones; at most: the ideal observer. Decoded: a feature's rule, linearly, "
    "from the codes of all layers; chance: the most frequent rule. Patched: how often the answer "
    "becomes that of B's rule when B's codes, or all of its attention patterns, are put into the "
    "run on A (ood, all layers).",
)

# Every preset's batches, rates and steps; the paper's are those of its published code.
LAPTOP = RavenSetup(
    model="hyla",
    # With 36 combinations much hangs on which nine are held out. This is the first seed with
    # no rule in more than three of them; of seed 0, `difference` is in five, and hardly
    # trained (see the results page).
    task=RavenConfig(n_features=2, seed=4),
    n_layers=3,
    d_model=64,
    n_heads=8,
    d_mlp=128,
    training=TrainingConfig(
        n_steps=14_000,
        batch_size=64,
        learning_rate=3e-3,
        weight_decay=0.1,
        warmup_steps=500,
        evaluate_every=1000,
    ),
)

SMOKE = Preset(
    changes="n_layers=2 d_model=16 n_heads=4 d_mlp=16 n_validation=64 training.n_steps=40 "
    "training.batch_size=16 training.warmup_steps=5 training.evaluate_every=20 scores.n_test=64 "
    "ceiling.n=64 decoding.n=100 interchange.n_pairs=20 projection.n=40"
)

PAPER = Preset(
    changes="task.n_features=4 task.seed=0 n_layers=4 d_model=128 n_heads=16 d_mlp=256 "
    "attention_dropout=0.1 training.n_steps=156250 training.batch_size=128 "
    "training.learning_rate=0.001 training.warmup_steps=1000"
)

STUDY = Study(
    name="raven_latent_code",
    question="What does a trained transformer's latent code know about Raven rules?",
    setup=LAPTOP,
    # The slowest first, so that models trained side by side end together.
    grids=({"model": ("hyla", "softmax", "linear"), "seed": (0,)},),
    presets={"smoke": SMOKE, "paper": PAPER},
    measures={
        "ceiling": Ceiling(),
        "decoding": Decoding(),
        "interchange": Interchange(),
        "projection": Projection(),
    },
    claims=CLAIMS,
    table=TABLE,
    views={
        "accuracy": functools.partial(
            training_curves,
            metric="accuracy",
            limits={
                "ideal observer": ("ceiling", "accuracy"),
                "chance": ("scores", "accuracy_chance"),
            },
        ),
        "decoding": functools.partial(
            plots.profiles,
            group="decoding",
            variable="score",
            along="layer",
            select={"metric": "accuracy", "key": "all"},
            rows="split",
            lines="control",
            ylabel="rule decoded",
            ylim=(0, 1.02),
        ),
        "confusion": functools.partial(
            plots.matrices,
            group="decoding",
            variable="confusion",
            y="true",
            x="predicted",
            select={"layer": "all", "key": "all", "split": PROBED[1]},
            shares=True,
            title="share of the true rule",
        ),
        "projection": views.projection,
        "interchange": views.interchange,
    },
)


if __name__ == "__main__":
    main(STUDY)
