"""Facts about Raven and fuzzy logic setups, see `facts`."""

import functools
from dataclasses import fields, replace
from typing import Any

import torch

from studies.engine import Setup
from studies.setups.latent_code import FuzzySetup, LatentCodeSetup, RavenSetup
from tasks import RAVEN_RULES
from tests.studies.papers.transformer_facts import normalised, transformer_facts


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
