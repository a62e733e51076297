"""Find writes to inputs in a region's backward pass: a user's `torch.autograd.Function` and a checkpoint may write."""

from __future__ import annotations

from torch import fx

from checked_backend.graphs.effects import writes

__all__ = ["writes_in_backward"]

_APPLY = "autograd_function_apply"
_CHECKPOINT = "tag_activation_checkpoint"
_VIEWS = frozenset(
    {"detach", "getitem", "narrow", "reshape", "select", "squeeze", "t", "transpose", "unsqueeze", "view"}
)


def writes_in_backward(gm: fx.GraphModule) -> bool:
    """Whether a region's backward pass writes to something that it did not make there.

    A call of a `torch.autograd.Function` may. A checkpointed body that writes to its inputs (a batch norm to its
    statistics) does so again when eager recomputes it. The compiled program mostly does not.
    """
    for node in gm.graph.nodes:
        name = getattr(node.target, "__name__", "")
        if node.op == "call_function" and name == _CHECKPOINT and _writes_to_operands(gm, node):
            return True
        if node.op != "call_function" or name != _APPLY:
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


def _writes_to_operands(gm: fx.GraphModule, call: fx.Node) -> bool:
    body = getattr(gm, str(getattr(call.args[0], "target", "")), None)
    if not isinstance(body, fx.GraphModule):
        return True  # nobody knows
    given = body.graph.find_nodes(op="placeholder")
    return any(writes(inner) and _written(inner) in given for inner in body.graph.nodes)


def _written(call: fx.Node) -> fx.Node | None:
    """The node that a call writes to. The call's first argument may be a view of it."""
    target = call.args[0] if call.args else None
    while isinstance(target, fx.Node) and target.op.startswith("call_"):
        name = target.target if isinstance(target.target, str) else getattr(target.target, "__name__", "")
        if name not in _VIEWS:
            return None
        target = target.args[0]
    return target if isinstance(target, fx.Node) else None
