"""Run a fuzz: keep worker processes busy, and write each result to the corpus as it comes.

A task is a question to a worker process, and the meaning of its answer, also if the worker died. Failures are confirmed
before more programs are checked, so that a run that is cut short has whole results.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from typing import Any

from checked_backend.errors import FuzzError
from checked_backend.fuzz.corpus import Corpus, Entry, Record
from checked_backend.fuzz.program import decode_program, encode_program, merge
from checked_backend.fuzz.report import Progress
from checked_backend.fuzz.results import DEATHS, Group, ProgramResult, documented, may_be, signature_of
from checked_backend.fuzz.worker import CONFIRMING, GENERATING, FuzzOptions
from checked_backend.process.job import IMPORTING, Job, JobEnd, RunningProcesses, run
from checked_backend.runs.case import Status

GRACE = 30.0
"""Seconds that processes have to end after the time is over."""

_LOCALIZE_SECONDS = 400.0
_TIMES_OF_DEATH = 5
"""How often a program that hangs may take all of its time while it is confirmed."""

_FIRST_LOOK = 4
_GIVEN_UP = 16
"""How many numbers may give no program before any has given one."""


@dataclass(frozen=True, slots=True)
class CheckTask:
    """Make the programs of these numbers, and check them in batches."""

    numbers: Sequence[int]
    batch: int

    def run(self, asked: FuzzOptions, running: RunningProcesses) -> tuple[list[Entry], CheckTask | None]:
        """What came out, and what to check one by one because a process died at all of it.

        What had no time, or was to come after a death, is missing. A FuzzError is raised if the process ended before it
        made or checked a program.
        """
        question = {"numbers": list(self.numbers), "batch": self.batch}
        end = _run("checked_backend.fuzz.worker:check", question, math.inf, asked, running)
        programs = Record.from_json(end.answer).programs if end.answer else []
        at = [entry for entry in programs if entry.result.status is Status.LOST]
        found = [entry for entry in programs if entry not in at]
        if running.stopped or end.stage == "done":
            return found, None
        if not at:
            stage, _, number = end.stage.rpartition(" ")
            if stage != GENERATING:
                raise _not_begun(end, asked)
            skipped = ProgramResult(Status.SKIPPED, f"making it {end.words}")
            return [*found, Entry(asked.seed, int(number), "", skipped)], None
        died = _died(end)
        if len(at) == 1:
            return [*found, replace(at[0], result=died)], None
        if died.kind:  # the first one stands for all as one, so that the death is confirmed whoever is at fault
            together = encode_program(merge([decode_program(entry.text) for entry in at]))
            found.append(replace(at.pop(0), result=replace(died, program=together)))
        return found, CheckTask([entry.number for entry in at], 1)


def _not_begun(answer: JobEnd, asked: FuzzOptions) -> FuzzError:
    """The error of a process that ended before it compiled anything: that says nothing of a program."""
    if answer.stage == IMPORTING and answer.kind == "memory":
        return FuzzError(
            f"torch cannot be imported within {asked.place.memory} bytes of memory; --memory may give more"
        )
    return FuzzError(f"a process {answer.words} while {answer.stage}, before it compiled:\n{answer.log}")


def _died(answer: JobEnd) -> ProgramResult:
    """The result of a program whose process died."""
    died = ProgramResult(Status.of_end(answer), f"the process {answer.words}", answer.seconds)
    if answer.kind == "memory":
        return died
    if answer.detail == "crash.signal":
        return replace(died, kind="crash", detail="crash.signal", actual=signal.Signals(-answer.exit).name)
    return replace(died, kind="crash", detail="crash.hang" if answer.kind == "hang" else "crash.exit")


@dataclass(frozen=True, slots=True)
class ConfirmTask:
    """Confirm the failure of a program in a fresh process and make it smaller; or look for the operator of a group."""

    of: Entry | Group

    def run(self, asked: FuzzOptions, running: RunningProcesses) -> Group | None:
        """The group that the failure makes; None if it did not show again."""
        result, group = self.of.result, self.of if isinstance(self.of, Group) else None
        died = result.status in (Status.CRASH, Status.HANG) or result.detail in DEATHS
        localize = group is not None
        question = {"program": encode_program(self.of.program), "localize": localize, "isolate": died}
        times = _TIMES_OF_DEATH if died else 2
        seconds = asked.reduce_seconds + (_LOCALIZE_SECONDS + asked.timeout if localize else times * asked.timeout)
        end = _run("checked_backend.fuzz.worker:confirm", question, seconds, asked, running)
        made = Record.from_json(end.answer).group if end.answer else None
        if made is None:  # it took its process with it
            if end.stage != CONFIRMING:
                raise _not_begun(end, asked)
            made = replace(signature_of(self.of.program, _died(end)), confirmed=True)
        if not made.kind or group is None:
            return made if made.kind else None
        if group.script_shows and not made.script_shows:
            made = replace(made, script=group.script, script_shows=True)
        op = made.op if made.result.op else group.op
        return replace(made, localized=True, op=op)


Task = CheckTask | ConfirmTask


def _run(
    work: str, question: Mapping[str, Any], seconds: float, asked: FuzzOptions, running: RunningProcesses
) -> JobEnd:
    question = {**question, "asked": asdict(replace(asked, folder=asked.folder.resolve()))}
    with running.one() as started:
        return run(Job(work, question, seconds), asked.place, started=started)


def run_fuzz(asked: FuzzOptions, corpus: Corpus, progress: Progress | None = None) -> None:
    """Generate, check, confirm and localize until the time is over or so many programs were checked.

    A FuzzError is raised if no programs can be generated, an OSError if the system gives no process.
    """
    run = _Run(asked, corpus, progress)
    with ThreadPoolExecutor(asked.jobs) as pool:
        try:
            run.loop(pool)
        finally:
            run.stop()


@dataclass(slots=True)
class _Run:
    asked: FuzzOptions
    corpus: Corpus
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
            while len(self._running) < self.asked.jobs and (task := self._next()) is not None:
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
        seconds = self.asked.seconds
        return seconds is not None and time.monotonic() - self.begun > seconds + grace

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
        enough = self.asked.programs is not None and self._begun_to_check() >= self.asked.programs
        if self._to_localize and (not localizing or enough):
            return ConfirmTask(self._to_localize.pop(0))
        if enough:
            return None
        if self.to_check:
            return self.to_check.pop(0)
        numbers = self.corpus.missing(self.asked.seed, self._busy)
        count = self.asked.chunk
        if self.asked.programs is not None:
            count = min(count, self.asked.programs - self._begun_to_check())
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
        if not self.corpus.checked and self.corpus.left_out().total() >= _GIVEN_UP:
            raise FuzzError(f"no programs were generated: {self.corpus.left_out_words()}")

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
