"""Calls again: in other tensors, and in the first call's tensors with other values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from checked_backend import Report, Verdict, check
from checked_backend.checking.check import Effort
from checked_backend.checking.copies import refill
from tests.support import faults


def _program(x: torch.Tensor) -> torch.Tensor:
    return x.exp() + 1


def _write(x: torch.Tensor) -> torch.Tensor:
    return x.mul_(2).exp()


def _called_again(function: Callable[..., Any], compiler: Any, make: Callable[[float], torch.Tensor]) -> Report:
    effort = Effort(further=[(make(2.0),)], refilled=[(make(3.0),)])
    return check(function, (make(1.0),), compiler=compiler, gradients=False, effort=effort)


def _floats(value: float) -> torch.Tensor:
    return torch.full((3,), value)


@pytest.mark.parametrize("function", [_program, _write])
@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_a_right_compiler_passes(function: Callable[..., Any], compiler: str) -> None:
    report = _called_again(function, compiler, _floats)
    assert report.verdict is Verdict.PASS, report
    assert sum(region.checked_calls for region in report.coverage.regions) == 3


def test_a_write_to_what_an_earlier_call_was_given_is_found() -> None:
    report = _called_again(_program, faults.writes_to_earlier_inputs, _floats)
    assert {(f.detail, f.subject) for f in report.findings} == {("mutation.unexpected", "mutated[x]")}
    assert "a later call of the compiled program writes to this argument of call 2" in report.findings[0].message


@pytest.mark.parametrize("make", [_floats, lambda value: torch.full((3,), int(value))], ids=["_floats", "_integers"])
def test_a_result_that_is_remembered_by_the_address_of_its_input_is_found(make: Callable[[float], Any]) -> None:
    report = _called_again(_program, faults.remembers_by_address, make)
    assert report.verdict is Verdict.FAIL
    assert any("in call 3 of 3" in finding.message for finding in report.findings)


def _named(*tensors: torch.Tensor) -> Sequence[tuple[str, object]]:
    return [(str(place), tensor) for place, tensor in enumerate(tensors)]


def test_values_go_into_the_memory_that_there_is() -> None:
    held, fresh = torch.zeros(6), torch.arange(6.0)
    assert refill(_named(held[1:3], held[::2]), _named(fresh[1:3], fresh[::2]))
    assert torch.equal(held, fresh)


def test_what_a_call_has_changed_otherwise_is_not_refilled() -> None:
    changed = torch.zeros(4).unsqueeze_(0)
    for held in (changed, torch.zeros(4).mul_(torch.ones(4, requires_grad=True))):
        assert not refill(_named(held), _named(torch.ones(4)))
        assert not held.detach().any()
    assert not refill([("a", 1)], [("a", 2)])
