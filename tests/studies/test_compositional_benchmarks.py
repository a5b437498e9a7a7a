import json
from collections import Counter
from dataclasses import replace
from io import StringIO
from itertools import product
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
import xarray as xr
from PIL import Image
from rich.console import Console
from torch import nn
from torch.nn.functional import one_hot, softmax
from transformer_lens import HookedRootModule
from transformer_lens.hook_points import HookPoint

import mechanisms
import tasks
from studies import compositional_benchmarks
from studies.engine import ALL, Resources, RunError, Study, Trained, read, read_result, run
from studies.engine.cells import Cell
from studies.engine.checkpoints import load_weights
from studies.engine.claims import judge
from studies.engine.examples import Examples
from studies.engine.fairness import assess
from studies.engine.scoring import score
from studies.setups.benchmark import (
    ABOUT_AS_MANY_PARAMETERS,
    PAPERS_WIDTH,
    gain,
    pairing,
    value_scores,
)
from tests.studies.engine.synthetic import result_of

pytestmark = pytest.mark.slow

STUDIES = {
    study.name: study
    for study in vars(compositional_benchmarks).values()
    if isinstance(study, Study)
}


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
def changes(tmp_path_factory):
    """What the smoke presets differ in here: images and text are made, examples are few."""
    folder = tmp_path_factory.mktemp("data")
    tiny_images(folder)
    (folder / "book.txt").write_text("It was a bright cold day in April, and so on.\n" * 80)
    images = [f"task.folder={folder}", "task.sources=colours,triangles", "task.n_valid=4"]
    text = [f"task.path={folder / 'book.txt'}", "task.vocabulary_size=270", "task.length=16"]
    with pytest.MonkeyPatch.context() as patch:
        # Nothing is left in the user's cache.
        patch.setattr("tasks.stored.text.save_arrays", lambda *_: None)
        yield {
            "images": [*images, "task.image_size=16"],
            "text": [*text, "n_validation=4"],
            "esbn": ["n_layers=1"],
            "sort_of_clevr": ["seed=0"],
        }


@pytest.fixture(scope="module")
def plans(changes):
    return {n: study.plan("smoke", changes.get(n, [])) for n, study in STUDIES.items()}


@pytest.fixture(scope="module")
def folders(changes, tmp_path_factory):
    """The folders of finished runs; figures are drawn by their own test, but for those of scan."""
    root, found = tmp_path_factory.mktemp("runs"), {}
    for name, study in STUDIES.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("studies.setups.benchmark.N_EXAMPLES", 60)
            if name != "scan":
                patch.setattr("studies.engine.execution.draw", lambda *_: None)
            resources = Resources(root=root, workers=1)
            found[name] = run(study, "smoke", changes.get(name, []), resources=resources)
    return found


@pytest.fixture(scope="module")
def results(folders):
    return {name: read_result(folder / "result.nc") for name, folder in folders.items()}


def model_of(setup, folder):
    model = setup.build(torch.Generator().manual_seed(setup.seed)).eval()
    place = folder.parent / "models" / Cell(setup, root=folder.parent).name
    load_weights(model, place / "best.safetensors", device="cpu")
    return model


# The runs


def test_there_is_a_study_for_each_benchmark():
    assert list(STUDIES) == ["sort_of_clevr", "triangles", "esbn", "scan", "images", "text"]


@pytest.mark.parametrize("name", STUDIES)
def test_all_is_there(name, plans, results, folders):
    result, study = results[name], STUDIES[name]
    models = [setup.model for setup in plans[name].cells]
    assert result["scores"]["model"].to_numpy().tolist() == models
    # Multi-head attention has no retrievals of its own: it is trained once, whatever R.
    of_heads = result["scores"]["model"].to_numpy() == "multi_head"
    assert np.isnan(result["scores"]["n_retrievals"].to_numpy()[of_heads]).all()
    assert set(result["scores"]["n_retrievals"].to_numpy()[~of_heads]) == {2}
    headline = "perplexity" if name == "text" else "accuracy"
    assert np.isfinite(result["scores"][headline].isel(split=0).sel(group=ALL)).all()
    drawn = {view: draw(result) for view, draw in study.views.items()}
    others = {f"value_scores_R{n}" for n in (3, 4, 6, 8)} | {"cutoffs", "tuning"}
    assert {view for view, figure in drawn.items() if figure is None} == others & set(drawn)
    plt.close("all")
    if name == "scan":
        pictures = {path.stem for path in folders[name].glob("*.png")}
        assert pictures == {"loss", "scores", "training"}
    stream = StringIO()
    Console(width=120, file=stream).print(study.table.render(result))
    printed = stream.getvalue()
    theirs = {"triangles": ["93.8", "96.7"], "scan": ["11.0", "27.0"], "sort_of_clevr": ["88.2"]}
    for text in ("multi-head", "weights", "MFLOP", *theirs.get(name, [])):
        assert text in printed


@pytest.mark.parametrize("name", STUDIES)
def test_costs_are_those_of_the_model(name, plans, results):
    costs = results[name]["costs"].to_dataset()
    for number, setup in enumerate(plans[name].cells):
        weights = sum(one.numel() for one in setup.build(torch.Generator()).parameters())
        assert costs["parameters"][number] == weights
    # A search chooses among the retrievals: that is more work than a head of its own.
    compositional = costs["operations"][costs["model"] == "compositional"].min()
    assert compositional > costs["operations"][costs["model"] == "multi_head"].min()


def test_accuracy_is_that_of_the_best_checkpoint_counted_one_by_one(plans, folders, results):
    scores = results["sort_of_clevr"]["scores"].to_dataset().sel(split="test")
    types = list(tasks.SORT_OF_CLEVR_QUESTIONS)
    for number, setup in enumerate(plans["sort_of_clevr"].cells):
        model = model_of(setup, folders["sort_of_clevr"])
        batch = tasks.SortOfClevr(setup.task).batch("test", 0, 60)
        with torch.no_grad():
            right = model(*batch.inputs)[:, 0].argmax(-1) == batch.targets[:, 0]
        kinds = batch.latents["question_type"].tolist()
        found = scores.isel(cell=number)
        for kind, name in enumerate(types):
            mine = [bool(one) for one, other in zip(right, kinds, strict=True) if other == kind]
            one = found.sel(group=name)
            assert one["n_examples"] == len(mine)
            assert one["accuracy"] == pytest.approx(sum(mine) / len(mine))
            assert one["accuracy_chance"] == setup.sampler().chance("test")[name]
            assert one["accuracy_low"] <= one["accuracy"] <= one["accuracy_high"]
        assert found["accuracy"].sel(group=ALL) == pytest.approx(right.float().mean().item())


def test_questions_about_one_picture_count_as_one(plans):
    """Right on half of the pictures: the interval is that of pictures, not of 30 questions each."""
    setup = plans["sort_of_clevr"].cells[0]
    setup = replace(setup, task=replace(setup.task, n_test=40))
    batch = setup.sampler().batch("test", 0, 1200)
    known = batch.latents["image"] % 2 == 0
    answers = torch.where(known, batch.targets[:, 0], (batch.targets[:, 0] + 1) % 10)

    class Half(nn.Module):
        def forward(self, image, question):
            return 9.0 * one_hot(answers, 10)[:, None].float()

    found = score(setup, Half(), [batch], "test").interval(setup)
    # The normal approximation of a share of 40.
    half = 1.96 * np.sqrt(0.25 / 40)
    assert found.estimate[0, 0] == 0.5
    assert found.high[0, 0] - found.low[0, 0] == pytest.approx(2 * half, rel=0.1)


def test_perplexity_is_per_word_and_bits_per_byte(plans, folders, results):
    (setup, *_) = plans["text"].cells
    model, text = model_of(setup, folders["text"]), Path(setup.task.path).read_text()
    task, total = setup.sampler(), 0.0
    for window in range(task.size("test")):
        batch = task.batch("test", window, 1)
        with torch.no_grad():
            chances = model(batch.inputs)[0].log_softmax(-1)
        wanted = zip(batch.targets[0].tolist(), batch.mask[0].tolist(), strict=True)
        total -= sum(chances[n, t].item() * counts for n, (t, counts) in enumerate(wanted))
    tested = text[len(text) - task.n_bytes("test") :]
    one = results["text"]["scores"].to_dataset().isel(cell=0).sel(split="test", group=ALL)
    n_words = len(tested.split()) + tested.count("\n")
    assert one["perplexity"] == pytest.approx(np.exp(total / n_words), rel=1e-4)
    assert one["bits_per_byte"] == pytest.approx(total / np.log(2) / len(tested), rel=1e-4)


def test_a_model_that_knows_nothing_has_the_vocabularys_perplexity(plans):
    setup = plans["text"].cells[0]
    task = setup.sampler()
    batch = task.batch("valid", 0, task.size("valid"))
    logits = torch.zeros(*batch.targets.shape, task.vocabulary_size)
    found = setup.scores(logits, batch, "valid")
    loss, words = (part.sum().item() for part in found["perplexity"])
    assert loss == pytest.approx(task.n_tokens("valid") * np.log(task.vocabulary_size), rel=1e-5)
    assert words == pytest.approx(task.n_words("valid") + task.n_lines("valid"), rel=1e-5)


def test_chance_is_what_the_questions_of_the_same_split_tell(plans):
    """The most frequent answer to each kind of question, in training; right in the split."""
    setup = plans["sort_of_clevr"].cells[0]
    task, kinds, answers = setup.sampler(), {}, {}
    for split in ("train", "test"):
        batch = task.batch(
            split, 0, task.size(split) if split != "train" else 30 * task.config.n_train
        )
        # Six colours twice; then what is asked.
        kinds[split] = [tuple(row) for row in batch.inputs[1][:, 12:].tolist()]
        answers[split] = batch.targets[:, 0].tolist()
    usual = {
        kind: Counter(
            a for k, a in zip(kinds["train"], answers["train"], strict=True) if k == kind
        ).most_common(1)[0][0]
        for kind in set(kinds["train"])
    }
    right = [usual[k] == a for k, a in zip(kinds["test"], answers["test"], strict=True)]
    chance = setup.references("test")["chance"]["accuracy"]
    assert chance[ALL] == pytest.approx(np.mean(right))
    assert chance[ALL] != setup.references("valid")["chance"]["accuracy"][ALL]


def test_scan_is_right_if_every_action_is(plans):
    setup = plans["scan"].cells[0]
    trimmed = setup.sampler().batch("ood", 0, 50)
    assert trimmed.targets.shape[1] == trimmed.latents["length"].max() + 1
    assert trimmed.mask.sum() == (trimmed.latents["length"] + 1).sum()
    right = one_hot(trimmed.targets, len(tasks.SCAN_ACTIONS)).float()
    wrong = right.clone()
    wrong[0, 3] = wrong[0, 3].roll(1)
    for output, expected in ((right, 1.0), (wrong, 0.0)):
        found = setup.scores(output, trimmed, "ood")
        assert found["accuracy"][0][0] == expected
        assert (found["accuracy"][0][1:] == 1).all()
    of_tokens = found["token_accuracy"]
    assert (of_tokens[1] - of_tokens[0])[0] == pytest.approx(1, abs=1e-5)
    lengths = torch.stack(list(setup.groups(trimmed).values()))
    assert (lengths.sum(0) == 1).all()


# Value scores


def test_value_scores_are_means_of_what_the_hooks_show(plans, folders, results):
    found = results["sort_of_clevr"]["value_scores"].to_dataset()
    known = np.isfinite(found["tightness"].to_numpy())
    assert known.tolist() == [
        setup.model == "compositional" for setup in plans["sort_of_clevr"].cells
    ]
    assert np.allclose(found["value_scores"].sum("retrieval")[known], 1, atol=1e-5)
    number = int(known.argmax())
    setup = plans["sort_of_clevr"].cells[number]
    batch = setup.sampler().batch("test", 0, 60)
    _, cache = model_of(setup, folders["sort_of_clevr"]).run_with_cache(*batch.inputs)
    binary = batch.latents["question_type"] == 1
    for layer in (0, 1):
        shown = cache[f"blocks.{layer}.attn.hook_value_scores"][binary]
        one = found["value_scores"].isel(cell=number).sel(layer=layer, group="binary")
        assert np.allclose(one.sel(token="all"), shown.mean((0, 1)), atol=1e-5)
        assert np.allclose(one.sel(token="last"), shown[:, -1].mean(0), atol=1e-5)


class Chooses(HookedRootModule):
    """Two searches with two retrievals; which they choose can depend on the question's type."""

    def __init__(self, sharpness, by_type):
        super().__init__()
        self.sharpness, self.by_type = sharpness, by_type
        self.weights = nn.Parameter(torch.zeros(1))
        attn, block = nn.Module(), nn.Module()
        attn.hook_value_scores = HookPoint()
        block.attn = attn
        self.blocks = nn.ModuleList([block])
        self.setup()

    def forward(self, image, question):
        unary = question[:, 12] == 1
        choice = torch.tensor([0, 1])[None] ^ (unary & self.by_type).long()[:, None]
        scores = softmax(self.sharpness * one_hot(choice, 2).float(), -1)
        self.blocks[0].attn.hook_value_scores(scores[:, None].expand(-1, 3, -1, -1))
        return torch.zeros(len(image), 1, 10)


@pytest.mark.parametrize(
    ("sharpness", "by_type", "tightness", "difference"),
    # Of three pairs of types two differ wholly; and a third of questions takes turns.
    [(99.0, False, 1.0, 0.0), (0.0, True, 0.5, 0.0), (99.0, True, 2 / 3, 2 / 3)],
)
def test_planted_pairings_are_seen(plans, sharpness, by_type, tightness, difference):
    setup = next(one for one in plans["sort_of_clevr"].cells if one.model == "compositional")
    trained = Trained(
        setup, Chooses(sharpness, by_type), 1, "cpu", Examples(setup, "cpu").fresh("x")
    )
    trained.__dict__["untrained"] = Chooses(0.0, False)
    found = value_scores(trained)
    assert found["tightness"] == pytest.approx(tightness, abs=1e-5)
    assert found["difference"] == pytest.approx(difference, abs=1e-5)
    assert found["tightness_untrained"] == pytest.approx(0.5)
    assert found["difference_untrained"] == pytest.approx(0, abs=1e-6)
    assert value_scores(replace(trained, setup=replace(setup, n_retrievals=1))) is None


def test_a_pairing_is_tight_where_each_search_uses_one_retrieval_in_a_layer():
    even, one = np.full((2, 4), 0.25), np.eye(4)[[2, 0]]
    of_two = np.array([[1.0, 0, np.nan, np.nan]] * 2)
    half = (even + one) / 2
    # [cell, layer, search, retrieval]
    shares = np.array([[even * np.nan] * 2, [even, even], [even, one], [half, even], [of_two] * 2])
    data = xr.DataArray(
        shares[:, None, None],
        {"group": ["all"], "token": ["all"], "n_retrievals": ("cell", [1, 4, 4, 4, 2])},
        ("cell", "group", "token", "layer", "search", "retrieval"),
    )
    result = xr.DataTree.from_dict({"value_scores": xr.Dataset({"value_scores": data})})
    assert pairing(result) == pytest.approx([np.nan, 0, 1, 0.5, 1], nan_ok=True)


# Presets

N_CELLS = {
    # Seeds times models.
    ("sort_of_clevr", "retrievals"): 3 * (1 + 5 + 1 + 1) + 3 * (4 + 1),
    ("sort_of_clevr", "more-retrievals"): 3 * (1 + 3),
    ("sort_of_clevr", "more-heads"): 2 * 6,
    ("sort_of_clevr", "counts"): 3 * (1 + 4),
    ("sort_of_clevr", "paper"): 5 * (1 + 4 + 4 + 1 + 2 + 2 + 1),
    ("triangles", "retrievals"): 2 * 3 * (1 + 3 + 1),
    ("triangles", "pairing"): 3 * 5,
    ("triangles", "counts"): 3 * (1 + 3),
    ("triangles", "paper"): 3 * (1 + 3 + 3),
    ("esbn", "withheld"): 5 * (5 + 4) * 3,
    ("esbn", "most-withheld"): 40 * 3 * 3,
    ("esbn", "distribution"): 2 * 3 * 2 * 3,
    ("esbn", "paper"): 10 * 5 * 6,
    ("esbn", "paper-rmts"): 10 * 4 * 6,
    ("esbn", "paper-distribution-of-three"): 10 * 4 * 6,
    ("esbn", "paper-identity-rules"): 10 * 4 * 6,
    ("scan", "cutoffs"): 3 * 3 * 2,
    ("scan", "paper"): 5 * 8 * 5,
    ("images", "paper"): 3 * 5,
    ("text", "paper"): 3 * 2,
}


@pytest.mark.parametrize(("name", "preset"), N_CELLS)
def test_the_number_of_cells_of_a_preset(name, preset):
    assert len(STUDIES[name].plan(preset).cells) == N_CELLS[name, preset]


def test_other_widths_and_heads_of_sort_of_clevr_have_their_hidden_units():
    cells = STUDIES["sort_of_clevr"].plan("paper", ["seed=0"]).cells
    sizes = {(cell.d_model, cell.d_mlp, cell.n_heads) for cell in cells}
    assert sizes == {(32, 64, 2), (256, 512, 4), (256, 512, 8), (512, 1024, 4), (512, 1024, 8)}
    of_mlp = [cell for cell in cells if cell.scorer == "mlp"]
    assert [cell.n_retrievals for cell in of_mlp] == [1, 2, 3, 4]


def test_attention_of_a_language_model_has_its_own_rate():
    cells = STUDIES["text"].plan("paper").cells
    rates = {(cell.model, cell.training.learning_rate) for cell in cells}
    assert rates == {("multi_head", 2e-3), ("compositional", 4e-3)}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("scorer=mlp", {"scorer": "mlp"}),
        ("separate_value_keys=true", {"separate_value_keys": True}),
        ("chosen_by=gumbel", {"selection": "gumbel"}),
        ("chosen_by=hard", {"selection": "hard"}),
        ("chosen_by=top_k n_selected=2", {"selection": "top_k", "n_selected": 2}),
        ("d_selection=5", {"d_selection": 5}),
        ("own_value=true", {"own_value": True}),
    ],
)
@pytest.mark.parametrize("name", STUDIES)
def test_all_options_of_the_attention_are_settings(name, change, expected):
    multi_head, *others = (
        STUDIES[name].plan("laptop", ["n_retrievals=3", *change.split()]).cells[:2]
    )
    attention = others[0].attention
    assert {key: getattr(attention, key) for key in expected} == expected
    if "own_value" in change:
        assert multi_head.attention.own_value


@pytest.mark.parametrize("name", STUDIES)
def test_the_laptop_preset(name):
    steps, batch, rate, n_cells = {
        "sort_of_clevr": (12_000, 256, 2e-3, 2),
        "triangles": (8000, 64, 4e-3, 2),
        "esbn": (3000, 32, 2e-3, 4),
        "scan": (6000, 64, 2e-3, 2),
        "images": (4000, 64, 1e-3, 2),
        "text": (3000, 16, 8e-3, 2),
    }[name]
    plan = STUDIES[name].plan("laptop")
    training = plan.setup.training
    assert (training.n_steps, training.batch_size, training.learning_rate) == (steps, batch, rate)
    assert (training.warmup_steps, training.evaluate_every) == (200, steps // 10)
    assert training.checkpoint == ("last" if name == "esbn" else "best")
    assert len(plan.cells) == n_cells
    # Data that is at hand.
    assert not any(one in json.dumps(plan.config["setup"]) for one in ("cifar", "svhn"))


@pytest.mark.parametrize("preset", ["smoke", "laptop", "paper"])
@pytest.mark.parametrize("name", STUDIES)
def test_every_preset_trains(name, preset, plans):
    plan = STUDIES[name].plan(preset)
    for setup in {one.model: one for one in plan.cells}.values():
        if name in ("sort_of_clevr", "triangles", "images", "text"):
            # Pictures and text that are here; the patches fit the triangles.
            setup = replace(setup, task=plans[name].setup.task)
        if name == "triangles":
            setup = replace(setup, patch_size=16)
        model = setup.build(torch.Generator().manual_seed(0))
        kind = mechanisms.AttentionConfig, mechanisms.CompositionalAttentionConfig
        assert type(setup.attention) is kind[setup.model == "compositional"]
        assert torch.isfinite(setup.loss(model, setup.sampler().batch("train", 0, 2), 0))


@pytest.mark.parametrize("preset", ["smoke", "laptop", "paper"])
def test_examples_are_left_to_score_where_others_choose(preset):
    sizes = {
        "sort_of_clevr": lambda task: 30 * task.n_valid,
        "triangles": lambda task: task.n_valid,
        "scan": lambda task: task.size_of_id,
        "images": lambda task: task.n_valid + task.triangles.n_valid,
    }
    for name, size in sizes.items():
        setup = STUDIES[name].plan(preset).setup
        assert setup.n_validation <= size(setup.task) / 2, name


@pytest.mark.parametrize("name", STUDIES)
def test_models_have_the_dropout_of_their_settings(name, plans):
    config = replace(plans[name].cells[0], dropout=0.3).build(torch.Generator()).config
    mlp, is_picture = config.feed_forward, name in ("sort_of_clevr", "triangles", "images")
    assert mlp.dropout == (0.0 if name == "text" else 0.3)
    assert mlp.output_dropout == (0.3 if is_picture else 0.0)
    # Of the embedding and what a part of a block adds.
    assert getattr(config, "dropout", 0.0) == (0.3 if name in ("scan", "text") else 0.0)
    assert config.attention.dropout == (0.3 if name == "scan" else 0.0)


def test_the_grids_of_esbn_have_the_pairs_that_there_are():
    presets = [preset for name, preset in N_CELLS if name == "esbn" and "paper" in preset]
    plans = [STUDIES["esbn"].plan(preset, ["seed=0"]) for preset in presets]
    cells = [cell for plan in plans for cell in plan.cells]
    steps = {(c.task.rule, c.task.n_withheld): c.training.n_steps for c in cells}
    assert len(steps) == 4 * 4 + 1
    assert steps["same_different", 98] == 100
    assert ("rmts", 98) not in steps
    assert all(("ood" in cell.splits) == (cell.task.n_withheld > 0) for cell in cells)


def test_multi_head_attention_is_trained_once_whatever_r():
    cells = STUDIES["triangles"].plan("paper", ["seed=0", "scorer=dot"]).cells
    assert [one.model for one in cells] == ["multi_head"] + 3 * ["compositional"]
    assert [one.n_retrievals for one in cells[1:]] == [1, 2, 4]


def test_a_kind_of_questions_is_compared_where_some_model_has_learned_it():
    for kind in tasks.SORT_OF_CLEVR_QUESTIONS:
        claims = [
            claim
            for claim in STUDIES["sort_of_clevr"].claims
            if claim.statement.endswith(f": {kind}")
        ]
        # Compositional attention against as many heads, and more heads; its two scorers.
        assert len(claims) == 3
        for claim in claims:
            assert claim.trained is not None
            assert (claim.trained.group, claim.trained.share_of) == (kind, "chance")


@pytest.mark.parametrize("name", ["sort_of_clevr", "triangles"])
def test_models_are_counted_at_the_sizes_of_the_paper(name):
    plan = STUDIES[name].plan
    counted, theirs = (
        {
            (one.model, one.n_retrievals): [
                tuple(weight.shape)
                for weight in one.build(torch.Generator().manual_seed(0)).parameters()
            ]
            for one in plan(preset, ["seed=0", "scorer=dot"]).cells
            if one.d_model == PAPERS_WIDTH and one.n_heads == 4
        }
        for preset in ("counts", "paper")
    )
    assert counted == theirs
    assert len(counted) > 3


@pytest.mark.parametrize(
    ("width", "extra", "verdict"),
    [(256, 5, "holds"), (256, 8, "contradicted"), (64, 8, "not run")],
)
def test_weights_are_compared_at_the_papers_width(width, extra, verdict):
    alike = {"n_retrievals": 2, "d_model": width, "id": 0.5, "ood": 0.5}
    tree = result_of(
        [
            alike | {"model": model, "seed": seed, "parameters": number}
            for model, number in (("compositional", 100 + extra), ("multi_head", 100))
            for seed in range(3)
        ]
    )
    found = judge(tree, [ABOUT_AS_MANY_PARAMETERS], assess(tree, None))
    assert found["verdict"].to_numpy().tolist() == [verdict]


def test_papers_figures_are_those_of_its_tables():
    def theirs(name, split, group, changes=(), **settings):
        cells = STUDIES[name].plan("paper", ["seed=0", *changes]).cells
        return {
            one.n_retrievals if one.model == "compositional" else 0: known.value
            for one in cells
            for known in one.paper()
            if (known.split, known.group) == (split, group)
            if all(getattr(one, key) == value for key, value in settings.items())
        }

    sizes = {"d_model": 256, "n_heads": 4}
    ternary = theirs("sort_of_clevr", "test", "ternary", **sizes, scorer="dot")
    assert ternary == {0: 0.649, 1: 0.664, 2: 0.669, 3: 0.671, 4: 0.648}
    binary = theirs("sort_of_clevr", "test", "binary", **sizes, scorer="mlp")
    assert binary == {1: 0.858, 2: 0.847, 3: 0.846, 4: 0.878}
    unary = theirs("sort_of_clevr", "test", "unary", d_model=32)
    assert unary == {0: 0.662, 2: 0.741}
    assert theirs("sort_of_clevr", "test", "unary", d_model=512, n_heads=8) == {0: 0.985}
    assert theirs("sort_of_clevr", "test", "binary", d_model=512, n_heads=4) == {0: 0.842, 2: 0.845}
    assert theirs("triangles", "test", ALL) == {0: 0.938, 1: 0.956, 2: 0.967, 4: 0.97}
    assert theirs("images", "test", "svhn") == {0: 0.85, 1: 0.85, 2: 0.86, 3: 0.852, 4: 0.86}
    accuracy = theirs("scan", "ood", ALL, ["task.cutoff=27"])
    assert accuracy == {0: 0.22, 1: 0.38, 2: 0.49, 4: 0.26, 8: 0.30}
    assert theirs("text", "test", ALL) == {0: 39.6, 8: 38.8}


@pytest.mark.parametrize(
    "changes",
    [
        [],
        ["task.path=book.txt"],
        ["task.path=book.txt", "task.tokens=words"],
        ["task.path=book.txt", "task.name=wikitext-103-v1", "task.tokens=words"],
        ["task.path=none", "task.name=wikitext-103-raw-v1"],
        ["task.path=none", "task.name=wikitext-2-v1", "task.tokens=words"],
    ],
)
def test_other_texts_do_not_get_the_numbers_of_wikitext(changes):
    cells = STUDIES["text"].plan("laptop", ["n_retrievals=8", *changes]).cells
    assert [cell.paper() for cell in cells] == [[], []]


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("scan", ["task.rule=rmts"], r"unknown setting 'task.rule'"),
        ("scan", ["task.split=sample"], r"task.split must be one of simple, .* got 'sample'"),
        ("esbn", ["task.rule=rtms"], r"task.rule must be one of same_different, .*got 'rtms'"),
        ("esbn", ["task.n_withheld=99"], r"n_withheld must be .*, got 99"),
        ("text", ["model=single"], r"model must be one of multi_head, compositional, got 'single'"),
        ("text", ["n_retrievals=2,2"], r"values of n_retrievals must be different"),
        ("text", ["scores.n_test=1"], r"n_test must be at least 2, got 1"),
        ("images", ["n_heads=3"], r"n_heads must divide d_model = 64, got 3"),
    ],
)
def test_wrong_settings_are_refused(name, changes, message):
    with pytest.raises(ValueError, match=message):
        STUDIES[name].plan("laptop", changes)


def test_data_that_is_not_there_is_asked_for(tmp_path):
    changes = [f"task.path={tmp_path}/nothing.txt"]
    with pytest.raises(RunError, match=r"path must exist, got .*\. Put there a text file"):
        run(STUDIES["text"], "smoke", changes, resources=Resources(root=tmp_path))


# Figures


@pytest.mark.parametrize(
    ("name", "shown"), [("text", set()), ("sort_of_clevr", {"chance", "paper"})]
)
def test_scores_are_drawn_with_chance_but_not_with_the_perplexity_of_frequencies(
    results, name, shown
):
    figure = STUDIES[name].views["scores"](results[name])
    texts = {text.get_text() for text in figure.findobj(plt.Text)}
    assert texts & {"chance", "paper", "frequencies"} == shown
    plt.close(figure)


def test_a_grid_of_cutoffs_is_drawn_with_the_papers_figures(results):
    result = results["scan"]
    here = result["scores"].to_dataset()
    other = here.assign_coords(cutoff=("cell", [22, 22]), cell=["a", "b"])
    other["accuracy_paper"] = 0 * other["accuracy_paper"] + 0.01
    tree = xr.DataTree.from_dict({"scores": xr.concat([here, other], "cell")})
    tree.attrs = result.attrs
    figure = STUDIES["scan"].views["cutoffs"](tree)
    # But for the dots of seeds.
    lines = [line for line in figure.axes[2].get_lines() if line.get_linestyle() == "-"]
    assert [line.get_xdata().tolist() for line in lines] == [[22, 26]] * 2
    assert [line.get_ydata().tolist() for line in lines] == [[0.01, 0.11], [0.01, 0.27]]


def test_known_values_stand_beside_the_intervals(results):
    figure = STUDIES["triangles"].views["scores"](results["triangles"])
    (legend,) = figure.legends
    assert {text.get_text() for text in legend.get_texts()} == {"chance", "paper"}
    marks = [
        line.get_xdata()[0] for line in figure.axes[0].get_lines() if line.get_label() == "paper"
    ]
    assert marks == pytest.approx([0.938, 0.967])


def test_gains_are_paired_with_the_baseline_of_the_same_seed_and_settings():
    rows = [
        # model, R, withheld, seed, accuracy
        ("multi_head", np.nan, 50, 0, 0.5),
        ("multi_head", np.nan, 50, 1, 0.6),
        ("multi_head", np.nan, 95, 0, 0.4),
        ("compositional", 2, 50, 1, 0.9),
        ("compositional", 2, 50, 0, 0.7),
        ("compositional", 2, 95, 0, 0.8),
        ("compositional", 2, 95, 1, 0.8),
    ]
    names = ("model", "n_retrievals", "n_withheld", "seed")
    columns = dict(zip(names, zip(*(row[:4] for row in rows), strict=True), strict=True))
    coordinates = {name: ("cell", list(values)) for name, values in columns.items()}
    scores = xr.Dataset(
        {"accuracy": ("cell", [row[4] for row in rows]), "chosen": ("cell", [True] * len(rows))},
        coords={"cell": range(len(rows))} | coordinates,
    )
    tree = xr.DataTree.from_dict({"scores": scores})
    axes = {"coordinates": {name: name for name in names}, "pairs": ["seed"], "tuned": []}
    tree.attrs |= {"axes": json.dumps(axes), "config": json.dumps({"setup": {}})}
    found = gain(read("scores", "accuracy")).values(tree)
    assert np.allclose(found, [np.nan] * 3 + [0.3, 0.2, 0.4, np.nan], equal_nan=True)
