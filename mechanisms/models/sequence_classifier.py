"""A transformer over padded sequences of tokens, read out from the mean over their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import linear
from transformer_lens.hook_points import HookPoint

from mechanisms.attention.crossing import require_no_distances
from mechanisms.attention.positions import sinusoidal_embedding
from mechanisms.dropout import dropout
from mechanisms.initialization import lecun_normal, normal, zeros
from mechanisms.layers.depth import SteppedModel, stack_blocks
from mechanisms.models.initial_weights import redraw_as_tensor2tensor
from mechanisms.models.transformer import LAYER_NORM_EPSILON, Block, run_blocks
from mechanisms.protocols import AttentionProtocol, ComponentConfig
from mechanisms.sequences import rows_of_table
from mechanisms.validation import check_choice, check_dropout, check_positive, check_sizes

SequencePositions = Literal["sinusoidal", "none"]
SequenceInitialization = Literal["lecun_normal", "xavier_uniform"]


@dataclass(frozen=True, kw_only=True)
class SequenceClassifierConfig:
    """Configuration of a `SequenceClassifier`: sizes and components.

    Args:
        d_input: number of token ids.
        d_output: number of classes, or 1 for a ranking score.
        padding: id of padding; it need not be a token id, so -1 is allowed.
        d_model: width of the residual stream.
        n_layers: number of blocks, or of steps through the shared block.
        attention: config of the attention, for example `AttentionConfig`; with two sequences it
            must not measure distances or be rotary.
        feed_forward: config of the feed-forward layer, for example `FeedForwardConfig`.
        n_sequences: sequences of an example, 1 or 2.
        positions: position encoding, which starts anew in each sequence: `sinusoidal` or `none`.
        shared: whether all blocks have the same weights.
        norm_epsilon: epsilon of all LayerNorms.
        initialization: `lecun_normal`, with zero biases; or `xavier_uniform`, as in tensor2tensor
            (its `uniform_unit_scaling` with gain 1).
        dropout: dropout probability of the embedding and of what attention and feed-forward layer
            add to the stream.

    Raises:
        ValueError: a setting is not allowed.

    Example:
        >>> config = SequenceClassifierConfig(
        ...     d_input=10, d_output=2, padding=-1, d_model=16, n_layers=2,
        ...     attention=AttentionConfig(n_heads=4, d_head=4),
        ...     feed_forward=FeedForwardConfig(d_mlp=32),
        ... )
        >>> SequenceClassifier(config)(tokens).shape  # [batch, 1, d_output]
        torch.Size([40, 1, 2])
    """

    d_input: int
    d_output: int
    padding: int
    d_model: int
    n_layers: int
    attention: AttentionProtocol
    feed_forward: ComponentConfig
    n_sequences: int = 1
    positions: SequencePositions = "sinusoidal"
    shared: bool = False
    norm_epsilon: float = LAYER_NORM_EPSILON
    initialization: SequenceInitialization = "lecun_normal"
    dropout: float = 0.0

    def __post_init__(self):
        check_sizes(self, "d_input", "d_output", "d_model", "n_layers")
        if self.n_sequences not in (1, 2):
            raise ValueError(f"n_sequences must be 1 or 2, got {self.n_sequences!r}")
        if self.n_sequences == 2:
            require_no_distances("attention", self.attention)
        check_choice(self, "positions", SequencePositions)
        check_choice(self, "initialization", SequenceInitialization)
        check_positive(self, "norm_epsilon")
        check_dropout(self)


class SequenceClassifier(SteppedModel):
    """A pre-LN transformer over one or two token sequences, read out from the mean of its tokens.

    The encoder of Vaswani et al. 2017 with the LayerNorms before each part; the classifier of
    sentiment of Tay et al. 2019, section 3.5 (tensor2tensor). The tokens of both sequences stand in
    one row, and a vector for each sequence, `W_sequence` [sequence, d_model], is added to its
    embeddings. Padding is never attended to, nor does it count in the mean, so that wider padding
    does not change the logits; an example without tokens has those of the bias.

    Embeddings have unit scale: `W_E` [d_input, d_model] starts from N(0, 1 / d_model) and is
    multiplied by sqrt(d_model). Read-out: `W_U` [d_model, d_output], `b_U`.

    Hook points: `hook_embed` and `blocks.{i}.*`, [batch, pos, d_model], where positions are those
    of the first sequence, padding included, then those of the second one; `hook_pooled`
    [batch, 1, d_model], the mean. With shared weights these live in `core`, and `blocks[t]` only
    holds the hook points of step t.

    Args:
        config: the configuration.
        generator: random generator of the initial weights; None for torch's global generator.

    Example:
        >>> parts = {"attention": attention, "feed_forward": feed_forward, "n_layers": 2}
        >>> sizes = {"d_input": 10, "d_output": 2, "padding": -1, "d_model": 16}
        >>> model = SequenceClassifier(SequenceClassifierConfig(**parts, **sizes)).eval()
        >>> wider = torch.nn.functional.pad(tokens, (0, 3), value=-1)  # padding has no effect
        >>> torch.allclose(model(tokens), model(wider), atol=1e-5)
        True
    """

    def __init__(
        self, config: SequenceClassifierConfig, *, generator: torch.Generator | None = None
    ):
        super().__init__(config.n_layers, shared=config.shared)
        self.config = config
        d_model, std = config.d_model, config.d_model**-0.5
        self.W_E = normal(config.d_input, d_model, std=std, generator=generator)
        self.W_sequence = None
        if config.n_sequences > 1:
            self.W_sequence = normal(config.n_sequences, d_model, std=1.0, generator=generator)
        self.hook_embed, self.hook_pooled = HookPoint(), HookPoint()
        self.core, self.blocks = stack_blocks(
            lambda: Block(
                config,
                norm_epsilon=config.norm_epsilon,
                dropout=config.dropout,
                generator=generator,
            ),
            config.n_layers,
            shared=config.shared,
        )
        self.ln_final = nn.LayerNorm(d_model, eps=config.norm_epsilon)
        self.W_U = lecun_normal(d_model, config.d_output, fan_in=d_model, generator=generator)
        self.b_U = zeros(config.d_output)
        if config.initialization == "xavier_uniform":
            redraw_as_tensor2tensor(self, embedding_std=std, generator=generator)
        self.setup()

    def _stacks(self) -> Sequence[nn.ModuleList]:
        return (self.blocks,)

    def forward(
        self,
        *sequences: Int[Tensor, "batch _"],
        n_steps: int | None = None,
    ) -> Float[Tensor, "batch 1 d_output"]:
        """The logits of each example.

        Args:
            sequences: as many as `n_sequences`, each [batch, pos] with lengths of its own: ids in
                [0, d_input), or padding.
            n_steps: number of steps with shared weights; None for `n_layers`.

        Raises:
            ValueError: there are more or fewer sequences, or as for `set_steps` and
                `rows_of_table`.
        """
        config = self.config
        n_steps = self._prepare_steps(n_steps)
        if len(sequences) != config.n_sequences:
            raise ValueError(
                f"sequences must be {config.n_sequences}, as n_sequences says, got {len(sequences)}"
            )
        is_token = torch.cat(sequences, 1) != config.padding
        x = torch.cat([self._embed(tokens, i) for i, tokens in enumerate(sequences)], 1)
        x = self.hook_embed(dropout(x, config.dropout, self.training))
        x = run_blocks(x, self.core, self.blocks, n_steps, mask=is_token[:, None, None])
        state = self.ln_final(x).masked_fill(~is_token[..., None], 0.0)
        count = is_token.sum(1).clamp(min=1)[:, None, None]
        pooled = self.hook_pooled(state.sum(1, keepdim=True) / count)
        return linear(pooled, self.W_U.T, self.b_U)

    def _embed(
        self, tokens: Int[Tensor, "batch pos"], sequence: int
    ) -> Float[Tensor, "batch pos d_model"]:
        rows = rows_of_table(tokens, len(self.W_E), padding=self.config.padding)
        x = self.W_E[rows] * self.config.d_model**0.5
        if self.config.positions == "sinusoidal":
            x = x + sinusoidal_embedding(*x.shape[1:]).to(x)
        return x if self.W_sequence is None else x + self.W_sequence[sequence]
