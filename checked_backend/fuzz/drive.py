"""Run a fuzz: keep worker processes busy, and write each result to the corpus as it comes.

Failures are confirmed before more programs are checked, so that a run that is cut short has whole results.
"""

from __future__ import annotations

import time
from collections import Counter
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from typing import Any

from checked_backend.fuzz.corpus import UNSETTLED, Corpus, Entry
from checked_backend.fuzz.report import Progress
from checked_backend.fuzz.results import Group, ProgramResult, documented, may_be, signature_of
from checked_backend.fuzz.tasks import CheckTask, ConfirmTask, Death, FuzzOptions, GenerateTask, Task
from checked_backend.process.job import RunningProcesses
from checked_backend.runs.status import Status

GRACE = 30.0
"""Seconds that processes have to end after the time is over."""

_GENERATED_FEW, _GENERATED_AT_ONCE = 16, 96
_ENOUGH_WAITING = 48
_FIRST_LOOK = 4
_FAILED = (Status.FAIL, Status.CRASH, Status.HANG)


@dataclass(frozen=True, slots=True)
class FuzzEnd:
    """How a run ended."""

    checked: int
    seconds: float
    waiting: int
    left_out: Counter[str] = field(default_factory=Counter)


def run_fuzz(
    asked: FuzzOptions,
    corpus: Corpus,
    *,
    jobs: int = 1,
    seconds: float | None,
    programs: int | None = None,
    progress: Progress | None = None,
) -> FuzzEnd:
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
    return FuzzEnd(run.checked, time.monotonic() - run.begun, len(run.to_confirm), run.left_out)


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
    to_confirm: list[ConfirmTask] = field(default_factory=list)
    to_check: list[CheckTask] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    _to_localize: list[Group] = field(default_factory=list)
    _running: dict[Future[Any], Task] = field(default_factory=dict)
    running: RunningProcesses = field(default_factory=RunningProcesses)

    def loop(self, pool: ThreadPoolExecutor) -> None:
        self.corpus.check_unsettled_again()
        for entry, result in self.corpus.failures():
            self._sort(ConfirmTask.of_entry(entry, result))
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
            task = self.to_confirm.pop(0)
            if not self._known(task):
                return task
        localizing = any(isinstance(task, ConfirmTask) and task.group for task in self._running.values())
        enough = self.programs is not None and self._begun_to_check() >= self.programs
        if self._to_localize and (not localizing or enough):
            return ConfirmTask.of_group(self._to_localize.pop(0))
        return None if enough else self._next_check()

    def _begun_to_check(self) -> int:
        return self.checked + sum(len(task.entries) for task in self._running.values() if isinstance(task, CheckTask))

    def _to_generate(self, waiting: int) -> int:
        """How many programs to generate now: few at first, so that results come soon, and few if few are asked for."""
        if waiting >= _ENOUGH_WAITING or (waiting and not self.checked):
            return 0
        if self.programs is None:
            return _GENERATED_AT_ONCE if self.checked else _GENERATED_FEW
        missing = self.programs - self._begun_to_check() - waiting
        return min(max(missing, _GENERATED_FEW), _GENERATED_AT_ONCE) if missing > 0 else 0

    def _next_check(self) -> Task | None:
        if self.to_check:
            return self.to_check.pop(0)
        busy = {entry.name for t in self._running.values() if isinstance(t, CheckTask) for entry in t.entries}
        waiting = [entry for entry in self.corpus.waiting() if entry.name not in busy]
        generating = any(isinstance(task, GenerateTask) for task in self._running.values())
        count = self._to_generate(len(waiting))
        if count and not generating:
            return GenerateTask(self.corpus.next_number(self.asked.seed), count)
        if not waiting:
            return None
        counts = Counter(entry.alike for entry in waiting)
        full = (entry.alike for entry in waiting if counts[entry.alike] >= self.asked.batch)
        alike = next(full, waiting[0].alike)  # a compile that few share costs as much as one that many do
        size = self.asked.chunk
        if self.programs is not None:
            size = min(size, self.programs - self._begun_to_check())
        chosen = [entry for entry in waiting if entry.alike == alike][:size]
        dynamic = alike.endswith("1")
        return CheckTask(chosen[: max(1, size // 4)] if dynamic else chosen, 1 if dynamic else self.asked.batch)

    # what came out

    def _take(self, task: Task, result: Any) -> None:
        if isinstance(task, GenerateTask):
            made, left_out = result
            self.left_out += left_out
            self.corpus.add_programs(made)
        elif isinstance(task, CheckTask):
            self._take_checked(task, *result)
        else:
            self._take_confirmed(task, result)

    def _take_checked(self, task: CheckTask, found: dict[int, Any], again: list[CheckTask]) -> None:
        self.to_check.extend(again)
        # until it is checked alone, and also if that never comes
        unsettled = {one.entries[0].name: _beside(one.death) for one in again if one.death is not None}
        self.corpus.add_results({**unsettled, **{task.entries[place].name: one for place, one in found.items()}})
        self.checked += len(found)
        for place, examined in found.items():
            if examined.status in _FAILED and examined.kind:
                self._sort(ConfirmTask.of_entry(task.entries[place], examined))
        if task.death is not None and found:
            self._settle(task.entries[0], task.death, found[0])

    def _settle(self, entry: Entry, death: Death, alone: ProgramResult) -> None:
        """If none of the programs that ended a process together does so alone, let all of them be confirmed as one."""
        death.left -= 1
        death.explained = death.explained or alone.status in _FAILED
        if not death.left and not death.explained and death.result.kind:
            self.corpus.add_results({entry.name: death.result})
            self._sort(ConfirmTask.of_entry(entry, death.result))

    def _sort(self, task: ConfirmTask) -> None:
        """Count a failure of a known group or a documented difference; let others wait to be confirmed."""
        if task.entry is not None and documented(task.result) is not None:
            self.corpus.put(signature_of(task.program, task.result), task.entry)
        elif not self._known(task):
            self.to_confirm.append(task)
            self.to_confirm.sort(key=lambda one: one.program.size)

    def _known(self, task: ConfirmTask) -> bool:
        if task.entry is None:
            return False
        program = task.program
        known = (g for g in self.corpus.groups() if g.confirmed and not _is_looked_into(g))
        group = next((g for g in known if may_be(g, program, task.result)), None)
        if group is None:
            return False
        self.corpus.assign(task.entry, group.signature)
        return True

    def _take_confirmed(self, task: ConfirmTask, group: Group | None) -> None:
        if group is None:
            if task.entry is not None:
                self.corpus.assign(task.entry, "")
            elif task.group is not None:
                self.corpus.put(replace(task.group, localized=True), was=task.group.signature)  # it did not fail now
            return
        known = {one.signature for one in self.corpus.groups()}
        kept = self.corpus.put(group, task.entry, "" if task.group is None else task.group.signature)
        if kept.signature not in known and task.group is None:
            if self.asked.localize and _has_an_operator_to_find(kept):
                self._to_localize.append(kept)
            if self.progress is not None:
                self.progress.found(kept)


def _beside(death: Death) -> ProgramResult:
    """The result of a program whose process died while it was checked together with others."""
    words = f"{UNSETTLED}: {death.result.message}"
    return ProgramResult(Status.INCONCLUSIVE, words, death.result.seconds, alone=False)


def _has_an_operator_to_find(group: Group) -> bool:
    """Whether looking for the operator may find it. The search runs in the process that a death would end."""
    return group.confirmed and not (group.localized or group.is_death or group.difference is not None)


def _is_looked_into(group: Group) -> bool:
    """Whether the next failure that may be a known bug is confirmed all the same, as another may hide behind it.

    It is after 4, 8, 16, ... of them, so that a bug that is met often takes little of the time.
    """
    return group.met >= _FIRST_LOOK and group.met & (group.met - 1) == 0
