"""A gradient that is wrong only where forward and backward are compiled together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from tests.support import faults
from tests.support.locate_tools import located, operator_of


class ConvNet(nn.Module):
    def __init__(self, pool: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.last = nn.Linear(4, 3)
        self.pool = pool

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = x.abs().amax()
        x = F.relu(self.norm(self.first(x / scale)))
        x = self.pool(x)
        x = F.gelu(self.second(x)) + torch.sigmoid(x)
        x = x * torch.tanh(x)
        return self.last(x.mean((2, 3))).log_softmax(-1)


def trained(compiled: Callable[..., Any]) -> None:
    compiled(torch.randn(2, 3, 9, 9)).square().sum().backward()


@pytest.mark.process
@pytest.mark.parametrize(
    ("pool", "forward", "backward"),
    [
        (lambda x: F.avg_pool2d(x, 3, 2, ceil_mode=True), "avg_pool2d", "avg_pool2d_backward"),
        pytest.param(
            lambda x: F.max_pool2d(x, 3, 2, 1, ceil_mode=True),
            "max_pool2d_with_indices",
            "max_pool2d_with_indices_backward",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            lambda x: F.adaptive_avg_pool2d(x, 4),
            "_adaptive_avg_pool2d",
            "_adaptive_avg_pool2d_backward",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_pooling_in_a_network_whose_gradient_is_wrong(
    pool: Callable[[Tensor], Tensor], forward: str, backward: str
) -> None:
    wrong = faults.wrong_if_compiled_together(f"aten.{forward}.default", f"aten.{backward}.default")
    location = located(trained, ConvNet(pool), wrong)
    assert (location.op or "").removeprefix("aten.").removesuffix(".default") == forward
    assert location.graph == "dynamo"
    assert location.cut is not None
    assert location.cut.finding.subject.startswith("grad[")
    assert len([node for node in location.cut.case.graph.graph.nodes if node.op == "call_function"]) == 1
    assert any("forward and backward are compiled together" in note for note in location.notes)


class Siblings(nn.Module):
    def __init__(self, part: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(4, 3)
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x)) * 2
        x = x + F.gelu(x).cos()
        one, other, *_ = self.part(x)
        product = one * other
        return self.last(F.silu(product) + torch.sin(product)).softmax(-1)


def second_detached(name: str) -> Callable[..., Any]:
    """An operator with several outputs hands on the gradient of the first alone."""

    def result(node: fx.Node, value: Any) -> Any:
        if str(node.target) == name and isinstance(value, tuple):
            first, second, *rest = value
            return (first, second.detach() if len(value) > 1 else second, *rest)
        return value

    return faults.interpreted(result, "python")


@pytest.mark.process
@pytest.mark.parametrize(
    ("part", "target", "name"),
    [
        (lambda x: x.chunk(2, 1), "chunk", "Tensor.chunk"),
        pytest.param(
            lambda x: torch.split(x, 4, 1), str(torch.split), "torch.functional.split", marks=pytest.mark.slow
        ),
        pytest.param(lambda x: x.unflatten(1, (2, 4)).unbind(1), "unbind", "Tensor.unbind", marks=pytest.mark.slow),
        (lambda x: torch.var_mean(x.unflatten(1, (2, 4)), 1), str(torch.var_mean), "torch.var_mean"),
    ],
    ids=["chunk", "split", "unbind", "var_mean"],
)
def test_a_gradient_that_is_lost_between_sibling_outputs(part: Callable[[Tensor], Any], target: str, name: str) -> None:
    def program(compiled: Callable[..., Any]) -> None:
        compiled(torch.randn(5, 6)).square().sum().backward()

    location = located(program, Siblings(part), second_detached(target))
    assert operator_of(location) == name
    assert location.graph == "dynamo"


@pytest.mark.process
def test_siblings_of_which_one_is_lost_in_the_backward_graph() -> None:
    """The product that reads both is right: stored, both parts are right, and so is the product."""

    def program(compiled: Callable[..., Any]) -> None:
        compiled(torch.randn(5, 6)).square().sum().backward()

    def halved(value: Tensor) -> Tensor:
        return torch.cat([value[:, :4], torch.zeros_like(value[:, 4:])], 1)

    wrong = faults.wrong_if_compiled_together("aten.split.Tensor", "aten.cat.default", halved)
    location = located(program, Siblings(lambda x: x.chunk(2, 1)), wrong)
    assert operator_of(location) == "Tensor.chunk"


@pytest.mark.process
def test_gradients_that_are_right_are_not_accused() -> None:
    """Only the forward pass is wrong."""
    location = located(
        trained, ConvNet(lambda x: F.avg_pool2d(x, 2)), faults.wrong_operator("aten.gelu.default", how="aot")
    )
    assert location.op == "aten.gelu.default"
    assert not any("compiled together" in note for note in location.notes)
