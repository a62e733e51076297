"""Graphs that set modes on their way are localized like any other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from checked_backend.diagnose.localize.cut import Parts
from checked_backend.diagnose.localize.subgraph import calls_of, part_of
from checked_backend.diagnose.reduce.failing_case import FailingCase
from checked_backend.diagnose.repro.translate import write_program
from checked_backend.graphs.mode_blocks import with_mode_blocks
from checked_backend.options import CheckOptions
from checked_backend.regions.compile import copy_graph
from checked_backend.regions.graph_case import GraphCase
from tests.support import faults
from tests.support.locate_tools import calls, located, operator_of
from tests.support.region_tools import dynamo_graph

OPTIONS = CheckOptions(compiler="aot_eager", on_divergence="record")


def rotated(x: Tensor, w: Tensor) -> Tensor:
    """As in language models: the rotary embedding is computed without gradients, and never in low precision."""
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        angles = torch.arange(x.shape[-1]).float() * 0.1
        cos = angles.cos()
    x = torch.tanh(x * cos)
    x = F.gelu(x)
    return F.linear(x, w).softmax(-1)


def in_half(x: Tensor, w: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = F.linear(x, w)
        with torch.autocast("cpu", enabled=False):
            z = F.gelu(F.linear(x, w))
        y = F.linear(y, w) + z
    return y.float().softmax(-1)


def inside_no_grad(x: Tensor, w: Tensor) -> Tensor:
    with torch.no_grad():
        mask = F.gelu(x) > 0.1
    return torch.sin(F.linear(x * mask, w))


def in_inference(x: Tensor, w: Tensor) -> Tensor:
    with torch.inference_mode():
        scale = F.gelu(w)
    return F.linear(x, w) * scale.sum()


def training(compiled: Callable[..., Any]) -> None:
    compiled(torch.randn(5, 8), torch.randn(8, 8, requires_grad=True)).sum().backward()


def inference(compiled: Callable[..., Any]) -> None:
    with torch.no_grad():
        compiled(torch.randn(5, 8), torch.randn(8, 8))


def amp(compiled: Callable[..., Any]) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        compiled(torch.randn(5, 8), torch.randn(8, 8))


@pytest.mark.process
@pytest.mark.parametrize(
    ("function", "program"),
    [
        (rotated, training),
        (in_half, amp),
        (inside_no_grad, training),
        (in_inference, inference),
        pytest.param(rotated, amp, marks=pytest.mark.slow),
        pytest.param(in_half, training, marks=pytest.mark.slow),
        pytest.param(inside_no_grad, inference, marks=pytest.mark.slow),
    ],
)
def test_the_operator_is_named_in_a_graph_that_sets_modes(
    function: Callable[..., Any], program: Callable[..., Any]
) -> None:
    before = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")
    location = located(program, function, faults.wrong_operator(str(F.gelu)))
    assert (location.op, location.graph) == ("aten.gelu.default", "dynamo")
    assert location.cut is not None
    assert (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")) == before


@pytest.mark.process
@pytest.mark.parametrize("dtype", [torch.bfloat16, None])
def test_a_compiler_that_is_wrong_under_autocast_alone(dtype: torch.dtype | None) -> None:
    """A part runs under the modes that it has in the whole: elsewhere this compiler is right."""

    def spoil(value: Tensor) -> Tensor:
        return faults.changed(value) if value.dtype is torch.bfloat16 else value

    def function(x: Tensor, w: Tensor) -> Tensor:
        with torch.no_grad():
            x = x * 2
        if dtype is None:  # then it is ambient
            return torch.sin(F.linear(torch.cos(x), w).float())
        with torch.autocast("cpu", dtype=dtype):
            y = F.linear(torch.cos(x), w)
        return torch.sin(y.float())

    location = located(amp if dtype is None else inference, function, faults.wrong_operator(str(F.linear), spoil))
    assert operator_of(location) == "torch._C._nn.linear"
    assert location.cut is not None


@pytest.mark.process
def test_bisection_goes_past_modes_too() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = F.linear(x, w)
        y[1:3].mul_(2)  # what is written through a view is not probed
        with torch.no_grad():
            y = torch.cos(y)
        return F.gelu(y.float()) + 1

    location = located(inference, function, faults.left_out("mul_", "python"))
    assert (operator_of(location), location.op, location.graph) == ("Tensor.mul_", "aten.mul_.Tensor", "dynamo")
    assert "bisection" in location.notes[-1]
    assert calls(location.cut.case) == ["mul_"]  # alone, on the values that eager had there


def test_an_operator_that_should_have_raised_under_a_mode() -> None:
    def function(x: Tensor, _w: Tensor) -> Tensor:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            return torch.linalg.cholesky(torch.sin(x @ x.mT) - 100) * 2

    location = located(inference, function, faults.left_out(str(torch.linalg.cholesky), "python"))
    assert operator_of(location) == "torch._C._linalg.linalg_cholesky"
    assert location.cut is not None
    assert not torch.is_autocast_enabled("cpu")


def test_a_part_enters_and_leaves_the_modes_of_its_own_calls() -> None:
    x, w = torch.randn(5, 8), torch.randn(8, 8)
    graph = dynamo_graph(in_half, x, w)
    nodes = calls_of(graph)
    first, within, after = nodes[0], nodes[1], nodes[-2]
    for chosen, dtype, modes in (
        ([first], torch.bfloat16, 2),
        ([within], torch.float32, 4),
        ([after], torch.float32, 0),
        ([first, within], torch.float32, 4),
    ):
        part, sources = part_of(graph, chosen, [chosen[-1]])
        part.graph.lint()
        given = [torch.randn(5, 8) if source.name != "l_w_" else w for source in sources]
        assert part(*given)[0].dtype == dtype
        assert not torch.is_autocast_enabled("cpu")
        assert len(part.graph.nodes) - len(chosen) - len(sources) - 1 == modes


def test_blocks_can_be_traced_and_written() -> None:
    x, w = torch.randn(5, 8), torch.randn(8, 8)
    graph = dynamo_graph(in_half, x, w)
    expected = in_half(x, w)
    again = torch.compile(with_mode_blocks(copy_graph(graph)), backend="eager", fullgraph=True)
    torch.testing.assert_close(again(x, w)[0], expected, rtol=0, atol=0)
    written = write_program(FailingCase(GraphCase(graph, (x, w), OPTIONS), "output[0]"), plain=False)
    names: dict[str, Any] = {"torch": torch, "F": F}
    lines = "\n".join(f"    {line}" for line in written.lines)
    exec(f"def program({', '.join(written.parameters)}):\n{lines}", names)
    assert "with torch.autocast('cpu', dtype=torch.bfloat16" in lines
    torch.testing.assert_close(names["program"](x, w), expected, rtol=0, atol=0)


def test_a_graph_with_modes_that_is_right_has_no_wrong_prefix() -> None:
    x, w = torch.randn(5, 8), torch.randn(8, 8)
    assert Parts(dynamo_graph(in_half, x, w), [x, w], OPTIONS, GraphCase.findings).shortest_wrong_prefix() is None
