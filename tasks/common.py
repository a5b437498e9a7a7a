"""What the tasks share: checks of arguments, and randomness that follows from a config."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


class Key:
    """Random numbers that depend on a config and a path alone.

    Args:
        config: all of its fields enter.
    """

    def __init__(self, config: "DataclassInstance") -> None:
        self._digest = hashlib.sha256(json.dumps(asdict(config), sort_keys=True).encode())

    def hexdigest(self) -> str:
        """Return the config's hash, 64 hexadecimal digits."""
        return self._digest.hexdigest()

    def seed(self, path: str) -> int:
        """Return the 128 bits that belong to a path."""
        digest = self._digest.copy()
        digest.update(path.encode())
        return int.from_bytes(digest.digest()[:16], "little")

    def generator(self, path: str) -> np.random.Generator:
        """Return a fresh generator: always the same one for the same config and path."""
        # NumPy's Philox takes all 128 bits as its key; torch's CPU generator uses 32 bits of its
        # seed, so that some batches of a long run would occur twice.
        return np.random.Generator(np.random.Philox(key=self.seed(path)))


def require_int(name: str, value: Any, low: int, high: int) -> None:
    """Raise a ValueError unless `value` is a whole number from `low` to `high`."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"{name}={value!r}: allowed is a whole number from {low} to {high}")


def require_range(name: str, value: Any, low: int, high: int) -> None:
    """Raise a ValueError unless `value` is a pair with low <= first <= last <= high."""
    whole = isinstance(value, tuple) and len(value) == 2 and all(type(x) is int for x in value)
    if not whole or not low <= value[0] <= value[1] <= high:
        raise ValueError(
            f"{name}={value!r}: allowed is a pair (first, last) of whole numbers, "
            f"{low} <= first <= last <= {high}"
        )


def require_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    """Raise a ValueError, which names the nearest choice, unless `value` is one of `choices`."""
    if value not in choices:
        near = get_close_matches(str(value), choices, n=1)
        hint = f"; nearest: {near[0]!r}" if near else ""
        raise ValueError(f"{name}={value!r}: allowed are {', '.join(choices)}{hint}")


def require_share(name: str, value: Any) -> None:
    """Raise a ValueError unless `value` is a number from 0 to 1."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ValueError(f"{name}={value!r}: allowed is a number from 0 to 1")
