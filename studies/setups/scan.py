"""Setup: SCAN with an encoder-decoder (Mittal et al. 2021, section 4.6)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import mechanisms
import tasks
from studies.engine import Metric, Selection, reported
from studies.engine.setup import Role
from studies.setups.pairing import NORM_EPSILON, PairingSetup

if TYPE_CHECKING:
    import torch
    from jaxtyping import Bool
    from torch import Tensor

    from mechanisms.protocols import AttentionProtocol
    from tasks import Batch

LENGTHS = ((1, 12), (13, 24), (25, 36), (37, 48))
"""Ranges of the number of actions whose commands are scored as a group."""

PAPER_CUTOFFS = (22, 24, 25, 26, 27, 28, 29, 30)


@dataclass(frozen=True, kw_only=True)
class ScanSetup(PairingSetup):
    """An encoder-decoder that translates commands to actions.

    An answer is right if every action is right; for this, teacher forcing and greedy decoding
    agree. Checkpoints are chosen by likelihood on `id`, since accuracy there soon reaches 1.

    Args:
        task: the split and, for the split `length`, the largest number of actions in training.
        dropout: rate for embeddings, the outputs of all parts of a block, hidden activations and,
            in multi-head attention, patterns.
    """

    task: tasks.ScanConfig

    task_type: ClassVar = partial(tasks.Scan, trimmed=True)
    metrics: ClassVar = {
        **PairingSetup.metrics,
        "token_accuracy": Metric(
            "share of right actions, those before them given", percent=True, best=1.0
        ),
    }
    selection: ClassVar = Selection("id", "log_likelihood")
    reported: ClassVar = reported("mittal_2021", "scan")

    @property
    def splits(self) -> Mapping[str, Role]:
        """Further commands from the training distribution (`id`), and held-out ones (`ood`)."""
        return {"id": "in", "ood": "out"} if self.task.split != "simple" else {"id": "in"}

    @property
    def attention(self) -> AttentionProtocol:
        """Without biases, but for value queries and value keys, as in the authors' code."""
        attention = super().attention
        if isinstance(attention, mechanisms.AttentionConfig):
            return replace(attention, bias=False, dropout=self.dropout, dropout_shared=False)
        assert isinstance(attention, mechanisms.CompositionalAttentionConfig)
        return replace(attention, biases="selection")

    def build(self, generator: torch.Generator) -> mechanisms.EncoderDecoder:
        """An encoder-decoder whose layers share weights, within encoder and decoder each."""
        actions = tasks.SCAN_ACTIONS
        config = mechanisms.EncoderDecoderConfig(
            **self.blocks,
            d_input=len(tasks.SCAN_WORDS),
            d_output=len(actions),
            begin=actions.index("<bos>"),
            end=actions.index("<eos>"),
            padding=actions.index("<pad>"),
            marks=True,
            tied=True,
            post_norm=True,
            norm_epsilon=NORM_EPSILON,
            initialization="mittal_2021",
            dropout=self.dropout,
        )
        return mechanisms.EncoderDecoder(config, generator=generator)

    def groups(self, batch: Batch[Any]) -> dict[str, Bool[Tensor, " batch"]]:
        """By number of actions."""
        length = batch.latents["length"]
        return {f"{low}-{high}": (length >= low) & (length <= high) for low, high in LENGTHS}
