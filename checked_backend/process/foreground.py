"""Run a program in this one's place in the terminal: signals reach it, and this process ends as it ended."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NoReturn

from checked_backend.process.job import die_with

_FORWARDED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGCONT", "SIGALRM", "SIGWINCH")
_FROM_TERMINAL = 0x80
"""The code of a signal from the kernel (``SI_KERNEL``). A terminal sends such a signal to the program, too."""


def run_in_foreground(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run a program with this one's terminal, open files and working directory, and wait for its end.

    A signal that is sent to this process reaches the program; if this process is killed, so is the program.

    Returns:
        Its exit code; negative: the number of the signal that killed it.

    Raises:
        OSError: It cannot be started.
    """
    if not hasattr(signal, "sigwaitinfo"):  # macOS: what the terminal sends reaches both
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            restore = partial(signal.signal, signal.SIGINT, before)
            return subprocess.call(command, env=environment, preexec_fn=restore, close_fds=False)
        finally:
            signal.signal(signal.SIGINT, before)
    waited = {getattr(signal, name) for name in _FORWARDED} | {signal.SIGCHLD}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, waited)
    parent = os.getpid()

    def prepare() -> None:
        die_with(parent)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    try:
        program = subprocess.Popen(command, env=environment, preexec_fn=prepare, close_fds=False)
        while program.poll() is None:
            told = signal.sigwaitinfo(waited)
            if told.si_signo != signal.SIGCHLD and told.si_code != _FROM_TERMINAL:
                program.send_signal(told.si_signo)
        return program.returncode
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def die_by(number: int) -> NoReturn:
    """End this process by the signal that ended the program, so that a shell sees the same. No core is dumped."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(os.getpid(), number)
    os._exit(128 + number)
