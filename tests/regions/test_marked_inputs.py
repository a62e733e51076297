"""Views of what requires grad, made with grad mode off: eager's copies have the marks that the user's tensors have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import checked_backend as cb
from tests.support import faults
from tests.support.region_tools import agreed, checked, found, gathered


class Weights(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4, 4))
        self.register_buffer("steps", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self.steps.add_(1)
        return (*self.weight.chunk(2), self.weight.t(), x @ self.weight, self.steps[1:])


class WritesToWeights(Weights):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self.weight[0].add_(1)
        return self.weight[1:], x + 1


def some_views(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x[..., :-1], x + 1, *x.split(2), x.t()[1:], x.detach(), x.view_as(x), x


def writes_to_a_view(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    part = x[1:]
    part.mul_(2)
    return part, x


def views_with_grad(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    with torch.enable_grad():
        part = x[1:]
    return part, x + 1


@pytest.mark.sampled(8)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
@pytest.mark.parametrize("make", [Weights, WritesToWeights, lambda: some_views, lambda: writes_to_a_view])
def test_views_of_what_requires_grad(make: Callable[[], Any], compiler: str, mode: Callable[[], Any]) -> None:
    if compiler == "aot_eager" and make() is writes_to_a_view:
        return  # of which AOT autograd makes no graph
    with mode():
        for history in (False, True):
            x = torch.randn(4, 4)
            if not history:
                x.requires_grad_()
            agreed(cb.check(make(), (x,), compiler=compiler))
            function = checked(make(), compiler)
            agreed(gathered(lambda f=function, x=x: (f(x), f(x))))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # Dynamo asks for it
def test_views_of_a_tensor_with_a_history_and_where_grad_mode_is_on_inside() -> None:
    x = torch.randn(4, 4, requires_grad=True)
    for mode in (torch.no_grad, torch.inference_mode):
        with torch.enable_grad():
            made = x * 2
        with mode():
            agreed(gathered(lambda made=made: checked(some_views, "aot_eager")(made)))
            agreed(gathered(lambda: checked(views_with_grad, "eager")(x)))


detaches = faults.every_output(torch.Tensor.detach)
marks = faults.every_output(lambda output: output.detach().requires_grad_())


def test_a_lost_or_made_up_mark_is_found() -> None:
    x = torch.randn(4, 4, requires_grad=True)
    with torch.no_grad():
        details = found(gathered(lambda: checked(lambda x: (x[1:], x + 1), detaches)(x)))
        assert details == {("structure.requires_grad", "output[0]")}
        details = found(gathered(lambda: checked(lambda x: (x[1:], x + 1), marks)(x)))
        assert details == {("structure.requires_grad", "output[1]")}
        report = cb.check(lambda x: (x[1:], x + 1), (x,), compiler=detaches)
        assert ("structure.requires_grad", "output[0]") in found(report)
