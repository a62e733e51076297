"""The verb ``report``: reports, sweeps and fuzzes that are on disk."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from checked_backend.cli.fuzzing import report_fuzz
from checked_backend.cli.options import Certificate, Html, Junit, Verbose
from checked_backend.cli.printing import STDOUT, Pages, complain, print_reports, print_text, write_file
from checked_backend.cli.sweeping import report_sweep
from checked_backend.errors import CheckedBackendError
from checked_backend.findings import Verdict
from checked_backend.report.certificate import render_certificate
from checked_backend.report.codec import dumps, encode, json_schema
from checked_backend.report.html import render_html
from checked_backend.report.junit import render_junit
from checked_backend.report.merged import merged_report
from checked_backend.report.model_explorer import encode_graphs, encode_node_data
from checked_backend.report.write import ReadReports, read_reports
from checked_backend.runs.folder import RunFolder


def report(
    path: Annotated[
        Path | None,
        typer.Argument(metavar="FILE_OR_DIR", help="A report file, or a folder of reports, of a sweep or of a fuzz."),
    ] = None,
    html: Html = None,
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="[FILE]", help="Write JSON; without FILE, print it.")
    ] = None,
    junit: Junit = None,
    certificate: Certificate = False,
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
    pages = Pages(html, json_file, junit)
    kind = next((kind for kind in ("sweep", "fuzz") if RunFolder.is_one(path, kind)), "")
    if since is not None and kind != "sweep":
        raise typer.BadParameter("only the folder of a sweep has that", param_hint="--since")
    if kind and model_explorer:
        raise typer.BadParameter("this has no graphs; name a folder of reports", param_hint="--model-explorer")
    if kind and certificate:
        raise typer.BadParameter(f"a {kind} has no certificate; name a folder of reports", param_hint="--certificate")
    if kind:
        return report_sweep(path, since, pages) if kind == "sweep" else report_fuzz(path, pages)
    found = read_reports(path)
    if not found.reports:
        why = "".join(f"\n  {file}: {reason}" for file, reason in found.broken)
        raise CheckedBackendError(f"no reports in {path}{why}")
    if merge:
        found = replace(found, reports=(replace(merged_report(found.reports), path=path),))
    unread = [Verdict.INCONCLUSIVE for _ in found.broken]  # a file that cannot be read may hide a failure
    verdict = Verdict.worst([*(report.verdict for report in found.reports), *unread]) or Verdict.INCONCLUSIVE
    printed = pages.write(
        html=lambda: render_html(found.reports, found.broken),
        as_json=lambda: _json(found, verdict),
        junit=lambda: render_junit(found.reports, found.broken),
    )
    if model_explorer is not None:
        write_file(dumps(encode_graphs(found.reports)), model_explorer)
        data = model_explorer.with_name(f"{model_explorer.stem}_node_data.json")
        write_file(dumps(encode_node_data(found.reports)), data)
    if certificate:
        print_text(render_certificate(found.reports))
    elif not printed:
        print_reports(found.reports, verbose=verbose)
    for file, reason in found.broken:
        complain(f"{file}: {reason}")
    return verdict


def _json(found: ReadReports, verdict: Verdict) -> str:
    """Reports and unreadable files as JSON."""
    return dumps(
        {
            "schema": "checked_backend.reports",
            "version": 1,
            "verdict": verdict.value,
            "reports": [{"path": str(report.path), "report": encode(report)} for report in found.reports],
            "broken": [{"path": str(file), "reason": reason} for file, reason in found.broken],
        }
    )
