"""The verb ``report``, misuse, help, and output that somebody reads only in part."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from checked_backend.cli import reporting
from checked_backend.findings import Coverage, Finding, Kind, Skip
from checked_backend.report import Report
from checked_backend.report.write import write_report
from tests.support.cli_tools import Run
from tests.support.raising import raising

PASS = Report((), Coverage(checked={"outputs": 1}), "fine")
FAIL = replace(PASS, findings=(Finding(Kind.LOGIC, "output[0]", "wrong"),), title="bad")
VAGUE = replace(PASS, coverage=Coverage(checked={"outputs": 1}, skipped=(Skip("x", "y", matters=True),)), title="vague")


@pytest.mark.parametrize(
    ("reports", "code"), [([PASS], 0), ([PASS, FAIL], 1), ([VAGUE, PASS], 2), ([VAGUE, FAIL], 1), ([], 3)]
)
def test_exit_code_is_the_worst_verdict(run: Run, tmp_path: Path, reports: list[Report], code: int) -> None:
    for report in reports:
        write_report(report, tmp_path)
    got, out, err = run("report", tmp_path)
    assert got == code
    for report in reports:
        assert str(report).partition("\n")[0] in out
    if not reports:
        assert err == f"checked-backend: no reports in {tmp_path}\n"


def test_reports_of_ranks_are_merged_and_a_broken_file_is_still_told(run: Run, tmp_path: Path) -> None:
    for report in (FAIL, FAIL, PASS):
        write_report(report, tmp_path)
    (tmp_path / "bad.json").write_text("{")
    code, out, err = run("report", tmp_path, "--merge", "--json")
    assert code == 1
    assert "bad.json: not a report" in err
    (merged,) = json.loads(out)["reports"]
    assert merged["path"] == str(tmp_path)
    assert len(merged["report"]["findings"]) == 1


def test_one_file(run: Run, tmp_path: Path) -> None:
    path = write_report(FAIL, tmp_path)
    code, out, _ = run("report", path)
    assert (code, out) == (1, str(replace(FAIL, path=path)) + "\n")


def test_broken_file_is_said_and_is_not_a_pass(run: Run, tmp_path: Path) -> None:
    write_report(PASS, tmp_path)
    (tmp_path / "bad.json").write_text("{")
    code, _, err = run("report", tmp_path)
    assert code == 2
    assert err.startswith(f"checked-backend: {tmp_path / 'bad.json'}: not a report: not JSON: ")
    code, _, err = run("report", tmp_path / "bad.json")
    assert code == 3
    assert "no reports in" in err


@pytest.mark.parametrize("order", ["{path} --json", "--json {path}", "{path} --json -", "{path} --json=-"])
def test_json_to_stdout(run: Run, tmp_path: Path, order: str) -> None:
    path = write_report(FAIL, tmp_path)
    code, out, err = run("report", *order.format(path=tmp_path).split())
    assert (code, err) == (1, "")
    read = json.loads(out)
    assert (read["verdict"], read["broken"]) == ("fail", [])
    assert read["reports"][0]["path"] == str(path)
    assert Report.from_json(json.dumps(read["reports"][0]["report"])) == FAIL


def test_internal_error(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporting, "read_reports", raising(RuntimeError("oops")))
    code, _, err = run("report", tmp_path)
    assert code == 3
    assert "RuntimeError: oops" in err
    assert "internal error: this is a bug in checked_backend" in err


@pytest.mark.process
@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("checked-backend repo", ["report"]),
        ("checked-backend report --cert", ["--certificate"]),
        ("checked-backend check model.py:make --loc", ["--localize"]),
    ],
)
def test_shells_complete_verbs_and_options_without_loading_torch(words: str, completed: list[str]) -> None:
    asked = {"_CHECKED_BACKEND_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    program = "import sys; sys.modules['torch'] = None; from checked_backend.cli.verbs import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**asked, "PATH": "", "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, completed, "")


@pytest.mark.parametrize(
    ("words", "meant"),
    [(["reprot", "x"], "report"), (["report", "x", "--certifcate"], "--certificate"), (["doctor", "--jsn"], "--json")],
)
def test_a_mistyped_verb_or_option_is_answered_with_the_one_that_was_meant(
    run: Run, words: list[str], meant: str
) -> None:
    code, _, err = run(*words)
    assert (code, meant in err.splitlines()[-1]) == (3, True)


@pytest.mark.process
def test_python_m_and_a_reader_that_leaves(tmp_path: Path) -> None:
    for _ in range(30):
        write_report(FAIL, tmp_path)
    command = [sys.executable, "-m", "checked_backend", "report", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert process.stdout.readline().startswith("FAIL: ")
        process.stdout.close()
        assert process.stderr.read() == ""


@pytest.mark.process
def test_output_that_the_terminal_cannot_show(tmp_path: Path) -> None:
    write_report(replace(PASS, title="naïve ∑"), tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "checked_backend", "report", str(tmp_path)],
        env={"PYTHONIOENCODING": "ascii", "PATH": "", "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "na\\xefve \\u2211" in done.stdout
