"""The Neural Data Router and the transformers it is compared with: columns over steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import linear
from transformer_lens.hook_points import HookPoint

from mechanisms.attention.geometric import GeometricAttention, GeometricAttentionConfig
from mechanisms.attention.multi_head import AttentionConfig
from mechanisms.attention.positions import interleaved_sinusoids
from mechanisms.attention.relative import RelativeAttention, RelativeAttentionConfig
from mechanisms.dropout import dropout
from mechanisms.initialization import lecun_normal, zeros
from mechanisms.layers.copy_gate import CopyGate, CopyGateConfig
from mechanisms.layers.depth import SteppedModel, stack_blocks
from mechanisms.layers.feed_forward import FeedForwardConfig
from mechanisms.layers.halting import Halting, HaltingConfig, run_steps
from mechanisms.protocols import AttentionProtocol, ComponentConfig
from mechanisms.sequences import enclose
from mechanisms.validation import check_choice, check_dropout, check_sizes

RouterVariant = Literal[
    "transformer", "relative", "relative_gate", "abs_rel_gate", "geometric", "ndr"
]
Readout = Literal["first", "last"]
EmbeddingInit = Literal["normal", "kaiming_normal", "xavier_uniform"]
Initialization = Literal["lecun_normal", "csordas_2021"]

LAYER_NORM_EPSILON = 1e-5


@dataclass(frozen=True, kw_only=True)
class NeuralDataRouterConfig:
    """Configuration of a `NeuralDataRouter`: sizes, components and read-out.

    Args:
        d_input: number of token ids, without BOS and EOS.
        d_output: number of classes.
        d_model: width of a column's state.
        n_steps: number of times the shared block is applied.
        attention: config of the attention, for example `GeometricAttentionConfig`.
        feed_forward: config of the feed-forward layer, for example
            `FeedForwardConfig(activation="relu")`.
        gate: config of the copy gate; None for a residual connection and a LayerNorm.
        sinusoidal: whether sinusoidal positions (`interleaved_sinusoids`) are added to the
            embedding.
        readout: column whose last state gives the logits: `first` (BOS) or `last` (EOS).
        dropout: dropout probability of the attention output; without a gate also of the
            feed-forward output.
        embedding_dropout: dropout probability of the embedding with its positions.
        embedding_init: what embeddings are drawn from: N(0, 1), N(0, 2 / d_model)
            (`kaiming_normal`) or uniformly with the variance 2 / (token ids + d_model)
            (`xavier_uniform`).
        initialization: what the other weights are drawn from: N(0, 1 / fan in), biases 0; or as in
            the authors' code, see `initialize_as_published`.
        halting: config of adaptive computation time; None for `n_steps` steps of all columns.

    Raises:
        ValueError: a setting is not allowed; d_model is odd with sinusoidal positions; or the
            attention or feed-forward layer is none of the paper's with their initialisation.

    Example:
        >>> config = NeuralDataRouterConfig.named(
        ...     "ndr", d_input=10, d_output=3, d_model=16, d_mlp=32, n_heads=4, n_steps=6
        ... )
        >>> config.gate.width
        'vector'
    """

    d_input: int
    d_output: int
    d_model: int
    n_steps: int
    attention: AttentionProtocol
    feed_forward: ComponentConfig
    gate: CopyGateConfig | None = None
    sinusoidal: bool = False
    readout: Readout = "last"
    dropout: float = 0.0
    embedding_dropout: float = 0.0
    embedding_init: EmbeddingInit = "normal"
    initialization: Initialization = "lecun_normal"
    halting: HaltingConfig | None = None

    def __post_init__(self):
        check_sizes(self, "d_input", "d_output", "d_model", "n_steps")
        check_choice(self, "readout", Readout)
        check_choice(self, "embedding_init", EmbeddingInit)
        check_choice(self, "initialization", Initialization)
        check_dropout(self, "dropout", "embedding_dropout")
        if self.sinusoidal and self.d_model % 2:
            raise ValueError(f"d_model must be even for the sinusoids, got {self.d_model}")
        if self.initialization == "csordas_2021":
            check_published(self)

    @classmethod
    def named(
        cls,
        variant: RouterVariant,
        *,
        d_input: int,
        d_output: int,
        d_model: int,
        d_mlp: int,
        n_heads: int,
        n_steps: int,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        gate_dropout: float = 0.0,
        attention_dropout_of: Literal["queries", "keys"] = "queries",
    ) -> NeuralDataRouterConfig:
        """The config of a model that Csordás et al. 2021 compare, all with shared weights.

        - `transformer`: softmax attention, sinusoidal positions (a Universal Transformer);
        - `relative`: relative positions instead;
        - `relative_gate`: relative positions and the copy gate;
        - `abs_rel_gate`: the same with the abs/rel gate;
        - `geometric`: geometric attention, weights divided by their sum, without the copy gate;
        - `ndr`: geometric attention and the copy gate, the Neural Data Router.

        Weights start as in the authors' code, embeddings from N(0, 1), those of `relative` and
        `geometric` with `kaiming_normal` (on ListOps `relative` has `xavier_uniform` there).

        Args:
            dropout: of the attention output and the feed-forward layer's hidden units; without a
                gate of its output too, with one of the gate's hidden units too.
            attention_dropout: of the components of queries, as in the text, or of keys, as in the
                code; the attention of `transformer` has none. That has 0.1 on its embedding.
            gate_dropout: of all gates of a token.
            attention_dropout_of: which components `attention_dropout` drops.

        Raises:
            ValueError: the variant is unknown, or `n_heads` does not divide `d_model`.

        Source: Csordás et al. 2021, tables 4 to 6 and section B.2; where it is silent, the code.
        """
        if variant not in get_args(RouterVariant):
            allowed = ", ".join(get_args(RouterVariant))
            raise ValueError(f"variant must be one of {allowed}, got {variant!r}")
        if n_heads < 1 or d_model % n_heads:
            raise ValueError(f"n_heads must divide d_model = {d_model}, got {n_heads}")
        heads: dict[str, Any] = {"n_heads": n_heads, "d_head": d_model // n_heads}
        of_keys = attention_dropout_of == "keys"
        dropped: dict[str, Any] = {"key_dropout" if of_keys else "query_dropout": attention_dropout}
        if variant in ("geometric", "ndr"):
            normalize = variant == "geometric"
            attention = GeometricAttentionConfig(**heads, **dropped, normalize=normalize)
        elif variant == "transformer":
            attention = AttentionConfig(**heads, bias=False)
        else:
            gated = variant == "abs_rel_gate"
            attention = RelativeAttentionConfig(**heads, **dropped, gated=gated)
        gate = None
        if variant in ("relative_gate", "abs_rel_gate", "ndr"):
            gate = CopyGateConfig(
                update="layer_norm" if variant == "ndr" else "tanh",
                dropout=gate_dropout,
                hidden_dropout=dropout,
            )
        return cls(
            d_input=d_input,
            d_output=d_output,
            d_model=d_model,
            n_steps=n_steps,
            attention=attention,
            feed_forward=FeedForwardConfig(d_mlp=d_mlp, activation="relu", dropout=dropout),
            gate=gate,
            sinusoidal=variant == "transformer",
            dropout=dropout,
            embedding_dropout=0.1 if variant == "transformer" else 0.0,
            embedding_init=("kaiming_normal" if variant in ("relative", "geometric") else "normal"),
            initialization="csordas_2021",
        )


class RouterBlock(nn.Module):
    """One step of every column: merge the attention output, then update the state.

    m = LN(h + attention(h)); with a copy gate (Csordás et al. 2021, equations 6 to 9)
    h <- gate * update + (1 - gate) * h, where update = LN(FFN(m)) or tanh(FFN(m)) and the gate
    depends on m (or, if the gate's config says so, on h, or m is kept instead of h); without one
    h <- LN(m + FFN(m)), the post-LN block of Vaswani et al. 2017.

    Hook points [batch, pos, d_model]: `hook_resid_pre` (h), `hook_attn_out`, `hook_resid_mid` (m),
    `hook_mlp_out`, `hook_resid_post`; with a copy gate also `hook_update`, `hook_gate_logit` and
    `hook_gate` (whose last dim is 1 for a scalar gate); and those of `attn`, `mlp` and, with
    halting, `halt`.

    Example:
        >>> config = NeuralDataRouterConfig.named(
        ...     "ndr", d_input=5, d_output=3, d_model=8, d_mlp=16, n_heads=2, n_steps=4
        ... )
        >>> RouterBlock(config)(torch.zeros(1, 6, 8)).shape
        torch.Size([1, 6, 8])
    """

    def __init__(self, config: NeuralDataRouterConfig, *, generator: torch.Generator | None = None):
        super().__init__()
        self.dropout = config.dropout
        self.attn = config.attention.build(config.d_model, generator=generator)
        self.ln_merge = nn.LayerNorm(config.d_model, eps=LAYER_NORM_EPSILON)
        self.mlp = config.feed_forward.build(config.d_model, generator=generator)
        self.gate, self.ln_out = None, None
        if config.gate is not None:
            self.gate = CopyGate(config.gate, config.d_model, generator=generator)
            self.hook_update = HookPoint()
            self.hook_gate_logit, self.hook_gate = HookPoint(), HookPoint()
        if config.gate is None or config.gate.update == "layer_norm":
            self.ln_out = nn.LayerNorm(config.d_model, eps=LAYER_NORM_EPSILON)
        self.halt = None
        if config.halting is not None:
            self.halt = Halting(config.halting, config.d_model, generator=generator)
        self.hook_resid_pre, self.hook_attn_out = HookPoint(), HookPoint()
        self.hook_resid_mid, self.hook_mlp_out = HookPoint(), HookPoint()
        self.hook_resid_post = HookPoint()
        if config.initialization == "csordas_2021":
            initialize_as_published(self, generator=generator)

    def forward(
        self,
        h: Float[Tensor, "batch pos d_model"],
        *,
        mask: Bool[Tensor, "#batch 1 pos pos"] | None = None,
        hooks: RouterBlock | None = None,
    ) -> Float[Tensor, "batch pos d_model"]:
        """The columns after this step; `hooks` are the hook points of the step."""
        points = self if hooks is None else hooks
        h = points.hook_resid_pre(h)
        attn_out = points.hook_attn_out(self.attn(h, h, mask=mask, hooks=points.attn))
        merged = self.ln_merge(h + dropout(attn_out, self.dropout, self.training))
        merged = points.hook_resid_mid(merged)
        mlp_out = points.hook_mlp_out(self.mlp(merged, hooks=points.mlp))
        if self.gate is None:
            assert self.ln_out is not None
            h = self.ln_out(merged + dropout(mlp_out, self.dropout, self.training))
        else:
            update = mlp_out.tanh() if self.ln_out is None else self.ln_out(mlp_out)
            seen = merged if self.gate.config.sees == "all" else h
            kept = h if self.gate.config.skips == "layer" else merged
            logit = points.hook_gate_logit(self.gate.logits(seen))
            gate = points.hook_gate(self.gate.gates(logit))
            # Under autocast the update and the gate may have half precision.
            h = torch.lerp(kept, points.hook_update(update).to(h.dtype), gate.to(h.dtype))
        return points.hook_resid_post(h)


def check_published(config: NeuralDataRouterConfig) -> None:
    """Raise a ValueError unless `initialize_as_published` knows all parts of the block."""
    known = (GeometricAttentionConfig, RelativeAttentionConfig, AttentionConfig)
    if not isinstance(config.attention, known):
        names = ", ".join(each.__name__ for each in known)
        raise ValueError(
            f"attention must be one of {names} with initialization='csordas_2021', "
            f"got {config.attention}"
        )
    mlp = config.feed_forward
    if not isinstance(mlp, FeedForwardConfig) or mlp.activation == "swiglu" or not mlp.bias:
        raise ValueError(
            "feed_forward must be a FeedForwardConfig with biases and without a gate with "
            f"initialization='csordas_2021', got {mlp}"
        )


def initialize_as_published(
    block: RouterBlock, *, generator: torch.Generator | None = None
) -> None:
    """Draw the weights of a block as the authors' code does, all uniformly.

    With d the width of a column, h that of all heads together and m that of a hidden layer, the
    variances are

    - geometric attention, all but the direction: 2 / (d + d_head);
    - other attentions: 2 / (d + h) for queries and positions, 2 / (d + 2h) for keys and values (one
      matrix in the code), 1 / 3h for the output;
    - hidden layers of feed-forward and gate: 4 / (d + m); the gate's output 2 / (m + gates);
    - feed-forward output: 2 / (d + m) without a gate, 50/9 / (d + m) before a LayerNorm, 1 / 3m
      before a tanh;
    - direction, abs/rel gate and all biases but that of the gate, which is kept: 1 / (3 fan in).

    Source: the code of Csordás et al. 2021 (layers/transformer); it does not apply the
    initialisation that it has for the direction.
    """

    def uniform(fan_in: int, *weights: Tensor) -> None:
        for weight in weights:
            nn.init.uniform_(weight, -(fan_in**-0.5), fan_in**-0.5, generator=generator)

    def xavier(fans: int, *weights: Tensor, gain: float = 1.0) -> None:
        bound = gain * (6 / fans) ** 0.5
        for weight in weights:
            nn.init.uniform_(weight, -bound, bound, generator=generator)

    attn, mlp, gate = cast(Any, block.attn), cast(Any, block.mlp), block.gate
    n_heads, d_model, d_head = attn.W_Q.shape
    if isinstance(attn, GeometricAttention):
        xavier(d_model + d_head, attn.W_Q, attn.W_K, attn.W_V, attn.W_O)
        uniform(d_model, attn.W_dir, attn.b_dir)
    else:
        d_heads = n_heads * d_head
        relative = isinstance(attn, RelativeAttention)
        xavier(d_model + d_heads, attn.W_Q, *([attn.W_pos] if relative else []))
        xavier(d_model + 2 * d_heads, attn.W_K, attn.W_V)
        uniform(d_heads, attn.W_O)
        if relative and attn.config.gated:
            uniform(d_model, attn.W_gate, attn.b_gate)
    fans = sum(mlp.W_in.shape)
    xavier(fans, mlp.W_in, gain=2**0.5)
    uniform(d_model, mlp.b_in)
    if gate is not None and block.ln_out is None:
        uniform(len(mlp.W_out), mlp.W_out)
    else:
        xavier(fans, mlp.W_out, gain=1.0 if gate is None else 5 / 3)
    uniform(len(mlp.W_out), mlp.b_out)
    if gate is not None:
        xavier(sum(gate.W_in.shape), gate.W_in, gain=2**0.5)
        uniform(d_model, gate.b_in)
        xavier(sum(gate.W_out.shape), gate.W_out)


class NeuralDataRouter(SteppedModel):
    """A transformer with shared weights that updates one column per token and reads out one column.

    Csordás, Irie and Schmidhuber 2021, "The Neural Data Router: Adaptive Control Flow in
    Transformers Improves Systematic Generalization". Each token becomes a column, as do BOS before
    and EOS directly after the sequence; the logits are a linear map of the column of BOS or EOS
    after the last step.

    Hook points: `hook_embed` and `blocks.{t}.*` (see `RouterBlock`). The weights live in `core`;
    `blocks[t]` only holds the hook points of step t.

    Args:
        config: the configuration.
        generator: random generator of the initial weights; None for torch's global generator.

    Example:
        >>> config = NeuralDataRouterConfig.named(
        ...     "ndr", d_input=10, d_output=3, d_model=16, d_mlp=32, n_heads=4, n_steps=6
        ... )
        >>> _, cache = NeuralDataRouter(config).run_with_cache(tokens)
        >>> cache["blocks.5.hook_gate"].shape  # the columns are BOS, the tokens and EOS
        torch.Size([40, 7, 16])
    """

    def __init__(self, config: NeuralDataRouterConfig, *, generator: torch.Generator | None = None):
        super().__init__(config.n_steps, shared=True)
        self.config = config
        self.W_E = _embedding(config, generator)
        self.hook_embed = HookPoint()
        core, self.blocks = stack_blocks(
            lambda: RouterBlock(config, generator=generator), config.n_steps, shared=True
        )
        self.core = cast(RouterBlock, core)
        self.W_U = lecun_normal(
            config.d_model, config.d_output, fan_in=config.d_model, generator=generator
        )
        self.b_U = zeros(config.d_output)
        if config.initialization == "csordas_2021":
            for weight in (self.W_U, self.b_U):
                bound = config.d_model**-0.5
                nn.init.uniform_(weight, -bound, bound, generator=generator)
        self.setup()

    def _stacks(self) -> Sequence[nn.ModuleList]:
        return (self.blocks,)

    def forward(
        self, tokens: Int[Tensor, "batch pos"], *, n_steps: int | None = None
    ) -> Float[Tensor, "batch 1 d_output"]:
        """The logits of each sequence.

        Args:
            tokens: ids in [0, d_input); negative ids are padding, which must be at the end.
            n_steps: number of steps; None for that of the config.

        Raises:
            ValueError: n_steps is less than 1, or as for `enclose`.
        """
        return self.forward_with_cost(tokens, n_steps=n_steps)[0]

    def forward_with_cost(
        self, tokens: Int[Tensor, "batch pos"], *, n_steps: int | None = None
    ) -> tuple[Float[Tensor, "batch 1 d_output"], Float[Tensor, "batch pos_and_2"]]:
        """The logits, and each column's ponder cost: its steps, plus the remainder with halting.

        Arguments and errors as for `forward`.
        """
        n_steps = self._prepare_steps(n_steps)
        ids, mask, end = enclose(tokens, self.config.d_input)
        h = self.W_E[ids]
        if self.config.sinusoidal:
            h = h + interleaved_sinusoids(0, h.shape[1], self.config.d_model).to(h)
        h = self.hook_embed(dropout(h, self.config.embedding_dropout, self.training))
        mask = mask[:, None, None, :]
        h, cost = run_steps(
            h,
            self.blocks[:n_steps],
            lambda h, points: self.core(h, mask=mask, hooks=points),
            halt=self.core.halt,
        )
        if self.config.readout == "first":
            column = h[:, 0]
        else:
            column = h.gather(1, end[:, None, None].expand(-1, 1, h.shape[2]))[:, 0]
        return linear(column, self.W_U.T, self.b_U)[:, None], cost


def _embedding(config: NeuralDataRouterConfig, generator: torch.Generator | None) -> nn.Parameter:
    weight = torch.empty(config.d_input + 2, config.d_model)
    match config.embedding_init:
        case "normal":
            nn.init.normal_(weight, generator=generator)
        case "kaiming_normal":
            nn.init.kaiming_normal_(weight, generator=generator)
        case "xavier_uniform":
            nn.init.xavier_uniform_(weight, generator=generator)
    return nn.Parameter(weight)
