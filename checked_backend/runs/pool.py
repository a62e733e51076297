"""Run jobs at the same time: on this machine, or on a Ray cluster."""

from __future__ import annotations

import contextlib
import importlib
import queue
import socket
import traceback
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from typing import Any, Generic, Protocol, TypeVar

from checked_backend.errors import SuiteError
from checked_backend.process.job import JobResources, RunningProcesses
from checked_backend.runs.case import Case, CaseResult, Status

RAY_RETRIES = 1
"""How often Ray retries a job whose node or worker was lost. Then it is recorded as lost."""

_POLL_SECONDS = 1.0


class CaseJob(Protocol):
    """The work for one case."""

    @property
    def case(self) -> Case:
        """The case."""


_Job = TypeVar("_Job", bound=CaseJob)
Runner = Callable[[_Job, JobResources, Callable[[int], None]], CaseResult]
"""Runs one job and waits for it. The callback receives the id of the job's process, which leads a process group."""
Done = Generator[tuple[_Job, CaseResult], None, None]


class Pool(Protocol[_Job]):
    """Runs jobs."""

    def run(self, jobs: Sequence[_Job], begun: Callable[[Case], None], /) -> Done[_Job]:
        """Run each job once, and yield it with its result when it is done. Closing the generator ends running jobs.

        ``begun`` is called with each case when it starts, maybe in another thread.
        """


class LocalPool(Generic[_Job]):
    """Runs jobs on this machine. One thread for each concurrent job waits for the job's process.

    Args:
        gpus: The GPUs, as CUDA_VISIBLE_DEVICES names them; concurrent jobs get them in turn.
    """

    def __init__(
        self, runner: Runner[_Job], resources: JobResources, jobs: int = 1, gpus: Sequence[str | None] = ()
    ) -> None:
        self._runner = runner
        self._jobs = jobs
        self._free: queue.SimpleQueue[JobResources] = queue.SimpleQueue()
        gpus = gpus or [resources.gpu]
        for slot in range(jobs):
            self._free.put(replace(resources, gpu=gpus[slot % len(gpus)]))

    def run(self, jobs: Sequence[_Job], begun: Callable[[Case], None]) -> Done[_Job]:
        """See `Pool`."""
        running = RunningProcesses()
        with ThreadPoolExecutor(self._jobs) as threads:
            done = {threads.submit(self._run_one, job, begun, running): job for job in jobs}
            try:
                for future in as_completed(done):
                    yield done[future], future.result()
            finally:
                threads.shutdown(wait=False, cancel_futures=True)
                running.stop()

    def _run_one(self, job: _Job, begun: Callable[[Case], None], running: RunningProcesses) -> CaseResult:
        resources = self._free.get()
        begun(job.case)
        try:
            with running.one() as started:
                return self._runner(job, resources, started)
        except Exception as error:  # an exception in one job must not stop the others
            words = f"the engine failed: {type(error).__name__}: {error}"
            return CaseResult(Status.LOST, words, log=traceback.format_exc())
        finally:
            self._free.put(resources)


class RayPool(Generic[_Job]):
    """Runs jobs on a Ray cluster. Its nodes need this package, and the suites at the same paths as here.

    A job takes as many CPUs as it has threads, and a whole GPU if its case asks for CUDA.

    Args:
        address: The cluster's address; None for the one that Ray finds, or else a new one on this machine.

    Raises:
        SuiteError: Ray is not installed, or there is no cluster at the address.
    """

    def __init__(self, runner: Runner[_Job], resources: JobResources, address: str | None = None) -> None:
        try:
            self._ray: Any = importlib.import_module("ray")
        except ImportError as error:
            raise SuiteError(f"--engine ray: {error}; install it with pip install 'checked-backend[ray]'") from error
        self._runner = runner
        self._resources = resources
        if not self._ray.is_initialized():
            try:
                self._ray.init(address=address, log_to_driver=False, configure_logging=False)
            except Exception as error:  # Ray raises any exception of its transport
                first = (str(error).strip().splitlines() or [""])[0]
                raise SuiteError(f"--engine ray: no cluster at {address or 'this machine'}: {first}") from error

    def run(self, jobs: Sequence[_Job], _begun: Callable[[Case], None]) -> Done[_Job]:
        """See `Pool`. The callback ``begun`` is never called: only the cluster knows when a job starts."""
        remote = self._ray.remote(max_retries=RAY_RETRIES, retry_exceptions=False)(_run_there)
        waiting: dict[Any, _Job] = {}
        for job in jobs:
            gpus = 1 if job.case.device == "cuda" else 0
            task = remote.options(num_cpus=self._resources.threads or 1, num_gpus=gpus, name=str(job.case))
            waiting[task.remote(job, self._resources, self._runner)] = job
        try:
            while waiting:
                ready, _ = self._ray.wait(list(waiting), num_returns=1, timeout=_POLL_SECONDS)
                for reference in ready:
                    yield waiting.pop(reference), self._result(reference)
        finally:
            for reference in waiting:
                with contextlib.suppress(Exception):  # the cluster may have ended
                    self._ray.cancel(reference, force=True)

    def _result(self, reference: Any) -> CaseResult:
        exceptions = self._ray.exceptions
        try:
            return CaseResult.from_json(self._ray.get(reference))
        except exceptions.OutOfMemoryError as error:
            status, words, told = Status.OUT_OF_MEMORY, "Ray ended it for want of memory on its node", error
        except exceptions.RayTaskError as error:
            status, words, told = Status.LOST, "it could not be started on its node", error
        except exceptions.RayError as error:
            status, words, told = Status.LOST, f"its node was lost {RAY_RETRIES + 1} times", error
        first = f"{type(told).__name__}: {(str(told).strip().splitlines() or [''])[0]}"[:400]
        return CaseResult(status, f"{words}: {first}", log=str(told) if status is Status.LOST else "")


def _run_there(job: Any, resources: JobResources, runner: Runner[Any]) -> str:
    """Run a job on a node. It returns JSON text, so that nodes with another version of this package are noticed."""
    result = runner(job, resources, lambda _pid: None)
    return replace(result, host=result.host or socket.gethostname()).to_json()
