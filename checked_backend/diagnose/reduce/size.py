"""How simple a program is: a key that makes the smallest one the same in every run."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from checked_backend.diagnose.reduce.failing_case import FailingCase, call_nodes
from checked_backend.diagnose.reduce.forms import form_of
from checked_backend.graphs.nodes import outputs_of
from checked_backend.numerics.bits import with_memory

__all__ = ["Size", "fingerprint", "measure_size"]

_DTYPES = (torch.float32, torch.int64, torch.bool, torch.float64, torch.bfloat16, torch.float16, torch.int32)


@dataclass(frozen=True, slots=True, order=True)
class Size:
    """Smaller is simpler; compared from the first field to the last.

    Attributes:
        calls: Operator calls.
        outputs: Values returned.
        dynamic: 1 with symbolic sizes.
        inputs: Inputs.
        elements: Elements of all inputs, and of tensors that the graph makes without inputs.
        dimensions: Dimensions of all inputs.
        nodes: Nodes of the graph, those that only take one of several results included.
        dtypes: How unusual the dtypes are.
        layouts: Inputs that are not contiguous.
        values: How unusual the values are.
        arguments: How unusual the numbers in calls are.
    """

    calls: int
    outputs: int
    dynamic: int
    inputs: int
    elements: int
    dimensions: int
    nodes: int
    dtypes: int
    layouts: int
    values: int
    arguments: int

    @property
    def structure(self) -> tuple[int, ...]:
        """The fields about how large the program is, without those about how plain it is."""
        return (self.calls, self.outputs, self.dynamic, self.inputs, self.elements)

    def __str__(self) -> str:
        parts = (self.calls, "call"), (self.inputs, "input"), (self.elements, "element")
        calls, inputs, elements = (f"{count} {word}{'' if count == 1 else 's'}" for count, word in parts)
        return f"{calls} on {inputs} of {elements}"


def measure_size(program: FailingCase) -> Size:
    """The size of a program."""
    graph = program.case.graph.graph
    calls = call_nodes(graph)
    tensors = [value for value in program.case.inputs if isinstance(value, torch.Tensor)]
    return Size(
        calls=len(calls),
        outputs=len(outputs_of(graph)),
        dynamic=int(program.case.dynamic),
        inputs=len(program.case.inputs),
        elements=sum(tensor.numel() for tensor in tensors) + sum(map(_made, calls)),
        dimensions=sum(tensor.dim() for tensor in tensors),
        nodes=len(graph.nodes),
        dtypes=sum(_unusual(tensor.dtype) for tensor in tensors) + sum(map(_argument_dtypes, calls)),
        layouts=sum(not tensor.is_contiguous() or tensor.storage_offset() != 0 for tensor in tensors),
        values=sum(form_of(tensor).rank for tensor in tensors),
        arguments=sum(map(_argument_size, calls)),
    )


def fingerprint(program: FailingCase) -> str:
    """A digest of everything that decides what a program does, apart from its compiler."""
    digest = hashlib.sha256(program.case.graph.code.encode())
    digest.update(f"{program.subject} {program.case.dynamic}".encode())
    for value in program.case.inputs:
        if not isinstance(value, torch.Tensor):
            digest.update(repr(value).encode())
            continue
        digest.update(f"{value.dtype} {value.device} {tuple(value.shape)} {value.stride()}".encode())
        data = with_memory(value.detach()).contiguous().cpu()
        if data.numel():
            digest.update(data.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _unusual(dtype: torch.dtype) -> int:
    return _DTYPES.index(dtype) if dtype in _DTYPES else len(_DTYPES)


def _leaves(node: fx.Node) -> list[Any]:
    found: list[Any] = []
    fx.node.map_aggregate((node.args, dict(node.kwargs)), found.append)
    return [leaf for leaf in found if not isinstance(leaf, fx.Node)]


def _made(node: fx.Node) -> int:
    """Elements that a call makes without inputs, as ``full`` and ``arange`` do."""
    if node.all_input_nodes or not node.args:
        return 0
    sizes = node.args[0] if isinstance(node.args[0], (list, tuple)) else node.args[:1]
    return math.prod(size for size in sizes if type(size) is int)


def _argument_dtypes(node: fx.Node) -> int:
    return sum(_unusual(leaf) for leaf in _leaves(node) if isinstance(leaf, torch.dtype))


def _argument_size(node: fx.Node) -> int:
    return sum(1 if leaf in (0, None) else 1 + len(str(leaf)) for leaf in _leaves(node))
