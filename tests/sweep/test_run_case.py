"""Cases in their processes: what comes out for each end."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from checked_backend.process.job import JobEnd, JobResources, Warm
from checked_backend.process.warm import WarmProcess
from checked_backend.report import Report
from checked_backend.runs.case import Case, CaseResult, Status
from checked_backend.sweep.drive import modules_of, result_of, run_case
from checked_backend.sweep.plan import SweepJob
from checked_backend.sweep.rules import Settings
from tests.support.program_texts import COMPILER_WITH_COSINE_FOR_SINE
from tests.support.sweep_tools import outcome

RESOURCES = JobResources(threads=1, memory=3 << 30)

MODELS = f"""
import os, signal, sys, time, torch
from checked_backend.checking import program_run

{COMPILER_WITH_COSINE_FOR_SINE}

def linear():
    return torch.nn.Linear(2, 2), (torch.ones(1, 2),)

def aborts():
    os.abort()

def hungry():
    return torch.nn.Identity(), (torch.zeros(3 << 30),)

def leaves():
    sys.exit(3)

def sine_until_killed():
    program_run.investigate = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    return torch.sin, (torch.ones(3),)

def sine_for_ever():
    program_run.investigate = lambda *_: time.sleep(600)
    return torch.sin, (torch.ones(3),)
"""


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("zoo") / "zoo_of_cases.py"
    path.write_text(MODELS)
    return path


@pytest.fixture(scope="module")
def warm() -> Iterator[Warm | None]:
    if sys.platform != "linux":
        yield None
        return
    with WarmProcess(modules_of([]), RESOURCES) as process:
        yield process


def ran(zoo: Path, warm: Warm | None, model: str, compiler: str = "eager", **settings: object) -> CaseResult:
    case = Case("python:zoo_of_cases.py", model, compiler=compiler)
    return run_case(SweepJob(f"python:{zoo}", case, Settings(**{"timeout": 300.0, **settings})), RESOURCES, id, warm)


@pytest.mark.process
def test_a_case_in_a_fresh_python(zoo: Path) -> None:
    found = ran(zoo, None, "linear")
    assert (found.status, found.message) == (Status.PASS, "")
    assert found.host


@pytest.mark.process
@pytest.mark.parametrize(
    ("model", "status", "message"),
    [
        ("linear", "pass", ""),
        ("aborts", "crash", "the process was killed by SIGABRT while building the model"),
        ("hungry", "out of memory", "RuntimeError"),
        ("leaves", "error", "SystemExit: 3"),
    ],
)
def test_a_case_in_a_fork(zoo: Path, warm: Warm | None, model: str, status: str, message: str) -> None:
    found = ran(zoo, warm, model)
    assert (found.status.value, found.message[: len(message)]) == (status, message)
    assert (model in found.log) == (status != "pass")  # where it died


@pytest.mark.process
@pytest.mark.parametrize(
    ("model", "words"),
    [("sine_until_killed", "was killed by SIGKILL (out of memory?)"), ("sine_for_ever", "had not ended after 40 s")],
)
def test_a_process_that_ends_while_the_operator_is_looked_for_leaves_the_failure(
    zoo: Path, warm: Warm | None, model: str, words: str
) -> None:
    wrong = ran(zoo, warm, model, f"{zoo}:wrong", timeout=40.0, localize=True)
    assert (wrong.status, wrong.stage) == (Status.FAIL, "checking the compiled program")
    assert wrong.message.startswith("logic: output[0]: ")
    assert f"; the process {words} while checking the compiled program, so it looked no further" in wrong.message
    [finding] = Report.from_json(wrong.report).findings
    assert "not yet: this was written while the operator was looked for" in str(finding.evidence)


def end(told: CaseResult | None, exit: int, overdue: float | None = None, log: str = "", stage: str = "x") -> JobEnd:
    return JobEnd("" if told is None else told.to_json(), stage, exit, log, overdue=overdue)


FULL = "OSError: [Errno 28] No space left on device"


@pytest.mark.parametrize(
    ("left", "status", "message"),
    [
        (end(outcome(), 0), "pass", ""),
        (end(outcome(), -11), "crash", "the process was killed by SIGSEGV while x"),
        (end(None, -9), "crash", "the process was killed by SIGKILL (out of memory?) while x"),
        (end(None, -6, log="terminate: std::bad_alloc"), "out of memory", "the process was killed by SIGABRT"),
        (end(None, 1), "crash", "the process exited with status 1 while x"),
        (end(None, -9, 60.0), "hang", "the process had not ended after 60 s while x"),
        (end(None, 0), "crash", "the process exited with status 0 while x"),
        (JobEnd("{", "x", 0), "crash", "a worker's result: Invalid JSON"),
        # what ends before the model says nothing of it
        (
            end(None, 1, log=FULL, stage="importing torch"),
            "lost",
            f"the process exited with status 1 while importing torch: {FULL}",
        ),
        (end(None, 1, log=FULL, stage="building the model"), "crash", "the process exited with status 1"),
    ],
)
def test_what_a_process_leaves_behind_becomes_a_result(left: JobEnd, status: str, message: str) -> None:
    found = result_of(left)
    assert (found.status.value, found.message[: len(message)]) == (status, message)
