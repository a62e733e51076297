"""Decide whether a later node depends on how a value lies in memory, or only reads its elements."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from checked_backend._torch.operators import OpOverload
from checked_backend.graphs.effects import writes
from checked_backend.graphs.nodes import is_getitem, recorded_value
from checked_backend.graphs.schema import arguments, is_custom, operator_name

LAYOUT = frozenset({"stride", "offset"})
"""The names of mismatches that are about layout alone."""

# Namespaces of torch's own operators that compute with any strides. Others hand pointers to kernels that may not.
_READ_ANY_STRIDES = frozenset({"aten", "prims", "prim"})
# The schema of these gives the result memory of its own. In fact it is a view, or depends on the input's layout.
_GO_BY_MEMORY_NAMES = """
    _unsafe_view as_strided_copy as_strided_scatter is_contiguous is_non_overlapping_and_dense is_strides_like_format
    resize resize_as set storage_offset stride sym_is_contiguous sym_storage_offset sym_stride view_as_complex_copy
    view_as_real_copy view_copy
"""
_GO_BY_MEMORY = frozenset(_GO_BY_MEMORY_NAMES.split())


def dependent(node: fx.Node, index: int | None) -> str:
    """The first reason why the layout of a node's result matters, as text; "" if nothing depends on it.

    Strides and storage offsets matter for a value that the graph returns, that a later node makes a view of or writes
    to, or that goes to code that is not torch's own. A node that only reads elements does not depend on where they lie.
    If its own result lies elsewhere because of that, the result is a mismatch of its own.

    Args:
        index: Which of its results; None if it has a single one.
    """
    value = recorded_value(node)
    nested = isinstance(value, (tuple, list)) and any(isinstance(part, (tuple, list)) for part in value)
    return next(_reasons(node, None if nested else index), "")


def _reasons(node: fx.Node, index: int | None) -> Iterator[str]:
    for user in node.users:
        if is_getitem(user):
            if index is None or user.args[1] == index or not isinstance(user.args[1], int):
                yield from _reasons(user, None)
        elif user.op == "output":
            yield "the graph returns it"
        elif reason := _reason(node, user):
            yield f"{user.name} ({operator_name(user)}) {reason}"


def _reason(node: fx.Node, user: fx.Node) -> str:
    """Why a user of a node depends on the layout of that input; "" if it does not."""
    target = user.target
    if not isinstance(target, OpOverload) or is_custom(user) or target.namespace not in _READ_ANY_STRIDES:
        return "is not one of torch's operators that take any strides"
    for argument, value in arguments(user):
        given: list[fx.Node] = []
        fx.node.map_arg(value, given.append)
        if node in given and (argument is None or argument.alias_info is not None):
            return "writes to it" if writes(user) else "makes a view of it"
    return "goes by where it lies in memory" if target._opname in _GO_BY_MEMORY else ""
