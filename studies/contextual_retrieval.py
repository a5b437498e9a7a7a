"""Does attention that pairs searches with retrievals freely answer unseen pairings better?

Contextual retrieval of "Compositional Attention" (Mittal et al. 2021): multi-head attention and
compositional attention on training combinations of preferences and on held-out ones; which
retrieval each search chooses; and how much of the error a forced pairing removes.

    python studies/contextual_retrieval.py                      # 10 to 15 minutes
    python studies/contextual_retrieval.py --preset smoke
    python studies/contextual_retrieval.py d_model=32,128 seed=0
    python studies/contextual_retrieval.py --preset paper --device cuda
"""

from functools import partial

import torch
import xarray as xr
from matplotlib.figure import Figure

import probes
import tasks
from studies import engine
from studies.engine import Claim, Reading, Row, metric, read
from studies.report import drawings, panels, plots
from studies.report.panels import values
from studies.setups.retrieval import MODELS, RetrievalSetup


def combinations(trained: engine.Trained, n: int = 4000) -> xr.Dataset | None:
    """`error` [split, preference_0, preference_1] by combination of two searches' preferences.

    NaN for combinations that a split does not have.

    Args:
        trained: the trained model.
        n: examples of each split.
    """
    setup, means = trained.setup, []
    if setup.task.n_searches != 2:
        return None
    for split in setup.splits:
        batch = trained.batch(split, n)
        with torch.no_grad():
            parts = [
                setup.answer(trained.model, part)
                for part in batch.parts(setup.evaluation_batch_size)
            ]
        error = trained.task.score(torch.cat(parts), batch)["absolute_error"]
        first, second = batch.latents["preference"].unbind(-1)
        labels = {"preference_0": first, "preference_1": second}
        means.append(probes.mean_by_labels(error, labels, setup.task.n_retrievals))
    mean = xr.concat(means, xr.Variable("split", list(setup.splits)))
    mean.attrs["long_name"] = "mean absolute error of a combination of preferences"
    return xr.Dataset({"error": mean})


def chosen_retrievals(trained: engine.Trained, n: int = 4000) -> xr.Dataset | None:
    """Which retrieval each search of compositional attention uses, and the error when it is forced.

    See `probes.score_pairing`, with splits as groups, and `probes.force_pairing`.

    Args:
        trained: the trained model.
        n: examples of each split, and held-out examples whose pairing is forced.
    """
    if trained.setup.model != "compositional":
        return None
    batches = {split: trained.batches(split, n) for split in trained.setup.splits}
    pairing = probes.measure_pairing(trained.model, batches, seed=trained.seed)
    batch = trained.batch("ood", n)
    forced = probes.force_pairing(
        trained.model,
        batch.inputs,
        batch.latents["preference"],
        pairing.sel(fitted="id"),
        "blocks.0.attn.hook_value_scores",
        error=lambda output, part: trained.setup.scores(output, batch[part], "ood")["error"][0],
        activation=pairing["activation"].sel(group="id"),
        seed=trained.seed,
    )
    return pairing.merge(forced.drop_vars("error"), combine_attrs="drop_conflicts")


ID, OOD = metric("error", "id"), metric("error", "ood")
SHARE = {s: metric("error", s) / metric("error_constant", s) for s in ("id", "ood")}
PAPER = {s: metric("error_paper", s) for s in ("id", "ood")}
OVER_TRAINING = read("training", "error", split="id", group="all", mean=("train_step",))
of_pairing = partial(read, "pairing", fitted="id", search="pooled")
AGREE, AGREE_OOD = (of_pairing("agreement", group=s, control="observed") for s in ("id", "ood"))
SHUFFLED = of_pairing("agreement", group="id", control="shuffled")
REMOVED = read("pairing", "removed", condition="familiar")

MITTAL = "Mittal et al. 2021, section 5.1"
COMPOSITIONAL = {"model": "compositional"}


def less(
    statement: str, reading: Reading, source: str = MITTAL, than: str = "multi_head", **more: bool
) -> Claim:
    """The claim that a reading of compositional attention is below that of another model."""
    return Claim(statement, source, reading, {"model": than}, COMPOSITIONAL, **more)


def exceeds(statement: str, reading: Reading, value: float, source: str = MITTAL) -> Claim:
    """The claim that a reading of compositional attention exceeds a number."""
    return Claim(statement, source, reading, COMPOSITIONAL, value)


FAMILIAR = (
    "Compositional attention has a lower error than multi-head attention on training combinations"
)
FASTER = "It learns faster: its error on training combinations, over training, is lower"
PAIRS = "On held-out combinations, a head for each pair does not make up for it"
SPECIALISED = (
    "Its retrievals specialise: choices agree with a pairing more than with one of shuffled "
    "preferences"
)
PREFERRED = (
    "Its searches choose the preferred retrieval on held-out combinations too: more than halfway "
    "from chance to always"
)
MENDED = (
    "Its remaining error is in the pairing: forcing its own pairing of training combinations "
    "removes at least half of the error on held-out ones"
)
CLAIMS = (
    less(FAMILIAR, ID, of_learning=True),
    less("Its error is lower on held-out combinations", OOD),
    less("Its error rises less from training to held-out combinations", OOD - ID),
    less(FASTER, OVER_TRAINING, "Mittal et al. 2021, figure 10", of_learning=True),
    less(PAIRS, OOD, "ours", "multi_head_pairs"),
    exceeds(SPECIALISED, AGREE - SHUFFLED, 0.0, "Mittal et al. 2021, figures 5 and 11"),
    exceeds(PREFERRED, AGREE_OOD - of_pairing("chance", group="ood") / 2, 0.5),
    exceeds(MENDED, REMOVED, 0.5, "ours"),
)

TABLE = engine.Table(
    title="Mean absolute error",
    conditions="rows",
    rows=(
        Row("param.", read("costs", "parameters"), engine.count, spread=False),
        Row("kFLOP", read("costs", "operations") / 1000, engine.count, spread=False),
        Row("ID", ID, engine.short),
        Row("share", SHARE["id"], spread=False),
        Row("paper", PAPER["id"], engine.short, spread=False),
        engine.Section("held out"),
        Row("OOD", OOD, engine.short),
        Row("share", SHARE["ood"], spread=False),
        Row("paper", PAPER["ood"], engine.short, spread=False),
    ),
    caption="ID: combinations of preferences as in training; OOD: held-out ones; share: of the "
    "error of always answering 0, in %. The weights of the searches, and with them the size of "
    "errors, differ between seeds. Paper: after 100,000 steps, with other weights.",
)

LAPTOP = RetrievalSetup(
    model="compositional",
    task=tasks.ContextualRetrievalConfig(),
    d_model=64,
    d_mlp=256,
    n_validation=1000,
    training=engine.TrainingConfig(
        n_steps=6000,
        batch_size=128,
        learning_rate=2e-3,
        final_learning_rate=0.01,
        weight_decay=0.0,
        warmup_steps=300,
        evaluate_every=500,
    ),
)
PAPERS_GRID = {
    "d_model": (32, 64, 128, 256, 512),
    "model": ("multi_head", "compositional"),
    "seed": (0, 1, 2),
}
PRESETS = {
    "smoke": engine.Preset(
        changes="seed=0,1 d_model=8 d_mlp=16 training.n_steps=20 training.batch_size=16 "
        "training.warmup_steps=5 training.evaluate_every=10 n_validation=20 "
        "scores.n_test=100 combinations.n=100 pairing.n=100"
    ),
    "widths": engine.Preset(changes="d_model=16,32,128"),
    # 100,000 updates of 256 examples with a constant rate of 1e-4: Adam, no weight decay.
    "paper": engine.Preset(
        changes="training.n_steps=100000 training.batch_size=256 training.evaluate_every=2000 "
        "training.learning_rate=1e-4 training.final_learning_rate=1.0 training.warmup_steps=0 "
        "scores.n_test=10000 combinations.n=10000 pairing.n=10000",
        grids=(
            {"task.n_searches": (2,), "task.n_retrievals": (4,)} | PAPERS_GRID,
            {"task.n_searches": (4,), "task.n_retrievals": (8, 16)} | PAPERS_GRID,
        ),
    ),
}

MOST = 6
"""The largest number of networks in a figure."""


def pairing(result: xr.DataTree) -> Figure | None:
    """See `probes.draw_pairing`: a row for each of the first `MOST` networks; None without any."""
    if "pairing" not in result.children:
        return None
    data = result["pairing"].to_dataset()
    networks = [
        (condition.label, cell)
        for condition in panels.shown_conditions(result)
        if panels.has_values(data[["entropy"]].isel(cell=condition.cells))
        for cell in condition.cells
    ][:MOST]
    n_panels = data.sizes["search"] * data.sizes["group"]
    figure, axes = panels.grid(len(networks), n_panels, width=1.7, height=2.1, share=False)
    for row, (label, cell) in zip(axes, networks, strict=True):
        network = data.isel(cell=cell)
        probes.draw_pairing(row, network, fitted="id")
        row[0].set_ylabel(f"{label}, seed {network['seed'].item()}\npreference", fontsize=8)
    return figure


MEASURED = {"id": ID, "ood": OOD}
MEASURED |= {f"always 0, {split}": metric("error_constant", split) for split in ("id", "ood")}
MEASURED |= {f"paper, {split}": PAPER[split] for split in ("id", "ood")}
ZERO = {"always answering 0": values("scores", "error_constant", group="all")}
MAP = {"y": "preference_0", "x": "preference_1", "rows": "split"}
VIEWS = {
    "errors": partial(plots.points, readings=MEASURED, xlabel="mean absolute error"),
    "shares": partial(plots.points, readings=SHARE, xlabel="error / that of always answering 0"),
    "training": partial(plots.training, metric="error", references=ZERO, log="y"),
    "combinations": partial(
        drawings.matrices, data=values("combinations", "error"), title="mean absolute error", **MAP
    ),
    "pairing": pairing,
    "agreement": partial(
        plots.lines,
        data=values("pairing", "agreement", search="pooled"),
        along="group",
        rows="fitted",
        lines="control",
        references={"chance": values("pairing", "chance", search="pooled")},
        ylabel="choices that agree, fitted",
        ylim=(0.0, 1.03),
    ),
    "forcing": partial(
        plots.lines,
        data=values("pairing", "mean_error"),
        along="condition",
        ylabel="error, ood",
    ),
}

STUDY = engine.Study(
    name="contextual_retrieval",
    question="Does attention that pairs searches and retrievals answer unseen pairings better?",
    setup=LAPTOP,
    grids=({"model": MODELS, "seed": (0, 1, 2)},),
    presets=PRESETS,
    measures={"combinations": combinations, "pairing": chosen_retrievals},
    # Half the error of a constant answer.
    trained=engine.TrainedIf(split="id", metric="error", reaches=0.5, share_of="constant"),
    claims=CLAIMS,
    table=TABLE,
    views=VIEWS,
)

if __name__ == "__main__":
    engine.main(STUDY)
