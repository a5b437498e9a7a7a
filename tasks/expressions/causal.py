"""The causal model of expressions: symbols and the structure of a tree determine the values.

The sampler evaluates tokens (see `reading`); here the graph of an expression is evaluated, with
the values of some nodes set.
"""

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from tasks.causal import Allowed, Entries, Variable
from tasks.expressions.reading import Operate
from tasks.expressions.trees import Notation

STRUCTURE = ("length", "node", "node_token", "node_depth", "edges", "root")
"""The latents that are the structure of the tree, which cannot be set."""


class ExpressionModel(NamedTuple):
    """The mechanisms of expressions.

    Attributes:
        notation: the syntax; smaller token ids than those of the operators are literals, whose
            values are their ids.
        operate: evaluates operations.
        n_values: number of values, from 0 on.
    """

    notation: Notation
    operate: Operate
    n_values: int

    def variables(self) -> dict[str, Variable]:
        """Return all variables but `depth` and `edge_used`."""
        symbols = Allowed("literals for literals and operators for operations", self._same_kind)
        values = Allowed(f"integers from 0 to {self.n_values - 1} at nodes", self._is_value)
        structure = ("node", "node_depth", "edges")
        return {
            **{name: Variable() for name in STRUCTURE},
            "node_symbol": Variable(allowed=symbols),
            "node_value": Variable(
                causes=("node_symbol", *structure),
                compute=self._values,
                allowed=values,
                within=True,
            ),
            "inputs": Variable(causes=("node_symbol", "node", "node_token"), compute=self._tokens),
            "targets": Variable(causes=("node_value", "node", "root"), compute=_answers),
        }

    def pruned(self) -> dict[str, Variable]:
        """Return `edge_used` and `depth` of operations that may depend on some arguments only."""
        causes = ("node_symbol", "node_value", "node", "node_depth", "edges")
        return {
            "edge_used": Variable(causes=causes, compute=self._used),
            "depth": Variable(causes=("edge_used", "node", "edges"), compute=_dependency_depth),
        }

    def _same_kind(self, new: Tensor, old: Tensor) -> Bool[Tensor, "batch node"]:
        first, last = self.notation.operators[0], self.notation.operators[-1]
        return (new >= 0) & (new <= last) & (old >= 0) & ((new < first) == (old < first))

    def _is_value(self, new: Tensor, old: Tensor) -> Bool[Tensor, "batch node"]:
        return (new >= 0) & (new < self.n_values) & (old >= 0)

    def _values(
        self,
        node_symbol: Int[Tensor, "batch node"],
        node: Int[Tensor, "batch pos"],
        node_depth: Int[Tensor, "batch node"],
        edges: Int[Tensor, "batch edge 2"],
        entries: Entries,
    ) -> Int[Tensor, "batch node"]:
        symbol, is_set = node_symbol.numpy(), entries.is_set.numpy()
        value = np.where(node_depth.numpy() == 0, symbol, -1)
        value = np.where(is_set, entries.values.numpy(), value)
        arguments, count = self._arguments(node, edges, symbol.shape[1])
        depth = np.where(is_set, 0, node_depth.numpy())
        for level in range(1, depth.max(initial=0) + 1):
            row, column = np.nonzero(depth == level)
            operands = value[row[:, None], arguments[row, column]]
            result, _ = self.operate(symbol[row, column], operands, count[row, column])
            value[row, column] = result
        return torch.from_numpy(value)

    def _used(
        self,
        node_symbol: Int[Tensor, "batch node"],
        node_value: Int[Tensor, "batch node"],
        node: Int[Tensor, "batch pos"],
        node_depth: Int[Tensor, "batch node"],
        edges: Int[Tensor, "batch edge 2"],
    ) -> Bool[Tensor, "batch edge"]:
        """Return whether an argument and all operations above it are selected."""
        symbol, value = node_symbol.numpy(), node_value.numpy()
        arguments, count = self._arguments(node, edges, symbol.shape[1])
        row, column = np.nonzero(node_depth.numpy() > 0)
        operands = arguments[row, column]
        _, selected = self.operate(
            symbol[row, column], value[row[:, None], operands], count[row, column]
        )
        is_selected = np.zeros(symbol.shape, bool)
        operation, slot = np.nonzero(selected)
        is_selected[row[operation], operands[operation, slot]] = True

        links = _links(node, edges)
        selected = links.is_edge & np.take_along_axis(is_selected, links.argument, 1)
        edge_above, is_top = _edges_above(links)
        used = selected
        for _ in range(symbol.shape[1]):
            used = selected & (is_top | np.take_along_axis(used, edge_above, 1))
        return torch.from_numpy(used)

    def _tokens(
        self,
        node_symbol: Int[Tensor, "batch node"],
        node: Int[Tensor, "batch pos"],
        node_token: Int[Tensor, "batch node"],
    ) -> Int[Tensor, "batch pos"]:
        token, position = node_token.gather(1, node.clamp(min=0)), torch.arange(node.shape[1])
        opening = -1 if self.notation.opening is None else self.notation.opening
        brackets = torch.where(position < token, opening, self.notation.closing)
        symbols = node_symbol.gather(1, node.clamp(min=0))
        tokens = torch.where(position == token, symbols, brackets)
        return torch.where(node < 0, -1, tokens)

    def _arguments(
        self, node: Int[Tensor, "batch pos"], edges: Int[Tensor, "batch edge 2"], n_nodes: int
    ) -> tuple[Int[np.ndarray, "batch node argument"], Int[np.ndarray, "batch node"]]:
        """Return the nodes of each operation's arguments, and their number."""
        links = _links(node, edges)
        same = links.operation[:, :, None] == links.operation[:, None]
        slot = np.tril(same & links.is_edge[:, None], -1).sum(2)
        shape = (len(node), n_nodes)
        arguments = np.zeros((*shape, self.notation.n_arguments[1]), np.int64)
        count = np.zeros(shape, np.int64)
        row, edge = np.nonzero(links.is_edge)
        operation = links.operation[row, edge]
        arguments[row, operation, slot[row, edge]] = links.argument[row, edge]
        np.add.at(count, (row, operation), 1)
        return arguments, count


class _Links(NamedTuple):
    """Edges between nodes."""

    is_edge: Bool[np.ndarray, "batch edge"]
    argument: Int[np.ndarray, "batch edge"]
    operation: Int[np.ndarray, "batch edge"]


def _links(node: Int[Tensor, "batch pos"], edges: Int[Tensor, "batch edge 2"]) -> _Links:
    of_position = node.gather(1, edges.clamp(min=0).flatten(1)).view(edges.shape)
    return _Links((edges[..., 0] >= 0).numpy(), *of_position.numpy().transpose(2, 0, 1))


def _edges_above(
    links: _Links,
) -> tuple[Int[np.ndarray, "batch edge"], Bool[np.ndarray, "batch edge"]]:
    """Return the edge that leads on from each edge's operation, and whether there is none."""
    leads_on = (links.operation[:, :, None] == links.argument[:, None]) & links.is_edge[:, None]
    return leads_on.argmax(2), ~leads_on.any(2)


def _dependency_depth(
    edge_used: Bool[Tensor, "batch edge"],
    node: Int[Tensor, "batch pos"],
    edges: Int[Tensor, "batch edge 2"],
) -> Int[Tensor, " batch"]:
    """Return the number of edges on the longest path of used edges to the root."""
    edge_above, is_top = _edges_above(_links(node, edges))
    used = edge_used.numpy()
    length = np.zeros(used.shape, np.int64)
    for _ in range(used.shape[1]):
        above = np.where(is_top, 0, np.take_along_axis(length, edge_above, 1))
        length = np.where(used, 1 + above, 0)
    return torch.from_numpy(length.max(1, initial=0))


def _answers(
    node_value: Int[Tensor, "batch node"],
    node: Int[Tensor, "batch pos"],
    root: Int[Tensor, " batch"],
) -> Int[Tensor, "batch 1"]:
    return node_value.gather(1, node.gather(1, root[:, None]))
