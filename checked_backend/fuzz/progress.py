"""Show how a run is going: a live line in a terminal, and a line for each new group."""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Console
from rich.text import Text

from checked_backend.fuzz.database import Corpus
from checked_backend.fuzz.groups import Group
from checked_backend.fuzz.render.summary import standing
from checked_backend.report.clean import clean
from checked_backend.report.progress import LiveView
from checked_backend.runs.progress import duration

__all__ = ["Progress"]

_EVERY = 60.0
"""Seconds between lines where there is no terminal."""


class Progress(LiveView):
    """Tells of new groups, and now and then how many programs, operations and groups there are.

    Args:
        corpus: Where results go.
        console: Where to print.
        known: The signatures of known groups.
        clock: Returns the time in seconds.
    """

    def __init__(
        self, corpus: Corpus, console: Console, known: set[str], clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(console)
        self._corpus = corpus
        self._console = console
        self._known = known
        self._clock = clock
        self._begun = self._told = clock()
        self._before = corpus.totals().checked

    def found(self, group: Group) -> None:
        """Tell of a group that is new in this corpus."""
        word = standing(group, self._known)
        style = "bold red" if word == "new" else "dim"
        line = Text.assemble((f"{word:<11}", style), clean(f"{group.signature}: {group.result.message}"[:200]))
        self._console.print(line, soft_wrap=True, highlight=False)

    def tell(self) -> None:
        """Show the counts."""
        now = self._clock()
        if self.is_shown:
            self.update(Text(self.line()))
        elif now - self._told > _EVERY:
            self._told = now
            self._console.print(self.line(), soft_wrap=True, highlight=False)

    def line(self) -> str:
        """The counts in one line."""
        totals, spent = self._corpus.totals(), self._clock() - self._begun
        rate = (totals.checked - self._before) / max(spent, 1e-9)
        share = totals.compiled / totals.checked if totals.checked else 0.0
        groups = self._corpus.groups()
        bugs = sum(group.confirmed and group.difference is None for group in groups)
        return (
            f"{duration(spent)}: {totals.checked} programs, {rate:.2f} a second, {share:.0%} compiled, "
            f"{totals.ops} operations, {totals.pairs} with dtypes, {bugs} groups"
        )
