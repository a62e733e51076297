"""The health of a run over time: a small record of each check for those who asked."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch.utils.hooks import RemovableHandle

from checked_backend.findings import Finding
from checked_backend.report.file_names import process_rank

log = logging.getLogger(__name__)

FIRST, LATEST = 8, 4
"""So many of a region's first checks the latest are compared with, and about so many latest: one is no drift."""

DRIFT, NOTICEABLE = 3.0, 0.5
"""The least growth of the ratio to the noise that is a drift, and the largest ratio that is none however it grew."""


@dataclass(frozen=True, slots=True)
class CheckRecord:
    """The result of one check of a region.

    Attributes:
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


class Health:
    """The time that a process's checks have taken, and the callbacks that get their records.

    Attributes:
        began: When the first region was built; None before.
    """

    def __init__(self) -> None:
        self.began: float | None = None
        self._lock = threading.Lock()
        self._callbacks: OrderedDict[int, Callable[[CheckRecord], object]] = OrderedDict()
        self._telling = threading.local()
        self._spent = 0.0

    def add(self, callback: Callable[[CheckRecord], object]) -> RemovableHandle:
        """Call something after each check."""
        handle = RemovableHandle(self._callbacks)
        self._callbacks[handle.id] = callback
        return handle

    def spent(self, seconds: float) -> float:
        """Note the time that a check took. Return the share of the time that all checks have taken."""
        with self._lock:
            self._spent += seconds
            return min(1.0, self._spent / (time.perf_counter() - (self.began or 0.0)))

    def tell(self, record: CheckRecord, note: Callable[[str], None]) -> None:
        """Call all callbacks. What they raise is noted, and the program goes on.

        A callback may call a compiled program. Of its checks nobody is told, or the callback would call itself.
        """
        if getattr(self._telling, "now", False):
            return
        self._telling.now = True
        try:
            for callback in (*self._callbacks.values(),):
                try:
                    callback(record)
                except Exception as error:
                    note(f"a callback of on_check raised: {type(error).__name__}: {error}".splitlines()[0])
                    log.warning("checked_backend: a callback of on_check raised", exc_info=error)
        finally:
            self._telling.now = False


HEALTH = Health()
"""That of this process, which is one run: callbacks are asked for once, wherever regions are built."""


def on_check(callback: Callable[[CheckRecord], object]) -> RemovableHandle:
    """Call something after each checked call, and after each checked backward pass, with a small record.

    It is called in the thread of the call, before a finding raises. An exception of the callback is named in the
    coverage and in the log, and ends nothing. If the callback calls a compiled program, that is checked, and the
    callback is not told of it.

    Args:
        callback: Gets a `CheckRecord`.

    Returns:
        A handle: ``handle.remove()`` ends it; it also works in a ``with`` statement.
    """
    return HEALTH.add(callback)


@dataclass(slots=True)
class _Drift:
    """The mean ratio to the noise in the latest checks, and what it was after the first ones."""

    checks: int = 0
    first: float = 0.0
    latest: float = 0.0

    def add(self, ratio: float) -> float | None:
        """Note a check, and say how many times the ratio has grown; None where it did not, or not by much."""
        self.checks += 1
        self.latest += (ratio - self.latest) / (self.checks if self.checks <= FIRST else LATEST)
        if self.checks <= FIRST:
            self.first = self.latest
            return None
        grown = self.latest / max(self.first, NOTICEABLE / DRIFT)
        return grown if grown >= DRIFT else None


class RegionHealth:
    """The checks of one region over time.

    Args:
        note: Receives remarks that change no verdict.
    """

    def __init__(self, region: str, note: Callable[[str], None], health: Health) -> None:
        self._region, self._note, self._health = region, note, health
        self._drifts = (_Drift(), _Drift())
        if health.began is None:
            health.began = time.perf_counter()

    def checked(
        self,
        call: int,
        ratios: Mapping[str, float] | None,
        findings: Sequence[Finding],
        seconds: float,
        *,
        backward: bool = False,
    ) -> None:
        """Note a check that is over, with its differences divided by their noise, by subject."""
        subject, ratio = max((ratios or {}).items(), key=lambda item: item[1], default=("", None))
        failing = sum(finding.fails and not finding.is_layout for finding in findings)
        drift = None
        if ratio is not None and math.isfinite(ratio) and not failing:
            drift = self._drifts[backward].add(ratio)
        share, rank = self._health.spent(seconds), process_rank()
        record = CheckRecord(self._region, call, backward, ratio, subject, failing, seconds, share, drift, rank)
        what, noise = "gradients of call" if backward else "call", "no noise known"
        if ratio is not None:
            noise = f"{ratio:.3g} times the noise in {subject}"
        said = f"{failing} findings" if failing else "agrees with eager"
        log.debug("%s: %s %d %s (%s), %.3g s", self._region, what, call, said, noise, seconds)
        self._health.tell(record, self._note)
