"""Combinations that are held out: training has each of their parts, and the first draw counts."""

from itertools import combinations

import numpy as np
import pytest

from tasks.held_out import hold_out

PAIRS = np.array(list(combinations(range(4), 2)))


def test_a_first_draw_with_all_parts_is_kept():
    for seed in range(30):
        order = np.random.default_rng(seed).permutation(6)
        train, held_out = hold_out(PAIRS, 3, np.random.default_rng(seed))
        assert sorted([*train, *held_out]) == list(range(6))
        assert set(PAIRS[train].ravel()) == set(range(4))
        if set(PAIRS[order[3:]].ravel()) == set(range(4)):
            assert train.tolist() == order[3:].tolist()
            assert held_out.tolist() == order[:3].tolist()


def test_what_no_draw_covers_is_an_error():
    with pytest.raises(
        ValueError, match=r"leave all 4 parts .* got 0.833333: none of 1,000 random"
    ):
        hold_out(PAIRS, 5, np.random.default_rng(0))
