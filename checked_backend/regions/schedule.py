"""Which calls of a region are checked, and the time that a check takes.

Every n-th, or as many as a share of the run's time pays for. The share is one bucket for the whole run, however many
regions it has and however often they are compiled. Time that passes fills it. Checks and skipped calls empty it, below
zero if a check takes longer than was expected. A check begins when the bucket holds what it is expected to take. Next
is the region that was given least time. Others begin earlier only if they leave in the bucket what it needs.

Once a check is paid for, its call is drawn from as many as come by while its time is earned. A program often does the
same things in turn, and checks that came as soon as they are paid for could meet the same one each time. Only a recheck
comes at once, as it may take many times what another check takes.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from math import inf
from typing import Any
from weakref import WeakSet

from checked_backend.options import CheckOptions

clock: Callable[[], float] = time.perf_counter
"""The time in seconds by which checks are paid for."""


def is_recheck(number: int) -> bool:
    """Whether a check is one of 1, 2, 4, 8, ...: at first with all control runs, later with those that it needs."""
    return number & (number - 1) == 0


@dataclass(slots=True)
class TimedCheck:
    """The check of a call and then of its backward passes, each timed without the program's own run.

    Attributes:
        number: Its number among the checks of the region, from 1; 0 if the schedule does not number them.
        limit: Seconds that a pass may take. What takes longer is postponed.
        began: When the pass began, or would have begun if it had run without a pause.
        own: Seconds of the program's own run in it.
        postponed: Seconds that it takes in all, if it is postponed until they are earned; else 0.
        made: Whether values were compared in it. If not, the check is still to be made.
    """

    number: int = 0
    limit: float = inf
    began: float = 0.0
    own: float = 0.0
    postponed: float = 0.0
    made: bool = False

    @property
    def spent(self) -> float:
        """Seconds that the pass has taken so far."""
        return max(0.0, clock() - self.began - self.own)

    def may_take(self, seconds: float) -> bool:
        """Whether the pass may take so much longer. If not, it is postponed."""
        needed = self.spent + seconds
        if needed > self.limit:
            self.postponed = needed
        return needed <= self.limit

    @contextmanager
    def program(self) -> Iterator[None]:
        """A block that the program would have run unchecked, too."""
        began = clock()
        try:
            yield
        finally:
            self.own += clock() - began


class Schedule:
    """Checks the first call of a region and every n-th after it."""

    def __init__(self, every: int = 1) -> None:
        self._every = every
        self._calls = 0
        self._is_due = False
        self._number, self._limit = 0, inf

    def skip(self) -> bool:
        """Count a call, and say whether it is surely not checked. This takes next to no time."""
        self._is_due = self._is_due or self._comes_due()
        return not self._is_due

    def due(self) -> TimedCheck | None:
        """Say how a call is checked that is not skipped; None if it is not checked."""
        if not (self._is_due or self._comes_due()):
            return None
        self._is_due = False
        return TimedCheck(self._number, self._limit)

    def _comes_due(self) -> bool:
        """Count a call. Return whether it is checked."""
        self._calls += 1
        return (self._calls - 1) % self._every == 0

    def unchecked(self, run: Callable[..., Any], args: Sequence[Any]) -> Any:
        """Run a call that is neither skipped nor checked."""
        return run(*args)

    @contextmanager
    def charged(self, check: TimedCheck, *, backward: bool = False, already: float = 0.0) -> Iterator[None]:
        """A block that checks a call, or the backward pass of one. It is paid for, also if it raises.

        Args:
            already: Seconds that the pass took before the block.
        """
        check.began, check.own, check.postponed, check.made = clock() - already, 0.0, 0.0, False
        try:
            yield
        finally:
            self._pay(check, backward=backward)

    def _pay(self, check: TimedCheck, *, backward: bool) -> None:
        """Pay for a pass of a check that ends now."""


RUNS, NODE, COMPILES = 30.0, 3e-3, 1.5
"""What a check of unknown cost is expected to take: unchecked calls; the first one also seconds for each node, and in
half precision compilations, as such a region has its float64 twin and its operators compiled."""

TIMED = 8
"""The first calls of a region are timed for that, so many of them."""

HELD = 2.0
"""The bucket holds this many of the dearest checks, so that an idle hour is not spent in a burst."""

SKIPPING, FOR_SKIPPING = 3e-6, 0.8
"""Seconds that skipping a call takes, and the part of the share that this may take up, however short calls are."""


class Budget:
    """The bucket of a run.

    Attributes:
        share: The share of the run's time that checks may take.
        spent: Seconds that were paid so far.
        calls: How often its regions were called.
        random: Draws the calls that are checked.
    """

    def __init__(self, share: float) -> None:
        self.share = share
        self.spent, self.calls = 0.0, 0
        self.random = random.Random(0)
        self._lock = threading.Lock()
        self._regions = WeakSet[RegionBudget]()
        self._next: RegionBudget | None = None
        self._dearest = 0.0
        self._saved, self._since, self._paid_calls = 0.0, inf, 0

    def open(self, region: RegionBudget, building: float) -> None:
        """Take in a region. The time in which it was built earns nothing."""
        with self._lock:
            region.given = min((one.given for one in self._called()), default=0.0)
            self._regions.add(region)
            self._since = min(clock(), self._since + building)

    def holds(self, now: float) -> float:
        """Seconds that are earned and not spent. Skipping is paid for, and must not use up all that is earned."""
        earned = self.share * max(0.0, now - self._since)
        return self._saved + earned - min(SKIPPING * (self.calls - self._paid_calls), FOR_SKIPPING * earned)

    def next(self, caller: RegionBudget) -> RegionBudget:
        """The region that was given least, of those that the program still calls."""
        first = self._next
        if first is None or not first.is_called:
            with self._lock:
                first = self._next = min([caller, *self._called()], key=lambda one: (one.given, one.needed))
        return first

    def charge(self, region: RegionBudget, seconds: float) -> None:
        """Pay for what ends now."""
        with self._lock:
            now = clock()
            self._dearest = max(self._dearest, seconds, *(one.needed for one in self._called()))
            self._saved = min(self.holds(now), HELD * self._dearest) - seconds
            self._since = max(self._since, now)
            self.spent += SKIPPING * (self.calls - self._paid_calls) + seconds
            self._paid_calls = self.calls
            region.given += seconds
            self._next = None

    def _called(self) -> Iterator[RegionBudget]:
        return (region for region in self._regions if region.is_called)


budget_of = cache(Budget)
"""The bucket of all regions that ask for a share. The process is one run: Dynamo hands over each region by itself."""


class RegionBudget(Schedule):
    """Checks a call of a region when the run has earned it.

    Args:
        building: Seconds that building the region took.
        first: Seconds that its first check is expected to take beside its runs.

    Attributes:
        needed: Seconds that the next check is expected to take; infinite before a call was timed.
        given: Seconds that its checks took.
    """

    def __init__(self, budget: Budget, *, building: float = 0.0, first: float = 0.0) -> None:
        super().__init__()
        self.needed, self.given = inf, 0.0
        self._budget, self._built = budget, clock()
        self._opened = self._called = budget.calls
        self._number = 1
        self._own, self._first = inf, first
        self._costs: dict[bool, float] = {}
        self._was_postponed = False
        self._wait: int | None = None
        budget.open(self, building)

    @property
    def is_called(self) -> bool:
        """Whether the program still calls it: it has not been away for longer than it had been there."""
        return self.needed < inf and self._budget.calls - self._called <= self._called - self._opened

    def skip(self) -> bool:
        """Count a call that has earned no check. Most calls of a run come here."""
        return self._calls >= TIMED and super().skip()

    def _comes_due(self) -> bool:
        budget, now = self._budget, clock()
        budget.calls += 1
        self._calls += 1
        self._called = budget.calls
        holds = budget.holds(now)
        if holds < self.needed:
            return False
        ahead = budget.next(self)
        if ahead is not self and holds < self.needed + ahead.needed:
            return False
        recheck = is_recheck(self._number)
        # what was postponed has waited for its time; and where known noise does not suffice, something has changed
        self._limit = holds if recheck and not self._was_postponed else inf
        wait = self._wait
        if wait is None:
            to_earn = self._calls / max(now - self._built, 1e-9) * self.needed / budget.share
            wait = 0 if recheck else int(to_earn * budget.random.random())
        self._wait = wait - 1
        return wait <= 0

    def unchecked(self, run: Callable[..., Any], args: Sequence[Any]) -> Any:
        """Run a call, and time it."""
        began = clock()
        try:
            return run(*args)
        finally:
            self._own = min(self._own, clock() - began)
            self._expect()

    def _expect(self) -> None:
        """Expect of the next check what the last one of its kind took."""
        self.needed = self._costs.get(is_recheck(self._number), RUNS * self._own + self._first)

    def _pay(self, check: TimedCheck, *, backward: bool) -> None:
        seconds, recheck = check.spent, is_recheck(check.number)
        self._budget.charge(self, seconds)
        self._wait = None
        if check.postponed:
            self._costs[True], self._was_postponed = check.postponed, True
        elif check.made:
            before = self._costs.pop(recheck, 0.0)
            if check.number > 1:  # the first one is no measure: it compiles
                self._costs[recheck] = seconds + (before if backward else 0.0)
            if not backward:
                self._number += 1
                self._first = 0.0
                self._was_postponed = self._was_postponed and not recheck
        self._expect()


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
    first = NODE * nodes + (COMPILES * compiling if low_precision else 0.0)
    return RegionBudget(budget_of(options.budget), building=building, first=first)
