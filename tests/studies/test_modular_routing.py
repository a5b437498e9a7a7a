import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import mechanisms
from studies.engine import Resources, read_result, run, settings
from studies.engine.checkpoints import load_weights
from studies.engine.examples import Examples
from studies.engine.trained import Trained
from studies.measures.modular_routing import (
    measure_combinations,
    measure_gaps,
    measure_paths,
    measure_specialization,
)
from studies.modular_routing import SIZES, STUDY, TUNING
from studies.setups.equations import MODELS, MODULAR

pytestmark = pytest.mark.slow

SMOKE = ["model=cross_attention,monolithic", "selection_bottleneck=false,true", "seed=0"]
PLANS = {name: study for study in (TUNING, SIZES, STUDY) for name in study.presets}
"""The study of each preset."""


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs")
    return run(STUDY, "smoke", SMOKE, resources=Resources(root=out, workers=1))


@pytest.fixture(scope="module")
def result(smoke):
    return read_result(smoke / "result.nc")


def cells_of(preset, *changes):
    return PLANS[preset].plan(preset, list(changes)).cells


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
    # The networks have learned modules, two layers and one size.
    expected -= {"true_modules", "keys_of_true_modules", "keys_end_to_end", "one_layer"}
    expected -= {"collapse_by_functional_bottleneck", "detailed_losses", "detailed_routing"}
    # Nothing was chosen.
    expected -= {"tuning"}
    expected -= {f"{split}_{few}_operators" for split in ("id", "ood") for few in ("few", "many")}
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
    linear = ["input_encoder=linear", "seed=0", *changes]
    (setup,) = cells_of("smoke", "model=structural_oracle", f"pool={pool}", *linear)
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


def test_modules_of_combinations_are_those_of_their_operators():
    scores = measure_combinations(planted(right=True), n=300, kept=4)
    assert (scores["digits"] == 0).all()
    for split, n_kept in (("id", 4), ("ood", 3)):
        part = scores.sel(split=split)
        names = [name for name in part["name"].to_numpy() if name]
        assert len(names) == n_kept
        for row, name in enumerate(names):
            modules = part["activation"].isel(combination=row).argmax("module").to_numpy()
            chosen = [("add", "subtract", "multiply")[module] for module in modules]
            assert chosen == name.split(", ")
    assert np.isnan(scores["activation"].sel(split="ood", combination=3)).all()


def test_choices_that_depend_on_the_digits_have_an_entropy():
    trained = planted(right=True)
    with torch.no_grad():
        # The first number decides, whatever the operator: module 1 above 0, else module 0.
        model, setup = trained.model, trained.setup
        for parameter in model.parameters():
            parameter.zero_()
        model.W_E[0, 0] = 1
        model.router.W_Q[:, 0, 0] = 1
        model.router.matching.keys[:, 1, 0] = 10
        model.router.variable_scores.fill_(-torch.inf)[:, 0] = 0
    scores = measure_combinations(trained, n=600).sel(split="ood")
    batch = setup.sampler().batch("ood", 0, 600)
    shares = [
        (batch.inputs[batch.latents["task"] == task, 0, 0] > 0).double().mean().item()
        for task in batch.latents["task"].unique()
    ]
    entropy = [-p * math.log(p) - (1 - p) * math.log(1 - p) for p in shares]
    expected = np.mean(entropy) / math.log(3)
    assert scores["digits"].to_numpy() == pytest.approx(expected, rel=1e-6)


class Shifted(nn.Module):
    """A network whose answers are off by a tenth."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, inputs):
        return self.network(inputs) + 0.1

    def all_paths(self, inputs):
        answers, probabilities = self.network.all_paths(inputs)
        return answers + 0.1, probabilities


class FirstNumber(nn.Module):
    """A network without the modules that any combination needs."""

    def forward(self, inputs):
        return inputs[:, 0, :1]

    def all_paths(self, inputs):
        return inputs[:, 0, :1].expand(-1, 9), None


def test_a_gap_is_that_of_the_path_the_read_out_or_the_modules():
    def losses(trained):
        return measure_gaps(trained, n=300)["loss"].mean("task").to_numpy()

    right = planted(right=True)
    assert (losses(right) < 1e-12).all()
    shifted = replace(planted(right=True), model=Shifted(right.model))
    routed, path, read_out = losses(shifted)
    assert routed == pytest.approx(0.01, rel=1e-3) == path
    assert read_out < 1e-12
    routed, path, read_out = losses(planted(right=False))
    assert path < 1e-12 < 0.05 < routed
    routed, path, read_out = losses(replace(planted(right=True), model=FirstNumber()))
    assert routed == path > read_out > 0.01


def test_gaps_are_chosen_on_other_examples_than_they_are_scored_on():
    """Random answers: the best path and read-out of one half do not help the other."""
    trained = planted(right=True)

    class Noise(nn.Module):
        def forward(self, inputs):
            return torch.zeros(len(inputs), 1)

        def all_paths(self, inputs):
            generator = torch.Generator().manual_seed(int(inputs[0, 0, 0] * 1e6))
            return torch.randn(len(inputs), 500, generator=generator), None

    loss = measure_gaps(replace(trained, model=Noise()), n=300)["loss"]
    assert sorted(loss["task"].to_numpy()) == sorted(
        trained.task.task_names[number] for number in trained.task.tasks("ood")
    )
    assert loss["stage"].to_numpy().tolist() == ["routed", "path", "read-out"]
    routed, path, read_out = loss.mean("task").to_numpy()
    # Noise of variance 1, and the best constant.
    assert path == pytest.approx(1 + routed, rel=0.2)
    assert read_out == pytest.approx(routed, rel=0.2)


def test_measures_do_not_apply_to_a_network_without_modules():
    (setup,) = cells_of("smoke", "model=monolithic", "seed=0")
    trained = Trained(setup, None, 0, "cpu", Examples(setup, "cpu").fresh("test"))
    assert measure_specialization(trained) is None
    assert measure_paths(trained) is None
    assert measure_gaps(trained) is None
    assert measure_combinations(trained) is None


def test_a_network_of_one_layer_has_to_perform_combinations():
    (setup,) = cells_of("one_layer", "model=encoder", "seed=0", "task.seed=0")
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


# The setup and the presets


def test_the_paper_has_a_cell_for_each_condition_that_differs():
    cells = cells_of("paper")
    # Three routers with and without bottleneck, the structural oracle, both objectives; and one
    # network without modules.
    conditions = (3 * 2 + 1) * 2 + 1
    assert len(cells) == conditions * 4 * 4 * 5
    first = next(cell for cell in cells if cell.model == "encoder")
    network = first.build(torch.Generator()).config
    assert (network.n_modules, network.pool.d_mlp, network.pool.depth) == (30, 300, 2)
    assert (network.n_layers, network.functional_bottleneck) == (2, "oracle")
    assert (network.input_encoder, network.choice) == ("mlp", "pair")
    single = next(cell for cell in cells if cell.model == "monolithic")
    assert single.build(torch.Generator()).config.d_mlp == 9000
    assert (first.task.n_id, first.task.n_ood, first.task.length) == (200, 2000, 2)


def test_sizes_are_swept_for_the_methods_of_the_papers_figure_4():
    cells = cells_of("paper-sizes")
    methods = {(one.model, one.objective, one.selection_bottleneck) for one in cells}
    on_all_paths = {("encoder", "all_paths", False), ("encoder", "all_paths", True)}
    assert methods == {(model, "sampled", False) for model in MODELS} | on_all_paths
    assert len(cells) == len(methods) * 5 * 6 * 5


def test_sizes_have_a_grid_of_their_own():
    cells = SIZES.plan("laptop").cells
    assert {cell.task.n_operators for cell in cells} == {3, 5}
    assert len(cells) == 2 * len(STUDY.plan("laptop").cells)


PRESETS = {
    "smoke": (10, 20, 4),
    "laptop": (15, 6000, 10),
    "pairs": (150, 6000, 10),
    "selection": (14 * 6, 6000, 10),
    "end_to_end": (5 * 28, 6000, 10),
    "operators": (40 * 6, 6000, 20),
    "near-a-decision": (8 * 28, 6000, 20),
    "specialization": (4 * 50, 6000, 20),
    "ten-to-fifteen": (4 * 100, 6000, 20),
    "more-points": (2 * 40, 6000, 20),
    "points": (2 * 6, 6000, 10),
    "functional": (12 * 6, 6000, 10),
    "keys": (9 * 6, 6000, 10),
    "one_layer": (4 * 14, 6000, 25),
    "true_modules": (7 * 28, 6000, 10),
    "bottlenecks": (2 * 24, 6000, 10),
    "all_paths": (2 * 24, 6000, 10),
    "second_best": (2 * 78, 6000, 10),
    "all-paths": (3 * 12 * 4, 6000, 10),
    "paper": (1200, 50_000, 30),
    "paper-sizes": (1050, 50_000, 30),
    "paper-true-modules": (140, 50_000, 30),
    "paper-functional": (720, 50_000, 30),
    "paper-one-layer": (160, 50_000, 30),
    "paper-keys": (1280, 50_000, 30),
}
"""Cells, steps of training, and modules."""


@pytest.mark.parametrize("preset", PLANS)
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


# Where rates are chosen, no paths are measured.
@pytest.mark.parametrize("preset", [name for name in PLANS if PLANS[name] is not TUNING])
def test_every_held_out_combination_has_enough_examples_to_choose_its_path(preset):
    plan = PLANS[preset].plan(preset, [])
    paths = plan.measures["paths"]
    for setup in {cell.task: cell for cell in plan.cells}.values():
        batch = setup.sampler().batch("ood", 0, paths.n)
        fewest = batch.latents["task"].unique(return_counts=True)[1].min()
        # One half chooses, the other is scored.
        assert fewest // 2 >= max(paths.examples)


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
    (usual,) = cells_of("laptop", "model=concatenation", "seed=0")
    assert usual.temperature_at(0) == 3
    assert usual.temperature_at(5999) == pytest.approx(0.5)


@pytest.mark.parametrize("preset", [name for name in PLANS if name != "smoke"])
def test_settings_that_were_tuned_are_those_of_every_preset_but_the_papers(preset):
    found = {}
    for one in cells_of(preset):
        found.setdefault((one.model, one.objective), set()).add(
            (one.training.learning_rate, one.temperature, one.entropy)
        )
    for (model, objective), settings_ in found.items():
        if preset.startswith("paper"):
            assert settings_ == {(3e-4, 3.0, 0.0)}
        elif preset == "all-paths":
            assert len(settings_) == 12
        else:
            rate = 1e-3 if model == "encoder" else 3e-3
            temperature = {"structural_oracle": 10, "encoder": 10, "cross_attention": 30}
            entropy = 0.03 if objective == "all_paths" else 0
            assert settings_ == {(rate, temperature.get(model, 3), entropy)}


def test_settings_are_tuned_alike():
    tried = {}
    for one in TUNING.plan("laptop").cells:
        tried.setdefault(one.model, []).append((one.training.learning_rate, one.temperature))
        assert one.seed >= 100
    for model, settings_ in tried.items():
        # One router was best at the highest of three temperatures, another at the lowest.
        assert len(set(settings_)) == 12 + 4 * (model in ("cross_attention", "concatenation"))
        assert len(settings_) == 3 * len(set(settings_))
    assert set(tried) == {*MODULAR, "monolithic"}


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
        ("task.length=1", "task.length must be at least 2, got 1"),
        ("task.n_operators=16", r"n_operators must be .*, got 16"),
        ("n_module=3", "unknown setting 'n_module'; nearest: n_modules"),
    ],
)
def test_wrong_settings_are_refused(setting, message):
    with pytest.raises(ValueError, match=message):
        STUDY.plan("smoke", [setting])
