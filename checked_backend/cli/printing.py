"""What the command line prints, whatever the terminal's encoding."""

from __future__ import annotations

import sys

from checked_backend.report.clean import clean

__all__ = ["complain", "print_text"]


def print_text(text: str) -> None:
    """Print to stdout; what its encoding lacks is escaped."""
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding))  # noqa: T201


def complain(text: str) -> None:
    """Print to stderr, under the program's name."""
    print(f"checked-backend: {clean(text)}", file=sys.stderr)  # noqa: T201
