"""A process that has imported torch, and forks a worker for each question: ``python -m ...forker MODULE...``.

Questions come on stdin and replies leave on stdout, a line of JSON each. A question has two replies: ``{"pid": 12}``
once the worker leads its own session, and ``{"status": 0, "overdue": false}`` when it has ended. Or it has one,
``{"refused": "..."}``: this process cannot be forked. It ends when stdin does, with the worker and all that the worker
started.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from checked_backend.sweep.job import LOG
from checked_backend.sweep.worker import work

__all__ = ["main"]

_LONGEST_WAIT = 1e6
"""Seconds. The system refuses to wait much longer at a time."""


def main(modules: Sequence[str]) -> None:
    """Import modules, then fork a worker for each question until there are no more.

    Args:
        modules: Names of modules. One that cannot be imported is left to the workers, which tell why.
    """
    questions, replies = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)  # what a module prints when it is imported is no reply
    for module in modules:
        with contextlib.suppress(Exception):
            importlib.import_module(module)
    gc.collect()
    gc.freeze()  # workers share these objects' memory until they change them
    with os.fdopen(questions, "rb", buffering=0) as lines:
        while line := lines.readline():
            _answer(json.loads(line), questions, replies)


def _answer(asked: Mapping[str, Any], questions: int, replies: int) -> None:
    threads = os.listdir("/proc/self/task")
    if len(threads) > 1:  # a fork copies one of them, and the locks that the others hold
        _reply(replies, {"refused": f"it has {len(threads)} threads"})
        return
    parent = os.getpid()
    worker = os.fork()
    if worker == 0:
        _be_worker(asked, parent, questions, replies)
    overdue = _waited(worker, questions, float(asked["timeout"]))
    _, status = os.waitpid(worker, 0)
    _reply(replies, {"status": os.waitstatus_to_exitcode(status), "overdue": overdue})


def _be_worker(asked: Mapping[str, Any], parent: int, questions: int, replies: int) -> NoReturn:
    try:
        os.setsid()
        _reply(replies, {"pid": os.getpid()})
        os.close(questions)
        os.close(replies)
        folder = Path(asked["folder"])
        log = os.open(folder / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        work(asked["question"], folder, parent)
    finally:
        os._exit(1)  # never return into the code of the process that forks


def _waited(worker: int, questions: int, timeout: float) -> bool:
    """Wait for a worker, and kill what is left of its group. The worker's status stays to be read.

    Returns:
        Whether the worker was killed because its time was up.
    """
    ended = os.pidfd_open(worker)
    try:
        ready, _, _ = select.select([ended, questions], [], [], min(timeout, _LONGEST_WAIT))
    finally:
        os.close(ended)
        os.kill(worker, signal.SIGKILL)  # it may not lead a group yet
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(worker, signal.SIGKILL)
    return not ready


def _reply(replies: int, reply: Mapping[str, object]) -> None:
    os.write(replies, json.dumps(reply).encode() + b"\n")


if __name__ == "__main__":
    main(sys.argv[1:])
