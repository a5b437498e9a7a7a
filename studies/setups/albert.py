"""ALBERT of transformers as a looped transformer over the columns of an expression."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint
from transformers import AlbertConfig, AlbertModel, AttentionInterface

import mechanisms
from mechanisms.layers.depth import SteppedModel

HOOKED = "modscope_hooked"
"""The name of `hooked_attention` among the attention functions of transformers."""
MOST_COLUMNS = 64
"""Columns that have a position; ALBERT learns one vector for each."""


class Albert(SteppedModel):
    """ALBERT, one layer of which is applied at every step; read out at a mark.

    The layer and the embeddings are those of transformers. Hook points have the names of
    `mechanisms.NeuralDataRouter`: `blocks.{t}.hook_resid_pre`, `blocks.{t}.attn.hook_pattern` and
    `blocks.{t}.hook_resid_post`; edits of attention change what the layer reads.

    Args:
        n_tokens: number of token ids, without BOS and EOS.
        n_answers: number of classes.
        n_steps: steps without `n_steps` in a call.
        readout: the mark that is read out, `first` or `last`.
        generator: random generator of the initial weights.
        sizes: further arguments of `transformers.AlbertConfig`.

    Source: Lan et al. 2020, "ALBERT: A Lite BERT for Self-supervised Learning of Language
    Representations", https://arxiv.org/abs/1909.11942.
    """

    def __init__(
        self,
        n_tokens: int,
        n_answers: int,
        *,
        n_steps: int,
        readout: str,
        generator: torch.Generator,
        **sizes: Any,
    ):
        super().__init__(n_steps, shared=True)
        AttentionInterface.register(HOOKED, hooked_attention)
        self.n_tokens, self.readout = n_tokens, readout
        config = AlbertConfig(
            vocab_size=n_tokens + 2,
            max_position_embeddings=MOST_COLUMNS,
            num_hidden_layers=n_steps,
            **cast(Any, {"attn_implementation": HOOKED}),
            **sizes,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(torch.randint(2**31, (), generator=generator).item())
            self.albert = AlbertModel(config, add_pooling_layer=False)
            self.unembed = nn.Linear(config.hidden_size, n_answers)
        self.blocks = nn.ModuleList(_Points() for _ in range(n_steps))
        self.setup()

    def _stacks(self) -> Sequence[nn.ModuleList]:
        return (self.blocks,)

    def forward(
        self, tokens: Int[Tensor, "batch pos"], *, n_steps: int | None = None
    ) -> Float[Tensor, "batch 1 n_answers"]:
        """The logits of each sequence; arguments as for `NeuralDataRouter`.

        Raises:
            ValueError: with both marks a sequence has more than `MOST_COLUMNS`.
        """
        n_steps = self._prepare_steps(n_steps)
        ids, mask, end = mechanisms.enclose(tokens, self.n_tokens)
        if ids.shape[1] > MOST_COLUMNS:
            most = MOST_COLUMNS - 2
            raise ValueError(f"tokens must have at most {most} pos, got {tokens.shape[1]}")
        encoder = cast(Any, self.albert.encoder)
        (layer,) = encoder.albert_layer_groups[0].albert_layers
        h = encoder.embedding_hidden_mapping_in(self.albert.embeddings(ids))
        for points in cast(Any, self.blocks[:n_steps]):
            h = points.hook_resid_pre(h)
            h = points.hook_resid_post(
                layer(h, mask[:, None, None, :], hook_pattern=points.attn.hook_pattern)
            )
        column = h[:, 0] if self.readout == "first" else h[torch.arange(len(h)), end]
        return self.unembed(column)[:, None]


class _Points(nn.Module):
    """The hook points of one step."""

    def __init__(self):
        super().__init__()
        self.hook_resid_pre, self.hook_resid_post = HookPoint(), HookPoint()
        self.attn = nn.Module()
        self.attn.hook_pattern = HookPoint()


def hooked_attention(
    module: nn.Module,
    query: Float[Tensor, "batch head query_pos d_head"],
    key: Float[Tensor, "batch head key_pos d_head"],
    value: Float[Tensor, "batch head key_pos d_head"],
    attention_mask: Tensor | None,
    *,
    scaling: float,
    dropout: float = 0.0,
    hook_pattern: HookPoint,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """An attention function of transformers whose pattern passes a hook point."""
    scores = query @ key.mT * scaling
    if attention_mask is not None:
        scores = scores.masked_fill(~attention_mask, -torch.inf)
    pattern = hook_pattern(scores.softmax(-1))
    mixed = nn.functional.dropout(pattern, dropout, module.training) @ value
    return mixed.transpose(1, 2), pattern
