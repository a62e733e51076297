"""A fuzz as a run whose cases are groups, and as issues, also with texts of strangers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from xml.etree import ElementTree

import pytest

from checked_backend import Coverage, Finding, Kind, Report, Verdict
from checked_backend.fuzz.corpus import Corpus
from checked_backend.fuzz.examine import CHECK_FAILED
from checked_backend.fuzz.report import PROGRAMS, render_issue, summarize
from checked_backend.fuzz.results import DOCUMENTED, Group
from checked_backend.runs.data import render_json, render_junit
from checked_backend.runs.page import render_html
from checked_backend.runs.summary import Summary
from checked_backend.runs.text import render_text
from tests.support.fuzz_tools import PASS, STRIDES, failing, filled, group_of

EVIL = "</pre></script><script>alert(1)</script><b onclick='x'>\x1b[31m\u202e\x00 ]]>"
LOUD = Finding(kind=Kind.LOGIC, subject="output[0]", message=f"wrong by <b>much</b> {EVIL}")
SETTINGS: Mapping[str, str] = MappingProxyType(
    {"compiler": "inductor", "torch": "2.13.0", "cpu": f"a CPU {EVIL}", EVIL: "1"}
)
REPORT = Report([LOUD], Coverage()).to_json()
EVIL_RESULT = replace(failing(actual=EVIL, expected=EVIL, report=REPORT), message=EVIL)
KNOWN = replace(group_of("torch.neg"), result=EVIL_RESULT, script=f"print('''{EVIL}''')\n```\n")
BROKEN = failing(status="inconclusive")
NEW = replace(group_of("torch.neg"), op=EVIL, stage=EVIL)
UNCONFIRMED = group_of("torch.exp", confirmed=False)
A_STRIDE = group_of("torch.abs", **STRIDES)


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    """Two programs that pass, and nothing else."""
    with Corpus(tmp_path / "f", write=True) as made:
        made.settle(SETTINGS)
        filled(made, ("torch.sin", PASS), ("torch.cos", PASS))
        return made


@pytest.fixture
def summary(corpus: Corpus) -> Summary:
    came = {"torch.exp": PASS, "torch.neg": failing(), "torch.abs": failing(status="inconclusive")}
    _, second, _ = filled(corpus, *came.items())
    corpus.put(KNOWN, second)
    for group in (NEW, UNCONFIRMED, A_STRIDE):
        corpus.put(group)
    return summarize(corpus, {KNOWN.signature})


def test_each_group_stands_where_it_belongs_and_the_verdict_follows(summary: Summary) -> None:
    assert [case.data["standing"] for case in summary.cases if case.case.model != PROGRAMS] == [
        "known",
        "new",
        "documented",
        "unconfirmed",
    ]
    assert summary.verdict is Verdict.FAIL
    assert summary.title.startswith("inductor on torch 2.13.0, 3 programs (1 fail, 1 inconclusive, 1 pass), 3 of them")
    assert render_text(summary).splitlines()[0].endswith(": 3 fail (2 expected), 2 inconclusive")


@pytest.mark.parametrize(
    ("groups", "verdict", "doubt"),
    [
        ([], Verdict.PASS, ""),
        ([KNOWN, A_STRIDE], Verdict.PASS, ""),
        ([UNCONFIRMED], Verdict.INCONCLUSIVE, "1 failures did not show again in a fresh process"),
    ],
)
def test_what_is_known_or_documented_is_a_pass(
    corpus: Corpus, groups: list[Group], verdict: Verdict, doubt: str
) -> None:
    for group in groups:
        corpus.put(group)
    summary = summarize(corpus, {KNOWN.signature})
    assert summary.verdict is verdict
    assert doubt in render_text(summary)


@pytest.mark.parametrize(
    ("result", "count", "doubt"),
    [
        (failing(), 1, "1 failures are not confirmed yet"),
        (BROKEN, 2, "only 2 of 4 programs have a verdict"),
        (
            replace(failing(status="inconclusive"), message=f"{CHECK_FAILED}: KeyError: 3"),
            1,
            "1 checks failed themselves",
        ),
    ],
)
def test_what_says_nothing_of_the_compiler_is_no_pass(tmp_path: Path, result: object, count: int, doubt: str) -> None:
    with Corpus(tmp_path / "f", write=True) as corpus:
        filled(corpus, ("torch.sin", PASS), ("torch.cos", PASS), *[("torch.neg", result)] * count)
        summary = summarize(corpus, set())
    assert summary.verdict is Verdict.INCONCLUSIVE
    assert doubt in render_text(summary)
    assert ElementTree.fromstring(render_junit(summary)).find("testsuite").get("errors") == "1"


def test_failures_that_did_not_show_again_are_no_pass_and_named(corpus: Corpus) -> None:
    (gone,) = filled(corpus, ("torch.neg", replace(failing(), message="logic: wrong\nPASS: once")))
    corpus.assign(gone, "")
    summary = summarize(corpus, set())
    assert summary.verdict is Verdict.INCONCLUSIVE
    for text in (render_text(summary), render_html(summary)):
        assert "seed 0, program 0: did not show again: logic: wrong PASS: once" in text


def test_nothing_checked_is_no_pass(tmp_path: Path) -> None:
    with Corpus(tmp_path / "f", write=True) as corpus:
        summary = summarize(corpus, set())
    assert summary.verdict is Verdict.INCONCLUSIVE
    assert "no program was checked" in render_text(summary)


def test_text_has_the_programs_and_no_escapes(summary: Summary) -> None:
    text = render_text(summary)
    assert "    v0 = torch.neg(x0)" in text
    assert DOCUMENTED["structure.stride"].source in text
    assert "# met 1 time" in text
    assert "\x1b" not in text
    assert "\u202e" not in text


def test_json_is_strict_and_has_all_groups(summary: Summary) -> None:
    found = json.loads(render_json(summary), parse_constant=lambda word: pytest.fail(word))
    assert found["schema"] == "checked_backend.fuzz"
    assert found["verdict"] == "fail"
    groups = {group["standing"]: group for group in found["cases"] if group["model"] != PROGRAMS}
    assert "https://" in groups["documented"]["expected"]
    assert groups["new"]["op"] == EVIL
    assert groups["known"]["program"]["calls"][0][0] == "torch.neg"


def test_junit_fails_for_new_groups_alone(summary: Summary) -> None:
    suite = ElementTree.fromstring(render_junit(summary)).find("testsuite")
    assert suite is not None
    numbers = {name: suite.get(name) for name in ("tests", "failures", "errors", "skipped")}
    assert numbers == {"tests": "5", "failures": "1", "errors": "2", "skipped": "2"}
    (failure,) = suite.iter("failure")
    assert "# torch.compile(backend='inductor')" in str(failure.text)


def test_html_has_a_row_and_a_section_for_each_group_and_escapes_every_text(summary: Summary) -> None:
    page = render_html(summary)
    assert page.count("<tr data-status=") == 5
    assert page.count("<summary>Text for an issue</summary>") == 3  # a documented difference needs none
    assert "wrong by &lt;b&gt;much&lt;/b&gt;" in page  # the finding, from the check's report
    assert "v0 = torch.neg(x0)" in page
    assert "&lt;script&gt;alert(1)" in page
    assert not [evil for evil in ("<script>alert(1)", "<b>", "<b onclick", "\x1b", "\u202e") if evil in page]


def test_an_issue_has_program_script_versions_and_hardware_in_blocks_that_hold() -> None:
    text = render_issue(KNOWN, SETTINGS)
    assert text.startswith("# torch.compile(backend='inductor'): neg gives other results than eager\n")
    assert "\n````python\n" in text  # the script has a fence of three
    assert "- torch: 2.13.0" in text
    assert "- cpu: a CPU" in text
    assert "\x1b" not in text


def test_a_message_forges_no_line_and_no_markdown(corpus: Corpus) -> None:
    forged = "first\n```\n# heading\n2. logic | forged\nPASS: all is well @everyone"
    group = replace(group_of("torch.neg"), op="neg\nPASS: all", result=replace(failing(), message=forged))
    assert "````text\nfirst\n```\n# heading" in render_issue(group, {})
    corpus.put(group)
    assert not any(
        line.startswith(("2. ", "PASS: all", "# heading"))
        for line in render_text(summarize(corpus, set())).splitlines()
    )
