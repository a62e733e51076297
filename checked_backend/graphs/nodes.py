"""Small helpers for FX nodes and graphs."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

__all__ = ["graph_fetched", "is_getitem", "outputs_of", "recorded_value"]


def recorded_value(node: fx.Node) -> Any:
    """The value that tracing recorded for a node. AOT graphs call it ``val``, Dynamo graphs ``example_value``."""
    return node.meta.get("val", node.meta.get("example_value"))


def graph_fetched(home: torch.nn.Module, node: fx.Node) -> fx.GraphModule | None:
    """The graph that a node fetches for a higher-order operator; None if it fetches no graph.

    Args:
        home: The module whose graph the node is in.
    """
    if node.op != "get_attr":
        return None
    found: Any = home
    for name in str(node.target).split("."):
        found = getattr(found, name, None)
    return found if isinstance(found, fx.GraphModule) else None


def is_getitem(node: fx.Node) -> bool:
    """Whether a node only picks one of several results of another node."""
    return node.op == "call_function" and getattr(node.target, "__name__", "") == "getitem"


def outputs_of(graph: fx.Graph) -> list[Any]:
    """The nodes and constants that a graph returns, as a list; empty if it has no output."""
    for node in graph.find_nodes(op="output"):
        returned = node.args[0]
        return list(returned) if isinstance(returned, (tuple, list)) else [returned]
    return []
