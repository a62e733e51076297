"""Small questions about FX nodes and graphs."""

from __future__ import annotations

from typing import Any

from torch import fx

__all__ = ["is_getitem", "outputs_of", "recorded_value"]


def recorded_value(node: fx.Node) -> Any:
    """What tracing recorded of a node's value: AOT graphs call it ``val``, Dynamo graphs ``example_value``."""
    return node.meta.get("val", node.meta.get("example_value"))


def is_getitem(node: fx.Node) -> bool:
    """Whether a node only picks one of several results of another."""
    return node.op == "call_function" and getattr(node.target, "__name__", "") == "getitem"


def outputs_of(graph: fx.Graph) -> list[Any]:
    """What a graph returns, flat: nodes and constants. Empty if it has no output."""
    for node in graph.find_nodes(op="output"):
        returned = node.args[0]
        return list(returned) if isinstance(returned, (tuple, list)) else [returned]
    return []
