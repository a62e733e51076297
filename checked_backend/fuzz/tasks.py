"""The questions to worker processes, and the meaning of their answers, also if a worker died."""

from __future__ import annotations

import json
import signal
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from checked_backend.errors import FuzzError
from checked_backend.fuzz.corpus import Entry
from checked_backend.fuzz.generate.draft import Choices
from checked_backend.fuzz.program import FuzzProgram, decode_program, encode_program, merge
from checked_backend.fuzz.results import DEATHS, Group, ProgramResult, signature_of
from checked_backend.fuzz.worker import CONFIRMING, GENERATING, OUT_OF_TIME
from checked_backend.process.job import IMPORTING, Job, JobEnd, JobResources, RunningProcesses, run
from checked_backend.runs.status import Status

_CHUNK_SECONDS = 90.0
"""Seconds after which a process begins no other batch, so that results come in time."""

_GENERATE_SECONDS = 300.0
_LOCALIZE_SECONDS = 400.0
_TIMES_OF_DEATH = 5
"""How often a program that hangs may take all of its time while it is confirmed."""

_REASONS = 6
_DEATHS = 5
"""How many programs may end the process that makes them before it is given up for now."""


@dataclass(frozen=True, slots=True)
class FuzzOptions:
    """The user's choices for a run.

    Attributes:
        generator: The checkout whose torchfuzz makes them; empty for this package's own generator.
        timeout: Seconds for one program, or for one batch.
        reduce_seconds: Seconds for making a program smaller.
    """

    compiler: str = "inductor"
    options: Mapping[str, Any] = field(default_factory=dict)
    choices: Choices = field(default_factory=Choices)
    generator: str = ""
    seed: int = 0
    batch: int = 8
    chunk: int = 16
    timeout: float = 120.0
    reduce_seconds: float = 60.0
    localize: bool = True
    scripts: bool = True
    place: JobResources = field(default_factory=JobResources)
    folder: Path = Path("checked_backend_fuzz")


class Stopped(Exception):
    """Raised for a task that was ended from here: it has no result."""


@dataclass(frozen=True, slots=True)
class GenerateTask:
    """Generate some programs."""

    start: int
    count: int

    def run(self, asked: FuzzOptions, running: RunningProcesses) -> tuple[list[Entry], Counter[str]]:
        """The programs, and why how many others were left out.

        What ends its process is left out as well, and a new process goes on with the number after it.

        Raises:
            FuzzError: They could not be generated.
        """
        made: list[Entry] = []
        left_out: Counter[str] = Counter()
        start, end = self.start, self.start + self.count
        for _ in range(_DEATHS + 1):
            answer = _run(self._question(asked, start, end), _GENERATE_SECONDS, asked, running)
            if running.stopped:
                raise Stopped
            raw = _parsed(answer)
            if "refused" in raw:
                raise FuzzError(str(raw["refused"]))
            made += [Entry(asked.seed, n, text, alike, tuple(c)) for n, text, alike, c in raw.get("programs", ())]
            left_out.update(raw.get("left_out", {}))
            stage, _, number = answer.stage.rpartition(" ")
            if stage != GENERATING or not number.isdecimal():
                break
            left_out[f"making it {answer.words}"] += 1
            start = int(number) + 1
            if start >= end:
                break
        if not made and answer.stage == IMPORTING and answer.kind == "memory":
            raise FuzzError(
                f"torch cannot be imported within {asked.place.memory} bytes of memory; --memory may give more"
            )
        if not made:
            why = left_out_words(left_out)
            raise FuzzError(f"no programs were generated: {why or f'the process {answer.words}'}\n{answer.log}")
        return made, left_out

    def _question(self, asked: FuzzOptions, start: int, end: int) -> dict[str, Any]:
        return {
            "work": "checked_backend.fuzz.worker:generate",
            "seed": asked.seed,
            "start": start,
            "count": end - start,
            "choices": asdict(asked.choices),
            "generator": asked.generator,
        }


def left_out_words(left_out: Counter[str]) -> str:
    """``31 of torchfuzz's were left out: sort, which no program may call (20), ...``; empty if none was."""
    if not left_out:
        return ""
    most = ", ".join(f"{reason} ({count})" for reason, count in left_out.most_common(_REASONS))
    more = "" if len(left_out) <= _REASONS else ", ..."
    return f"{left_out.total()} of the generator's programs were left out: {most}{more}"


@dataclass(slots=True)
class Death:
    """The end of a process that checked several programs in one compile. Each of them is then checked alone.

    Attributes:
        result: What came out for all of them as one program.
        left: How many of them are not checked alone yet.
        explained: Whether one of them fails alone.
    """

    result: ProgramResult
    left: int
    explained: bool = False


@dataclass(frozen=True, slots=True)
class CheckTask:
    """Check programs, in batches.

    Attributes:
        death: The end of the process that checked the only program together with others; None if there was none.
    """

    entries: Sequence[Entry]
    batch: int
    death: Death | None = None

    def run(self, asked: FuzzOptions, running: RunningProcesses) -> tuple[dict[int, ProgramResult], list[CheckTask]]:
        """The results by place, and the tasks to repeat because a process died before it answered."""
        question = {
            "work": "checked_backend.fuzz.worker:check",
            "programs": [entry.text for entry in self.entries],
            "compiler": asked.compiler,
            "options": dict(asked.options),
            "batch": self.batch,
            "seconds": _CHUNK_SECONDS,
        }
        seconds = asked.timeout * max(1, -(-len(self.entries) // self.batch))
        answer = _run(question, seconds, asked, running)
        found = {int(place): ProgramResult.from_json(text) for place, text in _parsed(answer).items()}
        missing = [place for place in range(len(self.entries)) if place not in found]
        in_time = answer.exit == 0 and answer.stage == OUT_OF_TIME
        if not missing or running.stopped or in_time:
            return found, []  # what is missing waits in the corpus
        blamed = _blamed(answer, missing)
        if len(blamed) == 1:
            found[blamed[0]] = _died(answer)
            blamed = []
        again = []
        if blamed:
            together = encode_program(merge([self.entries[place].program for place in blamed]))
            death = Death(replace(_died(answer), program=together), len(blamed))
            again = [CheckTask([self.entries[place]], 1, death) for place in blamed]
        rest = [self.entries[place] for place in missing if place not in blamed and place not in found]
        return found, [*again, *([CheckTask(rest, self.batch)] if rest else [])]


def _blamed(answer: JobEnd, missing: Sequence[int]) -> list[int]:
    """The places of programs that may have ended a process: the one it was at, or its batch.

    Raises:
        FuzzError: It was at none yet.
    """
    match answer.stage.split():
        case ["batch", first, last]:
            return [place for place in missing if int(first) <= place <= int(last)]
        case ["program", place, _, _] if int(place) in missing:
            return [int(place)]
    raise _not_begun(answer)


def _not_begun(answer: JobEnd) -> FuzzError:
    """The error of a process that ended before it compiled anything: that says nothing of a program."""
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
    """Confirm a failure in a fresh process and make it smaller; or look for the operator of a group.

    Attributes:
        entry: The program in the corpus; None of a group.
        group: The group whose operator is looked for; None of a program.
    """

    text: str
    result: ProgramResult
    entry: Entry | None = None
    group: Group | None = None

    @classmethod
    def of_entry(cls, entry: Entry, result: ProgramResult) -> ConfirmTask:
        """Confirm what came out for a program of the corpus."""
        return cls(result.program or entry.text, result, entry)

    @property
    def program(self) -> FuzzProgram:
        """The program."""
        return decode_program(self.text)

    @classmethod
    def of_group(cls, group: Group) -> ConfirmTask:
        """Look for the operator of a group."""
        return cls(group.text, group.result, group=group)

    def run(self, asked: FuzzOptions, running: RunningProcesses) -> Group | None:
        """The group that the failure makes; None if it did not show again."""
        died = self.result.status in (Status.CRASH, Status.HANG) or self.result.detail in DEATHS
        localize = self.group is not None
        question = {
            "work": "checked_backend.fuzz.confirm:answer",
            "program": self.text,
            "compiler": asked.compiler,
            "options": dict(asked.options),
            "seconds": 0.0 if localize else asked.reduce_seconds,
            "localize": localize,
            "scripts": asked.scripts,
            "isolate": died,
            "timeout": asked.timeout,
            "reports": str(asked.folder.resolve()),
        }
        times = _TIMES_OF_DEATH if died else 2
        seconds = asked.reduce_seconds + (_LOCALIZE_SECONDS + asked.timeout if localize else times * asked.timeout)
        answer = _run(question, seconds, asked, running)
        raw = _parsed(answer)
        if running.stopped:
            raise Stopped
        if not raw:  # it took its process with it
            if answer.stage != CONFIRMING:
                raise _not_begun(answer)
            gone = _died(answer)
            return None if not gone.kind else self._made(self.text, gone, {})
        result = ProgramResult.from_json(raw["result"])
        return self._made(raw["program"], result, raw) if result.kind else None

    def _made(self, text: str, result: ProgramResult, raw: Mapping[str, Any]) -> Group:
        made = replace(
            signature_of(decode_program(text), result),
            confirmed=True,
            script=str(raw.get("script", "")),
            script_shows=bool(raw.get("script_shows")),
        )
        if self.group is None:
            return made
        if self.group.script_shows and not made.script_shows:
            made = replace(made, script=self.group.script, script_shows=True)
        op = made.op if result.op else self.group.op
        return replace(made, localized=True, op=op)


Task = GenerateTask | CheckTask | ConfirmTask


def _run(question: Mapping[str, Any], seconds: float, asked: FuzzOptions, running: RunningProcesses) -> JobEnd:
    with running.one() as started:
        return run(Job(question["work"], question, seconds), asked.place, "fresh", started)


def _parsed(answer: JobEnd) -> dict[str, Any]:
    try:
        raw = json.loads(answer.answer) if answer.answer else {}
    except ValueError:
        return {}
    return raw if isinstance(raw, dict) else {}
