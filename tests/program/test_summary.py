"""The page at the end of a run, and its verdict, from what processes left in the folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from checked_backend.findings import Coverage, Finding, Kind, RegionInfo, Verdict
from checked_backend.findings.paths import shown_path
from checked_backend.program.folder import Mark, tidy
from checked_backend.program.summary import RunResult, exit_code, github_annotations, read_run
from checked_backend.report import Report
from checked_backend.report.write import write_report

REGION = RegionInfo("f [0/0]", calls=4, checked_calls=2, checked_backwards=1)
PASS = Report((), Coverage((REGION,), {"outputs": 2}, detection_limit={"output[0]": 1e-5, "grad[x]": 3e-4}), "a.py")
WRONG = Finding(Kind.LOGIC, "output[0]", "50% off,\nand more", source="a, b.py:3 in f: x.sin()")
FAIL = replace(PASS, findings=(WRONG,))
IDLE = Report((), Coverage(), "imports only")


def leave(folder: Path, report: Report, *, ends: bool = True) -> None:
    mark = Mark(folder, "a.py")
    mark.save(IDLE, 1.0, 0.0)  # an earlier state, which is written over
    mark.save(report, 10.0, 2.5)
    if ends:
        mark.ended()


def read(folder: Path, status: int | None = 0) -> RunResult:
    return read_run(folder, ["a.py", "--epochs", "1"], status, 11.0)


@pytest.mark.parametrize(
    ("reports", "verdict"),
    [
        ([PASS], Verdict.PASS),
        ([PASS, FAIL], Verdict.FAIL),
        ([PASS, IDLE], Verdict.PASS),
        ([IDLE], Verdict.INCONCLUSIVE),
        ([], Verdict.INCONCLUSIVE),
    ],
)
def test_the_worst_verdict_of_the_processes_that_compiled(
    tmp_path: Path, reports: list[Report], verdict: Verdict
) -> None:
    for report in reports:
        leave(tmp_path / "run", report)
    assert read(tmp_path / "run").verdict is verdict


def test_the_page(tmp_path: Path) -> None:
    leave(tmp_path, PASS)
    page = str(read(tmp_path))
    assert page.startswith("checked-backend: PASS: the compiled program agrees with eager")
    assert "a.py --epochs 1: exit code 0, 11.0 s" in page
    assert "1 region, 2 of 4 calls, 1 backward pass\n" in page
    assert "a relative error of 0.0003 in grad[x]" in page
    assert "2.5 s of 10.0 s (25%)" in page
    assert shown_path(str(tmp_path)) in page


def test_what_all_ranks_find_is_told_once_and_what_one_finds_apart(tmp_path: Path) -> None:
    other = replace(WRONG, source="a.py:9 in f: x.cos()")
    for rank in range(4):
        found = replace(WRONG if rank < 3 else other, ranks=(str(rank),))
        leave(tmp_path, replace(FAIL, findings=(found,), title=f"a.py (rank {rank})"))
    result = read(tmp_path)
    assert len(result.used) == 4
    page = str(result)
    assert page.count("\n1. output[0]") == 2
    assert page.count("FAIL: ") == 3  # two reports, and the verdict
    assert page.count("a, b.py:3 in f") == page.count("a.py:9 in f") == 1


def test_a_process_that_left_no_complete_report_is_no_pass(tmp_path: Path) -> None:
    leave(tmp_path, PASS, ends=False)
    result = read(tmp_path)
    assert result.verdict is Verdict.INCONCLUSIVE
    assert "left no complete report" in str(result)
    (tmp_path / "other").mkdir()
    leave(tmp_path / "other", FAIL, ends=False)
    assert read(tmp_path / "other").verdict is Verdict.FAIL


def test_what_a_region_knew_by_the_kill_is_told(tmp_path: Path) -> None:
    leave(tmp_path / "run", FAIL, ends=False)
    named = replace(WRONG, op="aten.sin.default", stage="compiled")
    write_report(replace(FAIL, title="f", findings=(named,)), tmp_path)
    assert read(tmp_path / "run").findings == [named]
    leave(tmp_path / "other", FAIL)  # it ended by itself, and knows all that there is
    assert read(tmp_path / "other").findings == [WRONG]


def test_a_report_that_cannot_be_read_is_no_pass(tmp_path: Path) -> None:
    leave(tmp_path, PASS)
    (tmp_path / "bad.json").write_text("{")
    assert read(tmp_path).verdict is Verdict.INCONCLUSIVE


@pytest.mark.parametrize(
    ("status", "reports", "code"),
    [(0, [PASS], 0), (0, [FAIL], 1), (0, [], 2), (3, [PASS], 3), (3, [FAIL], 3), (-9, [PASS], 137)],
)
def test_the_own_exit_code_is_kept_unless_the_verdict_is_worse(
    tmp_path: Path, status: int, reports: list[Report], code: int
) -> None:
    for report in reports:
        leave(tmp_path / "run", report)
    result = read(tmp_path / "run", status)
    assert exit_code(result) == code
    assert ("whether the program ends so in eager too" in str(result)) == (status != 0 and reports == [PASS])


def test_nothing_compiled_and_nothing_run_are_told_apart(tmp_path: Path) -> None:
    assert "never called torch.compile" in str(read(tmp_path / "none"))
    assert "ended (exit code 3) before it compiled anything" in str(read(tmp_path / "none", 3))
    leave(tmp_path, IDLE)
    assert "nothing compiled ran" in str(read(tmp_path))


def test_annotations_are_escaped_and_at_the_line() -> None:
    assert list(github_annotations([WRONG])) == [
        "::error file=a%2C b.py,line=3,title=checked_backend%3A logic::output[0] is wrong (it is made here; the "
        "operator is not known)"
    ]
    assert next(github_annotations([replace(WRONG, source="")])).endswith("::output[0] is wrong")


def test_an_empty_folder_goes_and_a_used_one_stays(tmp_path: Path) -> None:
    for name, used in (("empty", False), ("used", True)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "hooked").touch()
        if used:
            leave(folder, PASS)
        tidy(folder)
        assert folder.exists() is used


def test_an_end_by_a_signal_without_a_name_is_told(tmp_path: Path) -> None:
    assert "killed by signal 40" in str(read(tmp_path, status=-40))
    assert "killed by SIGKILL" in str(read(tmp_path, status=-9))


def test_an_annotation_names_the_file_from_the_top_of_the_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path / "sub")
    monkeypatch.setenv("GITHUB_WORKSPACE", str(tmp_path))
    found = [replace(WRONG, source="b.py:3 in f: x.sin()")]
    assert next(github_annotations(found)).startswith("::error file=sub/b.py,")
    monkeypatch.setenv("GITHUB_WORKSPACE", str(tmp_path / "another"))
    assert next(github_annotations(found)).startswith("::error file=b.py,")
