"""What torch leaves open is no program."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from checked_backend.fuzz.generate.undefined import is_undefined
from checked_backend.fuzz.program import Call, Constant, Ref

SMALL = torch.tensor([1.0, -2.0])
LARGE = torch.tensor([1.0, 3e9])
NAN = torch.tensor([1.0, float("nan")])
INT = torch.tensor([1, 7])
INT8 = torch.tensor([1, 7], dtype=torch.int8)
TWICE = torch.tensor([1, 1])


@pytest.mark.parametrize(
    ("call", "values"),
    [
        (Call("Tensor.int", (Ref(0),)), [LARGE]),
        (Call("Tensor.long", (Ref(0),)), [NAN]),
        (Call("Tensor.byte", (Ref(0),)), [SMALL]),
        (Call("Tensor.to", (Ref(0), Constant("int8"))), [LARGE]),
        (Call("torch.sum", (Ref(0),), {"dtype": Constant("int32")}), [LARGE]),
        (Call("Tensor.copy_", (Ref(0), Ref(1))), [INT, NAN]),
        (Call("setitem", (Ref(0), 0, Ref(1))), [INT, LARGE * 1e12]),
        (Call("<<", (Ref(0), 8)), [INT8]),
        (Call(">>", (Ref(0), Ref(1))), [INT, torch.tensor([64, 0])]),
        (Call("torch.bitwise_left_shift", (Ref(0), Ref(1))), [INT8, torch.tensor([-1, 0], dtype=torch.int8)]),
        (Call("torch.topk", (Ref(0), 1)), [SMALL]),
        (Call("Tensor.neg_", (Ref(0),)), [SMALL[:1].expand(3)]),
        (Call("setitem", (Ref(0), 0, 1)), [torch.zeros(3).as_strided((2, 2), (1, 1))]),
        (Call("torch.neg", (Ref(0),), {"out": Ref(1)}), [SMALL, SMALL[:1].expand(2)]),
        (Call("torch.linalg.eigh", (Ref(0),)), [torch.eye(2)]),
        (Call("Tensor.index_copy", (Ref(0), 0, Ref(1), Ref(2))), [SMALL, TWICE, SMALL]),
        (Call("Tensor.scatter_", (Ref(0), 0, Ref(1), Ref(2))), [SMALL, TWICE, SMALL]),
    ],
)
def test_what_is_left_open_is_refused(call: Call, values: list[Any]) -> None:
    assert is_undefined(call, values)


@pytest.mark.parametrize(
    ("call", "values"),
    [
        (Call("Tensor.int", (Ref(0),)), [SMALL]),
        (Call("Tensor.bool", (Ref(0),)), [NAN]),
        (Call("Tensor.to", (Ref(0), Constant("float16"))), [LARGE]),
        (Call("Tensor.copy_", (Ref(0), Ref(1))), [SMALL, NAN]),
        (Call("<<", (Ref(0), 7)), [INT8]),
        (Call("torch.linalg.norm", (Ref(0),)), [SMALL]),
        (Call("Tensor.index_copy", (Ref(0), 0, Ref(1), Ref(2))), [SMALL, torch.tensor([1, 0]), SMALL]),
        (Call("Tensor.scatter_add", (Ref(0), 0, Ref(1), Ref(2))), [SMALL, TWICE, SMALL]),
    ],
)
def test_what_is_defined_is_not(call: Call, values: list[Any]) -> None:
    assert not is_undefined(call, values)
