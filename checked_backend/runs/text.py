"""A run as text: counts, cases that did not pass, and what changed since another run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from textwrap import indent

from checked_backend.report.clean import clean, first_line
from checked_backend.runs.case import Status
from checked_backend.runs.summary import Comparison, Summary

_SHOWN = 40


def render_text(summary: Summary, comparison: Comparison | None = None) -> str:
    """Return a run as text."""
    return "\n".join(_lines(summary, comparison))


def _lines(summary: Summary, comparison: Comparison | None) -> Iterator[str]:
    counts = ", ".join(summary.counted.values()) or "no cases"
    if summary.waiting:
        counts += f", {len(summary.waiting)} without a result"
    yield f"{summary.verdict.value.upper()}: {clean(summary.title)}: {counts}"
    for status in summary.counts:
        if status is not Status.PASS:
            cases = [case for case in summary.cases if case.status is status]
            told = []
            for case in cases:
                expected = f"\n    expected: {clean(case.result.expected)}" if case.result.expected else ""
                example = indent(f"\n{clean(case.example)}", " " * 6) if case.example else ""
                name = clean(str(case.case)).replace("\n", " ")
                told.append(f"{name}: {first_line(case.result.message)}{expected}{example}")
            yield from _section(f"\n{status} ({{}}): {status.means}", told)
    waiting = "\nwithout a result ({}): sweep again with the same --out, or merge the other parts"
    yield from _section(waiting, [clean(str(case)) for case in summary.waiting])
    yield from _section("\nno results ({}), left as they are", [clean(why) for why in summary.damaged])
    ended = {
        case.case: ", ".join(attempt.result.status for attempt in case.attempts) for case in summary.cases if case.flaky
    }
    yield from _section("\nflaky ({})", [f"{clean(str(case))}: {statuses}" for case, statuses in ended.items()])
    if comparison is None:
        return
    yield f"\nsince {clean(comparison.before.title)}:"
    for heading, changes in comparison.changes.items():
        told = [f"{clean(str(change.after.case))}: {change.words}" for change in changes]
        yield from _section(f"  {heading} ({{}})", told, "    ")
    if not comparison.changes:
        yield "  nothing changed"
    for words, only in (("only in the later run", comparison.new), ("only in the earlier run", comparison.gone)):
        yield from _section(f"  {words} ({{}})", [f"{clean(str(case.case))}: {case.status}" for case in only], "    ")


def _section(heading: str, lines: Sequence[str], indent: str = "  ") -> Iterator[str]:
    if lines:
        yield heading.format(len(lines))
        yield from (f"{indent}{line}" for line in lines[:_SHOWN])
        if len(lines) > _SHOWN:
            yield f"{indent}and {len(lines) - _SHOWN} more"
