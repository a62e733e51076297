"""The possible results of a case."""

from __future__ import annotations

from enum import Enum

from checked_backend.findings import Verdict


class Status(str, Enum):
    """The result of one case. The first three are verdicts of a check; with the others there is no verdict."""

    PASS = "pass"
    FAIL = "fail"
    INCONCLUSIVE = "inconclusive"
    CRASH = "crash"
    HANG = "hang"
    OUT_OF_MEMORY = "out of memory"
    LOST = "lost"
    ERROR = "error"
    IMPORT_ERROR = "import error"
    UNSUPPORTED = "unsupported"
    SKIPPED = "skipped"

    def __str__(self) -> str:
        return self.value

    @property
    def failed(self) -> bool:
        """Whether something is wrong: with the compiler, the model, or the machine."""
        return self in _FAILED

    @property
    def means(self) -> str:
        """An explanation for people."""
        return _MEANS[self]

    @classmethod
    def of_verdict(cls, verdict: Verdict) -> Status:
        """The status of a verdict."""
        return cls(verdict.value)


_MEANS = {
    Status.PASS: "compiled, it agrees with eager",
    Status.FAIL: "compiled, it is wrong",
    Status.INCONCLUSIVE: "neither pass nor fail could be said",
    Status.CRASH: "its process died",
    Status.HANG: "its process had not ended when its time was up",
    Status.OUT_OF_MEMORY: "it needs more memory than it may have",
    Status.LOST: "the machine that ran it was lost, twice",
    Status.ERROR: "the model does not run in eager",
    Status.IMPORT_ERROR: "the model needs a module that is not here",
    Status.UNSUPPORTED: "it cannot be run in this way here",
    Status.SKIPPED: "a rule says not to run it",
}

_FAILED = frozenset(
    {Status.FAIL, Status.CRASH, Status.HANG, Status.OUT_OF_MEMORY, Status.LOST, Status.ERROR},
)
