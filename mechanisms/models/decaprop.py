"""DecaProp: a reader of passages whose layers are densely connected by attention."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import product
from typing import cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformer_lens import HookedRootModule
from transformer_lens.hook_points import HookPoint

from mechanisms.attention.alignment import AlignmentConfig
from mechanisms.attention.bidirectional_connector import N_FEATURES, BidirectionalConnector
from mechanisms.attention.gated_alignment import GatedAlignment
from mechanisms.dropout import dropout
from mechanisms.hooking import remove_hook_points
from mechanisms.initialization import lecun_normal, normal, zeros
from mechanisms.models.lstm import LstmLayer, LstmLayerHooks
from mechanisms.sequences import rows_of_table
from mechanisms.validation import check_dropout, check_sizes

_N_MATCHES = 2


@dataclass(frozen=True, kw_only=True)
class DecaPropConfig:
    """Configuration of a `DecaProp`.

    Args:
        d_input: number of token ids.
        padding: id of padding, which comes after the tokens of a text; it need not be a token id.
        d_embed: width of the token embeddings.
        d_hidden: width of the state of each LSTM and direction.
        n_layers: number of encoder layers, between all of which there are connectors.
        n_factors: width of the factors of the factorization machines.
        alignment: how passage and question are aligned, in the connectors and in the gated
            attention to the question. The passage attends to itself with softmax, always.
        dropout: dropout probability of the input of every LSTM and of the pointers.

    Raises:
        ValueError: a setting is outside its range.

    Example:
        >>> DecaPropConfig(d_input=10, padding=0, d_embed=8, d_hidden=4).n_layers
        3
    """

    d_input: int
    padding: int
    d_embed: int
    d_hidden: int
    n_layers: int = 3
    n_factors: int = 64
    alignment: AlignmentConfig = field(default_factory=AlignmentConfig)
    dropout: float = 0.0

    def __post_init__(self):
        check_sizes(self, "d_input", "d_embed", "d_hidden", "n_layers", "n_factors")
        check_dropout(self)


class DecaProp(HookedRootModule):
    """A reader: the logits of the first and of the last token of the answer in a passage.

    Tay et al. 2018, "Densely Connected Attention Propagation for Reading Comprehension":

    - input (section 3.1): an embedding of each token, with two numbers: whether the other text has
      the token, and its frequency in the passage. There are no characters in token ids, and so none
      of the paper's character embeddings;
    - encoder (3.2): `n_layers` bidirectional LSTMs, with the same weights for passage P and
      question Q. A connector joins every layer i of P to every layer j of Q; the features of those
      with i = j are inputs of the next layer. Out come all layers and all features;
    - core (3.3): gated attention to the question and an LSTM make U_1, the same of the passage to
      itself U_2; one-sided connectors join both to every Q_j;
    - pointers (3.4): an LSTM H_1 over U_2 with all features of the core, an LSTM H_2 over H_1; the
      logits of the start are W_start · H_1, those of the end W_end · H_2, -inf at padding.

    The authors' published code (NIPS2018_DECAPROP) departs from its paper: no features are inputs
    of the encoder's layers, its connectors have features of attention within each text, too, and
    the pointers read the features of the core alone.

    Hook points: `hook_embed` (passage) and `hook_embed_question` [batch, pos, d_embed + 2];
    `connectors.{i}.{j}.*` (P_i and Q_j), `core_connectors.{0 or 1}.{j}.*` (U_1 or U_2, and Q_j),
    see `BidirectionalConnector`, with the passage as a; `attend.*`, `attend_self.*`, see
    `GatedAlignment`; `passage_layers.{i}.*`, `question_layers.{i}.*`, `core_layers.{0 or 1}.*`,
    `pointer_layers.{0 or 1}.*`, see `LstmLayerHooks`; `hook_logits` [batch, 2, pos].

    Parameters: `W_E`, from N(0, 1); `encoder.{i}`, `core_layers.{0 or 1}`, `pointer_layers.{0 or
    1}`, each an `LstmLayer`; those of connectors and attention; `W_pointer` [2, 2 d_hidden],
    `b_pointer` [2].

    Args:
        config: the configuration.
        generator: random generator of the initial weights; None for torch's global generator.

    Example:
        >>> reader = DecaProp(DecaPropConfig(d_input=10, padding=0, d_embed=8, d_hidden=4))
        >>> reader(torch.randint(1, 10, (2, 12)), torch.randint(1, 10, (2, 3))).shape
        torch.Size([2, 2, 12])
    """

    def __init__(self, config: DecaPropConfig, *, generator: torch.Generator | None = None):
        super().__init__()
        self.config = config
        self.W_E = normal(config.d_input, config.d_embed, std=1.0, generator=generator)
        n, width = config.n_layers, 2 * config.d_hidden

        def lstm(d_in: int) -> LstmLayer:
            return LstmLayer(d_in, config.d_hidden, bidirectional=True, generator=generator)

        def connectors(rows: int, *, one_sided: bool) -> nn.ModuleList:
            sizes = (config.alignment, width, config.n_factors)
            return nn.ModuleList(
                nn.ModuleList(
                    BidirectionalConnector(*sizes, one_sided=one_sided, generator=generator)
                    for _ in range(n)
                )
                for _ in range(rows)
            )

        d_inner = [width + N_FEATURES] * (n - 1)
        self.encoder = nn.ModuleList(map(lstm, [config.d_embed + _N_MATCHES, *d_inner]))
        # The same weights read passages and questions, with hook points of their own.
        remove_hook_points(self.encoder)
        self.passage_layers, self.question_layers = (
            nn.ModuleList(LstmLayerHooks(bidirectional=True) for _ in range(n)) for _ in range(2)
        )
        self.connectors = connectors(n, one_sided=False)
        d_encoded = n * width + N_FEATURES * n * n
        by_softmax = replace(config.alignment, composition=None, scaled=True)
        self.attend, self.attend_self = (
            GatedAlignment(alignment, d_in, config.d_hidden, generator=generator)
            for alignment, d_in in ((config.alignment, d_encoded), (by_softmax, width))
        )
        self.core_layers = nn.ModuleList(map(lstm, (2 * d_encoded, 2 * width)))
        self.core_connectors = connectors(2, one_sided=True)
        self.pointer_layers = nn.ModuleList(map(lstm, (width + 2 * n * N_FEATURES, width)))
        self.W_pointer = lecun_normal(2, width, fan_in=width, generator=generator)
        self.b_pointer = zeros(2)
        self.hook_embed, self.hook_embed_question = HookPoint(), HookPoint()
        self.hook_logits = HookPoint()
        self.setup()

    def set_positions(self, n_passage: int, n_question: int) -> None:
        """Create the hook points of all steps for texts of up to so many tokens.

        A forward pass does so, too; before torch.compile, call this.
        """
        needed = {self.passage_layers: n_passage, self.question_layers: n_question}
        needed |= {self.core_layers: n_passage, self.pointer_layers: n_passage}
        layers = [(cast(LstmLayerHooks, one), n) for group, n in needed.items() for one in group]
        if any(len(layer.steps) < n for layer, n in layers):
            for layer, n in layers:
                layer.extend_steps(n)
            self.setup()

    def forward(
        self, passage: Int[Tensor, "batch p_pos"], question: Int[Tensor, "batch q_pos"]
    ) -> Float[Tensor, "batch 2 p_pos"]:
        """The logits of the first and of the last token of the answer; -inf at padding.

        Args:
            passage: ids in [0, d_input), or padding.
            question: the same.

        Raises:
            ValueError: as for `rows_of_table`.
        """
        self.set_positions(passage.shape[1], question.shape[1])
        mask_p, mask_q = passage != self.config.padding, question != self.config.padding
        length = mask_p.sum(1)[:, None].clamp(min=1)
        in_passage, in_question = (_occurrences(x, passage) for x in (passage, question))
        asked = _occurrences(passage, question)
        p = self.hook_embed(self._embed(passage, mask_p, asked, in_passage / length))
        embedded = self._embed(question, mask_q, in_question, in_question / length)
        q = self.hook_embed_question(embedded)
        p, q, q_layers = self._encode(p, q, mask_p, mask_q)

        first = self._run(self.core_layers[0], self.attend(p, q, mask_p, mask_q), mask_p)
        matched = self.attend_self(first, first, mask_p, mask_p)
        second = self._run(self.core_layers[1], matched, mask_p)
        features = [
            connector(fused, layer, mask_p, mask_q)[0]
            for fused, row in zip((first, second), self.core_connectors, strict=True)
            for connector, layer in zip(cast(nn.ModuleList, row), q_layers, strict=True)
        ]
        start = self._run(self.pointer_layers[0], torch.cat([second, *features], -1), mask_p)
        end = self._run(self.pointer_layers[1], start, mask_p)
        states = dropout(torch.stack([start, end], 1), self.config.dropout, self.training)
        logits = (states * self.W_pointer[:, None]).sum(-1) + self.b_pointer[:, None]
        return self.hook_logits(logits.masked_fill(~mask_p[:, None], -torch.inf))

    def _embed(
        self,
        tokens: Int[Tensor, "batch pos"],
        mask: Bool[Tensor, "batch pos"],
        in_other: Int[Tensor, "batch pos"],
        frequency: Float[Tensor, "batch pos"],
    ) -> Float[Tensor, "batch pos d_embed_and_2"]:
        """The embeddings of a text, with whether the other one has the token, and its frequency."""
        x = self.W_E[rows_of_table(tokens, len(self.W_E), padding=self.config.padding)]
        matches = torch.stack([in_other > 0, frequency], -1).to(x)
        return torch.cat([x, matches], -1).masked_fill(~mask[..., None], 0.0)

    def _encode(
        self,
        p: Float[Tensor, "batch p_pos d_in"],
        q: Float[Tensor, "batch q_pos d_in"],
        mask_p: Bool[Tensor, "batch p_pos"],
        mask_q: Bool[Tensor, "batch q_pos"],
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """All layers and features of the passage and of the question, and the latter's layers."""
        p_layers, q_layers, features = [], [], {}
        for i, layer in enumerate(self.encoder):
            p_layers.append(self._run(layer, p, mask_p, self.passage_layers[i]))
            q_layers.append(self._run(layer, q, mask_q, self.question_layers[i]))
            features[i, i] = self._connect(i, i, p_layers, q_layers, mask_p, mask_q)
            p, q = (
                torch.cat([layers[i], propagated], -1)
                for layers, propagated in zip((p_layers, q_layers), features[i, i], strict=True)
            )
        pairs = list(product(range(len(p_layers)), repeat=2))
        for i, j in pairs:
            if i != j:
                features[i, j] = self._connect(i, j, p_layers, q_layers, mask_p, mask_q)
        p, q = (
            torch.cat([*layers, *(features[pair][side] for pair in pairs)], -1)
            for side, layers in enumerate((p_layers, q_layers))
        )
        return p, q, q_layers

    def _connect(
        self,
        i: int,
        j: int,
        p_layers: list[Tensor],
        q_layers: list[Tensor],
        mask_p: Bool[Tensor, "batch p_pos"],
        mask_q: Bool[Tensor, "batch q_pos"],
    ) -> tuple[Float[Tensor, "batch p_pos 3"], Float[Tensor, "batch q_pos 3"]]:
        """The features of layer i of the passage and of layer j of the question."""
        connector = cast(nn.ModuleList, self.connectors[i])[j]
        return connector(p_layers[i], q_layers[j], mask_p, mask_q)

    def _run(
        self,
        layer: nn.Module,
        x: Float[Tensor, "batch pos d_in"],
        mask: Bool[Tensor, "batch pos"],
        hooks: nn.Module | None = None,
    ) -> Float[Tensor, "batch pos two_d_hidden"]:
        """The states of an LSTM, whose input is dropped out."""
        return layer(dropout(x, self.config.dropout, self.training), mask=mask, hooks=hooks)


def _occurrences(
    tokens: Int[Tensor, "batch pos"], text: Int[Tensor, "batch text_pos"]
) -> Int[Tensor, "batch pos"]:
    """How often each token occurs in a text."""
    return (tokens[:, :, None] == text[:, None]).sum(-1)
