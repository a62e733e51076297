"""Plain data: a case, what rules say about it, and what became of it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from checked_backend.errors import SuiteError
from checked_backend.findings import Verdict
from checked_backend.sweep.status import Status

__all__ = ["DTYPES", "MODES", "Case", "Outcome", "Settings", "Speed", "decoded"]

MODES = ("inference", "training")
DTYPES = ("float32", "bfloat16", "float16", "amp")

_COMPACT = (",", ":")


@dataclass(frozen=True, slots=True)
class Case:
    """One model, run in one way.

    Attributes:
        suite: The suite's label: ``huggingface``, ``python:models.py``.
        model: Its name there.
        mode: ``inference`` or ``training``.
        dtype: ``float32``, ``bfloat16``, ``float16``, or ``amp``: float32 under autocast.
        device: ``cpu`` or ``cuda``.
        compiler: A Dynamo backend's name.
        dynamic: Whether its shapes are dynamic.
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
        """What tells it from every other case, in any database."""
        return json.dumps([getattr(self, entry.name) for entry in fields(self)], separators=_COMPACT)

    @property
    def way(self) -> str:
        """How it is run, in words."""
        shapes = ", dynamic" if self.dynamic else ""
        return f"{self.mode} {self.dtype} {self.device}, {self.compiler}{shapes}"

    def __str__(self) -> str:
        return f"{self.model} ({self.way})"


@dataclass(frozen=True, slots=True)
class Settings:
    """What rules and the command line say about a case.

    Attributes:
        run_as: The dtype to run it in instead of the case's own.
        batch_size: None for the model's own.
        timeout: Seconds after which it counts as hung.
        skip: Why it is not run.
        tags: What is known of the model, and why: ``slow``, ``non_deterministic``, ``control_flow``.
        ignore_outputs: Subjects whose findings are not to fail it, and why.
        noise: Greatest relative error that is taken for noise, by subject, and why.
        compiler_options: Handed to the candidate.
        optimizer: Of ``torch.optim``, as ``NAME:KEY=VALUE,...``, which takes a step in training; None for none.
        localize: Find the operator after a failure.
        canary: Whether it is a model that the suite itself does not count on.
    """

    run_as: str | None = None
    batch_size: int | None = None
    timeout: float = 1800.0
    skip: str | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    ignore_outputs: Mapping[str, str] = field(default_factory=dict)
    noise: Mapping[str, tuple[float, str]] = field(default_factory=dict)
    compiler_options: Mapping[str, Any] = field(default_factory=dict)
    optimizer: str | None = None
    localize: bool = False
    canary: bool = False

    def digest(self, source: str) -> str:
        """A short text that changes when the case would be run otherwise, or its suite's source is another.

        Time limits and tags do not count: a result stands whatever they are.

        Args:
            source: The suite's fingerprint.
        """
        parts = asdict(self)
        for name in ("timeout", "tags", "skip", "canary", "localize"):
            del parts[name]
        text = json.dumps([parts, source], sort_keys=True, separators=_COMPACT, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Speed:
    """What a case costs. None is what could not be measured.

    Attributes:
        compile_seconds: The first compiled step, less a later one.
        eager_step: Seconds of one step in eager, the median.
        compiled_step: The same compiled.
        eager_peak: Bytes that eager steps took at their peak, beyond what was held before.
        compiled_peak: The same compiled.
    """

    compile_seconds: float | None = None
    eager_step: float | None = None
    compiled_step: float | None = None
    eager_peak: int | None = None
    compiled_peak: int | None = None

    @property
    def speedup(self) -> float | None:
        """Eager's step by the compiled one."""
        if not self.eager_step or not self.compiled_step:
            return None
        return self.eager_step / self.compiled_step


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a case.

    Attributes:
        status: The answer.
        message: Why, in a sentence.
        stage: What its process was doing.
        expected: Why a rule takes this status for what the model is known for; it then counts for no exit code.
        seconds: How long its process ran.
        peak: Bytes that its process held at most; with the check's own copies.
        noise: The greatest detection limit of its results: the relative error that its rounding noise would hide.
        speed: What it costs.
        report: The check's report as JSON.
        log: The end of what its process printed.
        host: Where it ran.
    """

    status: Status
    message: str = ""
    stage: str = ""
    expected: str = ""
    seconds: float = 0.0
    peak: int | None = None
    noise: float | None = None
    speed: Speed = field(default_factory=Speed)
    report: str = ""
    log: str = ""
    host: str = ""

    @property
    def verdict(self) -> Verdict | None:
        """What it means for the whole sweep; None if it means nothing."""
        if self.status is Status.SKIPPED or self.expected:
            return None
        if self.status is Status.PASS:
            return Verdict.PASS
        return Verdict.FAIL if self.status.failed else Verdict.INCONCLUSIVE

    def to_json(self) -> str:
        """As text, for another process."""
        return json.dumps(asdict(self), separators=_COMPACT)

    @classmethod
    def from_json(cls, text: str) -> Outcome:
        """Read what `to_json` wrote.

        Raises:
            SuiteError: It is something else.
        """
        try:
            raw = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise SuiteError(f"a worker's result is not JSON: {error}") from error
        found = decoded(cls, {**raw, "speed": None} if isinstance(raw, dict) else raw, "a worker's result")
        return found if not raw.get("speed") else _with_speed(found, raw["speed"])


def _with_speed(outcome: Outcome, raw: object) -> Outcome:
    values = {entry.name: getattr(outcome, entry.name) for entry in fields(outcome)}
    return Outcome(**{**values, "speed": decoded(Speed, raw, "a worker's result: speed")})


_CHECKS: Mapping[str, tuple[type, ...]] = {
    "str": (str,),
    "bool": (bool,),
    "int": (int,),
    "float": (int, float),
    "None": (type(None),),
}


_GREATEST = 1e18


def decoded(cls: Any, raw: object, where: str) -> Any:
    """Make one of these records of JSON values that a stranger may have written.

    Args:
        cls: The class; fields that are no plain values are left to their defaults.
        raw: The values.
        where: What they are, for the message.

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
        if isinstance(value, int | float) and not abs(value) < _GREATEST:  # nor NaN
            raise SuiteError(f"{where}: {entry.name} got {value!r:.80}; expected a number below {_GREATEST:g}")
        values[entry.name] = value
    try:
        return cls(**values)
    except TypeError as error:
        raise SuiteError(f"{where}: {error}") from None
