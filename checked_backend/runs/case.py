"""Plain data: a case, what came out for it, and how both are read from a file that is not trusted."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from enum import Enum
from typing import Annotated, Any, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from checked_backend.errors import SuiteError
from checked_backend.findings import Verdict
from checked_backend.process.job import JobEnd

STRICT = ConfigDict(strict=True, allow_inf_nan=False)
"""For what a stranger may have written."""

_Number = Annotated[float, Field(ge=0, lt=1e18)]
_Count = Annotated[int, Field(ge=0, lt=10**18)]
_Read = TypeVar("_Read")


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

    @classmethod
    def of_end(cls, end: JobEnd) -> Status:
        """The status of a case whose process ended before it had a result."""
        return {"hang": cls.HANG, "memory": cls.OUT_OF_MEMORY}.get(end.kind, cls.CRASH)


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


@dataclass(frozen=True, slots=True)
class Case:
    """One model in one mode, dtype, device and so on.

    Attributes:
        suite: The suite's label: ``huggingface``, ``python:models.py``.
        model: The model's name in the suite.
        dtype: ``float32``, ``bfloat16``, ``float16``, or ``amp``: float32 under autocast.
        compiler: A Dynamo backend's name, or ``FILE.py:NAME``.
    """

    __pydantic_config__ = STRICT

    suite: str
    model: str
    mode: str = "inference"
    dtype: str = "float32"
    device: str = "cpu"
    compiler: str = "inductor"
    dynamic: bool = False

    @property
    def values(self) -> list[Any]:
        """Its fields in order."""
        return [getattr(self, entry.name) for entry in fields(self)]

    @property
    def key(self) -> str:
        """A text that identifies the case in any run."""
        return json.dumps(self.values, separators=(",", ":"))

    @property
    def way(self) -> str:
        """How the model is run, in words."""
        shapes = ", dynamic" if self.dynamic else ""
        return f"{self.mode} {self.dtype} {self.device}, {self.compiler}{shapes}"

    def __str__(self) -> str:
        return f"{self.model} ({self.way})"


@dataclass(frozen=True, slots=True)
class CaseResult:
    """The result of a case.

    Attributes:
        status: Pass, fail, or why there is no verdict.
        message: The reason, in a sentence.
        stage: The last stage that the process entered.
        expected: The rule's reason why this status is expected of the model. The exit code then ignores the case.
        peak: Peak memory of the process in bytes, with the check's own copies.
        noise: The greatest detection limit of the results: the relative error that rounding noise would hide.
        report: The check's report as JSON.
        log: The end of what the process printed.
    """

    __pydantic_config__ = STRICT

    status: Status
    message: str = ""
    stage: str = ""
    expected: str = ""
    seconds: _Number = 0.0
    peak: _Count | None = None
    noise: _Number | None = None
    report: str = ""
    log: str = ""
    host: str = ""

    @property
    def verdict(self) -> Verdict | None:
        """The verdict that counts for the whole run; None if the case does not count."""
        if self.status is Status.SKIPPED or self.expected:
            return None
        if self.status is Status.PASS:
            return Verdict.PASS
        return Verdict.FAIL if self.status.failed else Verdict.INCONCLUSIVE

    def to_json(self) -> str:
        """The result as JSON text."""
        return encode(self)

    @classmethod
    def from_json(cls, text: str) -> CaseResult:
        """Read what `to_json` wrote, as `decode` does."""
        return decode(_RESULT, text, "a worker's result")


@dataclass(frozen=True, slots=True)
class Attempt:
    """The result of one attempt at a case.

    Attributes:
        state: A digest that changes when the settings or the suite's source change.
        finished: When the attempt ended, in UTC.
    """

    __pydantic_config__ = STRICT

    case: Case
    state: str
    finished: str
    result: CaseResult


_RESULT = TypeAdapter(CaseResult)


def encode(value: Any) -> str:
    """A dataclass as JSON text. Half a surrogate pair, which JSON cannot have, becomes a question mark."""
    text = json.dumps(asdict(value), separators=(",", ":"), ensure_ascii=False)
    return text.encode("utf-8", "replace").decode("utf-8")


def decode(adapter: TypeAdapter[_Read], text: str | bytes, where: str) -> _Read:
    """Read what `encode` wrote. It is not trusted: a stranger may have written it.

    Raises:
        SuiteError: A value has another type; the message names the field.
    """
    try:
        return adapter.validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise SuiteError(f"{where}: {place}{': ' * bool(place)}{first['msg']}") from None
