"""Processes of cases: how they end, and that nothing is left of them."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from checked_backend.process.child import Ended
from checked_backend.report import Report
from checked_backend.sweep.case import Case, CaseResult, Settings
from checked_backend.sweep.job import Answer, Job, JobResources, run_job
from checked_backend.sweep.job import _outcome as outcome_of
from checked_backend.sweep.status import Status
from tests.support.program_texts import COMPILER_WITH_COSINE_FOR_SINE
from tests.support.sweep_tools import outcome

MODELS = """
import os, signal, subprocess, sys, torch

def aborts():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    open(os.environ["PID_FILE"], "w").write(str(child.pid))
    os.abort()

def hungry():
    return torch.nn.Identity(), (torch.zeros(3 << 28),)
"""

SEARCHED = f"""
import os, signal, time, torch
from checked_backend.checking import program_run

{COMPILER_WITH_COSINE_FOR_SINE}
END = os.environ["END"]
program_run.investigate = lambda *_: time.sleep(600) if END == "hang" else os.kill(os.getpid(), signal.SIGKILL)

def sine():
    return torch.sin, (torch.ones(3),)

def clean():
    return torch.tanh, (torch.ones(3),)
"""


def ran(folder: Path, model: str, place: JobResources, timeout: float = 300.0) -> CaseResult:
    path = folder / "zoo_of_jobs.py"
    path.write_text(MODELS)
    case = Case("python:zoo_of_jobs.py", model, compiler="eager")
    return run_job(Job(f"python:{path}", case, Settings(timeout=timeout)), place)


@pytest.mark.process
def test_a_process_that_dies_is_a_crash_and_what_it_started_goes_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PID_FILE", str(tmp_path / "pid"))
    found = ran(tmp_path, "aborts", JobResources(threads=1))
    assert (found.status, found.stage) == (Status.CRASH, "building the model")
    assert found.message == "the process was killed by SIGABRT while building the model"
    assert "aborts" in found.log  # where it died
    assert found.host
    child = Path(f"/proc/{(tmp_path / 'pid').read_text()}/stat")
    end = time.monotonic() + 60
    while child.exists() and child.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.process
def test_a_process_that_does_not_end_is_a_hang() -> None:
    found = run_job(Job("huggingface", Case("huggingface", "x"), Settings(timeout=0.2)), JobResources())
    assert found.status is Status.HANG
    assert found.message.startswith("the process had not ended after 0.2 s while ")


@pytest.mark.process
@pytest.mark.parametrize(
    ("end", "words"), [("kill", "was killed by SIGKILL (out of memory?)"), ("hang", "had not ended after 40 s")]
)
def test_a_process_that_ends_while_the_operator_is_looked_for_leaves_the_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str, words: str
) -> None:
    monkeypatch.setenv("END", end)
    path = tmp_path / "zoo_of_searches.py"
    path.write_text(SEARCHED)

    def found(model: str) -> CaseResult:
        case = Case("python:zoo_of_searches.py", model, compiler=f"{path}:wrong")
        place = JobResources(threads=1, folder=str(tmp_path))
        return run_job(Job(f"python:{path}", case, Settings(timeout=40.0, localize=True)), place)

    wrong = found("sine")
    assert (wrong.status, wrong.stage) == (Status.FAIL, "checking the compiled program")
    assert wrong.message.startswith("logic: output[0]: ")
    assert f"; the process {words} while checking the compiled program, so it looked no further" in wrong.message
    [finding] = Report.from_json(wrong.report).findings
    assert "not yet: this was written while the operator was looked for" in str(finding.evidence)
    assert found("clean").status is Status.PASS


@pytest.mark.process
@pytest.mark.skipif(not hasattr(os, "fork"), reason="only POSIX limits memory")
def test_a_process_has_no_more_memory_than_it_may(tmp_path: Path) -> None:
    found = ran(tmp_path, "hungry", JobResources(threads=1, memory=2 << 30))
    assert found.status is Status.OUT_OF_MEMORY


def answer(told: CaseResult | None, status: int, stage: str, overdue: float | None = None, **more: object) -> Answer:
    text = "" if told is None else told.to_json()
    return Answer(text, Ended(status, stage, overdue), str(more.get("log", "")), 1.0, bool(more.get("starved")))


@pytest.mark.parametrize(
    ("left", "status", "message"),
    [
        (answer(outcome(), 0, "x"), "pass", ""),
        (answer(outcome(), -11, "x"), "crash", "the process was killed by SIGSEGV while x"),
        (answer(None, -9, "x"), "crash", "the process was killed by SIGKILL (out of memory?) while x"),
        (answer(None, -9, "x", starved=True), "out of memory", "the process was killed by SIGKILL"),
        (answer(None, -6, "x", log="terminate: std::bad_alloc"), "out of memory", "the process was killed by SIGABRT"),
        (answer(None, 1, "x"), "crash", "the process exited with status 1 while x"),
        (answer(None, -9, "x", 60.0), "hang", "the process had not ended after 60 s while x"),
        (Answer("{", Ended(0, "x", None), "", 1.0, False), "crash", "a worker's result is not JSON"),
        (Answer("", Ended(0, "x", None), "", 1.0, False), "crash", "the process exited with status 0 while x"),
    ],
)
def test_what_a_worker_leaves_behind_becomes_an_outcome(left: Answer, status: str, message: str) -> None:
    found = outcome_of(left)
    assert found.status.value == status
    assert found.message.startswith(message)


def test_what_ends_before_the_model_says_nothing_of_it() -> None:
    log = "OSError: [Errno 28] No space left on device"
    found = outcome_of(Answer("", Ended(1, "importing torch", None), log, 1.0, starved=False))
    assert found.status is Status.LOST
    assert found.message == f"the process exited with status 1 while importing torch: {log}"
    crash = outcome_of(Answer("", Ended(1, "building the model", None), log, 1.0, starved=False))
    assert crash.status is Status.CRASH
