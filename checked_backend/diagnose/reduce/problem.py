"""The problem that passes work on: they propose programs, only `Problem.consider` accepts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from checked_backend.diagnose.oracle import Oracle, screen_cases, verdict_oracle
from checked_backend.diagnose.reduce.failing_case import FailingCase
from checked_backend.diagnose.reduce.races import has_race
from checked_backend.diagnose.reduce.size import Size, fingerprint, measure_size
from checked_backend.findings import Finding, Kind
from checked_backend.graphs.nodes import outputs_of
from checked_backend.regions.graph_case import GraphCase

__all__ = ["OutOfTime", "Problem", "ReductionProgress"]

VALUE_KINDS = frozenset({Kind.LOGIC, Kind.PRECISION, Kind.NONFINITE})
"""Kinds of findings about values. If all values agree, there is no such finding."""

MIN_TIMEOUT_S = 20.0
TIMEOUT_FACTOR = 8.0
"""A candidate counts as hung after this many times the time of the original program."""


class OutOfTime(Exception):
    """Raised when the deadline has passed."""


def _sign(finding: Finding) -> tuple[str, str]:
    """The facts that must stay besides kind and subject: the finer kind, and the exception if there is one."""
    raised = finding.kind in (Kind.CRASH, Kind.EXCEPTION)
    return finding.detail, f"{finding.expected} {finding.actual}" if raised else ""


@dataclass(frozen=True, slots=True)
class ReductionProgress:
    """How far a reduction is. ``str()`` is a line for people.

    Attributes:
        step: The present step.
        tried: Programs checked so far.
        size: Size of the smallest program so far.
        seconds_left: Seconds until the deadline.
    """

    step: str
    tried: int
    size: Size
    seconds_left: float

    def __str__(self) -> str:
        return f"{self.size}, {self.tried} tried, {self.step}, at most {max(0.0, self.seconds_left):.0f} s left"


class Problem:
    """The smallest program so far that goes wrong in the same way.

    Args:
        program: The program to reduce.
        kind: The kind of the finding that must stay.
        deadline: A `time.monotonic` moment after which nothing is tried.
        progress: Called before each program that is checked.
        screen: Tells in advance which cases cannot go wrong.

    Attributes:
        best: The smallest program so far.
        tried: How many programs were checked.
        step: The present step, in words.
    """

    def __init__(
        self,
        program: FailingCase,
        kind: Kind,
        deadline: float,
        *,
        progress: Callable[[ReductionProgress], None] | None = None,
        oracle: Oracle = verdict_oracle,
        screen: Callable[[Sequence[GraphCase], float], list[bool]] | None = screen_cases,
    ) -> None:
        self.best = program
        self.tried = 0
        self.step = "start"
        self._kind = kind
        self._deadline = deadline
        self._progress = progress
        self._oracle = oracle
        self._screen = screen
        self._size = measure_size(program)
        self._signs: set[tuple[str, str]] = set()
        self._rejected: set[str] = set()
        self._timeout = 10 * MIN_TIMEOUT_S
        self._races = has_race(program)

    @property
    def size(self) -> Size:
        """The size of the smallest program so far."""
        return self._size

    @property
    def seconds_left(self) -> float:
        """Seconds until the deadline."""
        return self._deadline - time.monotonic()

    def is_interesting(self, program: FailingCase) -> bool:
        """Whether a program goes wrong as wanted, checked anew.

        Raises:
            OutOfTime: The deadline has passed, or passed while it was checked.
        """
        left = self.seconds_left
        if left <= 0:
            raise OutOfTime
        if self._progress is not None:
            self._progress(ReductionProgress(self.step, self.tried, self._size, left))
        self.tried += 1
        began = time.monotonic()
        found = self._oracle(program.case, min(self._timeout, left)) or ()
        if self.seconds_left <= 0:
            raise OutOfTime
        signs = {_sign(item) for item in found if (item.kind, item.subject) == (self._kind, program.subject)}
        if not self._signs:
            self._signs = signs
        wrong = bool(signs & self._signs)
        if self.tried == 1:
            self._timeout = max(MIN_TIMEOUT_S, TIMEOUT_FACTOR * (time.monotonic() - began))
        return wrong

    def consider(self, candidate: FailingCase) -> bool:
        """Accept a program if it is smaller than the best and still goes wrong in the same way.

        A program with an undefined result is not accepted, unless the original program has one.

        Raises:
            OutOfTime: The deadline has passed.
        """
        size = measure_size(candidate)
        if not size < self._size:
            return False
        if not self._races and has_race(candidate):
            return False
        digest = fingerprint(candidate)
        if digest in self._rejected:
            return False
        if not self.is_interesting(candidate):
            self._rejected.add(digest)
            return False
        self.best, self._size = candidate, size
        return True

    def screened(self, candidates: Sequence[FailingCase]) -> list[FailingCase]:
        """The candidates that are smaller than the best and give other results when compiled than in eager.

        Args:
            candidates: The best program on other values of the same shapes.

        Raises:
            OutOfTime: The deadline has passed.
        """
        smaller = [program for program in candidates if measure_size(program) < self._size]
        if self._kind not in VALUE_KINDS or not self._screen:
            return smaller
        if self.seconds_left <= 0:
            raise OutOfTime
        flags = self._screen([program.case for program in smaller], min(self._timeout, self.seconds_left))
        return [program for program, may_be_wrong in zip(smaller, flags, strict=True) if may_be_wrong]

    def wrong_results(self, program: FailingCase) -> list[int]:
        """The outputs of a program that go wrong in the wanted kind.

        Raises:
            OutOfTime: The deadline has passed.
        """
        left = self.seconds_left
        if left <= 0:
            raise OutOfTime
        found = self._oracle(program.case, min(self._timeout, left)) or ()
        subjects = {item.subject for item in found if item.kind == self._kind}
        count = len(outputs_of(program.case.graph.graph))
        return [place for place in range(count) if f"output[{place}]" in subjects]

    def first_of(self, candidates: Sequence[FailingCase]) -> bool:
        """Accept the first of these that `consider` accepts."""
        return any(self.consider(candidate) for candidate in candidates)
