"""Find the functions to run in eager and to compile for the function that the user gave to a check."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

__all__ = ["called_inside", "eager_function", "function_name"]


def eager_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """The original of a function that ``torch.compile`` returned; any other function itself.

    A function that ``torch.compiler.disable`` returned stays as it is.
    """
    if _is_disabled(function):
        return function
    inner = getattr(function, "_orig_mod", None) or getattr(function, "_torchdynamo_orig_callable", None)
    return function if inner is None else eager_function(inner)


def function_name(function: Callable[..., Any]) -> str:
    """The name of the user's function, for people: ``ConvNet`` for a module, ``train_step``, ``<lambda>``."""
    while isinstance(function, partial):
        function = function.func
    if isinstance(function, torch.nn.Module):
        return type(function).__name__
    named = str(getattr(function, "__qualname__", type(function).__name__))
    return named.rpartition("<locals>.")[2]


def called_inside(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function to compile: for a disabled function a function that calls it, for any other the function itself.

    ``torch.compile`` removes ``torch.compiler.disable`` from the function that it is given. Everywhere else in the
    user's program, where compiled code calls the function, it is not compiled.
    """
    if not _is_disabled(function):
        return function

    def calls_disabled(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return calls_disabled


def _is_disabled(function: Callable[..., Any]) -> bool:
    """Whether ``torch.compiler.disable`` returned a function, or a module's ``forward``."""
    called = function.forward if isinstance(function, torch.nn.Module) else function
    return bool(getattr(called, "_torchdynamo_disable", False))
