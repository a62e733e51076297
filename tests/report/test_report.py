"""The verdict of a report, and what shows it."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings

from checked_backend import DivergenceError, Report
from checked_backend.findings import Coverage, Finding, Kind, Skip, Verdict
from tests.report.test_codec import CHECKED, reports


@settings(deadline=None)  # a test is not timed
@given(reports)
@example(Report((Finding(Kind.LOGIC, "output[0]", "message", repro="repro.py", script="\ud800"),), CHECKED))
def test_every_rendering_works_and_is_safe(report: Report) -> None:
    text = str(report)
    assert text.startswith(report.verdict.value.upper() + ": ")
    page = report.to_html()
    page.encode("utf-8")
    for output in (text, page):
        assert not set(output) & {"\x1b", "\x00", "\u202e"}
    assert "<script" not in page


def finding(kind: Kind) -> Finding:
    return Finding(kind, "output[0]", "message")


@pytest.mark.parametrize("kind", list(Kind))
def test_verdict_of_a_kind(kind: Kind) -> None:
    expected = Verdict.FAIL if kind.fails else Verdict.INCONCLUSIVE
    assert Report((finding(kind),), CHECKED).verdict is expected


@pytest.mark.parametrize(
    ("coverage", "expected"),
    [
        (CHECKED, Verdict.PASS),
        (Coverage(), Verdict.INCONCLUSIVE),
        (Coverage(checked={"outputs": 0, "gradients": 0}), Verdict.INCONCLUSIVE),
        (Coverage(checked={"outputs": 1}, skipped=(Skip("x", "y"),)), Verdict.PASS),
        (Coverage(checked={"outputs": 1}, skipped=(Skip("x", "y", matters=True),)), Verdict.INCONCLUSIVE),
        (Coverage(checked={"outputs": 1}, ignored=(finding(Kind.LOGIC),)), Verdict.PASS),
    ],
)
def test_verdict_of_a_coverage(coverage: Coverage, expected: Verdict) -> None:
    assert Report((), coverage).verdict is expected


def test_fail_wins_over_inconclusive() -> None:
    assert Report((finding(Kind.UNSUPPORTED), finding(Kind.RNG)), Coverage()).verdict is Verdict.FAIL


def test_raise_for_verdict() -> None:
    failed = Report((finding(Kind.LOGIC),), CHECKED)
    with pytest.raises(DivergenceError) as caught:
        failed.raise_for_verdict()
    assert caught.value.report is failed
    assert str(caught.value) == str(failed)
    Report((), Coverage()).raise_for_verdict()
    Report((), CHECKED).raise_for_verdict()
