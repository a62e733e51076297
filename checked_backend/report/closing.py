"""The line at the end of a run in which nothing was found: it says what was checked, and how sharply.

A session says it when it ends. What is checked outside of every session is told when the process ends.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
from contextvars import ContextVar

from checked_backend.findings import Coverage
from checked_backend.report.clean import first_line, plural
from checked_backend.report.coverage_view import but_for_ignored
from checked_backend.report.file_names import process_rank
from checked_backend.report.ledger import Ledger

__all__ = ["ProcessEnd", "closing_line", "end_of_process", "say_closing_line"]

log = logging.getLogger(__name__)


def closing_line(coverage: Coverage) -> str:
    """``numcheck: 3 regions, 18 calls, 189 tensors agree with eager``, and the error that would have been caught.

    If an error could hide in something that was skipped, the line says that too. It is empty if nothing was compared.
    """
    calls = sum(region.checked_calls for region in coverage.regions)
    if not calls:
        return ""
    tensors = coverage.checked.get("tensors", 0)
    parts = [plural(len(coverage.regions), "region"), plural(calls, "call")]
    parts += [plural(tensors, "tensor")] if tensors else []
    compared = f"numcheck: {', '.join(parts)}"
    hidden = [first_line(f"{skip.subject}: {skip.reason}") for skip in coverage.skipped if skip.matters]
    if hidden:
        more = f"; and {plural(len(hidden) - 1, 'other part')}" if len(hidden) > 1 else ""
        hiding = f"an error could hide where nothing was checked: {hidden[0]}{more}"
        return f"{compared} compared and nothing found, but {hiding}"
    limits = coverage.detection_limit.values()
    if not limits and not coverage.ignored:
        return f"{compared} agree with eager exactly"
    sharp = f" (smallest relative error that would have been caught everywhere: {max(limits):.2g})" if limits else ""
    return f"{compared} agree with eager{but_for_ignored(coverage)}{sharp}"


def say_closing_line(ledger: Ledger) -> None:
    """Tell the logger at INFO, and a person who sits at a terminal and has no such logger."""
    line = "" if ledger.findings() else closing_line(ledger.coverage())
    if not line:
        return
    log.info(line)
    if not log.isEnabledFor(logging.INFO) and sys.stderr is not None and sys.stderr.isatty():
        sys.stderr.write(f"{line}\n")


class ProcessEnd:
    """Gathers what is checked outside of every session, for a line at the end of the process."""

    def __init__(self) -> None:
        self._ledger = Ledger()
        self._process = 0

    def ledgers(self) -> tuple[Ledger, ...]:
        """Where to write to; nowhere in a process that was forked, which is a part of the first one's run."""
        process = os.getpid()
        if not self._process:
            self._process = process
            atexit.register(self.say)
        return (self._ledger,) if self._process == process else ()

    def say(self) -> None:
        """Say the line, on the first rank alone."""
        if os.getpid() == self._process and not process_rank():
            say_closing_line(self._ledger)


# A process ends once.
_end: ContextVar[ProcessEnd] = ContextVar("checked_backend_end_of_process", default=ProcessEnd())  # noqa: B039


def end_of_process() -> ProcessEnd:
    """The checks that are gathered for the end of this process."""
    return _end.get()
