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
from torch import nn
from transformer_lens import HookedRootModule
from transformer_lens.hook_points import HookPoint

from studies import running
from studies.coda_composition import (
    CONDITION,
    COORDINATES,
    CodaModel,
    answered,
    assemble,
    chosen_cells,
    closing_table,
    draw_figures,
    errors_of,
    matches_of,
    matrices_of,
    presets,
    run,
    saturation_of,
    signs_of,
    summary,
)
from studies.coda_figures import model_name
from studies.coda_tasks import ALL, TASKS, coda_task
from studies.running import Resources, load_model_config
from studies.runs import RunError
from studies.settings import override
from studies.training import load_weights

SCRIPT = Path(__file__).parents[2] / "studies" / "coda_composition.py"
SETTINGS = {
    "mlu": ["mechanisms=softmax,coda", "gate_centrings=none", "learning_rates=0.002"],
    "signed_pairs": [
        "mechanisms=linear,coda",
        "affinities=tanh",
        "gates=sigmoid,arctan",
        "gate_centrings=none,matrix",
    ],
}
STUDIES = {task: override(presets(task)["smoke"], words) for task, words in SETTINGS.items()}
PAIRS = coda_task(STUDIES["signed_pairs"].task)
MLU = coda_task(STUDIES["mlu"].task)
HEADED = next(one for one in STUDIES["signed_pairs"].trained_models() if one.mechanism == "coda")
FIGURES = {"accuracy", "training", "signs", "matrices"}


def command(task, *words):
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--task", task, "--preset=smoke", "--workers=1", *words],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"COLUMNS": "100", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def opened(folder):
    with xr.open_datatree(folder / "result.nc", engine="h5netcdf") as tree:
        return tree.load()


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    """The folder of a run by the command, and what it prints."""
    root = tmp_path_factory.mktemp("runs")
    printed = command("mlu", *SETTINGS["mlu"], f"--out={root}")
    (folder,) = root.glob("coda_composition-*")
    return folder, printed


@pytest.fixture(scope="module")
def runs(smoke):
    """Folders of finished runs: lines by the command, pairs in this process, without figures."""
    folder, root = smoke[0], smoke[0].parent
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(running, "draw", lambda *_: None)
        pairs = run(STUDIES["signed_pairs"], resources=Resources(root=root))
    return {"mlu": folder, "signed_pairs": pairs}


@pytest.fixture(scope="module")
def results(runs):
    return {task: opened(folder) for task, folder in runs.items()}


def test_the_command_prints_the_table_and_where_the_files_are(smoke):
    folder, printed = smoke
    for text in ("softmax", "CoDA", "most frequent answer", "76.1", "84.3", str(folder)):
        assert text in printed
    for kind in ("png", "pdf"):
        assert {path.stem for path in folder.glob(f"*.{kind}")} == FIGURES


@pytest.mark.parametrize("task", TASKS)
def test_the_result_tells_what_it_is(task, results):
    result, cells = results[task], STUDIES[task].trained_models()
    assert json.loads(result.attrs["config"])["study"]["seeds"] == [0]
    errors = result["errors"].to_dataset()
    assert errors["cell"].to_numpy().tolist() == [cell.folder_name for cell in cells]
    for name in (*CONDITION, "seed", "learning_rate"):
        assert errors[name].to_numpy().tolist() == [cell.condition[name] for cell in cells]
    coda = [cell.folder_name for cell in cells if cell.mechanism == "coda"]
    for group in ("saturation", "matrices"):
        assert result[group]["cell"].to_numpy().tolist() == coda
    for name in ("affinity_matrix", "gate_matrix", "pattern"):
        assert result["matrices"][name].ndim == 6
    assert ("sign" in result["matrices"]) == (task == "signed_pairs")
    places = {"mlu": ["encoder", "decoder", "cross"], "signed_pairs": ["a", "b"]}[task]
    assert result["signs"]["place"].to_numpy().tolist() == places
    assert result["training"]["train_step"].to_numpy().tolist() == [2, 4]
    for group in result.subtree:
        for name, variable in group.variables.items():
            assert variable.attrs.get("long_name"), (group.path, name)
    known = set().union(*(group.coords for group in result.subtree))
    assert set(COORDINATES) <= known


@pytest.mark.parametrize("task", TASKS)
def test_accuracy_is_that_of_the_best_checkpoint(task, runs, results):
    study = STUDIES[task]
    for number in (0, -1):
        cell = study.trained_models()[number]
        model = cell.build().eval()
        load_weights(model, runs[task].parent / "models" / cell.folder_name / "best.safetensors")
        batch = coda_task(cell.task).batch("ood", 1, study.n_test, "cpu")
        with torch.no_grad():
            found = model(*batch.inputs).argmax(-1)
        right = ((found == batch.targets) | ~batch.mask).all(1).double().mean().item()
        one = results[task]["errors"].to_dataset().isel(cell=number).sel(split="ood", group=ALL)
        assert one["accuracy"] == pytest.approx(right)


def test_a_finished_run_is_not_run_again(runs):
    before = (runs["mlu"] / "result.nc").stat().st_mtime_ns
    assert run(STUDIES["mlu"], resources=Resources(root=runs["mlu"].parent)) == runs["mlu"]
    assert (runs["mlu"] / "result.nc").stat().st_mtime_ns == before


def test_an_interrupted_run_ends_in_the_same_result(runs, results, tmp_path, monkeypatch):
    class Stop(Exception):
        pass

    study = replace(STUDIES["signed_pairs"], ablated=(), doubled=False)
    drawn, kind = [], type(PAIRS)
    batch = kind.batch

    def interrupted(self, split, index, size, device):
        drawn.append(split)
        if drawn.count("train") == 7:  # in the second model, behind its first checkpoint
            raise Stop
        return batch(self, split, index, size, device)

    monkeypatch.setattr(running, "draw", lambda *_: None)
    monkeypatch.setattr(kind, "batch", interrupted)
    with pytest.raises(Stop):
        run(study, resources=Resources(root=tmp_path))
    monkeypatch.setattr(kind, "batch", batch)
    found = opened(run(study, resources=Resources(root=tmp_path)))
    cells = found["errors"]["cell"].to_numpy()
    for group in ("errors", "signs", "training", "matrices"):
        one = found[group].to_dataset()
        whole = results["signed_pairs"][group].to_dataset()
        xr.testing.assert_equal(one, whole.sel(cell=[c for c in cells if c in one["cell"]]))


def test_a_checkpoint_is_analysed_without_training(runs, results, tmp_path, monkeypatch):
    monkeypatch.setattr(running, "draw", lambda *_: None)
    study = STUDIES["signed_pairs"]
    cell = study.trained_models()[-1]
    place = runs["signed_pairs"].parent / "models" / cell.folder_name
    found = opened(run(study, resources=Resources(root=tmp_path), checkpoints=(place,)))
    assert not (tmp_path / "models").exists()
    for group in ("errors", "training", "saturation"):
        one = found[group].to_dataset()
        expected = results["signed_pairs"][group].to_dataset().sel(cell=[cell.folder_name])
        expected = expected.sel({dim: one[dim] for dim in one.dims})
        xr.testing.assert_equal(one, expected)
    # There is nothing to compare it with, but it is drawn itself.
    drawn = draw_figures(found)
    assert set(drawn) == FIGURES
    (name,) = (label.get_text() for label in drawn["accuracy"].axes[0].get_yticklabels())
    assert name == "single, 2 sigm."
    with pytest.raises(RunError, match=r"was trained on"):
        load_model_config(place, CodaModel, STUDIES["mlu"].tasks())


# Settings


def test_the_laptop_trains_each_model_once():
    # Attention; CoDA plain, centred by row, and where it is asked for with a doubled gate.
    for task, kinds in (("mlu", 3 + 2), ("signed_pairs", 3 + 3 + (1 + 16 + 8 + 1))):
        study = presets(task)["laptop"]
        cells = study.trained_models()
        assert len(cells) == kinds * max(1, len(study.learning_rates)) * len(study.seeds)
        assert len({cell.folder_name for cell in cells}) == len(cells)
        assert len({json.dumps(cell.condition) for cell in cells}) == len(cells)


@pytest.mark.parametrize(
    ("task", "preset", "alignment", "centrings"),
    [
        ("mlu", "ablation", "heads", ("none", "row")),
        ("signed_pairs", "laptop", "networks", ("none", "row", "matrix")),
    ],
)
def test_the_ablation_has_all_compositions(task, preset, alignment, centrings):
    cells = presets(task)[preset].trained_models()
    found = {
        (one.affinity, one.gate, one.affinity_centring, one.gate_centring)
        for cell in cells
        if cell.alignment == alignment and (one := cell.composition) is not None
    }
    functions = ("tanh", "sigmoid", "arctan", "algebraic")
    expected = {(*pair, "none", "none") for pair in product(functions, functions)}
    expected |= {("tanh", "sigmoid", *pair) for pair in product(centrings, centrings)}
    assert found == expected


@pytest.mark.parametrize("task", TASKS)
def test_models_of_all_presets_can_be_built(task):
    for preset in ("laptop", "paper"):
        cells = presets(task)[preset].trained_models()
        for cell in {cell.name: cell for cell in cells}.values():
            small = replace(cell.sizes, d_model=8 * cell.sizes.n_heads, d_mlp=8, n_layers=1)
            model = replace(cell, sizes=small).build()
            batch = coda_task(cell.task).batch("ood", 0, 3, "cpu")
            assert answered(coda_task(cell.task), model, batch).shape == (3,)


@pytest.mark.parametrize(
    ("task", "setting", "message"),
    [
        ("mlu", "gate_centrings=none,matrix", r"gate_centrings must be among none, row, got ma"),
        ("mlu", "affinity_centrings=matrix", r"affinity_centrings must be among none, row"),
        ("mlu", "mechanisms=softmax,hyper", r"mechanisms must be among .*coda, got hyper"),
        ("mlu", "ablated=networks", r"ablated must be among heads, got networks"),
        ("mlu", "gates=relu", r"gate must be one of tanh, .*got 'relu'"),
        ("mlu", "seeds=1,1", r"seeds must be different from one another"),
        ("mlu", "learning_rates=0.1,0.1", r"learning_rates must be different"),
        ("signed_pairs", "n_test=3", r"n_test must be at least 10, got 3"),
        ("signed_pairs", "sizes.n_heads=3", r"n_heads must divide d_model = 64, got 3"),
    ],
)
def test_wrong_settings_are_told(task, setting, message):
    with pytest.raises(ValueError, match=message):
        override(presets(task)["laptop"], [setting]).trained_models()
    with pytest.raises(ValueError, match=r"mechanisms or ablated must name something"):
        replace(presets(task)["laptop"], mechanisms=(), ablated=())


# Tasks


def test_pairs_of_characters_are_those_that_a_query_sees():
    batch = MLU.batch("ood", 3, 6, "cpu")
    found = MLU.pairs(batch)
    lines, given = (part.tolist() for part in batch.inputs)
    for example in range(6):
        line, answer = lines[example], given[example]
        length = int(batch.latents["length"][example])  # and the end is asked for too
        for place, queries, keys in (
            ("encoder", line, line),
            ("decoder", answer, answer),
            ("cross", answer, line),
        ):
            expected = np.zeros((len(queries), len(keys)), bool)
            for i, j in product(range(len(queries)), range(len(keys))):
                there = line[i] != 0 if place == "encoder" else i <= length
                expected[i, j] = there and keys[j] != 0 and (place != "decoder" or j <= i)
            np.testing.assert_array_equal(found[place][example].numpy(), expected)
    assert not found["cross"].all()


def test_words_are_the_line_and_its_answer():
    batch = MLU.batch("ood", 0, 20, "cpu")
    for example in range(20):
        written, line = ("".join(words) for words in MLU.words(batch, example))
        *values, question = line.split(",")
        value = eval(
            question, dict((name, int(one)) for name, one in (v.split("=") for v in values))
        )
        assert written == f"{value}<eos>"


def test_words_tell_the_planted_signs():
    batch = PAIRS.batch("ood", 0, 10, "cpu")
    for example in range(10):
        asking, told = PAIRS.words(batch, example)
        signs = [
            [int(f"{one[-1]}1") if one[:-1] == other.split()[0] else 0 for other in told]
            for one in asking
        ]
        assert batch.latents["sign"][example].tolist() == signs
        assert PAIRS.signs(batch)["b"][example].tolist() == [
            list(row) for row in zip(*signs, strict=True)
        ]
        total = sum(row[j] * int(other.split()[1]) for row in signs for j, other in enumerate(told))
        (group,) = [name for name, of in PAIRS.groups(batch).items() if of[example] and name != ALL]
        size = abs(total)
        assert group == ("sum 1-3" if size < 4 else "sum 4-8" if size < 9 else "sum above 8")


def test_groups_of_lines_are_by_what_is_asked():
    batch = MLU.batch("id", 0, 50, "cpu")
    groups = MLU.groups(batch)
    for example in range(50):
        question = "".join(MLU.words(batch, example)[1]).split(",")[-1]
        assert {name for name, of in groups.items() if of[example]} == {
            ALL,
            question[1],
            "one variable" if question[0] == question[2] else "two variables",
        }


# What is looked at


class Aligned(HookedRootModule):
    """Pairs solved by two heads: one weighs by the planted sign (times `size`), one by chance."""

    def __init__(self, size, seed=0):
        super().__init__()
        self.size, self.random = size, np.random.default_rng(seed)
        for name in ("align_a", "align_b"):
            part = nn.Module()
            part.hook_pattern = HookPoint()
            self.add_module(name, part)
        self.setup()

    def forward(self, a, b):
        config = STUDIES["signed_pairs"].task
        key_a, polarity = (a - 1) // 2, 1 - 2 * ((a - 1) % 2)
        rest = b - 1 - 2 * config.n_keys
        key_b, level = rest // (2 * config.n_values), rest % (2 * config.n_values)
        value = level - config.n_values + (level >= config.n_values)
        sign = (key_a[:, :, None] == key_b[:, None]) * polarity[:, :, None].float()
        chance = torch.from_numpy(self.random.uniform(-1, 1, sign.shape)).float()
        self.align_a.hook_pattern(torch.stack([self.size * sign, chance], 1))
        self.align_b.hook_pattern(torch.stack([chance, chance], 1).mT)
        total = torch.einsum("bij,bj->b", sign, value.float())
        return torch.stack([-total, total], -1)[:, None]


def signs_in(model):
    batches = {split: [PAIRS.batch(split, 2, 300, "cpu")] for split in ("id", "ood")}
    scored = [signs_of(PAIRS, model, HEADED, some) for some in batches.values()]
    return xr.concat(scored, xr.Variable("split", list(batches)), combine_attrs="drop_conflicts")


@pytest.mark.parametrize("size", [0.3, -0.02, 7.0])
def test_planted_signs_are_found_whatever_the_size_of_weights(size):
    model = Aligned(size)
    tested = {split: PAIRS.batch(split, 1, 100, "cpu") for split in ("id", "ood")}
    signs = xr.concat(
        [signs_in(model), signs_in(Aligned(0.0))], xr.Variable("weights", ["trained", "untrained"])
    )
    one = signs["balanced_accuracy"].sel(scale="relative", weights="trained", place="a", layer=0)
    assert (one.sel(head=0, control="observed") == 1).all()
    assert abs(one.sel(head=1, control="observed") - 1 / 3).max() < 0.06
    assert abs(one.sel(control="shuffled") - 1 / 3).max() < 0.06
    turned = signs["turned"].sel(control="observed", scale="relative", weights="trained", head=0)
    assert (turned.sel(place="a") == (size < 0)).all()

    tree = xr.DataTree.from_dict({"errors": errors_of(PAIRS, model, tested), "signs": signs})
    result = assemble([HEADED], [tree])
    means = summary(result).isel(condition=0)["mean"]
    assert means.sel(figure="accuracy ood") == 1
    assert means.sel(figure="signs") == 1
    assert abs(means.sel(figure=["signs untrained", "signs shuffled"]) - 1 / 3).max() < 0.06
    # A third of the tokens that count are subtracted, or half of them, and 0.45 of random weights.
    planted = PAIRS.batch("ood", 2, 300, "cpu").latents["sign"].float()
    below = (size * planted < -0.1).float().mean().item()
    assert means.sel(figure="negative") == pytest.approx((below + 3 * 0.45) / 4, abs=0.02)


def test_accuracy_is_counted_one_by_one():
    class Positive(nn.Module):
        def forward(self, a, b):
            return torch.tensor([0.0, 1.0]).expand(len(a), 1, 2)

    tested = {split: PAIRS.batch(split, 1, 400, "cpu") for split in ("id", "ood")}
    found = errors_of(PAIRS, Positive(), tested)
    for split, batch in tested.items():
        totals = batch.latents["total"].tolist()
        for group, least, most in ((ALL, 0, 99), ("sum 1-3", 1, 3), ("sum above 8", 9, 99)):
            mine = [total > 0 for total in totals if least <= abs(total) <= most]
            one = found.sel(split=split, group=group)
            share = sum(mine) / len(mine)
            half = 1.96 * np.sqrt(share * (1 - share) / len(mine))
            assert one["n"] == len(mine)
            assert one["accuracy"] == pytest.approx(share)
            assert one["accuracy_low"] == pytest.approx(share - half, abs=0.03)
            assert one["accuracy_high"] == pytest.approx(share + half, abs=0.03)
    assert (found["chance"] == 0.5).all()


def scaled(cell, factor):
    """A model whose functions are saturated in part."""
    model = cell.build().eval()
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if name.endswith(("W_Q", "W_K")) or "align" in name or "embed" in name:
                weights *= factor
    return model


@pytest.mark.parametrize(
    ("task", "alignment", "prefix"),
    [
        ("mlu", "heads", "decoder_blocks.{}.cross_attn."),
        ("signed_pairs", "heads", "align_a."),
        ("signed_pairs", "networks", ""),
    ],
)
def test_matrices_are_what_the_hooks_show(task, alignment, prefix):
    cells = STUDIES[task].trained_models()
    cell = next(c for c in cells if c.mechanism == "coda" and c.alignment == alignment)
    about, model = coda_task(cell.task), scaled(cell, 3.0)
    batch = about.batch("ood", 0, 4, "cpu")
    shown = matrices_of(about, model, cell, batch)
    shown = shown.transpose("layer", "example", "head", "query_pos", "key_pos")
    _, cache = model.run_with_cache(*batch.inputs)
    valid = about.pairs(batch)[about.SHOWN][:, None].numpy()
    for layer in range(shown.sizes["layer"]):
        one = shown.isel(layer=layer)
        for name, hook in (("affinity_matrix", "affinity"), ("gate_matrix", "gate")):
            seen = cache[prefix.format(layer) + f"hook_{hook}"].numpy()
            np.testing.assert_array_equal(one[name], np.where(valid, seen, np.nan))
        product_of = np.tanh(one["affinity_matrix"]) * one["gate_matrix"]
        np.testing.assert_allclose(one["pattern"], product_of, atol=1e-6)
    assert shown["query"].transpose(..., "query_pos").to_numpy().tolist() == [
        about.words(batch, example)[0] for example in range(4)
    ]
    assert ("sign" in shown) == (task == "signed_pairs")


def test_saturation_is_a_share_of_the_pairs_that_are_there():
    cell = next(one for one in STUDIES["mlu"].trained_models() if one.mechanism == "coda")
    model = scaled(cell, 3.0)
    batches = [MLU.batch("id", index, 5, "cpu") for index in (0, 1)]
    found = saturation_of(MLU, model, cell, batches)["saturated"]
    caches = [model.run_with_cache(*batch.inputs)[1] for batch in batches]
    starts = {"encoder": "encoder_blocks.{}.attn", "cross": "decoder_blocks.{}.cross_attn"}
    for (place, start), layer, head in product(starts.items(), (0, 1), (0, 1)):
        for quantity, limit in (("affinity", 2.0), ("dissimilarity", 3.0)):
            name = f"{start.format(layer)}.hook_{quantity}"
            values = np.concatenate(
                [
                    cache[name][:, head].numpy()[MLU.pairs(batch)[place].numpy()]
                    for cache, batch in zip(caches, batches, strict=True)
                ]
            )
            one = found.sel(place=place, layer=layer, head=head, quantity=quantity)
            assert one.sel(side="low") == pytest.approx((values <= -limit).mean())
            assert one.sel(side="high") == pytest.approx((values >= limit).mean())
    assert (found.sel(quantity="affinity") > 0.01).all()
    # N is minus a distance.
    assert (found.sel(quantity="dissimilarity", side="high") == 0).all()


def test_of_several_learning_rates_that_counts_which_is_best_on_id():
    study = replace(STUDIES["mlu"], learning_rates=(0.001, 0.01), seeds=(0, 1))
    cells = [one for one in study.trained_models() if one.mechanism == "coda"]
    rates = [cell.training.learning_rate for cell in cells]
    assert rates == [0.001, 0.001, 0.01, 0.01]
    accuracy = np.array([[0.5, 0.9], [0.7, 0.9], [0.9, 0.1], [0.2, 0.3]])
    names = {name: ("cell", [cell.condition[name] for cell in cells]) for name in CONDITION}
    errors = xr.Dataset(
        {"accuracy": (("cell", "split", "group"), accuracy[:, :, None])},
        coords={"cell": [one.folder_name for one in cells], "split": ["id", "ood"], "group": [ALL]}
        | {"learning_rate": ("cell", rates)}
        | names,
    )
    assert chosen_cells(errors).to_numpy().tolist() == [1, 1, 0, 0]
    # On ood the other one were better; that must not be looked at.
    assert chosen_cells(errors.isel(split=[1, 0])).to_numpy().tolist() == [1, 1, 0, 0]


# Figures


def named(**changes):
    usual = {"model": "coda", "alignment": "heads", "affinity": "tanh", "gate": "sigmoid"}
    usual |= {"affinity_centring": "none", "gate_centring": "none", "doubled": 0}
    return model_name(usual | changes)


def test_names_say_what_differs_from_the_basic_form():
    assert named() == "CoDA"
    assert named(doubled=1) == "CoDA, 2 sigm."
    assert named(affinity="arctan", gate="tanh") == "CoDA, arctan × tanh"
    assert named(affinity="algebraic", doubled=1) == "CoDA, alg. × 2 sigm."
    assert named(gate_centring="row") == "CoDA, N by row"
    both = {"affinity_centring": "matrix", "gate_centring": "matrix"}
    assert named(alignment="networks", **both) == "single, E, N by matrix"
    assert named(**both | {"gate_centring": "row"}) == "CoDA, E matrix, N row"
    assert named(model="linear_relu", affinity="", gate="") == "linear relu"
    for task in TASKS:
        cells = presets(task)["laptop"].trained_models()
        names = {cell.name: model_name(cell.condition) for cell in cells}
        assert len(set(names.values())) == len(names)
        assert max(map(len, names.values())) <= 26


@pytest.mark.parametrize("task", TASKS)
def test_figures_and_table_are_drawn(task, results):
    drawn = draw_figures(results[task])
    assert set(drawn) == FIGURES | ({"ablation"} if task == "signed_pairs" else set())
    for name, figure in drawn.items():
        file = io.BytesIO()
        figure.savefig(file, dpi=40)
        assert np.asarray(Image.open(file)).std() > 1, name
    console = Console(width=100)
    with console.capture() as capture:
        console.print(closing_table(results[task]))
    shown = "M<0" if task == "mlu" else "single, tanh × arctan"
    assert shown in capture.get()


def test_a_match_is_any_sign_where_a_token_counts():
    # Of those to be subtracted 0.1 are ignored, of those to be added 0.3, of the others 0.8.
    confusion = xr.DataArray(
        [[0.6, 0.1, 0.3], [0.1, 0.8, 0.1], [0.5, 0.3, 0.2]],
        dims=("sign", "found"),
        coords={"sign": [-1, 0, 1], "found": [-1, 0, 1]},
    )
    found = matches_of(xr.Dataset({"confusion": confusion}))
    assert found.item() == pytest.approx(((0.9 + 0.7) / 2 + 0.8) / 2)


def texts_of(axis):
    return [text.get_text() for text in axis.texts]


def test_the_ablation_shows_accuracies_on_ood(results):
    errors = results["signed_pairs"]["errors"].to_dataset().sel(split="ood", group=ALL)
    errors = errors.isel(cell=(errors["alignment"] == "networks").to_numpy())
    by_name = {
        model_name({name: one[name].item() for name in CONDITION}): f"{100 * one['accuracy']:.1f}"
        for one in (errors.isel(cell=number) for number in range(errors.sizes["cell"]))
    }
    functions, centring, beside, _ = draw_figures(results["signed_pairs"])["ablation"].axes
    expected = ["single CoDA", "single, tanh × arctan"]
    assert texts_of(functions) == [by_name[name] for name in expected]
    assert texts_of(centring) == [by_name[name] for name in ("single CoDA", "single, N by matrix")]
    kept = [label.get_text().replace("\n", " ") for label in beside.get_yticklabels()]
    assert kept == ["softmax", "CoDA", "CoDA, 2 sigm."]
    expected = ["single softmax", "single CoDA", "single, 2 sigm."]
    assert texts_of(beside) == [by_name[name] for name in expected]


def test_figures_compare_the_forms_of_the_paper_and_their_best_rates(results):
    headed = ["linear", "CoDA", "CoDA, 2 sigm."]
    single = ["single CoDA", "single, N by matrix", "single, 2 sigm."]
    for task, names in (
        ("mlu", ["softmax", "CoDA"]),
        ("signed_pairs", [*headed, "single softmax", *single]),
    ):
        drawn = draw_figures(results[task])
        first = drawn["accuracy"].axes[0]
        assert [label.get_text() for label in first.get_yticklabels()] == names
        titles = [axis.get_title() for axis in drawn["signs"].axes]
        assert titles[: len(names)] == names
        told = []
        for axis in drawn["training"].axes:
            if (legend := axis.get_legend()) is not None:
                told += [text.get_text() for text in legend.get_texts()][:-2]
        assert told == names
    result = results["signed_pairs"].copy(deep=True)
    for name in ("errors", "signs", "training", "matrices"):
        data = result[name].to_dataset()
        other = ((data["model"] != "linear") | (data["seed"] > 0)).astype(int)
        result[name] = xr.DataTree(data.assign_coords(chosen=other))
    first = draw_figures(result)["accuracy"].axes[0]
    assert [label.get_text() for label in first.get_yticklabels()] == names[1:]


def test_matrices_leave_padding_out(results):
    data = results["mlu"]["matrices"].to_dataset()
    affinity, gate, pattern = draw_figures(results["mlu"])["matrices"].axes[:3]
    keys = [label.get_text() for label in affinity.get_xticklabels()]
    assert "" not in keys
    assert "".join(keys) in {"".join(row) for row in data["key"].isel(example=0).to_numpy()}
    shown = [np.asarray(axis.get_images()[0].get_array()) for axis in (affinity, gate, pattern)]
    assert all(np.isfinite(one).all() for one in shown)
    np.testing.assert_allclose(shown[2], np.tanh(shown[0]) * shown[1], atol=1e-6)


def test_the_matrix_that_is_drawn_is_of_the_head_that_agrees_best(results):
    result = results["signed_pairs"].copy(deep=True)
    data = result["matrices"].to_dataset()
    right = result["errors"]["accuracy"].sel(split="id", group=ALL, cell=data["cell"].to_numpy())
    best = int(right.to_numpy().argmax())
    pattern = data["pattern"].copy()
    sign = data["sign"].isel(cell=best)
    pattern[{"cell": best, "head": -1}] = -0.5 * sign.to_numpy()[None]
    result["matrices"] = xr.DataTree(data.assign(pattern=pattern))
    figure = draw_figures(result)["matrices"]
    title = figure.get_suptitle()
    assert "correlation with the planted signs: -1.00" in title
    weights, planted = (np.asarray(axis.get_images()[0].get_array()) for axis in figure.axes[2:4])
    np.testing.assert_allclose(weights, -0.5 * planted)
    limits = [axis.get_images()[0].get_clim() for axis in figure.axes[2:4]]
    assert limits == [(-0.5, 0.5), (-1, 1)]
