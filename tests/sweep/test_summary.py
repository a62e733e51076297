"""What is known of each case, and what changed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from checked_backend.errors import SuiteError
from checked_backend.findings import Verdict
from checked_backend.sweep.case import Case, CaseResult
from checked_backend.sweep.database import Attempt, Database
from checked_backend.sweep.summary import SweepComparison, compare, find_run, summarize
from tests.support.sweep_tools import VERSIONS, outcome, run_with, summary_of


def compared(folder: Path, before: dict[str, CaseResult], after: dict[str, CaseResult]) -> SweepComparison:
    with Database(folder / "a.db", write=True) as database:
        runs = [run_with(database, before, "2.12.0"), run_with(database, after)]
        return compare(*(summarize(database, run) for run in runs))


def test_newly_failing_fixed_and_what_is_neither(tmp_path: Path) -> None:
    before = {"a": "pass", "b": "fail", "c": "crash", "d": "unsupported", "e": "fail", "same": "fail", "gone": "pass"}
    after = {"a": "hang", "b": "pass", "c": "fail", "d": "fail", "e": "skipped", "same": "fail", "new": "pass"}
    found = compared(tmp_path, {m: outcome(s) for m, s in before.items()}, {m: outcome(s) for m, s in after.items()})
    assert [(c.after.case.model, c.words) for c in found.newly_failing] == [
        ("a", "pass -> hang"),
        ("d", "unsupported -> fail"),
    ]
    assert [c.after.case.model for c in found.fixed] == ["b"]
    assert [c.after.case.model for c in found.changed] == ["c", "e"]
    assert [c.case.model for c in found.new] == ["new"]
    assert [c.case.model for c in found.gone] == ["gone"]


def test_noisier(tmp_path: Path) -> None:
    before = {m: outcome(noise=1e-6) for m in ("noisy", "same")}
    found = compared(tmp_path, before, {"noisy": outcome(noise=3e-6), "same": outcome(noise=1.5e-6)})
    assert [(c.after.case.model, c.words) for c in found.noisier] == [("noisy", "3 times")]


def test_results_that_are_no_longer_equal_bit_for_bit_are_noisier(tmp_path: Path) -> None:
    before = {m: outcome(report="{}") for m in ("differs", "more", "equal")} | {"unchecked": outcome()}
    after = {
        "differs": outcome(noise=1e-6),
        "more": outcome(noise=1e-3),
        "equal": outcome(),
        "unchecked": outcome(noise=1e-6),
    }
    found = compared(tmp_path, before, after)
    assert [(c.after.case.model, c.words) for c in found.noisier] == [
        ("more", "equal bits -> noise of 0.001"),
        ("differs", "equal bits -> noise of 1e-06"),
    ]
    assert not compared(tmp_path / "other", after, before).noisier


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
    found = summary_of(tmp_path, {f"m{n}": outcome(status) for n, status in enumerate(statuses)})
    assert found.verdict is verdict


def test_attempts_of_one_state_that_differ_are_flaky_and_the_worst_counts(tmp_path: Path) -> None:
    with Database(tmp_path / "a.db", write=True) as database:
        run = database.begin("", VERSIONS)
        for attempt, status in enumerate(("pass", "crash", "pass")):
            database.add(run, Attempt(Case("s", "m"), attempt, "", "s", outcome(status)))
        (case,) = summarize(database, run).cases
    assert case.flaky
    assert case.status.value == "crash"


def test_a_place_that_was_mended_is_not_flaky(tmp_path: Path) -> None:
    with Database(tmp_path / "a.db", write=True) as database:
        run = database.begin("", VERSIONS)
        for attempt, status in enumerate(("import error", "lost", "pass")):
            database.add(run, Attempt(Case("s", "m"), attempt, "", "s", outcome(status)))
        (case,) = summarize(database, run).cases
    assert not case.flaky


def test_only_the_last_state_counts(tmp_path: Path) -> None:
    with Database(tmp_path / "a.db", write=True) as database:
        run = database.begin("", VERSIONS)
        database.add(run, Attempt(Case("s", "m"), 0, "", "old source", outcome("fail")))
        database.add(run, Attempt(Case("s", "m"), 0, "", "new source", outcome("pass")))
        (case,) = summarize(database, run).cases
    assert not case.flaky
    assert case.status.value == "pass"


def test_runs_are_found_by_number_name_and_torch_version(tmp_path: Path) -> None:
    with Database(tmp_path / "a.db", write=True) as database:
        first = run_with(database, {}, "2.12.0+cpu")
        second = database.begin("nightly", {**VERSIONS, "torch": "2.13.0"})
        runs = database.runs()
    assert find_run(runs, "1") == find_run(runs, "2.12.0") == first
    assert find_run(runs, "nightly") == find_run(runs, "2") == second
    with pytest.raises(SuiteError, match=r"no run '3'; give a number, a name or a torch version\. There are: run 1"):
        find_run(runs, "3")
    assert replace(second, name="x").title.startswith("run 2 'x' (torch 2.13.0, ")


def test_a_failure_of_another_kind_is_a_change_and_one_that_no_rule_knows_is_new(tmp_path: Path) -> None:
    def failed(kind: str, expected: str = "") -> CaseResult:
        return outcome("fail", message=f"{kind}: output[0]: wrong", expected=expected)

    before = {"known": failed("logic", "#1"), "other": failed("logic"), "same": failed("logic")}
    after = {"known": failed("alias"), "other": failed("crash"), "same": failed("logic")}
    found = compared(tmp_path, before, after)
    assert [(c.after.case.model, c.words) for c in found.newly_failing] == [("known", "logic (known) -> alias")]
    assert [(c.after.case.model, c.words) for c in found.changed] == [("other", "logic -> crash")]
