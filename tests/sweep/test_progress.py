"""What a person sees while a sweep runs."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from checked_backend.sweep.progress import Progress, duration
from tests.support.sweep_tools import jobs_of, outcome


def told(*, terminal: bool) -> str:
    out = io.StringIO()
    now = [0.0]
    console = Console(file=out, force_terminal=terminal, width=120, color_system=None, markup=False)
    with Progress(4, 3, console, clock=lambda: now[0]) as progress:
        first, second = jobs_of("first", "sec\x1b[31mond")
        progress.begun(first)
        now[0] = 20.0
        progress.done(first, outcome("pass", seconds=20.0))
        progress.begun(second)
        now[0] = 40.0
        assert progress.time_left() == 120.0
        console.print(progress._table())
        progress.done(second, outcome("crash", message="killed by SIGABRT\nmore", seconds=200.0))
    return out.getvalue()


def test_a_line_for_each_case_where_there_is_no_terminal() -> None:
    lines = told(terminal=False).splitlines()
    assert lines[0] == "[1/4] pass          first (inference float32 cpu, eager)  20.0 s"
    assert lines[-2].startswith("[2/4] crash         sec")
    assert lines[-2].endswith("3 min")
    assert lines[-1].strip() == "killed by SIGABRT"


def test_the_table_has_progress_time_left_what_runs_and_counts() -> None:
    text = told(terminal=False)
    assert "1 of 4 cases, 3 done before, 40.0 s so far, about 2 min left" in text
    assert "1 pass" in text
    assert "inference float32 cpu, eager" in text
    assert "\x1b[31m" not in text


def test_a_live_table_in_a_terminal() -> None:
    assert "\x1b[" in told(terminal=True)
    assert "\x1b[31m" not in told(terminal=True)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.04, "0.0 s"), (99.0, "99.0 s"), (100.0, "2 min"), (7500.0, "2 h 05 min")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
