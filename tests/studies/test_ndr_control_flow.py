import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import networkx as nx
import numpy as np
import pytest
import torch
import xarray as xr
from matplotlib.colors import to_rgba
from matplotlib.patches import Rectangle
from scipy.stats import binomtest

import probes
import tasks
from studies import ndr_control_flow as module
from studies.ndr_control_flow import (
    GATED,
    MODELS,
    NODES,
    PAPER,
    NdrModel,
    accuracy,
    analyse,
    assemble,
    beyond_training,
    capture_columns,
    closing_table,
    graphs_of,
    presets,
    run,
    spread_over_depths,
    task_of,
    train_model,
    true_dataflow,
)
from studies.ndr_figures import control_flow_graphs, figures
from studies.running import Resources, command, load_model_config
from studies.runs import RunError, write_json
from studies.settings import override
from tasks import ListOpsConfig, TableLookupConfig
from tasks.arithmetic import describe_arithmetic
from tasks.listops import describe_listops
from tasks.table_lookup import look_up

SCRIPT = Path(__file__).parents[2] / "studies" / "ndr_control_flow.py"
SMOKE = ["directions=forward", "models=ndr,lstm", "n_graphs=30"]
LIGHT = ["--workers", "1", "--threads", "1"]
STUDY = override(presets()["smoke"], SMOKE)
UNGATED = {"accuracy", "training"}
FIGURES = UNGATED | {"scores", "cuts", "parallelism", "attention_ndr_forward"}
FIGURES |= {"graph_ndr_forward_gate", "graph_ndr_forward_change"}


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs")
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--preset", "smoke", *SMOKE, *LIGHT, "--out", str(out)],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"COLUMNS": "120", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (folder,) = out.glob("ndr_control_flow-*")
    return folder, done.stdout


@pytest.fixture(scope="module")
def result(smoke):
    with xr.open_datatree(smoke[0] / "result.nc", engine="h5netcdf") as tree:
        return tree.load()


@pytest.fixture(scope="module")
def drawn(result):
    return figures(result)


@pytest.fixture
def undrawn(monkeypatch):
    """Figures take longer than all the rest of a tiny run."""
    monkeypatch.setattr(module, "draw_figures", lambda result: {})


def numbers(tree):
    return {
        (group.relative_to(tree), name): group[name].to_numpy()
        for group in tree.subtree
        for name in group.data_vars
    }


def same_numbers(first, second):
    first, second = numbers(first), numbers(second)
    return first.keys() == second.keys() and all(
        np.array_equal(first[key], second[key], equal_nan=first[key].dtype.kind == "f")
        for key in first
    )


# The run


def test_the_smoke_run_ends_in_a_table_and_says_where_the_files_are(smoke):
    folder, printed = smoke
    for word in ("ndr", "lstm", "right, id", "depth 5", "the paper", "edges, F1", "chance"):
        assert word in printed
    assert str(folder) in printed


def test_the_result_says_how_it_was_made(result, smoke):
    attrs = result.attrs
    assert attrs["schema_version"] == 1
    assert attrs["config_hash"] == smoke[0].name.removeprefix("ndr_control_flow-")
    assert json.loads(attrs["config"])["study"]["task"]["train_depth"] == 3
    assert "ndr_control_flow.py --preset smoke" in attrs["command"]
    for name in ("created_at", "git_commit", "versions", "seed", "device"):
        assert attrs[name]


def test_every_variable_and_coordinate_has_a_name(result):
    named = 0
    for group in result.subtree:
        for name, variable in {**group.data_vars, **group.coords}.items():
            assert variable.attrs.get("long_name"), (group.path, name)
            named += 1
    assert named > 50
    scores = result["control_flow"]
    assert set(scores["control"].to_numpy()) == {"trained", "shuffled", "untrained"}
    for group, name in ((scores, "score"), (result["cuts"], "rate")):
        low, middle, high = (group[name + end] for end in ("_low", "", "_high"))
        assert bool((low <= middle).where(middle.notnull(), True).all())
        assert bool((middle <= high).where(middle.notnull(), True).all())
    assert result["accuracy"]["model"].to_numpy().tolist() == ["ndr", "lstm"]
    # Only the one with gates has graphs.
    assert scores["model"].to_numpy().tolist() == ["ndr"]
    assert float(result["accuracy"]["chance"].sel(task="forward")) == 1 / 8


def test_a_finished_study_is_not_run_again(smoke):
    folder = smoke[0]
    before = {path: path.stat().st_mtime_ns for path in folder.parent.rglob("*")}
    assert run(STUDY, resources=Resources(root=folder.parent)) == folder
    assert {path: path.stat().st_mtime_ns for path in folder.parent.rglob("*")} == before


class Killed(BaseException):
    """What no handler of errors catches."""


def dies_at(call, function):
    calls = Counter()

    def mortal(*args, **named):
        calls["made"] += 1
        if calls["made"] == call:
            raise Killed
        return function(*args, **named)

    return mortal


@pytest.mark.parametrize(
    ("owner", "name", "call", "left"),
    [
        # Each evaluation scores two splits: the third call belongs to the second one.
        (tasks.TableLookup, "score", 3, "models/ndr-*/last.safetensors"),
        (probes, "write_graphml", 3, "ndr*/result.nc"),
    ],
    ids=["while training", "while exporting"],
)
def test_a_killed_study_ends_in_the_same_result(
    owner, name, call, left, smoke, result, undrawn, tmp_path, monkeypatch
):
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, dies_at(call, getattr(owner, name)))
        with pytest.raises(Killed):
            run(STUDY, resources=Resources(root=tmp_path))
    assert list(tmp_path.glob(left))
    assert not list(tmp_path.glob("ndr*/graphs"))
    again = run(STUDY, resources=Resources(root=tmp_path))
    with xr.open_datatree(again / "result.nc", engine="h5netcdf") as tree:
        assert same_numbers(tree, result)
    graphs = {path.name: path.read_text() for path in (smoke[0] / "graphs").iterdir()}
    assert graphs == {path.name: path.read_text() for path in (again / "graphs").iterdir()}


def test_a_checkpoint_is_analysed_without_training(smoke, result, undrawn, tmp_path):
    (model,) = smoke[0].parent.glob("models/ndr-*")
    folder = run(STUDY, resources=Resources(root=tmp_path), checkpoints=(model,))
    assert not list(tmp_path.glob("models/*"))
    with xr.open_datatree(folder / "result.nc", engine="h5netcdf") as tree:
        assert tree["accuracy"]["model"].to_numpy().tolist() == ["ndr"]
        for name in ("control_flow", "cuts", "examples"):
            assert same_numbers(xr.DataTree(tree[name].to_dataset()), result[name])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--preset", "huge"], "preset must be one of smoke, laptop, paper"),
        (["models=ndr,gru"], "models must be among ndr, geometric"),
        (["models=ndr,ndr"], "models must be different from one another"),
        (["directions=sideways"], "directions must be among ('forward', 'backward')"),
        (["directions="], "directions"),
        (["router.d_modle=3"], "unknown setting 'router.d_modle'; nearest are router.d_model"),
        (["n_graphs=3"], "n_graphs must be at least 10, got 3"),
        (["n_drawn=0"], "n_drawn must be at least 1, got 0"),
        (["backward_readout=middle"], "backward_readout must be"),
        (["task.n_tables=40"], "n_tables"),
        (["--checkpoint", "nowhere"], "nowhere is no run folder of a NdrModel"),
    ],
)
def test_wrong_input_gets_a_clear_error(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        sys, "argv", ["ndr_control_flow.py", "--preset", "smoke", *words, "--out", str(tmp_path)]
    )
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as ended:
        command(question="?", presets=presets, run=run, table=closing_table)
    assert ended.value.code == 1
    assert message in " ".join(capsys.readouterr().out.split())
    assert not list(tmp_path.iterdir())


def test_other_tasks_have_no_directions():
    with pytest.raises(ValueError, match="directions must be among \\(\\) for this task"):
        override(presets()["paper-listops"], ["directions=forward"])


def test_a_checkpoint_of_another_task_is_refused(smoke, tmp_path):
    (model,) = smoke[0].parent.glob("models/ndr-*")
    other = override(STUDY, ["directions=backward"])
    with pytest.raises(RunError, match="was trained on"):
        run(other, resources=Resources(root=tmp_path), checkpoints=(model,))


@pytest.mark.parametrize("preset", ["paper", "paper-arithmetic", "paper-listops"])
@pytest.mark.parametrize("name", ["ndr", "lstm"])
def test_what_a_run_folder_says_is_read_back(preset, name, tmp_path):
    study = replace(presets()[preset], models=(name,))
    config = study.trained_models()[0]
    write_json(tmp_path / "config.json", {"version": "0", "config": config})
    assert load_model_config(tmp_path, NdrModel, study.tasks()) == config


# Models and presets


@pytest.mark.parametrize("name", MODELS)
def test_every_model_is_built_and_trained(name, tmp_path):
    study = replace(STUDY, models=(name,), n_graphs=10)
    sizes = ("router", "gated", "ungated", "recurrent")
    steps = [f"{one}.training.n_steps=2" for one in sizes]
    study = override(study, [*steps, *(f"{one}.training.evaluate_every=2" for one in sizes)])
    (config,) = study.trained_models()
    folder = train_model(config, root=tmp_path, device="cpu", position=0)
    assert folder.name == config.folder_name
    found = analyse(study, config, folder, "cpu")
    assert found["training"]["train_step"].to_numpy().tolist() == [2]
    assert ("control_flow" in found.children) == (name in GATED)
    # Two steps of training changed the weights, and what is analysed runs as long as in a test.
    trained, untrained = config.build(testing=True), config.build(testing=True)
    module.load_weights(trained, folder / "best.safetensors")
    batch = task_of(config.task).batch("ood", 0, 20)
    assert not torch.equal(trained.eval()(batch.inputs), untrained.eval()(batch.inputs))
    if name in module.ROUTERS:
        assert len(trained.blocks) == config.sizes.n_test_steps


@pytest.mark.parametrize("preset", [name for name in presets() if name.startswith("paper")])
def test_paper_presets_build_their_models(preset):
    study = replace(presets()[preset], models=MODELS)
    width = {"ndr": study.router.d_model, "geometric": study.router.d_model}
    for config in study.trained_models():
        model = config.build()
        if config.name in width:
            tokens = len(task_of(config.task).vocabulary) + 2  # the marks at both ends
            assert model.W_E.shape == (tokens, width[config.name])
            assert len(model.blocks) == config.sizes.n_steps


def test_the_paper_presets_are_the_papers():
    lookup, arithmetic, listops = (
        presets()[f"paper{suffix}"] for suffix in ("", "-arithmetic", "-listops")
    )
    assert (lookup.router.d_model, lookup.router.n_heads, lookup.router.n_steps) == (256, 1, 14)
    assert lookup.task == TableLookupConfig()
    assert (lookup.router.training.batch_size, lookup.router.training.n_steps) == (512, 30_000)
    assert (arithmetic.router.d_mlp, arithmetic.router.n_steps) == (1024, 15)
    assert arithmetic.router.training.n_steps == 100_000
    assert (listops.router.d_model, listops.router.n_heads) == (512, 16)
    assert (listops.router.n_steps, listops.router.n_test_steps) == (20, 24)
    assert listops.task == ListOpsConfig()
    assert {model for _, model in PAPER} <= set(MODELS)


# What is looked at


def lookup_example(direction):
    """`101 c a`, or mirrored, beside the shorter `010 b`."""
    tables = np.stack([np.random.default_rng(i).permutation(8) for i in range(3)])
    written = [[5, 10, 8, -1], [2, 9, -1, -1]]
    if direction == "backward":
        written = [[8, 10, 5, -1], [9, 2, -1, -1]]
    return look_up(np.array(written), tables, direction)


def arithmetic_example():
    """`(3+(4*5))` beside `7`."""
    plus, times, opening, closing = range(10, 14)
    return describe_arithmetic(
        np.array([[opening, 3, plus, opening, 4, times, 5, closing, closing], [7] + [-1] * 8])
    )


def listops_example():
    """`[MIN 7 [SM 1 2 ] 3 ]`, whose minimum is its first 3, beside `[MAX 4 1 ]`."""
    total, minimum, maximum, _, closing = range(10, 15)
    return describe_listops(
        np.array(
            [
                [minimum, 7, total, 1, 2, closing, 3, closing],
                [maximum, 4, 1, closing, -1, -1, -1, -1],
            ]
        )
    )


TRUTHS = {
    "forward": (
        lookup_example("forward"),
        "last",
        {(1, 2), (2, 3), (3, 4)},
        [-1, 0, 1, 2, 3, -1],
        [[1], [2], [3], [4]],
    ),
    "backward": (
        lookup_example("backward"),
        "last",
        {(3, 2), (2, 1), (1, 4)},
        [-1, 2, 1, 0, 3, -1],
        [[1], [2], [3], [4]],
    ),
    "backward, read at the first mark": (
        lookup_example("backward"),
        "first",
        {(3, 2), (2, 1), (1, 0)},
        [3, 2, 1, 0, -1, -1],
        [[0], [1], [2], [3]],
    ),
    "arithmetic": (
        arithmetic_example(),
        "last",
        {(2, 3), (5, 6), (7, 6), (6, 3), (3, 10)},
        [-1, -1, 0, 2, -1, 0, 1, 0, -1, -1, 3],
        [[1, 3, 9], [2], [4, 6, 8], [5], [7], [10]],
    ),
    "listops": (
        listops_example(),
        "last",
        {(2, 1), (4, 3), (5, 3), (3, 1), (7, 1), (1, 9)},
        [-1, 2, 0, 1, 0, 0, -1, 0, -1, 3],
        [[1, 8], [2], [3, 6], [4], [5], [7], [9]],
    ),
}
"""Examples, the mark that is read out; of the first example the edges, levels and groups of
columns, of which column 0 is the mark before the first token."""


def truth_of(name):
    examples, readout, *_ = TRUTHS[name]
    return true_dataflow(examples.take(torch.arange(2), "cpu"), readout)


@pytest.mark.parametrize("name", TRUTHS)
def test_the_true_dataflow_is_that_of_expressions_worked_out_by_hand(name):
    truth = truth_of(name)
    _, _, expected, level, groups = TRUTHS[name]
    edges = truth["edges"].to_numpy()
    assert {tuple(edge) for edge in edges[0].tolist() if edge != [-1, -1]} == expected
    assert truth["level"][0].to_numpy().tolist() == level
    # What is read out is read last, and from the root.
    (last,) = (edge for edge in expected if edge[1] == level.index(max(level)))
    assert (int(truth["root"][0]), int(truth["readout"][0])) == last
    found = {}
    for column, group in enumerate(truth["group"][0].to_numpy().tolist()):
        found.setdefault(group, []).append(column)
    found.pop(-1)
    assert sorted(found.values()) == groups
    # Padding of an edge stays padding, and is not used; the edge to what is read out is.
    padding = (edges == -1).any(-1)
    assert padding[1].any()
    assert (edges[padding] == -1).all()
    assert not truth["used"].to_numpy()[padding].any()
    assert bool(truth["used"][:, -1].all())


def test_what_a_minimum_ignores_is_not_used():
    truth = truth_of("listops")
    edges, used = truth["edges"].to_numpy()[0], truth["used"].to_numpy()[0]
    unused = {tuple(edge) for edge in edges[~used].tolist() if edge != [-1, -1]}
    assert unused == {(2, 1), (7, 1)}


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


@pytest.mark.parametrize("nodes", NODES)
@pytest.mark.parametrize("name", TRUTHS)
def test_perfect_control_flow_is_scored_as_perfect(name, nodes):
    # Only the first: a chain of one step says nothing of order.
    truth = truth_of(name).isel(example=[0])
    routes = 1 if name in ("arithmetic", "listops") else None
    graphs = graphs_of(perfect_columns(truth), nodes)
    scores = probes.score_control_flow(graphs, truth, routes=routes)["score"]
    trained = scores.sel(control="trained")
    for metric in ("precision", "recall", "f1", "order", "tau", "parallelism"):
        assert float(trained.sel(metric=metric)) == pytest.approx(1), metric
    assert float(trained.sel(metric="readout_step")) == float(trained.sel(metric="root_step")) + 1
    assert float(scores.sel(control="shuffled", metric="f1")) < 0.7


@pytest.fixture(scope="module")
def untrained():
    config, _ = STUDY.trained_models()
    return config.build(testing=True).eval()


@pytest.fixture(scope="module")
def batch():
    return spread_over_depths(task_of(STUDY.tasks()[0]), 40, "cpu")


def test_examples_are_spread_over_the_depths_of_all_splits(batch):
    task = task_of(STUDY.tasks()[0])
    counts = Counter(batch.latents["depth"].tolist())
    # 20 of `id` are as evenly of depths 2 and 3 as there are expressions of depth 2.
    available = Counter(task.batch("id", 0, 20).latents["depth"].tolist())
    assert counts == {2: min(10, available[2]), 3: 10, 4: 10, 5: 10}
    # They are still examples of the task, beside their own latents.
    config = replace(task.config, direction="forward")
    again = look_up(batch.inputs.numpy(), tasks.TableLookup(config).tables, "forward")
    assert torch.equal(again.targets.long(), batch.targets[:, 0])
    assert torch.equal(again.latents["depth"].long(), batch.latents["depth"])
    assert len({tuple(row) for row in batch.inputs.tolist()}) == len(batch)


def test_a_few_examples_of_the_deepest_of_training_and_of_all_beyond_are_drawn(batch):
    shown = beyond_training(batch, STUDY.tasks()[0], 2)
    depth = batch.latents["depth"]
    assert depth[shown].tolist() == [3, 3, 4, 4, 5, 5]
    assert shown[0] == depth.tolist().index(3)


def test_accuracy_is_the_share_of_right_answers_counted_one_by_one(untrained):
    task = task_of(STUDY.tasks()[0])
    found = accuracy(untrained, task, 50, "cpu")
    right, every = Counter(), Counter()
    for split in ("id", "valid", "ood"):
        held = task.batch(split, 0, task.size(split))
        for example in range(len(held)):
            one = held[example : example + 1]
            with torch.no_grad():
                answer = int(untrained(one.inputs)[0, 0].argmax())
            for key in (split, int(one.latents["depth"])):
                every[key] += 1
                right[key] += answer == int(one.targets[0, 0])
    for dim, name in (("split", "accuracy"), ("depth", "accuracy_at_depth")):
        for key in found[dim].to_numpy().tolist():
            cell = found.sel({dim: key})
            assert float(cell[name]) == right[key] / every[key]
            interval = binomtest(right[key], every[key]).proportion_ci(method="exact")
            assert float(cell[f"{name}_low"]) == pytest.approx(interval.low)
            assert float(cell[f"{name}_high"]) == pytest.approx(interval.high)


def test_gates_changes_and_attention_are_those_of_the_model(untrained, batch):
    columns = capture_columns(untrained, batch)
    with torch.no_grad():
        logits, cache = untrained.run_with_cache(batch.inputs)
    last = len(untrained.blocks) - 1
    gate = cache[f"blocks.{last}.hook_gate"].mean(-1)
    before, after = (cache[f"blocks.{last}.hook_resid_{place}"] for place in ("pre", "post"))
    change = (after - before).norm(dim=-1) / (after.norm(dim=-1) + before.norm(dim=-1))
    attention = cache[f"blocks.{last}.attn.hook_pattern"]
    for name, expected in (("gate", gate), ("change", change), ("attention", attention)):
        found = columns[name].isel(step=last)
        valid = columns["valid"].to_numpy()
        if name == "attention":
            found = found.transpose("example", "query_pos", "key_pos", "head")
            expected = expected.permute(0, 2, 3, 1)
        np.testing.assert_allclose(found.to_numpy()[valid], expected.numpy()[valid], atol=1e-6)
    assert columns.sizes["step"] == len(untrained.blocks)
    assert columns["answer"].to_numpy().tolist() == logits[:, 0].argmax(-1).tolist()


def test_columns_are_numbered_as_the_model_does(untrained, batch):
    changed = batch.inputs.clone()
    changed[:, 1] = torch.where(changed[:, 1] == 8, 9, 8)
    with torch.no_grad():
        _, one = untrained.run_with_cache(batch.inputs)
        _, two = untrained.run_with_cache(changed)
    differs = (one["hook_embed"] != two["hook_embed"]).any(-1)
    assert differs.nonzero()[:, 1].unique().tolist() == [2]


@pytest.mark.parametrize("readout", ["first", "last"])
def test_the_answer_is_read_where_the_truth_says(readout, batch):
    config, _ = STUDY.trained_models()
    model = replace(config, readout=readout).build(testing=True).eval()
    column = torch.from_numpy(true_dataflow(batch, readout)["readout"].to_numpy())
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


def test_graphs_are_written_for_other_programs(smoke, result):
    folder = smoke[0] / "graphs"
    for nodes in NODES:
        graphs = result[f"graphs/forward/ndr/0/{nodes}"].to_dataset()
        for example in range(graphs.sizes["example"]):
            expected = probes.to_networkx(graphs, example)
            place = folder / f"ndr-forward-seed0-{nodes}-{example}"
            text = place.with_suffix(".json").read_text()
            found = nx.node_link_graph(json.loads(text), edges="edges")
            assert nx.utils.graphs_equal(
                nx.relabel_nodes(found, lambda node: tuple(node)), expected
            )
            loaded = nx.read_graphml(place.with_suffix(".graphml"))
            assert set(loaded) == {str(node) for node in expected}
            assert loaded.number_of_edges() == expected.number_of_edges()
            assert nx.is_directed_acyclic_graph(expected)
            # A mark at both ends, and as many tokens as the depth and one.
            depth = int(result["examples"]["depth"].sel(task="forward").squeeze()[example])
            assert sum(step == -1 for _, step in expected) == depth + 3
    kept = 2 * len(NODES) * graphs.sizes["example"]
    assert len(list(folder.iterdir())) == kept


# Figures


def test_the_figures_are_drawn_from_the_file_alone(drawn, smoke):
    assert set(drawn) == FIGURES
    for name in drawn:
        for kind in ("png", "pdf"):
            assert (smoke[0] / f"{name}.{kind}").stat().st_size > 1000


def test_without_gates_there_are_two_figures(result):
    few = xr.DataTree.from_dict({name: result[name].to_dataset() for name in UNGATED})
    few.attrs = result.attrs
    assert set(figures(few)) == UNGATED


def test_the_accuracy_figure_shows_the_accuracies(drawn, result):
    (axis,) = drawn["accuracy"].axes
    handles, labels = axis.get_legend_handles_labels()
    assert labels == ["depths of training", "Neural Data Router", "LSTM", "chance"]
    for handle, model in zip(handles[1:3], ("ndr", "lstm"), strict=True):
        expected = result["accuracy"]["accuracy_at_depth"].sel(task="forward", model=model, seed=0)
        assert handle.get_ydata().tolist() == expected.to_numpy().tolist()
    box = handles[0].get_extents().transformed(axis.transData.inverted())
    assert (box.x0, box.x1) == pytest.approx((1.5, 3.5))


def outlined(axis):
    black = to_rgba("black")
    return [
        (round(one.get_x() + one.get_width() / 2), round(one.get_y() + one.get_height() / 2))
        for one in axis.patches
        if isinstance(one, Rectangle) and one.get_edgecolor() == black
    ]


def test_the_graph_figure_shows_nodes_reads_and_answers():
    """A graph worked out by hand: column 1 updates twice, and reads first 2, then 0 and 2."""
    gate = np.full((1, 3, 3), 0.1)
    gate[0, [0, 2], 1] = 0.9
    attention = np.zeros((1, 3, 2, 3, 3))
    attention[0, 0, 0, 1, 2] = 0.9
    attention[0, 2, 0, 1, [0, 2]] = 0.6
    attention[0, 2, 1, 1, 2] = 0.7  # another head reads the same
    dims = ("example", "step", "head", "query_pos", "key_pos")
    graphs = probes.extract_control_flow(
        xr.DataArray(gate, dims=(*dims[:2], "pos")),
        xr.DataArray(attention, dims=dims),
        xr.DataArray(np.ones((1, 3), dtype=bool), dims=("example", "pos")),
    )
    examples = xr.Dataset(
        {
            "token": (("example", "pos"), [["BOS", "x", "EOS"]]),
            "target": ("example", ["101"]),
            "answer": ("example", ["011"]),
            "depth": ("example", [5]),
        }
    )
    figure = control_flow_graphs(examples, graphs, [0], nodes="gate", title="a model")
    axis = figure.axes[0]
    assert sorted(outlined(axis)) == [(1, 0), (1, 2)]
    arrows = [(one.xyann, one.xy) for one in axis.texts]
    assert sorted(arrows) == [((0, -1), (1, 2)), ((2, -1), (1, 0)), ((2, -1), (1, 2))]
    assert "right is 101, answered 011" in axis.get_title(loc="left")
    assert [one.label1.get_text() for one in axis.xaxis.get_major_ticks()] == ["BOS", "x", "EOS"]
    # Steps go down.
    assert axis.get_ylim()[0] > axis.get_ylim()[1]
    figure.draw_without_rendering()


def test_several_seeds_and_directions_fit_into_figures_and_table(smoke):
    """The smoke run's analyses, once more as those of other seeds and directions."""
    study = override(STUDY, ["directions=forward,backward", "seeds=0,1"])
    trees = {}
    for name in study.models:
        (path,) = smoke[0].glob(f"models/{name}-*.nc")
        trees[name] = xr.load_datatree(path, engine="h5netcdf")
    models = study.trained_models()
    tree = assemble(models, [trees[one.name].copy() for one in models])
    tree.attrs = {"config": json.dumps({"study": {"task": {"train_depth": 3}}})}
    drawn = figures(tree)
    assert set(drawn) == FIGURES | {name.replace("forward", "backward") for name in FIGURES}
    # Two models on two tasks; one of them with gates, and two kinds of nodes.
    for name, panels in {"accuracy": 2, "training": 4, "scores": 16, "cuts": 8}.items():
        assert len(drawn[name].axes) == panels
    table = closing_table(tree)
    assert len(table.columns) == 1 + 4


def test_help_does_not_import_transformer_lens_or_matplotlib():
    script = f"""
import sys, runpy
sys.argv = ["ndr", "--help"]
try:
    runpy.run_path({str(SCRIPT)!r}, run_name="__main__")
except SystemExit:
    pass
assert not {{"transformer_lens", "matplotlib"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, timeout=60)
