"""Alignment of a task's variables with sites of a model, by interchange within subspaces."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import xarray as xr
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformer_lens.tools.analysis.interchange import (
    DASResult,
    Intervention,
    SubspaceInterchange,
    collect_activations,
    fit_das,
    intervened_logits,
    random_basis,
)
from transformer_lens.utilities.statistics import derive_generator

from probes.capturing.hooking import HookedModel, check_model, evaluating
from probes.checking import checked
from probes.interventions.answers import hits_of
from probes.interventions.swaps import NO_ANSWER, Swaps
from probes.interventions.vectors import Vector, VectorModel, check_vector
from probes.progress import progress
from probes.statistics.intervals import Interval, bootstrap_ratio, interval_variables

LEARNED, OTHERS, UNTRAINED = "learned", "another variable", "untrained"
UNTRAINED_NONE = "untrained, none"
CONTROLS = ("none", "whole", "pca", "random", OTHERS, UNTRAINED, UNTRAINED_NONE)
PAIRS = ("all", "changed")

_IGNORED = -100  # the label that torch's cross-entropy leaves out


@checked
def align(
    model: HookedModel,
    fit: Swaps,
    test: Mapping[str, Swaps],
    *,
    sites: Mapping[str, Vector],
    logits: Callable[[Any], Tensor],
    ranks: Sequence[int],
    untrained: HookedModel | None = None,
    draws: int = 5,
    epochs: int = 20,
    learning_rate: float = 1e-2,
    batch_size: int = 128,
    resamples: int = 1000,
    seed: int = 0,
) -> xr.Dataset:
    """Find out at which sites, and in which subspaces, a model keeps a task's variables.

    Interchange intervention accuracy (Geiger et al. 2021, "Causal Abstractions of Neural
    Networks"): how often the model's answer to the base, with a vector of the source patched in, is
    the causal model's answer with a *variable* of the source. Distributed alignment search (Geiger
    et al. 2024, "Finding Alignments Between Interpretable Causal Variables and Distributed Neural
    Representations") learns the subspace in which the vector is exchanged. Learned on `fit`, scored
    on `test`. TransformerLens learns and exchanges.

    DAS finds subspaces in random networks, too, and whole vectors carry everything that was
    computed. So `learned` stands beside controls:

    - "none": no exchange. Pairs in which the variable makes no difference count as hits here: see
      `pairs`.
    - "whole": all of the vector is exchanged. What it gives already needs no subspace.
    - "pca": as many principal components of the vector, in the bases and sources of `fit`.
    - "random": a random subspace of the same rank, the mean over `draws`.
    - "another variable": the subspaces learned for the other variables, their mean; high where the
      subspace carries more than the variable. Only with several variables.
    - "untrained": a subspace learned in the same way in a model with random weights, if passed;
      "untrained, none": that model without exchange, which may guess right.

    Args:
        model: an eager HookedRootModule or TransformerBridge.
        fit: pairs on which subspaces are learned, see `swap`. Base and source should differ in
            more than the variable.
        test: other pairs by split, with the variables of `fit`.
        sites: vectors by name.
        logits: maps the model's output to logits [example, class] or [example, answer, class], of
            the shape of the answers and a class dim.
        ranks: dimensions of the subspaces, each at least 1 and at most that of the smallest vector.
        untrained: the same model with random weights.
        draws: number of random subspaces.
        epochs, learning_rate, batch_size: of the search (Adam).
        resamples: number of bootstrap resamples.
        seed: seed of the search, random subspaces and the bootstrap.

    Returns:
        Coordinates `split`, `site`, `rank`, `variable`, `control` ("learned", then the controls)
        and `pairs`: "all" pairs with an answer, or those in which the variable has "changed" the
        causal model's answer.

        - `accuracy, accuracy_low, accuracy_high` [split, pairs, site, rank, control, variable].
        - `above, above_low, above_high` [...]: the accuracy of "learned" minus that of the control.
        - `trials` [split, pairs, variable]: number of pairs.
        - `loss` [site, rank, variable, epoch]: of the search. More epochs are needed where it still
          falls at its end.
        - `basis` [site, rank, variable, feature, axis]: the learned subspaces, orthonormal; NaN
          beyond the rank and the size of a vector.

        Intervals: 95%, percentile bootstrap over pairs.

    Raises:
        KeyError: an unknown hook, or a split lacks a variable.
        TypeError: a model cannot be hooked.
        ValueError: a model is compiled; there is no site, split or rank; a rank is larger than a
            vector; shapes do not match; entries, or answers among the classes, that there are not;
            nothing downstream reads the value of a hook.
        RuntimeError: a hook does not fire at its step, or fires again without one, in some batch.

    Example:
        >>> found = align(
        ...     model,
        ...     probes.swap(task, *fit, {"rule": {"rule": fit[1].latents["rule"]}}),
        ...     {"ood": probes.swap(task, *ood, {"rule": {"rule": ood[1].latents["rule"]}})},
        ...     sites={"layer 1": probes.Vector("blocks.1.hook_resid_post", numpy.s_[:, -1])},
        ...     logits=lambda output: output,
        ...     ranks=[4],
        ... )
        >>> found["accuracy"].sel(pairs="changed")["control"].values.tolist()
        ['learned', 'none', 'whole', 'pca', 'random']
    """
    numbers = {"draws": draws, "epochs": epochs, "batch_size": batch_size, "resamples": resamples}
    _check_arguments(fit, test, sites, ranks, numbers)
    models = {LEARNED: model} if untrained is None else {LEARNED: model, UNTRAINED: untrained}
    for each in models.values():
        check_model(each)
        for name, vector in sites.items():
            check_vector(each, name, vector, fit.base, batch_size)
    hits: dict[str, list[dict[str, np.ndarray]]] = {split: [] for split in test}
    losses, bases = [], []
    for name, vector in progress([*sites.items()], "align"):
        searches = {
            key: _Search(each, vector, logits, epochs, learning_rate, batch_size, seed)
            for key, each in models.items()
        }
        search = searches[LEARNED]
        components = search.components(fit, name, max(ranks))
        # Many subspaces are exchanged in the same pairs: their hits, with the sources read once.
        hits_in = {
            (key, split): partial(each.hits, swaps, each.sources(swaps))
            for key, each in searches.items()
            for split, swaps in test.items()
        }
        unchanged = {
            split: {
                "none": hits_in[LEARNED, split](_keep),
                "whole": hits_in[LEARNED, split](_replace),
            }
            for split in test
        }
        for rank in ranks:
            learned = {
                key: [each.learn(fit, variable, rank) for variable in fit.answers]
                for key, each in searches.items()
            }
            losses.append([result.losses for result in learned[LEARNED]])
            bases.append([result.basis.cpu().numpy() for result in learned[LEARNED]])
            seeds = [derive_generator(seed, f"{name} {rank} {draw}") for draw in range(draws)]
            random = [random_basis(len(components), rank, g.initial_seed()) for g in seeds]
            for split in test:
                hits_here = hits_in[LEARNED, split]
                of_random = [hits_here(SubspaceInterchange(basis)) for basis in random]
                found = unchanged[split] | {
                    "pca": hits_here(SubspaceInterchange(components[:, :rank])),
                    "random": np.mean(of_random, axis=0),
                }
                for key in searches:
                    subspaces = [SubspaceInterchange(result.basis) for result in learned[key]]
                    crossed = np.stack([hits_in[key, split](subspace) for subspace in subspaces])
                    # [variable of the subspace, variable, pair]
                    found[key] = np.stack([row[i] for i, row in enumerate(crossed)])
                    if key == UNTRAINED:
                        found[UNTRAINED_NONE] = hits_in[key, split](_keep)
                    elif len(crossed) > 1:
                        found[OTHERS] = (crossed.sum(axis=0) - found[key]) / (len(crossed) - 1)
                hits[split].append(found)
    shape = len(sites), len(ranks)
    parts = [_scores(hits[split], swaps, shape, resamples, seed) for split, swaps in test.items()]
    joined: Any = xr.concat(parts, xr.Variable("split", [*test], {"long_name": "split"}))
    dims, lead = ("site", "rank", "variable"), (*shape, len(fit.answers))
    loss, basis = np.array(losses), _padded(bases)
    loss, basis = (array.reshape(*lead, *array.shape[2:]) for array in (loss, basis))
    about = {"long_name": "axes of the learned subspace"}
    result = joined.assign(
        loss=((*dims, "epoch"), loss, {"long_name": "loss of the search", "units": "nat"}),
        basis=((*dims, "feature", "axis"), basis, about),
        site=("site", [*sites], {"long_name": "vector that is exchanged"}),
        rank=("rank", [*ranks], {"long_name": "dimensions of the subspace"}),
        variable=("variable", [*fit.answers], {"long_name": "variable of the causal model"}),
    )
    attrs = {"epochs": epochs, "learning_rate": learning_rate, "draws": draws, "seed": seed}
    return result.assign_attrs(attrs)


@dataclass(frozen=True)
class _Search:
    """Subspaces of a vector of a model, and what is answered when they are exchanged."""

    model: HookedModel
    vector: Vector
    logits: Callable[[Any], Tensor]
    epochs: int
    learning_rate: float
    batch_size: int
    seed: int

    def learn(self, swaps: Swaps, variable: str, rank: int) -> DASResult:
        """Learn the subspace of a variable from the pairs that have an answer."""
        wanted = swaps.answers[variable]
        pairs = _has_answer(wanted).nonzero()[:, 0]
        run = self._run(swaps)
        with evaluating(self.model, gradients=True):
            return fit_das(
                run,
                run.HOOK,
                pairs,
                pairs + len(swaps),
                torch.where(wanted == NO_ANSWER, _IGNORED, wanted)[pairs],
                run,
                rank=rank,
                epochs=self.epochs,
                batch_size=self.batch_size,
                lr=self.learning_rate,
                seed=self.seed,
            )

    def components(self, swaps: Swaps, name: str, n: int) -> Float[Tensor, "feature axis"]:
        """Principal components of the vectors of all bases and sources."""
        pairs = torch.arange(len(swaps))
        vectors = torch.cat([self._vectors(swaps, pairs), self.sources(swaps)])
        if n > min(vectors.shape):
            raise ValueError(
                f"ranks must be at most {min(vectors.shape)}, the size of the vector {name!r} or "
                f"the number of examples, got {n}"
            )
        return torch.linalg.svd(vectors - vectors.mean(dim=0), full_matrices=False).Vh[:n].T

    def sources(self, swaps: Swaps) -> Float[Tensor, "pair feature"]:
        """The vectors of all sources."""
        return self._vectors(swaps, torch.arange(len(swaps)) + len(swaps))

    def hits(
        self, swaps: Swaps, sources: Float[Tensor, "pair feature"], intervention: Intervention
    ) -> Float[np.ndarray, "variable pair"]:
        """Whether the answer to each base, after the intervention, is the causal model's."""
        run, pairs = self._run(swaps), torch.arange(len(swaps))
        with evaluating(self.model):
            found = intervened_logits(
                run, run.HOOK, intervention, pairs, sources, run, batch_size=self.batch_size
            )
        answers = found.argmax(dim=1)
        if answers.shape != swaps.own.shape:
            raise ValueError(
                "logits must return [example, class] or [example, answer, class] for answers of "
                f"the shape {tuple(swaps.own.shape)}, got answers {tuple(answers.shape)}"
            )
        return hits_of(answers, swaps.answers).astype(np.float64)

    def _vectors(self, swaps: Swaps, pairs: Tensor) -> Float[Tensor, "pair feature"]:
        run = self._run(swaps)
        with evaluating(self.model):
            return collect_activations(run, run.HOOK, pairs, run, batch_size=self.batch_size)

    def _run(self, swaps: Swaps) -> VectorModel:
        return VectorModel(self.model, self.vector, swaps, self.logits)


def _keep(base: Tensor, source: Tensor) -> Tensor:
    return base


def _replace(base: Tensor, source: Tensor) -> Tensor:
    return source


def _has_answer(answers: Int[Tensor, "pair ..."]) -> Bool[Tensor, " pair"]:
    return (answers != NO_ANSWER).reshape(len(answers), -1).any(dim=1)


def _masks(swaps: Swaps) -> Bool[np.ndarray, "which variable pair"]:
    """The pairs that have an answer, and those in which it is another one than the base's."""
    answered = [_has_answer(answers) for answers in swaps.answers.values()]
    differs = [
        ((answers != NO_ANSWER) & (answers != swaps.own)).reshape(len(swaps), -1).any(dim=1)
        for answers in swaps.answers.values()
    ]
    return torch.stack([torch.stack(answered), torch.stack(differs)]).numpy()


def _scores(
    hits: Sequence[Mapping[str, Float[np.ndarray, "variable pair"]]],
    swaps: Swaps,
    shape: tuple[int, int],
    resamples: int,
    seed: int,
) -> xr.Dataset:
    """Accuracies and their differences; `hits` are of each site and rank, by control."""
    controls = [name for name in (LEARNED, *CONTROLS) if name in hits[0]]
    values = np.stack([[found[name] for name in controls] for found in hits])
    # [pair, which, site and rank, control, variable]
    columns = np.moveaxis(values, -1, 0)[:, None]
    masks = np.moveaxis(_masks(swaps), -1, 0)[:, :, None, None]
    wholes = np.broadcast_to(masks, (*columns.shape[:1], 2, *columns.shape[2:])).astype(float)
    dims = ("pairs", "site", "rank", "control", "variable")
    result = xr.Dataset(coords={"pairs": list(PAIRS), "control": controls})
    for name, parts, about in (
        ("accuracy", columns, "share of answers that are the causal model's"),
        ("above", columns[:, :, :, :1] - columns, "accuracy of the learned subspace, minus this"),
    ):
        found = bootstrap_ratio(parts * wholes, wholes, resamples=resamples, seed=seed)
        split = Interval(*(part.reshape(2, *shape, *part.shape[2:]) for part in found))
        result = result.assign(interval_variables(name, split, dims, long_name=about))
    counts = masks[:, :, 0, 0].sum(axis=0)
    result["trials"] = ("pairs", "variable"), counts, {"long_name": "number of pairs"}
    result["control"].attrs["long_name"] = "what is exchanged"
    result["pairs"].attrs["long_name"] = "which pairs"
    result.attrs["interval"] = f"percentile bootstrap over pairs, 95%, {resamples} resamples"
    return result


def _padded(
    bases: Sequence[Sequence[Float[np.ndarray, "feature axis"]]],
) -> Float[np.ndarray, "search variable feature axis"]:
    """Stack bases of different sizes, filled up with NaN."""
    sizes = [max(basis.shape[dim] for row in bases for basis in row) for dim in (0, 1)]
    padded = np.full((len(bases), len(bases[0]), *sizes), np.nan)
    for row, of_variables in zip(padded, bases, strict=True):
        for target, basis in zip(row, of_variables, strict=True):
            target[: basis.shape[0], : basis.shape[1]] = basis
    return padded


def _check_arguments(
    fit: Swaps,
    test: Mapping[str, Swaps],
    sites: Mapping[str, Vector],
    ranks: Sequence[int],
    numbers: Mapping[str, int],
) -> None:
    for name, given in {"test": test, "sites": sites, "ranks": ranks}.items():
        if not given:
            raise ValueError(f"{name} must not be empty, got {given!r}")
    if min(ranks) < 1:
        raise ValueError(f"ranks must be at least 1, got {list(ranks)}")
    for split, swaps in test.items():
        if [*swaps.answers] != [*fit.answers]:
            raise KeyError(
                f"test[{split!r}] must have the variables of fit, {', '.join(fit.answers)}, got "
                f"{', '.join(swaps.answers)}"
            )
    for name, number in numbers.items():
        if number < 1:
            raise ValueError(f"{name} must be at least 1, got {number}")
    for variable, answers in fit.answers.items():
        if not _has_answer(answers).any():
            raise ValueError(f"fit must have answers with {variable!r} exchanged, got none")
