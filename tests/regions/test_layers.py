"""Cutting a region into its layers, and the float64 twin that is compiled by layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from checked_backend.regions import build
from checked_backend.regions.float64_twin import compile_layers_of_twin, compile_twin
from checked_backend.regions.layers import cut_into_layers
from tests.support.region_tools import agreed, dynamo_graph, gathered

Program = Callable[..., Any]


def layers(x: torch.Tensor, *weights: torch.Tensor) -> Any:
    """Each layer takes its weight, what is in front of them all, and the layer before it."""
    mask = torch.zeros_like(x)
    mask += x.detach().sign()
    inner = []
    for w in weights:
        x = F.dropout(torch.relu(x @ w) * mask + x, 0.5)
        inner.append(x.t())
    return x.sum().sin(), inner[2]


def three(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    for w in weights[:3]:
        x = torch.relu(x @ w)
    return x


def wired_otherwise(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    for number, w in enumerate(weights):
        y = x @ w
        x = y - y.relu() if number % 2 else y.relu() - y
    return x


def across(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    """Each layer writes to the result of the one before it."""
    for w in weights:
        x.mul_(2)
        x = x @ w
        x.add_(1)
    return x


def without_gradients(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        for w in weights:
            x = torch.relu(x @ w)
    return x * weights[0]


def in_numbers(x: torch.Tensor, *weights: torch.Tensor) -> Any:
    for w in weights:
        one, two = torch.split(torch.relu(x @ w), 4)
        x = torch.cat([two, one])
    return x


def weights() -> list[torch.Tensor]:
    return [(torch.randn(8, 8) / 3).requires_grad_() for _ in range(8)]


@pytest.mark.parametrize(("program", "pieces"), [(layers, 9), (in_numbers, 8)])
def test_layers_that_are_alike_share_a_graph(program: Program, pieces: int) -> None:
    gm = dynamo_graph(program, torch.randn(8, 8), *weights())
    found = cut_into_layers(gm)
    assert len(found) == pieces
    assert len({piece.graph for piece in found}) <= 3


@pytest.mark.parametrize("program", [three, wired_otherwise, across, without_gradients])
def test_a_region_is_left_whole(program: Program) -> None:
    """With few layers, with others, with writes to what is passed on, or where a mode is set."""
    assert not cut_into_layers(dynamo_graph(program, torch.randn(8, 8), *weights()))


def test_a_region_of_symbolic_sizes_is_left_whole() -> None:
    x = torch.randn(8, 8)
    torch._dynamo.mark_dynamic(x, 0)
    assert not cut_into_layers(dynamo_graph(in_numbers, x, *weights()))


class Counting:
    """A right compiler that counts the graphs it compiles."""

    def __init__(self) -> None:
        self.compiled = 0

    def __call__(self, gm: fx.GraphModule, _example_inputs: Sequence[Any]) -> Callable[..., Any]:
        self.compiled += 1
        return gm.forward


def results(twin: Program, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    given = [value.detach().clone().requires_grad_(value.requires_grad) for value in inputs]
    returned = [value for value in twin(*given) if isinstance(value, torch.Tensor)]
    sum(value.sum() for value in returned).backward()
    return [*returned, *(value.grad for value in given if value.grad is not None)]


def test_a_twin_by_layers_computes_what_the_whole_one_does() -> None:
    gm = dynamo_graph(layers, torch.randn(8, 8), *weights())
    traced = [node.meta["example_value"] for node in gm.graph.find_nodes(op="placeholder")]
    inputs = [torch.randn(8, 8, dtype=torch.float64, requires_grad=value.requires_grad) for value in traced]
    compiler = Counting()
    by_layers = compile_layers_of_twin(compiler, gm, inputs)
    assert by_layers is not None
    assert compiler.compiled == 3
    expected = results(compile_twin(compiler, gm, traced, inputs), inputs)
    for own, whole in zip(results(by_layers, inputs), expected, strict=True):
        assert own.dtype is torch.float64
        torch.testing.assert_close(own, whole)
    assert compiler.compiled == 4


@pytest.mark.inductor
@pytest.mark.parametrize("wrong", [False, True])
def test_inductor_compiles_the_twin_of_a_deep_model_by_layers(monkeypatch: pytest.MonkeyPatch, wrong: bool) -> None:
    """Unless a value is outside of its noise: then all of the region is asked."""
    made = []

    def kept(*args: Any) -> Any:
        made.append(compile_layers_of_twin(*args))
        return made[-1]

    monkeypatch.setattr(build, "compile_layers_of_twin", kept)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(6))).bfloat16()
    options = {"localize": False, "on_divergence": "record"}
    if wrong:
        options["compiler_options"] = {"cpp.inject_relu_bug_TESTING_ONLY": "accuracy"}
        model.append(nn.ReLU())
    compiled = torch.compile(model, backend="numcheck", options=options)
    report = gathered(lambda: compiled(torch.randn(8, 16, dtype=torch.bfloat16)).sum().backward())
    if wrong:
        assert {finding.kind.fails for finding in report.findings} == {True}
    else:
        agreed(report)
        assert len(made) == 1
        assert made[0] is not None
