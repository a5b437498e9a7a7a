"""Control-flow graphs for networkx, and as files for other programs."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr
from jaxtyping import Float, Int

from probes.control_flow.graphs import INPUT_STEP, NO_HEAD

if TYPE_CHECKING:
    import networkx as nx

_TABLE = ("target_pos", "target_step", "source_pos", "source_step", "head", "weight")

_Node = tuple[int, int]


def to_networkx(graphs: xr.Dataset, example: int) -> "nx.DiGraph":
    """One example's control flow.

    Args:
        graphs: of `extract_control_flow`.
        example: index, from 0.

    Returns:
        Nodes (pos, step), step -1 for the input of a valid column, with `pos`, `step`, `gate`
        (1.0 for an input: the embedding writes the whole state) and `kind` ("input" or "update").
        Edges with `kind` ("attention" or "copy"), `weight` (the largest of the heads') and
        `heads` (a list, rising; empty for a copy). Acyclic.

    Raises:
        IndexError: no such example.
    """
    # Imported here: half a second, and only graphs one by one need it.
    import networkx as nx

    examples = graphs.sizes["example"]
    if not 0 <= example < examples:
        raise IndexError(f"example must be in 0..{examples - 1}, got {example}")
    # Bare variables: indexing a dataset costs more than building the graph.
    values = {name: variable.values for name, variable in graphs.variables.items()}
    graph = nx.DiGraph(example=example)
    for pos in np.flatnonzero(values["valid"][example]).tolist():
        graph.add_node((pos, INPUT_STEP), pos=pos, step=INPUT_STEP, gate=1.0, kind="input")
    steps, columns = np.nonzero(values["update"][example])
    gates = values["gate"][example, steps, columns]
    for pos, step, gate in zip(columns.tolist(), steps.tolist(), gates.tolist(), strict=True):
        graph.add_node((pos, step), pos=pos, step=step, gate=gate, kind="update")
    place = values["edge_example"]
    # Of the column's own type, or the whole column would be converted.
    first, last = place.searchsorted(np.array([example, example + 1], dtype=place.dtype))
    table = {name: values[name][first:last] for name in _TABLE}
    if last > first:
        graph.add_edges_from(_merged(**table))
    return graph


def write_graphml(graph: "nx.DiGraph", path: Path) -> None:
    """Write a graph of `to_networkx` as GraphML, which Gephi, yEd and Cytoscape open.

    GraphML knows no lists: `heads` becomes numbers between commas ("0,3"), and a node's name the
    text "(pos, step)".
    """
    import networkx as nx

    flat = graph.copy()
    for _, _, attributes in flat.edges(data=True):
        attributes["heads"] = ",".join(map(str, attributes["heads"]))
    nx.write_graphml(flat, path)


def write_node_link(graph: "nx.DiGraph", path: Path) -> None:
    """Write a graph of `to_networkx` as node-link JSON.

    `networkx.node_link_graph(json.loads(path.read_text()), edges="edges")` gives an equal graph.
    """
    import networkx as nx

    path.write_text(json.dumps(nx.node_link_data(graph, edges="edges")) + "\n")


def write_control_flow(graphs: xr.Dataset, folder: Path, name: str) -> list[Path]:
    """Write every example's graph as GraphML and as node-link JSON: `NAME-0.graphml`, ...

    Each file appears under its name when it is whole.

    Args:
        graphs: of `extract_control_flow`.
        folder: is made where there is none.
        name: what the files' names begin with.

    Returns:
        The files.

    Example:
        `write_control_flow(graphs, Path("graphs"), "ndr")`
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for example in range(graphs.sizes["example"]):
        graph = to_networkx(graphs, example)
        for ending, write in ((".json", write_node_link), (".graphml", write_graphml)):
            path = folder / f"{name}-{example}{ending}"
            unfinished = path.with_name(f".{path.name}.unfinished")
            write(graph, unfinished)
            written.append(unfinished.replace(path))
    return written


def _merged(
    target_pos: Int[np.ndarray, " edge"],
    target_step: Int[np.ndarray, " edge"],
    source_pos: Int[np.ndarray, " edge"],
    source_step: Int[np.ndarray, " edge"],
    head: Int[np.ndarray, " edge"],
    weight: Float[np.ndarray, " edge"],
) -> Iterator[tuple[_Node, _Node, dict[str, Any]]]:
    """One edge for all heads between the same two nodes, which stand in consecutive rows."""
    other = np.ones(len(head), dtype=bool)
    other[1:] = np.diff(target_pos) != 0
    other[1:] |= (np.diff(target_step) != 0) | (np.diff(source_pos) != 0)
    starts = np.flatnonzero(other)
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
