"""Keep Ctrl-C from being lost: Python drops the exception if it is raised in a fork's callback or a destructor."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

__all__ = ["Interruption", "terminable"]


class Interruption:
    """Remembers that Ctrl-C was pressed, until somebody has reacted to it."""

    def __init__(self) -> None:
        self._pressed = False

    @contextlib.contextmanager
    def awaited(self) -> Iterator[None]:
        """Listen for SIGINT in a block, in the main thread. It never arrives in other threads."""
        if not _can_listen(signal.SIGINT):
            yield
            return

        def pressed(_number: int, _frame: FrameType | None) -> None:
            self._pressed = True
            raise KeyboardInterrupt

        before = signal.signal(signal.SIGINT, pressed)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def check(self) -> None:
        """Raise the exception that was lost.

        Raises:
            KeyboardInterrupt: Ctrl-C was pressed, and nobody has reacted.
        """
        if self._pressed:
            raise KeyboardInterrupt

    def heard(self) -> None:
        """Note that somebody reacts to Ctrl-C, so that the program goes on."""
        self._pressed = False


def _can_listen(number: signal.Signals) -> bool:
    """Whether a handler can be set: only in the main thread, and only in place of Python's, which can be put back."""
    main = threading.current_thread() is threading.main_thread()
    return main and signal.getsignal(number) is not None


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Let SIGTERM act like Ctrl-C inside a block, in the main thread."""
    if not _can_listen(signal.SIGTERM):
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
