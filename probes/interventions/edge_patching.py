"""Edge patching: what single edges do to a metric, beside what an attribution says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import xarray as xr
from jaxtyping import Float, Int
from torch import Tensor
from transformer_lens.tools.analysis.attribution_patching import Node, capture_writer_outputs

from probes.capturing.hooking import HookedModel, evaluating
from probes.capturing.inputs import call, slices
from probes.checking import checked
from probes.interventions.answers import Metric, check_metric
from probes.interventions.attribution import check_pairs, label_of, ranked_edges
from probes.progress import progress
from probes.statistics.intervals import bootstrap, bootstrap_ratio, interval_variables

_GROUPS = ("strongest", "random")


@checked
def patch_edges(
    model: HookedModel,
    clean: Int[Tensor, "example pos"],
    corrupted: Int[Tensor, "example pos"],
    attribution: xr.Dataset,
    *,
    metric: Metric,
    n_edges: int = 10,
    batch_size: int = 256,
    resamples: int = 1000,
    seed: int = 0,
) -> xr.Dataset:
    """Patch the edges with the strongest attributions, and as many random ones, one at a time.

    In the corrupted run, the input of the reader at this position gets the clean output of the
    writer in place of the corrupted one, and all other edges keep the corrupted value (path
    patching, Wang et al. 2022, "Interpretability in the Wild"). The effect is the change of the
    metric, which the attribution estimates to first order. If the ranking means anything, the
    strongest edges have larger effects than random ones.

    The strongest of many noisy attributions are too large in the examples that they were ranked
    on: pass others here.

    Args:
        model: the TransformerBridge of the attribution.
        clean: tokens [example, pos], with the positions of the attribution.
        corrupted: the paired tokens, of the same shape.
        attribution: result of `attribute`.
        metric: function of the model's output and the examples (a slice) to floats [example].
        n_edges: number of strongest edges, and of random edges. The latter are drawn from all
            others, also from those that can have no effect: at positions before the first
            different token, or after all that the metric reads.
        batch_size: examples per forward pass.
        resamples: number of bootstrap resamples.
        seed: seed of the random edges and of the bootstrap.

    Returns:
        In the unit of the metric; `group` is "strongest" or "random":

        - `attribution` [group, rank]: the estimate, in the examples that `attribute` was given.
        - `effect, effect_low, effect_high` [group, rank]: mean effect in these examples;
          `example_effect` [group, rank, example].
        - `size, size_low, size_high` [group]: mean over edges of the absolute value of the mean
          effect; `size_difference`, `_low`, `_high`: "strongest" minus "random".

        `writer`, `reader` and `pos` [group, rank] are coordinates. Intervals: percentile bootstrap
        95% over examples, for these edges.

    Raises:
        TypeError: the model is no TransformerBridge, or tokens are not integers.
        ValueError: tokens are not [example, pos] of the same shape, or not in the vocabulary; the
            attribution has no edges, other positions or fewer than twice `n_edges` edges; or the
            metric is not one finite number for each example.

    Example:
        >>> found = attribute(bridge, clean[:1], corrupted[:1], metric=metric)
        >>> patched = patch_edges(bridge, clean[1:], corrupted[1:], found, metric=metric, n_edges=2)
        >>> bool(patched["size"].sel(group="strongest") > patched["size"].sel(group="random"))
        True
    """
    examples = check_pairs(model, clean, corrupted)
    ranked = ranked_edges(attribution, clean.shape[1])
    if not 1 <= n_edges <= len(ranked) // 2:
        raise ValueError(
            f"n_edges must be in 1..{len(ranked) // 2}, half of the {len(ranked)} edges, "
            f"got {n_edges}"
        )
    others = np.random.default_rng(seed).choice(len(ranked) - n_edges, n_edges, replace=False)
    edges = [ranked[i] for i in (*range(n_edges), *sorted(n_edges + others))]
    with evaluating(model), _edges_apart(model):
        effects = [
            _effects(model, clean[rows], corrupted[rows], edges, metric, rows)
            for rows in progress(slices(examples, batch_size), "patch edges")
        ]
    by_example = np.concatenate(effects).reshape(examples, len(_GROUPS), n_edges)

    def sizes(weights: Float[np.ndarray, "draw example"]) -> Float[np.ndarray, "draw group"]:
        return np.abs(np.tensordot(weights, by_example, axes=1) / examples).mean(-1)

    def differences(weights: Float[np.ndarray, "draw example"]) -> Float[np.ndarray, " draw"]:
        strongest, random = sizes(weights).T
        return strongest - random

    interval = partial(bootstrap, sizes=(examples,), resamples=resamples, seed=seed)
    dims = ("group", "rank")
    scores = [
        float(attribution["edge"].sel(writer=label_of(w), reader=label_of(r), pos=w.position))
        for w, r in edges
    ]
    names = {
        "writer": [label_of(writer) for writer, _ in edges],
        "reader": [label_of(reader) for _, reader in edges],
        "pos": [writer.position for writer, _ in edges],
    }
    shape = len(_GROUPS), n_edges
    about = {"long_name": "effect of patching the edge in each example"}
    return xr.Dataset(
        {
            "attribution": (dims, np.reshape(scores, shape), {"long_name": "attribution"}),
            **interval_variables(
                "effect",
                bootstrap_ratio(by_example, resamples=resamples, seed=seed),
                dims,
                long_name="mean effect of patching the edge",
            ),
            "example_effect": ((*dims, "example"), np.moveaxis(by_example, 0, -1), about),
            **interval_variables(
                "size", interval(sizes), "group", long_name="mean absolute effect of the edges"
            ),
            **interval_variables(
                "size_difference", interval(differences), (), long_name="size, strongest - random"
            ),
        },
        coords={
            "group": list(_GROUPS),
            "rank": np.arange(n_edges),
            **{name: (dims, np.reshape(values, shape)) for name, values in names.items()},
        },
        attrs={"examples": examples, "edges": len(ranked), "seed": seed}
        | {"interval": "percentile bootstrap 95% over examples"},
    )


def _effects(
    model: HookedModel,
    clean: Int[Tensor, "example pos"],
    corrupted: Int[Tensor, "example pos"],
    edges: Sequence[tuple[Node, Node]],
    metric: Metric,
    rows: slice,
) -> Float[np.ndarray, "example edge"]:
    """The change of the metric of the corrupted run when each edge gets its clean value."""
    after, before = (capture_writer_outputs(model, tokens) for tokens in (clean, corrupted))
    unpatched = check_metric("metric", metric(call(model, corrupted), rows), rows)
    effects = []
    for writer, reader in edges:
        change = _output(writer, after) - _output(writer, before)

        def add(
            residual: Tensor, step: int, reader: Node = reader, change: Tensor = change
        ) -> Tensor:
            patched = residual.clone()
            patched[_entries(reader)] += change
            return patched

        output = call(model, corrupted, {reader.hook_name: add})
        effects.append(check_metric("metric", metric(output, rows), rows) - unpatched)
    return np.stack(effects, axis=1)


def _output(writer: Node, outputs: dict[str, Tensor]) -> Float[Tensor, "example d_model"]:
    """What a component writes to the residual stream at a position."""
    if writer.kind == "attn_head_out":
        # `Node.hook_name` is that of the head before its output weights.
        return outputs[f"blocks.{writer.layer}.attn.hook_result"][_entries(writer)]
    return outputs[writer.hook_name][_entries(writer)]


def _entries(node: Node) -> tuple[slice | int, ...]:
    head = () if node.head is None else (node.head,)
    return slice(None), node.position, *head


@contextmanager
def _edges_apart(model: Any) -> Iterator[None]:
    """Make hooks of single heads' inputs and outputs fire, then restore the model's settings."""
    # `attn_in` and `split_qkv_input` exclude each other, so one is off before the other is on.
    names = ("attn_in", "attn_result", "split_qkv_input", "hook_mlp_in")
    switches = [getattr(model, f"set_use_{name}") for name in names]
    before = [bool(getattr(model.cfg, f"use_{name}", False)) for name in names]
    try:
        for name, switch in zip(names, switches, strict=True):
            switch(name != "attn_in")
        yield
    finally:
        for switch, value in reversed([*zip(switches, before, strict=True)]):
            switch(value)
