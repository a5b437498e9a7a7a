"""Facts about the quasi-attention setups, see `facts`."""

import functools
import json
import tempfile
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

import mechanisms
from mechanisms.models.decomposable_attention import Linear, TwoLayers
from studies.engine.optimizers import make_optimizers
from studies.setups.encoder_decoder import EncoderDecoderSetup
from studies.setups.mlu import MluSetup
from studies.setups.pair_reader import PairReaderSetup
from studies.setups.quasi_attention import QuasiSetup
from studies.setups.quasi_transformer import QuasiTransformerSetup
from studies.setups.question_answering import FactQuestionsSetup, ReaderSetup
from studies.setups.stored_texts import StoredPairsSetup, StoredTextSetup
from tasks import (
    MLU,
    MLU_OPERATORS,
    ClassificationConfig,
    FactQuestionsConfig,
    MLULines,
    MLULinesConfig,
    PairsConfig,
)
from tests.mechanisms.initial_weights import is_drawn_as, tensor2tensor
from tests.studies.papers.transformer_facts import drops_shared_pairs, normalised


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
def encoder_decoder_facts(setup: EncoderDecoderSetup) -> dict[str, Any]:
    """Facts about an encoder-decoder: its config, its parameters, its loss and its optimizer."""
    model = setup.build(torch.Generator().manual_seed(0))
    assert isinstance(model, mechanisms.EncoderDecoder)
    encoder, decoder, config = model.encoder_blocks, model.decoder_blocks, model.config
    assert len(encoder) == len(decoder)
    block: Any = encoder[0] if model.encoder_core is None else model.encoder_core
    steps = step_facts(model)
    steps |= {"training.ponder_weight": ponder_weight_of(setup, config.d_output)}
    names = {name for name, _ in model.named_parameters()}
    biases = {name for name in names if name.rpartition(".")[2] in ("b_Q", "b_K", "b_V", "b_O")}
    tables = {name for name in ("W_E", "W_E_target", "W_U") if name in names}
    return (
        quasi_facts(setup, block.attn)
        | optimizer_facts(setup, model)
        | steps
        | {
            "model.d_model": model.W_E.shape[1],
            "model.d_mlp": block.mlp.W_in.shape[1],
            "model.n_heads": block.attn.W_Q.shape[0],
            "model.d_head": block.attn.W_Q.shape[2],
            "model.activation": block.mlp.config.activation,
            "model.post_norm": block.post_norm,
            "model.norm_epsilon": block.ln1.eps,
            "model.dropout.residual": block.dropout,
            "model.dropout.attention": block.attn.config.dropout,
            "model.dropout.mlp": block.mlp.config.dropout,
            "model.label_smoothing": smoothing_of(setup, config.d_output),
            "model.dropout.attention_shared": drops_shared_pairs(block.attn.config),
            "model.initialisation": (
                "uniform_unit_scaling" if is_drawn_as(tensor2tensor, model) else "other"
            ),
            "model.one_embedding": tables == {"W_E"} and config.one_embedding,
            "model.attention_biases": bool(biases),
        }
    )


def step_facts(model: mechanisms.EncoderDecoder) -> dict[str, Any]:
    """Facts about layers, or steps with shared weights; removes all parameters of steps alone."""
    signals, cores = (model.encoder_signals, model.decoder_signals), (model.encoder_core,)
    cores += (model.decoder_core,)
    n_steps, shared = len(model.encoder_blocks), all(cores)
    facts: dict[str, Any] = {"model.shared_layers": shared, "model.halting": "none"}
    facts["model.n_steps" if shared else "model.n_layers"] = n_steps
    facts["model.positions"] = position_facts(model)
    tables = [signal.table for signal in signals]
    facts["model.step_signal"] = "none"
    if all(table is not None and len(table) == n_steps for table in tables):
        facts["model.step_signal"] = "learned"
        for signal in signals:
            signal.table = None
    if model.config.halting is not None:
        encoder, decoder = (cast(Any, core).halt for core in cores)
        assert encoder.config == decoder.config
        assert torch.equal(encoder.b, decoder.b)
        facts["model.halting"] = encoder.config.rule
        facts["model.halting_epsilon"] = encoder.config.epsilon
        facts["model.halting_bias"] = encoder.b.item()
        for core in cores:
            del cast(Any, core).halt
    return facts


@torch.no_grad()
def position_facts(model: mechanisms.EncoderDecoder) -> str:
    """Where positions are added, from the difference of two equal tokens."""
    tokens = torch.full((1, 2), 5)
    _, cache = model.eval().run_with_cache(tokens, tokens)
    expected = mechanisms.sinusoidal_embedding(2, model.config.d_model).diff(dim=0)
    in_embedding, in_step = (
        torch.allclose(cache[name][0].diff(dim=0), expected, atol=1e-5)
        for name in ("hook_embed", "encoder_blocks.0.hook_resid_pre")
    )
    if in_embedding:
        return "sinusoidal"
    return "sinusoidal, before each step" if in_step else "other"


def ponder_weight_of(setup: EncoderDecoderSetup, n_classes: int) -> float:
    """By how much the loss grows if all columns of encoder or decoder cost 1 more."""
    batch = setup.sampler().batch("train", 0, 2)
    losses = []
    for extra in (0.0, 1.0):
        costs = tuple(torch.full(tokens.shape, extra) for tokens in batch.inputs)
        logits = torch.zeros(*batch.targets.shape, n_classes)
        losses.append(setup.loss(answering(logits, costs), batch, 0).item())
    return round((losses[1] - losses[0]) / 2, 4)


def answering(logits: torch.Tensor, costs: tuple[torch.Tensor, ...]) -> nn.Module:
    """A model that always gives these logits and ponder costs."""
    model: Any = nn.Module()
    model.forward = lambda *_: logits
    model.forward_with_cost = lambda *_: (logits, costs)
    return model


def smoothing_of(setup: QuasiTransformerSetup, n_classes: int) -> float:
    """The probability that the loss expects of wrong answers, from its gradient at logits 0."""
    batch = setup.sampler().batch("train", 0, 2)
    has_costs = isinstance(setup, EncoderDecoderSetup)
    logits = torch.zeros(*batch.targets.shape, n_classes, requires_grad=True)
    costs = tuple(torch.zeros(tokens.shape) for tokens in batch.inputs) if has_costs else ()
    setup.loss(answering(logits, costs), batch, 0).backward()
    assert logits.grad is not None
    # softmax - expected probability, for each of the targets that count.
    at_target = logits.grad.gather(-1, batch.targets[..., None])[..., 0][batch.mask]
    expected = 1 / n_classes - at_target * batch.mask.sum()
    return round(1 - expected[0].item(), 4)


def pairs_facts(setup: PairReaderSetup) -> dict[str, Any]:
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


TRAINING_PAIRS = {
    # Bowman et al. 2015 (with a label); Williams et al. 2018; Khot et al. 2018; Welleck et al. 2019
    **{"snli": 549_367, "mnli": 392_702, "scitail": 23_596, "dnli": 310_110},
    # Wang et al. 2007 (train-all); Yang et al. 2015; Lowe et al. 2015
    **{"trecqa": 53_417, "wikiqa": 20_360, "ubuntu": 1_000_000},
}
"""Numbers of training pairs of published data sets."""


@functools.cache
def small_texts(n_texts: int) -> dict[str, Any]:
    """Settings of a small data set of one or two texts and two labels; models depend on no more."""
    folder = tempfile.mkdtemp()
    names = ("a", "b")[:n_texts]
    for split in ("train", "dev", "test"):
        rows = [{**dict.fromkeys(names, "yes no"), "label": label} for label in ("0", "1")]
        text = "\n".join(map(json.dumps, rows))
        Path(folder, f"{split}.jsonl").write_text(text)
    return {
        "name": "own",
        "path": folder,
        "columns": (*names, "label"),
        "labels": ("0", "1"),
        "n_valid": 1,
        "min_count": 1,
    }


def stored_pairs_facts(setup: StoredPairsSetup) -> dict[str, Any]:
    """Facts about decomposable attention on published pairs, and its passes over them."""
    settings = small_texts(2)
    task = PairsConfig(**{name: of for name, of in settings.items() if name != "n_valid"})
    training = setup.training
    epochs = training.n_steps * training.batch_size / TRAINING_PAIRS[setup.task.name]
    # The last pass may be cut off within a batch.
    return pairs_facts(replace(setup, task=task)) | {"training.epochs": round(epochs, 2)}


def stored_text_facts(setup: StoredTextSetup) -> dict[str, Any]:
    """Facts about a transformer on published texts."""
    tokens = setup.training.batch_size * setup.task.max_length
    same = replace(normalised(setup), training=setup.training)
    same = replace(same, task=ClassificationConfig(**small_texts(1)))
    return sequence_classifier_facts(same) | {
        "task.tokens": "words",
        "task.vocabulary_size": setup.task.vocabulary_size,
        # With the padding.
        "training.tokens_per_batch": tokens,
    }


@functools.cache
def sequence_classifier_facts(setup: StoredTextSetup) -> dict[str, Any]:
    """Facts about a classifier of sequences: its config, its parameters, its loss."""
    model = setup.build(torch.Generator().manual_seed(0))
    assert isinstance(model, mechanisms.SequenceClassifier)
    assert model.core is None
    block, config = cast(Any, model.blocks[0]), model.config
    names = {name.rpartition(".")[2] for name, _ in model.named_parameters()}
    return (
        quasi_facts(setup, block.attn)
        | optimizer_facts(setup, model)
        | {
            "model.n_layers": len(model.blocks),
            "model.d_model": model.W_E.shape[1],
            "model.d_mlp": block.mlp.W_in.shape[1],
            "model.n_heads": block.attn.W_Q.shape[0],
            "model.d_head": block.attn.W_Q.shape[2],
            "model.activation": block.mlp.config.activation,
            "model.norm_epsilon": block.ln1.eps,
            "model.positions": config.positions,
            "model.dropout.residual": block.dropout,
            "model.dropout.attention": block.attn.config.dropout,
            "model.dropout.attention_shared": drops_shared_pairs(block.attn.config),
            "model.dropout.mlp": block.mlp.config.dropout,
            "model.label_smoothing": smoothing_of(setup, len(setup.sampler().classes)),
            "model.initialisation": (
                "uniform_unit_scaling" if is_drawn_as(tensor2tensor, model) else "other"
            ),
            "model.attention_biases": bool(names & {"b_Q", "b_K", "b_V", "b_O"}),
        }
    )


def reader_facts(setup: ReaderSetup) -> dict[str, Any]:
    """Facts about DecaProp, built for a few words, since published data need not be there."""
    values = {f.name: getattr(setup, f.name) for f in fields(ReaderSetup)}
    setup = FactQuestionsSetup(**values, task=FactQuestionsConfig())
    model: Any = setup.build(torch.Generator())
    config, layer, connector = model.config, model.encoder[0].lstm, model.connectors[0][0]
    assert config.dropout == config.alignment.dropout
    facts = {
        "model.d_hidden": layer.hidden_size,
        "model.n_layers": len(model.encoder),
        "model.n_factors": connector.product.W_factors.shape[1],
        "model.d_embed": model.W_E.shape[1],
        # The inputs of the first layer are the embedding and two features of the word.
        "model.d_character": layer.input_size - model.W_E.shape[1] - 2 or "none",
        "model.dropout": config.dropout,
        "model.embedding": "learned" if model.W_E.requires_grad else "fixed",
    }
    return facts | composition_facts(connector.align.config.composition, shared=True)


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
    (adamw,) = make_optimizers(dict(model.named_parameters()), setup.training)
    group = adamw.param_groups[0]
    return {"training.beta1": group["betas"][0], "training.epsilon": group["eps"]}
