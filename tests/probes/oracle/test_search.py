import numpy as np
import pytest
import torch

from probes import search_paths
from tests.probes.oracle.path_models import OPERATIONS, Operations, Random, brute_force

EXAMPLES = 7


def random_problem(n_layers, n_modules):
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(EXAMPLES, 2, generator=generator, dtype=torch.double)
    targets = torch.rand(EXAMPLES, 2, generator=generator, dtype=torch.double)
    routed = torch.randint(n_modules, (EXAMPLES, n_layers), generator=generator)
    return Random(n_layers, n_modules), inputs, targets, routed


def expected(model, inputs, targets, routed):
    """Everything from the table of all paths' losses, example by example."""
    table = brute_force(model, inputs, targets)
    rows = {name: [] for name in ("best_loss", "best_path", "routed_loss", "mean_loss", "regret")}
    for example, own in enumerate(map(tuple, routed.tolist())):
        losses = {path: loss[example].item() for path, loss in table.items()}
        best = min(losses, key=losses.get)
        completed = [
            min(loss for path, loss in losses.items() if path[:prefix] == own[:prefix])
            for prefix in range(model.n_layers + 1)
        ]
        rows["best_loss"].append(losses[best])
        rows["best_path"].append(best)
        rows["routed_loss"].append(losses[own])
        rows["mean_loss"].append(np.mean(list(losses.values())))
        rows["regret"].append(np.diff(completed))
    return rows


def lookahead(model, share):
    """A bound: a share of the loss of the best completion, which is found by trying all."""

    def bound(inputs, layer, partial, targets):
        paths = partial.shape[1]
        for later in range(layer, model.n_layers):
            partial = model.advance(inputs, later, partial).flatten(1, 2)
        errors = (partial - targets[:, None]).square().sum(-1)
        return share * errors.unflatten(1, (paths, -1)).amin(-1)

    return bound


SIZES = [(1, 3), (2, 4), (3, 3), (3, 1)]


@pytest.mark.parametrize(("n_layers", "n_modules"), SIZES)
@pytest.mark.parametrize("method", ["exact", "beam", "best_first", "bounded"])
def test_each_method_finds_what_trying_all_paths_finds(method, n_layers, n_modules):
    model, inputs, targets, routed = random_problem(n_layers, n_modules)
    options = {"method": method, "width": n_modules ** (n_layers - 1)}
    if method == "bounded":
        options = {"method": "best_first", "width": 1, "bound": lookahead(model, 0.9)}
    result = search_paths(model, inputs, targets, routed=routed, **options)
    for name, values in expected(model, inputs, targets, routed).items():
        if name != "mean_loss" or method == "exact":
            np.testing.assert_allclose(result[name], values, atol=1e-12, err_msg=name)
    assert result["proven"].all()
    assert result["regret_proven"].all()
    np.testing.assert_allclose(
        result["regret"].sum("layer"), result["routed_loss"] - result["best_loss"], atol=1e-12
    )
    assert (result["regret"] >= 0).all()
    assert bool(result["mean_loss"].isnull().all()) == (method != "exact")


def test_exact_search_shares_prefixes():
    model, inputs, targets, routed = random_problem(3, 5)
    result = search_paths(model, inputs, targets, routed=routed)
    assert result["evaluated"].to_numpy().tolist() == [5 + 25 + 125] * EXAMPLES
    assert sum(model.asked) == EXAMPLES * (5 + 25 + 125)


@pytest.mark.parametrize("method", ["beam", "best_first"])
def test_evaluated_counts_applications(method):
    model, inputs, targets, routed = random_problem(3, 4)
    result = search_paths(model, inputs, targets, routed=routed, method=method, width=2)
    assert int(result["evaluated"].sum()) == sum(model.asked)


@pytest.mark.parametrize("method", ["exact", "beam", "best_first"])
def test_the_memory_limit_holds_and_changes_nothing(method):
    model, inputs, targets, routed = random_problem(3, 5)
    options = {"routed": routed, "method": method, "width": 3}
    whole = search_paths(model, inputs, targets, **options)
    largest = max(model.asked)
    # The least has room for a part of one example's paths only.
    for limit in (200_000, 40_000, 12_000):
        model.asked.clear()
        part = search_paths(model, inputs, targets, memory_limit=limit, **options)
        assert max(model.asked) * model.bytes_per_result <= limit
        assert max(model.asked) < largest
        for name in ("best_path", "evaluated", "proven"):
            assert part[name].equals(whole[name])
        np.testing.assert_allclose(part["regret"], whole["regret"], atol=1e-12)
        np.testing.assert_allclose(part["mean_loss"], whole["mean_loss"], atol=1e-12)


def test_a_narrow_beam_does_not_claim_a_proof():
    model, inputs, targets, routed = random_problem(3, 6)
    exact = search_paths(model, inputs, targets, routed=routed)
    beam = search_paths(model, inputs, targets, routed=routed, method="beam", width=1)
    assert not beam["proven"].any()
    assert (beam["evaluated"] < exact["evaluated"]).all()
    assert (beam["best_loss"] >= exact["best_loss"] - 1e-12).all()
    assert (beam["best_loss"] <= beam["routed_loss"]).all()
    assert (beam["regret"] >= 0).all()
    np.testing.assert_allclose(
        beam["regret"].sum("layer"), beam["routed_loss"] - beam["best_loss"], atol=1e-12
    )
    # The last layer's regret needs only one layer, which is looked at as a whole.
    assert beam["regret_proven"].sel(layer=2).all()
    last = [result["regret"].sel(layer=2) for result in (beam, exact)]
    np.testing.assert_allclose(*last, atol=1e-12)


def test_a_tight_bound_saves_applications_and_the_budget_ends_the_search():
    model, inputs, targets, routed = random_problem(4, 5)
    options = {"routed": routed, "method": "best_first", "width": 1}
    blind = search_paths(model, inputs, targets, **options)
    guided = search_paths(model, inputs, targets, bound=lookahead(model, 1.0), **options)
    np.testing.assert_allclose(guided["best_loss"], blind["best_loss"], atol=1e-12)
    # At most the path of least bound from each of 4 prefixes, and the router's own.
    assert (guided["evaluated"] <= 5 * (4 + 4 + 3 + 2 + 1)).all()
    assert (blind["evaluated"] >= 5 + 25 + 125 + 625).all()
    stopped = search_paths(model, inputs, targets, budget=50, **options)
    assert (stopped["evaluated"] <= 4 * 50 + 20).all()
    assert not stopped["proven"].any()
    assert (stopped["best_loss"] >= blind["best_loss"] - 1e-12).all()
    assert (stopped["best_loss"] <= stopped["routed_loss"]).all()


def test_a_loss_of_zero_is_a_proof():
    inputs = torch.rand(20, 2, generator=torch.Generator().manual_seed(0))
    network = Operations(OPERATIONS, n_layers=3)
    partial = network.begin(inputs)
    # A product, a maximum and a sum: unlike a sine, each is rounded alike in tensors of all shapes.
    for layer, module in enumerate((1, 3, 0)):
        partial = network.advance(inputs, layer, partial)[:, :, module]
    routed = torch.tensor([[1, 3, 2]]).expand(20, 3)
    for method in ("beam", "best_first"):
        result = search_paths(network, inputs, partial[:, 0], routed=routed, method=method, width=1)
        assert (result["best_loss"] == 0).all()
        assert result["proven"].all()
        # Only the last choice was wrong.
        assert (result["regret"].sel(layer=[0, 1]) == 0).all()
        assert (result["regret"].sel(layer=2) > 0).all()


def test_the_model_is_evaluated_and_left_as_it_was():
    model, inputs, targets, routed = random_problem(2, 3)
    assert model.training
    first, second = (search_paths(model, inputs, targets, routed=routed) for _ in range(2))
    assert first.identical(second)
    assert model.training
    assert model.dropout.training


def test_another_loss():
    model, inputs, targets, routed = random_problem(2, 4)
    result = search_paths(
        model,
        inputs,
        targets,
        routed=routed,
        loss=lambda answers, targets: (answers - targets[:, None]).abs().amax(-1),
    )
    squared = search_paths(model, inputs, targets, routed=routed)
    assert (result["best_loss"] ** 2 <= squared["best_loss"] + 1e-12).all()
    assert (result["best_loss"] ** 2 >= squared["best_loss"] / 2 - 1e-12).all()


def test_invalid_input_is_refused():
    model, inputs, targets, routed = random_problem(2, 3)

    def search(inputs=inputs, targets=targets, routed=routed, **options):
        return search_paths(model, inputs, targets, routed=routed, **options)

    with pytest.raises(ValueError, match=r"method must be one of exact, beam, .*'greedy'"):
        search(method="greedy")
    with pytest.raises(ValueError, match=r"width must be at least 1, got 0"):
        search(width=0)
    with pytest.raises(ValueError, match=r"must be 'best_first' if bound is given, got 'beam'"):
        search(method="beam", bound=lookahead(model, 1.0))
    with pytest.raises(
        ValueError, match=r"budget must be at least 12 .* got 11; .*'beam' or 'best_first'"
    ):
        search(budget=11)
    with pytest.raises(ValueError, match=r"memory_limit must be at least \d+ bytes, got 3000"):
        search(memory_limit=3000)
    deep, routed_deep = Random(5, 3), torch.zeros(EXAMPLES, 5, dtype=torch.long)
    with pytest.raises(ValueError, match=r"58080 bytes for best_first with budget=1000000, got 40"):
        search_paths(
            deep, inputs, targets, routed=routed_deep, method="best_first", memory_limit=40_000
        )
    with pytest.raises(ValueError, match=r"inputs must hold at least 1 example"):
        search(inputs=inputs[:0])
    with pytest.raises(ValueError, match=r"targets must have the 7 examples"):
        search(targets=targets[1:])
    with pytest.raises(ValueError, match=r"targets must be finite, got 1 NaN"):
        search(targets=targets.masked_fill(torch.arange(14).view(7, 2) == 5, torch.nan))
    with pytest.raises(TypeError, match=r"routed must hold integers, got torch.float32"):
        search(routed=routed.float())
    with pytest.raises(TypeError, match=r"routed of search_paths must be Tensor, got ndarray"):
        search(routed=routed.numpy())
    with pytest.raises(
        ValueError, match=r"routed must be \[example, layer\], \(7, 2\), got \(7, 1\)"
    ):
        search(routed=routed[:, :1])
    with pytest.raises(ValueError, match=r"routed must be in 0\.\.2, got 0\.\.3"):
        search(routed=routed.clamp(max=0).index_fill(0, torch.tensor([1]), 3))
    with pytest.raises(
        ValueError, match=r"loss must return \[example, path\], \(7, 9\), got \(7,\)"
    ):
        search(loss=lambda answers, targets: answers.sum((1, 2)))
    with pytest.raises(ValueError, match=r"loss must return finite numbers of at least 0, got -"):
        search(loss=lambda answers, targets: -answers.square().sum(-1))
    for bound in (lambda *_: torch.zeros(7), lambda *_: torch.full((7, 1), torch.nan)):
        with pytest.raises(ValueError, match=r"bound must return \[example, path\], \(7, 1\)"):
            search(method="best_first", bound=bound)
    model.begin = lambda inputs: inputs
    with pytest.raises(ValueError, match=r"model\.begin must return \[example, 1, state\]"):
        search()
    model.begin = lambda inputs: inputs[:, None]
    model.advance = lambda inputs, layer, partial: partial
    with pytest.raises(ValueError, match=r"model\.advance must return .* in layer 0"):
        search()


@pytest.mark.parametrize("shape", [(EXAMPLES,), (EXAMPLES, 1), (EXAMPLES, 3), (EXAMPLES, 1, 2)])
@pytest.mark.parametrize("method", ["exact", "beam", "best_first"])
def test_targets_of_another_shape_than_the_answers_are_refused(shape, method):
    model, inputs, _, routed = random_problem(2, 3)
    expected = (
        rf"targets must have the shape \({EXAMPLES}, 2\) of the answers, .* got \({EXAMPLES},"
    )
    with pytest.raises(ValueError, match=expected):
        search_paths(model, inputs, torch.zeros(shape).double(), routed=routed, method=method)


def test_targets_without_a_state_are_refused():
    """They would be compared with the answers of each other's examples."""
    targets = torch.zeros(EXAMPLES)
    with pytest.raises(ValueError, match=rf"shape \({EXAMPLES}, 1\) of the answers"):
        search_paths(
            Operations(OPERATIONS), torch.ones(EXAMPLES, 2), targets,
            routed=torch.zeros(EXAMPLES, 2, dtype=torch.long), method="exact",
        )  # fmt: skip
