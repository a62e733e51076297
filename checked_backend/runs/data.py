"""A run as JSON and as JUnit XML, which continuous integration services show."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from xml.etree import ElementTree

from checked_backend.findings import Verdict
from checked_backend.report.junit import junit_text, new_case, new_problem
from checked_backend.runs.case import Status
from checked_backend.runs.summary import CaseSummary, Comparison, Summary

_VERSION = 1


def render_json(summary: Summary, comparison: Comparison | None = None) -> str:
    """Return a run as strict JSON: every case with its report, and what changed."""
    found: dict[str, Any] = {
        "schema": f"checked_backend.{summary.kind}",
        "version": _VERSION,
        "verdict": summary.verdict.value,
        "run": _run(summary),
        "counts": {status.value: count for status, count in summary.counts.items()},
        "cases": [
            {**case.row, **case.data, "report": _report(case.result.report), "log": case.result.log}
            for case in summary.cases
        ],
        "waiting": [case.values for case in summary.waiting],
        "damaged": list(summary.damaged),
    }
    if comparison is not None:
        found["since"] = {
            "run": _run(comparison.before),
            "changes": {
                heading: [
                    {
                        "case": change.after.case.values,
                        "before": change.before.status.value,
                        "after": change.after.status.value,
                        "factor": change.factor,
                    }
                    for change in changes
                ]
                for heading, changes in comparison.changes.items()
            },
            "new": [case.case.values for case in comparison.new],
            "gone": [case.case.values for case in comparison.gone],
        }
    return json.dumps(found, indent=2, allow_nan=False)


def _run(summary: Summary) -> Mapping[str, Any]:
    return {"title": summary.title, "versions": summary.plan.versions, "started": summary.plan.started}


def _report(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=str) if text else None
    except (ValueError, RecursionError):
        return None


def render_junit(summary: Summary) -> str:
    """Return a run as JUnit XML: a test case for each case.

    A *fail* is a ``failure``. A case without a verdict or without a result is an ``error``. A case is ``skipped`` only
    if a rule skips it or expects its status.
    """
    suite = ElementTree.Element("testsuite", name=f"checked_backend {summary.kind}")
    for case in summary.cases:
        entry = new_case(suite, str(case.case), case.case.suite, time=f"{case.result.seconds:.3f}")
        if tag := _tag(case):
            expected = case.result.expected and f"expected: {case.result.expected}"
            message = "; ".join(part for part in (case.result.message or case.status.means, expected) if part)
            text = "\n".join(part for part in (message, case.result.log, case.example, *case.texts.values()) if part)
            new_problem(entry, tag, case.status.value, message, text)
    for waiting in summary.waiting:
        entry = new_case(suite, str(waiting), waiting.suite, time="0")
        new_problem(entry, "error", "waiting", "it has no result yet")
    for why in summary.damaged:
        new_problem(new_case(suite, why, "damaged", time="0"), "error", "damaged", why)
    return junit_text(suite)


def _tag(case: CaseSummary) -> str:
    verdict = case.result.verdict
    if verdict is None:
        return "skipped"
    if verdict is Verdict.PASS:
        return ""
    return "failure" if case.status is Status.FAIL else "error"
