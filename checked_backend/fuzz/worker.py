"""The work of a process that generates, checks or confirms, as `checked_backend.process.job` runs it.

``generate`` answers with programs, ``check`` with what came out for each program, as soon as it is known;
``confirm`` checks one program, makes it smaller, and answers with both.
"""

from __future__ import annotations

import importlib
import json
import os
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from checked_backend.errors import CheckedBackendError, FuzzError
from checked_backend.process.job import AnswerFolder

__all__ = ["CONFIRMING", "GENERATING", "OUT_OF_TIME", "WORK", "answer"]

WORK = "checked_backend.fuzz.worker:answer"

CONFIRMING = "confirming"
"""The stage of a worker that checks a program once more. No stage after it has no answer."""

GENERATING = "generating program"
"""The stage of a worker that makes a program, followed by its number."""

OUT_OF_TIME = "out of time"
"""The last stage of a worker that leaves programs unchecked because its time is over."""

_Question = Mapping[str, Any]


def answer(question: _Question, answers: AnswerFolder) -> None:
    """Answer one question, in a process of its own.

    Args:
        question: What to do.
        answers: Gets the stages and the answers.
    """
    warnings.simplefilter("ignore")
    kept = question.get("reports") if question.get("localize") else None  # other reports are in the answer
    os.environ["CHECKED_BACKEND_PROGRESS"] = "0"  # the terminal shows that of all workers
    os.environ["CHECKED_BACKEND_REPORT_DIR"] = kept or str(answers.path / "reports")
    asks: Mapping[str, Callable[[_Question, AnswerFolder], None]] = {
        "generate": _generate,
        "check": _check,
        "confirm": _confirm,
        "selftest": _selftest,
    }
    asks[question["ask"]](question, answers)


def _generate(question: _Question, answers: AnswerFolder) -> None:
    make = importlib.import_module("checked_backend.fuzz.generate.make")
    make_choices = importlib.import_module("checked_backend.fuzz.generate.draft").Choices
    encode = importlib.import_module("checked_backend.fuzz.program").encode_program
    alike = importlib.import_module("checked_backend.fuzz.examine").alike
    raw = question["choices"]
    choices = make_choices(tuple(raw["ops"]), tuple(raw["dtypes"]), raw["training"], raw["dynamic"], raw["longest"])
    rules, wanted = make.rules_for(()), make.rules_for(choices.ops) if choices.ops else ()
    if choices.ops and not wanted:
        answers.answer(json.dumps({"refused": "--ops names no operation that is known"}))
        return
    try:
        of = _generator(question, choices)
    except FuzzError as error:
        answers.answer(json.dumps({"refused": str(error)}))
        return
    made: list[tuple[int, str, str, Sequence[str]]] = []
    left_out: Counter[str] = Counter()
    for number in range(question["start"], question["start"] + question["count"]):
        answers.note(f"{GENERATING} {number}")
        try:
            program = of(number) if of else make.make_program(question["seed"], number, choices, rules, wanted)
        except LookupError:
            continue
        except CheckedBackendError as error:  # a program of torchfuzz that none of ours can be
            left_out[str(error)] += 1
            continue
        made.append((number, encode(program), alike(program), make.covered(program)))
        answers.answer(json.dumps({"programs": made, "left_out": left_out}))  # a later one may end this process
    answers.answer(json.dumps({"programs": made, "left_out": left_out}))
    answers.note("done")


def _generator(question: _Question, choices: Any) -> Callable[[int], Any] | None:
    """What makes the program of a number, if it is not this package's own generator."""
    if not question["generator"]:
        return None
    module = importlib.import_module("checked_backend.fuzz.generate.torchfuzz")
    torchfuzz = module.TorchFuzz(Path(question["generator"]), choices)
    return lambda number: torchfuzz.program(question["seed"], number)


def _check(question: _Question, answers: AnswerFolder) -> None:
    examining = importlib.import_module("checked_backend.fuzz.examine")
    programs = [importlib.import_module("checked_backend.fuzz.program").decode_program(t) for t in question["programs"]]
    found: dict[int, Any] = {}
    answers.note("loading the compiler")
    compiler = examining.compiler_of(question["compiler"])
    batch, begun = max(1, question["batch"]), time.monotonic()
    for start in range(0, len(programs), batch):
        if time.monotonic() - begun > question["seconds"]:
            answers.note(OUT_OF_TIME)  # else the compiler has ended this process
            return
        places = list(range(start, min(start + batch, len(programs))))

        def note(what: str, places: list[int] = places) -> None:
            words = what if what == "batch" else f"program {places[int(what.split()[1])]}"
            answers.note(f"{words} {places[0]} {places[-1]}")

        for place, came in examining.examine([programs[p] for p in places], compiler, question["options"], note):
            found[places[place]] = came.to_json()
            answers.answer(json.dumps(found))


def _confirm(question: _Question, answers: AnswerFolder) -> None:
    """Check one program in this fresh process, and make it smaller until the time is over."""
    importlib.import_module("checked_backend.fuzz.confirm").confirm(question, answers)


def _selftest(question: _Question, answers: AnswerFolder) -> None:
    """Try planted faults."""
    try_faults = importlib.import_module("checked_backend.fuzz.selftest").try_faults
    counts = {name: question[name] for name in ("seed", "most", "control")}
    found = []
    for tried in try_faults(question["faults"], **counts, note=answers.note):
        found.append(asdict(tried))
        answers.answer(json.dumps(found))  # a fault that takes all the time hides no other result
