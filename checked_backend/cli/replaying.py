"""The verbs ``replay``, ``localize`` and ``show``: dumped graphs. Those that run a graph do so in a process of its own.

The graph may kill what runs it, and so may what a compiler makes of it.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, NoReturn

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
    asked = {"compiler": compiler, "seed": seed, "modules": modules or (), "as_json": as_json}
    return _replay_apart(dump, timeout, memory, asked)


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
    asked = {"compiler": compiler, "seed": seed, "modules": modules or (), "as_json": as_json}
    return _replay_apart(dump, timeout, memory, {**asked, "report_dir": str(folder)})


def show(dump: _Dump, as_json: AsJson = False) -> None:
    """Read a dump in the terminal. Nothing in it is run."""
    package = import_module("checked_backend.dump")
    loaded = package.load_dump(dump)
    print_text(dumps(loaded.metadata) if as_json else package.render_dump(loaded))


def _replay_apart(dump: Path, timeout: float, memory: float | None, asked: Mapping[str, Any]) -> NoReturn:
    """Replay a dump in a process. If the compiled graph kills it, a second one reports that without compiling.

    Raises:
        ChildEnded: The process has told the verdict, or the error.
        CheckedBackendError: It died before it compiled the graph, or the second process died too.
    """

    def confined(died: Mapping[str, Any] | None) -> JobEnd:
        question = {"dump": str(dump), "died": died, **asked}
        job = Job(f"{__name__}:{replay_here.__name__}", question, timeout)
        with terminable():
            return run(job, JobResources(memory_in_bytes(memory)), logged=False, patience=math.inf)

    _keep_out(dump)
    ended = confined(None)
    if not ended.answer and ended.stage == _COMPILED and ended.overdue is None:
        ended = confined(asdict(ended))
    if ended.answer:
        raise ChildEnded(int(ended.answer))
    advice = ". Give it more with --timeout" if ended.overdue is not None and ended.overdue >= timeout else ""
    raise CheckedBackendError(f"{dump}: the process {ended.words} while {ended.stage}{advice}")


def replay_here(question: Mapping[str, Any], answers: AnswerFolder) -> int:
    """The work of that process: it prints the report and returns the exit code, which it also answers."""
    status = exit_code(lambda: _replayed(answers, **question))
    answers.answer(str(status))
    return status


def _replayed(
    answers: AnswerFolder,
    dump: str,
    died: Mapping[str, Any] | None,
    compiler: str,
    seed: int,
    modules: Sequence[str],
    report_dir: str | None = None,
    *,
    as_json: bool,
) -> Verdict:
    answers.note(_READING)
    loaded = _loaded(Path(dump), modules)
    module = import_module("checked_backend.checking.replay")
    with users_code(as_json), terminable():
        how = {"compiler": import_module("checked_backend.checking.target").load_compiler(compiler), "seed": seed}
        if report_dir is not None:
            Path(report_dir).mkdir(parents=True, exist_ok=True)
            how["investigator"] = import_module("checked_backend.diagnose.investigate").investigate
            how["report_dir"] = Path(report_dir)
        if died is None:
            answers.note(_IN_EAGER, _EAGER_SECONDS)
            module.rehearse(loaded, seed)
            answers.note(_COMPILED)
            found = _refusing(dump, lambda: module.replay(loaded, rehearsed=True, **how))
        else:
            answers.note(_AFTER_DEATH)
            found = _refusing(dump, lambda: module.replay_of_death(loaded, JobEnd(**died), **how))
    print_report(found, as_json)
    return found.verdict


def _refusing(dump: str, produce: Callable[[], Report]) -> Report:
    """Produce a report. An unforeseen exception becomes one sentence, because the dump may be at fault."""
    try:
        return produce()
    except (CheckedBackendError, OSError, SystemExit):
        raise
    except Exception as error:
        first = (str(error).strip().splitlines() or [""])[0][:400]
        message = f"{dump}: it runs in eager, but cannot be checked: {type(error).__name__}: {first}"
        raise CheckedBackendError(message) from error


def _loaded(folder: Path, modules: Sequence[str]) -> Any:
    """Import these modules, then load a dump whose graph may call their operators and functions."""
    torch = import_module("checked_backend._torch.operators")
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
    """Remove a dump's folder from the import path, which the process gets. ``python -m`` puts it there."""
    sys.path[:] = [path for path in sys.path if not _is_inside(path, folder)]


def _import(module: str, folder: Path) -> None:
    if os.getcwd() not in sys.path and not _is_inside("", folder):
        sys.path.insert(0, os.getcwd())  # `python -m` does so too
    try:
        import_module(module)
    except (Exception, SystemExit) as error:
        raise CheckedBackendError(f"--import {module}: {type(error).__name__}: {error}") from error
