"""The streams of CUDA: whether one is being captured, and waiting for what it was given."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


def is_capturing() -> bool:
    """Whether a CUDA graph records what runs on this stream. No value can be read then, and nothing synchronised."""
    # a process that has not used CUDA captures nothing, and asking a driver takes long
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def wait_for_devices(values: Iterable[Any]) -> None:
    """Wait until the current streams have run what they were given.

    A kernel that errs raises at a later call, whoever makes it. Other streams are not waited for: whoever uses them
    must do that.

    Args:
        values: Tensors tell the devices; others do not count.

    Raises:
        RuntimeError: A kernel erred.
    """
    devices = {value.device for value in values if isinstance(value, torch.Tensor) and value.device.type == "cuda"}
    for device in sorted(devices, key=str):
        torch.cuda.current_stream(device).synchronize()
