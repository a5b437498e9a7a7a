"""Where interventions act: hooks, at one or all of their firings, by site name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

from probes.capturing.hooking import (
    HookedModel,
    evaluating,
    resolve_hooks,
    run_with_matches,
)
from probes.capturing.inputs import Inputs, call, count_examples, slices, take_rows
from probes.interventions.readers import check_read

NO_SITE = "none"
"""The run without intervention."""


Firing = tuple[str, int]
"""A hook and the number of its firing in a pass."""


@dataclass(frozen=True)
class At:
    """A hook, at one or all of its firings, and what is patched in there.

    Attributes:
        hook: a hook name or glob.
        step: number of the firing, from 0, of a module that fires several times in a pass; None
            for all.
        source: for `interchange`: the hook of the source run whose activation is patched in; None
            for the same hook.
        source_step: the firing of that hook; None for the number of the firing that is patched.

    Raises:
        ValueError: a step is negative.

    Example:
        A state patched into an earlier step, of a module that fires several times, or of several:

        >>> At("core.hook_resid_post", step=1, source_step=5)
        >>> At("blocks.1.hook_resid_post", source="blocks.5.hook_resid_post")
    """

    hook: str
    step: int | None = None
    source: str | None = None
    source_step: int | None = None

    def __post_init__(self) -> None:
        for name in ("step", "source_step"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"{name} must be at least 0, got {value}")

    @property
    def source_hook(self) -> str:
        """The hook of the source run."""
        return self.source or self.hook


Hooks = Mapping[str, str | At | Sequence[str | At]]
"""Hooks by site name; those of a site are changed together."""


def resolve_sites(
    model: HookedModel, hooks: Hooks, inputs: Inputs, batch_size: int
) -> dict[str, list[At]]:
    """The hooks of each site, from names or globs.

    Args:
        model: the model.
        hooks: see `Hooks`.
        inputs: inputs of the model, which show which hooks fire.
        batch_size: examples per forward pass.

    Raises:
        KeyError: an unknown hook.
        ValueError: there is no site, one has no hook, or one is named "none"; or nothing downstream
            reads what the hooks of a site show.
    """
    if not hooks or NO_SITE in hooks:
        raise ValueError(
            f"hooks must name at least one site, and none {NO_SITE!r} (the unpatched run), "
            f"got {list(hooks)}"
        )
    sites: dict[str, list[At]] = {}
    for site, given in hooks.items():
        listed = [given] if isinstance(given, str | At) else given
        places = [place if isinstance(place, At) else At(place) for place in listed]
        if not places:
            raise ValueError(f"hooks[{site!r}] must name at least one hook, got {given!r}")
        for place in places:
            if place.source is not None:
                hooks_that_fire(model, inputs, place.source, batch_size)
        sites[site] = [
            *dict.fromkeys(
                replace(place, hook=name)
                for place in places
                for name in hooks_that_fire(model, inputs, place.hook, batch_size)
            )
        ]
    check_read(model, inputs, [{at.hook for at in places} for places in sites.values()], batch_size)
    return sites


def hooks_that_fire(model: HookedModel, inputs: Inputs, pattern: str, batch_size: int) -> list[str]:
    """The hooks that a name or glob matches, without those of steps that a model does not take.

    A model that was once called with more steps has the hooks of these steps, too; one that was not
    yet called with these inputs may lack some.

    Raises:
        KeyError: an unknown hook.
    """
    if pattern in model.hook_dict:
        return [pattern]
    fired = {name for name, _ in most_firings(model, inputs, [pattern], batch_size)}
    matched = resolve_hooks(model, pattern)
    return [name for name in matched if name in fired] or matched


def most_firings(
    model: HookedModel, inputs: Inputs, patterns: Sequence[str], batch_size: int
) -> list[Firing]:
    """The firings of the batch that has the most, in a model that loops as its inputs need.

    Raises:
        KeyError: an unknown hook.
    """
    return max(firings_of_batches(model, inputs, patterns, batch_size), key=len)


def firings_of_batches(
    model: HookedModel, inputs: Inputs, patterns: Sequence[str], batch_size: int
) -> list[list[Firing]]:
    """The firings of each batch; see `firings`."""
    batches = slices(count_examples("inputs", inputs), batch_size)
    return [firings(model, take_rows(inputs, rows), patterns) for rows in batches]


def firings(model: HookedModel, inputs: Inputs, patterns: Sequence[str]) -> list[Firing]:
    """The hooks that match and fire in a pass, in this order, with the number of the firing.

    Raises:
        KeyError: an unknown hook.
    """

    def run(matches: Mapping[str, list[str]]) -> list[Firing]:
        fired: list[Firing] = []
        counts: Counter[str] = Counter()

        # Not the hook point's own name: a TransformerBridge has hooks with several names.
        def note(activation: Any, hook: Any, name: str) -> None:
            fired.append((name, counts[name]))
            counts[name] += 1

        names = dict.fromkeys(chain.from_iterable(matches.values()))
        functions = [(name, partial(note, name=name)) for name in names]
        with evaluating(model), model.hooks(fwd_hooks=functions):
            call(model, inputs)
        return fired

    return run_with_matches(model, patterns, run)
