"""Rows of tables that are to be found again, such as combinations of rules."""

from collections.abc import Iterable

import numpy as np
from jaxtyping import Int


def find_rows(
    rows: Int[np.ndarray, "n entry"], tables: Iterable[Int[np.ndarray, "m entry"]]
) -> Int[np.ndarray, " n"]:
    """Return each row's number in the table that has it, or -1 where none does.

    Args:
        rows: the rows to be found.
        tables: at least one; no row occurs twice in them.
    """
    table, row_in_table = zip(*((table, np.arange(len(table))) for table in tables), strict=True)
    known, wanted = (
        np.ascontiguousarray(each, np.int64).view([("", np.int64)] * rows.shape[1])[:, 0]
        for each in (np.concatenate(table), rows)
    )
    order = np.argsort(known)
    nearest = order[np.searchsorted(known, wanted, sorter=order).clip(max=len(known) - 1)]
    return np.where(known[nearest] == wanted, np.concatenate(row_in_table)[nearest], -1)
