"""A run as text, JSON, JUnit XML and HTML, also with texts of strangers."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import pytest

from checked_backend.runs.data import render_json, render_junit
from checked_backend.runs.page import render_html
from checked_backend.runs.summary import Comparison, Summary, compare
from checked_backend.runs.text import render_text
from tests.support.sweep_tools import failing, outcome, summary_of

EVIL = "</script><script>alert(1)</script>\x1b[31m\u202e"


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Summary, Comparison]:
    before = {"good": outcome(), "bad": outcome(), EVIL: outcome("crash"), "skipped": outcome("skipped")}
    after = {
        "good": outcome(noise=1e-6),
        "bad": failing(message="logic: output[0]: wrong\nmore"),
        EVIL: outcome("hang", message=EVIL, log=EVIL, expected="known"),
        "skipped": outcome("skipped", message="=HYPERLINK()"),
        "vague": outcome("inconclusive", message="nothing was checked"),
    }
    old, new = summary_of(tmp_path, before, "2.12.0"), summary_of(tmp_path, after, "2.13.0")
    return new, compare(old, new)


def test_text_has_counts_reasons_changes_and_no_escapes(pair: tuple[Summary, Comparison]) -> None:
    text = render_text(*pair)
    lines = text.splitlines()
    assert lines[0].startswith(f"FAIL: {pair[0].title}: ")
    assert "torch2.13.0 (torch 2.13.0, " in lines[0]
    assert lines[0].endswith("1 pass, 1 fail, 1 inconclusive, 1 hang (1 expected), 1 skipped")
    assert "  bad (inference float32 cpu, inductor): logic: output[0]: wrong" in lines
    assert "  newly failing (1)" in lines
    assert "    bad (inference float32 cpu, inductor): pass -> fail" in lines
    assert "    expected: known" in lines
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "nothing changed" in render_text(pair[0], compare(pair[0], pair[0]))


def test_json_is_strict_and_has_the_reports(pair: tuple[Summary, Comparison]) -> None:
    found = json.loads(render_json(*pair), parse_constant=lambda word: pytest.fail(word))
    assert found["schema"] == "checked_backend.sweep"
    assert found["verdict"] == "fail"
    assert found["counts"] == {"pass": 1, "fail": 1, "inconclusive": 1, "hang": 1, "skipped": 1}
    cases = {case["model"]: case for case in found["cases"]}
    assert cases["good"]["noise"] == 1e-6
    assert cases["bad"]["report"]["findings"][0]["subject"] == "output[0]"
    assert [change["case"][1] for change in found["since"]["changes"]["newly failing"]] == ["bad"]
    assert [case[1] for case in found["since"]["new"]] == ["vague"]


def test_junit_counts_what_is_no_pass(pair: tuple[Summary, Comparison]) -> None:
    suite = ElementTree.fromstring(render_junit(pair[0])).find("testsuite")
    assert suite is not None
    assert {name: suite.get(name) for name in ("tests", "failures", "errors", "skipped")} == {
        "tests": "5",
        "failures": "1",
        "errors": "1",
        "skipped": "2",
    }


def test_html_is_one_page_with_one_script_that_the_policy_knows(pair: tuple[Summary, Comparison]) -> None:
    page = render_html(*pair)
    assert not re.search(r"""<[^>]*\s((src|href)\s*=\s*["']?[^"'#]|on\w+\s*=)""", page)  # nothing is loaded, or called
    (script,) = re.findall("<script.*?>(.*?)</script", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in page
    assert "alert(1)</script>" not in page
    assert "&lt;/script&gt;" in page
    assert 'class="noise"' in page
    assert "\x1b" not in page


def test_a_report_that_cannot_be_read_costs_nothing_else(tmp_path: Path) -> None:
    found = summary_of(tmp_path, {"a": outcome("fail", report="{"), "b": outcome("fail", report='{"schema": 1}')})
    assert render_html(found).count("<tr data-status=") == 2
    assert [case["report"] for case in json.loads(render_json(found))["cases"]] == [None, {"schema": 1}]


@pytest.mark.slow
def test_three_hundred_models_in_a_browser(tmp_path: Path) -> None:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no browser here")
    page = render_html(summary_of(tmp_path, {f"model{n}": failing() if n % 3 else outcome() for n in range(300)}))
    probe = (
        "<script>const b=document.querySelector('#filter');b.value='model29';b.dispatchEvent(new Event('input'));"
        "document.title=document.querySelector('#shown').textContent+'; '+performance.now().toFixed(0)+' ms'</script>"
    )
    page = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page).replace("</body>", f"{probe}</body>")
    (tmp_path / "page.html").write_text(page)
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom"]
    done = subprocess.run(
        [browser, *flags, f"file://{tmp_path / 'page.html'}"], capture_output=True, text=True, timeout=120, check=True
    )
    title = re.search("<title>(.*?)</title>", done.stdout)
    assert title[1].startswith("11 of 300 cases; ")
    assert int(title[1].rpartition("; ")[2].removesuffix(" ms")) < 2000
