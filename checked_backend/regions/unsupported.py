"""Tell limits of this machine from errors of the candidate.

With a missing compiler, a full disk or a limit of the system, the candidate raises, and so would plain torch, whatever
the program. That makes a verdict impossible, and is no difference. A compiler whose own cache may be broken is tried
with an empty one.
"""

from __future__ import annotations

import errno
import json
import os
import pickle
import re
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any
from zipfile import BadZipFile

import torch

from checked_backend._torch.caches import fresh_compile_caches
from checked_backend._torch.dynamo import causes
from checked_backend._torch.inductor import compile_trifle
from checked_backend.errors import is_out_of_memory
from checked_backend.findings import Finding, Kind
from checked_backend.process.memory import free_memory
from checked_backend.random_state import random_untouched
from checked_backend.regions.call_findings import FakeError, described_exception
from checked_backend.report.environment import compiler_command

PLENTY = 2 * 2**30
"""A compiler does not run out of memory if this many bytes are free."""

EXCESS = 4
"""How many times the memory of all of eager's tensors a program may ask for at once before that is its own fault."""

_MARGIN = 64 * 2**20

_LINE = 400


_ADVICE: Mapping[str, str] = MappingProxyType(
    {
        "disk": "Free some room, or set TORCHINDUCTOR_CACHE_DIR and TMPDIR to folders on a disk that has some",
        "files": "Raise the limit of open files (ulimit -n), or close some",
        "processes": "Raise the limit of processes and threads (ulimit -u, or the container's), or end some",
        "memory": "Free some memory, raise the limit (ulimit -v, or the container's), or check a smaller program",
        "compiler": "Install a C++ compiler (Debian, Ubuntu: apt-get install g++; Fedora: dnf install gcc-c++; macOS: "
        "xcode-select --install), or set CXX to one that works; checked-backend doctor tries it",
        "headers": "Install PACKAGES; checked-backend doctor tries the compiler",
        "cache": "Delete the folder, or set TORCHINDUCTOR_CACHE_DIR to one that can be written to",
    }
)
"""The limits of a system, and what can be done."""

_WORDS: Mapping[str, str] = MappingProxyType(
    {
        "disk": "no space left on device|quota exceeded|file too large",
        "files": "too many open files",
        "processes": "can't start new thread|resource temporarily unavailable",
        "memory": "cannot allocate memory|virtual memory exhausted|out of memory|std::bad_alloc|"
        "failed to map segment|memory exhausted",
    }
)
"""What systems and compilers say of these limits."""

_MISSING = re.compile(
    r".*fatal error: '?(?P<header>[^\s':]+)'?(?: file not found|: No such file or directory).*"
    r"|.*(?:cannot find -l|unable to find library -l|library not found for -l|library ')(?P<library>[\w+.-]+).*"
)
"""What a compiler or its linker says of a file that is not there, as a whole line."""

_PACKAGES = (
    (
        re.compile(r"(Python|pyconfig)\.h$|-lpython"),
        f"the headers of this Python (Debian, Ubuntu: apt-get install python{sys.version_info[0]}."
        f"{sys.version_info[1]}-dev; Fedora: dnf install python3-devel; conda and pyenv bring them), which belong in "
        f"{sysconfig.get_path('include')}",
    ),
    (
        re.compile(r"omp\.h$|-l[gi]?omp5?$"),
        "OpenMP (Debian, Ubuntu: apt-get install libomp-dev; Fedora: dnf install libomp-devel; macOS: brew install "
        "libomp)",
    ),
    (
        re.compile(""),
        "the compiler's own headers and libraries (Debian, Ubuntu: apt-get install build-essential; Fedora: dnf "
        "install gcc-c++ glibc-devel; macOS: xcode-select --install)",
    ),
)
"""What brings a file that a compiler does not find, by the file's name."""

_REQUEST = re.compile(r"tried to allocate (\d+(?:\.\d+)?) (bytes|KiB|MiB|GiB|TiB)", re.IGNORECASE)
_UNITS: Mapping[str, int] = MappingProxyType({"bytes": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40})

_OF_COMPILING = (
    *(OSError, ImportError, EOFError, pickle.UnpicklingError, BadZipFile, json.JSONDecodeError, UnicodeDecodeError),
    subprocess.SubprocessError,
)
"""What reading a broken cache raises, and what a compiler's process does."""


@dataclass(slots=True)
class MachineLimits:
    """Finds out whether a candidate's exceptions are caused by this machine.

    Attributes:
        needed: Says how many bytes all of eager's tensors need together.
        inductor: Whether the candidate is Inductor itself. Others need not know of a C++ compiler.
        works: Whether it is known that something can be compiled here. If not, where a compiler failed, the smallest
            program is compiled to see it.
    """

    needed: Callable[[], int] = lambda: 0
    inductor: bool = False
    works: bool = False

    def __call__(self, error: BaseException) -> Finding | None:
        """A finding of kind ``unsupported``; None if the candidate is to answer for the error."""
        found = limit_of(error, self.needed)
        if found is None and not self.works and FakeError.inside(error) is None:
            inside = list(causes(error))
            lowering = any(type(cause).__name__ == "LoweringException" for cause in inside)  # nothing was compiled yet
            if any(map(_is_about_compiling, inside)) or (self.inductor and not lowering):
                with random_untouched():
                    found = nothing_compiles()
        self.works = found is None  # it need not be tried at each call of a candidate that crashes
        return found


def no_process_here(error: BaseException) -> Finding | None:
    """Say that an isolated check has nowhere to run. None if that is not for a limit of the system.

    Args:
        error: The exception that starting a process raised.
    """
    short = limit_of(error)
    if short is None:
        return None
    advice = _ADVICE[short.detail.partition(".")[2]]
    message = f"nothing was run: no process can be started here ({short.actual}). {advice}; or check without isolate."
    return replace(short, message=message)


def nothing_compiles() -> Finding | None:
    """Compile the smallest program with Inductor, with an empty cache. A finding if even that fails."""
    try:
        with fresh_compile_caches():
            compile_trifle()
    except Exception as error:
        found = limit_of(error)
        if found is not None:
            return found
        inside = list(causes(error))
        missing = next((line for cause in inside if (line := _MISSING.search(_said(cause)))), None)
        if missing is not None:
            name = missing["header"] or f"-l{missing['library']}"
            packages = next(packages for names, packages in _PACKAGES if names.match(name))
            why = f"{compiler_command()} does not find {name}"
            return _finding("headers", missing[0].strip()[:_LINE], why, packages)
        told = next((cause for cause in inside if _is_about_compiling(cause)), error)
        return _finding("compiler", described_exception(told), f"{compiler_command()} compiles nothing here")
    return None


def limit_of(error: BaseException, needed: Callable[[], int] = lambda: 0) -> Finding | None:
    """A finding, if an exception or one of its causes is about a limit of the system."""
    limits = ((cause, _limit(cause, needed)) for cause in causes(error))
    return next((_finding(what, described_exception(cause)) for cause, what in limits if what), None)


def _limit(cause: BaseException, needed: Callable[[], int]) -> str:
    """The limit of the system that an exception is about, or nothing."""
    if type(cause).__name__ == "InvalidCxxCompiler":
        return "compiler"
    if isinstance(cause, PermissionError) or (isinstance(cause, OSError) and cause.errno == errno.EROFS):
        return "cache" if _in_cache(cause.filename) else ""
    what = ""
    if isinstance(cause, (OSError, ImportError, RuntimeError)):
        text = _said(cause)
        what = next((name for name, words in _WORDS.items() if re.search(words, text, re.IGNORECASE)), "")
    if is_out_of_memory(cause) or (what == "memory" and not _is_about_compiling(cause)):
        return "memory" if _is_short(cause, needed()) else ""
    return what


def _said(cause: BaseException) -> str:
    """What it says; of a compiler's failure only what the compiler said, not the command, which names many files."""
    return str(cause).rpartition("\nOutput:\n")[2]


def _is_short(cause: BaseException, needed: int) -> bool:
    """Whether there is too little memory here, rather than that the candidate asked for far more than eager does."""
    free = free_memory()
    request = _REQUEST.search(str(cause))
    if request is not None:
        size = float(request[1]) * _UNITS[request[2].lower()]
        device = isinstance(cause, torch.OutOfMemoryError)  # an accelerator's own memory, which it has found too small
        return size <= EXCESS * needed + _MARGIN and (device or free is None or free < size + PLENTY)
    return free is not None and free < max(PLENTY, EXCESS * needed)


def _is_about_compiling(cause: BaseException) -> bool:
    """Whether it comes from the compiler's process or its files."""
    return type(cause).__name__ == "CppCompileError" or isinstance(cause, _OF_COMPILING)


def _in_cache(filename: object) -> bool:
    name = os.fsdecode(filename) if isinstance(filename, (str, bytes, os.PathLike)) else ""
    folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    return "torchinductor" in name or (folder is not None and name.startswith(folder))


def _finding(what: str, actual: str, why: str = "", packages: str = "") -> Finding:
    message = (
        f"numcheck cannot judge this program: {why or actual}. Without a check it would fail here too. "
        f"{_ADVICE[what].replace('PACKAGES', packages)}."
    )
    detail = f"unsupported.{what}"
    return Finding(Kind.UNSUPPORTED, "candidate", message, detail, expected="no exception", actual=actual)


def out_of_memory(told: str) -> Finding:
    """A process died of too little memory."""
    return _finding("memory", described_exception(MemoryError("a limit of the system")), told)


def may_be_the_cache(error: BaseException) -> bool:
    """Whether a file that a process left half-written, or a folder that cannot be used, may have raised this."""
    inside = list(causes(error))
    no_compiler = any(type(cause).__name__ == "InvalidCxxCompiler" for cause in inside)
    return not no_compiler and any(map(_is_about_compiling, inside))


def compile_with_any_cache(
    compile_once: Callable[[], Callable[..., Any]], note: Callable[[str], None] = lambda _remark: None
) -> Callable[..., Any]:
    """Compile a region; once more with an empty cache, if the compiler's own one may be what failed.

    Args:
        compile_once: Compiles it, from a fresh copy of its graph each time.
        note: Receives a remark if the empty cache helped.

    Raises:
        Exception: Whatever the compiler raises.
    """
    try:
        return compile_once()
    except Exception as raised:
        if not may_be_the_cache(raised):
            raise
        error = raised.with_traceback(None)  # its frames hold tensors
    with fresh_cache(error, note):
        return compile_once()


@contextmanager
def fresh_cache(error: BaseException, note: Callable[[str], None]) -> Iterator[None]:
    """Compile with an empty cache in a block, because of an exception; note it if the block raises none."""
    with fresh_compile_caches(kept=True):
        yield
    folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or "torch's default folder"
    note(
        f"the compiler's cache ({folder}) has broken files, or cannot be used, so the region was compiled with an "
        f"empty one. {_ADVICE['cache']}. It raised {described_exception(error)}"
    )
