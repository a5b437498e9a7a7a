"""Long short-term memory over token sequences, unidirectional or bidirectional."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import linear
from transformer_lens import HookedRootModule
from transformer_lens.hook_points import HookPoint

from mechanisms.differentiation import is_in_transform
from mechanisms.dropout import dropout
from mechanisms.hooking import observed
from mechanisms.initialization import normal, uniform
from mechanisms.sequences import mask_padding
from mechanisms.validation import check_dropout, check_sizes


@dataclass(frozen=True, kw_only=True)
class LstmConfig:
    """Configuration of an `Lstm`: sizes, direction and dropout.

    Args:
        d_input: number of token ids.
        d_output: number of logits.
        d_embed: width of the token embeddings.
        d_hidden: width of the state of each layer and direction.
        n_layers: number of layers.
        bidirectional: whether every layer also reads from right to left.
        dropout: dropout probability of the embeddings and between the layers; there is no dropout
            between steps.

    Raises:
        ValueError: a setting is outside its range.

    Example:
        >>> LstmConfig(d_input=10, d_output=3, d_embed=8, d_hidden=16).n_layers
        1
    """

    d_input: int
    d_output: int
    d_embed: int
    d_hidden: int
    n_layers: int = 1
    bidirectional: bool = False
    dropout: float = 0.0

    def __post_init__(self):
        check_sizes(self, "d_input", "d_output", "d_embed", "d_hidden", "n_layers")
        check_dropout(self)


class RecurrentModel(HookedRootModule, ABC):
    """A model that reads embedded token sequences step by step, with hook points for every step.

    Sequences have no marks at their boundaries (Csordás et al. 2021, section B.2). Embeddings
    (`W_E`) start from N(0, 1).

    The hook points of steps are created by `set_positions`, or by a forward pass of that length;
    before torch.compile, call `set_positions`.
    """

    def __init__(self, d_input: int, d_embed: int, *, generator: torch.Generator | None = None):
        super().__init__()
        self.W_E = normal(d_input, d_embed, std=1.0, generator=generator)
        self.hook_embed = HookPoint()
        self._n_steps = 0

    def set_positions(self, n_positions: int) -> None:
        """Create the hook points of all steps for sequences of up to `n_positions` tokens.

        Raises:
            ValueError: n_positions is negative.
        """
        if n_positions < 0:
            raise ValueError(f"n_positions must be at least 0, got {n_positions}")
        if n_positions > self._n_steps:
            self._n_steps = n_positions
            self._extend_steps(self._n_steps)
            self.setup()

    @abstractmethod
    def _extend_steps(self, n_steps: int) -> None:
        """Create hook points until there are `n_steps` steps."""


class LstmHooks(nn.Module):
    """The hook points of one step: `hook_cell` (c), `hook_hidden` (h) [batch, d_hidden]."""

    def __init__(self):
        super().__init__()
        self.hook_cell, self.hook_hidden = HookPoint(), HookPoint()


def lstm_step(
    gates: Float[Tensor, "batch four_d_hidden"],
    cell: Float[Tensor, "batch d_hidden"],
    *,
    hooks: LstmHooks,
) -> tuple[Float[Tensor, "batch d_hidden"], Float[Tensor, "batch d_hidden"]]:
    """The next hidden state and cell of an LSTM with forget gates (Gers et al. 2000).

    c = sigmoid(f) c + sigmoid(i) tanh(g) and h = sigmoid(o) tanh(c), where `gates` holds the
    preactivations i, f, g, o in this order, as in torch.
    """
    input_gate, forget_gate, content, output_gate = gates.chunk(4, -1)
    cell = hooks.hook_cell(forget_gate.sigmoid() * cell + input_gate.sigmoid() * content.tanh())
    return hooks.hook_hidden(output_gate.sigmoid() * cell.tanh()), cell


def lstm_kernel(d_in: int, d_hidden: int, *, generator: torch.Generator | None = None) -> nn.LSTM:
    """One layer and direction of torch's LSTM, with weights drawn from the generator.

    Weights and biases are uniform in ±d_hidden^-1/2, as in torch.
    """
    # Built without weights, since torch would draw them from the global generator.
    kernel = nn.LSTM(d_in, d_hidden, batch_first=True, device="meta")
    kernel = kernel.to_empty(device=torch.get_default_device())
    for weight in kernel.parameters():
        nn.init.uniform_(weight, -(d_hidden**-0.5), d_hidden**-0.5, generator=generator)
    return kernel


def reverse_sequences(
    x: Float[Tensor, "batch pos d"], mask: Bool[Tensor, "batch pos"]
) -> Float[Tensor, "batch pos d"]:
    """Reverse every sequence, except its padding, which stays at the end."""
    position = torch.arange(x.shape[1], device=x.device)
    last = mask.sum(1, keepdim=True) - 1
    source = torch.where(mask, last - position, position)
    return x.gather(1, source[..., None].expand_as(x))


class LstmLayerHooks(nn.Module):
    """The hook points of one pass through an `LstmLayer`.

    `hook_hidden` [batch, pos, d_hidden x directions], 0 at padding; `steps.{pos}` and, if
    bidirectional, `backward_steps.{pos}` hold the `LstmHooks` of the step that reads position pos.
    """

    def __init__(self, *, bidirectional: bool):
        super().__init__()
        self.bidirectional = bidirectional
        self.steps, self.backward_steps = nn.ModuleList(), nn.ModuleList()
        self.hook_hidden = HookPoint()

    def extend_steps(self, n_positions: int) -> None:
        """Create hook points until there are `n_positions` positions."""
        for steps in (self.steps, self.backward_steps)[: 1 + self.bidirectional]:
            steps.extend(LstmHooks() for _ in range(len(steps), n_positions))


class LstmLayer(LstmLayerHooks):
    """One layer of an LSTM: initial states are zero, the output is [h forward; h backward].

    The backward direction starts at the last token of each sequence, not at its padding.

    Hook points: those of `LstmLayerHooks`. A direction without hooks on its steps runs in torch's
    fused kernel, but not inside of transforms of `torch.func`.
    """

    def __init__(
        self,
        d_in: int,
        d_hidden: int,
        *,
        bidirectional: bool,
        generator: torch.Generator | None = None,
    ):
        super().__init__(bidirectional=bidirectional)
        self.lstm = lstm_kernel(d_in, d_hidden, generator=generator)
        self.backward_lstm = None
        if bidirectional:
            self.backward_lstm = lstm_kernel(d_in, d_hidden, generator=generator)

    def forward(
        self,
        x: Float[Tensor, "batch pos d_in"],
        *,
        mask: Bool[Tensor, "batch pos"],
        hooks: LstmLayerHooks | None = None,
    ) -> Float[Tensor, "batch pos d_hidden_x_directions"]:
        """The hidden states after every position.

        Args:
            x: the inputs.
            mask: False for padding at the end.
            hooks: hook points in place of the layer's own, where it reads several sequences.
        """
        points = self if hooks is None else hooks
        # torch's kernel has no `vmap`.
        if is_in_transform() or observed(points.steps):
            hidden = self._run_stepwise(self.lstm, points.steps, x, mask, backward=False)
        else:
            hidden = self._run_kernel(self.lstm, x)
        if self.backward_lstm is not None:
            if is_in_transform() or observed(points.backward_steps):
                steps = points.backward_steps
                backward = self._run_stepwise(self.backward_lstm, steps, x, mask, backward=True)
            else:
                reversed_hidden = self._run_kernel(self.backward_lstm, reverse_sequences(x, mask))
                backward = reverse_sequences(reversed_hidden, mask)
            hidden = torch.cat((hidden, backward), -1)
        return points.hook_hidden(hidden.masked_fill(~mask[..., None], 0))

    @staticmethod
    def _run_kernel(
        lstm: nn.LSTM, x: Float[Tensor, "batch pos d_in"]
    ) -> Float[Tensor, "batch pos d_hidden"]:
        # There is no kernel for float16 on CPUs.
        with torch.autocast("cpu", enabled=False):
            return lstm(x)[0]

    @staticmethod
    def _run_stepwise(
        lstm: nn.LSTM,
        steps: nn.ModuleList,
        x: Float[Tensor, "batch pos d_in"],
        mask: Bool[Tensor, "batch pos"],
        *,
        backward: bool,
    ) -> Float[Tensor, "batch pos d_hidden"]:
        W_ih, W_hh, b_ih, b_hh = lstm.parameters()
        inputs = linear(x, W_ih, b_ih + b_hh).unbind(1)
        hidden = cell = x.new_zeros(x.shape[0], lstm.hidden_size)
        n_positions = x.shape[1]
        hiddens = [hidden] * n_positions
        for position in reversed(range(n_positions)) if backward else range(n_positions):
            gates = inputs[position] + linear(hidden, W_hh)
            hooks = steps[position]
            assert isinstance(hooks, LstmHooks)
            hidden, cell = lstm_step(gates, cell, hooks=hooks)
            # Backward, the padding comes first and must leave the state at zero.
            padding = ~mask[:, position, None]
            hidden, cell = hidden.masked_fill(padding, 0), cell.masked_fill(padding, 0)
            hiddens[position] = hidden
        return torch.stack(hiddens, 1)


class Lstm(RecurrentModel):
    """An LSTM that classifies token sequences, a baseline of Csordás et al. 2021.

    Hochreiter & Schmidhuber 1997 with forget gates; bidirectional, Schuster & Paliwal 1997.
    Weights start as in `lstm_kernel`, embeddings as in `RecurrentModel`. The logits are a linear
    map (`W_U`, `b_U`; uniform in ±fan_in^-1/2 at first) of the last layer's final states: of the
    forward direction at the last token, concatenated with the backward direction at the first.

    Hook points: `hook_embed` [batch, pos, d_embed];
    `layers.{i}.hook_hidden` [batch, pos, d_hidden x directions], forward first;
    `layers.{i}.steps.{pos}.hook_cell | hook_hidden` and, if bidirectional,
    `layers.{i}.backward_steps.{pos}.hook_cell | hook_hidden` [batch, d_hidden]: a change there
    affects every later step of its direction and the layers above.

    Args:
        config: the configuration.
        generator: random generator of the initial weights; None for torch's global generator.

    Example:
        >>> Lstm(LstmConfig(d_input=10, d_output=3, d_embed=8, d_hidden=16))(tokens).shape[-1]
        3
    """

    def __init__(self, config: LstmConfig, *, generator: torch.Generator | None = None):
        super().__init__(config.d_input, config.d_embed, generator=generator)
        self.config = config
        d_layer = config.d_hidden * (2 if config.bidirectional else 1)
        self.layers = nn.ModuleList(
            LstmLayer(
                config.d_embed if layer == 0 else d_layer,
                config.d_hidden,
                bidirectional=config.bidirectional,
                generator=generator,
            )
            for layer in range(config.n_layers)
        )
        bound = d_layer**-0.5
        self.W_U = uniform(d_layer, config.d_output, bound=bound, generator=generator)
        self.b_U = uniform(config.d_output, bound=bound, generator=generator)
        self.setup()

    def _extend_steps(self, n_steps: int) -> None:
        for layer in self.layers:
            assert isinstance(layer, LstmLayer)
            layer.extend_steps(n_steps)

    def forward(self, tokens: Int[Tensor, "batch pos"]) -> Float[Tensor, "batch 1 d_output"]:
        """The logits of each sequence.

        Args:
            tokens: ids in [0, d_input); negative ids are padding, which must be at the end.

        Raises:
            ValueError: as for `mask_padding`.
        """
        self.set_positions(tokens.shape[1])
        ids, mask, end = mask_padding(tokens, self.config.d_input)
        x = self.hook_embed(self.W_E[ids])
        for layer in self.layers:
            x = layer(dropout(x, self.config.dropout, self.training), mask=mask)
        forward, backward = x[..., : self.config.d_hidden], x[:, 0, self.config.d_hidden :]
        at_end = forward[torch.arange(len(end), device=end.device), end]
        final = torch.cat((at_end, backward), -1)
        return linear(final, self.W_U.T, self.b_U)[:, None]
