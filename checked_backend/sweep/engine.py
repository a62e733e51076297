"""Run jobs on this machine. One thread for each concurrent job waits for the job's process."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import threading
import traceback
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from typing import Protocol

from checked_backend.sweep.case import CaseResult
from checked_backend.sweep.job import Job, JobResources, run_job
from checked_backend.sweep.status import Status

__all__ = ["Engine", "LocalEngine", "Runner"]

Runner = Callable[[Job, JobResources, Callable[[int], None]], CaseResult]
"""Runs one job and waits for it. The callback receives the id of the job's process."""


class Engine(Protocol):
    """Runs jobs: on this machine, or on a cluster."""

    def run(
        self, jobs: Sequence[Job], begun: Callable[[Job], None], /
    ) -> Generator[tuple[Job, CaseResult], None, None]:
        """Run each job once, and yield it with its outcome when it is done. Closing the generator ends running jobs.

        Args:
            begun: Called with each job when it starts, maybe in another thread.
        """


class LocalEngine:
    """Runs jobs on this machine.

    Args:
        jobs: How many jobs run at a time.
        gpus: The GPUs, as CUDA_VISIBLE_DEVICES names them; concurrent jobs get them in turn.
        runner: Runs one job.
    """

    def __init__(self, jobs: int, place: JobResources, gpus: Sequence[str] = (), runner: Runner = run_job) -> None:
        self._jobs = jobs
        self._place = place
        self._gpus = gpus
        self._runner = runner

    def run(self, jobs: Sequence[Job], begun: Callable[[Job], None]) -> Generator[tuple[Job, CaseResult], None, None]:
        """See `Engine`."""
        crew = _Crew(self._runner, jobs, begun)
        places = [self._place_of(slot) for slot in range(min(self._jobs, len(jobs)))]
        threads = [threading.Thread(target=crew.work, args=(place,), daemon=True) for place in places]
        for thread in threads:
            thread.start()
        try:
            for _ in jobs:
                yield crew.done.get()
        finally:
            crew.stop()
            for thread in threads:
                thread.join(timeout=10)

    def _place_of(self, slot: int) -> JobResources:
        return replace(self._place, gpu=self._gpus[slot % len(self._gpus)]) if self._gpus else self._place


class _Crew:
    """The state that the threads share."""

    def __init__(self, runner: Runner, jobs: Sequence[Job], begun: Callable[[Job], None]) -> None:
        self.done: queue.SimpleQueue[tuple[Job, CaseResult]] = queue.SimpleQueue()
        self._runner = runner
        self._begun = begun
        self._waiting: queue.SimpleQueue[Job] = queue.SimpleQueue()
        for job in jobs:
            self._waiting.put(job)
        self._lock = threading.Lock()
        self._alive: set[int] = set()
        self._stopped = False

    def work(self, place: JobResources) -> None:
        mine: list[int] = []

        def started(pid: int) -> None:
            mine.append(pid)
            with self._lock:
                self._alive.add(pid)
                stopped = self._stopped
            if stopped:
                _kill(pid)

        while not self._stopped:
            try:
                job = self._waiting.get_nowait()
            except queue.Empty:
                return
            self._begun(job)
            try:
                outcome = self._runner(job, place, started)
            except Exception as error:  # an exception in one job must not stop the others
                words = f"the engine failed: {type(error).__name__}: {error}"
                outcome = CaseResult(Status.LOST, words, log=traceback.format_exc())
            with self._lock:
                self._alive.difference_update(mine)
            mine.clear()
            if not self._stopped:  # a job that was stopped from here has no result
                self.done.put((job, outcome))

    def stop(self) -> None:
        with self._lock:
            self._stopped = True
            alive = list(self._alive)
        for pid in alive:
            _kill(pid)


def _kill(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)
