"""The benchmarks of Mittal et al. 2021, "Compositional Attention".

Each is a task with its model, how answers are judged, and the paper's figures.
"""

from __future__ import annotations

import functools
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

import mechanisms
import tasks
from studies.language_models import (
    PYTHON_HELP,
    language_model,
    text_of,
    unigram_scores,
    windows_scored,
)
from tasks import (
    Batch,
    ESBNConfig,
    ImagesConfig,
    ScanConfig,
    SortOfClevrConfig,
    TextConfig,
    TrianglesConfig,
)

if TYPE_CHECKING:
    from transformer_lens import HookedRootModule

    from mechanisms.transformer import HeadedConfig

TaskConfig = (
    SortOfClevrConfig | TrianglesConfig | ESBNConfig | ScanConfig | ImagesConfig | TextConfig
)
TASKS: dict[str, type[TaskConfig]] = {
    "sort_of_clevr": SortOfClevrConfig,
    "triangles": TrianglesConfig,
    "esbn": ESBNConfig,
    "scan": ScanConfig,
    "images": ImagesConfig,
    "text": TextConfig,
}
"""The tasks by name."""

Scores = dict[str, tuple[Float[Tensor, " batch"], Float[Tensor, " batch"]]]
"""Of each example two numbers for each metric: its figure is the sum of the first ones over that of
the second ones."""

Paper = Mapping[int, Mapping[str, float]]
"""The paper's figures: by the number of retrievals, 0 for multi-head attention, and by group."""

ALL = "all"
"""The group of all examples."""

# With ~, so that the settings, and with them the names of run folders, are the same everywhere.
BUNDLED_IMAGES = "~/.cache/modscope/images"
"""Where `digits`, which come with scikit-learn, are written when they are first asked for."""

_LENGTHS = ((1, 12), (13, 24), (25, 36), (37, 48))
"""Numbers of actions of SCAN's commands that are scored together."""

_WINDOWS = {
    "same_different": None,
    "rmts": (2, 2, 2),
    "distribution_of_three": (3, 6),
    "identity_rules": (3, 6),
}
"""Images of an ESBN problem that are normalised together, None: all; pairs, or a row and the rest.

Ours. It makes `rmts` easy: of two images that are the same, nothing is left; all six together it is
hard to learn at all.
"""

_PAPER_SCAN = {
    0: (0.01, 0.06, 0.12, 0.11, 0.22, 0.02, 0.03, 0.05),
    1: (0.01, 0.03, 0.24, 0.34, 0.38, 0.10, 0.13, 0.08),
}
_PAPER_CUTOFFS = (22, 24, 25, 26, 27, 28, 29, 30)
"""The paper has eight figures for cut-offs from 22 to 30: 23, we assume, is not among them."""


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """How large a model is, whatever its attention.

    Args:
        d_model, d_mlp, n_layers: of the transformer; `scan` has as many layers twice.
        n_heads: heads of multi-head attention, or searches; each is d_model / n_heads wide.
        d_selection: width of value queries and value keys; None for that of a head.
        patch_size: of pictures; None where there are none, or no patches.
        dropout: of hidden activations; and, but for `esbn` and `text`, of what each part of a
            block adds, and of the embedding.

    Raises:
        ValueError: n_heads does not divide d_model.
    """

    d_model: int
    d_mlp: int
    n_layers: int
    n_heads: int
    d_selection: int | None = None
    patch_size: int | None = None
    dropout: float = 0.0

    def __post_init__(self):
        if self.n_heads < 1 or self.d_model % self.n_heads:
            raise ValueError(f"n_heads must divide d_model = {self.d_model}, got {self.n_heads}")

    @property
    def feed_forward(self) -> mechanisms.FeedForwardConfig:
        """That of every block."""
        return mechanisms.FeedForwardConfig(d_mlp=self.d_mlp, dropout=self.dropout)

    @property
    def patch(self) -> int:
        """The size of a patch. Raises ValueError if there is none."""
        if self.patch_size is None:
            raise ValueError("patch_size must be given for pictures, got None")
        return self.patch_size


@dataclass(frozen=True)
class Metric:
    """What a figure is.

    Attributes:
        long_name: for files and figures.
        percent: whether tables and figures show it in percent.
        exponential: whether the ratio of sums is its logarithm.
    """

    long_name: str
    percent: bool = False
    exponential: bool = False


METRICS = {
    "accuracy": Metric("share of right answers", percent=True),
    "log_likelihood": Metric("mean log-probability of a target, in nats"),
    "token_accuracy": Metric("share of right tokens, the tokens before them given", percent=True),
    "perplexity": Metric("perplexity per word", exponential=True),
    "bits_per_byte": Metric("bits per byte"),
}


class Benchmark(ABC):
    """A task, the model that learns it, and how its answers are judged.

    Attributes:
        headline: the metric that the benchmark is about.
        select: `SPLIT/METRIC` that picks the best checkpoint.
        value_scores: glob of the hook points of value scores [batch, pos, search, retrieval],
            positions without padding; None if there are none such.
        resampled: the latent that says what intervals are over; None: over examples.
        at_once: examples that are run together.
    """

    headline: ClassVar[str] = "accuracy"
    select: ClassVar[str]
    value_scores: ClassVar[str | None] = "blocks.*.attn.hook_value_scores"
    resampled: ClassVar[str | None] = None
    at_once: ClassVar[int] = 200

    @property
    @abstractmethod
    def splits(self) -> tuple[str, ...]:
        """The splits that are looked at; the last one is that of the paper's figures."""

    @property
    @abstractmethod
    def condition(self) -> dict[str, str | int]:
        """What tells the task from the same one with other settings."""

    @abstractmethod
    def size(self, split: str) -> int | None:
        """Number of examples of a split; None for a stream without end."""

    @abstractmethod
    def batch(self, split: str, index: int, size: int, device: str) -> Batch[Any]:
        """As a task's."""

    @abstractmethod
    def build(
        self, sizes: ModelSizes, attention: HeadedConfig, generator: torch.Generator
    ) -> HookedRootModule:
        """The untrained model."""

    @abstractmethod
    def score(self, split: str, output: Tensor, batch: Batch[Any]) -> Scores:
        """Of each of `METRICS` that the benchmark has, two numbers for each example."""

    @abstractmethod
    def groups(self, batch: Batch[Any]) -> dict[str, Bool[Tensor, " batch"]]:
        """Which examples are in which group, but for that of all; the same names for each batch."""

    @abstractmethod
    def chance(self, split: str) -> dict[str, float]:
        """The headline's figure without knowledge of the inputs, for groups where it is known."""

    @abstractmethod
    def paper(self) -> Paper:
        """The paper's figures of the headline, on the last of `splits`."""


@functools.lru_cache(maxsize=64)
def benchmark_of(config: TaskConfig) -> Benchmark:
    """The benchmark with this task; kept, since it makes its examples once."""
    match config:
        case SortOfClevrConfig():
            return SortOfClevrBenchmark(config)
        case TrianglesConfig():
            return TrianglesBenchmark(config)
        case ESBNConfig():
            return EsbnBenchmark(config)
        case ScanConfig():
            return ScanBenchmark(config)
        case ImagesConfig():
            return ImagesBenchmark(config)
        case TextConfig():
            return TextBenchmark(config)


def batches(benchmark: Benchmark, split: str, n_examples: int, device: str) -> Iterator[Batch[Any]]:
    """The first examples of a split, or all if there are fewer, some at a time."""
    size, at_once = benchmark.size(split), benchmark.at_once
    n_examples = n_examples if size is None else min(n_examples, size)
    for first in range(0, n_examples, at_once):
        batch = benchmark.batch(split, first // at_once, at_once, device)
        yield batch[: n_examples - first]


class SortOfClevrBenchmark(Benchmark):
    """A picture in patches, and a question about it."""

    select = "valid/accuracy"
    resampled = "image"

    def __init__(self, config: SortOfClevrConfig):
        self._task = tasks.SortOfClevr(config)

    @property
    def splits(self) -> tuple[str, ...]:
        """Both have pictures of their own."""
        return "valid", "test"

    @property
    def condition(self) -> dict[str, str | int]:
        """Nothing: the task has one form."""
        return {}

    def size(self, split: str) -> int | None:
        """Pairs of a picture and a question."""
        return self._task.size(split)

    def batch(self, split: str, index: int, size: int, device: str) -> Batch[Any]:
        """The task's."""
        return self._task.batch(split, index, size, device)

    def build(
        self, sizes: ModelSizes, attention: HeadedConfig, generator: torch.Generator
    ) -> HookedRootModule:
        """A transformer over patches and the question."""
        image, question = self._task.batch("test", 0, 1).inputs
        config = mechanisms.PatchTransformerConfig(
            image_size=image.shape[-1],
            patch_size=sizes.patch,
            n_channels=image.shape[1],
            d_output=len(tasks.SORT_OF_CLEVR_ANSWERS),
            d_model=sizes.d_model,
            n_layers=sizes.n_layers,
            attention=attention,
            feed_forward=sizes.feed_forward,
            d_condition=question.shape[-1],
            dropout=sizes.dropout,
        )
        return mechanisms.PatchTransformer(config, generator=generator)

    def score(self, split: str, output: Tensor, batch: Batch[Any]) -> Scores:
        """Accuracy and log-likelihood."""
        return _of_one_target(self._task.score(output[:, 0], batch)["correct"], output, batch)

    def groups(self, batch: Batch[Any]) -> dict[str, Bool[Tensor, " batch"]]:
        """The question types, and the subtypes of each."""
        kinds, subkinds = batch.latents["question_type"], batch.latents["subtype"]
        types = tasks.SORT_OF_CLEVR_QUESTIONS
        found = {name: kinds == kind for kind, name in enumerate(types)}
        for name, subtypes in types.items():
            asked = {f"{name}: {one}": subkinds == number for number, one in enumerate(subtypes)}
            found |= {one: found[name] & is_asked for one, is_asked in asked.items()}
        return found

    def chance(self, split: str) -> dict[str, float]:
        """The most frequent answer to each question, without the picture."""
        return self._task.chance(split)

    def paper(self) -> Paper:
        """Accuracy of each type."""
        return {
            0: {"unary": 0.986, "binary": 0.844, "ternary": 0.649},
            3: {"unary": 0.989, "binary": 0.898, "ternary": 0.671},
        }


class TrianglesBenchmark(Benchmark):
    """A picture in patches: is the triangle equilateral?"""

    select = "valid/accuracy"

    def __init__(self, config: TrianglesConfig):
        self._task = tasks.Triangles(config)

    @property
    def splits(self) -> tuple[str, ...]:
        """Both have triangles of their own."""
        return "valid", "test"

    @property
    def condition(self) -> dict[str, str | int]:
        """Nothing: the task has one form."""
        return {}

    def size(self, split: str) -> int | None:
        """Number of pictures."""
        return self._task.size(split)

    def batch(self, split: str, index: int, size: int, device: str) -> Batch[Any]:
        """The task's."""
        return self._task.batch(split, index, size, device)

    def build(
        self, sizes: ModelSizes, attention: HeadedConfig, generator: torch.Generator
    ) -> HookedRootModule:
        """A transformer over patches."""
        config = mechanisms.PatchTransformerConfig(
            image_size=self._task.config.image_size,
            patch_size=sizes.patch,
            n_channels=1,
            d_output=2,
            d_model=sizes.d_model,
            n_layers=sizes.n_layers,
            attention=attention,
            feed_forward=sizes.feed_forward,
            dropout=sizes.dropout,
        )
        return mechanisms.PatchTransformer(config, generator=generator)

    def score(self, split: str, output: Tensor, batch: Batch[Any]) -> Scores:
        """Accuracy and log-likelihood."""
        return _of_one_target(self._task.score(output[:, 0], batch)["correct"], output, batch)

    def groups(self, batch: Batch[Any]) -> dict[str, Bool[Tensor, " batch"]]:
        """Whether it is equilateral."""
        equilateral = batch.latents["equilateral"]
        return {"equilateral": equilateral, "other": ~equilateral}

    def chance(self, split: str) -> dict[str, float]:
        """A half; what the longest side alone tells is more."""
        return {ALL: self._task.chance}

    def paper(self) -> Paper:
        """Accuracy."""
        return {0: {ALL: 0.938}, 1: {ALL: 0.956}, 2: {ALL: 0.967}, 4: {ALL: 0.970}}


class EsbnBenchmark(Benchmark):
    """Relations between images, some of them of objects that training lacks."""

    select = "id/accuracy"

    def __init__(self, config: ESBNConfig):
        self._task = tasks.ESBN(config)

    @property
    def splits(self) -> tuple[str, ...]:
        """Objects of training, and, if any are withheld, these."""
        return self._task.splits[1:]

    @property
    def condition(self) -> dict[str, str | int]:
        """The rule, and how many objects training lacks."""
        return {"rule": self._task.config.rule, "n_withheld": self._task.config.n_withheld}

    def size(self, split: str) -> int | None:
        """There is no end."""
        return None

    def batch(self, split: str, index: int, size: int, device: str) -> Batch[Any]:
        """The task's."""
        return self._task.batch(split, index, size, device)

    def build(
        self, sizes: ModelSizes, attention: HeadedConfig, generator: torch.Generator
    ) -> HookedRootModule:
        """Images encoded one by one, and a transformer over their codes."""
        config = mechanisms.RelationClassifierConfig(
            d_output=self._task.n_answers,
            attention=attention,
            feed_forward=sizes.feed_forward,
            d_model=sizes.d_model,
            n_layers=sizes.n_layers,
            windows=_WINDOWS[self._task.config.rule],
        )
        return mechanisms.RelationClassifier(config, generator=generator)

    def score(self, split: str, output: Tensor, batch: Batch[Any]) -> Scores:
        """Accuracy and log-likelihood."""
        return _of_one_target(self._task.score(output, batch)["accuracy"], output, batch)

    def groups(self, batch: Batch[Any]) -> dict[str, Bool[Tensor, " batch"]]:
        """The relations."""
        relation = batch.latents["relation"]
        return {name: relation == number for number, name in enumerate(self._task.relations)}

    def chance(self, split: str) -> dict[str, float]:
        """One over the number of answers."""
        return {ALL: self._task.chance}

    def paper(self) -> Paper:
        """None: the paper draws its figures."""
        return {}


class ScanBenchmark(Benchmark):
    """Commands to actions, by an encoder and a decoder.

    An answer is right if every action is, which teacher-forced output decides as well as greedy
    one. The checkpoint is that with the highest likelihood on `id`, where all is soon right.
    """

    select = "id/log_likelihood"
    value_scores = None

    def __init__(self, config: ScanConfig):
        self._task = tasks.Scan(config)

    @property
    def splits(self) -> tuple[str, ...]:
        """Further commands like those of training, and what was held out."""
        return self._task.splits[1:]

    @property
    def condition(self) -> dict[str, str | int]:
        """The split, and the most actions of training if it is about that, else 0."""
        config = self._task.config
        return {"scan": config.split, "cutoff": config.cutoff if config.split == "length" else 0}

    def size(self, split: str) -> int | None:
        """Number of commands."""
        return self._task.size(split)

    def batch(self, split: str, index: int, size: int, device: str) -> Batch[Any]:
        """The task's, without the columns that are padding in all of it."""
        batch = self._task.batch(split, index, size, device)
        (command, actions), width = batch.inputs, int(batch.latents["length"].max()) + 1
        words = int((command != tasks.SCAN_WORDS.index("<pad>")).sum(1).max())
        return Batch(
            inputs=(command[:, :words], actions[:, :width]),
            targets=batch.targets[:, :width],
            mask=batch.mask[:, :width],
            latents=batch.latents,
        )

    def build(
        self, sizes: ModelSizes, attention: HeadedConfig, generator: torch.Generator
    ) -> HookedRootModule:
        """An encoder and a decoder."""
        actions = tasks.SCAN_ACTIONS
        config = mechanisms.EncoderDecoderConfig(
            d_input=len(tasks.SCAN_WORDS),
            d_output=len(actions),
            d_model=sizes.d_model,
            n_layers=sizes.n_layers,
            attention=attention,
            feed_forward=sizes.feed_forward,
            begin=actions.index("<bos>"),
            end=actions.index("<eos>"),
            padding=actions.index("<pad>"),
            dropout=sizes.dropout,
        )
        return mechanisms.EncoderDecoder(config, generator=generator)

    def score(self, split: str, output: Tensor, batch: Batch[Any]) -> Scores:
        """Accuracy of whole answers and of tokens, and log-likelihood."""
        found = self._task.score(output.argmax(-1), batch)
        n_targets = batch.mask.sum(1).float()
        return {
            "accuracy": (found["correct"], torch.ones_like(n_targets)),
            "token_accuracy": (found["token_correct"] * n_targets, n_targets),
            "log_likelihood": (_log_likelihood(output, batch), n_targets),
        }

    def groups(self, batch: Batch[Any]) -> dict[str, Bool[Tensor, " batch"]]:
        """By the number of actions."""
        length = batch.latents["length"]
        return {f"{low}-{high}": (length >= low) & (length <= high) for low, high in _LENGTHS}

    def chance(self, split: str) -> dict[str, float]:
        """None: nothing is right by chance."""
        return {}

    def paper(self) -> Paper:
        """Accuracy with this cut-off."""
        config = self._task.config
        if config.split != "length" or config.cutoff not in _PAPER_CUTOFFS:
            return {}
        place = _PAPER_CUTOFFS.index(config.cutoff)
        return {model: {ALL: figures[place]} for model, figures in _PAPER_SCAN.items()}


class ImagesBenchmark(Benchmark):
    """Images of several data sets, each with classes of its own."""

    select = "valid/accuracy"

    def __init__(self, config: ImagesConfig):
        if config.folder == BUNDLED_IMAGES:
            _write_digits(Path(BUNDLED_IMAGES).expanduser() / "digits")
        self._task = tasks.Images(config)

    @property
    def splits(self) -> tuple[str, ...]:
        """Both have images of their own."""
        return "valid", "test"

    @property
    def condition(self) -> dict[str, str | int]:
        """Which data sets they are."""
        return {"sources": ",".join(self._task.config.sources)}

    def size(self, split: str) -> int | None:
        """Number of images."""
        return self._task.size(split)

    def batch(self, split: str, index: int, size: int, device: str) -> Batch[Any]:
        """The task's."""
        return self._task.batch(split, index, size, device)

    def build(
        self, sizes: ModelSizes, attention: HeadedConfig, generator: torch.Generator
    ) -> HookedRootModule:
        """A transformer over patches with a read-out for each data set."""
        config = mechanisms.PatchTransformerConfig(
            image_size=self._task.config.image_size,
            patch_size=sizes.patch,
            n_channels=3,
            d_output=self._task.n_classes,
            d_model=sizes.d_model,
            n_layers=sizes.n_layers,
            attention=attention,
            feed_forward=sizes.feed_forward,
            dropout=sizes.dropout,
        )
        return mechanisms.PatchTransformer(config, generator=generator)

    def score(self, split: str, output: Tensor, batch: Batch[Any]) -> Scores:
        """Accuracy and log-likelihood."""
        return _of_one_target(self._task.score(output, batch)["correct"], output, batch)

    def groups(self, batch: Batch[Any]) -> dict[str, Bool[Tensor, " batch"]]:
        """The data sets."""
        dataset = batch.latents["dataset"]
        return {name: dataset == n for n, name in enumerate(self._task.config.sources)}

    def chance(self, split: str) -> dict[str, float]:
        """The most frequent class of each data set."""
        return self._task.chance(split)

    def paper(self) -> Paper:
        """None that are known to us."""
        return {}


class TextBenchmark(Benchmark):
    """A text, token by token."""

    headline = "perplexity"
    select = "valid/log_likelihood"
    at_once = 8

    def __init__(self, config: TextConfig):
        self._config = config
        self._task = text_of(config)

    @property
    def splits(self) -> tuple[str, ...]:
        """Those of the text."""
        return "valid", "test"

    @property
    def condition(self) -> dict[str, str | int]:
        """Which text it is."""
        config = self._config
        return {"text": config.name if config.path is None else config.path}

    def size(self, split: str) -> int | None:
        """Number of windows."""
        return self._task.size(split)

    def batch(self, split: str, index: int, size: int, device: str) -> Batch[Any]:
        """The task's."""
        return self._task.batch(split, index, size, device)

    def build(
        self, sizes: ModelSizes, attention: HeadedConfig, generator: torch.Generator
    ) -> HookedRootModule:
        """A causal transformer."""
        config = language_model(
            self._config,
            vocabulary_size=self._task.vocabulary_size,
            attention=attention,
            d_model=sizes.d_model,
            d_mlp=sizes.d_mlp,
            n_layers=sizes.n_layers,
            dropout=sizes.dropout,
        )
        return mechanisms.Transformer(config, generator=generator)

    def score(self, split: str, output: Tensor, batch: Batch[Any]) -> Scores:
        """See `studies.language_models.windows_scored`."""
        return windows_scored(self._task, split, output, batch)

    def groups(self, batch: Batch[Any]) -> dict[str, Bool[Tensor, " batch"]]:
        """None: a text is one."""
        return {}

    def chance(self, split: str) -> dict[str, float]:
        """The perplexity of how often each token occurs in training."""
        return {ALL: unigram_scores(self._task, split)["perplexity"]}

    def paper(self) -> Paper:
        """Perplexity of WikiText-103."""
        if self._config.name != "wikitext-103-raw-v1" or self._config.path == PYTHON_HELP:
            return {}
        return {0: {ALL: 39.6}, 8: {ALL: 38.8}}


def _of_one_target(
    correct: Float[Tensor, " batch"], output: Float[Tensor, "batch 1 answer"], batch: Batch[Any]
) -> Scores:
    one = torch.ones_like(correct)
    return {"accuracy": (correct, one), "log_likelihood": (_log_likelihood(output, batch), one)}


def _log_likelihood(
    output: Float[Tensor, "batch pos answer"], batch: Batch[Any]
) -> Float[Tensor, " batch"]:
    """The sum over the targets that count, in nats."""
    of_targets = output.float().log_softmax(-1).gather(-1, batch.targets[..., None])[..., 0]
    return of_targets.where(batch.mask, 0).sum(1)


def _write_digits(place: Path) -> None:
    """Write scikit-learn's handwritten digits, 8 x 8 pixels, the last 297 of them as `test`."""
    if place.exists():
        return
    import datasets
    from sklearn.datasets import load_digits

    found = cast(Any, load_digits())
    names = [str(name) for name in found.target_names]
    kinds = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=names)}
    )
    images = (found.images * (255 / 16)).astype(np.uint8)
    parts = datasets.DatasetDict()
    for split, rows in (("train", slice(None, 1500)), ("test", slice(1500, None))):
        columns = {"image": list(images[rows]), "label": found.target[rows].tolist()}
        parts[split] = datasets.Dataset.from_dict(columns, features=kinds)
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent) as part:
        written = Path(part) / place.name
        with _without_progress_bars():
            parts.save_to_disk(str(written))
        # Where it fails another process was faster.
        with suppress(OSError):
            written.rename(place)


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    """Those of `datasets`."""
    import datasets

    shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()
