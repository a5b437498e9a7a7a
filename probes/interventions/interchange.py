"""Is the code used, not only readable? Patch it from another instance and see what is answered."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import xarray as xr
from jaxtyping import Bool
from torch import Tensor

from probes.capturing.hooking import HookedModel, check_model, evaluating, resolve_hooks
from probes.capturing.inputs import (
    Inputs,
    call,
    check_answer,
    count_examples,
    slices,
    take_examples,
)
from probes.statistics.intervals import exact_rates, interval_variables

NO_SITE = "none"


def interchange(
    model: HookedModel,
    base_inputs: Inputs,
    source_inputs: Inputs,
    *,
    hooks: Mapping[str, str | Sequence[str]],
    where: Bool[Tensor, "#example ..."] | Mapping[str, Bool[Tensor, "#example ..."]],
    answer: Callable[[Any], Tensor],
    outcomes: Mapping[str, Tensor],
    batch_size: int = 256,
) -> xr.Dataset:
    """Run base instances with source instances' activations written into chosen entries of hooks.

    An interchange intervention (Geiger et al. 2021, "Causal Abstractions of Neural Networks"): if
    the patched run answers what the rule *of the source* gives on the panels *of the base*, then
    the patched entries carry the rule, and what follows uses it. For the latent code: the base is
    an instance A, the source an instance B with another rule, `hooks` the attention patterns, and
    `where` the entries from the query token to its key tokens. The outcomes to compare are the
    answer that B's rule gives on A's panels, and A's own. Run it again with sources that have
    *the same* rule: what changes then is not due to the rule. And compare with the site "none",
    the unpatched run, which shows how often an outcome is met anyway.

    TransformerLens' own interchange acts on subspaces of a residual stream; here single entries of
    any activation are exchanged, such as entries of an attention pattern.

    Args:
        model: an eager HookedRootModule or TransformerBridge.
        base_inputs: what the model is called with: [example, ...] tensor, or a tuple or mapping of
            such tensors.
        source_inputs: the same layout; example i is the source of base example i.
        hooks: by the name of a site, the hook names or globs that are patched *together* there:
            `{"layer 0": "blocks.0.attn.hook_pattern", "all": "blocks.*.attn.hook_pattern"}`.
        where: which entries are taken from the source; broadcasts against each hooked activation,
            all its dims present, for example [example, 1, query_pos, key_pos]. Or several such by
            the name of a scope, each patched in runs of its own:
            `{"code": code, "row": code.any(-1, keepdim=True)}`.
        answer: from the model's output to the answer, integers [example] or [example, ...].
        outcomes: candidate answers by name, each of the shape of all answers together. An answer
            hits when all its entries are equal to the candidate's; a candidate's entry of -1 is
            met by anything.
        batch_size: examples per forward pass.

    Returns:
        `hit` [site, outcome, example] (int8, 0 or 1); `rate`, `rate_low`, `rate_high`
        [site, outcome]: the share of hits and its exact 95% interval (Clopper-Pearson). The first
        site is "none". With several `where`, the first dim of all is `scope`.

    Raises:
        KeyError: an unknown hook; the message lists the nearest.
        TypeError: a model that cannot be hooked, `where` that is not boolean, answers that are not
            integers.
        ValueError: a compiled model, no site, scope or outcome, a site named "none", numbers of
            examples that differ, `where` or an outcome of another shape, base and source
            activations of different shapes.
        RuntimeError: a hook did not fire exactly once in a forward pass.
    """
    check_model(model)
    sites = _resolve_sites(model, hooks)
    examples = count_examples("base_inputs", base_inputs)
    scopes = where if isinstance(where, Mapping) else {"": where}
    _check_arguments(examples, source_inputs, scopes, outcomes, batch_size)

    answers: dict[tuple[str, str], list[Tensor]] = {
        (scope, site): [] for scope in scopes for site in (NO_SITE, *sites)
    }
    every_hook = list(dict.fromkeys(hook for names in sites.values() for hook in names))
    with evaluating(model):
        for part in slices(examples, batch_size):
            size = part.stop - part.start
            base = take_examples(base_inputs, part)
            source = _collect(model, take_examples(source_inputs, part), every_hook)
            unpatched = check_answer(answer(call(model, base)), size)
            for scope, entries in scopes.items():
                answers[scope, NO_SITE].append(unpatched)
                here = entries[part] if len(entries) == examples else entries
                for site, names in sites.items():
                    output = _run_patched(model, base, {name: source[name] for name in names}, here)
                    answers[scope, site].append(check_answer(answer(output), size))

    hits = np.stack([_hits(torch.cat(chunks), outcomes) for chunks in answers.values()])
    hits = hits.reshape(len(scopes), 1 + len(sites), len(outcomes), examples)
    dims = ("scope", "site", "outcome")
    about = "share of answers equal to the outcome"
    result = xr.Dataset(
        {
            "hit": ((*dims, "example"), hits, {"long_name": "the answer is the outcome"}),
            **interval_variables("rate", exact_rates(hits), dims, long_name=about),
        },
        coords={"scope": list(scopes), "site": [NO_SITE, *sites], "outcome": list(outcomes)},
        attrs={"examples": examples, "interval": "exact 95% (Clopper-Pearson) over examples"},
    )
    return result if isinstance(where, Mapping) else result.isel(scope=0, drop=True)


def _resolve_sites(
    model: HookedModel, hooks: Mapping[str, str | Sequence[str]]
) -> dict[str, list[str]]:
    if not hooks or NO_SITE in hooks:
        raise ValueError(
            f"hooks must name at least one site, none of them {NO_SITE!r} (the unpatched run), "
            f"got {list(hooks)}"
        )
    sites: dict[str, list[str]] = {}
    for site, patterns in hooks.items():
        listed = [patterns] if isinstance(patterns, str) else patterns
        names = dict.fromkeys(name for pattern in listed for name in resolve_hooks(model, pattern))
        if not names:
            raise ValueError(f"hooks[{site!r}] must name at least one hook, got {patterns!r}")
        sites[site] = list(names)
    return sites


def _check_arguments(
    examples: int,
    source_inputs: Inputs,
    scopes: Mapping[str, Tensor],
    outcomes: Mapping[str, Tensor],
    batch_size: int,
) -> None:
    sources = count_examples("source_inputs", source_inputs)
    if sources != examples:
        raise ValueError(f"base_inputs has {examples} examples, but source_inputs has {sources}")
    if not scopes:
        raise ValueError("where must name at least one scope, got an empty mapping")
    for scope, where in scopes.items():
        name = f"where[{scope!r}]" if scope else "where"
        if where.dtype != torch.bool:
            raise TypeError(f"{name} must be a bool tensor, got {where.dtype}")
        if where.ndim == 0 or len(where) not in (1, examples):
            raise ValueError(f"{name} must begin with {examples} or 1, got {tuple(where.shape)}")
    if not outcomes:
        raise ValueError("outcomes must name at least one outcome, got an empty mapping")
    for name, outcome in outcomes.items():
        if outcome.ndim == 0 or len(outcome) != examples:
            raise ValueError(
                f"outcomes[{name!r}] must have {examples} examples, "
                f"got shape {tuple(outcome.shape)}"
            )
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")


def _collect(model: HookedModel, inputs: Inputs, names: list[str]) -> dict[str, Tensor]:
    """The source's activations, copied: a later step may write into their storage."""
    collected: dict[str, Tensor] = {}

    def listener(name: str) -> Callable[..., None]:
        def hook_function(activation: Tensor, hook: Any) -> None:
            if name in collected:
                raise RuntimeError(f"hook {name!r} fired more than once in one forward pass")
            collected[name] = activation.clone()

        return hook_function

    with model.hooks(fwd_hooks=[(name, listener(name)) for name in names]):
        call(model, inputs)
    silent = [name for name in names if name not in collected]
    if silent:
        raise RuntimeError(f"hooks that did not fire in the forward pass: {silent}")
    return collected


def _run_patched(
    model: HookedModel, inputs: Inputs, sources: Mapping[str, Tensor], entries: Tensor
) -> Any:
    fired: list[str] = []

    def writer(name: str, source: Tensor) -> Callable[..., Tensor]:
        def hook_function(activation: Tensor, hook: Any) -> Tensor:
            fired.append(name)
            if activation.shape != source.shape:
                raise ValueError(
                    f"at {name!r} the base has shape {tuple(activation.shape)}, the source "
                    f"{tuple(source.shape)}; they must be equal"
                )
            _check_broadcast(name, entries, activation)
            return torch.where(entries.to(activation.device), source, activation)

        return hook_function

    with model.hooks(fwd_hooks=[(name, writer(name, source)) for name, source in sources.items()]):
        output = call(model, inputs)
    if sorted(fired) != sorted(sources):
        raise RuntimeError(f"hooks {list(sources)} must fire once each in a pass, fired: {fired}")
    return output


def _check_broadcast(name: str, entries: Tensor, activation: Tensor) -> None:
    fits = entries.ndim == activation.ndim and all(
        size in (1, whole) for size, whole in zip(entries.shape, activation.shape, strict=True)
    )
    if not fits:
        raise ValueError(
            f"where must broadcast to the activation at {name!r}, dim by dim: its part for these "
            f"examples has shape {tuple(entries.shape)}, the activation {tuple(activation.shape)}"
        )


def _hits(answered: Tensor, outcomes: Mapping[str, Tensor]) -> np.ndarray:
    for name, outcome in outcomes.items():
        if outcome.shape != answered.shape:
            raise ValueError(
                f"outcomes[{name!r}] must have the shape of the answers "
                f"{tuple(answered.shape)}, got {tuple(outcome.shape)}"
            )
    candidates = [outcome.cpu() for outcome in outcomes.values()]
    equal = [(answered == candidate) | (candidate == -1) for candidate in candidates]
    return np.stack([same.reshape(len(same), -1).all(dim=1).numpy() for same in equal]).astype(
        np.int8
    )
