"""Tasks, modular networks and probes together, with modules that compute the true operations."""

import numpy as np
import pytest
import torch
import xarray as xr
from torch.nn.functional import one_hot

import mechanisms
import probes
import tasks

TASK = tasks.MathEquations(tasks.MathEquationsConfig(n_ood=400, n_points=500))
OPERATION_OF_MODULE = (3, 0, 4, 1, 2)


def network(**changes):
    """A network whose modules are the operations of the task, permuted, with an oracle router."""
    names = tuple(TASK.operations[operation] for operation in OPERATION_OF_MODULE)
    matching = mechanisms.MatchingConfig(d_key=8)
    config = mechanisms.ModularNetworkConfig(
        **{
            "n_variables": TASK.n_variables,
            "d_input": TASK.n_features,
            "d_model": 16,
            "n_layers": 2,
            "n_modules": 5,
            "router": mechanisms.StructuralOracleRouterConfig(
                matching=matching, variables=TASK.deciding
            ),
            "pool": mechanisms.OperationPoolConfig(names=names),
        }
        | changes
    )
    return mechanisms.ModularNetwork(config, generator=torch.Generator().manual_seed(0)).eval()


def true_paths(batch):
    """The module with the right operation, for each example and layer."""
    module_of_operation = torch.tensor(OPERATION_OF_MODULE).argsort()
    return module_of_operation[batch.latents["operator"]]


def network_with_true_router():
    """A network whose router always chooses the module with the right operation."""
    model = network()
    n = len(OPERATION_OF_MODULE)
    with torch.no_grad():
        for parameter in (model.W_E, model.b_E, model.router.W_Q):
            parameter.zero_()
        model.W_E[1 : 1 + n, :n] = torch.eye(n)
        model.router.W_Q[:, :n, :n] = torch.eye(n)
        model.router.matching.keys.zero_()
        for module, operation in enumerate(OPERATION_OF_MODULE):
            model.router.matching.keys[:, module, operation] = 10
    return model


def module_choice(model, batch):
    """The routing decisions, one-hot [example, layer, module]."""
    choice = probes.Quantity("layers.*.hook_module_choice", dims=("example", "module"))
    return probes.capture(model, [batch], {"choice": choice})["choice"]


def routed_paths(model, batch):
    """The module that the router chooses, for each example and layer."""
    return torch.from_numpy(module_choice(model, batch).argmax("module").to_numpy())


@pytest.mark.parametrize("method", ["exact", "beam", "best_first"])
def test_true_operations_have_a_path_without_loss(method):
    model, batch = network(), TASK.batch("ood", 0, 300)
    routed = routed_paths(model, batch)
    paths = probes.search_paths(model, batch.inputs, batch.targets, routed=routed, method=method)
    assert paths["best_loss"].max() < 1e-10
    assert paths["routed_loss"].mean() > 0.01
    with torch.no_grad():
        errors = (model(batch.inputs) - batch.targets).square()[:, 0]
    assert np.allclose(paths["routed_loss"], errors, atol=1e-5)
    regret = paths["routed_loss"] - paths["best_loss"]
    assert np.allclose(paths["regret"].sum("layer"), regret, atol=1e-6)


def test_the_best_path_of_each_task_recovers_the_permutation():
    model, batch = network(), TASK.batch("ood", 0, 1000)
    untrained = network(n_modules=5, pool=mechanisms.MlpPoolConfig(d_mlp=16))
    scores = probes.score_paths(
        model,
        batch.inputs,
        batch.targets,
        routed=true_paths(batch),
        task=batch.latents["task"],
        untrained=untrained,
    )
    module_of_operation = np.argsort(OPERATION_OF_MODULE)
    for task in scores["task"].to_numpy():
        operators = TASK.combinations[task]
        path = scores["task_path"].sel(control="trained", task=task).to_numpy()
        # The square of the second operand does not depend on the first layer's result.
        if TASK.operations[operators[1]] != "square_second":
            assert path.tolist() == module_of_operation[operators].tolist()
    loss = scores["loss"]
    assert loss.sel(control="trained", path=["sample", "task", "routed"]).max() < 1e-10
    assert loss.sel(control="trained", path="mean") > 0.1
    assert loss.sel(control="untrained", path="task") > 0.01


def test_a_few_labels_find_the_path_that_the_router_misses():
    model, batch = network(), TASK.batch("ood", 0, 1000)
    adapted = probes.adapt_paths(
        model,
        batch.inputs,
        batch.targets,
        routed=routed_paths(model, batch),
        task=batch.latents["task"],
    )
    assert adapted["gap_closed"].sel(examples=64) == pytest.approx(1, abs=1e-6)
    assert adapted["gap_closed"].sel(examples=1) > 0.5


def test_the_true_router_is_fully_specialized():
    model, batch = network_with_true_router(), TASK.batch("ood", 0, 500)
    with torch.no_grad():
        assert (model(batch.inputs) - batch.targets).abs().max() < 1e-5
    choice = module_choice(model, batch)
    expected = one_hot(true_paths(batch), 5)
    assert np.array_equal(choice.transpose("example", "layer", "module"), expected)
    operation = xr.DataArray(batch.latents["operator"].numpy(), dims=("example", "layer"))
    scores = probes.score_specialization(choice, operation, operations=TASK.operations)
    observed = scores.sel(control="observed", layer="pooled")
    for name in ("specialization", "collapse", "assignment_accuracy"):
        assert observed[name] == pytest.approx(1)
    assert observed["assignment"].to_numpy().tolist() == np.argsort(OPERATION_OF_MODULE).tolist()


@pytest.mark.parametrize("bottleneck", ["oracle", "attention", "none"])
def test_the_search_agrees_with_hooks_that_set_each_path(bottleneck):
    pool = mechanisms.MlpPoolConfig(d_mlp=8)
    model = network(pool=pool, functional_bottleneck=bottleneck)
    batch = TASK.batch("ood", 0, 40)
    losses = []
    for first in range(5):
        for second in range(5):
            hooks = [
                (
                    f"layers.{layer}.hook_module_choice",
                    lambda c, hook, m=module: one_hot(torch.full((len(c),), m), 5).to(c),
                )
                for layer, module in enumerate((first, second))
            ]
            with torch.no_grad():
                answers = model.run_with_hooks(batch.inputs, fwd_hooks=hooks)
            losses.append((answers - batch.targets).square()[:, 0].numpy())
    routed = routed_paths(model, batch)
    paths = probes.search_paths(model, batch.inputs, batch.targets, routed=routed)
    assert np.allclose(paths["best_loss"], np.min(losses, axis=0), atol=1e-6)
    assert np.allclose(paths["mean_loss"], np.mean(losses, axis=0), atol=1e-5)
    path_numbers = paths["best_path"].to_numpy() @ [5, 1]
    losses_of_best = np.array(losses)[path_numbers, np.arange(40)]
    assert np.allclose(losses_of_best, paths["best_loss"], atol=1e-6)
