"""A report as plain text, and as a `rich` renderable for the terminal."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from checked_backend.findings import Verdict
from checked_backend.report.details import Row
from checked_backend.report.view import CauseView, ReportView, sections, short_sections, view

if TYPE_CHECKING:
    from checked_backend.report.report import Report

__all__ = ["render_rich", "render_text"]

_WIDTH = 100
_LABEL = 12  # the longest label and two spaces

_COLOURS: Mapping[Verdict, str] = MappingProxyType(
    {Verdict.PASS: "bold green", Verdict.FAIL: "bold red", Verdict.INCONCLUSIVE: "bold yellow"}
)


def render_text(report: Report, *, verbose: bool = False) -> str:
    """Return a report as plain text.

    The first line is the verdict and the worst cause. Prose is wrapped at 100 columns; code and paths are not, so that
    they can be copied, nor is the first line. There are no colour codes, and control characters in names are written
    out.

    Args:
        verbose: Tell all that is known of each finding, the coverage in full, and the environment.
    """
    parts = view(report)
    lines = [f"{parts.verdict.value.upper()}: {parts.sentence}"]
    if parts.title:
        lines.extend(_wrap(parts.title))
    for cause in parts.causes:
        lines.extend(["", *_cause(cause, verbose=verbose)])
    if parts.more:
        lines.extend(["", *_wrap(parts.more)])
    for heading, entries in sections(parts) if verbose else short_sections(parts):
        lines.extend(["", heading])
        for entry in entries:
            lines.extend(_wrap(entry, first="  - ", rest="    "))
    if parts.coverage and not verbose:
        lines.extend(["", *_wrap(f"Checked: {parts.coverage}", rest="  ")])
    if parts.path:
        lines.extend([*([] if parts.coverage and not verbose else [""]), f"Report: {parts.path}"])
        lines.extend(_page(parts))
    return "\n".join(lines)


def render_rich(report: Report, *, verbose: bool = False) -> RenderableType:
    """Return a report for a `rich` console: the words of `render_text`, in colour and at the console's width.

    No text of the report is read as console markup.
    """
    parts = view(report)
    colour = _COLOURS[parts.verdict]
    blocks: list[RenderableType] = [Text.assemble((parts.verdict.value.upper(), colour), f": {parts.sentence}")]
    if parts.title:
        blocks.append(Text(parts.title, style="dim"))
    for cause in parts.causes:
        blocks.extend([Text(), Text(cause.title, style="bold")])
        if cause.line:
            blocks.append(
                Text.assemble((f"   your line   {cause.line}", "cyan"), f"\n     | {cause.code}" if cause.code else "")
            )
        blocks.extend([Text(f"   {cause.sentence}"), _rich_rows(_rows_of(cause))])
        for finding in cause.findings if verbose else ():
            blocks.extend([Text(f"   {finding.title}", style="bold"), Text(f"   {finding.message}")])
            blocks.append(_rich_rows(finding.rows))
    if parts.more:
        blocks.extend([Text(), Text(parts.more)])
    for heading, entries in sections(parts) if verbose else short_sections(parts):
        table = Table.grid(padding=(0, 1))
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for entry in entries:
            table.add_row(Text("  -"), Text(entry))
        blocks.extend([Text(), Text(heading, style="bold"), table])
    if parts.coverage and not verbose:
        blocks.extend([Text(), Text(f"Checked: {parts.coverage}", style="dim")])
    if parts.path:
        blocks.append(Text(f"Report: {parts.path}"))
        blocks.extend(map(Text, _page(parts)))
    return Group(*blocks)


def _page(parts: ReportView) -> Iterator[str]:
    """The command that draws a report, which is worth it where something was found."""
    if parts.causes:
        yield f"Page:   checked-backend report {shlex.quote(parts.path)} --html page.html"


def _rows_of(cause: CauseView) -> tuple[Row, ...]:
    label = "differs" if cause.is_warning else "wrong"
    results = tuple(Row("" if place else label, result) for place, result in enumerate(cause.results))
    return (Row("because", cause.message), *results, *cause.rows) if cause.message else (*results, *cause.rows)


def _rich_rows(rows: Sequence[Row]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(Text(f"   {row.label}"), Text(row.text, style="cyan" if row.code else ""))
    return table


def _cause(cause: CauseView, *, verbose: bool) -> Iterator[str]:
    yield from _wrap(cause.title, rest="   ")
    if cause.line:
        yield f"   {'your line':<{_LABEL}}{cause.line}"
        yield from (f"     | {line}" for line in cause.code.split("\n") if line)
    yield from _wrap(cause.sentence, first="   ", rest="   ")
    yield from _rows(_rows_of(cause), "   ")
    for finding in cause.findings if verbose else ():
        yield ""
        yield from _wrap(finding.title, first="   ", rest="     ")
        yield from _wrap(finding.message, first="     ", rest="     ")
        yield from _rows(finding.rows, "     ")


def _rows(rows: Sequence[Row], indent: str) -> Iterator[str]:
    for row in rows:
        label = f"{indent}{row.label:<{_LABEL}}"
        if row.code:
            first, *others = row.text.split("\n")
            yield label + first
            yield from ((" " * len(label) + line).rstrip() for line in others)
        else:
            yield from _wrap(row.text, first=label, rest=" " * len(label))


def _wrap(text: str, *, first: str = "", rest: str = "") -> Iterator[str]:
    """Wrap each line of a text by itself; a word longer than the line is kept whole."""
    indent = first
    for line in text.split("\n"):
        wrapped = textwrap.wrap(
            line,
            _WIDTH,
            initial_indent=indent,
            subsequent_indent=rest,
            break_long_words=False,
            break_on_hyphens=False,
        )
        yield from wrapped or [indent.rstrip()]
        indent = rest
