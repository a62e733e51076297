"""``nonfinite=True`` as a user meets it: which node, whose line, what range its inputs had."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.lying_operators import record, run_alone


def made(program: Callable[..., Any], *args: Any, dynamic: bool | None = None) -> list[tuple[str | None, str]]:
    """Operator and message of each finding of a run, forward and backward."""
    report = record(program, args, dynamic=dynamic, nonfinite=True)
    return [(finding.op, finding.message) for finding in report.findings]


def joined(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.cat([x.log(), y * 1e30], 0) * 1e10


def test_inputs_in_lists_have_their_own_names_and_ranges() -> None:
    ((op, message),) = made(joined, torch.ones(2), torch.tensor([1.0, -2.0]))
    assert op == "aten.mul.Tensor"
    assert "made an infinity of finite inputs (inputs: cat in [-2e+30, 1e+30])" in message
    assert "test_nonfinite.py:" in message
    assert "in joined: return torch.cat([x.log(), y * 1e30], 0) * 1e10" in message


def test_a_gradient_that_overflows_is_named_in_the_backward() -> None:
    x = torch.tensor([0.0, 1.0], requires_grad=True)
    findings = made(lambda x: x.sqrt().sum(), x)
    assert findings[0][0] == "aten.div.Tensor"
    assert "in the backward graph: made an infinity of finite inputs" in findings[0][1]
    assert "inputs: expand in [1, 1], mul in [0, 2]" in findings[0][1]


def test_inside_of_a_branch_it_is_told_once_by_the_branch() -> None:
    def program(x: torch.Tensor) -> Any:
        return torch.cond(x.sum() > -9, lambda x: (x - 1).log() * 2, lambda x: x.cos(), (x,))

    findings = made(program, torch.tensor([3.0, 0.5]))
    assert [op for op, message in findings if "inherited" not in message] == ["aten.log.default"]
    assert "true_graph_0 of cond" in findings[0][1]
    assert "inputs: sub in [-0.5, 2]" in findings[0][1]
    outer = [message for op, message in findings if op == "cond"]
    assert all("graph_0 in [" not in message for message in outer)  # a branch is no number with a range


def test_sizes_among_the_inputs_are_not_taken_for_tensors() -> None:
    def program(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (y.new_full((x.shape[0],), 3.0) + x - 4).log()

    ((op, message),) = made(program, torch.ones(5), torch.ones(2), dynamic=True)
    assert op == "aten.log.default"
    assert re.search(r"inputs: sub\w* in \[0, 0\]", message)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.complex64, torch.float64])
def test_every_dtype_has_a_range(dtype: torch.dtype) -> None:
    x = torch.tensor([1.0, 3.0], dtype=dtype)
    ((op, message),) = made(lambda x: (x - 1) / (x - x), x)
    assert op == "aten.div.Tensor"
    assert "made NaN of finite inputs" in message
    assert "sub in [0, 2]" in message


def test_what_was_given_or_written_is_not_made() -> None:
    assert made(lambda x: x * 2 + 1, torch.tensor([1.0, float("inf")])) == []
    assert made(lambda x: torch.where(x > 0, x, float("-inf")).softmax(0), torch.tensor([1.0, -1.0])) == []
    assert made(lambda x, y: x * y, torch.ones(2), float("nan")) == []
    assert made(lambda x: torch.empty(3).fill_(1) + x, torch.ones(3)) == []


@pytest.mark.parametrize("size", [3, 100])
def test_the_script_shows_the_operator_alone(size: int) -> None:
    (finding,) = record(lambda x: (x + 1).log(), (torch.linspace(-1, 1, size),), nonfinite=True).findings
    ended, printed = run_alone(finding)
    assert "NOT FINITE" in ended
    given, returned = printed.split("it returns:")
    assert "finite=True" in given
    assert "finite=False" in returned
