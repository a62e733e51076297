"""What is known of each case, and what changed."""

from __future__ import annotations

from pathlib import Path

import pytest

from checked_backend.findings import Verdict
from checked_backend.runs.case import Case, CaseResult
from checked_backend.runs.results import Results, WantedCase
from checked_backend.runs.summary import CaseSummary, Comparison, compare, summarize
from tests.support.sweep_tools import keep, outcome, summary_of


def compared(folder: Path, before: dict[str, CaseResult], after: dict[str, CaseResult]) -> Comparison:
    return compare(summary_of(folder, before, "2.12.0"), summary_of(folder, after))


def attempted(folder: Path, *statuses: str) -> CaseSummary:
    for status in statuses:
        keep(folder / "a", {"m": outcome(status)})
    with Results(folder / "a") as results:
        (case,) = summarize(results).cases
    return case


def test_newly_failing_fixed_and_what_is_neither(tmp_path: Path) -> None:
    before = {"a": "pass", "b": "fail", "c": "crash", "d": "unsupported", "e": "fail", "same": "fail", "gone": "pass"}
    after = {"a": "hang", "b": "pass", "c": "fail", "d": "fail", "e": "skipped", "same": "fail", "new": "pass"}
    found = compared(tmp_path, {m: outcome(s) for m, s in before.items()}, {m: outcome(s) for m, s in after.items()})
    assert {
        heading: [(c.after.case.model, c.words) for c in changes] for heading, changes in found.changes.items()
    } == {
        "newly failing": [("a", "pass -> hang"), ("d", "unsupported -> fail")],
        "fixed": [("b", "fail -> pass")],
        "other changes": [("c", "crash -> fail"), ("e", "fail -> skipped")],
    }
    assert [c.case.model for c in found.new] == ["new"]
    assert [c.case.model for c in found.gone] == ["gone"]


def test_noisier(tmp_path: Path) -> None:
    before = {m: outcome(noise=1e-6) for m in ("noisy", "same")}
    found = compared(tmp_path, before, {"noisy": outcome(noise=3e-6), "same": outcome(noise=1.5e-6)})
    assert [(c.after.case.model, c.words) for c in found.changes["noisier"]] == [("noisy", "3 times")]


def test_results_that_are_no_longer_equal_bit_for_bit_are_noisier(tmp_path: Path) -> None:
    before = {m: outcome(report="{}") for m in ("differs", "more", "equal")} | {"unchecked": outcome()}
    after = {
        "differs": outcome(noise=1e-6),
        "more": outcome(noise=1e-3),
        "equal": outcome(),
        "unchecked": outcome(noise=1e-6),
    }
    assert [(c.after.case.model, c.words) for c in compared(tmp_path, before, after).changes["noisier"]] == [
        ("more", "equal bits -> noise of 0.001"),
        ("differs", "equal bits -> noise of 1e-06"),
    ]
    assert not compared(tmp_path / "other", after, before).changes


@pytest.mark.parametrize(
    ("statuses", "verdict"),
    [
        (["pass", "skipped"], Verdict.PASS),
        (["pass", "unsupported"], Verdict.INCONCLUSIVE),
        (["pass", "import error", "lost"], Verdict.FAIL),
        (["skipped"], Verdict.INCONCLUSIVE),
        ([], Verdict.INCONCLUSIVE),
    ],
)
def test_the_verdict_is_the_worst_and_nothing_checked_is_no_pass(
    tmp_path: Path, statuses: list[str], verdict: Verdict
) -> None:
    assert summary_of(tmp_path, {f"m{n}": outcome(status) for n, status in enumerate(statuses)}).verdict is verdict


def test_attempts_of_one_state_that_differ_are_flaky_and_the_worst_counts(tmp_path: Path) -> None:
    case = attempted(tmp_path, "pass", "crash", "pass")
    assert case.flaky
    assert case.status.value == "crash"


def test_a_place_that_was_mended_is_not_flaky_and_a_lost_machine_does_not_count(tmp_path: Path) -> None:
    assert not attempted(tmp_path / "1", "import error", "lost", "pass").flaky
    assert attempted(tmp_path / "2", "lost", "pass").status.value == "pass"


def test_only_the_last_state_counts(tmp_path: Path) -> None:
    keep(tmp_path / "a", {"m": outcome("fail")}, state="old source")
    keep(tmp_path / "a", {"m": outcome("pass")}, state="new source")
    with Results(tmp_path / "a") as results:
        (case,) = summarize(results).cases
        assert (case.flaky, case.status.value) == (False, "pass")
        results.wanted[case.case] = WantedCase(Case(case.case.suite, "m"), "a third")
        assert [waiting.model for waiting in summarize(results).waiting] == ["m"]


def test_a_failure_of_another_kind_is_a_change_and_one_that_no_rule_knows_is_new(tmp_path: Path) -> None:
    def failed(kind: str, expected: str = "") -> CaseResult:
        return outcome("fail", message=f"{kind}: output[0]: wrong", expected=expected)

    before = {"known": failed("logic", "#1"), "other": failed("logic"), "same": failed("logic")}
    found = compared(tmp_path, before, {"known": failed("alias"), "other": failed("crash"), "same": failed("logic")})
    assert {
        heading: [(c.after.case.model, c.words) for c in changes] for heading, changes in found.changes.items()
    } == {"newly failing": [("known", "logic (known) -> alias")], "other changes": [("other", "logic -> crash")]}
