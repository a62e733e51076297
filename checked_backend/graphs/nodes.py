"""Small helpers for FX nodes and graphs."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx


def recorded_value(node: fx.Node) -> Any:
    """The value that tracing recorded for a node. AOT graphs call it ``val``, Dynamo graphs ``example_value``."""
    return node.meta.get("val", node.meta.get("example_value"))


def followed(found: Any, path: str) -> Any:
    """What a dotted path of attributes leads to; None if there is no such attribute."""
    for step in path.split("."):
        found = getattr(found, step, None)
    return found


def fetched(home: torch.nn.Module, node: fx.Node) -> Any:
    """What a ``get_attr`` node of a module's graph fetches; None if there is no such attribute."""
    return followed(home, str(node.target))


def graph_fetched(home: torch.nn.Module, node: fx.Node) -> fx.GraphModule | None:
    """The graph that a node of a module's graph fetches for a higher-order operator; None if it fetches no graph."""
    found = fetched(home, node) if node.op == "get_attr" else None
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


def origin_of(node: fx.Node, dynamo: fx.GraphModule) -> fx.Node | None:
    """The node of Dynamo's graph that a node of an ATen graph was made from; None if that is not known.

    Args:
        node: Of a forward graph, or of a backward graph, whose nodes remember the forward's.
        dynamo: Dynamo's graph, or a copy of it.
    """
    name = _source_name(node) or _source_name(node, "fwd_source_fn_stack")
    if name is None:
        return None
    found: fx.Node | None = next((one for one in dynamo.graph.nodes if name in (_source_name(one), one.name)), None)
    return found


def _source_name(node: fx.Node, key: str = "source_fn_stack") -> str | None:
    stack = node.meta.get(key)
    return str(stack[-1][0]) if stack else None
