"""Synthetic tasks: a frozen config, a sampler and the named ground truth behind every example.

The names are imported when they are first used, so `import tasks` itself costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tasks.batch import Batch
    from tasks.raven import RAVEN_RULES, Raven, RavenConfig
    from tasks.raven_observer import IdealObserver, Observation, RavenCeiling

__all__ = [
    "RAVEN_RULES",
    "Batch",
    "IdealObserver",
    "Observation",
    "Raven",
    "RavenCeiling",
    "RavenConfig",
]

_HOME = {
    "RAVEN_RULES": "raven",
    "Batch": "batch",
    "IdealObserver": "raven_observer",
    "Observation": "raven_observer",
    "Raven": "raven",
    "RavenCeiling": "raven_observer",
    "RavenConfig": "raven",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'tasks' has no attribute {name!r}; it has {__all__}")
    return getattr(import_module(f"tasks.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
