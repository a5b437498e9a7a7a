import json
from collections import Counter

import numpy as np
import pytest
import torch
import xarray as xr

from studies.engine import Resources, Trained, read_result, run
from studies.engine.claims import judge
from studies.engine.examples import Examples
from studies.engine.fairness import assess
from studies.engine.results import config_of
from studies.measures.raven import codes_of, decoding
from studies.raven_latent_code import OTHER_RULE, STUDY
from tests.studies.command_line import command_line
from tests.studies.engine.synthetic import result_of


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs")
    words = ["--preset", "smoke", "--workers", "1", "--out", str(out)]
    status, printed = command_line(STUDY, words=words)
    assert status == 0
    (folder,) = out.glob("raven_latent_code-*")
    return folder, printed


@pytest.fixture(scope="module")
def result(smoke):
    return read_result(smoke[0] / "result.nc")


def test_the_smoke_run_ends_in_a_table_and_says_where_the_files_are(smoke):
    folder, printed = smoke
    for word in ("softmax", "linear", "HYLA", "decoded, ood", "chance", "not comparable"):
        assert word in printed
    assert str(folder) in printed


def test_the_decoder_has_its_controls_and_splits(result):
    decoding = result["decoding"]
    controls = {"probe", "shuffled", "control task", "untrained"}
    assert set(decoding["control"].to_numpy()) == controls
    assert set(decoding["split"].to_numpy()) == {"id_unpermuted", "ood_unpermuted"}
    assert result["scores"]["model"].to_numpy().tolist() == ["hyla", "softmax", "linear"]


def test_the_figures_are_drawn_from_the_file_alone(result, smoke):
    # One size, one number of features, one share held out, one rate: nothing is drawn against them.
    missing = {"scaling_instances", "scaling_depth", "scaling_width", "n_features", "held_out"}
    missing |= {"tuning"}
    for name, view in STUDY.views.items():
        assert (view(result) is None) == (name in missing), name
        for kind in ("png", "pdf"):
            path = smoke[0] / f"{name}.{kind}"
            assert path.exists() == (name not in missing)
            assert name in missing or path.stat().st_size > 1000
    (legend,) = STUDY.views["accuracy"](result).legends
    labels = {text.get_text() for text in legend.get_texts()}
    assert {"softmax attention", "HYLA", "ideal observer", "chance"} <= labels


def test_accuracies_stay_below_the_ideal_observer(result):
    ceiling = result["ceiling"]["accuracy"].sel(split=["id", "ood"])
    assert (result["scores"]["accuracy_low"].sel(group="all") <= ceiling).all()
    assert float(result["scores"]["accuracy_chance"].sel(group="all").max()) == 1 / 64


def test_decoding_and_use_are_measured_along_training(result):
    kept = (20, 40)
    for name in ("decoding", "interchange"):
        along, final = (result[path].to_dataset() for path in (f"{name}_along_training", name))
        assert tuple(along["train_step"].to_numpy()) == kept
        variable = "score" if name == "decoding" else "rate"
        for cell, tested in enumerate(result["training"]["tested_step"].to_numpy()):
            at = {"cell": along["cell"].to_numpy()[cell]}
            # The tested checkpoint is one of them, measured on the same examples.
            same = along[variable].sel(at | {"train_step": tested})
            xr.testing.assert_allclose(same.drop_vars("train_step"), final[variable].sel(at))


def test_models_that_have_learned_nothing_are_not_compared(result):
    claims = result["claims"].to_dataset()
    verdicts = claims["verdict"].to_numpy()[np.isfinite(claims["effect"])]
    # Three about HYLA and another mechanism, and nine about each of three.
    assert len(verdicts) == 3 + 9 * 3
    assert set(verdicts) == {"not comparable"}


@pytest.mark.parametrize("preset", ["laptop", *STUDY.presets])
def test_every_preset_builds_its_models(preset):
    """One of each mechanism and size; `tests/studies/papers` says what they are."""
    cells = {
        (cell.model, cell.n_heads, cell.d_head, cell.task.n_features): cell
        for cell in STUDY.plan(preset).cells
        if cell.d_model <= 128 and cell.n_layers <= 4
    }
    for setup in cells.values():
        model = setup.build(torch.Generator().manual_seed(0))
        batch = setup.sampler().batch("train", 0, 2)
        assert torch.isfinite(setup.loss(model, batch, 0))


def test_a_preset_of_the_paper_tunes_and_draws_a_split_for_each_seed():
    plan = STUDY.plan("paper")
    assert len(plan.cells) == 8 * 3 * 2 * 2
    assert plan.coordinates_of(*STUDY.tuned) == ["learning_rate", "weight_decay"]
    splits = {
        cell.seed: tuple(map(tuple, cell.sampler().combinations("ood").tolist()))
        for cell in plan.cells
    }
    assert len(set(splits.values())) == 3
    small = STUDY.plan("scaling").cells
    assert Counter((cell.training.n_steps, cell.n_layers, cell.d_model) for cell in small) == {
        (8000, 3, 64): 15,
        (4000, 3, 64): 15,
        (8000, 2, 64): 15,
        (8000, 3, 32): 15,
    }
    scaling = STUDY.plan("paper-scaling")
    assert len(scaling.cells) == 3 * 3**3 * 2**3 * 3
    sizes = {(cell.d_model, cell.n_heads, cell.d_head, cell.d_mlp) for cell in scaling.cells}
    assert sizes == {(128, 16, 4, 256), (256, 32, 4, 512), (512, 64, 4, 1024)}
    heads = {(cell.n_heads, cell.d_head) for cell in STUDY.plan("paper-single-head").cells}
    assert heads == {(1, 64), (16, 4)}


def test_the_result_names_its_settings(result):
    assert config_of(result)["setup"]["task"]["n_features"] == 2
    assert json.loads(result.attrs["seeds"]) == [0]


def test_the_latent_code_is_read_where_the_docstring_says():
    """From each answer token to the same feature in the two panels before it, of all heads."""
    (setup, *_) = STUDY.plan("smoke").cells
    model = setup.build(torch.Generator().manual_seed(0)).eval()
    batch = setup.sampler().batch("id_unpermuted", 0, 3)
    data = codes_of(model, [batch], n_features=2)
    assert data["code"].dims == ("example", "layer", "feature", "key", "head")
    assert (data["rule"].to_numpy() == batch.latents["rule"].numpy()).all()
    _, cache = model.run_with_cache(batch.inputs)
    for layer in range(2):
        pattern = cache[f"blocks.{layer}.attn.hook_pattern"]
        assert pattern.shape[-2:] == (18, 18)
        for feature in range(2):
            for key, panel in (("first", 6), ("second", 7)):
                code = data["code"].sel(layer=layer, key=key).isel(feature=feature)
                expected = pattern[:, :, 16 + feature, 2 * panel + feature]
                assert torch.allclose(torch.from_numpy(code.to_numpy()), expected)


def test_decoders_are_scored_on_other_instances_and_beside_the_untrained_model(monkeypatch):
    (setup, *_) = STUDY.plan("smoke").cells
    seen = []

    def noting(model, batches, n_features):
        batches = list(batches)
        seen.append((model, torch.cat([batch.inputs for batch in batches]).flatten(1)))
        return codes_of(model, batches, n_features)

    monkeypatch.setattr("studies.measures.raven.codes_of", noting)
    model = setup.build(torch.Generator().manual_seed(9)).eval()
    fresh = Examples(setup, "cpu").fresh("decoding")
    trained = Trained(setup, model, 0, "cpu", fresh)
    decoding(trained, n=60)
    for one in (model, trained.untrained):
        fit, *tests = ({tuple(row) for row in found.tolist()} for by, found in seen if by is one)
        assert len(tests) == 2
        assert all(len(fit & test) == 0 < len(test) for test in tests)


def test_effects_of_claims_are_in_the_direction_of_their_statements(result):
    tree = result.copy(deep=True)
    right = {"hyla": 0.9, "softmax": 0.5, "linear": 0.4}
    for cell, model in enumerate(tree["scores"]["model"].to_numpy()):
        accuracy = tree["scores"]["accuracy"]
        accuracy.loc[{"cell": accuracy["cell"][cell], "split": "ood"}] = right[model]
        accuracy.loc[{"cell": accuracy["cell"][cell], "split": "id"}] = 0.5
        # On familiar combinations all is the other way around.
        for split, sign in (("ood_unpermuted", 1), ("id_unpermuted", -1)):
            score, rate = tree["decoding"]["score"], tree["interchange"]["rate"]
            at = {"cell": score["cell"][cell], "split": split}
            score.loc[at] = 0.2 * sign
            score.loc[at | {"control": "probe"}] = sign * right[model]
            guess = tree["decoding"]["majority_of_type"]
            guess.loc[at] = 0.2 * sign
            rate.loc[at] = 0.0
            rate.loc[at | {"site": "all layers"} | OTHER_RULE] = 0.5 * sign
            answered = tree["erasure"]["rate"]
            answered.loc[at] = 0.5
            answered.loc[at | {"condition": "erased", "site": "all layers"}] = 0.5 - 0.3 * sign
    for name, at, value in (
        ("permuted", {"tokens": "corresponding", "split": "ood"}, 0.9),
        ("permuted", {"tokens": "same position", "split": "ood"}, 0.3),
        ("alignment", {"control": "probe", "split": "ood"}, 0.9),
        ("alignment", {"control": "untrained", "split": "ood"}, 0.3),
    ):
        tree[name]["score"].loc[at] = value
    for control, value in (("observed", 0.2), ("untrained", 0.1)):
        tree["similarity"]["related"].loc[{"control": control, "centring": "none"}] = value
    early, late = 4000, 20_000
    along = tree["decoding_along_training"].to_dataset().assign_coords(train_step=[early, late])
    for step, value in ((early, 0.3), (late, 0.5)):
        along["score"].loc[{"train_step": step, "split": "ood_unpermuted"}] = value
        along["score"].loc[{"train_step": step, "split": "id_unpermuted"}] = -value
    tree["decoding_along_training"] = xr.DataTree(along)
    found = judge(tree, STUDY.claims, assess(tree, None))
    effects = found["effect"].to_numpy()[np.isfinite(found["effect"])]
    assert len(effects) == 3 + 10 * 3
    assert (effects > 0).all()


def test_claims_about_sizes_and_ablations_are_in_the_direction_of_their_statements():
    basic = {"n_heads": 16, "n_steps": 78_125, "n_layers": 4, "d_model": 128, "seed": 0}
    basic |= {"n_experts": 1, "d_mlp": 128}
    changed = (
        ({"model": "hyla"}, 0.6),
        ({"model": "linear_relu"}, 0.5),
        ({"model": "rms_head_linear"}, 0.5),
        ({"model": "softmax"}, 0.5),
        ({"model": "linear"}, 0.5),
        ({"model": "softmax_relu"}, 0.4),
        ({"model": "hyla", "n_heads": 1}, 0.3),
        ({"model": "hyla", "n_steps": 312_500}, 0.7),
        ({"model": "hyla", "n_layers": 16}, 0.7),
        ({"model": "hyla", "d_model": 512}, 0.7),
        ({"model": "hyla", "n_experts": 4}, 0.7),
        ({"model": "hyla", "d_mlp": 512}, 0.65),
    )
    cells = [basic | changes | {"id": 0.9, "ood": right} for changes, right in changed]
    tree = result_of(cells)
    found = judge(tree, STUDY.claims, assess(tree, None))
    about = found["n_pairs"].to_numpy() > 0
    statements = found["statement"].to_numpy()[about]
    assert len(set(statements)) == len(statements) == 5 + 1 + 3 + 2
    assert (found["effect"].to_numpy()[about] > 0).all()


def test_a_mixture_of_experts_has_as_many_weights_as_a_wide_layer():
    cells = STUDY.plan("experts", ["model=hyla", "seed=0"]).cells
    models = {
        (cell.n_experts, cell.d_mlp): cell.build(torch.Generator().manual_seed(0)) for cell in cells
    }
    assert set(models) == {(1, 128), (4, 128), (1, 512)}
    mixture, wide = models[4, 128], models[1, 512]
    n_weights = [sum(w.numel() for w in model.parameters()) for model in (mixture, wide)]
    assert n_weights[0] == pytest.approx(n_weights[1], rel=0.02)
    layers = [model.blocks[0].mlp for model in (mixture, wide)]
    assert [type(layer).__name__ for layer in layers] == ["MixtureOfExperts", "FeedForward"]
    assert layers[0].top_k == 2
    for cell in cells:
        batch = cell.sampler().batch("train", 0, 2)
        assert torch.isfinite(cell.loss(models[cell.n_experts, cell.d_mlp], batch, 0))


def test_unknown_models_are_refused(tmp_path):
    with pytest.raises(ValueError, match="model must be one of"):
        run(STUDY, "smoke", ["model=hila"], resources=Resources(root=tmp_path))
