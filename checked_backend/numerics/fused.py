"""All statistics of two dense tensors in one loop, compiled by the system's C compiler if there is one.

Each reduction of torch or NumPy is a pass of its own over a block. A dozen of them take four times as long as reading
both tensors from memory. One loop takes little longer than that reading. A machine that compiles models for the CPU has
a C compiler. Without one, `measure` computes the same numbers in separate passes.
"""

from __future__ import annotations

import ctypes
import functools
import os
import select
import shlex
import shutil
import signal
import subprocess
import tempfile
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

__all__ = ["FUSED_ROW", "Checksum", "FusedLoop", "FusedStatistics", "begin_compiling", "checksum_loop", "fused_loop"]

FUSED_ROW = 512
"""Elements of a row. `FusedStatistics` locates an element to within one row. It is ``ROW`` in ``fused.c``."""

_FUSED = (torch.float32, torch.bfloat16, torch.float16)

_TIMEOUT = 20.0  # seconds; compiling takes a fifth of one
_DYING = 1.0  # seconds that killed processes get to be gone, so that none writes to a folder that is removed afterwards
_SCRIPT = """{
    for tuned in -march=native -mcpu=native -DUNTUNED; do
        "$@" $tuned >/dev/null 2>&1 && { echo 1; exit; }
    done
    echo 0
} &"""
"""Compiles for this processor, if the compiler knows an option for that, and says whether it could."""


class FusedStatistics(ctypes.Structure):
    """The input of a loop (from earlier blocks) and its output for one block (``struct statistics`` in ``fused.c``).

    If ``peak`` or ``top`` is not finite, the block holds a NaN, an infinity, or a difference beyond float32, and the
    other numbers mean nothing.

    Attributes:
        squares: Sum of the squares of the differences, good to about ``1e-6`` relative unless rows of it overflow or
            underflow in float32.
        reference_squares: The same for the reference's elements.
        peak: The greatest absolute difference, in float32.
        top: The greatest magnitude of the reference.
        ratio: The greatest absolute difference over the reference's magnitude, in float32, where ``0 / 0`` does not
            count. As an input, the greatest known ratio; it stays if no ratio exceeds it.
        differing: Number of elements whose difference is not 0.
        peak_row: Where the row begins that holds the greatest difference.
        ratio_row: Where the row begins that holds the greatest ratio, if ``ratio`` grew.
        ulp: The greatest distance in representable numbers; input and output like ``ratio``.
        overflows: Number of rows in which a ratio to a reference that is not 0 is beyond float32. If there is such a
            row, ``ratio`` is infinite. If there is none, an infinite ``ratio`` means that the reference is 0.
    """

    _fields_ = (
        ("squares", ctypes.c_double),
        ("reference_squares", ctypes.c_double),
        ("peak", ctypes.c_double),
        ("top", ctypes.c_double),
        ("ratio", ctypes.c_double),
        ("differing", ctypes.c_int64),
        ("peak_row", ctypes.c_int64),
        ("ratio_row", ctypes.c_int64),
        ("ulp", ctypes.c_int64),
        ("overflows", ctypes.c_int64),
    )

    squares: float
    reference_squares: float
    peak: float
    top: float
    ratio: float
    differing: int
    peak_row: int
    ratio_row: int
    ulp: int
    overflows: int


FusedLoop = Callable[[torch.Tensor, torch.Tensor, float, int], FusedStatistics]
"""Takes reference and candidate (one-dimensional, contiguous, on the CPU, no pending negation) and the greatest ratio
and distance known so far."""


def fused_loop(dtype: torch.dtype) -> FusedLoop | None:
    """The loop for a dtype. The first call in a process compiles it, which takes a fifth of a second.

    Returns:
        The loop; None for other dtypes than float32, bfloat16 and float16, or if nothing could be compiled.
    """
    function = _function("fused", dtype) if dtype in _FUSED else None
    if function is None:
        return None
    function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.POINTER(FusedStatistics))
    function.restype = None

    def loop(reference: torch.Tensor, candidate: torch.Tensor, ratio: float, ulp: int) -> FusedStatistics:
        statistics = FusedStatistics(ratio=ratio, ulp=ulp)
        function(reference.data_ptr(), candidate.data_ptr(), reference.numel(), ctypes.byref(statistics))
        return statistics

    return loop


Checksum = Callable[[torch.Tensor], int]
"""Takes integers (one-dimensional, contiguous, on the CPU)."""


def checksum_loop(dtype: torch.dtype) -> Checksum | None:
    """The loop that adds up a chunk's products for `checked_backend.numerics.fingerprint.fingerprint`.

    Returns:
        The loop; None for other dtypes than int32 and int16, or if nothing could be compiled.
    """
    function = _function("checksum", dtype) if dtype in (torch.int32, torch.int16) else None
    if function is None:
        return None
    function.argtypes, function.restype = (ctypes.c_void_p, ctypes.c_int64), ctypes.c_uint32
    return lambda bits: int(function(bits.data_ptr(), bits.numel()))


def _function(kind: str, dtype: torch.dtype) -> Any:
    """A function of ``fused.c``, for which ctypes has no type; None if it could not be compiled."""
    library = _library()
    return None if library is None else library[f"{kind}_{str(dtype).removeprefix('torch.')}"]


def begin_compiling() -> None:
    """Begin to compile the loops beside what the program does, so that nobody waits for them later."""
    _build()


def _library() -> ctypes.CDLL | None:
    build = _build()
    # forked: the parent's files may go, and a thread that is not here may hold its lock
    if build is not None and not build.done and build.owner != os.getpid():
        _build.cache_clear()
        build = _build()
    return None if build is None else build.library()


@functools.cache
def _build() -> _Build | None:
    named = os.environ.get("CC", "")
    try:
        compiler = shlex.split(named)
    except ValueError:  # a quotation mark that is not closed
        compiler = named.split()
    compiler = compiler or [found for found in map(shutil.which, ("cc", "gcc", "clang")) if found is not None][:1]
    try:
        return _Build(compiler) if compiler else None
    except OSError:  # no folder to write to, or no process to start
        return None


class _Build:
    """Compiles ``fused.c`` beside this process, and not as a child of it.

    A program may wait for all children that it started, or be told when one ends. It must not meet one that it did not
    start. So a shell starts the compiler, and ends at once.

    Attributes:
        done: Whether the loops are compiled, or cannot be.
        group: The number of the compiler's group of processes.

    Raises:
        OSError: It cannot be started.
    """

    def __init__(self, compiler: Sequence[str]) -> None:
        self.done = False
        self.owner = os.getpid()
        self._library: ctypes.CDLL | None = None
        self._lock = threading.Lock()
        folder = tempfile.mkdtemp(prefix="checked_backend_")
        self._result = Path(folder) / "fused.so"
        # NaN, infinities and denormals keep their meaning, whatever options the user's CC has. The source marks the
        # sums that may be reordered. Without start files: with -ffast-math one of them would switch off denormals in
        # the whole process.
        exact = ["-fno-fast-math", "-nostartfiles", "-fno-trapping-math"]
        options = ["-O3", "-fopenmp-simd", *exact, "-shared", "-fPIC", str(Path(__file__).with_name("fused.c")), "-lm"]
        self._pipe, theirs = os.pipe()
        try:
            shell = subprocess.Popen(
                ["/bin/sh", "-c", _SCRIPT, "sh", *compiler, *options, "-o", str(self._result)],
                stdin=subprocess.DEVNULL,
                stdout=theirs,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                env={**os.environ, "TMPDIR": folder},
            )
        except OSError:
            os.close(self._pipe)
            shutil.rmtree(folder, ignore_errors=True)
            raise
        finally:
            os.close(theirs)
        self.group = shell.pid
        self._end = weakref.finalize(self, _end, self._pipe, self.group, folder, self.owner)
        shell.wait()

    def library(self) -> ctypes.CDLL | None:
        """The loops, when they are compiled; None if the compiler cannot do it."""
        if not self.done:
            with self._lock:
                if not self.done:
                    with suppress(OSError):  # it is no library that this process can load
                        self._library = ctypes.CDLL(str(self._result)) if _said(self._pipe, _TIMEOUT) == b"1" else None
                    self._end()
                    self.done = True
        return self._library


def _said(pipe: int, seconds: float) -> bytes | None:
    """``1`` or ``0`` when a build has ended, nothing if it was killed; None if it has not ended in this time."""
    waiting = select.poll()
    waiting.register(pipe, select.POLLIN)
    return os.read(pipe, 1) if waiting.poll(1000 * seconds) else None


def _end(pipe: int, group: int, folder: str, owner: int) -> None:
    """End a build, maybe before it is done. A forked process leaves its parent's alone."""
    if os.getpid() == owner:
        if _said(pipe, 0.0) is None:
            with suppress(OSError):
                os.killpg(group, signal.SIGKILL)
            _said(pipe, _DYING)
        shutil.rmtree(folder, ignore_errors=True)
    os.close(pipe)
