"""Check a program that runs with ``CHECKED_BACKEND=1`` in its environment.

`start` is called when Python starts: by the ``sitecustomize`` that ``checked-backend run`` puts on the path, or by the
hook that ``checked-backend autostart --install`` writes. Nothing of torch is imported before the program imports it,
and nothing of the checks before the program compiles: what the program sets in between counts.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

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
_REPORT_DIR = "CHECKED_BACKEND_REPORT_DIR"


def start() -> None:
    """Check everything that this process compiles from now on. A second call does nothing."""
    asked = os.environ.get(ON, "").lower()
    if asked in ("", "0") or sys.flags.ignore_environment:  # python -E or -I
        return
    if asked not in ("1", "true", "yes", "on"):
        say(f"checked-backend: {ON} got {os.environ[ON]!r}; expected 1 or 0. Nothing is checked")
        os.environ[ON] = "0"  # Python may call this twice, and processes that this one starts call it too
        return
    if not any(isinstance(finder, Autostart) for finder in sys.meta_path):
        Autostart().wait_for_torch()


def stop() -> None:
    """Check nothing, because this process is a tool of this package and no program of the user's."""
    for variable in (ON, RUN):
        os.environ.pop(variable, None)
    for finder in [finder for finder in sys.meta_path if isinstance(finder, Autostart)]:
        finder.give_up()


class Autostart:
    """Waits for torch, and for the first ``torch.compile``; at the end of the process it has the verdict told."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._process = os.getpid()
        # a first process that replaced itself by os.exec is still the first: its id ends the folder's name
        self._first = RUN not in os.environ or os.environ[RUN].endswith(f"-{self._process}")
        self._watch: Any = None
        self._check: Any = None
        self._compile: Any = None
        if self._first:
            reports = os.path.abspath(os.environ.get(_REPORT_DIR) or "checked_backend_reports")
            name = f"run-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{self._process}"
            os.environ[_REPORT_DIR] = reports  # the program may change its directory
            os.environ.setdefault(RUN, os.path.join(reports, name))
        self._folder = os.environ[RUN]
        self._options = _options(os.environ)  # the program may clear its environment
        if os.path.isdir(self._folder):
            with open(os.path.join(self._folder, HOOKED), "w", encoding="ascii"):
                pass

    def wait_for_torch(self) -> None:
        """Replace ``torch.compile`` once torch is imported, and Dynamo's look-up of backends once that is."""
        sys.meta_path.insert(0, self)
        atexit.register(self.finish)
        for name, told in (("torch", self._has_torch), (_DYNAMO, self._has_dynamo)):
            if name in sys.modules:  # something else that runs when Python starts has imported it
                told(sys.modules[name])

    def give_up(self) -> None:
        """Check nothing from now on."""
        sys.meta_path.remove(self)
        atexit.unregister(self.finish)
        self._check = self._compile

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
            return self._checking()(*args, **kwargs)

        compile_later.restored_backend = self._restored  # type: ignore[attr-defined]
        torch.compile = compile_later

    def _has_dynamo(self, _dynamo: Any) -> None:
        sys.meta_path.remove(self)
        given = importlib.import_module("checked_backend._torch.given_backends")
        given.choose_given_backends(self._chosen)

    def _chosen(self, backend: Any) -> Any:
        self._checking()
        return backend if self._watch is None else self._watch.chosen(backend)

    def _restored(self, *made_of: Any) -> Any:
        restored = getattr(self._checking(), "restored_backend", None)
        return None if restored is None else restored(*made_of)

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
            if "record" in self._options:
                self._watch = importlib.import_module("checked_backend.program.record").RecordWatch(self._options)
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

    def finish(self) -> None:
        """Leave the process's report in the folder of the run; the first process of the run prints the summary."""
        if self._watch is not None:
            self._watch.write()
        is_fork = os.getpid() != self._process
        if is_fork or not self._first or "torch" not in sys.modules:
            return
        try:
            summary = importlib.import_module("checked_backend.program.summary")
        except ImportError as error:
            if self._check is None:  # nothing asked for a check, so nobody was told
                self._not_checked(str(error))
        else:
            took = time.perf_counter() - self._began
            summary.tell(self._folder, sys.orig_argv[1:], took, github=self._options.get("github", "0"))


def _options(environment: Mapping[str, str]) -> dict[str, str]:
    """The options that the environment has, by name."""
    return {
        variable.removeprefix(_PREFIX).lower(): value
        for variable, value in environment.items()
        if variable.startswith(_PREFIX) and value
    }


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
