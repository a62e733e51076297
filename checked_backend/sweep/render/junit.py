"""Render a run as JUnit XML, which continuous integration services show."""

from __future__ import annotations

from xml.etree import ElementTree

from checked_backend.findings import Verdict
from checked_backend.report.junit import xml_text
from checked_backend.sweep.status import Status
from checked_backend.sweep.summary import CaseSummary, Summary

__all__ = ["render_junit"]


def render_junit(summary: Summary) -> str:
    """Return a run as JUnit XML: a test case for each case.

    A *fail* is a ``failure``. A case without a verdict is an ``error``. A case is ``skipped`` only if a rule skips it
    or expects its status. A case without a result is an ``error``, too.
    """
    suite = ElementTree.Element("testsuite", name="checked_backend sweep")
    counted = {"failure": 0, "error": 0, "skipped": 0}
    for case in summary.cases:
        entry = ElementTree.SubElement(
            suite,
            "testcase",
            classname=xml_text(case.case.suite),
            name=xml_text(str(case.case)),
            time=f"{case.outcome.seconds:.3f}",
        )
        tag = _tag(case)
        if tag is None:
            continue
        counted[tag] += 1
        problem = ElementTree.SubElement(entry, tag, type=case.status.value, message=xml_text(_message(case)))
        problem.text = xml_text("\n".join(part for part in (_message(case), case.outcome.log) if part))
    for waiting in summary.waiting:
        name, why = xml_text(str(waiting)), "it has no result yet"
        entry = ElementTree.SubElement(suite, "testcase", classname=xml_text(waiting.suite), name=name, time="0")
        ElementTree.SubElement(entry, "error", type="waiting", message=why).text = why
        counted["error"] += 1
    numbers = {"failures": counted["failure"], "errors": counted["error"], "skipped": counted["skipped"]}
    suite.attrib.update(
        tests=str(len(summary.cases) + len(summary.waiting)), **{name: str(count) for name, count in numbers.items()}
    )
    root = ElementTree.Element("testsuites")
    root.append(suite)
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _tag(case: CaseSummary) -> str | None:
    verdict = case.outcome.verdict
    if verdict is None:
        return "skipped"
    if verdict is Verdict.PASS:
        return None
    return "failure" if case.status is Status.FAIL else "error"


def _message(case: CaseSummary) -> str:
    parts = (case.outcome.message or case.status.means, case.outcome.expected and f"expected: {case.outcome.expected}")
    return "; ".join(part for part in parts if part)
