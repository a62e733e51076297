"""The exception that ended a program, where it comes from torch's compiler or from autograd and not from the program.

Regions hold their own exceptions against eager's. What is raised beside them (by Dynamo, or by autograd where it cannot
see into a region) no region sees.
"""

from __future__ import annotations

import linecache
from collections.abc import Iterator
from pathlib import Path
from traceback import walk_tb
from types import FrameType
from typing import Any

import torch

from checked_backend.errors import CheckedBackendError
from checked_backend.findings import Finding, Kind, Skip
from checked_backend.regions.backward import eager_uses
from checked_backend.regions.call_findings import described_exception

__all__ = ["how_it_ended"]

_TORCH = Path(torch.__file__).parent
_COMPILERS = ("_dynamo", "_functorch", "_higher_order_ops", "_inductor", "autograd", "fx")
_REGIONS = "checked_backend.regions"

_UNUSED = "appears to not have been used in the graph"
_TWICE = "does not currently support double backward"


def how_it_ended(error: BaseException | None) -> Finding | Skip | None:
    """What the exception that ended a program says of the compiled program.

    Returns:
        A finding if eager does not raise it, a skip if nobody knows; None if it is the program's own, or a region has
        held it against eager already.
    """
    if not isinstance(error, Exception) or isinstance(error, CheckedBackendError):
        return None
    frames = list(walk_tb(error.__traceback__))
    if not frames or not _is_compilers(frames[-1]):
        return None
    if any(str(frame.f_globals.get("__name__")).startswith(_REGIONS) for frame, _ in frames):
        return None
    line = _users_line(frames)
    if _TWICE in str(error):
        return _finding(error, line, "AOT autograd compiles no second derivative, eager has one")
    if _UNUSED in str(error) and (where := next(_asked(frames), None)) is not None:
        inputs, outputs = where
        asked = [eager_uses(tensor, outputs) for tensor in inputs]
        if False in asked:
            return None  # eager raises it too
        if True in asked:
            told = (
                "both tensors are results of one compiled region, in which none depends on another; eager, asked once "
                "more, differentiates one by the other"
            )
            return _finding(error, line, told)
    reason = (
        f"it ended by {_described(error)}, raised beside the compiled code; eager was not asked, so nothing is known "
        "of whether it raises that too"
    )
    return Skip(f"the end of the program, at {line}" if line else "the end of the program", reason, matters=True)


def _finding(error: Exception, line: str, why: str) -> Finding:
    return Finding(
        kind=Kind.CRASH,
        detail="crash.differentiating",
        subject="candidate",
        message=f"the program ended by {_described(error)}: {why}",
        expected="no exception",
        actual=type(error).__name__,
        source=line or None,
    )


def _described(error: Exception) -> str:
    return described_exception(error).rstrip(".")


def _is_compilers(place: tuple[FrameType, int]) -> bool:
    path = Path(place[0].f_code.co_filename)
    return path.is_relative_to(_TORCH) and path.relative_to(_TORCH).parts[0] in _COMPILERS


def _users_line(frames: list[tuple[FrameType, int]]) -> str:
    """``train.py:10 in step: loss.backward()``, the innermost line that is neither torch's nor ours."""
    for frame, number in reversed(frames):
        name, path = str(frame.f_globals.get("__name__")), Path(frame.f_code.co_filename)
        if not path.is_relative_to(_TORCH) and name.partition(".")[0] != "checked_backend":
            code = linecache.getline(str(path), number).strip()
            return f"{path.name}:{number} in {frame.f_code.co_name}: {code}"
    return ""


def _asked(frames: list[tuple[FrameType, int]]) -> Iterator[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """The tensors by which ``torch.autograd.grad`` was to differentiate, and those that it was to differentiate."""
    for frame, _ in frames:
        if frame.f_code.co_name == "grad" and _is_compilers((frame, 0)):
            given: dict[str, Any] = frame.f_locals
            inputs, outputs = (
                [one for one in given.get(name) or () if isinstance(one, torch.Tensor)]
                for name in ("t_inputs", "t_outputs")
            )
            yield inputs, outputs
