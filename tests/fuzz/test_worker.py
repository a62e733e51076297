"""A process makes programs, checks those at once that may share a compile, and ends at a failure."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from checked_backend.fuzz import worker
from checked_backend.fuzz.corpus import Entry, Record
from checked_backend.fuzz.program import FuzzProgram
from checked_backend.fuzz.results import ProgramResult
from checked_backend.process.job import AnswerFolder
from checked_backend.runs.case import Status
from tests.support.fuzz_tools import PASS, failing, program_of

MADE = {
    0: program_of("torch.exp"),
    1: replace(program_of("torch.sin"), gradients=True),
    3: program_of("torch.abs"),
    4: program_of("torch.neg"),
    5: program_of("torch.cos"),
    6: program_of("torch.tan"),
}


class World:
    """Stands in for the generator and the check, which gets ``torch.neg`` wrong; notes what is lost if it dies now."""

    def __init__(self, folder: Path) -> None:
        self.answers = AnswerFolder(folder)
        self.lost: list[list[int]] = []

    def make(self, _seed: int, number: int, **_: Any) -> FuzzProgram:
        if number not in MADE:
            raise LookupError("none")
        return MADE[number]

    def examine(self, programs: Mapping[Entry, FuzzProgram], *asked: Any) -> Iterator[tuple[Entry, ProgramResult]]:
        asked[-1]([*programs])
        self.lost.append([number for number, status in self.told().items() if status is Status.LOST])
        yield from ((entry, failing() if "torch.neg" in one.ops else PASS) for entry, one in programs.items())

    def told(self) -> dict[int, Status]:
        record = Record.from_json((self.answers.path / "result.json").read_text())
        return {entry.number: entry.result.status for entry in record.programs}


@pytest.mark.parametrize(
    ("numbers", "lost", "told"),
    [
        ([0, 1, 2, 3], [[0, 3], [1]], {0: "pass", 1: "pass", 2: "skipped", 3: "pass"}),
        ([3, 4, 5, 6], [[3, 4]], {3: "pass", 4: "fail"}),  # the failure is confirmed before the others are checked
    ],
)
def test_what_may_share_a_compile_is_checked_at_once_until_one_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, numbers: list[int], lost: list[list[int]], told: dict[int, str]
) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    world = World(tmp_path)
    monkeypatch.setattr(worker, "make_program", world.make)
    monkeypatch.setattr(worker, "examine", world.examine)
    asked = worker.FuzzOptions("eager", timeout=9.0)
    worker.check({"asked": asdict(asked), "numbers": numbers, "batch": 2}, world.answers)
    assert world.lost == lost
    assert world.told() == {number: Status(status) for number, status in told.items()}
    assert world.answers.stage()[2] == "done"
