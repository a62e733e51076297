"""Names of files that no other process or rank takes: readable, with the time, the rank and the process."""

from __future__ import annotations

import itertools
import os
import re
import sys
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any


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
    """The part of file names that no other process uses: ``20260102T030405Z-rank0-1234``, or without the rank."""
    when = (now or datetime.now(timezone.utc)).strftime("%Y%m%dT%H%M%SZ")
    rank = process_rank()
    return "-".join([when, *([] if rank is None else [f"rank{rank}"]), str(os.getpid())])


def free_path(folder: Path, stem: str, suffix: str) -> Path:
    """A name in a folder that is not taken: ``stem.py``, else ``stem_1.py``, ..."""
    names = (f"{stem}{f'_{number}' if number else ''}{suffix}" for number in itertools.count())
    return next(path for name in names if not os.path.lexists(path := folder / name))
