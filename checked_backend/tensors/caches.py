"""Free memory that nothing uses any more."""

from __future__ import annotations

import gc

import torch


def empty_caches(*, oldest: bool = True) -> None:
    """Free objects that are only held in cycles, and the memory that torch's allocators keep for later.

    Args:
        oldest: Also look for cycles among Python's oldest objects, which takes up to a second in a large program.
    """
    gc.collect(2 if oldest else 1)
    for device in (torch.cuda, torch.xpu):
        if device.is_initialized():  # an uninitialized device would get a context by this call
            device.empty_cache()
    if torch.backends.mps.is_available():
        torch.mps.empty_cache()
