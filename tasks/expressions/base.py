"""What the tasks of the Neural Data Router share: expressions, and their graphs as latents.

Csordás, Irie, Schmidhuber 2021, "The Neural Data Router: Adaptive Control Flow in Transformers
Improves Systematic Generalization", has three tasks. Each example is an expression, read as a
sequence of tokens; the answer is its value. Deeper expressions are held out.
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal, final

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tasks.batch import Batch
from tasks.common import Key
from tasks.finite_task import FiniteTask

if TYPE_CHECKING:
    import networkx
    import xarray as xr


class ExpressionTask(FiniteTask):
    """A task whose examples are expressions.

    Splits: `train`; `id` has the depths of `train`, but other expressions; `valid` has deeper ones,
    and `ood` the deepest.

    The prefixes of the splits other than `train` are balanced over depth. A batch holds
    inputs [batch, pos] int64, token ids, -1 behind the end, as wide as the longest sequence that
    the split can hold; targets [batch, 1] int64, indices into `answers`; mask [batch, 1], all True.

    Latents (int64 but for `edge_used`; -1 is padding; the widths belong to the split):
    `length` [batch]: number of tokens;
    `depth` [batch]: what the splits are made by;
    `node` [batch, pos]: the sub-expression that each token belongs to: a literal is one of its own,
    an operation has its symbol and its brackets;
    `node_token` [batch, node]: the position of the token that stands for the node: the literal, or
    the operation's symbol; nodes are numbered in the order of these positions;
    `node_value` [batch, node]: its value, an index into `answers`;
    `node_depth` [batch, node]: 0 for a literal, else one more than that of the deepest argument;
    `edges` [batch, edge, 2]: the flow of data over tokens: (position of the argument's token,
    position of the operation's), in the order of the arguments' nodes;
    `edge_used` [batch, edge] bool: whether the answer can depend on this flow (False for padding);
    `root` [batch]: the position of the token whose value is the answer.
    """

    SPLITS: ClassVar = ("train", "id", "valid", "ood")

    def __init__(self, *, key: Key, separator: str) -> None:
        """Args: what all random choices follow from; what stands between the tokens of a text."""
        super().__init__(key=key)
        self._separator = separator

    @property
    @abstractmethod
    def vocabulary(self) -> tuple[str, ...]:
        """The name of each token id."""

    @property
    @abstractmethod
    def answers(self) -> tuple[str, ...]:
        """The name of each target."""

    @final
    @property
    def chance(self) -> float:
        """Accuracy of guessing: one over the number of answers."""
        return 1 / len(self.answers)

    @final
    def score(
        self, logits: Float[Tensor, "batch 1 answer"], batch: Batch
    ) -> dict[str, Float[Tensor, " batch"]]:
        """Return whether the most probable answer is right.

        Args:
            logits: [batch, 1, n_answers].
            batch: the batch that they answer.

        Returns:
            `accuracy` [batch]: 1 where it is right, else 0.

        Raises:
            ValueError: `logits` has another shape.
        """
        expected = (*batch.targets.shape, len(self.answers))
        if tuple(logits.shape) != expected:
            raise ValueError(f"logits of shape {tuple(logits.shape)}: allowed is {expected}")
        return {"accuracy": (logits.argmax(-1) == batch.targets).all(-1).float()}

    @final
    def words(self, batch: Batch, example: int) -> list[str]:
        """Return the names of the tokens of one example of a batch."""
        return [self.vocabulary[i] for i in batch.inputs[example].tolist() if i >= 0]

    @final
    def text(self, batch: Batch, example: int) -> str:
        """Return one example of a batch as it is written."""
        return self._separator.join(self.words(batch, example))


def dataflow(latents: dict[str, Tensor], example: int) -> "networkx.DiGraph":
    """Return the graph along which the values of one expression flow.

    Args:
        latents: those of a batch of an `ExpressionTask`.
        example: its index in the batch.

    Returns:
        A tree whose edges point to the root. A node is the position of a sub-expression's token,
        with attributes `value` and `depth`; an edge goes from an argument to its operation, with
        the attribute `used`: whether the answer can depend on it.
    """
    import networkx  # only those who draw or walk graphs pay for it

    names = ("node_token", "node_value", "node_depth", "edges", "edge_used")
    tokens, values, depths, edges, used = (latents[name][example].tolist() for name in names)
    graph = networkx.DiGraph()
    for token, value, depth in zip(tokens, values, depths, strict=True):
        if token >= 0:
            graph.add_node(token, value=value, depth=depth)
    for (argument, operation), is_used in zip(edges, used, strict=True):
        if argument >= 0:
            graph.add_edge(argument, operation, used=is_used)
    return graph


def column_dataflow(batch: Batch, *, readout: Literal["first", "last"] = "last") -> "xr.Dataset":
    """Return the flow of values over the columns of a model that puts a mark at both ends.

    Column 0 is the mark before the first token, and that after the last one stands behind the
    sequence, so that column 1 is token 0. The mark that is read out takes the root's value, one
    level later.

    Args:
        batch: of an `ExpressionTask`.
        readout: which mark is read out: the one before the `first` or behind the `last` token.

    Returns:
        What `probes.score_control_flow` takes; -1 is padding, or stands for none:

        - `edges` [example, edge, end]: column of the argument, column of the operation; the last
          edge leads to the mark.
        - `used` [example, edge] bool: whether the answer can depend on it.
        - `level` [example, pos]: of the value that a column holds, 0 for literals.
        - `group` [example, pos]: the sub-expression that it belongs to.
        - `readout`, `root` [example]: the columns of the mark and of the answer's value.
        - `valid` [example, pos] bool: whether a column is there.
        - `depth`, `target` [example]: of the expression, and its answer.

    Raises:
        ValueError: `readout` is neither.

    Example:
        `column_dataflow(TableLookup(TableLookupConfig()).batch("id", 0, 10))["edges"]`
    """
    import xarray as xr  # `import tasks` alone does not pay for it

    if readout not in ("first", "last"):
        raise ValueError(f"readout must be 'first' or 'last', got {readout!r}")
    latents = {name: values.cpu().numpy() for name, values in batch.latents.items()}
    n, width = batch.inputs.shape
    rows, root, inner = np.arange(n), latents["root"] + 1, latents["edges"]
    behind = latents["length"] + 1
    end = behind if readout == "last" else np.zeros_like(root)
    last = np.stack([root, end], -1)[:, None]

    level, group = (np.full((n, width + 2), -1) for _ in range(2))
    group[:, 1:-1] = latents["node"]
    example, node = np.nonzero(latents["node_token"] >= 0)
    level[example, latents["node_token"][example, node] + 1] = latents["node_depth"][example, node]
    level[rows, end] = level[rows, root] + 1
    group[rows, end] = latents["node"].max(1) + 1
    edges = np.concatenate([np.where(inner >= 0, inner + 1, -1), last], axis=1)
    used = np.concatenate([latents["edge_used"], np.ones((n, 1), dtype=bool)], axis=1)
    return xr.Dataset(
        {
            "edges": (("example", "edge", "end"), edges),
            "used": (("example", "edge"), used),
            "level": (("example", "pos"), level),
            "group": (("example", "pos"), group),
            "readout": ("example", end),
            "root": ("example", root),
            "valid": (("example", "pos"), np.arange(width + 2) <= behind[:, None]),
            "depth": ("example", latents["depth"]),
            "target": ("example", batch.targets[:, 0].cpu().numpy()),
        }
    )


def spread_over_depths(batches: Sequence[Batch], n: int) -> Batch:
    """Return about `n` examples in one batch, about equally many of each depth.

    Args:
        batches: of an `ExpressionTask`; of splits that differ in their widths, perhaps.
        n: how many in all; of each depth at least one, and no more than there are.

    Returns:
        The first ones of each depth, by rising depth, as wide as the widest.

    Raises:
        ValueError: there are no batches.

    Example:
        `spread_over_depths([task.batch(split, 0, 500) for split in ("id", "ood")], 200)`
    """
    if not batches:
        raise ValueError("batches must not be empty, got none")

    def join(tensors: list[Tensor]) -> Tensor:
        if tensors[0].ndim == 1:
            return torch.cat(tensors)
        padding = 0 if tensors[0].dtype == torch.bool else -1
        return pad_sequence([row for rows in tensors for row in rows], True, padding)

    latents = {name: join([one.latents[name] for one in batches]) for name in batches[0].latents}
    inputs, targets, mask = (
        join([getattr(one, name) for one in batches]) for name in ("inputs", "targets", "mask")
    )
    each = [(latents["depth"] == depth).nonzero()[:, 0] for depth in latents["depth"].unique()]
    chosen = torch.cat([places[: max(1, n // len(each))] for places in each])
    return Batch(inputs, targets, mask, latents)[chosen]
