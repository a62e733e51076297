"""The local engine: threads, processes that are killed with it, and what one bad job costs."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest

from checked_backend.sweep.case import CaseResult
from checked_backend.sweep.engine import LocalEngine
from checked_backend.sweep.job import Job, JobResources
from checked_backend.sweep.status import Status
from tests.support.sweep_tools import jobs_of, outcome

Started = Callable[[int], None]


def test_each_job_is_run_once_and_as_many_at_a_time_as_asked() -> None:
    running, most, lock = 0, 0, threading.Lock()
    gate = threading.Barrier(2, timeout=30)

    def run(_job: Job, _place: JobResources, _started: Started) -> CaseResult:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        gate.wait()
        with lock:
            running -= 1
        return outcome()

    jobs = jobs_of("a", "b", "c", "d")
    done = list(LocalEngine(2, JobResources(), runner=run).run(jobs, lambda _job: None))
    assert sorted(job.case.model for job, _ in done) == ["a", "b", "c", "d"]
    assert most == 2


def test_gpus_are_given_in_turn() -> None:
    seen: list[str | None] = []
    gate = threading.Barrier(3, timeout=30)

    def run(_job: Job, place: JobResources, _started: Started) -> CaseResult:
        gate.wait()
        seen.append(place.gpu)
        return outcome()

    list(LocalEngine(3, JobResources(), ["2", "GPU-5"], run).run(jobs_of("a", "b", "c"), lambda _job: None))
    assert sorted(map(str, seen)) == ["2", "2", "GPU-5"]


def test_a_runner_that_raises_costs_one_job() -> None:
    def run(job: Job, _place: JobResources, _started: Started) -> CaseResult:
        if job.case.model == "b":
            raise OSError("no more processes")
        return outcome()

    done = {
        job.case.model: found
        for job, found in LocalEngine(1, JobResources(), runner=run).run(jobs_of("a", "b", "c"), print)
    }
    assert [done[model].status for model in "abc"] == [Status.PASS, Status.LOST, Status.PASS]
    assert "no more processes" in done["b"].log


@pytest.mark.process
def test_closing_it_kills_what_runs_and_starts_nothing_more() -> None:
    begun: list[str] = []
    pids: list[int] = []
    up = threading.Event()

    def run(job: Job, _place: JobResources, started: Started) -> CaseResult:
        if job.case.model == "first":
            return outcome()
        process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        pids.append(process.pid)
        started(process.pid)
        up.set()
        process.wait()
        return outcome("crash")

    engine = LocalEngine(1, JobResources(), runner=run).run(
        jobs_of("first", "second", "third"), lambda job: begun.append(job.case.model)
    )
    with contextlib.closing(engine) as outcomes:
        next(outcomes)
        assert up.wait(60)
    assert begun == ["first", "second"]
    for _ in range(100):
        try:
            os.killpg(pids[0], 0)
        except ProcessLookupError:
            break
        time.sleep(0.05)
    else:
        raise AssertionError("the process is still there")
