"""A graph, its inputs and a compiler, tried; and what of a failed call still counts as wrong."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch._inductor.exc import CppCompileError

from checked_backend.findings import Finding, Kind
from checked_backend.options import CheckOptions
from checked_backend.regions import unsupported
from checked_backend.regions.graph_case import GraphCase, wrong_like
from tests.support import faults
from tests.support.raising import raising
from tests.support.reduce_tools import case_of, graph_of


def scaled_and_shifted(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ops.aten.mul.Tensor(x, 2), torch.ops.aten.add.Tensor(x, y)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_case_finds_what_is_wrong(dynamic: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    inputs = (torch.randn(4, 3), torch.randn(4, 3))
    graph = graph_of(scaled_and_shifted)
    assert GraphCase(graph, inputs, CheckOptions(compiler="eager"), dynamic).findings() == ()
    [found] = GraphCase(graph, inputs, CheckOptions(compiler=faults.one_element(1)), dynamic).findings()
    assert (found.kind, found.subject) == (Kind.LOGIC, "output[1]")
    assert not list(tmp_path.iterdir())  # a case is not a user's check: it writes no report


def test_a_case_that_crashes_is_not_laid_to_the_machine_which_has_compiled_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(unsupported, "nothing_compiles", raising(AssertionError("it compiles the least program")))
    inputs = (torch.randn(4, 3), torch.randn(4, 3))
    [found] = case_of(scaled_and_shifted, *inputs, compiler=raising(CppCompileError(["g++"], "garbage"))).findings()
    assert found.kind is Kind.CRASH


def test_inputs_are_not_changed() -> None:
    x = torch.ones(3)
    assert case_of(lambda x: (torch.ops.aten.mul_.Tensor(x, 2),), x).findings() == ()
    assert torch.equal(x, torch.ones(3))


LOGIC = Finding(Kind.LOGIC, "output[0]", "wrong", "logic")
STRIDE = replace(LOGIC, kind=Kind.STRUCTURE, detail="structure.stride")
SKIPPED = replace(LOGIC, kind=Kind.UNSUPPORTED, detail="unsupported")


def test_a_different_layout_is_wrong_only_where_nothing_else_was() -> None:
    assert wrong_like([LOGIC], [STRIDE, SKIPPED]) == []
    assert wrong_like([LOGIC, STRIDE], [STRIDE, LOGIC]) == [LOGIC]
    assert wrong_like([STRIDE], [STRIDE, SKIPPED]) == [STRIDE]
    severed = replace(STRIDE, more_than_layout="gradients are lost")
    assert wrong_like([LOGIC], [severed]) == [severed]
