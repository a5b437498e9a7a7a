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
from studies.engine import Resources, Trained, read_result, run
from studies.engine.claims import judge
from studies.engine.examples import Examples
from studies.engine.fairness import assess
from studies.engine.trained import initial_model
from studies.ndr_control_flow import (
    KINDS,
    PRESETS,
    STUDY,
    TABLE,
    broken,
    control_flow,
    drawn,
    flow,
)
from studies.setups import expressions
from studies.setups.expressions import GATED, MODELS, RECURRENT, ROUTERS, examples_of_all_depths
from studies.views import ndr as views
from tasks import ArithmeticConfig, ListOpsConfig, TableLookupConfig
from tasks.expressions.table_lookup import look_up

SMOKE = ["task.direction=forward", "model=ndr,lstm"]


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


def test_the_result_has_scores_by_depth_and_control_flow_of_gates_alone(result):
    scores = result["scores"].to_dataset()
    assert scores["model"].to_numpy().tolist() == ["ndr", "lstm"]
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
    assert set(flows["control"].to_numpy()) == {"trained", "shuffled", "untrained"}
    assert set(flows["nodes"].to_numpy()) == set(views.NODES) == set(KINDS)
    assert flows["score"].isel(cell=0).notnull().any()
    assert flows["score"].isel(cell=1).isnull().all()
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
        assert claim.reading.values(result).shape == (2,)


def test_effects_of_claims_are_in_the_direction_of_their_statements(result):
    tree = result.copy(deep=True)
    flows = tree["control_flow"]
    ndr = flows["cell"][0]
    score, rate = flows["score"], flows["rate"]
    score.loc[{"cell": ndr}] = 0.2
    score.loc[{"cell": ndr, "control": "trained"}] = 0.6
    score.loc[{"cell": ndr, "control": "trained", "nodes": "change"}] = 0.9
    rate.loc[{"cell": ndr}] = 0.1
    for kind in ("node", "edge"):
        rate.loc[{"cell": ndr, "condition": f"{kind} on the path", "cut": "lasting"}] = 0.8
    claims = [one for one in STUDY.claims if one.source == "ours" and one.exceeds == 0.0]
    found = judge(tree, claims, assess(tree, None))
    assert len(found["effect"]) == len(claims) == 10 + 1 + 4 + 1
    assert (found["effect"] > 0).all()


def test_the_table_renders(result):
    console = Console(width=100, record=True)
    with console.capture() as capture:
        console.print(TABLE.render(result))
    for word in ("NDR", "LSTM", "right, id", "depth 4, valid", "depth 5, ood", "the paper's"):
        assert word in capture.get()


def test_every_figure_is_drawn(folder):
    for name in STUDY.views:
        for kind in ("png", "pdf"):
            assert (folder / f"{name}.{kind}").stat().st_size > 1000


def test_without_gates_the_control_flow_is_left_out(result):
    few = xr.DataTree.from_dict(
        {name: result[name].to_dataset().isel(cell=[1]) for name in ("scores", "training")}
    )
    few.attrs = result.attrs
    drawn = {name for name, view in STUDY.views.items() if view(few) is not None}
    plt.close("all")
    assert drawn == {"accuracy", "training"}


# Settings


@pytest.mark.parametrize(
    ("preset", "change", "message"),
    [
        ("smoke", "model=gru", "model must be one of ndr, geometric"),
        ("smoke", "task.direction=sideways", "direction must be one of forward, backward"),
        ("smoke", "readout=middle", "readout must be one of first, last"),
        ("smoke", "router.d_model=3", "unknown setting 'router.d_model'"),
        ("smoke", "task.n_tables=40", "n_tables"),
        ("smoke", "n_validation=50", "n_validation must be less than task.n_valid = 50"),
        ("paper-listops", "task.direction=forward", "unknown setting 'task.direction'"),
    ],
)
def test_wrong_settings_get_a_clear_error(preset, change, message):
    with pytest.raises(ValueError, match=message.replace("(", "\\(")):
        STUDY.plan(preset, [change])


def cells_of(preset, *changes):
    some = [f"model={','.join(MODELS)}", *changes]
    cells = STUDY.plan(preset, some).cells
    return {cell.model: cell for cell in cells if getattr(cell.task, "direction", "") != "backward"}


SMALL = {
    "paper-arithmetic": ["task.n_train=600", "task.n_id=100"],
    "paper-listops": ["task.n_train=600", "task.n_id=100"],
}


@pytest.mark.parametrize("preset", ["laptop", *PRESETS])
def test_every_preset_builds_its_models_and_their_losses_are_finite(preset):
    cells = cells_of(
        preset, *SMALL.get(preset, []), *(["task.direction=forward"] * (preset == "near-mark"))
    )
    assert set(cells) == set(MODELS)
    for name, cell in cells.items():
        model = cell.build(torch.Generator().manual_seed(0))
        batch = cell.sampler().batch("train", 0, 2)
        assert torch.isfinite(cell.loss(model, batch, 0))
        tokens = len(cell.sampler().vocabulary)
        if name in ROUTERS:
            assert model.W_E.shape == (tokens + 2, cell.d_model)  # and the marks at both ends
            assert len(model.blocks) == cell.n_steps


TRAINING = ("n_steps", "batch_size", "learning_rate", "weight_decay", "clip", "warmup_steps")
PAPER_SIZES = {
    "paper": {
        "ndr": (256, 512, 1, 14, 14, 0.5, 0.1, 30_000, 512, 1.5e-4, 0.01, 5.0, 0),
        "geometric": (256, 512, 1, 14, 14, 0.5, 0.1, 30_000, 512, 1.5e-4, 0.01, 5.0, 0),
        "relative_gate": (256, 512, 1, 14, 14, 0.5, 0.1, 30_000, 512, 2e-4, 0.01, 5.0, 0),
        "transformer": (128, 256, 4, 11, 11, 0.1, 0.1, 30_000, 512, 1.5e-4, 0.0025, 5.0, 0),
    },
    "paper-arithmetic": {
        "ndr": (256, 1024, 4, 15, 15, 0.5, 0.1, 100_000, 512, 1.5e-4, 0.01, 1.0, 0),
        "abs_rel_gate": (256, 1024, 4, 15, 15, 0.5, 0.1, 100_000, 512, 1.5e-4, 0.01, 1.0, 0),
        "relative": (128, 256, 4, 11, 11, 0.5, 0.1, 200_000, 512, 1.5e-4, 0.0025, 1.0, 0),
    },
    "paper-listops": {
        "ndr": (512, 1024, 16, 20, 24, 0.1, 0.05, 100_000, 512, 2e-4, 0.09, 1.0, 0),
        "abs_rel_gate": (512, 2048, 16, 20, 24, 0.1, 0.1, 100_000, 512, 2e-4, 0.09, 1.0, 0),
        "transformer": (256, 1024, 16, 6, 6, 0.015, 0.05, 200_000, 512, 4e-4, 0.05, 1.0, 0),
    },
    "laptop": {
        "ndr": (64, 128, 4, 8, 14, 0.2, 0.1, 12_000, 128, 3e-3, 0.01, 5.0, 100),
        "abs_rel_gate": (64, 128, 4, 8, 14, 0.2, 0.1, 3000, 128, 1e-3, 0.01, 5.0, 100),
        "relative": (64, 128, 4, 8, 8, 0.2, 0.1, 3000, 128, 1e-3, 0.01, 5.0, 100),
    },
}
RECURRENT_SIZES = {
    "paper": (200, 1, 0.5, 20_000, 256, 1e-3, 0.0, 5.0, 0),
    "paper-arithmetic": (200, 2, 0.5, 200_000, 256, 1e-3, 0.0, 1.0, 0),
    "paper-listops": (512, 4, 0.1, 200_000, 512, 1e-3, 0.08, 1.0, 0),
    "laptop": (128, 1, 0.1, 3000, 128, 1e-3, 0.01, 5.0, 100),
}


@pytest.mark.parametrize("preset", PAPER_SIZES)
def test_presets_have_the_settings_of_their_source(preset):
    cells = cells_of(preset)
    sizes = ("d_model", "d_mlp", "n_heads", "n_steps", "n_test_steps", "dropout", "gate_dropout")
    for name, expected in PAPER_SIZES[preset].items():
        own = [getattr(cells[name], one) for one in sizes]
        assert (*own, *(getattr(cells[name].training, one) for one in TRAINING)) == expected
    for name in ("lstm", "bilstm"):
        own = [getattr(cells[name], one) for one in ("d_hidden", "n_layers", "dropout")]
        training = cells[name].training
        found = (*own, *(getattr(training, one) for one in TRAINING))
        assert found == RECURRENT_SIZES[preset]
    ndr, dnc = cells["ndr"], cells["dnc"]
    assert (dnc.n_cells, dnc.d_cell, dnc.n_read_heads) == (32, 32, 4)
    at_home = preset == "laptop"
    assert ndr.initial_s_bias == (-2 if at_home else 0)
    assert ndr.attention_dropout == (0 if at_home else 0.1)
    assert ndr.training.stop_at == (0.995 if at_home else None)
    assert cells["transformer"].training.stop_at is None
    assert ndr.training.final_learning_rate == (0.1 if at_home else 1)
    assert ndr.training.evaluate_every == (500 if at_home else 1000)
    # What chooses the checkpoint is not all of `valid`.
    assert ndr.n_validation == {"paper": 1000}.get(preset, 500) < ndr.task.n_valid


def test_models_have_the_dropout_and_the_bias_of_their_settings():
    cell = replace(cells_of("smoke", "task.direction=forward")["ndr"], initial_s_bias=-1.5)
    cell = replace(cell, dropout=0.3, attention_dropout=0.2, gate_dropout=0.1)
    for name in ROUTERS:
        model = replace(cell, model=name).build(torch.Generator().manual_seed(0))
        config = model.config
        assert (config.dropout, config.feed_forward.dropout) == (0.3, 0.3)
        if name != "transformer":
            # The paper's transformer has no dropout in its attention.
            assert config.attention.query_dropout == 0.2
        if name in GATED:
            assert config.gate.dropout == 0.1
        if name in ("ndr", "geometric"):
            assert (model.core.attn.s_bias == -1.5).all()
    for name in RECURRENT:
        assert replace(cell, model=name).build(torch.Generator()).config.dropout == 0.3


def test_the_papers_tasks_are_the_defaults():
    assert cells_of("paper")["ndr"].task == TableLookupConfig()
    assert cells_of("paper-listops")["ndr"].task == ListOpsConfig()


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
        model, batch.parts(evaluation_batch_size), answer=expressions.most_probable
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
def test_only_models_with_gates_have_control_flow(name, setup):
    trained = trained_of(replace(setup, model=name))
    assert (control_flow(trained, n=8) is not None) == (name in GATED)
    assert (drawn(trained_of(replace(setup, model=name)), n=1) is not None) == (name in GATED)


def test_examples_of_the_deepest_of_training_and_of_all_beyond_are_drawn(trained, setup):
    found = drawn(trained_of(setup), n=2)
    assert found["depth"].to_numpy().tolist() == [3, 3, 4, 4, 5, 5]
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
    assert len(files) == 2 * len(views.NODES) * n
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


def test_figures_of_graphs_show_examples_answers_and_updates(planted):
    for figure in (views.graphs(planted, nodes="change"), views.attention(planted)):
        titles = [axis.get_title(loc="left") + axis.get_ylabel() for axis in figure.axes]
        assert any("depth 3: right is" in title for title in titles)
    framed = [axis for axis in figure.axes if axis.patches]
    assert [axis.get_title() for axis in framed] == ["step 2", "step 4"]
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
