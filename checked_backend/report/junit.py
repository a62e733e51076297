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

__all__ = ["render_junit", "xml_text"]

_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def render_junit(reports: Sequence[Report], broken: Sequence[tuple[Path, str]] = ()) -> str:
    """Return reports as JUnit XML: one test case per report.

    A *fail* is a ``failure``. An *inconclusive* verdict and an unreadable file are an ``error``, because most services
    count ``skipped`` as success and neither is a pass.
    """
    verdicts = [report.verdict for report in reports]
    suite = ElementTree.Element(
        "testsuite",
        name="checked_backend",
        tests=str(len(reports) + len(broken)),
        failures=str(verdicts.count(Verdict.FAIL)),
        errors=str(verdicts.count(Verdict.INCONCLUSIVE) + len(broken)),
        skipped="0",
    )
    for number, (report, verdict) in enumerate(zip(reports, verdicts, strict=True), 1):
        case = _case(suite, report.title or (report.path.name if report.path else f"report {number}"))
        text = report.to_text(verbose=True)
        if verdict is Verdict.PASS:
            ElementTree.SubElement(case, "system-out").text = xml_text(text)
        else:
            _problem(case, "failure" if verdict is Verdict.FAIL else "error", verdict.value, text)
    for path, reason in broken:
        _problem(_case(suite, str(path)), "error", "unreadable", reason)
    root = ElementTree.Element("testsuites")
    root.append(suite)
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _case(suite: ElementTree.Element, name: str) -> ElementTree.Element:
    return ElementTree.SubElement(suite, "testcase", classname="checked_backend", name=xml_text(name))


def _problem(case: ElementTree.Element, tag: str, kind: str, text: str) -> None:
    text = xml_text(text)
    ElementTree.SubElement(case, tag, type=kind, message=text.partition("\n")[0]).text = text


def xml_text(text: str) -> str:
    """Text without what XML, or a terminal that shows it, cannot take."""
    return _NOT_XML.sub("\ufffd", clean(text))
