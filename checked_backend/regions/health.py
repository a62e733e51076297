"""The health of a run over time: a small record of each check for those who asked, and notes about drifts."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from checked_backend.findings import Finding
from checked_backend.report.file_names import process_rank

__all__ = [
    "CheckRecord",
    "CheckSubscription",
    "Health",
    "RegionHealth",
    "health_of_run",
    "health_used",
    "on_check",
]

log = logging.getLogger(__name__)

WINDOW = 8
"""How many of a region's first checks are compared with as many of its latest."""

DRIFT = 3.0
"""The least growth of the ratio to the noise, from the first checks to the latest, that is reported as a drift."""

NOTICEABLE = 0.5
"""A ratio to the noise below this is not reported, however much it grew."""


@dataclass(frozen=True, slots=True)
class CheckRecord:
    """The result of one check of a region.

    Attributes:
        region: The region's name.
        call: The number of the region's call, from 1. In a training program with one call for each step, it is the
            number of the step.
        backward: Whether the check is about the gradients of that call.
        ratio: The largest difference divided by its tensor's noise: 0 if all bits are equal, about 1 for noise; None if
            no noise was known to compare with.
        subject: The tensor with that difference.
        findings: The number of failing findings.
        seconds: The time that the check took beyond the program's own run.
        share: The share of the time that all checks of this process have taken, since the first region was built.
        drift: How many times the ratio has grown from the region's first checks to its latest; None where it did not.
        rank: This process's rank in a distributed program; None outside of one.
    """

    region: str
    call: int
    backward: bool
    ratio: float | None
    subject: str
    findings: int
    seconds: float
    share: float
    drift: float | None
    rank: int | None

    @property
    def step(self) -> int:
        """The number of the call, for programs with one call for each training step."""
        return self.call


class CheckSubscription(ExitStack):
    """A callback that gets a record of each check, until it is removed. A ``with`` block removes it at its end."""

    def remove(self) -> None:
        """End it. Nothing happens if it has ended."""
        self.close()


class Health:
    """The time that a process's checks have taken, and the callbacks that get their records.

    Args:
        clock: Gives the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._callbacks: tuple[Callable[[CheckRecord], object], ...] = ()
        self._telling = threading.local()
        self._began: float | None = None
        self._spent = 0.0

    def begins(self) -> None:
        """Note that a region was built."""
        with self._lock:
            if self._began is None:
                self._began = self._clock()

    def add(self, callback: Callable[[CheckRecord], object]) -> CheckSubscription:
        """Call something after each check."""
        with self._lock:
            self._callbacks = (*self._callbacks, callback)
        subscription = CheckSubscription()
        subscription.callback(self.remove, callback)
        return subscription

    def remove(self, callback: Callable[[CheckRecord], object]) -> None:
        """Call it no more."""
        with self._lock:
            self._callbacks = tuple(one for one in self._callbacks if one is not callback)

    def spent(self, seconds: float) -> float:
        """Note the time that a check took. Return the share of the time that all checks have taken."""
        with self._lock:
            self._spent += seconds
            passed = 0.0 if self._began is None else self._clock() - self._began
            return min(1.0, self._spent / passed) if passed > 0 else 1.0

    def tell(self, record: CheckRecord) -> list[str]:
        """Call all callbacks. An exception of one of them ends nothing.

        A callback may call a compiled program. Of its checks nobody is told, or the callback would call itself.

        Returns:
            The exceptions, in words.
        """
        if getattr(self._telling, "now", False):
            return []
        failed = []
        self._telling.now = True
        try:
            for callback in self._callbacks:
                try:
                    callback(record)
                except Exception as error:  # the user's program goes on; the coverage names the exception
                    failed.append(f"{type(error).__name__}: {error}".splitlines()[0])
                    log.warning("checked_backend: a callback of on_check raised %s", failed[-1], exc_info=error)
        finally:
            self._telling.now = False
        return failed


# The process is one run, and callbacks are asked for once, wherever regions are built.
_health: ContextVar[Health] = ContextVar("checked_backend_health", default=Health())  # noqa: B039


def health_of_run() -> Health:
    """The health of this process."""
    return _health.get()


@contextmanager
def health_used(health: Health) -> Iterator[None]:
    """Let regions that are built in a block tell another health than the process's."""
    token = _health.set(health)
    try:
        yield
    finally:
        _health.reset(token)


def on_check(callback: Callable[[CheckRecord], object]) -> CheckSubscription:
    """Call something after each checked call, and after each checked backward pass, with a small record.

    It is called in the thread of the call, before a finding raises. An exception of the callback is named in the
    coverage and in the log, and ends nothing. If the callback calls a compiled program, that is checked, and the
    callback is not told of it.

    Args:
        callback: Gets a `CheckRecord`.

    Returns:
        A handle: ``handle.remove()`` ends it; it also works in a ``with`` statement.
    """
    return _health.get().add(callback)


class RegionHealth:
    """The checks of one region over time.

    Args:
        region: The region's name.
        note: Receives remarks that change no verdict.
        health: The health of the process.
    """

    def __init__(self, region: str, note: Callable[[str], None], health: Health) -> None:
        self._region = region
        self._note = note
        self._health = health
        self._ratios: dict[bool, list[float]] = {False: [], True: []}
        self._told = False
        self._lock = threading.Lock()
        health.begins()

    def checked(
        self,
        call: int,
        ratios: Mapping[str, float] | None,
        findings: Sequence[Finding],
        seconds: float,
        *,
        backward: bool = False,
    ) -> None:
        """Note a check that is over.

        Args:
            call: The number of the region's call.
            ratios: The differences divided by their noise, by subject.
            findings: What the check found.
            seconds: The time that the check took.
            backward: Whether gradients were checked.
        """
        known = ratios or {}
        subject = max(known, key=known.__getitem__, default="")
        # those about layout alone fail no check
        failing = sum(finding.fails and not finding.is_layout for finding in findings)
        drift = None if failing else self._drift(known.get(subject), backward)
        if drift is not None and not self._told:
            self._told = True
            told = (
                f"drift: over the calls up to {call}, the greatest difference grew to {drift:.2g} times what it was, "
                f"measured in its noise; it is now that of {subject}. No finding yet; it is what precedes one where an "
                "error grows with the weights"
            )
            self._note(told)
            log.warning("checked_backend: %s: %s", self._region, told)
        share = self._health.spent(seconds)
        record = CheckRecord(
            self._region, call, backward, known.get(subject), subject, failing, seconds, share, drift, process_rank()
        )
        told = "no noise known" if record.ratio is None else f"{record.ratio:.3g} times the noise in {subject}"
        said = f"{failing} findings" if failing else "agrees with eager"
        what = "gradients of call" if backward else "call"
        log.debug("%s: %s %d %s (%s), %.3g s", self._region, what, call, said, told, seconds)
        for failed in self._health.tell(record):
            self._note(f"a callback of on_check raised: {failed}")

    def _drift(self, ratio: float | None, backward: bool) -> float | None:
        """How much the ratio grew from the first checks to the latest; None if it did not, or not by much."""
        with self._lock:
            ratios = self._ratios[backward]
            if ratio is None or not math.isfinite(ratio):
                return None
            ratios[:] = [*ratios[:WINDOW], *ratios[WINDOW:][1 - WINDOW :], ratio]
            first, latest = sorted(ratios[:WINDOW]), sorted(ratios[WINDOW:])
        if len(latest) < WINDOW:
            return None
        before, now = first[WINDOW // 2], latest[WINDOW // 2]
        # one call with other data is no drift: nearly all of the latest must be beyond all of the first
        grew = latest[1] > first[-1] and now >= NOTICEABLE and now >= DRIFT * before
        return now / max(before, NOTICEABLE / DRIFT) if grew else None
