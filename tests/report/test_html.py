"""The HTML page and the JUnit file."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

from checked_backend.findings import Coverage, Finding, Kind
from checked_backend.report import Report
from checked_backend.report.html import render_html
from checked_backend.report.junit import render_junit

EVIL = "<img src=x onerror=alert(1)> \"'&\x00 {{ 7 * 7 }}"
FINDING = Finding(Kind.LOGIC, EVIL, EVIL, source=EVIL, workaround=EVIL, evidence={EVIL: EVIL}, expected=EVIL)
CHECKED = Coverage(checked={"outputs": 1}, notes=(EVIL,))


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def parse(page: str) -> Tags:
    tags = Tags()
    tags.feed(page)
    return tags


def test_page_stands_alone_and_escapes() -> None:
    tags = parse(Report((FINDING,), CHECKED, EVIL, {EVIL: EVIL}, Path("a<b>.json")).to_html())
    assert not {"img", "script", "link", "iframe", "b"} & {tag for tag, _ in tags.seen}
    attributes = {name for _, given in tags.seen for name in given}
    assert not {name for name in attributes if name.startswith("on")} | ({"src"} & attributes)
    assert EVIL.replace("\x00", "\\x00") in tags.texts
    assert "alert(1)" in " ".join(tags.texts)


def test_page_of_many_reports_lists_the_broken() -> None:
    page = render_html([Report((FINDING,), CHECKED), Report((), CHECKED, "fine")], [(Path("bad<i>.json"), "not JSON")])
    tags = parse(page)
    assert {given["id"] for tag, given in tags.seen if tag == "section"} == {"report-1", "report-2"}
    assert {"FAIL", "PASS", "UNREADABLE", "bad<i>.json", "not JSON"} <= set(tags.texts)


def test_junit() -> None:
    reports = [Report((FINDING,), CHECKED, "one"), Report((), CHECKED), Report((), Coverage(), EVIL)]
    suite = ElementTree.fromstring(render_junit(reports, [(Path("bad.json"), "not JSON")]))[0]
    assert {key: suite.get(key) for key in ("tests", "failures", "errors", "skipped")} == {
        "tests": "4",
        "failures": "1",
        "errors": "2",
        "skipped": "0",
    }
    assert [[child.tag for child in case] for case in suite] == [["failure"], ["system-out"], ["error"], ["error"]]
    failure = suite[0][0]
    assert failure.get("message") == reports[0].headline.replace("\x00", "\\x00")
    assert "What to do next" in (failure.text or "")
