"""Which calls of a region are checked."""

from __future__ import annotations

import time

__all__ = ["GrowingDistance", "Schedule"]

FARTHEST = 1024
"""Occasions that are left out at most before what failed is tried again."""


class GrowingDistance:
    """When to try again what failed: after one occasion that is left out, then after two, four, ..."""

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


class Schedule:
    """Every n-th call, or as many as a share of the run time allows.

    Args:
        every: Check the first call and every n-th after it.
        budget: Instead of ``every``: the share of the time since the first call that checking may take. The first
            call is always checked.
    """

    def __init__(self, every: int, budget: float | None) -> None:
        self._every = every
        self._budget = budget
        self._calls = 0
        self._spent = 0.0
        self._began = 0.0

    def due(self) -> bool:
        """Count a call, and say whether it is to be checked."""
        number = self._calls
        self._calls += 1
        if self._budget is None:
            return number % self._every == 0
        now = time.perf_counter()
        if number == 0:
            self._began = now
            return True
        return self._spent <= self._budget * (now - self._began)

    def spent(self, seconds: float) -> None:
        """Note the time that a check took beyond the candidate's own run.

        The first call's check, with its check, is set-up and does not count.
        """
        if self._calls > 1:
            self._spent += seconds
        else:
            self._began = time.perf_counter()
