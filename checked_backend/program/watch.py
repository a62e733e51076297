"""Check every ``torch.compile`` of a program, and write a report for each of its processes."""

from __future__ import annotations

import contextlib
import multiprocessing.util
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import fx

from checked_backend.autostart import say
from checked_backend.findings import Finding, Skip
from checked_backend.program.compile_calls import CompileWatch
from checked_backend.program.ended import how_it_ended
from checked_backend.program.folder import Mark, ProcessReport
from checked_backend.program.shadow import Shadows
from checked_backend.regions.health import HEALTH, CheckRecord
from checked_backend.report.session import Session, active_sessions

__all__ = ["ProgramWatch"]


class ProgramWatch(CompileWatch):
    """Checks what a process compiles, from its first ``torch.compile`` to its end.

    Args:
        began: The time by `time.perf_counter` when the process began.
        first: The id of that process. A process with another id is a fork of it.

    Raises:
        OptionError: The environment has an unknown or bad option.
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
        """The session of the program if it is not active in this thread, else None."""
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
                f"checked-backend: call {call} of {region} differs from eager, which is said once; the report follows "
                "at the program's end",
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
        found = ProcessReport(report, time.perf_counter() - self._began, checking)
        self._marks[os.getpid()].save(found)

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
