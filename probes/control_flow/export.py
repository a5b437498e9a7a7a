"""Export of control-flow graphs to networkx and to files."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import xarray as xr
from jaxtyping import Float, Int

from probes.checking import checked
from probes.control_flow.graphs import INPUT_STEP, NO_HEAD

_TABLE = ("target_pos", "target_step", "source_pos", "source_step", "head", "weight")

_Node = tuple[int, int]


@checked
def to_networkx(graphs: xr.Dataset, example: int) -> nx.DiGraph:
    """Convert the control flow of one example to a networkx graph.

    Args:
        graphs: result of `extract_control_flow`.
        example: index of the example, from 0.

    Returns:
        Nodes (pos, step), step -1 for the input of a valid column, with `pos`, `step`, `gate`
        (1.0 for an input: the embedding writes the whole state) and `kind` ("input" or "update").
        Edges with `kind` ("attention" or "copy"), `weight` (the maximum over heads) and `heads`
        (an ascending list; empty for a copy). Acyclic.

    Raises:
        IndexError: the example is out of range.

    Example:
        >>> to_networkx(graphs, 0).nodes(data=True)
    """
    examples = graphs.sizes["example"]
    if not 0 <= example < examples:
        raise IndexError(f"example must be in 0..{examples - 1}, got {example}")
    # Plain arrays: indexing a dataset takes longer than building the graph.
    values = {name: variable.values for name, variable in graphs.variables.items()}
    graph = nx.DiGraph(example=example)
    for pos in np.flatnonzero(values["valid"][example]).tolist():
        graph.add_node((pos, INPUT_STEP), pos=pos, step=INPUT_STEP, gate=1.0, kind="input")
    steps, columns = np.nonzero(values["update"][example])
    gates = values["gate"][example, steps, columns]
    for pos, step, gate in zip(columns.tolist(), steps.tolist(), gates.tolist(), strict=True):
        graph.add_node((pos, step), pos=pos, step=step, gate=gate, kind="update")
    edge_example = values["edge_example"]
    # With another dtype, searchsorted would convert the whole column.
    first, last = edge_example.searchsorted(
        np.array([example, example + 1], dtype=edge_example.dtype)
    )
    table = {name: values[name][first:last] for name in _TABLE}
    if last > first:
        graph.add_edges_from(_merged(**table))
    return graph


@checked
def write_graphml(graph: nx.DiGraph, path: Path) -> None:
    """Write a graph of `to_networkx` as GraphML, for Gephi, yEd and Cytoscape.

    GraphML has no lists: `heads` becomes a comma-separated string ("0,3"), and a node's name the
    string "(pos, step)".

    Example:
        >>> write_graphml(to_networkx(graphs, 0), Path("graph.graphml"))
    """
    import networkx as nx

    copy = graph.copy()
    for _, _, attributes in copy.edges(data=True):
        attributes["heads"] = ",".join(map(str, attributes["heads"]))
    nx.write_graphml(copy, path)


@checked
def write_node_link(graph: nx.DiGraph, path: Path) -> None:
    """Write a graph of `to_networkx` as node-link JSON.

    `networkx.node_link_graph(json.loads(path.read_text()), edges="edges")` gives an equal graph.

    Example:
        >>> write_node_link(to_networkx(graphs, 0), Path("graph.json"))
    """
    import networkx as nx

    path.write_text(json.dumps(nx.node_link_data(graph, edges="edges")) + "\n")


@checked
def write_control_flow(graphs: xr.Dataset, folder: Path, name: str) -> list[Path]:
    """Write the graph of each example as GraphML and as node-link JSON: `NAME-0.graphml`, ...

    Files are written by atomic rename, so that none is ever incomplete.

    Args:
        graphs: result of `extract_control_flow`.
        folder: folder of the files, created if missing.
        name: prefix of the file names.

    Returns:
        The paths of the files.

    Example:
        >>> write_control_flow(graphs, Path("graphs"), "ndr")
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for example in range(graphs.sizes["example"]):
        graph = to_networkx(graphs, example)
        for suffix, write in ((".json", write_node_link), (".graphml", write_graphml)):
            path = folder / f"{name}-{example}{suffix}"
            temporary = path.with_name(f".{path.name}.unfinished")
            write(graph, temporary)
            written.append(temporary.replace(path))
    return written


def _merged(
    target_pos: Int[np.ndarray, " edge"],
    target_step: Int[np.ndarray, " edge"],
    source_pos: Int[np.ndarray, " edge"],
    source_step: Int[np.ndarray, " edge"],
    head: Int[np.ndarray, " edge"],
    weight: Float[np.ndarray, " edge"],
) -> Iterator[tuple[_Node, _Node, dict[str, Any]]]:
    """Merge the edges of several heads between two nodes, which are in consecutive rows."""
    starts_edge = np.ones(len(head), dtype=bool)
    starts_edge[1:] = np.diff(target_pos) != 0
    starts_edge[1:] |= (np.diff(target_step) != 0) | (np.diff(source_pos) != 0)
    starts = np.flatnonzero(starts_edge)
    bounds = [*starts.tolist(), len(head)]
    sources = zip(source_pos[starts].tolist(), source_step[starts].tolist(), strict=True)
    targets = zip(target_pos[starts].tolist(), target_step[starts].tolist(), strict=True)
    weights = np.maximum.reduceat(weight, starts).tolist()
    heads = head.tolist()
    for number, (source, target, largest) in enumerate(zip(sources, targets, weights, strict=True)):
        start = bounds[number]
        if heads[start] == NO_HEAD:
            yield source, target, {"kind": "copy", "weight": largest, "heads": []}
        else:
            read = heads[start : bounds[number + 1]]
            yield source, target, {"kind": "attention", "weight": largest, "heads": read}
