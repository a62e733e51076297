"""Verdicts on disk, so that a second run continues where the first one stopped."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
from pathlib import Path

import torch

from checked_backend.options import CheckOptions

__all__ = ["Journal", "Places"]


class Journal:
    """The verdicts on programs that were tried before, by fingerprint of the program.

    A line is a digest and ``1`` or ``0``. The digest also covers the compiler, its options, the version of torch and
    the wanted finding, so that no verdict of another problem is used. A file that is no such journal has no lines that
    fit.

    Args:
        path: The file; None to remember in memory alone.
        options: They name the compiler.
        wanted: The wanted finding, in words.
    """

    def __init__(self, path: Path | None, options: CheckOptions, wanted: str) -> None:
        self._path = path
        self._salt = f"{torch.__version__} {torch.version.git_version} {_compiler(options)} {wanted} "
        self._known: dict[str, bool] = {}
        if path is not None and path.is_file():
            for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
                digest, _, verdict = line.partition(" ")
                if verdict in ("0", "1"):
                    self._known[digest] = verdict == "1"

    def verdict(self, program: str) -> bool | None:
        """Whether a program went wrong when it was tried; None if it was not tried."""
        return self._known.get(self._digest(program))

    def note(self, program: str, wrong: bool) -> None:
        """Remember a verdict. A journal that cannot be written remembers in memory."""
        digest = self._digest(program)
        self._known[digest] = wrong
        if self._path is None:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as stream:
                stream.write(f"{digest} {int(wrong)}\n")
        except OSError:
            self._path = None

    def forget(self) -> None:
        """Drop everything, because the journal was found to be out of date."""
        self._known.clear()
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def _digest(self, program: str) -> str:
        return hashlib.sha256((self._salt + program).encode()).hexdigest()


class Places:
    """Remembers where a region was found to be wrong, in the same file.

    Args:
        path: The file; None to remember nothing.
        options: They name the compiler.
        about: The region, and what is wrong with it, in words.
    """

    def __init__(self, path: Path | None, options: CheckOptions, about: str) -> None:
        self._path = path
        salt = f"{torch.__version__} {torch.version.git_version} {_compiler(options)} {about}"
        self._digest = hashlib.sha256(salt.encode()).hexdigest()

    def known(self) -> tuple[str, str] | None:
        """The kind of the graph and the name of the node; None if they are not known."""
        if self._path is None or not self._path.is_file():
            return None
        found = None
        for line in self._path.read_text(encoding="utf-8", errors="replace").splitlines():
            match line.split(" "):
                case ["place", self._digest, kind, node]:
                    found = kind, node
        return found

    def note(self, kind: str, node: str) -> None:
        """Remember the kind of a graph and the name of a node, if the file can be written."""
        if self._path is None or self.known() == (kind, node):
            return
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as stream:
                stream.write(f"place {self._digest} {kind} {node}\n")


def _compiler(options: CheckOptions) -> str:
    settings = sorted((key, repr(value)) for key, value in options.compiler_options.items())
    if isinstance(options.compiler, str):
        return f"{options.compiler} {settings}"
    function = options.compiler
    try:
        source = inspect.getsource(function)
    except (OSError, TypeError):  # not a function, or written at a prompt
        source = ""
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{getattr(function, '__module__', '')}.{name} {hashlib.sha256(source.encode()).hexdigest()} {settings}"
