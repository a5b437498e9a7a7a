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
            "depth": Variable(
                causes=("edge_used", "node", "node_depth", "edges"), compute=_dependency_depth
            ),
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
        tree = _Tree(node, node_depth, edges)
        depth = np.where(is_set, 0, node_depth.numpy())
        for level in range(1, depth.max(initial=0) + 1):
            row, column = np.nonzero(depth == level)
            operands, count = tree.arguments(row, column, self.notation.n_arguments[1])
            value[row, column], _ = self.operate(
                symbol[row, column], value[row[:, None], operands], count
            )
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
        tree = _Tree(node, node_depth, edges)
        row, column = np.nonzero(node_depth.numpy() > 0)
        operands, count = tree.arguments(row, column, self.notation.n_arguments[1])
        _, selected = self.operate(symbol[row, column], value[row[:, None], operands], count)
        used = tree.parent < 0
        operation, slot = np.nonzero(selected)
        used[row[operation], operands[operation, slot]] = True
        for _ in range(tree.height):
            used = used & ((tree.parent < 0) | np.take_along_axis(used, tree.parent, 1))
        edge_used = np.zeros(edges.shape[:2], bool)
        edge_used[tree.row, tree.edge] = used[tree.row, tree.argument]
        return torch.from_numpy(edge_used)

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


class _Tree:
    """The trees of expressions between their nodes, with one entry for each edge.

    Attributes:
        row, edge: [n_edges] each, the example and the edge's number in it.
        argument, operation: [n_edges] each, the nodes that an edge joins.
        parent: [batch, node], the operation of each node, -1 for roots and padding.
        height: the greatest depth of a node.
    """

    def __init__(
        self,
        node: Int[Tensor, "batch pos"],
        node_depth: Int[Tensor, "batch node"],
        edges: Int[Tensor, "batch edge 2"],
    ) -> None:
        positions = edges.numpy()
        self.row, self.edge = np.nonzero(positions[..., 0] >= 0)
        self.argument, self.operation = node.numpy()[
            self.row[:, None], positions[self.row, self.edge]
        ].T
        self.parent = np.full(node_depth.shape, -1)
        self.parent[self.row, self.argument] = self.operation
        self.height = int(node_depth.max())

    def arguments(
        self, row: Int[np.ndarray, " n"], operation: Int[np.ndarray, " n"], most: int
    ) -> tuple[Int[np.ndarray, "n argument"], Int[np.ndarray, " n"]]:
        """Return the arguments of operations, padded with 0 up to the most, and their number."""
        n_nodes = self.parent.shape[1]
        key = self.row * n_nodes + self.operation
        order = np.argsort(key, kind="stable")  # edges are in the order of the arguments
        wanted = row * n_nodes + operation
        first, end = (
            np.searchsorted(key, wanted, side, sorter=order) for side in ("left", "right")
        )
        place = first[:, None] + np.arange(most)
        is_argument = place < end[:, None]
        arguments = self.argument[order[np.where(is_argument, place, 0)]]
        return np.where(is_argument, arguments, 0), end - first


def _dependency_depth(
    edge_used: Bool[Tensor, "batch edge"],
    node: Int[Tensor, "batch pos"],
    node_depth: Int[Tensor, "batch node"],
    edges: Int[Tensor, "batch edge 2"],
) -> Int[Tensor, " batch"]:
    """Return the number of edges on the longest path of used edges to the root."""
    tree = _Tree(node, node_depth, edges)
    distance = np.zeros(tree.parent.shape, np.int64)
    for _ in range(tree.height):
        above = np.take_along_axis(distance, tree.parent, 1)
        distance = np.where(tree.parent < 0, 0, 1 + above)
    length = np.zeros(edges.shape[:2], np.int64)
    length[tree.row, tree.edge] = distance[tree.row, tree.argument]
    return torch.from_numpy((length * edge_used.numpy()).max(1, initial=0))


def _answers(
    node_value: Int[Tensor, "batch node"],
    node: Int[Tensor, "batch pos"],
    root: Int[Tensor, " batch"],
) -> Int[Tensor, "batch 1"]:
    return node_value.gather(1, node.gather(1, root[:, None]))
