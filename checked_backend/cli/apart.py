"""Replay a dump in a child process: the graph may kill what runs it, and so may what a compiler makes of it.

This module does not load torch before it has forked, because torch's threads do not survive a fork.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

from checked_backend.errors import CheckedBackendError
from checked_backend.process.child import Limits, Noticeboard, can_confine, confined
from checked_backend.process.fresh import has_interpreter

__all__ = ["needs_fresh_interpreter", "replay_apart"]

_READING = "reading the dump"
_IN_EAGER = "running the graph in eager"
_COMPILED = "compiling the graph and running it"
_AFTER_DEATH = "running the graph in eager, after the compiled one had killed a process"
_EAGER_SECONDS = 300.0
_STATUSES = (0, 1, 2, 3)


def needs_fresh_interpreter(words: Sequence[str]) -> bool:
    """Whether the child must be a fresh Python, because this process cannot be forked.

    Args:
        words: The words of the command line. A compiler that this program registered is unknown to a fresh Python.
    """
    if not (can_confine() and has_interpreter()) or _can_fork():
        return False
    registered = _later("checked_backend._torch.dynamo").registered_here
    return all(registered(word.removeprefix("--compiler=")) is None for word in words)


def replay_apart(
    dump: Path,
    modules: Sequence[str],
    limits: Limits,
    how: Callable[[], Mapping[str, Any]],
    *,
    around: Callable[[], AbstractContextManager[None]],
    show: Callable[[Any], Any],
    exit_code: Callable[[Callable[[], Any]], int],
) -> int:
    """Replay a dump in a child. If the compiled graph kills the child, a second child reports that without compiling.

    Args:
        dump: The folder of the dump.
        modules: The modules that the user wants imported first.
        limits: The limits of the child.
        how: Makes the arguments of `replay`, in the child.
        around: Makes the context in which the graph is run.
        show: Prints the report and returns the verdict.
        exit_code: Calls a function, prints its error if it raises one, and returns the exit status.

    Returns:
        The exit status.

    Raises:
        CheckedBackendError: The child died before it compiled the graph, or the second child died too.
    """

    def work(board: Noticeboard | None, died: int | None) -> Any:
        note = _no_note if board is None else board.note
        note(_READING)
        loaded = _loaded(dump, modules)
        module = _later("checked_backend.checking.replay")
        with around():
            if died is None:
                arguments = how()
                note(_IN_EAGER, _EAGER_SECONDS)
                module.rehearse(loaded, arguments["seed"])
                note(_COMPILED)
                found = _refusing(dump, lambda: module.replay(loaded, rehearsed=True, **arguments))
            else:
                note(_AFTER_DEATH)
                found = _refusing(dump, lambda: module.replay_of_death(loaded, died, **how()))
        return show(found)

    if not _can_fork():
        return exit_code(lambda: work(None, None))

    def child(died: int | None, board: Noticeboard) -> int:
        _use_one_thread()
        return exit_code(lambda: work(board, died))

    ended = confined(partial(child, None), limits)
    if ended.exit not in _STATUSES and ended.stage == _COMPILED and ended.overdue is None:
        ended = confined(partial(child, ended.exit), limits)
    if ended.exit in _STATUSES:
        return ended.exit
    advice = ". Give it more with --timeout" if ended.overdue is not None and ended.overdue >= limits.seconds else ""
    raise CheckedBackendError(f"{dump}: the process {ended.words} while {ended.stage}{advice}")


def _no_note(_stage: str, _seconds: float | None = None) -> None:
    pass


def _refusing(dump: Path, produce: Callable[[], Any]) -> Any:
    """Produce a report. An unforeseen exception becomes one sentence, because the dump may be at fault."""
    try:
        return produce()
    except (CheckedBackendError, OSError, SystemExit):
        raise
    except Exception as error:
        first = (str(error).strip().splitlines() or [""])[0][:400]
        message = f"{dump}: it runs in eager, but cannot be checked: {type(error).__name__}: {first}"
        raise CheckedBackendError(message) from error


def _can_fork() -> bool:
    if "torch" not in sys.modules:
        return can_confine()
    worker = _later("checked_backend.process.worker")  # CUDA and autograd's threads do not survive a fork
    return worker.cannot_fork() is None and worker.cannot_differentiate_in_worker() is None


def _use_one_thread() -> None:
    """Use one thread in a child that inherited torch from its parent: torch's threads do not survive a fork."""
    if "torch" in sys.modules:
        _later("torch").set_num_threads(1)
        _later("checked_backend._torch.inductor").renew_compile_threads()


def _loaded(folder: Path, modules: Sequence[str]) -> Any:
    """Import these modules, then load a dump whose graph may call their operators and functions."""
    torch = _later("checked_backend._torch.operators")
    _keep_out(folder)
    if modules:
        _later("checked_backend.checking.replay")  # loads parts of torch, whose operators must not count as new
    before = torch.registered_operators()
    for module in modules:
        _import(module, folder)
    new = torch.registered_operators() - before
    return _later("checked_backend.dump").load_dump(folder, imported=modules, registered=new)


def _is_inside(path: str, folder: Path) -> bool:
    return Path(path or os.curdir).resolve().is_relative_to(folder.resolve())


def _keep_out(folder: Path) -> None:
    """Remove a dump's folder from the import path. ``python -m`` puts the working directory there."""
    sys.path[:] = [path for path in sys.path if not _is_inside(path, folder)]


def _import(module: str, folder: Path) -> None:
    if os.getcwd() not in sys.path and not _is_inside("", folder):
        sys.path.insert(0, os.getcwd())  # `python -m` does so too
    try:
        importlib.import_module(module)
    except Exception as error:
        raise CheckedBackendError(f"--import {module}: {type(error).__name__}: {error}") from error


def _later(module: str) -> Any:
    return importlib.import_module(module)
