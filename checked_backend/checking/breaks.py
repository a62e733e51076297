"""What Dynamo made of a program's code: which of it became no compiled region, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from checked_backend._torch import dynamo_counters
from checked_backend.record import Skip

__all__ = ["Tracing"]

MOST_REASONS = 3
"""Graph breaks that are told."""

_SUBJECT = "the compiled program"
_SWITCHED_OFF = "it is switched off (TORCH_COMPILE_DISABLE, torch._dynamo.config.disable), or this is no Python code"


@dataclass(slots=True)
class Tracing:
    """What Dynamo did while a program ran.

    Attributes:
        breaks: Its own words on each graph break.
        frames: How many frames it looked at (``total``) and translated (``ok``).
        numpy: Whether it traced NumPy's functions, which compute in torch then.
    """

    breaks: Counter[str] = field(default_factory=Counter)
    frames: Counter[str] = field(default_factory=Counter)
    numpy: bool = False

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Count what happens inside of the block."""
        before = dynamo_counters()
        try:
            yield
        finally:
            after = dynamo_counters()
            for mine, name in ((self.breaks, "graph_break"), (self.frames, "frames")):
                mine.update(after[name] - before[name])

    def no_region(self) -> Skip:
        """Why no region was compiled. Where there was nothing to compile, no error can hide."""
        if self.breaks:
            return Skip(_SUBJECT, f"Dynamo compiled no region of it: {self._reasons()}", matters=True)
        if self.frames["ok"]:
            return Skip(_SUBJECT, "Dynamo compiled no region of it: there is no tensor operation in it")
        if self.frames["total"]:
            return Skip(_SUBJECT, "Dynamo compiled no region of it: it skips this code", matters=True)
        return Skip(_SUBJECT, f"Dynamo traced none of it: {_SWITCHED_OFF}", matters=True)

    def between_regions(self) -> str | None:
        """A remark on what ran in eager between compiled regions; None if nothing did."""
        return f"graph breaks, around which the program runs in eager: {self._reasons()}" if self.breaks else None

    def _reasons(self) -> str:
        told = list(dict.fromkeys(_in_short(text) for text in self.breaks))
        more = f"; and {len(told) - MOST_REASONS} more" if len(told) > MOST_REASONS else ""
        return "; ".join(told[:MOST_REASONS]) + more


def _in_short(text: str) -> str:
    """The name of a graph break, its explanation and the first hint, without the developers' context."""
    lines = [line.strip() for line in text.splitlines()]
    said = [lines[0].rstrip(".")]
    for label in ("Explanation:", "Hint:"):
        said += [line.removeprefix(label).strip() for line in lines if line.startswith(label)][:1]
    return ". ".join(part.rstrip(".") for part in said if part)
