import re

import pytest
import torch
from torch.func import vmap

from mechanisms.sequences import rows_of_table


def test_ids_are_rows_and_padding_is_row_0():
    ids = torch.tensor([[2, -1, 0], [1, 2, -1]])
    assert rows_of_table(ids, 3, padding=-1).tolist() == [[2, 0, 0], [1, 2, 0]]
    assert rows_of_table(ids + 1, 4, padding=3).tolist() == [[0, 0, 1], [2, 0, 0]]
    assert rows_of_table(torch.zeros(0, 4, dtype=torch.long), 3).shape == (0, 4)


@pytest.mark.parametrize(
    ("padding", "wrong", "message"),
    [
        (None, -1, "token ids must be in [0, 3), got -1"),
        (-1, -2, "token ids must be in [0, 3), or -1 for padding, got -2"),
        (9, 3, "token ids must be in [0, 3), or 9 for padding, got 3"),
    ],
)
def test_other_ids_are_refused(padding, wrong, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        rows_of_table(torch.tensor([1, wrong]), 3, padding=padding)


def test_ids_are_taken_as_they_are_inside_of_vmap():
    ids = torch.tensor([[2, -1, 0], [1, 2, -1]])
    rows = vmap(lambda one: rows_of_table(one, 3, padding=-1))(ids)
    assert torch.equal(rows, rows_of_table(ids, 3, padding=-1))
