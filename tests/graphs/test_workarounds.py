"""A graph's code computes what its nodes say, powers of negative numbers included."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import fx

from checked_backend.graphs.workarounds import powers_called


def graph_of(base: Any) -> fx.GraphModule:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(operator.pow, (x, 2) if base is None else (base, x)))
    return fx.GraphModule({}, graph)


@pytest.mark.parametrize("base", [-2.0, -3, -0.0, float("-inf")])
def test_powers_of_negative_numbers(base: float) -> None:
    gm = graph_of(base)
    called = fx.GraphModule(gm, powers_called(gm.graph))
    for x in torch.tensor([1.0, 2.0, 3.0]), 2, 3:
        expected = fx.Interpreter(gm).run(x)
        torch.testing.assert_close(called(x), expected, rtol=0, atol=0)
        assert type(called(x)) is type(expected)
    assert len(gm.graph.find_nodes(op="call_function", target=operator.pow)) == 1  # the graph itself is as it was
    # FX's own code takes another sign; when it no longer does, there is no more need for this
    assert torch.signbit(gm(torch.tensor([2.0]))) != torch.signbit(called(torch.tensor([2.0])))


@pytest.mark.parametrize("base", [2.0, 0, True, None])
def test_other_powers_stay(base: Any) -> None:
    graph = graph_of(base).graph
    assert powers_called(graph) is graph
