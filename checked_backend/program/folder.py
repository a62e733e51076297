"""The folder of a run: each process leaves a mark when it first compiles, and a report when it ends."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from checked_backend.autostart import HOOKED, UNCHECKED
from checked_backend.findings import Finding
from checked_backend.report import Report
from checked_backend.report.file_names import this_moment
from checked_backend.report.write import read_reports, write_report, write_whole

WHOLE_CALLS = "whole calls compared with eager"
"""The name in the coverage's counts of calls that are compared as a whole (option ``shadow``)."""

_MARK = ".started"
_SECONDS, _CHECKING = "seconds of the program", "seconds of checks"


class Mark:
    """The mark and the report of one process in the folder."""

    def __init__(self, folder: Path, program: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._mark = folder / f"{this_moment()}{_MARK}"
        self._folder = folder
        self._path: Path | None = None
        write_whole(json.dumps({"program": program}) + "\n", self._mark)

    def save(self, report: Report, seconds: float, checking: float) -> None:
        """Write the report, the seconds that the process ran, and those of the checks, over an earlier one."""
        spent = {_SECONDS: f"{seconds:.6g}", _CHECKING: f"{checking:.6g}"}
        report = replace(report, environment={**report.environment, **spent})
        self._path = write_report(report, self._folder, self._path)

    def ended(self) -> None:
        """Note that the report is complete."""
        self._mark.unlink(missing_ok=True)


def read_processes(folder: Path) -> tuple[list[Report], list[str]]:
    """The reports of the processes that compiled something; and what is missing, in sentences."""
    if not folder.is_dir():
        return [], []
    read = read_reports(folder)
    missing = [f"a report cannot be read: {file.name}: {reason}" for file, reason in read.broken]
    killed = [path.name.removesuffix(_MARK) for path in sorted(folder.glob(f"*{_MARK}"))]
    missing += [
        f"a process that compiled left no complete report ({process}): it was killed, or ended by os._exit or os.exec"
        for process in killed
    ]
    missing += [
        f"a process was not checked, its Python lacks something: {path.read_text('utf-8').strip()}"
        for path in sorted(folder.glob(f"*{UNCHECKED}"))
    ]
    return [_completed(one, folder.parent, killed) for one in read.reports], missing


def _completed(report: Report, beside: Path, killed: Sequence[str]) -> Report:
    """With what the reports of its regions know of a process that was killed while it looked for an operator."""
    number = "" if report.path is None else ["", *report.path.stem.split("-")][-2]
    began = next((one.partition("-")[0] for one in killed if one.rpartition("-")[2] == number), None)
    if began is None:
        return report
    known: dict[tuple[str, str, str], Finding] = {}
    for file in sorted(beside.glob(f"*-{number}-*.json")):
        if file.stem.rsplit("Z-", 1)[0].rpartition("-")[2] + "Z" >= began:  # not of another process of this number
            with contextlib.suppress(OSError):
                known |= {finding.identity: finding for one in read_reports(file).reports for finding in one.findings}
    return replace(report, findings=tuple(known.get(finding.identity, finding) for finding in report.findings))


def tidy(folder: Path) -> None:
    """Remove the folder if nothing is in it."""
    with contextlib.suppress(OSError):
        (folder / HOOKED).unlink(missing_ok=True)
        folder.rmdir()


def seconds_of(report: Report) -> tuple[float, float]:
    """How long a process took for its checks, and in all; 0 if its report does not say."""
    with contextlib.suppress(KeyError, ValueError):
        return float(report.environment[_CHECKING]), float(report.environment[_SECONDS])
    return 0.0, 0.0
