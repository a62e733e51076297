"""What the account of a run knows about one region: its calls, its checks, what they cost and what it waits for.

A *recheck* is a check with all control runs, whatever earlier calls established. Other checks compare with the noise
that earlier calls established.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

__all__ = ["RECHECKS", "CheckStep", "Due", "Turn"]

OTHER_CALLS = 2.0
"""A region that was not called for this many times its longest pause is no longer waited for."""

RECHECK_RUNS, KNOWN_RUNS, LEAST = 30.0, 10.0, 2e-3
"""Estimates for a check of unknown cost: a number of unchecked calls, and the least seconds."""


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


RECHECKS = {CheckStep.RESULTS_RECHECK: False, CheckStep.GRADIENTS_RECHECK: True}
"""Steps that are rechecks, each with whether it is one of gradients."""


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
        self._postponed: set[CheckStep] = set()
        self.waits: dict[bool, CheckStep] = {}
        self.called = self.called_before = float("-inf")
        self._pause = 0.0
        self.unpaid = 0.0
        self._quiet_until = float("-inf")
        self._quiet_since = -1

    def comes(self, now: float) -> None:
        """Note a call."""
        if self.called > float("-inf"):
            self._pause = max(self._pause, now - self.called)
        if not self._since:
            self._since = dict.fromkeys(CheckStep, now)
        self.called_before, self.called = self.called, now

    def passes(self, now: float, events: int) -> bool:
        """Note a call at which asking the account is in vain; False if it is not.

        Most calls of a run come here, so that this looks at nothing but the region.

        Args:
            events: How many events the account has had.
        """
        if now >= self._quiet_until or self._quiet_since != events:
            return False
        # as `comes` does: on this path each further call of a function shows
        if now - self.called > self._pause:
            self._pause = now - self.called
        self.called_before, self.called = self.called, now
        return True

    def rest(self, until: float, events: int) -> None:
        """Be quiet until a time, or until the next event of the account."""
        self._quiet_until, self._quiet_since = until, events

    def wake(self) -> None:
        """Ask the account at the next call."""
        self._quiet_since = -1

    def has_gradients(self) -> None:
        """Note that the region has gradients to check. That is one more step to ask for."""
        if not self.gradients:
            self.gradients = True
            self.wake()

    def steps(self) -> Iterator[CheckStep]:
        """The steps that could be taken at a call, in the order in which they are tried."""
        recheck = [step for step, gradients in RECHECKS.items() if self._is_recheck(gradients)]
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
        return self._checks[RECHECKS[step]] > 0, -waited / self.estimate(step), self._number

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
        self.waits.pop(step in RECHECKS, None)

    def cost(self, step: CheckStep, backward: bool, seconds: float) -> None:
        """Note the cost of the forward or the backward part of a step."""
        self._costs[step, backward] = seconds
        if RECHECKS.get(step) is backward:
            self._postponed.discard(step)
        self._checks[backward] += 1
        while self._recheck_at[backward] <= self._checks[backward] and RECHECKS.get(step) is backward:
            self._recheck_at[backward] *= 2
        waiting = self.waits.get(True)
        if waiting is not None and not self._is_recheck(RECHECKS[waiting]):
            del self.waits[True]  # a call between the recheck's forward and backward part asked for it once more

    def postpone(self, step: CheckStep, backward: bool, needed: float) -> None:
        """Note that a step is to be taken again, and what its forward or its backward part will cost then."""
        self._costs[step, backward] = needed
        self._postponed.add(step)

    def was_postponed(self, step: CheckStep) -> bool:
        """Whether a step is taken again."""
        return step in self._postponed
