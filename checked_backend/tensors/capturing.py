"""Whether a CUDA graph is being captured."""

from __future__ import annotations

import torch

__all__ = ["is_capturing"]


def is_capturing() -> bool:
    """Whether a CUDA graph records what runs on this stream. No value can be read then, and nothing synchronised."""
    # a process that has not used CUDA captures nothing, and asking a driver takes long
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
