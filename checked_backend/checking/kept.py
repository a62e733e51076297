"""What is found of a program as a whole, on disk before it is looked for where that comes from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from checked_backend.findings import Coverage, Finding
from checked_backend.options import CheckOptions
from checked_backend.report import Report
from checked_backend.report.environment import environment
from checked_backend.report.kept import KeptReport

__all__ = ["KeptFindings"]

_NOT_YET = "not yet: this was written while the operator was looked for, and the process has not come back to it"


class KeptFindings:
    """The report of a check that localizes, as a file; regions keep reports of their own.

    Args:
        options: Say where it goes, and whether operators are looked for at all.
    """

    def __init__(self, options: CheckOptions) -> None:
        self._file = KeptReport(options.report_dir)
        self._localizes = options.localize
        self._begun = False

    def begin(self, findings: Sequence[Finding]) -> None:
        """Write what is known so far.

        Args:
            findings: All of them, those of the regions too.
        """
        if not self._localizes or not any(finding.fails and not finding.region for finding in findings):
            return
        self._begun = True
        told = tuple(replace(finding, evidence={**finding.evidence, "localized": _NOT_YET}) for finding in findings)
        self._file.progress(Report(told, Coverage(checked={"program runs": 1}), "check", environment()))

    def complete(self, report: Report) -> Report:
        """Write the finished report over that, if it was begun. Returns it with its path."""
        return self._file.save(report) if self._begun else report
