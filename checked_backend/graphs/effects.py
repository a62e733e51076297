"""The side effects of a call in a graph: the arguments that it writes to, and the mode that it sets."""

from __future__ import annotations

import inspect
import operator

from torch import fx

from checked_backend._torch.operators import HigherOrderOperator, OpOverload
from checked_backend.graphs.nodes import graph_fetched
from checked_backend.graphs.operators import UPDATING, describe_operator
from checked_backend.graphs.schema import is_built_in

_IN_PLACE = {"setitem", *(name for name in dir(operator) if name.startswith("i") and hasattr(operator, name[1:]))}
_MODES = ("_enter_", "_exit_", "_set_", "_saved_tensors_hooks")
_CALLS = ("call_function", "call_method", "call_module")


def has_effects(node: fx.Node) -> bool:
    """Whether a call in a Dynamo graph writes to its arguments, according to its name and its keywords."""
    if node.op not in _CALLS:
        return False
    name = _name(node)
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name in _IN_PLACE or _is_told_to_write(node) or "out" in node.kwargs


def written_by(node: fx.Node) -> fx.Node | None:
    """The argument that a call in a Dynamo graph writes to, and returns: ``out=`` if given, else the first."""
    if not has_effects(node):
        return None
    target = node.kwargs["out"] if "out" in node.kwargs else next(iter(node.args), None)
    return target if isinstance(target, fx.Node) else None


def _is_told_to_write(node: fx.Node) -> bool:
    """Whether the argument ``inplace`` is set, by name or, as `torch.nn.Dropout` passes it, by its position."""
    if not any(value is True for value in node.args) or not callable(node.target):
        return node.kwargs.get("inplace") is True
    try:
        parameters = list(inspect.signature(node.target).parameters)
    except (TypeError, ValueError):  # functions in C have no signature
        return False
    return any(name == "inplace" and value is True for name, value in zip(parameters, node.args, strict=False))


def writes(node: fx.Node) -> bool:
    """Whether a call writes to its arguments, in a Dynamo graph or an AOT graph."""
    if isinstance(node.target, OpOverload):
        return bool(describe_operator(node.target).mutated)
    return has_effects(node)


def may_write_undeclared(gm: fx.GraphModule) -> bool:
    """Whether a graph may write to a tensor although `writes` knows of no such call.

    torch's own operators write only to what their schemas name. Custom operators and calls of Python may write to any.
    """
    bodies = [body for body in gm.modules() if isinstance(body, fx.GraphModule)]
    return any(
        not _declares_writes(body, node) or (body is not gm and writes(node))
        for body in bodies
        for node in body.graph.nodes
    )


def _declares_writes(gm: fx.GraphModule, node: fx.Node) -> bool:
    target = node.target
    if node.op not in _CALLS or target is operator.getitem:
        return True
    if isinstance(target, HigherOrderOperator):  # what it does is in its bodies, if it has any
        return any(graph_fetched(gm, source) is not None for source in node.all_input_nodes)
    own = isinstance(target, OpOverload) and is_built_in(target)
    return own and describe_operator(target).base not in UPDATING


def sets_mode(node: fx.Node) -> bool:
    """Whether a call in a Dynamo graph sets a mode for the calls after it."""
    return bool(mode_name(node))


def mode_name(node: fx.Node) -> str:
    """The name of the function by which a call sets a mode for the calls after it; "" if it sets none."""
    name = _name(node) if node.op in _CALLS else ""
    return name if name.startswith(_MODES) else ""


def _name(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else str(getattr(node.target, "__name__", ""))
