"""The work of a process that makes and checks programs, as `checked_backend.process.job` runs it.

`checked_backend.fuzz.confirm` checks one program again, and makes it smaller.
"""

from __future__ import annotations

import os
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from checked_backend.errors import CheckedBackendError
from checked_backend.fuzz.corpus import Entry, Record
from checked_backend.fuzz.examine import alike, compiler_of, examine
from checked_backend.fuzz.generate.draft import Choices
from checked_backend.fuzz.generate.make import make_program
from checked_backend.fuzz.generate.torchfuzz import TorchFuzz
from checked_backend.fuzz.program import FuzzProgram, decode_program, encode_program
from checked_backend.fuzz.results import ProgramResult, documented
from checked_backend.process.job import AnswerFolder, JobResources
from checked_backend.runs.case import Status, encode

CONFIRMING = "confirming"
"""The stage of a worker that checks a program once more. No stage after it has no answer."""

GENERATING = "generating program"
"""The stage of a worker that makes a program, followed by its number."""

_GENERATE_SECONDS = 300.0
_SECONDS = 90.0
"""Seconds after which a process begins no other batch, so that results come in time."""


@dataclass(frozen=True, slots=True)
class FuzzOptions:
    """The user's choices for a run.

    Attributes:
        generator: The checkout whose torchfuzz makes them; empty for this package's own generator.
        jobs: How many processes there are at a time.
        seconds: How long it goes on; None for no end.
        programs: After how many programs it ends; None for no end.
        chunk: How many programs a process makes and checks, at most.
        timeout: Seconds for one program, or for one batch.
        reduce_seconds: Seconds for making a program smaller.
    """

    compiler: str = "inductor"
    options: Mapping[str, Any] = field(default_factory=dict)
    choices: Choices = field(default_factory=Choices)
    generator: str = ""
    seed: int = 0
    jobs: int = 1
    seconds: float | None = None
    programs: int | None = None
    batch: int = 8
    chunk: int = 64
    timeout: float = 120.0
    reduce_seconds: float = 60.0
    localize: bool = True
    scripts: bool = True
    place: JobResources = field(default_factory=JobResources)
    folder: Path = Path("checked_backend_fuzz")


_OPTIONS = TypeAdapter(FuzzOptions)


def options_of(question: Mapping[str, Any]) -> FuzzOptions:
    """The options in the question to a process, as `dataclasses.asdict` has them."""
    return _OPTIONS.validate_python(question["asked"])


def begin(reports: str | Path) -> None:
    """Prepare this process, which does one job and says nothing: reports of its checks go to a folder."""
    warnings.simplefilter("ignore")
    os.environ["CHECKED_BACKEND_PROGRESS"] = "0"  # the terminal shows that of all workers
    os.environ["CHECKED_BACKEND_REPORT_DIR"] = str(reports)


def check(question: Mapping[str, Any], answers: AnswerFolder) -> None:
    """Make the programs of these numbers, and check those at once that may share a compile.

    Each answer is a `checked_backend.fuzz.corpus.Record`. It has what is being checked as *lost*.
    """
    begin(answers.path / "reports")
    answers.note("loading the compiler", _GENERATE_SECONDS)
    asked = options_of(question)
    make: Callable[[int, int], FuzzProgram] = partial(make_program, choices=asked.choices)
    if asked.generator:
        make = TorchFuzz(Path(asked.generator), asked.choices).program
    compiler, begun = compiler_of(asked.compiler), time.monotonic()
    waiting: dict[str, list[Entry]] = defaultdict(list)
    done: list[Entry] = []

    def tell(now: Sequence[Entry] = ()) -> None:
        answers.answer(encode(Record(programs=[*done, *now])))

    def check_together(entries: Sequence[Entry]) -> bool:
        """Whether something failed that is to be confirmed before more is checked."""

        def note(now: Sequence[Entry]) -> None:
            tell(now)
            answers.note("checking", asked.timeout)

        programs = {entry: decode_program(entry.text) for entry in entries}
        for entry, result in examine(programs, compiler, asked.options, note):
            done.append(replace(entry, result=result))
            tell()
        return any(entry.failed and documented(entry.result) is None for entry in done)

    for number in question["numbers"]:
        answers.note(f"{GENERATING} {number}", _GENERATE_SECONDS)
        try:
            program = make(asked.seed, number)
        except (LookupError, CheckedBackendError) as error:  # a program of torchfuzz that none of ours can be
            done.append(Entry(asked.seed, number, "", ProgramResult(Status.SKIPPED, str(error))))
            tell()
            continue
        kind = alike(program)
        entry = Entry(asked.seed, number, encode_program(program), ProgramResult(Status.LOST), program.ops)
        waiting[kind].append(entry)
        if program.dynamic or len(waiting[kind]) >= question["batch"]:
            failed = check_together(waiting.pop(kind))
            if failed or time.monotonic() - begun > _SECONDS:
                break  # what waits here is made again
    else:
        for entries in waiting.values():
            check_together(entries)
    answers.note("done")
