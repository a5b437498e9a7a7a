"""Synthetic tasks: a frozen config, a sampler and the named ground truth behind every example.

The names are imported when they are first used, so `import tasks` itself costs nothing.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
