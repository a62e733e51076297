"""A process that has imported torch already and is forked for each job, which saves the time of imports.

Only Linux can do it, and only for jobs on the CPU: CUDA does not survive a fork.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from checked_backend.process.job import Forked, JobResources, NoForkError, asked_in, environment_of, forked, kill

_PAUSE = 0.02
_LONGEST = 4096


class WarmProcess:
    """A process that is forked for jobs. It starts to import at once.

    It gets the folder of a job and a socket for it, to which it writes the id of the fork and then the exit status.

    Raises:
        OSError: The system gives no process.
    """

    def __init__(self, modules: Sequence[str], resources: JobResources) -> None:
        self._modules = modules
        self._resources = resources
        self._lock = threading.Lock()
        self._has_served = False
        self._start()

    def _start(self) -> None:
        self._link, its_link = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its_link:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, *self._modules],
                stdin=its_link.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                cwd=self._resources.folder,
                env=environment_of(self._resources),
            )

    def __enter__(self) -> WarmProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._link.close()
        self._process.kill()
        self._process.wait()

    def forked(self, folder: Path) -> Forked:
        """See `checked_backend.process.job.Warm`."""
        here, there = socket.socketpair()
        with there, self._lock:
            if self._has_served and self._process.poll() is not None:  # else it would not do better a second time
                self.__exit__()
                self._start()
            with contextlib.suppress(OSError):
                socket.send_fds(self._link, [os.fsencode(folder)], [there.fileno()])
        process = _Fork(here)
        self._has_served = True
        return process


class _Fork(Forked):
    """A fork of that process, as the process sees it that asked for it."""

    def __init__(self, link: socket.socket) -> None:
        self._replies = link.makefile("rb", buffering=0)
        link.close()
        super().__init__(self._reply())

    def poll(self) -> int | None:
        return self.wait() if self._status is None and select.select([self._replies], [], [], 0)[0] else self._status

    def wait(self) -> int:
        if self._status is None:
            self._status = self._reply()
        return self._status

    def _reply(self) -> int:
        with contextlib.suppress(OSError, ValueError):
            return int(self._replies.readline())
        raise NoForkError


def main(modules: Sequence[str]) -> None:
    """Import modules, then fork this process for jobs. What cannot be imported is left to jobs, which say why."""
    link = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for module in modules:
        with contextlib.suppress(Exception):
            importlib.import_module(module)
    gc.collect()
    gc.freeze()  # jobs share these objects' memory until they change them
    jobs: list[tuple[Forked, socket.socket]] = []
    while True:
        if select.select([link], [], [], _PAUSE if jobs else None)[0]:
            name, asker, _, _ = socket.recv_fds(link, _LONGEST, 1)
            if not name or len(os.listdir("/proc/self/task")) > 1:
                for process, _ in jobs:
                    kill(process)
                return  # the parent has ended; or a fork would copy one thread, and the locks that others hold
            folder = Path(os.fsdecode(name))
            job, resources, _ = asked_in(folder)
            jobs.append((forked(job, resources, folder, logged=True), socket.socket(fileno=asker[0])))
            _tell(jobs[-1][1], jobs[-1][0].pid)
        for process, reply in list(jobs):
            if (status := process.poll()) is not None:
                with reply:
                    _tell(reply, status)
                jobs.remove((process, reply))


def _tell(asker: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # it was interrupted and does not listen any more; others do
        asker.sendall(b"%d\n" % number)


if __name__ == "__main__":
    main(sys.argv[1:])
