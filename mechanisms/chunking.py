"""Splitting a batch into chunks, so that large intermediate tensors never exist as a whole."""

from __future__ import annotations

import torch

CPU_ELEMENTS = 2**18
"""Elements of an intermediate tensor that are computed together on a CPU: they fit its cache."""

GPU_ELEMENTS = 2**26


def chunk_slices(n_items: int, elements_per_item: int, device: torch.device) -> list[slice]:
    """Slices that cover `n_items`, each with a limited number of elements (at least one item)."""
    elements = CPU_ELEMENTS if device.type == "cpu" else GPU_ELEMENTS
    size = max(1, elements // elements_per_item)
    return [slice(start, start + size) for start in range(0, n_items, size)]
