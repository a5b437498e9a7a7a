"""The Neural Data Router and the transformers it is compared with: columns over steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import dropout, linear
from transformer_lens.hook_points import HookPoint

from mechanisms.attention.geometric import GeometricAttentionConfig
from mechanisms.attention.multi_head import AttentionConfig
from mechanisms.attention.positions import sinusoidal_embedding
from mechanisms.attention.relative import RelativeAttentionConfig
from mechanisms.hooking import observed
from mechanisms.initialization import lecun_normal, zeros
from mechanisms.layers.copy_gate import CopyGate, CopyGateConfig
from mechanisms.layers.depth import SteppedModel, stack_blocks
from mechanisms.layers.feed_forward import FeedForwardConfig
from mechanisms.layers.halting import Halting, HaltingConfig, Ponder
from mechanisms.protocols import AttentionProtocol, ComponentConfig
from mechanisms.sequences import enclose
from mechanisms.validation import check_choice, check_dropout, check_sizes

RouterVariant = Literal[
    "transformer", "relative", "relative_gate", "abs_rel_gate", "geometric", "ndr"
]
Readout = Literal["first", "last"]

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
        sinusoidal: whether sinusoidal positions are added to the embedding.
        readout: column whose last state gives the logits: `first` (BOS) or `last` (EOS).
        dropout: dropout probability of the attention output.
        halting: config of adaptive computation time; None for `n_steps` steps of all columns.

    Raises:
        ValueError: a setting is not allowed.
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
    halting: HaltingConfig | None = None

    def __post_init__(self):
        check_sizes(self, "d_input", "d_output", "d_model", "n_steps")
        check_choice(self, "readout", Readout)
        check_dropout(self)

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
    ) -> NeuralDataRouterConfig:
        """The config of a model that Csordás et al. 2021 compare, all with shared weights.

        - `transformer`: softmax attention, sinusoidal positions (a Universal Transformer);
        - `relative`: relative positions instead;
        - `relative_gate`: relative positions and the copy gate;
        - `abs_rel_gate`: the same with the abs/rel gate;
        - `geometric`: geometric attention without the copy gate;
        - `ndr`: geometric attention and the copy gate, the Neural Data Router.

        Raises:
            ValueError: the variant is unknown, or `n_heads` does not divide `d_model`.
        """
        if variant not in get_args(RouterVariant):
            allowed = ", ".join(get_args(RouterVariant))
            raise ValueError(f"variant must be one of {allowed}, got {variant!r}")
        if n_heads < 1 or d_model % n_heads:
            raise ValueError(f"n_heads must divide d_model = {d_model}, got {n_heads}")
        heads = {"n_heads": n_heads, "d_head": d_model // n_heads, "dropout": attention_dropout}
        if variant in ("geometric", "ndr"):
            attention = GeometricAttentionConfig(**heads)
        elif variant == "transformer":
            attention = AttentionConfig(**heads)
        else:
            attention = RelativeAttentionConfig(**heads, gated=variant == "abs_rel_gate")
        gate = None
        if variant in ("relative_gate", "abs_rel_gate", "ndr"):
            gate = CopyGateConfig(
                update="layer_norm" if variant == "ndr" else "tanh", dropout=gate_dropout
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
        )


class RouterBlock(nn.Module):
    """One step of every column: merge the attention output, then update the state.

    m = LN(h + attention(h)); with a copy gate (Csordás et al. 2021, equations 6 to 9)
    h <- gate * update + (1 - gate) * h, where update = LN(FFN(m)) or tanh(FFN(m)); without one
    h <- LN(m + FFN(m)), the post-LN block of Vaswani et al. 2017.

    Hook points [batch, pos, d_model]: `hook_resid_pre` (h), `hook_attn_out`, `hook_resid_mid` (m),
    `hook_mlp_out`, `hook_resid_post`; with a copy gate also `hook_update` and `hook_gate` (whose
    last dim is 1 for a scalar gate); and those of `attn`, `mlp` and, with halting, `halt`.
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
            self.hook_update, self.hook_gate = HookPoint(), HookPoint()
        if config.gate is None or config.gate.update == "layer_norm":
            self.ln_out = nn.LayerNorm(config.d_model, eps=LAYER_NORM_EPSILON)
        self.halt = None
        if config.halting is not None:
            self.halt = Halting(config.halting, config.d_model, generator=generator)
        self.hook_resid_pre, self.hook_attn_out = HookPoint(), HookPoint()
        self.hook_resid_mid, self.hook_mlp_out = HookPoint(), HookPoint()
        self.hook_resid_post = HookPoint()

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
            gate = points.hook_gate(self.gate(merged))
            h = torch.lerp(h, points.hook_update(update), gate)
        return points.hook_resid_post(h)


class NeuralDataRouter(SteppedModel):
    """A transformer with shared weights that updates one column per token and reads out one column.

    Csordás, Irie and Schmidhuber 2021, "The Neural Data Router: Adaptive Control Flow in
    Transformers Improves Systematic Generalization". Each token becomes a column, as do BOS before
    and EOS directly after the sequence; the logits are a linear map of the column of BOS or EOS
    after the last step.

    Hook points: `hook_embed` and `blocks.{t}.*` (see `RouterBlock`). The weights live in `core`;
    `blocks[t]` only holds the hook points of step t. Embeddings start from N(0, 1), the scale of a
    normalised update; the other weights from N(0, 1 / fan in).

    Args:
        config: the configuration.
        generator: random generator of the initial weights; None for torch's global generator.
    """

    def __init__(self, config: NeuralDataRouterConfig, *, generator: torch.Generator | None = None):
        super().__init__(config.n_steps, shared=True)
        self.config = config
        self.W_E = nn.Parameter(
            torch.randn(config.d_input + 2, config.d_model, generator=generator)
        )
        self.hook_embed = HookPoint()
        core, self.blocks = stack_blocks(
            lambda: RouterBlock(config, generator=generator), config.n_steps, shared=True
        )
        self.core = cast(RouterBlock, core)
        self.W_U = lecun_normal(
            config.d_model, config.d_output, fan_in=config.d_model, generator=generator
        )
        self.b_U = zeros(config.d_output)
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
            h = h + sinusoidal_embedding(h.shape[1], self.config.d_model).to(h)
        h = self.hook_embed(h)
        h, cost = self._run_steps(h, mask[:, None, None, :], n_steps)
        if self.config.readout == "first":
            column = h[:, 0]
        else:
            column = h.gather(1, end[:, None, None].expand(-1, 1, h.shape[2]))[:, 0]
        return linear(column, self.W_U.T, self.b_U)[:, None], cost

    def _run_steps(
        self,
        h: Float[Tensor, "batch pos d_model"],
        mask: Bool[Tensor, "batch 1 1 pos"],
        n_steps: int,
    ) -> tuple[Float[Tensor, "batch pos d_model"], Float[Tensor, "batch pos"]]:
        halt = self.core.halt
        if halt is None:
            for points in self.blocks[:n_steps]:
                h = self.core(h, mask=mask, hooks=points)
            return h, h.new_full(h.shape[:2], n_steps)
        ponder = Ponder(h, halt.config)
        for points in self.blocks[:n_steps]:
            points = cast(RouterBlock, points)
            assert points.halt is not None
            ponder.running = points.halt.hook_running(ponder.running)
            if not (self.training or observed(points) or ponder.running.any()):
                break
            updated = self.core(h, mask=mask, hooks=points)
            h = torch.lerp(h, updated, ponder.running[..., None])
            ponder.add(h, halt(h, hooks=points.halt))
        return ponder.result(h), ponder.cost()
