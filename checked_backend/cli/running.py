"""The verbs ``run`` and ``autostart``: check every ``torch.compile`` in a program, in this one or in any."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import typer

from checked_backend.autostart import HOOKED, ON, RUN
from checked_backend.cli.printing import print_text
from checked_backend.errors import CheckedBackendError
from checked_backend.options import RunOptions, environment_variable, parse_options
from checked_backend.process.foreground import die_by, run_in_foreground
from checked_backend.program.folder import tidy
from checked_backend.program.hook import FILES, install_hook, missing_files, remove_hook, site_packages
from checked_backend.program.summary import exit_code, github_annotations, read_run
from checked_backend.report.codec import dumps
from checked_backend.report.file_names import this_moment
from checked_backend.report.write import write_whole

__all__ = ["autostart", "checking_environment", "run"]


def run(
    words: Annotated[list[str], typer.Argument(metavar="SCRIPT|MODULE [ARGS]...", help="The program, then its words.")],
    module: Annotated[bool, typer.Option("-m", help="The program is a module, as in python -m MODULE.")] = False,
    policy: Annotated[
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
    github: Annotated[bool, typer.Option("--github", help="Also print annotations for GitHub.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON to stdout instead of the summary.")] = False,
    json_file: Annotated[Path | None, typer.Option(metavar="FILE", help="Write JSON to a file.")] = None,
) -> None:
    """Run a program as it is and check every torch.compile in it: backend, mode and options are the code's own.

    The summary goes to stderr. The program's own exit code is kept unless it is 0 and the verdict is worse.
    """
    if every is not None and budget is not None:
        raise typer.BadParameter("--every checks every n-th call, --budget a share of the time: give one of them")
    if every is not None or budget is not None:  # the command line comes before the environment
        os.environ.pop(environment_variable("every"), None)
        os.environ.pop(environment_variable("budget"), None)
    options = {
        "on_divergence": policy,
        "every": every,
        "budget": budget,
        "compiler": compiler,
        "layout": layout,
        "ignore": ignore,
        "gradients": gradients,
        "localize": localize,
        "shadow": shadow,
        "report_dir": report_dir,
    }
    given = {name: value for name, value in options.items() if value is not None}
    parse_options(RunOptions, "numcheck", given)  # so that a message names the option, and not the variable below
    for name, value in given.items():
        os.environ[environment_variable(name)] = str(value)
    os.environ.pop(RUN, None)
    reports = parse_options(RunOptions, "numcheck", {}).report_dir.absolute()
    folder = reports / f"run-{this_moment()}"
    folder.mkdir(parents=True)
    if not module and words[0] != "-" and not Path(words[0]).exists():
        tidy(folder)
        raise CheckedBackendError(f"{words[0]}: there is no such program")
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
        print(f"\n{result}", file=sys.stderr)  # noqa: T201
    if json_file is not None:
        write_whole(dumps(result.to_dict()) + "\n", json_file)
    if github:
        annotations = "\n".join(["", *github_annotations(result.findings)])
        if as_json:  # stdout has that alone
            print(annotations, file=sys.stderr)  # noqa: T201
        else:
            print_text(annotations)
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
