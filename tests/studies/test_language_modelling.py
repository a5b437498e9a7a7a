import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr

import mechanisms
import tasks
from studies import language_figures
from studies.costs import count_parameters
from studies.language_modelling import (
    METRICS,
    LanguageModel,
    attention_of,
    matched_d_mlp,
    mechanism_names,
    paired_difference,
    parameters_of,
    presets,
    run,
    summary,
)
from studies.language_models import language_model
from studies.running import Resources, load_model_config
from studies.runs import RunError
from studies.settings import override
from studies.training import load_weights

SCRIPT = Path(__file__).parents[2] / "studies" / "language_modelling.py"
KINDS = [(name, which) for which in ("relative", "rotary") for name in mechanism_names(which)]


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    """A text of its own: words with a grammar, in lines."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    rng = np.random.default_rng(0)
    names, verbs = ["Ada", "Böhm", "Curry", "Gödel"], ["proves", "writes", "reads"]
    lines = [f"{rng.choice(names)} {rng.choice(verbs)} {rng.choice(names)}." for _ in range(1500)]
    path.write_text("\n".join(lines) + "\n")
    return [f"task.path={path}", "task.vocabulary_size=280", "task.length=16"]


@pytest.fixture(scope="module")
def study(settings):
    return override(presets()["smoke"], settings)


@pytest.fixture(scope="module")
def smoke(tmp_path_factory, settings):
    out = tmp_path_factory.mktemp("runs")
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--preset=smoke", "--workers=1", *settings, f"--out={out}"],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"COLUMNS": "80", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (folder,) = out.glob("language_modelling-*")
    return folder, done.stdout


@pytest.fixture(scope="module")
def result(smoke):
    with xr.open_datatree(smoke[0] / "result.nc", engine="h5netcdf") as tree:
        return tree.load()


def trained(smoke, cell):
    task = tasks.Text(cell.task, cache=None)
    model = cell.build(task.vocabulary_size).eval()
    load_weights(model, smoke[0].parent / "models" / cell.folder_name / "best.safetensors")
    return task, model


# Models


@pytest.mark.parametrize(("mechanism", "positions"), KINDS)
def test_every_mechanism_is_causal_and_sees_order_and_distance(mechanism, positions):
    config = language_model(
        tasks.TextConfig(length=12),
        vocabulary_size=270,
        attention=attention_of(mechanism, positions=positions, d_model=8, n_heads=2),
        d_model=8,
        d_mlp=8,
        n_layers=2,
        positions=positions,
        shared=False,
    )
    model = mechanisms.Transformer(config, generator=torch.Generator().manual_seed(0)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "relative_bias" in name:
                parameter.normal_(generator=torch.Generator().manual_seed(1))
        tokens = torch.arange(10)[None]
        other = tokens.clone()
        other[0, 6:] += 100
        one, two = model(tokens), model(other)
        assert torch.allclose(one[:, :6], two[:, :6], atol=1e-5)
        assert not torch.allclose(one[:, 6:], two[:, 6:], atol=1e-3)
        # The last token sees the same ones, two of them in other places.
        swapped = model(tokens[:, [0, 1, 3, 2, 4, 5, 6, 7, 8, 9]])
        assert not torch.allclose(one[:, -1], swapped[:, -1], atol=1e-5)


@pytest.mark.parametrize(("mechanism", "positions"), KINDS)
def test_every_model_has_as_many_parameters_as_softmax_attention(study, mechanism, positions):
    cell = replace(study.trained_models()[0], d_mlp=64, mechanism=mechanism, positions=positions)
    config = cell.build(270).config
    asked, found = (
        count_parameters(mechanisms.Transformer(one)) for one in (cell.reference(270), config)
    )
    assert parameters_of(config) == found
    # A unit of d_mlp is a row, a column and a bias of each of two layers.
    assert abs(found - asked) <= 2 * (2 * cell.d_model + 1) / 2
    assert config.feed_forward.d_mlp == cell.own_d_mlp(270)
    if (mechanism, positions) == ("softmax", "relative"):
        assert config.feed_forward.d_mlp == 64


def test_the_match_is_the_nearest_of_all():
    def make(d_mlp):
        return mechanisms.TransformerConfig(
            d_input=3,
            d_output=3,
            d_model=4,
            n_layers=1,
            attention=mechanisms.AttentionConfig(n_heads=1, d_head=4),
            feed_forward=mechanisms.FeedForwardConfig(d_mlp=d_mlp),
            positions="none",
        )

    counts = {d_mlp: parameters_of(make(d_mlp)) for d_mlp in range(1, 30)}
    for asked in range(counts[3], counts[20], 7):
        off = {d_mlp: abs(count - asked) for d_mlp, count in counts.items()}
        assert off[matched_d_mlp(make, asked)] == min(off.values())
    with pytest.raises(ValueError, match=r"n_parameters must be at least \d+, .* got 100"):
        matched_d_mlp(make, 100)


@pytest.mark.parametrize(
    ("attention", "positions", "message"),
    [
        ({"rotary": True}, "relative", r"positions must be rotary with .*, got 'relative'"),
        ({}, "rotary", r"positions must be relative with .*, got 'rotary'"),
        ({}, "absolute", r"positions must be one of relative, rotary, got 'absolute'"),
    ],
)
def test_positions_that_do_not_fit_the_attention_are_refused(attention, positions, message):
    with pytest.raises(ValueError, match=message):
        language_model(
            tasks.TextConfig(),
            vocabulary_size=270,
            attention=mechanisms.AttentionConfig(n_heads=2, d_head=4, **attention),
            d_model=8,
            d_mlp=8,
            n_layers=1,
            positions=positions,
        )


# The run


def test_the_command_prints_the_table_and_where_the_files_are(smoke):
    folder, printed = smoke
    for text in ("compositional", "rotary", "frequencies", "100.00%", str(folder)):
        assert text in printed
    names = {path.name for path in folder.glob("*.png")}
    assert names == {"training.png", "losses.png", "position.png"}


def test_the_result_tells_what_it_is(result):
    assert json.loads(result.attrs["config"])["study"]["seeds"] == [0]
    assert result["errors"]["model"].to_numpy().tolist() == [
        *("softmax", "compositional", "softmax", "hyla"),
    ]
    assert result["errors"]["positions"].to_numpy().tolist() == ["relative"] * 2 + ["rotary"] * 2
    for group in result.subtree:
        for name, variable in group.variables.items():
            assert variable.attrs.get("long_name"), (group.path, name)


def test_figures_are_those_of_the_best_checkpoint_token_by_token(smoke, study, result):
    text = Path(study.task.path).read_bytes()
    for number, cell in enumerate(study.trained_models()):
        task, model = trained(smoke, cell)
        losses, right, places = [], [], []
        for window in range(task.size("test")):
            batch = task.batch("test", window, 1)
            with torch.no_grad():
                chances = model(batch.inputs)[0].double().log_softmax(-1)
            for place in range(int(batch.mask.sum())):
                target = batch.targets[0, place]
                losses.append(-chances[place, target].item())
                right.append(bool(chances[place].argmax() == target))
                places.append(place)
        found = result["errors"].to_dataset().isel(cell=number).sel(split="test")
        tested = text[len(text) - task.n_bytes("test") :].decode()
        words = len(tested.split()) + tested.count("\n")
        expected = {
            "loss": np.mean(losses),
            "accuracy": np.mean(right),
            "bits_per_byte": sum(losses) / np.log(2) / len(tested.encode()),
            "perplexity": np.exp(sum(losses) / words),
            "token_perplexity": np.exp(np.mean(losses)),
        }
        assert expected.keys() == METRICS.keys()
        for name, value in expected.items():
            assert found[name].item() == pytest.approx(value, rel=1e-4), name
            assert found[f"{name}_low"] <= found[name] <= found[f"{name}_high"]
        windows = result["windows"].to_dataset().isel(cell=number)
        assert windows["tokens"].sum() == len(losses) == task.n_tokens("test")
        assert windows["loss"].sum() == pytest.approx(sum(losses), rel=1e-4)
        position = result["position"].to_dataset().isel(cell=number)
        for place in (0, 7, 15):
            mine = [loss for loss, one in zip(losses, places, strict=True) if one == place]
            assert position["loss"][place] == pytest.approx(np.mean(mine), rel=1e-4)
            assert position["tokens"][place] == len(mine)


def test_frequencies_of_tokens_are_the_baseline(study, result):
    task = tasks.Text(study.task, cache=None)
    found = result["errors"].to_dataset().isel(cell=0).sel(split="test")
    loss = task.baseline("test")
    assert found["loss_baseline"] == pytest.approx(loss)
    assert found["token_perplexity_baseline"] == pytest.approx(np.exp(loss))
    words = task.n_words("test") + task.n_lines("test")
    expected = np.exp(loss * task.n_tokens("test") / words)
    assert found["perplexity_baseline"] == pytest.approx(expected)
    # The figures of a split have the ratios that all models have in common.
    assert found["bits_per_byte_baseline"] / loss == pytest.approx(
        found["bits_per_byte"].item() / found["loss"].item(), rel=1e-4
    )


def test_costs_are_counted(smoke, study, result):
    costs = result["costs"].to_dataset()
    for number, cell in enumerate(study.trained_models()):
        _, model = trained(smoke, cell)
        assert costs["parameters"][number] == count_parameters(model)
        assert costs["d_mlp"][number] == model.blocks[0].mlp.W_in.shape[1]
    assert abs(costs["parameter_ratio"] - 1).max() < 2e-3
    assert costs["parameter_ratio"][0] == 1


# The summary


def test_differences_are_paired_over_windows():
    rng = np.random.default_rng(0)
    hard = rng.normal(200, 50, 40)  # windows differ far more than models
    tokens = np.full((3, 40), 50.0)
    loss = np.stack([hard, hard + 2 + 0.1 * rng.normal(size=40), hard + rng.normal(0, 20, 40)])
    scored = xr.Dataset(
        {"loss": (("cell", "window"), loss), "tokens": (("cell", "window"), tokens)}
    )
    apart, low, high = paired_difference(scored, [(1, 0)])
    assert apart == pytest.approx((loss[1] - hard).sum() / 2000)
    assert 0.038 < low < apart < high < 0.042
    # Without a difference but with noise, zero is within.
    _, low, high = paired_difference(scored, [(2, 0)])
    assert low < 0 < high
    assert high - low > 0.1
    assert paired_difference(scored, [(0, 0)]) == (0, 0, 0)
    # Two pairs count alike.
    both = paired_difference(scored, [(1, 0), (2, 0)])[0]
    each = [paired_difference(scored, [pair])[0] for pair in ((1, 0), (2, 0))]
    assert both == pytest.approx(np.mean(each))
    assert np.isnan(paired_difference(scored, [])).all()


def fake_result(conditions, valid, test):
    """Losses [cell] on valid, and test windows [cell, window] of one token each."""
    names = ("model", "positions", "learning_rate", "seed")
    told = {
        name: ("cell", list(values))
        for name, values in zip(names, zip(*conditions, strict=True), strict=True)
    }
    of_test = np.mean(test, axis=1)
    errors = {
        metric: (("cell", "split"), np.stack([valid, of_test], 1) if metric == "loss" else nothing)
        for metric in METRICS
        for nothing in [np.zeros((len(valid), 2))]
    }
    costs = {name: ("cell", np.ones(len(valid))) for name in ("parameters", "parameter_ratio")}
    groups = {
        "errors": xr.Dataset(errors, coords={"split": ["valid", "test"]} | told),
        "windows": xr.Dataset(
            {
                "loss": (("cell", "window"), test),
                "tokens": (("cell", "window"), np.ones_like(test)),
            }
        ),
        "costs": xr.Dataset(costs | {"d_mlp": ("cell", np.ones(len(valid)))}),
        "training": xr.Dataset({"seconds": (("cell", "train_step"), [[1.0, 3.0]] * len(valid))}),
    }
    return xr.DataTree.from_dict(groups)


def test_each_condition_has_its_learning_rate_and_is_paired_by_seed_and_positions():
    conditions = [
        ("softmax", "relative", 0.1, 0),
        ("softmax", "relative", 0.1, 1),
        ("softmax", "relative", 0.2, 0),
        ("softmax", "relative", 0.2, 1),
        ("hyla", "relative", 0.1, 0),
        ("hyla", "relative", 0.1, 1),
        ("hyla", "relative", 0.2, 1),
        ("hyla", "rotary", 0.1, 0),
    ]
    # Of softmax the second rate is better on valid, whatever the test says; of hyla the first.
    valid = np.array([5.0, 4.0, 1.0, 3.0, 2.0, 2.0, 4.0, 1.0])
    test = np.array([[0, 0], [0, 0], [7, 9], [5, 7], [9, 9], [4, 4], [0, 0], [1, 1]], dtype=float)
    found = summary(fake_result(conditions, valid, test))
    assert found["learning_rate"].to_numpy().tolist() == [0.2, 0.1, 0.1]
    losses = found.sel(figure="loss test")
    assert losses["mean"].to_numpy().tolist() == [7, 6.5, 1]
    assert losses["lowest"].to_numpy().tolist() == [6, 4, 1]
    assert losses["highest"].to_numpy().tolist() == [8, 9, 1]
    # ((9 - 7) + (9 - 9) + (4 - 5) + (4 - 7)) / 4; rotary has no softmax to compare with.
    assert found["difference"].to_numpy()[:2].tolist() == [0, -0.5]
    assert np.isnan(found["difference"].to_numpy()[2])
    assert (found["difference_low"][1], found["difference_high"][1]) == (-1.5, 0.5)
    assert found["mean"].sel(figure="seconds").to_numpy().tolist() == [3, 3, 3]


def test_positions_are_put_together_by_octaves():
    loss = np.array([8.0, 6.0, 4.0, 2.0, 1.0, np.nan])
    tokens = np.array([2.0, 2.0, 3.0, 1.0, 1.0, 0.0])
    ends, means = language_figures.binned(loss, tokens)
    assert ends == [1, 2, 4, 6]
    assert means == pytest.approx([8, 6, 3.5, 1])


def test_trained_models_can_be_analysed_alone(smoke, study, tmp_path):
    cell = study.trained_models()[3]
    place = smoke[0].parent / "models" / cell.folder_name
    assert load_model_config(place, LanguageModel, study.tasks()) == cell
    folder = run(study, resources=Resources(root=tmp_path), checkpoints=(place,))
    with xr.open_datatree(folder / "result.nc", engine="h5netcdf") as tree:
        assert tree["errors"]["model"].to_numpy().tolist() == ["hyla"]
        assert np.isnan(tree["summary"]["difference"]).all()


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("relative=linear,hyper", "relative must be among softmax, .*transformer_xl, got hyper"),
        ("rotary=compositional", "rotary must be among softmax, .*coda, got compositional"),
        ("seeds=1,1", "seeds must be different"),
        ("n_heads=3", r"n_heads must divide d_model = 16, got 3"),
        ("n_evaluate=0", "n_evaluate must be at least 1, got 0"),
    ],
)
def test_wrong_settings_are_told(setting, message):
    with pytest.raises(ValueError, match=message):
        override(presets()["smoke"], [setting])


def test_all_models_of_all_presets_can_be_built():
    for name, study in presets().items():
        cells = study.trained_models()
        assert len({cell.folder_name for cell in cells}) == len(cells), name
        vocabulary = study.task.vocabulary_size
        kinds = {(cell.mechanism, cell.positions): cell for cell in cells}
        for cell in kinds.values():
            assert cell.own_d_mlp(vocabulary) > cell.d_mlp / 2
    assert presets()["paper"].task.name == "wikitext-103-raw-v1"


def test_a_missing_text_is_told(study, tmp_path):
    study = replace(study, task=replace(study.task, path=str(tmp_path / "none.txt")))
    with pytest.raises(RunError, match=r"there is nothing\. Put there a text file"):
        run(study, resources=Resources(root=tmp_path))


def test_without_learning_rates_that_of_training_counts():
    study = override(presets()["smoke"], ["training.learning_rate=0.5"])
    assert {one.training.learning_rate for one in study.trained_models()} == {0.5}
    study = override(study, ["learning_rates=0.1,0.2"])
    assert {one.training.learning_rate for one in study.trained_models()} == {0.1, 0.2}
