"""Run work in another process with limits: however that process ends, its end is told, and nothing it started stays.

The work leaves its answer, and what it is doing, as files in a folder that outlives it. The process leads its own
session, is killed with all that it started, and does not outlive its parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import json
import math
import os
import re
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn, Protocol

IMPORTING = "importing torch"
"""The first stage of a job. It says nothing of the work."""

_PR_SET_PDEATHSIG = 1
_NO_MEMORY = ("std::bad_alloc", "can't allocate memory", "MemoryError", "CUDA out of memory")
_JOB, _ANSWER, _STAGE, _LOG = "job.json", "result.json", "stage", "log"
_PRINTED = ("stdout", "stderr")
_LOG_BYTES = 32 * 2**10
_MAX_ANSWER = 64 * 2**20
_LONGEST_PAUSE = 0.05
_LAST_WORDS = 1.0
"""Seconds in which a process that is ended tells where it was."""

_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
"""A line of what Python's fault handler writes."""

_FRAMES = 3
"""Places that are told of a stack."""

# The working folder may be a stranger's: nothing is imported from it, unless the path of the parent leads there.
_PROGRAM = """
import sys
sys.path[:] = [path for path in sys.path if path]
import json
with open(sys.argv[1] + "/job.json", encoding="utf-8") as file:
    sys.path[:] = json.load(file)["path"]
from pathlib import Path
from checked_backend.process.job import asked_in, do_work
do_work(Path(sys.argv[1]), *asked_in(Path(sys.argv[1])))
"""


@dataclass(frozen=True, slots=True)
class JobEnd:
    """How another process ended.

    Attributes:
        answer: What the job answered last; empty if it died before.
        stage: What it was doing, as it noted itself.
        exit: The exit status, negative if a signal killed it.
        log: The end of what it printed, if that was kept, and the stack of each of its threads if a signal ended it.
        overdue: The seconds that it, its stage, or its end after Ctrl-C might take, if it was killed for that.
        starved: Whether the system killed processes for lack of memory meanwhile.
    """

    answer: str
    stage: str
    exit: int
    log: str = ""
    seconds: float = 0.0
    overdue: float | None = None
    starved: bool = False

    @property
    def kind(self) -> Literal["done", "hang", "memory", "signal", "exit"]:
        """How it ended."""
        if self.answer and self.exit == 0:
            return "done"
        if self.overdue is not None:
            return "hang"
        if self.starved if -self.exit == signal.SIGKILL else any(words in self.log for words in _NO_MEMORY):
            return "memory"
        return "signal" if self.exit < 0 else "exit"

    @property
    def where(self) -> str:
        """The innermost places at which a signal ended it, or its time was over; empty if they are not known."""
        stack = self.log.rpartition("Current thread ")[2].partition("\n\n")[0]
        places = _FRAME.findall(stack)[:_FRAMES]
        return ", called at ".join(f"{file}:{line} in {function}" for file, line, function in places)

    @property
    def detail(self) -> str:
        """The finer kind of a finding about its death: ``crash.hang``, ``.memory``, ``.signal`` or ``.exit``."""
        if self.overdue is not None:
            return "crash.hang"
        if -self.exit == signal.SIGKILL:
            return "crash.memory"
        return "crash.signal" if self.exit < 0 else "crash.exit"

    @property
    def cause(self) -> str:
        """How it died: ``killed by SIGSEGV``, ``exited with status 1``, ``still running after 5 s``."""
        if self.overdue is not None:
            return f"still running after {self.overdue:g} s"
        if self.exit >= 0:
            return f"exited with status {self.exit}"
        if -self.exit == signal.SIGKILL:
            return "killed by SIGKILL (out of memory?)"
        return f"killed by {signal.Signals(-self.exit).name}"

    @property
    def words(self) -> str:
        """The same as the end of a sentence that begins with "the process"."""
        cause = self.cause.replace("still running", "had not ended", 1)
        return f"was {cause}" if cause.startswith("killed") else cause


@dataclass(frozen=True, slots=True)
class JobResources:
    """The resources and the working folder of a job.

    Attributes:
        memory: Bytes that the job's process may hold; None for no limit. Only Linux has such a limit.
        threads: The number of torch's threads; None for torch's own choice.
        gpu: The only GPU that the job sees; None for all.
        folder: The working folder of the job's process, from which it may import; None for this process's own.
    """

    memory: int | None = None
    threads: int | None = None
    gpu: str | None = None
    folder: str | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """Work for another process.

    Attributes:
        work: The name of the function that does it, ``package.module:function``; it gets the question and an
            `AnswerFolder`. Or a function that gets the folder alone. A number that it returns is the exit status.
        seconds: The process is killed after this time.
    """

    work: str | Callable[[AnswerFolder], object]
    question: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = math.inf


class AnswerFolder:
    """The folder in which a job leaves its answer and its current stage."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def note(self, stage: str, seconds: float = math.inf) -> None:
        """Write the name of the stage that begins now, and how long it may take."""
        self._write(_STAGE, f"{time.monotonic() + seconds} {seconds} {stage}")

    def answer(self, text: str) -> None:
        """Write the answer. A later one replaces it."""
        self._write(_ANSWER, text)

    def stage(self) -> tuple[float, float, str]:
        """The deadline of the stage, the seconds that it may take, and its name."""
        noted = _read(self.path / _STAGE, 1000) or "inf inf starting"
        end, seconds, stage = noted.split(" ", 2)
        return float(end), float(seconds), stage

    def _write(self, name: str, text: str) -> None:
        temporary = self.path / f".{name}"
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")
        os.replace(temporary, self.path / name)


class RunningProcesses:
    """The processes of jobs that run at the same time, so that all can be ended."""

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
    """A process that has imported modules already, and is forked for a job."""

    def forked(self, folder: Path, /) -> Forked:
        """A fork that does the work of which there is a question in a folder; it or its methods raise `NoForkError`."""


class NoForkError(Exception):
    """Raised if a warm process cannot be forked for a job, or has died with its fork."""


def run(
    job: Job,
    resources: JobResources,
    warm: Warm | None = None,
    started: Callable[[int], None] = lambda _pid: None,
    *,
    logged: bool = True,
    patience: float = 0.0,
) -> JobEnd:
    """Run a job in another process, and kill every process that it leaves.

    A job that is named runs in a fork of a warm process, or in a new Python if there is none or it cannot be forked.
    One that is a function of this program runs in a fork of this process.

    Args:
        started: Called with the id of the process, which leads a process group.
        logged: Whether to keep what the job prints. If not, it is printed here.
        patience: On Ctrl-C the job is interrupted too, and has this many seconds to end by itself.

    Raises:
        OSError: The system gives no process, or no temporary folder.
        KeyboardInterrupt: On Ctrl-C, if there is no patience, and on a second one.
    """
    with tempfile.TemporaryDirectory(prefix="checked-backend-job-") as name:
        folder = Path(name)
        killed_before = _killed_for_memory()
        _flush_output()
        try:
            process: _Process
            if callable(job.work):
                process = forked(job, resources, folder, logged=logged)
            else:
                _ask(job, resources, folder)
                process = warm.forked(folder) if warm else _fresh(resources, folder, logged=logged)
            begun = time.monotonic()
            try:
                started(process.pid)
                overdue = _awaited(process, folder, job.seconds, patience)
                if overdue is not None:
                    _abort(process)
            finally:
                kill(process)
                status = process.wait()
                if not logged:
                    _print_here(folder)
        except NoForkError:
            return run(job, resources, None, started, logged=logged, patience=patience)
        return JobEnd(
            _read(folder / _ANSWER, _MAX_ANSWER),
            AnswerFolder(folder).stage()[2],
            status,
            _read(folder / _LOG, _LOG_BYTES),
            time.monotonic() - begun,
            overdue,
            _killed_for_memory() > killed_before,
        )


class Forked:
    """A fork of this process, with as much of `subprocess.Popen` as is used here."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._status: int | None = None

    def poll(self) -> int | None:
        """The exit status, negative if a signal killed it; None while it runs."""
        if self._status is None:
            found, status = os.waitpid(self.pid, os.WNOHANG)
            self._status = os.waitstatus_to_exitcode(status) if found else None
        return self._status

    def wait(self) -> int:
        """The same at its end."""
        if self._status is None:
            self._status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._status


_Process = Forked | subprocess.Popen[bytes]


def forked(job: Job, resources: JobResources, folder: Path, *, logged: bool) -> Forked:
    """Fork this process for a job, which leaves its answer in a folder."""
    parent = os.getpid()
    with warnings.catch_warnings():
        # Python 3.12 warns of forking a process with threads; the child uses none of these
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        try:
            gc.freeze()  # what is left of the parent stays: a finalizer may wait for threads that are not here
            os.setsid()  # in the parent's process group, Ctrl-C would reach the child twice
            _drop_signal_handlers()
            sys.stdin = os.fdopen(os.open(os.devnull, os.O_RDONLY), closefd=False)  # nobody closes it
            if logged:
                log = os.open(folder / _LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
                os.dup2(log, 1)
                os.dup2(log, 2)
                sys.stdout = sys.stderr = os.fdopen(log, "w", errors="backslashreplace")
            elif not _prints_to_descriptors():
                sys.stdout, sys.stderr = (
                    (folder / one).open("w", encoding="utf-8", errors="backslashreplace") for one in _PRINTED
                )
            do_work(folder, job, resources, parent)
        finally:
            os._exit(1)  # never return into the parent's code
    return Forked(child)


def _drop_signal_handlers() -> None:
    """Remove the user's signal handlers: this process must not save the program's state or wake its event loop."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def _ask(job: Job, resources: JobResources, folder: Path) -> None:
    """Write what another Python is to do."""
    path = [*([resources.folder] if resources.folder is not None else []), *map(os.path.abspath, sys.path)]
    asked = {"job": asdict(job), "resources": asdict(resources), "parent": os.getpid(), "path": path}
    (folder / _JOB).write_text(json.dumps(asked, default=str), encoding="utf-8")


def asked_in(folder: Path) -> tuple[Job, JobResources, int]:
    """The job of which there is a question in a folder, its resources, and the process that asks."""
    asked = json.loads((folder / _JOB).read_text(encoding="utf-8"))
    return Job(**asked["job"]), JobResources(**asked["resources"]), asked["parent"]


def _fresh(resources: JobResources, folder: Path, *, logged: bool) -> subprocess.Popen[bytes]:
    with contextlib.ExitStack() as files:
        streams: dict[str, Any] = {}
        if logged:
            streams = {"stdout": files.enter_context((folder / _LOG).open("ab")), "stderr": subprocess.STDOUT}
        elif not _prints_to_descriptors():
            streams = {one: files.enter_context((folder / one).open("wb")) for one in _PRINTED}
        return subprocess.Popen(
            [sys.executable, "-u", "-c", _PROGRAM, str(folder)],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            cwd=resources.folder,
            env=environment_of(resources),
            **streams,
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
    return environment


def _awaited(process: _Process, folder: Path, seconds: float, patience: float) -> float | None:
    """Wait for the end of a process. Returns the seconds that it had, if it has not ended within them."""
    answers, limit, pause = AnswerFolder(folder), (time.monotonic() + seconds, seconds), 0.005
    while True:
        try:
            while process.poll() is None:
                end, allowed = min(limit, answers.stage()[:2])
                left = end - time.monotonic()
                if left <= 0:
                    return allowed
                time.sleep(min(pause, left))
                pause = min(2 * pause, _LONGEST_PAUSE)
            return None
        except KeyboardInterrupt:
            if not patience:
                raise
            limit, patience = min(limit, (time.monotonic() + patience, patience)), 0.0  # a second one ends it
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGINT)


def _abort(process: _Process) -> None:
    """End a process so that it leaves its stack in the log. One that cannot even do that goes on."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGABRT)
    until = time.monotonic() + _LAST_WORDS
    while process.poll() is None and time.monotonic() < until:
        time.sleep(_LONGEST_PAUSE)


def kill(process: _Process) -> None:
    """Kill a process, with all that it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    if process.poll() is None:  # it may not lead a group yet
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)


def do_work(folder: Path, job: Job, resources: JobResources, parent: int) -> NoReturn:
    """Do work, and end this process."""
    status = 1
    stacks = (folder / _LOG).open("ab")
    try:
        die_with(parent)
        faulthandler.enable(stacks)
        limit_memory(resources.memory)
        answers = AnswerFolder(folder)
        answers.note(IMPORTING)
        if resources.threads is not None:
            importlib.import_module("torch").set_num_threads(resources.threads)
        if callable(job.work):
            result = job.work(answers)
        else:
            module, _, name = job.work.partition(":")
            result = getattr(importlib.import_module(module), name)(job.question, answers)
        status = result if isinstance(result, int) else 0
    except BaseException:  # a forked process must not go on in its parent's code
        traceback.print_exc()
    finally:
        try:
            _flush_output()
        finally:
            os._exit(status)  # skips threads and destructors of the work, which could change the exit status


def run_script(question: Mapping[str, Any], _answers: AnswerFolder) -> int:
    """The work of a job that runs a script, as Python does. The exit status is the script's."""
    try:
        runpy.run_path(question["path"], run_name="__main__")
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    return 0


def die_with(parent: int) -> None:
    """Have this process killed when its parent, a process id, dies, however that dies. Only Linux can do that."""
    if sys.platform != "linux":
        return
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent is gone already
        os._exit(1)


def limit_memory(memory: int | None) -> None:
    """Limit this process's bytes (only on Linux), and make it the first that the system kills if memory runs out."""
    if sys.platform == "win32":
        return
    import resource  # noqa: PLC0415  Windows lacks it

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory is not None and sys.platform == "linux":
        _, most = resource.getrlimit(resource.RLIMIT_DATA)  # this process may not raise the hard limit
        memory = memory if most == resource.RLIM_INFINITY else min(memory, most)
        resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")


def _prints_to_descriptors() -> bool:
    """Whether what another process prints goes where this one prints. If not, an object in memory collects that."""
    try:
        return (sys.stdout.fileno(), sys.stderr.fileno()) == (1, 2)
    except (OSError, ValueError, AttributeError):
        return False


def _print_here(folder: Path) -> None:
    for name in _PRINTED:
        with contextlib.suppress(AttributeError, ValueError, OSError):  # the program has no stream, or closed it
            getattr(sys, name).write((folder / name).read_text(encoding="utf-8", errors="replace"))


def _flush_output() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError, OSError):  # the program has none, or closed it
            stream.flush()


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
