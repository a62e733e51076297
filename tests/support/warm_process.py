"""Run scripts that need torch alone, each in a fork of a Python that has imported torch and Dynamo.

Such a fork has nothing of this package and nothing of the test; the import, which costs three seconds of processor
time, is done once. What needs an interpreter that starts from nothing is started as usual.

As a program it is that Python: it forks for each connection to a socket. The fork waits for the script, and kills it if
the connection is closed.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

READ_BY_IMPORTS = ("TORCH", "PYTHON", "OMP_", "MKL_", "ATEN_", "CUDA", "LD_", "KMP_")
"""Environment variables with these beginnings are read while torch is imported: other ones need another process."""


class WarmPython:
    """Starts scripts as ``subprocess.run`` does. There is one warm process for each setting of what torch reads."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="warm_")
        self._started: dict[str, tuple[str, subprocess.Popen[bytes]]] = {}

    def start(self, env: Mapping[str, str]) -> str:
        """The address of the warm process for an environment."""
        key = json.dumps(sorted(item for item in env.items() if item[0].startswith(READ_BY_IMPORTS)))
        if key not in self._started:
            address = os.path.join(self._folder.name, f"{os.getpid()}_{len(self._started)}")
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(address)
                listener.listen()
                words = [sys.executable, __file__, str(listener.fileno())]
                process = subprocess.Popen(words, stdin=subprocess.PIPE, pass_fds=[listener.fileno()], env={**env})
            self._started[key] = address, process
        return self._started[key][0]

    def close(self) -> None:
        for _, process in self._started.values():
            process.kill()
            process.communicate()
        self._folder.cleanup()

    def run(
        self,
        script: str | Path,
        *words: str,
        cwd: str | Path | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a script to its end; `subprocess.TimeoutExpired` if it took too long, and was killed."""
        environment = dict(os.environ if env is None else env)
        command = [os.path.abspath(script), *words]
        sys.audit("subprocess.Popen", sys.executable, [sys.executable, *command], cwd, env)  # for the guard of marks
        request = json.dumps([command, os.path.abspath(cwd or os.getcwd()), environment])
        with (
            tempfile.TemporaryFile() as out,
            tempfile.TemporaryFile() as err,
            socket.socket(socket.AF_UNIX) as connection,
        ):
            connection.connect(self.start(environment))
            connection.settimeout(timeout)
            socket.send_fds(connection, [b"."], [out.fileno(), err.fileno()])
            connection.sendall(request.encode() + b"\n")
            try:
                code = int(connection.makefile().readline())
            except TimeoutError:
                raise subprocess.TimeoutExpired(command, timeout or 0.0) from None
            return subprocess.CompletedProcess(command, code, *map(_text, (out, err)))


def _text(file: Any) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


# the warm process


def next_script(listener: socket.socket) -> list[str]:
    """Serve until standard input ends. It returns in a process of its own for each script, with its words."""
    while True:
        ready, _, _ = select.select([listener, sys.stdin], [], [])
        if sys.stdin in ready:
            os._exit(0)
        connection, _ = listener.accept()
        if os.fork() == 0:
            os.setsid()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listener.close()
            words = _request(connection)
            script = os.fork()
            if script == 0:
                connection.close()
                return words
            connection.sendall(f"{_waited(script, connection)}\n".encode())
            os._exit(0)
        connection.close()


def _request(connection: socket.socket) -> list[str]:
    """Take over output, folder and environment; the words are returned."""
    _, files, _, _ = socket.recv_fds(connection, 1, 2)
    for target, file in enumerate(files, start=1):
        os.dup2(file, target)
        os.close(file)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    with connection.makefile() as lines:
        words, folder, environment = json.loads(lines.readline())
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    return list(words)


def _waited(script: int, connection: socket.socket) -> int:
    """The exit status of a script, which is killed if nobody waits for it any more."""
    ended = os.pidfd_open(script)
    ready, _, _ = select.select([ended, connection], [], [])
    if ended not in ready:
        os.killpg(0, signal.SIGKILL)  # this process, the script, and what it started
    return os.waitstatus_to_exitcode(os.waitpid(script, 0)[1])


def run_to_its_end(script: str) -> int:
    """Run a script; the exit status. What a Python takes apart at its end, which is a lot with torch, is let go."""
    code: object = 1
    try:
        runpy.run_path(script, run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
    threading._shutdown()  # waits for the threads that a Python waits for
    atexit._run_exitfuncs()
    if not isinstance(code, int | None):
        print(code, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    return int(code or 0) & 0xFF if isinstance(code, int | None) else 1


if __name__ == "__main__":
    import torch

    importlib.import_module("torch._dynamo")

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    sys.argv = next_script(socket.socket(fileno=int(sys.argv[1])))
    sys.path[0] = os.path.dirname(sys.argv[0])
    torch.default_generator.seed()
    os._exit(run_to_its_end(sys.argv[0]))
