"""A report that is on disk from the first finding on, and is completed as more becomes known."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from checked_backend.report.report import Report
from checked_backend.report.write import rewrite_report, write_report

__all__ = ["KeptReport"]

log = logging.getLogger(__name__)


class KeptReport:
    """The file of one report.

    If the process ends between two calls of `save`, the file has everything that the first call was given.

    Args:
        folder: Where it goes.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path: Path | None = None
        self._begun: Path | None = None

    def save(self, report: Report) -> Report:
        """Write the report, over what was saved before.

        Ctrl-C, or a handler of SIGTERM that raises, lets the file be written before it goes on.

        Returns:
            The report with its path; where it could not be written, with a note that says so.
        """
        try:
            self._write(report)
        except OSError as error:
            return self._unwritten(report, error)
        except (KeyboardInterrupt, SystemExit):
            self._path = self._path or self._begun  # it may be there already
            self.progress(report)
            raise
        return replace(report, path=self._path)

    def progress(self, report: Report) -> None:
        """Write the report if that can be done; nothing is said if not."""
        try:
            self._write(report)
        except OSError as error:
            log.debug("not written: %s", error)

    def _write(self, report: Report) -> None:
        if self._path is None:
            self._path = write_report(report, self._folder, claimed=self._claimed)
        else:
            rewrite_report(replace(report, path=self._path))

    def _claimed(self, path: Path) -> None:
        self._begun = path

    def _unwritten(self, report: Report, error: OSError) -> Report:
        why = error.strerror or str(error)
        if self._path is None:
            told = (
                f"this report is on no disk: it could not be written to {self._folder}: {why}. Set the option "
                "report_dir (CHECKED_BACKEND_REPORT_DIR) to a folder that can be written to"
            )
        else:
            told = f"the file {self._path} has the findings, but not all that is said here: {why}"
        log.warning("checked_backend: %s", told)
        notes = (told, *report.coverage.notes)
        return replace(report, path=self._path, coverage=replace(report.coverage, notes=notes))
