"""Sparse gradients are compared like others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import checked_backend as cb
from tests.support import faults
from tests.support.region_tools import agreed, checked, found, gathered


class Sparse(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 3, sparse=True, dtype=dtype)
        self.linear = nn.Linear(3, 2, dtype=dtype)

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(self.table(index)))


def rebuilt(gradient: torch.Tensor, change: Callable[[torch.Tensor, torch.Tensor], Any]) -> torch.Tensor:
    gradient = gradient.coalesce()
    parts = change(gradient.indices(), gradient.values().clone())
    return torch.sparse_coo_tensor(*parts, gradient.shape, check_invariants=True)


def one_value(indices: torch.Tensor, values: torch.Tensor) -> Any:
    values[-1, -1] *= 1.01
    return indices, values


SPARSE: dict[str, tuple[Callable[[torch.Tensor, torch.Tensor], Any], str]] = {
    "one value": (one_value, "logic"),
    "twice": (lambda indices, values: (indices, values * 2), "logic"),
    "other places": (lambda indices, values: ((indices + 1) % 20, values), "structure.indices"),
    "a place left out": (lambda indices, values: (indices[:, 1:], values[1:]), "structure.indices"),
    "a zero stored": (
        lambda indices, values: (
            torch.cat([indices, torch.tensor([[9]])], 1),
            torch.cat([values, torch.zeros(1, 3, dtype=values.dtype)]),
        ),
        "structure.indices",
    ),
}


def sparse_report(compiler: Any, dtype: torch.dtype) -> cb.Report:
    torch.manual_seed(0)
    model = checked(Sparse(dtype), compiler)
    return gathered(lambda: model(torch.tensor([1, 2, 2, 5])).sum().backward())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "compiler",
    [
        "eager",
        "aot_eager",
        faults.clean("aot"),
        faults.spoiled_gradient("table.weight", lambda gradient: gradient.coalesce(), "python"),
        faults.spoiled_gradient(
            "table.weight", lambda gradient: rebuilt(gradient, lambda i, v: (i.flip(1), v.flip(0)))
        ),
    ],
    ids=["eager", "aot_eager", "clean", "coalesced", "other order"],
)
# torch 2.11 warns although the test says what it wants
@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled:UserWarning")
def test_sparse_gradient_that_is_right(compiler: Any, dtype: torch.dtype) -> None:
    report = sparse_report(compiler, dtype)
    assert agreed(report)
    assert report.coverage.checked["gradients"] == 3


@pytest.mark.parametrize("how", ["python", "aot"])
@pytest.mark.parametrize("name", SPARSE)
def test_sparse_gradient_that_is_wrong(name: str, how: faults.How) -> None:
    change, detail = SPARSE[name]
    compiler = faults.spoiled_gradient("table.weight", lambda gradient: rebuilt(gradient, change), how)
    report = sparse_report(compiler, torch.float32)
    assert found(report) == {(detail, "grad[table.weight]")}
    if detail == "structure.indices":
        assert report.findings[0].expected == "3 places: 1, 2, 5"
