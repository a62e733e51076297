"""What is written down of a case, and how two answers differ."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import checked_backend as cb

Answer = Mapping[str, Any]
"""``verdict`` and ``findings`` (kind, detail, subject); where localized ``where``: (subject, operator, stage, line)."""

Answers = Mapping[str, Answer]


@dataclass(frozen=True)
class Case:
    """Something that the package is asked.

    Attributes:
        name: ``source/name``, unique.
        run: Asks it; its only answer has the name "", several have names of their own.
        quick: Whether ``--quick`` runs it.
        processor: Why the answer depends on the processor, if it does: then it is compared only where the vector
            instructions are those of the machine that gave it.
        seconds: After which it counts as hung.
    """

    name: str
    run: Callable[[], Answers]
    quick: bool = False
    processor: str = ""
    seconds: float = 300.0


def one(answer: Answer) -> Answers:
    """The only answer of a case."""
    return {"": answer}


def of_report(report: cb.Report, *, localized: bool = False, repro: bool = False) -> Answer:
    """The answer that a report gives.

    Args:
        report: The report.
        localized: Whether each finding's operator, stage and line are part of the answer.
        repro: Whether it is part of the answer that each repro showed its error in a fresh process.
    """
    findings = {(str(found.kind), found.detail, found.subject) for found in report.findings}
    answer: dict[str, Any] = {"verdict": str(report.verdict), "findings": sorted([*found] for found in findings)}
    if localized:
        places = {(found.subject, f"{found.op}", f"{found.stage}", line_of(found.source)) for found in report.findings}
        answer["where"] = sorted([*place] for place in places)
    if repro:
        scripts = {found.repro: found.repro_confirmed for found in report.findings if found.repro}
        answer["repro"] = [scripts[path] for path in sorted(scripts)]
    return answer


def of_error(error: BaseException) -> Answer:
    """The answer of a case that raises."""
    return {"verdict": f"raises {type(error).__name__}", "findings": []}


def line_of(source: str | None) -> str:
    """The function and the text of a user's line, without its file and number, which any edit above it moves."""
    return source.partition(" in ")[2] if source else "None"


def differences(before: Answers, now: Answers) -> Iterator[str]:
    """One line for each answer that is not as it was; answers of another processor are not compared."""
    for name in sorted({*before, *now}):
        if name not in now:
            yield f"{name}: no answer any more; it was {_told(before[name])}"
        elif name not in before:
            yield f"{name}: new: {_told(now[name])}"
        elif before[name].get("processor") == now[name].get("processor") and before[name] != now[name]:
            yield f"{name}: {_changes(before[name], now[name])}"


def _changes(before: Answer, now: Answer) -> str:
    keys = [key for key in sorted({*before, *now}, reverse=True) if before.get(key) != now.get(key)]
    return "; ".join(f"{key} {_change(before.get(key), now.get(key))}" for key in keys)


def _change(before: Any, now: Any) -> str:
    if not (isinstance(before, list) and isinstance(now, list)):
        return f"{before} -> {now}"
    gone = [f"-{_words(row)}" for row in before if row not in now]
    new = [f"+{_words(row)}" for row in now if row not in before]
    return " ".join([*gone, *new])


def _told(answer: Answer) -> str:
    return " ".join([answer["verdict"], *map(_words, answer["findings"])])


def _words(row: Any) -> str:
    return "(" + ", ".join(map(str, row)) + ")" if isinstance(row, list) else str(row)


def read(path: Path) -> dict[str, Answer]:
    """The answers of a file; none if there is no file."""
    if not path.exists():
        return {}
    answers: dict[str, Answer] = json.loads(path.read_text(encoding="utf-8"))
    return answers


def write(path: Path, answers: Answers) -> None:
    """Write answers, one line each, sorted by name: a change of an answer is a change of its line."""
    rows = [f"{json.dumps(name)}: {json.dumps(answers[name], ensure_ascii=False)}" for name in sorted(answers)]
    path.write_text("{\n" + ",\n".join(rows) + "\n}\n", encoding="utf-8")
