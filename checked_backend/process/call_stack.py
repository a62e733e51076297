"""The memory of Python's own call stack."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")
_SLOTS = 2**17
"""A frame of this many pointers gets a chunk of 2 MiB, of which the calls below it have half."""


def with_deep_stack(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Give calls below a function one chunk of memory for their frames.

    Since 3.11 CPython has its call stack in chunks of 16 KiB, and asks the system for each one anew
    (``_PyThreadState_PushFrame`` of ``Python/pystate.c``). A loop in a compiler whose calls cross the end of a chunk
    does that at every call: of 52 seconds for the first checked step of a model of 12 layers this took 6. A traceback
    that keeps a frame of the function reserves a MiB, which nothing touches.
    """
    function.__code__ = function.__code__.replace(co_stacksize=_SLOTS)
    return function
