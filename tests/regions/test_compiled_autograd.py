"""Compiled autograd: a backward pass that Dynamo captures is a region as others are."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

import checked_backend as cb
from tests.support import faults
from tests.support.region_tools import agreed, checked, found, gathered

# torch's own, where compiled autograd looks at saved results
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


@pytest.fixture(autouse=True)
def compiled_autograd() -> Iterator[None]:
    with torch._dynamo.config.patch(compiled_autograd=True):
        yield


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def gradients(model: nn.Module, step: Callable[[torch.Tensor], None], times: int = 3) -> list[torch.Tensor]:
    for number in range(times):
        step(torch.linspace(-1, 1 + number, 24).view(6, 4))
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def training(model: nn.Module) -> Callable[[torch.Tensor], None]:
    def step(x: torch.Tensor) -> None:
        model(x).square().sum().backward()

    return step


@pytest.mark.parametrize("in_backward", [True, False])
@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_compiled_autograd_agrees_and_accumulates_once(compiler: str, in_backward: bool) -> None:
    bare, model = net(), net()
    expected = gradients(bare, torch.compile(training(bare), backend=compiler))
    actual: list[torch.Tensor] = []
    compiled = checked(training(model), compiler, gradients=in_backward)
    assert agreed(gathered(lambda: actual.extend(gradients(model, compiled))))
    assert len(actual) == len(expected) == 4
    assert all(map(torch.equal, actual, expected))


@pytest.mark.parametrize("in_backward", [True, False])
def test_a_wrong_backward_is_found_under_compiled_autograd(in_backward: bool) -> None:
    model = net()
    wrong = faults.wrong_operator("aten.tanh_backward.default", lambda result: result * 1.01, "aot")
    compiled = checked(training(model), wrong, gradients=in_backward)
    report = gathered(lambda: gradients(model, compiled))
    assert {detail for detail, _ in found(report)} & {"logic", "precision"}, str(report)


def test_check_under_compiled_autograd() -> None:
    model = net()

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().sum()
        loss.backward()
        return loss.detach()

    report = cb.check(step, (torch.ones(6, 4),), compiler="aot_eager")
    assert not found(report), str(report)
