"""A run: programs are made and checked, failures confirmed before more is checked, and a second run goes on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from checked_backend.errors import FuzzError
from checked_backend.findings import Verdict
from checked_backend.fuzz.corpus import Corpus, Entry
from checked_backend.fuzz.drive import CheckTask, ConfirmTask, run_fuzz
from checked_backend.fuzz.program import encode_program
from checked_backend.fuzz.report import summarize
from checked_backend.fuzz.results import Group, ProgramResult
from checked_backend.fuzz.worker import FuzzOptions
from checked_backend.runs.case import Status
from tests.support.fuzz_tools import PASS, STRIDES, entry_of, failing, group_of, program_of
from tests.support.raising import raising

WRONG = "torch.neg"
MADE = [program_of("torch.exp"), program_of(WRONG), program_of("torch.abs", WRONG), program_of("torch.abs")]


class World:
    """Stands in for the processes: a compiler that gets one operator wrong. It notes what it is asked for."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.shows_again = True

    def check(self, task: CheckTask) -> Any:
        """As a process does, it ends at a failure."""
        self.asked.append([*task.numbers])
        found = []
        for number in task.numbers:
            program = MADE[number % len(MADE)]
            wrong = WRONG in program.ops
            found.append(entry_of(number, program, failing() if wrong else PASS))
            if wrong:
                break
        return found, None

    def confirm(self, task: ConfirmTask) -> Group | None:
        self.asked.append("localize" if isinstance(task.of, Group) else "confirm")
        if isinstance(task.of, Group):
            return replace(task.of, localized=True, op="neg")
        return group_of(WRONG) if self.shows_again else None


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    made = World()
    monkeypatch.setattr(CheckTask, "run", lambda self, *_: made.check(self))
    monkeypatch.setattr(ConfirmTask, "run", lambda self, *_: made.confirm(self))
    return made


@pytest.fixture
def corpus(tmp_path: Path) -> Iterator[Corpus]:
    with Corpus(tmp_path / "f", write=True) as made:
        made.settle({"compiler": "inductor"})
        yield made


def _run(corpus: Corpus, programs: int, progress: Any = None, **more: Any) -> None:
    run_fuzz(FuzzOptions(chunk=3, programs=programs, **more), corpus, progress)


def test_a_failure_is_confirmed_before_more_is_checked_and_then_localized(world: World, corpus: Corpus) -> None:
    found: list[Group] = []
    _run(corpus, 4, SimpleNamespace(found=found.append, tell=lambda: None))
    assert world.asked == [[0, 1, 2], "confirm", "localize", [2, 3], [3]]
    assert len(corpus.checked) == 4
    (group,) = corpus.groups()
    assert (group.op, group.met, group.localized) == ("neg", 2, True)
    assert [one.op for one in found] == ["neg"]
    assert not corpus.failures()


def test_a_bug_that_hides_behind_a_known_one_is_found(
    world: World, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs that have a wrong operator fail in the same way where another one of theirs is wrong too."""

    def confirm(task: ConfirmTask) -> Group | None:
        world.asked.append("confirm")
        both = len(task.of.program.ops) == 2
        return group_of("torch.abs" if both else WRONG)

    monkeypatch.setattr(world, "confirm", confirm)
    monkeypatch.setitem(globals(), "MADE", [MADE[1], *[MADE[2]] * 5])
    _run(corpus, 6, localize=False)
    assert {group.op: group.met for group in corpus.groups()} == {"neg": 4, "abs": 2}
    assert world.asked.count("confirm") == 2
    assert not corpus.failures()


def test_a_second_run_goes_on_with_what_is_there(world: World, corpus: Corpus) -> None:
    _run(corpus, 2, localize=False)
    world.asked.clear()
    _run(corpus, 2, localize=False)
    assert world.asked == [[2, 3], [3]]
    assert len(corpus.checked) == 4
    world.asked.clear()
    _run(corpus, 2, localize=True)
    assert world.asked == ["localize", [4, 5]]


def test_what_does_not_show_again_is_told_as_such(world: World, corpus: Corpus) -> None:
    world.shows_again = False
    _run(corpus, 4)
    assert not corpus.groups()
    assert len(corpus.unconfirmed()) == 2
    assert not corpus.failures()


def test_documented_differences_are_one_row_and_not_looked_into(
    world: World, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(task: CheckTask) -> Any:
        return [entry_of(number, MADE[0], failing(**STRIDES)) for number in task.numbers], None

    monkeypatch.setattr(world, "check", check)
    _run(corpus, 4)
    assert not world.asked
    (group,) = corpus.groups()
    assert group.difference is not None
    assert group.met == 4
    assert not corpus.failures()


def test_failures_that_were_not_confirmed_in_time_wait(world: World, corpus: Corpus) -> None:
    corpus.add([entry_of(0, MADE[1], failing())])
    run_fuzz(FuzzOptions(seconds=-1.0), corpus)
    assert not world.asked
    assert [entry.number for entry in corpus.failures()] == [0]


def test_an_error_of_a_task_ends_the_run(world: World, corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world, "check", raising(FuzzError("no compiler")))
    with pytest.raises(FuzzError, match="no compiler"):
        _run(corpus, 4)


def test_a_generator_that_makes_no_program_is_given_up(
    world: World, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(task: CheckTask) -> Any:
        return [Entry(0, number, "", ProgramResult(Status.SKIPPED, "streams")) for number in task.numbers], None

    monkeypatch.setattr(world, "check", check)
    with pytest.raises(FuzzError, match=r"no programs were generated: 18 .* were left out: streams \(18\)"):
        _run(corpus, 4)


@pytest.mark.parametrize("shows_again", [True, False])
def test_what_ends_a_process_together_is_confirmed_as_one_program_and_checked_one_by_one(
    world: World, corpus: Corpus, monkeypatch: pytest.MonkeyPatch, shows_again: bool
) -> None:
    died = failing("crash", "crash.signal", status="crash", program=encode_program(program_of("torch.exp", WRONG)))
    confirmed: list[str] = []

    def check(task: CheckTask) -> Any:
        if task.batch == 1:
            return [entry_of(number, MADE[0]) for number in task.numbers], None
        first, *others = task.numbers
        return [entry_of(first, MADE[0], died)], CheckTask(others, 1)

    def confirm(task: ConfirmTask) -> Group | None:
        confirmed.append(encode_program(task.of.program))
        return group_of(WRONG) if shows_again else None

    monkeypatch.setattr(world, "check", check)
    monkeypatch.setattr(world, "confirm", confirm)
    _run(corpus, 3, localize=False)
    assert confirmed == [died.program]
    assert sorted(entry.result.status.value for entry in corpus.checked) == ["crash", "pass", "pass"]
    assert summarize(corpus, set()).verdict is (Verdict.FAIL if shows_again else Verdict.INCONCLUSIVE)
