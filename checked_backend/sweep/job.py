"""Ask a worker process one question: which models a suite has, or the outcome of one case.

The worker leads its own session. It is killed with every process it started, and does not outlive its parent.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from checked_backend.errors import SuiteError
from checked_backend.process.child import Ended
from checked_backend.sweep.case import Case, CaseResult, Settings
from checked_backend.sweep.status import Status

__all__ = [
    "IMPORTING",
    "LOG",
    "Answer",
    "Forking",
    "Job",
    "JobResources",
    "environment_of",
    "ran_out_of_memory",
    "run_job",
    "run_worker",
]

IMPORTING = "importing torch"
"""The first stage of a worker."""

_BEFORE_THE_MODEL = ("starting", IMPORTING)

WORKER = "checked_backend.sweep.worker"
"""The worker of sweeps."""

_RESULT, _STAGE = "result.json", "stage"
LOG = "log"
"""The file in a worker's folder that gets what the worker prints."""
_LOG_BYTES = 16 * 2**10
_MAX_RESULT = 64 * 2**20
_NO_MEMORY = ("std::bad_alloc", "can't allocate memory", "MemoryError", "CUDA out of memory")


@dataclass(frozen=True, slots=True)
class JobResources:
    """The resources and the working folder of a job.

    Attributes:
        memory: Bytes that the job's process may hold; None for no limit.
        threads: The number of torch's threads; None for torch's own choice.
        gpu: The only GPU that the job sees; None for all.
        folder: The working folder of the job's process; None for this process's own.
    """

    memory: int | None = None
    threads: int | None = None
    gpu: str | None = None
    folder: str | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """An attempt at a case.

    Attributes:
        spec: The suite as the worker finds it: ``python:/home/me/models.py``.
        case: The case.
        settings: How to run and check it.
        attempt: The number of the attempt, from 0.
    """

    spec: str
    case: Case
    settings: Settings
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of a worker, and how it ended.

    Attributes:
        text: The worker's result; empty if it died before it had one.
        ended: How the worker ended.
        log: The end of what the worker printed.
        seconds: How long the worker ran.
        starved: Whether the system killed processes for lack of memory while the worker ran.
    """

    text: str
    ended: Ended
    log: str
    seconds: float
    starved: bool


class Forking(Protocol):
    """Processes that have imported torch already, and fork a worker for a question."""

    def run(
        self, question: Mapping[str, Any], folder: Path, timeout: float, started: Callable[[int], None], /
    ) -> tuple[int, bool] | None:
        """Run a worker. Returns its exit status and whether it was killed for its time; None if a fork cannot do it."""


def run_job(
    job: Job,
    place: JobResources,
    started: Callable[[int], None] = lambda _pid: None,
    forking: Forking | None = None,
) -> CaseResult:
    """Run a case in its own process. However that process ends, there is an outcome.

    Args:
        started: Called with the id of the process, which leads a process group.
        forking: Forks the process, if it can; None for a fresh Python.
    """
    question = {"ask": "run", "spec": job.spec, "case": asdict(job.case), "settings": asdict(job.settings)}
    try:
        answer = run_worker(question, job.settings.timeout, place, started, forking=forking)
    except OSError as error:
        return CaseResult(Status.LOST, f"no process could be started: {error}", host=socket.gethostname())
    return replace(_outcome(answer), host=socket.gethostname())


def _outcome(answer: Answer) -> CaseResult:
    told: CaseResult | None = None
    if answer.text:
        try:
            told = CaseResult.from_json(answer.text)
        except SuiteError as error:
            return CaseResult(Status.CRASH, str(error), answer.ended.stage, seconds=answer.seconds, log=answer.log)
    if told is not None and answer.ended.status == 0:
        log = "" if told.status is Status.PASS else answer.log
        return replace(told, seconds=answer.seconds, log=log)
    words = f"the process {answer.ended.words} while {answer.ended.stage}"
    if told is not None and told.status is Status.FAIL:
        words = f"{told.message}; {words}, so it looked no further"
        return replace(told, message=words, stage=answer.ended.stage, seconds=answer.seconds, log=answer.log)
    status = Status.CRASH
    if answer.ended.overdue is not None:
        status = Status.HANG
    elif ran_out_of_memory(answer):
        status = Status.OUT_OF_MEMORY
    elif answer.ended.stage in _BEFORE_THE_MODEL and answer.ended.status > 0:  # that says nothing of the model
        status = Status.LOST
        words += f": {(answer.log.strip().splitlines() or [''])[-1]}"
    before = told or CaseResult(status)
    return replace(
        before, status=status, message=words, stage=answer.ended.stage, seconds=answer.seconds, log=answer.log
    )


def ran_out_of_memory(answer: Answer) -> bool:
    """Whether a worker died for lack of memory."""
    if -answer.ended.status == signal.SIGKILL:
        return answer.starved
    return any(words in answer.log for words in _NO_MEMORY)


def run_worker(
    question: Mapping[str, Any],
    timeout: float,
    place: JobResources,
    started: Callable[[int], None] = lambda _pid: None,
    module: str = WORKER,
    forking: Forking | None = None,
) -> Answer:
    """Ask a worker one question, and kill every process that it leaves.

    Args:
        question: JSON values, described in the worker's module.
        timeout: Seconds after which the worker is killed.
        place: The worker's resources.
        started: Called with the worker's process id.
        module: The module that is the worker.
        forking: Forks the worker, if it can; None for a fresh Python.

    Raises:
        OSError: The system gives no process, or no temporary folder.
    """
    asked = {**question, "memory": place.memory, "threads": place.threads}
    if forking is not None:
        with contextlib.suppress(_NotForkedError):
            return _answer(lambda folder: _forked(asked, folder, timeout, started, forking), timeout)
    return _answer(lambda folder: _in_fresh_python(asked, folder, timeout, place, started, module), timeout)


def _answer(run: Callable[[Path], tuple[int, bool]], timeout: float) -> Answer:
    with tempfile.TemporaryDirectory(prefix="checked-backend-sweep-") as name:
        folder = Path(name)
        begun, killed_before = time.monotonic(), _killed_for_memory()
        status, overdue = run(folder)
        return Answer(
            _read(folder / _RESULT, _MAX_RESULT),
            Ended(status, _read(folder / _STAGE, 1000) or "starting", timeout if overdue else None),
            _read(folder / LOG, _LOG_BYTES, end=True),
            time.monotonic() - begun,
            _killed_for_memory() > killed_before,
        )


class _NotForkedError(Exception):
    """No worker was forked, or the process that forked it is lost."""


def _forked(
    asked: Mapping[str, Any], folder: Path, timeout: float, started: Callable[[int], None], forking: Forking
) -> tuple[int, bool]:
    ended = forking.run(asked, folder, timeout, started)
    if ended is None:
        raise _NotForkedError
    return ended


def _in_fresh_python(
    asked: Mapping[str, Any],
    folder: Path,
    timeout: float,
    place: JobResources,
    started: Callable[[int], None],
    module: str,
) -> tuple[int, bool]:
    with (folder / LOG).open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", module, str(folder), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd=place.folder,
            env=environment_of(place),
        )
    overdue = False
    try:
        started(process.pid)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(json.dumps(asked, default=str).encode(), timeout=timeout)
        overdue = process.poll() is None
    finally:
        _kill_group(process.pid)
        status = process.wait()
    return status, overdue


def environment_of(place: JobResources) -> dict[str, str]:
    """The environment of a worker with these resources."""
    environment = dict(os.environ)
    environment.pop("CHECKED_BACKEND", None)  # a worker checks its case only, not every torch.compile
    if place.threads is not None:
        environment.update(OMP_NUM_THREADS=str(place.threads), MKL_NUM_THREADS=str(place.threads))
        environment.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(place.threads))
    if place.gpu is not None:
        environment["CUDA_VISIBLE_DEVICES"] = place.gpu
    environment["PYTHONUNBUFFERED"] = "1"
    return environment


def _kill_group(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def _killed_for_memory() -> int:
    """How many processes the system has killed for lack of memory; 0 if the system does not say."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/vmstat").read_text(encoding="ascii").splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def _read(path: Path, most: int, *, end: bool = False) -> str:
    try:
        with path.open("rb") as stream:
            size = path.stat().st_size
            if end and size > most:
                stream.seek(size - most)
            return stream.read(most).decode("utf-8", "replace")
    except OSError:
        return ""
