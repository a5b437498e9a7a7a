"""Models of finished runs in the zoo, and studies that take models from it."""

import json
from dataclasses import dataclass, replace

import netCDF4
import pytest
import torch
import typer
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import mechanisms
from mechanisms import model_zoo
from studies.engine import Resources, RunError, read_result, run, settings, zoo
from studies.engine.cells import identity_of_weights
from studies.engine.checkpoints import read_log
from studies.engine.execution import Run
from studies.zoo import run_zoo, setup_of
from tests.studies.command_line import command_line
from tests.studies.engine.toy import TOY, TRAINING, ToySetup

NAME = "toy-n{task.n}-seed{seed}"
NAMES = ["toy-n4-seed0", "toy-n4-seed1"]


@dataclass(frozen=True, kw_only=True)
class LargestSetup(ToySetup):
    """The toy, learned by a transformer too; notes which models are trained."""

    def models(self):
        return ("transformer", *super().models())

    def build(self, generator):
        if self.model != "transformer":
            return super().build(generator)
        config = mechanisms.TransformerConfig(
            d_input=self.task.n,
            d_output=self.task.n,
            d_model=8,
            n_layers=1,
            n_readout=1,
            max_distance=2,
            attention=mechanisms.AttentionConfig(n_heads=2, d_head=4),
            feed_forward=mechanisms.FeedForwardConfig(d_mlp=8),
        )
        return mechanisms.Transformer(config, generator=generator)

    def loss(self, model, batch, step):
        TRAINED.append(self.model)
        return super().loss(model, batch, step)


TRAINED: list[str] = []


STUDY = replace(
    TOY,
    name="largest",
    setup=LargestSetup(
        model="transformer", training=replace(TRAINING, keep_at=()), n_validation=200
    ),
    grids=({"model": ("transformer",), "seed": (0, 1)},),
    presets={},
    measures={},
    along_training=(),
    claims=(),
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a finished run of two transformers and a linear model."""
    root = tmp_path_factory.mktemp("trained")
    return run(STUDY, changes=["model=transformer,linear"], resources=Resources(root=root))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty zoo."""
    monkeypatch.setattr(model_zoo, "FOLDER", tmp_path / "zoo")
    return model_zoo.FOLDER


@pytest.fixture
def filled(folder, trained):
    """A zoo with the two transformers."""
    assert zoo.add(trained, STUDY, NAME, ["model=transformer"]) == NAMES
    return folder


def edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def state(root):
    return {
        path: path.stat().st_mtime_ns
        for path in root.rglob("*")
        if path.is_file() and path.name != ".lock"
    }


def test_a_model_of_a_run_is_loaded_by_its_name(filled, trained):
    result = read_result(trained / "result.nc")
    catalog = mechanisms.zoo()
    assert catalog["model"].to_numpy().tolist() == NAMES
    for seed, name in enumerate(NAMES):
        (cell,) = (trained.parent / "models").glob(f"transformer-seed{seed}-*")
        best = load_file(cell / "best.safetensors")
        model = mechanisms.load(f"zoo:{name}")
        assert not model.training
        for key, weights in model.state_dict().items():
            assert torch.equal(weights, best[f"model/{key}"])
        entries = read_log(cell)
        best_entry = max(entries, key=lambda entry: entry["id/accuracy"])
        of_cell = result["scores"].to_dataset().sel(cell=cell.name, group="all")
        for split in ("id", "ood"):
            for metric in ("accuracy", "loss"):
                at = {"model": name, "split": split, "metric": metric}
                assert float(catalog["score"].sel(at)) == float(of_cell[metric].sel(split=split))
                assert float(catalog["validation"].sel(at)) == pytest.approx(
                    best_entry[f"{split}/{metric}"], abs=1e-6
                )
        assert int(catalog["step"].sel(model=name)) == best_entry["step"]
        assert int(catalog["seed"].sel(model=name)) == seed
        assert model_zoo.records()[name]["log"] == entries


def test_a_model_that_is_added_again_replaces_itself(filled, trained):
    before = model_zoo.records()
    (filled / f"{NAMES[1]}.safetensors").write_bytes(b"")
    assert zoo.add(trained, STUDY, NAME, ["seed=1", "model=transformer"]) == NAMES[1:]
    assert model_zoo.records() == before
    zoo.verify(NAMES[1], STUDY)


def test_every_model_has_the_scores_of_its_record(filled):
    for name in NAMES:
        zoo.verify(name, STUDY)


def test_records_and_weights_that_do_not_fit_are_noticed(filled):
    first, second = (filled / f"{name}.json" for name in NAMES)
    record = json.loads(first.read_text())
    scores = record["validation"]
    for key, value in scores.items():
        edit(first, validation=scores | {key: value + 0.02})
        with pytest.raises(RunError, match=f"not have the scores of its record: {key} is"):
            zoo.verify(NAMES[0], STUDY)
        edit(first, validation={other: scores[other] for other in scores if other != key})
        with pytest.raises(RunError, match=f"{key} is .*, not None"):
            zoo.verify(NAMES[0], STUDY)
    edit(first, validation=scores)
    zoo.verify(NAMES[0], STUDY)
    weights = second.with_suffix(".safetensors")
    weights.write_bytes(first.with_suffix(".safetensors").read_bytes())
    with pytest.raises(RunError, match="does not have the scores"):
        zoo.verify(NAMES[1], STUDY)


def test_a_record_from_before_a_setting_was_added_has_its_default(filled):
    path = filled / f"{NAMES[0]}.json"
    config = json.loads(path.read_text())["config"]
    identities = zoo.names_by_identity(STUDY)
    earlier = {key: value for key, value in config["training"].items() if key != "optimizer"}
    edit(path, config=config | {"training": earlier})
    assert zoo.names_by_identity(STUDY) == identities
    assert zoo.setup_of(config | {"training": earlier}, STUDY).training.optimizer == "adamw"
    zoo.verify(NAMES[0], STUDY)


def test_a_study_with_other_settings_than_a_record_is_noticed(filled):
    path = filled / f"{NAMES[0]}.json"
    config = json.loads(path.read_text())["config"]
    for other in (
        config | {"earlier": 1},
        config | {"width": -1, "n_validation": 0},
        config | {"task": config["task"] | {"class": "SmallestConfig"}},
    ):
        edit(path, config=other)
        with pytest.raises(RunError, match=r"largest has no setup with the settings .*has changed"):
            zoo.verify(NAMES[0], STUDY)


def test_a_study_takes_its_models_from_the_zoo_and_trains_the_others(filled, trained, tmp_path):
    root = tmp_path / "runs"
    words = ["--out", str(root), "--workers", "1", "--pretrained", "model=transformer,linear"]
    _, shown = command_line(STUDY, words=[*words, "--show"])
    assert all(f"in the zoo: {name}" in shown for name in NAMES)
    assert not root.exists()
    TRAINED.clear()
    status, printed = command_line(STUDY, words=words)
    assert status == 0
    assert set(TRAINED) == {"linear"}
    printed = " ".join(printed.split())
    assert f"2 models were not trained here, but are from the zoo: {', '.join(NAMES)}" in printed
    assert "trained by other code" not in printed

    (path,) = root.glob("largest-*/result.nc")
    result, original = read_result(path), read_result(trained / "result.nc")
    cells = original["scores"]["cell"].to_numpy().tolist()
    assert json.loads(result.attrs["from_zoo"]) == dict(zip(cells[:2], NAMES, strict=True))
    assert json.loads(original.attrs["from_zoo"]) == {}
    for group in ("scores", "costs"):
        assert result[group].to_dataset().equals(original[group].to_dataset())
    for cell, name in zip(cells[:2], NAMES, strict=True):
        (here,) = (root / "models").glob(f"{cell}*")
        there = trained.parent / "models" / cell
        assert (here / "log.jsonl").read_text() == (there / "log.jsonl").read_text()
        config = json.loads((here / "config.json").read_text())
        assert config == json.loads((there / "config.json").read_text()) | {"zoo": name}
        weights = load_file(here / "best.safetensors")
        for key, value in load_file(there / "best.safetensors").items():
            assert torch.equal(weights[key], value)
        assert load_file(here / "last.safetensors") == {}

    # All of it is on disk now.
    before = state(root)
    _, printed = command_line(STUDY, words=words)
    assert "taken from disk" in printed
    assert "from the zoo" in printed
    assert state(root) == before


def test_models_of_the_zoo_that_other_code_trained_are_accepted_and_recorded(filled, tmp_path):
    for name in NAMES:
        codes = model_zoo.records()[name]["codes"]
        codes[-1]["files"]["mechanisms/models/transformer.py"] = "0" * 16
        edit(filled / f"{name}.json", codes=codes)
    words = ["--out", str(tmp_path / "runs"), "--workers", "1", "--pretrained"]
    status, printed = command_line(STUDY, words=words)
    assert status == 0
    changed = "2 models were trained by other code; changed since: mechanisms/models/transformer.py"
    assert changed in " ".join(printed.split())
    (path,) = tmp_path.glob("runs/largest-*/result.nc")
    accepted = json.loads(read_result(path).attrs["accepted_code"])
    assert list(accepted.values()) == [["mechanisms/models/transformer.py"]] * 2
    _, shown = command_line(STUDY, words=[*words, "--show"])
    assert "other code" in shown


def test_models_are_taken_from_the_zoo_only_if_asked_for(filled, tmp_path):
    root = tmp_path / "runs"
    run(STUDY, resources=Resources(root=root, pretrained=True))
    TRAINED.clear()
    # Another study trains and measures the same cells, which is no reason to keep the result.
    run(replace(STUDY, name="other"), resources=Resources(root=root))
    assert len(TRAINED) == 2 * STUDY.setup.training.n_steps
    folder = run(STUDY, resources=Resources(root=root))
    assert json.loads(read_result(folder / "result.nc").attrs["from_zoo"]) == {}
    # And those that are trained here go before those of the zoo.
    run(STUDY, resources=Resources(root=root, pretrained=True))
    assert len(TRAINED) == 2 * STUDY.setup.training.n_steps
    assert json.loads(read_result(folder / "result.nc").attrs["from_zoo"]) == {}
    for other in ("pretrained", "redraw"):
        with pytest.raises(ValueError, match=f"which trains all models anew, excludes {other}"):
            Resources(fresh=True, **{other: True})


def test_models_that_came_from_the_zoo_are_not_added_to_it(filled, tmp_path):
    resources = Resources(root=tmp_path / "runs", pretrained=True)
    with pytest.raises(ValueError, match=r"has trained no model$"):
        zoo.add(run(STUDY, resources=resources), STUDY)
    more = replace(STUDY, grids=({"seed": (0, 1, 2)},))
    assert zoo.add(run(more, resources=resources), STUDY) == ["largest-transformer-seed2"]


def test_a_model_that_is_trained_again_in_the_zoo_is_measured_again(filled, tmp_path):
    resources = Resources(root=tmp_path / "runs", pretrained=True)
    folder = run(STUDY, resources=resources)
    first, second = (filled / f"{name}.json" for name in NAMES)
    codes = json.loads(first.read_text())["codes"]
    edit(first, codes=[codes[0] | {"at": "later"}])
    weights = first.with_suffix(".safetensors")
    weights.write_bytes(second.with_suffix(".safetensors").read_bytes())
    before = read_result(folder / "result.nc")["scores"]["accuracy"]
    run(STUDY, resources=resources)
    after = read_result(folder / "result.nc")["scores"]["accuracy"]
    assert [before[cell].equals(after[cell]) for cell in (0, 1)] == [False, True]


def test_measures_along_training_need_the_training(filled, tmp_path):
    training = replace(STUDY.setup.training, keep_at=(10,))
    setup = replace(STUDY.setup, training=training)
    along = replace(STUDY, setup=setup, along_training=("costs",))
    resources = Resources(root=tmp_path, pretrained=True)
    assert [cell.zoo_name for cell in Run(STUDY.plan(), resources).cells] == NAMES
    for cell, name in zip(along.plan().cells, NAMES, strict=True):
        edit(filled / f"{name}.json", config=settings.plain(cell))
    assert [cell.zoo_name for cell in Run(along.plan(), resources).cells] == [None, None]
    without = replace(along, along_training=())
    assert [cell.zoo_name for cell in Run(without.plan(), resources).cells] == NAMES


def test_models_whose_training_was_measured_serve_where_it_is_not(folder, tmp_path):
    training = replace(STUDY.setup.training, keep_at=(10,))
    along = replace(STUDY, setup=replace(STUDY.setup, training=training), along_training=("costs",))
    zoo.add(run(along, resources=Resources(root=tmp_path)), along, NAME)
    resources = Resources(root=tmp_path / "others", pretrained=True)
    TRAINED.clear()
    result = read_result(run(STUDY, resources=resources) / "result.nc")
    assert list(json.loads(result.attrs["from_zoo"]).values()) == NAMES
    assert not TRAINED
    # Those of other settings do not.
    others = STUDY.plan("laptop", ["training.learning_rate=0.5"])
    assert [cell.zoo_name for cell in Run(others, resources).cells] == [None, None]


def test_models_that_cannot_go_into_the_zoo_are_refused(folder, trained, tmp_path):
    with pytest.raises(RunError, match=r"its model is of the class torch\..*\.Sequential, which"):
        zoo.add(trained, STUDY, "{model}-{seed}")
    assert not list(folder.glob("*"))
    for only, message in (
        (["model=lstm"], "has trained no model with the settings model=lstm"),
        (["modle=mlp"], "unknown setting 'modle'"),
    ):
        with pytest.raises(ValueError, match=message):
            zoo.add(trained, STUDY, NAME, only)
    transformers = ["model=transformer"]
    for name, message in (
        ("largest-{wide}", "name must be text with settings in braces, of model"),
        ("largest-{task.wide}", "name must be text with settings in braces"),
        ("largest-{", "name must be text with settings in braces"),
        ("largest", "names must be different, got largest for transformer-seed0"),
        ("zoo/{seed}", "name must have only letters"),
    ):
        with pytest.raises(ValueError, match=message):
            zoo.add(trained, STUDY, name, transformers)
    zoo.add(trained, STUDY, "first", ["seed=0", *transformers])
    with pytest.raises(ValueError, match=r"is in the zoo already, as first, not transformer-0"):
        zoo.add(trained, STUDY, "{model}-{seed}", transformers)
    with pytest.raises(ValueError, match="names must be different, got first"):
        zoo.add(trained, STUDY, "first", ["seed=1", *transformers])
    with pytest.raises(RunError, match="is no finished run"):
        zoo.add(tmp_path, STUDY)


class Transformer(mechanisms.Transformer):
    """A model that `mechanisms.load` would not build."""

    def forward(self, inputs):
        return -super().forward(inputs)


class OtherSetup(LargestSetup):
    def build(self, generator):
        return Transformer(super().build(generator).config, generator=generator)


def test_models_of_other_classes_are_refused_whatever_their_names(folder, tmp_path):
    setup = OtherSetup(model="transformer", training=STUDY.setup.training)
    study = replace(STUDY, setup=setup, grids=({"seed": (0,)},))
    made = run(study, resources=Resources(root=tmp_path))
    with pytest.raises(RunError, match=r"test_zoo\.Transformer, which mechanisms does not"):
        zoo.add(made, study)
    assert not list(folder.glob("*"))


def test_only_models_that_a_result_has_measured_are_added(folder, trained, tmp_path):
    root = tmp_path / "runs"
    taken = run(STUDY, resources=Resources(root=root))
    (cell,) = (root / "models").glob("transformer-seed0-*")
    path = cell / "last.safetensors"
    log = read_log(cell)
    for entry in log:
        entry["id/accuracy"] /= 2
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() | {"log": json.dumps(log)}
    save_file(load_file(path), path, metadata)
    with pytest.raises(RunError, match="was trained again since the result was made"):
        zoo.add(taken, STUDY)
    cell.rename(cell.with_name("moved"))
    with pytest.raises(RunError, match="has no model: it was moved"):
        zoo.add(taken, STUDY)
    assert not list(folder.glob("*"))


def test_models_of_results_that_do_not_name_those_of_the_zoo_are_added(folder, tmp_path):
    made = run(STUDY, resources=Resources(root=tmp_path / "runs"))
    with netCDF4.Dataset(made / "result.nc", "r+") as file:
        file.delncattr("from_zoo")
    assert zoo.add(made, STUDY) == ["largest-transformer-seed0", "largest-transformer-seed1"]


def test_models_with_worse_tuned_settings_are_left_out(folder, tmp_path):
    tuned = replace(STUDY, grids=({"training.learning_rate": (1e-2, 1e-9), "seed": (0, 1)},))
    made = run(tuned, resources=Resources(root=tmp_path / "runs"))
    assert zoo.add(made, tuned) == ["largest-transformer-seed0", "largest-transformer-seed1"]
    rates = {
        record["config"]["training"]["learning_rate"] for record in model_zoo.records().values()
    }
    assert rates == {1e-2}


def test_the_command_adds_models_and_lists_them(folder, trained, monkeypatch, capsys):
    monkeypatch.setattr("studies.zoo.all_studies", lambda: {STUDY.name: STUDY})
    run_zoo([trained], NAME, ["model=transformer"])
    assert f"added {', '.join(NAMES)}" in capsys.readouterr().out
    run_zoo()
    printed = capsys.readouterr().out
    scores = mechanisms.zoo()["score"].sel(metric="accuracy")
    for word in (*NAMES, "accuracy", "loss", "in distribution", "out of distribution"):
        assert word in printed
    for value in scores.to_numpy().ravel():
        assert f"{value:.3g}" in printed
    assert setup_of(NAMES[1]) == STUDY.plan().cells[1]
    with pytest.raises(ValueError, match=r"unknown model 'zoo:toy'; nearest: zoo:toy-n4"):
        setup_of("toy")
    for run_folder, message in ((trained, "Sequential"), (folder, "no finished run")):
        with pytest.raises(typer.Exit):
            run_zoo([run_folder], "{model}-{seed}", ["model=linear"])
        assert message in " ".join(capsys.readouterr().out.split())
    monkeypatch.setattr("studies.zoo.all_studies", dict)
    with pytest.raises(typer.Exit):
        run_zoo([trained])
    assert "must be a run of a study of the package, got 'largest'" in " ".join(
        capsys.readouterr().out.split()
    )


@pytest.mark.parametrize("checkpoint", ["best", "last"])
def test_the_tested_checkpoint_is_the_model(checkpoint, folder, tmp_path):
    """With a rate at which the last checkpoint is another one than the best."""
    settings = [f"training.checkpoint={checkpoint}", "training.learning_rate=1", "seed=0"]
    settings.append("training.n_steps=25")
    made = run(STUDY, changes=settings, resources=Resources(root=tmp_path / "trained"))
    (name,) = zoo.add(made, STUDY)
    log = model_zoo.records()[name]["log"]
    assert max(log, key=lambda entry: entry["id/accuracy"])["step"] < log[-1]["step"]
    zoo.verify(name, STUDY)
    TRAINED.clear()
    again = run(
        STUDY, changes=settings, resources=Resources(root=tmp_path / "runs", pretrained=True)
    )
    assert TRAINED == []
    first, second = (read_result(made / "result.nc") for made in (made, again))
    assert json.loads(second.attrs["from_zoo"])
    assert first["scores"].to_dataset().equals(second["scores"].to_dataset())


def test_a_compiled_model_is_the_same_one_but_for_rounding():
    compiled, other = (
        replace(STUDY.setup, training=replace(TRAINING, **change))
        for change in ({"compile": True}, {"n_steps": TRAINING.n_steps + 1})
    )
    plain = replace(STUDY.setup, training=TRAINING)
    assert identity_of_weights(compiled) == identity_of_weights(plain)
    assert identity_of_weights(other) != identity_of_weights(plain)
