"""Check the JSON values of a graph, and build a `torch.fx.GraphModule` that calls only targets of `resolve_target`."""

from __future__ import annotations

import keyword
import re
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import fx, nn

from checked_backend.dump.arguments import BadArgument, decode_argument, takes_message
from checked_backend.dump.schema import Graph, Node
from checked_backend.dump.targets import (
    Trusted,
    Unresolved,
    checked_target,
    is_attribute,
    leaves_uninitialized,
    resolve_target,
)

# line breaks, turns of the reading direction, and characters that end a text in C++ or in Python
_CONTROL = re.compile(
    r"[^\n\x20-\x7e\xa0-\u2027\u202f-\u2065\u2070-\ud7ff\ue000-\U0010ffff]"
    r"|\\$|\)(?=\")|'(?='')|\"(?=\"\")",
    re.MULTILINE,
)


_GRAPH_DEPTH = 50
_ENTERING, _LEAVING = (f"function:torch.autograd.grad_mode:_{what}_inference_mode" for what in ("enter", "exit"))
_CHECKPOINTS = ("higher_order:tag_activation_checkpoint", "higher_order:wrap_activation_checkpoint")


class BadGraph(Exception):
    """Raised if JSON values are not a graph that a dump may hold."""


def check_graph(graph: Graph, *, runs: bool = True, depth: int = 0) -> None:
    """Check names, targets, arguments and order, without resolving operators that may not be here.

    A graph that is only shown, and not run, may call anything. `BadGraph` is raised if something is wrong or not
    allowed.
    """
    if depth > _GRAPH_DEPTH:
        raise BadGraph("subgraphs are nested too deeply")
    seen: set[str] = set()
    bodies = {node.name for node in graph.nodes if node.op == "get_attr" and node.target in graph.subgraphs}
    for node in graph.nodes:
        where = f"node {node.name}"
        if node.name in seen or keyword.iskeyword(node.name):
            raise BadGraph(f"{where}: the name is taken or reserved")
        _check_arguments(node, where, seen, runs=runs, bodies=bodies)
        _check_target(graph, node, where, runs=runs)
        seen.add(node.name)
    if [node.op for node in graph.nodes].count("output") != 1 or graph.nodes[-1].op != "output":
        raise BadGraph("a graph ends with its only output")
    if runs:
        _check_modes(graph)
    for child in graph.subgraphs.values():
        check_graph(child, runs=runs, depth=depth + 1)


def _check_modes(graph: Graph) -> None:
    """Refuse a graph that leaves inference mode on, because later code would run under it."""
    inside: list[Any] = []
    for node in graph.nodes:
        if node.target == _ENTERING:
            inside.append({"node": node.name})
        elif node.target == _LEAVING and (not inside or node.args["tuple"] != [inside.pop()]):
            raise BadGraph(f"node {node.name}: leaves an inference mode that was not the last to be entered")
    if inside:
        raise BadGraph(f"node {inside[-1]['node']}: the graph enters inference mode and does not leave it")


def _check_arguments(node: Node, where: str, seen: Collection[str], *, runs: bool, bodies: Collection[str]) -> None:
    """Check a node's arguments. Only higher-order operators may get graphs."""
    if not (isinstance(node.args, dict) and "tuple" in node.args):
        raise BadGraph(f"{where}: its arguments are no tuple")
    if not (isinstance(node.kwargs, dict) and "dict" in node.kwargs):
        raise BadGraph(f"{where}: its keyword arguments are no dictionary")

    def named(kind: str, name: str) -> int:
        if kind == "node" and name not in seen:
            raise BadGraph(f"{where}: uses {name!r}, which no earlier node is")
        if kind == "node" and runs and name in bodies and not node.target.startswith("higher_order:"):
            raise BadGraph(f"{where}: uses {name!r}, which is a graph and no value")
        return 0

    try:
        for value in (node.args, node.kwargs):
            decode_argument(value, named, message=not runs or takes_message(node.target))
    except BadArgument as error:
        raise BadGraph(f"{where}: {error}") from None
    keys = [key for key, _ in node.kwargs["dict"]]
    plain = all(isinstance(key, str) and key.isidentifier() and key.isascii() for key in keys)
    if not plain or len(set(keys)) < len(keys):
        raise BadGraph(f"{where}: its keyword arguments are no names")


def _check_target(graph: Graph, node: Node, where: str, *, runs: bool) -> None:
    if node.op == "placeholder":
        if not (node.target.isascii() and node.target.isidentifier()) or keyword.iskeyword(node.target):
            raise BadGraph(f"{where}: {node.target!r} is no name of an input")
        if node.args["tuple"] or node.kwargs["dict"]:
            raise BadGraph(f"{where}: an input with arguments")
    elif node.op == "output":
        if len(node.args["tuple"]) != 1 or node.kwargs["dict"]:
            raise BadGraph(f"{where}: an output has one argument")
    elif node.op == "get_attr" and runs:
        if node.target not in graph.subgraphs and node.target not in graph.constants:
            raise BadGraph(f"{where}: {node.target!r} is neither a subgraph nor a constant")
    elif node.op in ("call_function", "call_method") and runs:
        if node.target.startswith("method:") != (node.op == "call_method"):
            raise BadGraph(f"{where}: {node.target!r} does not go with {node.op}")
        try:
            checked_target(node.target)
        except Unresolved as error:
            raise BadGraph(f"{where}: {error}") from None
        args = node.args["tuple"]
        if node.op == "call_method" and not (args and isinstance(args[0], dict) and "node" in args[0]):
            raise BadGraph(f"{where}: a method needs a node to be called on")
        if node.target in _CHECKPOINTS and any(key == "context_fn" for key, _ in node.kwargs["dict"]):
            raise BadGraph(f"{where}: has a context_fn, which is a function of the process that was traced")
        reads = node.target == "function:builtins:getattr"
        if reads and (len(args) != 2 or not is_attribute(args[1]) or node.kwargs["dict"]):
            raise BadGraph(f"{where}: a dump may not read this attribute")


def rebuild_graph(
    graph: Graph, constants: Mapping[str, torch.Tensor], stacks: list[str], trusted: Trusted, path: str = ""
) -> fx.GraphModule:
    """Build a graph that passed `check_graph`.

    Args:
        constants: The constants, by dotted path from the outermost graph.
        stacks: The stack traces that nodes refer to by number.
        path: The place of this graph in the outermost one.

    Raises:
        BadGraph: An operator is not registered here, or an argument is invalid.
    """
    root = nn.Module()
    for name, child in graph.subgraphs.items():
        _attach(root, name, rebuild_graph(child, constants, stacks, trusted, f"{path}{name}."))
    for name in graph.constants:
        _attach(root, name, constants[f"{path}{name}"])
    built = fx.Graph()
    nodes: dict[str, fx.Node] = {}

    def named(kind: str, name: str) -> Any:
        if kind == "target":
            return resolve_target(name, trusted)
        return nodes[name] if kind == "node" else torch.device(name)

    for node in graph.nodes:
        message = takes_message(node.target)
        try:
            target = _target(node, trusted)
            args, kwargs = (decode_argument(value, named, message=message) for value in (node.args, node.kwargs))
            made = built.create_node(node.op, target, args, kwargs, name=node.name)
        # fx looks into the arguments too, and fails on some that no real graph has
        except (Unresolved, BadArgument, BadGraph, LookupError, TypeError, ValueError, RuntimeError) as error:
            raise BadGraph(f"node {path}{node.name}: {error}") from None
        if made.name != node.name:
            raise BadGraph(f"node {path}{node.name}: the name is reserved")
        if node.stack is not None and node.stack < len(stacks):
            # a line of the trace may become a comment in a compiler's code, so it must not end that comment
            made.meta["stack_trace"] = _CONTROL.sub("?", stacks[node.stack])
        nodes[node.name] = made
        if leaves_uninitialized(node.target) and node.op in ("call_function", "call_method"):
            # Uninitialised memory would differ between the compared runs. So would an index that is made from it: it
            # could be within its bounds when they are checked, and outside of them afterwards.
            built.call_function(torch.ops.aten.zero_.default, (made,))
    return fx.GraphModule(root, built)


def _target(node: Node, trusted: Trusted) -> Any:
    if node.op in ("call_function", "call_method"):
        return resolve_target(node.target, trusted)
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
