"""Each documented difference names its page, and takes only what that page describes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from checked_backend.fuzz.documented import DOCUMENTED, documented
from checked_backend.fuzz.examine import check_program
from checked_backend.fuzz.program import FuzzProgram, Input, Ref, Statement
from checked_backend.runs.status import Status
from tests.support.fuzz_tools import failing

SHARED, ONE = "shared memory: output[0]", "the same object: output[0]"


def _found(detail: str, subject: str, expected: str, actual: str) -> Any:
    return failing(detail=detail, subject=subject, expected=expected, actual=actual)


@pytest.mark.parametrize("detail", DOCUMENTED)
def test_each_class_has_a_reason_and_a_page_of_pytorch(detail: str) -> None:
    known = DOCUMENTED[detail]
    assert known.reason
    assert re.match(r"https://(github\.com/pytorch/|(discuss|dev-discuss|docs)\.pytorch\.org/)", known.source)


@pytest.mark.parametrize(
    ("detail", "subject", "expected", "actual", "is_documented"),
    [
        ("alias.identity", "output[1]", SHARED, ONE, True),
        ("alias.identity", "output[1]", ONE, SHARED, False),  # eager returns one tensor twice
        ("alias.identity", "output[1]", "shared memory: x", "the same object: x", False),  # an input for its view
        ("alias.identity", "output[1]", "the same object: x", "shared memory: x", False),
        ("alias.identity", "output[1]", SHARED, "", False),
        ("alias.memory", "output[1]", SHARED, "separate memory: output[0]", False),
        ("structure.stride", "output[0]", "(3, 1)", "(1, 2)", True),
        ("structure.stride", "output[0]", "(0, 1)", "(3, 1)", True),
        ("structure.stride", "output[0]", "(3, 1)", "(0, 1)", False),  # elements share memory
        ("structure.stride", "mutated[x]", "(3, 1)", "(1, 2)", False),
        ("structure.stride", "buffer[x]", "(3, 1)", "(1, 2)", False),
        ("structure.stride", "output[0]", "", "", False),
        ("structure.type", "grad[x]", "None", "Tensor", False),  # zeros are no finding: this gradient has numbers
        ("structure.type", "grad[x]", "Tensor", "None", False),
        ("structure.shape", "output[0]", "(2,)", "(3,)", False),
    ],
)
def test_a_class_takes_one_direction_and_one_subject(
    detail: str, subject: str, expected: str, actual: str, is_documented: bool
) -> None:
    assert (documented(_found(detail, subject, expected, actual)) is not None) is is_documented


def _program(*calls: Statement, returns: tuple[int, ...], gradients: bool = False) -> FuzzProgram:
    return FuzzProgram((Input("float32", (2, 3), (3, 1), requires_grad=gradients),), calls, returns, gradients)


TWO_VIEWS = _program(
    Statement("torch.exp", (Ref(0),)),
    Statement("Tensor.view", (Ref(1), 3, 2)),
    Statement("Tensor.view", (Ref(1), 3, 2)),
    returns=(2, 3),
)
ONE_TENSOR = _program(Statement("torch.exp", (Ref(0),)), returns=(1,))


def _changing(change: Callable[[list[Any], tuple[Any, ...]], list[Any]]) -> Callable[..., Any]:
    """A compiler that changes the results of a graph."""

    def compiler(gm: Any, _inputs: Any) -> Any:
        return lambda *args: change(list(gm(*args)), args)

    return compiler


@pytest.mark.parametrize(
    ("program", "change", "detail", "is_documented"),
    [
        (TWO_VIEWS, lambda outs, _: [outs[0], outs[0]], "alias.identity", True),
        (TWO_VIEWS, lambda outs, _: [outs[0], outs[0].clone()], "alias.memory", False),
        (ONE_TENSOR, lambda outs, _: [outs[0].t().contiguous().t()], "structure.stride", True),
        (ONE_TENSOR, lambda outs, _: [outs[0].t().contiguous().t() + 1], "", False),  # wrong numbers in that layout
    ],
)
def test_the_check_tells_a_documented_difference_from_a_fault_of_the_same_kind(
    program: FuzzProgram, change: Any, detail: str, is_documented: bool
) -> None:
    result = check_program(program, _changing(change))
    assert result.status is Status.FAIL
    if detail:
        assert result.detail == detail
    assert (documented(result) is not None) is is_documented


def test_a_view_of_an_input_that_comes_back_as_the_input_is_a_fault() -> None:
    program = _program(Statement("Tensor.view", (Ref(0), 2, 3)), returns=(1,))
    result = check_program(program, _changing(lambda _, args: [args[0]]))
    assert result.detail == "alias.identity"
    assert documented(result) is None


def test_a_result_whose_elements_share_memory_is_a_fault() -> None:
    program = _program(Statement("torch.zeros_like", (Ref(0),)), returns=(1,))
    result = check_program(program, _changing(lambda outs, _: [outs[0][:1].expand(2, 3)]))
    assert result.detail == "structure.stride"
    assert documented(result) is None


class _Sends(torch.autograd.Function):
    """Gives a gradient of a constant to what has no influence."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, unused: torch.Tensor, number: float) -> torch.Tensor:
        ctx.number, ctx.shape = number, unused.shape
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0], grads[0].new_full(ctx.shape, ctx.number), None


@pytest.mark.parametrize(("number", "kind"), [(0.0, ""), (1.0, "structure")])
def test_zeros_where_eager_has_no_gradient_are_nothing_and_numbers_are_a_fault(number: float, kind: str) -> None:
    inputs = tuple(Input("float32", (2,), (1,), requires_grad=True) for _ in range(2))
    calls = (
        Statement("torch.exp", (Ref(0),)),
        Statement("torch.zeros_like", (Ref(1),)),
        Statement("torch.add", (Ref(2), Ref(3))),
    )
    program = FuzzProgram(inputs, calls, (4,), gradients=True)

    def compiler(gm: Any, _inputs: Any) -> Any:
        return lambda *args: [_Sends.apply(gm(*args)[0], args[1], number)]

    result = check_program(program, compiler)
    assert result.kind == kind
    if kind:
        assert result.subject.startswith("grad[")
        assert documented(result) is None
