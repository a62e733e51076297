"""Encode a graph and its inputs as JSON values, with everything that a faithful replay needs."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from checked_backend._torch.operators import triton_kernel
from checked_backend._torch.symbols import hint_of, shape_facts, size_hint, tensor_bytes
from checked_backend.dump.arguments import BadArgument, decode_argument, encode_argument, takes_message
from checked_backend.dump.schema import is_path
from checked_backend.dump.targets import (
    Unresolved,
    checked_target,
    encode_target,
    is_importable,
    known_function,
    needed_import,
)
from checked_backend.dump.tensors import TensorTable, sizes_of, symbolic_text, unsupported_reason, value_range
from checked_backend.graphs.nodes import fetched, recorded_value
from checked_backend.graphs.source_line import source_line


class EncodedGraph:
    """The result of `encode_graph`.

    Attributes:
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


def _graph(gm: fx.GraphModule, found: EncodedGraph, path: str) -> dict[str, Any]:
    nodes = [_node(node, found) for node in gm.graph.nodes]
    subgraphs: dict[str, Any] = {}
    constants: dict[str, Any] = {}
    for node in gm.graph.nodes:
        if node.op == "call_module":
            found.unsupported[f"node {node.name} calls the module {node.target}"] = None
        if node.op != "get_attr" or node.target in subgraphs or node.target in constants:
            continue
        value = fetched(gm, node)
        reason = unsupported_reason(value) if isinstance(value, torch.Tensor) else f"a {type(value).__qualname__}"
        if not is_path(node.target):
            found.unsupported[f"attribute {path}{node.target} has a name that is no identifier"] = None
        elif isinstance(value, fx.GraphModule):
            subgraphs[node.target] = _graph(value, found, f"{path}{node.target}.")
        elif reason is None:
            constants[node.target] = found.constants.describe(value)
        else:
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
        args, kwargs = encode_argument(node.args), encode_argument(dict(node.kwargs))
    except TypeError as error:
        found.unsupported[f"an argument of node {node.name} is {error}"] = None
        args, kwargs = {"tuple": []}, {"dict": []}
    try:
        for value in (args, kwargs):
            decode_argument(value, lambda *_: 0, message=takes_message(target))
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


def _expected(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        plain, symbolic = sizes_of(value, hint_of), sizes_of(value, symbolic_text)
        expected: dict[str, Any] = {
            "dtype": str(value.dtype).removeprefix("torch."),
            **plain,
            "device": str(value.device),
            "layout": str(value.layout).removeprefix("torch."),
            "requires_grad": bool(value.requires_grad),
            "bytes": tensor_bytes(value),
        }
        if symbolic != plain:
            expected["symbolic"] = symbolic
        return {"tensor": expected}
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return {"symbol": str(value.node.expr), "hint": encode_argument(size_hint(value))}
    if isinstance(value, (tuple, list)):
        return {"items": [_expected(item) for item in value]}
    return None if value is None else {"type": type(value).__qualname__}


def _facts(gm: fx.GraphModule, found: EncodedGraph) -> None:
    sizes: list[torch.SymInt] = []
    for node in gm.graph.nodes:
        value = recorded_value(node)
        is_strided = isinstance(value, torch.Tensor) and value.layout is torch.strided
        candidates = [*value.shape, *value.stride()] if is_strided else [value]
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


GraphInput = tuple[str, str | None, Any]
"""A placeholder's name, the name that the user or AOT autograd has for it, and the value that tracing recorded."""


def graph_inputs(gm: fx.GraphModule) -> list[GraphInput]:
    """The inputs of a graph, with shapes as expressions."""
    return [(node.name, _source(node), recorded_value(node)) for node in gm.graph.find_nodes(op="placeholder")]


def _source(node: fx.Node) -> str | None:
    source = getattr(node.meta.get("grapharg"), "source", None)
    name = getattr(source, "name", None)
    if name is not None:
        return str(name() if callable(name) else name)
    description = node.meta.get("desc")
    return None if description is None else str(description.expr())


def describe_inputs(inputs: Sequence[GraphInput], actual: Sequence[Any] | None) -> tuple[dict[str, Any], TensorTable]:
    """The JSON values of inputs, and their storages, which the caller may save.

    Args:
        actual: The arguments of the graph's call, before it runs; None if it was not called yet.
    """
    table = TensorTable()
    entries: list[dict[str, Any]] = []
    grad = torch.is_grad_enabled()
    with torch.no_grad():
        for position, (name, source, traced) in enumerate(inputs):
            value = traced if actual is None or position >= len(actual) else actual[position]
            entries.append({"name": name, "source": source, **_describe(value, traced, table)})
        document: dict[str, Any] = {
            "inputs": entries,
            "storages": table.storages(),
            "called": actual is not None,
            "ambient": _ambient(entries, grad),
            "rng": None if actual is None else _rng(table),
        }
    shared = Counter(entry["tensor"]["storage"] for entry in entries if entry["type"] == "tensor")
    for entry in entries:
        if entry["type"] == "tensor":
            storage = entry["tensor"]["storage"]
            entry["tensor"]["alias_group"] = storage if shared[storage] > 1 else None
    return document, table


def _describe(value: Any, traced: Any, table: TensorTable) -> dict[str, Any]:
    if isinstance(value, torch.Tensor):
        reason = unsupported_reason(value)
        if reason is not None:
            return {"type": "other", "value": reason}
        spec = table.describe(value)
        spec["range"] = value_range(value)
        if spec["symbolic"] is None and isinstance(traced, torch.Tensor) and unsupported_reason(traced) is None:
            spec["symbolic"] = TensorTable().describe(traced)["symbolic"]
        return {"type": "tensor", "tensor": spec}
    symbol = str(traced.node.expr) if isinstance(traced, (torch.SymInt, torch.SymFloat, torch.SymBool)) else None
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        value = size_hint(value)
    if isinstance(value, (bool, int)):
        return {"type": type(value).__name__, "value": value, "symbol": symbol}
    if isinstance(value, float):
        return {"type": "float", "value": repr(value), "symbol": symbol}
    if value is None:
        return {"type": "none", "value": None, "symbol": symbol}
    return {"type": "other", "value": f"a {type(value).__module__}.{type(value).__qualname__}"}


def _ambient(entries: Sequence[dict[str, Any]], grad: bool) -> dict[str, Any]:
    kinds = {"cpu", *(entry["tensor"]["device"].partition(":")[0] for entry in entries if entry["type"] == "tensor")}
    return {
        "grad": grad,
        "inference": torch.is_inference_mode_enabled(),
        "autocast": {
            kind: str(torch.get_autocast_dtype(kind)).removeprefix("torch.")
            for kind in sorted(kinds)
            if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
        },
    }


def _rng(table: TensorTable) -> dict[str, str]:
    states = {"cpu": torch.get_rng_state()}
    for device in {storage["device"] for storage in table.storages()}:
        if device.startswith("cuda"):
            states[device] = torch.cuda.get_rng_state(device)
    return {device: base64.b64encode(bytes(state.tolist())).decode("ascii") for device, state in sorted(states.items())}
