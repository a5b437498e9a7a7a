"""Facts about setups of modular networks on equations, see `facts`."""

import functools
from dataclasses import replace
from typing import Any

import torch

import tasks
from mechanisms import (
    ConcatenationRouterConfig,
    CrossAttentionRouterConfig,
    EncoderRouterConfig,
    ModularNetwork,
    Monolithic,
    StructuralOracleRouterConfig,
)
from mechanisms.modular.module_pools import MlpPool
from studies.setups.equations import EquationsSetup
from tests.studies.papers.transformer_facts import normalised

ROUTERS = {
    StructuralOracleRouterConfig: "structural_oracle",
    CrossAttentionRouterConfig: "cross_attention",
    ConcatenationRouterConfig: "concatenation",
    EncoderRouterConfig: "encoder",
}


@functools.cache
def task_facts(config: tasks.MathEquationsConfig) -> dict[str, Any]:
    """Facts about equations that follow from examples, and the sizes of the splits."""
    task = tasks.MathEquations(config)
    # Fewer points are made faster, and are about the same tasks.
    few = tasks.MathEquations(replace(config, n_points=1000, n_id=200, n_ood=100))
    batch = few.batch("train", 0, few.size("train"))
    x, y = batch.inputs[:, 0, 0], batch.inputs[:, 1, 0]
    counts = batch.latents["task"].bincount()
    counts = counts[counts > 0]
    digits = torch.cat([x, y])
    is_uniform = (
        abs(digits.mean()) < 0.1 and abs(digits.var() * 3 - 1) < 0.1 and digits.abs().max() <= 1
    )
    results = [
        tasks.apply_operation(second, tasks.apply_operation(first, a, b), a)
        for (first, second), a, b in zip(
            [[few.operations[index] for index in row] for row in batch.latents["operator"][:200]],
            x.double().numpy(),
            y.double().numpy(),
            strict=False,
        )
    ]
    is_papers = torch.allclose(torch.tensor(results).float(), batch.targets[:200, 0], atol=1e-5)
    is_even = counts.max() - counts.min() <= 1
    return {
        "task.n_variables": batch.inputs.shape[1],
        "task.inputs_distribution": "uniform in [-1, 1]" if is_uniform else "another",
        "task.length": batch.latents["operator"].shape[1],
        "task.equation": "o2(o1(x1, x2), x1)" if is_papers else "another",
        "task.operations": tasks.MATH_OPERATIONS,
        "task.n_operators": len(few.operations),
        "task.sampling": "evenly" if is_even else "at random",
        "task.n_points": config.n_points,
        "task.n_id": config.n_id,
        "task.n_ood": config.n_ood,
        "task.n_combinations": len(task.combinations),
        "task.n_held_out_combinations": len(task.held_out),
        "task.points_train": config.size("train"),
        "task.points_ood": config.size("ood"),
    }


@functools.cache
def network_facts(setup: EquationsSetup) -> dict[str, Any]:
    """Facts about the network of a normalised setup: its parts, and what it does."""
    model = setup.build(torch.Generator().manual_seed(0)).eval()
    batch = setup.sampler().batch("train", 0, 64)
    with torch.no_grad():
        error = (model(batch.inputs) - batch.targets).square().mean()
        loss = setup.loss(model, batch, 0)
    of_squares = setup.objective == "all_paths" or torch.allclose(loss, error)
    facts = {"task.loss": "mean squared error" if of_squares else "another"}
    facts |= {"training.objective": setup.objective, "training.entropy": setup.entropy}
    if isinstance(model, Monolithic):
        widths = {layer.W.shape[1] for layer in model.layers}
        sizes = {"model.d_mlp": widths.pop(), "model.depth": len(model.layers) + 1}
        return facts | {"model.router": "monolithic"} | sizes
    assert isinstance(model, ModularNetwork)
    matching = model.router.matching
    keys = "direct"
    if matching.keys is None:
        keys = "projected" if len(matching.W_K) == model.n_layers > 1 else "shared"
    return (
        facts
        | pool_facts(model)
        | {
            "model.router": ROUTERS[type(model.config.router)],
            "model.n_layers": len(model.layers),
            "model.n_modules": model.n_modules,
            "model.n_paths": model.n_modules ** len(model.layers),
            "model.modules_shared": "one pool for all layers",
            "model.input_encoder": "linear" if model.W_H is None else "mlp",
            "model.keys": keys,
            "model.scaled": matching.scale != 1,
            "model.selection_bottleneck": getattr(model.router, "selector", None) is not None,
            "model.functional_bottleneck": bottleneck(model, batch.inputs),
            "model.selection_training": selection_in_training(model, batch.inputs),
            "model.selection_test": selection_in_tests(model, batch.inputs),
        }
    )


def pool_facts(model: ModularNetwork) -> dict[str, Any]:
    """Facts about the modules; with true operations they have no sizes."""
    pool = model.pool
    if not isinstance(pool, MlpPool):
        return {"model.pool": "operations"}
    hidden = pool.W_in.new_ones(1, 1, pool.W_in.shape[1]) @ pool.W_in + pool.b_in[:, None]
    expected = (hidden.relu() * pool.W_out[:, None]).sum(-1)[:, 0] + pool.b_out
    out = pool(pool.W_in.new_ones(1, 1, pool.W_in.shape[1]))[0]
    return {
        "model.pool": "mlp",
        "model.d_mlp": pool.W_in.shape[2],
        "model.depth": 2 + len(pool.W_hidden),
        "model.module_activation": "relu"
        if torch.allclose(out, expected, atol=1e-4)
        else "another",
    }


def bottleneck(model: ModularNetwork, inputs: torch.Tensor) -> str:
    """What modules receive: the digits, two numbers that are chosen, or all features."""
    _, cache = model.run_with_cache(inputs)
    operands = cache["layers.0.hook_operands"]
    if operands.shape[-1] > 2:
        return "none"
    if "layers.0.hook_operand_choice" in cache:
        return "attention"
    return "oracle" if torch.equal(operands[:, 0], inputs[:, :2, 0]) else "another"


def selection_in_training(model: ModularNetwork, inputs: torch.Tensor) -> str:
    """Whether single modules are sampled, with gradients for all of them."""
    model.train()
    kept = {}

    def keep(scores: torch.Tensor, hook: Any) -> None:
        scores.retain_grad()
        kept[hook.name] = scores

    with model.hooks(fwd_hooks=[("layers.0.hook_module_scores", keep)]):
        answers, cache = model.run_with_cache(inputs)
        answers.sum().backward()
    again = model.run_with_cache(inputs)[1]["layers.0.hook_module_choice"]
    model.eval()
    choice = cache["layers.0.hook_module_choice"]
    is_hard = torch.allclose(choice.amax(-1), torch.ones(len(choice)), atol=1e-5)
    has_gradient = bool((kept["layers.0.hook_module_scores"].grad.abs().sum((0, 1)) > 0).all())
    if is_hard and has_gradient and not torch.equal(choice.argmax(-1), again.argmax(-1)):
        return "straight-through Gumbel softmax"
    return "another"


def selection_in_tests(model: ModularNetwork, inputs: torch.Tensor) -> str:
    """Whether the module of the highest score is taken, or that of the largest sum."""

    def change(scores: torch.Tensor, hook: Any) -> torch.Tensor:
        changed = torch.zeros_like(scores)
        changed[..., 1] = 1.5
        # Where a variable is selected, it is any of them.
        changed[:, slice(None) if selects else 0, 0] = 2.0
        return changed

    selects = "layers.0.hook_selected_variable" in model.hook_dict
    with model.hooks(fwd_hooks=[("layers.0.hook_module_scores", change)]):
        _, cache = model.run_with_cache(inputs)
    chosen = set(cache["layers.0.hook_module_choice"].argmax(-1).tolist())
    return {(0,): "highest score", (1,): "largest sum"}.get(tuple(chosen), "another")


def equation_facts(setup: EquationsSetup) -> dict[str, Any]:
    """Facts about the task and the network of a setup."""
    few = replace(setup.task, n_points=1000, n_id=200, n_ood=100)
    same = normalised(replace(setup, task=few, temperature=1.0, final_temperature=1.0))
    return (
        task_facts(setup.task)
        | network_facts(same)
        # The others choose checkpoints, and are not tested.
        | {"task.points_id": setup.task.size("id") - setup.n_validation}
    )
