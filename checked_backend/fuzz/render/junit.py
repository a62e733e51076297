"""Render the findings of fuzzing as JUnit XML, which continuous integration services show."""

from __future__ import annotations

from xml.etree import ElementTree

from checked_backend.findings import Verdict
from checked_backend.fuzz.render.issue import render_issue
from checked_backend.fuzz.render.summary import Shown, Summary
from checked_backend.report.junit import xml_text

__all__ = ["render_junit"]


def render_junit(summary: Summary) -> str:
    """Return a database as JUnit XML: a test case for the run, and one for each group.

    A new group is a ``failure``. Known, documented and unconfirmed groups are ``skipped``: they fail no run. The run is
    an ``error`` if there are doubts: no program was checked, failures wait to be confirmed.
    """
    suite = ElementTree.Element("testsuite", name="checked_backend fuzz")
    run = ElementTree.SubElement(suite, "testcase", classname="checked_backend.fuzz", name="programs")
    text = xml_text("\n".join([summary.title, summary.counts, *summary.doubts]))
    if summary.doubts:
        why = xml_text(summary.doubts[0])
        ElementTree.SubElement(run, "error", type=Verdict.INCONCLUSIVE.value, message=why).text = text
    else:
        ElementTree.SubElement(run, "system-out").text = text
    counted = {"failure": 0, "skipped": 0}
    for shown in summary.groups:
        counted[_add(suite, shown, summary)] += 1
    suite.attrib.update(
        tests=str(1 + len(summary.groups)),
        failures=str(counted["failure"]),
        errors=str(int(bool(summary.doubts))),
        skipped=str(counted["skipped"]),
    )
    root = ElementTree.Element("testsuites")
    root.append(suite)
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _add(suite: ElementTree.Element, shown: Shown, summary: Summary) -> str:
    tag = "failure" if shown.standing == "new" else "skipped"
    name = xml_text(shown.group.signature)
    case = ElementTree.SubElement(suite, "testcase", classname="checked_backend.fuzz.groups", name=name)
    message = (
        shown.group.result.message if tag == "failure" else f"{shown.standing}: {shown.why} {shown.source}".strip()
    )
    problem = ElementTree.SubElement(case, tag, type=shown.standing, message=xml_text(message))
    problem.text = xml_text(render_issue(shown.group, summary.settings))
    return tag
