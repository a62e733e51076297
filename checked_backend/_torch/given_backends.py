"""The backends that a program hands to Dynamo without ``torch.compile``."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from torch._dynamo import eval_frame

_STANCES = frozenset({"_callback_from_stance", "callback_fn"})
"""Where a stance has another backend compile: a forced one, or AOT's eager at the first call."""

_ASKS = frozenset({"optimize", "_optimize", "optimize_assert", "_optimize_assert", "rebuild_ctx"})
"""What else asks for a backend in that file looks at graphs (``explain``, ``export``)."""


def choose_given_backends(choose: Callable[[Any], Any]) -> Callable[[], None]:
    """Have a function choose the backend wherever a program hands one to Dynamo without ``torch.compile``.

    Ways to do so are ``torch._dynamo.optimize`` and ``torch.compiler.set_stance``. What torch and this package hand
    over, for an export for example, is left alone; so is a stance's eager, because nothing compiles then.

    Args:
        choose: Takes the backend, and returns the one to use instead.

    Returns:
        A function that undoes it, if nobody has replaced the same name since.
    """
    original = eval_frame.get_compiler_fn

    @functools.wraps(original)
    def get_compiler_fn(compiler_fn: Any) -> Any:
        return original(choose(compiler_fn) if _is_given(compiler_fn) else compiler_fn)

    eval_frame.get_compiler_fn = get_compiler_fn

    def undo() -> None:
        if eval_frame.get_compiler_fn is get_compiler_fn:
            eval_frame.get_compiler_fn = original

    return undo


def _is_given(backend: Any) -> bool:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename == eval_frame.__file__:
        if frame.f_code.co_name in _STANCES:
            return not isinstance(backend, str) or backend != "eager"
        if frame.f_code.co_name not in _ASKS:
            return False
        frame = frame.f_back
    home = "" if frame is None else str(frame.f_globals.get("__name__"))
    return home.partition(".")[0] not in ("torch", "checked_backend")
