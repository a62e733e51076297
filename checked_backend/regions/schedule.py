"""Decide which calls of a region are checked, and which parts of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

from checked_backend.options import CheckOptions
from checked_backend.regions.budget import OVERHEAD, Account
from checked_backend.regions.turn import Due

__all__ = [
    "Accounts",
    "Compared",
    "GrowingDistance",
    "Meter",
    "Schedule",
    "accounts_used",
    "clock_of_run",
    "schedule_of",
]

TIMED = 8
"""How many unchecked calls of a region are timed, to estimate what a check will cost."""

SKIPPING = 6.0
"""What skipping a call takes altogether, in terms of what the schedule takes to see that no check is earned."""

FARTHEST = 1024
"""The most occasions that are left out before a failed attempt is tried again."""


class GrowingDistance:
    """Decides when to try again after a failure: after one occasion that is left out, then after two, four, ..."""

    def __init__(self) -> None:
        self._distance = 0
        self._left = 0

    def due(self) -> bool:
        """Count an occasion, and say whether to try."""
        if self._left:
            self._left -= 1
            return False
        return True

    def failed(self) -> None:
        """Note that trying failed."""
        self._distance = min(2 * self._distance or 1, FARTHEST)
        self._left = self._distance

    def succeeded(self) -> None:
        """Note that it did not."""
        self._distance = self._left = 0


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


Compared = Callable[[bool], int]
"""Gives how many calls, or backward passes, of a region were compared so far."""


class Schedule(Protocol):
    """Says which calls of one region are checked.

    Attributes:
        limited: Whether a region may be left unchecked altogether.
        clock: Gives the time in seconds.
    """

    limited: bool
    clock: Callable[[], float]

    def quiet(self) -> bool:
        """Count a call that is surely not to be checked; False if `due` has to be asked. This takes next to no time."""

    def due(self) -> Due | None:
        """Count a call, and say what of it is to be checked; None: nothing is."""

    def unchecked(self, run: Callable[..., Any], args: Sequence[Any]) -> Any:
        """Run a call that is not checked."""

    @property
    def dear(self) -> bool:
        """Whether leaving calls unchecked takes more time than it may."""

    def paid(
        self, due: Due, compared: Compared, *, backward: bool = False, already: float = 0.0
    ) -> AbstractContextManager[Meter]:
        """A block that checks a call, or the backward pass of one; entering it gives its `Meter`.

        Args:
            due: The parts of the call that are checked.
            compared: Gives how many calls, or backward passes, were compared so far.
            backward: Whether it is a backward pass.
            already: Seconds that this part of the check has taken before the block.
        """

    def has_gradients(self) -> None:
        """Note that the region has gradients to check."""


class EveryNth:
    """The first call and every n-th after it.

    Args:
        every: n.
    """

    limited = False

    def __init__(self, every: int) -> None:
        self.clock = time.perf_counter
        self._every = every
        self._calls = 0

    def quiet(self) -> bool:
        """Count a call that is not to be checked."""
        if self._calls % self._every == 0:
            return False
        self._calls += 1
        return True

    def due(self) -> Due | None:
        """Count a call, and say whether it is to be checked."""
        due = self._calls % self._every == 0
        self._calls += 1
        return Due() if due else None

    def unchecked(self, run: Callable[..., Any], args: Sequence[Any]) -> Any:
        """Run a call that is not checked."""
        return run(*args)

    @property
    def dear(self) -> bool:
        """No time was set for it."""
        return False

    @contextmanager
    def paid(self, _due: Due, _compared: Compared, *, backward: bool = False, already: float = 0.0) -> Iterator[Meter]:
        """A block that checks a call, or the backward pass of one."""
        yield Meter(self.clock, already=already)

    def has_gradients(self) -> None:
        """Nothing depends on that here."""


class Earned:
    """Checks a call when the account of the run has earned it.

    Args:
        clock: Gives the time in seconds.
        compiling: Seconds that the region's candidate took to compile.
        building: Seconds that building the region took beyond that.
        nodes: The number of nodes of its graph.
        low_precision: Whether it computes in half precision somewhere.
    """

    limited = True

    def __init__(
        self,
        account: Account,
        clock: Callable[[], float],
        *,
        compiling: float,
        building: float,
        nodes: int,
        low_precision: bool,
    ) -> None:
        self._account = account
        self.clock = clock
        self._turn = account.region(
            now=clock(), compiling=compiling, building=building, nodes=nodes, low_precision=low_precision
        )
        self._asked = 0.0
        self._timed = 0

    def quiet(self) -> bool:
        """Count a call that has earned no check yet. What that takes is paid for."""
        turn, now = self._turn, self.clock()
        if not turn.passes(now, self._account.events):
            return False
        turn.unpaid += SKIPPING * max(0.0, self.clock() - now)
        return True

    def due(self) -> Due | None:
        """Count a call, and say what of it is to be checked."""
        self._asked = now = self.clock()
        step = self._account.ask(self._turn, now)
        return None if step is None else self._turn.due(step)

    def unchecked(self, run: Callable[..., Any], args: Sequence[Any]) -> Any:
        """Run a call that is not checked. The time that skipping took is paid for too."""
        turn, began = self._turn, self.clock()
        turn.unpaid += max(0.0, began - self._asked) + OVERHEAD
        try:
            return run(*args)
        finally:
            if self._timed < TIMED:
                self._timed += 1
                turn.own = min(turn.own, self.clock() - began)
                turn.wake()

    @property
    def dear(self) -> bool:
        """Whether leaving calls unchecked takes more than its part of the share."""
        return self._account.dear

    @contextmanager
    def paid(self, due: Due, compared: Compared, *, backward: bool = False, already: float = 0.0) -> Iterator[Meter]:
        """A block that checks a call, or the backward pass of one. It is paid for, also if it raises.

        If nothing could be compared, the step is still to be taken.
        """
        account, turn, began = self._account, self._turn, self.clock() - already
        before = compared(backward)
        meter = Meter(self.clock, lambda seconds: account.affords(turn, due.step, seconds, backward=backward), already)
        try:
            yield meter
        finally:
            now = self.clock()
            seconds = max(0.0, now - began - meter.own)
            if meter.postponed and due.step is not None:
                account.postpone(turn, due.step, seconds, now, meter.postponed, backward=backward)
            else:
                step = due.step if compared(backward) > before else None
                account.charge(turn, step, seconds, now, backward=backward)

    def has_gradients(self) -> None:
        """Note that the region has gradients to check."""
        self._turn.has_gradients()


class Accounts:
    """The accounts of a run: one for each share that is asked for.

    Args:
        clock: Gives the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self._lock = threading.Lock()
        self._accounts: dict[float, Account] = {}

    def of(self, share: float) -> Account:
        """The account of all regions that ask for this share."""
        with self._lock:
            return self._accounts.setdefault(share, Account(share))


# The process is one run: Dynamo hands over each region by itself, and nothing but the process holds them together.
_accounts: ContextVar[Accounts] = ContextVar("checked_backend_accounts", default=Accounts())  # noqa: B039


@contextmanager
def accounts_used(accounts: Accounts) -> Iterator[None]:
    """Let regions that are built in a block spend from other accounts than the process's."""
    token = _accounts.set(accounts)
    try:
        yield
    finally:
        _accounts.reset(token)


def clock_of_run() -> Callable[[], float]:
    """The clock by which regions that are built now are paid for."""
    return _accounts.get().clock


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
        return EveryNth(options.every)
    accounts = _accounts.get()
    return Earned(
        accounts.of(options.budget),
        accounts.clock,
        compiling=compiling,
        building=building,
        nodes=nodes,
        low_precision=low_precision,
    )
