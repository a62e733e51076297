"""What is run in eager, and what is compiled, in place of what the user gave to a check."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["called_inside", "eager_function"]


def eager_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """What ``torch.compile`` was given, where the function is what it returned; else the function itself.

    What ``torch.compiler.disable`` returned stays as it is.
    """
    if _is_disabled(function):
        return function
    inner = getattr(function, "_orig_mod", None) or getattr(function, "_torchdynamo_orig_callable", None)
    return function if inner is None else eager_function(inner)


def called_inside(function: Callable[..., Any]) -> Callable[..., Any]:
    """What to compile in place of a function: of one that is disabled, a function that calls it.

    ``torch.compile`` takes ``torch.compiler.disable`` off the very function that it is given. Everywhere else in the
    user's program, that is where compiled code calls the function, it is not compiled.
    """
    if not _is_disabled(function):
        return function

    def calls_disabled(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return calls_disabled


def _is_disabled(function: Callable[..., Any]) -> bool:
    """Whether it is, or of a module its ``forward`` is, what ``torch.compiler.disable`` returned."""
    called = function.forward if isinstance(function, torch.nn.Module) else function
    return bool(getattr(called, "_torchdynamo_disable", False))
