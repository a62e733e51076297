"""Run jobs on a Ray cluster. Ray's workers start the same processes as `LocalEngine`, on nodes with free resources."""

from __future__ import annotations

import contextlib
import importlib
import socket
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from typing import Any

from checked_backend.errors import SuiteError
from checked_backend.sweep.case import CaseResult
from checked_backend.sweep.engine import Runner
from checked_backend.sweep.job import Job, JobResources, run_job
from checked_backend.sweep.status import Status

__all__ = ["RayEngine"]

RETRIES = 1
"""How often a job is retried whose node or Ray worker was lost. Then it is recorded as lost."""

_POLL_SECONDS = 1.0


class RayEngine:
    """Runs jobs on a Ray cluster. Its nodes need this package, and the suites at the same paths as here.

    A job takes as many CPUs as it has threads, and a whole GPU if its case asks for CUDA.

    Args:
        address: The cluster's address; None for the one that Ray finds, or else a new one on this machine.
        runner: Runs one job, on a node.

    Raises:
        SuiteError: Ray is not installed, or there is no cluster at the address.
    """

    def __init__(self, address: str | None, place: JobResources, runner: Runner = run_job) -> None:
        try:
            self._ray: Any = importlib.import_module("ray")
        except ImportError as error:
            raise SuiteError(f"--engine ray: {error}; install it with pip install 'checked-backend[ray]'") from error
        self._place = place
        self._runner = runner
        if not self._ray.is_initialized():
            try:
                self._ray.init(address=address, log_to_driver=False, configure_logging=False)
            except Exception as error:  # Ray raises any exception of its transport
                first = (str(error).strip().splitlines() or [""])[0]
                raise SuiteError(f"--engine ray: no cluster at {address or 'this machine'}: {first}") from error

    def run(self, jobs: Sequence[Job], _begun: Callable[[Job], None]) -> Generator[tuple[Job, CaseResult], None, None]:
        """See `Engine`. The callback ``begun`` is never called: only the cluster knows when a job starts."""
        remote = self._ray.remote(max_retries=RETRIES, retry_exceptions=False)(_run_there)
        waiting: dict[Any, Job] = {}
        for job in jobs:
            gpus = 1 if job.case.device == "cuda" else 0
            task = remote.options(num_cpus=self._place.threads or 1, num_gpus=gpus, name=str(job.case))
            waiting[task.remote(job, self._place, self._runner)] = job
        try:
            while waiting:
                ready, _ = self._ray.wait(list(waiting), num_returns=1, timeout=_POLL_SECONDS)
                for reference in ready:
                    yield waiting.pop(reference), self._outcome(reference)
        finally:
            for reference in waiting:
                with contextlib.suppress(Exception):  # the cluster may have ended
                    self._ray.cancel(reference, force=True)

    def _outcome(self, reference: Any) -> CaseResult:
        exceptions = self._ray.exceptions
        try:
            return CaseResult.from_json(self._ray.get(reference))
        except exceptions.OutOfMemoryError as error:
            return CaseResult(
                Status.OUT_OF_MEMORY, f"Ray ended it for want of memory on its node: {_first_line(error)}"
            )
        except exceptions.RayTaskError as error:
            return CaseResult(Status.LOST, f"it could not be started on its node: {_first_line(error)}", log=str(error))
        except exceptions.RayError as error:
            return CaseResult(
                Status.LOST, f"its node was lost {RETRIES + 1} times: {_first_line(error)}", log=str(error)
            )


def _run_there(job: Job, place: JobResources, runner: Runner) -> str:
    """Run a job on a node. It returns JSON text, so that nodes with another version of this package are noticed."""
    outcome = runner(job, place, lambda _pid: None)
    return replace(outcome, host=outcome.host or socket.gethostname()).to_json()


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"[:400]
