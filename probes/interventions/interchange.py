"""Interchange interventions: patch activations from other examples and compare the answers."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import xarray as xr
from jaxtyping import Bool
from torch import Tensor

from probes.capturing.hooking import HookedModel, broadcasts, check_model, evaluating
from probes.capturing.inputs import Inputs, call, check_answer, count_examples, slices, take_rows
from probes.checking import checked
from probes.interventions.answers import (
    Metric,
    check_outcomes,
    check_scored,
    hits_of,
    measure,
    metric_variables,
)
from probes.interventions.sites import NO_SITE, At, Hooks, resolve_sites
from probes.progress import progress
from probes.statistics.intervals import exact_rates, interval_variables


@checked
def interchange(
    model: HookedModel,
    base_inputs: Inputs,
    source_inputs: Inputs,
    *,
    hooks: Hooks,
    where: Bool[Tensor, "#example ..."] | Mapping[str, Bool[Tensor, "#example ..."]],
    answer: Callable[[Any], Tensor] | None = None,
    outcomes: Mapping[str, Tensor] | None = None,
    metrics: Mapping[str, Metric] | None = None,
    batch_size: int = 256,
    resamples: int = 1000,
    seed: int = 0,
) -> xr.Dataset:
    """Patch activations of source examples into the runs on base examples, and score the answers.

    An interchange intervention (Geiger et al. 2021, "Causal Abstractions of Neural Networks"): if
    the patched run gives the answer of the *source's* rule for the *base's* panels, the patched
    entries encode the rule, and later layers use it. For the latent code, the base is an instance
    A, the source an instance B with another rule, `hooks` are the attention patterns, and `where`
    selects the entries from the query token to its key tokens. Compare the outcomes "answer of B's
    rule on A's panels" and "A's own answer". Two controls: sources with the *same* rule show
    effects that are not due to the rule; the site "none", the unpatched run, shows how often an
    outcome occurs anyway.

    TransformerLens' own interchange acts on subspaces of a residual stream; this one exchanges
    single entries of any activation, such as those of an attention pattern.

    Args:
        model: an eager HookedRootModule or TransformerBridge.
        base_inputs: inputs of the model: a tensor [example, ...], or a tuple or mapping of them.
        source_inputs: the same layout; example i is the source of base example i.
        hooks: hook names or globs by site name; all hooks of a site are patched *together*:
            `{"layer 0": "blocks.0.attn.hook_pattern", "all": "blocks.*.attn.hook_pattern"}`. A hook
            that fires several times in a pass is patched each time, from the source's firing of the
            same number; `At` names one firing, or another hook or firing of the source.
        where: mask of the entries to patch; broadcasts against each hooked activation and has all
            its dims, for example [example, 1, query_pos, key_pos]. Or several masks by scope name,
            each patched in separate runs: `{"code": code, "row": code.any(-1, keepdim=True)}`.
        answer: maps the model's output to answers, integers [example] or [example, ...].
        outcomes: candidate answers by name, each with the shape of all answers. An answer is a hit
            if all its entries equal the candidate's; -1 in a candidate matches anything.
        metrics: numbers by name, instead of or beside answers: functions of the model's output and
            the examples (a slice) to floats [example], such as a difference of logits, a
            probability or an error.
        batch_size: examples per forward pass.
        resamples, seed: of the bootstrap of metrics.

    Returns:
        `hit` [site, outcome, example] (int8, 0 or 1); `rate`, `rate_low`, `rate_high`
        [site, outcome]: the share of hits and its exact 95% interval (Clopper-Pearson). The first
        site is "none". With several masks, `scope` is the first dim of all.

        With metrics: `value` [site, metric], the mean over examples; `change` [site, metric], the
        mean difference to the site "none", both with percentile bootstrap 95% intervals (`_low`,
        `_high`); and `example_value` [site, metric, example].

    Raises:
        KeyError: an unknown hook; the message lists the nearest names.
        TypeError: the model cannot be hooked, `where` is not boolean, or answers or outcomes are
            not integers.
        ValueError: the model is compiled; there is no site, scope or outcome; a site is named
            "none"; nothing downstream reads what a site shows, such as attention weights that a
            module only returns; numbers of examples differ; `where`, an outcome or the activations
            of base and source do not match in shape.
        RuntimeError: a hook did not fire, or fired less often than is asked for.

    Example:
        >>> entries = torch.ones(len(base), 1, 1, 1).bool()  # all heads, queries and keys
        >>> patched = interchange(
        ...     model, base, source, hooks={"all": "blocks.*.attn.hook_pattern"}, where=entries,
        ...     answer=lambda logits: logits.argmax(-1), outcomes={"source's answer": answers})
        >>> patched["rate"].sel(outcome="source's answer")
    """
    check_model(model)
    examples = count_examples("base_inputs", base_inputs)
    scopes = where if isinstance(where, Mapping) else {"": where}
    metrics = metrics or {}
    check_scored({"answer": answer, "outcomes": outcomes}, metrics)
    _check_arguments(examples, source_inputs, scopes, outcomes)
    sites = resolve_sites(model, hooks, base_inputs, batch_size)
    keys = [(scope, site) for scope in scopes for site in (NO_SITE, *sites)]
    answers: dict[tuple[str, str], list[Tensor]] = {key: [] for key in keys}
    numbers: dict[tuple[str, str], list[np.ndarray]] = {key: [] for key in keys}
    sources = list(dict.fromkeys(at.source_hook for site in sites.values() for at in site))

    def keep(scope: str, site: str, output: Any, rows: slice) -> None:
        if answer is not None:
            answers[scope, site].append(check_answer(answer(output), rows.stop - rows.start))
        numbers[scope, site].append(measure(metrics, output, rows))

    with evaluating(model):
        for rows in progress(slices(examples, batch_size), "interchange"):
            base = take_rows(base_inputs, rows)
            source = _collect(model, take_rows(source_inputs, rows), sources)
            unpatched = call(model, base)
            for scope, entries in scopes.items():
                keep(scope, NO_SITE, unpatched, rows)
                batch_entries = entries[rows] if len(entries) == examples else entries
                for site, places in sites.items():
                    output = _run_patched(model, base, places, source, batch_entries)
                    keep(scope, site, output, rows)

    result = xr.Dataset(
        coords={"scope": list(scopes), "site": [NO_SITE, *sites]}, attrs={"examples": examples}
    )
    shape = len(scopes), 1 + len(sites)
    if outcomes is not None:
        hits = np.stack([hits_of(torch.cat(batches), outcomes) for batches in answers.values()])
        hits = hits.reshape(*shape, len(outcomes), examples)
        dims = ("scope", "site", "outcome")
        long_name = "share of answers equal to the outcome"
        result = result.assign_coords(outcome=list(outcomes))
        result["hit"] = (*dims, "example"), hits, {"long_name": "the answer is the outcome"}
        rates = interval_variables("rate", exact_rates(hits), dims, long_name=long_name)
        result = result.assign(rates)
        result.attrs["interval"] = "exact 95% (Clopper-Pearson) over examples"
    if metrics:
        values = np.stack([np.concatenate(batches, axis=1) for batches in numbers.values()])
        values = values.reshape(*shape, len(metrics), examples)
        result = result.assign_coords(metric=list(metrics)).assign(
            metric_variables(values, ("scope", "site", "metric"), resamples=resamples, seed=seed)
        )
    return result if isinstance(where, Mapping) else result.isel(scope=0, drop=True)


def _check_arguments(
    examples: int,
    source_inputs: Inputs,
    scopes: Mapping[str, Tensor],
    outcomes: Mapping[str, Tensor] | None,
) -> None:
    sources = count_examples("source_inputs", source_inputs)
    if sources != examples:
        raise ValueError(
            f"source_inputs must have the {examples} examples of base_inputs, got {sources}"
        )
    if not scopes:
        raise ValueError("where must name at least one scope, got an empty mapping")
    for scope, where in scopes.items():
        name = f"where[{scope!r}]" if scope else "where"
        if where.dtype != torch.bool:
            raise TypeError(f"{name} must be a bool tensor, got {where.dtype}")
        if where.ndim == 0 or len(where) not in (1, examples):
            raise ValueError(
                f"{name} must have {examples} examples or 1, got shape {tuple(where.shape)}"
            )
    if outcomes is not None:
        check_outcomes(outcomes, examples)


def _collect(model: HookedModel, inputs: Inputs, names: list[str]) -> dict[str, list[Tensor]]:
    """Collect copies of the source's activations, whose storage a later step may overwrite."""
    collected: dict[str, list[Tensor]] = {name: [] for name in names}

    def keep(activation: Tensor, step: int, name: str) -> Tensor:
        collected[name].append(activation.clone())
        return activation

    call(model, inputs, {name: partial(keep, name=name) for name in names})
    return collected


def _run_patched(
    model: HookedModel,
    inputs: Inputs,
    places: Sequence[At],
    sources: Mapping[str, list[Tensor]],
    entries: Tensor,
) -> Any:
    patched: set[At] = set()

    def patch(activation: Tensor, step: int, name: str) -> Tensor:
        for at in places:
            if at.hook == name and at.step in (None, step):
                activation = _patched(activation, at, step, sources[at.source_hook], entries)
                patched.add(at)
        return activation

    output = call(model, inputs, {at.hook: partial(patch, name=at.hook) for at in places})
    if missing := [at for at in places if at not in patched]:
        raise RuntimeError(f"the base must reach the step of {missing[0]}, it takes fewer")
    return output


def _patched(
    activation: Tensor, at: At, step: int, sources: Sequence[Tensor], entries: Tensor
) -> Tensor:
    source_step = step if at.source_step is None else at.source_step
    if source_step >= len(sources):
        raise RuntimeError(
            f"the source must reach step {source_step} at {at.source_hook!r}, it takes "
            f"{len(sources)}"
        )
    source = sources[source_step]
    if activation.shape != source.shape:
        raise ValueError(
            f"the source's activation at {at.source_hook!r} must have the shape of the base's at "
            f"{at.hook!r}, {tuple(activation.shape)}, got {tuple(source.shape)}"
        )
    if not broadcasts(entries, activation):
        raise ValueError(
            f"where must broadcast to the activation at {at.hook!r}, {tuple(activation.shape)}, "
            f"dim by dim, got {tuple(entries.shape)} for these examples"
        )
    return torch.where(entries.to(activation.device), source, activation)
