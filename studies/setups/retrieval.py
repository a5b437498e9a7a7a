"""Setup: contextual retrieval by one layer of attention (Mittal et al. 2021)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal

import mechanisms
import tasks
from studies import engine
from studies.engine.setup import References, Role, Scores

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from mechanisms.protocols import AttentionProtocol

MODELS = ("multi_head", "multi_head_pairs", "compositional")

OF_COMPOSITIONAL = frozenset({"scorer", "separate_value_keys", "chosen_by", "n_selected"})


@dataclass(frozen=True, kw_only=True)
class RetrievalSetup(engine.Setup):
    """An encoder, one layer of attention between objects, and a read-out.

    The seed of the task (all examples, and the weights of its searches if they are drawn) is the
    model's `seed`, so seeds also differ in the data. The defaults are the paper's settings.

    Errors are scored on `id`, the familiar combinations of preferences, and on `ood`, those that
    are held out; for a model that is trained on all combinations on `id` and on `all`.

    Args:
        model: `multi_head` with `n_heads` heads; `multi_head_pairs` with a head of width
            d_model / S for each pair of a search and a retrieval, S R heads; or `compositional`
            with S searches of width d_model / S and R retrievals of width d_model / R.
        task: the retrieval task; its seed must stay 0, see above.
        d_model: width of an encoded object, and of all heads of `multi_head` together.
        d_mlp: hidden units of encoder and read-out; None for `d_model`.
        n_heads: number of heads of `multi_head`.
        own_value: whether each object's own value feeds the output, too (section C.1).
        nonlinear: whether a relu and another linear map follow the output of the attention.
        scorer, separate_value_keys, n_selected: see `mechanisms.CompositionalAttentionConfig`.
        chosen_by: how retrievals are selected, `selection` there.
        initialization: see `mechanisms.RetrievalNetworkConfig`.

    Raises:
        ValueError: the task has a seed of its own, or heads, searches or retrievals do not divide
            the width.
    """

    task: tasks.ContextualRetrievalConfig
    d_model: int
    d_mlp: int | None = None
    n_heads: int = 2
    own_value: bool = True
    nonlinear: bool = False
    scorer: Literal["dot", "mlp"] = "dot"
    separate_value_keys: bool = False
    chosen_by: Literal["softmax", "gumbel", "hard", "top_k"] = "softmax"
    n_selected: int | None = None
    initialization: Literal["lecun_normal", "uniform"] = "uniform"

    metrics: ClassVar = {"error": engine.Metric("mean absolute error", "lower", best=0.0)}
    selection: ClassVar = engine.Selection("id", "error")
    reported: ClassVar = engine.reported("mittal_2021", "contextual_retrieval")

    def __post_init__(self):
        super().__post_init__()
        if self.task.seed != 0:
            raise ValueError(f"task.seed must be 0, got {self.task.seed}: set the setting seed")
        parts = {
            "multi_head": (self.n_heads,),
            "compositional": (self.task.n_searches, self.task.n_retrievals),
        }
        for part in parts.get(self.model, (self.task.n_searches,)):
            if part < 1 or self.d_model % part:
                raise ValueError(f"d_model must be a multiple of {part}, got {self.d_model}")

    @property
    def splits(self) -> Mapping[str, Role]:
        if self.task.trained_on == "all":
            return {"id": "in", "all": "in"}
        return {"id": "in", "ood": "out"}

    @property
    def all_splits(self) -> tuple[str, ...]:
        return ("all", *(split for split in self.splits if split != "all"))

    def models(self) -> tuple[str, ...]:
        return MODELS

    def sampler(self) -> tasks.ContextualRetrieval:
        return engine.cached(tasks.ContextualRetrieval, replace(self.task, seed=self.seed))

    @property
    def attention(self) -> AttentionProtocol:
        """The attention between the objects."""
        searches, retrievals = self.task.n_searches, self.task.n_retrievals
        if self.model == "compositional":
            return mechanisms.CompositionalAttentionConfig(
                n_searches=searches,
                n_retrievals=retrievals,
                d_head=self.d_model // searches,
                d_value=self.d_model // retrievals,
                scorer=self.scorer,
                separate_value_keys=self.separate_value_keys,
                selection=self.chosen_by,
                n_selected=self.n_selected,
                own_value=self.own_value,
                nonlinear=self.nonlinear,
            )
        if self.model == "multi_head":
            heads, width = self.n_heads, self.d_model // self.n_heads
        else:
            heads, width = searches * retrievals, self.d_model // searches
        return mechanisms.AttentionConfig(
            n_heads=heads, d_head=width, own_value=self.own_value, nonlinear=self.nonlinear
        )

    def build(self, generator: torch.Generator) -> mechanisms.RetrievalNetwork:
        """A network with one output per object."""
        config = mechanisms.RetrievalNetworkConfig(
            d_input=self.sampler().n_features,
            d_output=1,
            d_model=self.d_model,
            d_mlp=self.d_model if self.d_mlp is None else self.d_mlp,
            attention=self.attention,
            initialization=self.initialization,
        )
        return mechanisms.RetrievalNetwork(config, generator=generator)

    def inapplicable(self) -> frozenset[str]:
        """Settings of the other models."""
        others = frozenset() if self.model == "compositional" else OF_COMPOSITIONAL
        return others | (frozenset() if self.model == "multi_head" else {"n_heads"})

    def loss(self, model: nn.Module, batch: tasks.Batch, step: int) -> Tensor:
        return (engine.answer(model, batch)[..., 0] - batch.targets).abs().mean()

    def scores(self, output: Tensor, batch: tasks.Batch, split: str) -> Scores:
        error = self.sampler().score(output, batch)["absolute_error"].mean(1)
        return {"error": (error, error.new_ones(len(batch)))}

    def references(self, split: str) -> References:
        """The expected error of the best constant answer, 0."""
        error = self.sampler().baseline(split)["absolute_error"]
        return {"constant": {"error": {engine.ALL: error}}}
