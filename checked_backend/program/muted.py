"""Mute a program while it is run once more for a check, so that nothing is printed twice."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["muted"]


class _Muted:
    """A stream that drops what one thread writes. Other threads write to the stream behind it."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._thread = threading.get_ident()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write, or drop."""
        return len(text) if threading.get_ident() == self._thread else int(self._stream.write(text))

    def writelines(self, lines: Iterable[str]) -> None:
        """Write, or drop."""
        for line in lines:
            self.write(line)


@contextmanager
def muted() -> Iterator[None]:
    """Drop what this thread prints to stdout inside of a block."""
    stream = sys.stdout
    if stream is None:
        yield
        return
    replaced: Any = _Muted(stream)
    sys.stdout = replaced
    try:
        yield
    finally:
        if sys.stdout is replaced:  # else the program has set its own meanwhile
            sys.stdout = stream
