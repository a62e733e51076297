"""Jobs in other processes, started in every way: how they end, and that nothing is left of them."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest

from checked_backend.process.job import (
    AnswerFolder,
    Job,
    JobEnd,
    JobResources,
    NoForkError,
    Warm,
    _ask,
    environment_of,
    run,
)
from checked_backend.process.warm import WarmProcess
from tests.support.job_work import work

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux forks workers and limits memory")

WORK = "tests.support.job_work:work"
ROOT = Path(__file__).parents[2]
RESOURCES = JobResources(memory=3 << 30, folder=str(ROOT))
Start = Literal["fork", "fresh"] | Warm


@pytest.fixture(scope="module")
def warm() -> Iterator[WarmProcess]:
    with WarmProcess(["tests.support.job_work", "no_such_module_anywhere"], RESOURCES) as process:
        yield process


@pytest.fixture(params=["fresh", "fork", "warm"])
def start(request: pytest.FixtureRequest, warm: WarmProcess) -> Start:
    if request.param == "fork" and threading.active_count() > 1:
        pytest.skip("a process with threads is not forked")
    return warm if request.param == "warm" else request.param


def job_of(start: Start, do: str, seconds: float = 60.0, **question: Any) -> Job:
    asked = {"do": do, **question}
    return Job(partial(work, asked) if start == "fork" else WORK, {} if start == "fork" else asked, seconds)


def ran(start: Start, do: str, seconds: float = 60.0, started: Callable[[int], None] = id, **question: Any) -> JobEnd:
    warm = None if isinstance(start, str) else start
    return run(job_of(start, do, seconds, **question), RESOURCES, warm, started)


def is_gone(pid: int) -> bool:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.process
@pytest.mark.parametrize(
    ("do", "seconds", "kind", "words"),
    [
        ("answer", 60.0, "done", "exited with status 0"),
        ("leave", 60.0, "exit", "exited with status 1"),
        ("hang", 1.0, "hang", "had not ended after 1 s"),
        ("eat", 60.0, "memory", "exited with status 1"),
    ],
)
def test_how_a_job_ends_and_what_it_leaves(start: Start, do: str, seconds: float, kind: str, words: str) -> None:
    end = ran(start, do, seconds)
    assert (end.kind, end.words, end.stage) == (kind, words, "at work")
    assert end.answer.isdecimal()
    assert ("MemoryError" in end.log) == (do == "eat")
    assert ran(start, "answer").kind == "done"  # it cost no other job


@pytest.mark.process
def test_a_job_that_dies_takes_what_it_started_along(start: Start, tmp_path: Path) -> None:
    end = ran(start, "abort", pid_file=str(tmp_path / "pid"), answer=False)
    assert (end.kind, end.words, end.answer) == ("signal", "was killed by SIGABRT", "")
    assert "job_work.py" in end.log  # where it died
    assert is_gone(int((tmp_path / "pid").read_text()))
    assert ran(start, "answer").kind == "done"


@pytest.mark.process
def test_a_job_can_be_ended_from_here_or_has_no_time_at_all(start: Start) -> None:
    end = ran(start, "hang", started=lambda pid: os.kill(pid, signal.SIGKILL))
    assert (end.kind, end.words) == ("signal", "was killed by SIGKILL (out of memory?)")
    assert ran(start, "hang", 0.0).kind == "hang"
    assert ran(start, "answer").kind == "done"


@pytest.mark.process
def test_a_warm_process_is_forked_again_and_again_and_replaced_when_it_dies(warm: WarmProcess) -> None:
    parents = {ran(warm, "answer").answer for _ in range(2)}
    assert len(parents) == 1
    assert parents != {str(os.getpid())}
    pids: list[int] = []
    end = ran(warm, "kill the parent", started=pids.append, driver=os.getpid())
    assert (end.kind, end.answer) == ("done", str(os.getpid()))  # in a fresh Python
    assert len(pids) == 2
    assert is_gone(pids[0])
    assert ran(warm, "answer").answer not in {*parents, str(os.getpid())}


@pytest.mark.process
def test_a_warm_process_is_forked_for_several_jobs_at_a_time(warm: WarmProcess) -> None:
    with ThreadPoolExecutor(1) as pool:
        hanging = pool.submit(ran, warm, "hang", 2.0)
        assert ran(warm, "answer").kind == "done"
        assert not hanging.done()
        assert hanging.result().kind == "hang"


@pytest.mark.process
def test_who_does_not_wait_for_the_end_of_a_fork_ends_no_other(warm: WarmProcess, tmp_path: Path) -> None:
    parent = ran(warm, "answer").answer
    _ask(Job(WORK, {"do": "answer"}, 60.0), RESOURCES, tmp_path)
    pid = warm.forked(tmp_path).pid  # and the fork's socket is closed
    assert is_gone(pid)
    time.sleep(0.2)  # by then its exit status was written to nobody
    assert ran(warm, "answer").answer == parent


@pytest.mark.process
def test_a_process_with_threads_is_not_forked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
    (tmp_path / "starts_a_thread.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    with WarmProcess(["starts_a_thread"], RESOURCES) as process:
        for _ in range(2):  # nor is it tried again
            with pytest.raises(NoForkError):
                process.forked(tmp_path)
        assert ran(process, "answer").answer == str(os.getpid())


DRIVER = """
import sys
from checked_backend.process.job import JobResources, run
from checked_backend.process.warm import WarmProcess
from tests.process.test_job import job_of
with WarmProcess([], JobResources()) as warm:
    job = job_of(sys.argv[1], "hang", 600.0)
    run(job, JobResources(), warm if sys.argv[1] == "warm" else None, lambda pid: print(pid, flush=True))
"""


@pytest.mark.process
@pytest.mark.parametrize("how", ["fresh", "fork", "warm"])
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT])
def test_nothing_outlives_a_driver(how: str, end: signal.Signals) -> None:
    command = [sys.executable, "-c", DRIVER, how]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment) as driver:
        pid = int(driver.stdout.readline())
        parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        driver.send_signal(end)
    assert is_gone(pid)
    assert is_gone(parent)


@pytest.mark.process
def test_closing_ends_a_process_that_still_imports() -> None:
    with WarmProcess(["torch"], RESOURCES) as process:
        pid = process._process.pid
    assert is_gone(pid)


@pytest.mark.process
@pytest.mark.parametrize("start", ["fork", "fresh"])
def test_what_a_job_prints_is_printed_here_where_something_collects_output(
    start: Literal["fork", "fresh"], capsys: pytest.CaptureFixture[str]
) -> None:
    end = run(job_of(start, "print"), RESOURCES, logged=False)
    assert (end.exit, end.kind, end.log) == (5, "exit", "")
    assert capsys.readouterr() == ("out\n", "err\n")


@pytest.mark.process
def test_a_stage_may_have_less_time() -> None:
    def stage(answers: AnswerFolder) -> None:
        answers.note("a stage", 0.2)
        time.sleep(600)

    end = run(Job(stage), RESOURCES)
    assert (end.kind, end.stage, end.words) == ("hang", "a stage", "had not ended after 0.2 s")


@pytest.mark.process
def test_a_process_that_is_limited_itself_can_limit_others() -> None:
    def limited(_answers: AnswerFolder) -> int:
        resource.setrlimit(resource.RLIMIT_DATA, (2**33, 2**33))
        return run(Job(lambda _: 5), JobResources(memory=2**40)).exit

    assert run(Job(limited), JobResources()).exit == 5


TERMINATED = """
import signal, sys, time
from checked_backend.process.interrupt import terminable
from checked_backend.process.job import Job, JobResources, run

def work(answers):
    try:
        print("begun", flush=True)
        time.sleep(600)
    except KeyboardInterrupt:
        return 7

with terminable():
    print(run(Job(work), JobResources(), logged=False, patience=600.0).exit)
"""


@pytest.mark.process
def test_sigterm_reaches_a_job_as_ctrl_c() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    command = [sys.executable, "-c", TERMINATED]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as running:
        running.stdout.readline()
        running.send_signal(signal.SIGTERM)
        assert running.stdout.read() == "7\n"


@pytest.mark.process
def test_a_new_python_imports_nothing_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("json", "importlib", "signal", "checked_backend"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('run')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", os.curdir)])
    end = run(Job(WORK, {"do": "answer"}, 60.0), JobResources())
    assert end.kind == "done", end.log


def test_the_environment_of_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    monkeypatch.setenv("CHECKED_BACKEND", "1")
    assert environment_of(JobResources(gpu="3"))["CUDA_VISIBLE_DEVICES"] == "3"
    found = environment_of(JobResources(threads=2))
    assert (found["CUDA_VISIBLE_DEVICES"], found["OMP_NUM_THREADS"]) == ("2,3", "2")
    assert "CHECKED_BACKEND" not in found  # a job checks what it is for, not every torch.compile


@pytest.mark.parametrize(
    ("end", "kind"),
    [
        (JobEnd("", "x", -9, starved=True), "memory"),
        (JobEnd("", "x", -9), "signal"),
        (JobEnd("", "x", -6, "terminate: std::bad_alloc"), "memory"),
        (JobEnd("", "x", 0), "exit"),
        (JobEnd("a", "x", -9, overdue=60.0, starved=True), "hang"),
        (JobEnd("a", "x", 0, "MemoryError, and it went on"), "done"),
    ],
)
def test_kinds_of_ends(end: JobEnd, kind: str) -> None:
    assert end.kind == kind
