"""The verb ``report``: reports, sweeps and fuzzes that are on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from checked_backend.cli.found import encode_found, merged, worst_of, write_found
from checked_backend.cli.fuzzing import Pages, report_fuzz
from checked_backend.cli.printing import STDOUT, Verbose, complain, print_reports, print_text
from checked_backend.cli.sweeping import report_sweep
from checked_backend.errors import CheckedBackendError
from checked_backend.findings import Verdict
from checked_backend.report.certificate import render_certificate
from checked_backend.report.codec import dumps, json_schema
from checked_backend.report.write import read_reports, write_whole
from checked_backend.runs.folder import RunFolder

__all__ = ["report"]


def report(
    path: Annotated[
        Path | None,
        typer.Argument(metavar="FILE_OR_DIR", help="A report file, or a folder of reports, of a sweep or of a fuzz."),
    ] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write one HTML page.")] = None,
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="[FILE]", help="Write JSON; without FILE, print it.")
    ] = None,
    junit: Annotated[Path | None, typer.Option(metavar="FILE", help="Write JUnit XML.")] = None,
    certificate: Annotated[bool, typer.Option("--certificate", help="Print what was checked, as Markdown.")] = False,
    merge: Annotated[bool, typer.Option("--merge", help="Make one report of all ranks' and processes'.")] = False,
    model_explorer: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a graph for Model Explorer.")
    ] = None,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema of reports.")] = False,
    verbose: Verbose = False,
    since: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Of a sweep: say what changed since this one.")
    ] = None,
) -> Verdict:
    """Show reports, a sweep and what changed since another, or a fuzz. The exit code is that of the worst one."""
    if schema:
        print_text(dumps(json_schema()))
        return Verdict.PASS
    if path is None and json_file not in (None, STDOUT):
        path, json_file = Path(str(json_file)), STDOUT  # "report --json DIR": the word after --json is the folder
    if path is None:
        raise typer.BadParameter("name a report file, or a folder of reports", param_hint="FILE_OR_DIR")
    is_sweep, is_fuzz = RunFolder.is_one(path, "sweep"), RunFolder.is_one(path, "fuzz")
    if model_explorer and (is_sweep or is_fuzz):
        raise typer.BadParameter("this has no graphs; name a folder of reports", param_hint="--model-explorer")
    if is_sweep:
        _refuse_certificate("sweep", certificate=certificate)
        return report_sweep(path, since, html=html, json_file=json_file, junit=junit)
    if since is not None:
        raise typer.BadParameter("only the folder of a sweep has that", param_hint="--since")
    if is_fuzz:
        _refuse_certificate("fuzz", certificate=certificate)
        return report_fuzz(path, Pages(html, json_file, junit))
    found = read_reports(path)
    if not found.reports:
        why = "".join(f"\n  {file}: {reason}" for file, reason in found.broken)
        raise CheckedBackendError(f"no reports in {path}{why}")
    if merge:
        found = merged(found, path)
    verdict = worst_of(found)
    write_found(found, html=html, junit=junit, model_explorer=model_explorer)
    if json_file is not None:
        text = dumps(encode_found(found, verdict))
        if json_file != STDOUT:
            write_whole(text + "\n", Path(json_file))
        else:
            print_text(text)
    if certificate:
        print_text(render_certificate(found.reports))
    elif json_file != STDOUT:
        print_reports(found.reports, verbose=verbose)
    for file, reason in found.broken:
        complain(f"{file}: {reason}")
    return verdict


def _refuse_certificate(of: str, *, certificate: bool) -> None:
    if certificate:
        raise typer.BadParameter(f"a {of} has no certificate; name a folder of reports", param_hint="--certificate")
