"""One question to a process of its own: which models a suite has, or what becomes of one case.

The process leads a session of its own, is killed with all that it started, and does not outlive who waits for it.
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
from typing import Any

from checked_backend.errors import SuiteError
from checked_backend.process.child import Ended
from checked_backend.sweep.case import Case, Outcome, Settings
from checked_backend.sweep.status import Status

__all__ = ["DONE_TIMING", "Answer", "Job", "Place", "run_job", "run_worker"]

DONE_TIMING = "timing the compiled program"
"""The stage of a worker in which there is a verdict already."""

_RESULT, _STAGE, _LOG = "result.json", "stage", "log"
_LOG_BYTES = 16 * 2**10
_MAX_RESULT = 64 * 2**20
_NO_MEMORY = ("std::bad_alloc", "can't allocate memory", "MemoryError", "CUDA out of memory")


@dataclass(frozen=True, slots=True)
class Place:
    """Where and with what a job runs.

    Attributes:
        memory: Bytes that its process may hold; None for no limit.
        threads: Of torch; None for torch's own choice.
        gpu: The one that it sees; None for all.
        speed: Whether to measure how fast the case is.
        folder: Working folder of its process; None for this one's.
    """

    memory: int | None = None
    threads: int | None = None
    gpu: str | None = None
    speed: bool = True
    folder: str | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """A case to run.

    Attributes:
        spec: The suite as the worker finds it: ``python:/home/me/models.py``.
        case: What.
        settings: How.
        attempt: From 0.
    """

    spec: str
    case: Case
    settings: Settings
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class Answer:
    """What a worker left behind.

    Attributes:
        text: Its result; empty if it died before it had one.
        ended: How it ended.
        log: The end of what it printed.
        seconds: How long it ran.
        starved: Whether the system killed processes for want of memory while it ran.
    """

    text: str
    ended: Ended
    log: str
    seconds: float
    starved: bool


def run_job(job: Job, place: Place, started: Callable[[int], None] = lambda _pid: None) -> Outcome:
    """Run a case in a process of its own. Whatever becomes of that process is an outcome.

    Args:
        job: The case.
        place: Where.
        started: Told the process id, which leads its group.
    """
    question = {
        "ask": "run",
        "spec": job.spec,
        "case": asdict(job.case),
        "settings": asdict(job.settings),
        "speed": place.speed,
    }
    try:
        answer = run_worker(question, job.settings.timeout, place, started)
    except OSError as error:
        return Outcome(Status.LOST, f"no process could be started: {error}", host=socket.gethostname())
    return replace(_outcome(answer, job.settings.timeout), host=socket.gethostname())


def _outcome(answer: Answer, timeout: float) -> Outcome:
    told: Outcome | None = None
    if answer.text:
        try:
            told = Outcome.from_json(answer.text)
        except SuiteError as error:
            return Outcome(Status.CRASH, str(error), answer.ended.stage, seconds=answer.seconds, log=answer.log)
    timing = answer.ended.stage == DONE_TIMING
    if told is not None and (answer.ended.status == 0 or (timing and answer.ended.overdue is not None)):
        note = told.message
        if answer.ended.status != 0:
            note = "; ".join(
                part for part in (note, f"not timed: that took more than the limit of {timeout:g} s") if part
            )
        log = "" if told.status is Status.PASS else answer.log
        return replace(told, message=note, seconds=answer.seconds, log=log)
    words = f"the process {answer.ended.words} while {answer.ended.stage}"
    status = Status.CRASH
    if answer.ended.overdue is not None:
        status = Status.HANG
    elif _ran_out_of_memory(answer):
        status = Status.OUT_OF_MEMORY
    before = told or Outcome(status)
    return replace(
        before, status=status, message=words, stage=answer.ended.stage, seconds=answer.seconds, log=answer.log
    )


def _ran_out_of_memory(answer: Answer) -> bool:
    if -answer.ended.status == signal.SIGKILL:
        return answer.starved
    return any(words in answer.log for words in _NO_MEMORY)


def run_worker(
    question: Mapping[str, Any], timeout: float, place: Place, started: Callable[[int], None] = lambda _pid: None
) -> Answer:
    """Ask a worker something, and see to it that nothing is left of it.

    Args:
        question: JSON values; `checked_backend.sweep.worker` says which.
        timeout: Seconds after which it is killed.
        place: Where it runs.
        started: Told its process id.

    Raises:
        OSError: The system gives no process, or no temporary folder.
    """
    with tempfile.TemporaryDirectory(prefix="checked-backend-sweep-") as name:
        folder = Path(name)
        begun, killed_before = time.monotonic(), _killed_for_memory()
        with (folder / _LOG).open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "checked_backend.sweep.worker", str(folder), str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=place.folder,
                env=_environment(place),
            )
        overdue = None
        try:
            started(process.pid)
            text = json.dumps({**question, "memory": place.memory, "threads": place.threads}, default=str)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(text.encode(), timeout=timeout)
            if process.poll() is None:
                overdue = timeout
        finally:
            _kill_group(process.pid)
            status = process.wait()
        ended = Ended(status, _read(folder / _STAGE, 1000) or "starting", overdue)
        return Answer(
            _read(folder / _RESULT, _MAX_RESULT),
            ended,
            _read(folder / _LOG, _LOG_BYTES, end=True),
            time.monotonic() - begun,
            _killed_for_memory() > killed_before,
        )


def _environment(place: Place) -> dict[str, str]:
    environment = dict(os.environ)
    environment.pop("CHECKED_BACKEND", None)  # a worker checks what it is told to, not all that compiles
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
    """How many processes the system has killed for want of memory; 0 where it does not say."""
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
