import json
from collections import Counter
from dataclasses import replace

import matplotlib.pyplot as plt
import networkx as nx
import numpy as np
import pytest
import torch
import xarray as xr
from rich.console import Console

import probes
import tasks
from studies.claims.ndr import (
    CONTROLS,
    FAILED,
    HABITS,
    KINDS,
    broken,
    flow,
    right_above_wrong,
    where_failing,
)
from studies.engine import Reading, Resources, Trained, read_result, run
from studies.engine.claims import judge
from studies.engine.examples import Examples
from studies.engine.fairness import assess
from studies.engine.trained import initial_model
from studies.measures import control_flow as measures
from studies.measures.control_flow import examples_of_all_depths
from studies.ndr_control_flow import ARITHMETIC_STUDY, LISTOPS_STUDY, STUDY, TABLE
from studies.setups import expressions
from studies.setups.expressions import GATED, GEOMETRIC, MODELS, PAPERS_LISTOPS, RECURRENT, ROUTERS
from studies.views import ndr as views
from studies.views import ndr_maps as maps
from tasks import ArithmeticConfig, ListOpsConfig, TableLookupConfig
from tasks.expressions.table_lookup import look_up

SMOKE = ["task.direction=forward", "model=ndr,lstm,transformer"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    return run(STUDY, "smoke", SMOKE, resources=Resources(root=root, workers=1))


@pytest.fixture(scope="module")
def result(folder):
    return read_result(folder / "result.nc")


@pytest.fixture(scope="module")
def setup():
    return STUDY.plan("smoke", SMOKE).cells[0]


@pytest.fixture(scope="module")
def trained(setup):
    """An untrained model, as measures get it."""
    return trained_of(setup)


def trained_of(setup):
    model = initial_model(setup, "cpu").eval()
    return Trained(setup, model, 0, "cpu", Examples(setup, "cpu").fresh("control_flow"))


@pytest.fixture(scope="module")
def batch(setup):
    return examples_of_all_depths(trained_of(setup), 40)


# The run


def test_the_result_has_scores_by_depth_and_control_flow_of_models_with_columns(result):
    scores = result["scores"].to_dataset()
    assert scores["model"].to_numpy().tolist() == ["ndr", "lstm", "transformer"]
    assert scores["split"].to_numpy().tolist() == ["id", "valid", "ood"]
    depths = scores["accuracy"].sel(split=["id", "valid", "ood"]).notnull().isel(cell=0)
    known = {
        split: [name for name in scores["group"].to_numpy() if depths.sel(split=split, group=name)]
        for split in ("id", "valid", "ood")
    }
    assert known == {
        "id": ["all", "depth 2", "depth 3"],
        "valid": ["all", "depth 4"],
        "ood": ["all", "depth 5"],
    }
    assert float(scores["accuracy_chance"].sel(split="ood", group="all")[0]) == 1 / 8
    assert float(scores["accuracy_paper"].sel(split="ood", group="all")[0]) == 1
    flows = result["control_flow"].to_dataset()
    assert set(flows["control"].to_numpy()) == {"trained", *CONTROLS, *HABITS}
    assert set(flows["nodes"].to_numpy()) == set(views.NODES) == set(KINDS)
    # A transformer has no gates, an LSTM no columns.
    known = flows["score"].sel(metric="recall", depth="all", correct="all", control="trained")
    assert known.sel(nodes="change").notnull().to_numpy().tolist() == [True, False, True]
    assert known.sel(nodes="gate").notnull().to_numpy().tolist() == [True, False, False]
    for part, name in (("heads", "best"), ("reads", "entropy"), ("drawn", "attention")):
        values = result[part][name].transpose("cell", ...)
        assert values.notnull().any(values.dims[1:]).to_numpy().tolist() == [True, False, True]
    assert result["timing"]["step_of_depth"].dims == ("cell", "control", "depth")
    assert result.attrs["selection_protocol"].startswith("Csordas et al. 2021")


def test_readings_of_the_table_and_of_claims_are_there(result):
    by_hand = result["control_flow"]["score"].sel(
        nodes="change", metric="f1", control="untrained", depth="all", correct="all"
    )
    found = flow("f1", "change", "untrained").values(result)
    np.testing.assert_array_equal(found, by_hand.to_numpy())
    rates = result["control_flow"]["rate"].sel(condition="no node", outcome="broken")
    by_hand = rates.sel(nodes="change", cut="lasting").to_numpy()
    np.testing.assert_array_equal(broken("no node").values(result), by_hand)
    assert np.isfinite(by_hand[0])
    known = {reading.label for _, reading in TABLE.readings().values()}
    assert len(known) == len(TABLE.readings())
    for claim in STUDY.claims:
        assert claim.reading.values(result).shape == (3,)


def test_effects_of_claims_are_in_the_direction_of_their_statements(result):
    tree = result.copy(deep=True)
    flows = tree["control_flow"]
    score, rate = flows["score"], flows["rate"]
    without = flows["cell"][1:]
    score[:] = 0.2
    score.loc[{"control": "trained"}] = 0.6
    score.loc[{"control": "trained", "nodes": "change"}] = 0.9
    score.loc[{"control": "trained", "correct": "False"}] = 0.7
    flows["examples"][:] = 30
    rate[:] = 0.1
    for kind in ("node", "edge"):
        rate.loc[{"condition": f"{kind} on the path", "cut": ["lasting", "lasting, matched"]}] = 0.8
    score.loc[{"cell": without}] = rate.loc[{"cell": without}] = np.nan
    claims = [one for one in STUDY.claims if one.source == "ours" and one.exceeds == 0.0]
    found = judge(tree, claims, assess(tree, None))
    assert len(found["effect"]) == len(claims) == 10 + 6 + 1 + 2 + 8 + 1
    assert (found["effect"] > 0).all()


def test_right_and_wrong_answers_are_compared_at_the_same_depth():
    """Deeper examples have lower scores and more wrong answers."""
    score = xr.DataArray(
        [[0.9, 0.8, np.nan], [0.4, 0.1, np.nan], [0.5, 0.2, np.nan]],
        {"depth": ["2", "9", "all"], "correct": ["True", "False", "all"]},
        ("depth", "correct"),
    )
    n = score.copy(data=[[90, 10, 100], [10, 30, 40], [100, 40, 140]])

    def value(n):
        data = xr.Dataset({"score": score, "examples": n}).expand_dims(
            cell=["a"], nodes=["change"], metric=["f1"], control=["trained"]
        )
        tree = xr.DataTree.from_dict({"scores": data[["cell"]], "control_flow": data})
        return right_above_wrong("f1", "change").values(tree)[0]

    assert value(n) == pytest.approx((10 * 0.1 + 30 * 0.3) / 40)
    assert value(n.copy(data=[[90, 10, 100], [10, 10, 20], [100, 20, 120]])) == pytest.approx(0.2)
    assert np.isnan(value(n.copy(data=[[90, 10, 100], [10, 9, 19], [100, 19, 119]])))
    # Without right answers at a depth, its wrong ones have nothing to be compared with.
    score.loc["9", "True"] = np.nan
    assert np.isnan(value(n))


def test_the_table_renders(result):
    console = Console(width=100, record=True)
    with console.capture() as capture:
        console.print(TABLE.render(result))
    for word in ("NDR", "LSTM", "right, id", "depth 4, valid", "depth 5, ood", "the paper's"):
        assert word in capture.get()


def test_every_figure_of_these_models_is_drawn(folder):
    others = [f"{kind}_{model}" for kind in ("attention", "head", "gates") for model in ROUTERS]
    absent = {name for name in others if not name.endswith(("_ndr", "_transformer"))}
    # A transformer has no gates, depth and length of a lookup are the same, and one rate was tried.
    absent |= {"gates_transformer", "done_by_length", "tuning"}
    for name in STUDY.views:
        for kind in ("png", "pdf"):
            path = folder / f"{name}.{kind}"
            assert path.exists() == (name not in absent), name
            assert name in absent or path.stat().st_size > 1000


def test_without_gates_the_control_flow_is_left_out(result):
    few = xr.DataTree.from_dict(
        {name: result[name].to_dataset().isel(cell=[1]) for name in ("scores", "training")}
    )
    few.attrs = result.attrs
    drawn = {name for name, view in STUDY.views.items() if view(few) is not None}
    plt.close("all")
    assert drawn == {"accuracy", "accuracy_paper", "training"}


def test_a_row_that_is_younger_than_a_result_is_left_out(result):
    older = result.copy(deep=True)
    summary = older["summary"].to_dataset()
    names = [name for name in summary["reading"].to_numpy() if "best head" not in name]
    older["summary"] = xr.DataTree(summary.sel(reading=names))
    del older["heads"]
    console = Console(width=100, record=True)
    with console.capture() as capture:
        console.print(TABLE.render(older))
    assert "right, id" in capture.get()
    assert "readout reads root" not in capture.get()


# Settings


@pytest.mark.parametrize(
    ("preset", "change", "message"),
    [
        ("smoke", "model=gru", "model must be one of ndr, ndr_undirected"),
        ("smoke", "task.direction=sideways", "direction must be one of forward, backward"),
        ("smoke", "readout=middle", "readout must be one of first, last"),
        ("smoke", "router.d_model=3", "unknown setting 'router.d_model'"),
        ("smoke", "drwn.n=3", "unknown setting .drwn.n.; nearest: drawn.n, [a-z_.]+, [a-z_.]+$"),
        ("smoke", "task.n_tables=40", "n_tables"),
        ("smoke", "n_validation=50", "n_validation must be less than task.n_valid = 50"),
    ],
)
def test_wrong_settings_get_a_clear_error(preset, change, message):
    with pytest.raises(ValueError, match=message.replace("(", "\\(")):
        STUDY.plan(preset, [change])


def test_a_setting_of_another_task_is_unknown():
    with pytest.raises(ValueError, match=r"unknown setting 'task\.direction'"):
        LISTOPS_STUDY.plan("paper", ["task.direction=forward"])


def cells_of(study, preset, *changes):
    some = [f"model={','.join(MODELS)}", *changes]
    cells = study.plan(preset, some).cells
    return {cell.model: cell for cell in cells if getattr(cell.task, "direction", "") != "backward"}


STUDIES = (STUDY, ARITHMETIC_STUDY, LISTOPS_STUDY)
ALL_PRESETS = [
    pytest.param(study, preset, id=f"{study.name}, {preset}")
    for study in STUDIES
    for preset in ("laptop", *study.presets)
]


@pytest.mark.slow
@pytest.mark.parametrize(("study", "preset"), ALL_PRESETS)
def test_every_preset_builds_its_models_and_their_losses_are_finite(study, preset):
    small = ["task.n_train=600", "task.n_id=100"] if study is not STUDY else []
    backward = ("near-mark", "recurrent", "backward", "choice")
    forward = ["task.direction=forward"] if preset in backward else []
    cells = cells_of(study, preset, *small, *forward)
    assert set(cells) == set(MODELS)
    for name, cell in cells.items():
        model = cell.build(torch.Generator().manual_seed(0))
        batch = cell.sampler().batch("train", 0, 2)
        assert torch.isfinite(cell.loss(model, batch, 0))
        tokens = len(cell.sampler().vocabulary)
        if name in ROUTERS:
            embedding = (
                model.albert.embeddings.word_embeddings.weight if name == "albert" else model.W_E
            )
            assert embedding.shape == (tokens + 2, cell.d_model)  # and the marks at both ends
            assert len(model.blocks) == cell.n_steps


def test_the_laptop_preset_has_its_own_sizes():
    cells = cells_of(STUDY, "laptop")
    sizes = ("d_model", "d_mlp", "n_heads", "n_steps", "n_test_steps", "dropout", "gate_dropout")
    training = ("n_steps", "batch_size", "learning_rate", "weight_decay", "clip", "warmup_steps")
    budget = (12_000, 128, 2e-3, 0.1, 5.0, 1000)
    for name in ROUTERS:
        dropout = 0.2 if name in GATED else 0.0
        values = [getattr(cells[name], size) for size in sizes]
        assert values == [64, 128, 4, 11, 14, dropout, 0.1]
    for cell in cells.values():
        assert tuple(getattr(cell.training, size) for size in training) == budget
    for name in RECURRENT:
        cell = cells[name]
        assert (cell.d_embed, cell.d_hidden, cell.dropout) == (128, 128, 0.1)
    dnc, ndr = cells["dnc"], cells["ndr"]
    assert (dnc.n_cells, dnc.d_cell, dnc.n_read_heads) == (32, 32, 4)
    assert (ndr.initial_s_bias, ndr.attention_dropout) == (-2, 0)
    assert (ndr.training.stop_at, ndr.training.decayed) == (0.995, "matrices")
    assert (ndr.training.final_learning_rate, ndr.training.evaluate_every) == (0.1, 500)


@pytest.mark.parametrize(("study", "preset"), ALL_PRESETS)
def test_what_chooses_the_checkpoint_is_not_all_of_valid(study, preset):
    for cell in study.plan(preset).cells:
        assert cell.n_validation < cell.task.n_valid


@pytest.mark.parametrize(
    ("study", "preset", "n_cells", "numbers"),
    [
        # Both directions, in distribution and out of it, for eight models.
        (STUDY, "paper", 80, 32),
        (ARITHMETIC_STUDY, "paper", 25, 10),
        (ARITHMETIC_STUDY, "paper-early", 25, 5),
        (LISTOPS_STUDY, "paper", 25, 10),
    ],
)
def test_cells_have_the_numbers_of_the_paper(study, preset, n_cells, numbers):
    cells = study.plan(preset).cells
    assert len(cells) == n_cells
    assert {cell.seed for cell in cells} == set(range(5))
    found = {number for cell in cells for number in cell.paper()}
    assert len(found) == numbers
    splits = Counter(number.split for cell in cells for number in cell.paper())
    assert splits["ood"] == n_cells
    assert splits["id"] == (0 if preset.endswith("early") else n_cells)
    for cell in cells:
        for number in cell.paper():
            assert number.experiment.endswith(f"/{cell.model}")


def test_models_have_the_dropout_and_the_bias_of_their_settings():
    cell = replace(cells_of(STUDY, "smoke", "task.direction=forward")["ndr"], initial_s_bias=-1.5)
    cell = replace(cell, dropout=0.3, attention_dropout=0.2, gate_dropout=0.1)
    albert = replace(cell, model="albert").build(torch.Generator()).albert.config
    assert (albert.hidden_dropout_prob, albert.attention_probs_dropout_prob) == (0.3, 0.0)
    for name in set(ROUTERS) - {"albert"}:
        model = replace(cell, model=name).build(torch.Generator().manual_seed(0))
        config = model.config
        assert (config.dropout, config.feed_forward.dropout) == (0.3, 0.3)
        if name not in ("transformer", "act"):
            # The paper's transformer has no dropout in its attention.
            assert config.attention.query_dropout == 0.2
        if name in GATED:
            assert (config.gate.dropout, config.gate.hidden_dropout) == (0.1, 0.3)
        if name in GEOMETRIC:
            assert (model.core.attn.s_bias == -1.5).all()
    for name in RECURRENT:
        assert replace(cell, model=name).build(torch.Generator()).config.dropout == 0.3


def test_an_undirected_router_does_not_know_the_side_of_a_key():
    cells = cells_of(STUDY, "smoke", "task.direction=forward")
    batch = cells["ndr"].sampler().batch("train", 0, 20)
    changes = {}
    for name in ("ndr", "ndr_undirected"):
        model = cells[name].build(torch.Generator().manual_seed(0)).eval()
        logits = model(batch.inputs)
        hooks = [("blocks.0.attn.hook_direction", lambda x, hook: x + torch.tensor([3.0, -3.0]))]
        changes[name] = (model.run_with_hooks(batch.inputs, fwd_hooks=hooks) - logits).abs().max()
        # What it does not learn is not among what is trained, but stays with its weights.
        assert ("core.attn.scale_pos" in dict(model.named_parameters())) == (name == "ndr")
        assert "core.attn.scale_pos" in model.state_dict()
    assert changes["ndr"] > 1e-3
    assert changes["ndr_undirected"] == 0


def test_a_halting_transformer_pays_for_the_steps_of_its_columns():
    cell = cells_of(STUDY, "smoke", "task.direction=forward", "ponder_weight=0.5")["act"]
    plain = replace(cell, model="transformer")
    network = cell.build(torch.Generator().manual_seed(0)).eval()
    batch = cell.sampler().batch("train", 0, 40)
    n_columns = batch.latents["length"] + 2
    assert len(n_columns.unique()) > 1
    _, cost = network.forward_with_cost(batch.inputs)
    by_hand = torch.cat([row[:n] for row, n in zip(cost, n_columns, strict=True)]).mean()
    difference = cell.loss(network, batch, 0) - plain.loss(network, batch, 0)
    torch.testing.assert_close(difference, 0.5 * by_hand)
    assert 0 < by_hand < cell.n_steps + 1
    assert plain.build(torch.Generator().manual_seed(0)).core.halt is None
    # Its states change until the last step, as in the code of its authors.
    assert network.config.halting.rule == "tensor2tensor"
    with pytest.raises(ValueError, match="ponder_weight must be at least 0, got -1"):
        replace(cell, ponder_weight=-1.0)


def test_the_control_flow_of_a_halting_transformer_is_that_of_its_changes():
    cell = cells_of(STUDY, "smoke", "task.direction=forward")["act"]
    flows = measures.control_flow(trained_of(cell), 20)
    assert flows["nodes"].to_numpy().tolist() == ["change"]
    assert measures.reads(trained_of(cell), 20).sizes["step"] == cell.n_test_steps


def test_recurrent_models_are_trained_once_for_all_settings_of_routers():
    plan = STUDY.plan("smoke", ["model=lstm,dnc,ndr", "d_mlp=16,32", "task.direction=forward"])
    assert Counter(cell.model for cell in plan.cells) == {"lstm": 1, "dnc": 1, "ndr": 2}
    plan = STUDY.plan("smoke", ["model=lstm,dnc", "n_cells=4,8", "task.direction=forward"])
    assert Counter(cell.model for cell in plan.cells) == {"lstm": 1, "dnc": 2}
    assert set(RECURRENT) < set(MODELS)


def test_where_it_is_tested_a_model_takes_more_steps_with_the_same_weights(setup):
    built, tested = (
        make(torch.Generator().manual_seed(0)).eval() for make in (setup.build, setup.build_tested)
    )
    assert (len(built.blocks), len(tested.blocks)) == (4, 6)
    batch = setup.sampler().batch("ood", 0, 4)
    with torch.no_grad():
        torch.testing.assert_close(setup.answer(built, batch), tested(batch.inputs))
        assert not torch.allclose(built(batch.inputs), tested(batch.inputs))


# Graphs against the truth


def truth_of(name):
    config, _, readout = TRUTHS[name]
    task = expressions.TASKS[type(config)](config)
    batch = task.batch("id", 0, 40)
    deep = (batch.latents["depth"] == config.train_depth).nonzero()[:, 0]
    return tasks.column_dataflow(batch[deep[:4]], readout=readout)


FEW = {"n_id": 40, "n_valid": 30, "n_ood": 30}
SHALLOW = {"n_train": 120, "train_depth": 3, "valid_depths": (4, 4), "ood_depths": (5, 5), **FEW}
LOOKUP = {"n_compositions": 300, "train_depth": 4, "valid_depths": (5, 5), "ood_depths": (6, 6)}
TRUTHS = {
    "forward": (TableLookupConfig(**LOOKUP, **FEW), None, "last"),
    "backward": (TableLookupConfig(direction="backward", **LOOKUP, **FEW), None, "last"),
    "near mark": (TableLookupConfig(direction="backward", **LOOKUP, **FEW), None, "first"),
    "arithmetic": (ArithmeticConfig(**SHALLOW), 1, "last"),
    "listops": (ListOpsConfig(**SHALLOW), 1, "last"),
}
"""Tasks, as how many columns a way may lead through, and the mark that is read out."""


def perfect_columns(truth):
    """Gates and attention that do just what is true: a value is computed a step after its parts."""
    level = truth["level"].to_numpy()
    n, width = level.shape
    steps = level.max() + 1
    gate = np.where(level[:, None] - 1 == np.arange(steps)[:, None], 0.9, 0.05)
    attention = np.zeros((n, steps, 1, width, width))
    for example, edges in enumerate(truth["edges"].to_numpy()):
        source, target = edges[edges[:, 0] >= 0].T
        attention[example, :, 0, target, source] = 0.8
    last = np.maximum(truth["readout"].to_numpy(), (level >= 0).cumsum(1).argmax(1))
    valid = np.arange(width) <= last[:, None]
    return xr.Dataset(
        {
            "gate": (("example", "step", "pos"), gate),
            "change": (("example", "step", "pos"), gate),
            "attention": (("example", "step", "head", "query_pos", "key_pos"), attention),
            "valid": (("example", "pos"), valid),
        }
    )


@pytest.mark.parametrize("nodes", views.NODES)
@pytest.mark.parametrize("name", TRUTHS)
def test_perfect_control_flow_is_scored_as_perfect(name, nodes):
    truth = truth_of(name)
    graphs = views.graphs_of(perfect_columns(truth), nodes)
    scores = probes.score_control_flow(graphs, truth, routes=TRUTHS[name][1])
    trained = scores["score"].sel(control="trained")
    for metric in ("precision", "recall", "f1", "order", "tau", "parallelism"):
        assert float(trained.sel(metric=metric)) == pytest.approx(1), metric
    assert float(trained.sel(metric="readout_step")) == float(trained.sel(metric="root_step")) + 1
    assert float(scores["score"].sel(control="shuffled", metric="f1")) < 0.7


# What is looked at


def test_examples_are_spread_over_the_depths_of_all_splits(batch, setup):
    task = setup.sampler()
    counts = Counter(batch.latents["depth"].tolist())
    # 20 of `id` are as evenly of depths 2 and 3 as there are expressions of depth 2.
    available = Counter(task.batch("id", 0, 20).latents["depth"].tolist())
    assert counts == {2: min(10, available[2]), 3: 10, 4: 10, 5: 10}
    # They are still examples of the task, beside their own latents.
    again = look_up(batch.inputs.numpy(), task.tables, "forward")
    assert torch.equal(again.targets.long(), batch.targets[:, 0])
    for name in ("depth", "length", "edges", "edge_used", "root"):
        assert torch.equal(again.latents[name].to(batch.latents[name]), batch.latents[name])
    found = {tuple(one for one in row if one >= 0) for row in batch.inputs.tolist()}
    assert len(found) == len(batch)
    # None of them chose the checkpoint.
    chose = task.batch("valid", 0, setup.n_validation).inputs.tolist()
    assert not found & {tuple(one for one in row if one >= 0) for row in chose}


def columns_of(model, batch, evaluation_batch_size=250):
    columns = probes.capture_control_flow(
        model, batch.parts(evaluation_batch_size), answer=measures.most_probable
    )
    return columns.assign(valid=tasks.column_dataflow(batch)["valid"])


def test_gates_changes_and_attention_are_those_of_the_model(trained, batch):
    columns, model = columns_of(trained.model, batch, 16), trained.model
    with torch.no_grad():
        logits, cache = model.run_with_cache(batch.inputs)
    last = len(model.blocks) - 1
    gate = cache[f"blocks.{last}.hook_gate"].mean(-1)
    before, after = (cache[f"blocks.{last}.hook_resid_{place}"] for place in ("pre", "post"))
    change = (after - before).norm(dim=-1) / (after.norm(dim=-1) + before.norm(dim=-1))
    attention = cache[f"blocks.{last}.attn.hook_pattern"].permute(0, 2, 3, 1)
    valid = columns["valid"].to_numpy()
    for name, expected in (("gate", gate), ("change", change), ("attention", attention)):
        found = columns[name].isel(step=last)
        if name == "attention":
            found = found.transpose("example", "query_pos", "key_pos", "head")
        np.testing.assert_allclose(found.to_numpy()[valid], expected.numpy()[valid], atol=1e-6)
    assert columns.sizes["step"] == len(model.blocks)
    answer = logits[:, 0].argmax(-1)
    assert columns["answer"].to_numpy().tolist() == answer.tolist()


def test_columns_are_numbered_as_the_model_does(trained, batch):
    changed = batch.inputs.clone()
    changed[:, 1] = torch.where(changed[:, 1] == 8, 9, 8)
    with torch.no_grad():
        _, one = trained.model.run_with_cache(batch.inputs)
        _, two = trained.model.run_with_cache(changed)
    differs = (one["hook_embed"] != two["hook_embed"]).any(-1)
    assert differs.nonzero()[:, 1].unique().tolist() == [2]


@pytest.mark.parametrize("readout", ["first", "last"])
def test_the_answer_is_read_where_the_truth_says(readout, setup, batch):
    model = trained_of(replace(setup, readout=readout)).model
    column = torch.from_numpy(tasks.column_dataflow(batch, readout=readout)["readout"].to_numpy())
    name = f"blocks.{len(model.blocks) - 1}.hook_resid_post"

    def answers(kept):
        def erase(h, hook):
            return h * kept(torch.arange(h.shape[1]))[..., None]

        with torch.no_grad():
            return model.run_with_hooks(batch.inputs, fwd_hooks=[(name, erase)])

    with torch.no_grad():
        plain = model(batch.inputs)
    torch.testing.assert_close(answers(lambda columns: columns == column[:, None]), plain)
    erased = answers(lambda columns: columns != column[:, None])
    assert not torch.isclose(erased, plain).all(-1).any()


@pytest.mark.parametrize("nodes", views.NODES)
def test_control_graphs_are_as_dense_as_those_of_the_model(trained, batch, nodes):
    columns = columns_of(trained.model, batch)
    generator = np.random.default_rng(0)
    lively = columns.assign(
        {nodes: columns[nodes].copy(data=generator.random(columns[nodes].shape) ** 4)}
    )
    lively["attention"] = columns["attention"].copy(
        data=generator.random(columns["attention"].shape) ** 4
    )
    graphs = views.graphs_of(lively, nodes)
    control = probes.match_control_flow(
        graphs, columns[nodes], columns["attention"], columns["valid"]
    )
    assert views.graphs_of(columns, "gate")["update"].sum() == 0
    for count in (
        lambda one: one["update"].sum().item(),
        lambda one: (one["head"] >= 0).sum().item(),
    ):
        assert count(control) == pytest.approx(count(graphs), rel=0.25)
    assert graphs["update"].sum() > 50


@pytest.mark.parametrize("name", MODELS)
def test_models_with_columns_have_control_flow_with_gates_also_by_gates(name, setup):
    trained = trained_of(replace(setup, model=name))
    flow = measures.control_flow(trained, n=8)
    assert (flow is not None) == (name in ROUTERS)
    if flow is not None:
        nodes = ["gate", "change"] if name in GATED else ["change"]
        assert flow["nodes"].to_numpy().tolist() == nodes
    for measure in (measures.heads, measures.timing, measures.sensitivity):
        assert (measure(trained_of(trained.setup), n=8) is not None) == (name in ROUTERS)
    drawn = measures.drawn(trained_of(trained.setup), n=1)
    assert (drawn is not None) == (name in ROUTERS)
    if drawn is not None:
        assert ("gate" in drawn) == bool(drawn["gates"].notnull().any()) == (name in GATED)


def test_graphs_at_the_thresholds_of_the_study_are_among_those_swept(setup):
    everywhere = measures.sensitivity(trained_of(setup), n=30)
    here = measures.control_flow(trained_of(setup), n=30)
    at = {"metric": "f1", "control": ["trained", "shuffled", *HABITS]}
    swept = everywhere["score"].sel(at)
    assert swept.sizes == {"gate_threshold": 4, "attention_threshold": 4, "control": 5}
    swept = swept.sel(gate_threshold=measures.NODES["change"])
    swept = swept.sel(attention_threshold=measures.LEAST_READ)
    graphs = here["score"].sel(at).sel(nodes="change", depth="all", correct="all")
    known = graphs.control != "shuffled"
    np.testing.assert_allclose(swept[known], graphs[known])
    of_trained = everywhere["score"].sel(metric="f1", control="trained")
    assert of_trained.std() > 0


def test_the_best_habit_is_the_reference_of_thresholds(result):
    curves, habit = views.sensitivity(result), views.habit(result)
    assert curves["value"].dims == ("cell", "smallest_change", "attention_threshold", "metric")
    swept = result["sensitivity"]["score"].sel(metric=["f1", "tau"])
    swept = swept.rename(gate_threshold="smallest_change")
    expected = swept.sel(control=list(HABITS)).max(["control", "attention_threshold"])
    xr.testing.assert_allclose(
        habit["value"].drop_attrs(), expected.drop_attrs().transpose(*habit["value"].dims)
    )
    assert (habit["value"].sel(metric="f1").isel(cell=0) > 0.3).all()


def test_examples_of_the_deepest_of_training_and_of_all_are_drawn(trained, setup):
    found = measures.drawn(trained_of(setup), n=2)
    assert found["depth"].to_numpy().tolist() == [3, 3, 5, 5]
    # A mark at both ends, and as many tokens as the depth and one.
    for depth, tokens in zip(found["depth"].to_numpy(), found["tokens"].to_numpy(), strict=True):
        first, *inner, last = tokens.split()
        assert (first, last, len(inner)) == ("BOS", "EOS", depth + 1)
        value = int(inner[0], 2)
        for table in inner[1:]:
            value = trained.task.tables["abc".index(table)][value]
        assert found["target"].to_numpy()[found["tokens"].to_numpy() == tokens] == f"{value:03b}"


# Graphs that are drawn


@pytest.fixture(scope="module")
def planted(result):
    """The smoke run's result, with gates that open and attention that reads."""
    tree = result.copy(deep=True)
    drawn = tree["drawn"].to_dataset()
    for name in views.NODES:
        drawn[name][0, :, 2, 1] = 0.9
        drawn[name][0, :, 4, 2] = 0.9
    # Gates alone open once more.
    drawn["gate"][0, :, 3, 2] = 0.9
    drawn["change"][0, :, 3, 2] = 0.0
    drawn["attention"][0, :, 2, 0, 1, 2] = 0.8
    drawn["attention"][0, :, 4, 0, 2, 1] = 0.7
    tree["drawn"] = xr.DataTree(drawn)
    return tree


def test_graphs_are_written_for_other_programs(planted, tmp_path):
    views.export(planted, tmp_path)
    data = planted["drawn"].to_dataset().isel(cell=0)
    files = sorted(path.name for path in (tmp_path / "graphs").iterdir())
    n = data.sizes["example"]
    # Two formats; the transformer has no gates.
    assert len(files) == 2 * (len(views.NODES) + 1) * n
    for nodes in views.NODES:
        for example in range(n):
            path = tmp_path / "graphs" / f"ndr-forward-seed0-{nodes}-{example}.json"
            graph = nx.node_link_graph(json.loads(path.read_text()), edges="edges")
            loaded = nx.read_graphml(path.with_suffix(".graphml"))
            assert (len(loaded), loaded.number_of_edges()) == (len(graph), graph.number_of_edges())
            assert nx.is_directed_acyclic_graph(graph)
            inputs = [node for node in graph if node[1] == -1]
            assert len(inputs) == int(data["depth"][example]) + 3
            updates = {tuple(node) for node in graph if node[1] >= 0}
            assert {(1, 2), (2, 4)} <= updates
            assert ((2, 3) in updates) == (nodes == "gate")
            assert graph.has_edge((2, -1), (1, 2))
            assert graph.has_edge((1, 2), (2, 4))


@pytest.mark.parametrize(
    ("nodes", "models"), [("gate", ["NDR"]), ("change", ["NDR", "transformer"])]
)
def test_graphs_show_the_examples_of_models_with_such_nodes(planted, nodes, models):
    figure = views.graphs(planted, nodes=nodes)
    titles = [axis.get_title(loc="left") for axis in figure.axes[:-1]]
    expected = [f"{model}, depth {depth}" for model in models for depth in (3, 5)]
    assert [title.split(":")[0] for title in titles] == expected
    assert all("right is" in title for title in titles)
    plt.close("all")


def test_accuracy_is_drawn_at_each_depth_beside_chance(result):
    figure = STUDY.views["accuracy"](result)
    axis = figure.axes[0]
    scores = result["scores"]["accuracy"].isel(cell=0)
    expected = [
        float(scores.sel(split=split, group=f"depth {depth}"))
        for split, depth in (("id", 2), ("id", 3), ("valid", 4), ("ood", 5))
    ]
    assert axis.lines[0].get_xdata().tolist() == [2, 3, 4, 5]
    assert axis.lines[0].get_ydata().tolist() == expected
    assert any(
        line.get_ydata() == [1 / 8, 1 / 8] for line in axis.lines[1:] if len(line.get_ydata()) == 2
    )
    plt.close(figure)


# Maps of examples


@pytest.fixture(scope="module")
def mapped(result):
    """The smoke run's result with known maps: the transformer's example is the paper's expression.

    Head 2 of NDR joins arguments and operations most clearly, at step 1; head 0 reads results.
    """
    tree = result.copy(deep=True)
    drawn, heads = tree["drawn"].to_dataset(), tree["heads"].to_dataset()
    weights = np.random.default_rng(0).random(drawn["attention"].shape).astype("float32")
    drawn["attention"] = drawn["attention"].copy(data=weights).where(drawn["attention"].notnull())
    drawn["change"][0, :, 3, 2] = 0.9
    heads["score"].loc[{"control": "others"}] = 0.1
    heads["score"].loc[{"control": "trained"}] = 0.2
    heads["at_step"][:] = 0.1
    for role, head, step in (("argument reads operator", 2, 1), ("operator reads result", 0, 4)):
        heads["score"].loc[{"control": "trained", "role": role, "head": head}] = 0.9
        heads["at_step"].loc[{"role": role, "head": head, "step": step}] = 0.7
    tree["drawn"], tree["heads"] = xr.DataTree(drawn), xr.DataTree(heads)
    return tree


def panels_of(figure):
    """The panels of a figure by the title of their example."""
    return {
        part.get_suptitle().replace("\n", " "): [axis for axis in part.axes if axis.images]
        for part in figure.subfigs
    }


def test_attention_is_drawn_for_all_models_with_columns(mapped):
    few = panels_of(maps.attention(mapped, most=3))
    assert [title.split(":")[0] for title in few] == ["NDR, depth 5", "transformer, depth 5"]
    assert all("3 of 6 steps" in title for title in few)
    ndr = next(iter(few.values()))
    assert [axis.get_title() for axis in ndr] == ["step 0", "step 2", "step 5"]
    drawn = mapped["drawn"].to_dataset().isel(cell=0)
    (deepest,) = np.flatnonzero(drawn["depth"] == 5)
    width = len(drawn["tokens"][deepest].item().split())
    expected = drawn["attention"][deepest, 2].max("head")[:width, :width]
    np.testing.assert_array_equal(ndr[1].images[0].get_array(), expected)
    (all_steps,) = panels_of(maps.attention(mapped, model="ndr")).values()
    # A column that changes is framed, at the step where it does.
    assert [len(axis.patches) for axis in all_steps] == [0, 0, 0, 1, 0, 0]
    assert maps.attention(mapped, model="geometric") is None
    # Models without gates have no frames: all their columns change all the time.
    (transformer,) = panels_of(maps.attention(mapped, model="transformer")).values()
    assert not any(axis.patches for axis in transformer)


def test_the_head_that_joins_arguments_and_operations_is_drawn_at_all_steps(mapped):
    ((title, panels),) = panels_of(maps.joining_head(mapped, model="ndr")).items()
    assert "head 2: argument reads operator" in title
    assert [axis.get_title() for axis in panels] == [f"step {i}, head 2" for i in range(6)]
    drawn = mapped["drawn"].to_dataset().isel(cell=0)
    shown = panels[3].images[0].get_array()
    (deepest,) = np.flatnonzero(drawn["depth"] == 5)
    expected = drawn["attention"][deepest, 3, 2, : len(shown), : len(shown)]
    np.testing.assert_array_equal(shown, expected)


def test_heads_are_drawn_where_their_part_is_clearest(mapped):
    title, panels = next(iter(panels_of(maps.heads(mapped)).items()))
    assert "first head 2: argument reads operator; then: operator reads result" in title
    names = [axis.get_title() for axis in panels]
    assert names[:4] == [f"step {step}, head 2" for step in (0, 2, 3, 5)]
    assert names[4] == "step 4, head 0"
    # Without heads there is nothing to choose from, in stored results neither.
    older = mapped.copy()
    del older["heads"]
    assert maps.heads(older) is None
    assert maps.joining_head(older, model="ndr") is None


def test_gates_of_all_channels_are_drawn(mapped):
    ((title, panels),) = panels_of(maps.gates(mapped, model="ndr")).items()
    assert "gates of 16 channels" in title
    drawn = mapped["drawn"].to_dataset().isel(cell=0)
    (deepest,) = np.flatnonzero(drawn["depth"] == 5)
    shown = panels[5].images[0].get_array()
    expected = drawn["gates"][deepest, 5, : shown.shape[1]].transpose("channel", "pos")
    np.testing.assert_array_equal(shown, expected)
    assert maps.gates(mapped, model="transformer") is None
    older = mapped.copy()
    older["drawn"] = xr.DataTree(mapped["drawn"].to_dataset().drop_vars("gates"))
    assert maps.gates(older, model="ndr") is None


def test_the_papers_expression_is_drawn_if_it_is_there(mapped):
    drawn = mapped["drawn"].to_dataset().isel(cell=0)
    assert drawn["depth"][views.main_example(drawn)] == 5
    texts = drawn["tokens"].to_numpy().astype(object)
    texts[0] = f"BOS {PAPERS_LISTOPS} EOS"
    assert views.main_example(drawn.assign(tokens=("example", texts))) == 0


def test_a_listops_model_gets_the_papers_expression():
    changes = [
        "task.n_train=60",
        "task.n_id=40",
        "task.n_valid=40",
        "task.n_ood=40",
        "n_validation=20",
    ]
    small = ["d_model=16", "d_mlp=8", "n_heads=2", "n_test_steps=3", "model=relative", "seed=0"]
    (cell,) = LISTOPS_STUDY.plan("paper", changes + small).cells
    found = measures.drawn(trained_of(cell), n=1)
    (number,) = np.flatnonzero(found["tokens"] == f"BOS {PAPERS_LISTOPS} EOS")
    assert found["target"][number] == "4"
    assert found["depth"].to_numpy().tolist() == [3, 5, 8]
    for other in ("task.max_arguments=4", "task.max_length=24 task.ood_depths=7,7"):
        (cell,) = LISTOPS_STUDY.plan("paper", [*changes, *small, *other.split()]).cells
        assert len(measures.drawn(trained_of(cell), n=1)["tokens"]) == 2
    scores = measures.heads(trained_of(cell), n=20)
    assert int(scores["pairs"].min()) > 0
    timing = measures.timing(trained_of(cell), n=20)
    assert timing["control"].to_numpy().tolist() == ["trained", "untrained"]
    assert np.isfinite(timing["slope"].sel(control="untrained")).all()


def test_a_result_without_gates_has_no_figure_of_gates(result):
    tree = result.copy(deep=True)
    tree["control_flow"] = xr.DataTree(tree["control_flow"].to_dataset().sel(nodes=["change"]))
    drawn = {name: STUDY.views[name](tree) for name in ("scores_gate", "scores_change", "cuts")}
    assert [name for name, figure in drawn.items() if figure is None] == ["scores_gate"]


def test_plots_shade_the_depths_of_the_split_in_distribution(result):
    assert views.depths_of_training(result) == (1.5, 3.5)
    tree = result.copy(deep=True)
    scores = tree["scores"].to_dataset()
    # As in ListOps, where single operations are held out, too.
    scores["accuracy"].loc[{"split": "id", "group": "depth 1"}] = 0.5
    tree["scores"] = xr.DataTree(scores)
    assert views.depths_of_training(tree) == (0.5, 3.5)


def test_the_order_of_keys_is_the_papers(result):
    figure = maps.key_order(result, n=4)
    # Nearer keys come first; of two at the same distance the right one.
    by_hand = [[np.nan, 1, 2, 3], [2, np.nan, 1, 3], [3, 2, np.nan, 1], [3, 2, 1, np.nan]]
    shown = figure.axes[0].images[0].get_array()
    np.testing.assert_array_equal(np.ma.filled(shown.astype(float), np.nan), by_hand)
    softmax = result.map_over_datasets(lambda data: data.isel(cell=[1, 2], missing_dims="ignore"))
    assert maps.key_order(softmax) is None


def test_operations_done_and_roles_are_drawn_from_their_measures(mapped):
    timing = mapped["timing"].to_dataset()
    roles = views.roles(mapped)
    assert roles["head"].to_numpy().tolist() == ["0", "1", "2", "3"]
    assert set(views.done_by_depth(mapped)["control"].to_numpy()) == {"trained", "untrained"}
    step = np.full(timing["step"].shape, np.nan)
    step[0, 0, 1] = np.arange(step.shape[-1])
    planted = mapped.copy()
    planted["timing"] = xr.DataTree(timing.assign(step=timing["step"].copy(data=step)))
    done = views.done_by_length(planted)["value"]
    # Depths of a single length are left out.
    n_lengths = np.isfinite(done).sum("length").max("cell")
    assert n_lengths.to_numpy().tolist() == [
        step.shape[-1] if depth == 1 and step.shape[-1] > 1 else 0
        for depth in range(step.shape[-2])
    ]
    assert not views.roles(xr.DataTree())


def test_the_cause_of_a_failure_is_asked_of_networks_that_fail():
    right = xr.DataArray(
        [[[0.9, 0.9, 0.9], [0.3, FAILED, 0.8], [0.1, FAILED, 0.8]]],
        dims=("split", "group", "cell"),
        coords={"split": ["ood"], "group": ["all", "depth 9", "depth 10"], "cell": range(3)},
    )
    tree = xr.DataTree.from_dict({"scores": xr.Dataset({"accuracy": right})})
    reading = where_failing(Reading("x", lambda _: np.array([0.3, 0.4, 0.5])))
    np.testing.assert_array_equal(reading.values(tree), [0.3, np.nan, np.nan])
