"""Loops and branches are made in all their kinds; one that cannot run, or changes nothing, leaves no trace."""

from __future__ import annotations

import random

import pytest
import torch

from checked_backend.fuzz.generate.defined import runs_alike
from checked_backend.fuzz.generate.draft import Choices, Draft
from checked_backend.fuzz.generate.make import add_block
from checked_backend.fuzz.program import Ref, Size, Statement


def _draft(seed: int) -> tuple[Draft, Ref]:
    draft = Draft(random.Random(seed), Choices(), gradients=False, dynamic=False)
    given = draft.new_input("float32", (3, 4), fill="range", low=1.0, high=2.0, stride=(4, 1))
    made = draft.add(Statement("torch.neg", (given,)))
    assert made is not None
    return draft, made


def test_all_kinds_of_loops_and_branches_come() -> None:
    kinds = set()
    for seed in range(80):
        draft, made = _draft(seed)

        def extend(changing: bool, draft: Draft = draft, made: Ref = made) -> bool:
            return draft.add(Statement("Tensor.add_" if changing else "torch.mul", (made, draft.scalar()))) is not None

        if add_block(draft, extend):
            program = draft.finish([made])
            assert runs_alike(program)
            kinds |= {call.op for call in program.calls}
            kinds |= {f"{call.op} {type(arg).__name__}" for call in program.calls for arg in call.args}
    assert {"for int", "for Size", "if Size", "if Ref", "if str", "flag", "else", "let"} <= kinds


def test_a_block_has_its_effect_when_it_ends() -> None:
    draft, made = _draft(0)
    before = draft.value(made).clone()
    draft.begin(Statement("for", (Size(0, 0),)))
    draft.add(Statement("Tensor.add_", (made, 1)))
    assert draft.in_block
    assert draft.end()
    assert torch.equal(draft.value(made), before + 3)
    assert not draft.in_block


def test_what_a_block_computes_is_not_known_after_it() -> None:
    draft, made = _draft(0)
    draft.begin(Statement("for", (2,)))
    inner = draft.add(Statement("torch.exp", (made,)))
    assert inner in draft.tensors()
    draft.add(Statement("Tensor.add_", (made, 1)))
    assert draft.end()
    assert inner not in draft.tensors()
    assert made in draft.tensors()


@pytest.mark.parametrize(
    "body",
    [
        [Statement("torch.exp", (Ref(1),))],
        [Statement("Tensor.squeeze_", (Ref(1),)), Statement("Tensor.sum", (Ref(1), Ref(2)))],
        [Statement("getitem", (Ref(1), Ref(2))), Statement("let", (Ref(1), Ref(3)))],
    ],
    ids=["changes nothing", "changes nothing that one sees", "cannot run three times"],
)
def test_a_block_that_is_of_no_use_leaves_no_trace(body: list[Statement]) -> None:
    draft, made = _draft(0)
    before = draft.value(made).clone()
    draft.begin(Statement("for", (4,)))
    for call in body:
        if call.op == "let":
            draft.let(*call.args)
        else:
            draft.add(call)
    assert not draft.end()
    assert [call.op for call in draft.calls] == ["torch.neg"]
    assert torch.equal(draft.value(made), before)


def test_nothing_random_is_drawn_in_a_block() -> None:
    draft, made = _draft(0)
    draft.begin(Statement("for", (2,)))
    assert draft.add(Statement("torch.rand_like", (made,))) is None
