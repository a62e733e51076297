"""The selftest: what counts as caught."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from checked_backend.findings import Kind
from checked_backend.fuzz import examine as examining
from checked_backend.fuzz import selftest
from checked_backend.fuzz.planted import FAULTS
from checked_backend.fuzz.results import ProgramResult
from checked_backend.fuzz.selftest import PLAIN, Tried, render_text, try_faults
from checked_backend.process.job import JobEnd, JobResources
from checked_backend.runs.case import Status
from tests.support.fuzz_tools import PASS

OF_CONTROL = len(PLAIN) + 4  # and those in one compile


def _tried(faults: list[str], monkeypatch: pytest.MonkeyPatch, found: Mapping[str, Any]) -> list[Tried]:
    """What comes out if the checks of a compiler find this, the same for each random program."""
    names = {id(fault.compiler): name for name, fault in FAULTS.items()}

    def check_program(program: Any, compiler: Any) -> Any:
        kind = found.get(compiler if isinstance(compiler, str) else names[id(compiler)], "")
        told = kind and program not in PLAIN.values()
        return replace(PASS, kind=kind, detail=kind, message=f"{kind}: told") if told else PASS

    monkeypatch.setattr(examining, "check_program", check_program)
    return [*try_faults(faults, seed=1, most=3, control=2, note=lambda _: None)]


def test_what_torch_alone_gets_wrong_in_the_same_way_is_no_catch_and_no_fault_of_the_control(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wrong = {"logic": "logic", "none": "logic", "alias": "logic", "nonfinite": "nonfinite", "eager": "logic"}
    logic, alias, nonfinite, control = _tried(["logic", "alias", "nonfinite", "none"], monkeypatch, wrong)
    assert (logic.caught, logic.programs, logic.left_out) == (False, 3, 3)
    assert (alias.caught, alias.left_out) == (False, 0)  # another kind than its own is none
    assert (nonfinite.caught, nonfinite.programs, nonfinite.finding) == (True, 1, "nonfinite: told")
    assert (control.caught, control.programs, control.left_out) == (False, OF_CONTROL + 2, 2)


def test_a_finding_of_the_control_that_torch_alone_has_not_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    (control,) = _tried(["none"], monkeypatch, {"none": "logic", "eager": "alias"})
    assert (control.caught, control.programs) == (True, OF_CONTROL + 1)


def test_another_fault_of_the_same_kind_is_no_catch(monkeypatch: pytest.MonkeyPatch) -> None:
    (overwrites,) = _tried(["overwrites"], monkeypatch, {"overwrites": "alias"})
    assert not overwrites.caught


@pytest.mark.parametrize(
    "came", [ProgramResult(Status.FAIL, "wrong", kind="logic"), ProgramResult(Status.INCONCLUSIVE, "why")]
)
def test_nothing_excuses_what_is_reported_of_a_plain_program(
    monkeypatch: pytest.MonkeyPatch, came: ProgramResult
) -> None:
    monkeypatch.setattr(examining, "check_program", lambda program, _: came if program == PLAIN["half"] else PASS)
    (control,) = try_faults(["none"], seed=1, most=3, control=0, note=lambda _: None)
    assert (control.caught, control.right) == (True, False)
    assert control.finding == f"a plain program (half): {came.status.value}: {came.message}"


def test_a_compile_that_is_shared_accuses_the_wrong_program_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    (shared,) = try_faults(["shared"], seed=1, most=3, control=0, note=lambda _: None)
    assert (shared.caught, shared.programs) == (True, 4)
    wrong = ProgramResult(Status.FAIL, "wrong", kind="logic")
    monkeypatch.setattr(examining, "examine", lambda programs, _: ((name, wrong) for name in programs))
    (shared,) = try_faults(["shared"], seed=1, most=3, control=0, note=lambda _: None)
    assert (shared.caught, shared.finding) == (False, "accused beside it: sums, integers, views")


def test_each_kind_of_finding_that_accuses_a_compiler_has_a_planted_fault() -> None:
    planted = {fault.kind for fault in FAULTS.values()} - {None}
    without = {Kind.EXCEPTION}  # where eager raises: programs are drawn that eager runs
    assert planted == {kind for kind in Kind if kind.fails} - without


def test_a_control_that_gets_no_verdicts_is_not_right(monkeypatch: pytest.MonkeyPatch) -> None:
    undecided = replace(PASS, status=Status.INCONCLUSIVE, message="the check itself failed")
    monkeypatch.setattr(examining, "check_program", lambda program, _: PASS if program in PLAIN.values() else undecided)
    control, logic = try_faults(["none", "logic"], seed=1, most=3, control=20, note=lambda _: None)
    assert (control.caught, control.undecided, control.right, logic.right) == (False, 20, False, False)
    assert f"WRONG  control     {OF_CONTROL + 20} programs, 20 without a verdict" in render_text([control])


def test_faults_that_the_time_did_not_suffice_for_are_told_beside_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    told = [{"fault": "logic", "words": "wrong", "caught": True, "programs": 3, "finding": "logic: output[0]"}]
    slow = JobEnd(json.dumps(told), "trying nonfinite", -9, "", 300.0, 300.0)
    monkeypatch.setattr(selftest, "run", lambda *_args, **_more: slow)
    results = {result.fault: result for result in selftest.run_selftest(JobResources())}
    assert set(results) == set(FAULTS)
    assert (results["logic"].right, results["nonfinite"].right, results["none"].right) == (True, False, False)
    text = render_text(list(results.values()))
    assert "MISSED nonfinite" in text
    assert "its process had not ended after 300 s while trying nonfinite" in text
