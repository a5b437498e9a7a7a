"""What the tasks of the Neural Data Router share: expressions, and their graphs as latents.

Csordás, Irie, Schmidhuber 2021, "The Neural Data Router: Adaptive Control Flow in Transformers
Improves Systematic Generalization", has three tasks. Each example is an expression, read as a
sequence of tokens; the answer is its value. Deeper expressions are held out.
"""

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar, final

from jaxtyping import Float
from torch import Tensor

from tasks._common import Key
from tasks.batch import Batch
from tasks.finite_task import FiniteTask

if TYPE_CHECKING:
    import networkx


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
    def text(self, batch: Batch, example: int) -> str:
        """Return one example of a batch as it is written."""
        ids = batch.inputs[example].tolist()
        return self._separator.join(self.vocabulary[i] for i in ids if i >= 0)


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
