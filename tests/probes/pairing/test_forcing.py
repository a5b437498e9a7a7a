"""Forced pairings in a model that is written by hand, with one fault at a time."""

import numpy as np
import pytest
import torch
import xarray as xr
from torch.nn.functional import one_hot
from transformer_lens import HookedRootModule
from transformer_lens.hook_points import HookPoint

from probes import Quantity, capture, force_pairing, score_pairing
from tasks import ContextualRetrieval, ContextualRetrievalConfig

TASK = ContextualRetrieval(ContextualRetrievalConfig(seed=1))
# Which search of the model plays the part of each true one, and which retrieval.
SEARCHES, RETRIEVALS = [1, 0], [2, 3, 1, 0]
HOOK = "hook_value_scores"


class ByHand(HookedRootModule):
    """Finds the nearest, pairs by the one-hot preferences, adds up.

    With the fault "pairing", a held-out combination is taken for a familiar one (an odd preference
    of the second search for the even one below it); with "retrieval", what is retrieved is another
    feature; with "soft", value scores are right but not hard.
    """

    def __init__(self, fault="none"):
        super().__init__()
        self.fault = fault
        self.hook_pattern = HookPoint()
        self.hook_value_scores = HookPoint()
        self.setup()

    def forward(self, inputs):
        place = inputs[..., :2].transpose(1, 2)
        distance = (place[..., None] - place[..., None, :]).abs()
        distance.diagonal(dim1=-2, dim2=-1).fill_(torch.inf)
        attention = one_hot(distance.argmin(-1), inputs.shape[1]).float()
        preference = inputs[..., 6:].unflatten(-1, (2, 4)).argmax(-1)
        if self.fault == "pairing":
            held_out = (preference[..., 0] >= 2) & (preference[..., 1] % 2 == 1)
            preference[..., 1] -= held_out.long()
        scores = one_hot(torch.tensor(RETRIEVALS)[preference], 4).float()
        if self.fault == "soft":
            scores = 0.7 * scores + 0.3 / 4
        # The true counterpart of each of the model's searches and retrievals.
        order = [SEARCHES.index(m) for m in range(2)]
        features = [RETRIEVALS.index(m) for m in range(4)]
        if self.fault == "retrieval":
            features = features[1:] + features[:1]
        pattern = self.hook_pattern(attention[:, order])
        scores = self.hook_value_scores(scores[:, :, order])
        values = inputs[..., 2:6][..., features]
        retrieved = torch.einsum("esqk,ekr->eqsr", pattern, values)
        weights = torch.from_numpy(TASK.coefficients).float()[order]
        return torch.einsum("eqsr,eqsr,s->eq", retrieved, scores, weights)


def pairing_of(model, splits=("id",)):
    """What the value scores say, the splits as groups."""
    kept = {
        "scores": Quantity(HOOK, ("example", "pos", "search", "retrieval")),
        "attention": Quantity("hook_pattern", ("example", "search", "query_pos", "key_pos")),
    }
    dims = ("example", "pos", "wanted")
    batches = [TASK.batch(split, 0, 200) for split in splits]
    data = capture(model, batches, kept, latent_dims={"preference": dims, "winner": dims})
    return score_pairing(
        data["scores"],
        data["preference"],
        winner=data["winner"],
        pattern=data["attention"],
        groups=xr.DataArray(np.repeat(splits, 200), dims="example"),
        resamples=10,
    )


def assignment_of(model):
    return pairing_of(model).sel(fitted="id")


def force(fault, *, split="ood", size=200, assignment=None, **options):
    model = ByHand(fault)
    batch = TASK.batch(split, 0, size)

    def error(output, part):
        return TASK.score(output, batch[part])["absolute_error"].mean(1)

    return force_pairing(
        model,
        batch.inputs,
        batch.latents["preference"],
        assignment_of(model) if assignment is None else assignment,
        HOOK,
        **({"error": error, "resamples": 200} | options),
    )


def test_the_assignment_is_found():
    for fault in ("none", "pairing", "retrieval", "soft"):
        found = assignment_of(ByHand(fault))
        assert found["search_assignment"].to_numpy().tolist() == SEARCHES
        assert found["retrieval_assignment"].to_numpy().tolist() == RETRIEVALS


def test_what_is_forced_is_what_disagrees():
    agreed = pairing_of(ByHand("pairing"), ("id", "ood"))["agreement"]
    agreed = agreed.sel(control="observed", fitted="id")
    assert agreed.sel(group="id").to_numpy().tolist() == [1, 1, 1]
    # All held-out combinations are mistaken, in their second search.
    assert agreed.sel(group="ood").to_numpy().tolist() == [1, 0, 0.5]


def test_a_broken_pairing_is_mended():
    result = force("pairing")
    assert result["mean_error"].sel(condition="none") > 0.1
    np.testing.assert_allclose(result["mean_error"].sel(condition="true"), 0, atol=1e-6)
    for name in ("removed", "removed_low", "removed_high"):
        assert result[name].sel(condition="true") == pytest.approx(1, abs=1e-5)
        # Wrong scores that are hard already. They are forced in a copy, which may lie otherwise in
        # memory than the model's own: products of the same numbers, but another kernel's.
        assert result[name].sel(condition="hardened") == pytest.approx(0, abs=1e-5)
        # A sum of errors over itself, once beside other sums and once alone.
        assert result[name].sel(condition="none") == pytest.approx(0, abs=1e-12)
    random = result.sel(condition="random")
    assert random["removed_high"] < 0.5
    assert random["removed_low"] <= random["removed"] <= random["removed_high"]
    assert result.attrs["forced"] == 200 * 10 * 2
    assert all(result[name].attrs["long_name"] for name in result.variables)


def test_broken_retrievals_are_not():
    result = force("retrieval")
    assert result["mean_error"].sel(condition="none") > 0.1
    for condition in ("true", "hardened"):
        for name in ("removed", "removed_low", "removed_high"):
            assert result[name].sel(condition=condition) == pytest.approx(0, abs=1e-5)


def test_soft_scores_are_mended_by_hardening_too():
    result = force("soft")
    for condition in ("true", "hardened"):
        assert result["removed"].sel(condition=condition) == pytest.approx(1, abs=1e-5)
    assert result["removed"].sel(condition="random") < 0


def familiar(fault):
    found = pairing_of(ByHand(fault), ("id", "ood")).sel(fitted="id")
    activation = found["activation"].sel(group="id")
    return force(fault, assignment=found, activation=activation)


def test_the_familiar_pairing_mends_what_is_paired_otherwise_than_there():
    result = familiar("pairing")
    assert result["condition"].to_numpy().tolist()[-1] == "familiar"
    assert result["removed"].sel(condition="familiar") == pytest.approx(1, abs=1e-5)
    # Soft scores are as soft there, and wrong retrievals as wrong.
    for fault in ("soft", "retrieval"):
        assert familiar(fault)["removed"].sel(condition="familiar") == pytest.approx(0, abs=1e-4)


def test_what_is_not_known_of_the_familiar_pairing_is_left():
    found = pairing_of(ByHand("pairing")).sel(fitted="id")
    activation = found["activation"].sel(group="id")
    nothing = force("pairing", assignment=found, activation=activation * np.nan)
    assert nothing["removed"].sel(condition="familiar") == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda a: a.T, ValueError, "activation must have the dims"),
        (lambda a: a.isel(search=[0]), KeyError, "activation must have the searches 0, 1, lacks 1"),
        (lambda a: a.isel(true_retrieval=[0]), ValueError, "4 true retrievals"),
        (lambda a: a.isel(model_retrieval=[0]), ValueError, "4 model retrievals"),
    ],
)
def test_activations_of_another_shape_are_refused(change, error, message):
    found = pairing_of(ByHand("pairing")).sel(fitted="id")
    activation = change(found["activation"].sel(group="id"))
    with pytest.raises(error, match=message):
        force("pairing", assignment=found, activation=activation)


def test_without_error_there_is_nothing_to_remove():
    result = force("none", error=lambda output, part: torch.zeros(len(output)))
    assert result["removed"].isnull().all()
    assert (result["mean_error"] == 0).all()


def test_the_numbers_are_those_of_the_errors():
    result = force("pairing", size=60, resamples=2000)
    errors = result["error"].to_numpy()
    np.testing.assert_allclose(result["mean_error"], errors.mean(1))
    removed = 1 - errors.mean(1) / errors[0].mean()
    np.testing.assert_allclose(result["removed"], removed, atol=1e-12)
    # Written out: the interval of a ratio from pairs of examples.
    rng = np.random.default_rng(0)
    rows = rng.integers(60, size=(2000, 60))
    draws = 1 - errors[2][rows].mean(1) / errors[0][rows].mean(1)
    bounds = result[["removed_low", "removed_high"]].sel(condition="random").to_array()
    np.testing.assert_allclose(bounds, np.quantile(draws, [0.025, 0.975]), rtol=0.2)


def test_batches_do_not_matter_and_the_seed_does():
    options = {"size": 30, "assignment": assignment_of(ByHand())}
    first = force("soft", batch_size=30, **options)
    # The model answers in float32, and some of its errors are 0 up to rounding.
    xr.testing.assert_allclose(first, force("soft", batch_size=7, **options), atol=1e-6)
    other = force("soft", seed=1, **options)["error"]
    same = (first["error"] == other).all("example").to_numpy().tolist()
    assert same == [True, True, False, True]


class Shows(HookedRootModule):
    """Answers with its value scores, which are its inputs."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Module(), torch.nn.Module()])
        for layer in self.layers:
            layer.hook_value_scores = HookPoint()
        self.setup()

    def forward(self, inputs):
        return torch.stack([layer.hook_value_scores(inputs) for layer in self.layers])


def assigned(searches, retrievals):
    return xr.Dataset(
        {
            "search_assignment": ("true_search", searches),
            "retrieval_assignment": ("true_retrieval", retrievals),
        }
    )


def test_only_what_has_a_counterpart_is_forced_in_all_layers():
    generator = torch.Generator().manual_seed(0)
    own = torch.rand(50, 3, 4, 5, generator=generator).softmax(-1)
    truth = torch.randint(-1, 3, (50, 3, 2), generator=generator)
    shown = []

    def error(output, part):
        shown.append(output.clone())
        return torch.zeros(len(own))

    # The first true search has no counterpart, nor has the true retrieval 1.
    result = force_pairing(
        Shows(),
        own,
        truth,
        assigned([-1, 3], [4, -1, 0]),
        "layers.*.hook_value_scores",
        error=error,
    )
    none, true, random, hardened = shown
    assert torch.equal(none, own.expand(2, -1, -1, -1, -1))
    wanted = {0: 4, 2: 0}
    forced, drawn = 0, []
    for e in range(50):
        for p in range(3):
            rest = slice(0, 3)
            for changed in (true, random, hardened):
                assert torch.equal(changed[:, e, p, rest], none[:, e, p, rest])
            if (v := truth[e, p, 1].item()) not in wanted:
                assert all(torch.equal(x[:, e, p], none[:, e, p]) for x in shown)
                continue
            forced += 1
            best = int(own[e, p, 3].argmax())
            for changed, r in ((true, wanted[v]), (hardened, best)):
                assert changed[:, e, p, 3].tolist() == [[float(i == r) for i in range(5)]] * 2
            assert random[0, e, p, 3].sort().values.tolist() == [0, 0, 0, 0, 1]
            assert torch.equal(random[0, e, p], random[1, e, p])
            drawn.append(int(random[0, e, p, 3].argmax()))
    assert result.attrs["forced"] == forced > 50
    assert (np.bincount(drawn, minlength=5) > 3).all()


def test_metrics_of_any_sign_are_measured_in_each_condition():
    batch = TASK.batch("ood", 0, 200)

    def minus(output, rows):
        return -TASK.score(output, batch[rows])["absolute_error"].mean(1)

    result = force("pairing", metrics={"minus": minus}, batch_size=64)
    usual = force("pairing", batch_size=64)
    assert result[[*usual]].identical(usual)
    # Products of another size may differ in the last bit.
    xr.testing.assert_allclose(usual, force("pairing"), rtol=1e-5, atol=1e-6)
    values = result["example_value"].sel(metric="minus", drop=True)
    np.testing.assert_allclose(values, -result["error"])
    np.testing.assert_allclose(result["value"][:, 0], -result["mean_error"])
    change = result["change"].sel(metric="minus")
    np.testing.assert_allclose(change, (values - values.sel(condition="none")).mean("example"))
    assert result["change_low"].sel(metric="minus", condition="true") > 0.1


def test_hooks_are_gone_after_an_error():
    model = Shows().train()

    def fail(output, part):
        raise ArithmeticError("in the error")

    own, truth = torch.rand(2, 1, 1, 2), torch.zeros(2, 1, 1, dtype=torch.long)
    with pytest.raises(ArithmeticError):
        force_pairing(model, own, truth, assigned([0], [0]), "layers.0.*", error=fail)
    assert not model.list_hooks()
    assert model.training


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"hook": "hook_scores"}, KeyError, r"hooks of the model .*, got 'hook_scores'"),
        ({"hook": []}, ValueError, r"hook must name at least one hook"),
        ({"batch_size": 0}, ValueError, r"batch_size and resamples must be at least 1"),
        ({"truth": torch.zeros(2, 3, 1)}, TypeError, r"truth must hold integers"),
        ({"truth": torch.zeros(1, 3, 1).long()}, ValueError, r"truth must have the shape \(2 "),
        ({"truth": torch.full((2, 3, 1), 2)}, ValueError, r"truth must be in -1\.\.1"),
        ({"truth": torch.full((2, 3, 1), -1)}, ValueError, r"share a counterpart to force"),
        ({"truth": torch.zeros(2, 4, 1).long()}, ValueError, r"must have the shape \(example, pos"),
        ({"assignment": assigned([2], [0, 1])}, ValueError, r"at least \(3, 1\) like assignment"),
        ({"assignment": xr.Dataset()}, KeyError, r"must hold 'search_assignment'"),
        ({"assignment": assigned([0], [0, 1]).expand_dims("fitted")}, ValueError, r"one of 'fitt"),
        (
            {"error": lambda o, p: o.sum()},
            ValueError,
            r"error must return .* \[2 examples\], got \(\)",
        ),
        ({"error": lambda o, p: -torch.ones(2)}, ValueError, r"error must be at least 0, got -1"),
    ],
)
def test_invalid_input_is_refused(changes, kind, message):
    arguments = {
        "inputs": torch.rand(2, 3, 2, 2),
        "truth": torch.zeros(2, 3, 1).long(),
        "assignment": assigned([0], [0, 1]),
        "hook": "layers.*.hook_value_scores",
        "error": lambda output, part: torch.ones(2),
    } | changes
    with pytest.raises(kind, match=message):
        force_pairing(Shows(), **arguments)


class Unread(Shows):
    """Shows its value scores, and answers without them."""

    def forward(self, inputs):
        super().forward(inputs)
        return inputs + 1


def test_value_scores_that_nothing_reads_are_refused():
    own, truth = torch.rand(2, 1, 1, 2), torch.zeros(2, 1, 1, dtype=torch.long)
    with pytest.raises(ValueError, match=r"read downstream, got 'layers.0.hook_value_scores'"):
        force_pairing(
            Unread(),
            own,
            truth,
            assigned([0], [0]),
            "layers.0.*",
            error=lambda output, part: torch.ones(2),
        )
