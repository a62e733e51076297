"""The progress of a run: a line for each case that ends, and on a terminal also what runs and how long it may take."""

from __future__ import annotations

from collections import Counter

from rich import progress
from rich.console import Console
from rich.text import Text

from checked_backend.report.clean import clean, first_line
from checked_backend.runs.case import Case, CaseResult, Status

_STYLES = {Status.PASS: "green", Status.SKIPPED: "dim", Status.UNSUPPORTED: "dim", Status.INCONCLUSIVE: "yellow"}


class Progress:
    """Is shown while it is entered, and leaves the lines behind.

    Args:
        total: The number of cases to run.
        done: The number of cases that were done before.
    """

    def __init__(self, total: int, done: int, console: Console) -> None:
        self._total = total
        self._before = f", {done} done before" if done else ""
        self._console = console
        self._counts: Counter[Status] = Counter()
        self._running: dict[Case, progress.TaskID] = {}
        self._view = progress.Progress(
            progress.TextColumn("{task.description}", markup=False),
            progress.BarColumn(),
            progress.TimeElapsedColumn(),
            progress.TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._all = self._view.add_task(self._words(), total=total)

    def __enter__(self) -> progress.Progress:
        return self._view.__enter__()

    def __exit__(self, *_: object) -> None:
        self._view.stop()

    def begun(self, case: Case) -> None:
        """Note that a case starts. May be called in another thread."""
        self._running[case] = self._view.add_task(clean(f"  {case}"), total=None)

    def done(self, case: Case, result: CaseResult) -> None:
        """Note that a case has ended."""
        if case in self._running:
            self._view.remove_task(self._running.pop(case))
        self._counts[result.status] += 1
        self._view.update(self._all, advance=1, description=self._words())
        line = Text.assemble(
            f"[{self._counts.total():>{len(str(self._total))}}/{self._total}] ",
            (f"{result.status:<13}", _STYLES.get(result.status, "bold red" if result.status.failed else "")),
            f" {clean(str(case))}  {duration(result.seconds)}",
        )
        if result.message and result.status is not Status.PASS:
            line.append(f"\n{' ' * 8}{first_line(result.message)}", "dim")
        self._console.print(line, soft_wrap=True, highlight=False)

    def _words(self) -> str:
        counts = "".join(f", {count} {status}" for status, count in self._counts.items())
        return f"{self._counts.total()} of {self._total} cases{self._before}{counts}"


def duration(seconds: float) -> str:
    """Seconds for people: ``4.2 s``, ``3 min``, ``2 h 05 min``."""
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02d} min"
