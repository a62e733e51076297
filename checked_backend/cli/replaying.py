"""The verbs ``replay``, ``localize`` and ``show``: dumped graphs. Those that run a graph do so in a child process.

The graph may kill what runs it, and so may what a compiler makes of it. This module does not load torch before it has
forked, because torch's threads do not survive a fork.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from checked_backend.cli.options import AsJson, Compiler, Memory, Words, memory_in_bytes
from checked_backend.cli.printing import ChildEnded, exit_code, print_report, print_text, users_code
from checked_backend.errors import CheckedBackendError
from checked_backend.findings import Verdict
from checked_backend.process.interrupt import terminable
from checked_backend.process.job import AnswerFolder, Job, JobEnd, JobResources, run
from checked_backend.report import Report
from checked_backend.report.codec import dumps

_READING = "reading the dump"
_IN_EAGER = "running the graph in eager"
_COMPILED = "compiling the graph and running it"
_AFTER_DEATH = "running the graph in eager, after the compiled one had killed a process"
_EAGER_SECONDS = 300.0
_STATUSES = (0, 1, 2, 3)
_NO_VERDICT = 70

_Dump = Annotated[Path, typer.Argument(metavar="DUMP", help="The folder of one graph.")]
_Seed = Annotated[int, typer.Option(metavar="N", help="For input values that were not saved.")]
_Modules = Annotated[
    Words,
    typer.Option("--import", metavar="MODULE", help="Import this first, for custom operators. It is run: trust it."),
]
_Timeout = Annotated[float, typer.Option(metavar="SECONDS", help="After which its process is ended.")]


def replay(
    dump: _Dump,
    compiler: Compiler = "inductor",
    seed: _Seed = 0,
    modules: _Modules = None,
    timeout: _Timeout = 1800.0,
    memory: Memory = None,
    as_json: AsJson = False,
) -> Verdict:
    """Run a dumped graph again, compiled, and check it against eager. It runs in a process of its own."""

    def how() -> dict[str, Any]:
        return {"compiler": import_module("checked_backend.checking.target").load_compiler(compiler), "seed": seed}

    return _replay_apart(dump, modules or (), timeout, memory_in_bytes(memory), how, as_json=as_json)


def localize(
    dump: _Dump,
    compiler: Compiler = "inductor",
    seed: _Seed = 0,
    folder: Annotated[Path, typer.Option("--out", metavar="DIR", help="Where the report and the repro go.")] = Path(
        "checked_backend_reports"
    ),
    modules: _Modules = None,
    timeout: _Timeout = 3600.0,
    memory: Memory = None,
    as_json: AsJson = False,
) -> Verdict:
    """Find the operator that a compiler gets wrong in a dumped graph, reduce it, write a repro.

    It runs in a process of its own. Ctrl-C ends it with the best so far.
    """

    def how() -> dict[str, Any]:
        folder.mkdir(parents=True, exist_ok=True)
        return {
            "compiler": import_module("checked_backend.checking.target").load_compiler(compiler),
            "seed": seed,
            "investigator": import_module("checked_backend.diagnose.investigate").investigate,
            "report_dir": folder,
        }

    return _replay_apart(dump, modules or (), timeout, memory_in_bytes(memory), how, as_json=as_json)


def show(dump: _Dump, as_json: AsJson = False) -> None:
    """Read a dump in the terminal. Nothing in it is run."""
    package = import_module("checked_backend.dump")
    loaded = package.load_dump(dump)
    print_text(dumps(loaded.metadata) if as_json else package.render_dump(loaded))


def needs_fresh_interpreter(words: Sequence[str]) -> bool:
    """Whether the child must be a fresh Python, because this process cannot be forked.

    A compiler that this program registered is unknown to a fresh Python.
    """
    if not (hasattr(os, "fork") and sys.executable) or _can_fork():
        return False
    registered = import_module("checked_backend._torch.dynamo").registered_here
    return all(registered(word.removeprefix("--compiler=")) is None for word in words)


def _replay_apart(
    dump: Path,
    modules: Sequence[str],
    timeout: float,
    memory: int | None,
    how: Callable[[], Mapping[str, Any]],
    *,
    as_json: bool,
) -> Verdict:
    """Replay a dump in a child. If the compiled graph kills the child, a second child reports that without compiling.

    ``how`` makes the arguments of `checking.replay.replay`, in the child.

    Raises:
        ChildEnded: The child has told the verdict, or the error.
        CheckedBackendError: The child died before it compiled the graph, or the second child died too.
    """

    def work(note: Callable[..., object], died: JobEnd | None) -> Verdict:
        note(_READING)
        loaded = _loaded(dump, modules)
        module = import_module("checked_backend.checking.replay")
        with users_code(as_json), terminable():
            if died is None:
                arguments = how()
                note(_IN_EAGER, _EAGER_SECONDS)
                module.rehearse(loaded, arguments["seed"])
                note(_COMPILED)
                found = _refusing(dump, lambda: module.replay(loaded, rehearsed=True, **arguments))
            else:
                note(_AFTER_DEATH)
                found = _refusing(dump, lambda: module.replay_of_death(loaded, died, **how()))
        print_report(found, as_json)
        return found.verdict

    if not _can_fork():
        return work(lambda *_stage: None, None)

    def child(died: JobEnd | None, answers: AnswerFolder) -> int:
        _use_one_thread()
        try:
            return exit_code(lambda: work(answers.note, died))
        except SystemExit:  # a module that was imported has called it, which is no verdict
            return _NO_VERDICT

    def confined(died: JobEnd | None) -> JobEnd:
        job = Job(partial(child, died), seconds=timeout)
        with terminable():
            return run(job, JobResources(memory), "fork", logged=False, patience=math.inf)

    ended = confined(None)
    if ended.exit not in _STATUSES and ended.stage == _COMPILED and ended.overdue is None:
        ended = confined(ended)
    if ended.exit in _STATUSES:
        raise ChildEnded(ended.exit)
    advice = ". Give it more with --timeout" if ended.overdue is not None and ended.overdue >= timeout else ""
    raise CheckedBackendError(f"{dump}: the process {ended.words} while {ended.stage}{advice}")


def _refusing(dump: Path, produce: Callable[[], Report]) -> Report:
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
        return hasattr(os, "fork")
    worker = import_module("checked_backend.process.worker")  # CUDA and autograd's threads do not survive a fork
    return worker.cannot_fork() is None and worker.cannot_differentiate_in_worker() is None


def _use_one_thread() -> None:
    """Use one thread in a child that inherited torch from its parent: torch's threads do not survive a fork."""
    if "torch" in sys.modules:
        import_module("torch").set_num_threads(1)
        import_module("checked_backend._torch.inductor").renew_compile_threads()


def _loaded(folder: Path, modules: Sequence[str]) -> Any:
    """Import these modules, then load a dump whose graph may call their operators and functions."""
    torch = import_module("checked_backend._torch.operators")
    _keep_out(folder)
    if modules:
        import_module("checked_backend.checking.replay")  # loads parts of torch, whose operators must not count as new
    before = torch.registered_operators()
    for module in modules:
        _import(module, folder)
    new = torch.registered_operators() - before
    return import_module("checked_backend.dump").load_dump(folder, imported=modules, registered=new)


def _is_inside(path: str, folder: Path) -> bool:
    return Path(path or os.curdir).resolve().is_relative_to(folder.resolve())


def _keep_out(folder: Path) -> None:
    """Remove a dump's folder from the import path. ``python -m`` puts the working directory there."""
    sys.path[:] = [path for path in sys.path if not _is_inside(path, folder)]


def _import(module: str, folder: Path) -> None:
    if os.getcwd() not in sys.path and not _is_inside("", folder):
        sys.path.insert(0, os.getcwd())  # `python -m` does so too
    try:
        import_module(module)
    except Exception as error:
        raise CheckedBackendError(f"--import {module}: {type(error).__name__}: {error}") from error
