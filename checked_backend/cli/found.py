"""Several report files as one result: the worst verdict, and JSON."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from checked_backend.findings import Verdict
from checked_backend.report.codec import dumps, encode
from checked_backend.report.html import render_html
from checked_backend.report.junit import render_junit
from checked_backend.report.merged import merged_report
from checked_backend.report.model_explorer import encode_graphs, encode_node_data
from checked_backend.report.write import ReadReports, write_whole

__all__ = ["encode_found", "merged", "worst_of", "write_found"]


def worst_of(found: ReadReports) -> Verdict:
    """Return the worst verdict. A file that could not be read counts as inconclusive: it may hide a failure."""
    unread = [Verdict.INCONCLUSIVE for _ in found.broken]
    return Verdict.worst([*(report.verdict for report in found.reports), *unread]) or Verdict.INCONCLUSIVE


def merged(found: ReadReports, path: Path) -> ReadReports:
    """Make one report of those that were found.

    Args:
        found: At least one report.
        path: Where they were found.
    """
    return replace(found, reports=(replace(merged_report(found.reports), path=path),))


def encode_found(found: ReadReports, verdict: Verdict) -> dict[str, Any]:
    """Return reports and unreadable files as JSON values."""
    return {
        "schema": "checked_backend.reports",
        "version": 1,
        "verdict": verdict.value,
        "reports": [{"path": str(report.path), "report": encode(report)} for report in found.reports],
        "broken": [{"path": str(file), "reason": reason} for file, reason in found.broken],
    }


def write_found(
    found: ReadReports,
    *,
    html: Path | None,
    junit: Path | None,
    model_explorer: Path | None = None,
) -> None:
    """Write them as one HTML page, as JUnit XML, and as a graph for a viewer, where that is asked for."""
    if html is not None:
        write_whole(render_html(found.reports, found.broken), html)
    if junit is not None:
        write_whole(render_junit(found.reports, found.broken), junit)
    if model_explorer is not None:
        write_whole(dumps(encode_graphs(found.reports)) + "\n", model_explorer)
        data = model_explorer.with_name(f"{model_explorer.stem}_node_data.json")
        write_whole(dumps(encode_node_data(found.reports)) + "\n", data)
