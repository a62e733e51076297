"""Check every ``torch.compile`` of a program, and write a report for each of its processes.

Regions hold their own exceptions against eager's. What is raised beside them (by Dynamo, or by autograd where it cannot
see into a region) no region sees: it is told of the exception that ended the program.
"""

from __future__ import annotations

import contextlib
import linecache
import multiprocessing.util
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from traceback import walk_tb
from types import FrameType
from typing import Any

import torch
from torch import fx

from checked_backend.autostart import say
from checked_backend.errors import CheckedBackendError
from checked_backend.findings import Finding, Kind, Skip
from checked_backend.program.compile_calls import CompileWatch
from checked_backend.program.folder import Mark
from checked_backend.program.shadow import Shadows
from checked_backend.regions.call_findings import described_exception
from checked_backend.regions.health import HEALTH, CheckRecord
from checked_backend.report.session import Session, active_sessions
from checked_backend.report.words import plain_names


class ProgramWatch(CompileWatch):
    """Checks what a process compiles, from its first ``torch.compile`` to its end; an OptionError for a bad option.

    ``first`` is the id of the process that began then, by `time.perf_counter`. One with another id is a fork of it.
    """

    def __init__(self, folder: str, began: float, first: int, began_with: Mapping[str, str]) -> None:
        super().__init__(defaults={"on_divergence": "record"}, began_with=began_with)
        options = self.check_run()
        self._shadows = Shadows(options, lambda: self._session, self._tell) if options.shadow else None
        self._folder = Path(folder)
        self._began = began
        self._first = first
        self._checking = 0.0
        self._lock = threading.Lock()
        self._marks: dict[int, Mark] = {}
        self._told: set[str] = set()
        self._session = Session(self._keep)
        self._entered = contextlib.ExitStack()
        self._entered.enter_context(self._session.entered())  # records the checks that the program makes by itself, too
        HEALTH.add(self._note)

    def current(self) -> Session | None:
        """The session of a fork, which began with that of the first process."""
        self._here()
        return None if self._session in active_sessions() else self._session

    def asked(self) -> None:
        """Mark this process as one that compiles."""
        self._here()

    def left_unchecked(self, skip: Skip) -> None:
        """Note in the report of this process what is not checked."""
        self._here()
        self._session.ledger.skip(skip)

    def region(
        self, gm: fx.GraphModule, example_inputs: Sequence[Any], options: Mapping[str, Any], mode: str | None
    ) -> Callable[..., Any]:
        """Compile a region of the program, and check it on every call."""
        if self._shadows is not None:
            self._shadows.traced(gm)
        return super().region(gm, example_inputs, options, mode)

    def compiled(self, model: Any, made: Any, compile_again: Callable[..., Any]) -> Any:
        """The result of ``torch.compile``. With the option ``shadow``, its whole calls are compared with eager."""
        return made if self._shadows is None else self._shadows.over(model, made, compile_again)

    def _here(self) -> None:
        """Mark this process, once. A fork gets its own mark, and an empty session."""
        if os.getpid() in self._marks:
            return
        if os.getpid() != self._first:
            self._checking, self._session, self._lock = 0.0, Session(self._keep), threading.Lock()
            # multiprocessing ends its forks without Python's exit handlers
            multiprocessing.util.Finalize(None, self.write, exitpriority=-100)
        self._marks[os.getpid()] = Mark(self._folder, _program())

    def _note(self, record: CheckRecord) -> None:
        with self._lock:
            self._checking += record.seconds
        if record.findings:
            self._tell(record.region, record.call)

    def _tell(self, region: str, call: int) -> None:
        with self._lock:
            is_news = region not in self._told
            self._told.add(region)
        if is_news:  # later calls mostly differ for the same reason, and a program may make thousands
            say(
                f"checked-backend: call {call} of {plain_names(region)} differs from eager, which is said once; the "
                "report follows at the program's end",
            )

    def _keep(self) -> None:
        """Write what is known by now, so that a kill does not lose it. A fork that looks for an operator does not."""
        if os.getpid() in self._marks:
            with contextlib.suppress(OSError), self._lock:
                self._save()

    def _save(self) -> None:
        report = replace(self._session.report, title=_program())
        shadows = 0.0 if self._shadows is None else self._shadows.seconds
        checking = self._checking + shadows + self._session.investigations.seconds
        self._marks[os.getpid()].save(report, time.perf_counter() - self._began, checking)

    def write(self) -> None:
        """Write the final report of this process if it compiled something, or made checks of its own."""
        if os.getpid() not in self._marks:
            own = self._session.report
            if os.getpid() != self._first or not (own.coverage.regions or own.findings):
                return
            self._here()
        if self._shadows is not None:
            self._shadows.close()
        ended = how_it_ended(getattr(sys, "last_value", None))  # set by Python for the exception that ends a program
        if isinstance(ended, Finding):
            self._session.ledger.add_findings([ended], [])
        elif ended is not None:
            self._session.ledger.skip(ended)
        self._session.close()
        self._save()
        self._marks[os.getpid()].ended()


def _program() -> str:
    rank = os.environ.get("RANK", "")
    return " ".join([*sys.argv, *([f"(rank {rank})"] if rank else [])]) or "python"


_TORCH = Path(torch.__file__).parent
_COMPILERS = ("_dynamo", "_functorch", "_higher_order_ops", "_inductor", "autograd", "fx")
_REGIONS = "checked_backend.regions"

_TWICE = "does not currently support double backward"


def how_it_ended(error: BaseException | None) -> Finding | Skip | None:
    """What the exception that ended a program says of the compiled program.

    Returns:
        A finding if eager does not raise it, a skip if nobody knows; None if it is the program's own, or a region has
        held it against eager already.
    """
    asked: list[BaseException] = []
    while isinstance(error, Exception) and error not in asked and not isinstance(error, CheckedBackendError):
        asked.append(error)
        frames = list(walk_tb(error.__traceback__))
        if frames and _is_compilers(frames[-1]):
            return _of_compiler(error, frames)
        error = error.__cause__ or error.__context__  # the program's own may have been raised where it met another
    return None


def _of_compiler(error: Exception, frames: list[tuple[FrameType, int]]) -> Finding | Skip | None:
    if any(str(frame.f_globals.get("__name__")).startswith(_REGIONS) for frame, _ in frames):
        return None
    line = _users_line(frames)
    if _TWICE in str(error):
        return _finding(error, line, "AOT autograd compiles no second derivative, eager has one")
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
