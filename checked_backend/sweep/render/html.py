"""Render a run as one self-contained HTML page: a table to filter and sort, and a section for each model."""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from checked_backend.report.clean import clean
from checked_backend.report.view import ReportView, sections, view
from checked_backend.sweep.progress import duration
from checked_backend.sweep.render.table import report_of, row, sections_of
from checked_backend.sweep.status import Status
from checked_backend.sweep.summary import CaseSummary, Summary, SweepComparison

__all__ = ["render_html"]

_WIDTH = 320.0
_NOISE_DECADES = 12.0


@dataclass(frozen=True, slots=True)
class _Bar:
    """A number drawn as a bar."""

    label: str
    text: str
    width: float
    kind: str


@dataclass(frozen=True, slots=True)
class _Way:
    """A case in its model's section."""

    summary: CaseSummary
    values: Mapping[str, Any]
    report: ReportView | None
    noise: Sequence[_Bar]
    facts: Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class _Page:
    """A model's section."""

    anchor: str
    suite: str
    model: str
    ways: Sequence[_Way]


def render_html(summary: Summary, comparison: SweepComparison | None = None) -> str:
    """Return a run as one self-contained HTML page. Every text in it is escaped, and only its own script may run."""
    environment = Environment(
        loader=PackageLoader("checked_backend.sweep.render"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["clean"] = clean
    source = environment.loader.get_source(environment, "table.js")[0] if environment.loader is not None else ""
    script = source.replace("\r\n", "\n")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")
    pages = _pages(summary)
    waiting = f", {len(summary.waiting)} without a result" if summary.waiting else ""
    return environment.get_template("sweep.html.j2").render(
        summary=summary,
        title=f"{summary.verdict.value.upper()}: {summary.run.title}{waiting}",
        statuses=[status for status in Status if summary.counts.get(status)],
        pages=pages,
        comparison=comparison,
        changes=list(sections_of(comparison)) if comparison is not None else [],
        sections=sections,
        script=script,
        digest=digest,
    )


def _pages(summary: Summary) -> list[_Page]:
    by_model: dict[tuple[str, str], list[CaseSummary]] = {}
    for case in summary.cases:
        by_model.setdefault((case.case.suite, case.case.model), []).append(case)
    return [
        _Page(f"model-{number}", suite, model, [_way(case) for case in cases])
        for number, ((suite, model), cases) in enumerate(by_model.items())
    ]


def _way(case: CaseSummary) -> _Way:
    values = row(case)
    report = report_of(case)
    limits = report.coverage.detection_limit if report is not None else {}
    return _Way(
        case,
        values,
        None if report is None else view(report),
        [_noise_bar(subject, limit) for subject, limit in list(limits.items())[:20]],
        list(_facts(case, values)),
    )


def _noise_bar(subject: str, limit: float) -> _Bar:
    """A bar for noise, on a logarithmic scale from 1e-12 to 1."""
    share = (
        1.0 if not math.isfinite(limit) else (math.log10(limit) + _NOISE_DECADES) / _NOISE_DECADES if limit > 0 else 0.0
    )
    return _Bar(subject, f"{limit:.2g}", _WIDTH * min(1.0, max(0.0, share)), "noise")


def _facts(case: CaseSummary, values: Mapping[str, Any]) -> Sequence[tuple[str, str]]:
    facts = [
        ("peak memory of the process", _bytes(values["process_peak"])),
        ("process ran", _seconds(values["seconds"])),
        ("host", values["host"]),
        ("finished", values["finished"]),
        ("attempts", ", ".join(result.outcome.status.value for result in case.attempts) if case.flaky else ""),
        ("expected", values["expected"]),
    ]
    return [(name, text) for name, text in facts if text]


def _seconds(value: float | None) -> str:
    return "" if value is None else duration(value)


def _bytes(value: int | None) -> str:
    return "" if value is None else f"{value / 2**20:.1f} MiB"
