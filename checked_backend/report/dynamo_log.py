"""Read what Dynamo logged about a program's code: graph breaks, skipped functions, the recompile limit."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from checked_backend._torch.dynamo import dynamo_counters, dynamo_hides_errors
from checked_backend.findings import Skip

MOST_REASONS = 3
"""Graph breaks that are told."""

_NO_GRAPH = "Dynamo compiled no region of it"
_NOT_ASKED = (
    "it is switched off (TORCH_COMPILE_DISABLE, torch._dynamo.config.disable, a stance), what runs is no Python code, "
    "or an earlier call had left it to eager"
)
_LIMIT = "recompile limit"


@dataclass(slots=True)
class DynamoLog:
    """A record of what Dynamo did while a program ran.

    Attributes:
        breaks: Its own words on each graph break.
        refused: Its own words on everything that it did not trace: graph breaks, and functions it gave up on.
        frames: How many functions it looked at (``total``) and translated (``ok``).
        hides_errors: Whether its own errors raise nothing. Without that, threads that compile at the same time make
            the two numbers differ too.
    """

    breaks: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    frames: Counter[str] = field(default_factory=Counter)
    hides_errors: bool = False

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Count what happens inside of the block."""
        before = dynamo_counters()
        try:
            yield
        finally:
            self.add(before, dynamo_counters())

    def add(self, before: dict[str, Counter[str]], after: dict[str, Counter[str]]) -> None:
        """Count what happened between two readings of Dynamo's counters."""
        for mine, name in ((self.breaks, "graph_break"), (self.refused, "unimplemented"), (self.frames, "frames")):
            mine.update(after[name] - before[name])
        self.hides_errors |= dynamo_hides_errors()

    @property
    def looked(self) -> bool:
        """Whether Dynamo looked at any function."""
        return bool(self.frames["total"] or self.breaks or self.refused)

    def no_region(self, subject: str) -> Skip:
        """Why no region was compiled. It matters always: eager was compared with eager."""
        return Skip(subject, f"{_NO_GRAPH}: {self._why()}" if self.looked else self._why(), matters=True)

    def in_eager(self, subject: str) -> Iterator[Skip]:
        """Calls that ran in eager although other calls of the same functions were compiled."""
        if any(_LIMIT in text for text in self.refused):
            told = _in_short(next(text for text in self.refused if _LIMIT in text))
            yield Skip(subject, f"some of its calls ran in eager, where Dynamo gave up: {told}", matters=True)
        failed = self.frames["total"] - self.frames["ok"]
        if self.hides_errors and failed > 0 and not self.refused:
            counted = "a function" if failed == 1 else f"{failed} functions"
            yield Skip(subject, f"{counted} ran in eager: {_FAILED}", matters=True)

    def notes(self) -> tuple[str, ...]:
        """What to say of graph breaks where regions were compiled around them."""
        return (f"graph breaks, around which the program runs in eager: {self.reasons()}",) if self.breaks else ()

    def reasons(self) -> str:
        """The first few graph breaks in short."""
        told = list(dict.fromkeys(map(_in_short, self.breaks or self.refused)))
        more = f"; and {len(told) - MOST_REASONS} more" if len(told) > MOST_REASONS else ""
        return "; ".join(told[:MOST_REASONS]) + more

    def _why(self) -> str:
        if self.breaks or self.refused:
            return self.reasons()
        if not self.frames["total"]:
            return f"Dynamo traced none of it: {_NOT_ASKED}"
        if self.frames["ok"]:
            return "there is no tensor operation in it"
        return f"it skips this code; {_FAILED}"


_FAILED = "Dynamo raised an error there, which torch._dynamo.config.suppress_errors hides, or the code raised itself"


def _in_short(text: str) -> str:
    """The name of a graph break, its explanation (of a list, the first point) and the first hint."""
    lines = [line.strip() for line in re.sub(r":\n\s*- ", ": ", text).splitlines()]
    said = [lines[0].rstrip(".")]
    for label in ("Explanation:", "Hint:"):
        said += [line.removeprefix(label).strip() for line in lines if line.startswith(label)][:1]
    return ". ".join(part.rstrip(".") for part in said if part)
