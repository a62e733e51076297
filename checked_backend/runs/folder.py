"""A folder of results: one JSON file for each attempt at a case, named by the case's key and by its content.

A file is written whole or not at all and never changes, so a run that was killed at any moment goes on where it ended,
and copying the files of one folder into another merges them. A stranger may have written them: names, sizes and kinds
of files are checked here, what is in them by whoever reads them.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

from pydantic import TypeAdapter

from checked_backend.errors import SuiteError
from checked_backend.runs.case import decode

if TYPE_CHECKING:
    from typing_extensions import Self

_Read = TypeVar("_Read")
_Plan = TypeVar("_Plan")
_MAX_BYTES = 64 * 2**20
_RESULT = re.compile(r"[a-z0-9._-]{1,60}-[0-9a-f]{16}\.[0-9a-f]{12}\.json")


def case_name(title: str, key: str) -> str:
    """The name of a case's files: readable, and another one for another key.

    Args:
        title: Any text. Only ``[a-z0-9._-]`` of it reaches the name.
    """
    slug = re.sub(r"[^a-z0-9._-]+", "-", title.lower())[:60].strip("-._") or "case"
    return f"{slug}-{_digest(key.encode('utf-8', 'backslashreplace'), 16)}"


class RunFolder:
    """A folder of results.

    Args:
        kind: What made it. The file ``KIND.json`` in it says what the run is of.
        write: Make the folder if it is missing, and lock it against others that write.

    Raises:
        SuiteError: The folder has something else in it, another process has locked it, or (as all methods do) a file
            cannot be read or written.
    """

    def __init__(self, path: Path, kind: str, *, write: bool = False) -> None:
        self.path = path
        self._kind = kind
        self._lock: int | None = None
        if not self.is_one(path, kind) and not (write and _is_empty(path)):
            raise SuiteError(f"{path}: not the folder of a {kind}: there is no {kind}.json in it")
        if write:
            with _telling(path, "made"):
                path.mkdir(parents=True, exist_ok=True)
            self._lock = self._locked()

    @staticmethod
    def is_one(path: Path, kind: str) -> bool:
        """Whether a folder is one of that kind."""
        return (path / f"{kind}.json").is_file()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._lock is not None:
            os.close(self._lock)

    def read_plan(self) -> bytes:
        """What the run is of; empty if it was not begun."""
        return self.read(str(self.path / f"{self._kind}.json")) if self.is_one(self.path, self._kind) else b""

    def write_plan(self, text: str) -> None:
        """Say what the run is of, over what was said before."""
        self._write(f"{self._kind}.json", text.encode())

    def results(self) -> Iterator[str]:
        """The files of all results, in the order of their names."""
        return (os.path.join(self.path, name) for name in sorted(os.listdir(self.path)) if _RESULT.fullmatch(name))

    def read(self, path: str) -> bytes:
        """The content of a file. Links, pipes and what is too large are refused."""
        with _telling(path, "read"):
            found = os.lstat(path)  # a link could lead out of the folder, and a pipe would have us wait
            if not stat.S_ISREG(found.st_mode):
                raise SuiteError(f"{path}: not a regular file")
            if found.st_size > _MAX_BYTES:
                raise SuiteError(f"{path}: larger than {_MAX_BYTES // 2**20} MiB")
            with open(path, "rb") as file:
                return file.read()

    def read_all(self, adapter: TypeAdapter[_Read], *, set_aside: bool) -> tuple[list[_Read], list[str]]:
        """The results that can be read, and why the other files are none.

        Args:
            set_aside: Keep those under another name, so that their cases can run again.
        """
        found, damaged = [], []
        for file in self.results():
            try:
                found.append(decode(adapter, self.read(file), file))
            except SuiteError as error:
                damaged.append(str(error))
                if set_aside:
                    with suppress(OSError):
                        os.rename(file, f"{file}.damaged")
        return found, damaged

    def add(self, name: str, text: str) -> None:
        """Keep the result of an attempt at a case, whose name `case_name` makes. The results of other attempts stay."""
        data = text.encode()
        self._write(f"{name}.{_digest(data, 12)}.json", data)

    def merge(self, other: RunFolder) -> int:
        """Copy the results of another folder that are not here yet. Returns how many were new."""
        new = [path for path in other.results() if not (self.path / os.path.basename(path)).exists()]
        for path in new:
            self._write(os.path.basename(path), other.read(path))
        return len(new)

    def _write(self, name: str, data: bytes) -> None:
        temporary = self.path / f".{os.getpid()}.tmp"
        with _telling(self.path, "written to"):
            temporary.unlink(missing_ok=True)  # a link there would lead out of the folder
            with temporary.open("xb") as stream:
                stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(temporary, self.path / name)

    def _locked(self) -> int | None:
        try:
            import fcntl  # noqa: PLC0415  Windows lacks it
        except ImportError:
            return None
        lock = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise SuiteError(
                f"{self.path}: another {self._kind} writes to it; wait for it, or give another --out"
            ) from None
        except OSError:  # some file systems of networks lock no folders
            os.close(lock)
            return None
        return lock


class StoredRun(Generic[_Plan, _Read]):
    """A run in its folder.

    Attributes:
        damaged: Files that are no records, and why. They count as nothing, and a run that goes on sets them aside.

    Raises:
        SuiteError: As `RunFolder`.
    """

    def __init__(
        self, path: Path, kind: str, plan: TypeAdapter[_Plan], record: TypeAdapter[_Read], *, write: bool = False
    ) -> None:
        self.path = path
        self._folder = RunFolder(path, kind, write=write)
        with ExitStack() as on_error:
            on_error.push(self._folder)
            text = self._folder.read_plan()
            self._stored = decode(plan, text, str(path / f"{kind}.json")) if text else None
            self._records, self.damaged = self._folder.read_all(record, set_aside=write)
            on_error.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._folder.__exit__()


def _digest(data: bytes, length: int) -> str:
    return hashlib.sha256(data).hexdigest()[:length]


def _is_empty(path: Path) -> bool:
    """Whether there is nothing but what a process left that was killed."""
    return not path.exists() or (path.is_dir() and all(name.startswith(".") for name in os.listdir(path)))


@contextmanager
def _telling(path: str | Path, what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise SuiteError(f"{path}: cannot be {what}: {error.strerror or error}") from error
