"""Processes that have imported torch already and are forked for each job, which saves the time of imports.

Only Linux can do it, and only for jobs on the CPU: CUDA does not survive a fork. Such a process takes jobs on stdin and
replies on stdout, a line of JSON each: ``{"pid": 12}`` once a job runs, and ``{"end": ...}`` when it has ended; or
``{"refused": "..."}``: this process cannot be forked. It ends when stdin does, with the job and all that it started.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from checked_backend.process.job import Job, JobEnd, JobResources, environment_of, run


class WarmProcesses:
    """Some processes that are forked, for one job at a time each.

    Args:
        count: The number of processes. They start to import at once.

    Raises:
        OSError: The system gives no process.
    """

    def __init__(self, count: int, modules: Sequence[str], resources: JobResources) -> None:
        self._modules = list(modules)
        self._resources = resources
        self._idle: deque[_WarmProcess] = deque()
        for _ in range(count):
            self._idle.append(self._started())

    def __enter__(self) -> WarmProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        while self._idle:
            self._idle.pop().close()

    def run(self, job: Job, started: Callable[[int], None]) -> JobEnd | None:
        """See `checked_backend.process.job.Warm`."""
        try:
            process = self._idle.popleft()
        except IndexError:
            return None
        try:
            end = process.run(job, self._resources, started)
        except BaseException:
            process.close()
            raise
        if end is not None:
            self._idle.appendleft(process)  # the one that has imported all already
            return end
        process.close()
        if process.served:  # it was killed; one that never served would not do better a second time
            with contextlib.suppress(OSError):
                self._idle.append(self._started())
        return None

    def _started(self) -> _WarmProcess:
        return _WarmProcess(
            subprocess.Popen(
                [sys.executable, "-m", __name__, *self._modules],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                cwd=self._resources.folder,
                env=environment_of(self._resources),
            )
        )


class _WarmProcess:
    """One such process, as its parent sees it."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.served = False
        self._busy = False
        self._process = process

    def run(self, job: Job, resources: JobResources, started: Callable[[int], None]) -> JobEnd | None:
        asked = {"job": asdict(job), "resources": asdict(resources)}
        to_it, from_it = self._process.stdin, self._process.stdout
        if to_it is None or from_it is None:
            return None
        self._busy = True
        with contextlib.suppress(OSError, ValueError):
            to_it.write(json.dumps(asked, default=str).encode() + b"\n")
            to_it.flush()
            for line in from_it:
                reply = json.loads(line)
                if "pid" in reply:
                    self.served = True
                    started(int(reply["pid"]))
                elif "end" in reply:
                    self._busy = False
                    return JobEnd(**reply["end"])
                else:
                    return None
        return None

    def close(self) -> None:
        """End the process, and its job with all that the job started."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        if self._busy:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=10)  # when its stdin ends, it ends its job and then itself
        self._process.kill()
        self._process.wait()


def main(modules: Sequence[str]) -> None:
    """Import modules, then fork this process for each job. What cannot be imported is left to jobs, which say why."""
    questions, replies = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)  # what a module prints when it is imported is no reply
    for module in modules:
        with contextlib.suppress(Exception):
            importlib.import_module(module)
    gc.collect()
    gc.freeze()  # jobs share these objects' memory until they change them

    def reply(what: Mapping[str, Any]) -> None:
        with os.fdopen(os.dup(replies), "wb") as stream:
            stream.write(json.dumps(what).encode() + b"\n")

    def has_no_parent(seconds: float) -> bool:  # nothing is asked before the reply
        return bool(select.select([questions], [], [], seconds)[0])

    with os.fdopen(questions, "rb", buffering=0, closefd=False) as lines:
        while line := lines.readline():
            threads = os.listdir("/proc/self/task")
            if len(threads) > 1:  # a fork copies one of them, and the locks that the others hold
                reply({"refused": f"it has {len(threads)} threads"})
                continue
            asked = json.loads(line)
            job, resources = Job(**asked["job"]), JobResources(**asked["resources"])
            own = (questions, replies)
            end = run(job, resources, "fork", lambda pid: reply({"pid": pid}), has_no_parent, own)
            reply({"end": asdict(end)})


if __name__ == "__main__":
    main(sys.argv[1:])
