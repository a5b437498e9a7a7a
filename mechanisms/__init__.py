"""Hooked attention mechanisms and models built from them.

Names are imported on first use, so `import mechanisms` itself is fast.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
