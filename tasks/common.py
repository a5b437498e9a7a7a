"""Checks of settings and shapes, and random numbers that follow from a config."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


class Key:
    """Random numbers that depend on a config and a path alone.

    Args:
        config: its fields enter the hash.
        without: fields that do not, such as a setting that a task got later: the numbers of earlier
            configs stay what they were.
    """

    def __init__(self, config: "DataclassInstance", without: tuple[str, ...] = ()) -> None:
        fields = {name: value for name, value in asdict(config).items() if name not in without}
        self._config = json.dumps(fields, sort_keys=True).encode()

    def hexdigest(self) -> str:
        """Return the config's hash, 64 hexadecimal digits."""
        return hashlib.sha256(self._config).hexdigest()

    def seed(self, path: str) -> int:
        """Return the 128-bit seed of a path."""
        digest = hashlib.sha256(self._config + path.encode()).digest()
        return int.from_bytes(digest[:16], "little")

    def generator(self, path: str) -> np.random.Generator:
        """Return a new generator, seeded by the config and the path."""
        # NumPy's Philox takes all 128 bits as its key; torch's CPU generator uses 32 bits of its
        # seed, so some batches of a long run would repeat.
        return np.random.Generator(np.random.Philox(key=self.seed(path)))


@dataclass(frozen=True)
class SeedConfig:
    """The config behind a `Key` whose random choices depend on the seed alone."""

    seed: int


def require_int(name: str, value: Any, low: int, high: int) -> None:
    """Raise a ValueError unless `value` is an integer from `low` to `high`."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"{name} must be an integer from {low} to {high}, got {value!r}")


def require_number(name: str, value: Any, low: float, high: float) -> None:
    """Raise a ValueError unless `value` is a number from `low` to `high`."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise ValueError(f"{name} must be a number from {low} to {high}, got {value!r}")


def require_range(name: str, value: Any, low: int, high: int) -> None:
    """Raise a ValueError unless `value` is a pair with low <= first <= last <= high."""
    is_pair = isinstance(value, tuple) and len(value) == 2 and all(type(x) is int for x in value)
    if not is_pair or not low <= value[0] <= value[1] <= high:
        raise ValueError(
            f"{name} must be a pair (first, last) of integers with "
            f"{low} <= first <= last <= {high}, got {value!r}"
        )


def require_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    """Raise a ValueError, which names the nearest choice, unless `value` is one of `choices`."""
    if value not in choices:
        nearest = get_close_matches(str(value), choices, n=1)
        hint = f"; nearest: {nearest[0]!r}" if nearest else ""
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}{hint}")


def require_bool(name: str, value: Any) -> None:
    """Raise a ValueError unless `value` is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")


def require_path(name: str, value: Any) -> None:
    """Raise a ValueError unless `value` is None or a non-empty string."""
    if value is not None and (not isinstance(value, str) or not value):
        raise ValueError(f"{name} must be None or a path, got {value!r}")


def require_held_out(name: str, share: float, n_held_out: int, n: int, items: str) -> None:
    """Raise a ValueError unless holding out `n_held_out` of `n` items leaves no side empty."""
    if not 0 < n_held_out < n:
        raise ValueError(
            f"{name} must leave items on both sides of the split, got {share!r}, which holds out "
            f"{n_held_out} of the {n} {items}"
        )


def require_shape(name: str, tensor: Tensor, *shapes: tuple[int, ...]) -> None:
    """Raise a ValueError unless a tensor has one of some shapes."""
    if tuple(tensor.shape) not in shapes:
        allowed = " or ".join(map(str, shapes))
        raise ValueError(f"{name} must have shape {allowed}, got {tuple(tensor.shape)}")
