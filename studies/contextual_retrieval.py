"""Does attention that pairs searches with retrievals freely answer unseen pairings better?

The contextual retrieval of "Compositional Attention" (Mittal et al. 2021): multi-head against
compositional attention, on combinations of preferences of training and on held-out ones; which
retrievals searches choose; and what of the error goes when a pairing is forced upon the model.

    python studies/contextual_retrieval.py                      # 10 to 15 minutes
    python studies/contextual_retrieval.py --preset smoke
    python studies/contextual_retrieval.py d_model=32,128 seed=0
    python studies/contextual_retrieval.py --preset paper --device cuda
"""

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import xarray as xr

import probes
from studies.engine import (
    Claim,
    Preset,
    Row,
    Section,
    Study,
    Table,
    Trained,
    TrainedIf,
    TrainingConfig,
    count,
    main,
    metric,
    read,
    short,
)
from studies.report import plots
from studies.report.curves import training_curves
from studies.setups.retrieval import MODELS, RetrievalSetup
from studies.views.retrieval import pairing
from tasks import ContextualRetrievalConfig

SCORES = "blocks.0.attn.hook_value_scores"
QUANTITIES = {
    "scores": probes.Quantity(SCORES, dims=("example", "pos", "search", "retrieval")),
    "pattern": probes.Quantity(
        "blocks.0.attn.hook_pattern", dims=("example", "search", "query_pos", "key_pos")
    ),
}
TRUE = ("example", "pos", "true_search")
LATENTS = {"preference": TRUE, "winner": TRUE, "retrieved": TRUE}


@dataclass(frozen=True)
class Combinations:
    """The error of each combination of two preferences.

    Args:
        n: examples of each split.
    """

    n: int = 4000

    def __call__(self, trained: Trained) -> xr.Dataset | None:
        """`error` [split, preference_0, preference_1], NaN where a split lacks the combination."""
        setup = trained.setup
        if setup.task.n_searches != 2:
            return None
        splits, size = list(setup.splits), setup.task.n_retrievals
        totals, counts = torch.zeros(2, len(splits), size**2, dtype=torch.double)
        for split, total, n in zip(splits, totals, counts, strict=True):
            for batch in trained.batches(split, self.n):
                with torch.no_grad():
                    output = setup.answer(trained.model, batch)
                error = trained.task.score(output, batch)["absolute_error"].double().cpu().ravel()
                number = batch.latents["combination"].cpu().ravel()
                total.index_add_(0, number, error)
                n += number.bincount(minlength=size**2)
        dims = ("split", "preference_0", "preference_1")
        mean = (totals / counts).reshape(-1, size, size).numpy()
        about = {"long_name": "mean absolute error of a combination of preferences"}
        labels = dict(zip(dims, (splits, range(size), range(size)), strict=True))
        return xr.Dataset({"error": (dims, mean, about)}, coords=labels)


@dataclass(frozen=True)
class Pairing:
    """Which retrieval each search of compositional attention uses, and what forcing it brings.

    Args:
        n: examples of each split; and as many, held out, whose pairing is forced.
    """

    n: int = 4000

    def __call__(self, trained: Trained) -> xr.Dataset | None:
        """See `probes.score_pairing`, with the splits as groups, and `probes.force_pairing`."""
        if trained.setup.model != "compositional":
            return None
        splits = list(trained.setup.splits)
        parts = [
            probes.capture(
                trained.model, trained.batches(split, self.n), QUANTITIES, latent_dims=LATENTS
            )
            for split in splits
        ]
        data = xr.concat(parts, "example", combine_attrs="drop_conflicts")
        of_split = np.repeat(splits, [one.sizes["example"] for one in parts])
        found = probes.score_pairing(
            data["scores"],
            data["preference"],
            winner=data["winner"],
            pattern=data["pattern"],
            groups=xr.DataArray(of_split, dims="example"),
            seed=trained.seed,
        )
        new = trained.batch("ood", self.n)
        forced = probes.force_pairing(
            trained.model,
            new.inputs,
            new.latents["preference"],
            found.sel(fitted="id"),
            SCORES,
            error=lambda output, part: trained.setup.scores(output, new[part], "ood")["error"][0],
            activation=found["activation"].sel(group="id"),
            seed=trained.seed,
        )
        return found.merge(forced.drop_vars("error"), combine_attrs="drop_conflicts")


SPLITS = ("id", "ood")
ERROR, CONSTANT, PAPER = (
    {split: metric(name, split) for split in SPLITS}
    for name in ("error", "error_constant", "error_paper")
)
SHARE = {split: ERROR[split] / CONSTANT[split] for split in SPLITS}
of_pairing = partial(read, "pairing", fitted="id", search="pooled")
AGREE = {s: of_pairing("agreement", group=s, control="observed") for s in SPLITS}
DEALT_ANEW = of_pairing("agreement", group="id", control="shuffled")
CHANCE_OOD = of_pairing("chance", group="ood")

THEIRS = "Mittal et al. 2021, section 5.1"
less = partial(Claim, of={"model": "multi_head"}, exceeds={"model": "compositional"})
of_compositional = partial(Claim, of={"model": "compositional"})
CLAIMS = (
    less(
        statement="Compositional attention has a lower error than multi-head attention on familiar "
        "combinations",
        source=THEIRS,
        reading=ERROR["id"],
        of_learning=True,
    ),
    less(
        statement="Its error is lower on held-out combinations", source=THEIRS, reading=ERROR["ood"]
    ),
    less(
        statement="It loses less by the step to held-out combinations",
        source=THEIRS,
        reading=ERROR["ood"] - ERROR["id"],
    ),
    less(
        statement="It learns faster: its error on familiar combinations, over training, is lower",
        source="Mittal et al. 2021, figure 10",
        reading=read("training", "error", split="id", group="all", mean=("train_step",)),
        of_learning=True,
    ),
    less(
        statement="On held-out combinations, a head for each pair does not make up for it",
        source="ours",
        reading=ERROR["ood"],
        of={"model": "multi_head_pairs"},
    ),
    of_compositional(
        statement="Its retrievals specialise: choices agree with a pairing more than with one of "
        "preferences that are dealt out anew",
        source="Mittal et al. 2021, figures 5 and 11",
        reading=AGREE["id"] - DEALT_ANEW,
        exceeds=0.0,
    ),
    of_compositional(
        statement="Its searches choose the preferred retrieval on held-out combinations too: more "
        "than half-way from chance to always",
        source=THEIRS,
        reading=AGREE["ood"] - CHANCE_OOD / 2,
        exceeds=0.5,
    ),
    of_compositional(
        statement="What it still gets wrong there is the pairing: its own pairing on familiar "
        "combinations, forced, removes at least half of the error",
        source="ours",
        reading=read("pairing", "removed", condition="familiar"),
        exceeds=0.5,
    ),
)

TABLE = Table(
    title="Mean absolute error",
    conditions="rows",
    rows=(
        Row("param.", read("costs", "parameters"), count, spread=False),
        Row("kFLOP", read("costs", "operations") / 1000, count, spread=False),
        Row("ID", ERROR["id"], short),
        Row("share", SHARE["id"], spread=False),
        Row("paper", PAPER["id"], short, spread=False),
        Section("held out"),
        Row("OOD", ERROR["ood"], short),
        Row("share", SHARE["ood"], spread=False),
        Row("paper", PAPER["ood"], short, spread=False),
    ),
    caption="ID: combinations of preferences of training; OOD: held-out ones; share: of the error "
    "of always answering 0, in %. The weights of the searches, and with them the size of errors, "
    "differ between seeds. Paper: after 100,000 steps, with weights of its own.",
)

LAPTOP = RetrievalSetup(
    model="compositional",
    task=ContextualRetrievalConfig(),
    d_model=64,
    d_mlp=256,
    n_validation=1000,
    training=TrainingConfig(
        n_steps=6000,
        batch_size=128,
        learning_rate=2e-3,
        final_learning_rate=0.01,
        weight_decay=0.0,
        warmup_steps=300,
        evaluate_every=500,
    ),
)
LOOKED_AT = ("scores.n_test", "combinations.n", "pairing.n")
SMOKE = Preset(
    changes={
        "seed": (0, 1),
        "d_model": 8,
        "d_mlp": 16,
        "training.n_steps": 20,
        "training.batch_size": 16,
        "training.warmup_steps": 5,
        "training.evaluate_every": 10,
        "n_validation": 20,
    }
    | dict.fromkeys(LOOKED_AT, 100)
)
# 100,000 updates of 256 examples with a constant rate of 1e-4: Adam, no weight decay.
PAPERS_OWN = Preset(
    changes={
        "training.n_steps": 100_000,
        "training.batch_size": 256,
        "training.learning_rate": 1e-4,
        "training.final_learning_rate": 1.0,
        "training.warmup_steps": 0,
        "training.evaluate_every": 2000,
    }
    | dict.fromkeys(LOOKED_AT, 10_000),
    grids=tuple(
        {
            "task.n_searches": (searches,),
            "task.n_retrievals": retrievals,
            "d_model": (32, 64, 128, 256, 512),
            "model": ("multi_head", "compositional"),
            "seed": (0, 1, 2),
        }
        for searches, retrievals in ((2, (4,)), (4, (8, 16)))
    ),
)

ZERO = {"always answering 0": ("scores", "error_constant")}
MEASURED = ERROR | {f"always 0, {split}": CONSTANT[split] for split in SPLITS}
MEASURED |= {f"paper, {split}": PAPER[split] for split in SPLITS}
MAP = {"y": "preference_0", "x": "preference_1", "rows": "split", "limits": None}
POOLED = {"select": {"search": "pooled"}, "rows": "fitted", "ylim": (0.0, 1.03)}
paired = partial(plots.profiles, group="pairing")
VIEWS = {
    "errors": partial(plots.bars, readings=MEASURED, ylabel="mean absolute error"),
    "shares": partial(plots.bars, readings=SHARE, ylabel="error / that of always answering 0"),
    "training": partial(training_curves, metric="error", limits=ZERO, log=True),
    "combinations": partial(
        plots.matrices, group="combinations", variable="error", title="mean absolute error", **MAP
    ),
    "pairing": pairing,
    "agreement": partial(
        paired,
        variable="agreement",
        along="group",
        lines="control",
        reference="chance",
        ylabel="choices that agree, fitted",
        **POOLED,
    ),
    "forcing": partial(paired, variable="mean_error", along="condition", ylabel="error, ood"),
}

STUDY = Study(
    name="contextual_retrieval",
    question="Does attention that pairs searches and retrievals answer unseen pairings better?",
    setup=LAPTOP,
    grids=({"model": MODELS, "seed": (0, 1, 2)},),
    presets={
        "smoke": SMOKE,
        "widths": Preset(changes={"d_model": (16, 32, 128)}),
        "paper": PAPERS_OWN,
    },
    measures={"combinations": Combinations(), "pairing": Pairing()},
    # Half the error of a constant answer, on familiar combinations.
    trained=TrainedIf(split="id", metric="error", reaches=0.5, share_of="constant"),
    claims=CLAIMS,
    table=TABLE,
    views=VIEWS,
)

if __name__ == "__main__":
    main(STUDY)
