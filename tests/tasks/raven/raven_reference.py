"""Reference implementation of the Raven task in plain Python, slow and literal."""

from collections import defaultdict
from fractions import Fraction
from itertools import permutations, product

STEP = {0: 0, 1: 1, 2: 2, 3: -1, 4: -2}
ALL_RULES = tuple(range(8))


def rows_of(rule, n_values, first_row=None):
    """Return all rows of a rule; with first_row, distribute-three has only its values."""
    values = range(n_values)
    if rule in STEP:
        step = STEP[rule]
        return [(a, (a + step) % n_values, (a + 2 * step) % n_values) for a in values]
    if rule == 5:
        return [(a, b, (a + b) % n_values) for a in values for b in values]
    if rule == 6:
        return [(a, b, (a - b) % n_values) for a in values for b in values]
    return list(permutations(values if first_row is None else first_row, 3))


def obeys(rule, rows, n_values):
    """Return whether complete rows, the first of a grid or all three, can come from the rule."""
    first = tuple(rows[0])
    return first in rows_of(rule, n_values) and all(
        tuple(row) in rows_of(rule, n_values, first) for row in rows[1:]
    )


def answer_by_rule(rule, grid, n_values):
    """Return the last value under a rule, from the first row and the last row's pair, or None."""
    a, b, _ = grid[2]
    if rule in STEP:
        return (b + STEP[rule]) % n_values
    if rule in (5, 6):
        return (a + b if rule == 5 else a - b) % n_values
    members = set(grid[0])
    if len(members) < 3 or a == b or not {a, b} <= members:
        return None
    (rest,) = members - {a, b}
    return rest


def likelihood(rule, grid, n_values):
    """Return the probability that the generator makes this complete grid with the rule."""
    if not obeys(rule, grid, n_values):
        return Fraction(0)
    first = len(rows_of(rule, n_values))
    later = len(rows_of(rule, n_values, tuple(grid[0])))
    return Fraction(1, first * later * later)


def posterior(shown, rule_prior, permuted, n_values):
    """Return the posterior over the last panel, by enumeration of all possibilities.

    Args:
        shown: [3][3][K] values as the columns list them; the last panel is not read.
        rule_prior: {rules of the K features: probability}.
        permuted: whether every column may have an order of its own.

    Returns:
        {answer as the last column lists it: probability}; empty where nothing explains `shown`.
    """
    n_features = len(shown[0][0])
    orders = list(permutations(range(n_features)))
    if not permuted:
        orders = orders[:1]
    total = defaultdict(Fraction)
    for answer in product(range(n_values), repeat=n_features):
        complete = [[list(panel) for panel in row] for row in shown]
        complete[2][2] = list(answer)
        for columns in product(orders, repeat=3):
            grids = [
                [[complete[r][c][columns[c].index(feature)] for c in range(3)] for r in range(3)]
                for feature in range(n_features)
            ]
            fitting = [
                {rule: p for rule in ALL_RULES if (p := likelihood(rule, grid, n_values))}
                for grid in grids
            ]
            for rules in product(*fitting):
                probability = rule_prior.get(rules, Fraction(0))
                for feature, rule in enumerate(rules):
                    probability *= fitting[feature][rule]
                total[answer] += probability
    evidence = sum(total.values())
    return {answer: p / evidence for answer, p in total.items() if p}


def prior_of(combinations, rule_order):
    """Return {rules: probability} for uniform combinations and an order of the rules."""
    prior = defaultdict(Fraction)
    for combination in combinations:
        orders = [combination]
        if rule_order == "random":
            orders = list(permutations(combination))
        for rules in orders:
            prior[tuple(rules)] += Fraction(1, len(combinations) * len(orders))
    return prior
