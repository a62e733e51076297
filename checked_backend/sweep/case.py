"""Plain data: a case, its settings, and its outcome."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from checked_backend.errors import SuiteError
from checked_backend.findings import Verdict
from checked_backend.sweep.status import Status

__all__ = ["DTYPES", "MODES", "Case", "CaseResult", "Settings", "decoded"]

MODES = ("inference", "training")
DTYPES = ("float32", "bfloat16", "float16", "amp")

_COMPACT = (",", ":")


@dataclass(frozen=True, slots=True)
class Case:
    """One model in one mode, dtype, device and so on.

    Attributes:
        suite: The suite's label: ``huggingface``, ``python:models.py``.
        model: The model's name in the suite.
        mode: ``inference`` or ``training``.
        dtype: ``float32``, ``bfloat16``, ``float16``, or ``amp``: float32 under autocast.
        device: ``cpu`` or ``cuda``.
        compiler: A Dynamo backend's name, or ``FILE.py:NAME``.
        dynamic: Whether the shapes are dynamic.
    """

    suite: str
    model: str
    mode: str = "inference"
    dtype: str = "float32"
    device: str = "cpu"
    compiler: str = "inductor"
    dynamic: bool = False

    @property
    def key(self) -> str:
        """A text that identifies the case in any database."""
        return json.dumps([getattr(self, entry.name) for entry in fields(self)], separators=_COMPACT)

    @property
    def way(self) -> str:
        """How the model is run, in words."""
        shapes = ", dynamic" if self.dynamic else ""
        return f"{self.mode} {self.dtype} {self.device}, {self.compiler}{shapes}"

    def __str__(self) -> str:
        return f"{self.model} ({self.way})"


@dataclass(frozen=True, slots=True)
class Settings:
    """How to run and check a case, from the rules and the command line.

    Attributes:
        run_as: The dtype to run the model in, instead of the case's own.
        batch_size: The batch size; None for the model's own.
        timeout: Seconds after which the case counts as hung.
        skip: The reason why the case is not run; empty if it is run.
        tags: Known properties of the model, each with its reason: ``slow``, ``non_deterministic``, ``control_flow``.
        ignore_outputs: Subjects whose findings do not fail the case, each with its reason.
        known_fails: Kinds of findings that are known of the model, each with its reason.
        noise: The greatest relative error that counts as noise, by subject, each with its reason.
        compiler_options: Options for the candidate.
        optimizer: An optimizer of ``torch.optim`` for training, as ``NAME:KEY=VALUE,...``; None for none.
        localize: Whether to find the operator after a failure.
        canary: Whether the suite itself lists the model as unreliable.
    """

    run_as: str | None = None
    batch_size: int | None = None
    timeout: float = 1800.0
    skip: str | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    ignore_outputs: Mapping[str, str] = field(default_factory=dict)
    known_fails: Mapping[str, str] = field(default_factory=dict)
    noise: Mapping[str, tuple[float, str]] = field(default_factory=dict)
    compiler_options: Mapping[str, Any] = field(default_factory=dict)
    optimizer: str | None = None
    localize: bool = False
    canary: bool = False

    def digest(self, source: str) -> str:
        """A short text that changes when the settings or the suite's source change.

        Time limits and tags are left out, because a result stays valid when they change.

        Args:
            source: The suite's fingerprint.
        """
        parts = asdict(self)
        for name in ("timeout", "tags", "skip", "canary", "localize"):
            del parts[name]
        text = json.dumps([parts, source], sort_keys=True, separators=_COMPACT, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class CaseResult:
    """The result of a case.

    Attributes:
        status: Pass, fail, or why there is no verdict.
        message: The reason, in a sentence.
        stage: The last stage that the process entered.
        expected: The rule's reason why this status is expected of the model. The exit code then ignores the case.
        seconds: How long the process ran.
        peak: Peak memory of the process in bytes, with the check's own copies.
        noise: The greatest detection limit of the results: the relative error that rounding noise would hide.
        report: The check's report as JSON.
        log: The end of what the process printed.
        host: The machine that ran it.
    """

    status: Status
    message: str = ""
    stage: str = ""
    expected: str = ""
    seconds: float = 0.0
    peak: int | None = None
    noise: float | None = None
    report: str = ""
    log: str = ""
    host: str = ""

    @property
    def verdict(self) -> Verdict | None:
        """The verdict that counts for the whole sweep; None if the case does not count."""
        if self.status is Status.SKIPPED or self.expected:
            return None
        if self.status is Status.PASS:
            return Verdict.PASS
        return Verdict.FAIL if self.status.failed else Verdict.INCONCLUSIVE

    def to_json(self) -> str:
        """The outcome as JSON text."""
        return json.dumps(asdict(self), separators=_COMPACT)

    @classmethod
    def from_json(cls, text: str) -> CaseResult:
        """Read what `to_json` wrote.

        Raises:
            SuiteError: The text is no outcome.
        """
        try:
            raw = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise SuiteError(f"a worker's result is not JSON: {error}") from error
        found: CaseResult = decoded(cls, raw, "a worker's result")
        return found


_CHECKS: Mapping[str, tuple[type, ...]] = {
    "str": (str,),
    "bool": (bool,),
    "int": (int,),
    "float": (int, float),
    "None": (type(None),),
}


_GREATEST = 1e18


def decoded(cls: Any, raw: object, where: str) -> Any:
    """Make a dataclass from JSON values. They are not trusted: a stranger may have written them.

    Args:
        cls: The dataclass. Fields that hold no plain values keep their defaults.
        raw: The JSON values.
        where: What the values are, for the message.

    Raises:
        SuiteError: A value has another type; the message names the field.
    """
    if not isinstance(raw, dict):
        raise SuiteError(f"{where}: expected an object, got {type(raw).__name__}")
    values: dict[str, object] = {}
    for entry in fields(cls):
        if entry.name not in raw:
            continue
        value, wanted = raw[entry.name], str(entry.type)
        if wanted == "Status":
            values[entry.name] = Status.of(value, where)
            continue
        kinds = tuple(kind for word in wanted.split(" | ") for kind in _CHECKS.get(word, ()))
        if not kinds:
            continue
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise SuiteError(f"{where}: {entry.name} got {value!r:.80}; expected {wanted}")
        if isinstance(value, int | float) and not abs(value) < _GREATEST:  # NaN is refused, too
            raise SuiteError(f"{where}: {entry.name} got {value!r:.80}; expected a number below {_GREATEST:g}")
        values[entry.name] = value
    try:
        return cls(**values)
    except TypeError as error:
        raise SuiteError(f"{where}: {error}") from None
