"""A fuzz as text, JSON, JUnit XML, HTML and issues, also with texts of strangers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from types import MappingProxyType
from xml.etree import ElementTree

import pytest

from checked_backend.findings import Coverage, Finding, Kind, Verdict
from checked_backend.fuzz.corpus import Corpus, Totals
from checked_backend.fuzz.examine import CHECK_FAILED
from checked_backend.fuzz.report import (
    Shown,
    Summary,
    render_html,
    render_issue,
    render_json,
    render_junit,
    render_text,
    summarize,
)
from checked_backend.fuzz.results import DOCUMENTED
from checked_backend.report import Report
from tests.support.fuzz_tools import PASS, STRIDES, failing, filled, group_of

EVIL = "</pre></script><script>alert(1)</script><b onclick='x'>\x1b[31m\u202e\x00 ]]>"
LOUD = Finding(kind=Kind.LOGIC, subject="output[0]", message=f"wrong by <b>much</b> {EVIL}")
SETTINGS: Mapping[str, str] = MappingProxyType(
    {"compiler": "inductor", "torch": "2.13.0", "cpu": f"a CPU {EVIL}", EVIL: "1"}
)


def _corpus(path: Path) -> Corpus:
    corpus = Corpus(path, write=True)
    corpus.settle(SETTINGS)
    came = {"torch.exp": PASS, "torch.neg": failing(), "torch.abs": failing(status="inconclusive")}
    _, second, _ = filled(corpus, *came.items())
    report = Report([LOUD], Coverage()).to_json()
    evil = failing(actual=EVIL, expected=EVIL, report=report)
    bug = replace(group_of("torch.neg"), result=replace(evil, message=EVIL), script=f"print('''{EVIL}''')\n```\n")
    corpus.put(bug, second)
    corpus.put(replace(group_of("torch.neg"), op=EVIL, stage=EVIL))
    corpus.put(group_of("torch.exp", confirmed=False))
    corpus.put(group_of("torch.abs", **STRIDES))
    return corpus


@pytest.fixture
def summary(tmp_path: Path) -> Summary:
    with _corpus(tmp_path / "f") as corpus:
        return summarize(corpus, {group_of("torch.neg").signature})


def test_each_group_stands_where_it_belongs_and_the_verdict_follows(summary: Summary) -> None:
    assert sorted(shown.standing for shown in summary.groups) == ["documented", "known", "new", "unconfirmed"]
    assert summary.verdict is Verdict.FAIL
    assert summary.title.startswith("FAIL: inductor on torch 2.13.0: groups: 1 new, 1 known, 1 documented, 1 unconf")
    rest = replace(summary, groups=[shown for shown in summary.groups if shown.standing in ("known", "documented")])
    assert rest.verdict is Verdict.PASS


def test_failures_that_did_not_show_again_are_no_pass(summary: Summary) -> None:
    for gone in (
        replace(summary, groups=[shown for shown in summary.groups if shown.standing == "unconfirmed"]),
        replace(summary, groups=(), gone=[("seed 0, program 7", "logic: output[0]: wrong once")]),
    ):
        assert gone.verdict is Verdict.INCONCLUSIVE
        assert "1 failures did not show again in a fresh process" in render_text(gone)
    assert "seed 0, program 7: logic: output[0]: wrong once" in render_text(gone)
    assert "seed 0, program 7: logic: output[0]: wrong once" in render_html(gone)


def test_programs_without_a_verdict_are_no_pass_if_they_are_most(summary: Summary) -> None:
    for statuses, verdict in (
        ({}, Verdict.INCONCLUSIVE),
        ({"inconclusive": 3, "out of memory": 2, "pass": 5}, Verdict.INCONCLUSIVE),
        ({"inconclusive": 3, "pass": 4}, Verdict.PASS),
    ):
        assert replace(summary, groups=(), totals=replace(summary.totals, statuses=statuses)).verdict is verdict


def test_failures_that_wait_to_be_confirmed_are_no_pass(summary: Summary) -> None:
    waiting = replace(summary, groups=(), waiting=2)
    assert waiting.verdict is Verdict.INCONCLUSIVE
    assert "2 failures are not confirmed yet" in render_text(waiting)
    suite = ElementTree.fromstring(render_junit(waiting)).find("testsuite")
    assert suite is not None
    assert suite.get("errors") == "1"


def test_text_has_the_programs_and_no_escapes(summary: Summary) -> None:
    text = render_text(summary)
    assert "v0 = torch.neg(x0)" in text
    assert f"documented at {DOCUMENTED['structure.stride'].source}" in text
    assert "1 programs without a verdict" in text
    assert "\x1b" not in text
    assert "\u202e" not in text


def test_json_is_strict_and_has_all_groups(summary: Summary) -> None:
    found = json.loads(render_json(summary), parse_constant=lambda word: pytest.fail(word))
    assert found["schema"] == "checked_backend.fuzz"
    assert found["verdict"] == "fail"
    groups = {group["standing"]: group for group in found["groups"]}
    assert groups["documented"]["documented_at"].startswith("https://")
    assert groups["new"]["op"] == EVIL
    assert groups["known"]["program"]["calls"][0][0] == "torch.neg"


def test_junit_fails_for_new_groups_alone(summary: Summary) -> None:
    suite = ElementTree.fromstring(render_junit(summary)).find("testsuite")
    assert suite is not None
    numbers = {name: suite.get(name) for name in ("tests", "failures", "errors", "skipped")}
    assert numbers == {"tests": "5", "failures": "1", "errors": "1", "skipped": "3"}
    problems = [problem for case in suite.iter("testcase") for problem in case if problem.tag != "system-out"]
    assert [problem.get("type") for problem in problems if problem.tag == "failure"] == ["new"]
    assert all("torch.compile" in str(problem.text) for problem in problems if problem.tag != "error")


class Reader(HTMLParser):
    """Collects what could run or be loaded, and the links."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.links: list[str] = []
        self.handlers: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.links += [str(value) for name, value in attrs if name in ("src", "href")]
        self.handlers += [name for name, _ in attrs if name.startswith("on")]


def test_html_runs_and_loads_nothing_and_every_text_is_escaped(summary: Summary) -> None:
    page = render_html(summary)
    reader = Reader()
    reader.feed(page)
    assert not reader.tags & {"script", "img", "link", "iframe", "object", "b"}
    assert not reader.handlers
    outside = {link for link in reader.links if not link.startswith("#")}
    assert outside == {DOCUMENTED["structure.stride"].source}
    assert "default-src 'none'" in page
    assert "&lt;script&gt;alert(1)" in page
    assert "\x1b" not in page
    assert "\u202e" not in page


def test_html_has_a_row_and_a_section_for_each_group(summary: Summary) -> None:
    page = render_html(summary)
    for number in range(1, 5):
        assert f'<a href="#group-{number}">' in page
        assert f'id="group-{number}"' in page
    assert page.count("<summary>Text for an issue</summary>") == 3  # a documented difference needs none
    assert "wrong by &lt;b&gt;much&lt;/b&gt;" in page  # the finding, from the check's report
    assert "v0 = torch.neg(x0)" in page
    assert "Programs without a verdict (1)" in page


def test_html_of_a_report_that_nobody_can_read_has_the_rest(summary: Summary) -> None:
    shown = next(one for one in summary.groups if one.standing == "known")
    broken = replace(shown, group=replace(shown.group, result=replace(shown.group.result, report='{"findings": 7}')))
    page = render_html(replace(summary, groups=[broken]))
    assert "What the check found" not in page
    assert "v0 = torch.neg(x0)" in page


def test_an_issue_has_program_script_versions_and_hardware_in_blocks_that_hold(summary: Summary) -> None:
    shown = next(one for one in summary.groups if one.standing == "known")
    text = render_issue(shown.group, summary.settings)
    assert text.startswith("# torch.compile(backend='inductor'): neg gives other results than eager\n")
    assert "\n````python\n" in text  # the script has a fence of three
    assert "- torch: 2.13.0" in text
    assert "- cpu: a CPU" in text
    assert "\x1b" not in text


def test_a_check_that_fails_itself_is_no_pass(summary: Summary) -> None:
    failed = replace(summary, groups=(), undecided=[("seed 0, program 1", f"{CHECK_FAILED}: KeyError: 3")])
    assert failed.verdict is Verdict.INCONCLUSIVE
    assert failed.doubts == ["1 checks failed themselves: that is a bug in checked_backend; please report it"]


def test_a_message_forges_no_line_and_no_markdown() -> None:
    forged = "first\n```\n# heading\n2. logic | forged\nPASS: all is well @everyone"
    group = replace(group_of("torch.neg"), result=replace(failing(), message=forged))
    issue = render_issue(group, {})
    assert "````text\nfirst\n```\n# heading" in issue
    text = render_text(Summary({}, Totals({"fail": 1}, 1, 1), [Shown(group, "new")], 0, (), [("seed 0", forged)]))
    assert not any(line.startswith(("2. ", "PASS: all", "# heading")) for line in text.splitlines())
