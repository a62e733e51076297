"""The folder of a run: each process leaves a mark when it first compiles, and a report when it ends."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from checked_backend.autostart import HOOKED, UNCHECKED
from checked_backend.report import Report
from checked_backend.report.file_names import this_moment
from checked_backend.report.write import read_reports, write_report, write_whole

__all__ = ["WHOLE_CALLS", "Mark", "ProcessReport", "RunFolder"]

WHOLE_CALLS = "whole calls compared with eager"
"""The name in the coverage's counts of calls that are compared as a whole (option ``shadow``)."""

_MARK = ".started"
_SECONDS, _CHECKING = "seconds of the program", "seconds of checks"


@dataclass(frozen=True, slots=True)
class ProcessReport:
    """The report of one process of a run.

    Attributes:
        report: The report.
        seconds: How long the process ran.
        checking: How much of that the checks took.
    """

    report: Report
    seconds: float
    checking: float


class Mark:
    """The mark and the report of one process in the folder.

    Args:
        program: The program's command line, for people.
    """

    def __init__(self, folder: Path, program: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._mark = folder / f"{this_moment()}{_MARK}"
        self._path: Path | None = None
        write_whole(json.dumps({"program": program}) + "\n", self._mark)

    def save(self, found: ProcessReport) -> None:
        """Write the report. It replaces the one that was written before."""
        spent = {_SECONDS: f"{found.seconds:.6g}", _CHECKING: f"{found.checking:.6g}"}
        report = replace(found.report, environment={**found.report.environment, **spent})
        if self._path is None:
            self._path = write_report(report, self._folder)
        else:
            write_whole(report.to_json(), self._path)

    def ended(self) -> None:
        """Note that the report is complete."""
        self._mark.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Reads the folder of a run."""

    path: Path

    def hooked(self) -> bool:
        """Whether any Python of the run has reached the hook that starts the checks."""
        return (self.path / HOOKED).exists()

    def processes(self) -> Iterator[ProcessReport]:
        """The reports of the processes that compiled something."""
        if self.path.is_dir():
            for report in read_reports(self.path).reports:
                yield ProcessReport(report, _number(report, _SECONDS), _number(report, _CHECKING))

    def broken(self) -> list[str]:
        """The report files that cannot be read, and why."""
        if not self.path.is_dir():
            return []
        return [f"{file.name}: {reason}" for file, reason in read_reports(self.path).broken]

    def unfinished(self) -> list[str]:
        """Processes that began to compile and left no complete report."""
        return sorted(path.name.removesuffix(_MARK) for path in self.path.glob(f"*{_MARK}"))

    def unchecked(self) -> list[str]:
        """Which processes could not be checked, and why."""
        return [path.read_text("utf-8").strip() for path in sorted(self.path.glob(f"*{UNCHECKED}"))]

    def tidy(self) -> None:
        """Remove the folder if nothing is in it."""
        with contextlib.suppress(OSError):
            (self.path / HOOKED).unlink(missing_ok=True)
            self.path.rmdir()


def _number(report: Report, name: str) -> float:
    with contextlib.suppress(KeyError, ValueError):
        return float(report.environment[name])
    return 0.0
