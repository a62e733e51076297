"""Reporters handle the findings of one region: the part that every backend shares.

A reporter names and grades findings, sets aside those that the user asked to ignore, adds the rest to all ledgers and
warns of layout once. How a failing finding is answered is each backend's own: see the reporters in `regions` and
`metadata`.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import FrameType

from checked_backend.errors import DivergenceWarning
from checked_backend.findings import Finding, RegionInfo, Severity, Skip
from checked_backend.options import CheckOptions, InterpreterOptions
from checked_backend.report.advice import layout_warning
from checked_backend.report.ledger import Ledger, split_ignored
from checked_backend.report.session import PROCESS_END, active_sessions, investigations

_OTHERS = frozenset({"torch", "checked_backend"})


class Reporter:
    """The place to which one region's checks write.

    Everything goes to the region's own ledger and to the sessions that are active where it happens.
    """

    def __init__(self, region: RegionInfo, options: CheckOptions | InterpreterOptions) -> None:
        self._region = region
        self._layout = options.layout
        self._ignore = options.ignore
        self._closing = isinstance(options, CheckOptions) and options.closing
        self._compiled_by = options.compiled_by if isinstance(options, CheckOptions) else ""
        self._ends_quietly = isinstance(options, CheckOptions) and not options.closing
        self._quiet = options.on_divergence == "record"
        self._own = Ledger()

    def _ledgers(self) -> tuple[Ledger, ...]:
        return (self._own, *self._around())

    def _around(self) -> tuple[Ledger, ...]:
        """The ledgers of the active sessions; outside of all of them, the one for the end of the process."""
        sessions = active_sessions()
        if sessions:
            if self._ends_quietly:
                for session in sessions:
                    session.closing = False
            return tuple(session.ledger for session in sessions)
        return PROCESS_END.ledgers() if self._closing else ()

    def _add_calls(self, *, calls: int = 0, checked: int = 0, drawn: int = 0, backwards: int = 0) -> None:
        """Add to the region's counts of calls, of checked calls and of checked backward passes."""
        info = replace(
            self._region,
            calls=calls,
            checked_calls=checked,
            drawn_calls=drawn,
            checked_backwards=backwards,
            last_checked_call=calls if checked else 0,
        )
        for ledger in self._ledgers():
            ledger.region(info, self)
            if self._compiled_by:
                ledger.compiled_by(self._compiled_by)

    def count(self, checked: Mapping[str, int]) -> None:
        """Note comparisons that ran."""
        for ledger in self._ledgers():
            ledger.count(checked)

    def skip(self, skip: Skip) -> None:
        """Note something that was not checked."""
        for ledger in self._ledgers():
            ledger.skip(replace(skip, region=self._region.name))

    def skip_until(self, skip: Skip) -> Callable[[], None]:
        """Note something that is not checked until the result is called: it is over then."""
        ledgers, about = self._ledgers(), object()
        for ledger in ledgers:
            ledger.begun(about, replace(skip, region=self._region.name))

        def over() -> None:
            for ledger in ledgers:
                ledger.over(about)

        return over

    def note(self, note: str) -> None:
        """Note a remark that changes no verdict."""
        for ledger in self._ledgers():
            ledger.note(note)

    def _graded(self, findings: Iterable[Finding]) -> tuple[list[Finding], list[Finding]]:
        """Graded findings to report, and those to ignore: layout alone fails only if the user asks for that."""
        graded = [
            replace(finding, severity=Severity.WARNING) if finding.is_layout and self._layout != "raise" else finding
            for finding in findings
        ]
        return split_ignored(graded, self._ignore, self._layout)

    def _add(self, reported: Sequence[Finding], ignored: Sequence[Finding]) -> tuple[Finding, ...]:
        """Add findings to all ledgers. Returns those that no earlier call of the region had."""
        for ledger in self._around():
            ledger.add_findings(reported, ignored)
        return self._own.add_findings(reported, ignored)

    def _warn_of_layout(self, new: Sequence[Finding]) -> None:
        """Warn once of each: what is compiled anew for other sizes is told no second time in one session."""
        told = investigations().told
        places = {(self._region.sources, finding.graph, finding.subject, finding.detail): finding for finding in new}
        fresh = [finding for place, finding in places.items() if place not in told]
        told.update(places)
        if fresh and not self._quiet:
            warnings.warn(layout_warning(fresh), DivergenceWarning, stacklevel=users_stacklevel())


def users_stacklevel() -> int:
    """The ``stacklevel`` at which the caller's warning names the user's code, not a line of torch or of this package.

    Where no frame is the user's, as in a thread of autograd's, it is the caller's own.
    """
    frame: FrameType | None = sys._getframe(1)
    level = 1
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).partition(".")[0] not in _OTHERS:
            return level
        frame, level = frame.f_back, level + 1
    return 1
