"""Time a program: compilation, steps in eager and compiled, and the memory that steps take."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from checked_backend._torch.dynamo import dynamo_reset
from checked_backend.checking.target import load_compiler
from checked_backend.sweep.case import Case, Speed
from checked_backend.sweep.prepare import Prepared

__all__ = ["measure_speed", "peak_of_process"]

_SECONDS = 1.0
_MOST, _LEAST = 30, 3


def measure_speed(program: Prepared, case: Case, compiler_options: Mapping[str, Any]) -> Speed:
    """Time a program in eager and compiled, without any check.

    Args:
        program: The program.
        case: The case, which names the candidate and says whether shapes are dynamic.
        compiler_options: Options for the candidate.

    Raises:
        Exception: Whatever the program or the candidate raises.
    """
    dynamo_reset()
    eager_step, eager_peak = _steps(partial(program.step, program.function), case.device)
    compiled = torch.compile(
        program.function,
        backend=load_compiler(case.compiler),
        dynamic=True if case.dynamic else None,
        options=dict(compiler_options) or None,
    )
    begun = time.perf_counter()
    program.step(compiled)
    _wait(case.device)
    first = time.perf_counter() - begun
    compiled_step, compiled_peak = _steps(partial(program.step, compiled), case.device)
    dynamo_reset()
    return Speed(max(0.0, first - compiled_step), eager_step, compiled_step, eager_peak, compiled_peak)


def _steps(step: Callable[[], object], device: str) -> tuple[float, int | None]:
    """The median time of a step, and the peak memory of steps, after a step to warm up."""
    step()
    _wait(device)
    before = _begin_peak(device)
    times: list[float] = []
    while len(times) < _LEAST or (len(times) < _MOST and sum(times) < _SECONDS):
        begun = time.perf_counter()
        step()
        _wait(device)
        times.append(time.perf_counter() - begun)
    after = _peak(device)
    return statistics.median(times), None if before is None or after is None else max(0, after - before)


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _begin_peak(device: str) -> int | None:
    """Reset the peak, and return the memory held now; None if the system cannot tell."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return None
    return _status("VmRSS")


def _peak(device: str) -> int | None:
    return torch.cuda.max_memory_allocated() if device == "cuda" else _status("VmHWM")


def _status(name: str) -> int | None:
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    return None


def peak_of_process() -> int | None:
    """The peak memory of this process in bytes; None if the system cannot tell."""
    try:
        import resource  # noqa: PLC0415  Windows lacks it
    except ImportError:
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
