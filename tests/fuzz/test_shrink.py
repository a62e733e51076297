"""A failing program becomes small, and stays a program that fails."""

from __future__ import annotations

import time

from checked_backend.fuzz.generate.defined import runs_alike
from checked_backend.fuzz.generate.draft import Choices
from checked_backend.fuzz.generate.make import make_program
from checked_backend.fuzz.program import FuzzProgram, Input, Ref, Statement
from checked_backend.fuzz.shrink import shrink

X = Input("float32", (4, 6), (1, 4), fill="edges", requires_grad=True)
LONG = FuzzProgram(
    (X, Input("float32", (6,), (1,))),
    (
        Statement("torch.mul", (Ref(0), Ref(1))),
        Statement("torch.exp", (Ref(2),)),
        Statement("Tensor.add_", (Ref(3), 1)),
        Statement("torch.cumsum", (Ref(4),), {"dim": 0}),
        Statement("torch.neg", (Ref(5),)),
    ),
    (6, 2, 5),
    gradients=True,
)


def _forever() -> float:
    return time.monotonic() + 60


def test_only_the_call_at_fault_stays() -> None:
    smallest = shrink(LONG, lambda program: "torch.cumsum" in program.ops, _forever())
    assert smallest.ops == ("torch.cumsum",)
    assert len(smallest.inputs) == len(smallest.returns) == 1
    assert not smallest.gradients
    (given,) = smallest.inputs
    assert given.shape == (4, 6)
    assert not given.requires_grad


def test_what_matters_stays() -> None:
    def wrong(program: FuzzProgram) -> bool:
        return program.gradients and {"torch.exp", "Tensor.add_"} <= set(program.ops)

    smallest = shrink(LONG, wrong, _forever())
    assert set(smallest.ops) == {"torch.exp", "Tensor.add_"}
    assert smallest.gradients
    assert runs_alike(smallest)


MANY = FuzzProgram(
    (Input("float32", (2,), (1,)),),
    tuple(Statement("torch.mul", (Ref(0), number)) for number in range(64)),
    tuple(range(1, 65)),
)


def test_two_results_of_many_are_found_by_halves() -> None:
    """Programs that share a compile make one of many results."""
    sizes = []

    def wrong(program: FuzzProgram) -> bool:
        sizes.append(len(program.calls))
        made = [place - len(program.inputs) for place in program.returns]
        return {3, 40} <= {program.calls[place].args[1] for place in made if place >= 0}

    assert [call.args[1] for call in shrink(MANY, wrong, _forever()).calls] == [3, 40]
    assert sum(sizes) < 20 * len(MANY.calls)


def test_one_call_of_many_is_found_by_halves_though_no_result_needs_it() -> None:
    """What the compiler refuses is refused whatever is returned."""
    sizes = []

    def wrong(program: FuzzProgram) -> bool:
        sizes.append(len(program.calls))
        return any(call.args[1] == 20 for call in program.calls)

    (call,) = shrink(MANY, wrong, _forever()).calls
    assert call.args[1] == 20
    assert sum(sizes) < 20 * len(MANY.calls)


def test_nothing_is_tried_after_the_deadline() -> None:
    assert shrink(LONG, lambda _program: True, time.monotonic() - 1) == LONG


def test_generated_programs_shrink_to_one_call() -> None:
    for number in range(12):
        program = make_program(5, number, Choices(longest=6))
        last = program.ops[-1]
        smallest = shrink(program, lambda one, op=last: op in one.ops, _forever())  # type: ignore[misc]
        assert len(smallest.calls) <= 3, smallest
        assert runs_alike(smallest)


def _looped(*body: Statement) -> FuzzProgram:
    calls = (Statement("torch.neg", (Ref(0),)), Statement("for", (3,)), *body, Statement("end"))
    return FuzzProgram((X,), (*calls, Statement("torch.exp", (Ref(1),))), (1, 4 + len(body)))


ROW = (Statement("setitem", (Ref(1), Ref(2), 2.5)), Statement("Tensor.add_", (Ref(1), 1)))


def test_a_loop_becomes_a_straight_line_where_that_fails_too() -> None:
    assert shrink(_looped(*ROW), lambda program: "Tensor.add_" in program.ops, _forever()).ops == ("Tensor.add_",)


def test_a_loop_that_matters_stays_with_what_matters_in_it() -> None:
    smallest = shrink(_looped(*ROW), lambda program: {"for", "setitem"} <= set(program.ops), _forever())
    assert set(smallest.ops) == {"for", "setitem"}
    assert Statement("for", (1,)) in smallest.calls
    assert runs_alike(smallest)


def test_the_half_of_a_branch_that_does_not_matter_goes() -> None:
    branch = (Statement("if", (Ref(2), "%", 2)), *ROW[:1], Statement("else"), *ROW[1:], Statement("end"))

    smallest = shrink(_looped(*branch), lambda program: {"for", "Tensor.add_"} <= set(program.ops), _forever())
    assert set(smallest.ops) == {"for", "Tensor.add_"}
    assert "if" not in smallest.ops
