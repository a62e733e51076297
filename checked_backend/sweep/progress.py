"""Show the progress of a sweep: a live table in a terminal, else a line for each case."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from checked_backend.report.clean import clean
from checked_backend.report.progress import LiveView
from checked_backend.sweep.case import CaseResult
from checked_backend.sweep.job import Job
from checked_backend.sweep.status import Status

__all__ = ["Progress", "duration"]

_STYLES = {Status.PASS: "green", Status.SKIPPED: "dim", Status.UNSUPPORTED: "dim", Status.INCONCLUSIVE: "yellow"}
_SHOWN = 12


class Progress(LiveView):
    """Shows each case, and the progress of the whole sweep.

    Args:
        total: The number of cases to run.
        done: The number of cases that an earlier sweep has done.
        console: Where to print.
        clock: Returns the time in seconds.
    """

    def __init__(self, total: int, done: int, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._total = total
        self._before = done
        self._console = console
        self._clock = clock
        self._begun = clock()
        self._lock = threading.Lock()
        self._running: dict[int, tuple[Job, float]] = {}
        self._counts: Counter[Status] = Counter()
        super().__init__(console, self._table)  # which draws the table at once

    def begun(self, job: Job) -> None:
        """Note that a case starts. May be called in another thread."""
        with self._lock:
            self._running[id(job)] = (job, self._clock())

    def done(self, job: Job, outcome: CaseResult) -> None:
        """Note that a case has ended."""
        with self._lock:
            self._running.pop(id(job), None)
            self._counts[outcome.status] += 1
            finished = sum(self._counts.values())
        style = _STYLES.get(outcome.status, "bold red" if outcome.status.failed else "")
        line = Text.assemble(
            f"[{finished:>{len(str(self._total))}}/{self._total}] ",
            (f"{outcome.status:<13}", style),
            f" {clean(str(job.case))}  {duration(outcome.seconds)}",
        )
        if outcome.message and outcome.status is not Status.PASS:
            line.append(f"\n{' ' * 8}{clean(outcome.message).splitlines()[0]}", "dim")
        self._console.print(line, soft_wrap=True, highlight=False)

    def time_left(self) -> float | None:
        """Estimated seconds until all cases are done; None before the first has ended."""
        finished = sum(self._counts.values())
        if not finished:
            return None
        return (self._clock() - self._begun) / finished * (self._total - finished)

    def _table(self) -> RenderableType:
        with self._lock:
            running = list(self._running.values())
            counts = dict(self._counts)
        finished, left, now = sum(counts.values()), self.time_left(), self._clock()
        spent = duration(now - self._begun)
        words = [f"{finished} of {self._total} cases", f"{spent} so far"]
        if self._before:
            words.insert(1, f"{self._before} done before")
        if left is not None:
            words.append(f"about {duration(left)} left")
        told = Text(", ".join(f"{count} {status}" for status, count in counts.items()) or "none has ended")
        table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
        for job, begun in running[:_SHOWN]:
            table.add_row("running", Text(clean(job.case.model)), Text(clean(job.case.way)), duration(now - begun))
        if len(running) > _SHOWN:
            table.add_row("", f"and {len(running) - _SHOWN} more", "", "")
        return Group(Text(", ".join(words), style="bold"), told, table)


def duration(seconds: float) -> str:
    """Seconds for people: ``4.2 s``, ``3 min``, ``2 h 05 min``."""
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02d} min"
