"""The node of Dynamo's graph that a node of an ATen graph was made from."""

from __future__ import annotations

from torch import fx

__all__ = ["origin_of"]


def origin_of(node: fx.Node, dynamo: fx.GraphModule) -> fx.Node | None:
    """The node of Dynamo's graph that a node of an ATen graph was made from; None if that is not known.

    Args:
        node: Of a forward graph, or of a backward graph, whose nodes remember the forward's.
        dynamo: Dynamo's graph, or a copy of it.
    """
    name = _name(node) or _name(node, "fwd_source_fn_stack")
    if name is None:
        return None
    found: fx.Node | None = next((one for one in dynamo.graph.nodes if name in (_name(one), one.name)), None)
    return found


def _name(node: fx.Node, key: str = "source_fn_stack") -> str | None:
    stack = node.meta.get(key)
    return str(stack[-1][0]) if stack else None
