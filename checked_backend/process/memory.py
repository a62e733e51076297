"""How much memory there is, how much of it this process can still get, and that of Python's own call stack."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")
_CGROUPS = Path("/sys/fs/cgroup")
_SLOTS = 2**17
"""A frame of this many pointers gets a chunk of 2 MiB, of which the calls below it have half."""


def whole_memory() -> int | None:
    """Bytes that this machine has, or this container may use; None if that is not known."""
    try:
        there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):
            there = min(there, int((_CGROUPS / name).read_text("ascii")))
    return there


def free_memory() -> int | None:
    """Bytes that this process can still get: of the machine, its container, and its own limits; None if not known."""
    return min((*_of_the_machine(), *_of_the_container(), *_of_the_process()), default=None)


def process_limited() -> bool:
    """Whether this process has a limit of its own (``ulimit -v``)."""
    return any(True for _ in _of_the_process())


@contextmanager
def memory_limit_lifted() -> Iterator[bool]:
    """Let this process and its children have all the memory that they may have; gives whether that is more."""
    if sys.platform == "win32":
        yield False
        return
    import resource  # noqa: PLC0415  not on Windows

    before = {limit: resource.getrlimit(limit) for limit in (resource.RLIMIT_AS, resource.RLIMIT_DATA)}
    try:
        for limit, (_, most) in before.items():
            resource.setrlimit(limit, (most, most))
        yield any(soft != most for soft, most in before.values())
    finally:
        for limit, both in before.items():
            resource.setrlimit(limit, both)


def _of_the_machine() -> Iterator[int]:
    for line in _lines(Path("/proc/meminfo")):
        if line.startswith("MemAvailable:"):
            yield int(line.split()[1]) * 1024


def _of_the_container() -> Iterator[int]:
    for line in _lines(Path("/proc/self/cgroup")):
        if line.startswith("0::/"):
            folder = _CGROUPS / line.removeprefix("0::/")
            with suppress(OSError, ValueError):
                most, used = ((folder / name).read_text("ascii") for name in ("memory.max", "memory.current"))
                yield max(0, int(most) - int(used))


def _of_the_process() -> Iterator[int]:
    if sys.platform == "win32":
        return
    import resource  # noqa: PLC0415  not on Windows

    used = {line.partition(":")[0]: line.split()[1] for line in _lines(Path("/proc/self/status")) if "kB" in line}
    for name, limit in (("VmSize", resource.RLIMIT_AS), ("VmData", resource.RLIMIT_DATA)):
        most, _ = resource.getrlimit(limit)
        if most != resource.RLIM_INFINITY:
            yield max(0, most - int(used.get(name, 0)) * 1024)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text("ascii", errors="replace").splitlines()
    except OSError:
        return []


def with_deep_stack(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Give calls below a function one chunk of memory for their frames.

    Since 3.11 CPython has its call stack in chunks of 16 KiB, and asks the system for each one anew
    (``_PyThreadState_PushFrame`` of ``Python/pystate.c``). A loop in a compiler whose calls cross the end of a chunk
    does that at every call: of 52 seconds for the first checked step of a model of 12 layers this took 6. A traceback
    that keeps a frame of the function reserves a MiB, which nothing touches.
    """
    function.__code__ = function.__code__.replace(co_stacksize=_SLOTS)
    return function
