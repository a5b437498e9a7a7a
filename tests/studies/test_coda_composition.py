import io
import re
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
import xarray as xr
from PIL import Image
from rich.console import Console
from torch import nn
from transformer_lens import HookedRootModule
from transformer_lens.hook_points import HookPoint

from studies.coda_composition import (
    ARITHMETIC,
    BY_HEADS,
    BY_NETWORKS,
    MATCHES,
    NEGATIVE,
    ON_ID,
    ON_OOD,
    SIGNED_PAIRS,
    SIGNS,
    grid,
)
from studies.engine import Preset, Resources, Trained, read_result, run
from studies.engine.claims import Comparison
from studies.engine.examples import Examples
from studies.engine.readings import conditions_of
from studies.measures.coda import composition
from studies.report.panels import shown_conditions
from studies.setups.quasi_attention import matrices as matrices_of
from studies.setups.quasi_attention import saturation as saturation_of
from studies.setups.quasi_attention import signs as signs_of
from studies.views.coda import ablation, matrices
from studies.views.coda import composition as composition_view
from tests.studies.engine.synthetic import result_of

pytestmark = pytest.mark.slow

STUDIES = {"mlu": ARITHMETIC, "signed_pairs": SIGNED_PAIRS}
PRESETS = ("laptop", "smoke", "ablation", "paper")
CHANGES = {"mlu": ["model=softmax,coda", "gate_centring=none", "training.learning_rate=0.002"]}
SMALL = (BY_HEADS | grid("linear", "coda"), BY_NETWORKS | grid(gate=("sigmoid", "tanh")))


def cells(task, preset="smoke", **wanted):
    found = STUDIES[task].plan(preset).cells
    return [one for one in found if all(getattr(one, k) == v for k, v in wanted.items())]


MLU = cells("mlu", model="coda")[0]
HEADED, SINGLE = (
    cells("signed_pairs", model="coda", alignment=name)[0] for name in ("heads", "networks")
)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Of both studies with few models: those of pairs with heads, and with one matrix."""
    smoke = Preset(changes=SIGNED_PAIRS.presets["smoke"].changes, grids=SMALL)
    found = {}
    for task, study in (
        ("mlu", replace(ARITHMETIC, views={})),
        ("signed_pairs", replace(SIGNED_PAIRS, views={}, presets={"smoke": smoke})),
    ):
        resources = Resources(root=tmp_path_factory.mktemp(task), workers=1)
        folder = run(study, "smoke", CHANGES.get(task, []), resources=resources)
        found[task] = read_result(folder / "result.nc")
    return found


@pytest.mark.parametrize("task", STUDIES)
def test_the_result_has_what_is_looked_at_in_each_model(task, results):
    result = results[task]
    coda = result["scores"]["model"] == "coda"
    for group, name in (("saturation", "saturated"), ("matrices", "pattern")):
        known = result[group][name].notnull()
        known = known.any([dim for dim in known.dims if dim != "cell"])
        assert known.to_numpy().tolist() == coda.to_numpy().tolist()
    along = result["saturation_along_training"]
    assert along["train_step"].to_numpy().tolist() == [2, 4]
    places = {"mlu": ["encoder", "decoder", "cross"], "signed_pairs": ["a", "b"]}[task]
    assert result["signs"]["place"].to_numpy().tolist() == places
    planted = task == "signed_pairs"
    assert ("sign" in result["matrices"]) == ("confusion" in result["signs"]) == planted
    paper = result["scores"].to_dataset().get("accuracy_paper")
    assert (paper is not None) == (task == "mlu")


@pytest.mark.parametrize("task", STUDIES)
def test_the_table_and_every_view_are_drawn(task, results):
    result, study = results[task], STUDIES[task]
    console = Console(width=120)
    with console.capture() as capture:
        console.print(study.table.render(result))
    for word in ("CoDA", "M<0", {"mlu": "84.3", "signed_pairs": "tanh(N)"}[task]):
        assert word in capture.get()
    assert "0.0\n" not in capture.get().partition("right")[0]
    drawn = {name: view(result) for name, view in study.views.items()}
    assert [name for name, one in drawn.items() if one is None] == (
        ["tuning", "ablation"] if task == "mlu" else ["tuning"]
    )
    for name, figure in drawn.items():
        if figure is not None:
            file = io.BytesIO()
            figure.savefig(file, dpi=40)
            assert np.asarray(Image.open(file)).std() > 1, name


def test_labels_say_what_differs_from_the_paper(results):
    labels = [one.label for one in shown_conditions(results["signed_pairs"])]
    assert labels == ["linear attention", "CoDA", "CoDA, single", "CoDA, single, tanh(N)"]


def test_the_ablation_shows_accuracies_on_ood(results):
    result = results["signed_pairs"]
    right = result["scores"]["accuracy"].sel(split="ood", group="all").to_numpy()
    expected = {
        one.values["gate"]: f"{right[one.cells].mean():.3f}"
        for one in conditions_of(result)
        if one.values["alignment"] == "networks"
    }
    figure = SIGNED_PAIRS.views["ablation"](result)
    (functions,) = figure.axes
    assert [text.get_text() for text in functions.texts] == [expected["sigmoid"], expected["tanh"]]


# Settings


def test_each_preset_trains_what_it_should():
    # Attention; CoDA plain, with N centred, and where it is asked for with a doubled gate, factors,
    # F of two layers.
    numbers = {
        ("mlu", "laptop"): (3 + 3) * 3,
        ("mlu", "seeds"): (3 + 4 + 2) * 4 * 3 + (1 + 2 + 1) * 4,
        ("mlu", "smoke"): (3 + 3) * 3,
        ("mlu", "ablation"): (16 + 3 + 1 + 3) * 3,
        ("mlu", "longer"): 4 * 3 * 3,
        ("mlu", "centring"): (4 + 1) * 3 * 3,
        ("mlu", "compositions"): 8 * (4 * 2 + 8),
        ("mlu", "paper"): (3 + 2 + 4) * 3,
        ("signed_pairs", "laptop"): (3 + 4 + (1 + 16 + 8 + 1 + 2 + 2)) * 2,
        ("signed_pairs", "smoke"): 3 + 3 + (1 + 4 + 1 + 1),
        ("signed_pairs", "ablation"): 16 + 3 + 1,
        ("signed_pairs", "width"): 2 * 3 * 5 + 7,
        ("signed_pairs", "paper"): (3 + 3 + (1 + 16 + 8 + 1 + 2 + 2)) * 3,
    }
    assert {key: len(STUDIES[key[0]].plan(key[1]).cells) for key in numbers} == numbers


@pytest.mark.parametrize("task", STUDIES)
def test_some_preset_has_the_models_of_every_claim(task):
    known = []
    for preset in PRESETS:
        plan = STUDIES[task].plan(preset)
        known.append([plan.coordinates(cell) for cell in plan.cells])

    def there(models, wanted):
        return any(
            all(one.get(name, value) in (value, None) for name, value in wanted.items())
            for one in models
        )

    for claim in STUDIES[task].claims:
        sides = [one for one in (claim.of, claim.other) if not isinstance(one, float)]
        assert any(all(there(models, one) for one in sides) for models in known), claim.statement


@pytest.mark.parametrize("task", STUDIES)
def test_claims_are_about_what_their_statements_say(task):
    usual = {"affinity": "tanh", "gate": "sigmoid", "affinity_centring": "none"}
    usual |= {"model": "coda", "gate_centring": "none", "doubled": False}
    n_functions = n_held_out = 0
    for claim in STUDIES[task].claims:
        if claim.statement.startswith("tanh(E) * sigmoid(N) is better than"):
            affinity, gate = re.findall(r"(\w+)\([EN]\)", claim.statement)[2:]
            assert claim.of == usual
            assert claim.exceeds == usual | {"affinity": affinity, "gate": gate}
            assert claim.reading == ON_ID
            n_functions += 1
        if "held-out" in claim.statement:
            assert claim.of == usual
            assert claim.exceeds == {"model": claim.statement.split()[-1]}
            assert claim.reading == ON_OOD
            n_held_out += 1
    assert (n_functions, n_held_out) == (7, 3 if task == "mlu" else 0)


@pytest.mark.parametrize(
    ("task", "preset", "alignment", "centrings"),
    [
        ("mlu", "ablation", None, ("none", "matrix")),
        ("signed_pairs", "ablation", "heads", ("none", "row")),
        ("signed_pairs", "laptop", "networks", ("none", "row", "matrix")),
    ],
)
def test_the_ablation_has_all_compositions(task, preset, alignment, centrings):
    found = {
        (one.affinity, one.gate, one.affinity_centring, one.gate_centring)
        for one in cells(task, preset, model="coda")
        if getattr(one, "alignment", None) == alignment
        and not one.doubled
        and one.scaled
        and one.beta == (0.1 if alignment == "networks" else 1.0)
    }
    functions = ("tanh", "sigmoid", "arctan", "algebraic")
    expected = {(*pair, "none", "none") for pair in product(functions, functions)}
    expected |= {("tanh", "sigmoid", *pair) for pair in product(centrings, centrings)}
    assert found == expected


def test_the_paper_preset_has_as_many_tokens_in_a_batch_as_tensor2tensor():
    """The number of lines is 4,096 divided by the greatest length (padding counts)."""
    setup = ARITHMETIC.plan("paper").setup
    batch = setup.sampler().batch("train", 0, setup.training.batch_size)
    width = batch.inputs[0].shape[1]
    assert 4096 - width < batch.inputs[0].numel() <= 4096
    assert list(setup.splits) == list(setup.sampler().splits[1:]) == ["id"]


def test_the_rate_of_the_paper_preset_is_tensor2tensors():
    """2 d_model^-.5 min(step warmup^-1.5, step^-.5)."""
    training = ARITHMETIC.plan("paper").setup.training
    for step in (1, 4000, 8000, 50_000):
        expected = 2 * 128**-0.5 * min(step * 8000**-1.5, step**-0.5)
        assert training.learning_rate_at(step - 1) == pytest.approx(expected)


def test_a_decoder_is_centred_by_row_where_its_encoder_is_by_matrix():
    setup = replace(MLU, affinity_centring="matrix", gate_centring="matrix", beta=0.5, scaled=False)
    config = setup.build(torch.Generator().manual_seed(0)).config
    assert config.attention.composition.affinity_centring == "matrix"
    for attention in (config.within_target, config.between):
        composition = attention.composition
        assert (composition.affinity_centring, composition.gate_centring) == ("row", "row")
        assert (composition.beta, attention.scaled) == (0.5, False)


def test_dropout_and_smoothing_are_where_the_settings_say():
    rates = {"dropout": 0.1, "attention_dropout": 0.2, "mlp_dropout": 0.3}
    setup = replace(MLU, **rates, label_smoothing=0.4, one_embedding=True)
    model = setup.build(torch.Generator().manual_seed(0)).eval()
    config = model.config
    assert (config.dropout, config.feed_forward.dropout) == (0.1, 0.3)
    assert {config.attention.dropout, config.between.dropout} == {0.2}
    batch = setup.sampler().batch("train", 0, 5)
    logits = model(*batch.inputs).log_softmax(-1)
    n = logits.shape[-1]
    expected = torch.full_like(logits, 0.4 / (n - 1)).scatter(-1, batch.targets[..., None], 0.6)
    loss = -(expected * logits).sum(-1)[batch.mask].mean()
    torch.testing.assert_close(setup.loss(model, batch, 0), loss)


def test_the_laptop_presets_are_as_they_were():
    lines, pairs = (study.plan("laptop").setup for study in STUDIES.values())
    for one, steps, batch, optimizer, rate, warm, every, n in (
        (lines, 2500, 64, "muon", 6e-3, 200, 250, 500),
        (pairs, 900, 128, "adamw", 2e-3, 100, 100, 1000),
    ):
        assert (one.d_model, one.n_heads, one.n_validation) == (64, 4, n)
        got = one.training
        assert (got.n_steps, got.batch_size) == (steps, batch)
        assert (got.optimizer, got.learning_rate) == (optimizer, rate)
        assert (got.warmup_steps, got.evaluate_every, got.weight_decay) == (warm, every, 0.01)
        assert got.keep_at == tuple(range(every, steps + 1, every))
    assert (lines.n_layers, lines.d_mlp, lines.task.low, lines.task.high) == (2, 256, -20, 20)


@pytest.mark.parametrize(("task", "preset"), list(product(STUDIES, PRESETS)))
def test_models_of_every_preset_learn_from_a_batch(task, preset):
    kinds = {
        (one.model, getattr(one, "alignment", ""), one.composition): one
        for one in cells(task, preset)
    }
    for setup in kinds.values():
        small = replace(setup, d_model=4 * setup.n_heads)
        batch = small.sampler().batch("train", 0, 3)
        loss = small.loss(small.build(torch.Generator().manual_seed(0)), batch, 0)
        assert torch.isfinite(loss)


@pytest.mark.parametrize(
    ("task", "setting", "message"),
    [
        ("mlu", "label_smoothing=1", r"label_smoothing must be in \[0, 1\), got 1"),
        ("mlu", "ponder_weight=-1", "ponder_weight must be at least 0, got -1"),
        ("mlu", "beta=0", "beta must be above 0 and finite, got 0"),
        (
            "signed_pairs",
            "alignment=heads gate_centring=none,matrix",
            "gate_centring must be one of none, row",
        ),
        ("mlu", "model=softmax,hyper", "model must be one of .*coda, .*got 'hyper'"),
        ("mlu", "gate=relu", "gate must be one of tanh, .*got 'relu'"),
        ("signed_pairs", "n_heads=3", "n_heads must divide d_model = 64, got 3"),
        ("signed_pairs", "alignment=single", "alignment must be one of heads, networks"),
        (
            "signed_pairs",
            "model=linear alignment=networks",
            "with alignment networks, model must be softmax or coda",
        ),
    ],
)
def test_wrong_settings_are_told(task, setting, message):
    with pytest.raises(ValueError, match=message):
        STUDIES[task].plan("laptop", setting.split())


# Tasks


def test_pairs_of_characters_are_those_that_a_query_sees():
    batch = MLU.sampler().batch("ood", 3, 6)
    found = {name: place.valid for name, place in MLU.places(batch).items()}
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


def test_words_and_groups_of_lines_are_those_of_the_question():
    batch = MLU.sampler().batch("ood", 0, 20)
    groups = MLU.groups(batch)
    for example in range(20):
        written, line = ("".join(words) for words in MLU.sampler().words(batch, example))
        *values, question = line.split(",")
        known = {name: int(one) for name, one in (value.split("=") for value in values)}
        assert written == f"{eval(question, known)}<eos>"
        assert {name for name, of in groups.items() if of[example]} == {
            question[1],
            "one variable" if question[0] == question[2] else "two variables",
        }


def test_words_tell_the_planted_signs():
    batch = HEADED.sampler().batch("ood", 0, 10)
    for example in range(10):
        asking, told = HEADED.sampler().words(batch, example)
        signs = [
            [int(f"{one[-1]}1") if one[:-1] == other.split()[0] else 0 for other in told]
            for one in asking
        ]
        assert batch.latents["sign"][example].tolist() == signs
        assert HEADED.places(batch)["b"].sign[example].T.tolist() == signs
        total = sum(row[j] * int(other.split()[1]) for row in signs for j, other in enumerate(told))
        (group,) = [name for name, of in HEADED.groups(batch).items() if of[example]]
        size = abs(total)
        assert group == ("sum 1-3" if size < 4 else "sum 4-8" if size < 9 else "sum above 8")


def test_an_answer_is_right_if_all_of_it_is():
    batch = MLU.sampler().batch("id", 0, 4)
    output = batch.targets.clone()
    output[1, 0] += 1
    output[2, batch.latents["length"][2]] = 5  # another character than the end
    output[3, -1] = 7 if not batch.mask[3, -1] else output[3, -1]  # behind the end
    right, whole = MLU.scores(output, batch, "id")["accuracy"]
    assert right.tolist() == [1, 0, 0, 1]
    assert whole.tolist() == [1, 1, 1, 1]


def test_the_loss_of_an_adaptive_transformer_has_the_mean_ponder_costs_of_its_characters():
    setup = replace(MLU, model="adaptive_universal", ponder_weight=0.3)
    model = setup.build(torch.Generator().manual_seed(0)).eval()
    batch = setup.sampler().batch("train", 0, 5)
    _, costs = model.forward_with_cost(*batch.inputs)
    means = []
    for tokens, cost in zip(batch.inputs, costs, strict=True):
        there = [
            cost[i, j].item()
            for i, row in enumerate(tokens.tolist())
            for j, token in enumerate(row)
            if token != 0
        ]
        assert len(there) < cost.numel()
        means.append(sum(there) / len(there))
    expected = MLU.loss(model, batch, 0) + 0.3 * sum(means)
    assert setup.loss(model, batch, 0).item() == pytest.approx(expected.item(), rel=1e-5)
    assert max(means) > 1


def test_universal_transformers_are_reached_at_laptop_size():
    changes = ["model=universal,adaptive_universal", "n_steps=3"]
    found = STUDIES["mlu"].plan("laptop", changes).cells
    assert [(one.model, one.training.learning_rate) for one in found] == [
        (model, rate)
        for model in ("universal", "adaptive_universal")
        for rate in (3e-3, 6e-3, 1.2e-2)
    ]
    steps = [len(one.build(torch.Generator().manual_seed(0)).encoder_blocks) for one in found]
    assert steps == [3, 3, 3, 4, 4, 4]
    models = {one.model for one in STUDIES["mlu"].plan("laptop").cells}
    assert models == {"softmax", "linear", "hyla", "coda"}


def test_a_claimed_gain_is_measured_against_the_other_model():
    cells = {"model": ["coda", "softmax"]}
    scores = xr.Dataset(
        {"accuracy": (("cell", "split", "group"), [[[0.84]], [[0.76]]])},
        coords={"model": ("cell", cells["model"]), "split": ["id"], "group": ["all"]},
    )
    (claim,) = [one for one in STUDIES["mlu"].claims if "gains 8.2 points" in one.statement]
    coda, softmax = claim.reading.values(xr.DataTree.from_dict({"scores": scores}))
    assert coda - softmax == pytest.approx(0.84 - 0.76 - 0.082)
    assert (claim.equals, claim.margin) == ({"model": "softmax"}, 0.02)
    assert claim.of.items() >= {"model": "coda", "affinity": "tanh", "gate": "sigmoid"}.items()


def test_models_that_are_alike_agree_that_centring_is_no_help():
    claims = [one for one in STUDIES["mlu"].claims if "does not help" in one.statement]
    assert len(claims) == 2
    for claim in claims:
        for gain, expected in ((0.0, "holds"), (0.03, "contradicted")):
            differences = np.array([0.001, -0.001, 0.002]) - gain
            comparison = Comparison(claim, differences=differences)
            assert comparison.verdict(comparison.p()) == expected


def test_claims_about_the_signs_of_e_leave_out_networks_where_it_has_no_sign():
    shares = [[[0.6, 0.1], [0.2, 0.1], [0.0, 0.1]], [[0.3, 0.1], [0.4, 0.1], [0.9, 0.1]]]
    composition = {
        name: (("cell", "quantity"), share)
        for name, share in zip(("negative", "positive"), shares, strict=True)
    }
    projection = ("cell", ["linear", "", "two_layers"])
    tree = {
        "composition": xr.Dataset(composition, {"quantity": ["affinity", "weight"]}),
        "scores": xr.Dataset(coords={"projection": projection}),
    }
    claims = {one.statement: one for one in STUDIES["signed_pairs"].claims}
    for statement, expected in (
        ("tanh(E) is more often negative than positive", [0.3, -0.2, np.nan]),
        ("tanh(E) has both signs: the rarer for a tenth of the pairs", [0.3, 0.2, np.nan]),
    ):
        found = claims[statement].reading.values(xr.DataTree.from_dict(tree))
        np.testing.assert_allclose(found, expected)
        of_lines = tree | {"scores": tree["scores"].drop_vars("projection")}
        found = claims[statement].reading.values(xr.DataTree.from_dict(of_lines))
        assert np.isfinite(found).all()


def test_chance_is_the_most_frequent_answer():
    chance = MLU.references("id")["chance"]["accuracy"]
    batch = MLU.sampler().batch("id", 9, 4000)
    minus = batch.latents["operator"] == 1
    assert chance["-"] == pytest.approx(
        (batch.latents["result"][minus] == 0).float().mean().item(), abs=0.04
    )
    assert chance["all"] < chance["-"]
    assert set(HEADED.references("id")["chance"]["accuracy"].values()) == {0.5}


# What is looked at


class Aligned(HookedRootModule):
    """Two heads: one weighs by the planted sign (times `size`), one by chance."""

    def __init__(self, size, seed=0):
        super().__init__()
        self.size, self.random = size, np.random.default_rng(seed)
        for name in ("align_a", "align_b"):
            part = nn.Module()
            part.hook_pattern = HookPoint()
            self.add_module(name, part)
        self.setup()

    def forward(self, a, b):
        n_keys, n_values = HEADED.task.n_keys, HEADED.task.n_values
        key_a, polarity = (a - 1) // 2, 1 - 2 * ((a - 1) % 2)
        key_b = (b - 1 - 2 * n_keys) // (2 * n_values)
        sign = (key_a[:, :, None] == key_b[:, None]) * polarity[:, :, None].float()
        chance = torch.from_numpy(self.random.uniform(-1, 1, sign.shape)).float()
        self.align_a.hook_pattern(torch.stack([self.size * sign, chance], 1))
        self.align_b.hook_pattern(torch.stack([chance, chance], 1).mT)
        return sign


def looked_at(measure, setup, model, untrained=None, **settings):
    fresh = Examples(setup, "cpu").fresh("a test")
    trained = Trained(setup, model, 0, "cpu", fresh)
    trained.__dict__["untrained"] = untrained
    return measure(trained, **settings)


@pytest.mark.parametrize("size", [0.3, -0.02, 7.0])
def test_planted_signs_are_found_whatever_the_size_of_weights(size):
    signs = looked_at(signs_of, HEADED, Aligned(size), Aligned(0.0), n=300)
    one = signs["balanced_accuracy"].sel(scale="relative", weights="trained", place="a", layer=0)
    assert (one.sel(head=0, control="observed") == 1).all()
    assert abs(one.sel(head=1, control="observed") - 1 / 3).max() < 0.06
    assert abs(one.sel(control="shuffled") - 1 / 3).max() < 0.06
    turned = signs["turned"].sel(control="observed", scale="relative", weights="trained", head=0)
    assert (turned.sel(place="a") == (size < 0)).all()

    result = xr.DataTree.from_dict(
        {"signs": signs.expand_dims(cell=["one"]), "scores": xr.Dataset(coords={"cell": ["one"]})}
    )
    read = {
        label: [agreement[label].values(result).item() for agreement in (SIGNS, MATCHES)]
        for label in SIGNS
    }
    assert read["trained"] == [1, 1]
    for label in ("untrained", "planted signs shuffled"):
        assert read[label] == pytest.approx([1 / 3, 1 / 2], abs=0.06)
    # A third of the tokens that count are subtracted, or half of them, and 0.45 of random weights.
    planted = HEADED.sampler().batch("ood", 2, 300).latents["sign"].float()
    below = (size * planted < -0.1).float().mean().item()
    assert NEGATIVE.values(result).item() == pytest.approx((below + 3 * 0.45) / 4, abs=0.02)


def test_a_match_is_any_sign_where_a_token_counts():
    signs = looked_at(signs_of, HEADED, Aligned(1.0), Aligned(0.0), n=100)
    table = signs["confusion"].transpose(..., "sign", "found").to_numpy()
    counted = 1 - (table[..., 0, 1] + table[..., 2, 1]) / 2
    np.testing.assert_allclose(signs["matched"], (counted + table[..., 1, 1]) / 2)


def scaled(setup, factor):
    """A model whose functions are saturated in part."""
    model = setup.build(torch.Generator().manual_seed(0)).eval()
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if name.endswith(("W_Q", "W_K")) or "align" in name or "embed" in name:
                weights *= factor
    return model


@pytest.mark.parametrize(
    ("setup", "prefix"),
    [(MLU, "decoder_blocks.{}.cross_attn."), (HEADED, "align_a."), (SINGLE, "")],
    ids=["lines", "heads", "networks"],
)
def test_matrices_are_what_the_hooks_show(setup, prefix):
    model = scaled(setup, 3.0)
    shown = looked_at(matrices_of, setup, model, n=4)
    shown = shown.transpose("layer", "example", "head", "query_pos", "key_pos")
    batch = Trained(setup, model, 0, "cpu", Examples(setup, "cpu").fresh("a test")).batch("ood", 4)
    _, cache = model.run_with_cache(*batch.inputs)
    valid = setup.places(batch)[setup.shown].valid[:, None].numpy()
    for layer in range(shown.sizes["layer"]):
        one = shown.isel(layer=layer)
        for name, hook in (("affinity_matrix", "affinity"), ("gate_matrix", "gate")):
            seen = cache[prefix.format(layer) + f"hook_{hook}"].numpy()
            np.testing.assert_array_equal(one[name], np.where(valid, seen, np.nan))
        product_of = np.tanh(one["affinity_matrix"]) * one["gate_matrix"]
        np.testing.assert_allclose(one["pattern"], product_of, atol=1e-6)
    words = [setup.sampler().words(batch, example)[0] for example in range(4)]
    assert shown["query"].transpose(..., "query_pos").to_numpy().tolist() == words
    assert ("sign" in shown) == (setup is not MLU)
    softmax = cells("mlu", model="softmax")[0]
    assert looked_at(matrices_of, softmax, None) is looked_at(saturation_of, softmax, None) is None


def test_saturation_is_a_share_of_the_pairs_that_are_there():
    model = scaled(MLU, 3.0)
    found = looked_at(saturation_of, MLU, model, n=10)
    fresh = Examples(MLU, "cpu").fresh("a test")
    batch = Trained(MLU, model, 0, "cpu", fresh).batch("id", 10)
    cache, places = model.run_with_cache(*batch.inputs)[1], MLU.places(batch)
    starts = {"encoder": "encoder_blocks.{}.attn", "cross": "decoder_blocks.{}.cross_attn"}
    for (place, start), layer, head in product(starts.items(), (0, 1), (0, 1)):
        for quantity, limit in (("affinity", 2.0), ("dissimilarity", 3.0)):
            seen = cache[f"{start.format(layer)}.hook_{quantity}"][:, head][places[place].valid]
            one = found["saturated"].sel(split="id", quantity=quantity)
            one = one.sel(place=place, layer=layer, head=head)
            assert one.sel(side="low") == pytest.approx((seen <= -limit).float().mean())
            assert one.sel(side="high") == pytest.approx((seen >= limit).float().mean())
    assert (found["saturated"].sel(quantity="affinity") > 0.01).all()
    # N is minus a distance.
    assert (found["saturated_mean"].sel(quantity="dissimilarity", side="high") == 0).all()


def test_the_matrix_that_is_drawn_is_of_the_head_that_agrees_best(results):
    result = results["signed_pairs"].copy(deep=True)
    data = result["matrices"].to_dataset()
    right = result["scores"]["accuracy"].sel(split="id", group="all")
    best = int(right.where(data["model"] == "coda").fillna(-1).to_numpy().argmax())
    pattern, sign = data["pattern"].copy(), data["sign"].isel(cell=best)
    pattern[{"cell": best, "head": 0, "layer": 0}] = -0.5 * sign
    result["matrices"] = xr.DataTree(data.assign(pattern=pattern))
    axes = matrices(result).axes
    weights, planted = (np.asarray(axis.get_images()[0].get_array()) for axis in axes[2:4])
    np.testing.assert_allclose(weights, -0.5 * planted)
    limits = [axis.get_images()[0].get_clim() for axis in axes[2:4]]
    assert limits == [(-0.5, 0.5), (-1, 1)]


def test_matrices_leave_padding_out(results):
    affinity, gate, pattern = matrices(results["mlu"]).axes
    keys = [label.get_text() for label in affinity.get_xticklabels()]
    data = results["mlu"]["matrices"].to_dataset().dropna("cell", how="all", subset=["pattern"])
    assert "" not in keys
    assert "".join(keys) in {"".join(row) for row in data["key"].isel(cell=0).to_numpy()}
    shown = [np.asarray(axis.get_images()[0].get_array()) for axis in (affinity, gate, pattern)]
    np.testing.assert_allclose(shown[2], np.tanh(shown[0]) * shown[1], atol=1e-6)


# Distributions and matrices along training


@pytest.mark.parametrize("setup", [MLU, SINGLE], ids=["lines", "networks"])
def test_the_composition_of_weights_is_that_of_single_pairs(setup):
    model = scaled(setup, 3.0)
    found = looked_at(composition, setup, model, n=12)
    fresh = Examples(setup, "cpu").fresh("a test")
    batch = Trained(setup, model, 0, "cpu", fresh).batch("id", 12)
    cache, values = model.run_with_cache(*batch.inputs)[1], {"affinity": [], "gate": []}
    starts = {"encoder": "encoder_blocks.{}.attn.", "decoder": "decoder_blocks.{}.attn."}
    starts |= {"cross": "decoder_blocks.{}.cross_attn.", "a": ""}
    for name, place in setup.places(batch).items():
        for layer in range(2 if setup is MLU else 1):
            start = starts[name].format(layer)
            affinity = torch.tanh(cache[f"{start}hook_affinity"])
            gate = cache[f"{start}hook_gate"]
            for head in range(affinity.shape[1]):
                values["affinity"] += affinity[:, head][place.valid].tolist()
                values["gate"] += gate[:, head][place.valid].tolist()
    values["weight"] = [x * y for x, y in zip(values["affinity"], values["gate"], strict=True)]
    for quantity, numbers in values.items():
        one, numbers = found.sel(quantity=quantity), np.array(numbers)
        assert one["negative"] == pytest.approx((numbers < 0).mean(), abs=1e-6)
        assert one["positive"] == pytest.approx((numbers > 0).mean(), abs=1e-6)
        assert one["near_zero"] == pytest.approx((abs(numbers) < 0.1).mean(), abs=1e-6)
        assert one["distribution"].sum() == pytest.approx(1)
        below = one["distribution"].where(one["bin"] < 0).sum()
        assert below == pytest.approx((numbers < 0).mean(), abs=1e-6)
    expected = np.corrcoef(values["affinity"], values["weight"])[0, 1]
    assert found["correlation"] == pytest.approx(expected, abs=1e-5)
    shown = found["matrix"].sel(quantity="weight")
    hook = "decoder_blocks.1.cross_attn.hook_pattern" if setup is MLU else "hook_pattern"
    n_queries, n_keys = ((found[name] != "").sum().item() for name in ("query", "key"))
    weights = cache[hook][0, 0, :n_queries, :n_keys].detach()
    np.testing.assert_allclose(shown[:n_queries, :n_keys], weights, atol=1e-6)
    assert shown.count() == n_queries * n_keys
    softmax = cells("mlu", model="softmax")[0]
    assert looked_at(composition, softmax, None) is None


def test_the_matrices_are_drawn_early_and_late(results):
    result = results["signed_pairs"].copy(deep=True)
    data = result["composition_along_training"].to_dataset()
    accuracy = result["scores"]["accuracy"].sel(split="id", group="all")
    measured = data["distribution"].notnull().any(["train_step", "quantity", "bin"])
    best = int(accuracy.where(measured).argmax("cell"))
    axes = composition_view(result).axes
    data = data.isel(cell=best)
    for row, step in ((0, 2), (2, 4)):
        for column, quantity in enumerate(("affinity", "gate", "weight")):
            image = axes[3 * row + column].get_images()[0]
            expected = data["matrix"].sel(train_step=step, quantity=quantity)
            expected = expected.dropna("query_pos", how="all").dropna("key_pos", how="all")
            np.testing.assert_allclose(image.get_array(), expected)
            assert image.get_clim() == (-1, 1)


def test_the_ablation_keeps_other_settings_apart():
    """One row for each factor with several functions, a column for centrings if there are any."""
    basic = {"affinity": "tanh", "affinity_centring": "none", "gate_centring": "none"}
    basic |= {"model": "coda", "doubled": 0, "seed": 0, "id": 0.0}
    models = [
        basic | {"gate": gate, "beta": beta, "ood": ood}
        for gate, beta, ood in (("sigmoid", 0.1, 0.2), ("tanh", 0.1, 0.4), ("sigmoid", 1.0, 0.9))
    ]

    def drawn(models):
        axes = ablation(result_of(models), reading=ON_OOD, title="right").axes
        return [(one.get_title(), [text.get_text() for text in one.texts]) for one in axes]

    functions = ("heads, beta=0.1: right", ["0.200", "0.400"])
    assert drawn(models) == [functions]
    models.append(models[0] | {"gate_centring": "matrix", "ood": 0.6})
    assert drawn(models) == [functions, ("heads, beta=0.1: right", ["0.200", "0.600"])]


def test_that_the_gate_opens_is_asked_where_n_is_centred():
    """Otherwise it is at most 0, and its sigmoid at most a half."""
    (claim,) = (one for one in ARITHMETIC.claims if one.statement.startswith("the gate opens"))
    centring = ["none", "matrix", "none"]
    coords = {"cell": range(3), "side": ["low", "high"], "gate_centring": ("cell", centring)}
    shares = xr.DataArray(
        [[[0.5, 0.0]], [[0.0, 0.2]], [[0.0, 0.0]]], dims=("cell", "split", "side")
    )
    data = shares.expand_dims(quantity=["dissimilarity"]).assign_coords(split=["id"], **coords)
    scores = xr.Dataset(coords={"cell": range(3), "gate_centring": ("cell", centring)})
    tree = xr.DataTree.from_dict(
        {"saturation": xr.Dataset({"saturated_mean": data}), "scores": scores}
    )
    np.testing.assert_array_equal(claim.reading.values(tree), [np.nan, 0.2, np.nan])
