"""What the study of quasi-attention trains on: lines of arithmetic, and pairs with planted signs.

Each is a task with its model, the places where that attends, and which pairs of tokens are there.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

import mechanisms
import tasks
from tasks import MLU_CHARACTERS, MLU_OPERATORS, Batch, MLUConfig, SignedPairsConfig

if TYPE_CHECKING:
    from transformer_lens import HookedRootModule

    from mechanisms.transformer import ComponentConfig

TaskConfig = MLUConfig | SignedPairsConfig
TASKS: dict[str, type[TaskConfig]] = {"mlu": MLUConfig, "signed_pairs": SignedPairsConfig}
"""The tasks by name."""

Alignment = Literal["heads", "networks"]

ALL = "all"
"""The group of all examples."""

_PAD, _BEGIN, _END = (MLU_CHARACTERS.index(mark) for mark in ("<pad>", "<bos>", "<eos>"))


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """How large a model is, whatever its attention.

    Args:
        d_model: width of the residual streams, or of all layers.
        d_mlp, n_layers: of the encoder, and again of the decoder; nothing to pairs.
        n_heads: each is d_model / n_heads wide.

    Raises:
        ValueError: n_heads does not divide d_model.
    """

    d_model: int
    d_mlp: int
    n_layers: int
    n_heads: int

    def __post_init__(self):
        if self.n_heads < 1 or self.d_model % self.n_heads:
            raise ValueError(f"n_heads must divide d_model = {self.d_model}, got {self.n_heads}")

    def attention(
        self, mechanism: str, composition: mechanisms.QuasiAttentionConfig | None
    ) -> mechanisms.AttentionConfig | mechanisms.CodaAttentionConfig:
        """CoDA with a composition, else one of `mechanisms.ATTENTION_VARIANTS`."""
        n_heads, d_head = self.n_heads, self.d_model // self.n_heads
        if composition is None:
            return mechanisms.AttentionConfig.named(mechanism, n_heads=n_heads, d_head=d_head)
        return mechanisms.CodaAttentionConfig(
            n_heads=n_heads, d_head=d_head, composition=composition
        )


class CodaTask(ABC):
    """A task, the model that learns it, and where that attends.

    Attributes:
        SPLITS: that are looked at, first the one like `train`.
        CENTRINGS: that its model allows.
        ALIGNMENTS: ways in which its model can attend.
        SHOWN: the place whose matrices are drawn.
    """

    SPLITS: ClassVar = ("id", "ood")
    CENTRINGS: ClassVar[Sequence[str]]
    ALIGNMENTS: ClassVar[Sequence[Alignment]]
    SHOWN: ClassVar[str]

    @abstractmethod
    def batch(self, split: str, index: int, size: int, device: str) -> Batch[Any]:
        """As a task's."""

    @abstractmethod
    def build(
        self,
        sizes: ModelSizes,
        alignment: Alignment,
        mechanism: str,
        composition: mechanisms.QuasiAttentionConfig | None,
        generator: torch.Generator,
    ) -> HookedRootModule:
        """The untrained model."""

    @abstractmethod
    def correct(self, output: Tensor, batch: Batch[Any]) -> Float[Tensor, " batch"]:
        """1 where the answer is right, else 0."""

    @abstractmethod
    def groups(self, batch: Batch[Any]) -> dict[str, Bool[Tensor, " batch"]]:
        """Which examples are in which group, first that of all."""

    @abstractmethod
    def chance(self) -> dict[str, float]:
        """The share of right answers of who always gives a group's most frequent one."""

    @abstractmethod
    def places(self, alignment: Alignment) -> dict[str, str]:
        """Where the model attends, and the start of the names of its hooks there.

        A glob, where there are several layers.
        """

    @abstractmethod
    def pairs(self, batch: Batch[Any]) -> dict[str, Bool[Tensor, "batch query_pos key_pos"]]:
        """The pairs of query and key at each place that are no padding, nor hidden by a mask."""

    @abstractmethod
    def signs(self, batch: Batch[Any]) -> dict[str, Int[Tensor, "batch query_pos key_pos"]]:
        """The planted signs at each place; none where nobody knows them."""

    @abstractmethod
    def words(self, batch: Batch[Any], example: int) -> tuple[list[str], list[str]]:
        """What the queries and keys of `SHOWN` are, one word for each, "" for padding."""


@functools.lru_cache(maxsize=16)
def coda_task(config: TaskConfig) -> CodaTask:
    """The task with this config; kept, since it prepares what it draws from once."""
    return MluTask(config) if isinstance(config, MLUConfig) else PairsTask(config)


class MluTask(CodaTask):
    """Lines of arithmetic, by an encoder and a decoder.

    An answer is right if every character is, which teacher-forced output decides as well as greedy
    one.
    """

    # A mean over all queries would show a decoder's what comes later.
    CENTRINGS = ("none", "row")
    ALIGNMENTS = ("heads",)
    SHOWN = "cross"

    def __init__(self, config: MLUConfig):
        self._task = tasks.MLU(config)

    def batch(self, split: str, index: int, size: int, device: str) -> Batch[Any]:
        """The task's."""
        return self._task.batch(split, index, size, device)

    def build(
        self,
        sizes: ModelSizes,
        alignment: Alignment,
        mechanism: str,
        composition: mechanisms.QuasiAttentionConfig | None,
        generator: torch.Generator,
    ) -> HookedRootModule:
        """An encoder and a decoder, all of whose attention is of this kind."""
        config = mechanisms.EncoderDecoderConfig(
            d_input=len(MLU_CHARACTERS),
            d_output=len(MLU_CHARACTERS),
            d_model=sizes.d_model,
            n_layers=sizes.n_layers,
            attention=sizes.attention(mechanism, composition),
            feed_forward=mechanisms.FeedForwardConfig(d_mlp=sizes.d_mlp),
            begin=_BEGIN,
            end=_END,
            padding=_PAD,
            shared=False,
        )
        return mechanisms.EncoderDecoder(config, generator=generator)

    def correct(self, output: Tensor, batch: Batch[Any]) -> Float[Tensor, " batch"]:
        """Whether all characters are right."""
        return self._task.score(output.argmax(-1), batch)["correct"]

    def groups(self, batch: Batch[Any]) -> dict[str, Bool[Tensor, " batch"]]:
        """By operator, and by whether both operands are one variable, which may cancel out."""
        latents = batch.latents
        found = {ALL: torch.ones(len(batch), dtype=torch.bool, device=batch.mask.device)}
        for number, sign in enumerate(MLU_OPERATORS):
            found[sign] = latents["operator"] == number
        same = latents["left"] == latents["right"]
        return found | {"one variable": same, "two variables": ~same}

    def chance(self) -> dict[str, float]:
        """About: of 10,000 lines."""
        batch = self._task.batch("train", 0, 10_000)
        results = {name: batch.latents["result"][of] for name, of in self.groups(batch).items()}
        return {
            name: some.unique(return_counts=True)[1].max().item() / len(some)
            for name, some in results.items()
        }

    def places(self, alignment: Alignment) -> dict[str, str]:
        """The encoder's and the decoder's self-attention, and what is between them."""
        return {
            "encoder": "encoder_blocks.*.attn.",
            "decoder": "decoder_blocks.*.attn.",
            "cross": "decoder_blocks.*.cross_attn.",
        }

    def pairs(self, batch: Batch[Any]) -> dict[str, Bool[Tensor, "batch query_pos key_pos"]]:
        """Of characters; a decoder's query sees itself and what is to its left."""
        line, given = (part != _PAD for part in batch.inputs)
        asked = batch.mask[:, :, None]
        return {
            "encoder": line[:, :, None] & line[:, None],
            "decoder": (asked & given[:, None]).tril(),
            "cross": asked & line[:, None],
        }

    def signs(self, batch: Batch[Any]) -> dict[str, Int[Tensor, "batch query_pos key_pos"]]:
        """None."""
        return {}

    def words(self, batch: Batch[Any], example: int) -> tuple[list[str], list[str]]:
        """The characters that are to be written, and those of the line."""
        written = [MLU_CHARACTERS[one] for one in batch.targets[example].tolist()]
        line = [MLU_CHARACTERS[one] for one in batch.inputs[0][example].tolist()]
        return _without_padding(written), _without_padding(line)


class PairsTask(CodaTask):
    """Pairs with planted signs, by decomposable attention.

    `heads`: A asks B, and B asks A, with one multi-head attention. `networks`: the paper's base
    model, in which both sides are aligned by one matrix, or its softmax over rows and columns.
    """

    ALIGNMENTS = ("heads", "networks")
    CENTRINGS = ("none", "row", "matrix")
    SHOWN = "a"

    def __init__(self, config: SignedPairsConfig):
        self._task = tasks.SignedPairs(config)

    def batch(self, split: str, index: int, size: int, device: str) -> Batch[Any]:
        """The task's."""
        return self._task.batch(split, index, size, device)

    def build(
        self,
        sizes: ModelSizes,
        alignment: Alignment,
        mechanism: str,
        composition: mechanisms.QuasiAttentionConfig | None,
        generator: torch.Generator,
    ) -> HookedRootModule:
        """Align, compare, aggregate."""
        headed: ComponentConfig | None = None
        if alignment == "heads":
            headed, composition = sizes.attention(mechanism, composition), None
        config = mechanisms.DecomposableAttentionConfig(
            d_input=self._task.vocabulary_size,
            d_output=2,
            d_model=sizes.d_model,
            composition=composition,
            attention=headed,
            padding=_PAD,
        )
        return mechanisms.DecomposableAttention(config, generator=generator)

    def correct(self, output: Tensor, batch: Batch[Any]) -> Float[Tensor, " batch"]:
        """Whether the more probable label is right."""
        return self._task.score(output, batch)["correct"]

    def groups(self, batch: Batch[Any]) -> dict[str, Bool[Tensor, " batch"]]:
        """By how far the signed sum is from 0."""
        size = batch.latents["total"].abs()
        return {
            ALL: torch.ones_like(size, dtype=torch.bool),
            "sum 1-3": size <= 3,
            "sum 4-8": (size > 3) & (size <= 8),
            "sum above 8": size > 8,
        }

    def chance(self) -> dict[str, float]:
        """Both labels are as frequent."""
        return dict.fromkeys(self.groups(self._task.batch("train", 0, 1)), 0.5)

    def places(self, alignment: Alignment) -> dict[str, str]:
        """`a` asks b; with heads also the other way."""
        return {"a": "align_a.", "b": "align_b."} if alignment == "heads" else {"a": ""}

    def pairs(self, batch: Batch[Any]) -> dict[str, Bool[Tensor, "batch query_pos key_pos"]]:
        """All: there is no padding."""
        everything = torch.ones_like(batch.latents["sign"], dtype=torch.bool)
        return {"a": everything, "b": everything.mT}

    def signs(self, batch: Batch[Any]) -> dict[str, Int[Tensor, "batch query_pos key_pos"]]:
        """Whether a token of A adds, subtracts or ignores one of B."""
        return {"a": batch.latents["sign"], "b": batch.latents["sign"].mT}

    def words(self, batch: Batch[Any], example: int) -> tuple[list[str], list[str]]:
        """The key (a letter) and polarity of A's tokens; the key and value of B's."""
        latents: Mapping[str, list[int]] = {
            name: batch.latents[name][example].tolist()
            for name in ("key_a", "polarity", "key_b", "value")
        }
        asking = zip(latents["key_a"], latents["polarity"], strict=True)
        told = zip(latents["key_b"], latents["value"], strict=True)
        return (
            [f"{_letter(key)}{'+' if sign > 0 else '-'}" for key, sign in asking],
            [f"{_letter(key)} {value:+d}" for key, value in told],
        )


def task_name(config: TaskConfig) -> str:
    """The name that `--task` has for it."""
    return next(name for name, kind in TASKS.items() if isinstance(config, kind))


def _letter(key: int) -> str:
    return chr(ord("a") + key) if key < 26 else f"k{key}"


def _without_padding(words: list[str]) -> list[str]:
    return ["" if word == "<pad>" else word for word in words]
