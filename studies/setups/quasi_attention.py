"""What both tasks of the quasi-attention study share: how models attend, and what is measured."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import xarray as xr

import mechanisms
import probes
from mechanisms.attention.quasi import Centring, Composition
from studies import engine
from studies.engine.setup import Scores
from tasks import Batch

COMPOSITION = ("affinity", "gate", "affinity_centring", "gate_centring", "doubled")
"""The settings of how CoDA composes its weights."""

PAIRS = ("example", "query_pos", "key_pos")
PLACES = ("place", "layer", "head")
LIMITS = {"affinity": 2.0, "dissimilarity": 3.0}
"""Beyond these tanh is within 0.04 of its limits, and the sigmoid within 0.05."""
ABOUT = {
    "affinity_matrix": "E, centred",
    "gate_matrix": "gate of N",
    "pattern": "M",
    "sign": "planted sign",
    "query": "word of each query",
    "key": "word of each key",
}
"""What `matrices` keeps."""


@dataclass(frozen=True, kw_only=True)
class QuasiSetup(engine.Setup):
    """A model that attends by softmax, linear attention, HYLA, or by CoDA (Tay et al. 2019).

    Args:
        model: one of `mechanisms.ATTENTION_VARIANTS`, or `coda`.
        d_model: width of the residual streams, or of all layers.
        n_heads: each is d_model / n_heads wide.
        affinity: CoDA's composition function of the affinity E.
        gate: its composition function of the dissimilarity N.
        affinity_centring: over what E is centred.
        gate_centring: over what N is centred.
        doubled: whether the gate is doubled.

    Attributes:
        shown: the place whose matrices are drawn.

    Raises:
        ValueError: a value is not allowed.
    """

    d_model: int
    n_heads: int
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
                "affinity_centring and gate_centring must be one of none, row: attention with "
                "heads has no matrix of all its queries, or would show a decoder's what comes later"
            )

    @property
    def may_centre_matrix(self) -> bool:
        """Whether E and N can be centred over all queries."""
        return False

    @property
    def composition(self) -> mechanisms.QuasiAttentionConfig | None:
        """How CoDA composes its weights; None for the others."""
        if self.model != "coda":
            return None
        return mechanisms.QuasiAttentionConfig(
            **{name: getattr(self, name) for name in COMPOSITION}
        )

    def attention(self) -> mechanisms.AttentionConfig | mechanisms.CodaAttentionConfig:
        """The attention with heads."""
        sizes: Any = {"n_heads": self.n_heads, "d_head": self.d_model // self.n_heads}
        if self.composition is None:
            return mechanisms.AttentionConfig.named(self.model, **sizes)
        return mechanisms.CodaAttentionConfig(composition=self.composition, **sizes)

    def inapplicable(self) -> frozenset[str]:
        return frozenset() if self.model == "coda" else frozenset(COMPOSITION)

    def scores(self, output: Any, batch: Batch[Any], split: str) -> Scores:
        right = self.sampler().score(output, batch)["correct"]
        return {"accuracy": (right, torch.ones_like(right))}

    @abstractmethod
    def places(self, batch: Batch[Any]) -> dict[str, probes.AttentionPlace]:
        """Where the model attends."""


def signs(trained: engine.Trained, n: int = 500) -> xr.Dataset:
    """How signed attention is, everywhere, and whether its signs are those that were planted.

    See `probes.measure_signedness`; `distribution` is the mean over places, layers and heads.

    Args:
        n: examples of each split.
    """
    models = {"trained": trained.model, "untrained": trained.untrained}
    found = probes.measure_signedness(models, examples(trained, n), resamples=200)
    mean = found["distribution"].mean(PLACES, keep_attrs=True)
    return found.assign(distribution=mean).rename(model="weights")


def saturation(trained: engine.Trained, n: int = 500) -> xr.Dataset | None:
    """How much of CoDA's E and N lies where the functions are flat, and its mean over all places.

    Args:
        n: examples of each split.
    """
    if trained.setup.composition is None:
        return None
    models, given = {"": trained.model}, examples(trained, n)
    found = probes.measure_saturation(models, given, LIMITS, resamples=200).sel(model="", drop=True)
    about = {"long_name": "share of pairs, mean over places and heads"}
    return found.assign(saturated_mean=found["saturated"].mean(PLACES).assign_attrs(about))


def matrices(trained: engine.Trained, n: int = 3) -> xr.Dataset | None:
    """CoDA's E, its gate and M in single examples of `ood`: the paper's Figure 2.

    `affinity_matrix`, `gate_matrix`, `pattern` [example, layer, head, query_pos, key_pos], NaN
    where there is no token; `query`, `key`: their words; `sign`, where it is planted.

    Args:
        n: examples.
    """
    if (setup := trained.setup).composition is None:
        return None
    batch = trained.batch("ood", n)
    place = {"shown": setup.places(batch)[setup.shown]}
    hooks = ["affinity", "gate", "pattern"]
    data = probes.capture_places(trained.model, [batch], place, hooks)["shown"]
    data = data.where(data["valid"]).drop_vars("valid")
    data = data.rename(affinity="affinity_matrix", gate="gate_matrix")
    words = [trained.task.words(batch, example) for example in range(n)]
    for name, some in zip(("query", "key"), zip(*words, strict=True), strict=True):
        data[name] = ("example", f"{name}_pos"), list(some)
    for name, variable in data.items():
        variable.attrs["long_name"] = ABOUT[str(name)]
    # Lines of other tasks have other lengths.
    return data.assign_coords({dim: range(data.sizes[dim]) for dim in PAIRS})


def examples(trained: engine.Trained, n: int) -> dict[str, Any]:
    """`n` examples of each split in batches, and where the model attends in them."""
    setup = trained.setup
    drawn = {split: trained.batch(split, n) for split in setup.splits}
    return {
        split: (list(batch.parts(setup.at_once)), setup.places(batch))
        for split, batch in drawn.items()
    }
