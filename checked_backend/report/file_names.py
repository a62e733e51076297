"""Names of files that no other process, rank or thread takes: readable, with the time, the rank and the process."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

__all__ = ["claimed_path", "process_rank", "this_moment"]


def process_rank() -> int | None:
    """This process's rank in a distributed program; None outside of one.

    ``torch.distributed`` knows it once its group is made, before that ``RANK``, which launchers set.
    """
    distributed: Any = sys.modules.get("torch.distributed")  # not imported for the question
    with suppress(AttributeError, RuntimeError, ValueError):
        if distributed.is_available() and distributed.is_initialized():
            return int(distributed.get_rank())
    rank = os.environ.get("RANK", "")
    return int(rank) if re.fullmatch(r"[0-9]{1,9}", rank) else None


def this_moment(now: datetime | None = None) -> str:
    """The part of file names that no other process uses: ``20260102T030405Z-1234``, or with the rank before the number.

    Args:
        now: The time, if not the present.
    """
    when = (now or datetime.now(timezone.utc)).strftime("%Y%m%dT%H%M%SZ")
    rank = process_rank()
    return "-".join([when, *([] if rank is None else [f"rank{rank}"]), str(os.getpid())])


@contextmanager
def claimed_path(folder: Path, stem: str, suffix: str) -> Iterator[Path]:
    """Hold a name in a folder that nobody else has, while a block writes it: ``stem.py``, else ``stem_1.py``, ...

    A claim that was left by a process that was killed only costs its number.

    Args:
        folder: The folder, which exists.
        stem: The name without its suffix.
        suffix: Such as ``.py``.

    Yields:
        The path. There is no file yet.

    Raises:
        OSError: The folder cannot be written to.
    """
    path, claim = _claimed(folder, stem, suffix)
    try:
        yield path
    finally:
        with suppress(OSError):
            claim.unlink(missing_ok=True)


def _claimed(folder: Path, stem: str, suffix: str) -> tuple[Path, Path]:
    number = 0
    while True:
        path = folder / f"{stem}{f'_{number}' if number else ''}{suffix}"
        claim = folder / f".{path.name}.claim"
        number += 1
        try:
            os.close(os.open(claim, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
        except FileExistsError:
            continue
        # Nobody else can take the name while we hold the claim, so this look cannot go out of date.
        if not os.path.lexists(path):
            return path, claim
        claim.unlink(missing_ok=True)
