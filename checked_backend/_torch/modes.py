"""Modes of a thread: dispatch modes, inference mode and autocast."""

from __future__ import annotations

import threading

import torch
from torch._C import DisableTorchFunction, DisableTorchFunctionSubclass
from torch._C import _DisableTorchDispatch as DisableTorchDispatch
from torch.amp.autocast_mode import _enter_autocast as enter_autocast
from torch.amp.autocast_mode import _exit_autocast as exit_autocast
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes

__all__ = [
    "DisableTorchDispatch",
    "DisableTorchFunction",
    "DisableTorchFunctionSubclass",
    "TorchDispatchMode",
    "disable_current_modes",
    "enter_autocast",
    "exit_autocast",
    "set_inference_mode",
]


def set_inference_mode(enabled: bool) -> None:
    """Switch inference mode for this thread for good.

    Torch has only a guard for it, and resets the mode when the guard is destroyed. The thread keeps the guard alive.
    """
    vars(threading.current_thread()).setdefault("checked_backend_modes", []).append(torch._C._InferenceMode(enabled))
