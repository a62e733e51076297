"""Give memory back that nothing uses any more."""

from __future__ import annotations

import gc

import torch

__all__ = ["empty_caches"]


def empty_caches() -> None:
    """Free what is only held in cycles, and what torch's allocators keep for later."""
    gc.collect()
    for device in (torch.cuda, torch.xpu):
        if device.is_initialized():  # else this would make a context on the device
            device.empty_cache()
    if torch.backends.mps.is_available():
        torch.mps.empty_cache()
