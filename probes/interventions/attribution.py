"""Attribution patching: what each component and each edge does to a metric, to first order."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float, Int
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.tools.analysis.attribution_patching import (
    EdgeAttributionConfig,
    Node,
    attribution_patch,
)

from probes.capturing.hooking import HookedModel, check_model, evaluating
from probes.checking import checked
from probes.interventions.answers import Metric, check_metric
from probes.progress import progress
from probes.statistics.intervals import Interval, bootstrap_ratio, interval_variables

_NAMES = {
    "embed": "embed",
    "attn_head_out": "head",
    "mlp_out": "mlp",
    "q_input": "q",
    "k_input": "k",
    "v_input": "v",
    "mlp_in": "mlp",
    "logits": "logits",
}
# Columns that are resampled together: 1,000 draws of them take 32 MB.
_MAX_COLUMNS = 4096

_Component = tuple[str, int, int]
"""Kind, layer and head of a node at any position; -1 without layer or head."""


@checked
def attribute(
    model: HookedModel,
    clean: Int[Tensor, "example pos"],
    corrupted: Int[Tensor, "example pos"],
    *,
    metric: Metric,
    granularity: Literal["node", "edge"] = "edge",
    resamples: int = 1000,
    seed: int = 0,
) -> xr.Dataset:
    """Attribute the difference between clean and corrupted runs to components and edges.

    Attribution patching (Nanda 2023; of edges: Syed et al. 2023, "Attribution Patching Outperforms
    Automated Circuit Discovery"), by `transformer_lens.tools.analysis.attribution_patch`, pair by
    pair. The attribution of an edge, from the component that writes to the residual stream to the
    input that reads it, is

        (output of the writer, clean - corrupted) . d metric / d input of the reader (corrupted):

    to first order, the change of the metric when the edge of the corrupted run gets the clean
    value. That of a node is the sum over the edges from it. A linear estimate may be far off, where
    a softmax or a nonlinearity saturates: see `patch_edges` for what the strongest edges really do,
    and `measure_faithfulness` for what they do together.

    Args:
        model: a TransformerBridge, whose blocks normalise the input of each sublayer.
        clean: tokens [example, pos], without padding.
        corrupted: the paired tokens, of the same shape.
        metric: function of the model's output and the examples (a slice) to floats [example],
            differentiable in the output. It gets one example at a time.
        granularity: "edge" for nodes and edges; "node" for nodes alone, the only one for models
            with fewer heads of keys and values than of queries, or of `boot_native`.
        resamples, seed: of the bootstrap.

    Returns:
        In the unit of the metric:

        - `node, node_low, node_high` [writer, pos]: mean attribution and its 95% interval
          (percentile bootstrap over examples); `example_node` [writer, pos, example].
        - `edge, edge_low, edge_high` [writer, reader, pos], `example_edge` [writer, reader, pos,
          example]; NaN where there is no edge: a reader before the writer.

        Writers are "embed", "head 0.3" (layer, head) and "mlp 0"; readers are "q 1.3", "k 1.3",
        "v 1.3", "mlp 1" and "logits". `writer_kind` (a kind of TransformerLens' `Node`),
        `writer_layer`, `writer_head` and those of the reader are coordinates; -1 for none.

    Raises:
        TypeError: the model is no TransformerBridge, or tokens are not integers.
        ValueError: tokens are not [example, pos] of the same shape, or not in the vocabulary; the
            metric is not one finite number for each example or has no gradient; or TransformerLens
            cannot split this model into edges.
        NotImplementedError: it cannot split the attention of this model into heads.

    Example:
        >>> found = attribute(bridge, clean, corrupted, metric=lambda logits, rows:
        ...     logits[:, -1].gather(1, targets[rows, None])[:, 0])
        >>> found["edge"].sum("pos").sel(reader="logits").idxmax("writer").item()
        'head 0.1'
    """
    examples = check_pairs(model, clean, corrupted)
    config = EdgeAttributionConfig(granularity=granularity)
    nodes: list[dict[Any, float]] = []
    edges: list[dict[Any, float]] = []
    with evaluating(model), torch.enable_grad():
        for i in progress(range(examples), "attribute"):
            pair = clean[i : i + 1], corrupted[i : i + 1]
            result = attribution_patch(model, *pair, _with_gradient(metric, i), config)
            nodes.append(result.node_scores)
            edges.append(result.edge_scores)

    writers = list(dict.fromkeys(map(_component, nodes[0])))
    readers = list(dict.fromkeys(_component(reader) for _, reader in edges[0]))
    n_pos = clean.shape[1]
    data = xr.Dataset(
        coords={**_coordinates("writer", writers), "pos": np.arange(n_pos)},
        attrs={"examples": examples, "interval": "percentile bootstrap 95% over examples"},
    )
    places = {name: i for i, name in enumerate(writers)}
    index = [(places[_component(node)], node.position) for node in nodes[0]]
    settings = {"resamples": resamples, "seed": seed}
    shape = len(writers), n_pos
    data = data.assign(_variables("node", ("writer", "pos"), nodes, index, shape, **settings))
    if edges[0]:
        data = data.assign_coords(_coordinates("reader", readers))
        ends = {name: i for i, name in enumerate(readers)}
        index = [(places[_component(w)], ends[_component(r)], w.position) for w, r in edges[0]]
        dims, shape = ("writer", "reader", "pos"), (len(writers), len(readers), n_pos)
        data = data.assign(_variables("edge", dims, edges, index, shape, **settings))
    return data


def check_pairs(model: HookedModel, clean: Tensor, corrupted: Tensor) -> int:
    """Count the pairs of tokens, for a model that TransformerLens can split into edges.

    Raises:
        TypeError, ValueError: see `attribute`.
    """
    check_model(model)
    if not isinstance(model, TransformerBridge):
        raise TypeError(
            "model must be a TransformerBridge, whose config and hooks of single heads' inputs "
            f"and outputs TransformerLens' attribution patching needs, got {type(model).__name__}; "
            "`interchange` patches any model with hooks"
        )
    if clean.ndim != 2 or clean.shape != corrupted.shape or not len(clean):
        raise ValueError(
            "clean and corrupted must be tokens [example, pos] of the same shape, got "
            f"{tuple(clean.shape)} and {tuple(corrupted.shape)}"
        )
    for name, tokens in (("clean", clean), ("corrupted", corrupted)):
        if tokens.is_floating_point() or tokens.is_complex():
            raise TypeError(f"{name} must hold token ids, integers, got {tokens.dtype}")
        least, most, n = int(tokens.min()), int(tokens.max()), model.cfg.d_vocab
        if least < 0 or most >= n > 0:
            raise ValueError(
                f"{name} must hold token ids from 0 to {n - 1}, got some in {least}..{most}"
            )
    return len(clean)


def of_example(metric: Metric, example: int) -> Callable[[Tensor], Tensor]:
    """The metric of one example as a scalar, which is what TransformerLens expects.

    Raises:
        ValueError: when it is called: the metric is not one finite number.
    """
    rows = slice(example, example + 1)

    def scalar(output: Tensor) -> Float[Tensor, ""]:
        values = metric(output, rows)
        check_metric("metric", values, rows)
        return values[0]

    return scalar


def _with_gradient(metric: Metric, example: int) -> Callable[[Tensor], Tensor]:
    scalar = of_example(metric, example)

    def differentiable(output: Tensor) -> Float[Tensor, ""]:
        value = scalar(output)
        if not value.requires_grad:
            raise ValueError(
                "metric must have a gradient: it must be computed from the output by "
                "differentiable operations, and the model's weights must require gradients"
            )
        return value

    return differentiable


def ranked_edges(attribution: xr.Dataset, n_pos: int) -> list[tuple[Node, Node]]:
    """The writer and reader of each edge, those with the largest absolute mean first.

    Raises:
        ValueError: there are no edges, or another number of positions.
    """
    if "edge" not in attribution:
        raise ValueError(
            "attribution must have the variable 'edge', of attribute(..., granularity='edge'), "
            f"got {list(attribution.data_vars)}"
        )
    if attribution.sizes["pos"] != n_pos:
        raise ValueError(
            f"clean must have the {attribution.sizes['pos']} positions of attribution, got {n_pos}"
        )
    scores = attribution["edge"].transpose("writer", "reader", "pos").to_numpy()
    index = np.argwhere(~np.isnan(scores))
    order = np.argsort(-np.abs(scores[*index.T]), kind="stable")

    def nodes(dim: str) -> list[dict[str, Any]]:
        parts = [attribution[f"{dim}_{part}"].to_numpy() for part in ("kind", "layer", "head")]
        return [
            {"kind": str(kind), "layer": _number(layer), "head": _number(head)}
            for kind, layer, head in zip(*parts, strict=True)
        ]

    writers, readers = nodes("writer"), nodes("reader")
    return [
        (Node(position=int(pos), **writers[w]), Node(position=int(pos), **readers[r]))
        for w, r, pos in index[order]
    ]


def label_of(node: Node) -> str:
    """The name of a node among the writers or readers."""
    return _label(_component(node))


def _component(node: Node) -> _Component:
    layer, head = (-1 if number is None else number for number in (node.layer, node.head))
    return node.kind, layer, head


def _number(value: int) -> int | None:
    return None if value < 0 else int(value)


def _label(component: _Component) -> str:
    kind, layer, head = component
    if kind in ("embed", "logits"):
        return _NAMES[kind]
    return f"{_NAMES[kind]} {layer}" + (f".{head}" if head >= 0 else "")


def _coordinates(dim: str, components: Iterable[_Component]) -> dict[str, Any]:
    kinds, layers, heads = map(list, zip(*components, strict=True))
    labels = [_label(each) for each in zip(kinds, layers, heads, strict=True)]
    parts = {"kind": kinds, "layer": layers, "head": heads}
    return {dim: labels} | {f"{dim}_{name}": (dim, values) for name, values in parts.items()}


def _variables(
    name: str,
    dims: tuple[str, ...],
    scores: list[dict[Any, float]],
    index: list[tuple[int, ...]],
    shape: tuple[int, ...],
    *,
    resamples: int,
    seed: int,
) -> dict[str, Any]:
    """Means with intervals and the attributions of examples, NaN where there is no node or edge."""
    by_example = np.array([list(each.values()) for each in scores])
    chunks = np.array_split(by_example, -(-by_example.shape[1] // _MAX_COLUMNS), axis=1)
    means = [bootstrap_ratio(chunk, resamples=resamples, seed=seed) for chunk in chunks]
    entries = tuple(np.array(index).T)

    def scattered(values: Float[np.ndarray, "entry ..."]) -> np.ndarray:
        array = np.full((*shape, *values.shape[1:]), np.nan)
        array[entries] = values
        return array

    interval = Interval(*(scattered(np.concatenate(part)) for part in zip(*means, strict=True)))
    long_name = f"attribution of the {name}"
    about = {"long_name": f"{long_name} in each example"}
    return {
        **interval_variables(name, interval, dims, long_name=f"{long_name}, mean over examples"),
        f"example_{name}": ((*dims, "example"), scattered(by_example.T), about),
    }
