"""The verb ``run``: run a program as it is, and check every ``torch.compile`` in it."""

from __future__ import annotations

import os
import site
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import typer

from checked_backend.autostart import ON, RUN
from checked_backend.cli.printing import print_text
from checked_backend.errors import CheckedBackendError
from checked_backend.options import RunOptions, environment_variable, parse_options
from checked_backend.process.foreground import die_by, run_in_foreground
from checked_backend.program.folder import RunFolder
from checked_backend.program.summary import exit_code, github_annotations, read_run
from checked_backend.report.codec import dumps
from checked_backend.report.file_names import this_moment
from checked_backend.report.write import write_whole

__all__ = ["hook", "run"]

_HOOK = "checked_backend.pth"


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

    The summary goes to stderr. The program's own exit code is kept unless it is 0 and the verdict is worse. The same
    without this command: CHECKED_BACKEND=1 in the environment of any Python, options as CHECKED_BACKEND_EVERY=10.
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
    folder = _claimed(reports)
    if not module and words[0] != "-" and not Path(words[0]).exists():
        RunFolder(folder).tidy()
        raise CheckedBackendError(f"{words[0]}: there is no such program")
    environment = {environment_variable("report_dir"): str(reports), RUN: str(folder), ON: "1"}
    began = time.perf_counter()
    program = [*(["-m"] if module else []), *words]
    status = run_in_foreground([sys.executable, *program], {**os.environ, **environment, **hook()})
    hooked = RunFolder(folder).hooked()
    result = read_run(folder, program, status, time.perf_counter() - began)
    if not hooked:
        raise CheckedBackendError("the program's Python did not start the checks: it ignores its environment or site")
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


def _claimed(reports: Path) -> Path:
    """Make a new folder for this run."""
    reports.mkdir(parents=True, exist_ok=True)
    for number in range(1000):
        folder = reports / f"run-{this_moment()}{f'-{number}' if number else ''}"
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        return folder
    raise CheckedBackendError(f"{reports}: no name is free for this run")


def hook() -> Mapping[str, str]:
    """The environment variables that start the checks: none if the hook is installed."""
    places = [*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])]
    if any(Path(place, _HOOK).is_file() for place in places):
        return {}
    bootstrap = Path(__file__).parents[1] / "program" / "bootstrap"
    known = os.environ.get("PYTHONPATH", "")
    return {"PYTHONPATH": os.pathsep.join([str(bootstrap), *([known] if known else [])])}
