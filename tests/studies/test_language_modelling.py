import json
from dataclasses import replace
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr
from rich.console import Console

import mechanisms
import tasks
from probes import count_parameters
from studies.engine import Resources, RunError, Trained, read_result, run
from studies.engine.cells import Cell
from studies.engine.checkpoints import load_weights
from studies.engine.claims import judge
from studies.engine.examples import Examples
from studies.engine.fairness import assess
from studies.language_modelling import LESS_SOFTMAX, STUDY, less_softmax, windows
from studies.setups.text import LanguageSetup

KINDS = [
    (name, which)
    for which in ("relative", "rotary")
    for name in replace(STUDY.setup, positions=which).models()
]


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    """A text of its own: words with a grammar, in lines."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    rng = np.random.default_rng(0)
    names, verbs = ["Ada", "Böhm", "Curry", "Gödel"], ["proves", "writes", "reads"]
    lines = [f"{rng.choice(names)} {rng.choice(verbs)} {rng.choice(names)}." for _ in range(1500)]
    path.write_text("\n".join(lines) + "\n")
    with pytest.MonkeyPatch.context() as patch:
        # Nothing is left in the user's cache.
        patch.setattr("tasks.stored.text.save_arrays", lambda *_: None)
        text = [f"task.path={path}", "task.vocabulary_size=280", "task.length=16"]
        yield [*text, "scores.n_test=1000000"]


@pytest.fixture(scope="module")
def cells(settings):
    return STUDY.plan("smoke", settings).cells


@pytest.fixture(scope="module")
def folder(settings, tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    return run(STUDY, "smoke", settings, resources=Resources(root=root, workers=1))


@pytest.fixture(scope="module")
def result(folder):
    return read_result(folder / "result.nc")


def model_of(setup, folder):
    model = setup.build(torch.Generator().manual_seed(setup.seed)).eval()
    place = folder.parent / "models" / Cell(setup, root=folder.parent).name
    load_weights(model, place / "best.safetensors", device="cpu")
    return model


def small(cell, **changes):
    return replace(cell, **({"d_model": 8, "n_heads": 2, "d_mlp": 64, "dropout": 0.0} | changes))


# Models


@pytest.mark.parametrize(("model", "positions"), KINDS)
def test_every_mechanism_is_causal_and_sees_order_and_distance(cells, model, positions):
    setup = small(cells[0], model=model, positions=positions)
    network = setup.build(torch.Generator().manual_seed(0)).eval()
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if "relative_bias" in name:
                parameter.normal_(generator=torch.Generator().manual_seed(1))
        tokens = torch.arange(10)[None]
        other = tokens.clone()
        other[0, 6:] += 100
        one, two = network(tokens), network(other)
        assert torch.allclose(one[:, :6], two[:, :6], atol=1e-5)
        assert not torch.allclose(one[:, 6:], two[:, 6:], atol=1e-3)
        # The last token sees the same ones, two of them in other places.
        swapped = network(tokens[:, [0, 1, 3, 2, 4, 5, 6, 7, 8, 9]])
        assert not torch.allclose(one[:, -1], swapped[:, -1], atol=1e-5)


@pytest.mark.parametrize(("model", "positions"), KINDS)
def test_every_model_has_as_many_parameters_as_softmax_attention(cells, model, positions):
    setup = small(cells[0], model=model, positions=positions)
    found = count_parameters(setup.build(torch.Generator()))
    softmax = replace(setup, model="softmax", positions="relative")
    asked = count_parameters(softmax.build(torch.Generator()))
    assert (softmax.own_d_mlp(), softmax.reference_parameters()) == (64, asked)
    # A unit of d_mlp is a row, a column and a bias of each of two layers: none is nearer.
    assert abs(found - asked) <= 2 * (2 * setup.d_model + 1) / 2


def test_settings_reach_the_model(cells):
    setup = small(cells[0], model="hyla", activation="swiglu", tied=True, attention_dropout=0.3)
    model = setup.build(torch.Generator())
    block = model.blocks[0]
    assert block.attn.config.dropout == 0.3
    assert (block.mlp.config.activation, block.mlp.config.bias) == ("swiglu", False)
    assert model.config.tied
    length = setup.task.length
    for max_distance in (5, length, length + 3):
        model = replace(setup, max_distance=max_distance).build(torch.Generator())
        table = model.blocks[0].relative_bias.table
        assert table.shape[1] == min(max_distance, length)
    rotary = replace(setup, model="coda", positions="rotary")
    assert rotary.inapplicable() == {"attention_dropout", "max_distance"}


def test_a_match_that_cannot_be_is_refused(cells):
    setup = small(cells[0], model="compositional", d_model=32, d_mlp=1)
    with pytest.raises(ValueError, match=r"room for the \d+ parameters .* got 1, .* softmax"):
        setup.own_d_mlp()


# The run


def test_all_is_there(result, folder):
    coordinates = result["scores"].coords
    assert coordinates["model"].to_numpy().tolist() == [
        *("softmax", "compositional", "softmax", "hyla")
    ]
    assert coordinates["positions"].to_numpy().tolist() == ["relative"] * 2 + ["rotary"] * 2
    for name, view in STUDY.views.items():
        # One rate was tried.
        assert (view(result) is None) == (name == "tuning")
        assert name == "tuning" or (folder / f"{name}.png").stat().st_size > 1000
    stream = StringIO()
    Console(width=90, file=stream).print(STUDY.table.render(result))
    assert all(word in stream.getvalue() for word in ("compositional", "rotary", "- softmax"))


def test_figures_are_those_of_the_best_checkpoint_token_by_token(folder, cells, result):
    text = Path(cells[0].task.path).read_bytes()
    for number, setup in enumerate(cells):
        task, model = setup.sampler(), model_of(setup, folder)
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
        found = result["scores"].to_dataset().isel(cell=number).sel(split="test", group="all")
        tested = text[len(text) - task.n_bytes("test") :].decode()
        words = len(tested.split()) + tested.count("\n")
        expected = {
            "loss": np.mean(losses),
            "accuracy": np.mean(right),
            "bits_per_byte": sum(losses) / np.log(2) / len(tested.encode()),
            "perplexity": np.exp(sum(losses) / words),
            "token_perplexity": np.exp(np.mean(losses)),
        }
        assert expected.keys() == setup.metrics.keys()
        for name, value in expected.items():
            assert found[name].item() == pytest.approx(value, rel=1e-4), name
            assert found[f"{name}_low"] <= found[name] <= found[f"{name}_high"]
        one = result["windows"].to_dataset().isel(cell=number)
        assert one["window_tokens"].sum() == len(losses) == task.n_tokens("test")
        assert one["window_loss"].sum() == pytest.approx(sum(losses), rel=1e-4)
        assert one["seen"].to_numpy().tolist() == [1, 2, 4, 8, 16]
        for seen in (1, 8, 16):
            mine = [
                loss
                for loss, place in zip(losses, places, strict=True)
                if seen / 2 < place + 1 <= seen
            ]
            assert one["loss"].sel(seen=seen) == pytest.approx(np.mean(mine), rel=1e-4)
            assert one["tokens"].sel(seen=seen) == len(mine)


def test_windows_that_choose_are_not_scored(cells, result):
    setup = cells[0]
    n_valid = setup.size("valid") - setup.n_validation
    counts = result["scores"]["n_examples"].sel(group="all")
    assert set(counts.sel(split="valid").to_numpy()) == {n_valid}
    assert set(counts.sel(split="test").to_numpy()) == {setup.size("test")}


def test_frequencies_of_tokens_are_what_is_known(cells, result):
    task = tasks.Text(cells[0].task, cache=None)
    found = result["scores"].to_dataset().isel(cell=0).sel(split="test", group="all")
    loss = task.baseline("test")
    assert found["loss_frequencies"] == pytest.approx(loss)
    assert found["token_perplexity_frequencies"] == pytest.approx(np.exp(loss))
    words = task.n_words("test") + task.n_lines("test")
    expected = np.exp(loss * task.n_tokens("test") / words)
    assert found["perplexity_frequencies"] == pytest.approx(expected)
    # The figures of a split have the ratios that all models have in common.
    assert found["bits_per_byte_frequencies"] / loss == pytest.approx(
        found["bits_per_byte"].item() / found["loss"].item(), rel=1e-4
    )


def test_what_is_matched_is_in_the_result(cells, folder, result):
    found = result["match"].to_dataset()
    for number, setup in enumerate(cells):
        model = model_of(setup, folder)
        assert result["costs"]["parameters"][number] == count_parameters(model)
        assert found["own_d_mlp"][number] == model.blocks[0].mlp.W_in.shape[1]
    assert abs(found["parameter_ratio"] - 1).max() < 2e-3
    assert found["parameter_ratio"][0] == 1


# Measures and readings of planted values


class Repeats(torch.nn.Module):
    """Is sure of the next token where it has seen more than so many, and knows nothing before."""

    def __init__(self, size, known_after):
        super().__init__()
        self.size, self.known_after = size, known_after

    def forward(self, tokens):
        logits = torch.zeros(*tokens.shape, self.size)
        sure = 50.0 * torch.nn.functional.one_hot(tokens.roll(-1, 1), self.size)
        # Of its last token a window does not show the next one.
        logits[:, self.known_after : -1] = sure[:, self.known_after : -1]
        return logits


def test_loss_by_tokens_that_are_seen_shows_from_where_a_model_knows(cells):
    setup = cells[0]
    size = setup.sampler().vocabulary_size
    fresh = Examples(setup, "cpu").fresh("windows")
    found = windows(Trained(setup, Repeats(size, 8), 1, "cpu", fresh))
    assert np.allclose(found["loss"].sel(seen=[1, 2, 4, 8]), np.log(size))
    assert found["loss"].sel(seen=16) == pytest.approx(np.log(size) / 8, rel=0.02)


def planted(result, conditions, window_loss):
    """The result with other cells: losses of windows [cell, window] of one token each."""
    names = ("model", "positions", "learning_rate", "seed")
    coordinates = {
        name: ("cell", list(values))
        for name, values in zip(names, zip(*conditions, strict=True), strict=True)
    }
    chosen = [int(one[2] == (0.2 if one[0] == "softmax" else 0.1)) for one in conditions]
    coordinates |= {"cell": [str(n) for n in range(len(window_loss))], "chosen": ("cell", chosen)}
    scores = result["scores"].to_dataset().isel(cell=[0] * len(window_loss))
    scores = scores.drop_vars(["model", "positions", "seed", "chosen"]).assign_coords(coordinates)
    scores["loss"].loc[{"split": "test", "group": "all"}] = np.mean(window_loss, axis=1)
    tree = xr.DataTree.from_dict(
        {
            "scores": scores,
            "windows": xr.Dataset(
                {
                    "window_loss": (("cell", "window"), window_loss),
                    "window_tokens": (("cell", "window"), np.ones_like(window_loss)),
                }
            ),
        }
    )
    coordinates = {name: name for name in names}
    axes = {"coordinates": coordinates, "pairs": ["seed"], "tuned": ["learning_rate"]}
    tree.attrs |= {"axes": json.dumps(axes), "config": json.dumps({"setup": {}})}
    return tree


def test_differences_are_paired_by_seed_positions_and_window(result):
    rng = np.random.default_rng(0)
    hard = rng.normal(4, 1, 40)  # windows differ far more than models
    conditions = [
        ("softmax", "relative", 0.1, 0),
        ("softmax", "relative", 0.2, 0),
        ("softmax", "relative", 0.2, 1),
        ("hyla", "relative", 0.1, 0),
        ("hyla", "relative", 0.1, 1),
        ("hyla", "rotary", 0.1, 0),
    ]
    loss = np.stack([hard - 3, hard, hard + 1, hard + 0.04 + 0.002 * rng.normal(size=40)])
    loss = np.concatenate([loss, [hard + 1 + rng.normal(0, 0.4, 40), hard]])
    found = less_softmax(planted(result, conditions, loss))
    # Of softmax the second rate was chosen, whatever the test says; rotary has none.
    assert np.isnan(found.estimate[[0, 1, 2, 5]]).all()
    assert found.estimate[3] == pytest.approx((loss[3] - loss[1]).mean())
    assert 0.038 < found.low[3] < found.estimate[3] < found.high[3] < 0.042
    # Without a difference but with noise, zero is within.
    assert found.low[4] < 0 < found.high[4]
    assert found.high[4] - found.low[4] > 0.1
    assert np.array_equal(
        LESS_SOFTMAX.values(planted(result, conditions, loss)),
        found.estimate,
        equal_nan=True,
    )


def test_differences_are_of_windows_of_the_same_length(result):
    conditions = [("softmax", "relative", 0.2, 0), ("hyla", "relative", 0.1, 0)] * 2
    # Of windows of twice the length there are half as many.
    loss = np.array([[3.0] * 4, [3.1] * 4, [2.0, 2.0, *[np.nan] * 2], [2.4, 2.4, *[np.nan] * 2]])
    tree = planted(result, conditions, loss)
    windows = tree["windows"].to_dataset()
    windows["window_tokens"] = windows["window_tokens"].where(windows["window_loss"].notnull())
    tree["windows"] = xr.DataTree(windows)
    scores = tree["scores"].to_dataset().assign_coords(length=("cell", [16, 16, 32, 32]))
    tree["scores"] = xr.DataTree(scores)
    axes = json.loads(tree.attrs["axes"])
    axes["coordinates"]["length"] = "task.length"
    tree.attrs["axes"] = json.dumps(axes)
    np.testing.assert_allclose(less_softmax(tree).estimate, [np.nan, 0.1, np.nan, 0.4])


def test_differences_need_no_axis_of_positions(result):
    """Where a preset has one kind of positions alone."""
    conditions = [("softmax", "relative", 0.2, 0), ("hyla", "relative", 0.1, 0)]
    tree = planted(result, conditions, np.stack([np.zeros(40), np.ones(40)]))
    axes = json.loads(tree.attrs["axes"])
    del axes["coordinates"]["positions"]
    tree.attrs["axes"] = json.dumps(axes)
    np.testing.assert_array_equal(less_softmax(tree).estimate, [np.nan, 1])


def test_claims_are_decided_the_way_their_statements_say(result):
    """HYLA ahead of linear attention by far, close to softmax attention; compositional behind."""
    means = {"softmax": 3.0, "linear": 3.6, "hyla": 3.01, "compositional": 3.3, "coda": 3.4}
    conditions = [
        (m, "relative", 0.2 if m == "softmax" else 0.1, s) for m in means for s in (0, 1, 2)
    ]
    jitter = 1e-3 * np.random.default_rng(0).normal(size=(len(conditions), 1))
    loss = np.array([[means[model]] * 5 for model, *_ in conditions]) + jitter
    tree = planted(result, conditions, loss)
    tree["training"] = result["training"].to_dataset().isel(cell=[0] * len(loss)).drop_vars("cell")
    tree["costs"] = result["costs"].to_dataset().isel(cell=[0] * len(loss)).drop_vars("cell")
    claims = judge(tree, STUDY.claims, assess(tree, None))
    verdicts = dict(zip(claims["statement"].to_numpy(), claims["verdict"].to_numpy(), strict=True))
    assert verdicts["HYLA models text better than linear attention"] == "holds"
    assert verdicts["HYLA is close to softmax attention"] == "holds"
    assert verdicts["Compositional attention is better than softmax"] == "contradicted"
    assert verdicts["Compositional attention is close to softmax attention"] == "contradicted"
    assert verdicts["Softmax attention is better than CoDA"] == "holds"
    assert verdicts["HYLA needs RMSHead"] == "not run"


# Presets and settings


def test_the_paper_presets():
    """Their settings are compared with the paper's in `tests/studies/papers`."""
    assert len(STUDY.plan("paper").cells) == 3 * 4 * 3 * 3
    assert len(STUDY.plan("paper-c4").cells) == 3 * 3
    for cell in STUDY.plan("paper").cells:
        n_tokens = cell.training.n_steps * cell.training.batch_size * cell.task.length
        assert n_tokens == pytest.approx(5 * 150e6, rel=1e-3)


def test_the_laptop_presets():
    setup = STUDY.plan("laptop").setup
    training = setup.training
    assert (training.n_steps, training.batch_size, training.learning_rate) == (2000, 16, 3e-3)
    assert (setup.task.vocabulary_size, setup.task.length, setup.dropout) == (1024, 64, 0.1)
    for name, n_cells in (
        ("laptop", 7),
        ("rates", 7 * 3 * 3),
        ("positions", 9),
        ("smoke", 4),
        ("compositional", 2 * (3 * 4 + 12)),
    ):
        assert len(STUDY.plan(name).cells) == n_cells


@pytest.mark.parametrize(
    "preset", ["smoke", "laptop", "rates", "compositional", "positions", "paper", "paper-c4"]
)
def test_every_preset_trains(preset, settings):
    plan = STUDY.plan(preset, [*settings, "seed=0", "n_layers=1", "training.precision=float32"])
    kinds = {(cell.model, cell.positions): cell for cell in plan.cells}
    for setup in kinds.values():
        # A narrower model of the same kind: the widths are asserted above.
        setup = replace(setup, d_model=16, d_mlp=64)
        model = setup.build(torch.Generator().manual_seed(0))
        assert setup.own_d_mlp() > 32
        loss = setup.loss(model, setup.sampler().batch("train", 0, 2), 0)
        assert torch.isfinite(loss)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["model=hyper"], "model must be one of softmax, .*transformer_xl, got 'hyper'"),
        (
            ["positions=rotary", "model=compositional"],
            "one of softmax, .* coda, got 'compositional'",
        ),
        (["n_heads=3"], "n_heads must divide d_model = 16, got 3"),
        (["n_validation=0"], "n_validation must be at least 1, got 0"),
    ],
)
def test_wrong_settings_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        STUDY.plan("smoke", changes)


def test_a_missing_text_is_told(tmp_path):
    changes = [f"task.path={tmp_path / 'none.txt'}"]
    with pytest.raises(RunError, match=r"path must exist, got .*\. Put there a text file"):
        run(STUDY, "smoke", changes, resources=Resources(root=tmp_path))


def test_all_seeds_have_windows_of_their_own(cells):
    setup = cells[0]
    assert isinstance(setup, LanguageSetup)
    one, two = (Examples(replace(setup, seed=seed), "cpu").train(0, 8).inputs for seed in (0, 1))
    assert not torch.equal(one, two)


def test_mechanisms_are_those_of_the_package():
    rotary = replace(STUDY.setup, positions="rotary")
    assert set(mechanisms.ATTENTION_VARIANTS) < set(rotary.models()) < set(STUDY.setup.models())
