"""The command line, ``checked-backend``. Only this module prints and chooses the exit code.

A verb is one small function that returns its verdict. Modules that need torch are loaded by the verb that needs them,
so that ``--help`` is quick.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from checked_backend.autostart import stop
from checked_backend.cli.apart import needs_fresh_interpreter, replay_apart
from checked_backend.cli.fuzzing import fuzz, selftest
from checked_backend.cli.printing import STDOUT, Verbose, complain, print_reports, print_text, users_code
from checked_backend.cli.recording import compare, record
from checked_backend.cli.reporting import report
from checked_backend.cli.running import autostart, run
from checked_backend.cli.sweeping import sweep
from checked_backend.errors import CheckedBackendError
from checked_backend.findings import Verdict
from checked_backend.process.child import Limits, default_memory
from checked_backend.process.fresh import call_in_fresh_interpreter
from checked_backend.process.interrupt import terminable
from checked_backend.report import Report
from checked_backend.report.certificate import render_certificate
from checked_backend.report.codec import dumps
from checked_backend.report.html import render_html
from checked_backend.report.write import write_whole

if TYPE_CHECKING:
    from checked_backend.cli.doctor import Diagnosis

__all__ = ["app", "main", "main_here"]

_EXIT: Mapping[Verdict, int] = MappingProxyType({Verdict.PASS: 0, Verdict.FAIL: 1, Verdict.INCONCLUSIVE: 2})
_MISUSE = 3
_IN_CHILD = (["replay"], ["localize"])
"""Verbs that run the graph of a dump. The graph may kill the process that runs it."""

_Dump = Annotated[Path, typer.Argument(metavar="DUMP", help="The folder of one graph.")]
_Compiler = Annotated[
    str, typer.Option(metavar="C", help="A backend of torch.compile, or FILE.py:NAME, which is run: trust it.")
]
_Seed = Annotated[int, typer.Option(metavar="N", help="For input values that were not saved.")]
_Modules = Annotated[
    list[str] | None,
    typer.Option("--import", metavar="MODULE", help="Import this first, for custom operators. It is run: trust it."),
]
_Timeout = Annotated[float, typer.Option(metavar="SECONDS", help="After which its process is ended.")]
_Memory = Annotated[
    float | None, typer.Option(metavar="GIB", help="What its process may hold; default four fifths of what there is.")
]

app = typer.Typer(
    name="checked-backend",
    help="Check torch.compile against eager. Exit codes: 0 pass, 1 fail, 2 inconclusive, 3 misuse or internal error.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _tell_version(asked: bool) -> None:
    if asked:
        print_text(f"checked-backend {importlib.import_module('checked_backend').__version__}")
        raise typer.Exit


@app.callback()
def _verbs(
    version: Annotated[
        bool, typer.Option("--version", callback=_tell_version, is_eager=True, help="Say which version this is.")
    ] = False,
) -> None:
    del version


app.command()(report)


@app.command()
def check(
    target: Annotated[
        str, typer.Argument(metavar="FILE.py:FACTORY", help="FACTORY() returns (fn_or_module, args, kwargs).")
    ],
    compiler: _Compiler = "inductor",
    compiler_option: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="Handed to the compiler; may be repeated.")
    ] = None,
    gradients: Annotated[bool | None, typer.Option("--gradients/--no-gradients", help="Default: if needed.")] = None,
    dynamic: Annotated[bool | None, typer.Option("--dynamic/--static", help="As for torch.compile.")] = None,
    iterations: Annotated[int | None, typer.Option(metavar="N", help="Run it N times in a row.")] = None,
    optimizer: Annotated[
        str | None, typer.Option(metavar="NAME[:KEY=VALUE,...]", help="Step it: Adam, SGD:lr=0.1,momentum=0.9.")
    ] = None,
    vary_data: Annotated[bool, typer.Option("--vary-data", help="Also on fresh data.")] = False,
    vary_layout: Annotated[bool, typer.Option("--vary-layout", help="Also in other memory layouts.")] = False,
    choices: Annotated[
        int | None, typer.Option(metavar="N", help="With N sets of kernels, where the compiler measures kernels.")
    ] = None,
    isolate: Annotated[bool, typer.Option("--isolate", help="In a process of its own, which may die.")] = False,
    timeout: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="When an isolated process counts as hung.")
    ] = None,
    localize: Annotated[bool, typer.Option("--localize", help="Find the operator after a failure.")] = False,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write one HTML page.")] = None,
    certificate: Annotated[bool, typer.Option("--certificate", help="Print what was checked, as Markdown.")] = False,
    verbose: Verbose = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> Verdict:
    """Check a function or a module of yours, compiled against eager. FILE.py is run: trust it."""
    factory = _later("checked_backend.checking.target")
    with users_code(as_json):
        function, args, kwargs = factory.load_factory(target)
        candidate = _loaded_compiler(compiler)
    options: dict[str, Any] = {  # an option that is None keeps its default
        "compiler_options": dict(factory.parse_value(one, "--compiler-option") for one in compiler_option or ())
        or None,
        "gradients": gradients,
        "dynamic": dynamic,
        "iterations": iterations,
        "optimizer": factory.parse_optimizer(optimizer) if optimizer else None,
        "vary_data": vary_data or None,
        "vary_layout": vary_layout or None,
        "choices": choices,
        "isolate": isolate or None,
        "timeout": timeout,
        "localize": localize or None,
    }
    given = {name: value for name, value in options.items() if value is not None}
    with users_code(as_json):
        found: Report = _later("checked_backend.checking").check(function, args, kwargs, compiler=candidate, **given)
    if html is not None:
        write_whole(render_html((found,)), html)
    if as_json:
        print_text(found.to_json())
    elif certificate:
        print_text(render_certificate((found,)))
    else:
        print_reports((found,), verbose=verbose)
    return found.verdict


_VERBS = (
    (sweep, False), (fuzz, False), (selftest, False),
    (run, True), (autostart, False), (record, True), (compare, False),
)  # fmt: skip
for _verb, _takes_a_program in _VERBS:
    app.command(context_settings={"allow_interspersed_args": not _takes_a_program})(_verb)


@app.command()
def replay(
    dump: _Dump,
    compiler: _Compiler = "inductor",
    seed: _Seed = 0,
    modules: _Modules = None,
    timeout: _Timeout = 1800.0,
    memory: _Memory = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> Verdict:
    """Run a dumped graph again, compiled, and check it against eager. It runs in a process of its own."""

    def how() -> dict[str, Any]:
        return {"compiler": _loaded_compiler(compiler), "seed": seed}

    return _replayed(dump, modules or (), as_json, _limits(timeout, memory), how)


@app.command()
def localize(
    dump: _Dump,
    compiler: _Compiler = "inductor",
    seed: _Seed = 0,
    folder: Annotated[Path, typer.Option("--out", metavar="DIR", help="Where the report and the repro go.")] = Path(
        "checked_backend_reports"
    ),
    modules: _Modules = None,
    timeout: _Timeout = 3600.0,
    memory: _Memory = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> Verdict:
    """Find the operator that a compiler gets wrong in a dumped graph, reduce it, write a repro.

    It runs in a process of its own. Ctrl-C ends it with the best so far.
    """

    def how() -> dict[str, Any]:
        folder.mkdir(parents=True, exist_ok=True)
        return {
            "compiler": _loaded_compiler(compiler),
            "seed": seed,
            "investigator": _later("checked_backend.diagnose.investigate").Investigation(complain),
            "report_dir": folder,
        }

    return _replayed(dump, modules or (), as_json, _limits(timeout, memory), how)


@app.command()
def show(
    dump: _Dump,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Read a dump in the terminal. Nothing in it is run."""
    package = _later("checked_backend.dump")
    loaded = package.load_dump(dump)
    print_text(dumps(loaded.metadata) if as_json else package.render_dump(loaded))


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> Verdict:
    """Say which versions, compilers and devices are here, and what can and cannot be checked with them."""
    diagnosis: Diagnosis = _later("checked_backend.cli.doctor").diagnose()
    print_text(dumps(diagnosis.to_dict()) if as_json else str(diagnosis))
    return diagnosis.verdict


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit.

    Args:
        arguments: The words after the program's name; default ``sys.argv[1:]``.

    Raises:
        SystemExit: Always. 0 pass, 1 fail, 2 inconclusive, 3 misuse or internal error.
    """
    stop()
    words = sys.argv[1:] if arguments is None else list(arguments)
    if words[:1] in _IN_CHILD and needs_fresh_interpreter(words):
        sys.exit(_exit_code(lambda: _in_fresh_interpreter(words)))
    main_here(words)


def main_here(words: Sequence[str]) -> NoReturn:
    """Do what `main` does in this process and its children.

    Args:
        words: The words of the command line, without the program's name.

    Raises:
        SystemExit: Always.
    """
    sys.exit(_run(list(words)))


def _in_fresh_interpreter(words: Sequence[str]) -> NoReturn:
    status = call_in_fresh_interpreter(__name__, main_here.__name__, words)
    if status < 0:
        raise CheckedBackendError(f"the process that ran it was killed by {signal.Signals(-status).name}")
    raise _ChildEnded(status)


def _run(arguments: list[str]) -> int:
    return _exit_code(
        lambda: app(args=_with_json_values(arguments), prog_name="checked-backend", standalone_mode=False)
    )


def _exit_code(produce: Callable[[], Any]) -> int:
    try:
        result = produce()
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read our output has gone, for example `head`. Python must not complain again when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _MISUSE
    except CheckedBackendError as error:
        complain(str(error))
        return _MISUSE
    except OSError as error:
        complain(f"{error.filename or 'a file'}: {error.strerror or error}")
        return _MISUSE
    except _ChildEnded as ended:
        return ended.status
    except (typer.Abort, KeyboardInterrupt):
        complain("stopped")
        return _MISUSE
    except MemoryError:
        complain("there is not enough memory")
        return _MISUSE
    except Exception as error:
        show = getattr(error, "show", None)  # click's usage errors; typer has no public name for their base class
        if callable(show):
            show()
        else:
            traceback.print_exc()
            complain("internal error: this is a bug in checked_backend; please report it with the lines above")
        return _MISUSE
    if isinstance(result, Verdict):
        return _EXIT[result]
    return 0 if result in (None, 0) else _MISUSE


class _ChildEnded(Exception):
    """Raised when a child process has done the work, with its exit status."""

    def __init__(self, status: int) -> None:
        super().__init__(f"exit status {status}")
        self.status = status


def _loaded_compiler(text: str) -> Any:
    return _later("checked_backend.checking.target").load_compiler(text)


def _limits(timeout: float, memory: float | None) -> Limits:
    return Limits(timeout, default_memory() if memory is None else int(memory * 2**30))


def _replayed(
    dump: Path, modules: Sequence[str], as_json: bool, limits: Limits, how: Callable[[], Mapping[str, Any]]
) -> Verdict:
    @contextmanager
    def around() -> Iterator[None]:
        with users_code(as_json), terminable():
            yield

    def show(found: Report) -> Verdict:
        if as_json:
            print_text(found.to_json())
        else:
            print_reports((found,), verbose=False)
        return found.verdict

    status = replay_apart(dump, modules, limits, how, around=around, show=show, exit_code=_exit_code)
    raise _ChildEnded(status)


def _with_json_values(arguments: list[str]) -> list[str]:
    """Turn ``report --json`` without FILE into ``--json=-``: typer has no option whose value may be left out."""
    if "report" not in arguments[:1]:
        return arguments
    out = []
    for position, word in enumerate(arguments):
        following = arguments[position + 1 : position + 2]
        bare = word == "--json" and (not following or (following[0].startswith("-") and following[0] != STDOUT))
        out.append(f"--json={STDOUT}" if bare else word)
    return out


def _later(module: str) -> Any:
    return importlib.import_module(module)
