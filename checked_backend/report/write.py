"""Report files: written whole or not at all, and read without trusting them."""

from __future__ import annotations

import itertools
import logging
import os
import re
import unicodedata
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path

from checked_backend.errors import CheckedBackendError
from checked_backend.report.file_names import process_rank, this_moment
from checked_backend.report.report import Report

log = logging.getLogger(__name__)

_files: ContextVar[list[Path] | None] = ContextVar("checked_backend_files_of_a_report", default=None)
_MAX_SLUG = 60
_MAX_BYTES = 32 * 2**20  # a report is kilobytes; a larger file is something else, and all its errors need memory


@dataclass(frozen=True, slots=True)
class ReadReports:
    """The reports of a file or a folder by file name, and the files that are none, with what is wrong with each."""

    reports: tuple[Report, ...]
    broken: tuple[tuple[Path, str], ...]


def write_report(report: Report, directory: Path, over: Path | None = None) -> Path:
    """Write a report as ``<title>-<UTC time>-[rank<rank>-]<process>-<n>.json``, or over an earlier one.

    A reader never sees half a file, and no two writers, in this process or another, get the same name. The title may be
    anything: only ``[a-z0-9._-]`` of it reaches the name. The folder is made if it is not there.

    Raises:
        OSError: The folder cannot be made or written to, or the disk is full. Nothing is left behind.
    """
    data = report.to_json().encode("ascii")
    directory.mkdir(parents=True, exist_ok=True)
    plain = unicodedata.normalize("NFKD", report.title).encode("ascii", "ignore").decode("ascii").lower()
    slug = re.sub(r"[^a-z0-9._]+", "-", plain)[:_MAX_SLUG].strip("-._") or "report"
    return _write(data, directory, f"{slug}-{this_moment(datetime.now(timezone.utc))}", over)


def write_whole(content: str | bytes, target: Path) -> None:
    """Write a file, text in UTF-8, whole or not at all, over what is there.

    Raises:
        OSError: The folder does not exist or cannot be written to, or the disk is full. The old file is kept.
    """
    data = content if isinstance(content, bytes) else content.encode("utf-8", "backslashreplace")
    if target.exists() and not target.is_file():
        target.write_bytes(data)  # a pipe or a device: replacing it would take it away from the system
        return
    _write(data, target.parent, target.name, over=target.resolve())


def read_reports(path: Path) -> ReadReports:
    """Read one report file, or all ``*.json`` files directly in a folder.

    Files that are not reports do not stop the others.

    Raises:
        OSError: ``path`` does not exist, or the folder cannot be listed.
    """
    path.stat()
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    reports: list[Report] = []
    broken: list[tuple[Path, str]] = []
    for file in files:
        if file.name.startswith("."):
            continue
        try:
            reports.append(replace(Report.from_json(_read(file)), path=file))
        except CheckedBackendError as error:
            broken.append((file, str(error)))
        except OSError as error:
            broken.append((file, f"cannot be read: {error.strerror or error}"))
    return ReadReports(tuple(reports), tuple(broken))


def _write(data: bytes, directory: Path, stem: str, over: Path | None = None) -> Path:
    """Write a file under a name that nobody has, or over another.

    Two writers cannot hold the same temporary file. One left by a process that was killed only costs its number.
    """
    numbers = itertools.count()
    while True:
        target = directory / f"{stem}-{next(numbers)}.json"
        temporary = directory / f".{target.name}.tmp"
        try:
            stream = temporary.open("xb")
        except FileExistsError:
            continue
        try:
            with stream:
                # Nobody else can take the name while we hold the temporary file, so this look cannot go out of date.
                if os.path.lexists(target):
                    continue
                stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(temporary, over or target)
            return over or target
        finally:
            with suppress(OSError):  # the error that brought us here is the one to tell of
                temporary.unlink(missing_ok=True)


def _read(file: Path) -> str:
    if not file.is_file():
        raise CheckedBackendError("not a report: not a regular file")
    if file.stat().st_size > _MAX_BYTES:
        raise CheckedBackendError(f"not a report: larger than {_MAX_BYTES // 2**20} MiB")
    try:
        return file.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckedBackendError(f"not a report: not UTF-8 text: {error}") from None


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
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path: Path | None = None

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
        before, files = self._path, _files.get()
        self._path = write_report(report, self._folder, before)
        if before is None and files is not None:
            files.append(self._path)

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
