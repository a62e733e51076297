"""The selftest: what counts as caught."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from checked_backend.findings import Kind
from checked_backend.fuzz import examine as examining
from checked_backend.fuzz import selftest
from checked_backend.fuzz.planted import FAULTS
from checked_backend.fuzz.selftest import Tried, render_text
from checked_backend.fuzz.worker import _selftest
from checked_backend.process.child import Ended
from checked_backend.sweep.job import Answer, JobResources
from checked_backend.sweep.status import Status
from checked_backend.sweep.worker import AnswerFolder
from tests.support.fuzz_tools import PASS


def _tried(faults: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch, found: Mapping[str, Any]) -> list[Any]:
    """What the worker answers if the checks of a compiler find this, the same for each program."""
    names = {id(fault.compiler): name for name, fault in FAULTS.items()}

    def check_program(_program: Any, compiler: Any) -> Any:
        kind = found.get(compiler if isinstance(compiler, str) else names[id(compiler)], "")
        return replace(PASS, kind=kind, detail=kind, message=f"{kind}: told") if kind else PASS

    monkeypatch.setattr(examining, "check_program", check_program)
    _selftest({"faults": faults, "seed": 1, "most": 3, "control": 2}, AnswerFolder(folder))
    found_text: list[Any] = json.loads((folder / "result.json").read_text())
    return found_text


def test_what_torch_alone_gets_wrong_in_the_same_way_is_no_catch_and_no_fault_of_the_control(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = {"logic": "logic", "none": "logic", "alias": "logic", "nonfinite": "nonfinite", "eager": "logic"}
    logic, alias, nonfinite, control = _tried(["logic", "alias", "nonfinite", "none"], tmp_path, monkeypatch, wrong)
    assert (logic["caught"], logic["programs"], logic["left_out"]) == (False, 3, 3)
    assert (alias["caught"], alias["left_out"]) == (False, 0)  # another kind than its own is none
    assert (nonfinite["caught"], nonfinite["programs"], nonfinite["finding"]) == (True, 1, "nonfinite: told")
    assert (control["caught"], control["programs"], control["left_out"]) == (False, 2, 2)


def test_a_finding_of_the_control_that_torch_alone_has_not_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (control,) = _tried(["none"], tmp_path, monkeypatch, {"none": "logic", "eager": "alias"})
    assert (control["caught"], control["programs"]) == (True, 1)


def test_each_kind_of_finding_that_accuses_a_compiler_has_a_planted_fault() -> None:
    planted = set[Kind]().union(*(fault.kinds for fault in FAULTS.values()))
    without = {Kind.EXCEPTION}  # where eager raises: programs are drawn that eager runs
    assert planted == {kind for kind in Kind if kind.fails} - without


def test_a_control_that_gets_no_verdicts_is_not_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    undecided = replace(PASS, status=Status.INCONCLUSIVE, message="the check itself failed")
    monkeypatch.setattr(examining, "check_program", lambda *_: undecided)
    _selftest({"faults": ["none", "logic"], "seed": 1, "most": 3, "control": 2}, AnswerFolder(tmp_path))
    control, logic = (Tried(**raw) for raw in json.loads((tmp_path / "result.json").read_text()))
    assert (control.caught, control.undecided, control.right, logic.right) == (False, 2, False, False)
    assert "WRONG  control     2 programs, 2 without a verdict: nothing was reported" in render_text([control])


def test_faults_that_the_time_did_not_suffice_for_are_told_beside_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    told = [{"fault": "logic", "words": "wrong", "caught": True, "programs": 3, "finding": "logic: output[0]"}]
    slow = Answer(json.dumps(told), Ended(-9, "trying nonfinite", 300.0), "", 300.0, starved=False)
    monkeypatch.setattr(selftest, "run_worker", lambda *_args, **_more: slow)
    monkeypatch.setattr(selftest, "_lethal", lambda name, _place: Tried(name, "kills", True, 1, finding="crash"))
    results = {result.fault: result for result in selftest.run_selftest(JobResources())}
    assert set(results) == set(FAULTS)
    assert (results["logic"].right, results["nonfinite"].right, results["none"].right) == (True, False, False)
    text = render_text(list(results.values()))
    assert "MISSED nonfinite" in text
    assert "its process had not ended after 300 s while trying nonfinite" in text
