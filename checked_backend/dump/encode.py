"""Encode a graph as JSON values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from checked_backend._torch.operators import HigherOrderOperator, OpOverload, triton_kernel
from checked_backend._torch.symbols import shape_facts, size_hint
from checked_backend.dump.arguments import BadArgument, argument_nodes, takes_message
from checked_backend.dump.portable import attribute
from checked_backend.dump.targets import (
    Unresolved,
    checked_target,
    encode_target,
    is_importable,
    known_function,
    needed_import,
)
from checked_backend.dump.tensors import TensorTable, hint_of, symbolic_text, unsupported_reason
from checked_backend.graphs.nodes import recorded_value
from checked_backend.graphs.source_line import source_line

__all__ = ["EncodedGraph", "encode_graph", "encode_value", "tensor_bytes"]


class EncodedGraph:
    """The result of `encode_graph`.

    Attributes:
        graph: The graph and its subgraphs.
        constants: The storages of its constants.
        stacks: The stack traces that nodes refer to by number.
        requires: The modules that must be imported to run it.
        unsupported: The parts that a dump cannot hold. With any of these, the dump can be read but not run.
        symbols: Range and hint of each symbol.
        relations: Relations that tracing relied on, such as ``Eq(Mod(s0, 2), 0)``.
    """

    def __init__(self) -> None:
        self.graph: dict[str, Any] = {}
        self.constants = TensorTable()
        self.stacks: dict[str, int] = {}
        self.requires: dict[str, None] = {}
        self.unsupported: dict[str, None] = {}
        self.symbols: dict[str, dict[str, Any]] = {}
        self.relations: list[str] = []


def encode_graph(gm: fx.GraphModule) -> EncodedGraph:
    """Encode a graph, its subgraphs and the descriptions of its constants. This computes nothing and adds no guard."""
    found = EncodedGraph()
    found.graph = _graph(gm, found, "")
    _facts(gm, found)
    return found


def tensor_bytes(value: Any) -> int | None:
    """Size in memory of a recorded tensor, with hints for symbolic sizes; None for anything else."""
    if not isinstance(value, torch.Tensor):
        return None
    return math.prod(hint_of(size) for size in value.shape) * value.dtype.itemsize


def _graph(gm: fx.GraphModule, found: EncodedGraph, path: str) -> dict[str, Any]:
    nodes = [_node(node, found) for node in gm.graph.nodes]
    subgraphs: dict[str, Any] = {}
    constants: dict[str, Any] = {}
    for node in gm.graph.nodes:
        if node.op == "call_module":
            found.unsupported[f"node {node.name} calls the module {node.target}"] = None
        if node.op != "get_attr" or node.target in subgraphs or node.target in constants:
            continue
        value = attribute(gm, str(node.target))
        if isinstance(value, fx.GraphModule):
            subgraphs[str(node.target)] = _graph(value, found, f"{path}{node.target}.")
        elif isinstance(value, torch.Tensor) and unsupported_reason(value) is None:
            constants[str(node.target)] = found.constants.describe(value)
        else:
            reason = unsupported_reason(value) if isinstance(value, torch.Tensor) else f"a {type(value).__qualname__}"
            found.unsupported[f"attribute {path}{node.target} is {reason}"] = None
    return {"nodes": nodes, "subgraphs": subgraphs, "constants": constants}


def _node(node: fx.Node, found: EncodedGraph) -> dict[str, Any]:
    target = encode_target(node.op, node.target)
    if node.op in ("call_function", "call_method"):
        if (why := _refusal(node, target)) is not None:
            found.unsupported[f"node {node.name} calls {why}"] = None
        elif (needed := needed_import(target)) is not None:
            found.requires[needed] = None
        if "triton_kernel_wrap" in target:
            kernel = triton_kernel(int(node.kwargs["kernel_idx"]))  # type: ignore[arg-type]
            found.requires[kernel.partition(":")[0]] = None
            found.unsupported[f"node {node.name} runs the Triton kernel {kernel}"] = None
    trace = node.meta.get("stack_trace") or node.stack_trace
    stack = found.stacks.setdefault(trace, len(found.stacks)) if trace else None
    try:
        args, kwargs = encode_value(node.args), encode_value(dict(node.kwargs))
    except TypeError as error:
        found.unsupported[f"an argument of node {node.name} is {error}"] = None
        args, kwargs = {"tuple": []}, {"dict": []}
    try:
        for value in (args, kwargs):
            for _ in argument_nodes(value, message=takes_message(target)):
                pass
    except BadArgument as error:
        found.unsupported[f"node {node.name}: {error}"] = None
    return {
        "name": node.name,
        "op": node.op,
        "target": target,
        "args": args,
        "kwargs": kwargs,
        "expected": _expected(recorded_value(node)),
        "source": source_line(node),
        "stack": stack,
    }


def _refusal(node: fx.Node, target: str) -> str | None:
    """The reason why a graph that calls a target cannot be run from its dump; None if it can."""
    if "triton_kernel_wrap" in target:
        return None  # this is reported elsewhere, with the kernel's name
    known = node.op == "call_method" or known_function(node.target) is not None
    if target.startswith("function:") and not known and not is_importable(target, node.target):
        return f"{target.removeprefix('function:')}, an object that cannot be imported"
    try:
        checked_target(target)
    except Unresolved as error:
        return str(error)
    return None


def encode_value(value: Any) -> Any:
    """An argument of a node as JSON values.

    Raises:
        TypeError: The argument has a type that a dump cannot hold. The message is that type.
    """
    if value is None or isinstance(value, (bool, str)):
        return value
    if type(value) is int:
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, fx.Node):
        return {"node": value.name}
    if isinstance(value, torch.Size):
        return {"size": [encode_value(item) for item in value]}
    if isinstance(value, tuple):
        return {"tuple": [encode_value(item) for item in value]}
    if isinstance(value, list):
        return [encode_value(item) for item in value]
    if isinstance(value, Mapping):
        return {"dict": [[encode_value(key), encode_value(item)] for key, item in value.items()]}
    if isinstance(value, slice):
        return {"slice": [encode_value(part) for part in (value.start, value.stop, value.step)]}
    if isinstance(value, complex):
        return {"complex": [encode_value(value.real), encode_value(value.imag)]}
    if value is Ellipsis:
        return {"ellipsis": True}
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        return {type(value).__name__: str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if isinstance(value, (OpOverload, HigherOrderOperator)):
        return {"target": encode_target("call_function", value)}
    raise TypeError(f"{type(value).__module__}.{type(value).__qualname__}")


def _expected(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        strided = value.layout is torch.strided
        shape = [hint_of(size) for size in value.shape]
        expected: dict[str, Any] = {
            "dtype": str(value.dtype).removeprefix("torch."),
            "shape": shape,
            "stride": [hint_of(step) for step in value.stride()] if strided else None,
            "device": str(value.device),
            "layout": str(value.layout).removeprefix("torch."),
            "requires_grad": bool(value.requires_grad),
            "bytes": tensor_bytes(value),
        }
        symbolic = [symbolic_text(size) for size in value.shape]
        strides = [symbolic_text(step) for step in value.stride()] if strided else None
        if symbolic != shape or strides != expected["stride"]:
            expected["symbolic"] = {"shape": symbolic, "stride": strides}
        return {"tensor": expected}
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return {"symbol": str(value.node.expr), "hint": encode_value(size_hint(value))}
    if isinstance(value, (tuple, list)):
        return {"items": [_expected(item) for item in value]}
    return None if value is None else {"type": type(value).__qualname__}


def _facts(gm: fx.GraphModule, found: EncodedGraph) -> None:
    sizes: list[torch.SymInt] = []
    for node in gm.graph.nodes:
        value = recorded_value(node)
        candidates = [*value.shape, *value.stride()] if _strided(value) else [value]
        sizes += [size for size in candidates if isinstance(size, torch.SymInt)]
    hints: dict[str, int | float | bool | None] = {}
    for size in sizes:
        expression = size.node.expr
        for symbol in expression.free_symbols:
            hints.setdefault(str(symbol), None)
        if expression.is_Symbol:
            hints[str(expression)] = size_hint(size)
    if sizes:
        ranges, found.relations = shape_facts(sizes[0], set(hints))
        found.symbols = {
            name: {"range": list(ranges.get(name, (None, None))), "hint": hint} for name, hint in hints.items()
        }


def _strided(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided
