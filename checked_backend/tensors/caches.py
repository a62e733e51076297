"""Free memory that nothing uses any more."""

from __future__ import annotations

import gc

import torch

__all__ = ["empty_caches"]


def empty_caches() -> None:
    """Free objects that are only held in cycles, and the memory that torch's allocators keep for later."""
    gc.collect()
    for device in (torch.cuda, torch.xpu):
        if device.is_initialized():  # an uninitialized device would get a context by this call
            device.empty_cache()
    if torch.backends.mps.is_available():
        torch.mps.empty_cache()
