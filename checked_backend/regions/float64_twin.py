"""The float64 twin: the same region, compiled by the same compiler, in float64.

Rounding differs between any two compilers, logic does not. In float64 rounding is so small that a remaining difference
is one of logic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import fx

from checked_backend._torch.operators import grouped_mm_functions
from checked_backend.errors import CheckedBackendError
from checked_backend.modes.grouped_mm import grouped_mm
from checked_backend.numerics.bits import holds_floats
from checked_backend.regions.compile import Compiler, compile_again, copy_graph, copy_in_casts
from checked_backend.tensors.float64_copies import promoted_dtype

_WIDEST = {"float": "double", "half": "double", "bfloat16": "double", "chalf": "cdouble", "cfloat": "cdouble"}
_BIT_CASTS = frozenset({"view", "view_dtype"})
_FROM_NUMBERS = (torch.tensor, torch.as_tensor, torch.asarray)
_WINDOWS = "torch.signal.windows.windows"  # Dynamo does not look inside the functions of this module
_LOW_PRECISION = (torch.float16, torch.bfloat16)


class TwinError(CheckedBackendError):
    """Raised for a region that cannot be compiled in float64."""


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Set torch's default dtype for a block."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def needs_default_dtype(gm: fx.GraphModule) -> bool:
    """Whether a region makes floating tensors in torch's default dtype, without floating inputs.

    The default dtype belongs to the whole process. Other threads would see it changed, so it is left alone if possible.
    """
    return any(
        node.op in ("call_function", "call_method")
        and holds_floats(node.meta.get("example_value"))
        and not any(holds_floats(source.meta.get("example_value")) for source in node.all_input_nodes)
        for node in gm.graph.nodes
    )


def computes_in_low_precision(gm: fx.GraphModule) -> bool:
    """Whether a value of half precision occurs anywhere in a region, bodies of higher-order operators included."""
    return any(
        _is_low(node.meta.get("example_value")) or getattr(node.target, "__name__", "") == "_enter_autocast"
        for body in gm.modules()
        if isinstance(body, fx.GraphModule)
        for node in body.graph.nodes
    )


def _is_low(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return any(_is_low(item) for item in value)
    return isinstance(value, torch.Tensor) and value.dtype in _LOW_PRECISION


def float64_graph(gm: fx.GraphModule) -> fx.GraphModule:
    """Rewrite a Dynamo graph so that it computes in float64 where it computed in a narrower floating dtype.

    Raises:
        TwinError: The region reinterprets the bits of floating-point numbers, or makes a window of rounded ones.
    """
    twin = copy_graph(gm)
    _promote_constants(twin)
    without_kernel = grouped_mm_functions()
    copy_in_casts(twin.graph)
    for node in twin.graph.nodes:
        if node.op == "call_method":
            node.target = _WIDEST.get(node.target, node.target)
        if node.target in without_kernel:
            node.target = grouped_mm
        if (
            node.op == "call_method"
            and node.target in _BIT_CASTS
            and any(isinstance(value, torch.dtype) for value in (*node.args, *node.kwargs.values()))
        ):
            raise TwinError(f"{node.name} reinterprets the bits of a tensor")
        if node.target is torch.ops.aten.view.dtype:
            raise TwinError(f"{node.name} reinterprets the bits of a tensor")
        if node.target in _FROM_NUMBERS and _wide_leaf(node.kwargs.get("dtype")) is torch.float64:
            _widen_result(node)
        elif node.op == "call_function" and getattr(node.target, "__name__", "") == "_enter_autocast":
            device, dtype, _, *rest = node.args
            node.args = (device, dtype, False, *rest)
        else:
            dtype = node.kwargs.get("dtype")
            if getattr(node.target, "__module__", "") == _WINDOWS and _wide_leaf(dtype) is not dtype:
                raise TwinError(f"{node.name} makes a window of coefficients that eager rounds to {dtype}")
            node.args = fx.map_arg(fx.node.map_aggregate(node.args, _wide_leaf), lambda inner: inner)
            node.kwargs = fx.map_arg(fx.node.map_aggregate(node.kwargs, _wide_leaf), lambda inner: inner)
    for name, child in list(twin.named_children()):
        if isinstance(child, fx.GraphModule):
            setattr(twin, name, float64_graph(child))
    twin.recompile()
    return twin


def _widen_result(node: fx.Node) -> None:
    """Make tensors of numbers in the dtype that the program names, as eager does, and widen them then."""
    with node.graph.inserting_after(node):
        wide = node.graph.call_method("double", (node,))
    node.replace_all_uses_with(wide, delete_user_cb=lambda user: user is not wide)


def _wide_leaf(value: Any) -> Any:
    return promoted_dtype(value) if isinstance(value, torch.dtype) else value


def _promote_constants(gm: fx.GraphModule) -> None:
    for node in gm.graph.nodes:
        if node.op != "get_attr":
            continue
        owner: Any = gm
        *path, last = str(node.target).split(".")
        for step in path:
            owner = getattr(owner, step)
        value = getattr(owner, last)
        if isinstance(value, torch.Tensor) and promoted_dtype(value.dtype) != value.dtype and owner is gm:
            delattr(owner, last)
            owner.register_buffer(last, value.detach().to(promoted_dtype(value.dtype)))


def compile_twin(
    compiler: Compiler, gm: fx.GraphModule, example_inputs: Sequence[Any], inputs64: Sequence[Any]
) -> Callable[..., Any]:
    """Compile a region's float64 twin.

    Args:
        example_inputs: The fake values of its placeholders as Dynamo traced them; with symbolic sizes the twin is
            compiled for the same symbols.

    Raises:
        TwinError: The region cannot be rewritten.
    """
    with default_dtype(torch.float64) if needs_default_dtype(gm) else nullcontext():
        return compile_again(compiler, float64_graph(gm), example_inputs, inputs64, promoted_dtype)
