"""Sessions: gather what every check finds while a block runs.

A session of a clean run says at its end what was checked, and how sharply. What is checked outside of every session is
told when the process ends.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar, cast

from checked_backend._torch.dynamo import dynamo_counters
from checked_backend.findings import Coverage, RegionInfo, Skip
from checked_backend.report import Report
from checked_backend.report.causes import short_region
from checked_backend.report.clean import first_line, listed, plural
from checked_backend.report.coverage_view import bluntest, but_for_ignored
from checked_backend.report.dynamo_log import DynamoLog
from checked_backend.report.file_names import process_rank
from checked_backend.report.ledger import Ledger
from checked_backend.report.progress import say

log = logging.getLogger(__name__)

_SUBJECT = "the compiled code"
_NO_REGION = "cb.collect()"
_NAMED = 3


class SessionPart(Protocol):
    """The memory that one room of the package keeps of a session, beside findings and counts."""

    def close(self) -> Iterable[Skip]:
        """End with the session. What could not be checked goes to the session's coverage."""


_T = TypeVar("_T")
_PartT = TypeVar("_PartT", bound=SessionPart)


@dataclass(slots=True)
class Investigations:
    """The time that a session spent on looking for operators, and the things it told. Nothing is done twice.

    Attributes:
        seconds: How long that took, all together.
        places: What was looked into: source lines and kinds of findings.
        told: What the user was warned of: source lines, subjects and finer kinds.
        causes: The operators that were found to be at fault, each with the stage.
    """

    seconds: float = 0.0
    places: set[tuple[object, ...]] = field(default_factory=set)
    told: set[tuple[object, ...]] = field(default_factory=set)
    causes: set[tuple[str, str]] = field(default_factory=set)


class Session:
    """Everything that `collect` gathers. ``on_news`` is as for `Ledger`.

    Attributes:
        closing: Whether a line may tell at the end how much agreed: no region in it has the option ``closing`` off.
    """

    def __init__(self, on_news: Callable[[], None] | None = None) -> None:
        self.closing = True
        self.ledger = Ledger(on_news)
        self.investigations = Investigations()
        self._parts: dict[type[SessionPart], SessionPart] = {}
        self._before = dynamo_counters()
        self._log: DynamoLog | None = None

    @property
    def report(self) -> Report:
        """Everything that numcheck found and covered since the session began.

        Its title names the modules and functions that were checked. The coverage also names the code that Dynamo left
        to eager meanwhile: nothing of it was checked.
        """
        report = self.ledger.report("")
        report = replace(report, title=_title(report.coverage.regions))
        dynamo, coverage = self._dynamo(), report.coverage
        left_out: Iterable[Skip] = ()
        if coverage.regions:
            left_out = dynamo.in_eager(_SUBJECT)
            coverage = replace(coverage, notes=(*coverage.notes, *dynamo.notes()))
        elif dynamo.looked:
            left_out = [dynamo.no_region(_SUBJECT)]
        return replace(report, coverage=replace(coverage, skipped=(*coverage.skipped, *left_out)))

    def part(self, kind: type[_PartT]) -> _PartT:
        """The memory of one room of the package: of this class, made without arguments when it is first asked for."""
        known = self._parts.get(kind) or self._parts.setdefault(kind, kind())  # no lock: forked processes ask too
        return cast("_PartT", known)

    @property
    def dynamo_looked(self) -> bool:
        """Whether Dynamo looked at any function since the session began."""
        return self._dynamo().looked

    def _dynamo(self) -> DynamoLog:
        if self._log is not None:
            return self._log
        log = DynamoLog()
        log.add(self._before, dynamo_counters())
        return log

    def close(self) -> None:
        """End the session's parts. What Dynamo does from now on is not the session's."""
        self._log = self._dynamo()
        for part in tuple(self._parts.values()):
            for skip in part.close():
                self.ledger.skip(skip)

    @contextmanager
    def entered(self, *, alone: bool = False, threads: bool = True) -> Iterator[None]:
        """Let this session see what happens in a block.

        Args:
            alone: Keep it from the sessions that are active around the block.
            threads: Let it see what other threads do meanwhile, too, if they are inside of no session.
        """
        around, block = () if alone else _sessions.get() or (), object()
        if threads and not alone:
            _open[block] = threading.get_ident(), self
        try:
            with during(_sessions, (*around, self)):
                yield
        finally:
            _open.pop(block, None)

    def paused(self) -> AbstractContextManager[None]:
        """Keep what happens in a block from this session."""
        return during(_sessions, tuple(session for session in active_sessions() if session is not self))


_open: dict[object, tuple[int, Session]] = {}  # no lock: forked processes ask too
"""The sessions whose blocks run now, by block, each with the thread that runs it."""


@contextmanager
def during(variable: ContextVar[_T], value: _T) -> Iterator[None]:
    """A block in which a variable of this context has a value."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def _title(regions: Sequence[RegionInfo]) -> str:
    """``ConvNet and Encoder``: the first few of what was checked."""
    names = list(dict.fromkeys(short_region(region.name) for region in regions))
    rest = len(names) - _NAMED
    shown = names if rest <= 0 else [*names[:_NAMED], plural(rest, "other")]
    return listed(shown) or _NO_REGION


_sessions: ContextVar[tuple[Session, ...] | None] = ContextVar("checked_backend_sessions", default=None)


def investigations() -> Investigations:
    """The innermost session's investigations. Outside of all sessions, regions share no memory of them."""
    sessions = active_sessions()
    return sessions[-1].investigations if sessions else Investigations()


def active_sessions() -> tuple[Session, ...]:
    """The sessions that this thread is inside of. If it is inside of none, those that other threads are inside of."""
    if (sessions := _sessions.get()) is not None or not _open:
        return sessions or ()
    own = threading.get_ident()
    return tuple(dict.fromkeys(session for thread, session in [*_open.values()] if thread != own))


@contextmanager
def collect(*, alone: bool = False, threads: bool = True, closing: bool = True) -> Iterator[Session]:
    """Gather what ``numcheck`` finds inside of the block.

    Use it with ``on_divergence="record"`` or ``"warn"``; with ``"raise"`` the first finding still raises. Sessions
    nest, and each sees what happens inside of it, and meanwhile in threads that are inside of no session.

    Args:
        alone: Keep what happens from the sessions around this one: it is none of the user's program.
        threads: See what happens in other threads, too.
        closing: At the end of a clean block tell how much agreed: the logger at INFO, or else stderr.

    Yields:
        The session; its ``report`` may be read during the block and after it.
    """
    session = Session()
    with session.entered(alone=alone, threads=threads):
        try:
            yield session
        finally:
            session.close()
    if closing and session.closing and not alone:
        say_closing_line(session.ledger)


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
    agree = f"{compared} agree with eager"
    if not coverage.detection_limit:
        return agree + (but_for_ignored(coverage) or " exactly")
    _, limit, but = bluntest(coverage.detection_limit.items())
    sharp = f"smallest relative error that would have been caught everywhere{but}: {limit:.2g}"
    return f"{agree}{but_for_ignored(coverage)} ({sharp})"


def say_closing_line(ledger: Ledger) -> None:
    """Say the line of a clean run."""
    line = "" if ledger.findings() else closing_line(ledger.coverage())
    if line:
        say(log, line)


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


PROCESS_END = ProcessEnd()
"""The checks that are gathered for the end of this process."""
