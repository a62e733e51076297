"""Keep Ctrl-C from being lost: Python drops the exception if it is raised in a fork's callback or a destructor."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType


class Interruption:
    """Remembers that Ctrl-C was pressed or that the time is up, until somebody has reacted to it.

    Attributes:
        why: Who or what ended the work, as the end of a sentence that begins with "stopped".
    """

    def __init__(self) -> None:
        self.why = "by the user"
        self._pressed = False
        self._over = False

    @contextlib.contextmanager
    def awaited(self, seconds: float) -> Iterator[None]:
        """Listen for SIGINT in a block, in the main thread. It never arrives in other threads.

        Args:
            seconds: When the time is up, which acts like Ctrl-C. In other threads only `check` raises then.
        """

        def pressed(_number: int, _frame: FrameType | None) -> None:
            self._pressed = True
            if not self._over:
                raise KeyboardInterrupt

        with _handled(signal.SIGINT, pressed) as listening:

            def time_is_up() -> None:
                self.why, self._pressed = f"at its deadline, after {seconds:g} s", True
                if listening:
                    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

            timer = threading.Timer(seconds, time_is_up)
            timer.daemon = True
            timer.start()
            try:
                yield
            finally:
                self._over = True
                timer.cancel()
                timer.join()

    def check(self) -> None:
        """Raise KeyboardInterrupt, if Ctrl-C was pressed and nobody has reacted: the exception was lost."""
        if self._pressed:
            raise KeyboardInterrupt

    def heard(self) -> None:
        """Note that somebody reacts to Ctrl-C, so that the program goes on."""
        self._pressed = False


def terminable() -> contextlib.AbstractContextManager[bool]:
    """Let SIGTERM act like Ctrl-C inside a block, in the main thread."""
    return _handled(signal.SIGTERM, signal.default_int_handler)


@contextlib.contextmanager
def _handled(number: signal.Signals, handler: Callable[[int, FrameType | None], object]) -> Iterator[bool]:
    """Handle a signal inside a block, and tell whether that can be.

    A handler can only be set in the main thread, and only in place of Python's, which can be put back.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(number) is None:
        yield False
        return
    before = signal.signal(number, handler)
    try:
        yield True
    finally:
        signal.signal(number, before)
