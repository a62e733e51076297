"""The fields of a case that every rendering shows, as plain values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from checked_backend.errors import CheckedBackendError
from checked_backend.report import Report
from checked_backend.sweep.summary import CaseChange, CaseSummary, SweepComparison

__all__ = ["COLUMNS", "report_of", "row", "sections_of"]

COLUMNS = (
    "suite",
    "model",
    "mode",
    "dtype",
    "device",
    "compiler",
    "dynamic",
    "status",
    "flaky",
    "attempts",
    "message",
    "expected",
    "seconds",
    "process_peak",
    "noise",
    "host",
    "finished",
)


def row(summary: CaseSummary) -> Mapping[str, Any]:
    """The values of a case, by the names in `COLUMNS`."""
    case, outcome = summary.case, summary.outcome
    values = (
        case.suite,
        case.model,
        case.mode,
        case.dtype,
        case.device,
        case.compiler,
        case.dynamic,
        summary.status.value,
        summary.flaky,
        len(summary.attempts),
        outcome.message,
        outcome.expected,
        outcome.seconds,
        outcome.peak,
        outcome.noise,
        outcome.host,
        max(result.finished for result in summary.attempts),
    )
    return dict(zip(COLUMNS, values, strict=True))


def sections_of(comparison: SweepComparison) -> Iterator[tuple[str, Sequence[CaseChange]]]:
    """The changes by heading, the worst first, without empty headings."""
    for heading, changes in (
        ("newly failing", comparison.newly_failing),
        ("fixed", comparison.fixed),
        ("other changes", comparison.changed),
        ("noisier", comparison.noisier),
    ):
        if changes:
            yield heading, changes


def report_of(summary: CaseSummary) -> Report | None:
    """The check's report; None if there is none or it cannot be read."""
    if not summary.outcome.report:
        return None
    try:
        return Report.from_json(summary.outcome.report)
    except CheckedBackendError:
        return None
