"""Keep the findings about a whole program on disk before they are localized."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from checked_backend.findings import Coverage, EvidenceKey, Finding
from checked_backend.options import CheckOptions
from checked_backend.report import Report
from checked_backend.report.environment import environment
from checked_backend.report.write import KeptReport

__all__ = ["KeptFindings"]

_NOT_YET = "not yet: this was written while the operator was looked for, and the process has not come back to it"


class KeptFindings:
    """The report of a check that localizes, as a file. Regions keep reports of their own.

    Args:
        options: They name the folder, and whether operators are looked for at all.
    """

    def __init__(self, options: CheckOptions, title: str) -> None:
        self._title = title
        self._file = KeptReport(options.report_dir)
        self._localizes = options.localize
        self._begun = False

    def begin(self, findings: Sequence[Finding]) -> None:
        """Write the findings so far.

        Args:
            findings: All findings, those of the regions included.
        """
        if not self._localizes or not any(finding.fails and not finding.region for finding in findings):
            return
        self._begun = True
        told = tuple(
            replace(finding, searched=True, evidence={**finding.evidence, EvidenceKey.LOCALIZED: _NOT_YET})
            for finding in findings
        )
        self._file.progress(Report(told, Coverage(checked={"program runs": 1}), self._title, environment()))

    def complete(self, report: Report) -> Report:
        """Write the finished report over the first one, if there is one. Return the report with its path."""
        return self._file.save(report) if self._begun else report
