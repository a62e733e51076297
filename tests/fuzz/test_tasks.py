"""What a worker's answer means, also where the worker died."""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import Any

import pytest

from checked_backend.errors import FuzzError
from checked_backend.fuzz import drive
from checked_backend.fuzz.corpus import Entry, Record
from checked_backend.fuzz.drive import CheckTask, ConfirmTask
from checked_backend.fuzz.program import decode_program
from checked_backend.fuzz.results import Group, ProgramResult, signature_of
from checked_backend.fuzz.worker import FuzzOptions
from checked_backend.process.job import IMPORTING, JobEnd, JobResources, RunningProcesses
from checked_backend.runs.case import Status
from tests.support.fuzz_tools import PASS, answer, answering, entry_of, failing, group_of, program_of

ENTRIES = [entry_of(number, program_of("torch.neg")) for number in range(4)]
AT = [replace(entry, result=ProgramResult(Status.LOST)) for entry in ENTRIES]
FAILED = replace(ENTRIES[0], result=failing())


def _check(monkeypatch: pytest.MonkeyPatch, given: JobEnd) -> tuple[dict[int, ProgramResult], CheckTask | None]:
    """What came out for which numbers, and the next task, if a worker ends so."""
    monkeypatch.setattr(drive, "_run", answering(given, asked=[]))
    found, again = CheckTask(range(4), 2).run(FuzzOptions(), RunningProcesses())
    return {entry.number: entry.result for entry in found}, again


def _confirm(monkeypatch: pytest.MonkeyPatch, given: JobEnd, entry: Entry = FAILED) -> tuple[Group | None, Any]:
    """The group, and what was asked."""
    asked: list[Any] = []
    monkeypatch.setattr(drive, "_run", answering(given, asked=asked))
    return ConfirmTask(entry).run(FuzzOptions(), RunningProcesses()), asked[0]


def test_all_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _check(monkeypatch, answer(Record(programs=ENTRIES), "done")) == (dict.fromkeys(range(4), PASS), None)


def test_the_program_that_killed_its_process_is_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    found, again = _check(monkeypatch, answer(Record(programs=[*ENTRIES[:2], AT[2]]), "checking", -signal.SIGSEGV))
    assert (found[2].status, found[2].detail, found[2].actual) == (Status.CRASH, "crash.signal", "SIGSEGV")
    assert set(found) == {0, 1, 2}  # what was to come next is missing, and so its turn comes
    assert again is None


@pytest.mark.parametrize("status", [-signal.SIGSEGV, 0])
def test_a_batch_that_ends_its_process_fails_as_one_program_and_is_taken_apart(
    monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    found, again = _check(monkeypatch, answer(Record(programs=[ENTRIES[0], *AT[1:]]), "checking", status))
    assert set(found) == {0, 1}
    assert found[1].status is Status.CRASH
    assert found[1].detail == ("crash.signal" if status else "crash.exit")
    assert decode_program(found[1].program).ops == ("torch.neg",) * 3
    assert again == CheckTask([2, 3], 1)


def test_a_batch_that_needs_too_much_memory_is_checked_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    died = replace(answer(Record(programs=AT[:2]), "checking", 1), log="MemoryError")
    assert _check(monkeypatch, died) == ({}, CheckTask([0, 1], 1))


def test_a_hang_is_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    found, again = _check(monkeypatch, answer(Record(programs=AT[:1]), "checking", -9, overdue=5.0))
    assert (found[0].status, found[0].detail) == (Status.HANG, "crash.hang")
    assert again is None


def test_who_is_stopped_from_here_is_not_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    given = answer(Record(programs=[ENTRIES[0], *AT[1:]]), "checking", -9)
    monkeypatch.setattr(drive, "_run", answering(given, asked=[]))
    running = RunningProcesses()
    running.stop()
    assert CheckTask(range(4), 2).run(FuzzOptions(), running) == ([ENTRIES[0]], None)


def test_a_failure_that_shows_again_is_confirmed_with_the_smaller_program(monkeypatch: pytest.MonkeyPatch) -> None:
    told = answer(Record(group=group_of("torch.exp")))
    group, asked = _confirm(monkeypatch, told, entry_of(0, program_of("torch.neg", "torch.exp"), failing()))
    assert (group.confirmed, group.op) == (True, "exp")
    assert not asked["isolate"]


def test_a_failure_that_does_not_show_again_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    group, _ = _confirm(monkeypatch, answer(Record(group=signature_of(program_of("torch.neg"), PASS))))
    assert group is None


def test_a_crash_is_looked_at_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    died = replace(FAILED, result=failing("crash", "crash.signal", "crash"))
    group, asked = _confirm(monkeypatch, answer(None, "confirming", -signal.SIGSEGV), died)
    assert asked["isolate"]
    assert group.confirmed
    assert group.detail == "crash.signal: SIGSEGV"


def test_localizing_keeps_what_is_known_of_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    known = replace(group_of("torch.exp", "torch.neg"), script="x", script_shows=True)
    told = answer(Record(group=signature_of(known.program, failing(op="aten.exp.default"))))
    monkeypatch.setattr(drive, "_run", answering(told, asked=[]))
    made = ConfirmTask(known).run(FuzzOptions(), RunningProcesses())
    assert (made.op, made.localized, made.script, made.script_shows) == ("exp", True, "x", True)


def test_too_little_memory_for_torch_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    short = replace(answer(None, IMPORTING, 1), log="Traceback\n  File ...\nMemoryError\n")
    monkeypatch.setattr(drive, "_run", answering(short, asked=[]))
    with pytest.raises(FuzzError) as caught:
        CheckTask(range(4), 2).run(FuzzOptions(place=JobResources(memory=10**7)), RunningProcesses())
    assert str(caught.value) == "torch cannot be imported within 10000000 bytes of memory; --memory may give more"


def test_a_program_that_ends_the_process_that_makes_it_costs_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    found, again = _check(monkeypatch, answer(Record(programs=ENTRIES[:2]), "generating program 2", -signal.SIGSEGV))
    assert {number: result.status for number, result in found.items()} == {
        0: Status.PASS,
        1: Status.PASS,
        2: Status.SKIPPED,
    }
    assert found[2].message == "making it was killed by SIGSEGV"
    assert again is None


def test_a_process_that_ends_before_it_compiles_blames_no_program(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = replace(answer(None, "loading the compiler", 1), log="ImportError: libfoo")
    with pytest.raises(FuzzError, match=r"exited with status 1 while loading the compiler.*\nImportError: libfoo"):
        _check(monkeypatch, failed)
    with pytest.raises(FuzzError, match="libfoo"):
        _confirm(monkeypatch, failed)
