"""The health of a run over time: a small record of each check for those who asked, and notes about drifts."""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from types import TracebackType

from checked_backend._torch.traces import CompilePlace
from checked_backend.findings import Finding
from checked_backend.report.file_names import process_rank

__all__ = [
    "CheckRecord",
    "CheckSubscription",
    "Health",
    "RegionHealth",
    "failing",
    "health_of_run",
    "health_used",
    "on_check",
]

log = logging.getLogger(__name__)

WINDOW = 8
"""How many of a tensor's first checks are compared with as many of its latest."""

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
        drift: The ratio that grew: "output[0]: 0.4 to 1.9 times its noise"; "" if none did.
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
    drift: str
    rank: int | None

    @property
    def step(self) -> int:
        """The number of the call, for programs with one call for each training step."""
        return self.call


class CheckSubscription:
    """A callback that gets a record of each check, until it is removed. A ``with`` block removes it at its end.

    Args:
        health: The health that the callback was added to.
        callback: The callback.
    """

    def __init__(self, health: Health, callback: Callable[[CheckRecord], object]) -> None:
        self._health = health
        self._callback = callback

    def remove(self) -> None:
        """End it. Nothing happens if it has ended."""
        self._health.remove(self._callback)

    def __enter__(self) -> CheckSubscription:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.remove()


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
        return CheckSubscription(self, callback)

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


class _Trend:
    """The ratio of one tensor to its noise: in its first checks, and in its latest."""

    def __init__(self) -> None:
        self._first: list[float] = []
        self._latest: list[float] = []
        self._told = False

    def grew(self, ratio: float) -> tuple[float, float] | None:
        """Add one more ratio. Return the two ratios between which it grew, the first time that this is much."""
        if len(self._first) < WINDOW:
            self._first.append(ratio)
            return None
        self._latest = [*self._latest[1 - WINDOW :], ratio]
        if self._told or len(self._latest) < WINDOW:
            return None
        before, now = (sorted(some)[WINDOW // 2] for some in (self._first, self._latest))
        # one call with other data is no drift: nearly all of the latest must be beyond all of the first
        apart = sorted(self._latest)[1] > max(self._first)
        if not (apart and now >= NOTICEABLE and now >= DRIFT * before):
            return None
        self._told = True
        return before, now


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
        self._place = CompilePlace.now()
        self._checks: Counter[bool] = Counter()  # by whether of gradients
        self._trends: dict[tuple[bool, str], _Trend] = {}
        self._lock = threading.Lock()
        health.begins()

    def checked(
        self, call: int, ratios: Mapping[str, float] | None, findings: int, seconds: float, *, backward: bool = False
    ) -> None:
        """Note a check that is over.

        Args:
            call: The number of the region's call.
            ratios: The differences divided by their noise, by subject.
            findings: The number of failing findings.
            seconds: The time that the check took.
            backward: Whether gradients were checked.
        """
        known = ratios or {}
        subject = max(known, key=known.__getitem__, default="")
        drift = "" if findings else self._drift(known, backward)
        if drift:
            told = (
                f"drift: over the calls up to {call}, {drift}. No finding yet; it is what precedes one where an error "
                "grows with the weights"
            )
            self._note(told)
            log.warning("checked_backend: %s: %s", self._region, told)
        share = self._health.spent(seconds)
        record = CheckRecord(
            self._region, call, backward, known.get(subject), subject, findings, seconds, share, drift, process_rank()
        )
        self._trace(record)
        for failed in self._health.tell(record):
            self._note(f"a callback of on_check raised: {failed}")

    def _trace(self, record: CheckRecord) -> None:
        """Log a check, and add it to torch's structured trace if it is the first, second, fourth, eighth ... one."""
        told = "no noise known" if record.ratio is None else f"{record.ratio:.3g} times the noise in {record.subject}"
        said = f"{record.findings} findings" if record.findings else "agrees with eager"
        what = "gradients of call" if record.backward else "call"
        log.debug("%s: %s %d %s (%s), %.3g s", record.region, what, record.call, said, told, record.seconds)
        self._checks[record.backward] += 1
        if not self._checks[record.backward] & (self._checks[record.backward] - 1):
            self._place.artifact("checked_backend_check", lambda: _json(record), encoding="json")

    def _drift(self, ratios: Mapping[str, float], backward: bool) -> str:
        grown = []
        with self._lock:
            for subject, ratio in ratios.items():
                if math.isfinite(ratio):
                    found = self._trends.setdefault((backward, subject), _Trend()).grew(ratio)
                    if found is not None:
                        grown.append(f"{subject} went from {found[0]:.2g} to {found[1]:.2g} times its noise")
        return "; ".join(grown)


def _json(record: CheckRecord) -> str:
    infinite = record.ratio is not None and not math.isfinite(record.ratio)
    return json.dumps(asdict(record) | ({"ratio": str(record.ratio)} if infinite else {}), indent=2)


def failing(findings: Sequence[Finding]) -> int:
    """The number of findings that fail a check, without those about layout alone.

    Args:
        findings: The findings of one call.
    """
    return sum(finding.fails and not finding.is_layout for finding in findings)
