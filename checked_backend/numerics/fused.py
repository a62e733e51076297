"""All statistics of two dense tensors in one loop, compiled by the system's C compiler if there is one.

Each reduction of torch or NumPy is a pass of its own over a block. A dozen of them take four times as long as reading
both tensors from memory. One loop takes little longer than that reading. A machine that compiles models for the CPU has
a C compiler. Without one, `measure` computes the same numbers in separate passes.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shlex
import shutil
import tempfile
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from checked_backend.numerics.detached import Detached

__all__ = ["FUSED_ROW", "Checksum", "FusedLoop", "FusedStatistics", "begin_compiling", "checksum_loop", "fused_loop"]

FUSED_ROW = 512
"""Elements of a row. `FusedStatistics` locates an element to within one row. It is ``ROW`` in ``fused.c``."""

_FUSED = (torch.float32, torch.bfloat16, torch.float16)

_TIMEOUT = 20.0  # seconds; compiling takes a fifth of one

_TUNED_FOR_THIS_PROCESSOR: tuple[list[str], ...] = (
    ["-march=native"],
    ["-mcpu=native"],
    [],
)  # not every compiler knows each


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

    Args:
        dtype: The dtype of the chunk.

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
    """Compiles ``fused.c`` in a process of its own.

    Args:
        compiler: The C compiler, and options of the user's for it.

    Raises:
        OSError: It cannot be started.
    """

    def __init__(self, compiler: Sequence[str]) -> None:
        self._compiler = compiler
        self._done = False
        self._library: ctypes.CDLL | None = None
        self._begin()

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._folder = tempfile.mkdtemp(prefix="checked_backend_")
        self._result = Path(self._folder) / "fused.so"
        first, *self._others = _TUNED_FOR_THIS_PROCESSOR
        try:
            self._compiling = self._started(first)
        except OSError:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        self._owner = os.getpid()
        self._clean = weakref.finalize(self, _ended, self._compiling, self._folder, self._owner)

    def _started(self, tuned: Sequence[str]) -> Detached:
        # NaN, infinities and denormals keep their meaning, whatever options the user's CC has. The source marks the
        # sums that may be reordered. Without start files: with -ffast-math one of them would switch off denormals in
        # the whole process.
        exact = ["-fno-fast-math", "-nostartfiles", "-fno-trapping-math"]
        options = ["-O3", "-fopenmp-simd", *exact, "-shared", "-fPIC", *tuned]
        source = Path(__file__).with_name("fused.c")
        return Detached([*self._compiler, *options, str(source), "-o", str(self._result), "-lm"], self._folder)

    def library(self) -> ctypes.CDLL | None:
        """The loops, when they are compiled; None if the compiler cannot do it."""
        if self._done:
            return self._library
        try:
            if os.getpid() != self._owner:  # forked: the parent's files may go, and a thread that is not here may lock
                self._clean.detach()
                self._begin()
        except OSError:
            return None
        with self._lock:
            if not self._done:
                try:
                    self._library = self._loaded()
                except OSError:
                    self._library = None
                self._done = True
            return self._library

    def _loaded(self) -> ctypes.CDLL | None:
        try:
            while True:
                succeeded = self._compiling.wait(_TIMEOUT)
                if succeeded:
                    return ctypes.CDLL(str(self._result))
                if succeeded is None or not self._others:  # a compiler that hangs would hang again
                    return None
                self._compiling.end()
                self._clean.detach()
                self._compiling = self._started(self._others.pop(0))
                self._clean = weakref.finalize(self, _ended, self._compiling, self._folder, self._owner)
        finally:
            self._clean()


def _ended(compiling: Detached, folder: str, owner: int) -> None:
    """End a build, maybe before it is done. A forked process leaves its parent's alone."""
    compiling.end()
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)
