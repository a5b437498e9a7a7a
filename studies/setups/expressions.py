"""Setup: table lookup, arithmetic and ListOps, and the models compared by Csordás et al. 2021."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn

import mechanisms
import tasks
from studies import engine
from studies.engine.settings import changed
from studies.engine.setup import References
from tasks import ArithmeticConfig, Batch, ListOpsConfig, TableLookupConfig

TASKS: dict[type, Any] = {
    TableLookupConfig: tasks.TableLookup,
    ArithmeticConfig: tasks.Arithmetic,
    ListOpsConfig: tasks.ListOps,
}
UNDIRECTED = "ndr_undirected"
"""The Neural Data Router whose attention does not know which keys are to the left."""

OWN_GATE, LATE_GATE = "relative_own_gate", "relative_late_gate"
"""Relative positions with gates that do not see other columns, or cannot skip the attention."""

NDRS = ("ndr", UNDIRECTED)
GEOMETRIC = (*NDRS, "geometric")
GATED = (*NDRS, "abs_rel_gate", "relative_gate", OWN_GATE, LATE_GATE)
"""Models with gates, which can be read as control flow."""

ADAPTIVE = "act"
"""The transformer with adaptive computation time: a Universal Transformer, each of whose columns
halts when it will (Dehghani et al. 2019)."""

ABSOLUTE = ("transformer", ADAPTIVE, "albert")
ROUTERS = (*NDRS, "geometric", *GATED[len(NDRS) :], "relative", *ABSOLUTE)
RECURRENT = ("lstm", "bilstm", "dnc")
MODELS = ROUTERS + RECURRENT

PAPERS_LISTOPS = "[SM [MED [MIN 1 7 4 [MAX 2 4 0 8 9 ] ] 7 ] 5 [MED 8 5 8 ] 0 7 ]"
"""The ListOps expression of figures 3 and 9 to 11 of Csordás et al. 2021."""

N_PAPERS_ARGUMENTS = 5
"""The most arguments of an operation in it."""

VARIANTS = {ADAPTIVE: "transformer", UNDIRECTED: "ndr"}
VARIANTS |= dict.fromkeys((OWN_GATE, LATE_GATE), "relative_gate")
"""The model of the paper that another one is made of."""

OF_ROUTERS = frozenset(
    {"d_model", "d_mlp", "n_heads", "n_steps", "n_test_steps", "attention_dropout", "gate_dropout"}
    | {"embedding_init", "initial_s_bias", "readout", "ponder_weight"}
)
OF_RECURRENT = frozenset({"d_embed", "d_hidden"})
OF_LSTMS, OF_DNC = frozenset({"n_layers"}), frozenset({"n_cells", "d_cell", "n_read_heads"})
EmbeddingInit = Literal["by model", "normal", "kaiming_normal", "xavier_uniform"]


@dataclass(frozen=True, kw_only=True)
class ExpressionSetup(engine.Setup):
    """A model that reads an expression and answers with its value; tested on deeper expressions.

    The defaults are the paper's settings for table lookup (appendix).

    Args:
        model: one of `MODELS`; `albert` is that of transformers, see `Albert`.
        task: the expressions.
        d_model, d_mlp, n_heads: sizes of a router, see `mechanisms.NeuralDataRouterConfig.named`.
        n_steps: steps of a router in training.
        n_test_steps: steps of a router in evaluation and in measures.
        dropout: dropout rate of all models.
        attention_dropout, gate_dropout: further dropout rates of a router, of components of
            queries and of all gates of a column.
        embedding_init: what a router's embeddings are drawn from; `by model` as for
            `NeuralDataRouterConfig.named`.
        initial_s_bias: initial value of geometric attention's `s_bias`; the lower it is, the
            farther a column attends at first.
        readout: whether a router is read out at the mark before the first token or at the one
            after the last; recurrent models are always read out at the last.
        ponder_weight: weight in the loss of the ponder cost of `act`, the mean over columns of
            their steps and remainders.
        d_embed, d_hidden: widths of a recurrent model's embedding and state.
        n_layers: layers of an LSTM or BiLSTM; the DNC's controller has one.
        n_cells, d_cell, n_read_heads: sizes of the DNC's memory.

    Raises:
        ValueError: `n_validation` leaves no example of `valid` for measures, or `ponder_weight` is
            negative.
    """

    task: TableLookupConfig | ArithmeticConfig | ListOpsConfig
    d_model: int = 256
    d_mlp: int = 512
    n_heads: int = 1
    n_steps: int = 14
    n_test_steps: int = 14
    dropout: float = 0.5
    attention_dropout: float = 0.1
    gate_dropout: float = 0.1
    embedding_init: EmbeddingInit = "by model"
    initial_s_bias: float = 0.0
    readout: Literal["first", "last"] = "last"
    ponder_weight: float = 0.01
    d_embed: int = 16
    d_hidden: int = 200
    n_layers: int = 1
    n_cells: int = 21
    d_cell: int = 200
    n_read_heads: int = 4

    selection: ClassVar = engine.Selection(
        "valid", "accuracy", protocol="Csordas et al. 2021: deeper validation depths"
    )
    evaluation_batch_size: ClassVar = 250
    # A number applies to cells with the settings of its experiment.
    reported: ClassVar = tuple(
        number
        for study in ("ndr_control_flow", "ndr_arithmetic", "ndr_listops")
        for number in engine.reported("csordas_2021", study)
    )

    def __post_init__(self):
        super().__post_init__()
        if self.n_validation >= self.task.n_valid:
            raise ValueError(
                f"n_validation must be less than task.n_valid = {self.task.n_valid}, so that "
                f"measures have examples of `valid`, got {self.n_validation}"
            )
        if self.ponder_weight < 0:
            raise ValueError(f"ponder_weight must be at least 0, got {self.ponder_weight}")

    @property
    def splits(self) -> dict[str, Any]:
        return {"id": "in", "valid": "out", "ood": "out"}

    def models(self) -> tuple[str, ...]:
        return MODELS

    def sampler(self) -> tasks.ExpressionTask:
        return engine.cached(TASKS[type(self.task)], self.task)

    def build(self, generator: torch.Generator) -> nn.Module:
        return (self._router if self.model in ROUTERS else self._recurrent)(generator)

    def build_tested(self, generator: torch.Generator) -> nn.Module:
        return replace(self, n_steps=self.n_test_steps).build(generator)

    def answer(self, model: nn.Module, batch: Batch) -> Tensor:
        more = {"n_steps": self.n_test_steps} if self.model in ROUTERS else {}
        return model(batch.inputs, **more)

    def loss(self, model: nn.Module, batch: Batch, step: int) -> Tensor:
        if self.model != ADAPTIVE:
            return super().loss(model, batch, step)
        logits, cost = cast(mechanisms.NeuralDataRouter, model).forward_with_cost(batch.inputs)
        # Each sequence has a mark before it and one after it.
        n_columns = (batch.inputs >= 0).sum(1) + 2
        used = torch.arange(cost.shape[1], device=cost.device) < n_columns[:, None]
        return engine.cross_entropy(logits.float(), batch) + self.ponder_weight * cost[used].mean()

    def groups(self, batch: Batch) -> dict[str, Tensor]:
        depths = range(1, self.task.ood_depths[1] + 1)
        return {f"depth {depth}": batch.latents["depth"] == depth for depth in depths}

    def references(self, split: str) -> References:
        return {"chance": {"accuracy": {engine.ALL: self.sampler().chance}}}

    def inapplicable(self) -> frozenset[str]:
        if self.model in RECURRENT:
            return OF_ROUTERS | (OF_LSTMS if self.model == "dnc" else OF_DNC)
        gate = frozenset() if self.model in GATED else {"gate_dropout"}
        bias = frozenset() if self.model in GEOMETRIC else {"initial_s_bias"}
        attention = {"attention_dropout"} if self.model in ABSOLUTE else frozenset()
        ponder = frozenset() if self.model == ADAPTIVE else {"ponder_weight"}
        own = {"embedding_init"} if self.model == "albert" else frozenset()
        return OF_RECURRENT | OF_LSTMS | OF_DNC | gate | bias | attention | ponder | own

    def _router(self, generator: torch.Generator) -> nn.Module:
        if self.model == "albert":
            return self._albert(generator)
        config = mechanisms.NeuralDataRouterConfig.named(
            cast(Any, VARIANTS.get(self.model, self.model)),
            **self._sizes("d_model", "d_mlp", "n_heads", "n_steps"),
            attention_dropout=self.attention_dropout,
            gate_dropout=self.gate_dropout,
        )
        config = replace(config, readout=self.readout)
        if self.model in (OWN_GATE, LATE_GATE):
            lacks = {"sees": "own"} if self.model == OWN_GATE else {"skips": "feed_forward"}
            config = replace(config, gate=replace(cast(Any, config.gate), **lacks))
        if self.model == ADAPTIVE:
            config = replace(config, halting=mechanisms.HaltingConfig(rule="tensor2tensor"))
        if self.embedding_init != "by model":
            config = replace(config, embedding_init=self.embedding_init)
        model = mechanisms.NeuralDataRouter(config, generator=generator)
        if isinstance(model.core.attn, mechanisms.GeometricAttention):
            nn.init.constant_(model.core.attn.s_bias, self.initial_s_bias)
            if self.model == UNDIRECTED:
                del model.core.attn.scale_pos
                model.core.attn.register_buffer("scale_pos", torch.zeros(1))
        return model

    def _albert(self, generator: torch.Generator) -> nn.Module:
        # transformers is slow to import, and few models need it.
        from studies.setups.albert import Albert

        ends = (len(self.sampler().vocabulary), len(self.sampler().answers))
        return Albert(
            *ends,
            n_steps=self.n_steps,
            readout=self.readout,
            generator=generator,
            embedding_size=self.d_model,
            hidden_size=self.d_model,
            intermediate_size=self.d_mlp,
            num_attention_heads=self.n_heads,
            hidden_dropout_prob=self.dropout,
            attention_probs_dropout_prob=0.0,
        )

    def _recurrent(self, generator: torch.Generator) -> nn.Module:
        if self.model == "dnc":
            config = mechanisms.DncConfig(**self._sizes(*OF_RECURRENT, *OF_DNC))
            return mechanisms.Dnc(config, generator=generator)
        sizes, both = self._sizes(*OF_RECURRENT, *OF_LSTMS), self.model == "bilstm"
        config = mechanisms.LstmConfig(bidirectional=both, **sizes)
        return mechanisms.Lstm(config, generator=generator)

    def _sizes(self, *names: str) -> dict[str, Any]:
        ends = {"d_input": self.sampler().vocabulary, "d_output": self.sampler().answers}
        own = {name: getattr(self, name) for name in (*names, "dropout")}
        return {name: len(words) for name, words in ends.items()} | own


def by_model(
    gated: str = "", ungated: str = "", recurrent: str = "", **models: str
) -> engine.Where:
    """Changes of settings for models other than NDR, by kind of model, or by model.

    Args:
        gated, ungated: of models without geometric attention, with and without gates.
        recurrent: of recurrent models.
        models: of single models, instead of those of their kind.
    """
    with_gates = tuple(model for model in GATED if model not in NDRS)
    kinds = {with_gates: gated, ("relative", *ABSOLUTE): ungated}
    kinds |= {RECURRENT: recurrent}
    return {"model": {model: text for names, text in kinds.items() for model in names} | models}


LOOKUP = ExpressionSetup(
    model="ndr",
    task=TableLookupConfig(n_id=4000, n_valid=2000, n_ood=1000),
    n_validation=1000,
    training=engine.TrainingConfig(
        n_steps=30_000,
        batch_size=512,
        learning_rate=1.5e-4,
        final_learning_rate=1.0,
        weight_decay=0.01,
        decayed="all",
        evaluate_every=1000,
        clip=5.0,
    ),
)
"""The paper's settings (appendix B.2) of NDR on table lookup."""

ARITHMETIC = changed(
    replace(LOOKUP, task=ArithmeticConfig(n_id=1000, n_valid=2000, n_ood=1000, side="right")),
    "d_mlp=1024 n_heads=4 n_steps=15 n_test_steps=15 d_embed=200 n_layers=2 "
    "training.n_steps=100000 training.clip=1.0",
)
LISTOPS = changed(
    replace(ARITHMETIC, task=ListOpsConfig(n_id=1000, n_valid=2000, n_ood=1000)),
    "d_model=512 n_heads=16 n_steps=20 n_test_steps=20 dropout=0.1 gate_dropout=0.05 "
    "readout=first d_embed=512 d_hidden=512 n_layers=4 training.learning_rate=2e-4 "
    "training.weight_decay=0.09",
)
LAPTOP = changed(
    LOOKUP,
    "task.n_tables=8 task.n_lone=0 task.valid_depths=6,7 task.ood_depths=8,10 "
    "task.n_compositions=200000 task.n_id=400 task.n_valid=1000 task.n_ood=2000 "
    "task.sampling=depth d_model=64 d_mlp=128 n_heads=4 n_steps=11 n_test_steps=14 dropout=0.2 "
    "attention_dropout=0.0 initial_s_bias=-2.0 d_embed=128 d_hidden=128 n_cells=32 d_cell=32 "
    "n_validation=500 training.n_steps=12000 training.stop_at=0.995 training.batch_size=128 "
    "training.learning_rate=2e-3 training.final_learning_rate=0.1 training.warmup_steps=1000 "
    "training.weight_decay=0.1 training.decayed=matrices training.evaluate_every=500 "
    "training.beta2=0.98",
)
"""Sizes for two cores, with which models with and without gates learn, found by our own search."""
MUON = (
    "training.optimizer=muon training.learning_rate=6e-3 training.batch_size=64 "
    "training.stop_at=none"
)
# The width of all batches is that of the longest expression allowed. Training ends before it has
# gone through all examples once; otherwise models without gates learn them by heart.
OF_LAPTOP = (
    "task.n_train=600000 task.train_depth=3 task.valid_depths=4,4 task.ood_depths=5,5 "
    "task.n_id=400 task.n_valid=1000 task.n_ood=2000 d_model=64 d_mlp=128 n_heads=4 n_steps=10 "
    "n_test_steps=10 dropout=0.1 attention_dropout=0.0 d_embed=128 d_hidden=128 n_layers=1 "
    f"n_validation=500 {MUON} training.n_steps=8000"
)
LAPTOP_ARITHMETIC = changed(
    replace(ARITHMETIC, training=LAPTOP.training),
    f"{OF_LAPTOP} task.side=balanced task.max_length=21",
)
# Operations with more arguments are learned more slowly.
LAPTOP_LISTOPS = changed(
    replace(LISTOPS, training=LAPTOP.training),
    f"{OF_LAPTOP} task.max_arguments=2 task.max_length=22",
)
