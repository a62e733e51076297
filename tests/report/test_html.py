"""The HTML page and the JUnit file."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote
from xml.etree import ElementTree

from checked_backend.findings import (
    Coverage,
    Distribution,
    EvidenceKey,
    Finding,
    Kernel,
    Kind,
    NodeError,
    RegionInfo,
    WorstElement,
)
from checked_backend.findings.pictures import MOST_NODES
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


def test_page_of_many_reports_lists_the_broken() -> None:
    page = render_html([Report((FINDING,), CHECKED), Report((), CHECKED, "fine")], [(Path("bad<i>.json"), "not JSON")])
    tags = parse(page)
    assert {given["id"] for tag, given in tags.seen if tag == "section"} == {"report-1", "report-2"}
    assert {"FAIL", "PASS", "UNREADABLE", "bad<i>.json", "not JSON"} <= set(tags.texts)


def test_junit() -> None:
    reports = [Report((FINDING,), CHECKED, "one"), Report((), CHECKED), Report((), Coverage(), EVIL)]
    suite = ElementTree.fromstring(render_junit(reports, [(Path("bad.json"), "not JSON")]))[0]
    counts = {"tests": "4", "failures": "1", "errors": "2", "skipped": "0"}
    assert {key: suite.get(key) for key in counts} == counts
    assert [[child.tag for child in case] for case in suite] == [["failure"], ["system-out"], ["error"], ["error"]]
    failure = suite[0][0]
    assert failure.get("message") == reports[0].headline.replace("\x00", "\\x00")
    assert "What to do next" in (failure.text or "")


def test_a_notebook_gets_a_part_of_a_page_whose_styles_touch_nothing_else() -> None:
    page = Report((FINDING,), CHECKED)._repr_html_()
    assert not {"html", "body", "head", "script"} & {tag for tag, _ in parse(page).seen}
    style = page.partition("<style>")[2].partition("</style>")[0]
    rules = [line.strip() for line in style.splitlines() if "{" in line]
    assert all(rule.startswith((".cb", "@media", "}")) for rule in rules), rules


def test_a_hostile_report_is_a_page_without_scripts_and_of_bounded_size() -> None:
    """Everything that a picture is made of is from the file: names, numbers, edges."""
    nodes = tuple(
        NodeError(EVIL + str(place), EVIL, (EVIL + str(place - 1), EVIL) * 200, math.nan, -1.0, math.inf, EVIL)
        for place in range(MOST_NODES)
    )
    element = WorstElement((2**64,) * 60, complex(math.nan, math.inf), math.nan, True)
    spread = Distribution((2**64,), (0, 0), ((math.inf,) * 64, (math.nan,)), (2**64,) * 80, (element,) * 64)
    kernel = Kernel(EVIL, EVIL, "</pre>" + EVIL * 200, 2**64, (EVIL,) * MOST_NODES, (EVIL,) * MOST_NODES)
    wrong = replace(FINDING, node=EVIL, op=EVIL, distribution=spread, flow=nodes, kernel=kernel, script=EVIL)
    report = Report.from_json(Report(tuple(wrong for _ in range(30)), CHECKED, EVIL, {EVIL: EVIL}).to_json())
    page = replace(report, path=Path("a<b>.json")).to_html()
    tags = parse(page)
    assert EVIL.replace("\x00", "\\x00") in tags.texts
    assert len(page) < 4_000_000
    assert not {"img", "script", "link", "iframe", "b"} & {tag for tag, _ in tags.seen}
    attributes = {name for _, given in tags.seen for name in given}
    assert not {name for name in attributes if name.startswith("on")} | ({"src", "xlink:href"} & attributes)
    links = [given for _, given in tags.seen if "href" in given]
    assert all(str(link["href"]).startswith(("#", "data:text/x-python;")) for link in links)
    assert "{{ 7 * 7 }}" in page  # a template in a name is not one


def test_every_part_that_scrolls_can_be_reached_by_keyboard() -> None:
    page = Report((FINDING,), CHECKED).to_html()
    parts = [given for tag, given in parse(page).seen if given.get("class") in ("wide", "tall")]
    assert parts
    assert all("tabindex" in given for given in parts)


def test_the_page_has_the_repro_to_copy_and_to_save() -> None:
    script = "import torch\nprint('100 %', torch.ones(3) < 2)\n"
    page = parse(Report((replace(FINDING, repro="/there/repro_relu.py", script=script),), CHECKED).to_html())
    [link] = [given for tag, given in page.seen if tag == "a"]
    assert link["download"] == "repro_relu.py"
    assert unquote(str(link["href"]).partition(",")[2]) == script
    assert script in page.texts


def test_names_that_dynamo_makes_up_are_only_where_all_is_told() -> None:
    region, limits = "torch_dynamo_resume_in_forward_at_9 [1/0]", {"input[___stack0]": 0.5}
    coverage = replace(CHECKED, regions=(RegionInfo(region, calls=1, checked_calls=1),), detection_limit=limits)
    findings = (Finding(Kind.LOGIC, "output[0]", "m", region=region), Finding(Kind.LOGIC, "output[1]", "n", region="f"))
    page = Report(findings, coverage).to_html()
    told = re.findall(r"<summary>All that is known.*?</details>", page, re.DOTALL)
    short = "".join(parse(re.sub(r"<summary>All that is known.*?</details>", "", page, flags=re.DOTALL)).texts)
    assert not re.search(r"\[1/0\]|___stack|torch_dynamo", short)
    assert "forward from line 9 on: 0 nodes, 1 of 1 call checked" in short
    assert "input[value 0 at the graph break]" in short
    assert "torch_dynamo_resume_in_forward_at_9 [1/0]" in "".join(parse(told[0]).texts)


def test_the_page_says_why_it_has_no_generated_code() -> None:
    said = replace(FINDING, evidence={EvidenceKey.GENERATED_CODE: "none: only Inductor hands it out"})
    assert "Generated code: none: only Inductor hands it out" in parse(Report((said,), CHECKED).to_html()).texts
    assert "Generated code" not in Report((FINDING,), CHECKED).to_html()


def test_a_long_name_may_break_between_its_parts_and_a_number_may_not() -> None:
    limits = {"grad[bert.layer.0.attention_output.weight]": 0.125}
    page = Report((), Coverage(checked={"outputs": 1}, detection_limit=limits)).to_html()
    assert "<td>grad[bert.<wbr>layer.0.<wbr>attention_<wbr>output.<wbr>weight]</td>" in page
    assert '<td class="number">0.12</td>' in page
    assert page.count("0.12") == 1
    assert "<wbr>" not in Report((), Coverage(checked={"outputs": 1}, detection_limit={"f(1.5, a<b)": 0.1})).to_html()
