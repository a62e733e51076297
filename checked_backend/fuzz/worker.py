"""The work of a process that makes and checks programs, as `checked_backend.process.job` runs it.

`checked_backend.fuzz.confirm` checks one program again, and makes it smaller.
"""

from __future__ import annotations

import os
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from checked_backend.errors import CheckedBackendError
from checked_backend.fuzz.corpus import Entry, Record
from checked_backend.fuzz.examine import Compiler, alike, compiler_of, examine
from checked_backend.fuzz.generate.draft import Choices
from checked_backend.fuzz.generate.make import make_program, rules_for
from checked_backend.fuzz.generate.torchfuzz import TorchFuzz
from checked_backend.fuzz.program import FuzzProgram, decode_program, encode_program
from checked_backend.fuzz.results import ProgramResult, documented
from checked_backend.process.job import AnswerFolder
from checked_backend.runs.case import encode
from checked_backend.runs.status import Status

CONFIRMING = "confirming"
"""The stage of a worker that checks a program once more. No stage after it has no answer."""

GENERATING = "generating program"
"""The stage of a worker that makes a program, followed by its number."""

_GENERATE_SECONDS = 300.0
_SECONDS = 90.0
"""Seconds after which a process begins no other batch, so that results come in time."""

_Question = Mapping[str, Any]


def begin(reports: str | Path) -> None:
    """Prepare this process, which does one job and says nothing: reports of its checks go to a folder."""
    warnings.simplefilter("ignore")
    os.environ["CHECKED_BACKEND_PROGRESS"] = "0"  # the terminal shows that of all workers
    os.environ["CHECKED_BACKEND_REPORT_DIR"] = str(reports)


def check(question: _Question, answers: AnswerFolder) -> None:
    """Make the programs of these numbers, and check those at once that may share a compile.

    Each answer is a `checked_backend.fuzz.corpus.Record`. It has what is being checked as *lost*.
    """
    begin(answers.path / "reports")
    answers.note("loading the compiler", _GENERATE_SECONDS)
    work = _Work(question, compiler_of(question["compiler"]), answers)
    make, begun = _generator(question), time.monotonic()
    waiting: dict[str, list[Entry]] = defaultdict(list)
    for number in question["numbers"]:
        answers.note(f"{GENERATING} {number}", _GENERATE_SECONDS)
        try:
            program = make(number)
        except (LookupError, CheckedBackendError) as error:  # a program of torchfuzz that none of ours can be
            work.tell(Entry(question["seed"], number, "", ProgramResult(Status.SKIPPED, str(error))))
            continue
        kind = alike(program)
        entry = Entry(question["seed"], number, encode_program(program), ProgramResult(Status.LOST), program.ops)
        waiting[kind].append(entry)
        if program.dynamic or len(waiting[kind]) >= question["batch"]:
            failed = work.check(waiting.pop(kind))
            if failed or time.monotonic() - begun > _SECONDS:
                break  # what waits here is made again
    else:
        for entries in waiting.values():
            work.check(entries)
    answers.note("done")


class _Work:
    """Checks programs, and answers with what has come out so far."""

    def __init__(self, question: _Question, compiler: Compiler, answers: AnswerFolder) -> None:
        self._question, self._compiler, self._answers = question, compiler, answers
        self._done: list[Entry] = []

    def tell(self, done: Entry) -> None:
        self._done.append(done)
        self._answer(())

    def check(self, entries: Sequence[Entry]) -> bool:
        """Whether something failed that is to be confirmed before more is checked."""

        def note(places: Sequence[int]) -> None:
            self._answer([entries[place] for place in places])
            self._answers.note("checking", self._question["timeout"])

        programs = [decode_program(entry.text) for entry in entries]
        for place, result in examine(programs, self._compiler, self._question["options"], note):
            self.tell(replace(entries[place], result=result))
        return any(entry.failed and documented(entry.result) is None for entry in self._done)

    def _answer(self, now: Sequence[Entry]) -> None:
        self._answers.answer(encode(Record(programs=[*self._done, *now])))


def _generator(question: _Question) -> Callable[[int], FuzzProgram]:
    """What makes the program of a number: this package's own generator, or that of a checkout."""
    raw, seed = question["choices"], question["seed"]
    choices = Choices(tuple(raw["ops"]), tuple(raw["dtypes"]), raw["training"], raw["dynamic"], raw["longest"])
    if question["generator"]:
        torchfuzz = TorchFuzz(Path(question["generator"]), choices)
        return lambda number: torchfuzz.program(seed, number)
    rules, wanted = rules_for(()), rules_for(choices.ops) if choices.ops else ()
    return lambda number: make_program(seed, number, choices, rules, wanted)
