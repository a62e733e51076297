"""Render a run as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from checked_backend.sweep.render.table import row, sections_of
from checked_backend.sweep.summary import Summary, SweepComparison

__all__ = ["render_json"]

_VERSION = 1


def render_json(summary: Summary, comparison: SweepComparison | None = None) -> str:
    """Return a run as strict JSON: every case with its settings and its report, and what changed."""
    found: dict[str, Any] = {
        "schema": "checked_backend.sweep",
        "version": _VERSION,
        "verdict": summary.verdict.value,
        "run": _run(summary.run.number, summary.run.name, summary.run.versions, summary.run.started),
        "counts": {status.value: count for status, count in summary.counts.items()},
        "cases": [
            {**_finite(row(case)), "report": _report(case.outcome.report), "log": case.outcome.log}
            for case in summary.cases
        ],
        "waiting": [json.loads(case.key) for case in summary.waiting],
    }
    if comparison is not None:
        before = comparison.before
        found["since"] = {
            "run": _run(before.number, before.name, before.versions, before.started),
            "changes": {
                heading: [
                    {
                        "case": json.loads(change.after.case.key),
                        "before": change.before.status.value,
                        "after": change.after.status.value,
                        "factor": change.factor,
                    }
                    for change in changes
                ]
                for heading, changes in sections_of(comparison)
            },
            "new": [json.loads(case.case.key) for case in comparison.new],
            "gone": [json.loads(case.case.key) for case in comparison.gone],
        }
    return json.dumps(found, indent=2, allow_nan=False)


def _run(number: int, name: str, versions: Mapping[str, str], started: str) -> Mapping[str, Any]:
    return {"number": number, "name": name, "versions": dict(versions), "started": started}


def _report(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=str) if text else None
    except (ValueError, RecursionError):
        return None


def _finite(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value if not isinstance(value, float) or math.isfinite(value) else repr(value)
        for name, value in values.items()
    }
