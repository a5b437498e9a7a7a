"""Tasks: a frozen config, a sampler and the named ground truth behind every example.

Names are imported on first use, so `import tasks` is fast.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
