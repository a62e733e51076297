"""A run: programs are made and checked, failures confirmed before more is checked, and a second run goes on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from checked_backend.errors import FuzzError
from checked_backend.findings import Verdict
from checked_backend.fuzz import drive
from checked_backend.fuzz.corpus import Corpus, Entry
from checked_backend.fuzz.drive import FuzzEnd, run_fuzz
from checked_backend.fuzz.program import encode_program
from checked_backend.fuzz.report import summarize
from checked_backend.fuzz.results import Group
from checked_backend.fuzz.tasks import CheckTask, ConfirmTask, Death, FuzzOptions, GenerateTask
from tests.support.fuzz_tools import PASS, STRIDES, failing, group_of, program_of

WRONG = "torch.neg"
MADE = [program_of("torch.exp"), program_of(WRONG), program_of("torch.abs", WRONG), program_of("torch.abs")]


class World:
    """Stands in for the processes: a compiler that gets one operator wrong.

    Attributes:
        asked: What was asked for, in order.
        generated: How many programs were asked for each time.
        ends_with: Which of these requests fails; None for none.
        shows_again: Whether a failure shows again.
    """

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.generated: list[int] = []
        self.ends_with: int | None = None
        self.shows_again = True

    def generate(self, task: GenerateTask) -> Any:
        self.asked.append(f"generate {task.start}")
        self.generated.append(task.count)
        if len(self.generated) == self.ends_with:
            raise FuzzError("enough")
        texts = [encode_program(program) for program in MADE]
        made = [Entry(0, task.start + n, text, "00") for n, text in enumerate(texts)]
        return made, Counter({"no words for it": 2})

    def check(self, task: CheckTask) -> Any:
        self.asked.append(f"check {len(task.entries)}")
        wrong = [WRONG in entry.program.ops for entry in task.entries]
        return {place: failing() if bad else PASS for place, bad in enumerate(wrong)}, []

    def confirm(self, task: ConfirmTask) -> Group | None:
        self.asked.append("confirm" if task.group is None else "localize")
        if task.group is not None:
            return replace(task.group, localized=True, op="neg")
        return group_of(WRONG) if self.shows_again else None


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    made = World()
    monkeypatch.setattr(GenerateTask, "run", lambda self, *_: made.generate(self))
    monkeypatch.setattr(CheckTask, "run", lambda self, *_: made.check(self))
    monkeypatch.setattr(ConfirmTask, "run", lambda self, *_: made.confirm(self))
    monkeypatch.setattr(drive, "_ENOUGH_WAITING", 1)
    return made


@pytest.fixture
def corpus(tmp_path: Path) -> Iterator[Corpus]:
    with Corpus(tmp_path / "f", write=True) as made:
        made.settle({"compiler": "inductor"})
        yield made


def _run(corpus: Corpus, programs: int, progress: Any = None, **more: Any) -> FuzzEnd:
    asked = FuzzOptions(chunk=2, **more)
    return run_fuzz(asked, corpus, seconds=None, programs=programs, progress=progress)


def test_few_programs_are_generated_at_first_and_no_more_than_are_missing(world: World, corpus: Corpus) -> None:
    _run(corpus, 1)
    assert world.generated == [16]
    world.generated.clear()
    _run(corpus, 80)
    few, *others = world.generated
    assert few == 77  # three wait
    assert others[0] < few


def test_without_a_number_the_first_programs_are_checked_before_more_are_generated(
    world: World, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drive, "_ENOUGH_WAITING", 48)
    world.ends_with = 2
    with pytest.raises(FuzzError, match="enough"):
        run_fuzz(FuzzOptions(chunk=2), corpus, seconds=None, programs=None)
    assert world.asked[:2] == ["generate 0", "check 2"]
    assert world.generated == [16, 96]


def test_a_failure_is_confirmed_before_more_is_checked_and_then_localized(world: World, corpus: Corpus) -> None:
    found: list[Group] = []
    ended = _run(corpus, 4, SimpleNamespace(found=found.append, tell=lambda: None))
    assert world.asked == ["generate 0", "check 2", "confirm", "localize", "check 2"]
    assert (ended.checked, ended.waiting) == (4, 0)
    assert ended.left_out == {"no words for it": 2}
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
        both = task.entry is not None and len(task.entry.program.ops) == 2
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
    assert world.asked == ["check 2"]
    assert corpus.totals().checked == 4
    world.asked.clear()
    _run(corpus, 2, localize=True)
    assert world.asked[0] == "localize"
    assert "generate 4" in world.asked


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
        return {place: failing(**STRIDES) for place in range(len(task.entries))}, []

    monkeypatch.setattr(world, "check", check)
    _run(corpus, 4)
    assert world.asked == ["generate 0"]
    (group,) = corpus.groups()
    assert group.difference is not None
    assert group.met == 4
    assert not corpus.failures()


def test_failures_that_were_not_confirmed_in_time_wait(world: World, corpus: Corpus) -> None:
    _run(corpus, 2)
    with Corpus(corpus.path) as other:
        assert not other.failures()
    first = corpus.waiting()[-1]
    corpus.add_results({first.name: failing()})
    ended = run_fuzz(FuzzOptions(), corpus, seconds=-1.0)
    assert ended.checked == 0
    assert [entry.name for entry, _ in corpus.failures()] == [first.name]


def test_an_error_of_a_task_ends_the_run(world: World, corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_task: GenerateTask) -> Any:
        raise FuzzError("--ops names nothing")

    monkeypatch.setattr(world, "generate", refuse)
    with pytest.raises(FuzzError, match="--ops names nothing"):
        _run(corpus, 4)


@pytest.mark.parametrize("alone", ["pass", "crash", "never"])
def test_what_ends_a_process_only_together_is_confirmed_as_one_program(
    world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, alone: str
) -> None:
    """Where its programs pass alone, all as one are confirmed. A run that ends before that does not pass."""
    died = failing("crash", "crash.signal", status="crash", program=encode_program(program_of("torch.exp", WRONG)))
    confirmed: list[str] = []

    def check(self: CheckTask, *_: Any) -> Any:
        if self.death is None:
            death = Death(died, len(self.entries))
            return {}, [CheckTask([entry], 1, death) for entry in self.entries]
        return {0: failing("crash", "crash.signal", status="crash") if alone == "crash" else PASS}, []

    monkeypatch.setattr(CheckTask, "run", check)
    monkeypatch.setattr(ConfirmTask, "run", lambda self, *_: confirmed.append(self.text))
    if alone == "never":
        monkeypatch.setattr(drive._Run, "_next_check", _once(drive._Run._next_check))
    with Corpus(tmp_path / "f", write=True) as corpus:
        corpus.settle({"compiler": "inductor"})
        run_fuzz(FuzzOptions(localize=False), corpus, seconds=None, programs=4)
        summary = summarize(corpus, set())
    assert (died.program in confirmed) == (alone == "pass")
    assert summary.verdict is Verdict.INCONCLUSIVE
    if alone == "never":
        assert any("were in a process that ended, and not checked alone" in doubt for doubt in summary.doubts)
        with Corpus(tmp_path / "f", write=True) as corpus:  # the next run checks them again
            assert not corpus.waiting()
            corpus.check_unsettled_again()
            assert len(corpus.waiting()) == 4


def _once(method: Any) -> Any:
    """A method that gives its first result, one generation and one check, and then nothing more."""
    given: list[Any] = []

    def first(self: Any) -> Any:
        if any(isinstance(task, CheckTask) for task in given):
            return None
        given.append(method(self))
        return given[-1]

    return first
