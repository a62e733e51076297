"""A graph from its JSON values: a `torch.fx.GraphModule` that calls only what `resolve_target` allows."""

from __future__ import annotations

import keyword
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import fx, nn

from checked_backend.dump.schema import Graph, Node
from checked_backend.dump.targets import Unresolved, attribute_allowed, checked_target, resolve_target

__all__ = ["BadGraph", "check_graph", "rebuild_graph"]

_DEPTH = 60
_TORCH_WORDS = ("dtype", "layout", "memory_format")


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
        for value in (node.args, node.kwargs):
            for name in _names(value, where, 0):
                if name not in seen:
                    raise BadGraph(f"{where}: uses {name!r}, which no earlier node is")
        _check_target(graph, node, where)
        seen.add(node.name)
    if [node.op for node in graph.nodes].count("output") != 1 or graph.nodes[-1].op != "output":
        raise BadGraph("a graph ends with its only output")
    for child in graph.subgraphs.values():
        check_graph(child)


def _check_target(graph: Graph, node: Node, where: str) -> None:
    if node.op == "placeholder":
        if not (node.target.isascii() and node.target.isidentifier()) or keyword.iskeyword(node.target):
            raise BadGraph(f"{where}: {node.target!r} is no name of an input")
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
        args = node.args.get("tuple", []) if isinstance(node.args, dict) else []
        if node.op == "call_method" and not (args and isinstance(args[0], dict) and "node" in args[0]):
            raise BadGraph(f"{where}: a method needs a node to be called on")
        if node.target == "function:builtins:getattr" and not (len(args) == 2 and attribute_allowed(args[1])):
            raise BadGraph(f"{where}: a dump may not read this attribute")


def _names(value: Any, where: str, depth: int) -> Iterator[str]:
    """The nodes that an argument refers to."""
    if depth > _DEPTH:
        raise BadGraph(f"{where}: arguments are nested too deeply")
    if isinstance(value, list):
        for item in value:
            yield from _names(item, where, depth + 1)
    elif isinstance(value, dict):
        if set(value) == {"node"}:
            yield str(value["node"])
        else:
            for item in value.values():
                yield from _names(item, where, depth + 1)


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
            args, kwargs = _decode(node.args, nodes, imported), _decode(node.kwargs, nodes, imported)
            if not isinstance(args, tuple) or not isinstance(kwargs, dict) or not all(map(_is_name, kwargs)):
                raise BadGraph("its arguments are no tuple and dictionary")
        except (Unresolved, BadGraph, KeyError, TypeError, ValueError, RuntimeError) as error:
            raise BadGraph(f"node {path}{node.name}: {error}") from None
        made = built.create_node(node.op, target, args, kwargs, name=node.name)
        if made.name != node.name:
            raise BadGraph(f"node {path}{node.name}: the name is reserved")
        if node.stack is not None and node.stack < len(stacks):
            made.meta["stack_trace"] = stacks[node.stack]
        nodes[node.name] = made
    return fx.GraphModule(root, built)


def _target(node: Node, imported: Collection[str]) -> Any:
    if node.op in ("call_function", "call_method"):
        return resolve_target(node.target, imported)
    if node.op == "call_module":
        raise BadGraph("calls a module, which a dump does not hold")
    return "output" if node.op == "output" else node.target


def _is_name(key: object) -> bool:
    return isinstance(key, str) and key.isidentifier()


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


def _decode(value: Any, nodes: Mapping[str, fx.Node], imported: Collection[str]) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, list):
        return [_decode(item, nodes, imported) for item in value]
    if not isinstance(value, dict) or len(value) != 1:
        raise BadGraph(f"an argument is {str(value)[:60]!r}")
    ((kind, inner),) = value.items()
    if kind == "node":
        return nodes[inner]
    if kind == "tuple":
        return tuple(_decode(item, nodes, imported) for item in inner)
    if kind == "size":
        return torch.Size([_decode(item, nodes, imported) for item in inner])
    if kind == "dict":
        return {_key(key): _decode(item, nodes, imported) for key, item in inner}
    if kind == "slice":
        start, stop, step = (_decode(part, nodes, imported) for part in inner)
        return slice(start, stop, step)
    if kind == "float" and inner in ("nan", "inf", "-inf"):
        return float(inner)
    if kind == "complex":
        real, imaginary = (_decode(part, nodes, imported) for part in inner)
        return complex(real, imaginary)
    if kind == "ellipsis":
        return ...
    if kind == "device":
        return torch.device(str(inner))
    if kind in _TORCH_WORDS and isinstance(word := getattr(torch, str(inner), None), getattr(torch, kind)):
        return word
    if kind == "target":
        return resolve_target(str(inner), imported)
    raise BadGraph(f"an argument of kind {str(kind)[:60]!r} with a bad value")


def _key(key: Any) -> Any:
    if not isinstance(key, (str, int, bool, float)) and key is not None:
        raise BadGraph("a key of a dictionary is no string or number")
    return key
