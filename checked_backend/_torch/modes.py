"""Modes of a thread: dispatch modes, inference mode and autocast."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

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
    "OperatorWatch",
    "TorchDispatchMode",
    "disable_current_modes",
    "enter_autocast",
    "exit_autocast",
    "set_inference_mode",
]


class OperatorWatch(TorchDispatchMode):
    """Calls a function with each operator and its arguments, before the operator runs.

    Args:
        higher_order: Whether higher-order operators are shown, too; else they cannot run inside.
    """

    def __init__(self, show: Callable[[Any, tuple[Any, ...], dict[str, Any]], object], *, higher_order: bool = False):
        super().__init__()  # type: ignore[no-untyped-call]
        self.supports_higher_order_operators = higher_order
        self._show = show

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self._show(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def set_inference_mode(enabled: bool) -> None:
    """Switch inference mode for this thread for good.

    Torch has only a guard for it, and resets the mode when the guard is destroyed. The thread keeps the guard alive.
    """
    vars(threading.current_thread()).setdefault("checked_backend_modes", []).append(torch._C._InferenceMode(enabled))
