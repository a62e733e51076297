"""Inputs that a region writes to in its backward pass, as a `torch.autograd.Function` of the user's may."""

from __future__ import annotations

from torch import fx

from checked_backend.interpret.effects import writes

__all__ = ["writes_in_backward"]

_APPLY = "autograd_function_apply"
_VIEWS = frozenset(
    {"detach", "getitem", "narrow", "reshape", "select", "squeeze", "t", "transpose", "unsqueeze", "view"}
)


def writes_in_backward(gm: fx.GraphModule) -> bool:
    """Whether a call of a `torch.autograd.Function` writes to something in its backward that it did not make there.

    Args:
        gm: A Dynamo graph.
    """
    for node in gm.graph.nodes:
        if node.op != "call_function" or getattr(node.target, "__name__", "") != _APPLY:
            continue
        forward, backward = (getattr(gm, str(body.target), None) for body in node.args[:2])
        if not isinstance(forward, fx.GraphModule) or not isinstance(backward, fx.GraphModule):
            return True  # nobody knows
        returned = forward.graph.output_node().args[0]
        results = returned[0] if isinstance(returned, (tuple, list)) and returned else None
        gradients = len(results) if isinstance(results, (tuple, list)) else 1
        held = backward.graph.find_nodes(op="placeholder")[gradients:]
        if any(writes(call) and _written(call) in held for call in backward.graph.nodes):
            return True
    return False


def _written(call: fx.Node) -> fx.Node | None:
    """What a call writes to, of which its first argument may be a view."""
    target = call.args[0] if call.args else None
    while isinstance(target, fx.Node) and target.op.startswith("call_"):
        name = target.target if isinstance(target.target, str) else getattr(target.target, "__name__", "")
        if name not in _VIEWS:
            return None
        target = target.args[0]
    return target if isinstance(target, fx.Node) else None
