"""What a cell of a study really is, in the names of the tables of papers.

The values come from the task, the model and the training that the cell builds, not from the text of
a preset.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any

import torch

from mechanisms import Transformer
from studies.engine import Setup
from studies.engine.study import Plan
from studies.setups.expressions import ExpressionSetup
from studies.setups.latent_code import FuzzySetup, LatentCodeSetup, RavenSetup
from tasks import RAVEN_RULES
from tests.studies.papers.expression_facts import expression_facts


def training_facts(setup: Setup) -> dict[str, Any]:
    """Facts about the optimizer, the schedule and the choice of a checkpoint."""
    config = setup.training
    names = (
        "learning_rate final_learning_rate schedule weight_decay decayed warmup_steps beta2 clip "
        "n_steps batch_size evaluate_every stop_at checkpoint precision"
    )
    facts = {f"training.{name}": getattr(config, name) for name in names.split()}
    selection = f"{setup.selection.split} {setup.selection.metric}"
    # Batches are drawn from all lengths.
    more = {"training.selection": selection, "training.length_bucketed_batches": False}
    return facts | more | {"seed": setup.seed}


# Models


def normalised(setup: Setup) -> Setup:
    """The setup with the training and the seeds of no cell: the model does not depend on them."""
    training = replace(setup.training, n_steps=1, learning_rate=1.0, weight_decay=0.0)
    return replace(setup, seed=0, n_validation=2, training=replace(training, warmup_steps=0))


@functools.cache
def transformer_facts(setup: Setup) -> dict[str, Any]:
    """Facts about a `Transformer`: its config, the parameters that it has, and their number."""
    with torch.device("meta"):
        model = setup.build(torch.Generator())
    assert isinstance(model, Transformer)
    config, block = model.config, model.blocks[0]
    attention, mlp = block.attn.config, block.mlp.config
    names = "positions bidirectional causal shared inputs tied n_layers d_model n_readout d_output"
    facts = {f"model.{name}": getattr(config, name) for name in names.split()}
    parameters = {name.rpartition(".")[2] for name, _ in block.named_parameters()}
    biases = {"b_Q", "b_K", "b_V", "b_O", "b_in", "b_out"} & parameters
    assert not biases or len(biases) == 6
    return facts | {
        "model.normalization": attention.normalization,
        "model.value_network": attention.value_network,
        "model.normalize_qk": hasattr(block.attn, "ln_q"),
        "model.n_heads": block.attn.W_Q.shape[0],
        "model.d_head": block.attn.W_Q.shape[2],
        "model.d_value": block.attn.W_V.shape[2],
        "model.d_mlp": block.mlp.W_in.shape[1],
        "model.activation": mlp.activation,
        "model.norm": {"LayerNorm": "layer_norm", "RMSNorm": "rms_norm"}[type(block.ln1).__name__],
        "model.norm_epsilon": block.ln1.eps,
        "model.biases": bool(biases),
        "model.dropout.attention": attention.dropout,
        "model.dropout.mlp": mlp.dropout,
        "model.dropout.residual": block.dropout,
        # The embedding has none.
        "model.dropout.embedding": 0.0,
        "model.n_parameters": sum(parameter.numel() for parameter in model.parameters()),
    }


def relative_bias_facts(setup: LatentCodeSetup) -> dict[str, Any]:
    """Facts about the relative position bias of a model."""
    small = replace(setup, n_layers=1, d_model=1, n_heads=4096, d_head=1, d_mlp=1)
    bias = small.build(torch.Generator().manual_seed(0)).blocks[0].relative_bias
    assert bias is not None
    n_buckets = bias.table.shape[1]
    # Entries are random: a hundred thousand of them have this spread up to a percent.
    spread, expected = bias.table.std().item(), n_buckets**-0.5
    return {
        "model.max_distance": bias.max_distance,
        "model.n_buckets": n_buckets,
        "model.relative_bias_std": expected if abs(spread / expected - 1) < 0.01 else spread,
    }


@functools.cache
def model_facts(setup: LatentCodeSetup) -> dict[str, Any]:
    """Facts about the model of a normalised setup."""
    return transformer_facts(setup) | relative_bias_facts(setup)


# Tasks


def id_examples(setup: Setup) -> str:
    """Whether the examples of `id` are those that training begins with."""
    batches = [setup.sampler().batch(split, 0, 8).inputs for split in ("train", "id")]
    return "of training" if torch.equal(*batches) else "new"


@functools.cache
def raven_task_facts(setup: RavenSetup) -> dict[str, Any]:
    """Facts about a Raven task that follow from the task itself."""
    task = setup.sampler()
    inputs = task.batch("train", 0, 2).inputs
    combinations = {side: task.combinations(side) for side in ("train", "ood")}
    n_train, n_ood = map(len, combinations.values())
    config = task.config
    facts = {
        f"task.{field.name}": getattr(config, field.name)
        for field in fields(config)
        if field.name != "seed"
    }
    return facts | {
        "task.n_rules": len(RAVEN_RULES),
        "task.n_combinations": n_train + n_ood,
        "task.n_train_combinations": n_train,
        "task.n_ood_combinations": n_ood,
        "task.sequence_length": inputs.shape[1],
        "task.d_input": inputs.shape[2],
        "task.chance": task.chance,
        "task.id_examples": id_examples(setup),
    }


def seed_fact(setup: Setup) -> int | str:
    """The seed of the task; "seed" if it is the seed of the run."""
    seed = setup.sampler().config.seed
    return "seed" if seed == setup.seed else seed


def raven_facts(setup: RavenSetup) -> dict[str, Any]:
    """Facts about the task and the model of a Raven setup."""
    same = replace(normalised(setup), task=replace(setup.task, seed=0))
    return model_facts(same) | raven_task_facts(same) | {"task.seed": seed_fact(setup)}


@functools.cache
def fuzzy_task_facts(setup: FuzzySetup) -> dict[str, Any]:
    """Facts about a fuzzy logic task that follow from the task itself."""
    task = setup.sampler()
    n_train, n_test, n_unknown = (
        len(task.combinations(split)) for split in ("train", "test", "ood")
    )
    seen, unseen = (
        {int(term) for split in splits for pair in task.combinations(split) for term in pair}
        for splits in (("train", "test"), ("ood",))
    )
    batch = task.batch("train", 0, 2)
    return {
        "task.n_variables": batch.latents["literals"].shape[2],
        "task.n_terms": batch.latents["literals"].shape[1],
        "task.n_examples": batch.inputs.shape[1],
        "task.d_input": batch.inputs.shape[2],
        "task.held_out": task.config.held_out,
        "task.n_conjunctions": len(task.conjunctions),
        "task.n_seen_terms": len(seen),
        "task.n_unseen_terms": len(unseen),
        "task.n_combinations": n_train + n_test,
        "task.n_train_combinations": n_train,
        "task.n_test_combinations": n_test,
        "task.n_unknown_combinations": n_unknown,
        "task.id_examples": id_examples(setup),
    }


def fuzzy_facts(setup: FuzzySetup) -> dict[str, Any]:
    """Facts about the task and the model of a fuzzy logic setup."""
    same = normalised(setup)
    facts = model_facts(same) | fuzzy_task_facts(same)
    return facts | {"task.seed": seed_fact(setup), "task.n_validation": setup.n_validation}


FACTS: Mapping[type[Setup], Callable[[Any], dict[str, Any]]] = {
    RavenSetup: raven_facts,
    FuzzySetup: fuzzy_facts,
    ExpressionSetup: expression_facts,
}
"""The facts about task and model, by the class of the setup."""


def facts_of(setup: Setup, plan: Plan) -> dict[str, Any]:
    """All facts about a cell of a plan by their names; None is "none"."""
    training = setup.training
    # A task with a fixed training set has its own number of examples.
    facts = {
        "task.n_train": training.n_steps * training.batch_size,
        "task.n_test": plan.measures["scores"].n_test,
    }
    facts |= training_facts(setup) | FACTS[type(setup)](setup)
    return {name: "none" if value is None else value for name, value in facts.items()}
