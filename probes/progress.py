"""Progress bars of probes."""

from collections.abc import Iterable
from typing import TypeVar

from tqdm import tqdm

Item = TypeVar("Item")


def progress(items: Iterable[Item], what: str, total: int | None = None) -> Iterable[Item]:
    """Iterate with a progress bar, shown on a terminal alone, and only after a second.

    Args:
        items: what to iterate over.
        what: the text of the bar.
        total: number of items, if these have no length.
    """
    return tqdm(items, desc=what, total=total, disable=None, leave=False, delay=1)
