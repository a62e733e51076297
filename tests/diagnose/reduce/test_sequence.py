"""Whole reductions, with compilers that are wrong on purpose."""

from __future__ import annotations

import faulthandler
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from checked_backend.diagnose.oracle import exception_oracle, verdict_oracle
from checked_backend.diagnose.reduce import problem
from checked_backend.diagnose.reduce.problem import Problem
from checked_backend.diagnose.reduce.sequence import _STRUCTURE, reduce
from checked_backend.findings import Kind
from checked_backend.regions.graph_case import GraphCase
from tests.support import faults
from tests.support.raising import raising
from tests.support.reduce_tools import case_of, targets

pytestmark = pytest.mark.process

aten = torch.ops.aten


def chain(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    a = aten.add.Tensor(x, y)
    b = aten.relu.default(a)
    c = aten.mul.Tensor(b, y)
    d = aten.sub.Tensor(c, x)
    return aten.exp.default(y), d, aten.neg.default(b)


def reduced(case: GraphCase, subject: str, kind: Kind = Kind.LOGIC, **further: Any) -> Problem:
    return reduce(case, subject=subject, kind=kind, deadline=time.monotonic() + 300, **further)


def test_one_wrong_operator_is_all_that_stays() -> None:
    case = case_of(chain, torch.randn(4, 6), torch.randn(4, 6), compiler=faults.wrong_operator("aten.relu.default"))
    reduction = reduced(case, "output[1]")
    assert (reduction.shown, reduction.stopped) == (True, "done")
    assert targets(reduction) == ["aten.relu.default"]
    assert reduction.best.subject == "output[0]"
    again = verdict_oracle(reduction.best.case, 60)
    assert [(found.kind, found.subject) for found in again] == [(Kind.LOGIC, "output[0]")]


def test_what_should_have_raised_is_reduced() -> None:
    def looked_up(x: Tensor, at: Tensor) -> tuple[Tensor, ...]:
        return (aten.index_select.default(x, 0, at),)

    def lenient(gm: fx.GraphModule, _examples: Sequence[Any]) -> Any:
        return lambda x, at: gm(x, at.clamp(max=len(x) - 1))

    case = case_of(looked_up, torch.randn(5, 6), torch.tensor([9, 1, 7]), compiler=lenient)
    reduction = reduced(case, "output[0]", Kind.EXCEPTION, oracle=exception_oracle)
    x, at = reduction.best.case.inputs
    assert reduction.shown
    assert (x.numel(), at.numel()) == (1, 1)
    assert at.item() >= len(x)
    [finding] = exception_oracle(reduction.best.case, 60) or ()
    assert (finding.kind, finding.detail) == (Kind.EXCEPTION, "exception.missing")
    assert "index out of range" in finding.message
    assert exception_oracle(case_of(looked_up, *case.inputs, compiler="eager"), 60) == ()


def test_what_is_right_is_not_reduced() -> None:
    reduction = reduced(case_of(chain, torch.randn(4), torch.randn(4), compiler="eager"), "output[1]")
    assert not reduction.shown
    assert len(targets(reduction)) == 6


def test_at_the_deadline_and_at_ctrl_c_the_best_so_far_stays() -> None:
    case = case_of(chain, torch.randn(4, 6), torch.randn(4, 6), compiler=faults.wrong_operator("aten.relu.default"))
    seen: list[str] = []

    def interrupt(line: str) -> None:
        seen.append(line)
        if int(line.partition(" ")[0]) < 6:
            raise KeyboardInterrupt

    stopped = reduced(case, "output[1]", progress=interrupt)
    assert stopped.stopped == "interrupted"
    assert 1 < len(targets(stopped)) < 6
    assert " tried, " in seen[-1]
    late = reduce(case, subject="output[1]", kind=Kind.LOGIC, deadline=time.monotonic())
    assert (late.stopped, late.tried, len(targets(late))) == ("deadline", 0, 6)


def test_a_compiler_that_dies_or_hangs_is_one_rejected_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(problem, "MIN_TIMEOUT_S", 2.0)
    monkeypatch.setattr(problem, "TIMEOUT_FACTOR", 2.0)
    events = tmp_path / "events"
    right = faults.wrong_operator("aten.relu.default")

    def compiler(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        found = [str(node.target) for node in gm.graph.nodes if node.op == "call_function"]
        if len(gm.graph.output_node().args[0]) > 3:  # every call on its own
            with events.open("a") as stream:
                stream.write("hangs\n")
            time.sleep(600)
        if found[-1] == "aten.mul.Tensor":  # an earlier output
            with events.open("a") as stream:
                stream.write("dies\n")
            faulthandler.disable()  # which would print where every thread is
            os.abort()
        return right(gm, inputs)

    reduction = reduced(case_of(chain, torch.randn(4, 6), torch.randn(4, 6), compiler=compiler), "output[1]")
    assert (reduction.shown, reduction.stopped) == (True, "done")
    assert targets(reduction)[0] == "aten.relu.default"
    assert len(targets(reduction)) <= 3
    assert {"hangs", "dies"} <= set(events.read_text().split())


def test_a_step_that_fails_is_not_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    failing = raising(RuntimeError("no way"))
    structure = tuple((name, failing if name == "dropping outputs" else step) for name, step in _STRUCTURE)
    monkeypatch.setattr("checked_backend.diagnose.reduce.sequence._STRUCTURE", structure)
    case = case_of(chain, torch.randn(4, 4), torch.randn(4, 4), compiler=faults.wrong_operator("aten.relu.default"))
    found = reduced(case, "output[1]")
    assert found.stopped == "done"
    assert found.size.calls < 5
