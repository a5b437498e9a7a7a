"""Base class of the tasks of the Neural Data Router: expressions, with their graphs as latents.

Csordás, Irie, Schmidhuber 2021, "The Neural Data Router: Adaptive Control Flow in Transformers
Improves Systematic Generalization", has three tasks. Each example is an expression as a sequence of
tokens; the answer is its value. Deeper expressions are held out.
"""

import re
from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal, final

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tasks.answers import is_correct
from tasks.batch import Batch
from tasks.causal import CausalTask
from tasks.common import Key
from tasks.finite import ExampleSet
from tasks.finite_task import FiniteTask

if TYPE_CHECKING:
    import networkx
    import xarray as xr


class ExpressionTask(FiniteTask, CausalTask):
    """A task whose examples are expressions.

    Splits: `train`; `id` has other expressions of the depths of `train`; `valid` has deeper ones,
    and `ood` the deepest.

    The prefixes of the splits other than `train` are balanced over depth. A batch has
    inputs [batch, pos] int64, token ids, padded with -1 to the greatest length of the split;
    targets [batch, 1] int64, indices into `answers`; mask [batch, 1], all True.

    Latents (int64 but for `edge_used`; padded with -1; widths depend on the split):
    `length` [batch]: number of tokens;
    `depth` [batch]: the depth that distinguishes the splits;
    `node` [batch, pos]: the sub-expression (node) of each token: a literal is a node, an operation
    has its symbol and its brackets;
    `node_token` [batch, node]: the position of the token that represents the node: the literal, or
    the operation's symbol; nodes are numbered in the order of these positions;
    `node_symbol` [batch, node]: the id of this token, in `vocabulary`;
    `node_value` [batch, node]: its value, an index into `answers`;
    `node_depth` [batch, node]: 0 for a literal, else one more than that of the deepest argument;
    `edges` [batch, edge, 2]: the dataflow between tokens: (position of the argument's token,
    position of the operation's), in the order of the arguments' nodes;
    `edge_used` [batch, edge] bool: whether the answer can depend on this edge (False for padding);
    `root` [batch]: the position of the token whose value is the answer.

    Causal model: `node_symbol` can be set, literals to literals and operations to operations, and
    `node_value`. The structure of the tree cannot. If a value is set, the inputs stay, and values
    of the operations above it follow; whether the answer can depend on an edge is always judged by
    the symbols and the values of the arguments.

    Example:
        >>> arithmetic: ExpressionTask = Arithmetic(ArithmeticConfig())
        >>> batch = arithmetic.examples_of(["(3+(4*5))"])
        >>> arithmetic.answers[batch.targets[0, 0]], batch.latents["node_depth"][0, :5]  # modulo 10
        ('3', tensor([0, 2, 0, 1, 0]))
    """

    SPLITS: ClassVar = ("train", "id", "valid", "ood")

    def __init__(self, *, key: Key, separator: str, width: int | None = None) -> None:
        """Set up the task without making any examples.

        Args:
            key: seeds all random choices.
            separator: the separator of tokens in a text.
            width: the greatest length of an expression in tokens; None: there is none.
        """
        super().__init__(key=key)
        self._separator, self._most_tokens = separator, width

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
        """Accuracy of a uniform guess: 1 over the number of answers.

        Always giving the most frequent answer may be better: in arithmetic "0" is right in about a
        quarter of the examples, see `Arithmetic`.
        """
        return 1 / len(self.answers)

    @final
    def score(
        self, logits: Float[Tensor, "batch 1 answer"], batch: Batch
    ) -> dict[str, Float[Tensor, " batch"]]:
        """Return `accuracy` [batch]: 1 where the most probable answer is correct, else 0.

        Args:
            logits: [batch, 1, n_answers].
            batch: the batch that was answered.

        Raises:
            ValueError: `logits` has another shape.
        """
        return {"accuracy": is_correct(logits, batch, len(self.answers))}

    @final
    def words(self, batch: Batch, example: int) -> list[str]:
        """Return the names of the tokens of one example of a batch."""
        return [self.vocabulary[i] for i in batch.inputs[example].tolist() if i >= 0]

    @final
    def text(self, batch: Batch, example: int) -> str:
        """Return one example of a batch as text."""
        return self._separator.join(self.words(batch, example))

    @final
    def examples_of(self, texts: Sequence[str]) -> Batch:
        """Return a batch of given expressions, written as `text` writes them.

        Args:
            texts: at least one; each is one well-formed expression of the task.

        Raises:
            ValueError: there is no text, or one has an unknown token, is too long or not
                well-formed.

        Example:
            `Arithmetic(ArithmeticConfig()).examples_of(["(3+(4*5))"])`
        """
        words = [text.split(self._separator) if self._separator else list(text) for text in texts]
        longest = max(map(len, words), default=0)
        if longest == 0:
            raise ValueError(f"texts must be at least one expression, got {list(texts)}")
        unknown = sorted({word for row in words for word in row} - set(self.vocabulary))
        if unknown:
            allowed = " ".join(self.vocabulary)
            raise ValueError(f"texts must consist of {allowed}, got {unknown[0]!r}")
        width = self._most_tokens or longest
        if longest > width:
            raise ValueError(f"texts must have at most {width} tokens, got {longest}")
        for text in texts:
            if not self._is_well_formed(text):
                raise ValueError(f"texts must be well-formed expressions, got {text!r}")
        tokens = np.full((len(words), width), -1, np.int8)
        for row, text in zip(tokens, words, strict=True):
            row[: len(text)] = [self.vocabulary.index(word) for word in text]
        return self._describe(tokens).take(torch.arange(len(words)), "cpu")

    def _is_well_formed(self, text: str) -> bool:
        """Whether a literal is left where operations on literals are replaced by a literal."""
        before = None
        while text != before:
            before, text = text, re.sub(self._operation, self.answers[0], text)
        return text in self.answers

    @property
    @abstractmethod
    def _operation(self) -> str:
        """The regular expression of an operation on literals, as text."""

    @abstractmethod
    def _describe(self, tokens: Int[np.ndarray, "n pos"]) -> ExampleSet:
        """Return the examples of sequences, with targets and latents."""


def dataflow(latents: dict[str, Tensor], example: int) -> "networkx.DiGraph":
    """Return the dataflow graph of one expression.

    Args:
        latents: those of a batch of an `ExpressionTask`.
        example: the expression's index in the batch.

    Returns:
        A tree whose edges point to the root. A node is the position of a sub-expression's token,
        with attributes `value` and `depth`; an edge goes from an argument to its operation, with
        the attribute `used`: whether the answer can depend on it.

    Example:
        >>> lookup = TableLookup(TableLookupConfig())
        >>> dataflow(lookup.batch("id", 0, 4).latents, 0).number_of_nodes() > 1
        True
    """
    import networkx  # imported here to keep `import tasks` fast

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
    """Return the dataflow over the columns of a model that adds a begin and an end token.

    Column 0 is the begin token, column 1 is token 0, and the end token follows the last token. The
    readout column, that of the begin or the end token, receives the root's value one level later.

    Args:
        batch: of an `ExpressionTask`.
        readout: whether the model is read out at the `first` or at the `last` column.

    Returns:
        The true dataflow as `probes.score_control_flow` expects it; -1 is padding or "none":

        - `edges` [example, edge, end]: column of the argument, column of the operation; the last
          edge leads to the readout column.
        - `used` [example, edge] bool: whether the answer can depend on the edge.
        - `level` [example, pos]: the depth of a column's value, 0 for literals.
        - `value` [example, pos]: a column's value, an index into the task's `answers`.
        - `span` [example, pos]: number of tokens of the sub-expression whose value a column holds;
          -1 for the readout column.
        - `group` [example, pos]: the sub-expression of a column.
        - `readout`, `root` [example]: the readout column and the column of the answer's value.
        - `valid` [example, pos] bool: whether the column is in use.
        - `depth`, `target` [example]: the expression's depth and answer.

    Raises:
        ValueError: `readout` is neither "first" nor "last".

    Example:
        >>> column_dataflow(TableLookup(TableLookupConfig()).batch("id", 0, 10))["edges"]
    """
    import xarray as xr  # imported here to keep `import tasks` fast

    if readout not in ("first", "last"):
        raise ValueError(f"readout must be 'first' or 'last', got {readout!r}")
    latents = {name: values.cpu().numpy() for name, values in batch.latents.items()}
    n, width = batch.inputs.shape
    rows, root, token_edges = np.arange(n), latents["root"] + 1, latents["edges"]
    last_column = latents["length"] + 1
    readout_column = last_column if readout == "last" else np.zeros_like(root)
    readout_edge = np.stack([root, readout_column], -1)[:, None]

    level, value, span, group = (np.full((n, width + 2), -1) for _ in range(4))
    group[:, 1:-1] = latents["node"]
    example, node = np.nonzero(latents["node_token"] >= 0)
    column = latents["node_token"][example, node] + 1
    level[example, column] = latents["node_depth"][example, node]
    value[example, column] = latents["node_value"][example, node]
    span[:, 1:-1] = _spans(latents)
    level[rows, readout_column] = level[rows, root] + 1
    value[rows, readout_column] = value[rows, root]
    group[rows, readout_column] = latents["node"].max(1) + 1
    column_edges = np.where(token_edges >= 0, token_edges + 1, -1)
    edges = np.concatenate([column_edges, readout_edge], axis=1)
    used = np.concatenate([latents["edge_used"], np.ones((n, 1), dtype=bool)], axis=1)
    return xr.Dataset(
        {
            "edges": (("example", "edge", "end"), edges),
            "used": (("example", "edge"), used),
            "level": (("example", "pos"), level),
            "value": (("example", "pos"), value),
            "span": (("example", "pos"), span),
            "group": (("example", "pos"), group),
            "readout": ("example", readout_column),
            "root": ("example", root),
            "valid": (("example", "pos"), np.arange(width + 2) <= last_column[:, None]),
            "depth": ("example", latents["depth"]),
            "target": ("example", batch.targets[:, 0].cpu().numpy()),
        }
    )


def _spans(latents: dict[str, Int[np.ndarray, "n ..."]]) -> Int[np.ndarray, "n pos"]:
    """The number of tokens of each sub-expression, at its token; -1 at other tokens."""
    node, node_token, node_depth = (latents[name] for name in ("node", "node_token", "node_depth"))
    n, width = node.shape
    spans, depths = np.zeros((n, width), np.int64), np.full((n, width), -1)
    example, token = np.nonzero(node >= 0)
    np.add.at(spans, (example, node_token[example, node[example, token]]), 1)
    example, number = np.nonzero(node_token >= 0)
    depths[example, node_token[example, number]] = node_depth[example, number]
    # Arguments are complete before their operations, which are deeper.
    example, edge = np.nonzero(latents["edges"][..., 0] >= 0)
    argument, operation = latents["edges"][example, edge].T
    depth = depths[example, argument]
    for level in range(depth.max(initial=-1) + 1):
        now = depth == level
        np.add.at(spans, (example[now], operation[now]), spans[example[now], argument[now]])
    return np.where(depths >= 0, spans, -1)


def spread_over_depths(batches: Sequence[Batch], n: int) -> Batch:
    """Return a batch of about `n` examples, about equally many of each depth.

    Args:
        batches: of an `ExpressionTask`; their widths may differ.
        n: number of examples in all; of each depth at least one, and at most the available ones.

    Returns:
        The first examples of each depth, in ascending order of depth, padded to the same width.

    Raises:
        ValueError: `batches` is empty.

    Example:
        >>> spread_over_depths([task.batch(split, 0, 500) for split in ("id", "ood")], 200)
    """
    if not batches:
        raise ValueError("batches must not be empty, got none")

    def join(tensors: list[Tensor]) -> Tensor:
        if tensors[0].ndim == 1:
            return torch.cat(tensors)
        padding = 0 if tensors[0].dtype == torch.bool else -1
        return pad_sequence([row for rows in tensors for row in rows], True, padding)

    latents = {
        name: join([batch.latents[name] for batch in batches]) for name in batches[0].latents
    }
    inputs, targets, mask = (
        join([getattr(batch, name) for batch in batches]) for name in ("inputs", "targets", "mask")
    )
    by_depth = [(latents["depth"] == depth).nonzero()[:, 0] for depth in latents["depth"].unique()]
    selected = torch.cat([examples[: max(1, n // len(by_depth))] for examples in by_depth])
    return Batch(inputs, targets, mask, latents)[selected]
