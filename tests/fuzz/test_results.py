"""One bug is one row, and a documented difference, which names its page, is none."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from checked_backend.fuzz.examine import check_program
from checked_backend.fuzz.known import plain
from checked_backend.fuzz.program import FuzzProgram, Input, Ref, Statement
from checked_backend.fuzz.results import DOCUMENTED, ProgramResult, documented, may_be, signature_of
from checked_backend.runs.case import Status
from tests.support import faults
from tests.support.fuzz_tools import STRIDES, failing, group_of, program_of


@pytest.mark.parametrize("op", ["torch.add", "Tensor.add_", "+", "+=", "aten.add.Tensor", "aten.add_.Tensor"])
def test_spellings_of_an_operator_are_one(op: str) -> None:
    assert plain(op) == "add"


def test_what_differs_makes_another_group() -> None:
    first = signature_of(program_of("torch.add"), failing("logic"))
    assert first.signature == signature_of(program_of("Tensor.add_"), failing("logic")).signature
    assert first.signature != signature_of(program_of("torch.mul"), failing("logic")).signature
    assert first.signature != signature_of(program_of("torch.add"), failing("alias")).signature
    assert first.signature != signature_of(program_of("torch.add"), failing("logic", "logic.this_dtype")).signature


def test_crashes_are_told_apart_by_their_exception() -> None:
    one = failing("crash", "crash.compiling", actual="KeyError: 'x'")
    other = failing("crash", "crash.compiling", actual="AssertionError: y")
    made = [signature_of(program_of("torch.add"), result).detail for result in (one, other)]
    assert made == ["crash.compiling: KeyError", "crash.compiling: AssertionError"]


def test_the_operator_that_was_found_names_the_group() -> None:
    assert signature_of(program_of("torch.exp", "torch.add"), failing(op="aten.exp.default")).op == "exp"
    assert signature_of(program_of("torch.exp", "torch.add"), failing()).op == "exp > add"


def test_a_failure_with_all_operations_of_a_known_group_may_be_that() -> None:
    group = group_of("torch.exp", "torch.add")
    assert may_be(group, program_of("torch.neg", "Tensor.exp_", "torch.add"), failing())
    assert not may_be(group, program_of("torch.neg", "torch.add"), failing())
    assert not may_be(group, program_of("torch.exp", "torch.add"), failing("alias"))


def test_the_smallest_confirmed_program_is_kept() -> None:
    large, small = group_of("torch.exp", "torch.add"), group_of("torch.exp")
    assert large.joined(small).program == small.program
    assert small.joined(group_of("torch.exp", confirmed=False)).confirmed


def test_documented_differences_are_one_group_whatever_the_operator() -> None:
    first, second = (signature_of(program_of(op), failing(**STRIDES)) for op in ("torch.exp", "torch.add"))
    assert first.signature == second.signature
    assert first.difference is not None
    assert signature_of(program_of("torch.exp"), failing(**{**STRIDES, "subject": "mutated[x0]"})).difference is None


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (
            failing(
                "alias", "alias.identity", expected="the same object: output[0]", actual="shared memory: output[0]"
            ),
            failing("alias", "alias.identity", expected="other", actual="shared memory: output[0]"),
        ),
        (
            failing("structure", "structure.type", expected="None", actual="Tensor"),
            failing("structure", "structure.type", expected="other", actual="Tensor"),
        ),
        (failing("structure", "structure.outputs", expected="2 values", actual="1"), failing("structure")),
        (failing("mutation", "mutation.uncounted"), failing("mutation", "mutation.wrong")),
        (failing("mutation", "mutation.default_dtype", subject="state[default_dtype]"), failing("mutation")),
    ],
)
def test_what_is_made_at_the_edge_of_a_program_is_one_bug_whatever_the_program(
    one: ProgramResult, other: ProgramResult
) -> None:
    first, second = (signature_of(program_of(op), one) for op in ("torch.exp", "torch.add"))
    assert first.signature == second.signature
    assert first.difference is None
    assert may_be(first, second.program, second.result)
    wrong, elsewhere = (signature_of(program_of(op), other) for op in ("torch.exp", "torch.add"))
    assert wrong.signature != elsewhere.signature != first.signature


def test_deaths_that_could_not_be_made_small_are_one_row() -> None:
    long = ("torch.exp", "torch.add", "torch.neg", "torch.sin"), ("torch.mul", "torch.cos", "torch.tan", "torch.abs")
    died = failing("crash", "crash.signal", status="crash", actual="SIGSEGV")
    first, second = (signature_of(program_of(*ops), died) for ops in long)
    assert first.signature == second.signature
    assert first.op == "several operators"
    small = signature_of(program_of("torch.exp", "torch.add"), died)
    assert small.op == "exp > add"  # that of a small one tells which bug it is
    assert not may_be(first, program_of(*long[1]), died)  # so the next one is looked into
    raised = failing("crash", "crash.compiling", actual="KeyError: 'x'")
    assert signature_of(program_of(*long[0]), raised).op == "exp > add > neg > sin"


SHARED, ONE = "shared memory: output[0]", "the same object: output[0]"


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
    found = failing(detail=detail, subject=subject, expected=expected, actual=actual)
    assert (documented(found) is not None) is is_documented


def _program(*calls: Statement, returns: tuple[int, ...], gradients: bool = False) -> FuzzProgram:
    return FuzzProgram((Input("float32", (2, 3), (3, 1), requires_grad=gradients),), calls, returns, gradients)


TWO_VIEWS = _program(
    Statement("torch.exp", (Ref(0),)),
    Statement("Tensor.view", (Ref(1), 3, 2)),
    Statement("Tensor.view", (Ref(1), 3, 2)),
    returns=(2, 3),
)
VIEW_OF_INPUT = _program(Statement("Tensor.view", (Ref(0), 2, 3)), returns=(1,))
ONE_TENSOR = _program(Statement("torch.exp", (Ref(0),)), returns=(1,))
ZEROS = _program(Statement("torch.zeros_like", (Ref(0),)), returns=(1,))


@pytest.mark.parametrize(
    ("program", "change", "detail", "is_documented"),
    [
        (TWO_VIEWS, lambda outs, _: [outs[0], outs[0]], "alias.identity", True),
        (TWO_VIEWS, lambda outs, _: [outs[0], outs[0].clone()], "alias.memory", False),
        (VIEW_OF_INPUT, lambda _, args: [args[0]], "alias.identity", False),
        (ONE_TENSOR, lambda outs, _: [outs[0].t().contiguous().t()], "structure.stride", True),
        (ZEROS, lambda outs, _: [outs[0][:1].expand(2, 3)], "structure.stride", False),  # elements share memory
        (ONE_TENSOR, lambda outs, _: [outs[0].t().contiguous().t() + 1], "", False),  # wrong numbers in that layout
    ],
)
def test_the_check_tells_a_documented_difference_from_a_fault_of_the_same_kind(
    program: FuzzProgram, change: Any, detail: str, is_documented: bool
) -> None:
    result = check_program(program, faults.run_in_python(lambda _gm: change))
    assert result.status is Status.FAIL
    if detail:
        assert result.detail == detail
    assert (documented(result) is not None) is is_documented


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

    sends = faults.run_in_python(lambda _gm: lambda results, args: [_Sends.apply(results[0], args[1], number)])
    result = check_program(program, sends)
    assert result.kind == kind
    if kind:
        assert result.subject.startswith("grad[")
        assert documented(result) is None
