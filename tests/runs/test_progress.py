"""What a person sees while a sweep runs."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from checked_backend.runs.progress import Progress, duration
from tests.support.sweep_tools import jobs_of, outcome


def told(*, terminal: bool) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=120, color_system=None, markup=False)
    with (shown := Progress(4, 3, console)) as view:
        first, second = (job.case for job in jobs_of("first", "sec\x1b[31m[bold]ond"))
        shown.begun(first)
        shown.done(first, outcome("pass", seconds=20.0))
        shown.begun(second)
        view.refresh()
        shown.done(second, outcome("crash", message="killed by SIGABRT\nmore", seconds=200.0))
    return out.getvalue()


def test_a_line_for_each_case_where_there_is_no_terminal() -> None:
    assert told(terminal=False).splitlines() == [
        "[1/4] pass          first (inference float32 cpu, eager)  20.0 s",
        "[2/4] crash         sec\\x1b[31m[bold]ond (inference float32 cpu, eager)  3 min",
        "        killed by SIGABRT",
    ]


def test_a_terminal_also_shows_what_runs_how_far_it_is_and_counts() -> None:
    text = told(terminal=True)
    assert "1 of 4 cases, 3 done before, 1 pass" in text
    assert "  sec\\x1b[31m[bold]ond (inference float32 cpu, eager)" in text
    assert "\x1b[31m" not in text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.04, "0.0 s"), (99.0, "99.0 s"), (100.0, "2 min"), (7500.0, "2 h 05 min")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
