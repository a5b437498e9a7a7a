"""Recursive reference implementation of expressions, independent of the package."""

from dataclasses import dataclass, field

from tests.tasks.batches import full_batch


@dataclass
class Node:
    """A sub-expression: its positions, its representing token, its arguments and its value."""

    positions: list
    token: int
    arguments: list = field(default_factory=list)
    selected: list = field(default_factory=list)
    value: int = -1
    used: bool = True

    @property
    def depth(self):
        return 1 + max(node.depth for node in self.arguments) if self.arguments else 0

    @property
    def dependency_depth(self):
        if not self.arguments:
            return 0
        return 1 + max(self.arguments[i].dependency_depth for i in self.selected)

    def all(self):
        return [self, *(node for argument in self.arguments for node in argument.all())]


def parse_infix(tokens):
    """Parse `(3+(4*5))`, a token per character."""

    def expression(start):
        if tokens[start] != "(":
            return Node([start], start, value=int(tokens[start])), start + 1
        left, middle = expression(start + 1)
        right, end = expression(middle + 1)
        assert tokens[end] == ")"
        node = Node([start, middle, end], middle, [left, right], [0, 1])
        node.value = eval("".join(tokens[start : end + 1])) % 10
        return node, end + 1

    node, end = expression(0)
    assert end == len(tokens)
    return finish(node)


def parse_prefix(tokens):
    """Parse `[MAX 3 4 ]`, given as a list of tokens."""

    def expression(start):
        if not tokens[start].startswith("["):
            return Node([start], start, value=int(tokens[start])), start + 1
        arguments, end = [], start + 1
        while tokens[end] != "]":
            argument, end = expression(end)
            arguments.append(argument)
        node = Node([start, end], start, arguments)
        values = [argument.value for argument in arguments]
        node.value, node.selected = reduce(tokens[start][1:], values)
        return node, end + 1

    node, end = expression(0)
    assert end == len(tokens)
    return finish(node)


def parse_tables(tokens, tables, *, backward):
    """Parse `101 d a b` or its mirror image; tables: name -> {symbol: symbol}."""
    order = list(enumerate(tokens))
    if backward:
        order.reverse()
    node, name = Node([order[0][0]], order[0][0]), order[0][1]
    names = sorted(next(iter(tables.values())))
    node.value = names.index(name)
    for position, table in order[1:]:
        name = tables[table][name]
        node = Node([position], position, [node], [0], names.index(name))
    return finish(node)


def finish(node):
    for i, argument in enumerate(node.arguments):
        argument.used = node.used and i in node.selected
        finish(argument)
    return node


def reduce(operator, values):
    """Return an operator's result and the indices of the arguments that it depends on."""
    if operator == "SM":
        return sum(values) % 10, list(range(len(values)))
    if operator in ("MIN", "MAX"):
        result = (min if operator == "MIN" else max)(values)
        return result, [values.index(result)]
    pairs = sort_by_network(list(zip(values, range(len(values)), strict=True)))
    middle = {pairs[(len(pairs) - 1) // 2], pairs[len(pairs) // 2]}
    result = sorted(values)[(len(values) - 1) // 2] + sorted(values)[len(values) // 2]
    return result // 2, sorted(index for _, index in middle)


def sort_by_network(pairs):
    """Sort by a bitonic network of two halves of four, the second with at most one value."""

    def compare(i, j):
        if j < len(pairs) and pairs[j][0] < pairs[i][0]:
            pairs[i], pairs[j] = pairs[j], pairs[i]

    for i, j in ((0, 1), (2, 3), (0, 3), (1, 2), (0, 1), (2, 3)):
        compare(i, j)
    # The halves' mirror images are compared, of which only 3 and 4 both hold a value.
    for i, j in ((3, 4), (0, 2), (1, 3), (0, 1), (2, 3)):
        compare(i, j)
    return pairs


def check_latents(batch, example, root):
    """Assert that the latents of an example agree with its parsed expression."""
    latents = {name: value[example] for name, value in batch.latents.items()}
    nodes = sorted(root.all(), key=lambda node: node.token)
    assert latents["length"] == sum(len(node.positions) for node in nodes)
    assert batch.targets[example].item() == root.value
    assert latents["root"] == root.token
    for name, expected in {
        "node_token": [node.token for node in nodes],
        "node_value": [node.value for node in nodes],
        "node_depth": [node.depth for node in nodes],
        "node": [
            number
            for _, number in sorted((p, i) for i, node in enumerate(nodes) for p in node.positions)
        ],
    }.items():
        assert unpadded(latents[name]) == expected, name
    parents = {id(child): node for node in nodes for child in node.arguments}
    below = [node for node in nodes if node is not root]
    edges = [[node.token, parents[id(node)].token] for node in below]
    assert unpadded(latents["edges"]) == edges
    used = latents["edge_used"].tolist()
    assert used[: len(edges)] == [node.used for node in below]
    assert not any(used[len(edges) :])


def unpadded(values):
    """Return a list without its padding, which must be at the end."""
    listed = values.tolist()
    while listed and listed[-1] in (-1, [-1, -1]):
        listed.pop()
    assert all(value not in (-1, [-1, -1]) for value in listed)
    return listed


def distinct(task, split):
    """Return the texts of all examples of a split, in their order."""
    batch = full_batch(task, split)
    return [task.text(batch, i) for i in range(len(batch))]
