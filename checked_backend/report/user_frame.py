"""Where in the user's own code a warning belongs."""

from __future__ import annotations

import sys
from types import FrameType

__all__ = ["users_stacklevel"]

_OTHERS = frozenset({"torch", "checked_backend"})


def users_stacklevel() -> int:
    """The ``stacklevel`` at which the caller's warning names the user's code, not a line of torch or of this package.

    Where no frame is the user's, as in a thread of autograd's, it is the caller's own.
    """
    frame: FrameType | None = sys._getframe(1)
    level = 1
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).partition(".")[0] not in _OTHERS:
            return level
        frame, level = frame.f_back, level + 1
    return 1
