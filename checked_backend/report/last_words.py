"""What a rank says when it ends by an exception, while another one has ended its program with a finding.

A rank that waits for another one outside of every region, as in DDP's backward pass, sees a broken connection when that
one ends. Torch's exception does not say why. So when the process ends, the other rank's report is printed below it.
"""

from __future__ import annotations

import atexit
import logging
import os
import re
import sys
import time
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path

from checked_backend._torch.collectives import distributed_is_on
from checked_backend.errors import CheckedBackendError
from checked_backend.report.file_names import process_rank
from checked_backend.report.peers import peers_of_run
from checked_backend.report.report import Report
from checked_backend.report.write import read_reports

__all__ = ["LastWords", "last_words_of_run"]

log = logging.getLogger(__name__)

_OF_RANK = re.compile(r"Z-rank(\d{1,9})-")
"""The rank in the name of a report's file."""


class LastWords:
    """Tells why this rank may have failed."""

    def __init__(self) -> None:
        self._process = 0
        self._rank: int | None = None
        self._began = time.time()
        self._folders: dict[Path, None] = {}

    def prepare(self, folder: Path) -> None:
        """Look for reports of other ranks when the process ends. Does nothing outside of a distributed program.

        Args:
            folder: Where they are, if the store of the process group is gone by then.
        """
        if not distributed_is_on():
            return
        if not self._process:
            self._process, self._rank = os.getpid(), process_rank()
            atexit.register(self.say)
        self._folders[folder.absolute()] = None

    def say(self) -> None:
        """Print the report of a rank that has ended its program, if an exception has ended this one."""
        error = getattr(sys, "last_value", None)  # set by Python for the exception that ends a program
        failed = isinstance(error, Exception) and not isinstance(error, CheckedBackendError)
        if not failed or os.getpid() != self._process or sys.stderr is None:
            return
        for who, report in (*self._announced(), *self._written()):
            sys.stderr.write(
                f"\nchecked_backend: rank {who} has ended its program with this finding, which may be why this one "
                f"failed:\n{report}\n"
            )
            return

    def _announced(self) -> Iterator[tuple[str, Report]]:
        for news in peers_of_run().news():
            if news.ends:
                yield f"{news.rank} on {news.host}", news.report

    def _written(self) -> Iterator[tuple[str, Report]]:
        """Reports with failures that other ranks wrote since: the rank that ended may have held the group's store."""
        for path in (path for folder in self._folders for path in sorted(folder.glob("*.json"))):
            rank = _OF_RANK.search(path.name)
            try:
                if rank is None or int(rank[1]) == self._rank or path.stat().st_mtime < self._began:
                    continue
                reports = read_reports(path).reports
            except OSError as problem:
                log.debug("%s cannot be read: %s", path, problem)
                continue
            yield from ((rank[1], report) for report in reports if any(finding.fails for finding in report.findings))


# A process ends once.
_words: ContextVar[LastWords] = ContextVar("checked_backend_last_words", default=LastWords())  # noqa: B039


def last_words_of_run() -> LastWords:
    """What this process says at its end."""
    return _words.get()
