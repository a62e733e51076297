"""Several programs as one."""

from __future__ import annotations

import torch

from checked_backend.fuzz.build import build, inputs_for
from checked_backend.fuzz.merge import merge
from checked_backend.fuzz.program import FuzzProgram, Input, Ref, Size, Statement, decode_program, encode_program

X = Input("float32", (2, 3), (3, 1))
SHARING = FuzzProgram(
    (X, Input("float32", (3,), (1,), shares=0)),
    (
        Statement("flag", (True,)),
        Statement("if", (Ref(2),)),
        Statement("Tensor.add_", (Ref(0), Size(1, 0))),
        Statement("end"),
        Statement("torch.mul", (Ref(1), 2)),
    ),
    (6,),
)
PLAIN = FuzzProgram((X,), (Statement("torch.neg", (Ref(0),)), Statement("torch.add", (Ref(1), Ref(0)))), (2, 1))


def test_one_program_gives_the_results_of_all() -> None:
    programs = [PLAIN, SHARING, PLAIN]
    merged = merge(programs)
    assert decode_program(encode_program(merged)) == merged
    expected = [value for results in build(programs)(*inputs_for(programs)) for value in results]
    actual = build([merged])(*inputs_for([merged]))
    assert len(actual) == 5
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def test_one_program_alone_stays_as_it_is() -> None:
    assert merge([SHARING]) == SHARING
