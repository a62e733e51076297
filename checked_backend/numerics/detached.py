"""Run a command beside this process, as no child of it.

A program may wait for all children that it started, or be told when one ends. It must not meet one that it did not
start. So a shell starts the command, and ends at once.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress

__all__ = ["Detached"]

_SCRIPT = '{ "$@" >/dev/null 2>&1; echo $?; } &'
"""The command's exit status, in a line, is what the pipe says. It ends with the last process of the command's."""

_DYING = 1.0
"""Seconds that killed processes get to be gone, so that none writes to a folder that is removed afterwards."""


class Detached:
    """A command that runs by itself.

    Args:
        command: The program and its arguments.
        folder: Where the command has its temporary files.

    Attributes:
        group: The number of its processes' group.

    Raises:
        OSError: There is no shell, or no process can be started.
    """

    def __init__(self, command: Sequence[str], folder: str) -> None:
        self._owner = os.getpid()
        self._said = b""
        self._pipe, theirs = os.pipe()
        try:
            shell = subprocess.Popen(
                ["/bin/sh", "-c", _SCRIPT, "sh", *command],
                stdin=subprocess.DEVNULL,
                stdout=theirs,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                env={**os.environ, "TMPDIR": folder},
            )
        except OSError:
            os.close(self._pipe)
            raise
        finally:
            os.close(theirs)
        self.group = shell.pid
        shell.wait()

    def wait(self, seconds: float) -> bool | None:
        """Wait until it is over.

        Args:
            seconds: How long to wait at most.

        Returns:
            Whether it succeeded; None if it is not over.
        """
        until = time.monotonic() + seconds
        pipe = select.poll()
        pipe.register(self._pipe, select.POLLIN)
        while b"\n" not in self._said:
            if not pipe.poll(max(0.0, 1000 * (until - time.monotonic()))):
                return None
            said = os.read(self._pipe, 16)
            if not said:
                return False  # it was killed
            self._said += said
        return self._said == b"0\n"

    def end(self) -> None:
        """End it if it is not over. In a forked process it is the parent's, and goes on."""
        if self._pipe < 0:
            return
        if os.getpid() == self._owner and self.wait(0.0) is None:
            with suppress(OSError):
                os.killpg(self.group, signal.SIGKILL)
            self.wait(_DYING)
        os.close(self._pipe)
        self._pipe = -1
