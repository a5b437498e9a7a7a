from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import one_hot
from transformer_lens import HookedRootModule
from transformer_lens.hook_points import HookPoint

from studies.contextual_retrieval import STUDY, chosen_retrievals, combinations
from studies.engine import Resources, Trained, read_result, run
from studies.engine.claims import judge
from studies.engine.examples import Examples
from studies.engine.fairness import assess
from studies.setups.retrieval import MODELS


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    return run(STUDY, "smoke", ["seed=0,3,4"], resources=Resources(root=root, workers=1))


@pytest.fixture(scope="module")
def result(folder):
    return read_result(folder / "result.nc")


def test_all_is_there_for_each_model_that_it_applies_to(result, folder):
    cells = result["scores"]["cell"]
    assert cells["model"].to_numpy().tolist() == [model for model in MODELS for _ in range(3)]
    assert cells["seed"].to_numpy().tolist() == [0, 3, 4] * 3
    pairs = np.isfinite(result["pairing"]["entropy"]).any(("group", "model_search"))
    assert pairs.to_numpy().tolist() == [False] * 6 + [True] * 3
    assert STUDY.table.render(result).row_count == 3
    for name in STUDY.views:
        assert (folder / f"{name}.png").stat().st_size > 1000


def test_every_seed_has_weights_of_its_own_which_the_constants_error_follows(result):
    constant = result["scores"]["error_constant"].sel(group="all", split="id").to_numpy()
    for cell, setup in enumerate(STUDY.plan("smoke", ["seed=0,3,4"]).cells):
        assert setup.sampler().config.seed == setup.seed
        # The mean size of the targets.
        size = setup.sampler().batch("id", 0, 20_000).targets.abs().mean()
        assert constant[cell] == pytest.approx(size.item(), rel=0.02)
    assert constant[0] != constant[1]


def test_errors_of_combinations_are_those_of_their_splits(result):
    error = result["combinations"]["error"]
    held_out = {(2, 1), (2, 3), (3, 1), (3, 3)}
    for split, known in (("id", False), ("ood", True)):
        for first, second in np.ndindex(4, 4):
            one = error.sel(split=split, preference_0=first, preference_1=second)
            assert np.isfinite(one).all() == (((first, second) in held_out) is known)
    means = error.mean(("preference_0", "preference_1"))
    assert np.allclose(means, result["scores"]["error"].sel(group="all"), rtol=0.2)


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


def looked_at(measure, *, n, wrong):
    (setup, *_) = STUDY.plan("smoke", ["seed=0", "model=compositional"]).cells
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
    "multi_head": {"id": 0.2, "ood": 0.4},
    "multi_head_pairs": {"id": 0.2, "ood": 0.5},
    "compositional": {"id": 0.1, "ood": 0.2, "agree": 0.9, "removed": 0.6},
}


def verdicts(result, **changes):
    """Of figures that are planted, the same for all seeds."""
    tree = result.copy(deep=True)
    for cell, model in enumerate(tree["scores"]["model"].to_numpy()):
        planted = GOOD[model] | (changes if model == "compositional" else {})
        tree["scores"]["error_constant"][{"cell": cell}] = 1.0
        for split in ("id", "ood"):
            for group in ("scores", "training"):
                error = tree[group]["error"]
                error.loc[{"cell": error["cell"][cell], "split": split}] = planted[split]
        if model == "compositional":
            pairing = tree["pairing"]
            pairing["chance"][{"cell": cell}] = 0.25
            pairing["removed"][{"cell": cell}] = planted["removed"]
            agreement = pairing["agreement"]
            at = {"cell": agreement["cell"][cell]}
            agreement.loc[at | {"control": "shuffled"}] = 0.3
            agreement.loc[at | {"control": "observed"}] = planted["agree"]
    found = judge(tree, STUDY.claims, assess(tree, STUDY.trained))
    return found["verdict"].to_numpy().tolist()


@pytest.mark.parametrize(
    ("changes", "against"),
    [
        ({}, set()),
        ({"id": 0.25}, {0, 3}),
        ({"ood": 0.45}, {1, 2}),
        ({"id": 0.05, "ood": 0.3}, {2}),
        ({"ood": 0.55}, {1, 2, 4}),
        ({"agree": 0.6}, {6}),
        ({"agree": 0.2}, {5, 6}),
        ({"removed": 0.4}, {7}),
    ],
)
def test_claims_hold_where_figures_say_so(result, changes, against):
    expected = ["contradicted" if n in against else "holds" for n in range(8)]
    assert verdicts(result, **changes) == expected


def test_models_that_did_not_learn_are_not_compared_on_held_out_combinations(result):
    found = verdicts(result, id=0.6)
    assert found[1:3] == ["not comparable"] * 2
    assert found[0] == "contradicted"


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("model=linear", "model must be one of multi_head, multi_head_pairs, compositional"),
        ("d_model=7", "d_model must be a multiple of 2, got 7"),
        ("task.n_searches=0", "n_searches"),
        ("task.seed=1", "task.seed must be 0, got 1"),
        ("seed=1,1", "different"),
        ("scores.n_test=1", "n_test must be at least 2"),
    ],
)
def test_wrong_settings_get_a_clear_error(setting, message):
    with pytest.raises(ValueError, match=message):
        STUDY.plan("smoke", [setting])


def test_the_error_that_is_minimised_is_the_one_that_is_scored():
    (setup, *_) = STUDY.plan("smoke", ["seed=0", "model=compositional"]).cells
    model, batch = setup.build(torch.Generator().manual_seed(0)), setup.sampler().batch("id", 0, 50)
    output = model(batch.inputs)
    error = (output[..., 0] - batch.targets).abs().mean().item()
    assert setup.loss(model, batch, 0).item() == pytest.approx(error)
    part, whole = setup.scores(output, batch, "id")["error"]
    assert (part.sum() / whole.sum()).item() == pytest.approx(error)


def test_networks_differ_in_their_heads_alone():
    cells = STUDY.plan("paper", ["seed=0", "d_model=64", "task.n_searches=2"]).cells
    heads = {}
    for setup in (replace(cells[0], model=model) for model in MODELS):
        attention = setup.build(torch.Generator()).config.attention
        assert attention.d_head == 32
        heads[setup.model] = attention.n_heads
        if setup.model == "compositional":
            assert (attention.n_searches, attention.n_retrievals) == (2, 4)
    assert heads == {"multi_head": 2, "multi_head_pairs": 8, "compositional": 2}


@pytest.mark.parametrize("preset", ["laptop", *STUDY.presets])
def test_every_preset_builds_its_models(preset):
    cells = {(one.model, one.task, one.d_model): one for one in STUDY.plan(preset).cells}
    for setup in cells.values():
        model = setup.build(torch.Generator().manual_seed(0))
        assert torch.isfinite(setup.loss(model, setup.sampler().batch("train", 0, 2), 0))


def test_the_paper_preset_is_the_papers():
    plan = STUDY.plan("paper")
    assert len(plan.cells) == 3 * 5 * 2 * 3
    sizes = {(one.task.n_searches, one.task.n_retrievals) for one in plan.cells}
    assert sizes == {(2, 4), (4, 8), (4, 16)}
    assert {one.d_model for one in plan.cells} == {32, 64, 128, 256, 512}
    training = plan.setup.training
    assert (training.n_steps, training.batch_size) == (100_000, 256)
    assert training.learning_rate_at(0) == training.learning_rate_at(50_000) == 1e-4
    assert sum(len(one.paper()) == 2 for one in plan.cells) == 3 * 16
    (laptop,) = STUDY.plan("laptop", ["seed=0", "model=compositional"]).cells
    assert {one.split: one.value for one in laptop.paper()} == {"id": 0.1, "ood": 0.28}
