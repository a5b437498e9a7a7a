"""The rules of Raven matrices: the rows that obey them, and the last value of a row."""

from itertools import permutations

import torch
from torch import Tensor

RAVEN_RULES = (
    "constant",
    "progression +1",
    "progression +2",
    "progression -1",
    "progression -2",
    "sum",
    "difference",
    "distribute three",
)
"""The rules' names; a rule's id is its index."""

STEPS = (0, 1, 2, -1, -2)
"""The difference between successive panels of the rules 0 to 4."""

SUM, DIFFERENCE, DISTRIBUTE = 5, 6, 7


def rule_answers(first_row: Tensor, a: Tensor, b: Tensor, n_values: int) -> tuple[Tensor, Tensor]:
    """Return the third value of a row under each rule, from the first two.

    Args:
        first_row: [..., 3], the values of the grid's first row: the set of "distribute three".
        a: [...], the first value of the row.
        b: [...], the second value; only sum and difference (a - b) depend on both.
        n_values: F.

    Returns:
        answer [..., 8]: in [0, F), -1 where undefined;
        defined [..., 8]: True for all rules but "distribute three", which requires three distinct
        values in the first row, with a and b two of them.
    """
    steps = torch.tensor(STEPS, device=b.device)
    by_step = (b[..., None] + steps) % n_values
    by_pair = torch.stack([a + b, a - b], -1) % n_values

    x, y, z = first_row.unbind(-1)
    is_defined = (x != y) & (y != z) & (x != z) & (a != b)
    for value in (a, b):
        is_defined = is_defined & (value[..., None] == first_row).any(-1)
    by_set = torch.where(is_defined, x + y + z - a - b, -1)

    answer = torch.cat([by_step, by_pair, by_set[..., None]], -1)
    return answer, answer >= 0


def all_rows(n_values: int) -> Tensor:
    """Return all rows of all rules, [7 F^2 + 6 F (F-1) (F-2), 3].

    Rules 0 to 6 have F^2 rows each, by (a, b), repeated where b has no effect; the rows of
    "distribute three" are ordered by (triple, order).
    """
    a, b = torch.meshgrid(torch.arange(n_values), torch.arange(n_values), indexing="ij")
    grids = [torch.stack([a, a + step, a + 2 * step], -1) for step in STEPS]
    grids += [torch.stack([a, b, a + b], -1), torch.stack([a, b, a - b], -1)]
    triples = torch.tensor(list(permutations(range(n_values), 3)))
    orders = torch.tensor(list(permutations(range(3))))
    distributed = triples[:, orders].reshape(-1, 3)
    return torch.cat([torch.cat(grids).view(-1, 3) % n_values, distributed])
