"""A report as plain text, and the same in colour for a terminal."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from rich.text import Text

from checked_backend.findings import Verdict
from checked_backend.report.details import Row
from checked_backend.report.view import CauseView, sections, view
from checked_backend.report.words import plain_names, with_texts

if TYPE_CHECKING:
    from checked_backend.report.report import Report

_WIDTH = 100
_LABEL = 12  # the longest label and two spaces

_COLOURS: Mapping[Verdict, str] = {
    Verdict.PASS: "bold green",
    Verdict.FAIL: "bold red",
    Verdict.INCONCLUSIVE: "bold yellow",
}


class _Line(NamedTuple):
    """A line, with what is in front of its text."""

    label: str
    text: str = ""
    style: str = ""
    label_style: str = "dim"


def render_text(report: Report, *, verbose: bool = False) -> str:
    """Return a report as plain text.

    The first line is the verdict and the worst cause. Prose is wrapped at 100 columns; code and paths are not, so that
    they can be copied, nor is the first line. There are no colour codes, and control characters in names are written
    out. ``verbose`` tells all that is known of each finding, the coverage in full, and the environment.
    """
    return "\n".join(f"{line.label}{line.text}" for line in _lines(report, verbose, _WIDTH))


def render_rich(report: Report, *, width: int, verbose: bool = False) -> Text:
    """Return the words of `render_text` in colour, wrapped at a console's width.

    No text of the report is read as console markup.
    """
    shown = Text()
    for line in _lines(report, verbose, width):
        shown.append(line.label, line.label_style).append(f"{line.text}\n", line.style)
    shown.rstrip()
    return shown


def _lines(report: Report, verbose: bool, width: int) -> Iterator[_Line]:
    parts = view(report)
    if not verbose:
        parts = with_texts(parts, plain_names)
    yield _Line(parts.verdict.value.upper(), f": {parts.sentence}", label_style=_COLOURS[parts.verdict])
    if parts.title:
        yield from _wrap(parts.title, width, style="dim")
    for cause in parts.causes:
        yield _Line("")
        yield from _cause(cause, verbose, width)
    if parts.more:
        yield _Line("")
        yield from _wrap(parts.more, width)
    for heading, entries in sections(parts, short=not verbose):
        yield from (_Line(""), _Line("", heading, "bold"))
        for entry in entries:
            yield from _wrap(entry, width, "  - ", "    ")
    brief = parts.coverage and not verbose
    if brief or parts.path:
        yield _Line("")
    if brief:
        yield from _wrap(f"Checked: {parts.coverage}", width, rest="  ", style="dim")
    if parts.path:
        yield _Line("", f"Report: {parts.path}")
        if parts.causes:  # the page is worth it where something was found
            yield _Line("", f"Page:   checked-backend report {shlex.quote(parts.path)} --html page.html")


def _cause(cause: CauseView, verbose: bool, width: int) -> Iterator[_Line]:
    yield from _wrap(cause.title, width, rest="   ", style="bold")
    if cause.line:
        yield _Line(f"   {cause.line_label:<{_LABEL}}", cause.line, "cyan")
        yield from (_Line("     | ", line) for line in cause.code.split("\n") if line)
    yield from _wrap(cause.sentence, width, "   ", "   ")
    label = "differs" if cause.is_warning else "wrong"
    because = [Row("because", cause.message)] if cause.message else []
    results = [Row("" if place else label, result) for place, result in enumerate(cause.results)]
    yield from _rows([*because, *results, *cause.rows], "   ", width)
    for finding in cause.findings if verbose else ():
        yield _Line("")
        yield from _wrap(finding.title, width, "   ", "     ", "bold")
        yield from _wrap(finding.message, width, "     ", "     ")
        yield from _rows(finding.rows, "     ", width)


def _rows(rows: Sequence[Row], indent: str, width: int) -> Iterator[_Line]:
    for row in rows:
        label = f"{indent}{row.label:<{_LABEL}}"
        if row.code:
            for place, line in enumerate(row.text.split("\n")):
                yield _Line((" " * len(label) if line else "") if place else label, line, "cyan")
        else:
            yield from _wrap(row.text, width, label, " " * len(label))


def _wrap(text: str, width: int, first: str = "", rest: str = "", style: str = "") -> Iterator[_Line]:
    """Wrap each line of a text by itself; a word longer than the line is kept whole."""
    indent = first
    for line in text.split("\n"):
        wrapped = textwrap.wrap(
            line, width, initial_indent=indent, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
        )
        for one in wrapped or [indent.rstrip()]:
            yield _Line(one[: len(indent)], one[len(indent) :], style)
            indent = rest
