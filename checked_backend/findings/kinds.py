"""The enumerations of a report: verdicts, severities, and kinds of findings."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum


class Word(str, Enum):
    """A string enumeration that prints as its value on every Python (``enum.StrEnum`` is 3.11)."""

    def __str__(self) -> str:
        return str(self.value)


class Verdict(Word):
    """The answer of a check. Never a bool: *inconclusive* is neither a pass nor a fail."""

    PASS = "pass"
    FAIL = "fail"
    INCONCLUSIVE = "inconclusive"

    @classmethod
    def worst(cls, verdicts: Iterable[Verdict | None]) -> Verdict | None:
        """The worst of several verdicts: *fail*, then *inconclusive*, then *pass*; None if there is no verdict."""
        given = set(verdicts)
        return next((verdict for verdict in (cls.FAIL, cls.INCONCLUSIVE, cls.PASS) if verdict in given), None)


class Severity(Word):
    """Whether a finding fails a check, or is only told."""

    ERROR = "error"
    WARNING = "warning"


class Kind(Word):
    """The kind of problem that a finding reports."""

    STRUCTURE = "structure"
    ALIAS = "alias"
    MUTATION = "mutation"
    LOGIC = "logic"
    PRECISION = "precision"
    NONFINITE = "nonfinite"
    RNG = "rng"
    EXCEPTION = "exception"
    CRASH = "crash"
    NONDETERMINISTIC = "nondeterministic"
    UNSUPPORTED = "unsupported"

    @property
    def fails(self) -> bool:
        """Whether a finding of this kind makes the verdict *fail* (the other kinds make it *inconclusive*)."""
        return self not in (Kind.NONDETERMINISTIC, Kind.UNSUPPORTED)
