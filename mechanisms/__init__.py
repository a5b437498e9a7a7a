"""Hooked attention mechanisms and the models made of them.

The names are imported when they are first used, so `import mechanisms` itself costs nothing.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
