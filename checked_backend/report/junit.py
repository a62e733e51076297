"""Reports as JUnit XML, which continuous integration services show."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree

from checked_backend.findings import Verdict
from checked_backend.report.clean import clean

if TYPE_CHECKING:
    from checked_backend.report.report import Report

_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def render_junit(reports: Sequence[Report], broken: Sequence[tuple[Path, str]] = ()) -> str:
    """Return reports as JUnit XML: one test case per report.

    A *fail* is a ``failure``. An *inconclusive* verdict and an unreadable file are an ``error``, because most services
    count ``skipped`` as success and neither is a pass.
    """
    verdicts = [report.verdict for report in reports]
    suite = ElementTree.Element("testsuite", name="checked_backend")
    for number, (report, verdict) in enumerate(zip(reports, verdicts, strict=True), 1):
        case = new_case(suite, report.title or (report.path.name if report.path else f"report {number}"))
        text = report.to_text(verbose=True)
        if verdict is Verdict.PASS:
            ElementTree.SubElement(case, "system-out").text = xml_text(text)
        else:
            new_problem(case, "failure" if verdict is Verdict.FAIL else "error", verdict.value, text=text)
    for path, reason in broken:
        new_problem(new_case(suite, str(path)), "error", "unreadable", text=reason)
    return junit_text(suite)


def junit_text(suite: ElementTree.Element) -> str:
    """A suite as the text of a file, with the numbers of its cases."""
    counts = (("tests", "testcase"), ("failures", "failure"), ("errors", "error"), ("skipped", "skipped"))
    suite.attrib.update({name: str(sum(1 for _ in suite.iter(tag))) for name, tag in counts})
    root = ElementTree.Element("testsuites")
    root.append(suite)
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def new_case(suite: ElementTree.Element, name: str, group: str = "checked_backend", **more: str) -> ElementTree.Element:
    """Add a test case."""
    return ElementTree.SubElement(suite, "testcase", {"classname": xml_text(group), "name": xml_text(name), **more})


def new_problem(case: ElementTree.Element, tag: str, kind: str, message: str = "", text: str = "") -> None:
    """Say why a case did not pass: a message of one line, which is the text's first if none is given, and a text."""
    message, text = xml_text(message or text.partition("\n")[0]), xml_text(text or message)
    ElementTree.SubElement(case, tag, type=kind, message=message).text = text


def xml_text(text: str) -> str:
    """Text without what XML, or a terminal that shows it, cannot take."""
    return _NOT_XML.sub("\ufffd", clean(text))
