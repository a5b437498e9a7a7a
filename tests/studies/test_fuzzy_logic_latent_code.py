import numpy as np
import pytest
import torch
import xarray as xr
from torch import nn
from transformer_lens import HookedRootModule
from transformer_lens.hook_points import HookPoint

from studies.engine import Resources, Trained, read_result, run
from studies.engine.claims import judge
from studies.engine.examples import Examples
from studies.engine.fairness import assess
from studies.fuzzy_logic_latent_code import STUDY
from studies.measures.fuzzy_logic import code_of_query, codes_of, decode_terms
from tests.studies.engine.synthetic import result_of

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    changes = ["n_points=6,8", "model=hyla", "decoding.n=100", "terms.n=100", "literals.n=100"]
    return run(STUDY, "smoke", changes, resources=Resources(root=root, workers=1))


@pytest.fixture(scope="module")
def result(folder):
    return read_result(folder / "result.nc")


def test_the_table_and_the_figures_show_every_setting(result, folder):
    assert STUDY.table.render(result).row_count == 2
    drawn = {path.stem for path in folder.glob("*.png")}
    # One share is held out, and one rate was tried: nothing is drawn against them.
    assert drawn == set(STUDY.views) - {"held_out", "tuning"}


def test_sequences_of_both_lengths_have_the_same_functions(result):
    scores = result["scores"]
    assert scores["n_points"].to_numpy().tolist() == [6, 8]
    assert scores["split"].to_numpy().tolist() == ["id", "test", "ood"]
    for setup in STUDY.plan("smoke", ["n_points=6,8", "seed=3"]).cells:
        task = setup.sampler()
        assert (task.config.seed, task.config.n_examples) == (3, setup.n_points)
        assert (
            task.combinations("test") == cells_of("seed=3")[0].sampler().combinations("test")
        ).all()


def cells_of(*changes):
    return STUDY.plan("smoke", list(changes)).cells


def test_r2_is_the_share_of_the_variance_that_is_explained():
    setup = cells_of("model=hyla")[0]
    batch = setup.sampler().batch("ood", 1, 500)
    values = batch.latents["values"]
    output = batch.targets[..., None] + 0.1 * torch.randn(500, 1, 1)
    error = (output[:, 0, 0] - batch.targets[:, 0]).square()
    variance = (values - values.mean(1, keepdim=True)).square().mean(1)
    ratio = {
        name: (part.sum() / whole.sum()).item()
        for name, (part, whole) in setup.scores(output, batch, "ood").items()
    }
    whole = setup.metrics["r2"].transform(ratio["r2"])
    assert whole == pytest.approx(1 - (error.mean() / variance.mean()).item(), abs=1e-5)
    assert ratio["r2_of_sequences"] == pytest.approx((1 - error / variance).mean().item(), rel=1e-4)


def test_what_the_paper_reports_selects_and_is_claimed():
    """The mean of the R^2 of each sequence, on `test`, which the paper calls OOD."""
    setup = cells_of("model=hyla")[0]
    assert setup.selection.metric == STUDY.trained.metric == "r2_of_sequences"
    assert {number.metric for number in setup.reported} == {"r2_of_sequences"}
    assert {number.split for number in setup.reported} == {"test"}
    readings = {claim.reading.label for claim in STUDY.claims}
    assert any("r2_of_sequences" in label for label in readings)
    assert not any("scores/r2 " in label for label in readings)


def test_the_squared_error_is_what_is_minimised():
    setup = cells_of("model=hyla")[0]
    model, batch = setup.build(torch.Generator().manual_seed(0)), setup.sampler().batch("id", 0, 50)
    error = (model(batch.inputs)[:, 0, 0] - batch.targets[:, 0]).square().mean().item()
    assert setup.loss(model, batch, 0).item() == pytest.approx(error)


def test_decoders_are_scored_on_other_sequences_and_beside_the_untrained_model(monkeypatch):
    setup = cells_of("model=hyla")[0]
    seen = []

    def noting(model, task, batches):
        seen.append((model, torch.cat([batch.inputs for batch in batches]).flatten(1)))
        return codes_of(model, task, batches)

    monkeypatch.setattr("studies.measures.fuzzy_logic.codes_of", noting)
    model = setup.build(torch.Generator().manual_seed(9)).eval()
    fresh = Examples(setup, "cpu").fresh("decoding")
    trained = Trained(setup, model, 0, "cpu", fresh)
    decode_terms(trained, n=60)
    for one in (model, trained.untrained):
        fit, *tests = sorted((found for by, found in seen if by is one), key=len)[-4:]
        parts = [{tuple(row) for row in found.tolist()} for found in (fit, *tests)]
        assert len(set.union(*parts)) == sum(map(len, parts)) == 4 * 60


def test_the_code_is_the_last_tokens_attention():
    pattern = torch.rand(3, 2, 5, 5)
    code = code_of_query(pattern)
    assert torch.equal(code[:, 0], pattern[:, :, 4, 4])
    assert torch.allclose(code[:, 1], pattern[:, :, 4, :4].mean(-1))


@pytest.mark.parametrize("split", ["id", "ood"])
def test_what_is_decoded_is_what_functions_are_made_of(split):
    setup = cells_of("model=hyla")[0]
    task, model = setup.sampler(), setup.build(torch.Generator().manual_seed(0))
    batch = task.fixed_query(split, 5, 40)
    data = codes_of(model, task, (one for one in [batch]))
    assert data["code"].sizes["key"] == 2
    for example in range(40):
        terms = set(batch.latents["terms"][example].tolist())
        row = data["target"].isel(example=example)
        for label, value in zip(row["label"].to_numpy(), row.to_numpy(), strict=True):
            kind, number = str(label).split()
            if kind == "term":
                assert value == (int(number) in terms)
            else:
                plain = [bool(task.conjunctions[term][int(number)]) for term in terms]
                assert value == np.mean(plain)
        has = data["has"].isel(example=example).to_numpy()
        assert set(np.flatnonzero(has).tolist()) == terms
        literals = data["literal"].isel(example=example).to_numpy().reshape(2, 4)
        assert (literals == task.conjunctions[sorted(terms)]).all()


def test_terms_that_are_not_there_are_not_decoded(result):
    scores = result["decoding"]["score"].sel(control="probe", layer="all", metric="r2")
    terms = [str(one) for one in scores["label"].to_numpy() if str(one).startswith("term")]
    assert len(terms) == 12
    assert np.isfinite(scores.sel(label=terms, split="id")).all()
    assert np.isnan(scores.sel(label=terms, split="ood")).all()
    # In all unseen terms the first two variables stand as they are.
    ood = scores.sel(split="ood").dropna("label", how="all")["label"].to_numpy()
    assert {str(one) for one in ood} == {"variable 2", "variable 3"}
    mean = result["decoding"]["kind_score"].sel(control="probe", layer="all", metric="r2")
    assert np.allclose(
        mean.sel(kind="term", split="id"), scores.sel(label=terms, split="id").mean("label")
    )


class Solver(HookedRootModule):
    """Finds a function's terms by trying all; its heads say how often variables are not negated."""

    def __init__(self, task):
        super().__init__()
        self.task = task
        block = nn.Module()
        block.attn = nn.Module()
        block.attn.hook_pattern = HookPoint()
        self.blocks = nn.ModuleList([block])
        self.setup()

    def forward(self, inputs):
        splits = ("train", "test", "ood")
        terms = np.concatenate([self.task.combinations(split) for split in splits])
        literals = torch.from_numpy(self.task.conjunctions[terms])
        points, values = inputs[:, :-1, :-1], inputs[:, :-1, -1]
        tried = [self.task.solve(points, one.expand(len(inputs), -1, -1)) for one in literals]
        best = (torch.stack(tried) - values).abs().sum(-1).argmin(0)
        code = self.code(literals[best])
        pattern = torch.zeros(len(inputs), code.shape[1], inputs.shape[1], inputs.shape[1])
        pattern[:, :, -1, -1] = code
        self.blocks[0].attn.hook_pattern(pattern)
        return torch.zeros(len(inputs), 1, 1)

    def code(self, literals):
        return literals.float().mean(1)


def test_planted_variables_are_decoded_and_controls_are_not():
    (setup,) = cells_of("model=hyla", "n_heads=4", "n_layers=1", "n_points=16")
    fresh = Examples(setup, "cpu").fresh("decoding")
    found = decode_terms(Trained(setup, Solver(setup.sampler()), 0, "cpu", fresh), n=120)
    score = found["kind_score"].sel(kind="variable", layer="all", metric="r2")
    assert (score.sel(control="probe") > 0.95).all()
    assert (score.sel(control="shuffled") < 0.3).all()
    assert (score.sel(control="untrained") < 0.9).all()


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("model=linear,hyper", "model must be one of softmax"),
        ("seed=1,1", "different"),
        ("held_out=1.5", "held_out"),
        ("n_points=1", "n_examples"),
    ],
)
def test_wrong_settings_get_a_clear_error(setting, message):
    with pytest.raises(ValueError, match=message):
        STUDY.plan("smoke", [setting])


@pytest.mark.parametrize("preset", ["laptop", *STUDY.presets])
def test_every_preset_builds_its_models(preset):
    cells = {(one.model, one.n_points): one for one in STUDY.plan(preset).cells}
    for setup in cells.values():
        model = setup.build(torch.Generator().manual_seed(0))
        assert torch.isfinite(setup.loss(model, setup.sampler().batch("train", 0, 2), 0))


def test_effects_of_claims_are_in_the_direction_of_their_statements():
    held_out = {"hyla": 0.8, "linear_relu": 0.7, "rms_head_linear": 0.6, "linear": 0.5}
    rows = [(model, 0.7, 16, value) for model, value in (held_out | {"softmax": 0.4}).items()]
    # Of HYLA also fewer held-out combinations, and longer sequences.
    rows += [("hyla", 0.3, 16, 0.9), ("hyla", 0.7, 64, 0.9), ("hyla", 0.7, 96, 0.95)]
    cells = [
        {"model": model, "held_out": share, "n_points": n, "n_experts": 1, "d_mlp": 256}
        for model, share, n, _ in rows
    ]
    # A mixture of experts, and as many weights in one layer.
    for capacity, value in (({"n_experts": 4}, 0.9), ({"d_mlp": 1024}, 0.85)):
        cells.append(cells[0] | capacity)
        rows.append((value,))
    cells = [cell | {"seed": 0, "id": 0.95, "ood": 0.1} for cell in cells]
    tree = result_of(cells, metric="r2_of_sequences")
    scores = tree["scores"].to_dataset().reindex(split=["id", "test", "ood"])
    scores["r2_of_sequences"].loc[{"split": "test"}] = [[value] for *_, value in rows]
    tree["scores"] = xr.DataTree(scores)
    at = {"kind": ["term", "variable"], "split": ["id", "test", "ood"], "layer": ["all"]}
    at |= {"metric": ["r2"], "control": ["probe", "untrained"]}
    decoded = np.broadcast_to([0.8, 0.3], (len(rows), 2, 3, 1, 1, 2))
    tree["decoding"] = xr.Dataset({"kind_score": (("cell", *at), decoded)}, at)
    at = {"split": ["test"], "layer": ["all"], "control": ["probe", "untrained"]}
    f1 = np.broadcast_to([0.8, 0.3], (len(rows), 1, 1, 2))
    tree["terms"] = xr.Dataset({"f1": (("cell", *at), f1)}, at)
    found = judge(tree, STUDY.claims, assess(tree, None))
    assert set(found["statement"].to_numpy()) == {one.statement for one in STUDY.claims}
    assert (found["n_pairs"] == 1).all()
    assert (found["effect"] > 0).all()


def test_presets_have_their_sizes():
    """`tests/studies/papers` has the settings of those named after the paper."""
    plan = STUDY.plan("paper")
    assert len(plan.cells) == 8 * 2 * 2 * 3
    assert plan.coordinates_of(*STUDY.tuned) == ["learning_rate", "weight_decay"]
    known = {known.value for one in plan.cells for known in one.paper()}
    assert known == {0.6328, 0.5989, 0.8113, 0.6893, 0.8127, 0.8454, 0.7942, 0.7098}
    assert len(STUDY.plan("paper-context").cells) == 3 * 4 * 3 * 2 * 2 * 3
    assert len(STUDY.plan("laptop").cells) == 5
    assert {one.n_points for one in STUDY.plan("context").cells} == {16, 32, 64}
    assert {(one.model, one.n_points) for one in STUDY.plan("longest").cells} == {
        (model, 96) for model in ("softmax", "linear", "hyla")
    }
    assert {one.held_out for one in STUDY.plan("held_out").cells} == {0.3, 0.5, 0.7}
    # They find the models that `tuned` trained.
    for preset in ("context", "held_out"):
        assert len(set(STUDY.plan("tuned").cells) & set(STUDY.plan(preset).cells)) == 3 * 5
