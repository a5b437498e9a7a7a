import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import xarray as xr
from scipy.stats import entropy
from sklearn.metrics import adjusted_mutual_info_score, normalized_mutual_info_score

from mechanisms import AttentionConfig, MixtureOfExpertsConfig, Transformer, TransformerConfig
from probes import Quantity, capture, score_specialization
from probes.specialization.information import SCORES

INFORMATION = ["normalised_mutual_information", "adjusted_mutual_information"]


def label(routing, operation):
    """Arrays [example, layer, module] and [example, layer] with their dims."""
    dims = ("example", "layer", "module")
    return xr.DataArray(np.asarray(routing), dims=dims), xr.DataArray(
        np.asarray(operation), dims=dims[:2]
    )


def hard_routing(seed, *, follow, examples=400, layers=2, operations=5, modules=8):
    """One-hot routing to the operation's module in a share `follow`, else to any."""
    rng = np.random.default_rng(seed)
    operation = rng.integers(operations, size=(examples, layers))
    anywhere = rng.integers(modules, size=operation.shape)
    chosen = np.where(rng.random(operation.shape) < follow, operation, anywhere)
    return label(np.eye(modules)[chosen], operation)


def soft_routing(seed, *, examples=300, layers=2, operations=4, modules=6):
    rng = np.random.default_rng(seed)
    operation = rng.integers(operations, size=(examples, layers))
    logits = rng.standard_normal((examples, layers, modules)) + 2 * np.eye(modules)[operation]
    weights = np.exp(logits)
    return label(weights / weights.sum(-1, keepdims=True), operation)


def reference(routing, operation, operations):
    """The scores of rows [token, module], written out one by one."""
    modules = routing.shape[1]
    rows = [
        np.mean([row for row, o in zip(routing, operation, strict=True) if o == wanted], axis=0)
        for wanted in range(operations)
        if wanted in operation
    ]
    collapse = entropy(np.mean(rows, axis=0))
    chosen = [list(row).index(max(row)) for row in routing]
    best = max(
        sum(assigned[o] == m for o, m in zip(operation, chosen, strict=True))
        for assigned in itertools.permutations(range(modules), operations)
    )
    return {
        "specialization": 1 - np.mean([entropy(row, base=modules) for row in rows]),
        "collapse": collapse / np.log(modules),
        "collapse_attainable": collapse / np.log(min(len(rows), modules)),
        "normalised_mutual_information": normalized_mutual_info_score(operation, chosen),
        "adjusted_mutual_information": adjusted_mutual_info_score(operation, chosen),
        "assignment_accuracy": best / len(chosen),
    }


@pytest.mark.parametrize("make", [soft_routing, hard_routing])
@pytest.mark.parametrize("operations", [4, 5])
def test_scores_equal_those_written_out(make, operations):
    # With 5 operations the soft routing never sees the last.
    options = {} if make is soft_routing else {"follow": 0.5, "operations": operations}
    routing, operation = make(0, modules=6, **options)
    result = score_specialization(routing, operation, operations=operations, resamples=2)
    for layer, where in {"0": [0], "1": [1], "pooled": [0, 1]}.items():
        rows = routing.to_numpy()[:, where].reshape(-1, 6)
        expected = reference(rows, operation.to_numpy()[:, where].reshape(-1), operations)
        for name, value in expected.items():
            got = float(result[name].sel(control="observed", layer=layer))
            assert got == pytest.approx(value, abs=1e-10), (name, layer)


def test_entropies_by_hand():
    # Operation 0 goes to modules 0 and 1 by halves, operation 1 always to module 2, 2 never occurs.
    routing = [[[1, 0, 0, 0]], [[0, 1, 0, 0]], [[0, 0, 1, 0]], [[0, 0, 1, 0]], [[0, 0, 1, 0]]]
    result = score_specialization(
        *label(routing, [[0], [0], [1], [1], [1]]), operations=("add", "subtract", "sine")
    )
    one = result.sel(layer="0", control="observed")
    # Entropies in bits: 1 and 0 of at most 2; over both (1/4, 1/4, 1/2): 1.5.
    assert float(one["specialization"]) == pytest.approx(0.75)
    assert float(one["collapse"]) == pytest.approx(0.75)
    assert float(one["collapse_attainable"]) == pytest.approx(1.5)
    assert float(one["assignment_accuracy"]) == pytest.approx(0.8)
    np.testing.assert_array_equal(one["activation"], [[0.5, 0.5, 0, 0], [0, 0, 1, 0], [np.nan] * 4])
    assert one["seen"].to_numpy().tolist() == [2, 3, 0]
    assert int(one["unseen"]) == 1
    assert int(one["assignment"].sel(operation="subtract")) == 2
    assert int(one["assignment"].sel(operation="add")) in (0, 1)
    assert int(one["assignment"].sel(operation="sine")) == -1
    np.testing.assert_allclose(one["utilisation"], [0.2, 0.2, 0.6, 0])
    assert int(one["dead"]) == 1
    again = score_specialization(
        *label(routing, [[0], [0], [1], [1], [1]]), operations=3, dead_share=0.2
    )
    assert again["dead"].to_numpy().tolist() == [3, 3]
    assert all(result[name].attrs["long_name"] for name in result.variables)


@pytest.mark.parametrize(("operations", "modules"), [(5, 30), (6, 6)])
def test_one_module_for_each_operation(operations, modules):
    rng = np.random.default_rng(0)
    operation = rng.integers(operations, size=(300, 2))
    module = rng.permutation(modules)[:operations]
    result = score_specialization(
        *label(np.eye(modules)[module[operation]], operation), operations=operations
    )
    known = dict.fromkeys(SCORES, 1.0)
    known["collapse"] = np.log(operations) / np.log(modules)
    observed = result.sel(control="observed", layer=["0", "1", "pooled"])
    for name, value in known.items():
        for suffix in ("", "_low", "_high"):
            np.testing.assert_allclose(observed[f"{name}{suffix}"], value, atol=1e-12)
    assert (result["assignment"] == module).all()
    assert (result["dead"] == modules - operations).all()
    shuffled = result.sel(control="shuffled", layer="pooled")
    assert shuffled["specialization"] < 0.6
    assert abs(shuffled["adjusted_mutual_information"]) < 0.03
    assert shuffled["assignment_accuracy"] < 0.35


def test_uniform_routing_is_not_specialised_but_not_collapsed():
    operation = np.random.default_rng(0).integers(5, size=(100, 1))
    result = score_specialization(*label(np.full((100, 1, 30), 1 / 30), operation), operations=5)
    one = result.sel(layer="0")
    np.testing.assert_allclose(one["specialization"], 0, atol=1e-12)
    np.testing.assert_allclose(one["collapse"], 1)
    np.testing.assert_allclose(one["collapse_attainable"], np.log(30) / np.log(5))
    np.testing.assert_allclose(one[INFORMATION].to_array(), 0, atol=1e-12)


def test_one_module_for_all_is_specialised_and_collapsed_with_any_operations():
    operation = np.random.default_rng(0).integers(5, size=(100, 2))
    routing = np.zeros((100, 2, 4))
    routing[..., 2] = 1
    result = score_specialization(*label(routing, operation), operations=5)
    np.testing.assert_allclose(result["specialization"], 1)
    np.testing.assert_allclose(result["collapse"], 0, atol=1e-12)
    np.testing.assert_allclose(result[INFORMATION].to_array(), 0, atol=1e-12)
    assert (result["dead"] == 3).all()
    np.testing.assert_allclose(result["utilisation"], [[0, 0, 1, 0]] * 3)


def test_random_routing_is_at_chance_and_as_good_as_shuffled():
    contains, difference = [], []
    for seed in range(20):
        result = score_specialization(
            *hard_routing(seed, follow=0.0), operations=5, resamples=200, seed=seed
        ).sel(layer="pooled")
        adjusted = result.sel(control="observed")
        contains.append(
            (adjusted["adjusted_mutual_information_low"] <= 0)
            & (adjusted["adjusted_mutual_information_high"] >= 0)
        )
        difference.append([float(result[name].diff("control")[0]) for name in SCORES])
        assert abs(adjusted["adjusted_mutual_information"]) < 0.03
    # 95% intervals, 20 times: fewer than 16 that hold 0 have a chance of 3e-3.
    assert sum(contains) >= 16
    spread = np.std(difference, axis=0) / np.sqrt(20)
    assert (np.abs(np.mean(difference, axis=0)) < 3.5 * spread).all()


def test_intervals_cover_the_scores_of_many_examples():
    """Also where entropies of few examples are far too low (50 for each operation)."""
    names = ["specialization", "collapse", "collapse_attainable", *INFORMATION]

    def score(seed, examples, resamples):
        data = hard_routing(seed, follow=0.4, layers=1, examples=examples)
        result = score_specialization(*data, operations=5, resamples=resamples, seed=seed)
        return result.sel(layer="0", control="observed")

    truth = score(1000, 100_000, 1)
    covered, bias = [], []
    for seed in range(40):
        got = score(seed, 250, 200)
        covered.append([got[f"{n}_low"] <= truth[n] <= got[f"{n}_high"] for n in names])
        bias.append(float(got["specialization"] - truth["specialization"]))
    # 95% intervals, 40 times: fewer than 33 that hold the truth have a chance of 1e-3.
    assert (np.sum(covered, axis=0) >= 33).all()
    assert np.mean(bias) > 0.02


def test_intervals_go_by_example():
    routing, operation = soft_routing(0, layers=1)
    once = score_specialization(routing, operation, operations=4)
    # The same routing at four positions tells nothing new, if they are known to be one example.
    together = score_specialization(
        routing.expand_dims(pos=4), operation.expand_dims(pos=4), operations=4
    )
    apart = score_specialization(
        *(xr.concat([x] * 4, "example") for x in (routing, operation)), operations=4
    )

    def width(result):
        one = result.sel(control="observed", layer="0")
        return float(one["specialization_high"] - one["specialization_low"])

    assert width(together) == pytest.approx(width(once))
    assert width(apart) == pytest.approx(width(once) / 2, rel=0.15)
    for result in (together, apart):
        np.testing.assert_allclose(
            result["specialization"].sel(control="observed"),
            once["specialization"].sel(control="observed"),
        )


def test_collapse_is_bounded_by_operations_and_specialization():
    for seed in range(5):
        for operations in (2, 4):
            data = soft_routing(seed, operations=operations, modules=12)
            result = score_specialization(*data, operations=operations, resamples=1)
            most = np.log(operations) / np.log(12) + 1 - result["specialization"]
            assert (result["collapse"] <= most + 1e-12).all()


def test_undefined_scores_are_nan_and_flagged():
    operation = np.random.default_rng(0).integers(3, size=(20, 1))
    single = score_specialization(*label(np.ones((20, 1, 1)), operation), operations=3)
    assert (single["defined"] == 0).all()
    for name in [*SCORES][:-1]:
        assert single[[name, f"{name}_low", f"{name}_high"]].to_array().isnull().all(), name
    share = np.bincount(operation[:, 0]).max() / 20
    np.testing.assert_allclose(single["assignment_accuracy"], share)

    # One operation: there is nothing to tell apart, but its entropy is known.
    routing, _ = soft_routing(0, layers=2)
    alone = np.zeros((300, 2), dtype=int)
    alone[:, 1] = -1
    result = score_specialization(routing, label(routing, alone)[1], operations=3)
    assert result["defined"].to_numpy().tolist() == [1, 0, 1]
    assert result["unseen"].to_numpy().tolist() == [2, 3, 2]
    assert result["specialization"].sel(layer="0").notnull().all()
    assert result[[*INFORMATION, "collapse_attainable"]].to_array().isnull().all()
    empty = result.sel(layer="1")
    assert empty[[*SCORES, "activation", "utilisation"]].isnull().all().to_array().all()
    assert int(empty["dead"]) == 0
    pooled, first = result.sel(layer="pooled"), result.sel(layer="0")
    xr.testing.assert_allclose(
        pooled.sel(control="observed").drop_vars("layer"),
        first.sel(control="observed").drop_vars("layer"),
    )


def test_a_handful_of_examples_is_not_above_chance():
    name = "adjusted_mutual_information"
    for each, known in ((1, np.nan), (2, 1)):
        operation = np.tile(np.arange(4), each)[:, None]
        result = score_specialization(*label(np.eye(4)[operation], operation), operations=4)
        one = result.sel(layer="0", control="observed")
        np.testing.assert_allclose(one[name], known)
        assert one[[f"{name}_low", f"{name}_high"]].to_array().isnull().all()
        assert float(one["specialization"]) == 1


def test_more_operations_than_modules_leave_some_without():
    operation = np.arange(60).reshape(60, 1) % 6
    result = score_specialization(*label(np.eye(3)[operation % 3], operation), operations=6)
    one = result.sel(layer="0", control="observed")
    assert sorted(one["assignment"].to_numpy()) == [-1, -1, -1, 0, 1, 2]
    assert float(one["assignment_accuracy"]) == pytest.approx(0.5)
    assert float(one["collapse_attainable"]) == pytest.approx(1)


def test_what_has_no_operation_does_not_count():
    routing, operation = soft_routing(0)
    padded = xr.concat([routing, 0 * routing], "pos")
    padded[1, 0, 0, 0] = np.nan
    labels = xr.concat([operation, 0 * operation - 1], "pos")
    plain, with_padding = (
        score_specialization(*data, operations=4, resamples=50)
        for data in ((routing, operation), (padded, labels))
    )
    xr.testing.assert_allclose(plain, with_padding)


def test_counts_weigh_each_row_alike_and_labels_may_be_for_all_layers():
    rng = np.random.default_rng(0)
    counts = rng.integers(1, 5, size=(50, 2, 3))
    operation = xr.DataArray(rng.integers(2, size=50), dims="example")
    routing = xr.DataArray(counts, dims=("example", "layer", "module"), coords={"layer": [3, 5]})
    result = score_specialization(routing, operation, operations=2, resamples=10)
    assert result["layer"].to_numpy().tolist() == ["3", "5", "pooled"]
    shares = counts / counts.sum(axis=2, keepdims=True)
    np.testing.assert_allclose(
        result["activation"].sel(operation=1, layer="5"), shares[operation == 1, 1].mean(axis=0)
    )
    turned = routing.transpose("module", "layer", "example")
    xr.testing.assert_identical(
        score_specialization(turned, operation, operations=2, resamples=10), result
    )


def test_router_of_a_mixture_of_experts():
    """Without attention, the first router's choice is a function of the token alone."""
    config = TransformerConfig(
        d_input=6,
        d_output=6,
        d_model=16,
        n_layers=2,
        attention=AttentionConfig.named("softmax", n_heads=2, d_head=8),
        feed_forward=MixtureOfExpertsConfig(n_experts=5, top_k=2, d_mlp=8),
        inputs="tokens",
        positions="none",
    )
    model = Transformer(config, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        model.blocks[0].attn.W_O.zero_()
    generator = torch.Generator().manual_seed(1)
    batches = []
    for _ in range(3):
        tokens, noise = torch.randint(6, (2, 50, 7), generator=generator)
        batches.append(SimpleNamespace(inputs=tokens, latents={"token": tokens, "noise": noise}))
    dims = ("example", "pos")
    data = capture(
        model,
        batches,
        {"routing": Quantity("blocks.*.mlp.hook_expert_weights", (*dims, "module"))},
        latent_dims={"token": dims, "noise": dims},
    )
    followed, ignored = (
        score_specialization(data["routing"], data[name], operations=6, resamples=200)
        for name in ("token", "noise")
    )
    tokens = torch.cat([batch.inputs for batch in batches])
    _, cache = model.run_with_cache(tokens)
    weights = cache["blocks.1.mlp.hook_expert_weights"].detach()
    for token in range(6):
        expected = weights[tokens == token].mean(dim=0)
        got = followed["activation"].sel(layer="1", operation=token)
        np.testing.assert_allclose(got, expected, atol=1e-6)
    first = followed.sel(layer="0")
    chosen, occurs = first["utilisation"], first["seen"]
    known = 2 * entropy(chosen) / (entropy(chosen) + entropy(occurs))
    assert known > 0.3
    got = first["normalised_mutual_information"].sel(control="observed")
    assert float(got) == pytest.approx(known)
    assert first["adjusted_mutual_information_low"].sel(control="observed") > 0.3
    assert abs(first["adjusted_mutual_information"].sel(control="shuffled")) < 0.05
    assert (abs(ignored["adjusted_mutual_information"]) < 0.05).all()


def test_results_repeat_and_are_files(tmp_path):
    routing, operation = soft_routing(0)
    first, second = (
        score_specialization(routing, operation, operations=4, seed=seed) for seed in (3, 3)
    )
    xr.testing.assert_identical(first, second)
    other = score_specialization(routing, operation, operations=4, seed=4)
    observed = [x["specialization"].sel(control="observed") for x in (first, other)]
    xr.testing.assert_equal(*observed)
    assert not other["specialization"].equals(first["specialization"])
    first.to_netcdf(tmp_path / "result.nc", engine="netcdf4")
    with xr.open_dataset(tmp_path / "result.nc", engine="netcdf4") as read:
        xr.testing.assert_equal(read.load(), first)


def test_invalid_input_is_refused():
    routing, operation = soft_routing(0)

    def score(routing=routing, operation=operation, **options):
        score_specialization(routing, operation, **({"operations": 4} | options))

    with pytest.raises(ValueError, match=r"dims \('example', 'layer', 'module'\).*'expert': 6"):
        score(routing.rename(module="expert"))
    with pytest.raises(ValueError, match=r"none of them empty.*'example': 0"):
        score(routing[:0], operation[:0])
    with pytest.raises(
        ValueError, match=r"sum to at most 1.*600 of 600 rows that do not.*sums to 2"
    ):
        score(2 * routing)
    lower = xr.DataArray([-1.0, 1, 1, 0, 0, 0], dims="module")
    with pytest.raises(ValueError, match=r"1 of 600 rows that do not.*holds -1\.\.1"):
        score(routing.where((routing["example"] > 0) | (routing["layer"] > 0), lower))
    with pytest.raises(ValueError, match=r"2 of 600 rows that do not.*nan"):
        score(routing.where(routing["example"] > 0))
    with pytest.raises(ValueError, match=r"not all 0.*600 of 600"):
        score(0 * routing)
    with pytest.raises(ValueError, match=r"'example'.*got \('pos', 'layer'\)"):
        score(operation=operation.rename(example="pos"))
    with pytest.raises(ValueError, match=r"others only of.*'module'"):
        score(operation=routing.argmax("layer"))
    with pytest.raises(ValueError, match="300 values along 'example', as routing has, got 299"):
        score(operation=operation[1:])
    with pytest.raises(ValueError, match="coordinate 'layer' of routing"):
        score(routing.assign_coords(layer=[0, 1]), operation.assign_coords(layer=[1, 0]))
    with pytest.raises(TypeError, match="integers, got float64"):
        score(operation=1.0 * operation)
    with pytest.raises(ValueError, match=r"operation must be in -1\.\.2, got values in 0\.\.3"):
        score(operations=3)
    with pytest.raises(ValueError, match="operations must be at least 1, got 0"):
        score(operations=0)
    with pytest.raises(ValueError, match="distinct names"):
        score(operations=["add", "add", "sine", "min"])
    with pytest.raises(TypeError, match=r"operations of .* must be .*, got str 'sine'"):
        score(operations="sine")
    with pytest.raises(ValueError, match=r"dead_share must be in \[0, 1\), got 1"):
        score(dead_share=1)
    with pytest.raises(ValueError, match="resamples must be at least 1, got 0"):
        score(resamples=0)
