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
from dataclasses import dataclass
from enum import Enum

__all__ = ["OVERHEAD", "Account", "CheckStep", "Due", "Turn"]

PACE = 2.0
"""How many times the asked share may be spent for a moment, where several checks are earned already."""

PAID_OUT = 0.1
"""How much more than the present earnings becomes available if much was earned before, relative."""

SAVED_FOR_RECHECKS = 0.5
"""The part of the earnings that is saved for a recheck while one waits. The rest is for other checks."""

OTHER_CALLS = 2.0
"""A region that was not called for this many times its longest pause is no longer waited for."""

RECHECK_RUNS, RECHECK_NODE, KNOWN_RUNS, LEAST = 60.0, 8e-3, 10.0, 2e-3
"""Estimates for a check of unknown cost: a number of unchecked calls, seconds for each node, and the least seconds."""

RECHECK_COMPILES = {False: 0.1, True: 2.0}
"""The estimate for a recheck of unknown cost, in compilations, by whether the region computes in half precision.

Such a region has its float64 twin and its operators compiled; others seldom do.
"""

FIRST_OF_ALL = 1.5
"""Seconds that the first recheck of the process costs beyond that, because torch prepares things at first use."""

OVERHEAD = 2e-6
"""Seconds that a skipped call takes beyond its measured time."""


class CheckStep(Enum):
    """The kind of check that a call gets. One call rechecks results or gradients, not both."""

    RESULTS_RECHECK = "recheck of results"
    GRADIENTS_RECHECK = "recheck of gradients"
    KNOWN = "compared with known noise"


@dataclass(frozen=True, slots=True)
class Due:
    """The parts of a call that are checked.

    Attributes:
        backward: Whether its backward passes are checked too.
        recheck: Whether results are rechecked; None: at checks 1, 2, 4, 8, ...
        backward_recheck: Whether gradients are rechecked; None: at checks 1, 2, 4, 8, ...
        step: The step in the account of the run; None if there is no account.
    """

    backward: bool = True
    recheck: bool | None = None
    backward_recheck: bool | None = None
    step: CheckStep | None = None


_RECHECKS = {CheckStep.RESULTS_RECHECK: False, CheckStep.GRADIENTS_RECHECK: True}


class Turn:
    """The facts that an account knows about one region.

    Args:
        number: The region's number in the account.
        unknown: What a recheck may cost beyond some runs, in seconds.

    Attributes:
        own: Seconds that an unchecked call takes, the shortest so far.
        gradients: Whether the region has gradients to check.
    """

    def __init__(self, number: int, unknown: float) -> None:
        self.own = float("inf")
        self.gradients = False
        self._number = number
        self.unknown = unknown
        self._checks = {False: 0, True: 0}
        self._recheck_at = {False: 1, True: 1}
        self._since: dict[CheckStep, float] = {}
        self._costs: dict[tuple[CheckStep, bool], float] = {}
        self.waits: dict[bool, CheckStep] = {}
        self.called = self.called_before = float("-inf")
        self._pause = 0.0
        self.unpaid = 0.0

    def comes(self, now: float) -> None:
        """Note a call."""
        if self.called > float("-inf"):
            self._pause = max(self._pause, now - self.called)
        if not self._since:
            self._since = dict.fromkeys(CheckStep, now)
        self.called_before, self.called = self.called, now

    def steps(self) -> Iterator[CheckStep]:
        """The steps that could be taken at a call, in the order in which they are tried."""
        recheck = [step for step, gradients in _RECHECKS.items() if self._is_recheck(gradients)]
        if recheck:
            yield min(recheck, key=lambda step: self._since[step])
        if self._checks[False]:
            yield CheckStep.KNOWN

    def _is_recheck(self, gradients: bool) -> bool:
        """Whether the next check is a recheck, as checks 1, 2, 4, 8, ... are. Gradients follow results."""
        if gradients and not (self.gradients and self._checks[False]):
            return False
        return self._checks[gradients] + 1 >= self._recheck_at[gradients]

    def due(self, step: CheckStep) -> Due:
        """The parts of a call that a step checks. A region's first gradients are checked by a step of their own."""
        return Due(
            backward=step is CheckStep.GRADIENTS_RECHECK or (step is CheckStep.KNOWN and self._checks[True] > 0),
            recheck=step is CheckStep.RESULTS_RECHECK,
            backward_recheck=step is CheckStep.GRADIENTS_RECHECK,
            step=step,
        )

    def place(self, step: CheckStep, now: float) -> tuple[bool, float, int]:
        """The region's place in the queue: the region that has waited longest is first.

        Among rechecks, the first ones of regions come before all others. Then come those that have waited longest for
        their cost. Otherwise a recheck that takes minutes to earn would hold up those of all regions after it.
        """
        waited = now - self._since[step]
        if step is CheckStep.KNOWN:
            return False, -waited, self._number
        return self._checks[_RECHECKS[step]] > 0, -waited / self.estimate(step), self._number

    def estimate(self, step: CheckStep) -> float:
        """The expected cost of a step: its cost the last time, or an upper estimate."""
        known = [cost for (of, _), cost in self._costs.items() if of is step]
        if known and (step is not CheckStep.GRADIENTS_RECHECK or (step, True) in self._costs):
            return sum(known)
        runs, more = (KNOWN_RUNS, 0.0) if step is CheckStep.KNOWN else (RECHECK_RUNS, self.unknown)
        return max(runs * self.own + more + LEAST, sum(known))

    def gone(self, share: float) -> float:
        """The time after which the region is not waited for: its longest pause, or the time to save up, is over."""
        saving = max((self.estimate(step) for step in self.waits.values()), default=0.0) / share
        return self.called + OTHER_CALLS * max(self._pause, saving)

    def begins(self, step: CheckStep, now: float) -> None:
        """Note that a step is taken."""
        self._since[step] = now
        self.waits.pop(step in _RECHECKS, None)

    def cost(self, step: CheckStep, backward: bool, seconds: float) -> None:
        """Note the cost of the forward or the backward part of a step."""
        self._costs[step, backward] = seconds
        self._checks[backward] += 1
        while self._recheck_at[backward] <= self._checks[backward] and _RECHECKS.get(step) is backward:
            self._recheck_at[backward] *= 2


class Account:
    """The time that a run may spend on checks, and has spent.

    Args:
        share: The share of the run's time that checks may take.
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
        self._saved = 0.0
        self._goal = 0.0
        self._rest_until = float("-inf")
        self._has_rechecked = False
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
            now: The time.
            compiling: Seconds that its candidate took to compile. Nothing is earned in these.
            building: Seconds that building it took beyond that.
            nodes: Nodes of its graph.
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
            self._pay(turn.unpaid)
            turn.unpaid = 0.0
            self._put_by()
            for step in turn.steps():
                if self._earned(turn, step, now):
                    turn.begins(step, now)
                    return step
                recheck = step in _RECHECKS
                if turn.own < float("inf") and turn.waits.get(recheck) is not step:
                    turn.waits[recheck] = step
                    self._limit(now)
            return None

    def charge(self, turn: Turn, step: CheckStep | None, seconds: float, now: float, *, backward: bool = False) -> None:
        """Pay for the forward or the backward part of a check.

        Args:
            turn: The region.
            step: The step; None for a check that was made whether it was earned or not.
            seconds: The time that it took beyond the candidate's own run.
            now: The time after it.
            backward: Whether it was the backward part.
        """
        with self._lock:
            self._earn(now)
            self._pay(seconds)
            if step is not None:
                turn.cost(step, backward, seconds)
                if step in _RECHECKS:
                    self._saved = max(0.0, self._saved - seconds)
                    self._learn()
            self._rest_until = max(self._rest_until, turn.called) + seconds / (PACE * self._share)
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
        self._saved = min(self._saved + SAVED_FOR_RECHECKS * earned, self._goal)

    def _put_by(self) -> None:
        """Set aside earnings that the present checks do not need. They are paid out later, little by little."""
        if self._available > self._most:
            self._surplus += self._available - self._most
            self._available = self._most

    def _pay(self, seconds: float) -> None:
        self._available -= seconds
        self.spent += seconds

    def _earned(self, turn: Turn, step: CheckStep, now: float) -> bool:
        """Whether it is this region's turn, and the step and those before it in the queue are earned."""
        recheck = step in _RECHECKS
        needed = turn.estimate(step)
        available = self._available if recheck else self._available - self._saved
        if now < self._rest_until or not available >= needed:
            return False
        if not recheck and self._recheck_is_earned(turn, now):
            return False
        for other in self._alive():
            waits = other.waits.get(recheck)
            if other is turn or waits is None or other.place(waits, now) > turn.place(step, now):
                continue
            if now > other.gone(self._share):
                continue
            if other.called >= turn.called_before:  # the other region is called as often as this one, and goes first
                return False
            needed += other.estimate(waits)
        return available >= needed

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
