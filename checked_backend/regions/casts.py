"""Casts in a graph that runs in float64: which give the tensor itself, and which another, as in the user's program."""

from __future__ import annotations

import torch
from torch import fx

from checked_backend.graphs.effects import has_effects
from checked_backend.numerics.bits import holds_floats
from checked_backend.regions.inputs import storage_key

__all__ = ["copy_in_casts", "pass_through_casts"]

_TO_DTYPE = {
    "float": torch.float32,
    "double": torch.float64,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "chalf": torch.complex32,
    "cfloat": torch.complex64,
    "cdouble": torch.complex128,
}
_CASTS = frozenset({"to", "type", "type_as", *_TO_DTYPE})


def pass_through_casts(graph: fx.Graph) -> None:
    """Replace casts to the dtype that a tensor has already by the tensor itself.

    In float64 such a cast would make another tensor, and a write to that would not reach the first.
    """
    for node in graph.nodes:
        if _is_cast(node) and _gives_itself(node):
            node.op, node.target, node.args, node.kwargs = "call_function", _itself, node.args[:1], {}


def copy_in_casts(graph: fx.Graph) -> None:
    """Have each cast make another tensor if it did so when it was traced, whatever the dtypes are later.

    Where all is float64, a cast would give the tensor itself, and a write to it would reach that, and the user's own
    tensor. Without writes nobody can tell.
    """
    if not any(map(has_effects, graph.nodes)):
        return
    for node in graph.nodes:
        if not _is_cast(node) or _gives_itself(node) or not all(map(_is_floating, (node.args[0], node))):
            continue
        if node.target == "type" and not any(isinstance(given, torch.dtype) for given in node.args):
            continue
        if node.target in _TO_DTYPE:
            node.args = (node.args[0], _TO_DTYPE[node.target])
        node.target, node.kwargs = "to", {**node.kwargs, "copy": True}


def _is_cast(node: fx.Node) -> bool:
    return node.op == "call_method" and node.target in _CASTS


def _is_floating(value: object) -> bool:
    return isinstance(value, fx.Node) and holds_floats(value.meta.get("example_value"))


def _gives_itself(node: fx.Node) -> bool:
    given, made = (source.meta.get("example_value") for source in (node.all_input_nodes[0], node))
    if not isinstance(given, torch.Tensor) or not isinstance(made, torch.Tensor):
        return False
    alike = (given.dtype, given.device, given.shape) == (made.dtype, made.device, made.shape)
    return alike and storage_key(given) is not None and storage_key(given) == storage_key(made)


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
