"""What torch defines on some values it may leave open on others."""

from __future__ import annotations

import pytest
import torch

from checked_backend.errors import FuzzError
from checked_backend.fuzz.build import make_inputs
from checked_backend.fuzz.generate.defined import on_other_values, run_defined, runs_alike
from checked_backend.fuzz.program import Constant, FuzzProgram, Input, Ref, Statement

FLOATS = Input("float32", (4,), (1,), seed=3)
INTEGERS = Input("int64", (4,), (1,), fill="range", low=0, high=3, seed=4)


def test_other_values_are_other_floats_and_other_integers_of_the_same_range() -> None:
    program = FuzzProgram((FLOATS, INTEGERS), (Statement("torch.take", (Ref(0), Ref(1))),), (2,))
    (floats, integers), (others, indices) = (make_inputs(one.inputs) for one in (program, on_other_values(program)))
    assert not torch.equal(floats, others)
    assert not torch.equal(integers, indices)
    assert ((indices >= 0) & (indices <= 3)).all()


def test_integers_stay_where_others_are_not_defined(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def defined(program: FuzzProgram) -> bool:
        calls.append(program)
        return len(calls) > 1

    monkeypatch.setattr("checked_backend.fuzz.generate.defined._is_defined", defined)
    program = FuzzProgram((FLOATS, INTEGERS), (Statement("torch.take", (Ref(0), Ref(1))),), (2,))
    other = on_other_values(program)
    assert (other.inputs[0] != FLOATS, other.inputs[1]) == (True, INTEGERS)
    monkeypatch.setattr("checked_backend.fuzz.generate.defined._is_defined", lambda _: False)
    assert on_other_values(program) == program


def test_values_on_which_torch_leaves_the_result_open_are_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    program = FuzzProgram((FLOATS,), (Statement("Tensor.to", (Ref(0), Constant("uint8"))),), (1,))
    negative = next(s for s in range(99) if bool((make_inputs(_seeded(program, s).inputs)[0] < -1).any()))
    positive = FuzzProgram((Input("float32", (4,), (1,), fill="range", low=0, high=3),), program.calls, (1,))
    with pytest.raises(FuzzError, match="not defined"):
        run_defined(_seeded(program, negative))
    assert on_other_values(positive) != positive
    monkeypatch.setattr("checked_backend.fuzz.generate.defined._OTHER", negative - FLOATS.seed)
    assert on_other_values(program) == program


def test_what_eager_does_not_repeat_does_not_run_alike() -> None:
    assert runs_alike(FuzzProgram((FLOATS,), (Statement("torch.neg", (Ref(0),)),), (1,)))
    assert not runs_alike(FuzzProgram((FLOATS,), (Statement("torch.neg", (Ref(0), 1, 2)),), (1,)))


def _seeded(program: FuzzProgram, seed: int) -> FuzzProgram:
    (given,) = program.inputs
    return FuzzProgram((Input(given.dtype, given.shape, given.stride, seed=seed),), program.calls, program.returns)
