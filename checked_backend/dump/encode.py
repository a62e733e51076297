"""Encode a graph and its inputs as JSON values, with everything that a faithful replay needs, and save their memory.

Storages are saved as bytes, not tensors. So strides, offsets, overlaps and every dtype come back as they were.
"""

from __future__ import annotations

import base64
import json
import math
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

from checked_backend._torch.fake_tensors import FakeTensor
from checked_backend._torch.operators import triton_kernel
from checked_backend._torch.symbols import hint_of, shape_facts, size_hint, tensor_bytes
from checked_backend._torch.tensors import (
    is_traceable_wrapper_subclass,
    is_zero_tensor,
    negative_view,
    storage_identity,
)
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
from checked_backend.graphs.nodes import fetched, recorded_value
from checked_backend.graphs.source_line import source_line
from checked_backend.numerics.bits import memory_of

_ALIGN = 64  # saved pieces start at multiples of this: the rounding of vectorised kernels may depend on alignment
_CHUNK = 64 << 20


def symbolic_text(value: Any) -> int | str:
    """A size as an integer, or as the text of its expression."""
    if isinstance(value, torch.SymInt):
        expression = value.node.expr
        return int(expression) if expression.is_Integer else str(expression)
    return int(value)


def sizes_of(tensor: torch.Tensor, number: Callable[[Any], int | str]) -> dict[str, Any]:
    """Shape and strides, each number by `hint_of` or `symbolic_text`."""
    strides = tensor.stride() if tensor.layout is torch.strided else None
    return {"shape": list(map(number, tensor.shape)), "stride": None if strides is None else list(map(number, strides))}


def unsupported_reason(tensor: torch.Tensor) -> str | None:
    """Why a tensor's memory cannot be written down; None if it can."""
    wrapper: Any = tensor  # mypy takes the test below for one that cannot hold
    if is_traceable_wrapper_subclass(wrapper):
        return f"a tensor subclass {type(tensor).__module__}.{type(tensor).__qualname__}"
    if tensor.layout is not torch.strided:
        return f"a tensor of layout {tensor.layout}"
    if tensor.is_quantized:
        return f"a quantized tensor of dtype {tensor.dtype}"
    try:
        storage_identity(tensor)
    except (NotImplementedError, RuntimeError):
        return f"a tensor without storage, {type(tensor).__qualname__}"
    return None


class TensorTable:
    """Describes tensors and collects the storages they lie in."""

    def __init__(self) -> None:
        self._storages: list[dict[str, Any]] = []
        self._places: dict[int, int] = {}
        self._owners: list[torch.Tensor] = []  # keeps storages alive, so that identities stay unique

    def describe(self, tensor: torch.Tensor) -> dict[str, Any]:
        """The JSON description of a tensor for which `unsupported_reason` is None.

        Sizes are hints. Expressions, if there are any, are under ``symbolic``.
        """
        plain, symbolic = (
            {**sizes_of(tensor, number), "storage_offset": number(tensor.storage_offset())}
            for number in (hint_of, symbolic_text)
        )
        return {
            "dtype": str(tensor.dtype).removeprefix("torch."),
            **plain,
            "device": str(tensor.device),
            "requires_grad": bool(tensor.requires_grad),
            "leaf": bool(tensor.is_leaf),
            "parameter": isinstance(tensor, torch.nn.Parameter),
            "conj": bool(tensor.is_conj()),
            "neg": bool(tensor.is_neg()),
            "storage": self._place(tensor, **plain),
            "symbolic": None if symbolic == plain else symbolic,
            "range": None,
        }

    def _place(self, tensor: torch.Tensor, shape: list[int], stride: list[int], storage_offset: int) -> int:
        if is_zero_tensor(tensor):
            tensor = tensor.clone()  # the clone has memory
        identity = storage_identity(tensor)
        if identity not in self._places:
            self._places[identity] = len(self._storages)
            self._storages.append({"device": str(tensor.device), "start": None, "end": 0, "checksum": None})
            self._owners.append(tensor)
        index = self._places[identity]
        storage, size = self._storages[index], tensor.dtype.itemsize
        if 0 not in shape:
            span = 1 + sum((length - 1) * step for length, step in zip(shape, stride, strict=True))
            first = storage_offset * size // _ALIGN * _ALIGN
            storage["start"] = first if storage["start"] is None else min(storage["start"], first)
            storage["end"] = max(storage["end"], (storage_offset + span) * size)
        return index

    def storages(self) -> list[dict[str, Any]]:
        """The JSON descriptions of the storages: the device, and the bytes from ``start`` to ``end`` that are used."""
        return [{**storage, "start": storage["start"] or 0} for storage in self._storages]

    def save(self, path: Path) -> list[dict[str, Any]]:
        """Write the storages to a safetensors file, each as bytes under ``storage_<index>``.

        Returns:
            `storages`, with the checksums of the written ones. Fake and meta tensors have nothing to write.
        """
        found = self.storages()
        chosen = [i for i, owner in enumerate(self._owners) if _has_memory(owner)]
        regions = {f"storage_{i}": _used_bytes(self._owners[i], found[i]["start"], found[i]["end"]) for i in chosen}
        for i, checksum in zip(chosen, _write(path, regions), strict=True):
            found[i]["checksum"] = checksum
        return found


def value_range(tensor: torch.Tensor) -> list[float] | None:
    """Least and greatest value of a real tensor; None if one of them is not finite, or the dtype has no order."""
    if tensor.numel() == 0 or not _has_memory(tensor) or tensor.dtype.is_complex:
        return None
    once = [1 if step == 0 else size for size, step in zip(tensor.shape, tensor.stride(), strict=True)]
    compact = tensor.detach().as_strided(once, tensor.stride(), tensor.storage_offset())  # of what is expanded
    if tensor.is_neg():
        compact = negative_view(compact)
    try:
        if tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1:
            compact = compact.float()
        low, high = (bound.item() for bound in compact.aminmax())
    except (NotImplementedError, RuntimeError):  # unsigned and sub-byte dtypes: the data decides whether int64 fits
        try:
            low, high = (bound.item() for bound in compact.to(torch.int64).aminmax())
        except (NotImplementedError, RuntimeError):
            return None
        if low < 0:
            return None
    if isinstance(low, bool):
        return [int(low), int(high)]
    return [low, high] if math.isfinite(low) and math.isfinite(high) else None


def _has_memory(tensor: torch.Tensor) -> bool:
    return not isinstance(tensor, FakeTensor) and tensor.device.type != "meta" and not is_zero_tensor(tensor)


def _used_bytes(owner: torch.Tensor, start: int, end: int) -> torch.Tensor:
    storage = owner.untyped_storage()
    end = min(end, storage.nbytes())
    return torch.empty(0, dtype=torch.uint8, device=owner.device).set_(storage, start, (max(0, end - start),), (1,))


def _write(path: Path, regions: dict[str, torch.Tensor]) -> list[int]:
    # by hand: the library copies everything to bytes objects first
    header: dict[str, Any] = {}
    position = 0
    for name, region in regions.items():
        after = position + region.numel()
        header[name] = {"dtype": "U8", "shape": [region.numel()], "data_offsets": [position, after]}
        position = after
    text = json.dumps(header).encode("ascii")
    text += b" " * (-len(text) % _ALIGN)
    checksums = []
    with open(path, "wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for region in regions.values():
            checksum = 0
            for first in range(0, region.numel(), _CHUNK):
                piece = region[first : first + _CHUNK].cpu()
                stream.write(memory_of(piece))
                checksum = zlib.crc32(memory_of(piece), checksum)
            checksums.append(checksum)
    return checksums


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
