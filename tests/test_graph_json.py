"""Graphs that are kept as JSON beside what was compiled of them."""

from __future__ import annotations

import json
import math
import operator
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from checked_backend._torch.graph_json import NotInJsonError, graph_from_json, graph_to_json


def kept(gm: fx.GraphModule) -> fx.GraphModule:
    return graph_from_json(json.loads(json.dumps(graph_to_json(gm))))


def traced(function: Any, *args: Any) -> fx.GraphModule:
    return make_fx(function, tracing_mode="fake")(*args)


def test_a_graph_computes_the_same_and_has_the_names_and_records_that_it_had() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        y = torch.where(x > 0, x.to(torch.bfloat16, memory_format=torch.preserve_format), -math.inf)
        high, where = y.max(1)
        return torch.cat([high, torch.zeros(3, dtype=torch.bfloat16, device="cpu")]) + where.sum() * 1.5e-7

    x = torch.randn(4, 6).t()
    gm = traced(program, x)
    back = kept(gm)
    assert torch.equal(back(x), gm(x))
    for node, own in zip(gm.graph.nodes, back.graph.nodes, strict=True):
        assert (node.op, node.name, node.target) == (own.op, own.name, own.target)
        value, copy = node.meta.get("val"), own.meta["val"]
        for one, two in zip(*((v if isinstance(v, (tuple, list)) else [v]) for v in (value, copy)), strict=True):
            if isinstance(one, torch.Tensor):
                assert (one.shape, one.dtype) == (two.shape, two.dtype)
    assert graph_to_json(back) == graph_to_json(gm)


def test_origins_constants_and_graphs_inside_are_kept() -> None:
    inside = traced(lambda x: x.sin(), torch.randn(3))
    home = nn.Module()
    home.scale = torch.tensor([1.0, math.nan, -0.0])  # type: ignore[assignment]
    home.inside = inside
    graph = fx.Graph()
    x = graph.placeholder("x")
    called = graph.call_function(torch.ops.higher_order.invoke_subgraph, (graph.get_attr("inside"), "inside", x))
    first = graph.call_function(operator.getitem, (called, 0))
    scaled = graph.call_function(torch.ops.aten.mul.Tensor, (first, graph.get_attr("scale")))
    scaled.meta["source_fn_stack"] = [("outer", None), ("relu", torch.relu)]
    graph.output((scaled,))
    back = kept(fx.GraphModule(home, graph))
    node = next(node for node in back.graph.nodes if node.target is torch.ops.aten.mul.Tensor)
    assert node.meta["source_fn_stack"][-1][0] == "relu"
    assert torch.equal(back.scale.view(torch.int32), home.scale.view(torch.int32))  # type: ignore[operator,union-attr]
    inner: Any = back.inside
    given = torch.randn(3)
    assert torch.equal(inner(given), given.sin())


@pytest.mark.parametrize(
    ("target", "factor"),
    [
        (torch.ops.aten.mul.Tensor, torch.arange(65.0)),
        (torch.ops.aten.mul.Tensor, nn.Parameter(torch.ones(1))),
        (torch.ops.aten.mul.Scalar, 1 + 2j),
        (torch.mul, 2.0),
    ],
)
def test_what_is_not_kept_is_refused(target: Any, factor: Any) -> None:
    home, graph = nn.Module(), fx.Graph()
    if isinstance(factor, torch.Tensor):
        home.factor = factor
        factor = graph.get_attr("factor")
    graph.output(graph.call_function(target, (graph.placeholder("x"), factor)))
    with pytest.raises(NotInJsonError):
        graph_to_json(fx.GraphModule(home, graph))


def test_symbols_for_sizes_are_symbols_again() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return x.reshape(-1).new_zeros(x.shape[0] * 2, 3) + x.shape[0] // 2

    gm = make_fx(program, tracing_mode="symbolic")(torch.randn(5, 3))
    back = kept(gm)
    assert torch.equal(back(torch.randn(7, 3)), gm(torch.randn(7, 3)))
    [x] = back.graph.find_nodes(op="placeholder")
    assert [isinstance(size, int) for size in x.meta["val"].shape] == [False, False]
    assert graph_to_json(back) == graph_to_json(gm)


@pytest.mark.parametrize(
    "target",
    [
        "os.system",
        "aten.no_such_operator.default",
        "system",
        "aten.add",
        "aten.__class__.x",
        "operator.attrgetter",
        "higher_order",
    ],
)
def test_what_is_no_operator_is_refused(target: str) -> None:
    entries = json.loads(json.dumps(graph_to_json(traced(lambda x: x + 1, torch.randn(3)))))
    entries[1][2] = target
    with pytest.raises((AttributeError, TypeError, ValueError, RuntimeError)):
        graph_from_json(entries)
