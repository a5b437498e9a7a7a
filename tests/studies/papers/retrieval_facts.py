"""Facts about contextual retrieval setups, see `facts`."""

import functools
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear

from mechanisms import CompositionalAttention
from studies.setups.retrieval import RetrievalSetup
from tasks import ContextualRetrieval, ContextualRetrievalConfig
from tests.studies.papers.transformer_facts import normalised


@functools.cache
def task_facts(config: ContextualRetrievalConfig) -> dict[str, Any]:
    """Facts about a task that follow from the task itself."""
    task = ContextualRetrieval(config)
    combinations = {split: set(map(tuple, task.combinations(split))) for split in task.splits}
    assert combinations["all"] == combinations["id"] | combinations["ood"]
    inputs = task.batch("train", 0, 2000).inputs
    searches, retrievals = config.n_searches, config.n_retrievals
    drawn = inputs[..., : searches + retrievals]
    trained = [split for split in ("id", "all") if combinations["train"] == combinations[split]]
    is_normal = drawn.mean().abs() < 0.02 and (drawn.var() - 1).abs() < 0.03
    ood = [",".join(map(str, combination)) for combination in sorted(combinations["ood"])]
    return {
        "task.n_searches": searches,
        "task.n_retrievals": retrievals,
        "task.n_objects": inputs.shape[1],
        "task.n_features": inputs.shape[2],
        "task.features": "N(0, 1)" if is_normal else "other",
        "task.coefficients": " ".join(map(str, task.coefficients)),
        "task.n_combinations": len(combinations["all"]),
        "task.n_ood_combinations": len(combinations["ood"]),
        "task.ood_combinations": " ".join(ood),
        "task.train_combinations": {"id": "familiar", "all": "all"}[trained[0]],
    }


def is_torchs_own(model: nn.Module) -> bool:
    """Whether weights and biases are drawn as those of torch's linear layers are."""
    parameters = dict(model.named_parameters())
    for name, weight in parameters.items():
        if not name.rpartition(".")[2].startswith("W_"):
            continue
        fan_in = weight[..., 0].numel() if name.endswith("W_O") else weight.shape[-2]
        bias = parameters.get("b_".join(name.rsplit("W_", 1)))
        spread = weight.std().item() * (3 * fan_in) ** 0.5
        if weight.abs().max() > fan_in**-0.5 or not 0.7 < spread < 1.3:
            return False
        if bias is None or not bias.any() or bias.abs().max() > fan_in**-0.5:
            return False
    return True


@functools.cache
def model_facts(setup: RetrievalSetup) -> dict[str, Any]:
    """Facts about the model of a normalised setup: its parameters, and what it computes."""
    model = setup.build(torch.Generator().manual_seed(0))
    attn, config = model.blocks[0].attn, model.blocks[0].attn.config
    inputs = setup.sampler().batch("train", 0, 4).inputs
    with torch.no_grad():
        output, cache = model.run_with_cache(inputs)
        encoded = linear(linear(inputs, model.W_in.T, model.b_in).relu(), model.W_E.T, model.b_E)
        attended = cache["blocks.0.hook_attn_out"]
        decoded = linear(attended, model.W_hidden.T, model.b_hidden).relu() @ model.W_U
        cut = [("blocks.0.hook_attn_out", lambda value, hook: 0 * value)]
        without = model.run_with_hooks(inputs, fwd_hooks=cut)
        turned = model(inputs.flip(1)).flip(1)
    pattern = cache["blocks.0.attn.hook_pattern"]
    is_encoder = torch.allclose(cache["hook_embed"], encoded, atol=1e-5)
    is_decoder = torch.allclose(output, decoded + model.b_U, atol=1e-5)
    norms = [part for part in model.modules() if isinstance(part, nn.LayerNorm | nn.RMSNorm)]
    biases = ("b_Q", "b_K", "b_V", "b_O", "b_own", "b_value_query", "b_value_key")
    shape = "linear, relu, linear"
    assert model.W_in.shape[1] == model.W_hidden.shape[1]
    facts = {
        "model.attention": "multi_head",
        "model.n_layers": len(model.blocks),
        "model.d_model": model.W_E.shape[1],
        "model.d_mlp": model.W_in.shape[1],
        "model.d_output": model.W_U.shape[1],
        "model.n_heads": attn.W_Q.shape[0],
        "model.d_head": attn.W_Q.shape[2],
        "model.d_value": attn.W_V.shape[2],
        "model.own_value": attn.W_own is not None,
        "model.own_value_width": None if attn.W_own is None else attn.W_own.shape[1],
        "model.attention_biases": all(getattr(attn, name, True) is not None for name in biases),
        "model.dropout": config.dropout,
        "model.residual": (without - without[:1, :1]).abs().max().item() > 1e-6,
        "model.norm": "layer_norm" if norms else "none",
        "model.masked_diagonal": not pattern.diagonal(dim1=-2, dim2=-1).any(),
        "model.positions": "none" if torch.allclose(output, turned, atol=1e-5) else "some",
        "model.encoder": shape if is_encoder else "other",
        "model.decoder": shape if is_decoder else "other",
        "model.initialisation": "torch's own" if is_torchs_own(model) else "other",
        "model.n_parameters": sum(parameter.numel() for parameter in model.parameters()),
    }
    if not isinstance(attn, CompositionalAttention):
        return facts
    return facts | {
        "model.attention": "compositional",
        "model.n_searches": attn.W_Q.shape[0],
        "model.n_retrievals": attn.W_V.shape[0],
        "model.d_selection": attn.W_value_query.shape[2],
        "model.scorer": config.scorer,
        "model.selection": config.selection,
        "model.value_key_shared_by_retrievals": attn.W_value_key.ndim == 2,
    }


@functools.cache
def loss_fact(setup: RetrievalSetup) -> str:
    """The name of the loss."""
    batch = setup.sampler().batch("train", 0, 4)
    model = setup.build(torch.Generator().manual_seed(0))
    error = (model(batch.inputs)[..., 0] - batch.targets).abs().mean()
    return "L1" if torch.allclose(setup.loss(model, batch, 0), error) else "other"


def retrieval_facts(setup: RetrievalSetup) -> dict[str, Any]:
    """Facts about the task, the model and the loss of a contextual retrieval setup."""
    same = normalised(setup)
    same = replace(same, task=replace(setup.task, trained_on="familiar"))
    return (
        task_facts(setup.task)
        | model_facts(same)
        | {
            "training.loss": loss_fact(same),
            "training.optimizer": "Adam" if setup.training.weight_decay == 0 else "AdamW",
        }
    )
