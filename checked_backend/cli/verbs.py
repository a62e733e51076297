"""The command line, ``checked-backend``. A verb is one function that returns its verdict, from which its exit code is.

Modules that need torch are loaded by the verb that needs them, so that ``--help`` is quick.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from checked_backend.autostart import stop
from checked_backend.cli.fuzzing import fuzz, selftest
from checked_backend.cli.options import (
    AsJson,
    Certificate,
    Compiler,
    CompilerOptions,
    Html,
    Verbose,
    compiler_options,
    parse_sizes,
)
from checked_backend.cli.printing import STDOUT, exit_code, print_report, print_text, users_code, write_file
from checked_backend.cli.replaying import localize, replay, show
from checked_backend.cli.reporting import report
from checked_backend.cli.running import autostart, compare, record, run
from checked_backend.cli.sweeping import sweep
from checked_backend.findings import Verdict
from checked_backend.report.certificate import render_certificate
from checked_backend.report.codec import dumps
from checked_backend.report.html import render_html
from checked_backend.report.progress import Progress, telling_whole

if TYPE_CHECKING:
    from checked_backend.cli.doctor import Diagnosis
    from checked_backend.report import Report

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
        print_text(f"checked-backend {import_module('checked_backend').__version__}")
        raise typer.Exit


@app.callback()
def _verbs(
    version: Annotated[
        bool, typer.Option("--version", callback=_tell_version, is_eager=True, help="Say which version this is.")
    ] = False,
) -> None:
    del version


def check(
    target: Annotated[
        str, typer.Argument(metavar="FILE.py:FACTORY", help="FACTORY() returns (fn_or_module, args, kwargs).")
    ],
    candidate: Annotated[
        str | None,
        typer.Option(metavar="FILE.py:NAME", help="Hold this kernel against it; compile nothing."),
    ] = None,
    sizes: Annotated[
        str | None, typer.Option(metavar="N,N,...", help="Sizes for a candidate; FACTORY(size) makes each.")
    ] = None,
    compiler: Compiler = "inductor",
    compiler_option: CompilerOptions = None,
    gradients: Annotated[bool | None, typer.Option("--gradients/--no-gradients", help="Default: if needed.")] = None,
    dynamic: Annotated[bool | None, typer.Option("--dynamic/--static", help="As for torch.compile.")] = None,
    iterations: Annotated[int, typer.Option(metavar="N", help="Run it N times in a row.")] = 1,
    optimizer: Annotated[
        str | None, typer.Option(metavar="NAME[:KEY=VALUE,...]", help="Step it: Adam, SGD:lr=0.1,momentum=0.9.")
    ] = None,
    vary_data: Annotated[bool, typer.Option("--vary-data", help="Also on fresh data.")] = False,
    vary_layout: Annotated[bool, typer.Option("--vary-layout", help="Also in other memory layouts.")] = False,
    choices: Annotated[
        int, typer.Option(metavar="N", help="With N sets of kernels, where the compiler measures kernels.")
    ] = 1,
    invariant: Annotated[
        str, typer.Option(metavar="batch,runs,choices", help="Compare it with itself too, bit by bit.")
    ] = "",
    isolate: Annotated[bool, typer.Option("--isolate", help="In a process of its own, which may die.")] = False,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="When an isolated process counts as hung.")] = 1800,
    localize: Annotated[bool, typer.Option("--localize", help="Find the operator after a failure.")] = False,
    html: Html = None,
    certificate: Certificate = False,
    verbose: Verbose = False,
    as_json: AsJson = False,
) -> Verdict:
    """Check a function or a module of yours, compiled against eager. FILE.py is run: trust it.

    With --candidate, a kernel of yours is checked against plain PyTorch; FACTORY(size) has it called with many sizes.
    """
    chosen = None if sizes is None else parse_sizes(sizes)
    with telling_whole(f"loading {target}"), users_code(as_json):
        factory = import_module("checked_backend.checking.target")
        function, args, kwargs = factory.load_factory(target, chosen, sized=candidate is not None)
        kernel = None if candidate is None else factory.load_function(candidate)
        compile_with = factory.load_compiler(compiler)
    options = compiler_options(compiler_option)
    stepped = factory.parse_optimizer(optimizer) if optimizer else None
    with users_code(as_json):
        found: Report = import_module("checked_backend.checking").check(
            function,
            args,
            kwargs,
            candidate=kernel,
            sizes=chosen,
            compiler=compile_with,
            compiler_options=options,
            gradients="auto" if gradients is None else gradients,
            dynamic=dynamic,
            iterations=iterations,
            optimizer=stepped,
            vary_data=vary_data,
            vary_layout=vary_layout,
            choices=choices,
            invariant=invariant.split(",") if invariant else (),
            isolate=isolate,
            timeout=timeout,
            localize=localize,
        )
    if html is not None:
        write_file(render_html((found,)), html)
    if certificate and not as_json:
        print_text(render_certificate((found,)))
    else:
        print_report(found, as_json, verbose=verbose)
    return found.verdict


def doctor(as_json: AsJson = False) -> Verdict:
    """Say which versions, compilers and devices are here, and what can and cannot be checked with them."""
    with Progress(on_interrupt="", patient=True).doing("looking at this machine"):
        diagnosis: Diagnosis = import_module("checked_backend.cli.doctor").diagnose()
    print_text(dumps(diagnosis.to_dict()) if as_json else str(diagnosis))
    return diagnosis.verdict


_TAKE_A_PROGRAM = (run, record)
for _verb in (
    *(run, check, report, doctor),
    *(record, compare, replay, localize, show),
    *(sweep, fuzz, selftest, autostart),
):  # in the order in which people need them
    app.command(context_settings={"allow_interspersed_args": _verb not in _TAKE_A_PROGRAM})(_verb)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit.

    Args:
        arguments: The words after the program's name; default ``sys.argv[1:]``.

    Raises:
        SystemExit: Always. 0 pass, 1 fail, 2 inconclusive, 3 misuse or internal error.
    """
    stop()
    words = _with_json_values(sys.argv[1:] if arguments is None else list(arguments))
    sys.exit(exit_code(lambda: app(args=words, prog_name="checked-backend", standalone_mode=False)))


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
