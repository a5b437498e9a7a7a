"""Probes: labelled arrays in, labelled arrays out.

`capture` streams activations (reduced inside the hook) beside the ground truth of a task;
`decode` and `decode_continuous` ask what is linearly readable from them, `project` shows them in
the plane, and `interchange` asks whether the model uses them.

Names are imported on first use (PEP 562), so that `import probes` costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from probes.capturing import Batch, Quantity, capture
    from probes.decoding import decode
    from probes.decoding_continuous import decode_continuous
    from probes.hooking import HookedModel, resolve_hooks
    from probes.interchanging import interchange
    from probes.projecting import project

_HOME = {
    "Batch": "probes.capturing",
    "HookedModel": "probes.hooking",
    "Quantity": "probes.capturing",
    "capture": "probes.capturing",
    "decode": "probes.decoding",
    "decode_continuous": "probes.decoding_continuous",
    "interchange": "probes.interchanging",
    "project": "probes.projecting",
    "resolve_hooks": "probes.hooking",
}

__all__ = [
    "Batch",
    "HookedModel",
    "Quantity",
    "capture",
    "decode",
    "decode_continuous",
    "interchange",
    "project",
    "resolve_hooks",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # No module is named like what it exports: importing the module would shadow the function here.
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
