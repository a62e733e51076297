"""Loops and branches: what belongs to which, the order of calls, and the straight line that they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from checked_backend.errors import FuzzError
from checked_backend.fuzz.build import build, function_source, make_inputs, run_call, run_eager
from checked_backend.fuzz.program import FuzzProgram, Input, Ref, Size, Statement, blocks_of, made_from, merge
from checked_backend.fuzz.shrink import straightened

END, ELSE = Statement("end"), Statement("else")


def loop(turns: Any, *body: Statement) -> tuple[Statement, ...]:
    return Statement("for", (turns,)), *body, END


def program(*calls: Statement, returns: tuple[int, ...] = (0,)) -> FuzzProgram:
    return FuzzProgram((Input("float32", (3, 2), (2, 1), fill="range"),), calls, returns)


ROWS = program(
    Statement("torch.neg", (Ref(0),)),
    *loop(
        Size(0, 0),
        Statement("if", (Ref(2), "%", 2)),
        Statement("setitem", (Ref(1), Ref(2), 7.5)),
        ELSE,
        Statement("getitem", (Ref(0), slice(Ref(2), None))),
        Statement("Tensor.mul_", (Ref(6), Ref(2))),
        END,
    ),
    returns=(1, 0),
)
"""Writes 7.5 to odd rows, and multiplies the rest of the input in even turns."""

NAMES = program(
    Statement("torch.neg", (Ref(0),)),
    *loop(3, Statement("torch.add", (Ref(1), 1)), Statement("let", (Ref(1), Ref(3)))),
    returns=(1,),
)


def test_a_loop_runs_as_often_as_it_says_on_one_storage() -> None:
    values = run_eager(ROWS)
    (x,) = make_inputs(ROWS.inputs)
    expected = -x
    expected[1] = 7.5
    x[2:] *= 2 * 1
    x[0:] *= 0
    assert torch.equal(values[1], expected)
    assert torch.equal(values[0], x)


def test_let_carries_a_value_to_the_next_turn() -> None:
    (x,) = make_inputs(NAMES.inputs)
    assert torch.equal(run_eager(NAMES)[1], -x + 1 + 1 + 1)


@pytest.mark.parametrize("made", [ROWS, NAMES], ids=["rows", "names"])
def test_straight_line_and_function_do_the_same(made: FuzzProgram) -> None:
    expected = run_eager(made)
    straight = straightened(made)
    assert not {"for", "if", "let"} & {call.op for call in straight.calls}
    values = run_eager(straight)
    results = build(made)(*make_inputs(made.inputs))
    for number, other, result in zip(made.returns, straight.returns, results, strict=True):
        assert torch.equal(expected[number], values[other])
        assert torch.equal(expected[number], result)


def test_the_text_is_a_loop_that_one_can_read() -> None:
    assert function_source(ROWS) == "\n".join(
        [
            "def program(x0):",
            "    v0 = torch.neg(x0)",
            "    for i1 in range(x0.size(0)):",
            "        if i1 % 2:",
            "            v0[i1] = 7.5",
            "        else:",
            "            v5 = x0[i1:]",
            "            v6 = v5.mul_(i1)",
            "    return (v0, x0)",
        ]
    )
    assert "        v0 = v2" in function_source(NAMES)


@pytest.mark.parametrize(("value", "expected"), [(True, 1), (False, 2)])
def test_a_flag_decides_and_is_an_argument(value: bool, expected: int) -> None:
    branch = (Statement("if", (Ref(1),)), Statement("Tensor.fill_", (Ref(0), 1)))
    flagged = program(Statement("flag", (value,)), *branch, ELSE, Statement("Tensor.fill_", (Ref(0), 2)), END)
    assert run_eager(flagged)[0][0, 0] == expected
    assert f"def program(x0, *, flag0={value}):" in function_source(flagged)
    (given,) = make_inputs(flagged.inputs)
    build(flagged)(given, flag0=not value)
    assert given[0, 0] == 3 - expected
    both = merge([flagged, ROWS])
    assert build(both)(*make_inputs(both.inputs))[0][0, 0] == expected


def test_blocks_know_their_statements() -> None:
    outer, inner = blocks_of(ROWS).values()
    assert (outer.head, outer.middle, outer.end) == (1, 8, 8)
    assert (inner.head, inner.middle, inner.end) == (2, 4, 7)


NEG = Statement("torch.neg", (Ref(0),))


@pytest.mark.parametrize(
    ("calls", "words"),
    [
        ((Statement("for", (2,)), NEG), "without an end"),
        ((NEG, END), "end without a beginning"),
        ((Statement("for", (2,)), NEG, ELSE, END), "for without an end"),
        ((Statement("if", (Ref(0), "<", 1)), NEG, END), "cannot take"),
        ((Statement("if", (Ref(0),)), NEG, END), "cannot take"),
        ((Statement("if", (Size(0, 0), "in", 1)), NEG, END), "cannot take"),
        (loop("3"), "cannot take"),
        (loop(-1), "cannot take"),
        (loop(65, NEG), "more than 64 turns"),
        (loop(9, *loop(9, NEG)), "more than 64 turns"),
        ((*loop(2, NEG), Statement("torch.neg", (Ref(2),))), "not known there"),
        ((NEG, *loop(2, Statement("torch.neg", (Ref(4),)), NEG)), "not known there"),
        ((NEG, Statement("let", (Ref(0), Ref(1)))), "cannot take"),
        ((NEG, *loop(2, Statement("let", (Ref(1), Ref(2))))), "cannot take"),
        ((NEG, Statement("flag", (1,))), "cannot take"),
        (loop(2, *loop(2, *loop(2, *loop(2, *loop(2, NEG))))), "nested too deep"),
    ],
)
def test_what_is_no_program_is_refused(calls: tuple[Statement, ...], words: str) -> None:
    for attempt in (run_eager, function_source, lambda one: build(one)):
        with pytest.raises(FuzzError, match=words):
            attempt(program(*calls))


def test_a_value_of_a_block_cannot_be_returned() -> None:
    with pytest.raises(FuzzError, match="in a block alone"):
        blocks_of(program(*loop(2, NEG), returns=(2,)))


def test_a_loop_over_a_large_size_is_refused() -> None:
    large = FuzzProgram((Input("int8", (65,), (1,)),), loop(Size(0, 0), NEG), (0,))
    with pytest.raises(FuzzError, match="more than 64 turns"):
        run_eager(large)


def test_what_a_result_is_made_from_includes_writes_to_its_memory() -> None:
    calls = (
        Statement("Tensor.view", (Ref(0), 6)),
        Statement("Tensor.zero_", (Ref(1),)),
        Statement("torch.neg", (Ref(0),)),
        Statement("torch.eq", (Ref(1), 2)),
        Statement("torch.abs", (Ref(0),)),
    )
    made = program(*calls, returns=(3,))
    assert made_from(made, [3]) >= {2}
    assert not made_from(made, [3]) & {3, 4}
    assert made_from(made, [1]) == {0, 1}


def test_a_block_is_needed_with_its_condition() -> None:
    flagged = program(
        Statement("flag", (True,)),
        Statement("torch.neg", (Ref(0),)),
        Statement("if", (Ref(1),)),
        Statement("Tensor.zero_", (Ref(2),)),
        Statement("torch.abs", (Ref(0),)),
        END,
        *loop(2, Statement("torch.abs", (Ref(0),))),
        returns=(2,),
    )
    assert made_from(flagged, [2]) == {0, 1, 2, 3, 5}


def test_calls_run_with_numbers_of_turns() -> None:
    assert run_call(Statement("torch.add", (Ref(0), Ref(1))), [torch.ones(()), 2]).item() == 3
