"""Graphs of operators in JSON, to be kept beside what was compiled of them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from checked_backend._torch.fake_tensors import ShapeEnv
from checked_backend._torch.operators import HigherOrderOperator, OpOverload

LARGEST_CONSTANT = 64
"""The most elements of a tensor in a graph that is kept."""

_ON_SIZES = frozenset(
    {
        "add", "and_", "eq", "floordiv", "ge", "getitem", "gt", "le", "lt", "mod", "mul", "ne", "neg", "or_", "pow",
        "sub", "truediv",
    }
)  # fmt: skip
"""Functions of Python's ``operator``, which graphs call on sizes and on sequences of tensors."""

_ORIGINS = ("source_fn_stack", "fwd_source_fn_stack")
_PLAIN = (torch.dtype, torch.layout, torch.memory_format)


class NotInJsonError(TypeError):
    """Raised if a graph has something that is not kept: functions of Python, large constants, complex numbers."""


def graph_to_json(gm: fx.GraphModule) -> list[Any]:
    """What a list in JSON keeps of a graph of operators, and of the graphs inside it. Symbols for sizes are left out.

    Raises:
        NotInJsonError: The graph has something else.
    """
    return [
        [
            node.op,
            node.name,
            _target(gm, node),
            _encoded(node.args),
            _encoded(dict(node.kwargs)),
            value_to_json(node.meta.get("val")),
            {key: str(node.meta[key][-1][0]) for key in _ORIGINS if node.meta.get(key)},
        ]
        for node in gm.graph.nodes
    ]


def graph_from_json(entries: list[Any]) -> fx.GraphModule:
    """The graph that was kept. What its nodes record are tensors without memory, with one symbol for all sizes.

    Raises:
        Exception: The list is not one of `graph_to_json`, or an operator is not registered here.
    """
    home, graph = torch.nn.Module(), fx.Graph()
    nodes: dict[str, fx.Node] = {}
    symbol = ShapeEnv().create_unbacked_symint()
    for op, name, target, args, kwargs, described, origins in entries:
        if op == "get_attr":
            [(target, constant)] = target.items()
            setattr(home, target, _constant(constant))
        called = _function(target) if op == "call_function" else target
        node = graph.create_node(op, called, tuple(_decoded(args, nodes)), _decoded(kwargs, nodes), name)
        node.meta["val"] = _value(described, symbol)
        node.meta.update({key: [(origin, None)] for key, origin in origins.items()})
        nodes[name] = node
    return fx.GraphModule(home, graph)


def value_to_json(value: Any) -> Any:
    """The shape and dtype of a tensor that tracing recorded; None stands for a symbol.

    Raises:
        NotInJsonError: It is none that is kept.
    """
    if isinstance(value, (list, tuple)):
        return [value_to_json(one) for one in value]
    if isinstance(value, (torch.SymInt, torch.SymBool, torch.SymFloat)):
        return {"value": None}
    if not isinstance(value, torch.Tensor):
        return {"value": _encoded(value)}
    if value.layout is not torch.strided:
        raise NotInJsonError("a tensor that is not strided")
    shape: Sequence[Any] = value.shape
    return {"shape": [size if isinstance(size, int) else None for size in shape], "dtype": _encoded(value.dtype)}


def _target(gm: fx.GraphModule, node: fx.Node) -> Any:
    target = node.target
    name = getattr(target, "__name__", "")
    if name in _ON_SIZES and target is getattr(operator, name):
        return f"operator.{name}"
    if isinstance(target, HigherOrderOperator):
        return target.name()
    if isinstance(target, OpOverload) or node.op in ("placeholder", "output"):
        return str(target)
    if node.op != "get_attr":
        raise NotInJsonError(f"{node.op} of {target}")
    held = getattr(gm, str(target))
    if isinstance(held, fx.GraphModule):
        return {str(target): {"graph": graph_to_json(held)}}
    if type(held) is torch.Tensor and held.device.type == "cpu" and held.numel() <= LARGEST_CONSTANT:
        return {str(target): {"dtype": _encoded(held.dtype), "values": held.tolist()}}
    raise NotInJsonError(f"a constant of type {type(held).__name__}")


def _function(target: str) -> Callable[..., Any]:
    home, _, name = target.partition(".")
    if home == "operator" and name in _ON_SIZES:
        found: Callable[..., Any] = getattr(operator, name)
        return found
    known: Any = torch.ops
    for part in target.split(".") if name else ("higher_order", target):
        known = getattr(known, part)
    if not isinstance(known, (OpOverload, HigherOrderOperator)):
        raise TypeError(f"{target} is no operator")
    return known


def _constant(kept: Mapping[str, Any]) -> fx.GraphModule | torch.Tensor:
    if "graph" in kept:
        return graph_from_json(kept["graph"])
    return torch.tensor(kept["values"], dtype=_decoded(kept["dtype"], {}), device="cpu")


def _encoded(value: Any) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, fx.Node):
        return {"node": value.name}
    if isinstance(value, (list, tuple)):
        return [_encoded(one) for one in value]
    if isinstance(value, dict):
        return {"dict": {name: _encoded(one) for name, one in value.items()}}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if isinstance(value, _PLAIN):
        return {"torch": str(value).removeprefix("torch.")}
    raise NotInJsonError(f"an argument of type {type(value).__name__}")


def _decoded(value: Any, nodes: Mapping[str, fx.Node]) -> Any:
    if isinstance(value, list):
        return [_decoded(one, nodes) for one in value]
    if not isinstance(value, dict):
        return value
    [(kind, held)] = value.items()
    if kind == "node":
        return nodes[held]
    if kind == "dict":
        return {name: _decoded(one, nodes) for name, one in held.items()}
    return torch.device(held) if kind == "device" else getattr(torch, held)


def _value(described: Any, symbol: torch.SymInt) -> Any:
    if isinstance(described, list):
        return [_value(one, symbol) for one in described]
    if "value" in described:
        return _decoded(described["value"], {})
    shape = [symbol if size is None else size for size in described["shape"]]
    return torch.empty(shape, dtype=_decoded(described["dtype"], {}), device="meta")
