"""What a worker's answer means, also where the worker died."""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import Any

import pytest

from checked_backend.errors import FuzzError
from checked_backend.fuzz import tasks
from checked_backend.fuzz.corpus import Entry
from checked_backend.fuzz.program import decode_program, encode_program
from checked_backend.fuzz.tasks import CheckTask, ConfirmTask, FuzzOptions, GenerateTask, Stopped
from checked_backend.process.job import IMPORTING, JobEnd, JobResources, RunningProcesses
from checked_backend.runs.status import Status
from tests.support.fuzz_tools import PASS, answer, answering, failing, group_of, program_of

ENTRIES = [Entry(0, place, encode_program(program_of("torch.neg")), "00") for place in range(4)]


def _raw(examined: Any) -> Any:
    return examined.to_json()


def _check(monkeypatch: pytest.MonkeyPatch, given: JobEnd, count: int = 4) -> tuple[dict[int, Any], list[CheckTask]]:
    monkeypatch.setattr(tasks, "_run", answering(given, asked=[]))
    return CheckTask(ENTRIES[:count], 2).run(FuzzOptions(), RunningProcesses())


def test_all_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    found, again = _check(monkeypatch, answer({place: _raw(PASS) for place in range(4)}))
    assert [found[place].status for place in range(4)] == [Status.PASS] * 4
    assert not again


def test_the_program_that_killed_its_process_is_blamed_and_the_others_run_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    died = answer({0: _raw(PASS), 1: _raw(PASS)}, "program 2 2 3", -signal.SIGSEGV)
    found, again = _check(monkeypatch, died)
    assert (found[2].status, found[2].detail, found[2].actual) == (Status.CRASH, "crash.signal", "SIGSEGV")
    assert [[entry.number for entry in task.entries] for task in again] == [[3]]


def test_a_batch_that_kills_its_process_is_taken_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    died = answer({0: _raw(PASS), 1: _raw(PASS)}, "batch 2 3", -signal.SIGSEGV)
    found, again = _check(monkeypatch, died)
    assert set(found) == {0, 1}
    assert [[entry.number for entry in task.entries] for task in again] == [[2], [3]]


def test_a_hang_is_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    found, again = _check(monkeypatch, answer(None, "program 0 0 0", -9, overdue=5.0), count=1)
    assert (found[0].status, found[0].detail) == (Status.HANG, "crash.hang")
    assert not again


def test_what_a_process_had_no_time_for_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    found, again = _check(monkeypatch, answer({0: _raw(PASS), 1: _raw(PASS)}, "out of time"))
    assert set(found) == {0, 1}
    assert not again


def test_a_compiler_that_ends_its_process_without_an_error_is_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    found, again = _check(monkeypatch, answer({0: _raw(PASS)}, "program 1 1 1", 0), count=2)
    assert (found[1].status, found[1].detail) == (Status.CRASH, "crash.exit")
    assert found[1].message == "the process exited with status 0"
    assert not again
    _, again = _check(monkeypatch, answer({}, "batch 0 1", 0), count=2)
    assert [[entry.number for entry in task.entries] for task in again] == [[0], [1]]


def test_who_is_stopped_from_here_is_not_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "_run", answering(answer(None, "program 0 0 3", -9), asked=[]))
    running = RunningProcesses()
    running.stop()
    assert CheckTask(ENTRIES, 2).run(FuzzOptions(), running) == ({}, [])
    monkeypatch.setattr(tasks, "_run", answering(answer(None, "confirming", -9), asked=[]))
    with pytest.raises(Stopped):
        ConfirmTask(ENTRIES[0].text, failing(), ENTRIES[0]).run(FuzzOptions(), running)


def test_a_failure_that_shows_again_is_confirmed_with_the_smaller_program(monkeypatch: pytest.MonkeyPatch) -> None:
    small = encode_program(program_of("torch.exp"))
    asked: list[Any] = []
    told = answer({"program": small, "result": _raw(failing()), "script": "x", "script_shows": True})
    monkeypatch.setattr(tasks, "_run", answering(told, asked=asked))
    group = ConfirmTask(encode_program(program_of("torch.neg", "torch.exp")), failing(), ENTRIES[0]).run(
        FuzzOptions(), RunningProcesses()
    )
    assert group is not None
    assert (group.confirmed, group.op, group.script, group.script_shows) == (True, "exp", "x", True)
    assert not asked[0]["isolate"]


def test_a_failure_that_does_not_show_again_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    told = answer({"program": ENTRIES[0].text, "result": _raw(PASS)})
    monkeypatch.setattr(tasks, "_run", answering(told, asked=[]))
    assert ConfirmTask(ENTRIES[0].text, failing(), ENTRIES[0]).run(FuzzOptions(), RunningProcesses()) is None


def test_a_crash_is_looked_at_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(tasks, "_run", answering(answer(None, "confirming", -signal.SIGSEGV), asked=asked))
    group = ConfirmTask(ENTRIES[0].text, failing("crash", "crash.signal", "crash"), ENTRIES[0]).run(
        FuzzOptions(), RunningProcesses()
    )
    assert asked[0]["isolate"]
    assert group is not None
    assert group.confirmed
    assert group.detail == "crash.signal: SIGSEGV"


def test_localizing_keeps_what_is_known_of_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    known = group_of("torch.exp", "torch.neg")
    told = answer({"program": encode_program(known.program), "result": _raw(failing(op="aten.exp.default"))})
    monkeypatch.setattr(tasks, "_run", answering(told, asked=[]))
    found = ConfirmTask.of_group(known).run(FuzzOptions(), RunningProcesses())
    assert found is not None
    assert (found.op, found.localized) == ("exp", True)


def test_programs_that_cannot_be_generated_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "_run", answering(answer({"refused": "--ops names nothing"}), asked=[]))
    with pytest.raises(FuzzError, match="--ops names nothing"):
        GenerateTask(0, 4).run(FuzzOptions(), RunningProcesses())
    monkeypatch.setattr(tasks, "_run", answering(answer(None, "generating", -11), asked=[]))
    with pytest.raises(FuzzError, match="no programs were generated: the process was killed by SIGSEGV"):
        GenerateTask(0, 4).run(FuzzOptions(), RunningProcesses())


def test_too_little_memory_for_torch_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    short = replace(answer(None, IMPORTING, 1), log="Traceback\n  File ...\nMemoryError\n")
    monkeypatch.setattr(tasks, "_run", answering(short, asked=[]))
    with pytest.raises(FuzzError) as caught:
        GenerateTask(0, 4).run(FuzzOptions(place=JobResources(memory=10**7)), RunningProcesses())
    assert str(caught.value) == "torch cannot be imported within 10000000 bytes of memory; --memory may give more"


def test_a_program_that_ends_the_process_that_makes_it_costs_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    told = (
        answer({"programs": [[8, "eight", "", []]], "left_out": {"odd": 1}}, "generating program 10", -signal.SIGSEGV),
        answer({"programs": [[11, "eleven", "", []]], "left_out": {"odd": 2}}, "done"),
    )
    monkeypatch.setattr(tasks, "_run", answering(*told, asked=asked))
    made, left_out = GenerateTask(8, 5).run(FuzzOptions(), RunningProcesses())
    assert made == [Entry(0, 8, "eight", ""), Entry(0, 11, "eleven", "")]
    assert left_out == {"odd": 3, "making it was killed by SIGSEGV": 1}
    assert [(one["start"], one["count"]) for one in asked] == [(8, 5), (11, 2)]


def test_a_generator_that_always_ends_its_process_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    deaths = [answer(None, f"generating program {number}", -signal.SIGSEGV) for number in range(96)]
    monkeypatch.setattr(tasks, "_run", answering(*deaths, asked=asked))
    with pytest.raises(FuzzError, match=r"no programs were generated: .*making it was killed by SIGSEGV"):
        GenerateTask(0, 96).run(FuzzOptions(), RunningProcesses())
    assert len(asked) == 6


def test_the_death_of_a_batch_is_kept_until_its_programs_were_checked_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    _, again = _check(monkeypatch, answer({}, "batch 0 2", -signal.SIGSEGV), count=3)
    (death,) = {id(task.death): task.death for task in again}.values()
    assert death is not None
    assert (death.left, death.result.status, death.result.detail) == (3, Status.CRASH, "crash.signal")
    assert decode_program(death.result.program).ops == ("torch.neg",) * 3


def test_a_process_that_ends_before_it_compiles_blames_no_program(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = replace(answer(None, "loading the compiler", 1), log="ImportError: libfoo")
    for entries in (ENTRIES, ENTRIES[:1]):
        monkeypatch.setattr(tasks, "_run", answering(failed, asked=[]))
        with pytest.raises(FuzzError, match=r"exited with status 1 while loading the compiler.*\nImportError: libfoo"):
            CheckTask(entries, 2).run(FuzzOptions(), RunningProcesses())
    monkeypatch.setattr(tasks, "_run", answering(failed, asked=[]))
    with pytest.raises(FuzzError, match="libfoo"):
        ConfirmTask(ENTRIES[0].text, failing(), ENTRIES[0]).run(FuzzOptions(), RunningProcesses())
