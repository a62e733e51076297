"""The work of processes that generate and check, as `checked_backend.process.job` runs it.

``generate`` answers with programs, ``check`` with what came out for each program, as soon as it is known.
`checked_backend.fuzz.confirm` checks one program again, and makes it smaller.
"""

from __future__ import annotations

import json
import os
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from checked_backend.errors import CheckedBackendError, FuzzError
from checked_backend.fuzz.examine import alike, compiler_of, examine
from checked_backend.fuzz.generate.draft import Choices
from checked_backend.fuzz.generate.make import covered, make_program, rules_for
from checked_backend.fuzz.generate.torchfuzz import TorchFuzz
from checked_backend.fuzz.program import FuzzProgram, decode_program, encode_program
from checked_backend.process.job import AnswerFolder

CONFIRMING = "confirming"
"""The stage of a worker that checks a program once more. No stage after it has no answer."""

GENERATING = "generating program"
"""The stage of a worker that makes a program, followed by its number."""

OUT_OF_TIME = "out of time"
"""The last stage of a worker that leaves programs unchecked because its time is over."""

_Question = Mapping[str, Any]


def begin(reports: str | Path) -> None:
    """Prepare this process, which does one job and says nothing: reports of its checks go to a folder."""
    warnings.simplefilter("ignore")
    os.environ["CHECKED_BACKEND_PROGRESS"] = "0"  # the terminal shows that of all workers
    os.environ["CHECKED_BACKEND_REPORT_DIR"] = str(reports)


def generate(question: _Question, answers: AnswerFolder) -> None:
    """Answer with programs of these numbers, in a process of its own."""
    begin(answers.path / "reports")
    raw = question["choices"]
    choices = Choices(tuple(raw["ops"]), tuple(raw["dtypes"]), raw["training"], raw["dynamic"], raw["longest"])
    try:
        make = _generator(question, choices)
    except FuzzError as error:
        answers.answer(json.dumps({"refused": str(error)}))
        return
    made: list[tuple[int, str, str, Sequence[str]]] = []
    left_out: Counter[str] = Counter()
    for number in range(question["start"], question["start"] + question["count"]):
        answers.note(f"{GENERATING} {number}")
        try:
            program = make(number)
        except LookupError:
            continue
        except CheckedBackendError as error:  # a program of torchfuzz that none of ours can be
            left_out[str(error)] += 1
            continue
        made.append((number, encode_program(program), alike(program), covered(program)))
        answers.answer(json.dumps({"programs": made, "left_out": left_out}))  # a later one may end this process
    answers.answer(json.dumps({"programs": made, "left_out": left_out}))
    answers.note("done")


def _generator(question: _Question, choices: Choices) -> Callable[[int], FuzzProgram]:
    """What makes the program of a number: this package's own generator, or that of a checkout."""
    rules, wanted = rules_for(()), rules_for(choices.ops) if choices.ops else ()
    if choices.ops and not wanted:
        raise FuzzError("--ops names no operation that is known")
    if not question["generator"]:
        return lambda number: make_program(question["seed"], number, choices, rules, wanted)
    torchfuzz = TorchFuzz(Path(question["generator"]), choices)
    return lambda number: torchfuzz.program(question["seed"], number)


def check(question: _Question, answers: AnswerFolder) -> None:
    """Answer with what came out for programs, in a process of its own."""
    begin(answers.path / "reports")
    programs = [decode_program(text) for text in question["programs"]]
    found: dict[int, str] = {}
    answers.note("loading the compiler")
    compiler = compiler_of(question["compiler"])
    batch, begun = max(1, question["batch"]), time.monotonic()
    for start in range(0, len(programs), batch):
        if time.monotonic() - begun > question["seconds"]:
            answers.note(OUT_OF_TIME)  # else the compiler has ended this process
            return
        places = list(range(start, min(start + batch, len(programs))))

        def note(what: str, places: list[int] = places) -> None:
            words = what if what == "batch" else f"program {places[int(what.split()[1])]}"
            answers.note(f"{words} {places[0]} {places[-1]}")

        for place, came in examine([programs[p] for p in places], compiler, question["options"], note):
            found[places[place]] = came.to_json()
            answers.answer(json.dumps(found))
