"""Remove findings from a report by rules: ignored outputs, and errors that a rule calls noise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from checked_backend.findings import Finding, Kind, Skip
from checked_backend.report import Report
from checked_backend.subjects import Subject
from checked_backend.sweep.rules import matches
from checked_backend.sweep.settings import Settings

__all__ = ["override"]

_OF_VALUES = (Kind.PRECISION, Kind.LOGIC)


def override(report: Report, settings: Settings) -> Report:
    """Remove the findings that rules ignore. The coverage keeps each of them, with the rule's reason."""
    kept: list[Finding] = []
    ignored: list[Finding] = []
    notes: list[str] = []
    for finding in report.findings:
        why = _ignored(finding.subject, settings.ignore_outputs) or _noise(finding, settings.noise)
        if why is None:
            kept.append(finding)
        else:
            ignored.append(finding)
            notes.append(f"{finding.subject}: a rule takes it out of the verdict: {why}")
    skipped = tuple(_harmless(skip, settings.ignore_outputs) for skip in report.coverage.skipped)
    coverage = replace(
        report.coverage,
        skipped=skipped,
        ignored=(*report.coverage.ignored, *ignored),
        notes=(*report.coverage.notes, *notes),
    )
    return replace(report, findings=tuple(kept), coverage=coverage)


def _matching(subject: str, names: Mapping[str, object]) -> str | None:
    bare = Subject.of(subject).text
    return next((name for name in names if matches(name, bare)), None)


def _ignored(subject: str, names: Mapping[str, str]) -> str | None:
    found = _matching(subject, names)
    return None if found is None else names[found]


def _noise(finding: Finding, limits: Mapping[str, tuple[float, str]]) -> str | None:
    found = _matching(finding.subject, limits)
    metrics = finding.metrics
    if found is None or finding.kind not in _OF_VALUES or metrics is None or metrics.nonfinite_mismatched:
        return None
    limit, reason = limits[found]
    if not metrics.reference_rms or metrics.rmse / metrics.reference_rms > limit:
        return None
    return f"{reason} (its relative error {metrics.rmse / metrics.reference_rms:.2g} is within {limit:g})"


def _harmless(skip: Skip, names: Mapping[str, str]) -> Skip:
    return replace(skip, matters=False) if skip.matters and _matching(skip.subject, names) else skip
