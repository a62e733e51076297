"""Ctrl-C that is not lost: the exception it raises is dropped where it hits a fork's callback or a destructor."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

__all__ = ["Interruption", "terminable"]


class Interruption:
    """Remembers that Ctrl-C was pressed, until that was heard."""

    def __init__(self) -> None:
        self._pressed = False

    @contextlib.contextmanager
    def awaited(self) -> Iterator[None]:
        """Listen for SIGINT in a block, in the main thread; elsewhere it never arrives."""
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
        """Raise what was lost.

        Raises:
            KeyboardInterrupt: Ctrl-C was pressed, and nobody has heard.
        """
        if self._pressed:
            raise KeyboardInterrupt

    def heard(self) -> None:
        """Go on: what is to be done about it is being done."""
        self._pressed = False


def _can_listen(number: signal.Signals) -> bool:
    """Only the main thread may; and a handler that is not Python's could not be put back."""
    main = threading.current_thread() is threading.main_thread()
    return main and signal.getsignal(number) is not None


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Let SIGTERM be what Ctrl-C is for a block, in the main thread."""
    if not _can_listen(signal.SIGTERM):
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
