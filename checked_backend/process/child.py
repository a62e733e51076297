"""Run work in a child process with limits: it dies with its parent, and its death does not harm the parent."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Literal, TextIO

__all__ = ["JobEnd", "Limits", "Noticeboard", "can_confine", "confined", "default_memory", "die_with", "limit_memory"]

_PR_SET_PDEATHSIG = 1
_NO_MEMORY = ("std::bad_alloc", "can't allocate memory", "MemoryError", "CUDA out of memory")


def die_with(parent: int) -> None:
    """Have this process killed when its parent, a process id, dies, however that dies. Only Linux can do that."""
    if sys.platform != "linux":
        return
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent is gone already
        os._exit(1)


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a child.

    Attributes:
        seconds: The child is killed after this time.
        memory: Bytes that the child may hold; None for no limit. Only Linux has such a limit.
    """

    seconds: float
    memory: int | None


@dataclass(frozen=True, slots=True)
class JobEnd:
    """How a child process ended.

    Attributes:
        answer: What a job answered last; empty if it died before, or if the child is no job.
        stage: What it was doing, as it noted itself.
        exit: The exit status, negative if a signal killed it.
        log: The end of what it printed.
        seconds: How long it ran.
        overdue: The seconds it had, or its stage, if it was killed for exceeding them.
        starved: Whether the system killed processes for lack of memory meanwhile.
    """

    answer: str
    stage: str
    exit: int
    log: str = ""
    seconds: float = 0.0
    overdue: float | None = None
    starved: bool = False

    @property
    def kind(self) -> Literal["done", "hang", "memory", "signal", "exit"]:
        """How it ended."""
        if self.answer and self.exit == 0:
            return "done"
        if self.overdue is not None:
            return "hang"
        if self.starved if -self.exit == signal.SIGKILL else any(words in self.log for words in _NO_MEMORY):
            return "memory"
        return "signal" if self.exit < 0 else "exit"

    @property
    def words(self) -> str:
        """How it died, as the end of a sentence that begins with "the process"."""
        if self.overdue is not None:
            return f"had not ended after {self.overdue:g} s"
        if self.exit >= 0:
            return f"exited with status {self.exit}"
        if -self.exit == signal.SIGKILL:
            return "was killed by SIGKILL (out of memory?)"
        return f"was killed by {signal.Signals(-self.exit).name}"


class Noticeboard:
    """A child's note of what it is doing, in memory that its parent shares and that outlives the child."""

    def __init__(self, limits: Limits) -> None:
        self._shared = mmap.mmap(-1, 1024)
        self._end = time.monotonic() + limits.seconds
        self._limits = limits
        self.note("starting")

    def note(self, stage: str, seconds: float | None = None) -> None:
        """Note the stage that begins now, and how long it may take if that is less than the time left."""
        allowed = self._limits.seconds if seconds is None else min(seconds, self._limits.seconds)
        end = self._end if seconds is None else min(self._end, time.monotonic() + seconds)
        text = f"{end!r} {allowed!r} {stage}".encode()[:1000]
        self._shared[: len(text) + 1] = text + b"\0"

    def read(self) -> tuple[float, float, str]:
        """The stage's deadline, the seconds it may take, and its name."""
        end, allowed, stage = self._shared[:].partition(b"\0")[0].decode("utf-8", "replace").split(" ", 2)
        return float(end), float(allowed), stage


def can_confine() -> bool:
    """Whether this operating system can fork a child."""
    return hasattr(os, "fork")


def default_memory() -> int | None:
    """Four fifths of the memory that this process may use; None if that is unknown."""
    try:
        there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):
            there = min(there, int(Path(file).read_text(encoding="ascii")))
    return there * 4 // 5


def confined(work: Callable[[Noticeboard], int], limits: Limits) -> JobEnd:
    """Do work in a child process, with limits. This process prints the child's output.

    SIGINT and SIGTERM are passed on to the child. The child leads a process group of its own, which is killed whole at
    the end.

    Args:
        work: Returns the child's exit status. It must catch every exception.
        limits: A child that exceeds them ends. This process does not.
    """
    board = Noticeboard(limits)
    parent = os.getpid()
    output = None if _inherits_output() else (_scratch(), _scratch())
    _flush_output()
    with warnings.catch_warnings():
        # Python 3.12 warns of forking a process with threads; the child uses none of these
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        status = 70
        try:
            os.setpgid(0, 0)  # in the parent's process group, Ctrl-C would reach the child twice
            die_with(parent)
            limit_memory(limits.memory)
            if output is not None:
                sys.stdout, sys.stderr = output
            status = work(board)
        finally:
            _flush_output()
            os._exit(status)  # never return into the parent's code
    try:
        ended = _awaited(child, board)
    finally:
        if output is not None:
            for own, stream in zip((sys.stdout, sys.stderr), output, strict=True):
                stream.seek(0)
                with contextlib.suppress(AttributeError, ValueError, OSError):  # the program has none, or closed it
                    own.write(stream.read())
                stream.close()
    return ended


def _inherits_output() -> bool:
    """Whether a child's output goes where this process prints. If not, an object in memory collects the output here."""
    try:
        return (sys.stdout.fileno(), sys.stderr.fileno()) == (1, 2)
    except (OSError, ValueError, AttributeError):
        return False


def _flush_output() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError, OSError):  # the program has none, or closed it
            stream.flush()


def _scratch() -> TextIO:
    return tempfile.TemporaryFile("w+", encoding="utf-8", errors="backslashreplace")


def limit_memory(memory: int | None) -> None:
    """Limit this process's bytes (only on Linux), and make it the first that the system kills if memory runs out."""
    if sys.platform == "win32":
        return
    import resource  # noqa: PLC0415  Windows lacks it

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory is not None and sys.platform == "linux":
        _, most = resource.getrlimit(resource.RLIMIT_DATA)  # this process may not raise the hard limit
        memory = memory if most == resource.RLIM_INFINITY else min(memory, most)
        resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")


def _awaited(child: int, board: Noticeboard) -> JobEnd:
    def pass_on(number: int, _frame: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)

    listening = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGINT, signal.SIGTERM) if listening else ()
    before = {number: signal.signal(number, pass_on) for number in numbers}
    pause, overdue = 0.005, None
    try:
        while True:
            found, status = os.waitpid(child, os.WNOHANG)
            if found:
                break
            end, allowed, _ = board.read()
            if overdue is None and time.monotonic() > end:
                overdue = allowed
                _kill_group(child)
            time.sleep(pause)
            pause = min(2 * pause, 0.1)
    finally:
        _kill_group(child)  # processes that the child started must not outlive it
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
    return JobEnd("", board.read()[2], os.waitstatus_to_exitcode(status), overdue=overdue)


def _kill_group(child: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)
