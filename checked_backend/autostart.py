"""Start to check a program that runs with ``CHECKED_BACKEND=1`` in its environment.

Python runs the line of ``checked_backend.pth`` when it starts; with the variable set, that line calls `start`. Nothing
of torch is imported before the program imports it, and nothing of the checks before the program compiles: what the
program sets in between counts.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["HOOKED", "ON", "RUN", "UNCHECKED", "Autostart", "say", "start", "stop"]

ON = "CHECKED_BACKEND"
"""The variable that turns the checks on."""

RUN = "CHECKED_BACKEND_RUN"
"""The variable with the folder of the run. A process that finds it set was started by a process of the run."""

HOOKED = "hooked"
"""A file in the folder of a run, which shows that a Python of the run has loaded this module."""

UNCHECKED = ".unchecked"
"""The end of the name of a file that says why a process of the run could not be checked."""

_DYNAMO = "torch._dynamo"
_PREFIX = ON + "_"
_RECORD = "CHECKED_BACKEND_RECORD"
_REPORT_DIR = "CHECKED_BACKEND_REPORT_DIR"


def start() -> None:
    """Check everything that this process compiles from now on. A second call does nothing."""
    if os.environ.get(ON, "") in ("", "0"):  # the .pth file does not call this then, but a `sitecustomize` does
        return
    if os.environ.get(ON, "").lower() not in ("1", "true", "yes", "on"):
        say(f"checked-backend: {ON} got {os.environ.get(ON)!r}; expected 1 or 0. Nothing is checked")
        os.environ[ON] = (
            "0"  # Python may run a line of a .pth file twice, and processes that this one starts run it too
        )
        return
    if any(isinstance(finder, Autostart) for finder in sys.meta_path):
        return
    autostart = Autostart()
    autostart.wait_for_torch()
    atexit.register(autostart.finish)


def stop() -> None:
    """Check nothing, because this process is a tool of this package and no program of the user's."""
    os.environ.pop(ON, None)
    for finder in [finder for finder in sys.meta_path if isinstance(finder, Autostart)]:
        finder.give_up()


class Autostart:
    """Waits for torch, and for the first ``torch.compile``; at the end of the process it has the verdict told."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._process = os.getpid()
        # a first process that replaced itself by os.exec is still the first: its id ends the folder's name
        self._first = RUN not in os.environ or os.environ[RUN].endswith(f"-{self._process}")
        self._added: list[str] = []
        self._main: Any = None
        self._exit_code: object = None
        self._exits = False
        self._watch: Any = None
        self._check: Any = None
        self._compile: Any = None
        self._gave_up = False
        if self._first:
            reports = os.path.abspath(os.environ.get(_REPORT_DIR) or "checked_backend_reports")
            name = f"run-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{os.getpid()}"
            self._added = [variable for variable in (RUN, _REPORT_DIR) if variable not in os.environ]
            os.environ[_REPORT_DIR] = reports  # the program may change its directory
            os.environ.setdefault(RUN, os.path.join(reports, name))
            self._remember_exit()
        self._folder = os.environ[RUN]
        self._options = _options(os.environ)  # the program may clear its environment
        if os.path.isdir(self._folder):
            with open(os.path.join(self._folder, HOOKED), "w", encoding="ascii"):
                pass

    def wait_for_torch(self) -> None:
        """Replace ``torch.compile`` once torch is imported, and Dynamo's look-up of backends once that is."""
        sys.meta_path.insert(0, self)
        for name, told in (("torch", self._has_torch), (_DYNAMO, self._has_dynamo)):
            if name in sys.modules:  # another line that Python runs when it starts has imported it
                told(sys.modules[name])

    def give_up(self) -> None:
        """Undo what `wait_for_torch` and `start` did."""
        self._gave_up = True
        sys.meta_path.remove(self)
        atexit.unregister(self.finish)
        for variable in self._added:
            os.environ.pop(variable, None)

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> Any:
        """Find torch and Dynamo as the other finders do, and be told when each is there."""
        told = {"torch": self._has_torch, _DYNAMO: self._has_dynamo}.get(name)
        if told is None:
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        spec = next((found for one in others if (found := one.find_spec(name, path, target)) is not None), None)
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            execute = loader.exec_module

            def exec_module(module: Any) -> None:
                del loader.exec_module
                execute(module)
                if self in sys.meta_path:
                    told(module)

            loader.exec_module = exec_module
        return spec

    def _has_torch(self, torch: Any) -> None:
        self._compile = original = torch.compile

        @functools.wraps(original)
        def compile_later(*args: Any, **kwargs: Any) -> Any:
            return (original if self._gave_up else self._checking())(*args, **kwargs)

        compile_later.restored_backend = self._restored  # type: ignore[attr-defined]
        torch.compile = compile_later
        # a thread may import torch
        frame = sys._current_frames().get(threading.main_thread().ident or 0) if self._first else None
        while frame is not None and self._main is None:
            if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") == "__main__":
                self._main = frame
            frame = frame.f_back

    def _has_dynamo(self, _dynamo: Any) -> None:
        sys.meta_path.remove(self)
        given = importlib.import_module("checked_backend._torch.given_backends")
        given.choose_given_backends(self._chosen)

    def _chosen(self, backend: Any) -> Any:
        self._checking()
        return backend if self._watch is None else self._watch.chosen(backend)

    def _restored(self, *made_of: Any) -> Any:
        self._checking()
        return None if self._watch is None else self._watch.backend_for(*made_of)

    def _checking(self) -> Any:
        if self._check is None:
            try:
                self._check = self._loaded()
            except (ImportError, SyntaxError, AttributeError) as error:  # not a Python that this package runs in
                self._watch, self._check = None, self._compile
                self._not_checked(f"{type(error).__name__}: {error}".partition("\n")[0])
        return self._check

    def _loaded(self) -> Any:
        with importlib.import_module("checked_backend.random_state").random_untouched():
            if _RECORD.removeprefix(_PREFIX).lower() in self._options:
                self._watch = importlib.import_module("checked_backend.program.record_watch").RecordWatch(self._options)
            else:
                module = importlib.import_module("checked_backend.program.watch")
                self._watch = module.ProgramWatch(self._folder, self._began, self._process, self._options)
            return self._watch.checking(self._compile)

    def _not_checked(self, why: str) -> None:
        say(f"checked-backend: nothing that {sys.executable} runs here is checked, its Python lacks something: {why}")
        with contextlib.suppress(OSError):
            os.makedirs(self._folder, exist_ok=True)
            place = os.path.join(self._folder, f"{os.getpid()}{UNCHECKED}")
            with open(place, "w", encoding="utf-8", errors="backslashreplace") as file:
                file.write(f"{sys.executable}: {why}\n")

    def _remember_exit(self) -> None:
        """Remember with what the program ends itself: Python tells nobody."""
        original = sys.exit

        @functools.wraps(original)
        def exit_remembered(status: Any = None, /) -> Any:
            self._exits, self._exit_code = True, status
            original(status)

        sys.exit = exit_remembered

    def finish(self) -> None:
        """Leave the process's report in the folder of the run; the first process of the run prints the summary.

        It changes the exit code of a program that ends well if the verdict is worse.
        """
        if self._watch is not None:
            self._watch.write()
        if os.getpid() != self._process:  # a fork
            return
        if not self._first or "torch" not in sys.modules:
            return
        status = self._status()
        self._main = None  # it keeps what the program's module has, files that Python closes at the end for one
        try:
            summary = importlib.import_module("checked_backend.program.summary")
        except ImportError as error:
            if self._check is None:  # nothing asked for a check, so nobody was told
                self._not_checked(str(error))
            code = 2  # inconclusive
        else:
            took = time.perf_counter() - self._began
            github = self._options.get("github", "0")
            code = summary.tell(self._folder, list(sys.orig_argv[1:]), status, took, github=github)
        if status == 0 and code != 0:
            sys._checked_backend_exit = _ExitCode(code)  # type: ignore[attr-defined]

    def _status(self) -> int | None:
        """The exit code that the program gives itself; None if it cannot be known here."""
        if getattr(sys, "last_value", None) is not None:  # an exception ends it
            return None
        if self._main is not None and _returned(self._main):
            return 0
        if not self._exits:
            return None
        if self._exit_code is None:
            return 0
        return self._exit_code if isinstance(self._exit_code, int) else 1


class _ExitCode:
    """Ends the process with an exit code as Python's last act, after files are flushed: Python asks nobody for one.

    Python clears the module `sys`, in which this is kept, after all others.

    Args:
        code: The exit code.
    """

    def __init__(self, code: int) -> None:
        self._code = code
        self._exit = os._exit
        self._flush = [stream.flush for stream in (sys.stdout, sys.stderr) if stream is not None]

    def __del__(self) -> None:
        for flush in self._flush:
            try:  # noqa: SIM105 (no module is left to suppress with)
                flush()
            except (OSError, ValueError):  # the program has closed it
                pass
        self._exit(self._code)


def _options(environment: Mapping[str, str]) -> dict[str, str]:
    """The options that the environment has, by name."""
    return {
        variable.removeprefix(_PREFIX).lower(): value
        for variable, value in environment.items()
        if variable.startswith(_PREFIX) and value
    }


def _returned(frame: Any) -> bool:
    """Whether a frame that is over came to its end, rather than to an exception."""
    opcodes = importlib.import_module("opcode")
    place, code = frame.f_lasti, frame.f_code.co_code
    return 0 <= place < len(code) and str(opcodes.opname[code[place]]).startswith("RETURN_")


def say(text: str, *, to_stdout: bool = False) -> None:
    """Write a line to the stderr, or stdout, with which the process began.

    What a program puts in its place, a log or a text that it looks at, is the program's own. Nothing is written where
    the process has none or has closed it.
    """
    stream = sys.__stdout__ if to_stdout else sys.__stderr__
    with contextlib.suppress(OSError, ValueError):
        if stream is not None:
            stream.write(f"{text}\n")
            stream.flush()
