"""A report says which part of a program Dynamo did not compile, and why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from check_tools import agreed, batch, skips
from torch._dynamo.utils import counters

import checked_backend as cb


def number_of_elements(x: torch.Tensor) -> int:
    return len(torch.argwhere(x))


def its_list(x: torch.Tensor) -> Any:
    return x.tolist()


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (number_of_elements, "Operator `aten.nonzero.default`'s output shape depends on input Tensor data"),
        (its_list, "does not support tracing `tolist()` on non-integer tensors"),
    ],
)
def test_why_no_region_was_compiled(function: Callable[..., Any], reason: str) -> None:
    report = cb.check(function, (batch(),), compiler="eager")
    assert report.verdict is cb.Verdict.INCONCLUSIVE
    assert "the compiled program: Dynamo compiled no region of it: " in skips(report)
    assert reason in skips(report)
    assert "Developer debug context" not in skips(report)


@pytest.mark.parametrize("function", [lambda x: x, lambda x: (x, 3, "text"), lambda x: len(x.shape)])
def test_where_there_is_nothing_to_compile_no_error_can_hide(function: Callable[..., Any]) -> None:
    report = agreed(cb.check(function, (batch(grad=True),), compiler="eager"))
    assert "there is no tensor operation in it" in skips(report)


@pytest.mark.parametrize("setting", ["disable", "stance"])
def test_where_dynamo_does_not_look_nothing_passes(setting: str) -> None:
    if setting == "disable":
        with torch._dynamo.config.patch(disable=True):
            report = cb.check(torch.sin, (batch(),), compiler="eager")
    else:
        with torch.compiler.set_stance("force_eager"):
            report = cb.check(torch.sin, (batch(),), compiler="eager")
    assert report.verdict is cb.Verdict.INCONCLUSIVE
    assert "Dynamo traced none of it: it is switched off" in skips(report)


def test_a_graph_break_between_two_regions_is_a_note() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        scale = x.sin().sum().item()
        return x.cos() * scale

    before = counters["graph_break"].total()
    report = agreed(cb.check(program, (batch(),), compiler="eager"))
    assert len(report.coverage.regions) == 2
    (note,) = report.coverage.notes
    assert note.startswith("graph breaks, around which the program runs in eager: ")
    assert "`Tensor.item()`" in note
    assert counters["graph_break"].total() > before
    without = agreed(cb.check(lambda x: x.cos(), (batch(),), compiler="eager"))
    assert without.coverage.notes == ()


def test_many_graph_breaks_are_cut_short() -> None:
    def program(x: torch.Tensor) -> Any:
        found = [x.sum().item(), x.tolist(), torch.argwhere(x), torch.allclose(x, x), torch.unique(x)]
        return found, x.sin()

    (note,) = cb.check(program, (batch(2, 2),), compiler="eager").coverage.notes
    assert note.endswith("more")
    assert note.count(";") == 3
