"""Run a fuzz: keep worker processes busy, and write each result to the corpus as it comes.

Failures are confirmed before more programs are checked, so that a run that is cut short has whole results.
"""

from __future__ import annotations

import time
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from checked_backend.errors import FuzzError
from checked_backend.fuzz.corpus import Corpus, Entry, left_out_words
from checked_backend.fuzz.report import Progress
from checked_backend.fuzz.results import Group, documented, may_be, signature_of
from checked_backend.fuzz.tasks import CheckTask, ConfirmTask, Task
from checked_backend.fuzz.worker import FuzzOptions
from checked_backend.process.job import RunningProcesses

GRACE = 30.0
"""Seconds that processes have to end after the time is over."""

_FIRST_LOOK = 4
_GIVEN_UP = 16
"""How many numbers may give no program before any has given one."""


def run_fuzz(
    asked: FuzzOptions,
    corpus: Corpus,
    *,
    jobs: int = 1,
    seconds: float | None,
    programs: int | None = None,
    progress: Progress | None = None,
) -> None:
    """Generate, check, confirm and localize until the time is over or so many programs were checked.

    Raises:
        FuzzError: No programs could be generated.
        OSError: The system gives no process.
    """
    run = _Run(asked, corpus, jobs, seconds, programs, progress)
    with ThreadPoolExecutor(jobs) as pool:
        try:
            run.loop(pool)
        finally:
            run.stop()


@dataclass(slots=True)
class _Run:
    asked: FuzzOptions
    corpus: Corpus
    jobs: int
    seconds: float | None
    programs: int | None
    progress: Progress | None
    begun: float = field(default_factory=time.monotonic)
    checked: int = 0
    to_confirm: list[Entry] = field(default_factory=list)
    to_check: list[CheckTask] = field(default_factory=list)
    _to_localize: list[Group] = field(default_factory=list)
    _running: dict[Future[Any], Task] = field(default_factory=dict)
    running: RunningProcesses = field(default_factory=RunningProcesses)

    def loop(self, pool: ThreadPoolExecutor) -> None:
        for entry in self.corpus.failures():
            self._sort(entry)
        if self.asked.localize:
            self._to_localize = [group for group in self.corpus.groups() if _has_an_operator_to_find(group)]
        while True:
            while len(self._running) < self.jobs and (task := self._next()) is not None:
                self._running[pool.submit(task.run, self.asked, self.running)] = task
            if not self._running or self._over(GRACE):
                return
            done, _ = wait(self._running, timeout=1.0, return_when=FIRST_COMPLETED)
            for future in done:
                self._take(self._running.pop(future), future.result())
            if self.progress is not None:
                self.progress.tell()

    def stop(self) -> None:
        """End the processes that still run, and keep what they have answered."""
        self.running.stop()
        for future in wait(self._running, timeout=10).done:
            task = self._running.pop(future)
            if isinstance(task, CheckTask) and not future.exception():
                self._take(task, future.result())

    # what to do next

    def _over(self, grace: float = 0.0) -> bool:
        return self.seconds is not None and time.monotonic() - self.begun > self.seconds + grace

    def _next(self) -> Task | None:
        if self._over():
            return None
        while self.to_confirm:
            entry = self.to_confirm.pop(0)
            if not self._known(entry):
                return ConfirmTask(entry)
        localizing = any(
            isinstance(task, ConfirmTask) and isinstance(task.of, Group) for task in self._running.values()
        )
        enough = self.programs is not None and self._begun_to_check() >= self.programs
        if self._to_localize and (not localizing or enough):
            return ConfirmTask(self._to_localize.pop(0))
        return None if enough else self._next_check()

    def _next_check(self) -> Task | None:
        if self.to_check:
            return self.to_check.pop(0)
        numbers = self.corpus.missing(self.asked.seed, self._busy)
        count = self.asked.chunk
        if self.programs is not None:
            count = min(count, self.programs - self._begun_to_check())
        return CheckTask(list(islice(numbers, count)), self.asked.batch)

    @property
    def _busy(self) -> set[int]:
        """The numbers of the programs that are being checked."""
        return {number for task in self._running.values() if isinstance(task, CheckTask) for number in task.numbers}

    def _begun_to_check(self) -> int:
        return self.checked + len(self._busy)

    # what came out

    def _take(self, task: Task, result: Any) -> None:
        if isinstance(task, ConfirmTask):
            self._take_confirmed(task.of, result)
            return
        found, one_by_one = result
        self.to_check += [one_by_one] * (one_by_one is not None)
        self.corpus.add(found)
        self.checked += sum(bool(entry.text) for entry in found)
        for entry in found:
            if entry.failed:
                self._sort(entry)
        left_out = self.corpus.left_out()
        if not self.corpus.totals().checked and left_out.total() >= _GIVEN_UP:
            raise FuzzError(f"no programs were generated: {left_out_words(left_out)}")

    def _sort(self, entry: Entry) -> None:
        """Count a failure of a known group or a documented difference; let others wait to be confirmed."""
        if documented(entry.result) is not None:
            self.corpus.put(signature_of(entry.program, entry.result), entry)
        elif not self._known(entry):
            self.to_confirm.append(entry)
            self.to_confirm.sort(key=lambda one: one.program.size)

    def _known(self, entry: Entry) -> bool:
        program = entry.program
        known = (g for g in self.corpus.groups() if g.confirmed and not _is_looked_into(g))
        group = next((g for g in known if may_be(g, program, entry.result)), None)
        if group is None:
            return False
        self.corpus.assign(entry, group.signature)
        return True

    def _take_confirmed(self, of: Entry | Group, group: Group | None) -> None:
        if isinstance(of, Group):  # if it did not fail now, it is as it was
            self.corpus.put(group or replace(of, localized=True), was=of.signature)
        elif group is None:
            self.corpus.assign(of, "")
        else:
            known = {one.signature for one in self.corpus.groups()}
            kept = self.corpus.put(group, of)
            if kept.signature in known:
                return
            if self.asked.localize and _has_an_operator_to_find(kept):
                self._to_localize.append(kept)
            if self.progress is not None:
                self.progress.found(kept)


def _has_an_operator_to_find(group: Group) -> bool:
    """Whether looking for the operator may find it. The search runs in the process that a death would end."""
    return group.confirmed and not (group.localized or group.is_death or group.difference is not None)


def _is_looked_into(group: Group) -> bool:
    """Whether the next failure that may be a known bug is confirmed all the same, as another may hide behind it.

    It is after 4, 8, 16, ... of them, so that a bug that is met often takes little of the time.
    """
    return group.met >= _FIRST_LOOK and group.met & (group.met - 1) == 0
