"""Which calls of a region are checked: every n-th, or as many as a share of the run's time pays for.

The share is one leaky bucket for the whole run, however many regions it has and however often they are compiled. Time
that passes fills it. Checks and skipped calls empty it, and it holds no more than a few checks. A check begins when
the bucket holds what it will take: what the last one of its kind took, or an upper estimate. The region that was given
least goes first.

A *recheck* is a check with all control runs, whatever earlier calls established: checks 1, 2, 4, 8, ... of a region.
It takes many times what another check takes. One half of what is earned is kept for the recheck that waits, so that
neither kind keeps the other from its turn.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from checked_backend.options import CheckOptions

__all__ = [
    "Budget",
    "BudgetSchedule",
    "Budgets",
    "Compared",
    "Due",
    "Meter",
    "Schedule",
    "budgets_used",
    "clock_of_run",
    "schedule_of",
]

FOR_RECHECKS = 0.5
"""The part of the earnings that is kept for the recheck that waits."""

RECHECK_RUNS, KNOWN_RUNS, LEAST = 60.0, 20.0, 4e-3
"""Estimates for a check of unknown cost, forward and backward: unchecked calls, and the least seconds."""

RECHECK_NODE, RECHECK_COMPILES = 3e-3, {False: 0.05, True: 1.5}
"""Estimates for a recheck of unknown cost: seconds for each node, and compilations.

The latter by whether the region computes in half precision. Such a region has its float64 twin and its operators
compiled; others seldom do.
"""

HELD = 3.0
"""The bucket holds this many of the dearest checks: a region's own, a recheck that waits, and one that is next."""

GONE = 2.0
"""A region that was not called for this many times its longest pause is no longer waited for."""

TIMED = 8
"""Unchecked calls of a region that are timed, to estimate what a check will cost."""

SKIPPING, FOR_SKIPPING = 3e-6, 0.8
"""Seconds that skipping a call takes, and the part of the share that this may take up, however short calls are."""

NOTICEABLE = 0.1
"""The part of all that was spent from which it is told that skipping calls takes too much."""

ASKING, FOR_ASKING = 60e-6, 0.05
"""Seconds that asking the bucket takes, and the part of the share that may go into asking in vain."""

Compared = Callable[[bool], int]
"""Gives how many calls, or backward passes, of a region were compared so far."""


class Meter:
    """The time that a check takes, without the time that the program would have taken anyway.

    Args:
        clock: Gives the time in seconds.
        affords: Says whether the check may take so many seconds altogether.
        already: Seconds that it has taken before.

    Attributes:
        own: Seconds of the program's own run.
        postponed: Seconds that the check takes altogether, if it waits until they are earned; 0 if it goes on.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        affords: Callable[[float], bool] = lambda _seconds: True,
        already: float = 0.0,
    ) -> None:
        self.own = 0.0
        self.postponed = 0.0
        self._affords = affords
        self._clock = clock
        self._began = clock() - already

    @property
    def spent(self) -> float:
        """Seconds that the check has taken so far, without the program's own."""
        return max(0.0, self._clock() - self._began - self.own)

    def may_take(self, seconds: float) -> bool:
        """Whether the check may take so much longer. If not, it is postponed until that is earned."""
        needed = self.spent + seconds
        if self._affords(needed):
            return True
        self.postponed = needed
        return False

    @contextmanager
    def program(self) -> Iterator[None]:
        """A block that the program would have run unchecked, too."""
        began = self._clock()
        try:
            yield
        finally:
            self.own += self._clock() - began


@dataclass(frozen=True, slots=True)
class Due:
    """A call that is to be checked.

    Attributes:
        recheck: Whether it is rechecked; None: at checks 1, 2, 4, 8, ...
    """

    recheck: bool | None = None


class Schedule:
    """Checks the first call of a region and every n-th after it.

    Args:
        every: n.

    Attributes:
        limited: Whether a region may be left unchecked altogether.
        clock: Gives the time in seconds.
    """

    limited = False

    def __init__(self, every: int = 1, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self._every = every
        self._calls = 0

    @property
    def dear(self) -> bool:
        """Whether leaving calls unchecked takes more time than it may."""
        return False

    def quiet(self) -> bool:
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
    def paid(self, due: Due, compared: Compared, *, backward: bool = False, already: float = 0.0) -> Iterator[Meter]:
        """A block that checks a call, or the backward pass of one. It is paid for, also if it raises.

        Args:
            due: How the call is checked.
            compared: Gives how many calls, or backward passes, were compared so far. If none was in the block, the
                check is still to be made.
            backward: Whether it is a backward pass.
            already: Seconds that this part of the check has taken before the block.
        """
        yield Meter(self.clock, already=already)


class Budget:
    """The bucket of a run.

    Args:
        share: The share of the run's time that checks may take.

    Attributes:
        spent: Seconds that were paid so far.
    """

    def __init__(self, share: float) -> None:
        self.spent = 0.0
        self._share = share
        self._lock = threading.Lock()
        self._regions: list[weakref.ref[BudgetSchedule]] = []
        self._last: float | None = None
        self._holds = 0.0
        self._for_skipping = 0.0
        self._excess = 0.0

    @property
    def dear(self) -> bool:
        """Whether skipping calls takes noticeably more than its part of the earnings."""
        return self._excess > NOTICEABLE * self.spent

    def open(self, region: BudgetSchedule, now: float, *, compiling: float, building: float) -> None:
        """Take in a region that was built just now. Compiling earns nothing, and building is paid for."""
        with self._lock:
            if self._last is not None:
                self._last = min(now, self._last + compiling)
            self._pay(building)
            self._regions.append(weakref.ref(region))

    def ask(self, region: BudgetSchedule, now: float) -> Due | None:
        """How a call is checked; None if no check is earned."""
        with self._lock:
            self._earn(now)
            self._pay_for_skipping(region)
            regions = [one for one in self._alive() if one is region or one.is_called(now)]
            known = [one for one in regions if one.own < float("inf")]
            if region not in known:
                return None
            self._holds = min(self._holds, HELD * max(one.estimate(step) for one in known for step in one.steps()))
            longest = float("inf")
            for recheck in region.steps():
                needed = region.estimate(recheck) + self._kept(region, recheck, known, now)
                if needed <= self._holds:
                    return Due(recheck)
                longest = min(longest, (needed - self._holds) / self._share)
            region.rest(now + max(longest, ASKING * len(self._regions) / (FOR_ASKING * self._share)))
            return None

    def _kept(self, region: BudgetSchedule, recheck: bool, others: Sequence[BudgetSchedule], now: float) -> float:
        """Seconds that the bucket keeps for other checks than this one."""
        kept = 0.0
        waiting = min((one for one in others if one.wants_recheck), key=_given, default=None)
        if waiting is not None and not (recheck and waiting is region):
            kept = min(waiting.estimate(True), FOR_RECHECKS * self._share * (now - waiting.since))
        if not recheck:
            first = min(others, key=_given)
            kept += 0.0 if first is region or not first.checks else first.estimate(False)
        return kept

    def charge(self, region: BudgetSchedule, seconds: float, now: float) -> None:
        """Pay for a part of a check.

        Args:
            seconds: The time that it took beyond the candidate's own run.
            now: The time after it.
        """
        with self._lock:
            self._earn(now)
            self._pay(seconds)
            region.given += seconds

    def holds(self, seconds: float) -> bool:
        """Whether so much is earned."""
        with self._lock:
            return self._holds >= seconds

    def _earn(self, now: float) -> None:
        last = now if self._last is None else self._last
        earned = self._share * max(0.0, now - last)
        self._last = max(last, now)
        self._holds += earned
        self._for_skipping += FOR_SKIPPING * earned

    def _pay(self, seconds: float) -> None:
        self._holds -= seconds
        self.spent += seconds

    def _pay_for_skipping(self, region: BudgetSchedule) -> None:
        """Pay for unchecked calls. That time is gone whatever is checked, so that it must not use up all earnings."""
        seconds, region.unpaid = region.unpaid, 0.0
        paid = min(seconds, self._for_skipping)
        self._for_skipping -= paid
        self._excess += seconds - paid
        self._holds -= paid
        self.spent += seconds

    def _alive(self) -> Iterator[BudgetSchedule]:
        regions = [(ref, ref()) for ref in self._regions]
        self._regions = [ref for ref, region in regions if region is not None]
        return (region for _, region in regions if region is not None)


def _given(region: BudgetSchedule) -> float:
    return region.given


class BudgetSchedule(Schedule):
    """Checks a call of a region when the run has earned it.

    Args:
        budget: The bucket of the run.
        clock: Gives the time in seconds.
        compiling: Seconds that the region's candidate took to compile.
        building: Seconds that building the region took beyond that.
        nodes: The number of nodes of its graph.
        low_precision: Whether it computes in half precision somewhere.

    Attributes:
        own: Seconds that an unchecked call takes, the shortest so far.
        checks: How many checks of results were made.
        given: Seconds that its checks took.
        since: When it began to wait for the next recheck.
        unpaid: Seconds that skipping its calls took and that are not paid for yet.
    """

    limited = True

    def __init__(
        self,
        budget: Budget,
        clock: Callable[[], float] = time.perf_counter,
        *,
        compiling: float = 0.0,
        building: float = 0.0,
        nodes: int = 0,
        low_precision: bool = False,
    ) -> None:
        super().__init__(clock=clock)
        self.own = float("inf")
        self.checks = 0
        self.given = self.unpaid = 0.0
        self.since = now = clock()
        self._budget = budget
        self._unknown = RECHECK_COMPILES[low_precision] * compiling + RECHECK_NODE * nodes
        self._costs: dict[tuple[bool, bool], float] = {}
        self._recheck_at = 1
        self._was_postponed = False
        self._called = float("-inf")
        self._pause = 0.0
        self._quiet_until = float("-inf")
        self._timed = 0
        budget.open(self, now, compiling=compiling, building=building)

    @property
    def dear(self) -> bool:
        """Whether leaving calls unchecked takes more than its part of the share."""
        return self._budget.dear

    def quiet(self) -> bool:
        """Count a call that has earned no check yet. Most calls of a run come here."""
        now = self.clock()
        if now >= self._quiet_until:
            return False
        self._comes(now)
        self.unpaid += SKIPPING
        return True

    def due(self) -> Due | None:
        """Count a call, and say how it is to be checked; None if it is not."""
        now = self.clock()
        self._comes(now)
        return self._budget.ask(self, now)

    def _comes(self, now: float) -> None:
        if now - self._called < float("inf"):
            self._pause = max(self._pause, now - self._called)
        self._called = now

    def rest(self, until: float) -> None:
        """Ask no more until a time."""
        self._quiet_until = until

    def unchecked(self, run: Callable[..., Any], args: Sequence[Any]) -> Any:
        """Run a call that is not checked."""
        self.unpaid += ASKING
        if self._timed >= TIMED:
            return run(*args)
        self._timed += 1
        began = self.clock()
        try:
            return run(*args)
        finally:
            self.own = min(self.own, self.clock() - began)

    @property
    def wants_recheck(self) -> bool:
        """Whether the next check is a recheck."""
        return self.checks + 1 >= self._recheck_at

    def steps(self) -> Iterator[bool]:
        """The checks that could be made, by whether they are rechecks, in the order in which they are tried."""
        if self.wants_recheck:
            yield True
        if self.checks:  # while a recheck waits, calls are held against known noise
            yield False

    def is_called(self, now: float) -> bool:
        """Whether the region is still called, as far as its pauses tell."""
        return now - self._called <= GONE * self._pause

    def estimate(self, recheck: bool) -> float:
        """The seconds that a check will take: those of the last one, or an upper estimate."""
        known = [cost for (kind, _), cost in self._costs.items() if kind is recheck]
        if known:
            return sum(known)
        runs, more = (RECHECK_RUNS, self._unknown) if recheck else (KNOWN_RUNS, 0.0)
        return runs * self.own + more + LEAST

    @contextmanager
    def paid(self, due: Due, compared: Compared, *, backward: bool = False, already: float = 0.0) -> Iterator[Meter]:
        """A block that checks a call, or the backward pass of one. It is paid for, also if it raises."""
        recheck = due.recheck
        began, before = self.clock() - already, compared(backward)
        # what was postponed has waited for its time; and where known noise does not suffice, something has changed
        free = not recheck or self._was_postponed
        meter = Meter(self.clock, lambda seconds: free or self._budget.holds(seconds), already)
        try:
            yield meter
        finally:
            now = self.clock()
            seconds = max(0.0, now - began - meter.own)
            if meter.postponed:
                self._costs[True, backward] = meter.postponed
                self._was_postponed = True
            elif recheck is not None and compared(backward) > before:
                self._costs[recheck, backward] = seconds
                self._was_postponed = self._was_postponed and not recheck
                if not backward:
                    self._checked(recheck, now)
            self._budget.charge(self, seconds, now)

    def _checked(self, recheck: bool, now: float) -> None:
        self.checks += 1
        while recheck and self._recheck_at <= self.checks:
            self._recheck_at *= 2
        if recheck or self.checks + 1 == self._recheck_at:
            self.since = now


class Budgets:
    """The buckets of a run: one for each share that is asked for.

    Args:
        clock: Gives the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self._lock = threading.Lock()
        self._budgets: dict[float, Budget] = {}

    def of(self, share: float) -> Budget:
        """The bucket of all regions that ask for this share."""
        with self._lock:
            return self._budgets.setdefault(share, Budget(share))


# The process is one run: Dynamo hands over each region by itself, and nothing but the process holds them together.
_budgets: ContextVar[Budgets] = ContextVar("checked_backend_budgets", default=Budgets())  # noqa: B039


@contextmanager
def budgets_used(budgets: Budgets) -> Iterator[None]:
    """Let regions that are built in a block spend from other buckets than the process's."""
    token = _budgets.set(budgets)
    try:
        yield
    finally:
        _budgets.reset(token)


def clock_of_run() -> Callable[[], float]:
    """The clock by which regions that are built now are paid for."""
    return _budgets.get().clock


def schedule_of(
    options: CheckOptions, *, compiling: float, building: float, nodes: int, low_precision: bool
) -> Schedule:
    """The schedule of a region that was built just now.

    Args:
        compiling: Seconds that its candidate took to compile.
        building: Seconds that building it took beyond that.
        nodes: The number of nodes of its graph.
        low_precision: Whether it computes in half precision somewhere.
    """
    if options.budget is None:
        return Schedule(options.every)
    budgets = _budgets.get()
    return BudgetSchedule(
        budgets.of(options.budget),
        budgets.clock,
        compiling=compiling,
        building=building,
        nodes=nodes,
        low_precision=low_precision,
    )
