"""A graph from its JSON values: a `torch.fx.GraphModule` that calls only what `resolve_target` allows."""

from __future__ import annotations

import keyword
import re
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import fx, nn

from checked_backend.dump.arguments import BadArgument, argument_nodes, decode_argument
from checked_backend.dump.schema import Graph, Node
from checked_backend.dump.targets import Unresolved, attribute_allowed, checked_target, resolve_target

__all__ = ["BadGraph", "check_graph", "rebuild_graph"]

_CONTROL = re.compile(r"[^\n\x20-\x7e\xa0-\u2027\u202f-\u2065\u2070-\ud7ff\ue000-\U0010ffff]")  # no breaks, no turns


class BadGraph(Exception):
    """The JSON values are not a graph that a dump may hold."""


def check_graph(graph: Graph) -> None:
    """Check names, targets, arguments and order, without resolving operators that may not be here.

    Raises:
        BadGraph: Something in it is wrong or not allowed.
    """
    seen: set[str] = set()
    for node in graph.nodes:
        where = f"node {node.name}"
        if node.name in seen or keyword.iskeyword(node.name):
            raise BadGraph(f"{where}: the name is taken or reserved")
        _check_arguments(node, where, seen)
        _check_target(graph, node, where)
        seen.add(node.name)
    if [node.op for node in graph.nodes].count("output") != 1 or graph.nodes[-1].op != "output":
        raise BadGraph("a graph ends with its only output")
    for child in graph.subgraphs.values():
        check_graph(child)


def _check_arguments(node: Node, where: str, seen: Collection[str]) -> None:
    if not (isinstance(node.args, dict) and "tuple" in node.args):
        raise BadGraph(f"{where}: its arguments are no tuple")
    if not (isinstance(node.kwargs, dict) and "dict" in node.kwargs):
        raise BadGraph(f"{where}: its keyword arguments are no dictionary")
    try:
        for value in (node.args, node.kwargs):
            for name in argument_nodes(value):
                if name not in seen:
                    raise BadGraph(f"{where}: uses {name!r}, which no earlier node is")
    except BadArgument as error:
        raise BadGraph(f"{where}: {error}") from None
    if not all(isinstance(key, str) and key.isidentifier() for key, _ in node.kwargs["dict"]):
        raise BadGraph(f"{where}: its keyword arguments are no names")


def _check_target(graph: Graph, node: Node, where: str) -> None:
    if node.op == "placeholder":
        if not (node.target.isascii() and node.target.isidentifier()) or keyword.iskeyword(node.target):
            raise BadGraph(f"{where}: {node.target!r} is no name of an input")
    elif node.op == "output":
        if len(node.args["tuple"]) != 1 or node.kwargs["dict"]:
            raise BadGraph(f"{where}: an output has one argument")
    elif node.op == "get_attr":
        if node.target not in graph.subgraphs and node.target not in graph.constants:
            raise BadGraph(f"{where}: {node.target!r} is neither a subgraph nor a constant")
    elif node.op in ("call_function", "call_method"):
        if node.target.startswith("method:") != (node.op == "call_method"):
            raise BadGraph(f"{where}: {node.target!r} does not go with {node.op}")
        try:
            checked_target(node.target)
        except Unresolved as error:
            raise BadGraph(f"{where}: {error}") from None
        args = node.args["tuple"]
        if node.op == "call_method" and not (args and isinstance(args[0], dict) and "node" in args[0]):
            raise BadGraph(f"{where}: a method needs a node to be called on")
        reads = node.target == "function:builtins:getattr"
        if reads and (len(args) != 2 or not attribute_allowed(args[1]) or node.kwargs["dict"]):
            raise BadGraph(f"{where}: a dump may not read this attribute")


def rebuild_graph(
    graph: Graph, constants: Mapping[str, torch.Tensor], stacks: list[str], imported: Collection[str], path: str = ""
) -> fx.GraphModule:
    """Build the graph.

    Args:
        graph: Passed `check_graph`.
        constants: By dotted path from the outermost graph.
        stacks: What nodes' stack numbers refer to.
        imported: Modules that the user named, whose functions may be called too.
        path: Where this graph is in the outermost one.

    Raises:
        BadGraph: An operator is not here, or an argument is not one.
    """
    root = nn.Module()
    for name, child in graph.subgraphs.items():
        _attach(root, name, rebuild_graph(child, constants, stacks, imported, f"{path}{name}."))
    for name in graph.constants:
        _attach(root, name, constants[f"{path}{name}"])
    built = fx.Graph()
    nodes: dict[str, fx.Node] = {}
    for node in graph.nodes:
        try:
            target = _target(node, imported)
            args = decode_argument(node.args, nodes, imported)
            kwargs = decode_argument(node.kwargs, nodes, imported)
            made = built.create_node(node.op, target, args, kwargs, name=node.name)
        # fx too looks into arguments while it takes them, and trips over some that no graph has
        except (Unresolved, BadGraph, LookupError, TypeError, ValueError, RuntimeError) as error:
            raise BadGraph(f"node {path}{node.name}: {error}") from None
        if made.name != node.name:
            raise BadGraph(f"node {path}{node.name}: the name is reserved")
        if node.stack is not None and node.stack < len(stacks):
            # a line of it may become a comment in code that a compiler makes: it must not end there
            made.meta["stack_trace"] = _CONTROL.sub("?", stacks[node.stack])
        nodes[node.name] = made
    return fx.GraphModule(root, built)


def _target(node: Node, imported: Collection[str]) -> Any:
    if node.op in ("call_function", "call_method"):
        return resolve_target(node.target, imported)
    if node.op == "call_module":
        raise BadGraph("calls a module, which a dump does not hold")
    return "output" if node.op == "output" else node.target


def _attach(root: nn.Module, path: str, value: Any) -> None:
    *parents, last = path.split(".")
    for step in parents:
        child = getattr(root, step, None)
        if not isinstance(child, nn.Module):
            child = nn.Module()
            root.add_module(step, child)
        root = child
    if hasattr(root, last):
        raise BadGraph(f"attribute {path} is reserved")
    if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
        root.register_buffer(last, value)
    else:
        setattr(root, last, value)
