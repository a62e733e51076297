"""Pools of jobs: threads here, processes that are killed with them, what one bad job costs; and a Ray cluster."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from checked_backend.errors import SuiteError
from checked_backend.process.job import JobResources
from checked_backend.runs.case import Case, CaseResult
from checked_backend.runs.pool import LocalPool, RayPool
from checked_backend.sweep.plan import SweepJob
from checked_backend.sweep.rules import Settings
from tests.support.sweep_tools import jobs_of, outcome

Started = Callable[[int], None]


def test_each_job_runs_once_as_many_at_a_time_as_asked_and_gpus_are_given_in_turn() -> None:
    running, most, lock = 0, 0, threading.Lock()
    gate = threading.Barrier(2, timeout=30)
    gpus: list[str | None] = []

    def run(_job: SweepJob, resources: JobResources, _started: Started) -> CaseResult:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
            gpus.append(resources.gpu)
        gate.wait()
        with lock:
            running -= 1
        return outcome()

    done = list(LocalPool(run, JobResources(), 2, ["2", "GPU-5"]).run(jobs_of("a", "b", "c", "d"), id))
    assert sorted(job.case.model for job, _ in done) == ["a", "b", "c", "d"]
    assert most == 2
    assert sorted(map(str, gpus)) == ["2", "2", "GPU-5", "GPU-5"]


def test_a_runner_that_raises_costs_one_job() -> None:
    def run(job: SweepJob, _resources: JobResources, _started: Started) -> CaseResult:
        if job.case.model == "b":
            raise OSError("no more processes")
        return outcome()

    done = {job.case.model: found for job, found in LocalPool(run, JobResources()).run(jobs_of("a", "b", "c"), id)}
    assert [done[model].status.value for model in "abc"] == ["pass", "lost", "pass"]
    assert "no more processes" in done["b"].log


@pytest.mark.process
def test_closing_it_kills_what_runs_and_starts_nothing_more() -> None:
    begun: list[str] = []
    pids: list[int] = []
    up = threading.Event()

    def run(job: SweepJob, _resources: JobResources, started: Started) -> CaseResult:
        if job.case.model == "first":
            return outcome()
        process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        pids.append(process.pid)
        started(process.pid)
        up.set()
        process.wait()
        return outcome("crash")

    jobs = LocalPool(run, JobResources()).run(
        jobs_of("first", "second", "third"), lambda case: begun.append(case.model)
    )
    with contextlib.closing(jobs) as done:
        next(done)
        assert up.wait(60)
    assert begun == ["first", "second"]
    with pytest.raises(ProcessLookupError):  # the pool has waited for it
        os.killpg(pids[0], 0)


class StandIn(ModuleType):
    """As much of Ray as the pool uses. Tasks run when they are waited for."""

    def __init__(self, errors: Mapping[str, Exception] | None = None, refuses: str = "") -> None:
        super().__init__("ray")
        self.exceptions = SimpleNamespace(RayError=_RayError, RayTaskError=_TaskError, OutOfMemoryError=_MemoryError)
        self.errors = dict(errors or {})
        self.refuses = refuses
        self.asked: list[Mapping[str, Any]] = []
        self.cancelled: list[object] = []
        self.address: object = "not asked"

    def is_initialized(self) -> bool:
        return False

    def init(self, address: str | None = None, **_settings: object) -> None:
        self.address = address
        if self.refuses:
            raise ConnectionError(self.refuses)

    def remote(self, **settings: object) -> Callable[[Callable[..., str]], Any]:
        def wrap(function: Callable[..., str]) -> Any:
            def options(**more: object) -> Any:
                self.asked.append({**settings, **more})
                return SimpleNamespace(remote=lambda *args: _Reference(function, args))

            return SimpleNamespace(options=options)

        return wrap

    def wait(self, waiting: Sequence[Any], **_settings: object) -> tuple[list[Any], list[Any]]:
        return [waiting[0]], list(waiting[1:])

    def get(self, reference: Any) -> str:
        error = self.errors.get(reference.args[0].case.model)
        if error is not None:
            raise error
        return str(reference.function(*reference.args))

    def cancel(self, reference: Any, **_settings: object) -> None:
        self.cancelled.append(reference.args[0].case.model)


class _Reference:
    def __init__(self, function: Callable[..., str], args: tuple[Any, ...]) -> None:
        self.function, self.args = function, args


class _RayError(Exception):
    pass


class _TaskError(_RayError):
    pass


class _MemoryError(_RayError):
    pass


def passes(_job: SweepJob, _resources: JobResources, _started: object) -> CaseResult:
    return outcome()


def test_results_come_back_and_each_job_asks_for_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = StandIn()
    monkeypatch.setitem(sys.modules, "ray", ray)
    jobs = [*jobs_of("a"), SweepJob("timm", Case("timm", "b", device="cuda"), Settings())]
    done = list(RayPool(passes, JobResources(threads=3), "ray://there").run(jobs, id))
    assert ray.address == "ray://there"
    assert [(job.case.model, found.status.value) for job, found in done] == [("a", "pass"), ("b", "pass")]
    assert [(ask["num_cpus"], ask["num_gpus"], ask["max_retries"]) for ask in ray.asked] == [(3, 0, 1), (3, 1, 1)]
    assert all(found.host for _, found in done)


def test_what_ray_could_not_run_is_recorded_and_costs_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = {
        "lost": _RayError("the node died\nmore"),
        "full": _MemoryError("the node is full"),
        "bad": _TaskError("ModuleNotFoundError: checked_backend"),
    }
    monkeypatch.setitem(sys.modules, "ray", StandIn(errors))
    jobs = jobs_of("lost", "full", "bad", "good")
    done = {job.case.model: found for job, found in RayPool(passes, JobResources()).run(jobs, id)}
    assert [found.status.value for found in done.values()] == ["lost", "out of memory", "lost", "pass"]
    assert done["lost"].message == "its node was lost 2 times: _RayError: the node died"
    assert "could not be started on its node" in done["bad"].message


def test_closing_it_cancels_what_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = StandIn()
    monkeypatch.setitem(sys.modules, "ray", ray)
    with closing(RayPool(passes, JobResources()).run(jobs_of("a", "b", "c"), id)) as done:
        next(done)
    assert ray.cancelled == ["b", "c"]


def test_no_ray_and_no_cluster_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(SuiteError, match=r"install it with pip install 'checked-backend\[ray\]'"):
        RayPool(passes, JobResources())
    monkeypatch.setitem(sys.modules, "ray", StandIn(refuses="nobody answers\nat all"))
    with pytest.raises(SuiteError, match=r"--engine ray: no cluster at there: nobody answers$"):
        RayPool(passes, JobResources(), "there")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_two_real_nodes_of_which_one_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    import ray
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")

    def held(job: SweepJob, _resources: JobResources, _started: object) -> CaseResult:
        here = ray.get_runtime_context().get_node_id()
        with (tmp_path / "ran").open("a") as stream:
            stream.write(f"{job.case.model} {here} {os.getpid()}\n")
        while not (tmp_path / "go").exists():
            time.sleep(0.05)
        return outcome(host=here)

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    other = cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    ray.init(address=cluster.address, log_to_driver=False)
    try:
        lost = other.node_id
        killer = threading.Thread(target=kill_when_busy, args=(cluster, other, tmp_path))
        killer.start()
        done = list(RayPool(held, JobResources(threads=1), cluster.address).run(jobs_of("a", "b", "c"), id))
        killer.join()
    finally:
        ray.shutdown()
        cluster.shutdown()
    ran = [line.split() for line in (tmp_path / "ran").read_text().splitlines()]
    assert sorted(job.case.model for job, _ in done) == ["a", "b", "c"]
    assert {found.status.value for _, found in done} == {"pass"}
    assert not any(found.host == lost for _, found in done)
    assert len(ran) == 4  # what the lost node ran, once more


def kill_when_busy(cluster: Any, node: Any, folder: Path) -> None:
    end = time.monotonic() + 120
    while time.monotonic() < end:
        ran = (folder / "ran").read_text().splitlines() if (folder / "ran").exists() else []
        if len(ran) == 2:  # one on each node
            cluster.remove_node(node, allow_graceful=False)
            [lost] = (int(line.split()[2]) for line in ran if node.node_id in line)
            while Path(f"/proc/{lost}").exists() and time.monotonic() < end:  # else it may still answer
                time.sleep(0.1)
            break
        time.sleep(0.1)
    (folder / "go").touch()
