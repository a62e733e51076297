"""Ranks of a distributed program tell one another of findings, through the store of their process group.

Nobody waits: a rank writes what it found, and reads what others wrote where it passes by. A store that fails costs no
more than the news.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from checked_backend._torch.collectives import default_store, distributed_is_on
from checked_backend.errors import CheckedBackendError
from checked_backend.report.file_names import process_rank
from checked_backend.report.report import Report
from checked_backend.report.write import read_reports

log = logging.getLogger(__name__)

_PREFIX = "checked_backend"
_COUNT = f"{_PREFIX}/count"

_LONGEST = 2**20
"""Bytes of a report that are sent; a longer one is sent as its findings' first lines."""


@dataclass(frozen=True, slots=True)
class Announcement:
    """The news of another rank."""

    rank: int
    host: str
    ends: bool
    report: Report

    def __str__(self) -> str:
        first = next((found for found in self.report.findings if found.fails), None)
        what = "a finding" if first is None else f"{first.detail or first.kind}, {first.subject} in {first.region}"
        where = f"; its report: {self.report.path}" if self.report.path else ""
        return f"rank {self.rank} on {self.host} found: {what}{where}"


class Peers:
    """The other ranks, as far as findings are concerned."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._store: Any = None
        self._next = 1
        self._missing: set[int] = set()

    def announce(self, report: Report, *, ends: bool) -> None:
        """Tell the other ranks of a report."""
        text = report.to_json()
        if len(text) > _LONGEST:
            findings = tuple(
                replace(found, evidence={}, distribution=None, flow=(), kernel=None) for found in report.findings[:8]
            )
            text = replace(report, findings=findings).to_json()
        path = "" if report.path is None else str(report.path.absolute())
        told = {"rank": process_rank() or 0, "host": socket.gethostname(), "ends": ends, "path": path, "report": text}
        with self._lock:
            store = self._current()
            if store is None or len(text) > _LONGEST:
                return
            try:
                store.set(f"{_PREFIX}/{store.add(_COUNT, 1)}", json.dumps(told))
            except Exception as error:  # the finding is told here all the same
                log.debug("other ranks were not told: %s", error)

    def news(self) -> list[Announcement]:
        """The announcements of other ranks since the last call."""
        if not distributed_is_on():
            return []
        found: list[Announcement] = []
        with self._lock:
            store = self._current()
            try:
                for number in [] if store is None else self._unread(store):
                    key = f"{_PREFIX}/{number}"
                    if not store.check([key]):  # it is being written, or its rank died before it was
                        self._missing.add(number)
                        continue
                    self._missing.discard(number)
                    announced = _read(store.get(key))
                    if announced is not None and announced.rank != process_rank():
                        found.append(announced)
            except Exception as error:  # the rank that has the store may be gone
                log.debug("other ranks could not be asked: %s", error)
        return found

    def _unread(self, store: Any) -> list[int]:
        """The numbers of announcements that were not read yet."""
        count = int(store.add(_COUNT, 0))
        numbers = [*sorted(self._missing), *range(self._next, count + 1)]
        self._next = max(self._next, count + 1)
        return numbers

    def _current(self) -> Any:
        store = default_store()
        if store is not self._store:
            self._store, self._next, self._missing = store, 1, set()
        return store


def _read(data: bytes) -> Announcement | None:
    try:
        told = json.loads(data)
        report = Report.from_json(told["report"])
        path = Path(told["path"]) if told["path"] else None
        return Announcement(int(told["rank"]), str(told["host"]), bool(told["ends"]), replace(report, path=path))
    except (CheckedBackendError, ValueError, KeyError, TypeError) as error:
        log.debug("what another rank announced cannot be read: %s", error)
        return None


_OF_RANK = re.compile(r"Z-rank(\d{1,9})-")
"""The rank in the name of a report's file."""


def this_rank() -> str:
    """This rank, for people: ``1 of 2 on HOST``; empty outside of a distributed program."""
    rank = process_rank()
    if rank is None or not distributed_is_on():
        return ""
    return f"{rank} on {socket.gethostname()}"


# A process is one rank.
PEERS = Peers()
"""The other ranks of this process's program."""


class ExitMessage:
    """Says, when this rank ends by an exception, that another one has ended its program with a finding.

    A rank that waits for another one outside of every region, as in DDP's backward pass, sees a broken connection when
    that one ends, and torch's exception does not say why. So the other rank's report is printed below it.
    """

    def __init__(self) -> None:
        self._process = 0
        self._rank: int | None = None
        self._began = time.time()
        self._folders: dict[Path, None] = {}

    def prepare(self, folder: Path) -> None:
        """Look for reports of other ranks when the process ends, in a folder if the group's store is gone by then."""
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
        announced = [(f"{news.rank} on {news.host}", news.report) for news in PEERS.news() if news.ends]
        for who, report in (*announced, *self._written()):
            sys.stderr.write(
                f"\nchecked_backend: rank {who} has ended its program with this finding, which may be why this one "
                f"failed:\n{report}\n"
            )
            return

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


EXIT_MESSAGE = ExitMessage()
