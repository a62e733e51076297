"""The account of a run: which checks its share of time has earned, and whose turn it is.

The whole run has one account, however many regions it has and however often they are compiled anew. It earns a share
of the time that passes, and pays for what checks take. A check that is not earned yet waits. So does one of a region
that was checked after another which waits too. An account knows the clock only through the times that it is given:
equal events at equal times give equal decisions.

Three things keep checks from coming in bursts. After a check comes a rest. What was earned while nothing could be
checked, or for an estimate that proved too high, is paid out little by little. And results and gradients are judged
anew (with all control runs) in different calls.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

__all__ = ["OVERHEAD", "Account", "Due", "Step", "Turn"]

PACE = 2.0
"""How many times the asked share may be spent for a moment, where several checks are earned already."""

PAID_OUT = 0.1
"""How much more than the present earnings becomes available if much was earned before, relative."""

SAVED_FOR_ANEW = 0.5
"""The part of the earnings that is saved for a judgement anew while it waits. The rest is for other checks."""

OTHER_CALLS = 2.0
"""A region that was not called for this many times its longest pause is no longer waited for."""

ANEW_RUNS, ANEW_NODE, KNOWN_RUNS, LEAST = 60.0, 8e-3, 10.0, 2e-3
"""Estimates for a check of unknown cost: a number of unchecked calls, seconds for each node, and the least seconds."""

ANEW_COMPILES = {False: 0.1, True: 2.0}
"""The same for a judgement anew in compilations, by whether the region computes in half precision.

Such a region has its float64 twin and its operators compiled; others seldom do.
"""

FIRST_OF_ALL = 1.5
"""Seconds that the first judgement of the process costs beyond that, because torch prepares things at first use."""

OVERHEAD = 2e-6
"""Seconds that a skipped call takes beyond its measured time."""


class Step(Enum):
    """The kind of check that a call gets. One call judges only one of results and gradients anew."""

    RESULTS_ANEW = "results anew"
    GRADIENTS_ANEW = "gradients anew"
    KNOWN = "held against known noise"


@dataclass(frozen=True, slots=True)
class Due:
    """The parts of a call that are checked.

    Attributes:
        backward: Whether its backward passes are checked too.
        anew: Whether results are judged anew, with all control runs; None: at judgements 1, 2, 4, 8, ...
        backward_anew: The same for gradients.
        step: The step in the account of the run; None if there is no account.
    """

    backward: bool = True
    anew: bool | None = None
    backward_anew: bool | None = None
    step: Step | None = None


_ANEW = {Step.RESULTS_ANEW: False, Step.GRADIENTS_ANEW: True}


class Turn:
    """The facts that an account knows about one region.

    Args:
        number: The region's number in the account.
        unknown: What a judgement anew may cost beyond some runs, in seconds.

    Attributes:
        own: Seconds that an unchecked call takes, the shortest so far.
        gradients: Whether it has gradients to check.
    """

    def __init__(self, number: int, unknown: float) -> None:
        self.own = float("inf")
        self.gradients = False
        self._number = number
        self.unknown = unknown
        self._judged = {False: 0, True: 0}
        self._anew_at = {False: 1, True: 1}
        self._since: dict[Step, float] = {}
        self._costs: dict[tuple[Step, bool], float] = {}
        self.waits: dict[bool, Step] = {}
        self.called = self.called_before = float("-inf")
        self._pause = 0.0
        self.unpaid = 0.0

    def comes(self, now: float) -> None:
        """Note a call."""
        if self.called > float("-inf"):
            self._pause = max(self._pause, now - self.called)
        for step in Step:
            self._since.setdefault(step, now)
        self.called_before, self.called = self.called, now

    def steps(self) -> Iterator[Step]:
        """The steps that could be taken at a call, in the order in which they are tried."""
        anew = [step for step, gradients in _ANEW.items() if self._is_anew(gradients)]
        if anew:
            yield min(anew, key=lambda step: self._since[step])
        if self._judged[False]:
            yield Step.KNOWN

    def _is_anew(self, gradients: bool) -> bool:
        """Whether the next judgement is anew, as judgements 1, 2, 4, 8, ... are; gradients follow results."""
        if gradients and not (self.gradients and self._judged[False]):
            return False
        return self._judged[gradients] + 1 >= self._anew_at[gradients]

    def due(self, step: Step) -> Due:
        """The parts of a call that a step checks. The first gradients of a region are judged by a step of their own."""
        return Due(
            backward=step is Step.GRADIENTS_ANEW or (step is Step.KNOWN and self._judged[True] > 0),
            anew=step is Step.RESULTS_ANEW,
            backward_anew=step is Step.GRADIENTS_ANEW,
            step=step,
        )

    def place(self, step: Step, now: float) -> tuple[bool, float, int]:
        """The region's place in the queue: the region that has waited longest is first.

        Among judgements anew, the first ones of regions come before all others. Then come those that have waited
        longest for their cost. Otherwise one that takes minutes to earn would hold up those of all regions after it.
        """
        waited = now - self._since[step]
        if step is Step.KNOWN:
            return False, -waited, self._number
        return self._judged[_ANEW[step]] > 0, -waited / self.estimate(step), self._number

    def estimate(self, step: Step) -> float:
        """The expected cost of a step: that of the last time, or an upper estimate."""
        known = [cost for (of, _), cost in self._costs.items() if of is step]
        if known and (step is not Step.GRADIENTS_ANEW or (step, True) in self._costs):
            return sum(known)
        runs, more = (KNOWN_RUNS, 0.0) if step is Step.KNOWN else (ANEW_RUNS, self.unknown)
        return max(runs * self.own + more + LEAST, sum(known))

    def gone(self, share: float) -> float:
        """When the region is no longer waited for: it was not called for longer than ever, and than saving takes."""
        saving = max((self.estimate(step) for step in self.waits.values()), default=0.0) / share
        return self.called + OTHER_CALLS * max(self._pause, saving)

    def begins(self, step: Step, now: float) -> None:
        """Note that a step is taken."""
        self._since[step] = now
        self.waits.pop(step in _ANEW, None)

    def cost(self, step: Step, backward: bool, seconds: float) -> None:
        """Note the cost of the forward or the backward part of a step."""
        self._costs[step, backward] = seconds
        self._judged[backward] += 1
        while self._anew_at[backward] <= self._judged[backward] and _ANEW.get(step) is backward:
            self._anew_at[backward] *= 2


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
        self._judged_anew = False
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
            unknown = ANEW_COMPILES[low_precision] * compiling + ANEW_NODE * nodes
            turn = Turn(self._count, unknown + FIRST_OF_ALL * (not self._judged_anew))
            self._turns.append(weakref.ref(turn))
            return turn

    def ask(self, turn: Turn, now: float) -> Step | None:
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
                anew = step in _ANEW
                if turn.own < float("inf") and turn.waits.get(anew) is not step:
                    turn.waits[anew] = step
                    self._limit(now)
            return None

    def charge(self, turn: Turn, step: Step | None, seconds: float, now: float, *, backward: bool = False) -> None:
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
                if step in _ANEW:
                    self._saved = max(0.0, self._saved - seconds)
                    self._learn()
            self._rest_until = max(self._rest_until, turn.called) + seconds / (PACE * self._share)
            self._limit(now)

    def _learn(self) -> None:
        if not self._judged_anew:
            self._judged_anew = True
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
        self._saved = min(self._saved + SAVED_FOR_ANEW * earned, self._goal)

    def _put_by(self) -> None:
        """Set aside earnings that the present checks do not need. They are paid out later, little by little."""
        if self._available > self._most:
            self._surplus += self._available - self._most
            self._available = self._most

    def _pay(self, seconds: float) -> None:
        self._available -= seconds
        self.spent += seconds

    def _earned(self, turn: Turn, step: Step, now: float) -> bool:
        """Whether it is this region's turn, and the step is earned together with those that go before it."""
        anew = step in _ANEW
        needed = turn.estimate(step)
        available = self._available if anew else self._available - self._saved
        if now < self._rest_until or not available >= needed:
            return False
        if not anew and self._anew_is_earned(turn, now):
            return False
        for other in self._alive():
            waits = other.waits.get(anew)
            if other is turn or waits is None or other.place(waits, now) > turn.place(step, now):
                continue
            if now > other.gone(self._share):
                continue
            if other.called >= turn.called_before:  # it is called as often as this one, and goes first
                return False
            needed += other.estimate(waits)
        return available >= needed

    def _anew_is_earned(self, turn: Turn, now: float) -> bool:
        """Whether another region, called as often as this one, only needs its next call to be judged anew.

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
        """Compute how much may lie ready, and how much to save for judgements anew. Called when either may change."""
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
