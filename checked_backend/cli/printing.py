"""Print for the command line, whatever the terminal's encoding, and say how a verb has ended."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from checked_backend.errors import CheckedBackendError
from checked_backend.findings import Verdict
from checked_backend.program.summary import EXIT_CODES
from checked_backend.report import Report
from checked_backend.report.clean import clean
from checked_backend.report.text import render_rich
from checked_backend.report.write import write_whole
from checked_backend.runs.data import render_json, render_junit
from checked_backend.runs.page import render_html
from checked_backend.runs.summary import Comparison, Summary
from checked_backend.runs.text import render_text

STDOUT = "-"
"""The value of ``--json`` without a file."""

_MISUSE = 3


@dataclass(frozen=True, slots=True)
class Pages:
    """The files to write besides what is printed; None for none. A ``json_file`` of ``-`` is printed instead."""

    html: Path | None = None
    json_file: str | None = None
    junit: Path | None = None

    def write(self, *, html: Callable[[], str], as_json: Callable[[], str], junit: Callable[[], str]) -> bool:
        """Render and write them. Returns whether the JSON was printed, so that no text is to be."""
        printed = self.json_file == STDOUT
        files = ((self.html, html), (self.junit, junit), (None if printed else self.json_file, as_json))
        for path, render in files:
            if path is not None:
                write_file(render(), Path(path))
        if printed:
            print_text(as_json())
        return printed


def show_run(summary: Summary, comparison: Comparison | None, pages: Pages) -> None:
    """Write the pages of a run, and print it as text unless its JSON is printed."""
    printed = pages.write(
        html=lambda: render_html(summary, comparison),
        as_json=lambda: render_json(summary, comparison),
        junit=lambda: render_junit(summary),
    )
    if not printed:
        print_text(render_text(summary, comparison))


def print_report(report: Report, as_json: bool, *, verbose: bool = False) -> None:
    """Print a report to stdout, as JSON or as text."""
    if as_json:
        print_text(report.to_json())
    else:
        print_reports((report,), verbose=verbose)


def print_reports(reports: Sequence[Report], *, verbose: bool) -> None:
    """Print reports to stdout, in colour if stdout is a terminal."""
    console = Console(markup=False, highlight=False, emoji=False)
    for number, shown in enumerate(reports):
        if number:
            print_text("\n" + "-" * 100 + "\n")
        if console.is_terminal:
            console.print(render_rich(shown, width=console.width, verbose=verbose), soft_wrap=True)
        else:
            print_text(shown.to_text(verbose=verbose))


@contextmanager
def users_code(as_json: bool) -> Iterator[None]:
    """Run the user's code. Its output does not mix with JSON, and its exit code is no verdict.

    Raises:
        CheckedBackendError: The code called ``sys.exit``.
    """
    try:
        with redirect_stdout(sys.stderr) if as_json else nullcontext():
            yield
    except SystemExit as stop:
        code = "" if stop.code is None else repr(stop.code)
        raise CheckedBackendError(f"the program called sys.exit({code}); it was not checked") from stop


def write_file(text: str, path: Path) -> None:
    """Write a file that was asked for, and say so on stderr."""
    write_whole(text.rstrip("\n") + "\n", path)
    complain(f"wrote {path}")


def print_text(text: str) -> None:
    """Print to stdout. Characters that its encoding lacks are escaped."""
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding))  # noqa: T201


def say(text: str) -> None:
    """Print to stderr."""
    print(text, file=sys.stderr)  # noqa: T201


def complain(text: str) -> None:
    """Print to stderr, after the program's name."""
    say(f"checked-backend: {clean(text)}")


class ChildEnded(Exception):
    """Raised when a child process has done the work, with its exit status."""

    def __init__(self, status: int) -> None:
        super().__init__(f"exit status {status}")
        self.status = status


def exit_code(produce: Callable[[], Any]) -> int:
    """The exit code of a verb, by the verdict that it returns. An error that it raises is printed."""
    try:
        result = produce()
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read our output has gone, for example `head`. Python must not complain again when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except CheckedBackendError as error:
        complain(str(error))
    except OSError as error:
        complain(f"{error.filename or 'a file'}: {error.strerror or error}")
    except ChildEnded as ended:
        return ended.status
    except (typer.Abort, KeyboardInterrupt):
        complain("stopped")
    except MemoryError:
        complain("there is not enough memory")
    except Exception as error:
        show = getattr(error, "show", None)  # click's usage errors; typer has no public name for their base class
        if callable(show):
            show()
        else:
            traceback.print_exc()
            complain("internal error: this is a bug in checked_backend; please report it with the lines above")
    else:
        return EXIT_CODES[result] if isinstance(result, Verdict) else 0 if result in (None, 0) else _MISUSE
    return _MISUSE
