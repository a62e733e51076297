"""Print for the command line, whatever the terminal's encoding."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.console import Console

from checked_backend.report import Report
from checked_backend.report.clean import clean
from checked_backend.report.text import render_rich

__all__ = ["STDOUT", "Verbose", "complain", "print_reports", "print_text"]

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
            console.print(render_rich(shown, verbose=verbose), soft_wrap=False)
        else:
            print_text(shown.to_text(verbose=verbose))


def print_text(text: str) -> None:
    """Print to stdout. Characters that its encoding lacks are escaped."""
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding))  # noqa: T201


def complain(text: str) -> None:
    """Print to stderr, after the program's name."""
    print(f"checked-backend: {clean(text)}", file=sys.stderr)  # noqa: T201
