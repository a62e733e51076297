"""Which calls of a region are checked, and the time that a check takes. Every n-th, or `budget.RegionBudget`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from typing import Any

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
