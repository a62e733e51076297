"""Make a graph that a dump can hold: replace calls of modules by their nodes, and give attributes plain names."""

from __future__ import annotations

import copy
import inspect
import keyword
import operator
import re
from collections.abc import Collection
from typing import Any

from torch import fx, nn

from checked_backend._torch.pytree import tree_leaves

__all__ = ["attribute", "portable"]

_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class _Tracer(fx.Tracer):
    """Traces into every module, and records what the module does to its buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.proxy_buffer_attributes = True

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return False


def portable(gm: fx.GraphModule) -> fx.GraphModule:
    """A graph, and the graphs in it, without calls of modules and without attributes such as ``body.0.weight``.

    Args:
        gm: A graph. It is not changed.

    Returns:
        The graph; ``gm`` itself if there is nothing to change. Calls of modules that cannot be traced symbolically
        stay. Inlined operators have the call's source line.
    """
    attributes = {str(node.target): attribute(gm, str(node.target)) for node in gm.graph.find_nodes(op="get_attr")}
    values = {
        path: portable(value) if isinstance(value, fx.GraphModule) else value for path, value in attributes.items()
    }
    calls = any(node.op == "call_module" for node in gm.graph.nodes)
    if not calls and all(value is attributes[path] and _plain(path) == path for path, value in values.items()):
        return gm
    graph = copy.deepcopy(gm.graph)
    for call in [node for node in graph.nodes if node.op == "call_module"]:
        _inline(gm, graph, call)
    names: dict[str, str] = {}
    for node in graph.nodes:
        if node.op == "get_attr":
            path = str(node.target)
            values.setdefault(path, attribute(gm, path))
            node.target = names.setdefault(path, _unused(_plain(path), names.values()))
    root = {names[path]: value for path, value in values.items() if path in names}
    return fx.GraphModule(root | _called(gm, graph), graph)


def attribute(gm: fx.GraphModule, path: str) -> Any:
    """The attribute at a dotted path in a graph's module; None if there is none."""
    value: Any = gm
    for step in path.split("."):
        value = getattr(value, step, None)
    return value


def _called(gm: fx.GraphModule, graph: fx.Graph) -> dict[str, nn.Module]:
    calls = [str(node.target) for node in graph.nodes if node.op == "call_module"]
    return {path: gm.get_submodule(path) for path in calls}


def _plain(path: str) -> str:
    """The path with steps that are identifiers for Python and for a dump."""
    steps = (re.sub(r"\W", "_", step, flags=re.ASCII) for step in path.split("."))
    return ".".join(f"_{step.lstrip('_')}" if _reserved(step) else step for step in steps)


def _reserved(step: str) -> bool:
    return not step.isidentifier() or keyword.iskeyword(step) or step.startswith("__")


def _unused(path: str, taken: Collection[str]) -> str:
    while path in taken:
        path += "_"
    return path


def _inline(gm: fx.GraphModule, graph: fx.Graph, call: fx.Node) -> None:
    module = gm.get_submodule(str(call.target))
    if module._forward_hooks or module._forward_pre_hooks:
        return
    try:
        signature = inspect.signature(module.forward)
        if any(parameter.kind in _VARIADIC for parameter in signature.parameters.values()):
            return
        bound = signature.bind(*call.args, **call.kwargs)
        bound.apply_defaults()
        fixed = {name: value for name, value in bound.arguments.items() if not _has_nodes(value)}
        if any(not isinstance(bound.arguments[name], fx.Node) for name in bound.arguments.keys() - fixed.keys()):
            return  # a node in a list
        body = _Tracer().trace(module, concrete_args=fixed)
        _drop_fixed(body, bound.arguments.keys() - fixed.keys())
    except Exception:  # symbolic tracing fails on many modules: on their control flow, on their own objects
        return
    with graph.inserting_before(call):
        result = _copy_body(graph, body, call, bound.arguments)
    _hand_on(graph, call, result)


def _has_nodes(value: Any) -> bool:
    return any(isinstance(leaf, fx.Node) for leaf in tree_leaves(value))


def _drop_fixed(body: fx.Graph, inputs: set[str]) -> None:
    """Drop the placeholders of arguments that are constants, and the assertions about them."""
    for node in list(body.nodes):
        if node.op == "placeholder" and node.target not in inputs:
            for dead in [*(user for made in node.users for user in made.users), *node.users, node]:
                body.erase_node(dead)  # this refuses a node that has users


def _copy_body(graph: fx.Graph, body: fx.Graph, call: fx.Node, arguments: dict[str, Any]) -> Any:
    """Copy the nodes of a module's graph to before its call, and return the graph's result."""
    copies: dict[fx.Node, Any] = {}
    for node in body.nodes:
        if node.op == "placeholder":
            copies[node] = arguments[node.target]
        elif node.op == "output":
            return fx.node.map_arg(node.args[0], copies.__getitem__)
        else:
            made = graph.node_copy(node, copies.__getitem__)
            if node.op == "get_attr":
                made.target = f"{call.target}.{node.target}"
            made.meta = {key: call.meta[key] for key in ("stack_trace", "nn_module_stack") if key in call.meta}
            copies[node] = made
    raise ValueError("a graph without output")


def _hand_on(graph: fx.Graph, call: fx.Node, result: Any) -> None:
    if isinstance(result, fx.Node):
        for key in ("val", "example_value"):
            if key in call.meta and result.op != "placeholder":
                result.meta[key] = call.meta[key]
        call.replace_all_uses_with(result)
    else:
        for user in list(call.users):
            if user.target is operator.getitem and isinstance(result, (tuple, list)) and isinstance(user.args[1], int):
                user.replace_all_uses_with(result[user.args[1]])
                graph.erase_node(user)
    if not call.users:
        graph.erase_node(call)
