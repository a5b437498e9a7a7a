"""Table lookup, arithmetic and ListOps, and the models that Csordás et al. 2021 compare on them."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn

import mechanisms
import tasks
from studies.engine import ALL, Selection, Setup
from tasks import ArithmeticConfig, Batch, ListOpsConfig, TableLookupConfig
from tasks.expressions import ExpressionTask

GEOMETRIC = ("ndr", "geometric")
GATED = ("ndr", "abs_rel_gate", "relative_gate")
"""The models whose gates can be read as control flow."""

ROUTERS = ("ndr", "geometric", "abs_rel_gate", "relative_gate", "relative", "transformer")
RECURRENT = ("lstm", "bilstm", "dnc")
MODELS = ROUTERS + RECURRENT

PAPER = {
    "forward": {"ndr": 1.00, "relative_gate": 0.99},
    "backward": {"ndr": 1.00, "relative_gate": 0.19},
    "arithmetic": {"ndr": 0.98, "lstm": 0.74, "relative": 0.77},
    "listops": {"ndr": 0.99, "lstm": 0.71, "relative": 0.79, "abs_rel_gate": 0.90},
}
"""Test accuracies reported by Csordás et al. 2021, tables 1 to 3: by task and model."""

OF_ROUTERS = frozenset(
    {"d_model", "d_mlp", "n_heads", "n_steps", "n_test_steps", "attention_dropout", "gate_dropout"}
    | {"initial_s_bias", "readout"}
)
OF_LSTMS, OF_DNC = frozenset({"n_layers"}), frozenset({"n_cells", "d_cell", "n_read_heads"})


@dataclass(frozen=True, kw_only=True)
class ExpressionSetup(Setup):
    """A model that reads an expression and answers its value, and expressions that are deeper.

    Args:
        model: one of `MODELS`.
        task: which expressions.
        d_model, d_mlp, n_heads: of a router, see `mechanisms.NeuralDataRouterConfig.named`.
        n_steps: of a router, in training.
        n_test_steps: of a router, where it is tested and measured.
        dropout: of every model.
        attention_dropout, gate_dropout: of a router.
        initial_s_bias: what geometric attention's `s_bias` starts from; the lower, the farther a
            column sees at first.
        readout: the mark, before the first or after the last token, whose column a router is read
            out at; recurrent models answer at the last.
        d_hidden: width of a recurrent model's embedding and state.
        n_layers: of an LSTM, in one or both directions; the DNC's controller has one.
        n_cells, d_cell, n_read_heads: of the DNC's memory.

    Raises:
        ValueError: the choice of the checkpoint would leave no example of `valid`.
    """

    task: TableLookupConfig | ArithmeticConfig | ListOpsConfig
    d_model: int
    d_mlp: int
    n_heads: int
    n_steps: int
    n_test_steps: int
    dropout: float
    attention_dropout: float = 0.1
    gate_dropout: float = 0.1
    initial_s_bias: float = 0.0
    readout: Literal["first", "last"] = "last"
    d_hidden: int
    n_layers: int
    n_cells: int = 32
    d_cell: int = 32
    n_read_heads: int = 4

    selection: ClassVar = Selection(
        "valid", "accuracy", protocol="Csordas et al. 2021: deeper validation depths"
    )
    at_once: ClassVar = 250

    def __post_init__(self):
        super().__post_init__()
        if self.n_validation >= self.task.n_valid:
            raise ValueError(
                f"n_validation must be less than task.n_valid = {self.task.n_valid}, so that "
                f"measures have examples of `valid`, got {self.n_validation}"
            )

    @property
    def splits(self) -> dict[str, Any]:
        """Depths of training, deeper ones, and the deepest."""
        return {"id": "in", "valid": "out", "ood": "out"}

    def models(self) -> tuple[str, ...]:
        """The paper's."""
        return MODELS

    def size(self, split: str) -> int:
        """All splits have an end."""
        return self.sampler().size(split)

    def sampler(self) -> ExpressionTask:
        """The task."""
        return _sampler(self.task)

    def build(self, generator: torch.Generator) -> nn.Module:
        """The model with as many steps as in training."""
        return (self._router if self.model in ROUTERS else self._recurrent)(generator)

    def build_tested(self, generator: torch.Generator) -> nn.Module:
        """The model with as many steps as where it is tested."""
        return replace(self, n_steps=self.n_test_steps).build(generator)

    def answer(self, model: nn.Module, batch: Batch) -> Tensor:
        """Logits [batch, 1, answer], after the steps of a test."""
        more = {"n_steps": self.n_test_steps} if self.model in ROUTERS else {}
        return model(batch.inputs, **more)

    def groups(self, batch: Batch) -> dict[str, Tensor]:
        """Expressions of each depth, `depth 1` to the deepest."""
        depths = range(1, self.task.ood_depths[1] + 1)
        return {f"depth {depth}": batch.latents["depth"] == depth for depth in depths}

    def references(self, split: str) -> dict[str, dict[str, dict[str, float]]]:
        """What guessing gives."""
        return {"chance": {"accuracy": {ALL: self.sampler().chance}}}

    def paper(self) -> dict[str, dict[str, dict[str, float]]]:
        """The paper's test, at its size."""
        kinds = {ArithmeticConfig: "arithmetic", ListOpsConfig: "listops"}
        task = kinds.get(type(self.task)) or cast(TableLookupConfig, self.task).direction
        known = PAPER[task].get(self.model)
        return {} if known is None else {"accuracy": {"ood": {ALL: known}}}

    def inapplicable(self) -> frozenset[str]:
        """Settings of other kinds of models."""
        if self.model in RECURRENT:
            return OF_ROUTERS | (OF_LSTMS if self.model == "dnc" else OF_DNC)
        gate = frozenset() if self.model in GATED else {"gate_dropout"}
        bias = frozenset() if self.model in GEOMETRIC else {"initial_s_bias"}
        return frozenset({"d_hidden"}) | OF_LSTMS | OF_DNC | gate | bias

    def _router(self, generator: torch.Generator) -> nn.Module:
        config = mechanisms.NeuralDataRouterConfig.named(
            cast(Any, self.model),
            **self._sizes("d_model", "d_mlp", "n_heads", "n_steps"),
            attention_dropout=self.attention_dropout,
            gate_dropout=self.gate_dropout,
        )
        config = replace(config, readout=self.readout)
        model = mechanisms.NeuralDataRouter(config, generator=generator)
        if isinstance(model.core.attn, mechanisms.GeometricAttention):
            nn.init.constant_(model.core.attn.s_bias, self.initial_s_bias)
        return model

    def _recurrent(self, generator: torch.Generator) -> nn.Module:
        if self.model == "dnc":
            sizes = self._sizes("d_hidden", *OF_DNC)
            config = mechanisms.DncConfig(d_embed=self.d_hidden, **sizes)
            return mechanisms.Dnc(config, generator=generator)
        sizes, both = self._sizes("d_hidden", *OF_LSTMS), self.model == "bilstm"
        config = mechanisms.LstmConfig(d_embed=self.d_hidden, bidirectional=both, **sizes)
        return mechanisms.Lstm(config, generator=generator)

    def _sizes(self, *names: str) -> dict[str, Any]:
        ends = {"d_input": self.sampler().vocabulary, "d_output": self.sampler().answers}
        own = {name: getattr(self, name) for name in (*names, "dropout")}
        return {name: len(words) for name, words in ends.items()} | own


@functools.lru_cache(maxsize=8)
def _sampler(config: Any) -> ExpressionTask:
    kinds = {
        TableLookupConfig: tasks.TableLookup,
        ArithmeticConfig: tasks.Arithmetic,
        ListOpsConfig: tasks.ListOps,
    }
    return kinds[type(config)](config)
