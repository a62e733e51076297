"""Processes that go when the one that waits for them goes, and a program that outlives what it compiles."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from types import FrameType

__all__ = ["die_with", "in_child"]

_PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Be killed when the process dies that waits for this one, however it dies. Only Linux can do that.

    Args:
        parent: Its process id.
    """
    if sys.platform != "linux":
        return
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it is gone already
        os._exit(1)


def in_child() -> int | None:
    """Go on in a child process: what is compiled there may kill it.

    It must be called before torch is loaded, whose threads do not survive a fork; otherwise nothing happens.
    SIGINT and SIGTERM are passed on to the child.

    Returns:
        None in the child, which is to do the work, and where there is none; in the parent the child's exit status,
        negative if a signal killed it.
    """
    if "torch" in sys.modules or not hasattr(os, "fork"):
        return None
    parent = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)  # else Ctrl-C would reach it twice
        die_with(parent)
        return None

    def pass_on(number: int, _frame: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        _, status = os.waitpid(child, 0)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return os.waitstatus_to_exitcode(status)
