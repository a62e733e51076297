"""Which calls of a region are checked: every n-th, or as many as a share of the run's time pays for.

The share is one leaky bucket for the whole run, however many regions it has and however often they are compiled. Time
that passes fills it. Checks and skipped calls empty it. A check begins when the bucket holds what it will take: what
the last one of its kind took, or an upper estimate. Regions take turns by fair queueing: next is the one that has been
given least time once its check is over, and the others leave in the bucket what it needs.

Between rechecks, the call that is checked is drawn from those that come by until the next check will be paid for. A
program often does the same things in turn, and checks that came as soon as they are paid for could meet the same one
each time.

A *recheck* is check 1, 2, 4, 8, ... of a region: at first with all control runs, later with those that it needs. It
may take many times what another check takes.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

from checked_backend.options import CheckOptions

RECHECK_RUNS, KNOWN_RUNS, LEAST = 60.0, 20.0, 4e-3
"""Estimates for a check of unknown cost, forward and backward: unchecked calls, and the least seconds."""

RECHECK_NODE, RECHECK_COMPILES = 3e-3, {False: 0.05, True: 1.5}
"""Estimates for a recheck of unknown cost: seconds for each node, and compilations.

The latter by whether the region computes in half precision. Such a region has its float64 twin and its operators
compiled; others seldom do.
"""

HELD = 2.0
"""The bucket holds this many of the dearest checks, so that nothing is spent in a burst after an idle hour."""

PATIENCE = 20
"""A region that was not called during this many checks of others is no longer waited for."""

TIMED = 8
"""Unchecked calls of a region that are timed, to estimate what a check will cost."""

SKIPPING, FOR_SKIPPING = 3e-6, 0.8
"""Seconds that skipping a call takes, and the part of the share that this may take up, however short calls are."""


@dataclass(slots=True)
class Meter:
    """The time that a check takes, without the time that the program would have taken anyway.

    Attributes:
        began: When the check began, or would have begun if it had run without a pause.
        affords: Says whether the check may take so many seconds altogether.
        own: Seconds of the program's own run.
        postponed: Seconds that the check takes altogether, if it waits until they are earned; 0 if it goes on.
    """

    clock: Callable[[], float]
    began: float
    affords: Callable[[float], bool]
    own: float = 0.0
    postponed: float = 0.0

    @property
    def spent(self) -> float:
        """Seconds that the check has taken so far, without the program's own."""
        return max(0.0, self.clock() - self.began - self.own)

    def may_take(self, seconds: float) -> bool:
        """Whether the check may take so much longer. If not, it is postponed until that is earned."""
        needed = self.spent + seconds
        if self.affords(needed):
            return True
        self.postponed = needed
        return False

    @contextmanager
    def program(self) -> Iterator[None]:
        """A block that the program would have run unchecked, too."""
        began = self.clock()
        try:
            yield
        finally:
            self.own += self.clock() - began


@dataclass(frozen=True, slots=True)
class Due:
    """A call that is to be checked.

    Attributes:
        recheck: Whether it is rechecked; None: at checks 1, 2, 4, 8, ...
    """

    recheck: bool | None = None


class Schedule:
    """Checks the first call of a region and every n-th after it.

    Attributes:
        limited: Whether a region may be left unchecked altogether.
        clock: Gives the time in seconds.
    """

    limited = False

    def __init__(self, every: int = 1, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self._every = every
        self._calls = 0

    def skip(self) -> bool:
        """Count a call that is surely not to be checked; False if `due` has to be asked. This takes next to no time."""
        if self._calls % self._every == 0:
            return False
        self._calls += 1
        return True

    def due(self) -> Due | None:
        """Count a call, and say how it is to be checked; None if it is not."""
        self._calls += 1
        return Due() if (self._calls - 1) % self._every == 0 else None

    def unchecked(self, run: Callable[..., Any], args: Sequence[Any]) -> Any:
        """Run a call that is not checked."""
        return run(*args)

    @contextmanager
    def charged(
        self, due: Due, compared: Callable[[bool], int], *, backward: bool = False, already: float = 0.0
    ) -> Iterator[Meter]:
        """A block that checks a call, or the backward pass of one. It is paid for, also if it raises.

        Args:
            compared: Gives how many calls, or backward passes, were compared so far. If none was in the block, the
                check is still to be made.
            already: Seconds that this part of the check has taken before the block.
        """
        before = compared(backward)
        meter = Meter(self.clock, self.clock() - already, self._affords(due))
        try:
            yield meter
        finally:
            self._pay(due, meter, made=compared(backward) > before, backward=backward)

    def _affords(self, due: Due) -> Callable[[float], bool]:
        return lambda _seconds: True

    def _pay(self, due: Due, meter: Meter, *, made: bool, backward: bool) -> None:
        """Pay for a check, which is still to be made unless it was ``made``."""


class Budget:
    """The bucket of a run.

    Attributes:
        share: The share of the run's time that checks may take.
        spent: Seconds that were paid so far.
        payments: How often a check was paid for.
        first: The region that is next, None before one is known.
        skipped: How many calls were skipped since the last payment.
        waiting: How many regions wait for their turn.
    """

    def __init__(self, share: float) -> None:
        self.spent = 0.0
        self.payments = 0
        self.first: RegionBudget | None = None
        self.skipped = 0
        self.waiting = 1
        self.share = share
        self._lock = threading.Lock()
        self._regions = WeakValueDictionary[int, RegionBudget]()
        self._numbers = itertools.count()
        self._saved = 0.0
        self._since = float("inf")

    def open(self, region: RegionBudget, now: float, building: float) -> int:
        """Take in a region that was built just now, and number it. Time in which regions are built earns nothing."""
        with self._lock:
            region.given = min((other.given for other in self._regions.values()), default=0.0)
            self._since = min(now, self._since + building)
            number = next(self._numbers)
            self._regions[number] = region
            return number

    def holds(self, now: float) -> float:
        """Seconds that are earned and not spent. Skipping is paid for, and must not use up all that is earned."""
        earned = self.share * max(0.0, now - self._since)
        return self._saved + earned - min(SKIPPING * self.skipped, FOR_SKIPPING * earned)

    def charge(self, region: RegionBudget, seconds: float, now: float) -> None:
        """Pay for a part of a check that has ended now, and find out which region is next."""
        with self._lock:
            self._saved = self.holds(now)
            self._since = max(self._since, now)
            self.spent += SKIPPING * self.skipped + seconds
            self.skipped = 0
            self.payments += 1
            region.given += seconds
            known = [one for one in self._regions.values() if one.needed < float("inf")]
            called = [one for one in known if self.payments - one.called <= PATIENCE]
            self.waiting = max(len(called), 1)
            self.first = min(called, key=lambda one: one.given + one.needed, default=None)
            capacity = HELD * max((one.dearest for one in known), default=0.0)
            self._saved = min(self._saved, capacity) - seconds


class RegionBudget(Schedule):
    """Checks a call of a region when the run has earned it.

    Args:
        building: Seconds that building the region took.
        recheck: Those that a recheck will take at most beyond running eager.

    Attributes:
        needed: Seconds that the next check will take; infinite before an unchecked call was timed.
        given: Seconds that its checks took.
        called: The number of payments of the run when the region was called last.
    """

    limited = True

    def __init__(
        self,
        budget: Budget,
        clock: Callable[[], float] = time.perf_counter,
        *,
        building: float = 0.0,
        recheck: float = 0.0,
    ) -> None:
        super().__init__(clock=clock)
        self.needed = float("inf")
        self.given = 0.0
        self.called = 0
        self._budget = budget
        self._unknown = recheck
        self._own = float("inf")
        self._timed = 0
        self._costs: dict[bool, float] = {}
        self._checks = 0
        self._was_postponed = False
        self._random = random.Random(budget.open(self, clock(), building))
        self._wait: int | None = None
        self._passed, self._since = 0, clock()

    def skip(self) -> bool:
        """Count a call that has earned no check yet. Most calls of a run come here."""
        if self._timed < TIMED or self._is_earned():
            return False
        self._budget.skipped += 1
        return True

    def due(self) -> Due | None:
        """Count a call, and say how it is to be checked; None if it is not."""
        return Due(self._recheck) if self._is_earned() else None

    def _is_earned(self) -> bool:
        """Whether the call that comes by is checked, now that a check is paid for."""
        budget, now = self._budget, self.clock()
        first, needed = budget.first, self.needed
        self.called = budget.payments
        self._passed += 1
        if first is not None and first is not self:
            needed += first.needed
        if budget.holds(now) < needed:
            return False
        if self._wait is None:
            self._wait = 0 if self._recheck else self._drawn(now)
        self._wait -= 1
        return self._wait < 0

    def _drawn(self, now: float) -> int:
        """A number of calls to let pass, of those that come by while the run earns as much as this check takes."""
        rate = self._passed / max(now - self._since, 1e-9)
        self._passed, self._since = 0, now
        calls = rate * self.needed / self._budget.share / self._budget.waiting
        return self._random.randrange(max(round(min(calls, 1e9)), 1))

    def unchecked(self, run: Callable[..., Any], args: Sequence[Any]) -> Any:
        """Run a call that is not checked; the first ones are timed."""
        self._budget.skipped += 1
        if self._timed >= TIMED:
            return run(*args)
        self._timed += 1
        began = self.clock()
        try:
            return run(*args)
        finally:
            self._own = min(self._own, self.clock() - began)
            self.needed = self._estimate()

    @property
    def _recheck(self) -> bool:
        """Whether the next check is one of 1, 2, 4, 8, ..."""
        return self._checks & (self._checks + 1) == 0

    @property
    def dearest(self) -> float:
        """The seconds that the dearest check takes."""
        return max((self.needed, *self._costs.values()))

    def _estimate(self) -> float:
        """The seconds that the next check will take: those of the last one of its kind, or an upper estimate."""
        runs, more = (RECHECK_RUNS, self._unknown) if self._recheck else (KNOWN_RUNS, 0.0)
        return self._costs.get(self._recheck, runs * self._own + more + LEAST)

    def _affords(self, due: Due) -> Callable[[float], bool]:
        # what was postponed has waited for its time; and where known noise does not suffice, something has changed
        free = not due.recheck or self._was_postponed
        return lambda seconds: free or self._budget.holds(self.clock()) >= seconds

    def _pay(self, due: Due, meter: Meter, *, made: bool, backward: bool) -> None:
        self._wait = None
        seconds = meter.spent
        so_far = self._costs.get(bool(due.recheck), 0.0) if backward else 0.0
        if meter.postponed:
            self._costs[True] = so_far + meter.postponed
            self._was_postponed = True
        elif due.recheck is not None and made:
            self._costs[due.recheck] = so_far + seconds
            self._was_postponed = self._was_postponed and not due.recheck
            self._checks += not backward
        self.needed = self._estimate()
        self._budget.charge(self, seconds, self.clock())


class Budgets(dict[float, Budget]):
    """The buckets of a run, by the share that is asked for."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__()
        self.clock = clock

    def of(self, share: float) -> Budget:
        """The bucket of all regions that ask for this share."""
        return self.setdefault(share, Budget(share))


_run = Budgets()
"""The process is one run: Dynamo hands over each region by itself, and nothing but the process holds them together."""


def clock_of_run() -> Callable[[], float]:
    """The clock by which regions that are built now are paid for."""
    return _run.clock


def schedule_of(
    options: CheckOptions, *, compiling: float, building: float, nodes: int, low_precision: bool
) -> Schedule:
    """The schedule of a region that was built just now.

    Args:
        compiling: Seconds that its candidate took to compile.
        building: Seconds that building it took altogether.
        low_precision: Whether it computes in half precision somewhere.
    """
    if options.budget is None:
        return Schedule(options.every)
    recheck = RECHECK_COMPILES[low_precision] * compiling + RECHECK_NODE * nodes
    return RegionBudget(_run.of(options.budget), _run.clock, building=building, recheck=recheck)
