"""Modes of a thread: dispatch modes, function modes, inference mode and autocast."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
import torch.overrides
import torch.utils._python_dispatch
from torch._C import DisableTorchFunction, DisableTorchFunctionSubclass
from torch._C import _DisableTorchDispatch as DisableTorchDispatch
from torch.amp.autocast_mode import _enter_autocast as enter_autocast
from torch.amp.autocast_mode import _exit_autocast as exit_autocast
from torch.utils._device import DeviceContext as _DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes

__all__ = [
    "DisableTorchDispatch",
    "DisableTorchFunction",
    "DisableTorchFunctionSubclass",
    "TorchDispatchMode",
    "disable_current_modes",
    "dispatch_modes",
    "enter_autocast",
    "exit_autocast",
    "function_modes",
    "set_dispatch_modes",
    "set_function_modes",
    "set_inference_mode",
]


def function_modes() -> tuple[Any, ...]:
    """The active torch function modes, outermost first, without the mode of the default device."""
    found = torch.overrides._get_current_function_mode_stack()
    return tuple(mode for mode in found if not isinstance(mode, _DeviceContext))


def set_function_modes(modes: Sequence[Any]) -> None:
    """Make these the active torch function modes, beside the mode of the default device."""
    wanted = [
        *(mode for mode in torch.overrides._get_current_function_mode_stack() if isinstance(mode, _DeviceContext))
    ]
    while torch._C._len_torch_function_stack():
        torch.overrides._pop_mode()
    for mode in (*wanted, *modes):
        torch.overrides._push_mode(mode)


def dispatch_modes() -> tuple[Any, ...]:
    """The active dispatch modes, outermost first."""
    return tuple(torch.utils._python_dispatch._get_current_dispatch_mode_stack())


def set_dispatch_modes(modes: Sequence[Any]) -> None:
    """Leave the dispatch modes that were entered since these were the active ones."""
    while len(dispatch_modes()) > len(modes):
        torch.utils._python_dispatch._pop_mode()


def set_inference_mode(enabled: bool) -> None:
    """Switch inference mode for this thread for good.

    Torch has only a guard for it, and resets the mode when the guard is destroyed. The thread keeps the guard alive.
    """
    vars(threading.current_thread()).setdefault("checked_backend_modes", []).append(torch._C._InferenceMode(enabled))
