"""Runs cases, each in a forked process of its own.

No case can change the answer of another one, and one that dies or hangs is an answer.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import signal
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

import checked_backend as cb
from tests.ledger.answer import Answer, Answers, Case, of_error


@dataclass(frozen=True)
class Done:
    """A case that has ended: its answers by full name, and how long it took."""

    case: Case
    answers: dict[str, Answer]
    seconds: float


@dataclass(frozen=True)
class _Running:
    case: Case
    process: BaseProcess
    folder: tempfile.TemporaryDirectory[str]
    began: float

    def ended(self) -> bool:
        return not self.process.is_alive() or self.late()

    def late(self) -> bool:
        return time.monotonic() > self.began + self.case.seconds


def run_cases(cases: Sequence[Case], jobs: int) -> Iterator[Done]:
    """Run cases, ``jobs`` at a time; they come as they end."""
    waiting, running = [*reversed(cases)], list[_Running]()
    _warm()
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                running.append(_start(waiting.pop()))
            wait([entry.process.sentinel for entry in running], timeout=1.0)
            for entry in [entry for entry in running if entry.ended()]:
                running.remove(entry)
                yield _collect(entry)
    finally:
        for entry in running:
            _end(entry)


def _warm() -> None:
    """Import what every case needs, once. Nothing is differentiated: autograd's threads do not survive a fork."""
    importlib.import_module("torch._inductor.compile_fx")
    cb.check(torch.sin, (torch.ones(2),), compiler="aot_eager")
    torch._dynamo.reset()


def _start(case: Case) -> _Running:
    folder = tempfile.TemporaryDirectory(prefix="ledger_", ignore_cleanup_errors=True)
    process = multiprocessing.get_context("fork").Process(target=_run, args=(case, Path(folder.name)))
    process.start()
    return _Running(case, process, folder, time.monotonic())


def _run(case: Case, folder: Path) -> None:
    """In the child: everything it starts is in its process group, everything it writes in its folder."""
    os.setsid()
    os.chdir(folder)
    with open("output.txt", "wb") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.environ["CHECKED_BACKEND_REPORT_DIR"] = str(folder / "reports")
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        answers = case.run()
    except Exception as error:
        answers = {"": of_error(error)}
    Path("answers.json").write_text(json.dumps(answers), encoding="utf-8")


def _collect(entry: _Running) -> Done:
    late, path = entry.late(), Path(entry.folder.name, "answers.json")
    with suppress(OSError, ValueError):
        return Done(entry.case, _named(entry.case, json.loads(path.read_text())), _end(entry))
    verdict = "hangs" if late else f"dies ({entry.process.exitcode})"
    return Done(entry.case, _named(entry.case, {"": {"verdict": verdict, "findings": []}}), _end(entry))


def _named(case: Case, answers: Answers) -> dict[str, Any]:
    of_processor = {"processor": torch.backends.cpu.get_cpu_capability()} if case.processor else {}
    return {
        f"{case.name}::{name}" if name else case.name: {**answer, **of_processor} for name, answer in answers.items()
    }


def _end(entry: _Running) -> float:
    with suppress(ProcessLookupError):
        os.killpg(entry.process.pid or 0, signal.SIGKILL)  # what it started, too
    entry.process.kill()
    entry.process.join()
    entry.folder.cleanup()
    return time.monotonic() - entry.began
