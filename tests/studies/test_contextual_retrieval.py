from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import one_hot
from transformer_lens import HookedRootModule
from transformer_lens.hook_points import HookPoint

from studies.contextual_retrieval import CLAIMS, STUDY
from studies.engine import Resources, Trained, read_result, run
from studies.engine.claims import judge
from studies.engine.examples import Examples
from studies.engine.fairness import assess
from studies.engine.settings import changed
from studies.measures.retrieval import (
    as_compositional,
    chosen_retrievals,
    combinations,
    early_error,
)
from studies.setups.retrieval import MODELS
from tests.studies.engine.synthetic import result_of

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    return run(STUDY, "smoke", ["seed=0,3,4"], resources=Resources(root=root, workers=1))


@pytest.fixture(scope="module")
def result(folder):
    return read_result(folder / "result.nc")


PROTOCOLS = ["familiar"] * 3 + ["all"] * 3


def test_all_is_there_for_each_model_that_it_applies_to(result, folder):
    cells = result["scores"]["cell"]
    models = ["multi_head"] * 6 + ["compositional"] * 6 + ["multi_head_pairs"] * 3
    assert cells["model"].to_numpy().tolist() == models
    assert cells["seed"].to_numpy().tolist() == [0, 3, 4] * 5
    assert cells["trained_on"].to_numpy().tolist() == PROTOCOLS * 2 + ["familiar"] * 3
    pairs = np.isfinite(result["pairing"]["entropy"]).any(("group", "model_search"))
    assert pairs.to_numpy().tolist() == [False] * 6 + [True] * 6 + [False] * 3
    assert STUDY.table.render(result).row_count == 5
    # One rate was tried.
    for name in set(STUDY.views) - {"tuning"}:
        assert (folder / f"{name}.png").stat().st_size > 1000


def test_each_model_is_scored_where_its_training_makes_sense(result):
    """No error in distribution stands for one out of distribution, or the other way round."""
    finite = np.isfinite(result["scores"]["error"]).sel(group="all")
    for cell in range(finite.sizes["cell"]):
        on_all = finite["trained_on"][cell] == "all"
        expected = {"id": True, "all": bool(on_all), "ood": not on_all}
        for split, is_scored in expected.items():
            assert finite.sel(split=split)[cell] == is_scored
    forced = np.isfinite(result["pairing"]["removed"]).any("condition")
    assert forced.to_numpy().tolist() == [False] * 6 + [True] * 3 + [False] * 6


def test_the_constants_error_is_that_of_the_weights(result):
    constant = result["scores"]["error_constant"].sel(group="all", split="id").to_numpy()
    cells = STUDY.plan("smoke", ["seed=0,3,4"]).cells
    for cell, setup in enumerate(cells):
        assert setup.sampler().config.seed == setup.seed
        # The mean size of the targets.
        size = setup.sampler().batch("id", 0, 20_000).targets.abs().mean()
        assert constant[cell] == pytest.approx(size.item(), rel=0.02)
    drawn = [changed(setup, "task.coefficients=drawn") for setup in cells]
    weights = {tuple(setup.sampler().coefficients) for setup in drawn}
    assert len(weights) == 3


def test_errors_of_combinations_are_those_of_their_splits(result):
    error = result["combinations"]["error"]
    held_out = {(2, 1), (2, 3), (3, 1), (3, 3)}
    has = {split: np.isfinite(error.sel(split=split)) for split in ("id", "ood", "all")}
    for first, second in np.ndindex(4, 4):
        at = {"preference_0": first, "preference_1": second}
        is_held_out = (first, second) in held_out
        on_all = error["trained_on"] == "all"
        assert (has["id"].sel(at) == (not is_held_out)).all()
        assert (has["ood"].sel(at) == (is_held_out & ~on_all)).all()
        assert (has["all"].sel(at) == on_all).all()
    means = error.mean(("preference_0", "preference_1"))
    scores = result["scores"]["error"].sel(group="all", split=means["split"])
    assert np.allclose(means, scores, rtol=0.2, equal_nan=True)


class Oracle(HookedRootModule):
    """Retrieves what is asked for, its retrievals in another order; perhaps wrongly if held out."""

    def __init__(self, task, *, wrong):
        super().__init__()
        self.task, self.wrong = task, wrong
        attn = nn.Module()
        attn.hook_value_scores, attn.hook_pattern = HookPoint(), HookPoint()
        block = nn.Module()
        block.attn = attn
        self.blocks = nn.ModuleList([block])
        self.setup()

    def forward(self, inputs):
        _, truth = self.task.solve(inputs)
        preference, (searches, retrievals) = truth["preference"], (2, 4)
        held = torch.from_numpy(self.task.combinations("ood"))
        new = (preference[:, :, None] == held).all(-1).any(-1)
        chosen = (preference + 1 + (new & self.wrong)[..., None]) % retrievals
        attn = self.blocks[0].attn
        scores = attn.hook_value_scores(one_hot(chosen, retrievals).float())
        pattern = one_hot(truth["winner"], inputs.shape[1]).float().transpose(1, 2)
        pattern = attn.hook_pattern(pattern)
        values = inputs[..., searches : searches + retrievals].roll(1, -1)
        weights = torch.from_numpy(self.task.coefficients).float()
        return torch.einsum("bsqk,bkr,bqsr,s->bq", pattern, values, scores, weights)[..., None]


COMPOSITIONAL = ["seed=0", "model=compositional", "task.trained_on=familiar"]


def looked_at(measure, *, n, wrong):
    (setup,) = STUDY.plan("smoke", COMPOSITIONAL).cells
    model = Oracle(setup.sampler(), wrong=wrong)
    return measure(Trained(setup, model, 0, "cpu", Examples(setup, "cpu").fresh("this")), n=n)


@pytest.mark.parametrize("wrong", [False, True])
def test_a_planted_pairing_is_found_and_forcing_it_mends_what_is_wrong(wrong):
    found = looked_at(chosen_retrievals, n=100, wrong=wrong)
    one = found.sel(fitted="id", search="pooled")
    assert one["retrieval_assignment"].to_numpy().tolist() == [1, 2, 3, 0]
    agreement = one["agreement"].sel(control="observed")
    assert agreement.sel(group="id") == 1
    assert agreement.sel(group="ood") == (0 if wrong else 1)
    assert one["agreement"].sel(control="shuffled", group="id") < 0.5
    # By the frequencies of preferences in the combinations, counted by hand.
    if not wrong:
        assert found["switch"] == pytest.approx(2 / 3, abs=0.06)
        assert found["unevenness"].sel(group="id") == pytest.approx(1 / 6, abs=0.06)
        assert found["unevenness"].sel(group="all") < 0.06
    error = found["mean_error"]
    assert (error.sel(condition="none") > 0.1) == wrong
    for condition in ("true", "familiar"):
        assert error.sel(condition=condition) == pytest.approx(0, abs=1e-6)
    assert error.sel(condition="random") > 0.1


def test_wrong_answers_are_those_of_the_combinations_that_they_are_planted_in():
    error = looked_at(combinations, n=200, wrong=True)["error"].to_numpy()
    assert np.nanmax(error[0]) == pytest.approx(0, abs=1e-6)
    assert np.nanmin(error[1]) > 0.1
    assert np.isfinite(error).sum(0).tolist() == [[1] * 4] * 4


GOOD = {
    "multi_head": {"id": 0.2, "all": 0.2, "early": 0.5, "ood": 0.4},
    "multi_head_pairs": {"id": 0.2, "ood": 0.5},
    "compositional": {"id": 0.1, "all": 0.1, "early": 0.4, "ood": 0.2}
    | {"agree": 0.9, "familiar": 0.9, "removed": 0.6, "switch": 0.5},
}


def verdicts(result, **changes):
    """Of figures that are planted, the same for all seeds."""
    tree = result.copy(deep=True)
    for cell, model in enumerate(tree["scores"]["model"].to_numpy()):
        planted = GOOD[model] | (changes if model == "compositional" else {})
        tree["scores"]["error_constant"][{"cell": cell}] = 1.0
        error, curve = tree["scores"]["error"], tree["training"]["error"]
        at = {"cell": error["cell"][cell]}
        for split in ("id", "all", "ood"):
            if np.isfinite(error.loc[at | {"split": split}]).all():
                error.loc[at | {"split": split}] = planted[split]
                curve.loc[at | {"split": split}] = planted[split]
                if split == "all":
                    curve.loc[at | {"split": split, "train_step": 10}] = planted["early"]
        if model == "compositional":
            pairing = tree["pairing"]
            of_all, of_some = (
                {"fitted": fitted, "control": "observed"} for fitted in ("all", "id")
            )
            for name, value, more in (
                ("chance", 0.25, {}),
                ("removed", planted["removed"], {}),
                ("switch", planted["switch"], {}),
                ("unevenness", 0.1, {}),
                ("agreement", 0.3, {"control": "shuffled"}),
                ("agreement", planted["agree"], of_all),
                ("agreement", planted["familiar"], of_some),
            ):
                data = pairing[name]
                # What was not measured stays so.
                measured = np.isfinite(data.loc[at | more])
                data.loc[at | more] = data.loc[at | more].where(~measured, value)
    found = judge(tree, CLAIMS, assess(tree, STUDY.trained))
    return found["verdict"].to_numpy().tolist()


# Claims by number: 0 on all combinations, 1 held out, 2 to 4 by parameters, 5 early, 6 over
# training, 7 and 8 specialisation of models trained on some and on all, 9 and 10 whether there is
# any, 11 switching, 12 pairs, 13 and 14 ours, 15 and 16 algebra, which is as measured.
@pytest.mark.parametrize(
    ("changes", "against"),
    [
        ({}, set()),
        ({"all": 0.25}, {0}),
        ({"id": 0.3}, set()),
        ({"ood": 0.45}, {1}),
        ({"ood": 0.55}, {1, 12}),
        ({"early": 0.55}, {5}),
        ({"early": 0.8}, {5, 6}),
        ({"agree": 0.2}, {7, 8, 9, 10}),
        ({"agree": 0.6}, {7, 8}),
        ({"switch": 0.05}, {11}),
        ({"familiar": 0.6}, {13}),
        ({"removed": 0.4}, {14}),
    ],
)
def test_claims_hold_where_figures_say_so(result, changes, against):
    expected = ["contradicted" if n in against else "holds" for n in range(17)]
    expected[2:5] = ["not run"] * 3
    assert verdicts(result, **changes) == expected


def test_widths_are_compared_at_every_number_of_heads():
    """Narrow compositional models against wide multi-head ones; equal widths for the others."""
    errors = {("compositional", 64): 0.3, ("compositional", 128): 0.8}
    errors |= {("multi_head", 64): 0.9, ("multi_head", 128): 0.5}
    cells = [
        {"model": model, "d_model": width, "n_heads": heads, "seed": seed, "id": 0.1, "ood": error}
        for (model, width), error in errors.items()
        for heads in ((2, 8) if model == "multi_head" else (None,))
        for seed in range(3)
    ]
    tree = result_of(cells, metric="error", better="lower")
    found = judge(tree, CLAIMS[:5], assess(tree, None)).to_dataframe()
    found = found[found["verdict"] != "not run"]
    assert found[["context", "verdict"]].to_numpy().tolist() == [
        ["d_model 64, n_heads 2", "holds"],
        ["d_model 64, n_heads 8", "holds"],
        ["d_model 128, n_heads 2", "contradicted"],
        ["d_model 128, n_heads 8", "contradicted"],
        ["n_heads 2", "holds"],
        ["n_heads 8", "holds"],
    ]
    assert found["effect"].to_numpy() == pytest.approx([0.6, 0.6, -0.3, -0.3, 0.2, 0.2])


def test_the_early_error_is_that_of_the_evaluation_nearest_to_it(result):
    curve = result["training"]["error"].sel(split="all", group="all")
    for share, step in ((0.1, 10), (0.7, 10), (0.8, 20)):
        values = early_error("all", share).values(result)
        np.testing.assert_array_equal(values, curve.sel(train_step=step))


def test_models_that_did_not_learn_are_not_compared_on_held_out_combinations(result):
    found = verdicts(result, id=0.6, all=0.6)
    assert found[1] == found[9] == "not comparable"
    assert found[0] == "contradicted"


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("model=linear", "model must be one of multi_head, multi_head_pairs, compositional"),
        ("d_model=7", "d_model must be a multiple of 2, got 7"),
        ("d_model=6", "d_model must be a multiple of 4, got 6"),
        ("n_heads=3", "d_model must be a multiple of 3, got 8"),
        ("task.trained_on=ood", "trained_on"),
        ("task.n_searches=0", "n_searches"),
        ("task.seed=1", "task.seed must be 0, got 1"),
        ("seed=1,1", "different"),
        ("scores.n_test=1", "n_test must be at least 2"),
    ],
)
def test_wrong_settings_get_a_clear_error(setting, message):
    with pytest.raises(ValueError, match=message):
        STUDY.plan("smoke", [setting])


@pytest.mark.parametrize("changes", ["", "own_value=false", "nonlinear=true"])
def test_multi_head_attention_is_compositional_attention_with_the_identity(changes, monkeypatch):
    setup = changed(STUDY.plan("smoke").setup, f"model=multi_head n_heads=4 {changes}")
    model = setup.build(torch.Generator().manual_seed(0)).eval()

    def measured():
        examples = Examples(setup, "cpu").fresh("as_compositional")
        return as_compositional(Trained(setup, model, 0, "cpu", examples))

    assert 0 <= measured()["distance"] < 1e-5
    # With other value scores the outputs are others.
    eye = torch.eye
    even = torch.full((4, 4), 0.25)
    monkeypatch.setattr(torch, "eye", lambda n, **to: eye(n, **to) if "dtype" in to else even)
    assert measured()["distance"] > 1e-2
    compositional = changed(setup, "model=compositional")
    fresh = Examples(compositional, "cpu").fresh("as_compositional")
    assert as_compositional(Trained(compositional, model, 0, "cpu", fresh)) is None


def test_the_error_that_is_minimised_is_the_one_that_is_scored():
    (setup,) = STUDY.plan("smoke", COMPOSITIONAL).cells
    model, batch = setup.build(torch.Generator().manual_seed(0)), setup.sampler().batch("id", 0, 50)
    output = model(batch.inputs)
    error = (output[..., 0] - batch.targets).abs().mean().item()
    assert setup.loss(model, batch, 0).item() == pytest.approx(error)
    part, whole = setup.scores(output, batch, "id")["error"]
    assert (part.sum() / whole.sum()).item() == pytest.approx(error)


def test_networks_differ_in_their_heads_alone():
    (setup,) = STUDY.plan("smoke", [*COMPOSITIONAL, "d_model=64", "n_heads=8"]).cells
    configs = {
        model: replace(setup, model=model, n_heads=8).build(torch.Generator()).config
        for model in MODELS
    }
    assert len({replace(config, attention=None) for config in configs.values()}) == 1
    widths = {
        model: (config.attention.n_heads, config.attention.d_head, config.attention.d_value)
        for model, config in configs.items()
    }
    assert widths == {
        "multi_head": (8, 8, None),
        "multi_head_pairs": (8, 32, None),
        "compositional": (2, 32, 16),
    }
    assert all(config.attention.own_value for config in configs.values())


def test_variants_of_the_attention_are_settings():
    text = "own_value=false nonlinear=true scorer=mlp chosen_by=top_k n_selected=2 d_mlp=5"
    (setup,) = STUDY.plan("smoke", [*COMPOSITIONAL, *text.split()]).cells
    attention = setup.attention
    assert (attention.own_value, attention.nonlinear) == (False, True)
    assert (attention.scorer, attention.selection, attention.n_selected) == ("mlp", "top_k", 2)
    (setup,) = STUDY.plan("smoke", [*COMPOSITIONAL, "separate_value_keys=true"]).cells
    assert setup.attention.separate_value_keys
    heads = replace(setup, model="multi_head", nonlinear=True, own_value=False).attention
    assert (heads.nonlinear, heads.own_value) == (True, False)


@pytest.mark.parametrize("preset", ["laptop", *STUDY.presets])
def test_every_preset_builds_its_models(preset):
    cells = {(one.model, one.task, one.d_model, one.n_heads): one for one in PLANS[preset].cells}
    for setup in cells.values():
        model = setup.build(torch.Generator().manual_seed(0))
        assert torch.isfinite(setup.loss(model, setup.sampler().batch("train", 0, 2), 0))


PLANS = {preset: STUDY.plan(preset) for preset in ("laptop", *STUDY.presets)}


def test_each_of_the_papers_rows_is_run_with_both_protocols():
    """The settings of each row are compared with the table of the paper elsewhere."""
    cells = PLANS["paper"].cells
    assert len(cells) == 32 * 2 * 3
    reported = [(one.task.trained_on, number.split) for one in cells for number in one.paper()]
    assert sorted(set(reported)) == [("all", "all"), ("familiar", "ood")]
    assert len(reported) == 32 * 2 * 3
    (laptop,) = STUDY.plan("laptop", COMPOSITIONAL).cells
    assert [(one.split, one.value) for one in laptop.paper()] == [("ood", 0.28)]
    on_all = changed(laptop, "task.trained_on=all")
    assert [(one.split, one.value) for one in on_all.paper()] == [("all", 0.1)]


def test_specialisation_is_looked_at_in_the_papers_tasks():
    for preset in ("specialization", "paper-specialization"):
        cells = PLANS[preset].cells
        tasks = {(one.task.n_searches, one.task.n_retrievals) for one in cells}
        assert tasks == {(1, 2), (1, 4), (2, 4)}
        assert {(one.model, one.task.trained_on) for one in cells} == {("compositional", "all")}
