"""Render a run as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from checked_backend.report.clean import clean
from checked_backend.sweep.render.table import sections_of
from checked_backend.sweep.status import Status
from checked_backend.sweep.summary import CaseSummary, Summary, SweepComparison

__all__ = ["render_text"]

_SHOWN = 40


def render_text(summary: Summary, comparison: SweepComparison | None = None) -> str:
    """Return a run as text: counts, cases that did not pass, and what changed since another run."""
    return "\n".join(_lines(summary, comparison))


def _lines(summary: Summary, comparison: SweepComparison | None) -> Iterator[str]:
    counts = ", ".join(f"{count} {status}" for status, count in summary.counts.items()) or "no cases"
    if summary.waiting:
        counts += f", {len(summary.waiting)} without a result"
    yield f"{summary.verdict.value.upper()}: {clean(summary.run.title)}: {counts}"
    for status in Status:
        if status is not Status.PASS:
            yield from _of_status(status, [case for case in summary.cases if case.status is status])
    if summary.waiting:
        yield f"\nwithout a result ({len(summary.waiting)}): sweep again with the same --db, or merge the other parts"
        yield from (f"  {clean(str(case))}" for case in summary.waiting[:_SHOWN])
        if len(summary.waiting) > _SHOWN:
            yield f"  and {len(summary.waiting) - _SHOWN} more"
    flaky = [case for case in summary.cases if case.flaky]
    if flaky:
        yield f"\nflaky ({len(flaky)})"
        for case in flaky:
            ended = ", ".join(result.outcome.status.value for result in case.attempts)
            yield f"  {clean(str(case.case))}: {ended}"
    if comparison is not None:
        yield from _changes(comparison)


def _of_status(status: Status, cases: Sequence[CaseSummary]) -> Iterator[str]:
    if not cases:
        return
    yield f"\n{status} ({len(cases)}): {status.means}"
    for case in cases[:_SHOWN]:
        why = clean(case.outcome.message).partition("\n")[0]
        yield f"  {clean(str(case.case))}: {why}"
        if case.outcome.expected:
            yield f"    expected: {clean(case.outcome.expected)}"
    if len(cases) > _SHOWN:
        yield f"  and {len(cases) - _SHOWN} more"


def _changes(comparison: SweepComparison) -> Iterator[str]:
    yield f"\nsince {clean(comparison.before.title)}:"
    sections = list(sections_of(comparison))
    for heading, changes in sections:
        yield f"  {heading} ({len(changes)})"
        for change in changes[:_SHOWN]:
            yield f"    {clean(str(change.after.case))}: {change.words}"
        if len(changes) > _SHOWN:
            yield f"    and {len(changes) - _SHOWN} more"
    if not sections:
        yield "  nothing changed"
    for words, cases in (("only in the later run", comparison.new), ("only in the earlier run", comparison.gone)):
        if cases:
            yield f"  {words} ({len(cases)})"
            yield from (f"    {clean(str(case.case))}: {case.status}" for case in cases[:_SHOWN])
            if len(cases) > _SHOWN:
                yield f"    and {len(cases) - _SHOWN} more"
