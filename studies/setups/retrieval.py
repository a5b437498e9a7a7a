"""Setup: contextual retrieval by one layer of attention (Mittal et al. 2021)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import mechanisms
import tasks
from studies import engine
from studies.engine.setup import References, Scores

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

MODELS = ("multi_head", "multi_head_pairs", "compositional")


@dataclass(frozen=True, kw_only=True)
class RetrievalSetup(engine.Setup):
    """An encoder, one layer of attention between objects, and a read-out.

    The seed of the task (weights of its searches, and all examples) is the model's `seed`, so
    seeds also differ in the data.

    Args:
        model: `multi_head` with S heads; `multi_head_pairs` with a head of the same width for
            each pair of a search and a retrieval, S R heads; or `compositional` with S searches
            and R retrievals.
        task: the retrieval task; its seed must stay 0, see above.
        d_model: width of all S heads together.
        d_mlp: hidden units of encoder and read-out.

    Raises:
        ValueError: the task has a seed of its own, or the searches do not divide the width.
    """

    task: tasks.ContextualRetrievalConfig
    d_model: int
    d_mlp: int

    metrics: ClassVar = {"error": engine.Metric("mean absolute error", better="lower")}
    selection: ClassVar = engine.Selection("id", "error")
    reported: ClassVar = engine.reported("mittal_2021", "contextual_retrieval")

    def __post_init__(self):
        super().__post_init__()
        if self.task.seed != 0:
            raise ValueError(f"task.seed must be 0, got {self.task.seed}: set the setting seed")
        if self.d_model % (searches := self.task.n_searches):
            raise ValueError(f"d_model must be a multiple of {searches}, got {self.d_model}")

    def models(self) -> tuple[str, ...]:
        return MODELS

    def sampler(self) -> tasks.ContextualRetrieval:
        return engine.cached(tasks.ContextualRetrieval, replace(self.task, seed=self.seed))

    def build(self, generator: torch.Generator) -> mechanisms.RetrievalNetwork:
        """A network with one output per object."""
        searches, retrievals = self.task.n_searches, self.task.n_retrievals
        d_head = self.d_model // searches
        if self.model == "compositional":
            attention = mechanisms.CompositionalAttentionConfig(
                n_searches=searches, n_retrievals=retrievals, d_head=d_head
            )
        else:
            heads = searches if self.model == "multi_head" else searches * retrievals
            attention = mechanisms.AttentionConfig(n_heads=heads, d_head=d_head)
        config = mechanisms.RetrievalNetworkConfig(
            d_input=self.sampler().n_features,
            d_output=1,
            d_model=self.d_model,
            d_mlp=self.d_mlp,
            attention=attention,
        )
        return mechanisms.RetrievalNetwork(config, generator=generator)

    def loss(self, model: nn.Module, batch: tasks.Batch, step: int) -> Tensor:
        return (engine.answer(model, batch)[..., 0] - batch.targets).abs().mean()

    def scores(self, output: Tensor, batch: tasks.Batch, split: str) -> Scores:
        error = self.sampler().score(output, batch)["absolute_error"].mean(1)
        return {"error": (error, error.new_ones(len(batch)))}

    def references(self, split: str) -> References:
        """The expected error of the best constant answer, 0."""
        error = self.sampler().baseline(split)["absolute_error"]
        return {"constant": {"error": {engine.ALL: error}}}
