"""The result of checking a program."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from checked_backend.errors import FuzzError
from checked_backend.runs.status import Status

__all__ = ["Examined"]


@dataclass(frozen=True, slots=True)
class Examined:
    """The result for one program.

    Attributes:
        status: A verdict, or how its process ended.
        message: Why, in a sentence.
        seconds: How long it took; of a batch, its share.
        compiled: Whether any of it was compiled.
        alone: Whether it had a compile of its own.
        kind: The kind of the worst finding; empty if there is none.
        detail: Its finer kind.
        subject: Its subject.
        stage: The stage of compilation in which it arises.
        op: The operator at fault, where one was found.
        expected: The value in eager, as text.
        actual: The value in the compiled program, as text.
        report: The report as JSON, of what did not pass.
        program: The program that fails, where that is several as one; empty if it is the one that was asked for.
    """

    status: Status
    message: str = ""
    seconds: float = 0.0
    compiled: bool = False
    alone: bool = True
    kind: str = ""
    detail: str = ""
    subject: str = ""
    stage: str = ""
    op: str = ""
    expected: str = ""
    actual: str = ""
    report: str = field(default="", repr=False)
    program: str = field(default="", repr=False)

    def to_json(self) -> str:
        """As JSON text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, raw: Any) -> Examined:
        """Read what `to_json` wrote, as text or already parsed.

        Raises:
            FuzzError: It is no such thing.
        """
        try:
            raw = json.loads(raw) if isinstance(raw, str) else raw
            given = {name: raw[name] for name in cls.__dataclass_fields__ if name in raw}
            read = cls(**{**given, "status": Status.of(given["status"], "a result of fuzz")})
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise FuzzError(f"a result of fuzz: {type(error).__name__}: {error}") from None
        for name, field_ in cls.__dataclass_fields__.items():
            kinds = (int, float) if name == "seconds" else (Status if name == "status" else type(field_.default),)
            if not isinstance(getattr(read, name), kinds):
                raise FuzzError(f"a result of fuzz: {name} got {getattr(read, name)!r:.80}, of a wrong type")
        return read
