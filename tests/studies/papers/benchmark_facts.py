"""Facts about the benchmarks of compositional attention, see `facts`."""

import functools
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

import mechanisms
import tasks
from mechanisms.attention.positions import interleaved_sinusoids
from mechanisms.models.patch_transformer import fast_sinusoids
from studies.setups.pairing import PairingSetup
from studies.setups.pictures import EsbnSetup, ImagesSetup, SortOfClevrSetup, TrianglesSetup
from studies.setups.scan import ScanSetup
from studies.setups.text import TextPairingSetup
from tests.mechanisms.initial_weights import fairseq, is_drawn_as, scan
from tests.studies.papers.transformer_facts import drops_shared_pairs, normalised


def without_training(setup: PairingSetup) -> Any:
    """The setup with the training and the seeds of no cell: the model does not depend on them."""
    same = normalised(setup)
    training = replace(same.training, n_parts=1, evaluate_every=1, keep_at=())
    return replace(same, training=training, n_validation=1)


# Models


def block_facts(block: Any, *, n_layers: int, shared: bool) -> dict[str, Any]:
    """Facts about a block of a model and its attention."""
    attn, mlp = block.attn, block.mlp
    n_heads, d_model, d_head = attn.W_Q.shape
    parameters = dict(attn.named_parameters())
    is_compositional = isinstance(attn.config, mechanisms.CompositionalAttentionConfig)
    facts = {
        "model.attention": "compositional" if is_compositional else "multi_head",
        f"model.{'n_searches' if is_compositional else 'n_heads'}": n_heads,
        "model.d_model": d_model,
        "model.d_head": d_head,
        "model.d_value": attn.W_V.shape[2],
        "model.biases": {"b_Q", "b_K", "b_V", "b_O"} <= parameters.keys(),
        "model.dropout.attention_pattern": attn.config.dropout,
        "model.d_mlp": mlp.W_in.shape[1],
        "model.activation": mlp.config.activation,
        "model.dropout.attention_output": block.dropout,
        "model.dropout.feed_forward_hidden": mlp.config.dropout,
        # Either the layer itself drops its output, or the block does.
        "model.dropout.feed_forward_output": max(mlp.config.output_dropout, block.dropout),
        "model.n_layers": n_layers,
        "model.shared_weights": shared,
        "model.post_norm": block.post_norm,
    }
    assert {norm.eps for norm in (block.ln1, block.ln2)} == {1e-5}
    return facts | (compositional_facts(attn, parameters) if is_compositional else {})


def initialisation_of(queries: torch.Tensor) -> str:
    """What the queries' matrix was drawn from, by its spread and its largest entry."""
    n_heads, d_model, d_head = queries.shape
    spread = (queries.std() * d_model**0.5).item()
    largest = (queries.abs().max() * d_model**0.5).item()
    if largest <= 1:
        assert math.isclose(spread, 3**-0.5, rel_tol=0.1)
        return "torch's own"
    if largest <= 2.3:
        assert math.isclose(spread, 1, rel_tol=0.1)
        return "lecun normal"
    assert math.isclose(spread, (d_model / (d_model + n_heads * d_head)) ** 0.5, rel_tol=0.1)
    return "xavier and kaiming normal"


def compositional_facts(attn: Any, parameters: dict[str, Any]) -> dict[str, Any]:
    """Facts about the retrievals and their selection."""
    has_keys = "W_value_key" in parameters
    assert has_keys != ("W_score" in parameters)
    return {
        "model.n_retrievals": attn.W_V.shape[0],
        "model.d_selection": attn.W_value_query.shape[2],
        "model.scorer": "dot" if has_keys else "mlp",
        "model.separate_value_keys": has_keys and attn.W_value_key.ndim == 3,
        "model.selection": attn.config.selection,
    }


@functools.cache
def patch_facts(setup: Any) -> dict[str, Any]:
    """Facts about a `PatchTransformer`."""
    n_classes = (10, 10, 10, 2) if isinstance(setup, ImagesSetup) else None
    with patch.object(ImagesSetup, "sampler", lambda _: SimpleNamespace(n_classes=n_classes)):
        model = setup.build(torch.Generator().manual_seed(0))
    config = model.config
    assert model.core is not None
    facts = {
        "model.patch_size": config.patch_size,
        "model.patch_embedding": "linear" if model.W_E2 is None else "mlp",
        "model.positions": positions_of(model),
        "model.final_norm": model.ln_final is not None,
        "model.dropout.embedding": config.dropout,
        "task.image_size": config.image_size,
        "task.n_channels": config.n_channels,
    }
    if isinstance(setup, ImagesSetup):
        facts |= {"model.d_readout": len(model.b_hidden), "model.task_tokens": len(model.cls)}
    elif isinstance(setup, SortOfClevrSetup):
        assert model.W_condition.shape[1] == model.W_E.shape[1] == config.d_model / 2
        facts |= {"model.question": "beside every token", "task.d_question": len(model.W_condition)}
        facts["model.readout"] = "linear" if model.W_hidden is None else "mlp"
    else:
        facts["model.readout"] = {2: "two logits"}[model.b_U.shape[1]]
    facts["model.initialisation"] = initialisation_of(model.core.attn.W_Q.detach())
    return facts | block_facts(model.core, n_layers=len(model.blocks), shared=True)


def positions_of(model: Any) -> str:
    """The position encoding of the patches, as the difference that they make."""
    config = model.config
    image = torch.zeros(1, config.n_channels, config.image_size, config.image_size)
    inputs = [image]
    if config.d_condition is not None:
        inputs.append(torch.zeros(1, config.d_condition))
    elif isinstance(config.d_output, tuple):
        inputs.append(torch.zeros(1, dtype=torch.long))
    with torch.no_grad():
        _, cache = model.run_with_cache(*inputs)
        # A condition's and the patches' shares are the same for all patches.
        embedded = cache["hook_embed"][0, : config.n_patches]
        waves = fast_sinusoids(config.n_patches, config.d_token)
        if config.beside:
            waves = waves @ model.W_join[: config.d_token]
    agrees = torch.allclose(embedded - embedded[:1], waves - waves[:1], atol=1e-4)
    return "fast_sinusoidal" if agrees else config.positions


@functools.cache
def relation_facts(setup: EsbnSetup) -> dict[str, Any]:
    """Facts about a `RelationClassifier`."""
    model = setup.build(torch.Generator().manual_seed(0))
    pair = torch.tensor([[[0.0], [1.0]]]).expand(1, 2, model.config.d_model)
    spread = (model.normalization(pair)[0, 1, 0]).item()
    windows = model.config.windows or (setup.sampler().n_images,)
    images = torch.rand(1, sum(windows), 1, 32, 32, generator=torch.Generator().manual_seed(0))
    _, cache = model.run_with_cache(images)
    assert (cache["hook_encoded"] >= 0).all()
    added = (cache["hook_embed"] - cache["hook_normalized"])[0]
    waves = interleaved_sinusoids(0, sum(windows), model.config.d_model)
    facts = {
        "model.windows": tuple(windows),
        # The standard deviation of 0 and 1 is 1/2, or sqrt(1/2) if it is unbiased.
        "model.context_variance": "unbiased"
        if math.isclose(spread, 0.5**0.5, rel_tol=1e-4)
        else "",
        "model.n_convolutions": len(model.encoder.W_conv),
        "model.n_filters": len(model.encoder.W_conv[0]),
        "model.d_readout": len(model.b_hidden),
        "model.positions": "sinusoidal" if torch.allclose(added, waves, atol=1e-5) else "other",
        "model.final_norm": hasattr(model, "ln_final"),
        "model.dropout.embedding": 0.0,
        "model.initialisation": initialisation_of(model.blocks[0].attn.W_Q.detach()),
    }
    assert model.core is None
    return facts | block_facts(model.blocks[0], n_layers=len(model.blocks), shared=False)


@functools.cache
def encoder_decoder_facts(setup: ScanSetup) -> dict[str, Any]:
    """Facts about an `EncoderDecoder`, whose decoder is like its encoder."""
    model = setup.build(torch.Generator().manual_seed(0))
    sides = [
        block_facts(core, n_layers=len(blocks), shared=True)
        for core, blocks in (
            (model.encoder_core, model.encoder_blocks),
            (model.decoder_core, model.decoder_blocks),
        )
    ]
    assert sides[0] == sides[1]
    assert model.decoder_core.cross_attn.config == model.decoder_core.attn.config
    names = {name for name, _ in model.named_parameters()}
    return sides[0] | {
        "model.positions": "sinusoidal",
        "model.final_norm": any(name.startswith("ln_") for name in names),
        "model.marks": model.W_E.shape[0] == len(tasks.SCAN_WORDS) + 2,
        "model.tied": "W_U" not in names,
        "model.initialisation": "xavier uniform" if is_drawn_as(scan, model) else "other",
        "model.dropout.attention_shared": drops_shared_pairs(model.encoder_core.attn.config),
        "model.dropout.embedding": model.config.dropout,
    }


@functools.cache
def language_model_facts(setup: TextPairingSetup) -> dict[str, Any]:
    """Facts about a language model, without reading the text."""
    sampler = SimpleNamespace(vocabulary_size=setup.task.vocabulary_size)
    few_words = SimpleNamespace(vocabulary_size=1000)
    with patch.object(TextPairingSetup, "sampler", lambda _: sampler), torch.device("meta"):
        model = setup.build(torch.Generator())
    with patch.object(TextPairingSetup, "sampler", lambda _: few_words):
        is_drawn = is_drawn_as(fairseq, setup.build(torch.Generator().manual_seed(0)))
    assert model.core is not None
    assert model.ln_final.eps == 1e-5
    n_parameters = sum(parameter.numel() for parameter in model.parameters())
    return block_facts(model.core, n_layers=len(model.blocks), shared=True) | {
        "model.positions": model.config.positions,
        "model.scaled": model.config.scaled,
        "model.tied": model.unembed is None,
        "model.final_norm": True,
        "model.dropout.embedding": model.config.dropout,
        "model.initialisation": "xavier uniform in attention" if is_drawn else "other",
        "model.parameters_in_millions": round(n_parameters / 1e6),
    }


# Tasks


@functools.cache
def questions_facts(config: tasks.SortOfClevrConfig) -> dict[str, Any]:
    """Facts about Sort-of-CLEVR, from the test set and from a smaller training set."""
    task = tasks.SortOfClevr(replace(config, n_train=64))
    test = task.batch("test", 0, task.size("test"))
    types, images = test.latents["question_type"], test.latents["image"]
    (per_type,) = {
        int(((types == kind) & (images == image)).sum()) for kind in range(3) for image in range(9)
    }
    of_batch = {
        len(task.batch("train", index, 9).latents["question_type"].unique()) for index in range(6)
    }
    yellow = tasks.SORT_OF_CLEVR_COLOURS.index("yellow")
    return {
        "task.n_objects": test.latents["shapes"].shape[1],
        "task.n_questions_of_a_type": per_type,
        "task.n_relational_questions": 2 * per_type,
        "task.n_answers": len(tasks.SORT_OF_CLEVR_ANSWERS),
        "task.omit_yellow": not (test.latents["colours"][types == 2] == yellow).any(),
        "task.by_type": of_batch == {1},
    }


def sort_of_clevr_facts(setup: SortOfClevrSetup) -> dict[str, Any]:
    """Facts about the task and the model of a Sort-of-CLEVR setup."""
    same = without_training(setup)
    sizes = {f"task.n_{split}": setup.task.size(split) for split in ("train", "valid", "test")}
    by_type = {"training.checkpoint_for_each_question_type": False}
    return patch_facts(same) | questions_facts(setup.task) | sizes | by_type


@functools.cache
def triangle_facts(config: tasks.TrianglesConfig) -> dict[str, Any]:
    """Facts about triangles, from the test set's size and a few of its images."""
    task = tasks.Triangles(replace(config, n_train=2, n_valid=2, n_test=100))
    batch = task.batch("test", 0, 100)
    points = batch.latents["points"]
    radius = (points - batch.latents["corners"][:, :, None]).abs().max().item()
    n_points = points.shape[2]
    assert (batch.inputs.sum((1, 2, 3)) == 3 * n_points).all()
    return {
        "task.n_clusters": points.shape[1],
        "task.points_per_cluster": n_points,
        "task.cluster_radius": radius,
        "task.point_drawn_as": "pixel",
        "task.share_equilateral": batch.latents["equilateral"].float().mean().item(),
        "task.drawn_anew_each_epoch": False,
        "task.chance": task.chance,
    }


def triangles_facts(setup: TrianglesSetup) -> dict[str, Any]:
    """Facts about the task and the model of a triangles setup."""
    sizes = {f"task.n_{split}": setup.task.size(split) for split in ("train", "valid", "test")}
    return patch_facts(without_training(setup)) | triangle_facts(setup.task) | sizes


def images_facts(setup: ImagesSetup) -> dict[str, Any]:
    """Facts about the task and the model of an images setup, without the stored images."""
    return patch_facts(without_training(setup)) | {
        "task.n_valid": setup.task.n_valid,
        "task.triangles_image_size": setup.task.triangles.image_size,
        "task.augmented": setup.task.augmented,
        "training.loss": "mean over the images",
    }


def esbn_facts(setup: EsbnSetup) -> dict[str, Any]:
    """Facts about the task and the model of an ESBN setup."""
    task = setup.sampler()
    problems = task.batch("id", 0, 64).latents["objects"]
    return relation_facts(without_training(setup)) | {
        "task.rule": setup.task.rule,
        "task.n_withheld": len(task.objects("ood")) if "ood" in task.splits else 0,
        "task.n_objects": len(task.pictures),
        "task.image_size": task.pictures.shape[-1],
        "task.n_images": task.n_images,
        "task.n_objects_of_a_problem": max(len(row.unique()) for row in problems),
        "task.n_answers": task.n_answers,
        "task.chance": task.chance,
    }


def scan_facts(setup: ScanSetup) -> dict[str, Any]:
    """Facts about the task and the model of a SCAN setup."""
    task = setup.sampler()
    sizes = {split: task.size(split) for split in task.splits}
    longest = task.batch("ood", 0, sizes["ood"]).latents["length"].max().item()
    shortest = task.batch("ood", 0, sizes["ood"]).latents["length"].min().item()
    n_known = sizes["train"] + sizes["id"]
    known = task.batch("train", 0, sizes["train"]).latents["length"].max().item()
    assert known <= setup.task.cutoff < shortest
    return encoder_decoder_facts(without_training(setup)) | {
        "task.split": setup.task.split,
        "task.cutoff": setup.task.cutoff,
        "task.n_commands": n_known + sizes["ood"],
        "task.id_share": round(sizes["id"] / n_known, 3),
        "task.max_actions": longest,
    }


def text_facts(setup: TextPairingSetup) -> dict[str, Any]:
    """Facts about the task and the model of a language model's setup."""
    facts = {f"task.{name}": getattr(setup.task, name) for name in ("tokens", "length", "context")}
    return language_model_facts(without_training(setup)) | facts
