"""Workers that are forked from a process that has imported torch: how they end, and what a death costs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from checked_backend.sweep.case import Case, CaseResult, Settings
from checked_backend.sweep.job import Job, JobResources, run_job, run_worker
from checked_backend.sweep.status import Status
from checked_backend.sweep.warm import WarmProcesses, can_fork, modules_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux forks workers")

PLACE = JobResources(threads=1, memory=3 << 30)

MODELS = """
import os, signal, subprocess, sys, time, torch

def linear():
    return torch.nn.Linear(2, 2), (torch.ones(1, 2),)

def aborts():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    open(os.environ["PID_FILE"], "w").write(str(child.pid))
    os.abort()

def sleeps():
    time.sleep(600)

def hungry():
    return torch.nn.Identity(), (torch.zeros(3 << 30),)

def kills_its_parent():
    if os.getppid() != int(os.environ["DRIVER"]):
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(600)
    return linear()

def leaves():
    sys.exit(3)
"""


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("warm") / "zoo.py"
    path.write_text(MODELS)
    return path


@pytest.fixture(scope="module")
def warm(zoo: Path) -> Iterator[WarmProcesses]:
    os.environ.update(PID_FILE=str(zoo.parent / "pid"), DRIVER=str(os.getpid()))  # what workers inherit is fixed now
    try:
        with WarmProcesses(1, modules_of([f"python:{zoo}"]), PLACE) as processes:
            yield processes
    finally:
        del os.environ["PID_FILE"], os.environ["DRIVER"]


def ran(
    zoo: Path, warm: WarmProcesses, model: str, timeout: float = 300.0, started: Callable[[int], None] = lambda _: None
) -> CaseResult:
    case = Case("python:zoo.py", model, compiler="eager")
    return run_job(Job(f"python:{zoo}", case, Settings(timeout=timeout)), PLACE, started, warm)


def is_running(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def is_gone(pid: int) -> bool:
    end = time.monotonic() + 60
    while is_running(pid) and time.monotonic() < end:
        time.sleep(0.05)
    return not is_running(pid)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.process
def test_a_case_is_forked_and_another_after_it(zoo: Path, warm: WarmProcesses) -> None:
    parents: list[int] = []
    for _ in range(2):
        found = ran(zoo, warm, "linear", started=lambda pid: parents.append(parent_of(pid)))
        assert (found.status, found.message) == (Status.PASS, "")
    assert parents[0] == parents[1] != os.getpid()


@pytest.mark.process
def test_a_crash_takes_what_it_started_along_and_costs_one_case(zoo: Path, warm: WarmProcesses) -> None:
    found = ran(zoo, warm, "aborts")
    assert found.status is Status.CRASH
    assert found.message == "the process was killed by SIGABRT while building the model"
    assert "aborts" in found.log
    assert is_gone(int((zoo.parent / "pid").read_text()))
    assert ran(zoo, warm, "linear").status is Status.PASS


@pytest.mark.process
def test_a_hang_is_killed_and_costs_one_case(zoo: Path, warm: WarmProcesses) -> None:
    found = ran(zoo, warm, "sleeps", timeout=3.0)
    assert (found.status, found.message) == (
        Status.HANG,
        "the process had not ended after 3 s while building the model",
    )
    assert ran(zoo, warm, "linear").status is Status.PASS


@pytest.mark.process
def test_a_worker_whose_time_is_up_at_once_is_killed_too(zoo: Path, warm: WarmProcesses) -> None:
    assert ran(zoo, warm, "sleeps", timeout=0.0).status is Status.HANG
    assert ran(zoo, warm, "linear").status is Status.PASS


@pytest.mark.process
def test_a_forked_worker_has_no_more_memory_than_it_may(zoo: Path, warm: WarmProcesses) -> None:
    assert ran(zoo, warm, "hungry").status is Status.OUT_OF_MEMORY
    assert ran(zoo, warm, "linear").status is Status.PASS


@pytest.mark.process
def test_a_worker_that_is_killed_is_a_crash_and_costs_one_case(zoo: Path, warm: WarmProcesses) -> None:
    found = ran(zoo, warm, "sleeps", started=lambda pid: os.kill(pid, signal.SIGKILL))
    assert found.status is Status.CRASH
    assert "SIGKILL" in found.message
    assert ran(zoo, warm, "linear").status is Status.PASS


@pytest.mark.process
def test_a_model_that_calls_exit_is_told_and_the_next_case_is_forked(zoo: Path, warm: WarmProcesses) -> None:
    assert ran(zoo, warm, "leaves").status is Status.ERROR
    assert ran(zoo, warm, "linear").status is Status.PASS


@pytest.mark.slow
@pytest.mark.ci_sample
def test_a_case_that_kills_the_process_it_was_forked_from_runs_again_in_a_fresh_python(
    zoo: Path, warm: WarmProcesses
) -> None:
    pids: list[int] = []
    found = ran(zoo, warm, "kills_its_parent", started=pids.append)
    assert found.status is Status.PASS
    assert len(pids) == 2
    assert is_gone(pids[0])  # it does not outlive the process that it killed
    parents: list[int] = []
    assert ran(zoo, warm, "linear", started=lambda pid: parents.append(parent_of(pid))).status is Status.PASS
    assert parents != [os.getpid()]  # another process forks now


FORKER_OF_THREADS = """
import threading, time
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
"""


@pytest.mark.process
def test_a_process_with_threads_is_not_forked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "starts_a_thread.py").write_text(FORKER_OF_THREADS)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    with WarmProcesses(1, ["starts_a_thread"], PLACE) as processes:
        assert processes.run({"ask": "models"}, tmp_path, 60.0, lambda _pid: None) is None
        assert processes.run({"ask": "models"}, tmp_path, 60.0, lambda _pid: None) is None  # nor tried again


@pytest.mark.slow
@pytest.mark.ci_sample
def test_a_library_that_is_missing_is_left_to_the_worker(zoo: Path) -> None:
    question: dict[str, Any] = {"ask": "models", "spec": f"python:{zoo}", "compilers": ["eager"]}
    with WarmProcesses(1, ["no_such_module_anywhere"], PLACE) as processes:
        parents: list[int] = []
        answer = run_worker(question, 120.0, PLACE, lambda pid: parents.append(parent_of(pid)), forking=processes)
    assert "linear" in [model["name"] for model in json.loads(answer.text)["models"]]
    assert parents != [os.getpid()]


DRIVER = """
import sys
from pathlib import Path
from checked_backend.sweep.case import Case, Settings
from checked_backend.sweep.job import Job, JobResources, run_job
from checked_backend.sweep.warm import WarmProcesses
with WarmProcesses(1, [], JobResources()) as warm:
    job = Job("python:" + sys.argv[1], Case("s", "sleeps", compiler="eager"), Settings())
    run_job(job, JobResources(), lambda pid: print(pid, flush=True), warm)
"""


@pytest.mark.process
def test_nothing_outlives_a_driver_that_is_killed(zoo: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PID_FILE": "", "DRIVER": "0"}
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, str(zoo)], stdout=subprocess.PIPE, env=environment)
    assert driver.stdout is not None
    with driver.stdout:
        worker = int(driver.stdout.readline())
        forker = parent_of(worker)
        driver.kill()
        driver.wait()
    assert is_gone(worker)
    assert is_gone(forker)


@pytest.mark.process
def test_closing_ends_processes_that_still_import() -> None:
    before = threading.active_count()
    with WarmProcesses(2, modules_of(["huggingface"]), PLACE) as processes:
        pids = [forker._process.pid for forker in processes._idle]
    assert len(pids) == 2
    assert not any(is_running(pid) for pid in pids)
    assert threading.active_count() == before


def test_only_cases_on_the_cpu_are_forked() -> None:
    assert can_fork(["cpu"])
    assert not can_fork(["cuda"])
    assert not can_fork(["cpu", "cuda"])


def test_nothing_of_the_users_is_imported_before_a_fork() -> None:
    assert modules_of(["python:models.py", "dumps:x"]) == modules_of([])
    assert any(name.startswith("transformers.") for name in modules_of(["huggingface"]))
