"""Calls of a region that are not checked, most of a long run; and those that are no calls of the program's at all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from checked_backend._torch.fake_tensors import FakeTensor
from checked_backend.regions.reporter import RegionReporter
from checked_backend.regions.returned_tensors import Results, ReturnedTensors
from checked_backend.regions.schedule import Schedule
from checked_backend.report.ledger import PassedCalls
from checked_backend.report.session import Session, active_sessions
from checked_backend.tensors.streams import is_capturing


class UncheckedCalls:
    """Counts them.

    A program's own kernels leave nothing of this package in the processor's caches, so that each function that is
    entered and each object that is looked at costs a microsecond or more. What must be noted of such calls is found
    once for as long as the same sessions are active.

    Args:
        earlier: The results of earlier calls. The compiled code that runs now may write to them.
    """

    def __init__(self, schedule: Schedule, earlier: ReturnedTensors, reporter: RegionReporter) -> None:
        self._schedule = schedule
        self._earlier = earlier
        self._reporter = reporter
        self._sessions: tuple[Session, ...] | None = None
        self._holders: Sequence[Results] = ()
        self._calls: PassedCalls | None = None

    def skip(self) -> bool:
        """Count a call if it is surely one of these, without a further look at it."""
        calls = self._calls
        if calls is None or active_sessions() != self._sessions or is_unobserved():
            return False
        if is_capturing() or not self._schedule.skip():
            return False
        for holder in self._holders:
            holder.unchecked = True
        calls.count += 1
        return True

    def captured(self) -> bool:
        """Count a call if a CUDA graph captures it. What the graph replays later does not come by here."""
        if not is_capturing():
            return False
        self._earlier.calls += 1
        self.count()
        self._reporter.captured()
        return True

    def count(self) -> None:
        """Count a call that was looked at."""
        calls = self._calls
        if calls is None or active_sessions() != self._sessions:
            if calls is not None:
                calls.end()
            self._calls = calls = self._reporter.passing()
            self._holders = self._earlier.holders()
            self._sessions = active_sessions()
        self._earlier.unchecked()
        calls.count += 1


_unobserved: ContextVar[bool] = ContextVar("checked_backend_unobserved", default=False)


@contextmanager
def unobserved() -> Iterator[None]:
    """A block in which regions run what was compiled, and look at nothing."""
    token = _unobserved.set(True)
    try:
        yield
    finally:
        _unobserved.reset(token)


def is_unobserved() -> bool:
    """Whether such a block runs."""
    return _unobserved.get()


def is_traced(args: Sequence[Any]) -> bool:
    """Whether a compiler calls a region while it compiles, to see what it returns: its tensors have no values.

    Dynamo does so where it splits the graph of a ``DistributedDataParallel`` module between two buckets.
    """
    return any(isinstance(arg, FakeTensor) for arg in args)
