"""Gradients that pass writes in place, each operator by itself: checked where the write can be spelled otherwise."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import checked_backend as cb
from tests.support import faults
from tests.support.region_tools import agreed, checked, gathered

Tensor = torch.Tensor


def _slice(h: Tensor) -> Tensor:
    h[:, 0] = 1.0
    return h


def _added(h: Tensor) -> Tensor:
    h += 1
    h.mul_(2)
    return h


def _accumulated(h: Tensor) -> Tensor:
    total = torch.zeros(h.shape, dtype=h.dtype)
    total.add_(h)
    return total


def _seen_by_view(h: Tensor) -> Tensor:
    view = h.view(-1)
    h.mul_(2)
    return view.view(h.shape)


def _without_history(h: Tensor) -> Tensor:
    with torch.no_grad():
        h.mul_(2)
    return h


CHECKED: dict[str, Callable[[Tensor], Tensor]] = {
    "method": lambda h: h.relu_(),
    "named": lambda h: F.relu(h, inplace=True),
    "by position": lambda h: F.leaky_relu(h, 0.1, True),
    "dropout": torch.nn.Dropout(0.1, inplace=True),
    "twice": _added,
    "accumulated": _accumulated,
}
TOLD: dict[str, Callable[[Tensor], Tensor]] = {
    "slice": _slice,
    "seen by a view": _seen_by_view,
    "under no_grad": _without_history,
}


class Model(torch.nn.Module):
    """Two layers with a write in place between them."""

    def __init__(self, write: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(16, 32)
        self.second = torch.nn.Linear(32, 16)
        self.write = write

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.gelu(self.write(self.first(x)))).float().square().mean()


def report(write: Callable[[Tensor], Tensor], factor: float) -> cb.Report:
    """Of one training step whose first weight has a gradient that is wrong by a factor at 16 bits."""

    def scaled(tensor: Tensor) -> Tensor:
        return tensor * factor if tensor.dtype is torch.bfloat16 else tensor

    run = checked(Model(write).bfloat16(), faults.spoiled_gradient("first.weight", scaled, "aot"))
    return gathered(lambda: run(torch.randn(40, 16, dtype=torch.bfloat16)).backward())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", CHECKED)
def test_gradients_that_pass_writes_in_place_are_checked(name: str) -> None:
    clean = report(CHECKED[name], 1.0)
    assert agreed(clean)
    assert not clean.coverage.skipped
    assert report(CHECKED[name], 1.03).verdict is cb.Verdict.FAIL


@pytest.mark.parametrize("name", TOLD)
def test_where_they_cannot_be_checked_the_coverage_says_so(name: str) -> None:
    clean = report(TOLD[name], 1.0)
    assert agreed(clean)
    [skip] = clean.coverage.skipped
    assert skip.subject == "operators by themselves"
    assert "gradients that pass" in skip.reason
    assert "written to later" in skip.reason
