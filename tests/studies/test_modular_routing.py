import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import xarray as xr

import mechanisms
from studies.engine import Resources, read_result, run, settings
from studies.engine.checkpoints import load_weights
from studies.engine.claims import judge
from studies.engine.examples import Examples
from studies.engine.trained import Trained
from studies.modular_routing import STUDY, measure_paths, measure_specialization, specialization
from studies.setups.equations import MODELS, MODULAR, ROUTERS

SMOKE = ["model=cross_attention,monolithic", "selection_bottleneck=false,true", "seed=0"]


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs")
    return run(STUDY, "smoke", SMOKE, resources=Resources(root=out, workers=1))


@pytest.fixture(scope="module")
def result(smoke):
    return read_result(smoke / "result.nc")


def cells_of(preset, *changes):
    return STUDY.plan(preset, list(changes)).cells


def small(setup, **changes):
    sizes = {"n_modules": 4, "d_mlp": 8, "d_model": 16, "d_key": 8, "d_encoder": 16}
    task = {"task.n_operators": 3, "task.n_points": 150}
    return settings.put(setup, sizes | task | changes)


# The smoke run


def test_cells_are_what_differs(result):
    cells = result["scores"]
    assert cells["model"].to_numpy().tolist() == [*["cross_attention"] * 2, "monolithic"]
    assert np.array_equal(cells["selection_bottleneck"], [0, 1, np.nan], equal_nan=True)
    assert np.isnan(result["paths"]["loss"].isel(cell=2)).all()
    assert STUDY.table.render(result).row_count == 3


def test_figures_are_drawn_where_there_is_something_to_draw(result, smoke):
    varied = {"by_selection_bottleneck"}
    others = {name for name in STUDY.views if "by_n" in name or name.startswith("by_")}
    expected = set(STUDY.views) - others | varied | {"by_task"}
    assert {path.stem for path in smoke.glob("*.png")} == expected
    assert {path.stem for path in smoke.glob("*.pdf")} == expected


def test_losses_are_those_of_the_best_checkpoint_on_examples_that_did_not_choose_it(result, smoke):
    scores = result["scores"].to_dataset().sel(group="all")
    for setup, name in zip(cells_of("smoke", *SMOKE), scores["cell"].to_numpy(), strict=True):
        model = setup.build(torch.Generator()).eval()
        load_weights(model, smoke.parent / "models" / name / "best.safetensors", device="cpu")
        for split, batch in (
            ("id", setup.sampler().batch("id", 0, 60)[30:]),
            ("ood", setup.sampler().batch("ood", 0, 300)),
        ):
            with torch.no_grad():
                loss = (model(batch.inputs) - batch.targets).square().mean().item()
            one = scores.sel(cell=name, split=split)
            assert one["loss"] == pytest.approx(loss, rel=1e-4)
            assert one["loss_low"] < one["loss"] < one["loss_high"]
            assert one["loss_constant"] == pytest.approx(setup.sampler().baseline(split))


def test_paths_are_in_their_order(result):
    paths = result["paths"].to_dataset().isel(cell=[0, 1])
    loss = paths["loss"].sel(control="trained")
    assert (loss.sel(path="sample") <= loss.sel(path=["task", "routed", "mean"])).all()
    regret = paths["regret"].sel(control="trained").sum("layer")
    assert np.allclose(regret, loss.sel(path="routed") - loss.sel(path="sample"), rtol=1e-4)
    held_out = loss.sel(split="ood")
    assert np.allclose(paths["oracle"], held_out.sel(path="task"), rtol=1e-5)
    assert np.allclose(paths["routed"], held_out.sel(path="routed"), rtol=1e-5)
    # The held-out combinations have as many examples each, so that their mean is the whole.
    by_task = paths["task_loss"].sel(control="trained")
    assert np.allclose(by_task.mean("task"), held_out, rtol=1e-4)
    setup = cells_of("smoke", *SMOKE)[0]
    names = [setup.sampler().task_names[number] for number in setup.sampler().held_out]
    assert sorted(by_task["task"].to_numpy()) == sorted(names)


def test_choices_add_up(result):
    scores = result["specialization"].to_dataset().isel(cell=[0, 1]).sel(split="ood")
    assert np.allclose(scores["activation"].sum("module"), 1)
    assert (scores["seen"].sel(layer=["0", "1"]).sum("operation") == 300).all()


# Measures, in networks that are known


def planted(right, *changes, pool="operations"):
    """The structural oracle over true operations; each operator's key is that of its operation, or
    of the first one."""
    (setup,) = cells_of("smoke", "model=structural_oracle", f"pool={pool}", "seed=0", *changes)
    model = setup.build(torch.Generator().manual_seed(0)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        n_operators = setup.task.n_operators
        for one in range(n_operators):
            model.W_E[1 + one, one] = 1  # an operator's features follow its scalar
            model.router.W_Q[:, one, one] = 1
            model.router.matching.keys[:, one if right else 0, one] = 10
    return Trained(setup, model, 0, "cpu", Examples(setup, "cpu").fresh("test"))


def test_a_network_that_routes_right_is_specialized_and_leaves_no_regret():
    trained = planted(right=True)
    scores = measure_specialization(trained, n=300).sel(control="observed")
    assert np.allclose(scores["specialization"], 1)
    assert np.allclose(scores["collapse_attainable"], 1, atol=1e-2)
    shuffled = measure_specialization(planted(right=True), n=300).sel(control="shuffled")
    assert (shuffled["specialization"] < 0.2).all()
    assert (scores["assignment"] == [0, 1, 2]).all()
    paths = measure_paths(planted(right=True), n=300, examples=(1, 4)).sel(control="trained")
    assert (paths["loss"].sel(path=["sample", "task", "routed"]) < 1e-12).all()
    assert (paths["regret"] < 1e-12).all()
    assert (paths["loss"].sel(path="mean") > 0.05).all()
    assert (paths["adapted"] >= paths["routed"]).all()


def test_a_network_that_sends_all_to_one_module_has_collapsed():
    scores = measure_specialization(planted(right=False), n=300).sel(control="observed")
    assert np.allclose(scores["specialization"], 1)
    assert np.allclose(scores["collapse"], 0)
    paths = measure_paths(planted(right=False), n=300, examples=(1, 4, 16)).sel(control="trained")
    held_out = paths["loss"].sel(split="ood")
    assert held_out.sel(path="task") < 1e-12 < 0.05 < held_out.sel(path="routed")
    # Which modules there are is known; a few labels say which ones a combination takes.
    assert paths["gap_closed"].sel(examples=16) > 0.95
    assert set(paths["layer"].to_numpy()) == {"0", "1"}


def test_measures_do_not_apply_to_a_network_without_modules():
    (setup,) = cells_of("smoke", "model=monolithic", "seed=0")
    trained = Trained(setup, None, 0, "cpu", Examples(setup, "cpu").fresh("test"))
    assert measure_specialization(trained) is None
    assert measure_paths(trained) is None


def test_a_network_of_one_layer_has_to_perform_combinations():
    (setup,) = cells_of("one_layer", "model=encoder", "seed=0")
    assert len(setup.operations) == 25
    assert setup.operations[:2] == ("add, add", "add, subtract")
    assert replace(setup, n_layers=2).operations == setup.sampler().operations
    trained = planted(True, "n_layers=1", pool="mlp")
    scores = measure_specialization(trained, n=300).sel(control="observed", layer="0", split="id")
    # The first operator chooses the module: of two combinations each, as often.
    assert scores["specialization"] == pytest.approx(1)
    table = scores["activation"].dropna("operation").to_series().unstack()
    assert len(table) == 6
    assert all(row.argmax() == ["add", "subtract", "multiply"].index(name.split(",")[0])
               for name, row in table.iterrows())  # fmt: skip


# Claims, on figures that were made up


USUAL = {"objective": "sampled", "selection_bottleneck": 0, "functional_bottleneck": "oracle"}
USUAL |= {"n_layers": 2, "n_operators": 5}
FIGURES = {"id": 0.05, "ood": 0.3, "specialization": 0.5, "by_layer": 0.6, "collapse": 0.6}
FIGURES |= {"sample": 0.001, "task": 0.01, "routed": 0.3, "null_sample": 0.1, "null_task": 0.4}
CONSTANT = 0.5


def cell(model, **changes):
    figures = dict(FIGURES)
    if model == "structural_oracle":
        figures |= {"id": 0.001, "ood": 0.002, "by_layer": 1.0}
    if model == "monolithic":
        figures = dict.fromkeys(FIGURES, np.nan) | {"id": 0.01, "ood": 0.4}
    return {"model": model} | USUAL | figures | changes


def all_models(**changes):
    return [cell(model, **changes) for model in MODELS]


def made_up(rows, n_seeds=4):
    """A result of these conditions; seeds differ by a hundredth."""
    rows = [
        row | {k: row[k] * (1 + 0.01 * seed) for k in FIGURES if k != "by_layer"} | {"seed": seed}
        for row in rows
        for seed in range(n_seeds)
    ]

    def of(name):
        return [row[name] for row in rows]

    names = ["model", "seed", *USUAL]
    coords = {name: ("cell", of(name)) for name in names}
    coords["cell"] = [str(number) for number in range(len(rows))]
    losses = np.array([of("id"), of("ood")]).T[..., None]
    constants = np.full_like(losses, CONSTANT)
    by_layer = np.array([of("by_layer"), of("by_layer"), of("specialization")]).T
    collapse = np.array([of("collapse")] * 3).T
    routing = ("cell", "split", "control", "layer")
    trained, null = (
        np.array([of(name) for name in kinds]).T
        for kinds in (("sample", "task", "routed"), ("null_sample", "null_task", "routed"))
    )
    paths = np.stack([trained, null], axis=1)[:, None]
    here = {"split": ["id"], "control": ["observed"], "layer": ["0", "1", "pooled"]}
    groups = {
        "scores": xr.Dataset(
            {
                "loss": (("cell", "split", "group"), losses),
                "loss_constant": (("cell", "split", "group"), constants),
                "chosen": ("cell", np.ones(len(rows), int)),
            },
            {"split": ["id", "ood"], "group": ["all"]},
        ),
        "specialization": xr.Dataset(
            {
                "specialization": (routing, by_layer[:, None, None]),
                "collapse": (routing, collapse[:, None, None]),
            },
            here,
        ),
        "paths": xr.Dataset(
            {"loss": (("cell", "split", "control", "path"), paths)},
            {
                "split": ["ood"],
                "control": ["trained", "untrained"],
                "path": ["sample", "task", "routed"],
            },
        ),
    }
    tree = xr.DataTree.from_dict({k: v.assign_coords(coords) for k, v in groups.items()})
    axes = {"coordinates": {name: name for name in names}, "pairs": ["seed"], "tuned": []}
    tree.attrs["axes"] = json.dumps(axes)
    tree.attrs["config"] = json.dumps({"setup": {"n_layers": 2}})
    return tree


class AllAlike:
    def objections(self, first, second, *, of_learning=False):
        return ""


def verdicts(rows, beginning):
    """The verdicts of the claim that begins so, by what its rows say of their condition."""
    claims = [one for one in STUDY.claims if one.statement.startswith(beginning)]
    assert claims, beginning
    found = judge(made_up(rows), claims, AllAlike())
    return found["verdict"].to_numpy().tolist()


FIRST = {
    "The structural oracle reaches": 1,
    "No other router": 3,
    "The OOD loss of the monolithic": 4,
    "The best path of each sample": 3,
    "The best path of each task": 3,
}


def test_the_first_claims_hold_where_they_should():
    for beginning, n in FIRST.items():
        assert verdicts(all_models(), beginning) == ["holds"] * n
    found = judge(made_up(all_models()), STUDY.claims, AllAlike())
    assert (found["verdict"] == "holds").sum() == sum(FIRST.values())
    assert set(found["verdict"].to_numpy()) == {"holds", "not run"}


@pytest.mark.parametrize(
    ("model", "change", "beginning"),
    [
        ("structural_oracle", {"ood": 0.2}, "The structural oracle reaches"),
        ("structural_oracle", {"by_layer": 0.8}, "The structural oracle reaches"),
        ("encoder", {"ood": 0.001, "by_layer": 0.99}, "No other router"),
        ("concatenation", {"ood": 0.41}, "The OOD loss of the monolithic"),
        ("structural_oracle", {"ood": 0.41}, "The OOD loss of the monolithic"),
        ("concatenation", {"sample": 0.04}, "The best path of each sample"),
        ("concatenation", {"null_sample": 0.0005}, "The best path of each sample"),
        ("cross_attention", {"task": 0.04}, "The best path of each task"),
    ],
)
def test_and_are_contradicted_when_one_figure_is_another(model, change, beginning):
    rows = [cell(name, **(change if name == model else {})) for name in MODELS]
    expected = ["holds"] * (FIRST[beginning] - 1)
    assert sorted(verdicts(rows, beginning)) == sorted([*expected, "contradicted"])


def test_networks_of_one_layer_are_left_to_claims_about_them():
    rows = all_models(n_layers=1)
    assert verdicts(rows, "No other router") == ["not run"]
    assert verdicts(rows, "The best path of each sample") == ["not run"]
    assert verdicts(rows, "With one layer the encoder's") == ["contradicted"]
    assert verdicts(rows, "With one layer no other") == ["holds"] * 2
    rows = [cell(name, n_layers=1, id=0.01) for name in ROUTERS]
    assert verdicts(rows, "With one layer the encoder's") == ["holds"]
    assert verdicts(rows, "With one layer no other") == ["contradicted"] * 2


def test_further_claims():
    encoder = [cell("encoder"), cell("encoder", selection_bottleneck=1, specialization=0.7)]
    assert verdicts(encoder, "The selection bottleneck") == ["holds"]
    encoder[1]["specialization"] = 0.4
    assert verdicts(encoder, "The selection bottleneck") == ["contradicted"]

    lower = [cell(name, objective="all_paths", id=0.0005) for name in MODULAR]
    assert verdicts(all_models() + lower, "All paths lower") == ["holds"] * 3
    assert verdicts(all_models() + lower, "All paths raise") == ["contradicted"]
    higher = [cell(name, objective="all_paths", id=0.1) for name in MODULAR]
    assert verdicts(all_models() + higher, "All paths lower") == ["contradicted"] * 3
    assert verdicts(all_models() + higher, "All paths raise") == ["holds"]

    three = [cell("encoder", n_operators=3, ood=0.4)]
    assert verdicts([cell("encoder"), *three], "OOD loss falls") == ["holds"]
    assert verdicts([cell("encoder", ood=0.5), *three], "OOD loss falls") == ["contradicted"]

    bottlenecks = [
        cell("encoder"),
        cell("encoder", functional_bottleneck="attention", ood=0.5),
        cell("encoder", functional_bottleneck="none", collapse=0.1),
    ]
    same = "Functional bottlenecks, oracle and attention"
    assert verdicts(bottlenecks, same) == ["holds"] * 2
    assert verdicts(bottlenecks, "Without functional") == ["holds"]
    bottlenecks[1]["ood"], bottlenecks[2]["collapse"] = 0.7, 0.4
    assert verdicts(bottlenecks, same) == ["contradicted", "holds"]
    assert verdicts(bottlenecks, "Without functional") == ["contradicted"]
    bottlenecks[2]["collapse"] = 0.0
    assert verdicts(bottlenecks, "Without functional") == ["holds"]


# Views, on figures that were made up


def test_a_specialized_network_shows_a_diagonal():
    """Operations go to modules 1, 2, 0 in one seed, 4, 3, 2 in another: each a diagonal."""
    tree = made_up([cell("encoder")], n_seeds=2)
    scores = tree["specialization"].to_dataset()
    sent = np.array([[1, 2, 0], [4, 3, 2]])
    one_hot = np.eye(5)[sent]
    dims = ("cell", "split", "layer")
    wide = [np.repeat(a[:, None, None], 3, axis=2) for a in (one_hot, sent, one_hot.mean(1))]
    tree["specialization"] = xr.DataTree(
        scores.assign(
            activation=((*dims, "operation", "module"), wide[0]),
            assignment=((*dims, "operation"), wide[1]),
            utilisation=((*dims, "module"), wide[2]),
        ).assign_coords(operation=["add", "subtract", "multiply"], module=range(5))
    )
    panels = [axis for axis in STUDY.views["activation"](tree).axes if axis.images]
    assert len(panels) >= 3
    for axis in panels[:3]:
        assert np.allclose(axis.images[0].get_array(), np.eye(3, 5))
    assert "activation" in tree["specialization"].data_vars


def test_modules_without_an_operation_come_last_the_busiest_first():
    tree = made_up([cell("encoder")], n_seeds=1)
    dims = ("cell", "split", "layer")
    shares = np.array([[0.1, 0.2, 0.3, 0.4], [0.1, 0.2, 0.3, 0.4]])
    scores = (
        tree["specialization"]
        .to_dataset()
        .assign(
            activation=((*dims, "operation", "module"), np.tile(shares, (1, 1, 3, 1, 1))),
            assignment=((*dims, "operation"), np.tile([2, -1], (1, 1, 3, 1))),
            utilisation=((*dims, "module"), np.tile([0.1, 0.2, 0.3, 0.4], (1, 1, 3, 1))),
        )
    )
    tree["specialization"] = xr.DataTree(scores.assign_coords(operation=["add", "sine"]))
    image = next(axis.images[0] for axis in STUDY.views["activation"](tree).axes if axis.images)
    assert image.get_array()[0].tolist() == pytest.approx([0.3, 0.4, 0.2, 0.1])


def test_specialization_stands_against_collapse_and_what_is_attainable():
    tree = made_up([cell("encoder"), cell("monolithic")], n_seeds=2)
    both = xr.concat([tree["specialization"].to_dataset()] * 2, "control")
    scores = both.assign_coords(control=["observed", "shuffled"]).assign(
        seen=("operation", [7, 7, 7, 0]), utilisation=("module", np.full(6, 1 / 6))
    )
    counts = {name: scores[name].expand_dims(cell=scores["cell"], layer=scores["layer"])
              for name in ("seen", "utilisation")}  # fmt: skip
    tree["specialization"] = xr.DataTree(scores.assign(counts))
    axes = specialization(tree).axes
    assert [axis.get_title() for axis in axes] == ["layer 0", "layer 1", "all layers"]
    lines = {str(line.get_label()): line.get_data() for line in axes[2].lines}
    # Three operations that occur, six modules.
    attainable = math.log(3) / math.log(6)
    assert lines["attainable"][0] + lines["attainable"][1] == pytest.approx(
        [1, 1 + attainable, 1 + attainable]
    )
    assert [value[0] for value in lines["a module for\neach operation"]] == [attainable, 1.0]
    x, y = lines["encoder"]
    assert list(x) == pytest.approx([0.6, 0.606])
    assert list(y) == pytest.approx([0.5, 0.505])
    assert "monolithic" not in lines


# The setup and the presets


def test_the_paper_has_a_cell_for_each_condition_that_differs():
    cells = cells_of("paper")
    # Three routers with and without bottleneck, the structural oracle, both objectives; and one
    # network without modules.
    conditions = (3 * 2 + 1) * 2 + 1
    assert len(cells) == conditions * 5 * 6 * 5
    assert {cell.task.n_operators for cell in cells} == {3, 5, 7, 10, 15}
    assert {cell.task.n_points for cell in cells} == {150, 500, 1000, 5000, 10_000, 20_000}
    first = next(cell for cell in cells if cell.model == "encoder")
    network = first.build(torch.Generator()).config
    assert (network.n_modules, network.pool.d_mlp, network.pool.depth) == (30, 300, 2)
    assert (network.n_layers, network.functional_bottleneck) == (2, "oracle")
    single = next(cell for cell in cells if cell.model == "monolithic")
    assert single.build(torch.Generator()).config.d_mlp == 9000
    training = first.training
    assert (training.n_steps, training.batch_size, training.learning_rate) == (50_000, 256, 3e-4)
    assert training.weight_decay == 0
    assert (first.task.n_id, first.task.n_ood, first.task.length) == (200, 2000, 2)


PRESETS = {
    "smoke": (10, 20, 4),
    "laptop": (15, 6000, 10),
    "selection": (42, 3000, 10),
    "operators": (120, 3000, 10),
    "functional": (36, 3000, 10),
    "keys": (27, 3000, 10),
    "one_layer": (12, 3000, 25),
    "true_modules": (12, 3000, 10),
    "learning_rate": (15, 6000, 10),
    "paper": (2250, 50_000, 30),
    "paper-functional": (60, 50_000, 30),
    "paper-keys": (60, 50_000, 30),
    "paper-one-layer": (20, 50_000, 30),
    "paper-true-modules": (20, 50_000, 30),
}
"""Cells, steps of training, and modules."""


@pytest.mark.parametrize("preset", STUDY.presets)
def test_every_preset_trains_its_networks(preset):
    cells = cells_of(preset)
    sizes = {(len(cells), one.training.n_steps, one.n_modules) for one in cells}
    assert sizes == {PRESETS[preset]}
    kinds = {}
    for one in cells:
        kind = small(one, **{"training.learning_rate": 3e-3, "seed": 0})
        kinds.setdefault(kind, kind)
    for setup in kinds:
        model = setup.build(torch.Generator().manual_seed(0)).train()
        loss = setup.loss(model, setup.sampler().batch("train", 0, 4), 0)
        assert loss.isfinite()
        loss.backward()


def test_the_objective_is_that_of_the_cell():
    cells = {
        (one.model, one.objective): one
        for one in cells_of("smoke", "objective=sampled,all_paths", "seed=0")
    }
    assert set(cells) == {(m, o) for m in MODULAR for o in ("sampled", "all_paths")} | {
        ("monolithic", "sampled")
    }
    for (router, objective), one in cells.items():
        model = one.build(torch.Generator().manual_seed(0)).eval()
        batch = one.sampler().batch("train", 0, 16)
        if objective == "all_paths":
            expected = mechanisms.all_paths_loss(model, batch.inputs, batch.targets)
        else:
            expected = (model(batch.inputs) - batch.targets).square().mean()
        assert torch.allclose(one.loss(model, batch, 0), expected), router


def test_the_temperature_falls_geometrically():
    changes = {"temperature": 4.0, "final_temperature": 1.0, "training.n_steps": 101}
    setup = settings.put(STUDY.setup, changes)
    assert [setup.temperature_at(step) for step in (0, 50, 100)] == pytest.approx([4, 2, 1])
    (usual,) = cells_of("laptop", "model=encoder", "seed=0")
    assert usual.temperature_at(0) == 3
    assert usual.temperature_at(5999) == pytest.approx(0.5)


def test_the_entropy_of_all_paths_counts_by_its_weight():
    cells = cells_of("smoke", "model=encoder", "objective=all_paths", "entropy=0.5", "seed=0")
    model = cells[0].build(torch.Generator().manual_seed(0)).eval()
    batch = cells[0].sampler().batch("train", 0, 16)
    loss = cells[0].loss(model, batch, 0)
    given = model, batch.inputs, batch.targets
    assert torch.allclose(loss, mechanisms.all_paths_loss(*given, entropy=0.5))
    assert not torch.allclose(loss, mechanisms.all_paths_loss(*given))


@pytest.mark.parametrize("step", [0, 100])
def test_paths_are_sampled_at_the_temperature_of_the_step(step):
    (cell,) = cells_of("smoke", "model=encoder", "seed=0")
    changes = {"temperature": 4.0, "final_temperature": 1.0, "training.n_steps": 101}
    setup = settings.put(cell, changes)
    batch = setup.sampler().batch("train", 0, 16)

    def gradients(loss):
        model = setup.build(torch.Generator().manual_seed(0)).train()
        torch.manual_seed(0)
        loss(model).backward()
        return [one.grad for one in model.parameters() if one.grad is not None]

    def at(temperature):
        return lambda model: mechanisms.sampled_path_loss(
            model, batch.inputs, batch.targets, temperature=temperature
        )

    found = gradients(lambda model: setup.loss(model, batch, step))
    same = {
        t: all(map(torch.allclose, found, gradients(at(t))))
        for t in (setup.temperature, setup.final_temperature)
    }
    assert same == {4.0: step == 0, 1.0: step == 100}


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("model=router", "model must be one of structural_oracle, .*got 'router'"),
        ("objective=mean", "objective must be one of sampled, all_paths, got 'mean'"),
        ("n_layers=3", "n_layers must be 1 or 2, got 3"),
        ("seed=1,1", "values of seed must be different from one another"),
        ("n_validation=49", "n_validation must be at most 48, got 49"),
        ("task.n_operators=16", r"n_operators must be .*, got 16"),
        ("n_module=3", "unknown setting 'n_module'; nearest are n_modules"),
    ],
)
def test_wrong_settings_are_refused(setting, message):
    with pytest.raises(ValueError, match=message):
        STUDY.plan("smoke", [setting])
