"""Small questions about nodes and graphs."""

from __future__ import annotations

import torch
from torch import fx

from checked_backend.graphs.nodes import is_getitem, outputs_of, recorded_value


def graph() -> fx.Graph:
    made = fx.Graph()
    split = made.call_function(torch.split, (made.placeholder("x"), 1))
    made.output((made.call_function(torch.relu, (made.call_method("__getitem__", (split, 0)),)), None, 3))
    return made


def test_what_a_graph_returns_is_flat() -> None:
    node, *constants = outputs_of(graph())
    assert isinstance(node, fx.Node)
    assert constants == [None, 3]
    single = fx.Graph()
    x = single.placeholder("x")
    single.output(x)
    assert outputs_of(single) == [x]
    assert outputs_of(fx.Graph()) == []


def test_an_item_of_several_results() -> None:
    found = [is_getitem(node) for node in fx.symbolic_trace(lambda x: torch.split(x, 1)[0].relu()).graph.nodes]
    assert found == [False, False, True, False, False]


def test_both_tracers_names_for_a_value_are_known() -> None:
    node = graph().find_nodes(op="placeholder")[0]
    assert recorded_value(node) is None
    node.meta["example_value"] = 1
    assert recorded_value(node) == 1
    node.meta["val"] = 2
    assert recorded_value(node) == 2
