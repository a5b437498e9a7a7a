"""Facts about the quasi-attention setups, see `facts`."""

import functools
from dataclasses import replace
from typing import Any

import torch
from torch import nn

import mechanisms
from mechanisms.models.decomposable_attention import Linear, TwoLayers
from studies.engine.training import _optimizer
from studies.setups.mlu import MluSetup
from studies.setups.quasi_attention import QuasiSetup
from studies.setups.signed_pairs import SignedPairsSetup
from tasks import MLU, MLU_CHARACTERS, MLU_OPERATORS, MLULines, MLULinesConfig
from tests.studies.papers.transformer_facts import normalised


def mlu_facts(setup: MluSetup) -> dict[str, Any]:
    """Facts about lines of arithmetic and the encoder-decoder that answers them."""
    same = replace(normalised(setup), training=setup.training)
    lines = dict(line_facts(setup.task))
    width = lines.pop("width")
    tokens = setup.training.batch_size * width
    # As many lines as 4,096 tokens hold.
    lines["training.tokens_per_batch"] = 4096 if tokens <= 4096 < tokens + width else tokens
    return lines | encoder_decoder_facts(same)


@functools.cache
def line_facts(config: Any) -> dict[str, Any]:
    """Facts about the lines, from a large batch of training lines."""
    is_fixed = isinstance(config, MLULinesConfig)
    task = MLULines(config) if is_fixed else MLU(config)
    batch = task.batch("train", 0, 50_000)
    numbers = torch.stack([batch.latents["x"], batch.latents["y"]])
    # A line is right if all of it is.
    one_off = batch.targets.clone()
    one_off[:, 0] += 1
    wrong = task.score(one_off, batch)["correct"]
    return {
        "width": batch.inputs[0].shape[1],
        "task.n_lines": config.n_lines if is_fixed else "endless",
        "task.numbers": (numbers.min().item(), numbers.max().item()),
        "task.operators": " ".join(
            MLU_OPERATORS[index] for index in batch.latents["operator"].unique().tolist()
        ),
        "task.test_share": config.n_test / config.n_lines if is_fixed else config.ood_share,
        "task.split": "random" if is_fixed else "by pairs of numbers",
        "task.correct_if": "other" if wrong.any() else "the whole sequence is right",
    }


@functools.cache
def encoder_decoder_facts(setup: MluSetup) -> dict[str, Any]:
    """Facts about an encoder-decoder: its config, its parameters, its loss and its optimizer."""
    with torch.device("meta"):
        model = setup.build(torch.Generator())
    assert isinstance(model, mechanisms.EncoderDecoder)
    encoder, decoder, config = model.encoder_blocks, model.decoder_blocks, model.config
    assert len(encoder) == len(decoder)
    block: Any = encoder[0]
    names = {name for name, _ in model.named_parameters()}
    biases = {name for name in names if name.rpartition(".")[2] in ("b_Q", "b_K", "b_V", "b_O")}
    tables = {name for name in ("W_E", "W_E_target", "W_U") if name in names}
    return (
        quasi_facts(setup, block.attn)
        | optimizer_facts(setup, model)
        | {
            "model.n_layers": len(encoder),
            "model.d_model": model.W_E.shape[1],
            "model.d_mlp": block.mlp.W_in.shape[1],
            "model.n_heads": block.attn.W_Q.shape[0],
            "model.d_head": block.attn.W_Q.shape[2],
            "model.activation": block.mlp.config.activation,
            "model.post_norm": block.post_norm,
            "model.norm_epsilon": block.ln1.eps,
            "model.positions": "sinusoidal",
            "model.dropout.residual": block.dropout,
            "model.dropout.attention": block.attn.config.dropout,
            "model.dropout.mlp": block.mlp.config.dropout,
            "model.label_smoothing": smoothing_of(setup),
            "model.initialisation": "LeCun's normal",
            "model.one_embedding": tables == {"W_E"} and config.one_embedding,
            "model.attention_biases": bool(biases),
        }
    )


def smoothing_of(setup: MluSetup) -> float:
    """The probability that the loss expects of wrong characters, from its gradient at logits 0."""
    batch = setup.sampler().batch("train", 0, 2)
    n_classes = len(MLU_CHARACTERS)
    logits = torch.zeros(*batch.targets.shape, n_classes, requires_grad=True)
    model = nn.Module()
    model.forward = lambda *_: logits  # pyright: ignore[reportAttributeAccessIssue]
    setup.loss(model, batch, 0).backward()
    assert logits.grad is not None
    # softmax - expected probability, for each of the targets that count.
    at_target = logits.grad.gather(-1, batch.targets[..., None])[..., 0][batch.mask]
    expected = 1 / n_classes - at_target * batch.mask.sum()
    return round(1 - expected[0].item(), 4)


def pairs_facts(setup: SignedPairsSetup) -> dict[str, Any]:
    """Facts about decomposable attention with one matrix, or with heads."""
    with torch.device("meta"):
        model = setup.build(torch.Generator())
    assert isinstance(model, mechanisms.DecomposableAttention)
    facts = {"model.d_model": model.W_E.shape[1]}
    if setup.alignment == "networks":
        kinds = {Linear: "linear", TwoLayers: "two_layers"}
        facts["model.projection"] = kinds[type(model.attend)]  # pyright: ignore[reportArgumentType]
        composition, shared = model.config.composition, not hasattr(model, "attend_distance")
        return facts | composition_facts(composition, shared) | optimizer_facts(setup, model)
    return facts | quasi_facts(setup, model.align) | optimizer_facts(setup, model)


def quasi_facts(setup: QuasiSetup, attention: Any) -> dict[str, Any]:
    """Facts about an attention module."""
    if not isinstance(attention.config, mechanisms.CodaAttentionConfig):
        return {"model.mechanism": attention.config.normalization}
    shared = not hasattr(attention, "W_Q_distance")
    return composition_facts(attention.config.composition, shared)


def composition_facts(
    composition: mechanisms.QuasiAttentionConfig | None, shared: bool
) -> dict[str, Any]:
    """Facts about CoDA's composition; softmax attention has none."""
    if composition is None:
        return {"model.mechanism": "softmax"}
    names = "affinity gate affinity_centring gate_centring doubled alpha beta"
    facts = {f"model.{name}": getattr(composition, name) for name in names.split()}
    return facts | {"model.mechanism": "coda", "model.shared": shared}


def optimizer_facts(setup: QuasiSetup, model: nn.Module) -> dict[str, Any]:
    """Facts about the optimizer that training builds."""
    group = _optimizer(model, setup.training).param_groups[0]
    return {"training.beta1": group["betas"][0], "training.epsilon": group["eps"]}
