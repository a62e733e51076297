"""Programs as data: what is written is read, what a stranger wrote is refused, and several become one."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch

from checked_backend.errors import FuzzError
from checked_backend.fuzz.build import build, make_inputs
from checked_backend.fuzz.known import is_known, operation, plain, spelled
from checked_backend.fuzz.program import (
    Constant,
    FuzzProgram,
    Input,
    Ref,
    Size,
    Statement,
    decode_program,
    encode_program,
    merge,
)

X = Input("float32", (2, 3), (3, 1))
SMALL = FuzzProgram((X,), (Statement("torch.add", (Ref(0), 1)),), (1,))


def test_every_kind_of_argument_is_read_as_it_was_written() -> None:
    args = (Ref(0), Size(0, -1), Constant("int8"), (1, [2.5, None]), slice(None, -1, 2), ..., "mean", True, 1 + 2j)
    program = FuzzProgram((X,), (Statement("torch.add", args, {"value": -math.inf, "dtype": Constant("bool")}),), (1,))
    assert decode_program(encode_program(program)) == program


def test_nan_is_read_as_nan() -> None:
    program = FuzzProgram((X,), (Statement("torch.add", (Ref(0), math.nan)),), (1,))
    assert math.isnan(decode_program(encode_program(program)).calls[0].args[1])


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("version",), 99, "version: Input should be 1"),
        (("inputs", 0, "dtype"), "qint8", "inputs.0.dtype: String should match"),
        (("inputs", 0, "shape"), [2**40, 1], "inputs.0.shape.0: Input should be less than"),
        (("inputs", 0, "shape"), [2**20, 2**20], "more than"),
        (("inputs", 0, "stride"), [1], "dimensions"),
        (("inputs", 0, "shares"), 0, "shares got 0"),
        (("inputs", 0, "low"), "1", "inputs.0.low.int: Input should be a valid integer"),
        (("calls", 0, 1, 0), {"v": 1}, "v got 1"),
        (("calls", 0, 1, 0), {"v": -1}, "v got -1"),
        (("calls", 0, 1, 0), {"torch": "load"}, "an argument got"),
        (("calls", 0, 1, 0), {"eval": "1"}, "an argument got"),
        (("calls", 0), ["torch.add"], "calls.0.1: Field required"),
        (("returns",), [7], "returns got 7"),
        (("gradients",), 1, "gradients: Input should be a valid boolean"),
    ],
)
def test_what_is_no_program_is_refused_by_field(path: tuple[Any, ...], value: Any, words: str) -> None:
    raw = json.loads(encode_program(SMALL))
    at = raw
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = value
    with pytest.raises(FuzzError) as caught:
        decode_program(json.dumps(raw))
    assert words in str(caught.value)


def test_arguments_nested_without_end_are_refused() -> None:
    raw = json.loads(encode_program(SMALL))
    nested: Any = 1
    for _ in range(50):
        nested = [nested]
    raw["calls"][0][1][0] = nested
    with pytest.raises(FuzzError, match="nested"):
        decode_program(json.dumps(raw))


def test_inputs_that_nothing_uses_are_dropped_and_others_keep_their_meaning() -> None:
    view = Input("float32", (2,), (1,), shares=1)
    dropped = FuzzProgram((X, X, view), (Statement("torch.neg", (Ref(2),)),), (3,)).unused_dropped()
    assert dropped.inputs == (X, Input("float32", (2,), (1,), shares=0))
    assert dropped.calls == (Statement("torch.neg", (Ref(1),)),)
    assert dropped.returns == (2,)


@pytest.mark.parametrize("name", ["x=print('run'), y", "from", "a b", ""])
def test_names_of_arguments_are_names(name: str) -> None:
    raw = json.loads(encode_program(SMALL))
    raw["calls"][0][2] = {"dict": {name: 1}}
    with pytest.raises(FuzzError, match="names of arguments"):
        decode_program(json.dumps(raw))


def test_loops_and_branches_are_read_as_they_were_written() -> None:
    calls = (
        Statement("flag", (True,)),
        Statement("torch.neg", (Ref(0),)),
        Statement("for", (Size(0, 0),)),
        Statement("if", (Ref(3), "%", 2)),
        Statement("setitem", (Ref(2), slice(Ref(3), None), Ref(3))),
        Statement("else"),
        Statement("let", (Ref(2), Ref(0))),
        Statement("end"),
        Statement("end"),
    )
    program = FuzzProgram((X,), calls, (2,))
    assert decode_program(encode_program(program)) == program
    assert program.ops == ("torch.neg", "for", "if", "setitem")


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
    expected = [value for program in programs for value in build(program)(*make_inputs(program.inputs))]
    actual = build(merged)(*make_inputs(merged.inputs))
    assert len(actual) == 5
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def test_one_program_alone_stays_as_it_is() -> None:
    assert merge([SHARING]) == SHARING


@pytest.mark.parametrize(
    "name", ["torch.add", "torch.linalg.norm", "torch.special.erf", "F.gelu", "Tensor.add_", "torch.zeros", "+="]
)
def test_tensor_operations_are_known(name: str) -> None:
    assert is_known(name)


@pytest.mark.parametrize(
    "name",
    [
        *("torch.load", "torch.save", "torch.hub.load", "torch.from_file", "torch.compile", "torch.set_default_dtype"),
        *("torch.ops", "torch.empty", "Tensor.resize_", "Tensor.set_", "Tensor.register_hook", "Tensor.__reduce_ex__"),
        *("os.system", "eval", "torch.classes.x", "torch.os.system", "F.os", "Tensor.share_memory_", "torch..add", ""),
        *("torch.utils.cpp_extension.load", "torch._C._nn.gelu", "Tensor.__class__", "Tensor.data"),
    ],
)
def test_everything_else_is_refused(name: str) -> None:
    with pytest.raises(FuzzError, match="no operation that may be called"):
        operation(name)


def test_functions_and_methods_are_called_as_such() -> None:
    assert operation("torch.add") is torch.add
    assert operation("Tensor.add_") is torch.Tensor.add_
    assert spelled("Tensor.add_") == "add_"


def test_indexing_has_a_name() -> None:
    assert [plain(op) for op in ("getitem", "setitem")] == ["x[...]", "x[...] = y"]
