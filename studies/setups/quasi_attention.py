"""What both tasks of the quasi-attention study share: how models attend, and what is measured."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import xarray as xr

import mechanisms
import probes
from mechanisms.quasi_attention import Centring, Composition
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
"""What `Matrices` keeps."""


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
        right = self.sampler().score(output, batch)["correct"]  # pyright: ignore[reportAttributeAccessIssue]
        return {"accuracy": (right, torch.ones_like(right))}

    def examples(self, trained: engine.Trained, n: int) -> dict[str, Any]:
        """`n` examples of each split in batches, and where the model attends in them."""
        drawn = {split: trained.batch(split, n) for split in self.splits}
        return {
            split: (list(batch.parts(self.at_once)), self.places(batch))
            for split, batch in drawn.items()
        }

    @abstractmethod
    def places(self, batch: Batch[Any]) -> dict[str, probes.AttentionPlace]:
        """Where the model attends."""


def score_signs(data: xr.Dataset) -> xr.Dataset:
    """Of weights as they are, and `relative` to the largest of a head."""
    relative = probes.relative_weights(data["pattern"], valid=data["valid"])
    both = xr.Dataset({"weights": data["pattern"], "relative": relative}).to_dataarray("scale")
    known = {"valid": data["valid"], "sign": data.get("sign")}
    return probes.score_signedness(both, **known, resamples=200)


def score_saturation(data: xr.Dataset) -> xr.Dataset:
    """Of E and N, beyond `LIMITS`."""
    values = data[list(LIMITS)].to_dataarray("quantity")
    top = xr.DataArray(list(LIMITS.values()), coords={"quantity": list(LIMITS)})
    where: Any = {"low": -top, "high": top, "valid": data["valid"]}
    return probes.score_saturation(values, **where, resamples=200).drop_dims("bin")


@dataclass(frozen=True)
class Signs:
    """How signed attention is, everywhere, and whether its signs are those that were planted.

    Args:
        n: examples of each split.
    """

    n: int = 500

    def __call__(self, trained: engine.Trained) -> xr.Dataset:
        """`probes.score_signedness` [weights, split, place, scale, layer, head, ...].

        `distribution` is the mean over places, layers and heads.
        """
        models = {"trained": trained.model, "untrained": trained.untrained}
        examples = trained.setup.examples(trained, self.n)
        found = probes.examine_places(models, examples, ["pattern"], score_signs)
        found = found.rename(model="weights")
        found["distribution"] = found["distribution"].mean(PLACES, keep_attrs=True)
        return found


@dataclass(frozen=True)
class Saturation:
    """How much of CoDA's E and N lies where the functions are flat.

    Args:
        n: examples of each split.
    """

    n: int = 500

    def __call__(self, trained: engine.Trained) -> xr.Dataset | None:
        """`saturated` [split, place, quantity, layer, head, side], and its `saturated_mean`."""
        if trained.setup.composition is None:
            return None
        models, examples = {"": trained.model}, trained.setup.examples(trained, self.n)
        found = probes.examine_places(models, examples, list(LIMITS), score_saturation)
        found = found.sel(model="", drop=True)
        about = {"long_name": "share of pairs, mean over places and heads"}
        return found.assign(saturated_mean=found["saturated"].mean(PLACES).assign_attrs(about))


@dataclass(frozen=True)
class Matrices:
    """CoDA's E, its gate and M in single examples of `ood`: the paper's Figure 2.

    Args:
        n: examples.
    """

    n: int = 3

    def __call__(self, trained: engine.Trained) -> xr.Dataset | None:
        """`affinity_matrix`, `gate_matrix`, `pattern` [example, layer, head, query_pos, key_pos].

        NaN where there is no token; `query`, `key`: their words; `sign`, where it is planted.
        """
        if (setup := trained.setup).composition is None:
            return None
        batch = trained.batch("ood", self.n)
        place = {"shown": setup.places(batch)[setup.shown]}
        hooks = ["affinity", "gate", "pattern"]
        data = probes.capture_places(trained.model, [batch], place, hooks)["shown"]
        data = data.where(data["valid"]).drop_vars("valid")
        data = data.rename(affinity="affinity_matrix", gate="gate_matrix")
        words = [trained.task.words(batch, example) for example in range(self.n)]
        for name, some in zip(("query", "key"), zip(*words, strict=True), strict=True):
            data[name] = ("example", f"{name}_pos"), list(some)
        for name, variable in data.items():
            variable.attrs["long_name"] = ABOUT[str(name)]
        # Lines of other tasks have other lengths.
        return data.assign_coords({dim: range(data.sizes[dim]) for dim in PAIRS})
