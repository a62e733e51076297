"""What torch leaves open is no program."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from checked_backend.fuzz.generate.defined import is_undefined
from checked_backend.fuzz.program import Constant, Ref, Statement

SMALL = torch.tensor([1.0, -2.0])
LARGE = torch.tensor([1.0, 3e9])
NAN = torch.tensor([1.0, float("nan")])
INT = torch.tensor([1, 7])
INT8 = torch.tensor([1, 7], dtype=torch.int8)
WITH_GRAD = torch.ones(2, requires_grad=True)
TWICE = torch.tensor([1, 1])


@pytest.mark.parametrize(
    ("call", "values"),
    [
        (Statement("Tensor.int", (Ref(0),)), [LARGE]),
        (Statement("Tensor.long", (Ref(0),)), [NAN]),
        (Statement("Tensor.byte", (Ref(0),)), [SMALL]),
        (Statement("Tensor.to", (Ref(0), Constant("int8"))), [LARGE]),
        (Statement("torch.sum", (Ref(0),), {"dtype": Constant("int32")}), [LARGE]),
        (Statement("Tensor.copy_", (Ref(0), Ref(1))), [INT, NAN]),
        (Statement("setitem", (Ref(0), 0, Ref(1))), [INT, LARGE * 1e12]),
        (Statement("<<", (Ref(0), 8)), [INT8]),
        (Statement(">>", (Ref(0), Ref(1))), [INT, torch.tensor([64, 0])]),
        (Statement("torch.bitwise_left_shift", (Ref(0), Ref(1))), [INT8, torch.tensor([-1, 0], dtype=torch.int8)]),
        (Statement("torch.topk", (Ref(0), 1)), [SMALL]),
        (Statement("Tensor.neg_", (Ref(0),)), [SMALL[:1].expand(3)]),
        (Statement("setitem", (Ref(0), 0, 1)), [torch.zeros(3).as_strided((2, 2), (1, 1))]),
        (Statement("torch.neg", (Ref(0),), {"out": Ref(1)}), [SMALL, SMALL[:1].expand(2)]),
        (Statement("torch.linalg.eigh", (Ref(0),)), [torch.eye(2)]),
        (Statement("Tensor.index_copy", (Ref(0), 0, Ref(1), Ref(2))), [SMALL, TWICE, SMALL]),
        (Statement("F.batch_norm", (Ref(0), Ref(1), Ref(1)), {"training": True}), [torch.eye(2), SMALL]),
        (Statement("F.instance_norm", (Ref(0), Ref(1)), {"running_var": Ref(2)}), [torch.eye(2), SMALL, SMALL[:1]]),
        (
            Statement("torch.native_batch_norm", (Ref(0), None, Ref(1), Ref(1), Ref(2))),
            [torch.eye(2), SMALL, torch.ones(2)],
        ),
        (Statement("Tensor.scatter_", (Ref(0), 0, Ref(1), Ref(2))), [SMALL, TWICE, SMALL]),
        (Statement("F.embedding_bag", (Ref(0), Ref(1)), {"offsets": Ref(1)}), [INT, torch.eye(9)]),
    ],
)
def test_what_is_left_open_is_refused(call: Statement, values: list[Any]) -> None:
    assert is_undefined(call, values)


@pytest.mark.parametrize(
    ("call", "values"),
    [
        (Statement("Tensor.int", (Ref(0),)), [SMALL]),
        (Statement("Tensor.bool", (Ref(0),)), [NAN]),
        (Statement("Tensor.to", (Ref(0), Constant("float16"))), [LARGE]),
        (Statement("Tensor.copy_", (Ref(0), Ref(1))), [SMALL, NAN]),
        (Statement("<<", (Ref(0), 7)), [INT8]),
        (Statement("torch.linalg.norm", (Ref(0),)), [SMALL]),
        (Statement("Tensor.index_copy", (Ref(0), 0, Ref(1), Ref(2))), [SMALL, torch.tensor([1, 0]), SMALL]),
        (Statement("Tensor.scatter_add", (Ref(0), 0, Ref(1), Ref(2))), [SMALL, TWICE, SMALL]),
        (Statement("F.batch_norm", (Ref(0), Ref(1), Ref(2))), [torch.eye(2), SMALL, LARGE]),
    ],
)
def test_what_is_defined_is_not(call: Statement, values: list[Any]) -> None:
    assert not is_undefined(call, values)
