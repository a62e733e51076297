"""An empty cache for a compiler whose own cache may be broken."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from checked_backend._torch.caches import fresh_compile_caches

__all__ = ["FreshCache"]


class FreshCache:
    """An empty folder for a compiler's files. It is removed when nobody holds this object any more.

    Raises:
        OSError: No folder can be made.
    """

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="checked_backend_cache_"))
        weakref.finalize(self, _remove, self._folder, os.getpid())

    @contextmanager
    def used(self) -> Iterator[None]:
        """Compile with this cache, and with nothing that was remembered before."""
        with fresh_compile_caches(self._folder):
            yield

    def kept_by(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """A compiled function that keeps the folder, from which it may load more files."""

        def run(*args: Any) -> Any:
            return compiled(*args)

        run.checked_backend_cache = self  # type: ignore[attr-defined]
        return run


def _remove(folder: Path, owner: int) -> None:
    if os.getpid() == owner:  # a forked process that ends does not own it
        shutil.rmtree(folder, ignore_errors=True)
