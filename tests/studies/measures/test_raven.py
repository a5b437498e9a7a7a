"""Measures of Raven models: planted attention is found, and untrained attention shows nothing."""

from itertools import product

import numpy as np
import pytest
import torch
import xarray as xr
from torch import nn
from transformer_lens import HookedRootModule
from transformer_lens.hook_points import HookPoint

import probes
from studies.engine import Trained
from studies.engine.examples import Examples
from studies.measures import raven, raven_erasure
from studies.raven_latent_code import STUDY
from tasks import RAVEN_RULES, raven_correspondence


def setup_of(n_features=4, n_layers=1):
    changes = [f"task.n_features={n_features}", f"n_layers={n_layers}", "n_heads=8", "d_head=2"]
    return STUDY.plan("smoke", changes).cells[0]


def fresh(setup):
    return Examples(setup, "cpu").fresh("some measure")


class Planted(HookedRootModule):
    """Attends to corresponding tokens, most with the head of the rule; sum is like difference.

    It knows the permutations and rules of the instances that it gets, in batches of these sizes.
    """

    def __init__(self, setup, splits, *sizes):
        super().__init__()
        block = nn.Module()
        block.attn = nn.Module()
        block.attn.hook_attn_scores, block.attn.hook_pattern = HookPoint(), HookPoint()
        self.blocks = nn.ModuleList([block])
        self.setup()
        self.known, self.n_heads = {}, setup.n_heads
        examples = fresh(setup)
        for split, n in product(splits, sizes):
            for batch in examples.batches(split, n):
                where = raven_correspondence(batch.latents["permutation"])
                labels = zip(where, batch.latents["response_rule"], batch.targets, strict=True)
                self.known |= dict(zip(map(self._key, batch.inputs), labels, strict=True))

    @staticmethod
    def _key(inputs):
        return inputs.numpy().tobytes()

    def forward(self, inputs):
        unused = 0 * self._pattern(inputs).sum()
        return torch.zeros(len(inputs), inputs.shape[1] // 9, 8) + unused

    def _pattern(self, inputs):
        n_pos, n_features = inputs.shape[1], inputs.shape[1] // 9
        noise = torch.Generator().manual_seed(0)
        shape = (len(inputs), self.n_heads, n_pos, n_pos)
        pattern = 0.1 * torch.rand(shape, generator=noise)
        for example, key in enumerate(map(self._key, inputs)):
            where, rules, _ = self.known[key]
            for token, rule in enumerate(rules.tolist()):
                code = 0.5 + torch.eye(self.n_heads)[5 if rule == 6 else rule]
                for panel in range(9):
                    position = panel * n_features + where[token, panel % 3]
                    pattern[example, :, n_pos - n_features + token, position] = code
        return self.blocks[0].attn.hook_pattern(self.blocks[0].attn.hook_attn_scores(pattern))


class Reading(Planted):
    """Reads the rule from its own attention, and is right where that is the true one."""

    def forward(self, inputs):
        n_features = inputs.shape[1] // 9
        codes = self._pattern(inputs)[:, :, -n_features:].diagonal(6 * n_features, 2, 3)
        known = [self.known[key][1:] for key in map(self._key, inputs)]
        rules, targets = (torch.stack(labels) for labels in zip(*known, strict=True))
        is_right = codes.argmax(1) == torch.where(rules == 6, 5, rules)
        return torch.eye(8)[torch.where(is_right, targets, (targets + 1) % 8)]


def planted(setup, splits, n):
    return Trained(setup, Planted(setup, splits, n), 0, "cpu", fresh(setup))


def untrained(setup):
    model = setup.build(torch.Generator().manual_seed(9)).eval()
    return Trained(setup, model, 0, "cpu", fresh(setup))


def test_heads_that_find_the_corresponding_token_are_found():
    setup = setup_of()
    found = raven.pointing(planted(setup, ("id", "ood"), 100), n=100)["share"]
    assert found.dims == ("split", "control", "target", "layer", "head", "row", "column")
    observed = found.sel(control="observed")
    assert (observed.sel(target="corresponding") == 1).all()
    assert (observed.sel(target="same position") == 0).all()
    for control in ("shuffled", "untrained"):
        share = found.sel(control=control, target="corresponding")
        assert abs(float(share.mean()) - 0.25) < 0.06


def test_the_rule_is_in_the_code_of_the_corresponding_tokens_only():
    setup = setup_of()
    found = raven.permuted(planted(setup, ("id", "id", "ood"), 150), n=150)
    score = found["score"].sel(metric="accuracy", layer="all")
    # Sum and difference cannot be told apart.
    assert (score.sel(tokens="corresponding", control="probe") > 0.75).all()
    # One token in four is at its own position.
    assert (score.sel(tokens="same position", control="probe") < 0.55).all()
    assert (score.sel(tokens="corresponding", control=["shuffled", "untrained"]) < 0.45).all()


@pytest.mark.parametrize("split", ["ood", "ood_unpermuted"])
def test_types_of_the_control_task_are_the_values_that_the_tokens_show(split):
    setup = setup_of()
    model = untrained(setup)
    batches = list(model.batches(split, 30))
    digits = torch.cat([batch.inputs for batch in batches]).argmax(-1).unflatten(1, (3, 3, 4))
    found = raven.permuted_weights(model.model, batches, n_features=4)
    assert (found["value"].to_numpy() == digits[:, 2, :2].numpy()).all()
    if split == "ood_unpermuted":
        shown = raven.codes_of(model.model, batches, n_features=4)["shown"].to_numpy()
        first, second = digits[:, 2, 0].numpy(), digits[:, 2, 1].numpy()
        assert (shown // 2**16 == first).all()
        assert (shown % 2**16 == second).all()


def test_the_rule_is_compared_with_the_control_task():
    found = raven.decoding(untrained(setup_of(n_features=2)), n=60)
    assert list(found["control"].to_numpy()) == ["probe", "shuffled", "control task", "untrained"]
    score = found["score"].sel(metric="accuracy")
    difference = score.sel(control="probe") - score.sel(control="control task")
    assert np.allclose(found["selectivity"], difference)


def test_which_token_corresponds_is_in_the_attention_to_all():
    setup = setup_of()
    found = raven.alignment(planted(setup, ("id", "id", "ood"), 100), n=100)
    score = found["score"].sel(metric="accuracy", layer="all")
    assert (score.sel(control="probe") > 0.95).all()
    assert (score.sel(control=["shuffled", "untrained"]) < 0.4).all()
    nothing = raven.alignment(untrained(setup), n=100)["score"]
    assert (nothing.sel(metric="accuracy", layer="all", control="probe") < 0.4).all()


def test_rules_with_the_same_code_are_similar():
    setup = setup_of()
    found = raven.similarity(planted(setup, ("ood_unpermuted",), 200), n=200)
    at = {"control": "observed", "layer": "all", "key": "all", "centring": "none"}
    similarity = found["similarity"].sel(at)
    assert similarity["first"].to_numpy().tolist() == list(RAVEN_RULES)
    assert float(similarity.sel(first="sum", second="difference")) == pytest.approx(1, abs=1e-3)
    assert float(similarity.sel(first="sum", second="constant")) < 0.9
    rest = [float(similarity[a, b]) for a in range(8) for b in range(a) if {a, b} != {5, 6}]
    related = found["related"].sel(at)
    assert float(related) == pytest.approx(1 - np.mean(rest), abs=1e-3)
    assert float(related) > 0.1
    assert abs(float(found["related"].sel(at | {"control": "shuffled"}))) < 0.05


def test_permuted_weights_are_those_of_the_answer_tokens():
    setup = setup_of(n_layers=2)
    model = setup.build(torch.Generator().manual_seed(0)).eval()
    batch = setup.sampler().batch("ood", 0, 3)
    data = raven.permuted_weights(model, [batch], 4)
    _, cache = model.run_with_cache(batch.inputs)
    order = batch.latents["permutation"]
    for layer in range(2):
        pattern = cache[f"blocks.{layer}.attn.hook_pattern"]
        for feature in range(4):
            for column, panel in ((0, 6), (1, 7)):
                for token in range(4):
                    weight = data["weight"].isel(
                        layer=layer, feature=feature, column=column, token=token
                    )
                    expected = pattern[:, :, 32 + feature, 4 * panel + token].numpy()
                    np.testing.assert_allclose(weight, expected)
                at = data["corresponding"].isel(feature=feature, column=column).to_numpy()
                same = order[torch.arange(3), column, torch.from_numpy(at)]
                assert torch.equal(same, order[:, 2, feature])
    assert (data["rule"].to_numpy() == batch.latents["response_rule"].numpy()).all()


def test_samples_show_instances_and_the_attention_of_the_last_token():
    setup = setup_of(n_layers=2)
    trained = untrained(setup)
    data = raven.samples(trained, n=2, n_codes=12)
    (batch,) = fresh(setup).batches("ood", 2)
    logits, cache = trained.model.run_with_cache(batch.inputs)
    assert (data["answer"].to_numpy() == logits.argmax(-1).numpy()).all()
    assert (data["values"].to_numpy() == batch.latents["values"].numpy()).all()
    for kind, hook in (("pattern", "hook_pattern"), ("scores", "hook_attn_scores")):
        expected = cache[f"blocks.1.attn.{hook}"][:, :, -1].numpy()
        np.testing.assert_allclose(data[kind].sel(layer=1), expected, rtol=1e-5)
    rules = data["code_rule"].to_numpy()
    assert (np.sort(rules) == rules).all()
    similarity = data["code_similarity"]
    assert similarity.dims == ("layer", "sample", "other")
    np.testing.assert_allclose(np.diagonal(similarity, axis1=1, axis2=2), 1, rtol=1e-5)


def test_codes_of_layers_are_projected_with_their_labels():
    setup = setup_of(n_layers=2)
    points = raven.projection(untrained(setup), n=20)
    assert points["layer"].to_numpy().tolist() == ["0", "1", "all"]
    (batch,) = fresh(setup).batches("ood_unpermuted", 20)
    assert (points["rule"].to_numpy() == batch.latents["rule"].numpy()).all()
    # Without permuted columns the answer tokens are in the order of the features.
    assert (points["value"].to_numpy() == batch.targets.numpy()).all()


@pytest.mark.parametrize(("model", "is_used"), [(Reading, True), (Planted, False)])
def test_erasing_rules_harms_a_model_that_reads_them_from_its_code(model, is_used):
    setup = setup_of(n_features=2)
    splits = ("id_unpermuted", "ood_unpermuted")
    trained = Trained(setup, model(setup, splits, 300, 300), 0, "cpu", fresh(setup))
    data = raven_erasure.erasure(trained, n=300, draws=2)
    assert data["rate"].dims == ("split", "condition", "site")
    assert data["site"].to_numpy().tolist() == ["layer 0", "all layers"]
    rate = data["rate"].sel(site="layer 0", split=list(splits))
    unchanged, erased = rate.sel(condition="none"), rate.sel(condition="erased")
    if is_used:
        assert (unchanged == 1).all()
        assert (erased < 0.6).all()
    else:
        assert (erased == unchanged).all()
    # A single layer is all layers.
    xr.testing.assert_allclose(
        rate.drop_vars("site"), data["rate"].sel(site="all layers").drop_vars("site")
    )
    difference = erased - rate.sel(condition="control")
    assert np.allclose(data["effect"].sel(control="control", site="layer 0"), difference)


def test_erasures_of_each_feature_are_fitted_on_other_instances_in_each_layer_and_all(monkeypatch):
    setup, calls, erase = setup_of(n_features=2, n_layers=2), [], probes.erase

    def spy(model, *data, **options):
        calls.append((*data, options["hooks"], options["outcomes"]["right"]))
        return erase(model, *data, **options)

    monkeypatch.setattr(probes, "erase", spy)
    raven_erasure.erasure(untrained(setup), n=30, draws=1)
    examples = fresh(setup)
    (fit,), (test,) = (examples.batches("id_unpermuted", 30) for _ in range(2))
    for feature in range(2):
        inputs, rules, tested, hooks, right = calls[feature]
        assert (inputs == fit.inputs).all()
        assert (tested == test.inputs).all()
        assert not (tested == inputs).all()
        assert (rules == fit.latents["rule"][:, feature]).all()
        assert (right == test.targets[:, feature]).all()
        layers = {f"layer {i}": f"blocks.{i}.attn.hook_pattern" for i in range(2)}
        assert hooks == layers | {"all layers": "blocks.*.attn.hook_pattern"}
