"""The worker process: ``python -m checked_backend.sweep.worker FOLDER PARENT``, with a question as JSON on stdin.

``{"ask": "models", "spec": ...}`` answers with the models of a suite; ``{"ask": "run", ...}`` runs a case. The worker
writes its answer and its current stage to files in the folder, which outlive it.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from checked_backend.process.child import die_with, limit_memory
from checked_backend.sweep.case import Case, Settings
from checked_backend.sweep.job import IMPORTING

__all__ = ["work"]


class AnswerFolder:
    """The folder in which a worker leaves its answer and its current stage."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def note(self, stage: str) -> None:
        """Write the name of the stage that begins now."""
        self._write("stage", stage)

    def answer(self, text: str) -> None:
        """Write the answer. A later one replaces it."""
        self._write("result.json", text)

    def _write(self, name: str, text: str) -> None:
        temporary = self._folder / f".{name}"
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")
        os.replace(temporary, self._folder / name)


def work(question: Mapping[str, Any], folder: Path, parent: int) -> NoReturn:
    """Answer one question, and end this process.

    Args:
        folder: The folder for the answer.
        parent: The id of this process's parent. This process ends with it.
    """
    die_with(parent)
    faulthandler.enable()
    status = 1
    try:
        _answer(question, folder)
        status = 0
    except BaseException:  # a forked worker must not go on in its parent's code
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(status)  # skips threads and destructors of the model, which could change the exit status


def _answer(question: Mapping[str, Any], folder: Path) -> None:
    limit_memory(question.get("memory"))
    answers = AnswerFolder(folder)
    answers.note(IMPORTING)
    if question["ask"] == "models":
        answers.answer(
            importlib.import_module("checked_backend.sweep.suites").models_as_json(
                question["spec"], question["compilers"]
            )
        )
        return
    _set_threads(question.get("threads"))
    module = importlib.import_module("checked_backend.sweep.examine")
    module.examine(
        question["spec"],
        Case(**question["case"]),
        _settings(question["settings"]),
        note=answers.note,
        answer=lambda outcome: answers.answer(outcome.to_json()),
    )


def _set_threads(threads: int | None) -> None:
    if threads is not None:
        importlib.import_module("torch").set_num_threads(threads)


def _settings(raw: Mapping[str, Any]) -> Settings:
    noise = {subject: (float(limit), str(reason)) for subject, (limit, reason) in raw["noise"].items()}
    return Settings(**{**raw, "noise": noise})


if __name__ == "__main__":
    work(json.loads(sys.stdin.read()), Path(sys.argv[1]), int(sys.argv[2]))
