"""Graphs with their patterns fused, as Inductor's last passes leave them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from checked_backend.diagnose.localize.fused import fused_graph, is_fused
from checked_backend.diagnose.localize.stages import GraphKind, Recorded
from checked_backend.diagnose.localize.subgraph import calls_of
from checked_backend.options import CheckOptions


def product(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    return torch.cos(torch.sin(x) @ y + z)


def written(x: Tensor, y: Tensor, index: Tensor) -> Tensor:
    return torch.ops.aten.index_put.default(torch.zeros_like(x), [index], (x @ y + x)[index])


def recorded(function: Any, inputs: Sequence[Any], kind: GraphKind = "inference", mode: Any = "fake") -> Recorded:
    return Recorded(kind, make_fx(function, tracing_mode=mode)(*inputs), tuple(inputs))


def targets(gm: fx.GraphModule) -> list[str]:
    return [str(node.target) for node in calls_of(gm)]


@pytest.mark.parametrize("mode", ["fake", "symbolic"])
@pytest.mark.parametrize("kind", ["forward", "backward", "inference"])
def test_a_product_and_a_sum_are_one(kind: GraphKind, mode: str) -> None:
    inputs = [torch.randn(4, 4) for _ in range(3)]
    before = recorded(product, inputs, kind, mode)
    wanted = targets(before.graph)
    fused = fused_graph(before, CheckOptions())
    assert fused is not None
    assert targets(before.graph) == wanted
    assert targets(fused.graph) == ["aten.sin.default", "aten.addmm.default", "aten.cos.default"]
    assert torch.allclose(fused.graph(*inputs), product(*inputs))
    sin, addmm, cos = calls_of(fused.graph)
    assert [is_fused(node, before.graph) for node in (sin, addmm, cos)] == [False, True, False]
    assert all(tuple(node.meta["val"].shape) == (4, 4) for node in (sin, addmm, cos))


def test_nothing_writes_in_place_yet() -> None:
    inputs = [torch.randn(4, 4), torch.randn(4, 4), torch.tensor([2, 0])]
    fused = fused_graph(recorded(written, inputs), CheckOptions())
    assert fused is not None
    assert "aten.addmm.default" in targets(fused.graph)
    assert "aten.index_put.default" in targets(fused.graph)  # and not index_put_, by which Inductor replaces it


def test_a_pass_of_the_user_runs_too() -> None:
    def sines_are_cosines(graph: fx.Graph) -> None:
        for node in graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default):
            node.target = torch.ops.aten.cos.default

    options = CheckOptions(compiler_options={"post_grad_custom_post_pass": sines_are_cosines})
    fused = fused_graph(recorded(lambda x: torch.sin(x) + 1, [torch.randn(4)]), options)
    assert fused is not None
    assert targets(fused.graph) == ["aten.cos.default", "aten.add.Tensor"]


def test_no_fused_graph_without_need_or_without_inductor() -> None:
    inputs = [torch.randn(4, 4) for _ in range(3)]
    assert fused_graph(recorded(lambda x: torch.sin(x) + 1, inputs[:1]), CheckOptions()) is None
    assert fused_graph(recorded(product, inputs), CheckOptions(compiler="aot_eager")) is None
    assert fused_graph(recorded(product, inputs, "dynamo"), CheckOptions()) is None
