"""Erasure: remove what is linearly readable of a label, and see what becomes of the answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from types import EllipsisType, MappingProxyType
from typing import Any

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float, Int, Shaped
from torch import Tensor
from transformer_lens.utilities.statistics import derive_generator

from probes.capturing.hooking import HookedModel, check_model, evaluating
from probes.capturing.inputs import (
    Edit,
    Inputs,
    call,
    check_answer,
    count_examples,
    slices,
    take_rows,
)
from probes.checking import checked, described
from probes.interventions.answers import check_outcomes, hits_of
from probes.interventions.sites import NO_SITE, Firing, Hooks, firings_of_batches, resolve_sites
from probes.progress import progress
from probes.statistics.intervals import bootstrap_ratio, interval_variables

CONTROLS = ("control", "random")
CONDITIONS = (NO_SITE, "erased", *CONTROLS)
# Singular values of an eraser, as a share of the largest, that count for its rank.
_RESOLVED = 1e-6

Entries = int | slice | EllipsisType | Tensor | np.ndarray | tuple | list
"""An index into an activation [example, ...], such as `numpy.s_[:, -1]`; `...` for all of it."""


@checked
def erase(
    model: HookedModel,
    fit_inputs: Inputs,
    labels: Shaped[Tensor, "fit_example ..."],
    inputs: Inputs,
    *,
    hooks: Hooks,
    answer: Callable[[Any], Tensor],
    outcomes: Mapping[str, Tensor],
    entries: Entries = ...,
    samples: int = 1,
    draws: int = 10,
    resamples: int = 1000,
    batch_size: int = 256,
    seed: int = 0,
) -> xr.Dataset:
    """Erase a label from activations, and score the answers of the model.

    Least-squares concept erasure (Belrose et al. 2023, "LEACE: Perfect linear concept erasure in
    closed form"; the package concept-erasure): the smallest change after which no linear decoder
    of the activation is better than a constant on the examples that it is fitted on. If answers
    suffer from it more than from its controls, the model *uses* what is linearly readable:

    - "control": the same erasure of labels that are permuted among the examples; those of the
      samples of one example stay together.
    - "random": removal of the projection on a random subspace of the rank of the erasure, within
      the space that the codes span. Where a label explains much of the variance, erasing it removes
      more of it than this control does, see `removed`.

    Several hooks of a site are erased in the order in which they fire, and so are the firings of a
    module that a model applies several times (see `At` for one of them): each erasure is fitted on
    activations of a model in which the earlier ones are erased already.

    Args:
        model: an eager HookedRootModule or TransformerBridge.
        fit_inputs: inputs that erasures are fitted on: a tensor [fit_example, ...], or a tuple or
            mapping of them.
        labels: the label to erase, integers or booleans [fit_example, ...]: one per example, or one
            per sample.
        inputs: inputs of other examples, whose answers are scored.
        hooks: hook names or globs by site name, as in `interchange`.
        answer: maps the model's output to answers, integers [example] or [example, ...].
        outcomes: candidate answers by name, as in `interchange`, such as the right answers.
        entries: index of the entries of an activation that hold the code: `...` for all,
            `numpy.s_[:, -1]` for the last position of a residual stream, `numpy.s_[:, :, 16,
            [12, 14]]` for the weights of a query.
        samples: number of leading dims of the entries that index samples: 1 for examples; 2 for
            examples and positions, where all positions share one erasure. The other dims are
            features.
        draws: number of random subspaces, and of permutations of the labels.
        resamples: number of bootstrap resamples.
        batch_size: examples per forward pass.
        seed: seed of the controls and of the bootstrap.

    Returns:
        - `rate, rate_low, rate_high` [condition, site, outcome]: share of answers that are the
          outcome, for the controls the mean over draws; conditions "none" (no change; the same at
          all sites), "erased", "control" and "random".
        - `effect, effect_low, effect_high` [control, site, outcome]: the rate when erased minus
          that of the controls "none", "control" and "random".
        - `hit` [condition, site, outcome, example], 0..1, the mean over draws.
        - `rank` [site]: dimensions that are erased, the mean over hooks and firings.
        - `removed` [condition, site]: share of the variance of the code that is removed.

        Intervals are percentile bootstrap 95% intervals over examples.

    Raises:
        KeyError: an unknown hook; the message lists the nearest names.
        TypeError: the model cannot be hooked, or labels, answers or outcomes are not
            integers.
        ValueError: the model is compiled; there is no site or outcome; a site is named "none";
            there are fewer than two labels; shapes or numbers of examples do not match; a number
            is below 1; activations are not finite; nothing downstream reads what a site shows.
        RuntimeError: a hook did not fire, or fired less often than is asked for, or than in other
            batches; `inputs` need steps that `fit_inputs` do not.

    Example:
        >>> used = erase(model, fit.inputs, fit.latents["rule"][:, 0], test.inputs,
        ...     hooks={"layer 0": "blocks.0.hook_resid_post"}, entries=numpy.s_[:, -1],
        ...     answer=lambda logits: logits.argmax(-1), outcomes={"right": test.targets})
        >>> used["effect"].sel(control="random", outcome="right")
    """
    check_model(model)
    n_fit, n = count_examples("fit_inputs", fit_inputs), count_examples("inputs", inputs)
    numbers = {"samples": samples, "draws": draws, "batch_size": batch_size}
    _check_arguments(labels, n_fit, n, outcomes, numbers)
    sites = _in_order(model, fit_inputs, hooks, batch_size)
    for site, places in _in_order(model, inputs, hooks, batch_size).items():
        if missing := [place for place in places if place not in sites[site]]:
            raise RuntimeError(
                f"fit_inputs must reach the firings at {site!r} of inputs, {len(places)}, got "
                f"{len(sites[site])}, without number {missing[0][1]} of {missing[0][0]!r}"
            )
    code = _Code(model, entries, samples, batch_size)
    conditions = [("erased", 0), *product(CONTROLS, range(draws))]
    jobs = [(site, *condition) for site in sites for condition in conditions]
    hits: dict[tuple[str, str], list[np.ndarray]] = {}
    removed: dict[tuple[str, str], list[float]] = {}
    ranks: dict[str, list[int]] = {}
    with evaluating(model):
        unchanged = hits_of(code.answers(inputs, answer, {}), outcomes)
        before = {
            place: _Samples.of(code.read(fit_inputs, place, {}), samples)
            for place in {places[0] for places in sites.values()}
        }
        for site, condition, draw in progress(jobs, "erase"):
            generator = derive_generator(seed, f"{condition} {draw}")
            erasers: dict[Firing, _Eraser] = {}
            shares = []
            for number, place in enumerate(sites[site]):
                if erasers:
                    codes = _Samples.of(code.read(fit_inputs, place, erasers), samples)
                else:
                    codes = before[place]
                if condition == "random":
                    eraser = codes.random_eraser(ranks[site][number], generator)
                else:
                    order = slice(None)
                    if condition == "control":
                        order = torch.randperm(len(labels), generator=generator)
                    eraser = codes.label_eraser(_per_sample(labels.cpu()[order], codes.shape))
                if condition == "erased":
                    ranks.setdefault(site, []).append(eraser.rank)
                shares.append(eraser.share_of_variance(codes.values))
                erasers[place] = eraser
            changed = hits_of(code.answers(inputs, answer, erasers), outcomes)
            hits.setdefault((condition, site), []).append(changed)
            removed.setdefault((condition, site), []).append(float(np.mean(shares)))
    means = {key: np.mean(draws_of, axis=0) for key, draws_of in hits.items()}
    means |= {(NO_SITE, site): unchanged.astype(float) for site in sites}
    stacked = np.stack(
        [np.stack([means[condition, site] for site in sites]) for condition in CONDITIONS]
    )
    result = _scores(stacked, resamples, seed)
    result["rank"] = (
        "site",
        [float(np.mean(ranks[site])) for site in sites],
        {"long_name": "dimensions that are erased, mean over hooks and firings"},
    )
    result["removed"] = (
        ("condition", "site"),
        [
            [float(np.mean(removed.get((condition, site), 0.0))) for site in sites]
            for condition in CONDITIONS
        ],
        {"long_name": "share of the variance of the code that is removed", "units": "1"},
    )
    attrs = {"examples": n, "fit_examples": n_fit, "draws": draws, "seed": seed}
    interval = f"percentile bootstrap over examples, 95%, {resamples} resamples"
    coordinates = {"site": [*sites], "outcome": [*outcomes]}
    return result.assign_coords(coordinates).assign_attrs(**attrs, interval=interval)


@dataclass(frozen=True)
class _Eraser:
    """The affine map x - (x - mean) right^T left^T, which removes `rank` dimensions."""

    left: Float[Tensor, "feature rank"]
    right: Float[Tensor, "rank feature"]
    mean: Float[Tensor, " feature"]
    rank: int

    def __call__(self, x: Float[Tensor, "sample feature"]) -> Float[Tensor, "sample feature"]:
        return x - (x - self.mean) @ self.right.T @ self.left.T

    def share_of_variance(self, x: Float[Tensor, "sample feature"]) -> float:
        """The share of the variance of x that is removed; 0 if it does not vary."""
        variance = x.var(dim=0).sum()
        return float(1 - self(x).var(dim=0).sum() / variance) if variance > 0 else 0.0


@dataclass(frozen=True)
class _Samples:
    """The codes that erasures are fitted on, and the orthogonal axes that they span.

    Attributes:
        values: the codes.
        shape: sizes of the sample dims.
        axes: directions in which the codes vary.
    """

    values: Float[Tensor, "sample feature"]
    shape: tuple[int, ...]
    axes: Float[Tensor, "axis feature"]

    @classmethod
    def of(cls, values: Float[Tensor, "example ..."], samples: int) -> _Samples:
        flat = values.flatten(0, samples - 1).flatten(1).double()
        _, scale, axes = torch.linalg.svd(flat - flat.mean(dim=0), full_matrices=False)
        return cls(flat, tuple(values.shape[:samples]), axes[scale > _RESOLVED * scale[0]])

    def label_eraser(self, labels: Int[Tensor, " sample"]) -> _Eraser:
        """The eraser of labels: in the space that the codes span if this is smaller, or in all."""
        # Imported here because the package is needed for this probe alone.
        from concept_erasure import LeaceFitter

        one_hot = torch.nn.functional.one_hot(labels.unique(return_inverse=True)[1]).double()
        mean = self.values.mean(dim=0)
        # The package's own tolerance would leave rare classes readable.
        fit = partial(LeaceFitter.fit, z=one_hot, svd_tol=_RESOLVED)
        if len(self.values) < self.values.shape[1]:
            eraser = fit((self.values - mean) @ self.axes.T).eraser
            left, right = self.axes.T @ eraser.proj_left, eraser.proj_right @ self.axes
        else:
            eraser = fit(self.values).eraser
            left, right = eraser.proj_left, eraser.proj_right
        change = torch.linalg.svdvals(right)
        rank = int((change > _RESOLVED * change.max()).sum()) if change.max() > 0 else 0
        return _Eraser(left, right, mean, rank)

    def random_eraser(self, rank: int, generator: torch.Generator) -> _Eraser:
        """The eraser of a random subspace of the space that the codes span."""
        within = torch.randn(len(self.axes), rank, generator=generator, dtype=self.axes.dtype)
        basis = self.axes.T @ torch.linalg.qr(within).Q
        return _Eraser(basis, basis.T, self.values.mean(dim=0), rank)


@dataclass(frozen=True)
class _Code:
    """Where a code is in activations, and how a model runs while it is read or erased."""

    model: HookedModel
    entries: Entries
    samples: int
    batch_size: int

    def read(
        self, inputs: Inputs, place: Firing, erasers: Mapping[Firing, _Eraser]
    ) -> Float[Tensor, "example ..."]:
        """The code at a firing of a hook, with the erasures before it."""
        collected: list[Tensor] = []

        def collect(activation: Tensor) -> None:
            try:
                part = activation[self.entries]
            except (IndexError, TypeError) as error:
                part, reason = None, f"{error} ({described(self.entries)})"
            else:
                reason = f"shape {tuple(part.shape)}"
            if part is None or part.ndim <= self.samples or len(part) != len(activation):
                raise ValueError(
                    f"entries must select {self.samples} sample dims and features from the "
                    f"activation at {place[0]!r}, {tuple(activation.shape)}, got {reason}"
                )
            collected.append(part.detach().cpu().clone())

        n = count_examples("inputs", inputs)
        for rows in slices(n, self.batch_size):
            edits = self._edits(erasers, {place: collect})
            call(self.model, take_rows(inputs, rows), edits)
        read = torch.cat(collected) if collected else torch.empty(0)
        if len(read) != n:
            raise RuntimeError(f"hook {place[0]!r} must reach step {place[1]} in all batches")
        if wrong := int((~read.isfinite()).sum()):
            raise ValueError(
                f"activations at {place[0]!r} must be finite, got {wrong} NaN or infinite values"
            )
        return read

    def answers(
        self,
        inputs: Inputs,
        answer: Callable[[Any], Tensor],
        erasers: Mapping[Firing, _Eraser],
    ) -> Int[Tensor, "example ..."]:
        """The answers of the model with these erasures."""
        parts = []
        for rows in slices(count_examples("inputs", inputs), self.batch_size):
            output = call(self.model, take_rows(inputs, rows), self._edits(erasers))
            parts.append(check_answer(answer(output), rows.stop - rows.start))
        return torch.cat(parts)

    def _edits(
        self,
        erasers: Mapping[Firing, _Eraser],
        readers: Mapping[Firing, Callable[[Tensor], None]] = MappingProxyType({}),
    ) -> dict[str, Edit]:
        def edit(activation: Tensor, step: int, name: str) -> Tensor:
            if reader := readers.get((name, step)):
                reader(activation)
            eraser = erasers.get((name, step))
            return activation if eraser is None else self._erased(activation, eraser)

        return {name: partial(edit, name=name) for name, _ in (*erasers, *readers)}

    def _erased(self, activation: Tensor, eraser: _Eraser) -> Tensor:
        part = activation[self.entries]
        flat = part.flatten(0, self.samples - 1).flatten(1)
        erased = eraser(flat.cpu().double()).reshape(part.shape)
        changed = activation.clone()
        changed[self.entries] = erased.to(activation)
        return changed


def _in_order(
    model: HookedModel, inputs: Inputs, hooks: Hooks, batch_size: int
) -> dict[str, list[Firing]]:
    """The firings of each site's hooks in the order of the forward pass.

    Raises:
        KeyError: an unknown hook.
        RuntimeError: a hook does not fire, or fires less often than is asked for.
        ValueError: a place names a source.
    """
    ordered: dict[str, list[Firing]] = {}
    sites = resolve_sites(model, hooks, inputs, batch_size)
    names = [*dict.fromkeys(at.hook for places in sites.values() for at in places)]
    batches = firings_of_batches(model, inputs, names, batch_size)
    for site, places in sites.items():
        if any(at.source is not None or at.source_step is not None for at in places):
            raise ValueError(f"hooks[{site!r}] must name no source, there is none to erase from")
        of_site = {at.hook for at in places}
        fired = max(([one for one in batch if one[0] in of_site] for batch in batches), key=len)
        ordered[site] = [
            (name, step)
            for name, step in fired
            if any(at.hook == name and at.step in (None, step) for at in places)
        ]
        for at in places:
            if not any(at.hook == name and at.step in (None, step) for name, step in fired):
                raise RuntimeError(f"hooks must fire in the forward pass, {at} does not")
    return ordered


def _per_sample(labels: Tensor, shape: Sequence[int]) -> Int[Tensor, " sample"]:
    """The label of each sample [*shape], given one per example or one per sample."""
    if tuple(labels.shape) != tuple(shape[: labels.ndim]):
        raise ValueError(
            f"labels must have the shape {tuple(shape)} of the samples, or one per example, got "
            f"{tuple(labels.shape)}"
        )
    missing = len(shape) - labels.ndim
    return labels[(..., *[None] * missing)].expand(*shape).reshape(-1).long()


def _scores(
    hits: Float[np.ndarray, "condition site outcome example"], resamples: int, seed: int
) -> xr.Dataset:
    columns = np.moveaxis(hits, -1, 0)
    effects = columns[:, 1:2] - columns[:, [0, 2, 3]]
    rate, effect = (
        bootstrap_ratio(values, resamples=resamples, seed=seed) for values in (columns, effects)
    )
    dims = ("site", "outcome")
    rates = interval_variables(
        "rate", rate, ("condition", *dims), long_name="share of answers equal to the outcome"
    )
    differences = interval_variables(
        "effect", effect, ("control", *dims), long_name="rate when erased minus that of the control"
    )
    long_name = "the answer is the outcome, mean over draws"
    return xr.Dataset(
        rates
        | differences
        | {"hit": (("condition", *dims, "example"), hits, {"long_name": long_name})},
        coords={
            "condition": ("condition", [*CONDITIONS], {"long_name": "what was erased"}),
            "control": [NO_SITE, *CONTROLS],
        },
    )


def _check_arguments(
    labels: Tensor,
    n_fit: int,
    n: int,
    outcomes: Mapping[str, Tensor],
    numbers: Mapping[str, int],
) -> None:
    if labels.is_floating_point() or labels.is_complex():
        raise TypeError(f"labels must be integers or booleans, got {labels.dtype}")
    if labels.ndim == 0 or len(labels) != n_fit:
        raise ValueError(
            f"labels must have the {n_fit} examples of fit_inputs, got {tuple(labels.shape)}"
        )
    if len(labels.unique()) < 2:
        raise ValueError(f"labels must have at least two values, got {labels.unique().tolist()}")
    for name, number in numbers.items():
        if number < 1:
            raise ValueError(f"{name} must be at least 1, got {number}")
    check_outcomes(outcomes, n)
