import enum
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from studies.engine import Claim, Preset, Study, metric
from studies.engine.execution import Resources, run
from studies.engine.results import read_result
from studies.engine.study import TAKEN
from tests.studies.engine.toy import TOY, LargestConfig, ToySetup, Weights


def cells_of(plan):
    """The model, width, seed and learning rate of each cell."""
    return [(cell.model, cell.width, cell.seed, cell.training.learning_rate) for cell in plan.cells]


def test_cells_are_all_combinations_of_the_axes():
    assert cells_of(TOY.plan()) == [
        ("mlp", 8, 0, 0.01),
        ("mlp", 8, 1, 0.01),
        ("linear", 8, 0, 0.01),
        ("linear", 8, 1, 0.01),
    ]


def test_any_setting_can_be_an_axis():
    plan = TOY.plan("laptop", ["width=4,8", "model=mlp", "seed=3"])
    assert cells_of(plan) == [("mlp", 4, 3, 0.01), ("mlp", 8, 3, 0.01)]
    assert [plan.coordinates(cell)["width"] for cell in plan.cells] == [4, 8]
    nested = TOY.plan("laptop", ["task.shift=0.5,1.5", "model=mlp", "seed=0"])
    assert [cell.task.shift for cell in nested.cells] == [0.5, 1.5]
    assert nested.axes["shift"] == "task.shift"


def test_the_values_of_a_repeated_setting_add_up():
    plan = TOY.plan("laptop", ["training.keep_at=10", "training.keep_at=20,30", "seed=0"])
    assert [cell.training.keep_at for cell in plan.cells[:2]] == [(10,), (20, 30)]
    assert plan.coordinates(plan.cells[1])["keep_at"] == "20,30"


def test_a_setting_that_does_not_apply_to_a_model_makes_no_cells():
    plan = TOY.plan("laptop", ["width=4,8", "seed=0"])
    assert cells_of(plan) == [("mlp", 4, 0, 0.01), ("mlp", 8, 0, 0.01), ("linear", 4, 0, 0.01)]
    assert plan.coordinates(plan.cells[2])["width"] is None


def test_axes_and_the_command_line_win_over_implied_settings():
    where = {"model": {"linear": "training.learning_rate=0.3 task.shift=2.0"}}
    study = replace(TOY, where=where)
    assert cells_of(study.plan("laptop", ["seed=0"]))[1] == ("linear", 8, 0, 0.3)
    assert study.plan("laptop", ["seed=0"]).cells[1].task.shift == 2.0
    changed = study.plan("laptop", ["seed=0", "training.learning_rate=0.7"])
    assert {cell.training.learning_rate for cell in changed.cells} == {0.7}
    assert {rate for *_, rate in cells_of(study.plan("rates"))} == {1e-3, 1e-2}


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ({"model": {"mpl": "width=16"}}, "`where` must be of models mlp, linear, got mpl"),
        ({"modle": {"mlp": "width=16"}}, "unknown setting 'modle'"),
        ({"model": {"mlp": "width=8,16"}}, "width must have a single value in 'width=8,16', got"),
    ],
)
def test_implied_settings_that_would_not_apply_are_refused(where, message):
    with pytest.raises(ValueError, match=message):
        replace(TOY, where=where).plan()


def test_presets_change_settings_of_cells_and_measures():
    plan = TOY.plan("wide")
    assert plan.cells[0].width == 16
    assert plan.measures["weights"] == Weights(30)
    assert plan.measures["scores"].n_test == 4096
    measures = TOY.plan("wide", ["weights.n=7", "scores.n_test=50"]).measures
    assert (measures["weights"].n, measures["scores"].n_test) == (7, 50)


def test_a_preset_can_replace_the_setup_and_the_grids():
    setup = replace(TOY.setup, task=LargestConfig(n=6))
    preset = Preset(setup=setup, grids=({"seed": (5,)}, {"width": (2, 3)}))
    plan = replace(TOY, presets={"other": preset}).plan("other")
    assert [(c.task.n, c.seed, c.width) for c in plan.cells] == [(6, 5, 8), (6, 0, 2), (6, 0, 3)]


def test_a_preset_can_leave_measures_out(tmp_path):
    fewer = {"all": Preset(), "fewer": Preset(measures=("hidden",)), "none": Preset(measures=())}
    study = replace(TOY, presets=fewer)
    assert {name: set(study.plan(name).measures) - {"scores", "costs"} for name in fewer} == {
        "all": {"weights", "hidden"},
        "fewer": {"hidden"},
        "none": set(),
    }
    steps = ["training.n_steps=2", "training.evaluate_every=1"]
    folder = run(study, "none", steps, resources=Resources(root=tmp_path))
    assert set(read_result(folder / "result.nc")) >= {"scores", "costs", "training", "claims"}
    with pytest.raises(ValueError, match="unknown setting 'weights\\.n'"):
        study.plan("fewer", ["weights.n=3"])


@pytest.mark.parametrize(
    ("changes", "cells"),
    [
        (["model=linear"], {("linear", 1, 40), ("linear", 0, 40)}),
        (["model=mlp"], {("mlp", 2, 40), ("mlp", 1, 40)}),
        (["model=mlp", "seed=1"], {("mlp", 1, 40)}),
        (["seed=0"], {("linear", 0, 40)}),
        (["seed=1,0"], {("mlp", 1, 40), ("linear", 1, 40), ("linear", 0, 40)}),
        # Not all of these are in the grids, so they replace what is there.
        (["seed=2,5"], {("mlp", 2, 40), ("mlp", 5, 40), ("linear", 2, 40), ("linear", 5, 40)}),
        # No grid has steps.
        (["seed=0", "training.n_steps=1,2"], {("linear", 0, 1), ("linear", 0, 2)}),
    ],
)
def test_values_that_grids_have_select_their_cells(changes, cells):
    grids = ({"model": ("mlp",), "seed": (2, 1)}, {"model": ("linear",), "seed": (1, 0)})
    plan = replace(TOY, presets={"own": Preset(grids=grids)}).plan("own", changes)
    assert {(cell.model, cell.seed, cell.training.n_steps) for cell in plan.cells} == cells


def test_changes_of_a_preset_do_not_replace_the_values_of_its_grids():
    grids = ({"seed": (0, 1)}, {"seed": (0,), "training.n_steps": (20,)})
    study = replace(TOY, presets={"own": Preset(changes="training.n_steps=40", grids=grids)})
    with pytest.raises(
        ValueError, match=r"got training\.n_steps of 40 in the changes and 20 in the"
    ):
        study.plan("own")
    some = replace(TOY, presets={"some": Preset(changes="seed=0", grids=grids)}).plan("some")
    assert [(cell.seed, cell.training.n_steps) for cell in some.cells] == [(0, 40), (0, 20)]
    # Those of the study's own grids are replaced.
    study = replace(TOY, grids=grids, presets={"others": Preset(changes="seed=7")})
    assert {cell.seed for cell in study.plan("others").cells} == {7}


def test_the_name_of_the_folder_depends_on_all_settings():
    names = {
        TOY.plan(preset, changes).folder_name
        for preset, changes in (
            ("laptop", []),
            ("wide", []),
            ("laptop", ["weights.n=30"]),
            ("laptop", ["seed=0"]),
            ("laptop", ["training.n_steps=41"]),
        )
    }
    assert len(names) == 5
    assert TOY.plan().folder_name == TOY.plan("laptop", ["width=8"]).folder_name


@pytest.mark.parametrize(
    ("preset", "change", "message"),
    [
        ("huge", "seed=0", "preset must be one of laptop, wide, rates, got 'huge'"),
        ("laptop", "sed=0", "unknown setting 'sed'; nearest: seed"),
        ("laptop", "weights.m=0", "unknown setting 'weights.m'; nearest: weights.n"),
        ("laptop", "wieghts.n=0", "unknown setting 'wieghts.n'; nearest: weights.n"),
        ("laptop", "seed", "settings must look like key=value, got 'seed'"),
        ("laptop", "seed=0,0", "values of seed must be different"),
        ("laptop", "seed=", "seed must have a value, got none"),
        ("laptop", "seed=3000", "seed must be a whole number from 0 to 2047, got 3000"),
        ("laptop", "weights.n=1,2", "weights.n must have a single value"),
        ("laptop", "model=tree", "model must be one of mlp, linear, got 'tree'"),
        ("laptop", "training.n_steps=0", "n_steps must be at least 1, got 0"),
        ("laptop", "n_validation=0", "n_validation must be at least 1, got 0"),
    ],
)
def test_wrong_settings_are_refused(preset, change, message):
    with pytest.raises(ValueError, match=message):
        TOY.plan(preset, [change])


def test_grids_may_have_numbers_of_numpy():
    study = replace(TOY, grids=({"seed": np.arange(2), "width": np.array([4, 8])},))
    plain = replace(TOY, grids=({"seed": (0, 1), "width": (4, 8)},))
    assert study.plan() == replace(plain.plan(), study=study)
    assert {type(cell.seed) for cell in study.plan().cells} == {int}
    assert {type(value) for value in study.plan().coordinates(study.plan().cells[0]).values()} == {
        int,
        str,
    }


@dataclass(frozen=True, kw_only=True)
class Recurrent(ToySetup):
    """A setup whose axis would have the name of a dim of results."""

    cell: str = "lstm"


@dataclass(frozen=True, kw_only=True)
class Metrical(ToySetup):
    """A setup with a setting that has the name of a metric."""

    accuracy: float = 0.1


def test_axes_that_have_names_of_variables_of_results_are_refused_before_training():
    study = replace(TOY, setup=Metrical(**vars(TOY.setup)))
    with pytest.raises(ValueError, match=r"axes must not be named accuracy, .*, got accuracy"):
        study.plan("laptop", ["accuracy=0.1,0.2"])
    # Those of a group have a longer name.
    plan = TOY.plan("laptop", ["training.batch_size=8,16"])
    assert plan.axes["training_batch_size"] == "training.batch_size"


def test_names_of_all_variables_of_results_are_taken(tmp_path):
    folder = run(TOY, changes=["training.n_steps=10"], resources=Resources(root=tmp_path))
    result = read_result(folder / "result.nc")
    found = {name for group in ("training", "costs") for name in result[group].data_vars}
    of_metrics = {"accuracy", "loss", "operations_in_training", "depth_in_training"}
    assert found - of_metrics <= TAKEN


@pytest.mark.parametrize(
    ("grids", "message"),
    [
        ((), "grids must have cells, got"),
        (({"seed": ()},), "grids must have cells, got"),
        (({"cell": ("lstm", "gru")},), "axes must not be named accuracy, .* cell, .*, got cell"),
    ],
)
def test_wrong_grids_are_refused_before_training(grids, message):
    setup = Recurrent(**vars(TOY.setup))
    with pytest.raises(ValueError, match=message):
        replace(TOY, setup=setup, grids=grids).plan()


class Kind(enum.Enum):
    ONE = 1


@dataclass(frozen=True, kw_only=True)
class Open(ToySetup):
    """A setup with a setting of any type."""

    option: Any = 0


@pytest.mark.parametrize(
    "value",
    [
        Path("x"), Kind.ONE, torch.float32, frozenset({1}), torch.ones(2), [1, 2], (1, [2]),
        np.ones(2), range(2),
    ],
)  # fmt: skip
@pytest.mark.parametrize("where", ["setup", "grid", "measure"])
def test_settings_of_other_types_are_refused_with_their_path(where, value):
    @dataclass(frozen=True)
    class Measuring:
        option: Any = field(default_factory=lambda: value)

    study = replace(TOY, setup=Open(**vars(TOY.setup)))
    found = value[1] if isinstance(value, tuple) else value
    message = f"setting {'m.' if where == 'measure' else ''}option must be None, a bool, .*, got "
    message += f"{re.escape(repr(found))} of type {type(found).__name__}"
    if where == "setup":
        study = replace(study, setup=replace(study.setup, option=value))
    elif where == "grid":
        study = replace(study, grids=({"option": (1, value)},))
    else:
        study = replace(study, measures={"m": Measuring()}, along_training=())
    with pytest.raises(TypeError, match=message):
        study.plan()


def without_annotation(trained, layer=None):
    return layer


def test_settings_whose_type_cannot_be_written_as_text_are_refused_with_their_path():
    setup, measures = Open(**vars(TOY.setup)), {"m": without_annotation}
    study = replace(TOY, setup=setup, measures=measures, along_training=())
    assert len(study.plan().cells) == 4
    for change, hint in (("option=3", "typing.Any"), ("m.layer=3", "NoneType")):
        path = change.partition("=")[0]
        message = f"setting {path} must be annotated as bool, int, .* given as text, got {hint}"
        with pytest.raises(TypeError, match=message):
            study.plan("laptop", [change])
    assert study.plan("laptop", ["m.layer=none"]).measures["m"].layer is None


def scaled(factor):
    def scale(value):
        return factor * value

    return scale


def test_cells_that_share_a_name_are_refused():
    """As of two functions of one name, since folders are named by names of functions."""
    study = replace(TOY, setup=Open(**vars(TOY.setup)))
    assert len(replace(study, grids=({"option": (abs, round)},)).plan().cells) == 2
    grids = ({"option": (scaled(1), scaled(2))},)
    with pytest.raises(ValueError, match=r"values of option must have different names, .* scaled"):
        replace(study, grids=grids).plan()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"measures": {"scores": Weights()}}, "measures must not be named scores"),
        ({"along_training": ("nothing",)}, "along_training must name measures, got nothing"),
        ({"tuned": ("rate",)}, "unknown setting 'rate'"),
        ({"presets": {"a": Preset(measures=("no",))}}, "must be of weights, hidden, got no"),
        ({"trained": replace(TOY.trained, metric="f1")}, "trained.metric must be one of accuracy"),
        ({"claims": TOY.claims * 2}, "claims must have different statements"),
        (
            {"claims": (replace(TOY.claims[0], of={"modle": "mlp"}),)},
            "coordinates of a claim must be .* of .*; got modle in 'hidden units help'",
        ),
    ],
)
def test_inconsistent_studies_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(TOY, **changes)


def test_the_default_table_shows_each_metric_on_each_split():
    study = Study(name="plain", question="?", setup=TOY.setup, grids=({},))
    labels = [row.label for row in study.table.rows]
    assert labels == ["accuracy, id", "accuracy, ood", "loss, id", "loss, ood"]


def test_claims_need_exceeds_or_equals_and_a_margin():
    claim = {"statement": "s", "source": "ours", "reading": metric("accuracy", "id"), "of": {}}
    with pytest.raises(ValueError, match="either exceeds or equals must be given, got"):
        Claim(**claim)
    with pytest.raises(ValueError, match="margin must be greater than 0 with equals, got 0"):
        Claim(**claim, equals=0.5)
