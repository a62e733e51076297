"""The account of a run: which checks its share of time has earned, and whose turn it is.

The whole run has one account, however many regions it has and however often they are compiled. It earns a share of
the time that passes, and pays for what checks take. A check that is not earned yet waits. It also waits while another
region waits that was checked longer ago. An account knows the clock only through the times that it is given: equal
events at equal times give equal decisions.

A *recheck* is a check with all control runs, whatever earlier calls established. Other checks compare with the noise
that earlier calls established.

Three things keep checks from coming in bursts. After a check comes a rest. What was earned while nothing could be
checked, or for an estimate that proved too high, is paid out little by little. Results and gradients are rechecked
in different calls.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator

from checked_backend.regions.turn import RECHECKS, CheckStep, Turn

__all__ = ["ASKING", "OVERHEAD", "Account"]

PACE = 2.0
"""How many times the asked share may be spent for a moment, where several checks are earned already."""

PAID_OUT = 0.2
"""How much more than the present earnings becomes available if much was earned before, relative."""

SAVED_FOR_RECHECKS = 0.5
"""The part of the earnings that is saved for a recheck while one waits. The rest is for other checks."""

RECHECK_NODE, RECHECK_COMPILES = 3e-3, {False: 0.05, True: 1.5}
"""Estimates for a recheck of unknown cost: seconds for each node, and compilations.

The latter by whether the region computes in half precision. Such a region has its float64 twin and its operators
compiled; others seldom do.
"""

FIRST_OF_ALL = 0.1
"""Seconds that the first recheck of the process costs beyond that, because torch prepares things at first use."""

FOR_SKIPPING = 0.8
"""The part of the share that leaving calls unchecked may take up. The rest is for checks, however short calls are.

It is a fifth: so much more than the share may be spent in all.
"""

OVERHEAD = 2e-6
"""Seconds that a skipped call takes beyond its measured time."""

NOTICEABLE = 0.1
"""The part of all that was spent from which it is told that skipping calls takes too much."""

ASKING, FOR_ASKING = 60e-6, 0.05
"""Seconds that asking takes, and the part of the share that may go into asking in vain."""


class Account:
    """The time that a run may spend on checks, and has spent.

    Args:
        share: The share of the run's time that checks may take.

    Attributes:
        spent: Seconds that were paid so far.
        events: A number that changes when a region may be earned a check earlier than it was told.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._lock = threading.Lock()
        self._turns: list[weakref.ref[Turn]] = []
        self._count = 0
        self._last: float | None = None
        self._available = 0.0
        self._surplus = 0.0
        self._most = float("inf")
        self._for_skipping = 0.0
        self._excess = 0.0
        self._saved = 0.0
        self._goal = 0.0
        self._rest_until = float("-inf")
        self._has_rechecked = False
        self.events = 0
        self.spent = 0.0

    def region(
        self,
        *,
        now: float,
        compiling: float = 0.0,
        building: float = 0.0,
        nodes: int = 0,
        low_precision: bool = False,
    ) -> Turn:
        """Open the account of a region that was built just now.

        Args:
            compiling: Seconds that its candidate took to compile. Nothing is earned in these.
            building: Seconds that building it took beyond that.
            low_precision: Whether it computes in half precision somewhere.
        """
        with self._lock:
            if self._last is not None:
                self._last = min(now, self._last + compiling)
            self._pay(building)
            self._count += 1
            unknown = RECHECK_COMPILES[low_precision] * compiling + RECHECK_NODE * nodes
            turn = Turn(self._count, unknown + FIRST_OF_ALL * (not self._has_rechecked))
            self._turns.append(weakref.ref(turn))
            return turn

    def ask(self, turn: Turn, now: float) -> CheckStep | None:
        """Count a call of a region, and return the step that is earned; None if none is."""
        with self._lock:
            self._earn(now)
            turn.comes(now)
            self._pay_for_skipping(turn.unpaid)
            turn.unpaid = 0.0
            self._put_by()
            longest = float("inf")
            for step in turn.steps():
                wait = self._wait(turn, step, now)
                if wait <= 0.0:
                    turn.begins(step, now)
                    self.events += 1
                    return step
                longest = min(longest, wait)
                recheck = step in RECHECKS
                if turn.own < float("inf") and turn.waits.get(recheck) is not step:
                    turn.waits[recheck] = step
                    self._limit(now)
            if turn.own < float("inf"):
                turn.rest(now + max(longest, self._asking()), self.events)
            return None

    def _asking(self) -> float:
        """Seconds in which a region may ask in vain once, so that all of them together seldom do."""
        return ASKING * len(self._turns) / (FOR_ASKING * self._share)

    def charge(self, turn: Turn, step: CheckStep | None, seconds: float, now: float, *, backward: bool = False) -> None:
        """Pay for the forward or the backward part of a check.

        Args:
            step: The step; None for a check that was made whether it was earned or not.
            seconds: The time that it took beyond the candidate's own run.
            now: The time after it.
            backward: Whether it was the backward part.
        """
        with self._lock:
            self.events += 1
            self._earn(now)
            self._pay(seconds)
            if step is not None:
                turn.cost(step, backward, seconds)
                if step in RECHECKS:
                    self._saved = max(0.0, self._saved - seconds)
                    self._learn()
            self._rest_until = max(self._rest_until, turn.called) + seconds / (PACE * self._share)
            self._limit(now)

    def affords(self, turn: Turn, step: CheckStep | None, seconds: float, *, backward: bool) -> bool:
        """Whether the forward or the backward part of a check may take so many seconds altogether.

        What was postponed before has waited until these were earned. Only a recheck is postponed: where a check with
        known noise needs more, something has changed.
        """
        if step not in RECHECKS or RECHECKS[step] is not backward or turn.was_postponed(step):
            return True
        with self._lock:
            return self._available >= seconds

    def postpone(
        self, turn: Turn, step: CheckStep, seconds: float, now: float, needed: float, *, backward: bool
    ) -> None:
        """Pay for a part of a check that is to be repeated when all that it takes is earned.

        Args:
            seconds: The time that it took so far.
            now: The time after it.
            needed: Seconds that it will take when it is repeated.
            backward: Whether it was the backward part.
        """
        with self._lock:
            self.events += 1
            self._earn(now)
            self._pay(seconds)
            turn.postpone(step, backward, needed)
            self._limit(now)

    def _learn(self) -> None:
        if not self._has_rechecked:
            self._has_rechecked = True
            for turn in self._alive():
                turn.unknown -= FIRST_OF_ALL

    def _earn(self, now: float) -> None:
        if self._last is None:
            self._last = now
        passed = max(0.0, now - self._last)
        self._last = max(self._last, now)
        paid_out = min(self._surplus, PAID_OUT * self._share * passed)
        self._surplus -= paid_out
        earned = self._share * passed + paid_out
        self._available += earned
        self._for_skipping += FOR_SKIPPING * earned
        self._saved = min(self._saved + SAVED_FOR_RECHECKS * earned, self._goal)

    def _put_by(self) -> None:
        """Set aside earnings that the present checks do not need. They are paid out later, little by little."""
        if self._available > self._most:
            self._surplus += self._available - self._most
            self._available = self._most

    def _pay(self, seconds: float) -> None:
        self._available -= seconds
        self.spent += seconds

    def _pay_for_skipping(self, seconds: float) -> None:
        """Pay for unchecked calls. That time is gone whatever is checked, so that it must not use up all earnings."""
        paid = min(seconds, self._for_skipping)
        self._for_skipping -= paid
        self._excess += seconds - paid
        self._available -= paid
        self.spent += seconds

    @property
    def dear(self) -> bool:
        """Whether unchecked calls take noticeably more than their part of the earnings."""
        return self._excess > NOTICEABLE * self.spent

    def _wait(self, turn: Turn, step: CheckStep, now: float) -> float:
        """Seconds that must pass before a step can be taken; 0: it is this region's turn, and all is earned.

        After these seconds it may still have to wait. An event may shorten the wait: see `Turn.rest`.
        """
        recheck = step in RECHECKS
        needed = turn.estimate(step)
        available = self._available if recheck else self._available - self._saved
        wait = max(self._rest_until - now, self._to_earn(needed - available))
        if wait > 0.0:
            return wait
        if not recheck and self._recheck_is_earned(turn, now):
            return self._asking()
        for other in self._alive():
            waits = other.waits.get(recheck)
            if other is turn or waits is None or other.place(waits, now) > turn.place(step, now):
                continue
            if now > other.gone(self._share):
                continue
            if other.called >= turn.called_before:  # the other region is called as often as this one, and goes first
                return self._asking()
            needed += other.estimate(waits)
        return self._to_earn(needed - available)

    def _to_earn(self, seconds: float) -> float:
        """The least time in which so much is earned."""
        return max(0.0, seconds / ((1.0 + PAID_OUT) * self._share))

    def _recheck_is_earned(self, turn: Turn, now: float) -> bool:
        """Whether another region, called as often as this one, only needs its next call to be rechecked.

        Otherwise a region that comes first after each rest would be checked each time, and others never.
        """
        waiting = [
            (other.place(other.waits[True], now), other.called >= turn.called_before, other.estimate(other.waits[True]))
            for other in self._alive()
            if other is not turn and True in other.waits and now <= other.gone(self._share)
        ]
        needed = 0.0
        for _, comes, estimate in sorted(waiting):
            needed += estimate
            if comes:
                return self._available >= needed
        return False

    def _limit(self, now: float) -> None:
        """Compute how much may lie ready, and how much to save for rechecks. Called when either may change."""
        most = saved = largest = 0.0
        for turn in self._alive():
            if turn.own == float("inf") or turn.called == float("-inf"):
                continue
            largest = max([largest, *(turn.estimate(step) for step in turn.steps())])
            if now > turn.gone(self._share):
                continue
            most += sum(turn.estimate(step) for step in turn.waits.values())
            if True in turn.waits:
                saved = max(saved, turn.estimate(turn.waits[True]))
        self._most = most + 2 * largest if largest else float("inf")
        self._goal = saved
        self._saved = min(self._saved, saved)

    def _alive(self) -> Iterator[Turn]:
        turns = [(ref, ref()) for ref in self._turns]
        self._turns = [ref for ref, turn in turns if turn is not None]
        return (turn for _, turn in turns if turn is not None)
