"""A report that is on disk from the first finding on, and is completed as more becomes known."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path

from checked_backend.report.file_names import process_rank
from checked_backend.report.report import Report
from checked_backend.report.write import rewrite_report, write_report

__all__ = ["KeptReport", "files_of_one_report", "keep_alone"]

log = logging.getLogger(__name__)

_files: ContextVar[list[Path] | None] = ContextVar("checked_backend_files_of_a_report", default=None)


@contextmanager
def files_of_one_report() -> Iterator[list[Path]]:
    """Gather the files that a block writes: reports of regions, of which one report of a program is made."""
    files: list[Path] = []
    token = _files.set(files)
    try:
        yield files
    finally:
        _files.reset(token)


def keep_alone(report: Report, files: Sequence[Path]) -> None:
    """Delete the files that a report has made needless: who reads the folder would be told the same finding twice.

    A distributed run keeps them, for other ranks may be reading.
    """
    if report.path is None or process_rank() is not None:
        return
    for file in files:
        if file != report.path:
            with suppress(OSError):
                file.unlink(missing_ok=True)


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
            files = _files.get()
            if files is not None:
                files.append(self._path)
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
