"""Run work in another process with limits: however that process ends, its end is told, and nothing it started stays.

The work is a function by its name. It leaves its answer, and what it is doing, as files in a folder that outlives it.
The process leads its own session, is killed with all that it started, and does not outlive its parent.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn, Protocol

from checked_backend.process.child import JobEnd, die_with, limit_memory

__all__ = [
    "IMPORTING",
    "AnswerFolder",
    "Job",
    "JobEnd",
    "JobResources",
    "RunningProcesses",
    "Warm",
    "environment_of",
    "run",
]

IMPORTING = "importing torch"
"""The first stage of a job. It says nothing of the work."""

_JOB, _ANSWER, _STAGE, _LOG = "job.json", "result.json", "stage", "log"
_LOG_BYTES = 16 * 2**10
_MAX_ANSWER = 64 * 2**20
_LONGEST_PAUSE = 0.05


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
    """Work for another process.

    Attributes:
        work: The function that does it, ``package.module:function``; it gets the question and an `AnswerFolder`.
        question: JSON values.
        seconds: The process is killed after this time.
    """

    work: str
    question: Mapping[str, Any]
    seconds: float


class AnswerFolder:
    """The folder in which a job leaves its answer and its current stage."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def note(self, stage: str) -> None:
        """Write the name of the stage that begins now."""
        self._write(_STAGE, stage)

    def answer(self, text: str) -> None:
        """Write the answer. A later one replaces it."""
        self._write(_ANSWER, text)

    def _write(self, name: str, text: str) -> None:
        temporary = self.path / f".{name}"
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")
        os.replace(temporary, self.path / name)


class RunningProcesses:
    """The processes of jobs that run at the same time, so that all can be ended.

    Attributes:
        stopped: Whether they were.
    """

    def __init__(self) -> None:
        self.stopped = False
        self._alive: set[int] = set()

    @contextlib.contextmanager
    def one(self) -> Iterator[Callable[[int], None]]:
        """Gives what is to be called with the id of each process of a job. At the end of the block they have ended."""
        mine: set[int] = set()

        def started(pid: int) -> None:
            mine.add(pid)
            self._alive.add(pid)
            if self.stopped:
                self.stop()

        try:
            yield started
        finally:
            self._alive -= mine

    def stop(self) -> None:
        """End all of them."""
        self.stopped = True
        for pid in list(self._alive):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)


class Warm(Protocol):
    """Processes that have imported modules already, and are forked for a job."""

    def run(self, job: Job, started: Callable[[int], None], /) -> JobEnd | None:
        """Run a job; None if a fork cannot do it."""


def run(
    job: Job,
    resources: JobResources,
    start: Literal["fork", "fresh"] | Warm = "fresh",
    started: Callable[[int], None] = lambda _pid: None,
    given_up: Callable[[float], object] = time.sleep,
    closed: Sequence[int] = (),
) -> JobEnd:
    """Run a job in another process, and kill every process that it leaves.

    Args:
        start: ``fresh`` for a new Python, ``fork`` for a fork of this process, or warm processes. A job that these
            cannot run gets a new Python.
        started: Called with the id of the process, which leads a process group.
        given_up: Waits some seconds, and says whether the job is not wanted any more.
        closed: Descriptors that a forked process must not have.

    Raises:
        OSError: The system gives no process, or no temporary folder.
    """
    if not isinstance(start, str):
        return start.run(job, started) or run(job, resources, "fresh", started)
    with tempfile.TemporaryDirectory(prefix="checked-backend-job-") as name:
        folder = Path(name)
        asked = {"work": job.work, "question": job.question, "memory": resources.memory, "threads": resources.threads}
        (folder / _JOB).write_text(json.dumps(asked, default=str), encoding="utf-8")
        begun, killed_before = time.monotonic(), _killed_for_memory()
        process = _forked(folder, closed) if start == "fork" else _fresh(folder, resources)
        try:
            started(process.pid)
            is_overdue = _is_overdue(process, job.seconds, given_up)
        finally:
            _kill(process)
            status = process.wait() or 0
        return JobEnd(
            _read(folder / _ANSWER, _MAX_ANSWER),
            _read(folder / _STAGE, 1000) or "starting",
            status,
            _read(folder / _LOG, _LOG_BYTES),
            time.monotonic() - begun,
            job.seconds if is_overdue else None,
            _killed_for_memory() > killed_before,
        )


class _Forked:
    """A fork of this process, with as much of `subprocess.Popen` as is used here."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._status: int | None = None

    def poll(self) -> int | None:
        return self.wait(os.WNOHANG) if self._status is None else self._status

    def wait(self, how: int = 0) -> int | None:
        if self._status is None:
            found, status = os.waitpid(self.pid, how)
            self._status = os.waitstatus_to_exitcode(status) if found else None
        return self._status


def _forked(folder: Path, closed: Sequence[int]) -> _Forked:
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        try:
            os.setsid()
            for descriptor in closed:
                os.close(descriptor)
            log = os.open(folder / _LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(log, 1)
            os.dup2(log, 2)
            sys.stdout = sys.stderr = os.fdopen(log, "w", errors="backslashreplace")
            _work(folder, parent)
        finally:
            os._exit(1)  # never return into the parent's code
    return _Forked(child)


def _fresh(folder: Path, resources: JobResources) -> subprocess.Popen[bytes]:
    with (folder / _LOG).open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", __name__, str(folder), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd=resources.folder,
            env=environment_of(resources),
        )


def environment_of(resources: JobResources) -> dict[str, str]:
    """The environment of a process with these resources."""
    environment = dict(os.environ)
    environment.pop("CHECKED_BACKEND", None)  # a job checks what it is for, not every torch.compile
    if resources.threads is not None:
        environment.update(OMP_NUM_THREADS=str(resources.threads), MKL_NUM_THREADS=str(resources.threads))
        environment.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(resources.threads))
    if resources.gpu is not None:
        environment["CUDA_VISIBLE_DEVICES"] = resources.gpu
    environment["PYTHONUNBUFFERED"] = "1"
    return environment


def _is_overdue(
    process: _Forked | subprocess.Popen[bytes], seconds: float, given_up: Callable[[float], object]
) -> bool:
    """Wait for the end of a process. Returns whether its time was up before."""
    end, pause = time.monotonic() + seconds, 0.005
    while process.poll() is None:
        left = end - time.monotonic()
        if left <= 0:
            return True
        if given_up(min(pause, left)):
            return False
        pause = min(2 * pause, _LONGEST_PAUSE)
    return False


def _kill(process: _Forked | subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    if process.poll() is None:  # it may not lead a group yet
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)


def _work(folder: Path, parent: int) -> NoReturn:
    """Do the work of a folder, and end this process."""
    status = 1
    try:
        die_with(parent)
        faulthandler.enable()
        asked = json.loads((folder / _JOB).read_text(encoding="utf-8"))
        limit_memory(asked["memory"])
        answers = AnswerFolder(folder)
        answers.note(IMPORTING)
        if asked["threads"] is not None:
            importlib.import_module("torch").set_num_threads(asked["threads"])
        module, _, name = asked["work"].partition(":")
        getattr(importlib.import_module(module), name)(asked["question"], answers)
        status = 0
    except BaseException:  # a forked process must not go on in its parent's code
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(status)  # skips threads and destructors of the work, which could change the exit status


def _killed_for_memory() -> int:
    """How many processes the system has killed for lack of memory; 0 if the system does not say."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/vmstat").read_text(encoding="ascii").splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def _read(path: Path, most: int) -> str:
    """The end of a file, of at most that many bytes; empty if there is none."""
    try:
        with path.open("rb") as stream:
            stream.seek(max(0, path.stat().st_size - most))
            return stream.read(most).decode("utf-8", "replace")
    except OSError:
        return ""


if __name__ == "__main__":
    _work(Path(sys.argv[1]), int(sys.argv[2]))
