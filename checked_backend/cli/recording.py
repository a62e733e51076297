"""The verbs ``record`` and ``compare``: what a program computes, against another machine, version or program."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from checked_backend.autostart import RUN
from checked_backend.cli.printing import print_text
from checked_backend.cli.running import checking_environment
from checked_backend.errors import CheckedBackendError
from checked_backend.findings import Verdict
from checked_backend.options import environment_variable
from checked_backend.process.foreground import die_by, run_in_foreground
from checked_backend.program.compare import compare_recordings
from checked_backend.program.records import PLAIN, written_by
from checked_backend.report.html import render_html
from checked_backend.report.write import write_whole

__all__ = ["compare", "record"]


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
        print(f"checked-backend: recording the program {told}", file=sys.stderr)  # noqa: T201
        status = _run(words, place, noise=number * 1_000_003)
        if not written_by(place):
            raise CheckedBackendError(
                f"the program compiled nothing that ran, so nothing is recorded (exit code {status})"
            )
        if status < 0:
            die_by(-status)
        if status:
            sys.exit(status)
    print(f"checked-backend: recorded in {folder}", file=sys.stderr)  # noqa: T201


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
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write one HTML page.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Tell all that is known.")] = False,
) -> Verdict:
    """Say where recording B first leaves the noise of recording A: another machine, another torch, GPU against CPU."""
    found = compare_recordings(first, second)
    if html is not None:
        write_whole(render_html([found]), html)
    print_text(found.to_json() if as_json else found.to_text(verbose=verbose))
    return found.verdict
