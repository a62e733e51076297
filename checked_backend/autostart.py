"""Start to check a program that runs with ``CHECKED_BACKEND=1`` in its environment.

Python runs the line of ``checked_backend.pth`` when it starts; with the variable set, that line calls `start`. Nothing
of torch is imported before the program imports it, and nothing of the checks before the program compiles: what the
program sets in between counts.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

__all__ = ["HOOKED", "ON", "RUN", "Autostart", "start", "stop"]

ON = "CHECKED_BACKEND"
"""The variable that turns the checks on."""

RUN = "CHECKED_BACKEND_RUN"
"""The variable with the folder of the run. A process that finds it set was started by a process of the run."""

HOOKED = "hooked"
"""A file in the folder of a run, which shows that a Python of the run has loaded this module."""

_DYNAMO = "torch._dynamo"
_RECORD = "CHECKED_BACKEND_RECORD"
_REPORT_DIR = "CHECKED_BACKEND_REPORT_DIR"


def start() -> None:
    """Check everything that this process compiles from now on. A second call does nothing."""
    if os.environ.get(ON, "") in ("", "0"):  # the .pth file does not call this then, but a `sitecustomize` does
        return
    if os.environ.get(ON, "").lower() not in ("1", "true", "yes", "on"):
        _complain(f"{ON} got {os.environ.get(ON)!r}; expected 1 or 0. Nothing is checked")
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
        self._first = RUN not in os.environ
        self._main: Any = None
        self._exit_code: object = None
        self._exits = False
        self._watch: Any = None
        self._check: Any = None
        self._compile: Any = None
        self._gave_up = False
        if self._first:
            reports = os.environ.get(_REPORT_DIR) or "checked_backend_reports"
            name = f"run-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{os.getpid()}"
            os.environ[RUN] = os.path.join(os.path.abspath(reports), name)
            self._remember_exit()
        self._folder = os.environ[RUN]
        if os.path.isdir(self._folder):
            with open(os.path.join(self._folder, HOOKED), "w", encoding="ascii"):
                pass

    def wait_for_torch(self) -> None:
        """Replace ``torch.compile`` once torch is imported, and Dynamo's look-up of backends once that is."""
        sys.meta_path.insert(0, self)

    def give_up(self) -> None:
        """Undo what `wait_for_torch` and `start` did."""
        self._gave_up = True
        sys.meta_path.remove(self)
        atexit.unregister(self.finish)
        if self._first:
            os.environ.pop(RUN, None)

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

        torch.compile = compile_later
        frame = sys._getframe()
        while frame is not None and self._main is None:
            if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") == "__main__":
                self._main = frame
            frame = frame.f_back  # type: ignore[assignment]

    def _has_dynamo(self, _dynamo: Any) -> None:
        sys.meta_path.remove(self)
        given = importlib.import_module("checked_backend._torch.given_backends")
        given.choose_given_backends(self._chosen)

    def _chosen(self, backend: Any) -> Any:
        self._checking()
        return self._watch.chosen(backend)

    def _checking(self) -> Any:
        if self._check is not None:
            return self._check
        with importlib.import_module("checked_backend.random_state").random_untouched():
            if os.environ.get(_RECORD):
                self._watch = importlib.import_module("checked_backend.program.record_watch").RecordWatch()
            else:
                module = importlib.import_module("checked_backend.program.watch")
                self._watch = module.ProgramWatch(self._folder, self._began, self._process)
            self._check = checked = self._watch.checking(self._compile)
        return checked

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
        summary = importlib.import_module("checked_backend.program.summary")
        status = self._status()
        code: int = summary.tell(self._folder, list(sys.orig_argv[1:]), status, time.perf_counter() - self._began)
        if status == 0 and code != 0:
            for stream in (sys.stdout, sys.stderr):
                if stream is not None:
                    stream.flush()
            os._exit(code)

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


def _returned(frame: Any) -> bool:
    """Whether a frame that is over came to its end, rather than to an exception."""
    opcodes = importlib.import_module("opcode")
    place, code = frame.f_lasti, frame.f_code.co_code
    return 0 <= place < len(code) and str(opcodes.opname[code[place]]).startswith("RETURN_")


def _complain(text: str) -> None:
    print(f"checked-backend: {text}", file=sys.stderr)  # noqa: T201
