"""A report as plain text, and as a `rich` renderable for the terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from checked_backend.findings import Verdict
from checked_backend.report.view import FindingView, sections, view

if TYPE_CHECKING:
    from checked_backend.report.report import Report

__all__ = ["render_rich", "render_text"]

_WIDTH = 100
_LABEL = 12  # the longest label and two spaces

_COLOURS: Mapping[Verdict, str] = MappingProxyType(
    {Verdict.PASS: "bold green", Verdict.FAIL: "bold red", Verdict.INCONCLUSIVE: "bold yellow"}
)


def render_text(report: Report) -> str:
    """Return a report as plain text.

    The first line is the verdict and one sentence. Prose is wrapped at 100 columns; code and paths are not, so that
    they can be copied. There are no colour codes, and control characters in names are written out.
    """
    parts = view(report)
    lines = list(_wrap(f"{parts.verdict.value.upper()}: {parts.sentence}"))
    if parts.title:
        lines.extend(_wrap(parts.title))
    for finding in parts.findings:
        lines.extend(["", *_finding(finding)])
    if parts.more:
        lines.extend(["", *_wrap(parts.more)])
    for heading, entries in sections(parts):
        lines.extend(["", heading])
        for entry in entries:
            lines.extend(_wrap(entry, first="  - ", rest="    "))
    if parts.path:
        lines.extend(["", f"Report: {parts.path}"])
    return "\n".join(lines)


def render_rich(report: Report) -> RenderableType:
    """Return a report for a `rich` console: the words of `render_text`, in colour and at the console's width.

    No text of the report is read as console markup.
    """
    parts = view(report)
    colour = _COLOURS[parts.verdict]
    blocks: list[RenderableType] = [Text.assemble((parts.verdict.value.upper(), colour), f": {parts.sentence}")]
    if parts.title:
        blocks.append(Text(parts.title, style="dim"))
    for finding in parts.findings:
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim", no_wrap=True)
        table.add_column(overflow="fold")
        for row in finding.rows:
            table.add_row(Text(f"  {row.label}"), Text(row.text, style="cyan" if row.code else ""))
        blocks.extend([Text(), Text(finding.title, style="bold"), Text(finding.message), table])
    if parts.more:
        blocks.extend([Text(), Text(parts.more)])
    for heading, entries in sections(parts):
        table = Table.grid(padding=(0, 1))
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for entry in entries:
            table.add_row(Text("  -"), Text(entry))
        blocks.extend([Text(), Text(heading, style="bold"), table])
    if parts.path:
        blocks.extend([Text(), Text(f"Report: {parts.path}")])
    return Group(*blocks)


def _finding(finding: FindingView) -> Iterator[str]:
    yield from _wrap(finding.title, rest="  ")
    yield from _wrap(finding.message, first="  ", rest="  ")
    for row in finding.rows:
        label = f"  {row.label:<{_LABEL}}"
        if row.code:
            first, *others = row.text.split("\n")
            yield label + first
            yield from (" " * len(label) + line for line in others)
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
