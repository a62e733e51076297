"""The HTML page and the JUnit file."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from checked_backend.findings import Coverage, Finding, Kind, Metrics, NoiseScale
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


def test_a_pass_shows_the_detection_limits_and_a_failure_its_picture_and_both_values() -> None:
    clean = Report((), Coverage(checked={"outputs": 1}, detection_limit={"output[0]": 1e-9, EVIL: 0.5}))
    tags = parse(clean.to_html())
    assert "1e-09" in tags.texts
    assert EVIL.replace("\x00", "\\x00") in tags.texts
    metrics = Metrics(4, 1, 0.25, 0.25, 1, 0.1, 1.0, 1.0, 0, 0, 0, 0, 0, (3,), 1.0, 1.25, "float32")
    wrong = Finding(Kind.LOGIC, "output[0]", "m", metrics=metrics, noise=NoiseScale(1e-7, 1e-7, "n"))
    tags = parse(Report((wrong,), CHECKED).to_html())
    assert "svg" in {tag for tag, _ in tags.seen}
    assert {"output[0][3]", "1", "1.25"} <= set(tags.texts)


def test_a_notebook_gets_a_part_of_a_page_whose_styles_touch_nothing_else() -> None:
    page = Report((FINDING,), CHECKED)._repr_html_()
    tags = parse(page)
    assert not {"html", "body", "head", "script"} & {tag for tag, _ in tags.seen}
    style = page.partition("<style>")[2].partition("</style>")[0]
    rules = [line.strip() for line in style.splitlines() if "{" in line]
    assert all(rule.startswith((".cb", "@media", "}")) for rule in rules), rules


def test_fifty_findings_are_one_page() -> None:
    many = [replace(FINDING, subject=f"grad[layers.{number}.weight]") for number in range(50)]
    page = Report(tuple(many), CHECKED).to_html()
    assert len(page) < 200_000
    assert page.count("<article>") == 1


_BROWSER = next((found for name in ("chromium", "google-chrome") if (found := shutil.which(name))), None)


@pytest.mark.slow
@pytest.mark.skipif(_BROWSER is None, reason="no Chromium here")
@pytest.mark.parametrize("width", [390, 1280])
def test_a_browser_shows_it_without_scrolling_sideways(tmp_path: Path, width: int) -> None:
    metrics = Metrics(4, 1, 0.25, 0.25, 1, 0.1, 1.0, 1.0, 0, 0, 0, 0, 0, (3,), 1.0, 1.25, "float32")
    wrong = Finding(
        Kind.LOGIC,
        "grad[" + "encoder.layers." * 10 + "weight]",
        "m" * 300,
        metrics=metrics,
        noise=NoiseScale(1e-7, 1e-7, "n"),
        repro="reports/" + "long_" * 40 + ".py",
    )
    page = tmp_path / "page.html"
    page.write_text(Report((wrong,), CHECKED, "t" * 300).to_html(), encoding="utf-8")
    frame = tmp_path / "frame.html"  # a page that measures the other one; headless windows are at least 500 wide
    frame.write_text(
        f'<iframe src="page.html" style="width:{width}px;height:800px"></iframe><script>'
        "onload = () => { const d = frames[0].document.documentElement;"
        ' document.title = d.scrollWidth + " " + d.clientWidth; document.body.append("W" + document.title + "W"); }'
        "</script>",
        encoding="utf-8",
    )
    command = [str(_BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files"]
    done = subprocess.run(
        [
            *command,
            f"--user-data-dir={tmp_path / 'profile'}",
            "--virtual-time-budget=3000",
            "--dump-dom",
            frame.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    found = re.search(r"W(\d+) (\d+)W", done.stdout)
    assert found is not None, done.stdout
    assert int(found[1]) <= int(found[2])
