import io
import json
import os
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr
from PIL import Image
from rich.console import Console

import mechanisms
import tasks
from studies import benchmark_figures, running
from studies.benchmark_tasks import ALL, METRICS, TASKS, batches, benchmark_of
from studies.compositional_benchmarks import (
    COORDINATES,
    BenchmarkModel,
    SplitScores,
    closing_table,
    draw_figures,
    presets,
    run,
    score_split,
)
from studies.language_models import language_model, windows_scored, write_python_help
from studies.running import Resources, load_model_config
from studies.runs import RunError
from studies.settings import override
from studies.training import load_weights

SCRIPT = Path(__file__).parents[2] / "studies" / "compositional_benchmarks.py"


def tiny_images(folder):
    """Two classes that differ in their colour, as SPLIT/CLASS/FILE."""
    rng = np.random.default_rng(0)
    for split, colour in product(("train", "test"), (0, 1)):
        place = folder / "colours" / split / ("red", "green")[colour]
        place.mkdir(parents=True)
        for number in range(12):
            pixels = np.zeros((16, 16, 3), np.uint8)
            pixels[..., colour] = rng.integers(100, 255)
            Image.fromarray(pixels).save(place / f"{number}.png")


@pytest.fixture(scope="module")
def studies(tmp_path_factory):
    """The smoke preset of every task, of images and text that are made here."""
    folder = tmp_path_factory.mktemp("data")
    tiny_images(folder)
    (folder / "book.txt").write_text("It was a bright cold day in April, and so on.\n" * 80)
    more = {
        "images": [
            "task.sources=colours,triangles",
            f"task.folder={folder}",
            "task.n_valid=4",
            "task.image_size=16",
        ],
        "text": [
            f"task.path={folder / 'book.txt'}",
            "task.vocabulary_size=270",
            "task.length=16",
        ],
    }
    return {task: override(presets(task)["smoke"], more.get(task, [])) for task in TASKS}


@pytest.fixture(scope="module")
def runs(studies, tmp_path_factory):
    """The folders of finished runs; but for one of them, figures are drawn by their own test."""
    root = tmp_path_factory.mktemp("runs")
    found = {}
    for task, study in studies.items():
        with pytest.MonkeyPatch.context() as patch:
            # Nothing is left in the user's cache.
            patch.setattr("tasks.text.save_arrays", lambda *_: None)
            if task != "scan":
                patch.setattr(running, "draw", lambda *_: None)
            found[task] = run(study, resources=Resources(root=root))
    return found


@pytest.fixture(scope="module")
def results(runs):
    found = {}
    for task, folder in runs.items():
        with xr.open_datatree(folder / "result.nc", engine="h5netcdf") as tree:
            found[task] = tree.load()
    return found


@pytest.mark.parametrize("task", TASKS)
def test_the_result_is_complete(task, studies, results):
    study, result = studies[task], results[task]
    cells = study.trained_models()
    scores = result["scores"].to_dataset()
    assert json.loads(result.attrs["config"])["study"]["seeds"] == list(study.seeds)
    assert scores["cell"].to_numpy().tolist() == [cell.folder_name for cell in cells]
    assert set(scores["task"].to_numpy()) == {task}
    for name in ("model", "n_searches", "n_retrievals", "seed"):
        expected = [cell.condition[name] for cell in cells]
        assert scores[name].to_numpy().tolist() == expected
    headline = scores.attrs["headline"]
    every = scores.sel(group=ALL)
    known = every[headline].notnull()
    assert known.isel(split=0).all()
    for bound, sign in (("low", -1), ("high", 1)):
        gap = sign * (every[f"{headline}_{bound}"] - every[headline])
        assert (gap.where(known, 0) >= -1e-9).all()
    for name in set(METRICS) & set(scores):
        if METRICS[name].percent:
            assert (
                scores[name]
                .where(scores[name].notnull(), 0)
                .clip(0, 1)
                .equals(scores[name].where(scores[name].notnull(), 0))
            )
    curves = result["training"].to_dataset()
    assert curves["train_step"].to_numpy().tolist() == [2, 4]
    assert np.isfinite(curves["loss"]).all()
    for group in result.subtree:
        for name, variable in group.variables.items():
            assert variable.attrs.get("long_name"), (group.path, name)
        assert set(group.coords) <= set(COORDINATES)


@pytest.mark.parametrize("task", TASKS)
def test_costs_are_those_of_the_model(task, studies, results):
    costs = results[task]["costs"].to_dataset()
    for number, cell in enumerate(studies[task].trained_models()):
        weights = sum(one.numel() for one in cell.build().parameters())
        assert costs["parameters"][number] == weights
    # A search chooses among the retrievals: that is more work than a head of its own.
    compositional = costs["operations"][costs["model"] == "compositional"].min()
    assert compositional > costs["operations"][costs["model"] == "multi_head"].min()


@pytest.mark.parametrize("task", TASKS)
def test_figures_and_table_are_drawn(task, runs, results):
    result = results[task]
    drawn = draw_figures(result)
    expected = {"scores", "training"} | (set() if task == "scan" else {"value_scores_R2"})
    assert set(drawn) == expected
    for name, figure in drawn.items():
        file = io.BytesIO()
        figure.savefig(file, dpi=50)
        assert np.asarray(Image.open(file)).std() > 1, name
    for kind in ("png", "pdf"):
        names = {path.stem for path in runs[task].glob(f"*.{kind}")}
        assert names == (expected if task == "scan" else set())
    console = Console(width=120)
    with console.capture() as capture:
        console.print(closing_table(result))
    printed = capture.get()
    for text in ("multi-head", "R = 2", "paper", "weights", "MFLOP"):
        assert text in printed
    for number in {"triangles": ["93.8", "96.7"], "scan": ["11.0"]}.get(task, []):
        assert number in printed


def test_accuracy_is_that_of_the_best_checkpoint_counted_one_by_one(studies, runs, results):
    scores = results["sort_of_clevr"]["scores"].to_dataset()
    for number, cell in enumerate(studies["sort_of_clevr"].trained_models()):
        model = cell.build().eval()
        folder = runs["sort_of_clevr"].parent / "models" / cell.folder_name
        load_weights(model, folder / "best.safetensors")
        task = tasks.SortOfClevr(cell.task)
        batch = task.batch("test", 0, studies["sort_of_clevr"].n_test)
        with torch.no_grad():
            right = model(*batch.inputs)[:, 0].argmax(-1) == batch.targets[:, 0]
        kinds = batch.latents["question_type"].tolist()
        for kind, name in enumerate(tasks.SORT_OF_CLEVR_QUESTIONS):
            mine = [bool(one) for one, other in zip(right, kinds, strict=True) if other == kind]
            found = scores.isel(cell=number).sel(split="test", group=name)
            assert found["n"] == len(mine)
            assert found["accuracy"] == pytest.approx(sum(mine) / len(mine))
    means = scores.sel(split="test")
    whole = sum(means["accuracy"].sel(group=g) * means["n"].sel(group=g) for g in kinds_of(scores))
    assert np.allclose(whole / means["n"].sel(group=ALL), means["accuracy"].sel(group=ALL))


def kinds_of(scores):
    return [name for name in scores["group"].to_numpy() if name != ALL and ":" not in name]


def test_value_scores_are_means_of_what_the_hooks_show(studies, runs, results):
    found = results["sort_of_clevr"]["value_scores"].to_dataset()
    assert set(found["model"].to_numpy()) == {"compositional"}
    assert np.allclose(found["value_scores"].sum("retrieval"), 1, atol=1e-5)
    study = studies["sort_of_clevr"]
    cell = next(one for one in study.trained_models() if one.mechanism == "compositional")
    model = cell.build().eval()
    load_weights(
        model,
        runs["sort_of_clevr"].parent / "models" / cell.folder_name / "best.safetensors",
    )
    batch = tasks.SortOfClevr(cell.task).batch("test", 0, study.n_test)
    _, cache = model.run_with_cache(*batch.inputs)
    binary = batch.latents["question_type"] == 1
    for layer in (0, 1):
        shown = cache[f"blocks.{layer}.attn.hook_value_scores"][binary]
        one = found["value_scores"].sel(cell=cell.folder_name, layer=layer, group="binary")
        assert np.allclose(one.sel(token="all"), shown.mean((0, 1)), atol=1e-5)
        assert np.allclose(one.sel(token="last"), shown[:, -1].mean(0), atol=1e-5)


def test_perplexity_is_per_word_and_bits_per_byte(studies, runs, results):
    study = studies["text"]
    cell = study.trained_models()[0]
    model = cell.build().eval()
    load_weights(model, runs["text"].parent / "models" / cell.folder_name / "best.safetensors")
    text = Path(cell.task.path).read_text()
    task = tasks.Text(cell.task, cache=None)
    total = 0.0
    for window in range(task.size("test")):
        batch = task.batch("test", window, 1)
        with torch.no_grad():
            chances = model(batch.inputs)[0].log_softmax(-1)
        for place, (target, counts) in enumerate(
            zip(batch.targets[0].tolist(), batch.mask[0].tolist(), strict=True)
        ):
            total -= chances[place, target].item() * counts
    tested = text[len(text) - task.n_bytes("test") :]
    one = results["text"]["scores"].to_dataset().isel(cell=0).sel(split="test", group=ALL)
    n_words = len(tested.split()) + tested.count("\n")
    assert one["perplexity"] == pytest.approx(np.exp(total / n_words), rel=1e-4)
    assert one["bits_per_byte"] == pytest.approx(total / np.log(2) / len(tested), rel=1e-4)
    assert one["perplexity_low"] <= one["perplexity"] <= one["perplexity_high"]


def test_scan_is_right_if_every_action_is(studies):
    benchmark = benchmark_of(studies["scan"].task)
    trimmed = benchmark.batch("ood", 0, 50, "cpu")
    assert trimmed.targets.shape[1] == trimmed.latents["length"].max() + 1
    assert trimmed.mask.sum() == (trimmed.latents["length"] + 1).sum()
    right = torch.nn.functional.one_hot(trimmed.targets, len(tasks.SCAN_ACTIONS)).float()
    wrong = right.clone()
    wrong[0, 3] = wrong[0, 3].roll(1)
    for output, expected in ((right, 1.0), (wrong, 0.0)):
        found = benchmark.score("ood", output, trimmed)
        assert found["accuracy"][0][0] == expected
        assert (found["accuracy"][0][1:] == 1).all()
    wrong_tokens = found["token_accuracy"]
    assert (wrong_tokens[1] - wrong_tokens[0])[0] == pytest.approx(1, abs=1e-5)


# Intervals


def scored(parts, wholes, groups, unit, metric="accuracy"):
    return SplitScores(
        metrics=(metric,),
        parts=np.array([parts], float),
        wholes=np.array([wholes], float),
        groups={name: np.array(one, bool) for name, one in groups.items()},
        unit=np.array(unit),
    )


def test_figures_are_ratios_of_sums():
    right, half = [1, 0, 2, 3], [True, True, False, False]
    one = scored(
        right, [1, 1, 4, 4], {ALL: [True] * 4, "half": half, "none": [False] * 4}, range(4)
    )
    found = one.figures()
    assert found["accuracy", ALL] == 0.6
    assert found["accuracy", "half"] == 0.5
    assert np.isnan(found["accuracy", "none"])
    assert np.isnan(one.intervals(0)[:, 0, 2]).all()
    grown = scored(right, [1, 1, 4, 4], {ALL: [True] * 4}, range(4), metric="perplexity")
    assert grown.figures()["perplexity", ALL] == pytest.approx(np.exp(0.6))


def test_intervals_are_over_units():
    rng = np.random.default_rng(0)
    right = rng.random(400) < 0.3
    everything = {ALL: [True] * 400}
    low, high = scored(right, np.ones(400), everything, range(400)).intervals(0)[:, 0, 0]
    # The normal approximation of a share.
    half = 1.96 * np.sqrt(right.mean() * (1 - right.mean()) / 400)
    assert (low, high) == pytest.approx((right.mean() - half, right.mean() + half), abs=0.008)
    # Ten answers that are all alike tell as little as one.
    many = np.repeat(right, 10)
    units = np.repeat(np.arange(400), 10)
    again = scored(many, np.ones(4000), {ALL: [True] * 4000}, units).intervals(0)[:, 0, 0]
    assert again == pytest.approx([low, high])


def test_as_many_examples_as_there_are(studies):
    benchmark = benchmark_of(studies["triangles"].task)
    assert [len(one) for one in batches(benchmark, "test", 10_000, "cpu")] == [60]
    assert [len(one) for one in batches(benchmark, "test", 7, "cpu")] == [7]
    model = studies["triangles"].trained_models()[0].build().eval()
    assert score_split(benchmark, model, "test", 7, "cpu").parts.shape == (2, 7)


# The grid, and the presets


def test_the_grid_of_esbn_has_the_pairs_that_there_are():
    study = presets("esbn")["paper"]
    pairs = [(one.rule, one.n_withheld) for one in study.tasks()]
    assert len(pairs) == 4 * 4 + 1
    assert ("same_different", 98) in pairs
    assert ("rmts", 98) not in pairs
    with pytest.raises(ValueError, match=r"n_withheld=99: allowed"):
        override(study, ["n_withheld=99"])


def test_multi_head_attention_is_trained_once_whatever_r():
    study = override(presets("triangles")["paper"], ["seeds=0"])
    found = [(one.mechanism, one.n_retrievals) for one in study.trained_models()]
    assert found == [("multi_head", 4), *(("compositional", one) for one in (1, 2, 4))]


@pytest.mark.parametrize("task", TASKS)
def test_the_paper_preset_is_the_papers(task, studies):
    study = presets(task)["paper"]
    sizes, training = study.sizes, study.training
    width, depth, heads = (
        {"sort_of_clevr": (256, 4, 4), "triangles": (256, 4, 4), "esbn": (128, 1, 8)}
        | {"scan": (128, 3, 8), "images": (256, 2, 4), "text": (512, 6, 8)}
    )[task]
    assert (sizes.d_model, sizes.n_layers, sizes.n_heads) == (width, depth, heads)
    if task == "sort_of_clevr":
        epoch = 9800 * 30 / 64
        assert training.n_steps == pytest.approx(100 * epoch, rel=0.001)
    # Its models can be built; of images and text those of the data that there is here.
    small = studies[task].task
    mine = study.task if task in ("sort_of_clevr", "triangles", "esbn", "scan") else small
    kinds = override(study, ["seeds=0"]).trained_models()
    for cell in kinds[:2]:
        model = replace(cell, task=mine, sizes=sizes).build()
        assert isinstance(model, torch.nn.Module)
        config = model.config.attention
        kind = mechanisms.AttentionConfig, mechanisms.CompositionalAttentionConfig
        assert type(config) is kind[cell.mechanism == "compositional"]


def test_every_laptop_preset_asks_for_data_that_is_at_hand():
    for task in TASKS:
        study = presets(task)["laptop"]
        assert {one.mechanism for one in study.trained_models()} == {"multi_head", "compositional"}
        names = json.dumps(str(study.task))
        assert not any(name in names for name in ("cifar", "svhn"))


@pytest.mark.parametrize(
    ("task", "setting", "message"),
    [
        ("scan", "rules=rmts", r"rules must be left out with ScanConfig"),
        ("scan", "task.split=simple", r"cutoffs must be left out with ScanConfig"),
        ("esbn", "rules=rtms", r"rules must be among same_different, .*got rtms"),
        ("esbn", "cutoffs=22", r"cutoffs must be left out with ESBNConfig"),
        ("text", "models=single", r"models must be among multi_head, compositional, got single"),
        ("text", "n_retrievals=2,2", r"n_retrievals must be different from one another"),
        ("text", "n_test=1", r"n_test must be at least 2, got 1"),
        ("images", "sizes.n_heads=3", r"n_heads must divide d_model = 64, got 3"),
    ],
)
def test_wrong_settings_are_refused(task, setting, message):
    with pytest.raises(ValueError, match=message):
        override(presets(task)["laptop"], [setting])


def test_data_that_is_not_there_is_asked_for(studies, tmp_path):
    study = override(studies["text"], [f"task.path={tmp_path}/nothing.txt"])
    with pytest.raises(RunError, match=r"there is nothing. Put there a text file"):
        run(study, resources=Resources(root=tmp_path))


def test_a_checkpoint_is_analysed_without_training(studies, runs, results, tmp_path, monkeypatch):
    monkeypatch.setattr(running, "draw", lambda *_: None)
    cell = studies["esbn"].trained_models()[3]
    place = runs["esbn"].parent / "models" / cell.folder_name
    folder = run(studies["esbn"], resources=Resources(root=tmp_path), checkpoints=(place,))
    with xr.open_datatree(folder / "result.nc", engine="h5netcdf") as tree:
        one = tree["scores"].to_dataset().drop_attrs()
        expected = results["esbn"]["scores"].to_dataset().sel(cell=[cell.folder_name])
        # Relations of other rules are none of its groups.
        expected = expected.sel(group=one["group"], split=one["split"])
        xr.testing.assert_allclose(one, expected.drop_attrs())
    with pytest.raises(RunError, match=r"was trained on"):
        load_model_config(place, BenchmarkModel, studies["scan"].tasks())


# The command line


def printed_by(*words):
    environment = os.environ | {"COLUMNS": "100", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, timeout=120, env=environment
    )


def test_an_unknown_task_is_an_error():
    done = printed_by(str(SCRIPT), "--task", "clevr", "--preset", "smoke")
    assert done.returncode == 1
    assert "--task must be one of sort_of_clevr, triangles, esbn, scan, images, text" in done.stdout
    assert "'clevr'" in done.stdout


def test_help_names_the_tasks_and_imports_little():
    script = f"""
import sys, runpy
sys.argv = ["study", "--help"]
try:
    runpy.run_path({str(SCRIPT)!r}, run_name="__main__")
except SystemExit:
    pass
heavy = {{"transformer_lens", "dask", "datasets", "tokenizers", "matplotlib"}} & set(sys.modules)
assert not heavy, heavy
"""
    done = printed_by("-c", script)
    assert done.returncode == 0, done.stderr
    assert "--task" in done.stdout
    assert "sort_of_clevr" in done.stdout


# Figures


def test_a_grid_of_cutoffs_is_drawn_with_the_papers_figures(results):
    scores = results["scan"]["scores"].to_dataset()
    several = xr.concat([scores, scores.assign_coords(cutoff=("cell", [22, 22]))], "cell")
    figure = benchmark_figures.scores_over_grid(several, "cutoff")
    lines = figure.axes[1].get_lines()
    dashed = [one for one in lines if one.get_linestyle() == "--"]
    assert [round(value) for value in dashed[0].get_ydata()] == [11, 11]
    assert dashed[0].get_xdata().tolist() == [22, 26]


# Language models, for other studies too


def test_a_language_model_does_not_look_ahead(studies):
    config = language_model(
        studies["text"].task,
        vocabulary_size=270,
        attention=mechanisms.CompositionalAttentionConfig(n_searches=2, n_retrievals=2, d_head=4),
        d_model=8,
        d_mlp=8,
        n_layers=2,
    )
    model = mechanisms.Transformer(config, generator=torch.Generator().manual_seed(0)).eval()
    tokens = torch.arange(10)[None]
    other = tokens.clone()
    other[0, 6:] += 100
    with torch.no_grad():
        one, two = model(tokens), model(other)
    assert torch.allclose(one[:, :6], two[:, :6], atol=1e-6)
    assert not torch.allclose(one[:, 6:], two[:, 6:], atol=1e-3)


def test_a_model_that_knows_nothing_has_the_vocabularys_perplexity(studies):
    task = tasks.Text(studies["text"].task, cache=None)
    batch = task.batch("valid", 0, task.size("valid"))
    logits = torch.zeros(*batch.targets.shape, task.vocabulary_size)
    found = windows_scored(task, "valid", logits, batch)
    loss, words = (part.sum().item() for part in found["perplexity"])
    assert loss == pytest.approx(task.n_tokens("valid") * np.log(task.vocabulary_size), rel=1e-5)
    assert words == pytest.approx(task.n_words("valid") + task.n_lines("valid"), rel=1e-5)


def test_the_text_that_comes_with_python_is_written_once(tmp_path):
    place = tmp_path / "cache" / "help.txt"
    write_python_help(place)
    text = place.read_text()
    assert len(text) > 100_000
    assert text.count(" the ") > 1000
    place.write_text("mine")
    write_python_help(place)
    assert place.read_text() == "mine"
