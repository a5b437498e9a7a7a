"""What all tasks of the quasi-attention studies share: attention, and measures of it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import xarray as xr

import mechanisms
import probes
from mechanisms.attention.quasi import Centring, Composition
from studies import engine
from studies.engine.setup import References, Scores
from tasks import Batch

COMPOSITION = (
    *("alpha", "beta", "affinity", "gate"),
    *("affinity_centring", "gate_centring", "doubled"),
)
"""Settings of CoDA's composition of attention weights."""

PAIRS = ("example", "query_pos", "key_pos")
PLACES = ("place", "layer", "head")
MOST_SHOWN = 40
"""The most queries and keys of a matrix that is kept for a figure."""
LIMITS = {"affinity": 2.0, "dissimilarity": 3.0}
"""Beyond these values tanh is within 0.04 of its limits, and the sigmoid within 0.05."""
ABOUT = {
    "affinity_matrix": "E, centred if the model does so",
    "gate_matrix": "gate of N",
    "pattern": "M",
    "sign": "planted sign",
    "query": "word of each query",
    "key": "word of each key",
}
"""Variables of `matrices`."""


@dataclass(frozen=True, kw_only=True)
class QuasiSetup(engine.Setup):
    """A model with softmax attention, linear attention, HYLA or CoDA (Tay et al. 2019).

    Args:
        model: one of `mechanisms.ATTENTION_VARIANTS`, or `coda`.
        d_model: width of the residual streams, or of all layers.
        n_heads: number of heads, each of width d_model / n_heads.
        alpha: CoDA's factor of the affinity E. The paper advises at most 1, the less the wider
            the vectors are.
        beta: its factor of the dissimilarity N; the same.
        scaled: whether E and N are also divided by sqrt(d_head), as in the paper's transformer.
        affinity: CoDA's composition function of the affinity E.
        gate: its composition function of the dissimilarity N.
        affinity_centring: dims over which E is centred. `matrix` is the paper's; a decoder, which
            must not see later queries, has `row` instead.
        gate_centring: the same for N.
        doubled: whether the gate is doubled.

    Attributes:
        shown: the attention whose matrices are drawn.

    Raises:
        ValueError: a value is not allowed.
    """

    d_model: int
    n_heads: int
    alpha: float = 1.0
    beta: float = 1.0
    scaled: bool = True
    affinity: Composition = "tanh"
    gate: Composition = "sigmoid"
    affinity_centring: Centring = "none"
    gate_centring: Centring = "none"
    doubled: bool = False

    shown: ClassVar[str]

    def __post_init__(self):
        super().__post_init__()
        if self.n_heads < 1 or self.d_model % self.n_heads:
            raise ValueError(f"n_heads must divide d_model = {self.d_model}, got {self.n_heads}")

    def models(self) -> tuple[str, ...]:
        return (*mechanisms.ATTENTION_VARIANTS, "coda")

    def check(self) -> None:
        super().check()
        composition = self.composition
        if composition is not None and composition.centres_matrix and not self.may_centre_matrix:
            raise ValueError(
                "affinity_centring and gate_centring must be one of none, row, got matrix: the "
                "attention between two sequences of different lengths has no mean over queries"
            )

    @property
    def may_centre_matrix(self) -> bool:
        """Whether E and N can be centred over all queries."""
        return False

    @property
    def composition(self) -> mechanisms.QuasiAttentionConfig | None:
        """The config of CoDA's composition; None for other models."""
        if self.model != "coda":
            return None
        return mechanisms.QuasiAttentionConfig(
            **{name: getattr(self, name) for name in COMPOSITION}
        )

    def attention(
        self, dropout: float = 0.0
    ) -> mechanisms.AttentionConfig | mechanisms.CodaAttentionConfig:
        """The config of multi-head attention or of CoDA with heads."""
        sizes: Any = {"n_heads": self.n_heads, "d_head": self.d_model // self.n_heads}
        if self.composition is None:
            config = mechanisms.AttentionConfig.named(self.model, **sizes)
        else:
            config = mechanisms.CodaAttentionConfig(
                composition=self.composition, scaled=self.scaled, **sizes
            )
        return replace(config, dropout=dropout, dropout_shared=False)

    def inapplicable(self) -> frozenset[str]:
        return frozenset() if self.model == "coda" else frozenset({*COMPOSITION, "scaled"})

    def scores(self, output: Any, batch: Batch[Any], split: str) -> Scores:
        right = self.sampler().score(output, batch)["correct"]
        return {"accuracy": (right, torch.ones_like(right))}

    def references(self, split: str) -> References:
        """The accuracy of the best answer without the text, as the task has it."""
        return {"chance": {"accuracy": {engine.ALL: self.sampler().chance(split)}}}

    @abstractmethod
    def places(self, batch: Batch[Any]) -> dict[str, probes.AttentionPlace]:
        """The attentions of the model, each with its hooks and its mask."""


def signs(trained: engine.Trained, n: int = 500) -> xr.Dataset:
    """The signs of attention weights, and whether they agree with the planted ones.

    See `probes.measure_signedness`; `distribution` is the mean over places, layers and heads.

    Args:
        trained: the trained model and its untrained control.
        n: examples of each split.
    """
    models = {"trained": trained.model, "untrained": trained.untrained}
    scores = probes.measure_signedness(models, examples(trained, n), resamples=200)
    mean = scores["distribution"].mean(PLACES, keep_attrs=True)
    return scores.assign(distribution=mean).rename(model="weights")


def saturation(trained: engine.Trained, n: int = 500) -> xr.Dataset | None:
    """The share of CoDA's E and N beyond `LIMITS`, where the functions are flat, and its mean.

    Args:
        trained: the trained model.
        n: examples of each split.
    """
    if trained.setup.composition is None:
        return None
    models, batches = {"": trained.model}, examples(trained, n)
    scores = probes.measure_saturation(models, batches, LIMITS, resamples=200)
    scores = scores.sel(model="", drop=True)
    about = {"long_name": "share of pairs, mean over places and heads"}
    return scores.assign(saturated_mean=scores["saturated"].mean(PLACES).assign_attrs(about))


def matrices(trained: engine.Trained, n: int = 3) -> xr.Dataset | None:
    """CoDA's E, its gate and M in single examples of the setup's last split, `ood` if it has one.

    `affinity_matrix`, `gate_matrix`, `pattern` [example, layer, head, query_pos, key_pos], NaN
    at padding; `query`, `key`: the tokens as words; `sign`: the planted signs, if there are any.

    Args:
        trained: the trained model.
        n: number of examples.
    """
    if (setup := trained.setup).composition is None:
        return None
    batch = trained.batch(list(setup.splits)[-1], n)
    places = {"shown": setup.places(batch)[setup.shown]}
    hooks = ["affinity", "gate", "pattern"]
    data = first_pairs(probes.capture_places(trained.model, [batch], places, hooks)["shown"])
    data = data.where(data["valid"]).drop_vars("valid")
    data = data.rename(affinity="affinity_matrix", gate="gate_matrix")
    words = [words_of(trained.task, batch, example, data.sizes) for example in range(len(batch))]
    for name in ("query", "key"):
        data[name] = ("example", f"{name}_pos"), [of_example[name] for of_example in words]
    for name, variable in data.items():
        variable.attrs["long_name"] = ABOUT[str(name)]
    # Cells with other tasks have other lengths.
    return data.assign_coords({dim: range(data.sizes[dim]) for dim in PAIRS})


def first_pairs(data: xr.Dataset) -> xr.Dataset:
    """Matrices of the first `MOST_SHOWN` queries and keys, which can still be drawn."""
    return data.isel(query_pos=slice(MOST_SHOWN), key_pos=slice(MOST_SHOWN))


def words_of(
    task: Any, batch: Batch[Any], example: int, sizes: Mapping[Any, int]
) -> dict[str, list[str]]:
    """The words of the queries and of the keys of an example, "" at padding.

    Args:
        task: its `words` are a pair of lists; or a single one, of a text that attends to itself.
        batch, example: the example.
        sizes: the number of words of each, as `query_pos` and `key_pos`.
    """
    words = task.words(batch, example)
    pair = words if isinstance(words, tuple) else (words, words)
    found = {}
    for name, tokens in zip(("query", "key"), pair, strict=True):
        width = sizes[f"{name}_pos"]
        found[name] = [*tokens, *[""] * width][:width]
    return found


def examples(trained: engine.Trained, n: int) -> dict[str, Any]:
    """`n` examples of each split in batches, with the attentions of the model on them."""
    setup = trained.setup
    batches = {split: trained.batch(split, n) for split in setup.splits}
    return {
        split: (list(batch.parts(setup.evaluation_batch_size)), setup.places(batch))
        for split, batch in batches.items()
    }
