"""Print for the command line, whatever the terminal's encoding."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from typing import Annotated

import typer
from rich.console import Console

from checked_backend.errors import CheckedBackendError
from checked_backend.report import Report
from checked_backend.report.clean import clean
from checked_backend.report.text import render_rich

__all__ = ["STDOUT", "Verbose", "complain", "print_reports", "print_text", "users_code"]

STDOUT = "-"
"""The value of ``--json`` without a file."""

Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Tell all that is known.")]


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

    Args:
        as_json: Whether stdout is to have JSON alone.

    Raises:
        CheckedBackendError: The code called ``sys.exit``.
    """
    try:
        with redirect_stdout(sys.stderr) if as_json else nullcontext():
            yield
    except SystemExit as stop:
        code = "" if stop.code is None else repr(stop.code)
        raise CheckedBackendError(f"the program called sys.exit({code}); it was not checked") from stop


def print_text(text: str) -> None:
    """Print to stdout. Characters that its encoding lacks are escaped."""
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding))  # noqa: T201


def complain(text: str) -> None:
    """Print to stderr, after the program's name."""
    print(f"checked-backend: {clean(text)}", file=sys.stderr)  # noqa: T201
