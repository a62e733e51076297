"""An SQLite file of one application: opened, checked, and locked against others that write to it.

The file is not trusted, because a stranger may have written it: only tables are read.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

from checked_backend.errors import CheckedBackendError

__all__ = ["FUZZ", "Format", "SqliteFile", "is_database"]

FUZZ = 0x4342465A
"""The id of a database of ``fuzz`` in its header: "CBFZ"."""

_MAGIC = b"SQLite format 3\0"
_File = TypeVar("_File", bound="SqliteFile")
_HEADER, _ID = 100, slice(68, 72)  # https://www.sqlite.org/fileformat.html


@dataclass(frozen=True, slots=True)
class Format:
    """The format of an application's SQLite file.

    Attributes:
        application: Its id in the file's header.
        version: The version that is read and written.
        schema: The SQL that makes its tables.
        tables: Their names.
        of: The things that it is a database of: ``sweeps``.
        writer: The verb that writes to it: ``sweep``.
        error: The exception for a file that cannot be used.
    """

    application: int
    version: int
    schema: str
    tables: frozenset[str]
    of: str
    writer: str
    error: type[CheckedBackendError]


def is_database(path: Path, application: int | None = None) -> bool:
    """Whether a file is an SQLite database.

    Args:
        application: The id that it must have in its header; None for any.
    """
    try:
        with path.open("rb") as stream:
            header = stream.read(_HEADER)
    except OSError:
        return False
    if not header.startswith(_MAGIC):
        return False
    return application is None or header[_ID] == application.to_bytes(4, "big")


class SqliteFile:
    """A file of an application.

    Args:
        form: The format that it must have.
        write: Create the file if it is missing, and lock it against others that write.

    Raises:
        CheckedBackendError: As in ``form.error``: the file is something else, or another process has locked it.
    """

    def __init__(self, path: Path, form: Format, *, write: bool) -> None:
        self.path = path
        self._form = form
        self._lock: IO[bytes] | None = None
        if path.is_dir() or (path.exists() and path.stat().st_size and not is_database(path)):
            raise form.error(f"{path}: not a database of {form.of}")
        if not write and not path.exists():
            raise form.error(f"{path}: no such database")
        if write:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = _held(path, form)
        with ExitStack() as on_error:
            if self._lock is not None:
                on_error.callback(self._lock.close)
            try:
                self._connection = _connected(path, write)
                on_error.callback(self._connection.close)
                self._check(fresh=write)
            except sqlite3.Error as error:
                raise form.error(f"{path}: not a database of {form.of}: {error}") from error
            on_error.pop_all()

    def _check(self, *, fresh: bool) -> None:
        form = self._form
        rows = self._connection.execute("SELECT type, name, sql FROM sqlite_master").fetchall()
        if not rows and fresh:
            made = f"PRAGMA application_id={form.application}; PRAGMA user_version={form.version}; {form.schema}"
            with self._connection:
                self._connection.executescript(f"BEGIN; {made} COMMIT;")
            return
        (application,) = self._connection.execute("PRAGMA application_id").fetchone()
        (version,) = self._connection.execute("PRAGMA user_version").fetchone()
        strange = sorted(str(name) for kind, name, _ in rows if kind not in ("table", "index"))
        if application != form.application or strange:
            raise form.error(f"{self.path}: not a database of {form.of}")
        if version != form.version:
            raise form.error(f"{self.path}: of version {version}; this checked_backend reads version {form.version}")
        tables = {name: sql for kind, name, sql in rows if kind == "table" and name in form.tables}
        if tables != _tables_of(form):  # a generated column may be of any size, a constraint refuse each row
            raise form.error(f"{self.path}: not a database of {form.of}: its tables are made otherwise")

    def close(self) -> None:
        """Close the file and release its lock."""
        self._connection.close()
        if self._lock is not None:
            self._lock.close()

    def __enter__(self: _File) -> _File:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """A transaction.

        Raises:
            CheckedBackendError: As in ``form.error``: it cannot be written; the disk is full, for example.
        """
        try:
            with self._connection:
                yield
        except sqlite3.Error as error:
            raise self._form.error(f"{self.path}: cannot be written: {error}. What is in it stays.") from error

    def _query(self, text: str, values: tuple[object, ...] = ()) -> list[Any]:
        try:
            return self._connection.execute(text, values).fetchall()
        except sqlite3.Error as error:
            raise self._form.error(f"{self.path}: cannot be read: {error}") from error


def _tables_of(form: Format) -> dict[str, str]:
    """The SQL of a format's tables, as a file keeps it."""
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.executescript(form.schema)
        found = connection.execute("SELECT name, sql FROM sqlite_master WHERE type = 'table'").fetchall()
    return dict(found)


def _connected(path: Path, write: bool) -> sqlite3.Connection:
    mode = "rwc" if write else "ro"
    connection = sqlite3.connect(f"{path.resolve().as_uri()}?mode={mode}", uri=True, check_same_thread=False)
    connection.execute("PRAGMA trusted_schema = OFF")
    return connection


def _held(path: Path, form: Format) -> IO[bytes] | None:
    try:
        import fcntl  # noqa: PLC0415  Windows lacks it
    except ImportError:
        return None
    lock = path.with_name(f"{path.name}.lock").open("a+b")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.seek(0)
        holder = lock.read(20).decode("ascii", "replace").strip()
        lock.close()
        why = f"another {form.writer} writes to it (process {holder}); wait for it, or give another --db"
        raise form.error(f"{path}: {why}") from error
    lock.truncate(0)
    lock.write(f"{os.getpid()}\n".encode())
    lock.flush()
    return lock
