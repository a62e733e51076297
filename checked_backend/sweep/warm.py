"""Processes that have imported torch already, and fork a worker for each question, which saves the time of imports.

Only Linux can do it, and only for cases on the CPU: CUDA does not survive a fork.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Self

from checked_backend._torch.preload import LATE_MODULES
from checked_backend.sweep.job import JobResources, environment_of

__all__ = ["WarmProcesses", "can_fork", "modules_of"]

FORKER = "checked_backend.sweep.forker"
"""The process that forks workers."""

_ALWAYS = ("torch", "checked_backend.sweep.examine", "checked_backend.sweep.suites", *LATE_MODULES)
_OF_SUITE = MappingProxyType(
    {
        "huggingface": (
            "transformers.modeling_utils",
            "transformers.masking_utils",
            "transformers.processing_utils",
            "transformers.generation.utils",
            "transformers.models.auto.modeling_auto",
        )
    }
)


def can_fork(devices: Sequence[str]) -> bool:
    """Whether workers for cases on these devices can be forked here."""
    return sys.platform == "linux" and set(devices) == {"cpu"}


def modules_of(suites: Sequence[str]) -> list[str]:
    """What to import before a fork: no code of the user's own.

    Args:
        suites: The suites, as the user names them.
    """
    return [*_ALWAYS, *(module for suite in suites for module in _OF_SUITE.get(suite.partition(":")[0], ()))]


class WarmProcesses:
    """Some processes that fork workers, one at a time each.

    Args:
        count: The number of processes. They start to import at once.
        modules: What they import.
        place: The resources of the workers.

    Raises:
        OSError: The system gives no process.
    """

    def __init__(self, count: int, modules: Sequence[str], place: JobResources) -> None:
        self._modules = list(modules)
        self._place = place
        self._idle: deque[_Forker] = deque()
        for _ in range(count):
            self._idle.append(self._started())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        while self._idle:
            self._idle.pop().close()

    def run(
        self, question: Mapping[str, Any], folder: Path, timeout: float, started: Callable[[int], None]
    ) -> tuple[int, bool] | None:
        """See `checked_backend.sweep.job.Forking`."""
        try:
            forker = self._idle.popleft()
        except IndexError:
            return None
        try:
            found = forker.run(question, folder, timeout, started)
        except BaseException:
            forker.close()
            raise
        if found is not None:
            self._idle.appendleft(forker)  # the one that has imported all already
        else:
            forker.close()
            if forker.served:  # it was killed; one that never served would not do better a second time
                with contextlib.suppress(OSError):
                    self._idle.append(self._started())
        return found

    def _started(self) -> _Forker:
        return _Forker(
            subprocess.Popen(
                [sys.executable, "-m", FORKER, *self._modules],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                cwd=self._place.folder,
                env=environment_of(self._place),
            )
        )


class _Forker:
    """One such process."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.served = False
        self._busy = False
        self._process = process

    def run(
        self, question: Mapping[str, Any], folder: Path, timeout: float, started: Callable[[int], None]
    ) -> tuple[int, bool] | None:
        asked = {"question": question, "folder": str(folder), "timeout": timeout}
        to_it, from_it = self._process.stdin, self._process.stdout
        if to_it is None or from_it is None:
            return None
        self._busy = True
        try:
            to_it.write(json.dumps(asked, default=str).encode() + b"\n")
            to_it.flush()
            for line in from_it:
                reply = json.loads(line)
                if "pid" in reply:
                    self.served = True
                    started(int(reply["pid"]))
                elif "status" in reply:
                    self._busy = False
                    return int(reply["status"]), bool(reply["overdue"])
                else:
                    return None
        except (OSError, ValueError):
            return None
        return None

    def close(self) -> None:
        """End the process, and its worker with all that the worker started."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        if self._busy:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=10)  # when its stdin ends, it ends its worker and then itself
        self._process.kill()
        self._process.wait()
