"""The verbs ``run``, ``record``, ``compare`` and ``autostart``: programs unchanged, checked or recorded."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from shutil import which
from typing import Annotated, Literal

import typer

from checked_backend.autostart import HOOKED, ON, RUN
from checked_backend.cli.options import AsJson, Html, Verbose
from checked_backend.cli.printing import print_report, print_text, say, write_file
from checked_backend.errors import CheckedBackendError, OptionError
from checked_backend.findings import Verdict
from checked_backend.options import RunOptions, environment_variable, parse_options
from checked_backend.process.foreground import die_by, run_in_foreground
from checked_backend.program.compare import compare_recordings
from checked_backend.program.folder import tidy
from checked_backend.program.hook import FILES, install_hook, missing_files, remove_hook, site_packages
from checked_backend.program.records import PLAIN, written_by
from checked_backend.program.summary import exit_code, github_annotations, read_run
from checked_backend.report.clean import plural
from checked_backend.report.codec import dumps
from checked_backend.report.file_names import this_moment
from checked_backend.report.html import render_html

_OPTIONS = (
    *("on_divergence", "every", "budget", "compiler", "layout", "ignore", "gradients", "localize", "shadow"),
    *("report_dir", "dump", "dump_values"),
)
"""Those of the verb that are options of a program's checks."""


def run(
    context: typer.Context,
    words: Annotated[list[str], typer.Argument(metavar="SCRIPT|MODULE [ARGS]...", help="The program, then its words.")],
    module: Annotated[bool, typer.Option("-m", help="The program is a module, as in python -m MODULE.")] = False,
    on_divergence: Annotated[
        Literal["record", "warn", "raise", "fallback"] | None,
        typer.Option("--on-divergence", "--policy", help="What a finding does at once; default record."),
    ] = None,
    every: Annotated[int | None, typer.Option(metavar="N", help="Check every n-th call of each region.")] = None,
    budget: Annotated[
        float | None, typer.Option(metavar="SHARE", help="Instead: the share of time that checks may take, 0.01.")
    ] = None,
    compiler: Annotated[
        str | None, typer.Option(metavar="C", help="The backend where the code names none; default inductor.")
    ] = None,
    layout: Annotated[
        Literal["warn", "raise", "ignore"] | None, typer.Option(help="What a finding about layout alone does.")
    ] = None,
    ignore: Annotated[str | None, typer.Option(metavar="KIND,...", help="Findings not to report.")] = None,
    gradients: Annotated[bool | None, typer.Option("--gradients/--no-gradients", help="Default: checked.")] = None,
    localize: Annotated[
        bool | None, typer.Option("--localize/--no-localize", help="Find the operator after a finding; default: yes.")
    ] = None,
    shadow: Annotated[
        bool | None, typer.Option("--shadow", help="Also compare whole calls with eager, at calls 1, 2, 4, ...")
    ] = None,
    report_dir: Annotated[Path | None, typer.Option(metavar="DIR", help="Where reports and repros go.")] = None,
    dump: Annotated[Path | None, typer.Option(metavar="DIR", help="Also write each graph to a folder there.")] = None,
    dump_values: Annotated[
        bool | None, typer.Option("--dump-values", help="With the real values of their inputs.")
    ] = None,
    github: Annotated[bool, typer.Option("--github", help="Also print annotations for GitHub.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON to stdout instead of the summary.")] = False,
    json_file: Annotated[Path | None, typer.Option(metavar="FILE", help="Write JSON to a file.")] = None,
) -> None:
    """Run a program unchanged and check every torch.compile in it: backend, mode and options are the code's own.

    The summary goes to stderr. The program's own exit code is kept unless it is 0 and the verdict is worse.
    """
    if every is not None or budget is not None:  # the command line comes before the environment
        os.environ.pop(environment_variable("every"), None)
        os.environ.pop(environment_variable("budget"), None)
    given = {name: context.params[name] for name in _OPTIONS if context.params[name] is not None}
    if dump is not None:
        given["dump"] = dump.absolute()  # the program may change its directory
    asked = parse_options(RunOptions, "numcheck", given)  # a message names the option, and not the variable below
    if compiler not in (None, "inductor", *entry_points(group="torch_dynamo_backends").names):  # torch takes seconds
        try:
            import_module("checked_backend.regions.compile").resolve_compiler(asked)
        except OptionError as error:
            variable = f"{environment_variable('compiler')}={compiler}"
            raise OptionError(f"{error} If the program registers it: {variable} checked-backend run ...") from None
    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise CheckedBackendError(f"--json-file: there is no folder {json_file.parent}")
    for name, value in given.items():
        os.environ[environment_variable(name)] = str(value)
    os.environ.pop(RUN, None)
    reports = parse_options(RunOptions, "numcheck", {}).report_dir.absolute()
    folder = reports / f"run-{this_moment()}"
    folder.mkdir(parents=True)
    if not module and words[0] != "-" and not Path(words[0]).exists():
        tidy(folder)
        command = "; a command is run by its module: torchrun is -m torch.distributed.run" if which(words[0]) else ""
        raise CheckedBackendError(f"{words[0]}: there is no such program{command}")
    environment = {environment_variable("report_dir"): str(reports), RUN: str(folder), **checking_environment()}
    began = time.perf_counter()
    program = [*(["-m"] if module else []), *words]
    status = run_in_foreground([sys.executable, *program], {**os.environ, **environment})
    hooked = (folder / HOOKED).exists()
    result = read_run(folder, program, status, time.perf_counter() - began)
    if not hooked:
        raise CheckedBackendError("the program's Python did not start the checks: it ignores its environment")
    if as_json:
        print_text(dumps(result.to_dict()))
    else:
        say(f"\n{result}")
    if json_file is not None:
        write_file(dumps(result.to_dict()), json_file)
    if github:
        tell = say if as_json else print_text  # stdout has JSON alone
        tell("\n".join(["", *github_annotations(result.findings)]))
    sys.stdout.flush()
    if status < 0:
        die_by(-status)
    sys.exit(exit_code(result))


def autostart(
    install: Annotated[bool, typer.Option("--install", help="Write the hook into this environment.")] = False,
    remove: Annotated[bool, typer.Option("--remove", help="Remove it; do so before the package is removed.")] = False,
    status: Annotated[bool, typer.Option("--status", help="Say whether it is there.")] = False,
) -> None:
    """Let CHECKED_BACKEND=1 alone check any program of this Python environment, as run does.

    Python runs a hook when it starts, two files in site-packages. Without the variable, or under python -E or -I, it
    does nothing. Options are variables too, as CHECKED_BACKEND_EVERY=10. Such a program prints the summary at its end
    and keeps its exit code.
    """
    if install + remove + status != 1:
        raise typer.BadParameter("give one of --install, --remove and --status")
    if install:
        install_hook()
    if remove:
        remove_hook()
    missing = missing_files()
    state = (
        "installed" if not missing else "not installed" if len(missing) == len(FILES) else f"{missing[0]} is missing"
    )
    print_text(f"{state} in {site_packages()}")


def checking_environment() -> Mapping[str, str]:
    """The environment in which a Python, and every Python that it starts, starts the checks."""
    bootstrap = Path(__file__).parents[1] / "program" / "bootstrap"
    known = os.environ.get("PYTHONPATH", "")
    return {ON: "1", "PYTHONPATH": os.pathsep.join([str(bootstrap), *([known] if known else [])])}


def record(
    command: Annotated[list[str], typer.Argument(metavar="CMD...", help="The program and its words; after --.")],
    folder: Annotated[Path, typer.Option("--out", metavar="DIR", help="A folder for it.")] = Path("recording"),
    noise_runs: Annotated[
        int, typer.Option(min=0, metavar="N", help="Runs after it, in eager with random roundings: the noise.")
    ] = 2,
    every: Annotated[
        int | None, typer.Option(metavar="N", help="Beside calls 1 to 16, 32, 64, ... every n-th of each region.")
    ] = None,
) -> None:
    """Record what a program's compiled regions compute, for checked-backend compare.

    The program runs as it is; then again as often as its noise is to be known. For each region and call, checksums and
    a sample of what goes in and out, and of gradients, are written. The exit code is the program's own.
    """
    if any((folder / name).exists() for name in (PLAIN, "noise-1")):
        raise CheckedBackendError(f"{folder} has a recording already; name another folder with --out")
    words = [sys.executable, *command] if command[0].endswith(".py") else command
    if every is not None:
        os.environ[environment_variable("every")] = str(every)
    for number in range(noise_runs + 1):
        place = folder.absolute() / (PLAIN if not number else f"noise-{number}")
        place.mkdir(parents=True)
        told = "as it is" if not number else f"with random roundings, {number} of {noise_runs}"
        say(f"checked-backend: recording the program {told}")
        status = _run(words, place, noise=number * 1_000_003)
        if not written_by(place):
            raise CheckedBackendError(
                f"the program compiled nothing that ran, so nothing is recorded (exit code {status})"
            )
        if status < 0:
            die_by(-status)
        if status:
            sys.exit(status)
    noise = f", and {plural(noise_runs, 'noise run')}" if noise_runs else ""
    say(f"checked-backend: recorded the program{noise} in {folder} (checked-backend compare {folder} DIR)")


def _run(words: list[str], place: Path, *, noise: int) -> int:
    with tempfile.TemporaryDirectory(prefix="checked_backend_") as marks:
        added = {
            **checking_environment(),
            RUN: marks,
            environment_variable("record"): str(place),
            environment_variable("noise"): str(noise),
        }
        try:
            return run_in_foreground(words, {**os.environ, **added})
        except OSError as error:
            raise CheckedBackendError(f"{words[0]}: it cannot be started: {error.strerror}") from error


def compare(
    first: Annotated[Path, typer.Argument(metavar="A", help="The folder of the recording whose noise counts.")],
    second: Annotated[Path, typer.Argument(metavar="B", help="The folder of the other recording.")],
    html: Html = None,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> Verdict:
    """Say where recording B first leaves the noise of recording A: another machine, another torch, GPU against CPU."""
    found = compare_recordings(first, second)
    if html is not None:
        write_file(render_html([found]), html)
    print_report(found, as_json, verbose=verbose)
    return found.verdict
