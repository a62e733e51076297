"""Parts of a graph as graphs of their own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import fx

from checked_backend._torch import OpOverload

__all__ = ["calls_of", "is_view", "outputs_of", "part_of", "tensors_made", "with_outputs"]

_CALLS = ("call_function", "call_method", "call_module")


def calls_of(gm: fx.GraphModule) -> list[fx.Node]:
    """The nodes that compute something, in order."""
    return [node for node in gm.graph.nodes if node.op in _CALLS]


def outputs_of(gm: fx.GraphModule) -> list[Any]:
    """What a graph returns, flat."""
    [output] = gm.graph.find_nodes(op="output")
    returned = output.args[0]
    return list(returned) if isinstance(returned, (tuple, list)) else [returned]


def tensors_made(node: fx.Node) -> list[fx.Node]:
    """The nodes that stand for the tensors which a call makes: itself, or the items taken of its tuple."""
    if isinstance(node.meta.get("val"), (tuple, list)):
        return [user for user in node.users if is_item(user) and isinstance(user.meta.get("val"), torch.Tensor)]
    return [node] if isinstance(node.meta.get("val"), torch.Tensor) and not is_item(node) else []


def is_item(node: fx.Node) -> bool:
    """Whether a node takes one item of a tuple."""
    return node.op == "call_function" and getattr(node.target, "__name__", "") == "getitem"


def is_view(node: fx.Node) -> bool:
    """Whether an operator returns its input's memory, and changes nothing in it."""
    if not isinstance(node.target, OpOverload):
        return False
    returned = [item.alias_info for item in node.target._schema.returns]
    return bool(returned) and all(alias is not None and not alias.is_write for alias in returned)


def with_outputs(gm: fx.GraphModule, extra: Sequence[fx.Node]) -> tuple[fx.GraphModule, list[int]]:
    """Copy a graph so that it returns further nodes too.

    Args:
        gm: The graph.
        extra: Nodes of it.

    Returns:
        The graph, and for each further node its place among what the graph returns.
    """
    graph = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    returned = graph.graph_copy(gm.graph, copied)
    outputs = list(returned) if isinstance(returned, (tuple, list)) else [returned]
    places = []
    for node in extra:
        if copied[node] not in outputs:
            outputs.append(copied[node])
        places.append(outputs.index(copied[node]))
    graph.output(tuple(outputs))
    return fx.GraphModule(gm, graph), places


def part_of(
    gm: fx.GraphModule,
    nodes: Collection[fx.Node],
    returned: Sequence[fx.Node],
    *,
    finish: Callable[[fx.Graph, fx.Node], fx.Node] = lambda _graph, node: node,
) -> tuple[fx.GraphModule, list[fx.Node]]:
    """Make a graph of some nodes of another.

    Args:
        gm: The graph.
        nodes: Its calls that the part has.
        returned: Those among them whose values the part returns.
        finish: Makes the returned node of the part's own.

    Returns:
        The part, and the nodes of the graph whose values are its inputs.
    """
    graph = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    chosen = set(nodes)
    inputs = _inputs_of(gm, chosen)
    for node in inputs:
        name = node.target if node.op == "placeholder" else node.name
        copied[node] = graph.placeholder(str(name))
        copied[node].meta = dict(node.meta)
    for node in gm.graph.nodes:
        if node in chosen or (node.op == "get_attr" and any(user in chosen for user in node.users)):
            copied[node] = graph.node_copy(node, lambda source: copied[source])
    graph.output(tuple(finish(graph, copied[node]) for node in returned))
    return fx.GraphModule(gm, graph), inputs


def _inputs_of(gm: fx.GraphModule, chosen: set[fx.Node]) -> list[fx.Node]:
    needed = {
        source for node in chosen for source in node.all_input_nodes if source not in chosen and source.op != "get_attr"
    }
    return [node for node in gm.graph.nodes if node in needed]
