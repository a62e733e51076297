"""The questions to worker processes, and the meaning of their answers, also if a worker died."""

from __future__ import annotations

import math
import signal
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from checked_backend.errors import FuzzError
from checked_backend.fuzz.corpus import Entry, Record
from checked_backend.fuzz.program import decode_program, encode_program, merge
from checked_backend.fuzz.results import DEATHS, Group, ProgramResult, signature_of
from checked_backend.fuzz.worker import CONFIRMING, GENERATING, FuzzOptions
from checked_backend.process.job import IMPORTING, Job, JobEnd, RunningProcesses, run
from checked_backend.runs.status import Status

_LOCALIZE_SECONDS = 400.0
_TIMES_OF_DEATH = 5
"""How often a program that hangs may take all of its time while it is confirmed."""


class Stopped(Exception):
    """Raised for a task that was ended from here: it has no result."""


@dataclass(frozen=True, slots=True)
class CheckTask:
    """Make the programs of these numbers, and check them in batches."""

    numbers: Sequence[int]
    batch: int

    def run(self, asked: FuzzOptions, running: RunningProcesses) -> tuple[list[Entry], CheckTask | None]:
        """What came out, and what to check one by one because a process died at all of it.

        What had no time, or was to come after a death, is missing.

        Raises:
            FuzzError: The process ended before it made or checked a program.
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
    words = f"the process {answer.words}"
    if answer.kind == "hang":
        return ProgramResult(Status.HANG, words, answer.seconds, kind="crash", detail="crash.hang")
    if answer.kind == "memory":
        return ProgramResult(Status.OUT_OF_MEMORY, words, answer.seconds)
    if answer.exit < 0 and -answer.exit != signal.SIGKILL:
        name = signal.Signals(-answer.exit).name
        return ProgramResult(Status.CRASH, words, answer.seconds, kind="crash", detail="crash.signal", actual=name)
    return ProgramResult(Status.CRASH, words, answer.seconds, kind="crash", detail="crash.exit")


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
        end = _run("checked_backend.fuzz.confirm:answer", question, seconds, asked, running)
        if running.stopped:
            raise Stopped
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
        return run(Job(work, question, seconds), asked.place, "fresh", started)
