"""Programs, results and folders of fuzz, made without a check."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from checked_backend.fuzz.corpus import Corpus, Entry, Record
from checked_backend.fuzz.program import FuzzProgram, Input, Ref, Statement, encode_program
from checked_backend.fuzz.results import Group, ProgramResult, signature_of
from checked_backend.process.job import JobEnd
from checked_backend.runs.case import Status, encode

PASS = ProgramResult(Status.PASS, compiled=True)

STRIDES: Mapping[str, str] = MappingProxyType(
    {
        "kind": "structure",
        "detail": "structure.stride",
        "subject": "output[0]",
        "expected": "(3, 1)",
        "actual": "(1, 2)",
    }
)
"""A difference that is documented."""


def program_of(*ops: str) -> FuzzProgram:
    """A program that calls one function after another on its result."""
    calls = tuple(Statement(op, (Ref(place),)) for place, op in enumerate(ops))
    return FuzzProgram((Input("float32", (2, 3), (3, 1)),), calls, (len(ops),))


def failing(kind: str = "logic", detail: str = "", status: str = "fail", **more: Any) -> ProgramResult:
    return ProgramResult(Status(status), f"{kind}: output[0]: wrong", 1.0, True, kind=kind, detail=detail, **more)


def group_of(*ops: str, confirmed: bool = True, **more: Any) -> Group:
    """A group of a program that calls these."""
    return replace(signature_of(program_of(*ops), failing(**more)), confirmed=confirmed)


def entry_of(number: int, program: FuzzProgram, result: ProgramResult = PASS) -> Entry:
    """A program of seed 0, and what came out for it."""
    return Entry(0, number, encode_program(program), result, program.ops)


def filled(corpus: Corpus, *results: tuple[str, ProgramResult]) -> list[Entry]:
    """Put programs of one operator into a corpus, each with what came out for it."""
    made = [entry_of(place, program_of(op), result) for place, (op, result) in enumerate(results)]
    corpus.add(made)
    return made


def answer(raw: Any, stage: str = "", status: int = 0, overdue: float | None = None) -> JobEnd:
    """What a worker answered, and how it ended."""
    text = encode(raw) if isinstance(raw, Record) else "" if raw is None else json.dumps(raw)
    return JobEnd(text, stage, status, "", 1.0, overdue)


def answering(*answers: JobEnd, asked: list[Any]) -> Callable[..., JobEnd]:
    """A stand-in for `run` of a job that gives these answers in order."""
    waiting = list(answers)

    def run(_work: str, question: Mapping[str, Any], *_args: Any) -> JobEnd:
        asked.append(question)
        return waiting.pop(0)

    return run
