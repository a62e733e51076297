"""Call a function of a module in a fresh Python process, which inherits nothing but the import paths.

It replaces a forked child if this process cannot be forked: CUDA and autograd's threads do not survive a fork.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import IO, TextIO

__all__ = ["call_in_fresh_interpreter", "has_interpreter"]

# `-I` keeps the working directory, which may be a stranger's, off the path until the caller's path is set.
_PROGRAM = """
import sys, json
parent, sys.path[:], module, function, words = json.loads(sys.argv[1])
from checked_backend.process.child import die_with
die_with(parent)
import importlib
getattr(importlib.import_module(module), function)(words)
"""


def has_interpreter() -> bool:
    """Whether this Python knows the program that starts another Python. An embedded Python may not."""
    return bool(sys.executable)


def call_in_fresh_interpreter(module: str, function: str, words: Sequence[str]) -> int:
    """Call a function of a module, both by name, with a list of words in a fresh Python.

    Its output is printed here, line by line. Ctrl-C reaches both. This process waits until the other has ended.

    Returns:
        The exit status. A negative status is the number of the signal that killed the process.
    """
    request = json.dumps([os.getpid(), [os.path.abspath(path) for path in sys.path], module, function, list(words)])
    with subprocess.Popen(
        [sys.executable, "-I", "-X", "utf8", "-c", _PROGRAM, request],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="backslashreplace",
    ) as process:
        pumps = [_pump(*ends) for ends in ((process.stdout, sys.stdout), (process.stderr, sys.stderr))]
        while True:
            try:
                status = process.wait()
                break
            except KeyboardInterrupt:
                continue
        for pump in pumps:
            pump.join()
        return status


def _pump(source: IO[str] | None, target: TextIO) -> threading.Thread:
    def run() -> None:
        for line in source or ():
            target.write(line)
            target.flush()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread
