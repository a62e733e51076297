"""The inputs of a graph as JSON values, with everything that a faithful replay needs."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from checked_backend._torch.symbols import size_hint
from checked_backend.dump.tensors import TensorTable, unsupported_reason, value_range
from checked_backend.graphs.nodes import recorded_value

__all__ = ["describe_inputs", "input_names", "traced_inputs"]


def traced_inputs(gm: fx.GraphModule) -> list[Any]:
    """The value that tracing recorded for each placeholder."""
    return [recorded_value(node) for node in gm.graph.find_nodes(op="placeholder")]


def input_names(gm: fx.GraphModule) -> list[tuple[str, str | None]]:
    """For each placeholder its name, and the name that the user or AOT autograd has for it."""
    return [(node.name, _source(node)) for node in gm.graph.find_nodes(op="placeholder")]


def _source(node: fx.Node) -> str | None:
    source = getattr(node.meta.get("grapharg"), "source", None)
    name = getattr(source, "name", None)
    if name is not None:
        return str(name() if callable(name) else name)
    description = node.meta.get("desc")
    return None if description is None else str(description.expr())


def describe_inputs(
    names: Sequence[tuple[str, str | None]], traced: Sequence[Any], actual: Sequence[Any] | None
) -> tuple[dict[str, Any], TensorTable]:
    """Describe inputs.

    Args:
        names: The result of `input_names`.
        traced: The result of `traced_inputs`, with shapes as expressions.
        actual: The arguments of the graph's call, before it runs; None if it was not called yet.

    Returns:
        The JSON values, and the storages, which the caller may save.
    """
    table = TensorTable()
    entries: list[dict[str, Any]] = []
    grad = torch.is_grad_enabled()
    with torch.no_grad():
        for position, (name, source) in enumerate(names):
            value = traced[position] if actual is None or position >= len(actual) else actual[position]
            entries.append({"name": name, "source": source, **_describe(value, traced[position], table)})
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
