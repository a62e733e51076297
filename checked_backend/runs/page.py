"""A run as one self-contained HTML page: a table to filter and sort, and a section for each model."""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

from jinja2 import PackageLoader

from checked_backend.errors import CheckedBackendError
from checked_backend.report import Report
from checked_backend.report.html import page_environment
from checked_backend.report.view import sections, view
from checked_backend.runs.progress import duration
from checked_backend.runs.summary import CaseSummary, Comparison, Summary

_WIDTH = 320.0
_NOISE_DECADES = 12.0
_MOST_BARS = 20


def render_html(summary: Summary, comparison: Comparison | None = None) -> str:
    """Return a run as one self-contained HTML page. Every text in it is escaped, and only its own script may run."""
    environment = page_environment("checked_backend.runs")
    script = PackageLoader("checked_backend.runs").get_source(environment, "table.js")[0].replace("\r\n", "\n")
    by_model: dict[tuple[str, str], list[CaseSummary]] = {}
    for case in summary.cases:
        by_model.setdefault((case.case.suite, case.case.model), []).append(case)
    waiting = f", {len(summary.waiting)} without a result" if summary.waiting else ""
    return environment.get_template("run.html.j2").render(
        summary=summary,
        title=f"{summary.verdict.value.upper()}: {summary.title}{waiting}",
        pages=[
            {"anchor": f"model-{number}", "suite": suite, "model": model, "ways": [_way(case) for case in cases]}
            for number, ((suite, model), cases) in enumerate(by_model.items())
        ],
        comparison=comparison,
        sections=sections,
        script=script,
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii"),
    )


def _way(case: CaseSummary) -> Mapping[str, Any]:
    """A case in its model's section."""
    report = _report_of(case.result.report)
    limits = {} if report is None else report.coverage.detection_limit
    return {
        "summary": case,
        "row": case.row,
        "report": None if report is None else view(report),
        "noise": [
            {"label": subject, "text": f"{limit:.2g}", "width": _WIDTH * _share(limit), "kind": "noise"}
            for subject, limit in list(limits.items())[:_MOST_BARS]
        ],
        "facts": [(name, text) for name, text in _facts(case) if text],
    }


def _report_of(text: str) -> Report | None:
    try:
        return Report.from_json(text) if text else None
    except CheckedBackendError:
        return None


def _share(limit: float) -> float:
    """A number on a logarithmic scale from 1e-12 to 1."""
    if not limit > 0:
        return 0.0
    return 1.0 if math.isinf(limit) else min(1.0, max(0.0, 1 + math.log10(limit) / _NOISE_DECADES))


def _facts(case: CaseSummary) -> Iterator[tuple[str, str]]:
    result = case.result
    yield "peak memory of the process", "" if result.peak is None else f"{result.peak / 2**20:.1f} MiB"
    yield "process ran", duration(result.seconds)
    yield "host", result.host
    yield "finished", case.finished
    yield "attempts", ", ".join(attempt.result.status for attempt in case.attempts) if case.flaky else ""
    yield "expected", result.expected
